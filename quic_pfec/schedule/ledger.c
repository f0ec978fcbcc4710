/* The ledger: see core.h, and transfer/ledger.py for the reasons. */
#include "core.h"

#include <stdlib.h>
#include <string.h>

static inline uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static inline uint32_t most(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

/* ---- loss ---- */

double loss_recent(double recent, bool lost)
{
    double moved = recent + 0.01 * ((lost ? 1.0 : 0.0) - recent);
    if (moved < 0.002)
        return 0.002;
    return moved > 0.6 ? 0.6 : moved;
}

double loss_long(const loss_estimate *loss)
{
    double mean = (loss->losses + 1.0) / (loss->fates + 20.0);
    return mean > 0.6 ? 0.6 : mean;
}

/* ---- memory ---- */

int ledger_init(ledger *book, uint32_t symbols, const double *priority, loss_estimate *loss)
{
    memset(book, 0, sizeof *book);
    book->symbols = symbols;
    book->priority = priority;
    book->loss = loss;
    book->state = calloc((size_t)symbols + 1, 1);
    return book->state == NULL ? -1 : 0;
}

void ledger_free(ledger *book)
{
    free(book->state);
    free(book->seen);
    free(book->tokens);
    free(book->heap);
    memset(book, 0, sizeof *book);
}

/* Room for one more item of `size` bytes in *items: 0, or -1 without memory. */
static int make_room(void **items, size_t count, size_t *room, size_t size)
{
    if (count < *room)
        return 0;
    size_t wanted = *room < 64 ? 64 : *room + *room / 2;
    void *moved = realloc(*items, wanted * size);
    if (moved == NULL)
        return -1;
    *items = moved;
    *room = wanted;
    return 0;
}

static int token_room(ledger *book)
{
    return make_room((void **)&book->tokens, book->token_count, &book->token_room, sizeof *book->tokens);
}

/* ---- the heap of known losses: lowest (priority, sid) first ---- */

static inline bool before(const lost_symbol *a, const lost_symbol *b)
{
    return a->priority < b->priority || (a->priority == b->priority && a->sid < b->sid);
}

static void sift_up(lost_symbol *heap, size_t at)
{
    lost_symbol item = heap[at];
    while (at > 0 && before(&item, &heap[(at - 1) / 2])) {
        heap[at] = heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap[at] = item;
}

static void sift_down(lost_symbol *heap, size_t count, size_t at)
{
    lost_symbol item = heap[at];
    for (size_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && before(&heap[child + 1], &heap[child]))
            child++;
        if (!before(&heap[child], &item))
            break;
        heap[at] = heap[child];
    }
    heap[at] = item;
}

static lost_symbol pop_lost(ledger *book)
{
    lost_symbol top = book->heap[0];
    book->heap[0] = book->heap[--book->heap_count];
    if (book->heap_count > 0)
        sift_down(book->heap, book->heap_count, 0);
    return top;
}

/* The order of resending: see ledger_rank(). */
static double urgency(const ledger *book, uint32_t sid)
{
    if (book->unit_packets == NULL)
        return book->priority[sid];
    uint32_t lacking = 0, first = sid - (uint32_t)book->unit_position[sid];
    for (uint32_t i = first; i < first + (uint32_t)book->unit_packets[sid]; i++)
        lacking += book->state[i] == SYMBOL_LOST;
    return book->priority[sid] * book->unit_packets[sid] / (lacking > 0 ? lacking : 1);
}

static void heapify(ledger *book)
{
    for (size_t i = book->heap_count / 2; i-- > 0;)
        sift_down(book->heap, book->heap_count, i);
}

/* Drop what feedback has resolved meanwhile. */
static void prune_lost(ledger *book)
{
    size_t kept = 0;
    for (size_t i = 0; i < book->heap_count; i++)
        if (book->state[book->heap[i].sid] == SYMBOL_LOST)
            book->heap[kept++] = book->heap[i];
    book->heap_count = kept;
    heapify(book);
}

void ledger_rank(ledger *book, const int32_t *unit_packets, const int32_t *unit_position)
{
    book->unit_packets = unit_packets;
    book->unit_position = unit_position;
    prune_lost(book);
    for (size_t i = 0; i < book->heap_count; i++)
        book->heap[i].priority = urgency(book, book->heap[i].sid);
    heapify(book);
}

static void forget_seen(ledger *book, uint32_t start, uint32_t stop)
{
    for (uint32_t sid = start; book->seen_count > 0 && sid < stop; sid++) {
        book->seen_count -= book->seen[sid];
        book->seen[sid] = 0;
    }
}

/* ---- sending ---- */

static int64_t add_token(ledger *book, int32_t meaning)
{
    book->tokens[book->token_count] = meaning;
    return (int64_t)book->token_count++;
}

static int64_t sent(ledger *book, uint32_t sid)
{
    book->state[sid] = SYMBOL_IN_FLIGHT;
    book->in_flight++;
    return add_token(book, (int32_t)sid);
}

int64_t ledger_send_source(ledger *book, uint32_t *sid)
{
    if (book->next == book->symbols)
        return -1;
    if (token_room(book) != 0)
        return -2;
    *sid = book->next++;
    return sent(book, *sid);
}

int64_t ledger_send_lost(ledger *book, uint32_t *sid)
{
    if (book->known_lost == 0)
        return -1;
    if (token_room(book) != 0)
        return -2;
    /* Every lost symbol is in the heap, so this ends. */
    do
        *sid = pop_lost(book).sid;
    while (book->state[*sid] != SYMBOL_LOST);
    book->known_lost--;
    forget_seen(book, *sid, *sid + 1);
    return sent(book, *sid);
}

int64_t ledger_send_repair(ledger *book)
{
    if (token_room(book) != 0)
        return -2;
    book->repairs_in_flight++;
    return add_token(book, TOKEN_REPAIR);
}

/* ---- learning ---- */

static void advance(ledger *book)
{
    const uint8_t *state = book->state;
    uint32_t at = book->prefix;
    while (state[at] == SYMBOL_KNOWN) /* the sentinel ends it */
        at++;
    book->prefix = at;
}

static void mark_known(ledger *book, uint32_t sid)
{
    uint8_t state = book->state[sid];
    if (state == SYMBOL_KNOWN)
        return;
    if (state == SYMBOL_IN_FLIGHT)
        book->in_flight--;
    else
        book->known_lost--;
    book->state[sid] = SYMBOL_KNOWN;
    book->known++;
    forget_seen(book, sid, sid + 1);
    if (sid == book->prefix)
        advance(book);
}

int ledger_fate(ledger *book, size_t token, bool delivered, bool probe)
{
    int32_t meaning = book->tokens[token];
    book->tokens[token] = TOKEN_SETTLED;
    if (meaning == TOKEN_SETTLED)
        return 0;
    if (!probe) {
        book->loss->fates += 1.0;
        book->loss->losses += delivered ? 0.0 : 1.0;
        book->loss->recent = loss_recent(book->loss->recent, !delivered);
    }
    if (meaning == TOKEN_REPAIR) {
        book->repairs_in_flight--;
        return 0;
    }
    uint32_t sid = (uint32_t)meaning;
    book->fated = most(book->fated, sid + 1);
    if (delivered) {
        mark_known(book, sid);
    } else if (book->state[sid] == SYMBOL_IN_FLIGHT) { /* by this very packet: it leaves again only after it was lost */
        if (make_room((void **)&book->heap, book->heap_count, &book->heap_room, sizeof *book->heap) != 0)
            return -2;
        book->state[sid] = SYMBOL_LOST;
        book->in_flight--;
        book->known_lost++;
        book->heap[book->heap_count].priority = urgency(book, sid);
        book->heap[book->heap_count].sid = sid;
        sift_up(book->heap, book->heap_count++);
    }
    return 0;
}

void ledger_learn_known(ledger *book, uint32_t start, uint32_t stop)
{
    start = most(start, book->prefix);
    if (start >= stop)
        return;
    uint32_t known = 0, flying = 0;
    for (uint32_t sid = start; sid < stop; sid++) {
        known += book->state[sid] == SYMBOL_KNOWN;
        flying += book->state[sid] == SYMBOL_IN_FLIGHT;
    }
    uint32_t fresh = stop - start - known;
    if (fresh == 0)
        return;
    book->in_flight -= flying;
    book->known_lost -= fresh - flying;
    book->known += fresh;
    memset(book->state + start, SYMBOL_KNOWN, stop - start);
    forget_seen(book, start, stop);
    book->fated = most(book->fated, stop);
    if (book->heap_count > 64 + 4 * (size_t)book->known_lost)
        prune_lost(book);
    advance(book);
}

/* ---- coding sets ---- */

typedef struct {
    uint32_t first, last, count; /* of no meaning but count when empty */
} run;

static run unresolved_in(const ledger *book, uint32_t start, uint32_t stop)
{
    run found = {0, 0, 0};
    for (uint32_t sid = start; sid < stop; sid++) {
        if (book->state[sid] == SYMBOL_KNOWN)
            continue;
        if (found.count++ == 0)
            found.first = sid;
        found.last = sid;
    }
    return found;
}

/* The first unresolved symbol of [start, stop), or stop. */
static uint32_t first_unresolved(const ledger *book, uint32_t start, uint32_t stop)
{
    while (start < stop && book->state[start] == SYMBOL_KNOWN)
        start++;
    return start;
}

/* The part of the head whose turn it is. One with known losses keeps its turn until they should be solved. */
static run stretch(ledger *book, uint32_t border, uint32_t max_window, uint32_t reach)
{
    bool moved = book->stretch_turns == 0;
    uint32_t begin = most(book->prefix, moved ? book->stretch_stop : book->stretch_start);
    uint32_t end = least(border, begin + max_window);
    uint32_t first = first_unresolved(book, begin, end);
    if (first >= end) {
        moved = true;
        end = least(border, book->prefix + max_window);
        first = first_unresolved(book, book->prefix, end);
    }
    run head = unresolved_in(book, first, least(end, first + reach));
    book->stretch_start = head.first;
    book->stretch_stop = head.last + 1;
    if (moved) {
        uint32_t lost = 0;
        for (uint32_t sid = head.first; sid <= head.last; sid++)
            lost += book->state[sid] == SYMBOL_LOST;
        book->stretch_turns = 1 + TURNS_PER_LOSS * lost;
    }
    book->stretch_turns--;
    return head;
}

void ledger_sack_set(ledger *book, uint32_t max_window, uint32_t max_head_span, coding_set *set, uint8_t *head)
{
    uint32_t border = most(book->prefix, least(book->fated, book->next));
    uint32_t flying_tail = book->next - border;
    uint32_t heads = ledger_unresolved(book) - flying_tail;
    *set = (coding_set){border, 0, 0, least(flying_tail, max_window)};
    if (heads == 0)
        return;
    uint32_t reach = least(max_head_span, max_window);
    run found = unresolved_in(book, book->prefix, least(border, book->prefix + reach));
    if (found.count < heads)
        found = stretch(book, border, max_window, reach);
    set->first_sid = found.first;
    set->head_span = found.last + 1 - found.first;
    memset(head, 0, (set->head_span + 7) / 8);
    for (uint32_t i = 0; i < set->head_span; i++)
        if (book->state[found.first + i] != SYMBOL_KNOWN)
            head[i / 8] |= (uint8_t)(1u << i % 8);
    uint64_t limit = (uint64_t)found.first + max_window;
    if (limit <= border || flying_tail == 0) {
        set->tail_offset = set->tail_span = 0;
        return;
    }
    set->tail_offset = border - (found.last + 1);
    set->tail_span = limit - border < flying_tail ? (uint32_t)(limit - border) : flying_tail;
}

void ledger_full_set(const ledger *book, uint32_t max_window, coding_set *set)
{
    *set = (coding_set){book->prefix, 0, 0, least(book->next - book->prefix, max_window)};
}
