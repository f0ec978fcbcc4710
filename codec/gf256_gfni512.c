/* AVX-512 kernels with GFNI: a product by c is one affine transformation, 64 bytes at a time.
 *
 * The affine instruction takes any field polynomial, so 0x11D costs the same as the 0x11B that the dedicated multiply
 * instruction is tied to. Two sources are joined per step by a three-way XOR. A symbol of 1,345..1,408 bytes is two
 * strips of 11 sums: its 22 would fit the registers as well, but half as many runs 1.2 times faster on 48 sources, which
 * do not fit the first-level cache (a strip of them does). */
#include "gf256.h"

#if GF256_X86

#include <immintrin.h>

#define GFNI512 __attribute__((target("avx512f,avx512bw,gfni")))
#define GFNI512_INLINE static inline __attribute__((always_inline, target("avx512f,avx512bw,gfni")))
#define XOR3 0x96 /* truth table of a ^ b ^ c */

GFNI512_INLINE __m512i matrix_of(uint8_t c)
{
    return _mm512_set1_epi64((long long)gf256_affine[c]);
}

GFNI512_INLINE __m512i load(const uint8_t *p)
{
    return _mm512_loadu_si512((const void *)p);
}

GFNI512_INLINE __m512i product(__m512i matrix, __m512i x)
{
    return _mm512_gf2p8affine_epi64_epi8(x, matrix, 0);
}

GFNI512 static void gfni512_axpy(uint8_t *y, const uint8_t *x, uint8_t c, size_t n)
{
    __m512i matrix = matrix_of(c);
    for (size_t i = 0; i < n; i += 64)
        _mm512_storeu_si512((void *)(y + i), _mm512_xor_si512(load(y + i), product(matrix, load(x + i))));
}

GFNI512 static void gfni512_scal(uint8_t *y, uint8_t c, size_t n)
{
    __m512i matrix = matrix_of(c);
    for (size_t i = 0; i < n; i += 64)
        _mm512_storeu_si512((void *)(y + i), product(matrix, load(y + i)));
}

/* One strip of `vectors` registers; a constant in each caller, so that the loops unroll and `sum` stays in registers. */
GFNI512_INLINE void dot_strip(uint8_t *y, const uint8_t *const *x, const uint8_t *c, size_t k, size_t at, int vectors)
{
    __m512i sum[11];
    GF256_UNROLL
    for (int v = 0; v < vectors; v++)
        sum[v] = _mm512_setzero_si512();
    size_t i = 0;
    for (; i + 1 < k; i += 2) {
        __m512i first = matrix_of(c[i]), second = matrix_of(c[i + 1]);
        const uint8_t *a = x[i] + at, *b = x[i + 1] + at;
        GF256_UNROLL
        for (int v = 0; v < vectors; v++)
            sum[v] = _mm512_ternarylogic_epi64(sum[v], product(first, load(a + 64 * v)),
                                               product(second, load(b + 64 * v)), XOR3);
    }
    if (i < k) {
        __m512i last = matrix_of(c[i]);
        const uint8_t *a = x[i] + at;
        GF256_UNROLL
        for (int v = 0; v < vectors; v++)
            sum[v] = _mm512_xor_si512(sum[v], product(last, load(a + 64 * v)));
    }
    GF256_UNROLL
    for (int v = 0; v < vectors; v++)
        _mm512_storeu_si512((void *)(y + at + 64 * v), sum[v]);
}

GFNI512 static void gfni512_dot(uint8_t *y, const uint8_t *const *x, const uint8_t *c, size_t k, size_t n)
{
    size_t at = 0;
    for (; n - at >= 11 * 64; at += 11 * 64)
        dot_strip(y, x, c, k, at, 11);
    for (; n - at >= 6 * 64; at += 6 * 64)
        dot_strip(y, x, c, k, at, 6);
    for (; n - at >= 2 * 64; at += 2 * 64)
        dot_strip(y, x, c, k, at, 2);
    for (; at < n; at += 64)
        dot_strip(y, x, c, k, at, 1);
}

static int gfni512_supported(void)
{
    __builtin_cpu_init(); /* the tests also ask whether the operating system saves the registers */
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("gfni");
}

const gf256_kernels gf256_gfni512 = {"gfni512", gfni512_supported, gfni512_axpy, gfni512_dot, gfni512_scal};

#else

typedef int gf256_gfni512_is_empty; /* ISO C forbids an empty translation unit */

#endif
