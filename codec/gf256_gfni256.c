/* GFNI kernels for processors without AVX-512 (Alder Lake and later client processors): 32 bytes at a time.
 *
 * The affine instruction is the one of gf256_gfni512.c in its VEX form. Eleven sums, the two matrices and the temporaries
 * fill the 16 registers; four such strips make a symbol of 1,408 bytes. */
#include "gf256.h"

#if GF256_X86

#include <immintrin.h>

#define GFNI256 __attribute__((target("avx2,gfni")))
#define GFNI256_INLINE static inline __attribute__((always_inline, target("avx2,gfni")))

GFNI256_INLINE __m256i matrix_of(uint8_t c)
{
    return _mm256_set1_epi64x((long long)gf256_affine[c]);
}

GFNI256_INLINE __m256i load(const uint8_t *p)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)p);
}

GFNI256_INLINE void store(uint8_t *p, __m256i v)
{
    _mm256_storeu_si256((__m256i *)(void *)p, v);
}

GFNI256_INLINE __m256i product(__m256i matrix, __m256i x)
{
    return _mm256_gf2p8affine_epi64_epi8(x, matrix, 0);
}

GFNI256 static void gfni256_axpy(uint8_t *y, const uint8_t *x, uint8_t c, size_t n)
{
    __m256i matrix = matrix_of(c);
    for (size_t i = 0; i < n; i += 64) {
        store(y + i, _mm256_xor_si256(load(y + i), product(matrix, load(x + i))));
        store(y + i + 32, _mm256_xor_si256(load(y + i + 32), product(matrix, load(x + i + 32))));
    }
}

GFNI256 static void gfni256_scal(uint8_t *y, uint8_t c, size_t n)
{
    __m256i matrix = matrix_of(c);
    for (size_t i = 0; i < n; i += 32)
        store(y + i, product(matrix, load(y + i)));
}

/* One strip of `vectors` registers; a constant in each caller, so that the loops unroll and `sum` stays in registers. */
GFNI256_INLINE void dot_strip(uint8_t *y, const uint8_t *const *x, const uint8_t *c, size_t k, size_t at, int vectors)
{
    __m256i sum[11];
    GF256_UNROLL
    for (int v = 0; v < vectors; v++)
        sum[v] = _mm256_setzero_si256();
    for (size_t i = 0; i < k; i++) {
        __m256i matrix = matrix_of(c[i]);
        const uint8_t *source = x[i] + at;
        GF256_UNROLL
        for (int v = 0; v < vectors; v++)
            sum[v] = _mm256_xor_si256(sum[v], product(matrix, load(source + 32 * v)));
    }
    GF256_UNROLL
    for (int v = 0; v < vectors; v++)
        store(y + at + 32 * v, sum[v]);
}

GFNI256 static void gfni256_dot(uint8_t *y, const uint8_t *const *x, const uint8_t *c, size_t k, size_t n)
{
    size_t at = 0;
    for (; n - at >= 704; at += 704) {
        dot_strip(y, x, c, k, at, 11);
        dot_strip(y, x, c, k, at + 352, 11);
    }
    for (; n - at >= 256; at += 256)
        dot_strip(y, x, c, k, at, 8);
    for (; at < n; at += 64)
        dot_strip(y, x, c, k, at, 2);
}

static int gfni256_supported(void)
{
    __builtin_cpu_init(); /* the tests also ask whether the operating system saves the registers */
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("gfni");
}

const gf256_kernels gf256_gfni256 = {"gfni256", gfni256_supported, gfni256_axpy, gfni256_dot, gfni256_scal};

#else

typedef int gf256_gfni256_is_empty; /* ISO C forbids an empty translation unit */

#endif
