/* From the header of a REPAIR frame to the list of (SID, coefficient): docs/wire.md §5, normative.
 *
 * Coefficients never travel. Both ends run SplitMix64 from the Transfer ID and the Repair Number, choose `degree`
 * members of the coding set with Floyd's algorithm, then draw one nonzero coefficient each in ascending SID order. */
#ifndef QUIC_PFEC_COEFFICIENTS_H
#define QUIC_PFEC_COEFFICIENTS_H

#include <stddef.h>
#include <stdint.h>

#define PFEC_MAX_SPAN 16384u /* SIDs: the hard cap on Max Window (docs/wire.md §2), bounds every scratch buffer */
#define PFEC_MAX_SID (1u << 30) /* exclusive: SIDs travel in the 4-byte varint form */

/* Every field as the peer sent it: nothing is trusted before repair_header_check(). */
typedef struct {
    uint64_t transfer_id, repair_number, first_sid, degree, head_span, tail_offset, tail_span;
    const uint8_t *head; /* bitmap, bit i of byte j is SID first_sid + 8j + i */
    size_t head_bytes;
} repair_header;

/* NULL if the header is canonical, its degree and span are within the limits and every SID it names is < end;
 * otherwise the reason. Requires max_span <= PFEC_MAX_SPAN. Works in 64 bits and loops over nothing. */
const char *repair_header_check(const repair_header *header, uint64_t max_degree, uint64_t max_span, uint64_t end);

/* One past the last SID of the coding set of a checked header. */
static inline uint32_t repair_header_end(const repair_header *h)
{
    return (uint32_t)(h->first_sid + h->head_span + h->tail_offset + h->tail_span);
}

/* Expand a checked header; returns the number of terms, at most min(degree, span). */
size_t repair_expand(const repair_header *header, uint32_t *sids, uint8_t *coefficients);

#endif
