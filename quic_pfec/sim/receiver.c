/* The receiver's rules for a peer that keeps its own: transfer/receiver.py, whose words are not repeated here. Computing
 * takes no time: what is determined is known at once. */
#include <math.h>
#include <string.h>

#include "engine.h"

static const double FEEDBACK_MIN_S = 0.001, MANIFEST_TIMEOUT_S = 10.0;
enum { FEEDBACK_FINAL = 3, USELESS_REPAIRS = 4096 };
static const uint8_t NO_BYTES[1];

static inline double later(double a, double b)
{
    return a > b ? a : b;
}

/* ---- time ---- */

static double feedback_time(const receiver *r)
{
    if (!r->opened || (r->status == STATUS_RUNNING && !r->manifest))
        return INFINITY;
    if (r->final_left == FEEDBACK_FINAL)
        return r->last_feedback_s + FEEDBACK_MIN_S;
    if (r->final_left > 0)
        return r->last_feedback_s + later(FEEDBACK_MIN_S, r->rtt_s / 4);
    if (r->status != STATUS_RUNNING)
        return INFINITY;
    if (r->urgent)
        return r->last_feedback_s + FEEDBACK_MIN_S;
    if (r->progress)
        return r->last_feedback_s + later(FEEDBACK_MIN_S, r->rtt_s / 16);
    return later(r->last_feedback_s, r->newest_s) + 1.5 * r->rtt_s + 0.025;
}

double receiver_timer(const receiver *r)
{
    double when_s = feedback_time(r);
    if (r->status != STATUS_RUNNING)
        return when_s;
    if (!r->manifest && MANIFEST_TIMEOUT_S < when_s)
        when_s = MANIFEST_TIMEOUT_S;
    return r->deadline_s < when_s ? r->deadline_s : when_s;
}

bool receiver_feedback_due(const receiver *r, double now)
{
    return now >= feedback_time(r);
}

static void freeze(receiver *r, double now)
{
    r->status = r->manifest && r->incomplete == 0 ? STATUS_COMPLETE : STATUS_FROZEN;
    r->frozen_s = now;
    r->final_left = FEEDBACK_FINAL;
    r->progress = r->urgent = true;
}

static bool is_open(receiver *r, double now)
{
    if (r->status == STATUS_RUNNING && now >= r->deadline_s)
        freeze(r, now);
    return r->status == STATUS_RUNNING;
}

/* ---- symbols ---- */

static void learn(receiver *r, uint32_t sid)
{
    const scenario *w = r->world;
    const uint32_t unit = w->unit_of[sid];
    if (!r->manifest || --r->missing[unit] > 0)
        return;
    r->incomplete--;
    r->gained += w->utility[unit] / w->utility_total;
    r->urgent = true;
}

static void settle(receiver *r, double now)
{
    r->newest_s = now;
    if (r->d.pending > 0) {
        size_t found = decoder_poll(&r->d, NULL, 0, r->d.pending, UINT64_MAX, r->polled);
        r->counters.recovered += found;
        r->progress = true;
        for (size_t i = 0; i < found; i++)
            learn(r, r->polled[i]);
    }
    if (r->manifest && r->d.prefix == r->world->symbols)
        freeze(r, now);
}

static void earn(receiver *r)
{
    if (r->useless_left < USELESS_REPAIRS)
        r->useless_left++;
    r->progress = true;
}

void receiver_on_source(receiver *r, uint32_t sid, double now)
{
    if (!is_open(r, now)) {
        r->counters.late++;
        return;
    }
    r->opened = true;
    if (decoder_source(&r->d, sid, NO_BYTES) == SOURCE_DUPLICATE) {
        r->counters.duplicate++;
    } else {
        r->counters.source++;
        earn(r);
        r->urgent |= sid > r->highest_source;
        if (sid >= r->highest_source)
            r->highest_source = (uint64_t)sid + 1;
        learn(r, sid);
    }
    settle(r, now);
}

void receiver_on_repair(receiver *r, const planned *p, uint64_t transfer_id, double now)
{
    if (!is_open(r, now)) {
        r->counters.late++;
        return;
    }
    r->opened = true;
    const coding_set *s = &p->set;
    const repair_header header = {transfer_id, p->number, s->first_sid, p->degree, s->head_span, s->tail_offset,
                                  s->tail_span, p->head, (s->head_span + 7) / 8};
    int outcome = REPAIR_TOO_COSTLY;
    if (r->useless_left > 0)
        outcome = decoder_repair(&r->d, &header, NO_BYTES);
    if (outcome == REPAIR_INNOVATIVE) {
        r->counters.useful++;
        earn(r);
    } else if (outcome == REPAIR_REDUNDANT) {
        r->counters.useless++;
        r->useless_left--;
    } else {
        r->counters.dropped++;
    }
    settle(r, now);
}

void receiver_on_manifest(receiver *r, uint64_t remaining_us, double now)
{
    if (!is_open(r, now)) {
        r->counters.late++;
        return;
    }
    double deadline_s = now + (double)remaining_us / 1e6;
    if (deadline_s < r->deadline_s)
        r->deadline_s = deadline_s;
    bool first = !r->manifest;
    settle(r, now);
    if (!first)
        return;
    r->opened = r->manifest = r->progress = r->urgent = true;
    for (uint32_t sid = 0; sid < r->d.highest; sid++)
        if (r->d.flags[sid] & SID_KNOWN)
            learn(r, sid);
    if (r->d.prefix == r->world->symbols)
        freeze(r, now);
}

void receiver_on_timer(receiver *r, double now)
{
    if (is_open(r, now) && !r->manifest && now >= MANIFEST_TIMEOUT_S)
        freeze(r, now);
}

/* ---- feedback ---- */

void receiver_feedback(receiver *r, double now, feedback *out)
{
    const decoder *d = &r->d;
    out->sequence = r->sequence++;
    out->prefix = d->prefix;
    out->deficit = (int64_t)d->highest - d->known_count - d->rank;
    out->credit = r->manifest && r->world->symbols > INITIAL_CREDIT ? r->world->symbols : INITIAL_CREDIT;
    out->running = r->status == STATUS_RUNNING;
    out->ranges = 0;
    for (uint32_t stop = d->prefix, start; out->ranges < MAX_RANGES && decoder_known_run(d, stop, &start, &stop);) {
        out->range[2 * out->ranges] = start;
        out->range[2 * out->ranges++ + 1] = stop;
    }
    r->last_feedback_s = now;
    r->progress = r->urgent = false;
    if (r->final_left > 0)
        r->final_left--;
    r->counters.feedback++;
}
