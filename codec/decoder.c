/* See decoder.h for the state and its invariant (*). */
#include <stdlib.h>
#include <string.h>

#include "decoder_internal.h"

/* ---- life ------------------------------------------------------------------------------------------------------ */

int decoder_init(decoder *d, const decoder_limits *limits, size_t symbol_size, uint32_t capacity)
{
    memset(d, 0, sizeof *d);
    const size_t unknown = limits->max_unknown;
    /* Room for a sweep (see raws_sweep): max_unknown rebased rows and the repairs that come while it runs. It leaves that
     * many in use at most; max_unknown / 2 innovative repairs at least lie between two sweeps. */
    const size_t raw = 3 * unknown + 16;
    const size_t operands = (PFEC_MAX_SPAN > raw ? PFEC_MAX_SPAN : raw) + 1;
    d->limits = *limits;
    d->symbol_size = symbol_size;
    d->capacity = capacity;
    d->max_raw = (uint32_t)raw;
    d->sweep_at = (uint32_t)(raw - unknown - unknown / SWEEP_ROWS - 8);
    d->t_offset = gf256_round_up(unknown);

    int failed = arena_init(&d->symbols, symbol_size, capacity);
    failed |= arena_init(&d->matrix, d->t_offset + gf256_round_up(raw), unknown + 1);
    failed |= arena_init(&d->raw, symbol_size, raw);
    d->flags = calloc(capacity, sizeof *d->flags);
    d->column_of = calloc(capacity, sizeof *d->column_of);
    d->known = calloc(((size_t)capacity + 63) / 64, sizeof *d->known);
    d->row = calloc(unknown + 1, sizeof *d->row);
    d->pivot = calloc(unknown + 1, sizeof *d->pivot);
    d->determined = calloc(unknown + 1, sizeof *d->determined);
    d->rebased = calloc(unknown + 1, sizeof *d->rebased);
    d->column_used = calloc((unknown + 63) / 64, sizeof *d->column_used);
    d->sid_of = calloc(unknown, sizeof *d->sid_of);
    d->row_at = calloc(unknown, sizeof *d->row_at);
    d->raw_used = calloc((raw + 63) / 64, sizeof *d->raw_used);
    d->term_sid = calloc(raw * unknown, sizeof *d->term_sid);
    d->term_factor = calloc(raw * unknown, sizeof *d->term_factor);
    d->term_count = calloc(raw, sizeof *d->term_count);
    d->folded_at = calloc(raw, sizeof *d->folded_at);
    d->sids = calloc(operands, sizeof *d->sids);
    d->coefficients = calloc(operands, sizeof *d->coefficients);
    d->operands = calloc(operands, sizeof *d->operands);
    d->factors = calloc(operands, sizeof *d->factors);
    d->named = calloc(gf256_round_up(raw), sizeof *d->named);
    if (failed || !d->flags || !d->column_of || !d->known || !d->row || !d->pivot || !d->determined || !d->rebased
        || !d->column_used || !d->sid_of || !d->row_at || !d->raw_used || !d->term_sid || !d->term_factor || !d->term_count
        || !d->folded_at || !d->sids || !d->coefficients || !d->operands || !d->factors || !d->named) {
        decoder_free(d);
        return -1;
    }
    for (size_t i = 0; i <= unknown; i++)
        d->row[i] = arena_slot(&d->matrix, i);
    return 0;
}

void decoder_free(decoder *d)
{
    arena_free(&d->symbols);
    arena_free(&d->matrix);
    arena_free(&d->raw);
    free(d->flags);
    free(d->column_of);
    free(d->known);
    free(d->row);
    free(d->pivot);
    free(d->determined);
    free(d->rebased);
    free(d->column_used);
    free(d->sid_of);
    free(d->row_at);
    free(d->raw_used);
    free(d->term_sid);
    free(d->term_factor);
    free(d->term_count);
    free(d->folded_at);
    free(d->sids);
    free(d->coefficients);
    free(d->operands);
    free(d->factors);
    free(d->named);
    memset(d, 0, sizeof *d);
}

/* Enlarge a zero-filled array in place. 0, or -1 with *array still valid. */
static int enlarge(void **array, size_t old_bytes, size_t bytes)
{
    uint8_t *larger = realloc(*array, bytes);
    if (larger == NULL)
        return -1;
    memset(larger + old_bytes, 0, bytes - old_bytes);
    *array = larger;
    return 0;
}

int decoder_grow(decoder *d, uint32_t capacity)
{
    /* A failure half-way leaves some arrays larger than d->capacity says, which harms nothing. */
    const size_t old = d->capacity, words = ((size_t)capacity + 63) / 64, old_words = (old + 63) / 64;
    void *flags = d->flags, *column_of = d->column_of, *known = d->known;
    int failed = enlarge(&flags, old * sizeof *d->flags, capacity * sizeof *d->flags);
    d->flags = flags;
    failed |= enlarge(&column_of, old * sizeof *d->column_of, capacity * sizeof *d->column_of);
    d->column_of = column_of;
    failed |= enlarge(&known, old_words * sizeof *d->known, words * sizeof *d->known);
    d->known = known;
    if (failed || arena_grow(&d->symbols, capacity) != 0)
        return -1;
    d->capacity = capacity;
    return 0;
}

/* ---- what is known --------------------------------------------------------------------------------------------- */

static void mark_known(decoder *d, uint32_t sid, uint8_t flags)
{
    d->flags[sid] |= (uint8_t)(SID_KNOWN | flags);
    bit_set(d->known, sid);
    d->known_count++;
    if (d->highest <= sid)
        d->highest = sid + 1;
    while (d->prefix < d->capacity) {
        const uint64_t missing = ~d->known[d->prefix / 64] >> d->prefix % 64;
        if (missing != 0) {
            d->prefix += (uint32_t)__builtin_ctzll(missing);
            break;
        }
        d->prefix += 64 - d->prefix % 64;
    }
}

/* First index in [from, end) whose known bit, XORed with `flip`, is 1; end if there is none. */
static uint32_t find_bit(const uint64_t *map, uint32_t from, uint32_t end, uint64_t flip)
{
    while (from < end) {
        const uint64_t word = (map[from / 64] ^ flip) >> from % 64;
        if (word != 0) {
            from += (uint32_t)__builtin_ctzll(word);
            return from < end ? from : end;
        }
        from += 64 - from % 64;
    }
    return end;
}

int decoder_known_run(const decoder *d, uint32_t from, uint32_t *start, uint32_t *stop)
{
    *start = find_bit(d->known, from, d->highest, 0);
    *stop = find_bit(d->known, *start, d->highest, UINT64_MAX);
    return *start < *stop;
}

/* ---- events ---------------------------------------------------------------------------------------------------- */

/* Forget every repair held. */
static void matrix_discard(decoder *d)
{
    d->counters.discarded += d->rank;
    for (uint32_t c = 0; c < d->column_width; c++)
        if (bit(d->column_used, c))
            column_release(d, c);
    memset(d->determined, 0, d->rank);
    d->rank = d->pending = 0;
    raws_clear(d);
}

int decoder_source(decoder *d, uint32_t sid, const uint8_t *data)
{
    uint8_t *slot = arena_slot(&d->symbols, sid);
    if (d->flags[sid] & SID_KNOWN) {
        if (memcmp(slot, data, d->symbol_size) == 0) {
            d->flags[sid] |= SID_RECEIVED;
            return SOURCE_DUPLICATE;
        }
        if (d->flags[sid] & SID_RECEIVED)
            return SOURCE_CONFLICT;
        /* Some repair was wrong, and every row may rest on it or on the symbol it gave: drop them all. What was decoded
         * from them before stays and is for the digest of its unit to judge. */
        memcpy(slot, data, d->symbol_size);
        d->flags[sid] |= SID_RECEIVED;
        matrix_discard(d);
        return SOURCE_REPLACED;
    }
    arena_ahead(&d->symbols, sid);
    memcpy(slot, data, d->symbol_size);
    mark_known(d, sid, SID_RECEIVED);
    if (d->column_of[sid] == 0)
        return SOURCE_NEW;

    const uint32_t column = d->column_of[sid] - 1u;
    const uint32_t owner = d->row_at[column]; /* row + 1 */
    if (owner != 0 && d->determined[owner - 1]) {
        /* The only row with this column: nothing else refers to the symbol (see fold_late_terms). */
        row_remove(d, owner - 1);
        column_release(d, column);
        if (d->rank == 0)
            raws_clear(d);
        return SOURCE_NEW;
    }
    d->flags[sid] |= SID_LATE;
    d->late_sources++;
    d->row_at[column] = 0;
    for (uint32_t j = 0; j < d->rank; j++) {
        if (d->row[j][column] != 0) {
            d->row[j][column] = 0;
            if (j + 1 != owner)
                note_determined(d, j);
        }
    }
    if (owner != 0) /* not determined, so another column is left; pivots of other rows are zero in it */
        set_pivot(d, owner - 1, (uint32_t)oldest_column(d, d->row[owner - 1]));
    column_release(d, column);
    return SOURCE_NEW;
}

/* A repair of one received symbol says what that symbol is: comparing costs no more than looking at it. */
static int one_term_contradicts(const decoder *d, const uint8_t *data)
{
    const uint32_t sid = d->sids[0];
    const uint8_t *product = gf256_mul[d->coefficients[0]], *symbol = decoder_symbol(d, sid);
    if ((d->flags[sid] & SID_RECEIVED) == 0)
        return 0;
    for (size_t i = 0; i < d->symbol_size; i++)
        if (product[symbol[i]] != data[i])
            return 1;
    return 0;
}

int decoder_repair(decoder *d, const repair_header *header, const uint8_t *data)
{
    const size_t terms = repair_expand(header, d->sids, d->coefficients);
    const uint32_t end = repair_header_end(header);
    if (d->highest < end)
        d->highest = end;

    uint32_t unknown = 0, fresh = 0, operations = 0;
    for (size_t i = 0; i < terms; i++) {
        const uint32_t sid = d->sids[i];
        if (d->flags[sid] & SID_KNOWN)
            continue;
        unknown++;
        if (d->column_of[sid] == 0)
            fresh++;
        else if (d->row_at[d->column_of[sid] - 1] != 0)
            operations++; /* pivot rows are zero in each other's pivots: one reduction for each pivot present */
    }
    if (unknown == 0) {
        if (terms == 1 && one_term_contradicts(d, data)) {
            d->counters.contradictions++;
            return REPAIR_CONTRADICTS;
        }
        d->counters.redundant++;
        return REPAIR_REDUNDANT;
    }
    if (fresh > d->limits.max_unknown - d->columns || operations > d->limits.row_ops_per_repair
        || d->raws == d->max_raw) {
        d->counters.rejected++;
        return REPAIR_TOO_COSTLY;
    }

    /* Reduce in the scratch row. Nothing else changes before the verdict: with a fresh column the row is innovative and
     * needs no clearing, without one there is no column to take back. */
    uint8_t *row = d->row[d->rank];
    memset(row, 0, d->matrix.stride);
    const uint32_t k = lowest_clear(d->raw_used);
    const size_t old_raw_width = d->raw_width;
    d->raw_width = widened(d->raw_width, k);
    int32_t pivot = -1;
    for (size_t i = 0; i < terms; i++) {
        const uint32_t sid = d->sids[i];
        if (d->flags[sid] & SID_KNOWN)
            continue;
        uint32_t column = d->column_of[sid] - 1u;
        if (d->column_of[sid] == 0) {
            column = column_new(d, sid);
            if (pivot < 0)
                pivot = (int32_t)column; /* SIDs ascend: the oldest fresh one */
        }
        row[column] = d->coefficients[i];
    }
    row[d->t_offset + k] = 1;
    for (size_t i = 0; i < terms; i++) {
        const uint32_t column = d->column_of[d->sids[i]]; /* 0 for known SIDs */
        const uint32_t owner = column == 0 ? 0 : d->row_at[column - 1];
        if (owner != 0)
            row_axpy(d, row, d->row[owner - 1], row[column - 1]);
    }
    if (pivot < 0) {
        pivot = oldest_column(d, row);
        if (pivot < 0) {
            d->raw_width = old_raw_width;
            d->counters.redundant++;
            return REPAIR_REDUNDANT;
        }
        for (uint32_t j = 0; j < d->rank; j++)
            operations += d->row[j][pivot] != 0;
        if (operations > d->limits.row_ops_per_repair) {
            d->raw_width = old_raw_width;
            d->counters.rejected++;
            return REPAIR_TOO_COSTLY;
        }
    }
    bit_set(d->raw_used, k);
    d->raws++;
    raw_store(d, k, data, terms);
    if (d->sweeping)
        row_rebase(d, d->rank, k);
    set_pivot(d, d->rank, (uint32_t)pivot); /* a fresh pivot column is zero in all other rows */
    d->rank++;
    raws_sweep(d);
    return REPAIR_INNOVATIVE;
}

/* Compute the symbol of determined row i and take the row out. */
static void materialise(decoder *d, uint32_t i)
{
    const uint32_t column = d->pivot[i], sid = d->sid_of[column];
    row_payload(d, i, arena_slot(&d->symbols, sid));
    row_remove(d, i);
    column_release(d, column);
    mark_known(d, sid, 0);
    d->counters.recovered++;
}

static int ascending(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

size_t decoder_poll(decoder *d, const uint32_t *first, size_t n_first, size_t max_symbols, uint64_t max_macs,
                    uint32_t *out)
{
    size_t n = 0;
    const uint64_t stop = max_macs > UINT64_MAX - d->counters.payload_macs ? UINT64_MAX : d->counters.payload_macs + max_macs;
    for (size_t i = 0; i < n_first && n < max_symbols && d->pending != 0 && d->counters.payload_macs < stop; i++) {
        if (first[i] >= d->capacity || d->column_of[first[i]] == 0)
            continue;
        const uint32_t owner = d->row_at[d->column_of[first[i]] - 1];
        if (owner != 0 && d->determined[owner - 1]) {
            materialise(d, owner - 1);
            out[n++] = first[i];
        }
    }
    if (n < max_symbols && d->pending != 0 && d->counters.payload_macs < stop) {
        size_t found = 0;
        for (uint32_t i = 0; i < d->rank; i++)
            if (d->determined[i])
                d->sids[found++] = d->sid_of[d->pivot[i]];
        qsort(d->sids, found, sizeof *d->sids, ascending);
        for (size_t i = 0; i < found && n < max_symbols && d->counters.payload_macs < stop; i++) {
            materialise(d, d->row_at[d->column_of[d->sids[i]] - 1] - 1u);
            out[n++] = d->sids[i];
        }
    }
    if (n != 0)
        raws_collect(d);
    return n;
}
