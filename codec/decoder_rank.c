/* See decoder_rank.h. All symbols share one slot of zeros, and payload operations cover no bytes: a stride of 0 says both. */
#include "decoder_rank.h"

#include <string.h>

#include "decoder_internal.h"

int rank_open(decoder *d, const decoder_limits *limits, uint32_t capacity)
{
    if (decoder_init(d, limits, 1, capacity) != 0)
        return -1;
    d->symbols.stride = d->raw.stride = 0;
    d->symbols.touched = d->raw.touched = SIZE_MAX;
    return 0;
}

void rank_close(decoder *d)
{
    d->symbols.stride = d->raw.stride = GF256_BLOCK; /* arenas are freed by it */
    decoder_free(d);
}

void rank_reset(decoder *d)
{
    const size_t seen = d->highest;
    memset(d->flags, 0, seen * sizeof *d->flags);
    memset(d->column_of, 0, seen * sizeof *d->column_of);
    memset(d->known, 0, (seen + 63) / 64 * sizeof *d->known);
    memset(d->column_used, 0, (d->limits.max_unknown + 63) / 64 * sizeof *d->column_used);
    memset(d->determined, 0, d->limits.max_unknown + 1);
    memset(&d->counters, 0, sizeof d->counters);
    d->known_count = d->prefix = d->highest = d->rank = d->pending = d->columns = 0;
    d->column_width = 0;
    d->late_sources = 0;
    raws_clear(d);
}

void rank_copy(decoder *to, const decoder *from)
{
    const size_t seen = to->highest > from->highest ? to->highest : from->highest;
    const size_t unknown = from->limits.max_unknown, words = (unknown + 63) / 64;
    memcpy(to->flags, from->flags, seen * sizeof *to->flags);
    memcpy(to->column_of, from->column_of, seen * sizeof *to->column_of);
    memcpy(to->known, from->known, (seen + 63) / 64 * sizeof *to->known);
    to->known_count = from->known_count;
    to->prefix = from->prefix;
    to->highest = from->highest;

    for (uint32_t i = 0; i < from->rank; i++)
        memcpy(to->row[i], from->row[i], from->matrix.stride);
    memcpy(to->pivot, from->pivot, (unknown + 1) * sizeof *to->pivot);
    memcpy(to->determined, from->determined, unknown + 1);
    memcpy(to->rebased, from->rebased, unknown + 1);
    to->rank = from->rank;
    to->pending = from->pending;

    memcpy(to->column_used, from->column_used, words * sizeof *to->column_used);
    memcpy(to->sid_of, from->sid_of, unknown * sizeof *to->sid_of);
    memcpy(to->row_at, from->row_at, unknown * sizeof *to->row_at);
    to->columns = from->columns;
    to->column_width = from->column_width;
    memcpy(to->raw_used, from->raw_used, (from->max_raw + 63) / 64 * sizeof *to->raw_used);
    to->raws = from->raws;
    to->sweeping = from->sweeping;
    to->raw_width = from->raw_width;
    to->late_sources = from->late_sources;
    to->counters = from->counters;
    for (size_t k = 0; k < from->raw_width; k++) {
        const size_t first = k * unknown;
        if (!bit(from->raw_used, k))
            continue;
        memcpy(to->term_sid + first, from->term_sid + first, from->term_count[k] * sizeof *to->term_sid);
        memcpy(to->term_factor + first, from->term_factor + first, from->term_count[k]);
        to->term_count[k] = from->term_count[k];
        to->folded_at[k] = from->folded_at[k];
    }
}
