/* AVX-512BW kernels without GFNI (Skylake-X, Cascade Lake): the nibble tables of gf256_avx2.c, 64 bytes at a time.
 *
 * A symbol of 1,345..1,408 bytes is two strips of 11 sums; why not one of 22: gf256_gfni512.c. */
#include "gf256.h"

#if GF256_X86

#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f,avx512bw")))
#define AVX512_INLINE static inline __attribute__((always_inline, target("avx512f,avx512bw")))
#define XOR3 0x96 /* truth table of a ^ b ^ c */

typedef struct {
    __m512i low, high, mask;
} multiplier;

AVX512_INLINE multiplier multiplier_of(uint8_t c)
{
    const __m128i *table = (const __m128i *)(const void *)gf256_nibble[c];
    multiplier m = {_mm512_broadcast_i32x4(_mm_load_si128(table)), _mm512_broadcast_i32x4(_mm_load_si128(table + 1)),
                    _mm512_set1_epi8(0x0f)};
    return m;
}

AVX512_INLINE __m512i load(const uint8_t *p)
{
    return _mm512_loadu_si512((const void *)p);
}

AVX512_INLINE void store(uint8_t *p, __m512i v)
{
    _mm512_storeu_si512((void *)p, v);
}

/* y ^ c * x in one three-way XOR of both halves of the product. */
AVX512_INLINE __m512i accumulated(__m512i y, multiplier m, __m512i x)
{
    __m512i low = _mm512_and_si512(x, m.mask);
    __m512i high = _mm512_and_si512(_mm512_srli_epi16(x, 4), m.mask);
    return _mm512_ternarylogic_epi64(y, _mm512_shuffle_epi8(m.low, low), _mm512_shuffle_epi8(m.high, high), XOR3);
}

AVX512 static void avx512_axpy(uint8_t *y, const uint8_t *x, uint8_t c, size_t n)
{
    multiplier m = multiplier_of(c);
    for (size_t i = 0; i < n; i += 64)
        store(y + i, accumulated(load(y + i), m, load(x + i)));
}

AVX512 static void avx512_scal(uint8_t *y, uint8_t c, size_t n)
{
    multiplier m = multiplier_of(c);
    for (size_t i = 0; i < n; i += 64)
        store(y + i, accumulated(_mm512_setzero_si512(), m, load(y + i)));
}

/* One strip of `vectors` registers; a constant in each caller, so that the loops unroll and `sum` stays in registers. */
AVX512_INLINE void dot_strip(uint8_t *y, const uint8_t *const *x, const uint8_t *c, size_t k, size_t at, int vectors)
{
    __m512i sum[11];
    GF256_UNROLL
    for (int v = 0; v < vectors; v++)
        sum[v] = _mm512_setzero_si512();
    for (size_t i = 0; i < k; i++) {
        multiplier m = multiplier_of(c[i]);
        const uint8_t *source = x[i] + at;
        GF256_UNROLL
        for (int v = 0; v < vectors; v++)
            sum[v] = accumulated(sum[v], m, load(source + 64 * v));
    }
    GF256_UNROLL
    for (int v = 0; v < vectors; v++)
        store(y + at + 64 * v, sum[v]);
}

AVX512 static void avx512_dot(uint8_t *y, const uint8_t *const *x, const uint8_t *c, size_t k, size_t n)
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

static int avx512_supported(void)
{
    __builtin_cpu_init(); /* the tests also ask whether the operating system saves the registers */
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
}

const gf256_kernels gf256_avx512 = {"avx512", avx512_supported, avx512_axpy, avx512_dot, avx512_scal};

#else

typedef int gf256_avx512_is_empty; /* ISO C forbids an empty translation unit */

#endif
