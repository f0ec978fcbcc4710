/* One direction of the bottleneck as arithmetic on the times passed in: sim/channel.py and sim/link.py in C, operation by
 * operation, so that all of them agree to the last bit (compiled without fused operations, which would round
 * otherwise). */
#ifndef QUIC_PFEC_EMULATOR_LINK_H
#define QUIC_PFEC_EMULATOR_LINK_H

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { RING = 16384, PACKET_BYTES = 1600, BUCKETS = 16384 };
static const double LATENESS_UNIT_S = 1e-6, QUEUE_DELAY_UNIT_S = 1e-4;

/* ---- random numbers and channels: sim/channel.py -------------------------------------------------------------- */

static uint64_t next_u64(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static double uniform(uint64_t *state)
{
    return (double)(next_u64(state) >> 11) * 0x1p-53;
}

typedef struct {
    enum { NO_LOSS, GILBERT_ELLIOTT, TRACE } model;
    double loss[2], move[2]; /* by state: 0 good, 1 bad */
    const uint8_t *trace;
    uint64_t trace_steps;
    uint64_t seed;
    uint64_t random, position;
    int bad;
} Channel;

static void channel_begin(Channel *c)
{
    c->random = c->seed;
    c->position = 0;
    c->bad = c->model == GILBERT_ELLIOTT && uniform(&c->random) < c->move[0] / (c->move[0] + c->move[1]);
}

static int channel_lost(Channel *c)
{
    if (c->model == NO_LOSS)
        return 0;
    if (c->model == TRACE)
        return c->trace[c->position++ % c->trace_steps];
    int lost = uniform(&c->random) < c->loss[c->bad];
    c->bad ^= uniform(&c->random) < c->move[c->bad];
    return lost;
}

/* ---- one direction: sim/link.py ------------------------------------------------------------------------------- */

typedef struct {
    double unit_s, total_s, largest_s;
    uint64_t count, buckets[BUCKETS + 1];
} Histogram;

static void histogram_add(Histogram *h, double value_s)
{
    double bucket = value_s / h->unit_s;
    h->buckets[bucket < 0 ? 0 : bucket < BUCKETS ? (int)bucket : BUCKETS]++;
    h->count++;
    h->total_s += value_s;
    if (value_s > h->largest_s)
        h->largest_s = value_s;
}

static double histogram_quantile(const Histogram *h, double share) /* upper end of the bucket it falls into */
{
    uint64_t seen = 0;
    for (int i = 0; i <= BUCKETS && h->count; i++)
        if ((double)(seen += h->buckets[i]) >= share * (double)h->count)
            return i == BUCKETS ? h->largest_s : (i + 1) * h->unit_s;
    return 0;
}

typedef struct {
    uint64_t packets, bytes, queue_drops, lost, delivered, delivered_bytes, corrupted, reordered;
    uint64_t sent, sent_bytes, ring_drops, write_errors, tcp_in, tcp_out, udp_in, udp_out;
} Counters;

typedef struct {
    double due_s;
    uint64_t order;
    uint32_t entry, size;
} Waiting;

typedef struct {
    Waiting items[RING];
    uint32_t head, count;
} Fifo;

typedef struct {
    /* settings */
    double seconds_per_byte, owd_s, queue_bytes, slot_s, corrupt, reorder, reorder_s;
    uint64_t overhead, noise_seed;
    int packet_clock, from_start;
    Channel channel;
    /* state */
    double busy_until_s, epoch_s;
    uint64_t noise, drawn, slots_lost, largest_queue_bytes;
    int begun, bit;
    Counters n;
    Histogram lateness, queue_delay;
    /* on their way: two queues, since all that is held back is held back by the same time */
    Fifo prompt, held;
    uint64_t entered;
    uint32_t free_entries[RING], free_count;
    uint8_t data[RING][PACKET_BYTES];
} Direction;

typedef struct {
    enum { DELIVER, QUEUE_DROP, CHANNEL_DROP } fate;
    double due_s, queue_delay_s;
    int64_t slot;
    int held;
    uint64_t offset;
    uint8_t mask; /* 0 = undamaged */
} Outcome;

static void direction_begin(Direction *d)
{
    channel_begin(&d->channel);
    d->noise = d->noise_seed;
    d->drawn = d->slots_lost = d->largest_queue_bytes = 0;
    d->bit = 0;
}

static void direction_mark(Direction *d)
{
    memset(&d->n, 0, sizeof d->n);
    memset(&d->lateness, 0, sizeof d->lateness);
    memset(&d->queue_delay, 0, sizeof d->queue_delay);
    d->lateness.unit_s = LATENESS_UNIT_S;
    d->queue_delay.unit_s = QUEUE_DELAY_UNIT_S;
}

static void direction_epoch(Direction *d, double now)
{
    d->epoch_s = now;
    d->begun = 1;
    direction_begin(d);
    direction_mark(d);
}

static void draw_to(Direction *d, uint64_t slot)
{
    for (; d->drawn <= slot; d->drawn++)
        d->slots_lost += d->bit = channel_lost(&d->channel);
}

static void direction_advance(Direction *d, double now)
{
    if (d->begun && !d->packet_clock)
        draw_to(d, (uint64_t)((now - d->epoch_s) / d->slot_s));
}

static Outcome direction_send(Direction *d, double now, uint64_t size)
{
    Outcome o = {.fate = DELIVER, .slot = -1};
    if (d->from_start && !d->begun)
        direction_epoch(d, now);
    d->n.packets++;
    d->n.bytes += size;
    double start_s = d->busy_until_s > now ? d->busy_until_s : now;
    double wire_bytes = (double)(size + d->overhead);
    double queued_bytes = (start_s - now) / d->seconds_per_byte + wire_bytes;
    if (queued_bytes > d->queue_bytes + 0.5) { /* half a byte swallows the rounding of times, and nothing else */
        d->n.queue_drops++;
        o.fate = QUEUE_DROP;
        return o;
    }
    uint64_t queued = (uint64_t)nearbyint(queued_bytes);
    if (queued > d->largest_queue_bytes)
        d->largest_queue_bytes = queued;
    double end_s = start_s + wire_bytes * d->seconds_per_byte;
    d->busy_until_s = end_s;
    o.due_s = end_s + d->owd_s;
    o.queue_delay_s = end_s - now;
    if (d->begun) {
        uint64_t slot = d->packet_clock ? d->drawn : (uint64_t)(((start_s + end_s) / 2 - d->epoch_s) / d->slot_s);
        draw_to(d, slot);
        o.slot = (int64_t)slot;
        if (d->bit) {
            d->n.lost++;
            o.fate = CHANNEL_DROP;
            return o;
        }
        if (d->corrupt > 0 && uniform(&d->noise) < d->corrupt && size > 0) {
            o.offset = next_u64(&d->noise) % size;
            o.mask = (uint8_t)(1 + next_u64(&d->noise) % 255);
            d->n.corrupted++;
        }
        if (d->reorder > 0 && uniform(&d->noise) < d->reorder) {
            d->n.reordered++;
            o.held = 1;
            o.due_s += d->reorder_s;
        }
    }
    d->n.delivered++;
    d->n.delivered_bytes += size;
    return o;
}

#endif
