"""Coefficients as RFC 8681 generates them, to cross-check the codec with other sliding-window codes; tests only.

Our own code cannot be carried by RFC 8681 (density is a 4-bit threshold, keys have 16 bits,
coding sets are unbroken), and nothing sent on the wire comes from here. With the same field and the same symbols, a
repair of another implementation over an unbroken window must equal the one computed from these coefficients.

Verified: TinyMT32 gives the 50 values of RFC 8682 for seed 1, which the authors' own check file and several public
implementations print as well. The reductions to 4 and 8 bits and the order of draws are those of two independent
implementations, irtf-nwcrg/swif-codec (`swif_rlc_generate_coding_coefficients`) and the crate cu-fec 1.3.0; these were
read, not run. Not verified: the text of RFC 8681 itself. An older file of swif-codec, `src/swif_coding_coefficients.c`
(draft version 10), scales by buckets instead of masking the low bits: it gives other coefficients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quic_pfec.fec.reference import multiply

__all__ = ["coefficients", "density_threshold", "repair_symbol", "tinymt32"]

FULL_DENSITY = 15
"""The threshold DT at which no coefficient is 0."""

_MASK32 = (1 << 32) - 1
_MAT1, _MAT2, _TMAT = 0x8F7011EE, 0xFC78FF1F, 0x3793FDFF


def tinymt32(seed: int) -> Iterator[int]:
    """Yield the 32-bit outputs of TinyMT32 with the parameters of RFC 8682, from a 32-bit seed."""
    s = [seed & _MASK32, _MAT1, _MAT2, _TMAT]
    for i in range(1, 8):
        before = s[(i - 1) & 3]
        s[i & 3] ^= (i + 1812433253 * (before ^ before >> 30)) & _MASK32

    def advance() -> None:
        y = s[3]
        x = (s[0] & 0x7FFFFFFF) ^ s[1] ^ s[2]
        x ^= x << 1 & _MASK32
        y ^= y >> 1 ^ x
        s[:] = [s[1], s[2], (x ^ y << 10) & _MASK32, y]
        if y & 1:
            s[1] ^= _MAT1
            s[2] ^= _MAT2

    for _ in range(8):
        advance()
    while True:
        advance()
        t = (s[0] + (s[2] >> 8)) & _MASK32
        yield s[3] ^ t ^ (_TMAT if t & 1 else 0)


def density_threshold(degree: int, window: int) -> int:
    """The smallest DT with a mean of at least `degree` nonzero coefficients in `window` symbols; at most 15."""
    if degree < 1 or window < 1:
        raise ValueError("degree and window must be positive")
    return min(FULL_DENSITY, -(-16 * degree // window) - 1)


def coefficients(repair_key: int, window: int, dt: int, m: int = 8) -> list[int]:
    """One coefficient for each of `window` symbols, oldest first, in GF(2^m), m = 8 or 1.

    `repair_key` in 0..65,535; `dt` in 0..15: each coefficient is nonzero with probability (dt + 1) / 16. ValueError
    outside these ranges.
    """
    if not 0 <= repair_key <= 0xFFFF:
        raise ValueError("the repair key has 16 bits")
    if not 0 <= dt <= FULL_DENSITY:
        raise ValueError("the density threshold is in 0..15")
    if not 0 <= window <= 0xFFF:
        raise ValueError("the number of source symbols has 12 bits")
    if m not in (1, 8):
        raise ValueError("the field is GF(2) or GF(2^8)")
    outputs = tinymt32(repair_key)
    chosen: list[int] = []
    for _ in range(window):
        if dt != FULL_DENSITY and next(outputs) & 0xF > dt:
            chosen.append(0)
        elif m == 1:
            chosen.append(1)
        else:
            chosen.append(next(value for output in outputs if (value := output & 0xFF)))
    return chosen


def repair_symbol(sources: Sequence[bytes], repair_key: int, dt: int) -> bytes:
    """The repair over `sources` of equal length, in GF(2^8) modulo 0x11D (RFC 8681 has the polynomial of RFC 5510)."""
    total = bytearray(len(sources[0]))
    for c, source in zip(coefficients(repair_key, len(sources), dt), sources, strict=True):
        for i, byte in enumerate(source):
            total[i] ^= multiply(c, byte)
    return bytes(total)
