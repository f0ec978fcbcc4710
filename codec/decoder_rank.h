/* A decoder of symbols without bytes: what is known when, and nothing else. For simulations, which run thousands of
 * transfers side by side and copy them half-way; the events are those of decoder.h. */
#ifndef QUIC_PFEC_DECODER_RANK_H
#define QUIC_PFEC_DECODER_RANK_H

#include "decoder.h"

/* In place of decoder_init() and decoder_free(); decoder_grow() is not for it. `data` of its events is one zero byte. */
int rank_open(decoder *d, const decoder_limits *limits, uint32_t capacity);
void rank_close(decoder *d);
/* As it was opened. */
void rank_reset(decoder *d);
/* `to` becomes what `from` is. Both were opened with the same limits and capacity. */
void rank_copy(decoder *to, const decoder *from);

#endif
