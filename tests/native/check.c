/* A check of the C code without Python, so that it can run where Python does not: another architecture under an
 * emulator, another compiler, under sanitisers. Prints the levels it checked; any failure ends it with status 1.
 *
 * Kernels: every level against the bitwise product, all coefficients, odd alignments, guard bytes. Coefficients: the
 * vectors of the wire format. Decoder: a stream with losses, every recovered byte compared. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "arena.h"
#include "coefficients.h"
#include "decoder.h"
#include "gf256.h"

static uint64_t state = 88172645463325252u;

static uint32_t draw(uint32_t n)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)((state >> 32) * n >> 32);
}

static void fill(uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)draw(256);
}

static void check(int good, const char *what, const char *level)
{
    if (good)
        return;
    fprintf(stderr, "%s: %s\n", level, what);
    exit(1);
}

static uint8_t product(unsigned a, unsigned b)
{
    unsigned p = 0;
    for (; b != 0; b >>= 1, a = a & 0x80 ? a << 1 ^ GF256_POLYNOMIAL : a << 1)
        if (b & 1)
            p ^= a;
    return (uint8_t)p;
}

enum { GUARD = 64, LONGEST = 1472, SOURCES = 9 };

static void check_kernels(const gf256_kernels *level)
{
    static uint8_t memory[SOURCES + 1][GUARD + 64 + LONGEST + GUARD], before[GUARD + 64 + LONGEST + GUARD];
    for (unsigned round = 0; round < 256; round++) {
        const size_t n = 64 * (size_t)draw(LONGEST / 64 + 1), k = draw(SOURCES + 1);
        const uint8_t *x[SOURCES];
        uint8_t c[SOURCES], expected[LONGEST];
        uint8_t *y = memory[SOURCES] + GUARD + draw(64);
        for (size_t i = 0; i <= SOURCES; i++)
            fill(memory[i], sizeof memory[i]);
        for (size_t i = 0; i < SOURCES; i++) {
            x[i] = memory[i] + GUARD + draw(64);
            c[i] = (uint8_t)draw(256);
        }
        c[0] = (uint8_t)round;

        memcpy(before, memory[SOURCES], sizeof before);
        for (size_t i = 0; i < n; i++)
            expected[i] = y[i] ^ product(c[0], x[0][i]);
        level->axpy(y, x[0], c[0], n);
        check(memcmp(y, expected, n) == 0, "axpy", level->name);
        for (size_t i = 0; i < n; i++)
            expected[i] = product(c[0], y[i]);
        level->scal(y, c[0], n);
        check(memcmp(y, expected, n) == 0, "scal", level->name);
        memset(expected, 0, n);
        for (size_t i = 0; i < n; i++)
            for (size_t j = 0; j < k; j++)
                expected[i] ^= product(c[j], x[j][i]);
        level->dot(y, x, c, k, n);
        check(memcmp(y, expected, n) == 0, "dot", level->name);
        memcpy(y, before + (y - memory[SOURCES]), n);
        check(memcmp(memory[SOURCES], before, sizeof before) == 0, "bytes outside were written", level->name);
    }
}

static void check_coefficients(void)
{
    static const uint32_t sids[] = {0, 2, 4, 7}, later[] = {41, 42, 44};
    static const uint8_t factors[] = {28, 84, 45, 197}, later_factors[] = {114, 114, 195}, bitmap[] = {0x17};
    uint32_t s[8];
    uint8_t c[8];
    repair_header h = {.degree = 4, .tail_span = 8};
    check(repair_expand(&h, s, c) == 4 && !memcmp(s, sids, sizeof sids) && !memcmp(c, factors, 4), "vector 1", "wire");
    h = (repair_header){.repair_number = 1, .first_sid = 40, .degree = 3, .head_span = 5, .head = bitmap, .head_bytes = 1};
    check(repair_header_check(&h, 255, 4096, 100) == NULL, "canonical header", "wire");
    check(repair_expand(&h, s, c) == 3 && !memcmp(s, later, sizeof later) && !memcmp(c, later_factors, 3), "vector 2",
          "wire");
}

static void check_stream(const gf256_kernels *level)
{
    enum { COUNT = 600, SIZE = 1372, WINDOW = 100 };
    static uint32_t sids[PFEC_MAX_SPAN];
    static uint8_t factors[PFEC_MAX_SPAN];
    static const uint8_t *operands[PFEC_MAX_SPAN];
    const decoder_limits limits = {64, 255, 4096, 1024};
    decoder d;
    arena truth, output;
    gf256 = *level;
    check(decoder_init(&d, &limits, SIZE, COUNT) == 0 && arena_init(&truth, SIZE, COUNT) == 0
              && arena_init(&output, SIZE, 1) == 0, "memory", level->name);
    for (uint32_t sid = 0; sid < COUNT; sid++)
        fill(arena_slot(&truth, sid), SIZE);
    uint32_t sent = 0, number = 0;
    while (d.prefix < COUNT && number < 20 * COUNT) {
        if (sent < COUNT && sent < d.prefix + WINDOW && draw(10) < 8) {
            if (draw(10) < 8)
                decoder_source(&d, sent, arena_slot(&truth, sent));
            sent++;
        } else if (d.prefix < sent) {
            repair_header h = {.transfer_id = 4, .repair_number = number++, .first_sid = d.prefix, .degree = 24,
                               .tail_span = sent - d.prefix};
            const size_t n = repair_expand(&h, sids, factors);
            for (size_t i = 0; i < n; i++)
                operands[i] = arena_slot(&truth, sids[i]);
            gf256.dot(output.base, operands, factors, n, output.stride);
            decoder_repair(&d, &h, output.base);
        }
        uint32_t found[4];
        const size_t n = decoder_poll(&d, NULL, 0, 4, UINT64_MAX, found);
        for (size_t i = 0; i < n; i++)
            check(memcmp(decoder_symbol(&d, found[i]), arena_slot(&truth, found[i]), SIZE) == 0, "a wrong byte", level->name);
    }
    check(d.prefix == COUNT && d.counters.recovered > COUNT / 10, "the stream did not complete", level->name);
    decoder_free(&d);
    arena_free(&truth);
    arena_free(&output);
}

int main(void)
{
    gf256_init();
    check_coefficients();
    for (size_t i = 0; gf256_level(i) != NULL; i++) {
        const gf256_kernels *level = gf256_level(i);
        if (!level->supported())
            continue;
        check_kernels(level);
        check_stream(level);
        printf("%s\n", level->name);
    }
    return 0;
}
