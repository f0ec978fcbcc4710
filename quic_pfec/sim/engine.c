/* The slots of a hand-off: see engine.h. */
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "engine.h"

enum { PACKET_BYTES = 1425, SPARE_FEEDBACK = 64 };

/* ---- chance: SplitMix64 of sim/channel.py ---- */

static double uniform(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

/* ---- the way there and back ---- */

static int receive(episode *e, double until)
{
    receiver *r = &e->receiver;
    for (;;) {
        double timer_s = receiver_timer(r), arrival_s = queue_time(&e->arrivals);
        double now = arrival_s < timer_s ? arrival_s : timer_s;
        if (now > until)
            return 0;
        if (arrival_s <= now) {
            const arrival *a = queue_pop(&e->arrivals);
            if (a->packet.kind == FRAME_MANIFEST)
                receiver_on_manifest(r, a->remaining_us, now);
            else if (a->packet.kind == FRAME_REPAIR)
                receiver_on_repair(r, &a->packet, e->core.transfer_id, now);
            else
                receiver_on_source(r, a->packet.number, now);
        } else {
            receiver_on_timer(r, now);
        }
        if (!receiver_feedback_due(r, now))
            continue;
        feedback made;
        receiver_feedback(r, now, &made);
        if (uniform(&e->chance) < e->disturbed.feedback_loss)
            continue;
        feedback *f = queue_push(&e->feedback, now + e->rtt_s / 2 + e->disturbed.feedback_delay_s);
        if (f == NULL)
            return -1;
        made.at_s = f->at_s;
        memcpy(f, &made, offsetof(feedback, range) + 2 * made.ranges * sizeof *made.range);
    }
}

/* Sender.on_feedback() for a receiver that keeps the rules. */
static void on_feedback(episode *e, const feedback *f)
{
    core *c = &e->core;
    const core_counters *n = &c->counters;
    e->feedback_count++;
    if ((int64_t)f->sequence <= e->feedback_sequence ||
        e->feedback_count > n->source + n->repair + n->resent + n->manifests + SPARE_FEEDBACK) {
        e->feedback_ignored++;
        return;
    }
    e->feedback_sequence = (int64_t)f->sequence;
    core_feedback(c, f->deficit, f->credit, f->running && c->running);
    ledger_learn_known(&e->book, 0, f->prefix);
    for (uint32_t i = 0; i < f->ranges; i++)
        ledger_learn_known(&e->book, f->range[2 * i], f->range[2 * i + 1]);
}

static int listen(episode *e, double now)
{
    while (queue_time(&e->feedback) <= now)
        on_feedback(e, queue_pop(&e->feedback));
    while (queue_time(&e->fates) <= now) {
        const fate *f = queue_pop(&e->fates);
        if (core_fate(&e->core, (size_t)f->token, f->delivered, false) != 0)
            return -1;
    }
    return 0;
}

static int begin_slot(episode *e)
{
    const scenario *w = e->world;
    double now = w->times_s[e->slot];
    if (e->step + 1 < w->steps && w->step_slots[e->step + 1] <= e->slot) {
        e->step++;
        e->rtt_s = w->step_rtt_s[e->step];
        e->slot_s = w->step_slot_s[e->step];
        e->min_rtt_s = e->rtt_s < e->min_rtt_s ? e->rtt_s : e->min_rtt_s;
        e->core.rtt_s = e->receiver.rtt_s = e->rtt_s;
        e->core.min_rtt_s = e->min_rtt_s;
        e->core.slot_s = e->slot_s;
        core_changed(&e->core);
    }
    e->begun = true;
    return receive(e, now) != 0 || listen(e, now) != 0 ? -1 : 0;
}

static int send_slot(episode *e)
{
    double now = e->world->times_s[e->slot], back_s = e->rtt_s;
    planned packet;
    uint64_t remaining_us = core_remaining_us(&e->core, now);
    ptrdiff_t count = core_plan(&e->core, now, 1, PACKET_BYTES, &packet);
    if (count < 0)
        return -1;
    if (count == 1) {
        bool lost = e->world->losses[e->slot];
        double there_s = e->rtt_s / 2;
        e->carried[e->slot] = (uint8_t)packet.kind;
        if (e->disturbed.reordering > 0.0 && uniform(&e->chance) < e->disturbed.reordering) {
            there_s += e->disturbed.reordering_s;
            back_s += e->disturbed.reordering_s;
        }
        if (!lost) {
            arrival *a = queue_push(&e->arrivals, now + there_s);
            if (a == NULL)
                return -1;
            a->remaining_us = remaining_us;
            a->packet.kind = packet.kind;
            a->packet.number = packet.number;
            if (packet.kind == FRAME_REPAIR)
                a->packet = packet;
        }
        if (packet.token >= 0) {
            bool seen = !lost;
            if (seen && e->disturbed.fates_loss > 0.0)
                seen = uniform(&e->chance) >= e->disturbed.fates_loss;
            fate *f = queue_push(&e->fates, now + back_s + e->disturbed.fates_delay_s);
            if (f == NULL)
                return -1;
            f->token = packet.token;
            f->delivered = seen;
        }
    }
    e->slot++;
    e->begun = false;
    return 0;
}

/* Nothing will be sent any more: what is on the way arrives. */
static int end(episode *e)
{
    double last_s = e->world->times_s[e->world->slots - 1];
    if (receive(e, last_s) != 0 || listen(e, last_s) != 0)
        return -1;
    e->slot = e->world->slots;
    e->done = true;
    return receive(e, e->world->deadline_s + 1.0);
}

static bool may_choose(episode *e)
{
    bool masks[CHOICES], any = false;
    choice_masks(&e->core.state, e->resend, masks);
    for (int i = 0; i < CHOICES; i++)
        any |= masks[i];
    return any;
}

static int run(episode *e, bool stops, uint32_t from)
{
    while (!e->done) {
        if (e->slot == e->world->slots)
            return end(e);
        if (!e->begun && begin_slot(e) != 0)
            return -1;
        double now = e->world->times_s[e->slot];
        if ((!e->core.running || e->book.known == e->book.symbols) && e->step + 1 == e->world->steps)
            return end(e); /* for good: no slot will carry anything */
        if (stops && e->slot >= from && core_decides(&e->core, now) && may_choose(e))
            return 0;
        if (send_slot(e) != 0)
            return -1;
    }
    return 0;
}

static double potential(episode *e)
{
    const receiver *r = &e->receiver;
    const sender_state *s = &e->core.state;
    double all = e->world->symbols, prefix = r->d.prefix;
    double d = state_deficit(s, (double)((int64_t)r->d.highest - r->d.known_count - r->d.rank));
    double share = d / (d + state_budget(s) > 1.0 ? d + state_budget(s) : 1.0);
    return 0.3 * prefix / all - 0.1 * share - 0.05 * log(1.0 + (double)s->sources_sent - prefix) / log(1.0 + all);
}

/* Rewards count from here. */
static void count_from_here(episode *e)
{
    e->gained = e->receiver.gained;
    e->potential = e->done ? 0.0 : potential(e);
}

int episode_advance(episode *e, uint32_t from)
{
    if (run(e, true, from) != 0)
        return -1;
    count_from_here(e);
    return 0;
}

int episode_finish(episode *e)
{
    return run(e, false, 0);
}

int episode_choose(episode *e, int choice, double *reward)
{
    core_force(&e->core, choice_action(&e->core.state, choice));
    if (send_slot(e) != 0 || run(e, true, 0) != 0)
        return -1;
    double before = e->gained + e->potential;
    count_from_here(e);
    *reward = e->gained + e->potential - before;
    return 0;
}

int episode_rule_choice(episode *e)
{
    if (e->done || !e->ruled)
        return -1;
    core *c = &e->core;
    flec remembered = c->flec; /* deciding leaves a reason behind */
    int verdict = c->verdict;
    action a = core_ask(c);
    c->flec = remembered;
    c->verdict = verdict;
    return choice_of(a);
}
