/* Hand-offs on the slot clock, compiled: sim/episode.py over transfer/receiver.py, number for number.
 *
 * The sender is schedule/core.h, the code that ships; the receiver's elimination is codec/decoder.h, on coefficients
 * alone; receiver.c is the rest of the receiver, for a peer that keeps every rule. No Python object, no clock. */
#ifndef QUIC_PFEC_SIM_ENGINE_H
#define QUIC_PFEC_SIM_ENGINE_H

#include <math.h>

#include "core.h"
#include "decoder_rank.h"

/* ---- what waits for its time: in the order of the times, then of the pushes ---- */

typedef struct {
    uint8_t *items;
    size_t size; /* bytes of an item, which begins with its time: a double */
    uint32_t first, count, room;
} queue;

static inline void *queue_at(const queue *q, uint32_t i)
{
    return q->items + (size_t)((q->first + i) & (q->room - 1)) * q->size;
}

static inline double queue_time(const queue *q)
{
    return q->count == 0 ? (double)INFINITY : *(const double *)queue_at(q, 0);
}

/* The first item, which stays readable until the next push. */
static inline void *queue_pop(queue *q)
{
    void *item = queue_at(q, 0);
    q->first++;
    q->count--;
    return item;
}

/* The place of a new item, its time filled in; NULL without memory. */
void *queue_push(queue *q, double at_s);
int queue_copy(queue *to, const queue *from);

/* ---- what does not depend on the policy ---- */

typedef struct {
    uint32_t symbols, units, slots, steps;
    const int32_t *unit_packets, *unit_position; /* of each sid */
    const uint32_t *unit_of;
    const double *priority, *oldest_first;       /* of each sid, in the order of resending */
    const int64_t *packets;                      /* of each unit, as the two below */
    const double *utility, *utility_before;
    double utility_total;
    const uint8_t *losses;                       /* of each slot */
    const double *times_s;
    const int64_t *step_slots;
    const double *step_rtt_s, *step_slot_s;
    double deadline_s;
} scenario;

/* ---- receiver.c (transfer/receiver.py) ---- */

enum { STATUS_RUNNING, STATUS_COMPLETE, STATUS_FROZEN, MAX_RANGES = 64 };

typedef struct {
    uint64_t source, duplicate, recovered, useful, useless, dropped, late, feedback;
} receiver_counters;

typedef struct {
    double at_s;
    uint64_t sequence;
    int64_t deficit, credit;
    uint32_t prefix;
    bool running;
    uint32_t ranges;
    uint32_t range[2 * MAX_RANGES]; /* only the first 2 * ranges count */
} feedback;

typedef struct {
    const scenario *world;
    decoder d;
    bool opened, manifest; /* a decoder exists; the manifest came */
    int status;
    double rtt_s, deadline_s, frozen_s, newest_s, last_feedback_s;
    bool progress, urgent;
    int final_left;
    uint64_t sequence;
    int64_t useless_left;
    uint64_t highest_source;
    int64_t *missing; /* of each unit */
    uint32_t incomplete;
    double gained;    /* utility of complete units, a share of all */
    receiver_counters counters;
    uint32_t *polled; /* room for every unknown */
} receiver;

double receiver_timer(const receiver *r);
void receiver_on_manifest(receiver *r, uint64_t remaining_us, double now);
void receiver_on_source(receiver *r, uint32_t sid, double now);
void receiver_on_repair(receiver *r, const planned *repair, uint64_t transfer_id, double now);
void receiver_on_timer(receiver *r, double now);
bool receiver_feedback_due(const receiver *r, double now);
void receiver_feedback(receiver *r, double now, feedback *out);

/* ---- memory.c, engine.c (sim/episode.py) ---- */

typedef struct {
    double at_s;
    uint64_t remaining_us;
    planned packet; /* of a repair all, else without its set and head */
} arrival;

typedef struct {
    double at_s;
    int64_t token;
    bool delivered;
} fate;

typedef struct {
    double feedback_loss, fates_loss, feedback_delay_s, fates_delay_s, reordering, reordering_s;
} disturbances;

typedef struct {
    const scenario *world; /* NULL: never reset */
    disturbances disturbed;
    core core;
    ledger book;
    loss_estimate loss;
    feature_memory memory;
    receiver receiver;
    queue arrivals, fates, feedback;
    uint64_t chance;
    uint32_t slot, step;
    double rtt_s, slot_s, min_rtt_s;
    bool begun, done, resend, ruled;
    int64_t feedback_sequence;
    uint64_t feedback_count, feedback_ignored;
    uint8_t *carried;
    double gained, potential; /* as of the last reward */
} episode;

enum { INITIAL_CREDIT = 4096, MOST_WINDOW = 4096, MOST_UNKNOWN = 512, MOST_DEGREE = 255 };

typedef struct {
    const policy *rule;     /* NULL: none */
    bool oldest_first, full_window, resend;
    double budget;
    uint32_t degree, symbol_size;
    loss_estimate loss;
    disturbances disturbed;
    uint64_t seed;
} start;

/* All return 0, or -1 without memory. Zeroed memory is an episode that was never reset. */
int episode_reset(episode *e, const scenario *world, const start *s);
void episode_free(episode *e);
int episode_copy(episode *to, const episode *from);
int episode_set_rule(episode *e, const policy *rule, bool full_window);
/* To the next slot >= `from` at which something is to be decided, or to the end. */
int episode_advance(episode *e, uint32_t from);
/* Follow the rule to the end. */
int episode_finish(episode *e);
/* The lane stands at a decision: take one of the choices, which its mask allows, and go on to the next. */
int episode_choose(episode *e, int choice, double *reward);
/* What the rule would do: a choice, or -1. */
int episode_rule_choice(episode *e);

#endif
