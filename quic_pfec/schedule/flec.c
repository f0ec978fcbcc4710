/* FlEC real time in three readings: schedule/flec.py, which says where each rule comes from. */
#include "core.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double OLDEST_S = 10.0, REFRESH_S = 0.2;

static inline double most(double a, double b)
{
    return a > b ? a : b;
}

static inline double least(double a, double b)
{
    return a < b ? a : b;
}

/* ---- the channel ---- */

static inline gilbert_event *event_at(const gilbert *g, uint32_t place)
{
    return &g->events[(g->first + place) % GILBERT_EVENTS];
}

static void count_transition(gilbert *g, bool from, bool to, uint32_t change)
{
    if (from) {
        g->from_loss += change;
        g->loss_to_ack += to ? 0 : change;
    } else {
        g->from_ack += change;
        g->ack_to_loss += to ? change : 0;
    }
}

static void drop_oldest(gilbert *g)
{
    bool lost = event_at(g, 0)->lost;
    g->lost -= lost;
    if (g->count > 1)
        count_transition(g, lost, event_at(g, 1)->lost, UINT32_MAX); /* minus one */
    g->first = (g->first + 1) % GILBERT_EVENTS;
    g->count--;
}

static void gilbert_add(gilbert *g, bool lost, double now)
{
    if (g->count == GILBERT_EVENTS)
        drop_oldest(g);
    if (g->count > 0)
        count_transition(g, event_at(g, g->count - 1)->lost, lost, 1);
    *event_at(g, g->count++) = (gilbert_event){now, lost};
    g->lost += lost;
    if (now - g->refreshed_s < REFRESH_S)
        return;
    g->refreshed_s = now;
    while (g->count > 0 && event_at(g, 0)->at_s < now - OLDEST_S)
        drop_oldest(g);
    g->enough = g->count >= GILBERT_ENOUGH;
    if (!g->enough)
        return;
    g->eps = (double)g->lost / g->count;
    g->p = g->from_ack > 0 ? (double)g->ack_to_loss / g->from_ack : 0.0;
    g->r = g->from_loss > 0 ? (double)g->loss_to_ack / g->from_loss : 1.0;
}

/* ---- memory ---- */

int flec_init(flec *f, ledger *book)
{
    memset(f, 0, sizeof *f);
    f->channel.refreshed_s = -INFINITY;
    f->channel.events = calloc(GILBERT_EVENTS, sizeof *f->channel.events);
    if (book->seen == NULL)
        book->seen = calloc((size_t)book->symbols + 1, 1);
    if (f->channel.events == NULL || book->seen == NULL) {
        flec_free(f);
        return -1;
    }
    memset(book->seen, 0, (size_t)book->symbols + 1);
    book->seen_count = 0;
    return 0;
}

void flec_free(flec *f)
{
    free(f->flying);
    free(f->channel.events);
    memset(f, 0, sizeof *f);
}

/* ---- deciding ---- */

flec_view flec_look(const flec *f, uint32_t known_lost, uint32_t seen, uint32_t prefix, double loss_prior)
{
    const gilbert *g = &f->channel;
    flec_view v = {known_lost - seen, 0, loss_prior, loss_prior, 1.0};
    for (size_t i = 0; i < f->flying_count; i++)
        v.ad += f->flying[i].stop > prefix;
    if (g->enough) {
        v.eps = g->eps;
        v.p = g->p;
        v.r_ge = g->r;
    }
    return v;
}

static flec_view look(const flec *f, const sender_state *s, uint32_t seen)
{
    return flec_look(f, (uint32_t)s->known_lost, seen, (uint32_t)(s->sources_sent - s->window), s->loss_long);
}

static bool tail_due(const flec *f, const policy *p, const sender_state *s)
{
    int64_t used = s->in_flight + s->repairs_in_flight;
    bool quiet = !s->can_source && (s->sources_sent == s->sources_total || s->budget_left == INFINITY);
    if (!quiet || used == 0 || !(s->rtt_slots > p->headroom * (double)used))
        return false;
    return s->sources_sent > f->tail_end || f->tail_sent <= f->tail_most;
}

static bool spread_due(const flec *f, const sender_state *s, const flec_view *v)
{
    double window = (double)s->window;
    if (!s->can_source || v->ad >= 2.0 * most(1.0, v->eps * window))
        return false;
    if (f->spread_left >= 1.0)
        return true;
    double fresh = (double)(s->sources_sent - f->spread_end);
    return fresh >= 1.0 && fresh >= least(window, 1.0 / v->p);
}

action flec_decide(flec *f, const policy *p, const sender_state *s, uint32_t seen)
{
    f->reason = REASON_NONE;
    if (p->rule == RULE_FLEC_RT) {
        if (s->can_resend)
            return (action){ACTION_RESEND, 1};
    } else if (s->can_repair) {
        flec_view v = look(f, s, seen);
        if (p->rule == RULE_FLEC_RT_SPREAD && spread_due(f, s, &v))
            f->reason = REASON_SPREAD;
        else if (v.md > v.ad)
            f->reason = REASON_FEEDBACK;
    }
    if (f->reason == REASON_NONE && s->can_source)
        return (action){ACTION_SOURCE, 1};
    if (f->reason == REASON_NONE && s->can_repair && tail_due(f, p, s))
        f->reason = REASON_TAIL;
    return (action){f->reason == REASON_NONE ? ACTION_IDLE : ACTION_REPAIR, 1};
}

/* ---- events ---- */

static void count_tail(flec *f, const sender_state *s, const flec_view *v)
{
    uint32_t end = (uint32_t)s->sources_sent;
    if (end <= f->tail_end) {
        f->tail_sent++;
        return;
    }
    if (f->tail_sent > f->tail_most)
        f->tail_protected = f->tail_end; /* the round before was closed */
    double wanted = most(most(1.0, 1.0 / v->r_ge), (double)(end - f->tail_protected) * v->eps);
    f->tail_most = least((double)s->window, wanted);
    f->tail_sent = 1;
    f->tail_end = end;
}

static void count_spread(flec *f, const sender_state *s, const flec_view *v)
{
    if (f->spread_left < 1.0) {
        double burst = v->r_ge == 1.0 ? 0.0 : 1.0 / v->r_ge;
        double fresh = (double)(s->sources_sent - f->spread_end);
        f->spread_left = 1.0 + least((double)s->window, floor(most(burst, fresh * v->eps)));
        f->spread_end = (uint32_t)s->sources_sent;
    }
    f->spread_left -= 1.0;
}

int flec_sent(flec *f, const sender_state *s, int64_t token, const coding_set *set, uint32_t seen, double now)
{
    f->clock_s = now;
    if (set == NULL)
        return 0;
    flec_view v = look(f, s, seen);
    if (f->flying_count == f->flying_room) {
        size_t room = f->flying_room < 64 ? 64 : 2 * f->flying_room;
        repair_range *moved = realloc(f->flying, room * sizeof *moved);
        if (moved == NULL)
            return -1;
        f->flying = moved;
        f->flying_room = room;
    }
    uint32_t stop = set->first_sid + set->head_span + set->tail_offset + set->tail_span;
    f->flying[f->flying_count++] = (repair_range){token, set->first_sid, stop};
    if (f->reason == REASON_TAIL)
        count_tail(f, s, &v);
    if (f->reason == REASON_SPREAD)
        count_spread(f, s, &v);
    return 0;
}

void flec_fate(flec *f, ledger *book, int64_t token, int32_t meaning, bool delivered, bool probe)
{
    if (!probe)
        gilbert_add(&f->channel, !delivered, f->clock_s);
    if (meaning != TOKEN_REPAIR)
        return;
    size_t place = 0;
    while (place < f->flying_count && f->flying[place].token != token)
        place++;
    if (place == f->flying_count)
        return; /* sent under another rule */
    repair_range range = f->flying[place];
    f->flying_count--;
    memmove(&f->flying[place], &f->flying[place + 1], (f->flying_count - place) * sizeof range);
    if (!delivered)
        return;
    for (uint32_t sid = range.first > book->prefix ? range.first : book->prefix; sid < range.stop; sid++) {
        if (book->state[sid] == SYMBOL_LOST && !book->seen[sid]) {
            book->seen[sid] = 1;
            book->seen_count++;
            return;
        }
    }
}
