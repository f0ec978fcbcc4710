/* Raw repairs: the payloads that rows refer to through T, and what of them is folded when. */
#include "decoder_internal.h"

#include <string.h>

void raws_clear(decoder *d)
{
    memset(d->raw_used, 0, (d->max_raw + 63) / 64 * sizeof *d->raw_used);
    d->sweeping = 0;
    d->raws = 0;
    d->raw_width = 0;
}

void raws_collect(decoder *d)
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

void row_payload(decoder *d, uint32_t i, uint8_t *y)
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

void raw_store(decoder *d, uint32_t k, const uint8_t *data, size_t terms)
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

void row_rebase(decoder *d, uint32_t i, uint32_t k)
{
    uint32_t *sids = d->term_sid + (size_t)k * d->limits.max_unknown;
    uint8_t *factors = d->term_factor + (size_t)k * d->limits.max_unknown;
    uint8_t *row = d->row[i];
    size_t n = 0;
    row_payload(d, i, arena_slot(&d->raw, k));
    for (uint32_t c = 0; c < d->column_width; c++) {
        if (row[c] != 0) {
            sids[n] = d->sid_of[c];
            factors[n++] = row[c];
        }
    }
    d->term_count[k] = (uint16_t)n;
    d->folded_at[k] = d->late_sources;
    memset(row + d->t_offset, 0, d->raw_width);
    row[d->t_offset + k] = 1;
    d->rebased[i] = 1;
}

int row_rebase_anew(decoder *d, uint32_t i)
{
    if (d->raws == d->max_raw)
        return 0;
    const uint32_t k = lowest_clear(d->raw_used);
    bit_set(d->raw_used, k);
    d->raws++;
    d->raw_width = widened(d->raw_width, k);
    row_rebase(d, i, k);
    return 1;
}

/* A row may go while raw repairs that its T named live on in the T of others, so raw repairs can outnumber the rows and
 * in the end fill all slots. A sweep then lets every row rest on one slot of its own, a few rows at a time, after which
 * the old raw repairs are free. It ends, because no rebased row ever names an old raw repair again: whatever row is
 * added to others while a sweep runs is rebased first.
 *
 * Slots suffice: a sweep begins with at most sweep_at + 1 in use. Every row that lives then takes one slot once, that is
 * max_unknown at most; every innovative repair meanwhile takes one and rebases SWEEP_ROWS rows, so there are at most
 * max_unknown / SWEEP_ROWS of them (see decoder_init). */
void raws_sweep(decoder *d)
{
    if (!d->sweeping) {
        if (d->raws <= d->sweep_at)
            return;
        raws_collect(d);
        if (d->raws <= d->sweep_at)
            return;
        d->sweeping = 1;
        memset(d->rebased, 0, d->rank);
    }
    for (int n = 0; n < SWEEP_ROWS; n++) {
        const uint8_t *next = memchr(d->rebased, 0, d->rank);
        if (next == NULL) {
            d->sweeping = 0;
            d->counters.compactions++;
            raws_collect(d);
            return;
        }
        if (!row_rebase_anew(d, (uint32_t)(next - d->rebased))) {
            d->sweeping = 0;
            return;
        }
    }
}
