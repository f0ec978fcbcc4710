/* A block of equal slots, 64-byte aligned, zero at first and backed by memory only where it was touched.
 *
 * Sender and receiver hold a whole transfer in one arena each: any known loss may be resent until the end and an
 * innovative repair folds in symbols known long ago, so no slot is recycled before the transfer ends. */
#ifndef QUIC_PFEC_ARENA_H
#define QUIC_PFEC_ARENA_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint8_t *base;  /* NULL: not initialised */
    size_t stride;  /* bytes from slot to slot, the slot size rounded up to GF256_BLOCK */
    size_t slots;
    void *memory;   /* what the platform gave */
    size_t touched; /* slots below are backed by memory, as far as arena_ahead() knows */
} arena;

/* 0, or -1 if the size overflows or there is no memory. */
int arena_init(arena *a, size_t slot_bytes, size_t slots);
/* Enlarge to `slots` >= a->slots. Contents stay, addresses may change. 0, or -1 with nothing changed. */
int arena_grow(arena *a, size_t slots);
void arena_free(arena *a);

/* Slot `index` is about to be written for the first time: back it and the next few with memory in one go. A page fault for
 * every third slot costs more than all else that happens to a symbol. Slots far ahead of the others are left alone. */
void arena_back(arena *a, size_t index);

/* Slots [first, first + count) are about to be written: back all of them, by large pages where the system grants them. One
 * large page takes some 100 us: for preparation, not for the path of a packet. */
void arena_back_run(arena *a, size_t first, size_t count);

static inline void arena_ahead(arena *a, size_t index)
{
    if (index >= a->touched)
        arena_back(a, index);
}

static inline uint8_t *arena_slot(const arena *a, size_t index)
{
    return a->base + index * a->stride;
}

#endif
