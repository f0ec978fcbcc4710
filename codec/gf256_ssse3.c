/* SSSE3 kernels: the nibble tables of gf256_avx2.c, 16 bytes at a time. Every x86-64 processor since 2006 has them. */
#include "gf256.h"

#if GF256_X86

#include <immintrin.h>

#define SSSE3 __attribute__((target("ssse3")))
#define SSSE3_INLINE static inline __attribute__((always_inline, target("ssse3")))

typedef struct {
    __m128i low, high, mask;
} multiplier;

SSSE3_INLINE multiplier multiplier_of(uint8_t c)
{
    const __m128i *table = (const __m128i *)(const void *)gf256_nibble[c];
    multiplier m = {_mm_load_si128(table), _mm_load_si128(table + 1), _mm_set1_epi8(0x0f)};
    return m;
}

SSSE3_INLINE __m128i product(multiplier m, __m128i x)
{
    __m128i low = _mm_and_si128(x, m.mask);
    __m128i high = _mm_and_si128(_mm_srli_epi16(x, 4), m.mask);
    return _mm_xor_si128(_mm_shuffle_epi8(m.low, low), _mm_shuffle_epi8(m.high, high));
}

SSSE3_INLINE __m128i load(const uint8_t *p)
{
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}

SSSE3_INLINE void store(uint8_t *p, __m128i v)
{
    _mm_storeu_si128((__m128i *)(void *)p, v);
}

SSSE3 static void ssse3_axpy(uint8_t *y, const uint8_t *x, uint8_t c, size_t n)
{
    multiplier m = multiplier_of(c);
    for (size_t i = 0; i < n; i += 16)
        store(y + i, _mm_xor_si128(load(y + i), product(m, load(x + i))));
}

SSSE3 static void ssse3_scal(uint8_t *y, uint8_t c, size_t n)
{
    multiplier m = multiplier_of(c);
    for (size_t i = 0; i < n; i += 16)
        store(y + i, product(m, load(y + i)));
}

/* One strip of `vectors` registers; a constant in each caller, so that the loops unroll and `sum` stays in registers. */
SSSE3_INLINE void dot_strip(uint8_t *y, const uint8_t *const *x, const uint8_t *c, size_t k, size_t at, int vectors)
{
    __m128i sum[8];
    GF256_UNROLL
    for (int v = 0; v < vectors; v++)
        sum[v] = _mm_setzero_si128();
    for (size_t i = 0; i < k; i++) {
        multiplier m = multiplier_of(c[i]);
        const uint8_t *source = x[i] + at;
        GF256_UNROLL
        for (int v = 0; v < vectors; v++)
            sum[v] = _mm_xor_si128(sum[v], product(m, load(source + 16 * v)));
    }
    GF256_UNROLL
    for (int v = 0; v < vectors; v++)
        store(y + at + 16 * v, sum[v]);
}

SSSE3 static void ssse3_dot(uint8_t *y, const uint8_t *const *x, const uint8_t *c, size_t k, size_t n)
{
    size_t at = 0;
    for (; n - at >= 128; at += 128)
        dot_strip(y, x, c, k, at, 8);
    for (; at < n; at += 64)
        dot_strip(y, x, c, k, at, 4);
}

static int ssse3_supported(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("ssse3") != 0;
}

const gf256_kernels gf256_ssse3 = {"ssse3", ssse3_supported, ssse3_axpy, ssse3_dot, ssse3_scal};

#else

typedef int gf256_ssse3_is_empty; /* ISO C forbids an empty translation unit */

#endif
