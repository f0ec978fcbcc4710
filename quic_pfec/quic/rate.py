"""`rate`: congestion control for a path that the caller knows to be lossy, and the pacer that goes with it.

A loss-based controller leaves about 95 % of a link with 8 % loss unused. Here the caller states the rate that the path
carries and loss alone changes nothing; that is the promise of a provisioned path (RFC 9265 exempts such paths). What
still backs off is what random loss cannot imitate: a standing queue, seen in the minima of the round-trip time, a
delivery rate far below the sending rate, and persistent congestion (RFC 9002 §7.6). Repairs and resends are inside the
rate: the pacer does not know what a packet carries. ECN is absent, because aioquic 1.7 drops the counts of ACK_ECN.

Time is cut into slices of one minimal round trip, not of one packet-timed round: with a deep queue the latter get long
exactly when a reaction is due. Pure: every method gets its time from the caller.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from aioquic.quic.congestion.base import QuicCongestionControl
from aioquic.quic.packet_builder import QuicSentPacket

from quic_pfec.quantities import parse_rate
from quic_pfec.wire.errors import LocalError

__all__ = ["RateController", "RatePacer", "rate_control"]

HEADER_BYTES = 28
"""IPv4 and UDP headers, counted with every datagram: the rate is one of bits on the wire."""

RTT_WINDOW_S = 10.0  # minimum of the round-trip time over this long, as in BBR
MIN_SLICE_S = 0.010  # shorter slices hold too few packets on a fast local path
QUEUE_FLOOR_S = 0.005  # a delay below this is the peer's ACK timer and scheduling, not a queue
QUEUE_SHARE = 0.5  # of the minimal round-trip time: above this, if it stays, it is a standing queue
QUEUE_SLICES = 3
QUEUE_BACKOFF = 0.85
GIVE_UP_BACKOFFS = 6  # then the delay is not our queue: take it as the path's, or we would starve beside a TCP flow
SHORTFALL_SLICES = 4
SHORTFALL = 0.6  # delivered below this share of the rate: more than random loss of 20 % explains
SHORTFALL_PACKETS = 32  # fewer than this expected in the window say nothing
FULL = 0.8  # a slice that used this share of the rate was not limited by the application
USED = 0.25  # a sender below this share of its rate did not build the queue that it sees
CLEAN_SLICES = 4
RECOVERY_STEP = 0.05  # of the cap, below the rate that was delivered at the last back-off
PROBE_STEP = 0.01  # of the cap, beyond it; doubles every 8 clean slices up to RECOVERY_STEP
IDLE_RESET_S = 10.0  # after this long without a packet the path is as unknown as at the start
MIN_WINDOW_PACKETS = 10  # RFC 9002 §7.2
MIN_RATE_PACKETS = 2  # a round trip: where persistent congestion restarts (RFC 9002 §7.6.2)
WINDOW_GAIN = 2.0
DRAIN_GAIN = 1.25


def rate_control(rate: str | float, *, max_datagram_size: int = 1452) -> tuple[RateController, RatePacer]:
    """Controller and pacer for `ExtensionConnection.set_congestion_control`; `rate` as in `parse_rate`."""
    controller = RateController(rate_bps=parse_rate(rate), max_datagram_size=max_datagram_size)
    return controller, RatePacer(controller, max_datagram_size=max_datagram_size)


@dataclass(slots=True)
class _Slice:
    """What happened in one slice of time; bytes on the wire."""

    start_s: float
    sent: int = 0
    delivered: int = 0
    lost: int = 0
    min_rtt_s: float = math.inf
    window_limited: bool = False


class RateController(QuicCongestionControl):
    """Congestion control at a stated rate. `rate_bps` is the present rate, never above `cap_bps`.

    The congestion window is a safety net against a dead path, not the controller: twice the product of rate and minimal
    round trip, plus 5 ms for acknowledgements that are sent late. The rate is kept by `RatePacer`.
    """

    def __init__(self, *, rate_bps: float, max_datagram_size: int = 1452) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self.cap_bps = parse_rate(rate_bps)
        self.queue_backoffs = 0
        self.shortfall_backoffs = 0
        self.persistent_congestions = 0
        self.packets_lost = 0
        self.packets_acked = 0
        self.loss_share = 0.0  # EWMA over slices, for reports and logs; changes nothing
        self._max_datagram_size = max_datagram_size
        self._cap = self.cap_bps / 8
        self._rate = self._cap  # bytes on the wire per second
        self._rtts: deque[tuple[float, float]] = deque()  # (time, rtt), both rising: the head is the minimum
        self._last_rtt_s = 0.0
        self._last_sent_s = -math.inf
        self._slice: _Slice | None = None
        self._was_full = False
        self._full_run: deque[tuple[int, float]] = deque(maxlen=SHORTFALL_SLICES)  # (delivered, duration)
        self._queue_run = 0
        self._episode = 0  # back-offs on one standing queue
        self._hold_until_s = -math.inf
        self._clean_run = 0
        self._delivered_rate = self._cap  # at the last back-off
        self._restart_target: float | None = None

    # ---- what others read --------------------------------------------------------------------------------------------

    @property
    def rate_bps(self) -> float:
        """The present rate in bit/s, headers included."""
        return 8 * self._rate

    @property
    def rate_bytes_per_s(self) -> float:
        return self._rate

    @property
    def min_rtt_s(self) -> float | None:
        """Smallest round trip of the last 10 s; None before the first sample."""
        return self._rtts[0][1] if self._rtts else None

    def get_log_data(self) -> dict[str, Any]:
        return super().get_log_data() | {"pacing_rate": int(self.rate_bps), "loss_share": round(self.loss_share, 4)}

    # ---- events of aioquic's recovery --------------------------------------------------------------------------------

    def on_packet_sent(self, *, packet: QuicSentPacket) -> None:
        now = _sent_time(packet)
        if now - self._last_sent_s > IDLE_RESET_S and self._slice is not None:
            self._forget()
        self._last_sent_s = now
        current = self._advance(now)
        self.bytes_in_flight += packet.sent_bytes
        current.sent += packet.sent_bytes + HEADER_BYTES
        if self.bytes_in_flight + self._max_datagram_size > self.congestion_window:
            current.window_limited = True

    def on_packet_acked(self, *, now: float, packet: QuicSentPacket) -> None:
        self.bytes_in_flight -= packet.sent_bytes
        self.packets_acked += 1
        self._advance(now).delivered += packet.sent_bytes + HEADER_BYTES

    def on_packets_lost(self, *, now: float, packets: Iterable[QuicSentPacket]) -> None:
        current = self._advance(now)
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes
            self.packets_lost += 1
            current.lost += packet.sent_bytes + HEADER_BYTES

    def on_packets_expired(self, *, packets: Iterable[QuicSentPacket]) -> None:
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes

    def on_persistent_congestion(self) -> None:
        """RFC 9002 §7.6: restart from two packets a round trip, double each round trip up to half the old rate."""
        self.persistent_congestions += 1
        if self._restart_target is None:
            self._restart_target = self._rate / 2
        self._rate = self._floor()
        self._reset_runs()
        self._update_window()

    def on_rtt_measurement(self, *, now: float, rtt: float) -> None:
        current = self._advance(now)
        current.min_rtt_s = min(current.min_rtt_s, rtt)
        self._last_rtt_s = rtt
        while self._rtts and self._rtts[-1][1] >= rtt:
            self._rtts.pop()
        self._rtts.append((now, rtt))
        while self._rtts[0][0] < now - RTT_WINDOW_S:
            self._rtts.popleft()
        self._update_window(now)

    # ---- slices ------------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> _Slice:
        if self._slice is None:
            self._slice = _Slice(now)
        elif now - self._slice.start_s >= max(self.min_rtt_s or 0.0, MIN_SLICE_S):
            self._judge(self._slice, now)
            self._slice = _Slice(now)
        return self._slice

    def _judge(self, ended: _Slice, now: float) -> None:
        duration_s = now - ended.start_s
        resolved = ended.delivered + ended.lost
        if resolved:
            self.loss_share += (ended.lost / resolved - self.loss_share) / 8
        full = ended.window_limited or ended.sent >= FULL * self._rate * duration_s
        if ended.window_limited or ended.sent >= USED * self._rate * duration_s:
            self._judge_queue(ended, now)
        self._judge_delivery(ended, now, duration_s, full)
        self._recover(ended, full)
        self._was_full = full
        self._update_window(now)

    def _judge_queue(self, ended: _Slice, now: float) -> None:
        base_s, rtt_s = self.min_rtt_s, ended.min_rtt_s
        if base_s is None or rtt_s == math.inf:
            return
        if rtt_s <= base_s + self._queue_limit_s(base_s):
            self._queue_run = self._episode = 0
            return
        self._queue_run += 1
        self._clean_run = 0
        if now < self._hold_until_s or self._queue_run < QUEUE_SLICES:
            return
        self.queue_backoffs += 1
        self._episode += 1
        self._back_off(QUEUE_BACKOFF * self._rate, ended.delivered / (now - ended.start_s), now, rtt_s)
        if self._episode >= GIVE_UP_BACKOFFS:
            self._rtts = deque([(now, rtt_s)])
            self._episode = 0

    def _judge_delivery(self, ended: _Slice, now: float, duration_s: float, full: bool) -> None:
        # The first full slice after a pause delivers nothing yet, and a slice that delivers nothing at all is an
        # outage, which persistent congestion judges: a bottleneck that is too slow still delivers.
        if not (full and self._was_full and ended.delivered):
            self._full_run.clear()
            return
        self._full_run.append((ended.delivered, duration_s))
        delivered = sum(bytes_ for bytes_, _ in self._full_run)
        lasted_s = sum(seconds for _, seconds in self._full_run)
        expected = self._rate * lasted_s
        if (
            len(self._full_run) < SHORTFALL_SLICES
            or expected < SHORTFALL_PACKETS * self._max_datagram_size
            or delivered >= SHORTFALL * expected
        ):
            return
        self.shortfall_backoffs += 1
        self._episode = 0
        rate = delivered / lasted_s
        self._back_off(max(1.25 * rate, self._rate / 2), rate, now, self._last_rtt_s)

    def _back_off(self, rate: float, delivered_rate: float, now: float, rtt_s: float) -> None:
        self._rate = max(min(rate, self._rate), self._floor())
        self._delivered_rate = max(delivered_rate, self._floor())
        self._restart_target = None
        self._reset_runs()
        # What the new rate does is seen one round trip later; until then the smaller window drains the queue.
        self._hold_until_s = now + rtt_s + MIN_SLICE_S

    def _recover(self, ended: _Slice, full: bool) -> None:
        if self._restart_target is not None:
            if ended.delivered:
                self._rate = min(2 * self._rate, self._cap)
                if self._rate >= self._restart_target:
                    self._restart_target = None
            return
        base_s = self.min_rtt_s
        if self._rate >= self._cap or not full or base_s is None or self._queue_run:
            return
        if ended.min_rtt_s > base_s + self._queue_limit_s(base_s) / 2:
            return  # a queue is forming: wait and see
        self._clean_run += 1
        if self._clean_run < CLEAN_SLICES:
            return
        step = RECOVERY_STEP
        if self._rate >= 0.9 * self._delivered_rate:
            step = min(step, PROBE_STEP * 2 ** ((self._clean_run - CLEAN_SLICES) // 8))
        self._rate = min(self._rate + step * self._cap, self._cap)

    # ---- small parts -------------------------------------------------------------------------------------------------

    def _queue_limit_s(self, base_s: float) -> float:
        return max(QUEUE_FLOOR_S, QUEUE_SHARE * base_s)

    def _floor(self) -> float:
        rtt_s = max(self.min_rtt_s or 0.1, MIN_SLICE_S)
        return min(MIN_RATE_PACKETS * self._max_datagram_size / rtt_s, self._cap)

    def _reset_runs(self) -> None:
        self._full_run.clear()
        self._was_full = False
        self._clean_run = 0

    def _forget(self) -> None:
        self._rate = self._delivered_rate = self._cap
        self._slice = None
        self._restart_target = None
        self._queue_run = self._episode = 0
        self._hold_until_s = -math.inf
        self._reset_runs()
        self._update_window()

    def _update_window(self, now: float = math.inf) -> None:
        least = MIN_WINDOW_PACKETS * self._max_datagram_size
        base_s = self.min_rtt_s
        if base_s is None:
            self.congestion_window = least
            return
        gain = DRAIN_GAIN if now < self._hold_until_s else WINDOW_GAIN
        self.congestion_window = max(least, int(self._rate * (gain * base_s + QUEUE_FLOOR_S)))


class RatePacer:
    """Token bucket in bytes on the wire, at the controller's present rate.

    A burst is at most 1 ms worth or two packets, whichever is larger. Timers of an event loop come up to a few
    milliseconds late, which on a slow link is several packets: whoever waited for the pacer may send in addition what
    the lateness has cost, up to `catch_up_s`. Whoever had nothing to send gets no such credit.
    """

    MAX_DEBT_S = 0.1

    def __init__(
        self,
        controller: RateController,
        *,
        max_datagram_size: int = 1452,
        burst_s: float = 0.001,
        catch_up_s: float = 0.004,
    ) -> None:
        if burst_s < 0 or catch_up_s < 0:
            raise LocalError("burst and catch-up cannot be negative")
        self._controller = controller
        self._packet = max_datagram_size + HEADER_BYTES
        self._burst_s = burst_s
        self._catch_up_s = catch_up_s
        self._tokens = 2.0 * self._packet
        self._time_s = -math.inf
        self._due_s: float | None = None  # when whoever waits was told to come back
        self._provisional = 0  # charged since the last `settle`
        self.next_size: int | None = None

    @property
    def rate_bps(self) -> float:
        return self._controller.rate_bps

    @property
    def reduced(self) -> bool:
        return self._controller.rate_bps < self._controller.cap_bps

    def next_send_time(self, now: float) -> float | None:
        """None when a full packet may be sent now, else when that will be."""
        self._refill(now)
        missing = self._packet - self._tokens
        if missing <= 1e-3:  # a thousandth of a byte: rounding must not cause a timer that cannot advance
            self._due_s = None
            return None
        self._due_s = now + missing / self._controller.rate_bytes_per_s
        return self._due_s

    def update_after_send(self, now: float) -> None:
        """One more packet is being built, of `next_size` or, until `settle` knows better, of full size."""
        self._refill(now)
        charge = self._packet if self.next_size is None else self.next_size + HEADER_BYTES
        self.next_size = None
        self._tokens -= charge
        self._provisional += charge

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        """aioquic's pacer would take cwnd/RTT here; this one takes the controller's rate."""

    def settle(self, now: float, datagram_sizes: Sequence[int]) -> None:
        """Everything that left counts, packets with acknowledgements and of the handshake among it."""
        self._refill(now)
        self._tokens += self._provisional - sum(datagram_sizes) - HEADER_BYTES * len(datagram_sizes)
        self._tokens = max(self._tokens, -self.MAX_DEBT_S * self._controller.rate_bytes_per_s)
        self._provisional = 0
        self.next_size = None

    def _refill(self, now: float) -> None:
        if now <= self._time_s:
            return
        rate = self._controller.rate_bytes_per_s
        depth = max(self._burst_s * rate, 2.0 * self._packet)
        if self._due_s is not None:
            depth += rate * min(max(now - self._due_s, 0.0), self._catch_up_s)
        if self._time_s > -math.inf:
            self._tokens += rate * (now - self._time_s)
        self._tokens = min(self._tokens, depth)
        self._time_s = now


def _sent_time(packet: QuicSentPacket) -> float:
    if packet.sent_time is None:
        raise LocalError("a packet without a time was sent")
    return packet.sent_time
