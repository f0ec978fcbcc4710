"""The receiver: symbols to units, the freeze, the feedback."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.transfer import receiver as module
from quic_pfec.transfer.receiver import Frozen, ManifestReceived, Receiver
from quic_pfec.transfer.units import DigestSink
from quic_pfec.wire.errors import AppCode
from quic_pfec.wire.frames import (
    AckStatus,
    PfecAckFrame,
    RepairFrame,
    SourceFrame,
    parse_pfec_ack,
)
from quic_pfec.wire.limits import Limits
from tests.receiver_world import SMALL, WORLD, Keep, expected, fails, feed, frozen, piece, units
from tests.transfer_world import MANIFEST, SIZE, manifest_frame, receiver, world

# the way of a symbol


def test_units_come_out_as_they_complete() -> None:
    sink = Keep()
    got = receiver(WORLD, sink=sink)
    assert units(feed(got, [0, 2, 3, 7])) == []
    assert units(feed(got, [1])) == [0]
    assert units(feed(got, [6, 4, 8, 5])) == [1]
    assert sink.data == {0: expected(WORLD, 0), 1: expected(WORLD, 1)}
    assert got.stats.source == 9


def test_repairs_recover_what_was_lost() -> None:
    sink = Keep()
    got = receiver(WORLD, sink=sink)
    feed(got, [sid for sid in range(40) if sid not in {3, 17, 18}])
    assert got.receive_batch([WORLD.repair(0, 0, 40)], 0.2) == []
    got.receive_batch([WORLD.repair(1, 3, 20)], 0.2)
    events = got.receive_batch([WORLD.repair(2, 16, 10)], 0.2)
    assert sorted(units(events)) == [0, 4]
    assert frozen(events) == [Frozen(complete=True)]
    assert sink.data == {unit: expected(WORLD, unit) for unit in range(10)}
    assert (got.stats.recovered, got.stats.repairs_useful, got.stats.source) == (3, 3, 37)


def test_symbols_before_the_manifest_are_kept() -> None:
    got = Receiver(0, Limits(), 0.0)
    assert feed(got, range(2, 38)) == []
    got.receive_batch([WORLD.repair(0, 0, 2), WORLD.repair(1, 0, 2)], 0.1)
    (event,) = got.receive_batch([manifest_frame()], 0.2)
    assert event == ManifestReceived(MANIFEST)
    events = got.accept(WORLD.sizes, WORLD.symbols, SIZE, DigestSink(), 0.2)
    assert sorted(units(events)) == list(range(9))
    assert got.feedback(0.2).credit == 4096
    assert frozen(feed(got, [38, 39])) == [Frozen(complete=True)]


def test_the_manifest_grants_credit_for_the_whole_transfer() -> None:
    got = Receiver(0, SMALL, 0.0)
    feed(got, range(10))
    assert got.feedback(0.1).credit == 16
    got.receive_batch([manifest_frame()], 0.1)
    got.accept(WORLD.sizes, WORLD.symbols, SIZE, DigestSink(), 0.1)
    assert got.feedback(0.2).credit == 40
    assert frozen(feed(got, range(10, 40)))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), accept_after=st.integers(0, 60), loss=st.floats(0.0, 0.9))
def test_any_order_any_duplicates(seed: int, accept_after: int, loss: float) -> None:
    """The units are right, and every PFEC_ACK is legal, never goes backwards and claims nothing untrue."""
    chance = random.Random(seed)
    frames: list[SourceFrame | RepairFrame] = [WORLD.source(sid) for sid in range(40) if chance.random() > loss]
    frames += [WORLD.repair(n, *_span(chance), degree=chance.choice([1, 3, 48])) for n in range(chance.randrange(30))]
    frames += chance.sample(frames, len(frames) // 3)
    chance.shuffle(frames)
    sink = Keep()
    got = Receiver(0, Limits(), 0.0)
    got.receive_batch([manifest_frame(10.0)], 0.0)
    before: PfecAckFrame | None = None
    for number, frame in enumerate(frames):
        now = 0.001 * number
        got.receive_batch([frame], now)
        if number == accept_after:
            got.accept(WORLD.sizes, WORLD.symbols, SIZE, sink, now)
        ack = got.feedback(now)
        assert parse_pfec_ack(ack.body(), 0, Limits())[0] == ack
        known = got.known_bitmap()
        for start, stop in [(0, ack.next_sid), *ack.ranges]:
            assert all(known[sid // 8] >> sid % 8 & 1 for sid in range(start, stop))
        assert ack.next_sid + ack.seen_span <= 40
        if before is not None:
            assert ack.sequence == before.sequence + 1
            assert (ack.next_sid, ack.credit) >= (before.next_sid, before.credit)
        before = ack
    if got.units is None:
        got.accept(WORLD.sizes, WORLD.symbols, SIZE, sink, 1.0)
    got.on_timer(10.0)
    assert got.status is not AckStatus.RUNNING
    assert got.units is not None
    assert sorted(sink.data) == list(np.flatnonzero(got.units.complete))
    assert all(data == expected(WORLD, unit) for unit, data in sink.data.items())


def _span(chance: random.Random) -> tuple[int, int]:
    first = chance.randrange(40)
    return first, chance.randint(1, 40 - first)


# the manifest


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 10_000), cuts=st.sets(st.integers(1, len(MANIFEST) - 1), max_size=12))
def test_fragments_of_all_copies_merge(seed: int, cuts: set[int]) -> None:
    chance = random.Random(seed)
    bounds = [0, *sorted(cuts), len(MANIFEST)]
    pieces = [piece(low, high - low) for low, high in pairwise(bounds)]
    pieces += [piece(start, chance.randint(1, 80)) for start in chance.choices(range(len(MANIFEST)), k=5)]
    chance.shuffle(pieces)
    got = Receiver(0, Limits(), 0.0)
    missing = set(range(len(MANIFEST)))
    for frame in pieces:
        events = got.receive_batch([frame], 0.0)
        before = bool(missing)
        missing -= set(range(frame.offset, frame.offset + len(frame.data)))
        assert events == ([ManifestReceived(MANIFEST)] if before and not missing else [])
    assert not missing


def test_copies_that_differ() -> None:
    wrong = MANIFEST[:50] + b"?" + MANIFEST[51:]
    for first, second in (
        (piece(0, 200), piece(0, 200, data=MANIFEST + b"x")),
        (piece(0, 200), piece(40, 20, data=wrong)),
        (piece(30, 40), piece(0, 200, data=wrong)),
        (piece(30, 21), piece(50, 20, data=wrong)),
        (piece(50, 20), piece(30, 21, data=wrong)),
    ):
        got = Receiver(0, Limits(), 0.0)
        got.receive_batch([first], 0.0)
        with fails(AppCode.KV_MANIFEST, application=True):
            got.receive_batch([second], 0.0)


def test_a_manifest_in_too_many_pieces() -> None:
    got = Receiver(0, Limits(), 0.0)
    with fails(AppCode.KV_MANIFEST, application=True):
        got.receive_batch([piece(offset, 1) for offset in range(0, 200, 2)], 0.0)


def test_by_frame_and_by_stream() -> None:
    got = Receiver(0, Limits(), 0.0)
    assert got.receive_manifest(MANIFEST, 0.1) == [ManifestReceived(MANIFEST)]
    assert got.deadline_s is None  # the stream says nothing of time
    assert got.receive_batch([manifest_frame()], 0.2) == []
    assert got.receive_manifest(MANIFEST, 0.3) == []
    assert got.deadline_s == pytest.approx(1.2)
    with fails(AppCode.KV_MANIFEST, application=True):
        got.receive_manifest(MANIFEST + b"x", 0.4)
    got = Receiver(0, Limits(), 0.0)
    got.receive_batch([piece(100, 50)], 0.1)
    with fails(AppCode.KV_MANIFEST, application=True):
        got.receive_manifest(bytes(200), 0.2)


# the deadline


def test_the_earliest_deadline_of_all_copies_stands() -> None:
    got = Receiver(0, Limits(), 0.0)
    got.receive_batch([piece(0, 10, 1.0)], 0.100)
    got.receive_batch([piece(0, 10, 0.9)], 0.250)  # this copy queued for 50 ms
    assert got.deadline_s == pytest.approx(1.1)
    got.receive_batch([piece(0, 10, 0.7)], 0.390)  # this one queued for less than the first
    assert got.deadline_s == pytest.approx(1.09)
    got.note_remaining(5.0, 0.4)
    assert got.deadline_s == pytest.approx(1.09)
    feed(got, [0], 0.5)
    assert got.feedback(0.5).remaining_us == pytest.approx(590_000, abs=1)


def test_freezes_at_the_deadline() -> None:
    got = receiver(WORLD, deadline_s=0.5)
    feed(got, range(10))
    got.feedback(0.11)
    assert got.on_timer(0.4999) == []
    assert got.on_timer(0.5) == [Frozen(complete=False)]
    assert (got.status, got.frozen_s) == (AckStatus.FROZEN, 0.5)
    assert got.on_timer(0.6) == []


def test_a_packet_after_the_deadline_is_late_though_the_timer_has_not_fired() -> None:
    got = receiver(WORLD, deadline_s=0.5)
    feed(got, range(39))
    assert feed(got, [39], 0.5001) == [Frozen(complete=False)]
    assert (got.status, got.stats.late, got.stats.source) == (AckStatus.FROZEN, 1, 39)


def test_freezes_early_when_everything_is_known() -> None:
    got = receiver(WORLD, deadline_s=0.5)
    assert feed(got, range(40), 0.2)[-1] == Frozen(complete=True)
    assert (got.status, got.frozen_s) == (AckStatus.COMPLETE, 0.2)


def test_without_a_manifest_it_ends_too() -> None:
    got = Receiver(0, Limits(manifest_timeout_us=2_000_000), 1.0)
    feed(got, range(10), 1.1)
    assert got.on_timer(2.9) == []
    assert got.on_timer(3.0) == [Frozen(complete=False)]
    assert got.partial_units() == []


def test_next_timer() -> None:
    got = Receiver(0, Limits(), 1.0)
    assert got.next_timer() == 11.0  # the manifest
    feed(got, [0], 1.0)
    got.receive_batch([manifest_frame(0.5)], 1.0)
    assert got.deadline_s == 1.5
    feed(got, [1], 1.1)
    assert got.feedback_due(1.1)
    got.feedback(1.1)
    assert got.next_timer() == pytest.approx(1.1 + 1.5 * 0.1 + 0.025)


# decoding in slices


def test_a_burst_of_recovered_symbols_comes_in_slices() -> None:
    sink = Keep()
    of = world([20, 20])
    got = receiver(of, sink=sink)
    got.receive_batch([of.repair(number, 0, 40) for number in range(39)], 0.1)
    assert got.stats.recovered == 0
    number = 39
    while got.stats.recovered == 0:  # one in 255 brings nothing
        got.receive_batch([of.repair(number, 0, 40)], 0.2)
        number += 1
    assert got.stats.recovered == module.POLL_SLICE == 32
    assert got.status is AckStatus.RUNNING
    got.feedback(0.2)
    assert got.next_timer() == 0.2  # at once
    events = got.on_timer(0.2)
    assert frozen(events) == [Frozen(complete=True)]
    assert got.stats.recovered == 40
    assert len(sink.data) == 2


def test_a_slice_ends_with_so_many_units() -> None:
    """Each costs its sink a digest and a copy."""
    of = world([1] * 30)
    got = receiver(of)
    events = got.receive_batch([of.repair(number, 0, 30) for number in range(33)], 0.1)
    assert len(units(events)) == module.POLL_UNITS == got.stats.recovered
    calls = 1
    while not frozen(events):
        assert got.event_timer() == 0.1  # at once
        events = got.on_timer(0.1)
        assert 0 < len(units(events)) < module.POLL_UNITS + module.POLL_STEP
        calls += 1
    assert calls == -(-30 // module.POLL_UNITS)


def test_the_freeze_takes_what_is_determined() -> None:
    got = receiver(WORLD, deadline_s=0.5)
    first = got.receive_batch([WORLD.repair(number, 0, 38) for number in range(40)], 0.1)
    assert 0 < got.stats.recovered < 38
    events = got.on_timer(0.5)
    assert got.stats.recovered == 38
    assert units(first) + units(events) == list(range(9))
    assert events[-1] == Frozen(complete=False)


# feedback


@pytest.mark.parametrize("rtt_s", [0.0005, 0.020, 0.2])
def test_at_most_one_feedback_a_millisecond_and_three_at_the_end(rtt_s: float) -> None:
    of = world([10] * 100)
    got = receiver(of, deadline_s=0.08)
    got.rtt_s = rtt_s
    chance = random.Random(3)
    sent: list[tuple[float, AckStatus]] = []
    for step in range(100_000):  # every 10 us, a packet every 100 us
        now = step * 1e-5
        got.on_timer(now)
        if step % 10 == 0 and step // 10 < 900 and chance.random() > 0.1:
            feed(got, [step // 10], now, of)
        if got.feedback_due(now):
            sent.append((now, got.feedback(now).status))
    times = [now for now, _ in sent]
    assert min(np.diff(times)) > 0.00099
    assert sum(status is AckStatus.FROZEN for _, status in sent) == 3
    assert got.stats.feedback == len(sent)
    assert 30 < len(sent) < 85
    timer_s = got.next_timer()
    assert timer_s is None


def test_a_gap_is_told_at_once_and_plain_progress_a_little_later() -> None:
    got = receiver(WORLD)
    got.rtt_s = 0.160
    feed(got, [0], 0.100)
    got.feedback(0.100)
    feed(got, [1], 0.101)
    assert not got.feedback_due(0.109)
    assert got.feedback_due(0.1101)  # a sixteenth of a round trip
    got.feedback(0.1101)
    feed(got, [3], 0.1102)
    assert not got.feedback_due(0.1110)
    assert got.feedback_due(0.1112)
    got.feedback(0.1112)
    feed(got, [2], 0.1113)  # unit 0 is complete
    assert got.feedback_due(0.1123)
    ack = got.feedback(0.1123)
    assert (ack.next_sid, ack.seen_span, ack.deficit, ack.ranges) == (4, 0, 0, ())
    assert ack.ack_delay_us == pytest.approx(1000, abs=1)


def test_it_speaks_up_while_nothing_comes() -> None:
    """The sender must not wait for ever when a PFEC_ACK was lost."""
    got = receiver(WORLD)
    got.rtt_s = 0.020
    feed(got, [0, 2], 0.1)
    got.feedback(0.1)
    assert not got.feedback_due(0.15)
    assert got.feedback_due(0.156)
    ack = got.feedback(0.156)
    assert (ack.next_sid, ack.seen_span, ack.deficit, ack.ranges) == (1, 2, 1, ((2, 3),))
    assert got.feedback_due(0.212)


def test_nothing_is_said_before_anything_came() -> None:
    got = Receiver(0, Limits(), 0.0)
    got.receive_batch([piece(0, 10)], 0.0)
    assert not got.feedback_due(0.5)


def test_the_first_feedback_says_that_the_manifest_is_here() -> None:
    """The sender stops repeating it then; three lost copies must not be the end."""
    got = Receiver(0, Limits(), 0.0)
    feed(got, range(10))
    got.receive_batch([piece(0, 150)], 0.1)
    assert not got.feedback_due(0.5)
    got.receive_batch([piece(150, 50)], 0.5)
    assert got.feedback_due(0.5)
    got = Receiver(0, Limits(), 0.0)
    feed(got, range(10))
    assert got.on_timer(10.0) == [Frozen(complete=False)]
    assert got.feedback_due(10.0)  # that it is over is worth telling


def test_deficit_counts_what_repairs_bring() -> None:
    got = receiver(WORLD)
    feed(got, [0, 4])
    assert got.feedback(0.1).deficit == 3
    got.receive_batch([WORLD.repair(0, 0, 8)], 0.1)
    ack = got.feedback(0.2)
    assert (ack.seen_span, ack.deficit) == (7, 5)  # six unknown of eight, one repair held
    assert ack.ranges == ((4, 5),)


def test_ranges_are_bounded() -> None:
    of = world([10] * 20)
    got = receiver(of)
    feed(got, range(1, 200, 2), of=of)
    ack = got.feedback(0.1)
    assert len(ack.ranges) == 64
    assert ack.ranges[0] == (1, 2)


def test_all_feedback_lost_does_not_stop_it() -> None:
    got = receiver(WORLD)
    for sid in range(40):
        feed(got, [sid], 0.01 * sid)
    assert got.status is AckStatus.COMPLETE
    assert got.stats.feedback == 0


def test_release_keeps_the_last_feedback() -> None:
    got = receiver(WORLD, deadline_s=0.5)
    feed(got, [0, 1, 4, 6])
    got.on_timer(0.5)
    first = got.feedback(0.5)
    got.release()
    assert got.units is None
    assert (got.known_bitmap(), got.partial_units()) == (b"", [])
    again = [got.feedback(now) for now in (0.6, 0.7)]
    for ack in again:
        assert (ack.next_sid, ack.seen_span, ack.deficit, ack.ranges) == (2, 5, 3, ((4, 5), (6, 7)))
        assert (ack.status, ack.credit) == (AckStatus.FROZEN, first.credit)
    assert [ack.sequence for ack in (first, *again)] == [0, 1, 2]
    assert not got.feedback_due(10.0)
    got.release()  # twice is harmless
    assert got.receive_batch([WORLD.source(7)], 0.8) == []


def test_partial_units() -> None:
    got = receiver(WORLD, deadline_s=0.5)
    feed(got, [0, 1, 2, 3, 4, 6, 7])
    got.on_timer(0.5)
    ((unit, data, ranges),) = got.partial_units()
    payload = SIZE - 4
    assert (unit, ranges) == (1, [(0, payload), (2 * payload, 4 * payload)])
    whole = expected(WORLD, 1)
    assert data == whole[:payload] + bytes(payload) + whole[2 * payload :]
