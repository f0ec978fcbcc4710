"""`bbr`: congestion control by a model of the path, after the IETF's BBRv3 (draft-ietf-ccwg-bbr).

A loss-based controller takes every loss for a full queue. This one measures the rate at which the path delivers and the
delay of the empty path, paces at the one and keeps about their product in flight; loss only bounds it, above a
threshold per round trip. The threshold is a named parameter: the draft's 2 % by default, a higher one on a path that
the caller declares lossy, which is a deviation and reported as one. A standing queue is limited in every mode, because
the model limits what is in flight; a packet whose symbol was recovered is as lost as any other.

States and their gains are the draft's. It differs where aioquic gives less than the draft asks for: an acknowledgement
is over when something else happens, since nothing marks its end; a spurious loss is never reported, so nothing is
undone; congestion marks (ECN) are absent. Pure: every method gets its time from the caller, and randomness is seeded.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from aioquic.quic.congestion.base import K_INITIAL_WINDOW, QuicCongestionControl
from aioquic.quic.packet_builder import QuicSentPacket

from quic_pfec.quic.bbr_model import BETA, DRAFT_LOSS_THRESHOLD, BbrModel
from quic_pfec.quic.delivery import DeliverySampler, Sample, SentRecord
from quic_pfec.quic.pacing import HEADER_BYTES
from quic_pfec.wire.errors import LocalError

__all__ = ["BbrController", "Phase"]

PACING_MARGIN = 0.99  # BBR.PacingMarginPercent
PROBE_RTT_GAIN = 0.5
PROBE_RTT_S = 0.2
DRAIN_ROUNDS = 3
PROBE_WAIT_S = 2.0  # and up to a second more
RENO_ROUNDS = 63
QUANTUM_S = 0.001
MAX_QUANTUM = 65536
MIN_WINDOW_PACKETS = 2  # RFC 9002 §7.2


class Phase(Enum):
    """State of the machine, with its pacing gain and window gain."""

    STARTUP = ("startup", 2.77, 2.0)
    DRAIN = ("drain", 0.5, 2.0)
    DOWN = ("down", 0.9, 2.0)
    CRUISE = ("cruise", 1.0, 2.0)
    REFILL = ("refill", 1.0, 2.0)
    UP = ("up", 1.25, 2.25)
    PROBE_RTT = ("probe_rtt", 1.0, PROBE_RTT_GAIN)

    def __init__(self, label: str, pacing_gain: float, window_gain: float) -> None:
        self.label = label
        self.pacing_gain = pacing_gain
        self.window_gain = window_gain


class _Acks(Enum):
    """What acknowledgements tell about the last probe for bandwidth."""

    INIT = 0
    REFILLING = 1
    STARTING = 2
    FEEDBACK = 3
    STOPPING = 4


PROBE_BW = frozenset({Phase.DOWN, Phase.CRUISE, Phase.REFILL, Phase.UP})
ACCELERATING = frozenset({Phase.STARTUP, Phase.REFILL, Phase.UP})


class BbrController(QuicCongestionControl):
    """See the module. `loss_threshold`: share of a round trip's bytes, 0 < x < 1. Raises LocalError outside."""

    name = "bbr"

    def __init__(
        self,
        *,
        max_datagram_size: int = 1452,
        loss_threshold: float = DRAFT_LOSS_THRESHOLD,
        seed: int | None = None,
    ) -> None:
        if not 0 < loss_threshold < 1:
            raise LocalError(f"loss_threshold is a share between 0 and 1, not {loss_threshold}")
        self._packet = max_datagram_size
        self._initial_window = K_INITIAL_WINDOW * max_datagram_size
        self._window = float(self._initial_window)
        self._sampler = DeliverySampler()
        self._model = BbrModel(self._sampler, max_datagram_size=max_datagram_size, loss_threshold=loss_threshold)
        self._random = random.Random(seed)
        self._holds_back: Callable[[float], bool] = lambda now: True
        super().__init__(max_datagram_size=max_datagram_size)
        self.packets_acked = 0
        self.packets_lost = 0
        self.persistent_congestions = 0
        self.probes_too_high = 0
        self._phase = Phase.STARTUP
        self._acks = _Acks.INIT
        self._now = -math.inf  # of the acknowledgement being gathered, or of the last event
        self._pacing_rate = Phase.STARTUP.pacing_gain * self._initial_window / 0.001
        self._drain_round = 0
        self._limited_round = -2  # the last round in which the window was full
        self._idle_restart = False
        self._prior_window = 0.0
        self._probe_rtt_done_s: float | None = None
        self._probe_rtt_round_done = False
        self._cycle_start_s = 0.0
        self._probe_wait_s = PROBE_WAIT_S
        self._probe_round = 0  # rounds are counted from here to the next probe
        self._probe_sample = False  # losses now answer for a probe
        self._too_high = False
        self._precautionary = False
        self._up_rounds = 0
        self._up_acked = 0
        self._up_acked_per_packet = math.inf

    # ---- what others read --------------------------------------------------------------------------------------------

    @property
    def congestion_window(self) -> int:
        """Bytes of UDP payload that may be in flight."""
        self._finish_ack()
        return int(self._window)

    @congestion_window.setter
    def congestion_window(self, window: int) -> None:
        self._window = float(window)

    @property
    def pacing_rate_bytes_per_s(self) -> float:
        """UDP payload per second that may leave now."""
        self._finish_ack()
        return max(self._pacing_rate, 2 * self._packet)

    @property
    def rate_bps(self) -> float:
        """The rate to plan with, in bit/s with headers: what the path bears, or in startup what is being tried."""
        rate = self.pacing_rate_bytes_per_s if self._phase is Phase.STARTUP else self._model.bw
        return 8 * max(rate, self._packet) * (1 + HEADER_BYTES / self._packet)

    @property
    def loss_threshold(self) -> float:
        return self._model.loss_threshold

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Estimated bandwidth, UDP payload."""
        self._finish_ack()
        return self._model.max_bw

    @property
    def min_rtt_s(self) -> float | None:
        """Smallest round trip of about the last 10 s; None before the first sample."""
        self._finish_ack()
        return self._model.min_rtt_s if self._model.min_rtt_s < math.inf else None

    @property
    def held_back(self) -> bool:
        """Whether it has not yet found the path's rate, or losses hold it below what it found."""
        self._finish_ack()
        return not self._model.full_bw_reached or self._model.bw_short < self._model.max_bw

    def get_log_data(self) -> dict[str, Any]:
        return super().get_log_data() | {
            "pacing_rate": int(8 * self._pacing_rate),
            "bbr_phase": self._phase.label,
            "bbr_bandwidth": int(8 * self._model.max_bw),
        }

    def ask_pacer(self, holds_back: Callable[[float], bool]) -> None:
        """The pacer knows who waits for it, and thereby whether there is anything to send."""
        self._holds_back = holds_back

    # ---- events of aioquic's recovery --------------------------------------------------------------------------------

    def on_packet_sent(self, *, packet: QuicSentPacket) -> None:
        now = packet.sent_time
        if now is None:
            raise LocalError("a packet without a time was sent")
        self._finish_ack()
        self._now = now
        if self.bytes_in_flight <= 0 and self._sampler.app_limited:
            self._restart_from_idle(now)
        self.bytes_in_flight += packet.sent_bytes
        self._sampler.on_sent(packet.packet_number, packet.sent_bytes, now, self.bytes_in_flight)
        if self._window_full:
            self._limited_round = self._model.round_count

    def on_packet_acked(self, *, now: float, packet: QuicSentPacket) -> None:
        self.check_app_limited(now)
        self.bytes_in_flight -= packet.sent_bytes
        self.packets_acked += 1
        self._sampler.on_acked(packet.packet_number, packet.sent_bytes, now)

    def on_packets_lost(self, *, now: float, packets: Iterable[QuicSentPacket]) -> None:
        self._finish_ack()
        self.check_app_limited(now)
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes
            self.packets_lost += 1
            record = self._sampler.on_lost(packet.packet_number, packet.sent_bytes)
            self._model.on_loss(packet.packet_number, packet.sent_bytes)
            if record is not None and self._probe_sample:
                self._judge_probe(record)
        self._update_control(0)

    def on_packets_expired(self, *, packets: Iterable[QuicSentPacket]) -> None:
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes
            self._sampler.forget(packet.packet_number)

    def on_persistent_congestion(self) -> None:
        """RFC 9002 §7.6: the window collapses, then grows with what arrives up to what the model bears."""
        self.persistent_congestions += 1
        self._window = float(MIN_WINDOW_PACKETS * self._packet)

    def on_rtt_measurement(self, *, now: float, rtt: float) -> None:
        self._finish_ack()

    def check_app_limited(self, now: float) -> None:
        """Before anything changes at `now`: did the time since the last event pass with nothing to send?"""
        if now <= self._now:
            return
        self._finish_ack()
        self._now = now
        if not self._holds_back(now) and not self._window_full:
            self._sampler.mark_app_limited(self.bytes_in_flight)

    @property
    def _window_full(self) -> bool:
        return self.bytes_in_flight + self._packet > self._window

    @property
    def _window_limited(self) -> bool:
        """Whether the window was full in this round or the last."""
        return self._limited_round >= self._model.round_count - 1

    # ---- an acknowledgement ------------------------------------------------------------------------------------------

    def _finish_ack(self) -> None:
        if not self._sampler.pending:
            return
        model, now = self._model, self._now
        first = model.min_rtt_s == math.inf
        sample = self._sampler.finish(0.0 if first else model.min_rtt_s)
        if sample is None:
            return
        model.on_sample(sample, now, probing=self._phase in ACCELERATING, window=self._window)
        self._check_startup()
        self._check_drain()
        self._update_cycle(sample)
        model.update_min_rtt(sample.rtt_s, now)
        if first:  # nothing was known but the initial window
            self._pacing_rate = Phase.STARTUP.pacing_gain * self._initial_window / max(model.min_rtt_s, 1e-6)
        self._check_probe_rtt(sample)
        model.after_sample(sample)
        self._update_control(sample.newly_acked)

    def _check_startup(self) -> None:
        model = self._model
        if self._phase is not Phase.STARTUP:
            return
        if model.startup_too_lossy:
            model.full_bw_reached = True
            model.inflight_long = max(self._bdp(), model.inflight_latest)
        if model.full_bw_reached:
            self._phase = Phase.DRAIN
            self._drain_round = model.round_count

    def _check_drain(self) -> None:
        if self._phase is Phase.DRAIN and (
            self.bytes_in_flight <= self._inflight(1.0) or self._model.round_count > self._drain_round + DRAIN_ROUNDS
        ):
            self._go_down()

    # ---- probing for bandwidth ---------------------------------------------------------------------------------------

    def _go_down(self) -> None:
        self._model.reset_loss_signals()
        self._up_acked_per_packet = math.inf
        self._probe_round = self._model.round_count - self._random.randrange(2)
        self._probe_wait_s = PROBE_WAIT_S + self._random.random()
        self._cycle_start_s = self._now
        self._acks = _Acks.STOPPING
        self._model.start_round()
        self._phase = Phase.DOWN

    def _refill(self) -> None:
        self._model.reset_short_term()
        self._up_rounds = 0
        self._up_acked = 0
        self._precautionary = False
        self._acks = _Acks.REFILLING
        self._model.start_round()
        self._phase = Phase.REFILL

    def _go_up(self, sample: Sample) -> None:
        self._probe_sample = True
        self._acks = _Acks.STARTING
        self._model.start_round()
        self._model.reset_full_bw(sample.rate)
        self._phase = Phase.UP
        self._raise_slope()

    def _update_cycle(self, sample: Sample) -> None:
        model = self._model
        if not model.full_bw_reached or self._adapt_long_term(sample) or self._phase not in PROBE_BW:
            return
        if self._phase in (Phase.DOWN, Phase.CRUISE):
            if self._time_to_probe():
                self._refill()
            elif self._phase is Phase.DOWN and self.bytes_in_flight <= min(
                model.inflight_with_headroom, self._inflight(1.0, model.max_bw)
            ):
                self._phase = Phase.CRUISE
        elif self._phase is Phase.REFILL:
            if model.round_start:
                self._go_up(sample)
        elif self._time_to_go_down(sample):
            self._too_high = False
            self._go_down()

    def _adapt_long_term(self, sample: Sample) -> bool:
        """Follow a probe through its acknowledgements; True if that decided the next phase."""
        model = self._model
        in_probe_bw = self._phase in PROBE_BW
        if self._acks is _Acks.STARTING and model.round_start:
            self._acks = _Acks.FEEDBACK
        if self._acks is _Acks.STOPPING and model.round_start:
            self._probe_sample = False
            self._acks = _Acks.INIT
            if in_probe_bw and not sample.app_limited:
                model.advance_max_bw()
            if in_probe_bw and self._precautionary and not self._too_high:
                self._refill()
                return True
        if model.lossy(sample.lost, sample.in_flight) or model.inflight_long == math.inf:
            return False
        model.inflight_long = max(model.inflight_long, sample.in_flight)
        if self._phase is Phase.UP:
            self._raise_long_term(sample)
        return False

    def _raise_long_term(self, sample: Sample) -> None:
        model = self._model
        if not self._window_limited or self._window < model.inflight_long:
            return
        self._up_acked += sample.newly_acked
        if self._up_acked >= self._up_acked_per_packet:
            steps = int(self._up_acked // self._up_acked_per_packet)
            self._up_acked -= int(steps * self._up_acked_per_packet)
            model.inflight_long += steps * self._packet
        if model.round_start:
            self._raise_slope()

    def _raise_slope(self) -> None:
        self._up_acked_per_packet = max(self._window / (1 << self._up_rounds), self._packet)
        self._up_rounds = min(self._up_rounds + 1, 30)

    def _time_to_probe(self) -> bool:
        if self._now > self._cycle_start_s + self._probe_wait_s:
            return True
        reno_rounds = min(min(self._bdp(), self._window) / self._packet, RENO_ROUNDS)
        return self._model.round_count - self._probe_round >= reno_rounds

    def _time_to_go_down(self, sample: Sample) -> bool:
        model = self._model
        if self._too_high and self.bytes_in_flight >= model.inflight_long:
            self._precautionary = True
            return True
        if self._window_limited and self._window >= model.inflight_long:
            model.reset_full_bw(sample.rate)  # the bound, not the path, limits what is seen
            return False
        return model.full_bw_now

    def _judge_probe(self, record: SentRecord) -> None:
        """A packet of a probe was lost: did the probe go too far?"""
        model = self._model
        if not model.lossy(self._sampler.lost - record.lost, record.in_flight):
            return
        self.probes_too_high += 1
        self._too_high = True
        self._probe_sample = False  # one answer a probe
        if not record.app_limited:
            target = min(self._bdp(), self._window)
            model.inflight_long = max(model.inflight_at_loss(record), BETA * target)
        if self._phase is Phase.UP:
            self._go_down()

    # ---- probing for the round-trip time -----------------------------------------------------------------------------

    def _check_probe_rtt(self, sample: Sample) -> None:
        model = self._model
        if self._phase is not Phase.PROBE_RTT and not self._idle_restart and model.probe_rtt_due(self._now):
            model.probe_rtt_begins(self._now)
            self._prior_window = max(self._window, self._prior_window)
            self._phase = Phase.PROBE_RTT
            self._probe_rtt_done_s = None
            self._acks = _Acks.STOPPING
            model.start_round()
        if self._phase is Phase.PROBE_RTT:
            self._sampler.mark_app_limited(self.bytes_in_flight)  # low rates now say nothing about the path
            if self._probe_rtt_done_s is None:
                if self.bytes_in_flight <= self._probe_rtt_window():
                    self._probe_rtt_done_s = self._now + PROBE_RTT_S
                    self._probe_rtt_round_done = False
                    model.start_round()
            else:
                self._probe_rtt_round_done |= model.round_start
                if self._probe_rtt_round_done:
                    self._check_probe_rtt_done()
        if sample.delivered > 0:
            self._idle_restart = False

    def _check_probe_rtt_done(self) -> None:
        if self._probe_rtt_done_s is None or self._now <= self._probe_rtt_done_s:
            return
        self._model.rtt_probed(self._now)
        self._window, self._prior_window = max(self._window, self._prior_window), 0.0
        self._model.reset_short_term()
        if self._model.full_bw_reached:
            self._go_down()
            self._phase = Phase.CRUISE
        else:
            self._phase = Phase.STARTUP

    def _restart_from_idle(self, now: float) -> None:
        self._idle_restart = True
        self._model.restart_extra_acked(now)
        if self._phase in PROBE_BW:
            self._set_pacing_rate(1.0)
        elif self._phase is Phase.PROBE_RTT:
            self._check_probe_rtt_done()

    # ---- rate and window ---------------------------------------------------------------------------------------------

    def _update_control(self, newly_acked: int) -> None:
        model = self._model
        self._set_pacing_rate(self._phase.pacing_gain)
        most = self._quantised(self._bdp(self._phase.window_gain) + model.extra_acked)
        window = self._window
        if model.full_bw_reached:
            window = min(window + newly_acked, most)
        elif window < most or self._sampler.delivered < self._initial_window:
            window += newly_acked
        if self._phase is Phase.PROBE_RTT:
            window = min(window, self._probe_rtt_window())
        cap = math.inf
        if self._phase in (Phase.CRUISE, Phase.PROBE_RTT):
            cap = model.inflight_with_headroom
        elif self._phase in PROBE_BW:
            cap = model.inflight_long
        cap = max(min(cap, model.inflight_short), model.min_pipe)
        floor = model.min_pipe if newly_acked else 0  # persistent congestion goes below it until something arrives
        self._window = min(max(window, floor), cap)

    def _set_pacing_rate(self, gain: float) -> None:
        rate = gain * self._model.bw * PACING_MARGIN
        if self._model.full_bw_reached or rate > self._pacing_rate:
            self._pacing_rate = rate

    def _bdp(self, gain: float = 1.0) -> float:
        bdp = self._model.bdp(gain)
        return float(self._initial_window) if bdp == math.inf else bdp

    def _inflight(self, gain: float, bw: float | None = None) -> float:
        bdp = self._model.bdp(gain, bw)
        return self._quantised(float(self._initial_window) if bdp == math.inf else bdp)

    def _quantised(self, volume: float) -> float:
        quantum = max(min(self._pacing_rate * QUANTUM_S, MAX_QUANTUM), 2 * self._packet)
        volume = max(volume, quantum, self._model.min_pipe)
        return volume + 2 * self._packet if self._phase is Phase.UP else volume

    def _probe_rtt_window(self) -> float:
        return max(self._bdp(PROBE_RTT_GAIN), self._model.min_pipe)
