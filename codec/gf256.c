/* Tables, the scalar kernels and the choice of a level at run time. */
#include "gf256.h"

#include <string.h>

_Alignas(64) uint8_t gf256_mul[256][256];
_Alignas(64) uint8_t gf256_inv[256];
_Alignas(64) uint8_t gf256_nibble[256][32];
_Alignas(64) uint64_t gf256_affine[256];
gf256_kernels gf256;

static uint8_t multiply(unsigned a, unsigned b)
{
    unsigned product = 0;
    for (; b != 0; b >>= 1) {
        if (b & 1u)
            product ^= a;
        a <<= 1;
        if (a & 0x100u)
            a ^= GF256_POLYNOMIAL;
    }
    return (uint8_t)product;
}

/* Output bit i of the affine instruction is the parity of (byte 7-i of the matrix AND x): row i collects, for each
 * input bit j, bit i of c * 2^j. */
static uint64_t affine_matrix(unsigned c)
{
    uint64_t matrix = 0;
    for (unsigned i = 0; i < 8; i++) {
        uint64_t row = 0;
        for (unsigned j = 0; j < 8; j++)
            row |= (uint64_t)((gf256_mul[c][1u << j] >> i) & 1u) << j;
        matrix |= row << (8 * (7 - i));
    }
    return matrix;
}

static void build_tables(void)
{
    for (unsigned a = 0; a < 256; a++) {
        for (unsigned b = 0; b < 256; b++) {
            gf256_mul[a][b] = multiply(a, b);
            if (gf256_mul[a][b] == 1)
                gf256_inv[a] = (uint8_t)b;
        }
    }
    for (unsigned c = 0; c < 256; c++) {
        for (unsigned i = 0; i < 16; i++) {
            gf256_nibble[c][i] = gf256_mul[c][i];
            gf256_nibble[c][16 + i] = gf256_mul[c][i << 4];
        }
        gf256_affine[c] = affine_matrix(c);
    }
}

static void scalar_axpy(uint8_t *y, const uint8_t *x, uint8_t c, size_t n)
{
    const uint8_t *row = gf256_mul[c];
    for (size_t i = 0; i < n; i++)
        y[i] ^= row[x[i]];
}

static void scalar_scal(uint8_t *y, uint8_t c, size_t n)
{
    const uint8_t *row = gf256_mul[c];
    for (size_t i = 0; i < n; i++)
        y[i] = row[y[i]];
}

/* The accumulator is a local strip, not y: a term may alias y (see the contract of dot). */
static void scalar_dot(uint8_t *y, const uint8_t *const *x, const uint8_t *c, size_t k, size_t n)
{
    enum { STRIP = 512 };
    uint8_t sum[STRIP];
    for (size_t at = 0; at < n; at += STRIP) {
        size_t length = n - at < STRIP ? n - at : STRIP;
        memset(sum, 0, length);
        for (size_t i = 0; i < k; i++)
            scalar_axpy(sum, x[i] + at, c[i], length);
        memcpy(y + at, sum, length);
    }
}

static int scalar_supported(void)
{
    return 1;
}

const gf256_kernels gf256_scalar = {"scalar", scalar_supported, scalar_axpy, scalar_dot, scalar_scal};

static const gf256_kernels *const levels[] = {
    &gf256_scalar,
#if GF256_X86
    &gf256_ssse3,
    &gf256_avx2,
    &gf256_avx512,
    &gf256_gfni256,
    &gf256_gfni512,
#endif
#if GF256_NEON
    &gf256_neon,
#endif
};

const gf256_kernels *gf256_level(size_t index)
{
    return index < sizeof levels / sizeof *levels ? levels[index] : NULL;
}

void gf256_init(void)
{
    if (gf256.name != NULL)
        return;
    build_tables();
    for (size_t i = 0; gf256_level(i) != NULL; i++)
        if (gf256_level(i)->supported())
            gf256 = *gf256_level(i);
}
