"""QUIC variable-length integers (RFC 9000 §16), over plain buffers.

aioquic has its own, tied to its Buffer; the room needs one that works on any bytes-like object, reports truncation as a
`PeerError`, and can write a chosen width, because packets of equal size need fields of constant length.
"""

from __future__ import annotations

from quic_pfec.wire.errors import ErrorCode, LocalError, PeerError

__all__ = ["MAX", "decode", "encode", "encode_fixed", "size"]

MAX = (1 << 62) - 1
"""Largest value a varint can hold."""

_LARGEST = {1: 0x3F, 2: 0x3FFF, 4: 0x3FFF_FFFF, 8: MAX}
_PREFIX = {1: 0, 2: 0x4000, 4: 0x8000_0000, 8: 0xC000_0000_0000_0000}


def size(value: int) -> int:
    """Bytes of the shortest form of `value`: 1, 2, 4 or 8. Raises `LocalError` outside 0..2^62-1."""
    if value < 0:
        raise LocalError(f"a varint cannot hold {value}")
    if value <= 0x3F:
        return 1
    if value <= 0x3FFF:
        return 2
    if value <= 0x3FFF_FFFF:
        return 4
    if value <= MAX:
        return 8
    raise LocalError(f"a varint cannot hold {value}")


def encode(value: int) -> bytes:
    """The shortest form of `value`. Raises `LocalError` outside 0..2^62-1."""
    length = size(value)
    return (_PREFIX[length] | value).to_bytes(length, "big")


def encode_fixed(value: int, length: int) -> bytes:
    """`value` in exactly `length` bytes (1, 2, 4 or 8). Raises `LocalError` when it does not fit."""
    largest = _LARGEST.get(length)
    if largest is None or not 0 <= value <= largest:
        raise LocalError(f"a varint of {length} bytes cannot hold {value}")
    return (_PREFIX[length] | value).to_bytes(length, "big")


def decode(data: bytes | memoryview, pos: int) -> tuple[int, int]:
    """The varint at `pos` >= 0 and the position after it; any width is accepted, as RFC 9000 §16 asks.

    `data` holds unsigned bytes. Raises `PeerError` FRAME_ENCODING_ERROR when it ends inside the varint.
    """
    if pos >= len(data):
        raise _truncated()
    first = data[pos]
    if first < 0x40:
        return first, pos + 1
    length = 1 << (first >> 6)
    end = pos + length
    if end > len(data):
        raise _truncated()
    return int.from_bytes(data[pos:end], "big") & _LARGEST[length], end


def _truncated() -> PeerError:
    return PeerError(ErrorCode.FRAME_ENCODING_ERROR, "truncated varint")
