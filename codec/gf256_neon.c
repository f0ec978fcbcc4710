/* NEON kernels for AArch64: the nibble tables of gf256_avx2.c, looked up with TBL, 16 bytes at a time.
 *
 * NEON is mandatory in ARMv8-A, so there is no test at run time. Of the 32 registers 16 hold sums. */
#include "gf256.h"

#if GF256_NEON

#include <arm_neon.h>

#define INLINE static inline __attribute__((always_inline))

typedef struct {
    uint8x16_t low, high, mask;
} multiplier;

INLINE multiplier multiplier_of(uint8_t c)
{
    multiplier m = {vld1q_u8(gf256_nibble[c]), vld1q_u8(gf256_nibble[c] + 16), vdupq_n_u8(0x0f)};
    return m;
}

INLINE uint8x16_t product(multiplier m, uint8x16_t x)
{
    return veorq_u8(vqtbl1q_u8(m.low, vandq_u8(x, m.mask)), vqtbl1q_u8(m.high, vshrq_n_u8(x, 4)));
}

static void neon_axpy(uint8_t *y, const uint8_t *x, uint8_t c, size_t n)
{
    multiplier m = multiplier_of(c);
    for (size_t i = 0; i < n; i += 16)
        vst1q_u8(y + i, veorq_u8(vld1q_u8(y + i), product(m, vld1q_u8(x + i))));
}

static void neon_scal(uint8_t *y, uint8_t c, size_t n)
{
    multiplier m = multiplier_of(c);
    for (size_t i = 0; i < n; i += 16)
        vst1q_u8(y + i, product(m, vld1q_u8(y + i)));
}

/* One strip of `vectors` registers; a constant in each caller, so that the loops unroll and `sum` stays in registers. */
INLINE void dot_strip(uint8_t *y, const uint8_t *const *x, const uint8_t *c, size_t k, size_t at, int vectors)
{
    uint8x16_t sum[16];
    GF256_UNROLL
    for (int v = 0; v < vectors; v++)
        sum[v] = vdupq_n_u8(0);
    for (size_t i = 0; i < k; i++) {
        multiplier m = multiplier_of(c[i]);
        const uint8_t *source = x[i] + at;
        GF256_UNROLL
        for (int v = 0; v < vectors; v++)
            sum[v] = veorq_u8(sum[v], product(m, vld1q_u8(source + 16 * v)));
    }
    GF256_UNROLL
    for (int v = 0; v < vectors; v++)
        vst1q_u8(y + at + 16 * v, sum[v]);
}

static void neon_dot(uint8_t *y, const uint8_t *const *x, const uint8_t *c, size_t k, size_t n)
{
    size_t at = 0;
    for (; n - at >= 256; at += 256)
        dot_strip(y, x, c, k, at, 16);
    for (; at < n; at += 64)
        dot_strip(y, x, c, k, at, 4);
}

static int neon_supported(void)
{
    return 1;
}

const gf256_kernels gf256_neon = {"neon", neon_supported, neon_axpy, neon_dot, neon_scal};

#else

typedef int gf256_neon_is_empty; /* ISO C forbids an empty translation unit */

#endif
