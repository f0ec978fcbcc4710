/* What the next packet carries: the masks around a policy. See core.h, and transfer/planner.py for the same in Python. */
#include "core.h"

#include <math.h>
#include <string.h>

enum { MANIFEST_EVERY = 16, MANIFEST_COPIES = 3 };
static const uint32_t MANIFEST_IDLE = UINT32_MAX;
static const double MOST_SLOTS = 9007199254740992.0; /* 2^53 */

static void count_slots(core *c, double now)
{
    int64_t slots = core_slots_left(c, now);
    c->state.slots_total = slots > 1 ? slots : 1;
}

void core_start(core *c, double now)
{
    c->heard = c->late = c->has_burst = c->has_chosen = false;
    c->since_manifest = MANIFEST_EVERY;
    c->manifest_at = MANIFEST_IDLE;
    c->manifest_retry_s = INFINITY;
    c->repair_number = 0;
    memset(&c->counters, 0, sizeof c->counters);
    memset(&c->state, 0, sizeof c->state);
    c->state.sources_total = c->book->symbols;
    count_slots(c, now);
    if (c->memory != NULL)
        features_start(c->memory, c->state.slots_total);
}

void core_extend(core *c, double now, double deadline_s)
{
    c->deadline_s = deadline_s;
    c->late = true;
    c->has_burst = c->has_chosen = false;
    count_slots(c, now);
    if (c->memory != NULL) /* the time since the last progress counts from here; what was seen of the path stays */
        c->memory->progress_left = c->state.slots_total;
}

int core_set_rule(core *c, const policy *rule)
{
    c->rule = *rule;
    c->has_burst = c->has_chosen = false;
    flec_free(&c->flec);
    return policy_is_flec(rule) ? flec_init(&c->flec, c->book) : 0;
}

void core_free(core *c)
{
    flec_free(&c->flec);
}

int64_t core_slots_left(const core *c, double now)
{
    double slots = (core_cutoff(c) - now - c->reserved_s) / c->slot_s;
    if (!(slots >= 1.0))
        return 0;
    return (int64_t)(slots < MOST_SLOTS ? slots : MOST_SLOTS);
}

bool core_finished(const core *c, double now)
{
    return !c->running || c->book->known == c->book->symbols || now >= core_cutoff(c);
}

double core_next_timer(const core *c)
{
    double cutoff_s = core_cutoff(c);
    if (!c->running)
        return INFINITY;
    return c->heard || cutoff_s < c->manifest_retry_s ? cutoff_s : c->manifest_retry_s;
}

uint64_t core_remaining_us(const core *c, double now)
{
    double remaining_us = (c->deadline_s - now - c->min_rtt_s / 2) * 1e6;
    if (!(remaining_us >= 1.0))
        return 0;
    return remaining_us < 4611686018427387904.0 ? (uint64_t)remaining_us : ((uint64_t)1 << 62) - 1;
}

void core_view(core *c, double now)
{
    const ledger *book = c->book;
    sender_state *s = &c->state;
    bool more = book->next < book->symbols;
    s->slots_left = core_slots_left(c, now);
    s->rtt_slots = c->rtt_s / c->slot_s;
    s->sources_sent = book->next;
    s->unit_packets = more ? c->unit_packets[book->next] : 0;
    s->unit_position = more ? c->unit_position[book->next] : 0;
    s->in_flight = book->in_flight;
    s->repairs_in_flight = book->repairs_in_flight;
    s->repairs_sent = (int64_t)c->counters.repair;
    s->known_lost = book->known_lost;
    s->unresolved = ledger_unresolved(book);
    s->window = book->next - book->prefix;
    s->feedback_deficit = c->feedback_deficit;
    s->packets_extra = (int64_t)(c->counters.repair + c->counters.resent);
    s->fates = (int64_t)book->loss->fates;
    s->loss_short = book->loss->recent;
    s->loss_long = loss_long(book->loss);
    s->budget_left = c->budget;
    s->can_source = more && book->next < c->credit;
    s->can_repair = c->budget >= 1 && s->unresolved > 0;
    s->can_resend = c->budget >= 1 && book->known_lost > 0;
    if (c->memory != NULL)
        features_view(c->memory, s);
}

/* The masks every policy is under: budget, credit, time (a burst must fit what is left). */
static bool allowed(action a, const sender_state *s)
{
    switch (a.kind) {
    case ACTION_SOURCE:
        return s->can_source;
    case ACTION_REPAIR:
        return s->can_repair && a.count <= s->budget_left && a.count <= (s->slots_left > 1 ? s->slots_left : 1);
    case ACTION_RESEND:
        return s->can_resend;
    default:
        return false;
    }
}

action core_ask(core *c)
{
    if (policy_is_flec(&c->rule))
        return flec_decide(&c->flec, &c->rule, &c->state, c->book->seen_count);
    if (c->rule.net != NULL)
        return network_decide(&c->rule, &c->state, c->memory, c->degree, &c->verdict);
    return policy_decide(&c->rule, &c->state);
}

static int choose(core *c, double now)
{
    if (c->has_chosen && c->chosen_s == now)
        return 0;
    core_view(c, now);
    const sender_state *s = &c->state;
    action chosen = c->burst;
    c->verdict = VERDICT_RULE;
    if (!c->has_burst || !allowed(chosen, s)) {
        c->has_burst = false;
        if (c->rule.rule != RULE_EXTERNAL) {
            chosen = core_ask(c);
        } else {
            chosen = (action){ACTION_IDLE, 1};
            if (c->decide(c->user, s, &chosen) != 0)
                return -1;
        }
        if (!allowed(chosen, s))
            chosen = (action){ACTION_IDLE, 1};
    }
    /* Only missing credit keeps new symbols from leaving. */
    if (chosen.kind != ACTION_RESEND && s->sources_sent < s->sources_total && !s->can_source)
        c->counters.slots_credit++;
    c->has_chosen = true;
    c->chosen_s = now;
    c->chosen = chosen;
    return 0;
}

static bool manifest_due(const core *c, double now)
{
    if (c->late)
        return false;
    if (c->manifest_at != MANIFEST_IDLE)
        return true;
    if (!c->heard && (c->since_manifest >= MANIFEST_EVERY || now >= c->manifest_retry_s))
        return true;
    bool all_out = c->book->next == c->book->symbols;
    return c->counters.manifests < MANIFEST_COPIES && (all_out || c->since_manifest >= MANIFEST_EVERY);
}

bool core_decides(core *c, double now)
{
    if (core_finished(c, now) || manifest_due(c, now))
        return false;
    core_view(c, now);
    return !(c->has_burst && allowed(c->burst, &c->state));
}

void core_force(core *c, action forced)
{
    c->has_chosen = false;
    c->has_burst = true;
    c->burst = forced;
    c->flec.reason = REASON_NONE;
}

int core_ready(core *c, double now)
{
    if (core_finished(c, now))
        return 0;
    if (manifest_due(c, now))
        return 1;
    if (choose(c, now) != 0)
        return -1;
    return c->chosen.kind != ACTION_IDLE;
}

/* The next fragment of the manifest: bytes of its frame, 0 if it does not fit. */
static size_t plan_manifest(core *c, double now, int64_t bytes_free, planned *out)
{
    if (c->manifest_at == MANIFEST_IDLE)
        c->manifest_at = 0;
    uint32_t offset = c->manifest_at, size = manifest_fragment(c->manifest_bytes, offset);
    size_t bytes =
        size + frame_manifest_overhead(c->transfer_id, c->manifest_bytes, offset, core_remaining_us(c, now), size);
    if ((int64_t)bytes > bytes_free)
        return 0;
    *out = (planned){.kind = FRAME_MANIFEST, .number = offset, .token = -1};
    c->manifest_at = offset + size;
    if (c->manifest_at == c->manifest_bytes) {
        c->manifest_at = MANIFEST_IDLE;
        c->counters.manifests++;
        c->since_manifest = 0;
        /* Also while nothing else may be sent, for want of credit say: about a PTO later (RFC 9002 §6.2.1). */
        c->manifest_retry_s = now + 1.5 * c->rtt_s + 0.025;
    }
    return bytes;
}

/* A repair, whole in *out but for its token; 0 if it does not fit. */
static size_t plan_repair(core *c, int64_t bytes_free, planned *out)
{
    static const coding_set empty;
    coding_set widest = empty;
    widest.tail_span = c->max_window;
    /* 8 bytes more for the fields whose size is not known yet. */
    int64_t room = bytes_free - c->symbol_size - (int64_t)frame_repair_overhead(c->transfer_id, 48, &widest) - 8;
    if (room < 1)
        return 0;
    if (c->rule.full_window) {
        ledger_full_set(c->book, c->max_window, &out->set);
    } else {
        uint32_t span = room < MAX_HEAD_SPAN / 8 ? (uint32_t)(8 * room) : MAX_HEAD_SPAN;
        ledger_sack_set(c->book, c->max_window, span, &out->set, out->head);
    }
    out->degree = policy_degree(&c->rule, &c->state, c->degree, c->max_degree);
    return c->symbol_size + frame_repair_overhead(c->transfer_id, out->degree, &out->set);
}

/* Bytes of the planned frame; 0: nothing, or it does not fit; -1, -2 as core_plan(). */
static int64_t plan_symbol(core *c, double now, int64_t bytes_free, planned *out)
{
    if (choose(c, now) != 0)
        return -1;
    action chosen = c->chosen;
    size_t bytes;
    if (chosen.kind == ACTION_IDLE)
        return 0;
    if (chosen.kind == ACTION_REPAIR) {
        bytes = plan_repair(c, bytes_free, out);
        if (bytes == 0)
            return 0;
        out->kind = FRAME_REPAIR;
        out->number = (uint32_t)c->repair_number;
        out->token = ledger_send_repair(c->book);
        if (out->token < 0)
            return -2;
        c->repair_number++;
        c->budget -= 1;
        c->counters.repair++;
    } else {
        bytes = c->symbol_size + frame_source_overhead(c->transfer_id);
        if ((int64_t)bytes > bytes_free)
            return 0;
        bool again = chosen.kind == ACTION_RESEND;
        if (again && c->book->unit_packets == NULL && (c->ranks || policy_ranks(&c->rule, &c->state)))
            ledger_rank(c->book, c->unit_packets, c->unit_position);
        out->token = again ? ledger_send_lost(c->book, &out->number) : ledger_send_source(c->book, &out->number);
        if (out->token < 0)
            return -2;
        out->kind = again ? FRAME_RESEND : FRAME_SOURCE;
        if (again) {
            c->budget -= 1;
            c->counters.resent++;
        } else {
            c->counters.source++;
        }
    }
    if (policy_is_flec(&c->rule)) {
        const coding_set *set = out->kind == FRAME_REPAIR ? &out->set : NULL;
        if (flec_sent(&c->flec, &c->state, out->token, set, c->book->seen_count, now) != 0)
            return -2;
    }
    c->counters.overridden += c->verdict == VERDICT_OVERRIDE;
    c->counters.guarded += c->verdict == VERDICT_GUARD;
    c->has_burst = chosen.count > 1;
    c->burst = (action){chosen.kind, chosen.count - 1};
    c->since_manifest++;
    c->has_chosen = false;
    return (int64_t)bytes;
}

ptrdiff_t core_plan(core *c, double now, size_t room, int64_t bytes_free, planned *out)
{
    size_t count = 0;
    for (; count < room && !core_finished(c, now); count++) {
        planned *packet = &out[count];
        int64_t bytes = manifest_due(c, now) ? (int64_t)plan_manifest(c, now, bytes_free, packet)
                                             : plan_symbol(c, now, bytes_free, packet);
        if (bytes < 0)
            return (ptrdiff_t)bytes;
        if (bytes == 0)
            break;
        if (!c->counters.any)
            c->counters.first_packet_s = now;
        c->counters.any = true;
        c->counters.last_packet_s = now;
        c->counters.frame_bytes += (uint64_t)bytes;
    }
    return (ptrdiff_t)count;
}

int core_fate(core *c, size_t token, bool delivered, bool probe)
{
    c->has_chosen = false;
    c->counters.losses += !delivered && !probe;
    int32_t meaning = c->book->tokens[token];
    int failed = ledger_fate(c->book, token, delivered, probe);
    if (c->memory != NULL && meaning != TOKEN_SETTLED && !probe)
        features_fate(c->memory, !delivered);
    if (failed == 0 && meaning != TOKEN_SETTLED && policy_is_flec(&c->rule))
        flec_fate(&c->flec, c->book, (int64_t)token, meaning, delivered, probe);
    return failed;
}

void core_feedback(core *c, int64_t deficit, int64_t credit, bool running)
{
    c->has_chosen = false;
    c->heard = true;
    c->feedback_deficit = deficit;
    if (credit > c->credit)
        c->credit = credit;
    c->running = running;
}
