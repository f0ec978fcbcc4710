/* The memory of hand-offs, and what they begin with: see engine.h. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"

enum { MANIFEST_BYTES = 250, NOTHING = 255 };

/* ---- queues ---- */

static int queue_grow(queue *q)
{
    uint32_t room = q->room == 0 ? 64 : 2 * q->room;
    uint8_t *items = malloc(room * q->size);
    if (items == NULL)
        return -1;
    for (uint32_t i = 0; i < q->count; i++)
        memcpy(items + i * q->size, queue_at(q, i), q->size);
    free(q->items);
    q->items = items;
    q->room = room;
    q->first = 0;
    return 0;
}

void *queue_push(queue *q, double at_s)
{
    if (q->count == q->room && queue_grow(q) != 0)
        return NULL;
    uint32_t place = q->count++;
    for (; place > 0 && *(double *)queue_at(q, place - 1) > at_s; place--)
        memcpy(queue_at(q, place), queue_at(q, place - 1), q->size);
    double *item = queue_at(q, place);
    *item = at_s;
    return item;
}

int queue_copy(queue *to, const queue *from)
{
    while (to->room < from->count)
        if (queue_grow(to) != 0)
            return -1;
    to->first = 0;
    to->count = from->count;
    for (uint32_t i = 0; i < from->count; i++)
        memcpy(queue_at(to, i), queue_at(from, i), from->size);
    return 0;
}

/* ---- memory ---- */

/* RULE_EXTERNAL: a decision that nobody made by episode_choose() is to wait. */
static int wait_for_choice(void *user, const sender_state *s, action *out)
{
    (void)user;
    (void)s;
    (void)out;
    return 0;
}

static void free_transfer(episode *e)
{
    core_free(&e->core);
    ledger_free(&e->book);
    free(e->carried);
    free(e->receiver.missing);
    e->carried = NULL;
    e->receiver.missing = NULL;
    e->world = NULL;
}

void episode_free(episode *e)
{
    free_transfer(e);
    if (e->receiver.polled != NULL)
        rank_close(&e->receiver.d);
    free(e->receiver.polled);
    free(e->arrivals.items);
    free(e->fates.items);
    free(e->feedback.items);
    memset(e, 0, sizeof *e);
}

/* A decoder without a past for `symbols`, and what belongs to a receiver of `world`. */
static int open_receiver(receiver *r, const scenario *world)
{
    static const decoder_limits limits = {MOST_UNKNOWN, MOST_DEGREE, MOST_WINDOW, 1024};
    if (r->polled != NULL && r->d.capacity < world->symbols) {
        rank_close(&r->d);
        free(r->polled);
        r->polled = NULL;
    }
    if (r->polled == NULL) {
        r->polled = malloc(MOST_UNKNOWN * sizeof *r->polled);
        if (r->polled == NULL)
            return -1;
        if (rank_open(&r->d, &limits, world->symbols) != 0) {
            free(r->polled);
            r->polled = NULL;
            return -1;
        }
    }
    rank_reset(&r->d);
    r->missing = malloc(world->units * sizeof *r->missing);
    return r->missing == NULL ? -1 : 0;
}

static int open_transfer(episode *e, const scenario *world, const double *priority)
{
    free_transfer(e);
    e->arrivals.size = sizeof(arrival);
    e->fates.size = sizeof(fate);
    e->feedback.size = sizeof(feedback);
    e->arrivals.count = e->fates.count = e->feedback.count = 0;
    e->carried = malloc(world->slots);
    if (e->carried == NULL || open_receiver(&e->receiver, world) != 0 ||
        ledger_init(&e->book, world->symbols, priority, &e->loss) != 0) {
        free_transfer(e);
        return -1;
    }
    e->world = world;
    return 0;
}

int episode_set_rule(episode *e, const policy *rule, bool full_window)
{
    policy external = {.rule = RULE_EXTERNAL, .full_window = full_window};
    e->ruled = rule != NULL;
    return core_set_rule(&e->core, rule != NULL ? rule : &external);
}

int episode_reset(episode *e, const scenario *world, const start *s)
{
    if (open_transfer(e, world, s->oldest_first ? world->oldest_first : world->priority) != 0)
        return -1;
    memset(e->carried, NOTHING, world->slots);
    e->disturbed = s->disturbed;
    e->loss = s->loss;
    e->chance = s->seed ^ 0x5EED;
    e->slot = e->step = 0;
    e->rtt_s = e->min_rtt_s = world->step_rtt_s[0];
    e->slot_s = world->step_slot_s[0];
    e->begun = e->done = false;
    e->resend = s->resend;
    e->feedback_sequence = -1;
    e->feedback_count = e->feedback_ignored = 0;
    e->gained = e->potential = 0.0;

    receiver *r = &e->receiver;
    r->world = world;
    r->opened = r->manifest = r->progress = r->urgent = false;
    r->status = STATUS_RUNNING;
    r->rtt_s = e->rtt_s;
    r->deadline_s = r->frozen_s = INFINITY;
    r->newest_s = 0.0;
    r->last_feedback_s = -1e9;
    r->final_left = 0;
    r->sequence = r->highest_source = 0;
    r->useless_left = 4096;
    memcpy(r->missing, world->packets, world->units * sizeof *r->missing);
    r->incomplete = world->units;
    r->gained = 0.0;
    memset(&r->counters, 0, sizeof r->counters);

    e->memory = (feature_memory){.unit_of = world->unit_of, .utility_before = world->utility_before,
                                 .units = world->units, .budget_total = s->budget};
    memset(&e->core, 0, sizeof e->core);
    core *c = &e->core;
    c->book = &e->book;
    c->decide = wait_for_choice;
    c->unit_packets = world->unit_packets;
    c->unit_position = world->unit_position;
    c->memory = &e->memory;
    c->symbol_size = s->symbol_size;
    c->degree = s->degree;
    c->max_degree = MOST_DEGREE;
    c->max_window = MOST_WINDOW;
    c->manifest_bytes = MANIFEST_BYTES;
    c->budget = s->budget;
    c->deadline_s = world->deadline_s;
    c->rtt_s = c->min_rtt_s = e->rtt_s;
    c->slot_s = e->slot_s;
    c->credit = INITIAL_CREDIT;
    c->running = true;
    core_start(c, 0.0);
    return episode_set_rule(e, s->rule, s->full_window);
}

static void *duplicate(const void *data, size_t used, size_t room)
{
    void *copy = malloc(room > 0 ? room : 1);
    if (copy != NULL && used > 0)
        memcpy(copy, data, used);
    return copy;
}

static int copy_ledger(ledger *to, const ledger *from, loss_estimate *loss)
{
    ledger copy = *from;
    size_t states = (size_t)from->symbols + 1;
    copy.loss = loss;
    copy.state = duplicate(from->state, states, states);
    copy.seen = from->seen == NULL ? NULL : duplicate(from->seen, states, states);
    copy.tokens = duplicate(from->tokens, from->token_count * sizeof *from->tokens, from->token_room * sizeof *from->tokens);
    copy.heap = duplicate(from->heap, from->heap_count * sizeof *from->heap, from->heap_room * sizeof *from->heap);
    ledger_free(to);
    *to = copy;
    return copy.state == NULL || copy.tokens == NULL || copy.heap == NULL || (from->seen != NULL && copy.seen == NULL) ? -1 : 0;
}

static int copy_core(episode *to, const episode *from)
{
    const flec *f = &from->core.flec;
    core_free(&to->core);
    to->core = from->core;
    to->core.book = &to->book;
    to->core.memory = &to->memory;
    to->core.flec.flying = NULL;
    to->core.flec.channel.events = NULL;
    if (f->channel.events == NULL)
        return 0;
    flec *copy = &to->core.flec;
    copy->flying = duplicate(f->flying, f->flying_count * sizeof *f->flying, f->flying_room * sizeof *f->flying);
    copy->channel.events =
        duplicate(f->channel.events, GILBERT_EVENTS * sizeof(gilbert_event), GILBERT_EVENTS * sizeof(gilbert_event));
    return copy->flying == NULL || copy->channel.events == NULL ? -1 : 0;
}

static void copy_receiver(receiver *to, const receiver *from)
{
    receiver copy = *from;
    copy.d = to->d;
    copy.missing = to->missing;
    copy.polled = to->polled;
    *to = copy;
    memcpy(to->missing, from->missing, from->world->units * sizeof *to->missing);
    rank_copy(&to->d, &from->d);
}

int episode_copy(episode *to, const episode *from)
{
    if (to == from)
        return 0;
    /* Decoders are copied between equals: one that is larger is a stranger. */
    if (to->receiver.polled != NULL && to->receiver.d.capacity != from->receiver.d.capacity) {
        rank_close(&to->receiver.d);
        free(to->receiver.polled);
        to->receiver.polled = NULL;
    }
    scenario size = *from->world;
    size.symbols = from->receiver.d.capacity;
    if (to->world == NULL || to->receiver.polled == NULL || to->world != from->world) {
        if (open_transfer(to, &size, from->book.priority) != 0)
            return -1;
    }
    to->world = NULL; /* until all of it is there */
    int failed = copy_ledger(&to->book, &from->book, &to->loss);
    failed |= copy_core(to, from);
    failed |= queue_copy(&to->arrivals, &from->arrivals) | queue_copy(&to->fates, &from->fates);
    failed |= queue_copy(&to->feedback, &from->feedback);
    if (failed)
        return -1;
    copy_receiver(&to->receiver, &from->receiver);
    memcpy(to->carried, from->carried, from->world->slots);
    to->disturbed = from->disturbed;
    to->loss = from->loss;
    to->memory = from->memory;
    to->chance = from->chance;
    to->slot = from->slot;
    to->step = from->step;
    to->rtt_s = from->rtt_s;
    to->slot_s = from->slot_s;
    to->min_rtt_s = from->min_rtt_s;
    to->begun = from->begun;
    to->done = from->done;
    to->resend = from->resend;
    to->ruled = from->ruled;
    to->feedback_sequence = from->feedback_sequence;
    to->feedback_count = from->feedback_count;
    to->feedback_ignored = from->feedback_ignored;
    to->gained = from->gained;
    to->potential = from->potential;
    to->world = from->world;
    return 0;
}
