/* AVX2 kernels: two 16-entry tables per coefficient, one for each nibble, looked up with VPSHUFB.
 *
 * The dot product keeps one strip of the output in registers and runs over all sources, so the output is written
 * once instead of k times. Function-level targets keep the rest of the program free of AVX2. */
#include "gf256.h"

#if GF256_X86

#include <immintrin.h>

#define AVX2 __attribute__((target("avx2")))
#define AVX2_INLINE static inline __attribute__((always_inline, target("avx2")))

typedef struct {
    __m256i low, high, mask;
} multiplier;

AVX2_INLINE multiplier multiplier_of(uint8_t c)
{
    const __m128i *table = (const __m128i *)(const void *)gf256_nibble[c];
    multiplier m = {_mm256_broadcastsi128_si256(_mm_load_si128(table)),
                    _mm256_broadcastsi128_si256(_mm_load_si128(table + 1)), _mm256_set1_epi8(0x0f)};
    return m;
}

AVX2_INLINE __m256i product(multiplier m, __m256i x)
{
    __m256i low = _mm256_and_si256(x, m.mask);
    __m256i high = _mm256_and_si256(_mm256_srli_epi16(x, 4), m.mask);
    return _mm256_xor_si256(_mm256_shuffle_epi8(m.low, low), _mm256_shuffle_epi8(m.high, high));
}

AVX2_INLINE __m256i load(const uint8_t *p)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)p);
}

AVX2_INLINE void store(uint8_t *p, __m256i v)
{
    _mm256_storeu_si256((__m256i *)(void *)p, v);
}

AVX2 static void avx2_axpy(uint8_t *y, const uint8_t *x, uint8_t c, size_t n)
{
    multiplier m = multiplier_of(c);
    for (size_t i = 0; i < n; i += 64) {
        store(y + i, _mm256_xor_si256(load(y + i), product(m, load(x + i))));
        store(y + i + 32, _mm256_xor_si256(load(y + i + 32), product(m, load(x + i + 32))));
    }
}

AVX2 static void avx2_scal(uint8_t *y, uint8_t c, size_t n)
{
    multiplier m = multiplier_of(c);
    for (size_t i = 0; i < n; i += 32)
        store(y + i, product(m, load(y + i)));
}

/* One strip of `vectors` registers. The count is a constant in each caller: the loops unroll and `sum` never
 * leaves the registers (8 sums, 2 tables, the mask and temporaries fill the 16 there are). */
AVX2_INLINE void dot_strip(uint8_t *y, const uint8_t *const *x, const uint8_t *c, size_t k, size_t at, int vectors)
{
    __m256i sum[8];
    GF256_UNROLL
    for (int v = 0; v < vectors; v++)
        sum[v] = _mm256_setzero_si256();
    for (size_t i = 0; i < k; i++) {
        multiplier m = multiplier_of(c[i]);
        const uint8_t *source = x[i] + at;
        GF256_UNROLL
        for (int v = 0; v < vectors; v++)
            sum[v] = _mm256_xor_si256(sum[v], product(m, load(source + 32 * v)));
    }
    GF256_UNROLL
    for (int v = 0; v < vectors; v++)
        store(y + at + 32 * v, sum[v]);
}

AVX2 static void avx2_dot(uint8_t *y, const uint8_t *const *x, const uint8_t *c, size_t k, size_t n)
{
    size_t at = 0;
    for (; n - at >= 256; at += 256)
        dot_strip(y, x, c, k, at, 8);
    for (; n - at >= 128; at += 128)
        dot_strip(y, x, c, k, at, 4);
    for (; at < n; at += 64)
        dot_strip(y, x, c, k, at, 2);
}

static int avx2_supported(void)
{
    __builtin_cpu_init(); /* the test also asks whether the operating system saves the registers */
    return __builtin_cpu_supports("avx2") != 0;
}

const gf256_kernels gf256_avx2 = {"avx2", avx2_supported, avx2_axpy, avx2_dot, avx2_scal};

#else

typedef int gf256_avx2_is_empty; /* ISO C forbids an empty translation unit */

#endif
