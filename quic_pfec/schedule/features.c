/* The state of the paper's decision process as 15 numbers: schedule/features.py, which gives the formulas. */
#include "core.h"

#include <math.h>

static inline double least(double a, double b)
{
    return a < b ? a : b;
}

static inline double most(double a, double b)
{
    return a > b ? a : b;
}

void features_start(feature_memory *m, int64_t slots_total)
{
    m->after_loss = 0.3;
    m->lost_before = false;
    m->prefix = 0;
    m->progress_left = slots_total;
}

void features_fate(feature_memory *m, bool lost)
{
    if (m->lost_before)
        m->after_loss += 0.02 * ((lost ? 1.0 : 0.0) - m->after_loss);
    m->lost_before = lost;
}

void features_view(feature_memory *m, const sender_state *s)
{
    uint32_t prefix = (uint32_t)(s->sources_sent - s->window);
    if (prefix == m->prefix)
        return;
    m->prefix = prefix;
    m->progress_left = s->slots_left;
}

double state_deficit(const sender_state *s, double reported)
{
    double eps = s->loss_short;
    return most(0.0, reported + eps * (double)s->in_flight - (1.0 - eps) * (double)s->repairs_in_flight);
}

double state_budget(const sender_state *s)
{
    if (s->budget_left < INFINITY)
        return s->budget_left;
    return most(0.0, (double)s->slots_total - (double)s->packets_extra);
}

static double mean_utility(const feature_memory *m, uint32_t first, uint32_t stop)
{
    if (stop > m->units)
        stop = m->units;
    return stop > first ? (m->utility_before[stop] - m->utility_before[first]) / (double)(stop - first) : 0.0;
}

void features_look(const feature_memory *m, const sender_state *s, int version, uint32_t degree, float *out)
{
    double total = (double)s->slots_total, left = (double)s->slots_left, rtt = most(1e-9, s->rtt_slots);
    double n = (double)s->sources_sent, all = (double)s->sources_total, w = (double)s->window;
    double eps = s->loss_short, d = state_deficit(s, (double)s->feedback_deficit), budget = state_budget(s);
    double budget_total = m->budget_total < INFINITY ? m->budget_total : total;
    uint32_t here = s->sources_sent < s->sources_total ? m->unit_of[s->sources_sent] : m->units;
    uint32_t first = s->sources_sent - s->window < s->sources_total ? m->unit_of[s->sources_sent - s->window] : m->units;
    uint32_t last = here < m->units ? here + 1 : m->units;
    double unresolved = mean_utility(m, first, last < first + 64 ? last : first + 64);
    double next = mean_utility(m, here, here + 16), mean = mean_utility(m, 0, m->units);
    double missing = (double)s->feedback_deficit + eps * (double)s->in_flight;
    double idle = (double)(m->progress_left - s->slots_left);
    double x[FEATURES] = {
        budget_total > 0.0 ? budget / budget_total : 0.0,
        left / total,
        version == 2 ? least(1.0, left / (4.0 * rtt)) : least(2.0, (all - n) / most(1.0, left)) / 2.0,
        most(-1.0, least(1.0, (left - (all - n) - d / (1.0 - eps)) / total)),
        least(1.0, 4.0 * eps),
        m->after_loss,
        d / most(1.0, d + budget),
        log(1.0 + d) / log(65.0),
        log(1.0 + w) / log(1.0 + all),
        least(4.0, w / (rtt + (double)degree)) / 4.0,
        least(4.0, idle / rtt) / 4.0,
        s->unit_packets > 0 ? (double)s->unit_position / (double)s->unit_packets : 0.0,
        mean > 0.0 ? least(4.0, unresolved / mean) / 4.0 : 0.0,
        next + unresolved > 0.0 ? next / (next + unresolved) : 0.0,
        w > 0.0 ? 1.0 - pow(1.0 - least(1.0, missing / w), least((double)degree, w)) : 0.0,
    };
    for (int i = 0; i < FEATURES; i++)
        out[i] = (float)x[i];
}

void choice_masks(const sender_state *s, bool resend, bool *out)
{
    double room = least(s->budget_left, most(1.0, (double)s->slots_left));
    bool repair = s->can_repair && s->window > 0 && state_deficit(s, (double)s->feedback_deficit) > 0.0;
    out[0] = s->can_source;
    out[1] = repair;
    out[2] = repair && room >= 4.0;
    out[3] = repair && room >= 16.0;
    out[4] = resend && s->can_resend;
}

action choice_action(const sender_state *s, int choice)
{
    static const int32_t repairs[] = {0, 1, 4, 16};
    if (choice == 4)
        return (action){ACTION_RESEND, 1};
    if (choice > 0)
        return (action){ACTION_REPAIR, repairs[choice]};
    int64_t burst = s->unit_packets - s->unit_position;
    if (burst > MAX_SOURCE_BURST)
        burst = MAX_SOURCE_BURST;
    if (burst > s->slots_left)
        burst = s->slots_left;
    return (action){ACTION_SOURCE, burst > 1 ? (int32_t)burst : 1};
}
