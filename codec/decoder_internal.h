/* What the three parts of the decoder share: decoder.c (events), decoder_rows.c (elimination on coefficients) and
 * decoder_raws.c (payloads of the repairs held). State and invariant (*): decoder.h. */
#ifndef QUIC_PFEC_DECODER_INTERNAL_H
#define QUIC_PFEC_DECODER_INTERNAL_H

#include "decoder.h"
#include "gf256.h"

enum { SWEEP_ROWS = 4 }; /* rows rebased after each innovative repair while a sweep runs */

/* ---- bitmaps -------------------------------------------------------------------------------------------------- */

static inline int bit(const uint64_t *map, size_t i)
{
    return (int)(map[i / 64] >> i % 64 & 1);
}

static inline void bit_set(uint64_t *map, size_t i)
{
    map[i / 64] |= UINT64_C(1) << i % 64;
}

static inline void bit_clear(uint64_t *map, size_t i)
{
    map[i / 64] &= ~(UINT64_C(1) << i % 64);
}

/* Lowest clear bit; the caller knows that there is one. */
static inline uint32_t lowest_clear(const uint64_t *map)
{
    uint32_t word = 0;
    while (map[word] == UINT64_MAX)
        word++;
    return 64 * word + (uint32_t)__builtin_ctzll(~map[word]);
}

/* Lower a high-water mark (a multiple of 64) to the last word in use. */
static inline size_t trimmed(const uint64_t *map, size_t width)
{
    while (width != 0 && map[width / 64 - 1] == 0)
        width -= 64;
    return width;
}

static inline size_t widened(size_t width, uint32_t index)
{
    size_t needed = gf256_round_up((size_t)index + 1);
    return needed > width ? needed : width;
}

/* ---- decoder_rows.c ------------------------------------------------------------------------------------------- */

/* y += c * x over the columns and raw repairs in use; beyond the widths every live row is zero. */
void row_axpy(decoder *d, uint8_t *y, const uint8_t *x, uint8_t c);
/* Mark row i if its pivot is its only column. Rows stay determined: no later operation touches such a row. */
void note_determined(decoder *d, uint32_t i);
/* Make column p the pivot of row i: scale it to 1 and clear it in every other row. */
void set_pivot(decoder *d, uint32_t i, uint32_t p);
/* Column of the oldest SID in a row, or -1 if the row is zero. */
int32_t oldest_column(const decoder *d, const uint8_t *row);
uint32_t column_new(decoder *d, uint32_t sid);
/* The column is zero in every row by now. */
void column_release(decoder *d, uint32_t c);
/* Drop row i; the last row takes its place. */
void row_remove(decoder *d, uint32_t i);

/* ---- decoder_raws.c ------------------------------------------------------------------------------------------- */

void raws_clear(decoder *d);
/* Release the raw repairs that no row names any more. */
void raws_collect(decoder *d);
/* y = T[i] * raw: the right side of (*) for row i. y may be a slot that T[i] names. */
void row_payload(decoder *d, uint32_t i, uint8_t *y);
/* Store a repair in slot k: fold the known ones of d->sids[0..terms-1] into the payload and note the others. */
void raw_store(decoder *d, uint32_t k, const uint8_t *data, size_t terms);
/* Let row i rest on slot k alone. No other row names slot k, which is in use; T[i] may. */
void row_rebase(decoder *d, uint32_t i, uint32_t k);
/* The same with a free slot; 0 if there is none, and nothing changed. */
int row_rebase_anew(decoder *d, uint32_t i);
/* After an innovative repair: start a sweep if slots run short, go on with one that runs. */
void raws_sweep(decoder *d);

#endif
