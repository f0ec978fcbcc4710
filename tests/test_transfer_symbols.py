"""Batches of raw symbols: the receiver judges them exactly as parsed frames taken one by one by every rule.

The oracle is the receiver with an intake that takes nothing: every packet and every recovered symbol is judged in
Python, in the order of the rules. The other sides use the native intake and its twin.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec import _codec
from quic_pfec.fec import reference
from quic_pfec.transfer import receiver as module
from quic_pfec.transfer.receiver import Event, Frozen, Receiver, UnitReceived
from quic_pfec.transfer.units import DigestSink
from quic_pfec.wire.errors import PeerError
from quic_pfec.wire.frames import AckStatus, ManifestFrame, RepairFrame, RepairHeader, SourceFrame
from quic_pfec.wire.limits import Limits
from tests.transfer_world import SIZE, manifest_frame, receiver, world

WORLD = world([4, 1, 3, 4, 5, 1, 2, 4])
COUNT = WORLD.symbols
Frame = SourceFrame | RepairFrame | ManifestFrame


class Judging:
    """An intake that takes nothing."""

    def __init__(self, decoder: Any, useless_repairs: int) -> None:
        self.useless_left = useless_repairs
        self.highest = 0
        self._twin = reference.Intake(decoder, useless_repairs)

    def bind(self, *arrays: Any) -> None:
        self._twin.bind(*arrays)

    def take(self, packets: list[Any], start: int, end: int) -> tuple[int, int]:
        return start, _codec.INTAKE_ODD

    def place(self, sids: list[int], start: int) -> tuple[int, int]:
        return start, _codec.INTAKE_ODD

    def collect(self, unit: int) -> bytes:
        return self._twin.collect(unit)

    def counts(self) -> tuple[int, int, int, int, int, bool]:
        return 0, 0, 0, 0, 0, False


class Record(DigestSink):
    """Keeps all units that it was shown, in their order."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bytes, bool]] = []

    def write_unit(self, unit: int, data: bytes) -> bool:
        accepted = super().write_unit(unit, data)
        self.seen.append((unit, data, accepted))
        return accepted


def packet(frame: Frame) -> tuple[Any, ...]:
    if isinstance(frame, SourceFrame):
        return frame.sid, memoryview(frame.symbol)
    assert isinstance(frame, RepairFrame)
    h = frame.header
    return (
        h.transfer_id, h.repair_number, h.first_sid, h.degree, h.head_span, h.head, h.tail_offset, h.tail_span,
        memoryview(frame.symbol),
    )  # fmt: skip


@contextmanager
def intake_is(kind: Any) -> Iterator[None]:
    before = module.Intake
    module.Intake = kind
    try:
        yield
    finally:
        module.Intake = before


def wild_frame(chance: random.Random, number: int, hostility: float) -> SourceFrame | RepairFrame:
    sid = chance.randrange(COUNT)
    if chance.random() >= hostility:
        if chance.random() < 0.6:
            return WORLD.source(sid)
        return WORLD.repair(number, sid, chance.randint(1, COUNT - sid), degree=chance.choice([1, 3, 48]))
    span = chance.randint(1, COUNT - sid)
    honest = WORLD.repair(number, sid, span)
    return chance.choice(
        [
            lambda: WORLD.source(sid, of=chance.randrange(COUNT)),  # the bytes of another
            lambda: SourceFrame(0, sid, b"\xff\xff\xff\xff" + bytes(SIZE - 4)),  # no such unit
            lambda: SourceFrame(0, sid, bytes(WORLD.encoder.symbol(sid))[:-1] + b"?"),
            lambda: SourceFrame(0, COUNT + chance.randrange(3), bytes(SIZE)),
            lambda: SourceFrame(0, 5000, bytes(SIZE)),
            lambda: SourceFrame(0, sid, bytes(SIZE + 8)),
            lambda: WORLD.repair(number, sid, span, lie=True),
            lambda: WORLD.repair(number, sid, 1, lie=True),
            lambda: WORLD.repair(7, 0, COUNT),  # again
            lambda: RepairFrame(honest.header, bytes(SIZE - 4)),
            lambda: RepairFrame(RepairHeader(0, number, sid, 9, 0, b"", 0, COUNT - sid + 1), bytes(SIZE)),
            lambda: RepairFrame(RepairHeader(0, number, 4090, 9, 0, b"", 0, 10), bytes(SIZE)),
        ]
    )()


class Side:
    """A receiver and everything that can be seen of it."""

    def __init__(self, intake: Any, limits: Limits, raw: bool) -> None:
        self.intake, self.raw = intake, raw
        self.sink = Record()
        self.receiver = Receiver(0, limits, 0.0)
        self.error: tuple[int, bool, str] | None = None
        self.events: list[Event] = []

    def do(self, act: Any) -> None:
        if self.error is not None:
            return
        with intake_is(self.intake):
            try:
                self.events += act(self)
            except PeerError as error:
                self.error = error.code, error.application, str(error)

    def feed(self, frames: list[Frame], now: float) -> list[Event]:
        if not self.raw or any(isinstance(frame, ManifestFrame) for frame in frames):
            return self.receiver.receive_batch(frames, now)
        return self.receiver.receive_symbols([packet(frame) for frame in frames], now)

    def seen(self, now: float) -> tuple[Any, ...]:
        got = self.receiver
        table = got.units
        arrays = () if table is None else (table.complete.tolist(), table.corrupt.tolist(), table._missing.tolist())
        return (
            self.error, self.events, asdict(got.stats), got.status, got.next_timer(), self.sink.seen,
            got.known_bitmap(), got.recovered_symbols(), got.partial_units(), arrays, got.feedback_due(now),
            got._knowledge(),
        )  # fmt: skip


@settings(deadline=None, max_examples=250)
@given(
    seed=st.integers(0, 2**32),
    hostility=st.sampled_from([0.0, 0.02, 0.1, 0.3]),
    accept_at=st.integers(0, 12),
    deadline_s=st.sampled_from([0.004, 0.011, 1.0]),
    useless=st.sampled_from([3, 4096]),
)
def test_raw_batches_are_judged_as_frames_one_by_one(
    seed: int, hostility: float, accept_at: int, deadline_s: float, useless: int
) -> None:
    chance = random.Random(seed)
    limits = Limits(initial_credit=chance.choice([16, 4096]), max_unknown=chance.choice([6, 512]))
    sides = [Side(Judging, limits, False), Side(_codec.Intake, limits, True), Side(reference.Intake, limits, True)]
    before = module.USELESS_REPAIRS
    module.USELESS_REPAIRS = useless
    try:
        for step in range(16):
            now = 0.001 * step
            frames: list[Frame] = [
                wild_frame(chance, 100 * step + i, hostility) for i in range(chance.choice([0, 1, 3, 12]))
            ]
            if chance.random() < 0.2:
                frames.insert(chance.randint(0, len(frames)), manifest_frame(deadline_s))
            timer = chance.random() < 0.3
            for side in sides:
                side.do(lambda it, f=frames, at=now: it.feed(f, at))
                if step == accept_at:
                    side.do(lambda it, at=now: it.receiver.accept(WORLD.sizes, COUNT, SIZE, it.sink, at))
                if timer:
                    side.do(lambda it, at=now: it.receiver.on_timer(at))
            expected = sides[0].seen(now)
            assert sides[1].seen(now) == expected
            assert sides[2].seen(now) == expected
            if chance.random() < 0.3:
                for side in sides:
                    side.receiver.feedback(now)
    finally:
        module.USELESS_REPAIRS = before


def test_a_batch_is_one_crossing_and_one_more_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    class Counting:
        def __init__(self, decoder: Any, useless: int) -> None:
            self.inner = _codec.Intake(decoder, useless)

        def take(self, *arguments: Any) -> tuple[int, int]:
            nonlocal calls
            calls += 1
            return self.inner.take(*arguments)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    monkeypatch.setattr(module, "Intake", Counting)
    of = world([10] * 20)
    got = receiver(of)
    judged: list[Any] = []
    monkeypatch.setattr(Receiver, "_judge", lambda self, *arguments: judged.append(arguments))
    events = got.receive_symbols([(sid, of.encoder.symbol(sid)) for sid in range(200)], 0.1)
    assert [event.unit for event in events if isinstance(event, UnitReceived)] == list(range(20))
    assert events[-1] == Frozen(complete=True)
    assert calls == 20  # the last packet completes the last unit
    assert judged == []


def test_views_are_read_during_the_call_alone() -> None:
    sink = Record()
    got = receiver(WORLD, sink=sink)
    datagram = bytearray(SIZE)
    for sid in range(COUNT):
        datagram[:] = WORLD.encoder.symbol(sid)
        got.receive_symbols([(sid, memoryview(datagram))], 0.1)
    datagram.append(0)  # BufferError if a view were left
    assert got.status is AckStatus.COMPLETE
    assert all(accepted for _, _, accepted in sink.seen)


def test_late_batches_are_counted() -> None:
    got = receiver(WORLD, deadline_s=0.5)
    batch = [packet(WORLD.source(0)), packet(WORLD.repair(0, 0, 4)), (10**9, b"")]
    assert got.receive_symbols(batch, 0.5) == [Frozen(complete=False)]
    assert got.receive_symbols(batch, 0.6) == []
    assert (got.stats.late, got.stats.repairs_late, got.stats.source) == (6, 2, 0)


def dense_losses(lost: int, size: int) -> tuple[Receiver, list[tuple[Any, ...]]]:
    """A receiver of one large unit that received nothing, and as many dense repairs as it takes."""
    of = world([lost])
    got = receiver(of)
    return got, [packet(of.repair(n, 0, lost)) for n in range(lost + 3)]


def test_a_slice_is_bounded_in_symbols_and_in_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one call materialises: at most POLL_SLICE symbols, none begun after POLL_MACS; all of it at the freeze."""
    lost = 200
    got, repairs = dense_losses(lost, SIZE)
    got.receive_symbols(repairs, 0.1)
    decoder = got._decoder
    assert decoder is not None
    assert decoder.rank + got.stats.recovered == lost
    calls = 1
    while decoder.pending:
        assert got.event_timer() == 0.1  # at once, again and again
        macs, recovered = decoder.counters()["payload_macs"], got.stats.recovered
        got.on_timer(0.1)
        work, some = decoder.counters()["payload_macs"] - macs, got.stats.recovered - recovered
        assert 0 < some <= module.POLL_SLICE
        assert work < module.POLL_MACS + 3 * 512
        assert some == module.POLL_SLICE or work >= module.POLL_MACS or not decoder.pending
        calls += 1
    assert calls >= lost / module.POLL_SLICE
    assert got.status is AckStatus.COMPLETE
    frozen, repairs = dense_losses(lost, SIZE)
    frozen.receive_symbols(repairs, 0.1)
    assert frozen.on_timer(1.0)[-1] == Frozen(complete=True)
    assert frozen.stats.recovered == lost


def test_partial_units_come_in_one_copy_with_their_ranges() -> None:
    got = receiver(WORLD, deadline_s=0.5)
    got.receive_symbols([packet(WORLD.source(sid)) for sid in (0, 1, 3)], 0.1)
    ((unit, data, ranges),) = got.partial_units()
    payload = SIZE - 4
    assert (unit, ranges) == (0, [(0, 2 * payload), (3 * payload, int(WORLD.sizes[0]))])
    parts = [bytes(WORLD.encoder.symbol(sid))[4:] for sid in range(4)]
    parts[2] = bytes(payload)
    assert data == b"".join(parts)[: int(WORLD.sizes[0])]
    assert isinstance(data, bytes)
    assert np.asarray(got.units.complete if got.units else []).sum() == 0
