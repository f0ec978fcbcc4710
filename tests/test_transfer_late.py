"""Late repair between the halves of a transfer: the freeze as it was, symbols after it, and every way to the end."""

from __future__ import annotations

import pytest

from quic_pfec.schedule.policies import POLICY_NAMES
from quic_pfec.transfer import late as module
from quic_pfec.transfer.events import LateOver
from quic_pfec.transfer.late import LateReceiver
from quic_pfec.transfer.sender import FrameKind, Sender
from quic_pfec.wire.errors import AppCode, ErrorCode
from quic_pfec.wire.frames import AckStatus, ManifestFrame, PfecAckFrame
from quic_pfec.wire.limits import Limits
from tests.receiver_world import WORLD, Keep, expected, fails, feed, frozen, units
from tests.transfer_world import SIZE, SLOT_S, ack, manifest_frame, sender

REST = range(20, 40)


def late_receiver(late_s: float = 5.0, *, sink: Keep | None = None) -> LateReceiver:
    """Admitted at 0.0, to freeze at 1.0; half of its symbols came, five units of ten."""
    made = LateReceiver(0, Limits(), 0.0)
    made.receive_batch([manifest_frame(1.0)], 0.0)
    made.accept(WORLD.sizes, WORLD.symbols, SIZE, sink or Keep(), 0.0)
    made.allow_late(late_s)
    feed(made, range(20))
    return made


def told(receiver: LateReceiver, now: float) -> tuple[AckStatus, int]:
    frame = receiver.feedback(now)
    return frame.status, frame.remaining_us


def test_the_freeze_is_the_state_at_the_deadline_and_what_waits_is_not_lost() -> None:
    first, second = Keep(), Keep()
    got = late_receiver(sink=first)
    known = got.known_bitmap()
    assert frozen(feed(got, REST[:8], now=1.0)) != []  # the very packets that tell the time
    assert got.takes_late
    assert feed(got, REST[8:12], now=1.001) == []
    assert got.known_bitmap() == known
    assert got.stats.late == 0
    assert units(got.go_on(second, 1.002)) == [5, 6, 7]
    assert sorted(first.data) == [0, 1, 2, 3, 4]
    events = feed(got, REST[12:], now=1.5)
    assert units(events) == [8, 9]
    assert events[-1] == LateOver()
    assert second.data == {unit: expected(WORLD, unit) for unit in range(5, 10)}
    assert told(got, 1.6) == (AckStatus.COMPLETE, 0)
    assert not got.takes_late
    assert got.event_timer() is None


def test_feedback_says_for_how_long_late_symbols_are_taken() -> None:
    got = late_receiver(5.0)
    got.on_timer(1.0)
    assert told(got, 1.0) == (AckStatus.FROZEN, 5_000_000)
    got.go_on(Keep(), 1.0)
    feed(got, [30], now=2.0)
    assert got.feedback_due(2.1)
    frame = got.feedback(3.0)
    assert (frame.status, frame.remaining_us, frame.next_sid) == (AckStatus.FROZEN, 3_000_000, 20)
    assert frame.ranges == ((30, 31),)
    assert got.feedback_time() is not None  # it goes on also when nothing comes: a PFEC_ACK may be lost


def test_the_time_limit_frees_the_arena_and_says_so() -> None:
    sink = Keep()
    got = late_receiver(2.0)
    got.on_timer(1.0)
    got.go_on(sink, 1.0)
    feed(got, REST[:6], now=2.9)
    assert got.event_timer() == 3.0
    assert got.on_timer(3.0) == [LateOver()]
    assert got.units is None
    assert got._decoder is None
    copies = 0
    now = 3.0
    while (due_s := got.feedback_time()) is not None:
        now = max(now, due_s)
        assert told(got, now) == (AckStatus.FROZEN, 0)
        copies += 1
    assert copies == 3
    assert feed(got, REST[6:], now=3.5) == []
    assert got.stats.late == 14
    assert sorted(sink.data) == [5]


def test_symbols_after_the_limit_are_late_even_before_the_timer() -> None:
    got = late_receiver(2.0)
    got.on_timer(1.0)
    got.go_on(Keep(), 1.0)
    assert feed(got, REST, now=3.0) == []
    assert got.stats.late == 20


def test_released_in_the_middle_it_tells_the_sender_to_stop() -> None:
    got = late_receiver()
    got.on_timer(1.0)
    got.go_on(Keep(), 1.0)
    got.release()
    assert got._decoder is None
    assert told(got, 1.1) == (AckStatus.FROZEN, 0)
    assert feed(got, REST, now=1.2) == []
    assert got.go_on(Keep(), 1.3) == []


@pytest.mark.parametrize("granted", [True, False])
def test_nothing_late_is_taken_unless_it_was_granted_and_something_lacks(granted: bool) -> None:
    got = late_receiver(5.0 if granted else 0.0)
    if granted:
        assert frozen(feed(got, REST)) != []  # complete in time
        assert got.status is AckStatus.COMPLETE
    else:
        got.on_timer(1.0)
        assert told(got, 1.0) == (AckStatus.FROZEN, 0)
    assert not got.takes_late
    assert got.go_on(Keep(), 1.0) == []
    assert feed(got, [39], now=1.1) == []
    assert got.stats.late == 1


def test_repairs_help_after_the_freeze_as_before() -> None:
    sink = Keep()
    got = late_receiver()
    got.on_timer(1.0)
    got.go_on(sink, 1.0)
    feed(got, [sid for sid in REST if sid not in (22, 35)], now=1.1)
    events = got.receive_batch([WORLD.repair(0, 20, 20), WORLD.repair(1, 20, 20)], 1.2)
    while got.takes_late:
        events += got.on_timer(1.2)
    assert LateOver() in events
    assert sink.data == {unit: expected(WORLD, unit) for unit in range(5, 10)}


def test_the_manifest_cannot_come_after_the_freeze() -> None:
    got = late_receiver()
    got.on_timer(1.0)
    got.receive_batch([manifest_frame(0.001)], 1.1)
    assert got.stats.late == 1
    assert got.takes_late


def test_every_rule_still_binds_the_sender() -> None:
    got = late_receiver()
    got.on_timer(1.0)
    got.go_on(Keep(), 1.0)
    with fails(ErrorCode.PROTOCOL_VIOLATION):  # row 9
        got.receive_batch([WORLD.source(3, of=4)], 1.1)
    with fails(ErrorCode.PROTOCOL_VIOLATION):  # row 6
        got.receive_symbols([(40, bytes(SIZE))], 1.1)
    got.receive_batch([WORLD.repair(0, 2, 1, lie=True)], 1.3)
    with fails(AppCode.KV_INTEGRITY, application=True):  # row 15
        got.receive_batch([WORLD.repair(1, 3, 1, lie=True)], 1.3)


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD_SYMBOLS", 5)
    got = late_receiver()
    got.on_timer(1.0)
    feed(got, REST[:4], now=1.0)
    feed(got, REST[4:], now=1.0)
    assert got.stats.late == 15
    got.go_on(Keep(), 1.1)
    assert got.stats.source == 25


# the sender


def heard(out: Sender, sequence: int = 0, **fields: object) -> None:
    out.on_feedback(ack(sequence, 0, **fields))


def test_the_sender_goes_on_by_a_second_deadline_without_the_manifest() -> None:
    out = sender(WORLD, "arq", deadline_s=0.020, late_s=5.0)  # cut off at 15 ms
    before = out.plan(0.0, 10)
    heard(out)
    slots = out.slots_total
    assert not out.is_late
    assert out.ready(0.015)
    assert out.is_late
    assert out.deadline_s == 5.020
    after = [frame for slot in range(15, 60) for frame in out.plan(slot * SLOT_S)]
    assert {frame.kind for frame in after} == {FrameKind.SOURCE}
    assert len(after) == WORLD.symbols - sum(frame.kind is FrameKind.SOURCE for frame in before)
    assert out.on_time.source == out.stats.source - len(after)
    assert out.slots_total == slots
    for frame in after[:3]:
        assert frame.token is not None
        out.on_fate(frame.token, False)
    assert [frame.kind for frame in out.plan(0.1, 9)] == [FrameKind.RESEND] * 3
    assert out.finished(5.015)


def test_nobody_goes_on_unasked_or_unheard() -> None:
    plain, alone = sender(WORLD, deadline_s=0.02), sender(WORLD, deadline_s=0.02, late_s=5.0)
    for out in (plain, alone):
        out.plan(0.0, 5)
        if out is plain:
            heard(out)
        assert out.finished(0.015)
        assert out.plan(0.016, 5) == []
    heard(alone)  # it comes after the cut-off: now it is known that the receiver has the transfer
    assert alone.ready(0.017)


@pytest.mark.parametrize("status", [AckStatus.COMPLETE, AckStatus.FROZEN])
def test_the_sender_stops_when_it_is_told(status: AckStatus) -> None:
    out = sender(WORLD, deadline_s=0.02, late_s=5.0)
    out.plan(0.0, 5)
    heard(out, 0, status=AckStatus.FROZEN, remaining_us=1)  # a receiver that froze before we thought it would
    assert out.ready(0.001)
    assert out.is_late
    heard(out, 1, status=status, remaining_us=0)
    assert out.finished(0.002)
    assert out.next_timer() is None


def test_a_peer_that_only_claims_to_go_on_is_heard_by_those_alone_who_asked() -> None:
    out = sender(WORLD, deadline_s=0.02)
    out.plan(0.0, 5)
    heard(out, 0, status=AckStatus.FROZEN, remaining_us=10_000_000)
    assert out.finished(0.001)


@pytest.mark.parametrize("policy", [name for name in POLICY_NAMES if name != "none"])
def test_together_they_complete_what_the_deadline_cut(policy: str) -> None:
    """One packet a millisecond, every fifth lost; the receiver freezes at half of the cache."""
    out = sender(WORLD, policy, deadline_s=0.030, late_s=5.0)
    got = LateReceiver(0, Limits(), 0.0)
    got.rtt_s = 0.01
    first, second = Keep(), Keep()
    reported: bytes | None = None
    acks: list[tuple[float, PfecAckFrame]] = []
    fates: list[tuple[float, int, bool]] = []
    flying: list[tuple[float, object]] = []
    number, over = 0, False
    for slot in range(2000):
        now = slot * SLOT_S
        while acks and acks[0][0] <= now:
            out.on_feedback(acks.pop(0)[1])
        while fates and fates[0][0] <= now:
            _, token, delivered = fates.pop(0)
            out.on_fate(token, delivered)
        for frame in out.plan(now):
            number += 1
            lost = number % 5 == 0
            if frame.token is not None:
                fates.append((now + 0.010, frame.token, not lost))
            if not lost:
                flying.append((now + 0.005, frame.frame))
        events = []
        while flying and flying[0][0] <= now:
            arrived = flying.pop(0)[1]
            events += got.receive_batch([arrived], now)  # type: ignore[list-item]
            if isinstance(arrived, ManifestFrame) and got.units is None:
                got.accept(WORLD.sizes, WORLD.symbols, SIZE, first, now)
                got.allow_late(5.0)
        timer_s = got.event_timer()
        if timer_s is not None and timer_s <= now:
            events += got.on_timer(now)
        if frozen(events):
            reported = got.known_bitmap()
            events += got.go_on(second, now)
        over |= LateOver() in events
        if got.feedback_due(now):
            acks.append((now + 0.005, got.feedback(now)))
        if over and out.finished(now):
            break
    assert reported is not None
    assert over
    assert got.status is AckStatus.COMPLETE
    assert out.finished(now)
    assert len(first.data) < 10
    assert first.data | second.data == {unit: expected(WORLD, unit) for unit in range(10)}
    assert not first.data.keys() & second.data.keys()
