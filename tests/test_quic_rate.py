from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.tls import Epoch
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.quic.extension import OutFrame
from quic_pfec.quic.rate import HEADER_BYTES, RateController, RatePacer, rate_control
from quic_pfec.wire.frames import SOURCE

from .quic_pair import Direction, make_pair, random_loss
from .quic_toy import Toy

SIZE = 1452
WIRE = SIZE + HEADER_BYTES
MBPS = 1e6


# ---- a link in virtual time ------------------------------------------------------------------------------------------


@dataclass
class Flow:
    """A greedy sender on a drop-tail link; the receiver acknowledges 1 ms after the first packet of a batch."""

    cap_bps: float
    link_bps: float | Callable[[float], float]
    rtt_s: float = 0.020
    queue_s: float = 0.050
    loss: float = 0.0
    seed: int = 1
    wanted: Callable[[float], bool] = lambda now: True
    now: float = 50.0
    rates: list[tuple[float, float]] = field(default_factory=list)
    delivered: list[tuple[float, int]] = field(default_factory=list)
    queues: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.controller, self.pacer = rate_control(self.cap_bps, max_datagram_size=SIZE)
        self.random = random.Random(self.seed)
        self.flight: dict[int, QuicSentPacket] = {}
        self.link_free = 0.0
        self.unacked: deque[int] = deque()
        self.agenda: list[tuple[float, int, str, Any]] = []
        self.order = itertools.count()
        self.number = 0
        self.wake_id = 0
        self.largest = -1
        self.first_sample: float | None = None
        self.start = self.now

    def rate_of_link(self, now: float) -> float:
        return self.link_bps(now - self.start) if callable(self.link_bps) else self.link_bps

    def at(self, when: float, what: str, value: Any = None) -> None:
        heapq.heappush(self.agenda, (when, next(self.order), what, value))

    def run(self, duration_s: float) -> Flow:
        end = self.now + duration_s
        self.at(self.now, "send")
        while self.agenda and self.agenda[0][0] <= end:
            self.now, _, what, value = heapq.heappop(self.agenda)
            getattr(self, f"_{what}")(value)
        self.now = end
        return self

    def wake(self, when: float) -> None:
        """One pending wake-up of the sender, the latest decision."""
        self.wake_id += 1
        self.at(when, "send", self.wake_id)

    def _send(self, wake_id: Any) -> None:
        if wake_id not in (None, self.wake_id):
            return
        while self.wanted(self.now - self.start):
            due = self.pacer.next_send_time(self.now)
            if due is not None:
                self.wake(due)
                return
            if self.controller.bytes_in_flight + SIZE > self.controller.congestion_window:
                return
            self.pacer.update_after_send(self.now)
            packet = QuicSentPacket(
                Epoch.ONE_RTT, True, True, False, self.number, QuicPacketType.ONE_RTT, self.now, SIZE
            )
            self.flight[self.number] = packet
            self.controller.on_packet_sent(packet=packet)
            self.pacer.settle(self.now, [SIZE])
            self._transport(self.number)
            self.number += 1
        self.wake(self.now + 0.001)

    def _transport(self, number: int) -> None:
        rate = self.rate_of_link(self.now)
        waiting = max(0.0, self.link_free - self.now)
        self.queues.append((self.now, waiting))
        if rate <= 0 or waiting > self.queue_s:
            return
        self.link_free = max(self.now, self.link_free) + WIRE * 8 / rate
        if self.random.random() >= self.loss:
            self.at(self.link_free + self.rtt_s / 2, "receive", number)

    def _receive(self, number: int) -> None:
        self.delivered.append((self.now, WIRE))
        if not self.unacked:
            self.at(self.now + 0.001, "acknowledge")
        self.unacked.append(number)

    def _acknowledge(self, _: Any) -> None:
        self.at(self.now + self.rtt_s / 2, "acked", list(self.unacked))
        self.unacked.clear()

    def _acked(self, numbers: list[int]) -> None:
        newest: QuicSentPacket | None = None
        for number in numbers:
            packet = self.flight.pop(number, None)
            if packet is not None:
                self.controller.on_packet_acked(now=self.now, packet=packet)
                newest = packet
        if newest is not None and newest.sent_time is not None:
            self.largest = max(self.largest, newest.packet_number)
            self.controller.on_rtt_measurement(now=self.now, rtt=self.now - newest.sent_time)
        lost = [packet for number, packet in self.flight.items() if number <= self.largest - 3]
        for packet in lost:
            del self.flight[packet.packet_number]
        if lost:
            self.controller.on_packets_lost(now=self.now, packets=lost)
            times = [packet.sent_time or 0.0 for packet in lost]
            if max(times) - min(times) > 3 * (self.rtt_s + 0.035):
                self.controller.on_persistent_congestion()
        self.rates.append((self.now - self.start, self.controller.rate_bps))
        self._send(None)

    def goodput(self, start_s: float, end_s: float) -> float:
        """Bits on the wire per second that came out of the link between two times since the start."""
        bytes_ = sum(size for when, size in self.delivered if start_s <= when - self.start < end_s)
        return 8 * bytes_ / (end_s - start_s)

    def mean_rate(self, start_s: float, end_s: float) -> float:
        chosen = [rate for when, rate in self.rates if start_s <= when < end_s]
        return sum(chosen) / len(chosen)

    def queue(self, start_s: float, end_s: float) -> float:
        chosen = [waiting for when, waiting in self.queues if start_s <= when - self.start < end_s]
        return sum(chosen) / len(chosen)


@pytest.mark.parametrize("loss", [0.0, 0.01, 0.05, 0.084, 0.2])
@pytest.mark.parametrize("rate", [5 * MBPS, 20 * MBPS, 100 * MBPS])
def test_random_loss_alone_changes_nothing(loss: float, rate: float) -> None:
    flow = Flow(rate, rate, loss=loss).run(2.0)
    assert flow.controller.rate_bps == rate
    assert flow.controller.queue_backoffs == flow.controller.shortfall_backoffs == 0
    assert flow.goodput(0.2, 2.0) > 0.97 * rate * (1 - loss) * 0.98
    assert flow.controller.packets_lost > 0 or loss == 0.0


def test_the_same_loss_is_seen_whatever_is_done_with_it() -> None:
    flow = Flow(20 * MBPS, 20 * MBPS, loss=0.1).run(3.0)
    controller = flow.controller
    share = controller.packets_lost / (controller.packets_lost + controller.packets_acked)
    assert share == pytest.approx(0.1, abs=0.03)
    assert controller.loss_share == pytest.approx(0.1, abs=0.06)


@pytest.mark.parametrize("loss", [0.0, 0.084])
@pytest.mark.parametrize("queue_s", [0.005, 0.020, 0.050, 0.500])
@pytest.mark.parametrize("factor", [1.3, 2.0, 3.0])
def test_a_cap_too_high_settles_at_the_link(loss: float, queue_s: float, factor: float) -> None:
    if queue_s == 0.005 and factor < 1.7:
        return  # a queue shorter than the threshold, and less loss than a lossy path may have: nothing to see
    link = 20 * MBPS
    flow = Flow(factor * link, link, loss=loss, queue_s=queue_s).run(6.0)
    assert flow.controller.queue_backoffs + flow.controller.shortfall_backoffs > 0
    for start in (0.8, 2.0, 4.0):
        assert flow.goodput(start, start + 2.0) > 0.9 * link * (1 - loss)
        if queue_s > 0.01:
            assert 0.85 * link < flow.mean_rate(start, start + 2.0) < 1.12 * link
            assert flow.queue(start, start + 2.0) < 0.030


def test_settling_takes_about_twenty_round_trips() -> None:
    link = 20 * MBPS
    flow = Flow(3 * link, link, queue_s=0.050).run(1.0)
    assert flow.mean_rate(0.0, 0.06) > 2.4 * link
    assert 0.85 * link < flow.mean_rate(0.4, 0.6) < 1.2 * link


def test_a_rate_step_is_followed_down_and_up() -> None:
    full = 20 * MBPS
    flow = Flow(full, lambda t: full if t < 1.0 or t > 3.0 else full / 2, loss=0.05, queue_s=0.05).run(7.0)
    assert flow.goodput(2.0, 3.0) > 0.85 * full / 2 * 0.95
    assert flow.mean_rate(2.0, 3.0) < 0.62 * full
    assert flow.mean_rate(6.0, 7.0) > 0.9 * full


def test_a_longer_path_is_not_a_queue_for_ever() -> None:
    flow = Flow(20 * MBPS, 20 * MBPS)
    flow.run(1.0)
    flow.rtt_s = 0.060
    flow.run(8.0)
    assert flow.controller.rate_bps > 0.9 * 20 * MBPS
    assert flow.controller.queue_backoffs <= 12


def test_a_short_outage_changes_nothing() -> None:
    full = 20 * MBPS
    flow = Flow(full, lambda t: 0.0 if 1.0 <= t < 1.2 else full)
    flow.run(1.21)
    flow._transport(flow.number - 1)  # a probe of aioquic, which finds the path alive again
    flow.run(1.0)
    assert flow.controller.rate_bps == full
    assert flow.goodput(1.4, 2.0) > 0.95 * full  # at 2 s the rate dips, to see the empty path


def test_persistent_congestion_restarts_slowly_and_recovers() -> None:
    full = 20 * MBPS
    flow = Flow(full, full)
    flow.run(1.0)
    flow.controller.on_persistent_congestion()
    floor = flow.controller.rate_bps
    assert floor == pytest.approx(2 * SIZE * 8 / 0.022, rel=0.1)
    flow.controller.on_persistent_congestion()
    assert flow.controller.persistent_congestions == 2
    flow.run(0.05)
    assert floor < flow.controller.rate_bps <= 8 * floor
    flow.run(1.5)
    assert flow.mean_rate(2.0, 2.5) > 0.9 * full


def test_an_application_that_sends_little_neither_grows_nor_shrinks() -> None:
    flow = Flow(20 * MBPS, 20 * MBPS, wanted=lambda t: t % 0.1 < 0.002).run(3.0)
    assert flow.controller.rate_bps == 20 * MBPS
    flow.controller._rate /= 2
    flow.run(2.0)
    assert flow.controller.rate_bps == pytest.approx(10 * MBPS)


def test_the_rate_dips_for_a_moment_to_see_the_empty_path() -> None:
    flow = Flow(20 * MBPS, 20 * MBPS).run(1.9)
    assert flow.controller.rate_bytes_per_s * 8 == 20 * MBPS
    flow.run(0.15)
    assert flow.controller.rate_bytes_per_s * 8 == 10 * MBPS
    assert flow.controller.rate_bps == 20 * MBPS  # what is planned with does not jump
    flow.run(4.8)
    assert flow.goodput(2.2, 6.8) > 0.99 * 20 * MBPS
    flow.run(0.3)
    assert flow.goodput(6.9, 7.1) < 0.9 * 20 * MBPS


def test_a_late_comer_learns_of_the_queue_that_it_keeps() -> None:
    """Another flow held the queue when this one came, and is gone: it has never seen the path without one."""
    flow = Flow(20 * MBPS, 20 * MBPS).run(0.2)
    flow.link_free += 0.040
    flow.run(0.03)
    flow.controller._rtts.clear()
    flow.run(1.27)
    assert flow.queue(1.0, 1.5) > 0.008
    assert flow.controller.queue_backoffs == 0
    flow.run(3.0)
    assert flow.queue(2.5, 4.5) < 0.002
    assert flow.controller.min_rtt_s == pytest.approx(0.0205, abs=0.002)


def test_idle_for_long_forgets_what_was_learned() -> None:
    flow = Flow(60 * MBPS, 20 * MBPS, wanted=lambda t: not 2.0 < t < 13.0)
    flow.run(2.0)
    assert flow.controller.rate_bps < 30 * MBPS
    flow.run(11.01)
    assert flow.controller.rate_bps > 50 * MBPS


def test_window() -> None:
    controller = RateController(rate_bps=20 * MBPS, max_datagram_size=SIZE)
    assert controller.congestion_window == 10 * SIZE
    assert controller.min_rtt_s is None
    controller.on_rtt_measurement(now=1.0, rtt=0.1)
    assert controller.congestion_window == pytest.approx(20 * MBPS / 8 * 0.205, abs=1)
    controller.on_rtt_measurement(now=1.1, rtt=0.02)
    assert controller.congestion_window == pytest.approx(20 * MBPS / 8 * 0.045, abs=1)
    controller.on_rtt_measurement(now=11.2, rtt=0.03)
    assert controller.min_rtt_s == 0.03
    assert controller.get_log_data()["pacing_rate"] == 20_000_000


def test_bytes_in_flight_return_to_zero_whatever_happens_to_packets() -> None:
    controller = RateController(rate_bps=20 * MBPS, max_datagram_size=SIZE)
    packets = [
        QuicSentPacket(Epoch.ONE_RTT, True, True, False, n, QuicPacketType.ONE_RTT, 1.0, SIZE - n) for n in range(6)
    ]
    for packet in packets:
        controller.on_packet_sent(packet=packet)
    controller.on_packet_acked(now=1.1, packet=packets[0])
    controller.on_packets_lost(now=1.1, packets=iter(packets[1:3]))
    controller.on_packets_expired(packets=filter(lambda packet: packet.in_flight, packets[3:]))
    assert controller.bytes_in_flight == 0
    assert controller.packets_lost == 2  # expired packets are probes, not losses


# ---- pacer -----------------------------------------------------------------------------------------------------------


def paced(rate: float, duration_s: float, lateness: Callable[[], float], size: int = SIZE, **options: Any) -> float:
    """Bits on the wire per second from a greedy sender whose timer comes `lateness()` late."""
    controller = RateController(rate_bps=rate, max_datagram_size=SIZE)
    pacer = RatePacer(controller, max_datagram_size=SIZE, **options)
    now, sent = 10.0, 0
    while now < 10.0 + duration_s:
        sizes: list[int] = []
        while (due := pacer.next_send_time(now)) is None:
            pacer.next_size = size
            pacer.update_after_send(now)
            sizes.append(size)
        pacer.settle(now, sizes)
        sent += sum(sizes) + HEADER_BYTES * len(sizes)
        now = max(now, due) + lateness()
    return 8 * sent / duration_s


@pytest.mark.parametrize("rate", [2 * MBPS, 20 * MBPS, 100 * MBPS, 1000 * MBPS])
@pytest.mark.parametrize("late_s", [0.0, 0.001, 0.003])
def test_the_average_is_kept_with_coarse_timers(rate: float, late_s: float) -> None:
    generator = random.Random(5)
    got = paced(rate, 1.0, lambda: generator.random() * late_s)
    assert got == pytest.approx(rate, rel=0.015, abs=3 * WIRE * 8)


def test_small_packets_are_charged_what_they_are() -> None:
    assert paced(20 * MBPS, 1.0, lambda: 0.0005, size=200) == pytest.approx(20 * MBPS, rel=0.02)


def test_without_catching_up_a_slow_link_would_lose_time() -> None:
    assert paced(20 * MBPS, 1.0, lambda: 0.003, catch_up_s=0.0) < 0.9 * 20 * MBPS


def burst(pacer: RatePacer, now: float) -> int:
    count = 0
    while pacer.next_send_time(now) is None:
        pacer.update_after_send(now)
        count += 1
    pacer.settle(now, [SIZE] * count)
    return count


@pytest.mark.parametrize(("rate", "packets"), [(2 * MBPS, 2), (20 * MBPS, 2), (100 * MBPS, 8), (1000 * MBPS, 84)])
def test_idle_time_gives_one_burst_and_no_more(rate: float, packets: int) -> None:
    _, pacer = rate_control(rate, max_datagram_size=SIZE)
    burst(pacer, 1.0)
    for now in (5.0, 9.0):
        pacer.next_send_time(now)  # comes back, is not blocked, sends nothing
        now += 1.0
        assert burst(pacer, now) == pytest.approx(packets, abs=1)


def test_catching_up_is_bounded() -> None:
    _, pacer = rate_control(20 * MBPS, max_datagram_size=SIZE)
    burst(pacer, 1.0)
    assert burst(pacer, 3.0) <= 2 + math.ceil(0.004 * 20 * MBPS / 8 / WIRE)


def test_packets_that_bypass_the_pacer_are_paid_back() -> None:
    controller, pacer = rate_control(20 * MBPS, max_datagram_size=SIZE)
    burst(pacer, 1.0)
    for _ in range(10):
        pacer.update_after_send(1.0)
    pacer.settle(1.0, [SIZE] * 10)
    due = pacer.next_send_time(1.0)
    assert due == pytest.approx(1.0 + 10.5 * WIRE / controller.rate_bytes_per_s, rel=0.001)
    pacer.settle(1.0, [SIZE] * 100_000)
    due = pacer.next_send_time(1.0)
    assert due is not None
    assert due < 1.2


@settings(deadline=None, max_examples=60)
@given(
    rate=st.floats(1e5, 1e9),
    gaps=st.lists(st.floats(0.0, 0.05), min_size=1, max_size=60),
)
def test_never_more_than_rate_burst_and_catch_up(rate: float, gaps: list[float]) -> None:
    controller = RateController(rate_bps=rate, max_datagram_size=SIZE)
    pacer = RatePacer(controller, max_datagram_size=SIZE)
    now, sent = 3.0, 0
    for gap in gaps:
        sent += burst(pacer, now) * WIRE
        due = pacer.next_send_time(now)
        assert due is not None
        assert due > now
        now += gap
    allowed = rate / 8 * (now - 3.0 + 0.001 + 0.004) + 3 * WIRE
    assert sent <= allowed


# ---- in a connection -------------------------------------------------------------------------------------------------


class Rated(Toy):
    def setup(self, *, rate: float = 20 * MBPS, **options: Any) -> None:
        super().setup(**options)
        self.set_congestion_control(*rate_control(rate))


@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_frames_keep_the_rate_in_both_directions_at_once(loss: float) -> None:
    endless = {"total": 10**9}
    pair = make_pair(
        Rated,
        Rated,
        client_options=endless,
        server_options=endless,
        up=Direction(drop=random_loss(loss, 1), rate_bps=20.2 * MBPS, queue_bytes=100_000),
        down=Direction(drop=random_loss(loss, 2), rate_bps=20.2 * MBPS, queue_bytes=100_000),
    )
    pair.connect()
    pair.run(0.2)
    before = [direction.wire_bytes for direction in (pair.up, pair.down)]
    pair.run(1.0)
    for direction, start in zip((pair.up, pair.down), before, strict=True):
        assert 0.97 < (direction.wire_bytes - start) * 8 / (20 * MBPS) < 1.01
    client: Any = pair.client
    server: Any = pair.server
    assert client.send_rate_bps == server.send_rate_bps == 20 * MBPS
    assert client.blocked_pacer > 0


@pytest.mark.parametrize("size", [300, 720, 1100])
def test_small_frames_keep_the_rate_too(size: int) -> None:
    pair = make_pair(Rated, Rated, client_options={"total": 10**9, "size": size})
    pair.connect()
    pair.run(0.2)
    start = pair.up.wire_bytes
    pair.run(0.5)
    assert (pair.up.wire_bytes - start) * 8 / 0.5 == pytest.approx(20 * MBPS, rel=0.02)


def test_small_packets_of_one_turn_are_charged_what_they_are() -> None:
    pair = make_pair(Rated, Rated)
    pair.connect()
    pair.run(0.5)
    client: Any = pair.client
    client.next_frame = lambda now, space: client.queue.popleft() if space > 1300 else None  # one a packet
    client.queue.extend(OutFrame(SOURCE, bytes(246), None) for _ in range(20))
    before = pair.up.offered
    pair.transmit()
    assert 5 <= pair.up.offered - before <= 10  # two full packets are 2,960 bytes: room must remain for a full one


def test_streams_keep_the_rate_and_back_off_as_frames_do() -> None:
    pair = make_pair(
        Rated,
        Rated,
        client_options={"rate": 60 * MBPS},
        up=Direction(rate_bps=20 * MBPS, queue_bytes=125_000, drop=random_loss(0.02, 1)),
        server_changes={"max_data": 1 << 30, "max_stream_data": 1 << 30},
    )
    pair.connect()
    pair.client.send_stream_data(0, bytes(12_000_000))
    pair.run(1.0)
    client: Any = pair.client
    assert 14 * MBPS < client.send_rate_bps < 26 * MBPS
    start = pair.up.delivered_bytes
    pair.run(1.0)
    assert (pair.up.delivered_bytes - start) * 8 > 0.88 * 20 * MBPS


def test_a_packet_with_an_acknowledgement_does_not_outrun_the_rate() -> None:
    """The peer sends at 20 Mbit/s and causes an acknowledgement a millisecond; our own rate is 2 Mbit/s."""
    pair = make_pair(Rated, Rated, client_options={"total": 10**9, "rate": 2 * MBPS}, server_options={"total": 10**9})
    pair.connect()
    pair.run(0.2)
    client: Any = pair.client
    start = client.sent
    pair.run(1.0)
    assert (client.sent - start) * 1400 * 8 < 2 * MBPS
