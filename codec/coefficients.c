/* SplitMix64, Floyd's sample and the expansion of a repair header (docs/wire.md §5). */
#include "coefficients.h"

#include <string.h>

#define VARINT_MAX ((UINT64_C(1) << 62) - 1)

const char *repair_header_check(const repair_header *h, uint64_t max_degree, uint64_t max_span, uint64_t end)
{
    if (h->transfer_id > VARINT_MAX)
        return "transfer_id is above 2^62 - 1";
    if (h->repair_number > UINT32_MAX)
        return "repair_number does not fit 32 bits";
    if (h->degree == 0)
        return "degree is 0";
    if (h->degree > max_degree || h->degree > VARINT_MAX)
        return "degree is above the limit";
    if (h->head_span > max_span || h->tail_offset > max_span || h->tail_span > max_span
        || h->head_span + h->tail_offset + h->tail_span > max_span)
        return "span is above the limit";
    if (h->head_span + h->tail_span == 0)
        return "the coding set is empty";
    if (h->tail_offset != 0 && (h->head_span == 0 || h->tail_span == 0))
        return "tail_offset without a head and a tail";
    if (h->head_bytes != (h->head_span + 7) / 8)
        return "the head bitmap has the wrong length";
    if (h->head_span != 0) {
        unsigned last = (unsigned)((h->head_span - 1) & 7);
        unsigned top = h->head[h->head_bytes - 1];
        if ((h->head[0] & 1u) == 0 || top >> last != 1u)
            return "the head bitmap is not canonical";
    }
    if (h->first_sid > end || h->first_sid + h->head_span + h->tail_offset + h->tail_span > end)
        return "the coding set reaches beyond the last legal SID";
    return NULL;
}

static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}

/* Uniform in 0..n-1 up to a bias below n / 2^32. */
static uint32_t draw(uint64_t *state, uint32_t n)
{
    return (uint32_t)((next(state) >> 32) * n >> 32);
}

/* Floyd: k distinct positions out of m, as a bitmap. */
static void pick(uint64_t *state, uint64_t *chosen, uint32_t m, uint32_t k)
{
    memset(chosen, 0, (m + 63) / 64 * sizeof *chosen);
    for (uint32_t j = m - k; j < m; j++) {
        uint32_t t = draw(state, j + 1);
        const uint32_t taken = 0u - (uint32_t)(chosen[t / 64] >> t % 64 & 1); /* no branch: a coin toss in dense sets */
        t = (t & ~taken) | (j & taken);
        chosen[t / 64] |= UINT64_C(1) << t % 64;
    }
}

size_t repair_expand(const repair_header *h, uint32_t *sids, uint8_t *coefficients)
{
    uint64_t chosen[PFEC_MAX_SPAN / 64];
    uint64_t state = (h->transfer_id & UINT32_MAX) << 32 | h->repair_number;
    uint32_t head_size = 0;
    for (size_t j = 0; j < h->head_bytes; j++)
        head_size += (uint32_t)__builtin_popcount(h->head[j]);

    size_t n = 0;
    const int sample_head = head_size >= h->degree;
    if (sample_head)
        pick(&state, chosen, head_size, (uint32_t)h->degree);
    uint32_t position = 0;
    for (size_t j = 0; j < h->head_bytes; j++) {
        for (uint32_t bits = h->head[j]; bits != 0; bits &= bits - 1, position++) {
            if (sample_head && (chosen[position / 64] >> position % 64 & 1) == 0)
                continue;
            sids[n++] = (uint32_t)(h->first_sid + 8 * j + (uint32_t)__builtin_ctz(bits));
        }
    }
    if (!sample_head && h->tail_span != 0) {
        const uint32_t tail = (uint32_t)h->tail_span;
        const uint64_t wanted = h->degree - head_size;
        const uint32_t first = (uint32_t)(h->first_sid + h->head_span + h->tail_offset);
        pick(&state, chosen, tail, wanted < tail ? (uint32_t)wanted : tail);
        for (uint32_t word = 0; word < (tail + 63) / 64; word++)
            for (uint64_t bits = chosen[word]; bits != 0; bits &= bits - 1)
                sids[n++] = first + 64 * word + (uint32_t)__builtin_ctzll(bits);
    }
    for (size_t i = 0; i < n; i++)
        coefficients[i] = (uint8_t)(1 + draw(&state, 255));
    return n;
}
