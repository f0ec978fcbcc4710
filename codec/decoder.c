/* See decoder.h for the state and its invariant (*). */
#include "decoder.h"

#include <stdlib.h>
#include <string.h>

#include "gf256.h"

/* ---- bitmaps -------------------------------------------------------------------------------------------------- */

static int bit(const uint64_t *map, size_t i)
{
    return (int)(map[i / 64] >> i % 64 & 1);
}

static void bit_set(uint64_t *map, size_t i)
{
    map[i / 64] |= UINT64_C(1) << i % 64;
}

static void bit_clear(uint64_t *map, size_t i)
{
    map[i / 64] &= ~(UINT64_C(1) << i % 64);
}

/* Lowest clear bit; the caller knows that there is one. */
static uint32_t lowest_clear(const uint64_t *map)
{
    uint32_t word = 0;
    while (map[word] == UINT64_MAX)
        word++;
    return 64 * word + (uint32_t)__builtin_ctzll(~map[word]);
}

/* Lower a high-water mark (a multiple of 64) to the last word in use. */
static size_t trimmed(const uint64_t *map, size_t width)
{
    while (width != 0 && map[width / 64 - 1] == 0)
        width -= 64;
    return width;
}

static size_t widened(size_t width, uint32_t index)
{
    size_t needed = gf256_round_up((size_t)index + 1);
    return needed > width ? needed : width;
}

/* ---- life ----------------------------------------------------------------------------------------------------- */

int decoder_init(decoder *d, const decoder_limits *limits, size_t symbol_size, uint32_t capacity)
{
    memset(d, 0, sizeof *d);
    const size_t unknown = limits->max_unknown;
    /* A row may go while the raw repairs its T named live on in other rows, so there can be more raw repairs than rows.
     * Twice the columns make room for at least max_unknown innovative repairs between two compactions. */
    const size_t raw = 2 * unknown + 16;
    const size_t operands = (PFEC_MAX_SPAN > raw ? PFEC_MAX_SPAN : raw) + 1;
    d->limits = *limits;
    d->symbol_size = symbol_size;
    d->capacity = capacity;
    d->max_raw = (uint32_t)raw;
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
    if (failed || !d->flags || !d->column_of || !d->known || !d->row || !d->pivot || !d->determined || !d->column_used
        || !d->sid_of || !d->row_at || !d->raw_used || !d->term_sid || !d->term_factor || !d->term_count
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

/* ---- what is known -------------------------------------------------------------------------------------------- */

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

/* ---- rows and columns ----------------------------------------------------------------------------------------- */

/* y += c * x over the columns and raw repairs in use; beyond the widths every live row is zero. */
static void row_axpy(decoder *d, uint8_t *y, const uint8_t *x, uint8_t c)
{
    gf256.axpy(y, x, c, d->column_width);
    gf256.axpy(y + d->t_offset, x + d->t_offset, c, d->raw_width);
    d->counters.row_operations++;
}

/* Mark row i if its pivot is its only column. Rows stay determined: no later operation touches such a row. */
static void note_determined(decoder *d, uint32_t i)
{
    if (d->determined[i])
        return;
    uint8_t *row = d->row[i];
    unsigned others = 0;
    row[d->pivot[i]] = 0;
    for (size_t at = 0; at < d->column_width && others == 0; at += 64) /* dense rows leave in the first block or two */
        for (size_t v = 0; v < 64; v++)
            others |= row[at + v];
    row[d->pivot[i]] = 1;
    d->determined[i] = others == 0;
    d->pending += others == 0;
}

/* Make column p the pivot of row i: scale it to 1 and clear it in every other row. */
static void set_pivot(decoder *d, uint32_t i, uint32_t p)
{
    uint8_t *row = d->row[i];
    if (row[p] != 1) {
        const uint8_t inverse = gf256_inv[row[p]];
        gf256.scal(row, inverse, d->column_width);
        gf256.scal(row + d->t_offset, inverse, d->raw_width);
    }
    for (uint32_t j = 0; j < d->rank; j++) {
        if (j != i && d->row[j][p] != 0) {
            row_axpy(d, d->row[j], row, d->row[j][p]);
            note_determined(d, j);
        }
    }
    d->pivot[i] = (uint16_t)p;
    d->row_at[p] = (uint16_t)(i + 1);
    d->determined[i] = 0;
    note_determined(d, i);
}

/* Column of the oldest SID in a row, or -1 if the row is zero. */
static int32_t oldest_column(const decoder *d, const uint8_t *row)
{
    int32_t oldest = -1;
    for (uint32_t c = 0; c < d->column_width; c++)
        if (row[c] != 0 && (oldest < 0 || d->sid_of[c] < d->sid_of[oldest]))
            oldest = (int32_t)c;
    return oldest;
}

static uint32_t column_new(decoder *d, uint32_t sid)
{
    const uint32_t c = lowest_clear(d->column_used);
    bit_set(d->column_used, c);
    d->columns++;
    d->column_width = widened(d->column_width, c);
    d->sid_of[c] = sid;
    d->row_at[c] = 0;
    d->column_of[sid] = (uint16_t)(c + 1);
    return c;
}

/* The column is zero in every row by now. */
static void column_release(decoder *d, uint32_t c)
{
    d->column_of[d->sid_of[c]] = 0;
    d->row_at[c] = 0;
    bit_clear(d->column_used, c);
    d->columns--;
    d->column_width = trimmed(d->column_used, d->column_width);
}

/* Drop row i; the last row takes its place. */
static void row_remove(decoder *d, uint32_t i)
{
    const uint32_t last = --d->rank;
    d->pending -= d->determined[i];
    d->row_at[d->pivot[i]] = 0;
    if (i != last) {
        uint8_t *row = d->row[i];
        d->row[i] = d->row[last];
        d->row[last] = row;
        d->pivot[i] = d->pivot[last];
        d->determined[i] = d->determined[last];
        d->row_at[d->pivot[i]] = (uint16_t)(i + 1);
    }
    d->determined[last] = 0;
}

/* ---- raw repairs ---------------------------------------------------------------------------------------------- */

static void raws_clear(decoder *d)
{
    memset(d->raw_used, 0, (d->max_raw + 63) / 64 * sizeof *d->raw_used);
    d->raws = 0;
    d->raw_width = 0;
}

/* Release the raw repairs that no row names any more. */
static void raws_collect(decoder *d)
{
    if (d->rank == 0) {
        raws_clear(d);
        return;
    }
    memset(d->named, 0, d->raw_width);
    for (uint32_t j = 0; j < d->rank; j++) {
        const uint8_t *t = d->row[j] + d->t_offset;
        for (size_t k = 0; k < d->raw_width; k++)
            d->named[k] |= t[k];
    }
    for (uint32_t k = 0; k < d->raw_width; k++) {
        if (bit(d->raw_used, k) && d->named[k] == 0) {
            bit_clear(d->raw_used, k);
            d->raws--;
        }
    }
    d->raw_width = trimmed(d->raw_used, d->raw_width);
}

/* Move the terms whose source came after the repair to the known side. Terms that were *decoded* stay: the row that
 * gave the symbol was the only one with its column, so they cancel in every other sum of (*). */
static void fold_late_terms(decoder *d, uint32_t k)
{
    if (d->folded_at[k] == d->late_sources)
        return;
    d->folded_at[k] = d->late_sources;
    uint32_t *sids = d->term_sid + (size_t)k * d->limits.max_unknown;
    uint8_t *factors = d->term_factor + (size_t)k * d->limits.max_unknown;
    uint8_t *payload = arena_slot(&d->raw, k);
    size_t n = 1, kept = 0;
    d->operands[0] = payload;
    d->factors[0] = 1;
    for (size_t i = 0; i < d->term_count[k]; i++) {
        if (d->flags[sids[i]] & SID_LATE) {
            d->operands[n] = decoder_symbol(d, sids[i]);
            d->factors[n++] = factors[i];
        } else {
            sids[kept] = sids[i];
            factors[kept++] = factors[i];
        }
    }
    d->term_count[k] = (uint16_t)kept;
    if (n > 1) {
        gf256.dot(payload, d->operands, d->factors, n, d->symbols.stride);
        d->counters.payload_macs += n - 1;
    }
}

/* y = T[i] * raw: the right side of (*) for row i. */
static void row_payload(decoder *d, uint32_t i, uint8_t *y)
{
    const uint8_t *t = d->row[i] + d->t_offset;
    size_t n = 0;
    for (uint32_t k = 0; k < d->raw_width; k++)
        if (t[k] != 0)
            fold_late_terms(d, k);
    for (uint32_t k = 0; k < d->raw_width; k++) {
        if (t[k] != 0) {
            d->operands[n] = arena_slot(&d->raw, k);
            d->factors[n++] = t[k];
        }
    }
    gf256.dot(y, d->operands, d->factors, n, d->symbols.stride);
    d->counters.payload_macs += n;
}

/* Replace the raw repairs by the payloads of the rows, T by the unit matrix. Needed only when rows went for so long
 * without the matrix ever becoming empty that their raw repairs fill every slot; max_unknown innovative repairs at least
 * lie between two calls, so the cost per repair is bounded by 2 * max_unknown + 16 multiply-adds. 0, or -1 without
 * memory and nothing changed. */
static int raws_compact(decoder *d)
{
    arena fresh;
    if (arena_init(&fresh, d->symbol_size, d->max_raw) != 0)
        return -1;
    for (uint32_t i = 0; i < d->rank; i++)
        row_payload(d, i, arena_slot(&fresh, i));
    arena_free(&d->raw);
    d->raw = fresh;
    const size_t old_width = d->raw_width;
    raws_clear(d);
    for (uint32_t i = 0; i < d->rank; i++) {
        uint32_t *sids = d->term_sid + (size_t)i * d->limits.max_unknown;
        uint8_t *factors = d->term_factor + (size_t)i * d->limits.max_unknown;
        size_t n = 0;
        for (uint32_t c = 0; c < d->column_width; c++) {
            if (d->row[i][c] != 0) {
                sids[n] = d->sid_of[c];
                factors[n++] = d->row[i][c];
            }
        }
        d->term_count[i] = (uint16_t)n;
        d->folded_at[i] = d->late_sources;
        memset(d->row[i] + d->t_offset, 0, old_width);
        d->row[i][d->t_offset + i] = 1;
        bit_set(d->raw_used, i);
        d->raws++;
        d->raw_width = widened(d->raw_width, i);
    }
    d->counters.compactions++;
    return 0;
}

static int raws_make_room(decoder *d)
{
    if (d->raws == d->max_raw)
        raws_collect(d);
    return d->raws == d->max_raw ? raws_compact(d) : 0;
}

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

/* ---- events --------------------------------------------------------------------------------------------------- */

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

/* Fold the known terms into the payload of raw repair k and note the others. */
static void raw_store(decoder *d, uint32_t k, const uint8_t *data, size_t terms)
{
    uint8_t *payload = arena_slot(&d->raw, k);
    uint32_t *sids = d->term_sid + (size_t)k * d->limits.max_unknown;
    uint8_t *factors = d->term_factor + (size_t)k * d->limits.max_unknown;
    size_t n = 1, unknown = 0;
    memcpy(payload, data, d->symbol_size);
    d->operands[0] = payload;
    d->factors[0] = 1;
    for (size_t i = 0; i < terms; i++) {
        if (d->flags[d->sids[i]] & SID_KNOWN) {
            d->operands[n] = decoder_symbol(d, d->sids[i]);
            d->factors[n++] = d->coefficients[i];
        } else {
            sids[unknown] = d->sids[i];
            factors[unknown++] = d->coefficients[i];
        }
    }
    d->term_count[k] = (uint16_t)unknown;
    d->folded_at[k] = d->late_sources;
    if (n > 1) {
        gf256.dot(payload, d->operands, d->factors, n, d->symbols.stride);
        d->counters.payload_macs += n - 1;
    }
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
        || raws_make_room(d) != 0) {
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
    set_pivot(d, d->rank, (uint32_t)pivot); /* a fresh pivot column is zero in all other rows */
    d->rank++;
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

size_t decoder_poll(decoder *d, const uint32_t *first, size_t n_first, size_t max_symbols, uint32_t *out)
{
    size_t n = 0;
    for (size_t i = 0; i < n_first && n < max_symbols && d->pending != 0; i++) {
        if (first[i] >= d->capacity || d->column_of[first[i]] == 0)
            continue;
        const uint32_t owner = d->row_at[d->column_of[first[i]] - 1];
        if (owner != 0 && d->determined[owner - 1]) {
            materialise(d, owner - 1);
            out[n++] = first[i];
        }
    }
    if (n < max_symbols && d->pending != 0) {
        size_t found = 0;
        for (uint32_t i = 0; i < d->rank; i++)
            if (d->determined[i])
                d->sids[found++] = d->sid_of[d->pivot[i]];
        qsort(d->sids, found, sizeof *d->sids, ascending);
        for (size_t i = 0; i < found && n < max_symbols; i++) {
            materialise(d, d->row_at[d->column_of[d->sids[i]] - 1] - 1u);
            out[n++] = d->sids[i];
        }
    }
    if (n != 0)
        raws_collect(d);
    return n;
}
