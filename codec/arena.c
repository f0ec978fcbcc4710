/* Arenas by anonymous mapping on Linux (growing moves page-table entries, not bytes), by calloc elsewhere. */
#define _GNU_SOURCE
#include "arena.h"

#include <stdlib.h>
#include <string.h>

#include "gf256.h"

#ifdef __linux__

#include <sys/mman.h>

static void *memory_new(size_t bytes)
{
    /* No reservation: most of a hand-off cut by its deadline is never touched. */
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static void *memory_grow(void *memory, size_t old_bytes, size_t bytes)
{
    void *moved = mremap(memory, old_bytes, bytes, MREMAP_MAYMOVE);
    return moved == MAP_FAILED ? NULL : moved;
}

static void memory_free(void *memory, size_t bytes)
{
    munmap(memory, bytes);
}

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; older kernels refuse it, and pages come by faults as ever */
#endif

static void memory_back(uint8_t *start, uint8_t *end)
{
    const uintptr_t page = 4096; /* a larger page makes the call fail, which is harmless */
    start = (uint8_t *)((uintptr_t)start & ~(page - 1));
    (void)madvise(start, (size_t)(end - start), MADV_POPULATE_WRITE);
}

static void memory_large(uint8_t *start, uint8_t *end)
{
    const uintptr_t page = 4096;
    start = (uint8_t *)((uintptr_t)start & ~(page - 1));
    (void)madvise(start, (size_t)(end - start), MADV_HUGEPAGE); /* refused where there are none, which is harmless */
}

#else

static void *memory_new(size_t bytes)
{
    return bytes > SIZE_MAX - GF256_BLOCK ? NULL : calloc(1, bytes + GF256_BLOCK);
}

static uint8_t *aligned(void *memory);

static void *memory_grow(void *memory, size_t old_bytes, size_t bytes)
{
    void *larger = memory_new(bytes);
    if (larger != NULL) {
        memcpy(aligned(larger), aligned(memory), old_bytes);
        free(memory);
    }
    return larger;
}

static void memory_free(void *memory, size_t bytes)
{
    (void)bytes;
    free(memory);
}

static void memory_back(uint8_t *start, uint8_t *end)
{
    (void)start;
    (void)end;
}

static void memory_large(uint8_t *start, uint8_t *end)
{
    (void)start;
    (void)end;
}

#endif

static uint8_t *aligned(void *memory)
{
    return (uint8_t *)memory + (gf256_round_up((uintptr_t)memory) - (uintptr_t)memory);
}

int arena_init(arena *a, size_t slot_bytes, size_t slots)
{
    memset(a, 0, sizeof *a);
    size_t stride = gf256_round_up(slot_bytes);
    if (slot_bytes == 0 || stride < slot_bytes || slots == 0 || slots > SIZE_MAX / 2 / stride)
        return -1;
    void *memory = memory_new(slots * stride);
    if (memory == NULL)
        return -1;
    *a = (arena){.base = aligned(memory), .stride = stride, .slots = slots, .memory = memory};
    return 0;
}

int arena_grow(arena *a, size_t slots)
{
    if (slots < a->slots || slots > SIZE_MAX / 2 / a->stride)
        return -1;
    if (slots == a->slots)
        return 0;
    void *memory = memory_grow(a->memory, a->slots * a->stride, slots * a->stride);
    if (memory == NULL)
        return -1;
    a->base = aligned(memory);
    a->memory = memory;
    a->slots = slots;
    return 0;
}

void arena_back(arena *a, size_t index)
{
    enum { AHEAD = 32, GAP = 1024 }; /* slots: 45 KB at a time, about 10 us */
    if (index > a->touched + GAP)
        return;
    const size_t end = index + AHEAD < a->slots ? index + AHEAD : a->slots;
    memory_back(arena_slot(a, index), arena_slot(a, end));
    a->touched = end;
}

void arena_back_run(arena *a, size_t first, size_t count)
{
    const size_t end = first + count;
    memory_large(arena_slot(a, first), arena_slot(a, end));
    memory_back(arena_slot(a, first), arena_slot(a, end));
    if (first <= a->touched && end > a->touched)
        a->touched = end;
}

void arena_free(arena *a)
{
    if (a->memory != NULL)
        memory_free(a->memory, a->slots * a->stride);
    memset(a, 0, sizeof *a);
}
