"""What the codec tests share: seeded symbols, headers from drawn numbers, and determinacy by rank alone.

`determined` is a third opinion beside the native decoder and its twin: it knows no pivots, payloads or order of
arrival, only that a symbol is determined exactly if its unit vector lies in the row space of what was received.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quic_pfec import _codec
from quic_pfec.fec import coefficients, reference

Header = tuple[int, int, int, int, int, bytes, int, int]

LEVELS = [_codec.isa()] if os.environ.get("QUIC_PFEC_ISA") else _codec.isa_levels()
"""Levels whose kernels are called by name: all, or the one that this process is about (test_codec_isa)."""


def symbols(count: int, size: int, seed: int) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(size) for _ in range(count)]


def head_of(sids: Sequence[int]) -> tuple[int, int, bytes]:
    """(first_sid, head_span, bitmap) of ascending SIDs."""
    first = sids[0]
    span = sids[-1] - first + 1
    bitmap = bytearray((span + 7) // 8)
    for sid in sids:
        bitmap[(sid - first) // 8] |= 1 << (sid - first) % 8
    return first, span, bytes(bitmap)


def header(number: int, head: Sequence[int], tail: range, degree: int, transfer: int = 4) -> Header:
    """A canonical header over the SIDs of `head` (ascending, all below the tail) and of `tail`; not both empty."""
    if not head:
        return transfer, number, tail.start, degree, 0, b"", 0, len(tail)
    first, span, bitmap = head_of(head)
    offset = tail.start - first - span if len(tail) else 0
    return transfer, number, first, degree, span, bitmap, offset, len(tail)


def random_header(rng: random.Random, number: int, low: int, high: int, degree: int) -> Header:
    """A header over a random subset of [low, high): head, tail or both."""
    border = rng.randint(low, high)
    head = [sid for sid in range(low, border) if rng.random() < 0.5]
    tail = range(rng.randint(border, high), high)
    if not head and not len(tail):
        head = [rng.randrange(low, high)]
    return header(number, head, tail, degree)


def repair_symbol(sources: Sequence[bytes], h: Header) -> bytes:
    """The repair of a header by definition: the sum of coefficient * symbol."""
    total = 0
    for sid, c in coefficients.expand(*h):
        product = bytes(reference.multiply(c, x) for x in sources[sid])
        total ^= int.from_bytes(product, "little")
    return total.to_bytes(len(sources[0]), "little")


def _rank(rows: list[list[int]]) -> int:
    rows = [row[:] for row in rows]
    rank = 0
    for column in range(len(rows[0]) if rows else 0):
        pivot = next((i for i in range(rank, len(rows)) if rows[i][column]), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        scale = reference.inverse(rows[rank][column])
        rows[rank] = [reference.multiply(x, scale) for x in rows[rank]]
        for i in range(rank + 1, len(rows)):
            if c := rows[i][column]:
                rows[i] = [x ^ reference.multiply(c, y) for x, y in zip(rows[i], rows[rank], strict=True)]
        rank += 1
    return rank


def determined(count: int, received: Iterable[int], repairs: Iterable[Header]) -> set[int]:
    """SIDs below `count` that the received sources and repairs determine."""
    rows = [[int(i == sid) for i in range(count)] for sid in received]
    for h in repairs:
        terms = dict(coefficients.expand(*h))
        rows.append([terms.get(i, 0) for i in range(count)])
    rank = _rank(rows)
    return {sid for sid in range(count) if _rank([*rows, [int(i == sid) for i in range(count)]]) == rank}


@dataclass(frozen=True, slots=True)
class State:
    """Everything a decoder says about itself without its payloads."""

    prefix: int
    highest: int
    deficit: int
    rank: int
    pending: int
    unknown_columns: int
    ranges: tuple[tuple[int, int], ...]
    bitmap: bytes
    counters: tuple[tuple[str, int], ...]


def state(decoder: Any) -> State:
    counters = decoder.counters()
    del counters["payload_macs"], counters["compactions"]  # the twin works on payloads in its own way
    return State(
        decoder.prefix,
        decoder.highest,
        decoder.deficit,
        decoder.rank,
        decoder.pending,
        decoder.unknown_columns,
        tuple(decoder.known_ranges(1_000_000)),
        decoder.known_bitmap(),
        tuple(sorted(counters.items())),
    )


def known(decoder: Any) -> set[int]:
    return {sid for sid in range(decoder.capacity) if decoder.known(sid)}


def stream(decoder: Any, seed: int, count: int, steps: int, window: int, size: int, resend: float) -> int:
    """Random events of a stream with 30 % loss, resends and duplicates, held within `window` of the decoder's prefix.

    `resend` is the share of resends in the steps that send no new symbol; the rest are repairs over the window. Returns
    the number of recovered symbols. Every symbol that the decoder calls known is compared with the one sent.
    """
    rng = random.Random(seed)
    truth = symbols(count, size, seed)
    encoder = _codec.Encoder(size, count)
    checked = 0
    for number in range(steps):
        low, sent = decoder.prefix, encoder.count
        if sent < min(count, low + window) and rng.random() < 0.7:
            sid = encoder.push(truth[sent])
            if rng.random() < 0.7:
                decoder.source(sid, truth[sid])
        elif low < sent and rng.random() >= resend:
            h = random_header(rng, number, low, sent, rng.randint(1, 24))
            decoder.repair(*h, encoder.repair(*h))
        elif sent:
            sid = rng.randrange(max(0, low - 5), sent)
            decoder.source(sid, truth[sid])
        if rng.random() < 0.5:
            for sid in decoder.poll(rng.randint(1, 4)):
                assert decoder.symbol(sid) == truth[sid]
                checked += 1
    for sid in known(decoder):
        assert decoder.symbol(sid) == truth[sid]
    return checked
