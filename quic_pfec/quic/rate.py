"""`rate`: congestion control for a path that the caller knows to be lossy, and the pacer that goes with it.

A loss-based controller leaves about 95 % of a link with 8 % loss unused. Here the caller states the rate that the path
carries and loss alone changes nothing; that is the promise of a provisioned path (RFC 9265 exempts such paths). What
still backs off is what random loss cannot imitate: a standing queue, seen in the minima of the round-trip time, a
delivery rate far below the sending rate, and persistent congestion (RFC 9002 §7.6). Repairs and resends are inside the
rate: the pacer does not know what a packet carries. ECN is absent, because aioquic 1.7 drops the counts of ACK_ECN.

A queue is known by the delay of the empty path, which a sender that came late, or that fills the link to the last bit,
never sees. So every few seconds the rate dips for a moment. And where backing off does not remove the queue, somebody
else keeps it: the rate then holds at a share of what it had, and dips to tell a queue from a path that got longer.

Time is cut into slices of one minimal round trip, not of one packet-timed round: with a deep queue the latter get long
exactly when a reaction is due. Pure: every method gets its time from the caller.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from aioquic.quic.congestion.base import QuicCongestionControl
from aioquic.quic.packet_builder import QuicSentPacket

from quic_pfec.quantities import parse_rate
from quic_pfec.quic.pacing import HEADER_BYTES, TokenBucket
from quic_pfec.wire.errors import LocalError

__all__ = ["HEADER_BYTES", "RateController", "RatePacer", "rate_control"]

RTT_WINDOW_S = 10.0  # minimum of the round-trip time over this long, as in BBR
MIN_SLICE_S = 0.010  # shorter slices hold too few packets on a fast local path
QUEUE_FLOOR_S = 0.005  # a delay below this is the peer's ACK timer and scheduling, not a queue
QUEUE_SHARE = 0.5  # of the minimal round-trip time: above this, if it stays, it is a standing queue
QUEUE_SLICES = 3
QUEUE_BACKOFF = 0.85
LEAST_SHARE = 0.4  # of what was delivered lately: a standing queue that stays is not ours, who yields more starves
REMEMBERED_S = 60.0  # "lately"
LEAST_HOLD_S = 1.0  # a share that was reached is held this long before it is lowered further
DIP_SHARE = 0.5  # of the rate, to see the delay of the empty path
DIP_FIRST_S = 2.0  # after the first packet; a hand-off is mostly shorter
DIP_EVERY_S = 5.0  # as BBR's ProbeRTT
DIP_S = 0.1  # or three round trips
PATH_DELAY_MOVES_S = 0.002  # a delay that a dip moves less than this may be the path's own
DIPS_IN_VAIN = 3  # then it is; another sender may fill one gap, hardly three
DIP_AGAIN_S = 0.3
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


def rate_control(
    rate: str | float, *, max_datagram_size: int = 1452, burst_s: float = 0.001
) -> tuple[RateController, RatePacer]:
    """Controller and pacer for `ExtensionConnection.set_congestion_control`; `rate` as in `parse_rate`.

    burst_s: what may leave at once, in seconds of the rate.
    """
    controller = RateController(rate_bps=parse_rate(rate), max_datagram_size=max_datagram_size)
    return controller, RatePacer(controller, max_datagram_size=max_datagram_size, burst_s=burst_s)


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

    name = "rate"

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
        self._last_event_s = -math.inf
        self._slice: _Slice | None = None
        self._was_full = False
        self._full_run: deque[tuple[int, float]] = deque(maxlen=SHORTFALL_SLICES)  # (delivered, duration)
        self._queue_run = 0
        self._episode = 0  # back-offs on one standing queue
        self._episode_least = 0.0
        self._least_since_s = 0.0
        self._delivered_rates: deque[tuple[float, float]] = deque()  # (time, rate), falling: the head is the maximum
        self._hold_until_s = -math.inf
        self._dip_until_s = -math.inf
        self._dip_next_s: float | None = None
        self._dip_rtt_s = math.inf  # smallest during the dip
        self._dip_before_s: float | None = None  # the delay before it, where that looked like a queue
        self._dips_in_vain = 0  # in a row
        self._dip_asked = False  # about this queue, because backing off did not remove it
        self._queue_seen_s = -math.inf
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
        """What the pacer keeps: the present rate, or half of it for a moment, to see the path without its queue."""
        return DIP_SHARE * self._rate if self._dipping else self._rate

    @property
    def _dipping(self) -> bool:
        return self._dip_until_s > self._last_event_s

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
        if self._dipping:
            self._dip_rtt_s = min(self._dip_rtt_s, rtt)
        while self._rtts and self._rtts[-1][1] >= rtt:
            self._rtts.pop()
        self._rtts.append((now, rtt))
        # While a queue stands nobody sees the empty path: what was known of it stays, until a dip contradicts.
        while self._rtts[0][0] < now - RTT_WINDOW_S < self._rtts[-1][0] and self._queue_seen_s < now - RTT_WINDOW_S:
            self._rtts.popleft()
        self._update_window(now)

    # ---- slices ------------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> _Slice:
        self._last_event_s = now
        if self._slice is None:
            self._slice = _Slice(now)
            self._dip_next_s = now + DIP_FIRST_S
        elif now - self._slice.start_s >= max(self.min_rtt_s or 0.0, MIN_SLICE_S):
            self._judge(self._slice, now)
            self._slice = _Slice(now)
        return self._slice

    def _judge(self, ended: _Slice, now: float) -> None:
        duration_s = now - ended.start_s
        self._note_delivered(ended.delivered / duration_s, now)
        resolved = ended.delivered + ended.lost
        if resolved:
            self.loss_share += (ended.lost / resolved - self.loss_share) / 8
        if self._dip_until_s >= ended.start_s:
            self._end_dip(now)
            return
        full = ended.window_limited or ended.sent >= FULL * self._rate * duration_s
        if ended.window_limited or ended.sent >= USED * self._rate * duration_s:
            self._judge_queue(ended, now)
        self._judge_delivery(ended, now, duration_s, full)
        self._recover(ended, full)
        self._was_full = full
        if full and self._dip_next_s is not None and now >= self._dip_next_s:
            self._dip(now, ended)
        self._update_window(now)

    def _note_delivered(self, rate: float, now: float) -> None:
        while self._delivered_rates and self._delivered_rates[-1][1] <= rate:
            self._delivered_rates.pop()
        self._delivered_rates.append((now, rate))
        while self._delivered_rates[0][0] < now - REMEMBERED_S:
            self._delivered_rates.popleft()

    def _judge_queue(self, ended: _Slice, now: float) -> None:
        base_s, rtt_s = self.min_rtt_s, ended.min_rtt_s
        if base_s is None or rtt_s == math.inf:
            return
        if rtt_s <= base_s + self._queue_limit_s(base_s):
            self._queue_run = self._episode = 0
            self._dips_in_vain = 0
            self._dip_asked = False
            return
        self._queue_run += 1
        self._queue_seen_s = now
        self._clean_run = 0
        if now < self._hold_until_s or self._queue_run < QUEUE_SLICES:
            return
        delivered = ended.delivered / (now - ended.start_s)
        if not self._episode:
            self._episode_least = LEAST_SHARE * self._delivered_rates[0][1]
        if self._rate <= self._episode_least:
            if not self._dip_asked:
                self._dip_asked = True
                self._least_since_s = now
                self._dip(now, ended)
            if now < self._least_since_s + LEAST_HOLD_S:
                return
            self._least_since_s = now
            self._episode_least *= QUEUE_BACKOFF
        self.queue_backoffs += 1
        self._episode += 1
        self._back_off(max(QUEUE_BACKOFF * self._rate, self._episode_least), delivered, now, rtt_s)

    def _dip(self, now: float, ended: _Slice) -> None:
        self._dip_before_s = ended.min_rtt_s if self._queue_run else None
        self._dip_until_s = now + max(DIP_S, 3 * self._last_rtt_s)
        self._dip_next_s = now + DIP_EVERY_S
        self._dip_rtt_s = math.inf
        self._queue_run = 0
        self._reset_runs()

    def _end_dip(self, now: float) -> None:
        """A slice with a dip in it is over; the dip may last. A delay that did not fall with the rate is the path's."""
        if self._dipping or self._dip_before_s is None:
            return
        moved = abs(self._dip_rtt_s - self._dip_before_s) > PATH_DELAY_MOVES_S
        self._dip_before_s = None
        self._dips_in_vain = 0 if moved else self._dips_in_vain + 1
        if 0 < self._dips_in_vain < DIPS_IN_VAIN:
            self._dip_next_s = now + DIP_AGAIN_S
        elif self._dips_in_vain:
            self._rtts = deque([(now, self._dip_rtt_s)])
            self._queue_seen_s = -math.inf
            self._dips_in_vain = self._episode = 0
            self._dip_asked = False

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
        self._restart_target = self._dip_before_s = None
        self._dips_in_vain = 0
        self._dip_asked = False
        self._queue_seen_s = -math.inf
        self._dip_until_s = -math.inf
        self._delivered_rates.clear()
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


class RatePacer(TokenBucket):
    """Token bucket in bytes on the wire, at the controller's present rate."""

    def __init__(
        self,
        controller: RateController,
        *,
        max_datagram_size: int = 1452,
        burst_s: float = 0.001,
        catch_up_s: float = 0.004,
    ) -> None:
        super().__init__(max_datagram_size=max_datagram_size, burst_s=burst_s, catch_up_s=catch_up_s)
        self._controller = controller

    @property
    def rate_bytes_per_s(self) -> float:
        return self._controller.rate_bytes_per_s

    @property
    def rate_bps(self) -> float:
        return self._controller.rate_bps

    @property
    def reduced(self) -> bool:
        return self._controller.rate_bps < self._controller.cap_bps


def _sent_time(packet: QuicSentPacket) -> float:
    if packet.sent_time is None:
        raise LocalError("a packet without a time was sent")
    return packet.sent_time
