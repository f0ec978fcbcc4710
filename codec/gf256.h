/* Arithmetic in GF(2^8) modulo x^8+x^4+x^3+x^2+1 (0x11D) over whole symbols.
 *
 * The field is the one of RFC 5510 and RFC 8681. Everything that touches a symbol goes through the three
 * region kernels below; one table of function pointers is filled at module initialisation, so the choice of an
 * instruction set costs one indirect call and the build needs no SIMD flag.
 *
 * Contract of every kernel: n is a multiple of GF256_BLOCK (0 included), operands may have any alignment
 * (aligned ones are about twice as fast), any coefficient is legal, nothing outside [0, n) is read or written.
 */
#ifndef QUIC_PFEC_GF256_H
#define QUIC_PFEC_GF256_H

#include <stddef.h>
#include <stdint.h>

#define GF256_POLYNOMIAL 0x11Du
#define GF256_BLOCK 64u /* bytes: symbols are padded to it, so that no kernel has a tail */

#if defined(__GNUC__) && (defined(__x86_64__) || defined(__i386__))
#define GF256_X86 1
#else
#define GF256_X86 0
#endif

#if defined(__aarch64__) && defined(__ARM_NEON)
#define GF256_NEON 1
#else
#define GF256_NEON 0
#endif

/* Loops over the accumulators of a strip must unroll whole, or the sums leave the registers. */
#if defined(__clang__)
#define GF256_UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define GF256_UNROLL _Pragma("GCC unroll 32")
#else
#define GF256_UNROLL
#endif

typedef struct {
    const char *name;
    /* Whether processor and operating system have what the level needs. */
    int (*supported)(void);
    /* y ^= c * x. y and x are the same pointer or do not overlap. */
    void (*axpy)(uint8_t *y, const uint8_t *x, uint8_t c, size_t n);
    /* y = sum over i < k of c[i] * x[i]; zero for k = 0. An x[i] may be y itself: every strip is read before it
     * is written, so {y, 1} among the terms makes the call accumulate. */
    void (*dot)(uint8_t *y, const uint8_t *const *x, const uint8_t *c, size_t k, size_t n);
    /* y = c * y. */
    void (*scal)(uint8_t *y, uint8_t c, size_t n);
} gf256_kernels;

/* The level in use. Valid after gf256_init(). */
extern gf256_kernels gf256;

/* Tables, valid after gf256_init(). */
extern uint8_t gf256_mul[256][256];
extern uint8_t gf256_inv[256];                     /* gf256_inv[0] is 0 and never used */
extern uint8_t gf256_nibble[256][32];              /* c * {0..15}, then c * {0x00, 0x10, .. 0xf0} */
extern uint64_t gf256_affine[256];                 /* c as an 8x8 bit matrix in the order of GF2P8AFFINEQB */

/* Build the tables and select the best level. Idempotent; call it under the interpreter lock. */
void gf256_init(void);

/* Levels this build holds, worst first; NULL beyond the end. A level may be unsupported by the processor. */
const gf256_kernels *gf256_level(size_t index);

extern const gf256_kernels gf256_scalar;
#if GF256_X86
extern const gf256_kernels gf256_ssse3;
extern const gf256_kernels gf256_avx2;
extern const gf256_kernels gf256_gfni256;
extern const gf256_kernels gf256_avx512;
extern const gf256_kernels gf256_gfni512;
#endif
#if GF256_NEON
extern const gf256_kernels gf256_neon;
#endif

static inline size_t gf256_round_up(size_t n)
{
    return (n + (GF256_BLOCK - 1)) & ~(size_t)(GF256_BLOCK - 1);
}

#endif
