"""What `bbr` believes about its path: rounds, bandwidth, propagation delay, and the volumes that the path bears.

The estimating half of BBRv3 (draft-ietf-ccwg-bbr, "Updating Network Path Model Parameters"); `bbr` acts on it. Two time
scales: the long-term model is what bandwidth probing found (`max_bw`, `inflight_long`), the short-term model is what
losses since the last probe advise (`bw_short`, `inflight_short`) and is forgotten at the next probe.

One deviation, on paths declared lossy: there the short-term model is touched only by rounds that lost more than the
threshold. The draft touches it at any loss, which at 8 % random loss takes 8 % of the rate every round trip.
"""

from __future__ import annotations

import math
from collections import deque

from quic_pfec.quic.delivery import DeliverySampler, Sample, SentRecord

__all__ = ["DRAFT_LOSS_THRESHOLD", "LOSSY_LOSS_THRESHOLD", "BbrModel"]

DRAFT_LOSS_THRESHOLD = 0.02
"""Loss rate of a round trip above which probing has gone too far (BBR.LossThresh)."""
LOSSY_LOSS_THRESHOLD = 0.4
"""The same on a path declared lossy; chosen by measurement, see docs/decisions.md."""

BETA = 0.7  # BBR.Beta
HEADROOM = 0.15  # BBR.Headroom
FULL_GROWTH = 1.25
FULL_ROUNDS = 3
FULL_LOSS_EVENTS = 6  # BBRStartupFullLossCnt
EXTRA_ACKED_ROUNDS = 10
MIN_RTT_WINDOW_S = 10.0
PROBE_RTT_INTERVAL_S = 5.0
MIN_PIPE_PACKETS = 4
QUEUE_FLOOR_S = 0.005  # a delay below this is the peer's ACK timer and scheduling, not a queue
QUEUE_SHARE = 0.5  # of the propagation delay
DOUBT_ROUNDS = 8  # with a standing queue; one of our own is drained sooner
DOUBT_EVERY_S = 2.0
PATH_DELAY_MOVES_S = 0.002  # a delay that a pause moves less than this is no queue


class BbrModel:
    """Bandwidths in bytes/s, volumes in bytes. Fed with samples and losses by the controller, in its order."""

    def __init__(self, sampler: DeliverySampler, *, max_datagram_size: int, loss_threshold: float) -> None:
        self.loss_threshold = loss_threshold
        self._sampler = sampler
        self._packet = max_datagram_size
        # rounds: a round ends when a packet that left after its begin is acknowledged
        self.round_count = 0
        self.round_start = False
        self._next_round_delivered = 0
        # bandwidth: maxima of the previous and the present probing cycle
        self._cycle_max_bw = [0.0, 0.0]
        self.bw_short = math.inf
        # whether the pipe is full
        self.full_bw_reached = False
        self.full_bw_now = False
        self._full_bw = 0.0
        self._full_bw_rounds = 0
        # volumes
        self.inflight_long = math.inf
        self.inflight_short = math.inf
        self.extra_acked = 0.0
        self._extra_acked: deque[tuple[int, float]] = deque()  # (round, bytes), bytes falling: the head is the maximum
        self._extra_start_s = 0.0
        self._extra_delivered = 0
        # propagation delay
        self.min_rtt_s = math.inf
        self._min_rtt_stamp_s = -math.inf
        self.probe_rtt_expired = False
        self._probe_rtt_min_s = math.inf
        self._probe_rtt_stamp_s = -math.inf
        # losses of a round, which begins with its first loss
        self._bw_latest = 0.0
        self._inflight_latest = 0
        self._loss_in_round = False
        self._loss_round_delivered = 0
        self._loss_round_start = False
        self._lost_before = 0
        self._rtt_latest_s = math.inf  # minimum of this round, and of the last
        self._rtt_before_s = math.inf
        self._queue_rounds = 0
        self._rtt_probed_s = -math.inf
        self._rtt_unprobed_s = math.inf
        self._loss_runs = 0
        self._last_lost = -2
        self.startup_too_lossy = False

    # ---- what it says ------------------------------------------------------------------------------------------------

    @property
    def max_bw(self) -> float:
        return max(self._cycle_max_bw)

    @property
    def bw(self) -> float:
        return min(self.max_bw, self.bw_short)

    @property
    def min_pipe(self) -> int:
        return MIN_PIPE_PACKETS * self._packet

    @property
    def inflight_with_headroom(self) -> float:
        """The long-term bound less a part left to others."""
        if self.inflight_long == math.inf:
            return math.inf
        return max(self.inflight_long - max(self._packet, HEADROOM * self.inflight_long), self.min_pipe)

    @property
    def inflight_latest(self) -> int:
        return self._inflight_latest

    def bdp(self, gain: float = 1.0, bw: float | None = None) -> float:
        """`gain` bandwidth-delay products; infinite before the first round trip."""
        return gain * (self.bw if bw is None else bw) * self.min_rtt_s if self.min_rtt_s < math.inf else math.inf

    @property
    def standing_queue(self) -> bool:
        """Whether even the fastest packets of this round or of the last waited noticeably."""
        rtt_s = self._rtt_latest_s if self._rtt_latest_s < math.inf else self._rtt_before_s
        return math.inf > rtt_s > self.min_rtt_s + max(QUEUE_FLOOR_S, QUEUE_SHARE * self.min_rtt_s)

    @property
    def present_threshold(self) -> float:
        """The loss threshold that holds now: random loss builds no queue, so beside one the draft's value counts."""
        return min(self.loss_threshold, DRAFT_LOSS_THRESHOLD) if self.standing_queue else self.loss_threshold

    def lossy(self, lost: float, in_flight: float) -> bool:
        """Whether losing that much of a flight exceeds the threshold."""
        return lost > in_flight * self.present_threshold

    # ---- samples -----------------------------------------------------------------------------------------------------

    def on_sample(self, sample: Sample, now: float, *, probing: bool, window: float) -> None:
        """Everything an acknowledgement teaches but the round-trip time. `probing`: a phase that accelerates."""
        self._update_latest(sample)
        self._update_round(sample)
        if sample.rate > 0 and (sample.rate >= self.max_bw or not sample.app_limited):
            self._cycle_max_bw[1] = max(self._cycle_max_bw[1], sample.rate)
        if self._loss_round_start:
            self._end_loss_round(probing, window)
        self._update_extra_acked(sample, now, window)
        self._check_full_pipe(sample)

    def after_sample(self, sample: Sample) -> None:
        """Last step of an acknowledgement: a new loss round starts from what this one measured."""
        if self._loss_round_start:
            self._bw_latest, self._inflight_latest = sample.rate, sample.delivered

    def start_round(self) -> None:
        self._next_round_delivered = self._sampler.delivered

    def advance_max_bw(self) -> None:
        """A probing cycle is over: what the one before it found is forgotten."""
        self._cycle_max_bw = [self._cycle_max_bw[1], 0.0] if self._cycle_max_bw[1] else self._cycle_max_bw

    def reset_full_bw(self, baseline: float = 0.0) -> None:
        self._full_bw = baseline
        self._full_bw_rounds = 0
        self.full_bw_now = False

    def restart_extra_acked(self, now: float) -> None:
        self._extra_start_s, self._extra_delivered = now, 0

    def update_min_rtt(self, rtt_s: float, now: float) -> None:
        """Minima over 5 s, which says when to look for the delay of the empty path, and over 10 s, which is used."""
        self.probe_rtt_expired = now > self._probe_rtt_stamp_s + PROBE_RTT_INTERVAL_S
        if self._probe_rtt_min_s == math.inf:
            self.probe_rtt_expired = False
        if rtt_s < self._probe_rtt_min_s or self.probe_rtt_expired:
            self._probe_rtt_min_s, self._probe_rtt_stamp_s = rtt_s, now
        if self._probe_rtt_min_s < self.min_rtt_s or now > self._min_rtt_stamp_s + MIN_RTT_WINDOW_S:
            self.min_rtt_s, self._min_rtt_stamp_s = self._probe_rtt_min_s, self._probe_rtt_stamp_s

    def probe_rtt_due(self, now: float) -> bool:
        """Whether to look for the delay of the empty path now.

        On a path declared lossy also when a standing queue does not go away, which could be a path that got longer.
        """
        if self.probe_rtt_expired:
            return True
        lossy = self.loss_threshold > DRAFT_LOSS_THRESHOLD
        return lossy and self._queue_rounds >= DOUBT_ROUNDS and now > self._rtt_probed_s + DOUBT_EVERY_S

    def probe_rtt_begins(self, now: float) -> None:
        self._rtt_probed_s = now
        self._rtt_unprobed_s = min(self._rtt_latest_s, self._rtt_before_s)
        self._queue_rounds = 0

    def rtt_probed(self, now: float) -> None:
        """A look at the empty path is over; the next is due one interval from now.

        A delay that did not fall with the volume in flight is the path's own. The draft lets ten seconds pass before it
        believes that; on a path declared lossy they would be spent with the draft's loss threshold.
        """
        self._probe_rtt_stamp_s = now
        seen_s = min(self._rtt_latest_s, self._rtt_before_s)
        if (
            self.loss_threshold > DRAFT_LOSS_THRESHOLD
            and self.min_rtt_s + QUEUE_FLOOR_S < seen_s < math.inf
            and seen_s >= self._rtt_unprobed_s - PATH_DELAY_MOVES_S
        ):
            self.min_rtt_s = self._probe_rtt_min_s = seen_s
            self._min_rtt_stamp_s = now

    def _update_latest(self, sample: Sample) -> None:
        self._loss_round_start = False
        self._bw_latest = max(self._bw_latest, sample.rate)
        self._inflight_latest = max(self._inflight_latest, sample.delivered)
        if sample.prior_delivered >= self._loss_round_delivered:
            self._loss_round_delivered = self._sampler.delivered
            self._loss_round_start = True

    def _update_round(self, sample: Sample) -> None:
        self.round_start = sample.prior_delivered >= self._next_round_delivered
        if self.round_start:
            self.start_round()
            self.round_count += 1
            self._queue_rounds = self._queue_rounds + 1 if self.standing_queue else 0
            self._rtt_before_s, self._rtt_latest_s = self._rtt_latest_s, math.inf
        self._rtt_latest_s = min(self._rtt_latest_s, sample.rtt_s)

    def _update_extra_acked(self, sample: Sample, now: float, window: float) -> None:
        expected = self.bw * (now - self._extra_start_s)
        if self._extra_delivered <= expected:
            self.restart_extra_acked(now)
            expected = 0.0
        self._extra_delivered += sample.newly_acked
        extra = min(self._extra_delivered - expected, window)
        oldest = self.round_count - (EXTRA_ACKED_ROUNDS if self.full_bw_reached else 1)
        while self._extra_acked and self._extra_acked[-1][1] <= extra:
            self._extra_acked.pop()
        self._extra_acked.append((self.round_count, extra))
        while self._extra_acked[0][0] < oldest:
            self._extra_acked.popleft()
        self.extra_acked = self._extra_acked[0][1]

    def _check_full_pipe(self, sample: Sample) -> None:
        """Three rounds in a row without a quarter more: the pipe is full."""
        if self.full_bw_now or not self.round_start or sample.app_limited:
            return
        if sample.rate >= FULL_GROWTH * self._full_bw:
            self.reset_full_bw(sample.rate)
            return
        self._full_bw_rounds += 1
        if self._full_bw_rounds >= FULL_ROUNDS:
            self.full_bw_now = self.full_bw_reached = True

    # ---- losses ------------------------------------------------------------------------------------------------------

    def on_loss(self, number: int, size: int) -> None:
        """A packet was declared lost (and counted by the sampler)."""
        if not self._loss_in_round:
            self._loss_in_round = True
            self._loss_round_delivered = self._sampler.delivered
            self._lost_before = self._sampler.lost - size
            self._loss_runs = 0
        if number != self._last_lost + 1:
            self._loss_runs += 1
        self._last_lost = number

    def inflight_at_loss(self, record: SentRecord) -> float:
        """The volume in flight at which the losses crossed the threshold, inside the packet `record`."""
        before = record.in_flight - record.size
        lost_before = self._sampler.lost - record.lost - record.size
        threshold = self.present_threshold
        inside = (threshold * before - lost_before) / (1 - threshold)
        return before + inside

    def reset_loss_signals(self) -> None:
        self._loss_in_round = False
        self._bw_latest, self._inflight_latest = 0.0, 0

    def reset_short_term(self) -> None:
        self.bw_short = self.inflight_short = math.inf

    def _end_loss_round(self, probing: bool, window: float) -> None:
        if not self._loss_in_round:
            return
        self._loss_in_round = False
        lost = self._sampler.lost - self._lost_before
        heavy = self.lossy(lost, lost + self._inflight_latest)
        self.startup_too_lossy = heavy and self._loss_runs >= FULL_LOSS_EVENTS
        if probing or (self.present_threshold > DRAFT_LOSS_THRESHOLD and not heavy):
            return
        if self.bw_short == math.inf:
            self.bw_short = self.max_bw
        if self.inflight_short == math.inf:
            self.inflight_short = window
        self.bw_short = max(self._bw_latest, BETA * self.bw_short)
        self.inflight_short = max(self._inflight_latest, BETA * self.inflight_short)
