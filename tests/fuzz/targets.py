"""Fuzz targets of the codec: functions from bytes to None that raise AssertionError on anything wrong.

They know no fuzzer: atheris drives them (`run.py`), and pytest replays the corpus through them (`test_fuzz_corpus.py`).
The oracle is the plain-Python twin, event by event, wherever two correct decoders must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from quic_pfec import _codec
from quic_pfec.fec import coefficients, reference
from quic_pfec.fec.outcome import RepairOutcome, SourceOutcome
from tests.codec_world import Header, header, known, repair_symbol, state, symbols

SIZE = 8
COUNT = 32
TRUTH = symbols(COUNT, SIZE, seed=31)
LEVELS = _codec.isa_levels()


class Reader:
    """Numbers out of the input; zeros once it is used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, n: int) -> bytes:
        part = self._data[self._at : self._at + n]
        self._at += n
        return part.ljust(n, b"\0")

    def byte(self) -> int:
        return self.take(1)[0]

    def below(self, n: int) -> int:
        return int.from_bytes(self.take(2), "little") % n

    def number(self) -> int:
        """Any magnitude up to 72 bits, the ends of the ranges often."""
        kind = self.byte()
        if kind < 16:
            edge = (0, 1, 2**14, 2**30, 2**32, 2**62, 2**63, 2**64)[kind % 8]
            return edge - (kind >= 8)
        return int.from_bytes(self.take(kind % 10), "little")


def _legal_header(reader: Reader) -> Header:
    low = reader.below(COUNT)
    high = low + 1 + reader.below(COUNT - low)
    border = low + reader.below(high - low + 1)
    mask = int.from_bytes(reader.take(4), "little")
    head = [sid for sid in range(low, border) if mask >> sid % 32 & 1]
    tail = range(border + reader.below(high - border + 1), high)
    if not head and not len(tail):
        head = [low]
    return header(reader.below(65_536), head, tail, 1 + reader.below(20))


def _wild_header(reader: Reader) -> tuple[Any, ...]:
    span = reader.number()
    bitmap = reader.take(min((span + 7) // 8, 40)) if reader.byte() & 1 else reader.take(reader.byte() % 9)
    return (
        reader.number(), reader.number(), reader.number(), reader.number(), span, bitmap, reader.number(),
        reader.number(),
    )  # fmt: skip


def _result(call: Callable[..., Any], *arguments: Any) -> Any:
    """What a call returns, or the family of what it raises: OverflowError is a ValueError to the caller."""
    try:
        return call(*arguments)
    except (ValueError, OverflowError):
        return ValueError


def headers(data: bytes) -> None:
    """Hostile repair headers: native and twin accept the same ones and expand them alike."""
    reader = Reader(data)
    native, twin = (
        _codec.Decoder(SIZE, COUNT, max_span=24, max_degree=9),
        reference.Decoder(SIZE, COUNT, max_span=24, max_degree=9),
    )
    while reader:
        h = _wild_header(reader) if reader.byte() & 3 else _legal_header(reader)
        if h[4] + h[6] + h[7] <= 200_000:  # the twin checks before it loops, but let it be quick
            assert _result(_codec.expand, *h) == _result(coefficients.expand, *h)
        payload = bytes(SIZE)
        assert _result(native.repair, *h, payload) == _result(twin.repair, *h, payload)
        assert state(native) == state(twin)


def session(data: bytes) -> None:
    """Any sequence of true packets, polls, growth and batches: as the twin, within limits, never a wrong byte."""
    reader = Reader(data)
    unknown = 1 + reader.byte() % 40
    budget = reader.byte()
    limits = {"max_unknown": unknown, "row_ops_per_repair": budget if budget < 64 else 1024}
    native, twin = _codec.Decoder(SIZE, COUNT, **limits), reference.Decoder(SIZE, COUNT, **limits)
    while reader:
        kind = reader.byte() % 8
        before = native.counters()["row_operations"]
        rank = native.rank
        if kind < 2:
            sid = reader.below(COUNT)
            assert native.source(sid, TRUTH[sid]) == twin.source(sid, TRUTH[sid])
            assert native.counters()["row_operations"] - before <= rank
        elif kind < 5:
            h = _legal_header(reader)
            payload = repair_symbol(TRUTH, h)
            assert native.repair(*h, payload) == twin.repair(*h, payload)
            assert native.counters()["row_operations"] - before <= limits["row_ops_per_repair"]
        elif kind == 5:
            order = [reader.below(COUNT + 4) for _ in range(reader.byte() % 5)]
            most = reader.byte() % 6
            assert native.poll(most, order) == twin.poll(most, order)
        elif kind == 6:
            batch: list[tuple[Any, ...]] = []
            for _ in range(reader.byte() % 6):
                if reader.byte() & 1:
                    sid = reader.below(COUNT + (reader.byte() == 0))
                    batch.append((sid, TRUTH[sid % COUNT]))
                else:
                    h = _legal_header(reader)
                    batch.append((*h, repair_symbol(TRUTH, h)))
            assert _result(native.receive_batch, batch) == _result(twin.receive_batch, batch)
        else:
            capacity = native.capacity + reader.byte() % 3
            native.grow(capacity)
            twin.grow(capacity)
        assert state(native) == state(twin)
        assert 0 <= native.pending <= native.rank <= native.unknown_columns <= unknown
        assert native.deficit >= 0
    for sid in known(native):
        assert native.symbol(sid) == twin.symbol(sid) == TRUTH[sid % COUNT]  # growth: the batches go one beyond


def poisoned(data: bytes) -> None:
    """One corrupted repair among true packets: nothing received is ever wrong, and honest sources mend all."""
    reader = Reader(data)
    decoder = _codec.Decoder(SIZE, COUNT, max_unknown=COUNT)
    at, received = reader.byte() % 20, set[int]()
    step = 0
    while reader:
        kind = reader.byte() % 4
        if kind == 0:
            sid = reader.below(COUNT)
            assert decoder.source(sid, TRUTH[sid]) != SourceOutcome.CONFLICT
            received.add(sid)
        elif kind == 3:
            decoder.poll(reader.byte() % 5)
        else:
            h = _legal_header(reader)
            payload = bytearray(repair_symbol(TRUTH, h))
            if step == at:
                payload[reader.below(SIZE)] ^= 1 + reader.below(255)
            assert decoder.repair(*h, payload) in tuple(RepairOutcome)
            step += 1
        assert all(decoder.symbol(sid) == TRUTH[sid] for sid in received)
    for sid in range(COUNT):
        assert decoder.source(sid, TRUTH[sid]) != SourceOutcome.CONFLICT
        assert decoder.symbol(sid) == TRUTH[sid]
    assert (decoder.prefix, decoder.rank, decoder.unknown_columns) == (COUNT, 0, 0)


def intake(data: bytes) -> None:
    """Packets of any kind on their way into a decoder and a table of units: as the twin, step by step."""
    reader = Reader(data)
    counts = [1 + reader.byte() % 4 for _ in range(1 + reader.byte() % 6)]
    total = sum(counts)
    payload = SIZE - 4
    truth = [
        (unit << 8 | fragment).to_bytes(4, "big") + bytes([unit ^ 0x5A, fragment, 7, 0])
        for unit, count in enumerate(counts)
        for fragment in range(count)
    ]
    useless, end = reader.byte() % 5, reader.below(COUNT + 4)
    sides = []
    for codec in (_codec, reference):
        decoder: Any = codec.Decoder(SIZE, COUNT, max_unknown=16, max_span=24, max_degree=9)
        sid_of, missing = np.full(sum(counts), -1, dtype=np.int32), np.array(counts, dtype=np.int64)
        sides.append((decoder, codec.Intake(decoder, useless), sid_of, missing))
    bound = False

    def both(call: Callable[[Any], Any]) -> Any:
        native, twin = (_result(call, side) for side in sides)
        assert native == twin
        return native

    def seen(side: Any) -> Any:
        decoder, taker, sid_of, missing = side
        return state(decoder), taker.useless_left, taker.highest, sid_of.tolist(), missing.tolist()

    while reader:
        kind = reader.byte() % 8
        if kind == 0 and not bound:
            sizes = np.array(counts, dtype=np.int64) * payload - reader.byte() % payload
            base = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
            bound = both(lambda side, s=sizes, b=base: side[1].bind(s, b, side[2], side[3])) is None
        elif kind == 1:  # all equations are true: from false ones two correct decoders may compute different symbols
            most = reader.byte() % 5
            found = both(lambda side, n=most: side[0].poll(n))
            if bound and found:
                both(lambda side, sids=found: side[1].place(sids, 0))
        else:
            batch: list[Any] = []
            for _ in range(1 + reader.byte() % 5):
                what = reader.byte() % 8
                sid = reader.below(total)
                if what < 4:
                    batch.append((sid, truth[sid]))
                elif what == 4:
                    batch.append((reader.number(), reader.take(reader.byte() % SIZE)))
                elif what == 5:
                    wild = _wild_header(reader)
                    if wild[4] + wild[6] + wild[7] > 200_000 or _result(coefficients.expand, *wild) is ValueError:
                        batch.append((*wild, bytes(SIZE)))
                elif what == 6:
                    h = header(reader.below(99), [], range(sid, total), 1 + reader.byte() % 12)
                    batch.append((*h, repair_symbol(truth, h)))
                else:
                    batch.append([None, (), (1,), (sid, None), (None, b"")][reader.byte() % 5])
            at = 0
            while at < len(batch):
                at, stop = both(lambda side, b=batch, i=at: side[1].take(b, i, end))
                at += stop == _codec.INTAKE_ODD
            both(lambda side: side[1].counts())
        both(seen)


def kernels(data: bytes) -> None:
    """Every level as the scalar one, for any length, alignment and coefficients; bytes outside stay."""
    reader = Reader(data)
    n, k = 64 * (reader.byte() % 25), reader.byte() % 12
    rng = np.random.default_rng(reader.below(65_536))
    memory = rng.integers(0, 256, (k + 1, n + 192), dtype=np.uint8)
    starts = [64 + reader.byte() % 64 for _ in range(k + 1)]
    sources = [memory[i, start : start + n] for i, start in enumerate(starts[:k])]
    factors = reader.take(k)
    c = reader.byte()
    results = []
    for level in LEVELS:
        row = memory[k].copy()
        y = row[starts[k] : starts[k] + n]
        _codec._dot(level, y, sources, factors)
        if k:
            _codec._axpy(level, y, sources[0], c)
        _codec._scal(level, y, c ^ 1)
        results.append(row.tobytes())
        assert results[-1] == results[0], level
        row[starts[k] : starts[k] + n] = memory[k, starts[k] : starts[k] + n]
        assert np.array_equal(row, memory[k]), level


TARGETS: dict[str, Callable[[bytes], None]] = {
    "headers": headers,
    "session": session,
    "poisoned": poisoned,
    "kernels": kernels,
    "intake": intake,
}
