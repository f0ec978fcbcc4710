"""From the header of a REPAIR frame to its list of (SID, coefficient), in plain Python.

This is the readable form of docs/wire.md §5 (normative), and the twin of `codec/coefficients.c`: coefficients
never travel, both ends derive them from the Transfer ID and the Repair Number.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["MAX_SID", "MAX_SPAN", "check_header", "expand", "pick", "splitmix64"]

MAX_SPAN = 16_384
"""SIDs: the hard cap on the span of one repair (Max Window, docs/wire.md §2)."""
MAX_SID = 1 << 30
"""Exclusive: SIDs travel in the 4-byte varint form (docs/wire.md §4)."""

_MASK32 = (1 << 32) - 1
_MASK64 = (1 << 64) - 1
_MAX_VARINT = (1 << 62) - 1


def splitmix64(state: int) -> Iterator[int]:
    """Yield the 64-bit outputs of SplitMix64 from a 64-bit state."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) & _MASK64
        z = state
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK64
        yield z ^ z >> 31


def _draw(outputs: Iterator[int], n: int) -> int:
    return ((next(outputs) >> 32) * n) >> 32


def pick(outputs: Iterator[int], m: int, k: int) -> list[int]:
    """Choose k distinct positions out of m (k <= m) by Floyd's algorithm; returns them ascending."""
    chosen: set[int] = set()
    for j in range(m - k, m):
        t = _draw(outputs, j + 1)
        chosen.add(j if t in chosen else t)
    return sorted(chosen)


def check_header(
    transfer_id: int,
    repair_number: int,
    first_sid: int,
    degree: int,
    head_span: int,
    head: bytes,
    tail_offset: int,
    tail_span: int,
    *,
    max_degree: int,
    max_span: int,
    end: int,
) -> None:
    """Raise ValueError unless the header is canonical, within the limits and names only SIDs below `end`."""
    if not isinstance(head, bytes):
        raise TypeError("head must be bytes")
    if min(transfer_id, repair_number, first_sid, degree, head_span, tail_offset, tail_span) < 0:
        raise ValueError("a header field is negative")
    if transfer_id > _MAX_VARINT:
        raise ValueError("transfer_id is above 2^62 - 1")
    if repair_number > _MASK32:
        raise ValueError("repair_number does not fit 32 bits")
    if degree == 0:
        raise ValueError("degree is 0")
    if degree > max_degree:
        raise ValueError("degree is above the limit")
    if head_span + tail_offset + tail_span > max_span:
        raise ValueError("span is above the limit")
    if head_span + tail_span == 0:
        raise ValueError("the coding set is empty")
    if tail_offset and not (head_span and tail_span):
        raise ValueError("tail_offset without a head and a tail")
    if len(head) != (head_span + 7) // 8:
        raise ValueError("the head bitmap has the wrong length")
    if head_span and (not head[0] & 1 or head[-1] >> (head_span - 1) % 8 != 1):
        raise ValueError("the head bitmap is not canonical")
    if first_sid + head_span + tail_offset + tail_span > end:
        raise ValueError("the coding set reaches beyond the last legal SID")


def expand(
    transfer_id: int,
    repair_number: int,
    first_sid: int,
    degree: int,
    head_span: int,
    head: bytes,
    tail_offset: int,
    tail_span: int,
) -> list[tuple[int, int]]:
    """Return the terms of a repair as (SID, coefficient in 1..255), ascending; at most `degree` of them.

    The head is a bitmap of SIDs that are always coded (bit i of byte j is SID first_sid + 8j + i), the tail a
    contiguous run sampled to fill up the degree. ValueError if the header is not legal (span <= 16,384, SIDs below
    2^30).
    """
    header = (transfer_id, repair_number, first_sid, degree, head_span, head, tail_offset, tail_span)
    check_header(*header, max_degree=_MAX_VARINT, max_span=MAX_SPAN, end=MAX_SID)
    outputs = splitmix64((transfer_id & _MASK32) << 32 | repair_number)
    head_sids = [first_sid + i for i in range(head_span) if head[i // 8] >> i % 8 & 1]
    if len(head_sids) >= degree:
        sids = [head_sids[i] for i in pick(outputs, len(head_sids), degree)]
    else:
        tail = first_sid + head_span + tail_offset
        sampled = pick(outputs, tail_span, min(degree - len(head_sids), tail_span))
        sids = head_sids + [tail + i for i in sampled]
    return [(sid, 1 + _draw(outputs, 255)) for sid in sids]
