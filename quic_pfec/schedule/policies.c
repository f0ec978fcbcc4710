/* The deterministic rules: schedule/policies.py, number for number and in the same order of arithmetic. */
#include "core.h"

#include <math.h>

static const action IDLE = {ACTION_IDLE, 1}, SOURCE = {ACTION_SOURCE, 1}, REPAIR = {ACTION_REPAIR, 1},
                    RESEND = {ACTION_RESEND, 1};
static const double LONG_RTT = 100.0;
enum { ENOUGH_FATES = 20 }; /* as many as the prior of the loss rate stands for */

/* Is the slot free for a repair when no source may leave? */
static bool spare(const sender_state *s)
{
    return s->sources_sent == s->sources_total || s->budget_left == INFINITY;
}

static action source_or_spare(const sender_state *s)
{
    if (s->can_source)
        return SOURCE;
    return s->can_repair && spare(s) ? REPAIR : IDLE;
}

static action fixed(const policy *p, const sender_state *s)
{
    int64_t due = (int64_t)(p->rate * (double)s->sources_sent + 1e-9);
    if (s->can_repair && s->repairs_sent < due)
        return REPAIR;
    return source_or_spare(s);
}

static action arq(const sender_state *s)
{
    if (s->can_resend)
        return RESEND;
    return s->can_source ? SOURCE : IDLE;
}

static action deficit(const sender_state *s)
{
    double expected = (1.0 - s->loss_short) * (double)s->repairs_in_flight;
    if (s->can_repair && (double)s->feedback_deficit - expected > 0.5)
        return REPAIR;
    return source_or_spare(s);
}

static action epoch(const policy *p, const sender_state *s)
{
    static const int32_t bursts[] = {16, 4, 1};
    double lacking = (double)s->feedback_deficit + p->alpha * s->loss_short * (double)s->in_flight -
                     (1.0 - s->loss_short) * (double)s->repairs_in_flight;
    if (s->can_repair) {
        double room = s->slots_left > 1 ? (double)s->slots_left : 1.0;
        if (s->budget_left < room)
            room = s->budget_left;
        for (size_t i = 0; i < sizeof bursts / sizeof *bursts; i++)
            if (lacking >= bursts[i] && bursts[i] <= room)
                return (action){ACTION_REPAIR, bursts[i]};
    }
    return source_or_spare(s);
}

/* More will be lost than the budget can make up for, and there is time to choose what to save. */
static bool binds(const policy *p, const sender_state *s)
{
    int64_t leaving = s->sources_total < s->slots_total ? s->sources_total : s->slots_total;
    return p->hold_rtt > 0.0 && (double)s->slots_total > LONG_RTT * s->rtt_slots &&
           s->budget_left + (double)s->packets_extra < s->loss_long * (double)leaving;
}

bool policy_ranks(const policy *p, const sender_state *s)
{
    return p->rule == RULE_HYBRID && binds(p, s);
}

static action hybrid(const policy *p, const sender_state *s)
{
    if (binds(p, s)) {
        double need = ((double)s->known_lost + s->loss_long * (double)s->in_flight) / (1.0 - s->loss_long);
        need = s->budget_left < need ? s->budget_left : need;
        bool now = (double)s->slots_left <= need + p->hold_rtt * s->rtt_slots;
        if (s->can_resend && (now || !s->can_source))
            return RESEND;
        return s->can_source ? SOURCE : IDLE;
    }
    if (s->can_resend)
        return RESEND;
    if ((double)s->slots_left <= p->horizon_rtt * s->rtt_slots && s->can_repair) {
        if (s->in_flight > 0) {
            double expected_loss = s->loss_long * (double)s->in_flight;
            double flying = (double)s->in_flight, variance = 8.0 * expected_loss;
            if (flying > p->crowd) {
                double unsure = (flying - p->crowd) / flying;
                variance += unsure * p->doubt * s->loss_long * (1.0 - s->loss_long) / ((double)s->fates + 20.0) * flying * flying;
            }
            double wanted = p->alpha * expected_loss + p->spread * sqrt(variance);
            if (wanted - (1.0 - s->loss_long) * (double)s->repairs_in_flight > 0.5)
                return REPAIR;
        }
        bool little = s->fates < ENOUGH_FATES && s->unresolved <= 2 * s->unit_packets;
        double open_share = little ? p->blind_share : p->open_share;
        bool opens = s->can_source && s->unit_position == 0;
        if (opens && (double)s->slots_left < open_share * (double)s->unit_packets && s->unresolved > 0)
            return REPAIR;
    }
    return source_or_spare(s);
}

uint32_t policy_degree(const policy *p, const sender_state *s, uint32_t degree, uint32_t most)
{
    if (p->rule != RULE_HYBRID || (double)s->in_flight <= p->crowd || p->wide_degree <= (double)degree)
        return degree;
    return p->wide_degree < (double)most ? (uint32_t)p->wide_degree : most;
}

action policy_decide(const policy *p, const sender_state *s)
{
    switch (p->rule) {
    case RULE_NONE:
        return s->can_source ? SOURCE : IDLE;
    case RULE_FIXED:
        return fixed(p, s);
    case RULE_ARQ:
        return arq(s);
    case RULE_DEFICIT:
        return deficit(s);
    case RULE_EPOCH:
        return epoch(p, s);
    case RULE_HYBRID:
        return hybrid(p, s);
    default:
        return IDLE;
    }
}
