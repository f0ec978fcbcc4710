"""The link: due times, drops and losses exactly as its construction says, and an accurate log of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.sim import link as link_module
from quic_pfec.sim.channel import PRESETS, GilbertElliottChannel, TraceChannel, channel_factory, losses
from quic_pfec.sim.link import (
    Delivery,
    Drop,
    Link,
    SlotLog,
    default_queue_bytes,
    default_slot_s,
)

PAPER = PRESETS["paper"]
RATE_BPS = 8e6  # a byte a microsecond


def trace(text: str):
    return lambda: TraceChannel(bytes(int(digit) for digit in text))


class TestTimes:
    def test_due_is_transmission_after_the_backlog_plus_delay(self) -> None:
        link = Link(RATE_BPS, 0.010)
        assert link.send(1.0, 972) == Delivery(pytest.approx(1.0 + 0.001 + 0.010))
        assert link.send(1.0, 472) == Delivery(pytest.approx(1.0 + 0.0015 + 0.010))
        assert link.send(1.0005, 972) == Delivery(pytest.approx(1.0 + 0.0025 + 0.010))
        # Idle since 1.0025: the unused time is gone.
        assert link.send(2.0, 972) == Delivery(pytest.approx(2.0 + 0.001 + 0.010))

    def test_time_does_not_run_backwards(self) -> None:
        link = Link(RATE_BPS, 0.010)
        link.send(1.0, 100)
        with pytest.raises(ValueError, match="backwards"):
            link.send(0.9, 100)

    def test_rate_within_the_rounding_of_doubles(self) -> None:
        """A million packets offered too fast leave at the rate, far from the origin of a real clock too."""
        link = Link(100e6, 0.0, queue_bytes=20_000)
        now, first, delivered = 500_000.0, None, 0
        for step in range(200_000):
            outcome = link.send(now + step * 100e-6, 1372)
            if isinstance(outcome, Delivery):
                first = first or outcome.due_s
                delivered += 1
                last = outcome.due_s
        assert (delivered - 1) * 1400 * 8 / (last - first) == pytest.approx(100e6, rel=1e-6)


class TestQueue:
    def test_tail_drop_at_the_exact_byte(self) -> None:
        link = Link(RATE_BPS, 0.010, queue_bytes=10_000)
        outcomes = [link.send(123456.789, 972) for _ in range(12)]
        assert [isinstance(outcome, Delivery) for outcome in outcomes] == [True] * 10 + [False] * 2
        assert outcomes[-1] is Drop.QUEUE
        # One packet has left: room for one of its size, not for one byte more.
        assert link.send(123456.790, 973) is Drop.QUEUE
        assert isinstance(link.send(123456.790, 972), Delivery)
        stats = link.stats()
        assert (stats.packets, stats.queue_drops, stats.delivered, stats.largest_queue_bytes) == (14, 3, 11, 10_000)

    def test_a_queue_drop_takes_no_time_and_no_step(self) -> None:
        link = Link(RATE_BPS, 0.0, 1000, trace("01"), clock="packet", loss_from_start=True)
        assert isinstance(link.send(0.0, 972), Delivery)
        assert link.send(0.0, 972) is Drop.QUEUE
        assert link.send(0.001, 972) is Drop.CHANNEL
        assert isinstance(link.send(0.002, 972), Delivery)

    def test_default_is_one_round_trip_of_the_rate(self) -> None:
        assert default_queue_bytes(100e6, 0.010) == 250_000
        assert default_queue_bytes(1e6, 0.010) == 30_000
        assert Link(100e6, 0.010).queue_bytes == 250_000


class TestLoss:
    def test_nothing_is_lost_before_the_first_epoch(self) -> None:
        link = Link(RATE_BPS, 0.0, None, trace("1"), corrupt=1.0, reorder=1.0, reorder_s=1.0)
        assert link.send(0.0, 972) == Delivery(pytest.approx(0.001))
        assert link.epoch_s is None
        with pytest.raises(ValueError, match="epoch"):
            link.log()
        link.advance(1.0)
        link.epoch(1.0)
        assert link.send(1.0, 972) is Drop.CHANNEL

    def test_a_lost_packet_takes_its_time(self) -> None:
        link = Link(RATE_BPS, 0.0, None, trace("10"), clock="packet", loss_from_start=True)
        assert link.send(0.0, 972) is Drop.CHANNEL
        assert link.send(0.0, 972) == Delivery(pytest.approx(0.002), slot=1)

    def test_packets_of_one_slot_back_to_back_have_a_slot_each(self) -> None:
        link = Link(RATE_BPS, 0.0, 1 << 30, channel_factory(PAPER, 3), slot_s=1000e-6)
        link.epoch(98_765.4321)
        fates = [link.send(98_765.4321, 972) for _ in range(20_000)]
        expected = losses(GilbertElliottChannel(PAPER, 3), 20_000)
        assert [fate is Drop.CHANNEL for fate in fates] == expected.tolist()
        assert [f.slot for f in fates if isinstance(f, Delivery)] == np.flatnonzero(~expected).tolist()

    def test_a_packet_meets_the_slot_of_its_middle(self) -> None:
        link = Link(RATE_BPS, 0.0, None, slot_s=1000e-6)
        link.epoch(0.0)
        # Transmissions [0.6, 1.1), [1.1, 1.6) and [2.9, 3.3) ms have their middles in slots 0, 1 and 3.
        slots = [link.send(at, size).slot for at, size in ((0.0006, 472), (0.0007, 472), (0.0029, 372))]
        assert slots == [0, 1, 3]
        assert link.log().used.tolist() == [True, True, False, True]

    @given(gaps=st.lists(st.floats(0, 0.02), min_size=1, max_size=60), sizes=st.data())
    @settings(deadline=None, max_examples=50)
    def test_losses_of_the_slots_do_not_depend_on_what_is_sent(self, gaps: list[float], sizes: st.DataObject) -> None:
        link = Link(RATE_BPS, 0.01, None, channel_factory(PAPER, 9), loss_from_start=True)
        now, lost_slots = 0.0, set()
        for gap in gaps:
            now += gap
            outcome = link.send(now, sizes.draw(st.integers(0, 1500)))
            if outcome is Drop.CHANNEL:
                lost_slots.add(len(link.log().losses) - 1)
        log = link.log()
        assert log.losses.tolist() == losses(GilbertElliottChannel(PAPER, 9), len(log.losses)).tolist()
        assert set(np.flatnonzero(log.lost)) == lost_slots
        stats = link.stats()
        assert stats.packets == stats.queue_drops + stats.lost + stats.delivered == len(gaps)

    def test_packet_clock_stands_still_in_silence(self) -> None:
        link = Link(RATE_BPS, 0.0, None, channel_factory(PAPER, 4), clock="packet", loss_from_start=True)
        fates = [link.send(step * step * 0.001, 1000) is Drop.CHANNEL for step in range(400)]
        link.advance(1000.0)
        assert fates == losses(GilbertElliottChannel(PAPER, 4), 400).tolist()
        log = link.log()
        assert (log.slot_s, log.drawn, log.used.all()) == (None, 400, True)

    def test_an_epoch_restarts_everything_but_the_queue(self) -> None:
        link = Link(RATE_BPS, 0.0, None, channel_factory(PAPER, 5), corrupt=0.5, slot_s=1000e-6)
        runs = []
        for start in (10.0, 20.0003, 30.1):
            link.epoch(start)
            fates = [link.send(start + step * 0.001, 972) for step in range(500)]
            runs.append([(f.slot, f.flip) if isinstance(f, Delivery) else f for f in fates])
            assert link.stats().packets == 500
            assert link.epoch_s == start
        assert runs[0] == runs[1] == runs[2]

        link.send(31.0, 972)
        link.epoch(31.0)
        assert link.send(31.0, 972).due_s == pytest.approx(31.002)


class TestLog:
    def test_advance_draws_the_silence(self) -> None:
        link = Link(RATE_BPS, 0.0, None, channel_factory(PAPER, 6), slot_s=0.001)
        link.epoch(5.0)
        link.send(5.0101, 100)
        link.advance(5.2004)
        log = link.log()
        assert log.losses.tolist() == losses(GilbertElliottChannel(PAPER, 6), 201).tolist()
        assert np.flatnonzero(log.used).tolist() == [10]
        # The slot drawn in advance is the one that the next packet meets.
        slot_200 = log.losses[200]
        assert (link.send(5.2004, 100) is Drop.CHANNEL) == slot_200

    def test_long_silence_is_drawn_in_pieces(self) -> None:
        link = Link(RATE_BPS, 0.0, None, channel_factory(PAPER, 6), slot_s=1e-6)
        link.epoch(0.0)
        link.send(0.2, 100)
        assert link.log().losses.tolist() == losses(GilbertElliottChannel(PAPER, 6), link.log().drawn).tolist()
        assert link.log().drawn > 200_000

    def test_a_full_log_keeps_its_beginning_and_the_losses_go_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(link_module, "MAX_LOG_SLOTS", 100)
        link = Link(RATE_BPS, 0.0, None, channel_factory(PAPER, 7), slot_s=0.001)
        link.epoch(0.0)
        fates = [link.send(step * 0.001, 972) is Drop.CHANNEL for step in range(300)]
        expected = losses(GilbertElliottChannel(PAPER, 7), 300)
        assert fates == expected.tolist()
        log = link.log()
        assert (log.drawn, len(log.used)) == (300, 100)
        assert log.losses.tolist() == expected[:100].tolist()

    @pytest.mark.parametrize("clock", ["slot", "packet"])
    def test_json_round_trip(self, clock: str) -> None:
        link = Link(RATE_BPS, 0.0, None, channel_factory(PAPER, 8), clock=clock, loss_from_start=True)  # type: ignore[arg-type]
        for step in range(77):
            link.send(step * 0.002, 1000)
        log = link.log()
        fields = json.loads(json.dumps(log.to_json()))
        again = SlotLog.from_json(fields)
        assert (again.epoch_s, again.slot_s, again.drawn) == (log.epoch_s, log.slot_s, log.drawn)
        assert again.losses.tolist() == log.losses.tolist()
        assert again.used.tolist() == log.used.tolist()
        assert bytes.fromhex(fields["lost"]) == np.packbits(log.lost, bitorder="little").tobytes()

    def test_bit_order(self) -> None:
        fields = SlotLog(0.0, 0.001, 10, np.arange(10) == 9, np.arange(10) == 0).to_json()
        assert (fields["losses"], fields["used"]) == ("0002", "0100")


class TestDamage:
    def test_corrupts_one_byte_of_the_share_asked_for(self) -> None:
        link = Link(RATE_BPS, 0.0, 1 << 30, None, corrupt=0.1, loss_from_start=True)
        data = bytes(range(200))
        damaged = 0
        for _ in range(5000):
            outcome = link.send(0.0, len(data))
            assert isinstance(outcome, Delivery)
            arrived = outcome.apply(data)
            assert len(arrived) == len(data)
            different = sum(a != b for a, b in zip(arrived, data, strict=True))
            assert different == (outcome.flip is not None)
            damaged += different
        assert damaged == link.stats().corrupted
        assert damaged / 5000 == pytest.approx(0.1, rel=0.15)

    def test_an_empty_datagram_has_no_byte_to_damage(self) -> None:
        link = Link(RATE_BPS, 0.0, None, None, corrupt=1.0, loss_from_start=True)
        assert link.send(0.0, 0).apply(b"") == b""
        assert link.stats().corrupted == 0

    def test_reordered_packets_are_overtaken(self) -> None:
        link = Link(RATE_BPS, 0.0, 1 << 30, None, reorder=0.2, reorder_s=0.0055, loss_from_start=True)
        due = [link.send(0.0, 972).due_s for _ in range(1000)]
        late = [value - (index + 1) * 0.001 > 0.001 for index, value in enumerate(due)]
        assert sum(late) == link.stats().reordered
        assert sum(late) / 1000 == pytest.approx(0.2, rel=0.2)

    def test_damage_leaves_the_losses_alone(self) -> None:
        plain, noisy = (
            Link(RATE_BPS, 0.0, 1 << 30, channel_factory(PAPER, 2), corrupt=share, reorder=share, loss_from_start=True)
            for share in (0.0, 0.3)
        )
        for _ in range(2000):
            assert (plain.send(0.0, 900) is Drop.CHANNEL) == (noisy.send(0.0, 900) is Drop.CHANNEL)


@pytest.mark.parametrize(
    "arguments",
    [
        {"rate_bps": 0},
        {"rate_bps": float("nan")},
        {"owd_s": -1e-9},
        {"queue_bytes": 0},
        {"slot_s": 0.0},
        {"corrupt": 1.5},
        {"reorder": -0.1},
        {"reorder_s": -1.0},
        {"overhead": -1},
        {"clock": "hour"},
    ],
)
def test_refuses(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Link(**({"rate_bps": 1e6, "owd_s": 0.01} | arguments))  # type: ignore[arg-type]


def test_default_slot() -> None:
    assert default_slot_s(20e6) == pytest.approx(576e-6)
    assert Link(20e6, 0.01).slot_s == default_slot_s(20e6)


def test_the_path_may_change_under_way() -> None:
    link = Link(8e6, 0.010, 1 << 20, overhead=0)
    first = link.send(0.0, 1000)
    assert link.queue_delay_s(0.0) == pytest.approx(0.001)
    assert link.queue_delay_s(5.0) == 0.0
    link.change(0.0, rate_bps=4e6, owd_s=0.030)
    second = link.send(0.0, 1000)
    assert isinstance(first, Delivery)
    assert isinstance(second, Delivery)
    assert first.due_s == pytest.approx(0.011)  # what is in the queue keeps its time
    assert second.due_s == pytest.approx(0.001 + 0.002 + 0.030)
    link.change(1.0, dead=True)
    assert link.send(1.0, 1000) is Drop.CHANNEL
    link.change(2.0, dead=False)
    assert isinstance(link.send(2.0, 1000), Delivery)
    stats = link.stats()
    assert (stats.packets, stats.lost, stats.delivered) == (4, 1, 3)
    for wrong in ({"rate_bps": 0.0}, {"owd_s": -1.0}):
        with pytest.raises(ValueError, match="must"):
            link.change(3.0, **wrong)
    with pytest.raises(ValueError, match="backwards"):
        link.change(0.5)
