/* Rows and columns: exact elimination on coefficients. No payload is touched here. */
#include "decoder_internal.h"

void row_axpy(decoder *d, uint8_t *y, const uint8_t *x, uint8_t c)
{
    gf256.axpy(y, x, c, d->column_width);
    gf256.axpy(y + d->t_offset, x + d->t_offset, c, d->raw_width);
    d->counters.row_operations++;
}

void note_determined(decoder *d, uint32_t i)
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

void set_pivot(decoder *d, uint32_t i, uint32_t p)
{
    uint8_t *row = d->row[i];
    /* Only a rebased row may enter others while a sweep runs (see raws_sweep). Without a slot the sweep is off. */
    if (d->sweeping && !d->rebased[i] && !row_rebase_anew(d, i))
        d->sweeping = 0;
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

int32_t oldest_column(const decoder *d, const uint8_t *row)
{
    int32_t oldest = -1;
    for (uint32_t c = 0; c < d->column_width; c++)
        if (row[c] != 0 && (oldest < 0 || d->sid_of[c] < d->sid_of[oldest]))
            oldest = (int32_t)c;
    return oldest;
}

uint32_t column_new(decoder *d, uint32_t sid)
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

void column_release(decoder *d, uint32_t c)
{
    d->column_of[d->sid_of[c]] = 0;
    d->row_at[c] = 0;
    bit_clear(d->column_used, c);
    d->columns--;
    d->column_width = trimmed(d->column_used, d->column_width);
}

void row_remove(decoder *d, uint32_t i)
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
        d->rebased[i] = d->rebased[last];
        d->row_at[d->pivot[i]] = (uint16_t)(i + 1);
    }
    d->determined[last] = 0;
}
