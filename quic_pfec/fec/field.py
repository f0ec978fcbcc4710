"""GF(2^8) modulo 0x11D in plain Python: the arithmetic of the twin and of everything that checks the native kernels."""

from __future__ import annotations

__all__ = ["PRODUCTS", "Buffer", "added", "inverse", "multiply", "scaled"]

_POLYNOMIAL = 0x11D
Buffer = bytes | bytearray | memoryview


def multiply(a: int, b: int) -> int:
    """Product in GF(2^8) modulo 0x11D, bit by bit; a and b in 0..255."""
    product = 0
    while b:
        if b & 1:
            product ^= a
        a <<= 1
        if a & 0x100:
            a ^= _POLYNOMIAL
        b >>= 1
    return product


PRODUCTS = [bytes(multiply(c, x) for x in range(256)) for c in range(256)]
_INVERSES = [0] + [PRODUCTS[c].index(1) for c in range(1, 256)]


def inverse(a: int) -> int:
    """Inverse of a in 1..255 in GF(2^8) modulo 0x11D."""
    if not 0 < a < 256:
        raise ValueError(f"{a} has no inverse")
    return _INVERSES[a]


def scaled(data: Buffer, c: int) -> bytes:
    """c * data, byte by byte; c in 0..255."""
    return bytes(data).translate(PRODUCTS[c])


def added(a: bytes, b: bytes) -> bytes:
    """a + b of equal length."""
    return (int.from_bytes(a, "little") ^ int.from_bytes(b, "little")).to_bytes(len(a), "little")
