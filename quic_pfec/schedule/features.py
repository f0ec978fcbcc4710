"""The state of the paper's decision process as 15 numbers, and its choices: what a learned policy sees and answers.

The paper (arXiv 2610.21390, section IV-B) names the features and gives no formulas; these are ours. All are causal at
the sender and free of scale. This module is the specification of schedule/features.c, which the simulator and the
compiled policies use. n and N are the symbols sent and all, W the span after the known prefix, T and Trem the slots in
all and left, B and Brem the budget (T, and what of T was not spent on repairs and resends, where there is none), eps
the moving average of the loss, I and R the symbols and repairs in flight, m the deficit that the receiver reported,
d = max(0, m + eps I - (1 - eps) R), P the packets of the present unit, U the utility of a unit, K the degree.

| name | formula |
|---|---|
| budget | Brem / B |
| time | Trem / T |
| pressure | min(2, (N - n) / max(1, Trem)) / 2; version 2: min(1, Trem / (4 RTT)) |
| slack | (Trem - (N - n) - d / (1 - eps)) / T, within -1..1 |
| loss | min(1, 4 eps) |
| burst | moving average, gain 0.02 from 0.3, of loss given that the fate before was a loss |
| deficit_share | d / max(1, d + Brem) |
| deficit | log(1 + d) / log 65 |
| window | log(1 + W) / log(1 + N) |
| window_rtt | min(4, W / (RTT + K)) / 4 |
| silence | min(4, slots since the prefix moved / RTT) / 4 |
| position | share of the present unit that was sent |
| utility | min(4, mean U from the prefix's unit to the present one, 64 at most, / mean U) / 4 |
| utility_next | u / (u + that mean), u = mean U of the next 16 units |
| failure | 1 - (1 - min(1, (m + eps I) / W))^min(K, W) |
"""

from __future__ import annotations

from math import inf, log
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quic_pfec.schedule.state import MAX_SOURCE_BURST, REPAIR_BURSTS, RESEND, Action, ActionKind, State

NAMES = (
    "budget", "time", "pressure", "slack", "loss", "burst", "deficit_share", "deficit", "window", "window_rtt",
    "silence", "position", "utility", "utility_next", "failure",
)  # fmt: skip
CHOICES = ("source", "repair1", "repair4", "repair16", "resend")


def deficit(state: State) -> float:
    """d, the packets that the receiver will lack if nothing more is sent."""
    loss = state.loss_short
    return max(0.0, state.feedback_deficit + loss * state.in_flight - (1.0 - loss) * state.repairs_in_flight)


def _budget(state: State) -> float:
    if state.budget_left < inf:
        return state.budget_left
    return max(0.0, state.slots_total - state.packets_extra)


class FeatureMemory:
    """What the features remember between decisions; one for each transfer.

    unit_packets: int64[U] and utility: float64[U] in the order of sending; budget: packets, may be infinite.
    """

    def __init__(
        self,
        unit_packets: NDArray[np.int64],
        utility: NDArray[np.float64],
        slots_total: int,
        budget: float = inf,
        degree: int = 48,
    ) -> None:
        self._unit_of = np.repeat(np.arange(len(unit_packets)), unit_packets)
        self._before = np.concatenate(([0.0], np.cumsum(utility)))
        self._unlimited = budget == inf
        self._budget = float(slots_total) if self._unlimited else budget
        self._degree = degree
        self._after_loss = 0.3
        self._lost_before = False
        self._prefix = 0
        self._progress_left = slots_total

    def on_fate(self, lost: bool) -> None:
        """The first fate of a packet that was no probe, in the order in which fates come."""
        if self._lost_before:
            self._after_loss += 0.02 * (lost - self._after_loss)
        self._lost_before = lost

    def extend(self, slots_total: int) -> None:
        """A second deadline, so many slots away, begins to count; what was seen of the path stays."""
        self._progress_left = slots_total
        if self._unlimited:
            self._budget = float(slots_total)

    def view(self, state: State) -> None:
        """At every packet that is no manifest, and before `look`."""
        prefix = state.sources_sent - state.window
        if prefix != self._prefix:
            self._prefix = prefix
            self._progress_left = state.slots_left

    def look(self, state: State, version: Literal[1, 2] = 1) -> NDArray[np.float32]:
        """The features, float32[15]."""
        total, left, rtt = state.slots_total, state.slots_left, max(1e-9, state.rtt_slots)
        unsent, window, loss = state.sources_total - state.sources_sent, state.window, state.loss_short
        lacking, budget = deficit(state), _budget(state)
        units = len(self._before) - 1
        here = int(self._unit_of[state.sources_sent]) if unsent else units
        first = int(self._unit_of[state.sources_sent - window]) if unsent + window else units
        unresolved = self._mean(first, min(first + 64, here + 1))
        following, mean = self._mean(here, here + 16), self._mean(0, units)
        missing = state.feedback_deficit + loss * state.in_flight
        pressure = min(2.0, unsent / max(1.0, left)) / 2.0
        values = (
            budget / self._budget if self._budget > 0 else 0.0,
            left / total,
            min(1.0, left / (4.0 * rtt)) if version == 2 else pressure,
            max(-1.0, min(1.0, (left - unsent - lacking / (1.0 - loss)) / total)),
            min(1.0, 4.0 * loss),
            self._after_loss,
            lacking / max(1.0, lacking + budget),
            log(1.0 + lacking) / log(65.0),
            log(1.0 + window) / log(1.0 + state.sources_total),
            min(4.0, window / (rtt + self._degree)) / 4.0,
            min(4.0, (self._progress_left - left) / rtt) / 4.0,
            state.unit_position / state.unit_packets if state.unit_packets else 0.0,
            min(4.0, unresolved / mean) / 4.0 if mean > 0 else 0.0,
            following / (following + unresolved) if following + unresolved > 0 else 0.0,
            1.0 - (1.0 - min(1.0, missing / window)) ** min(self._degree, window) if window else 0.0,
        )
        return np.array(values, dtype=np.float32)

    def _mean(self, first: int, stop: int) -> float:
        stop = min(stop, len(self._before) - 1)
        return float(self._before[stop] - self._before[first]) / (stop - first) if stop > first else 0.0


def masks(state: State, *, resend: bool = False) -> NDArray[np.bool_]:
    """What may be chosen, bool[5] in the order of `CHOICES` (the paper: repairs only if something is lacking)."""
    room = min(state.budget_left, max(1, state.slots_left))
    repair = state.can_repair and state.window > 0 and deficit(state) > 0.0
    repairs = [repair and room >= burst for burst in REPAIR_BURSTS]
    return np.array([state.can_source, *repairs, resend and state.can_resend], dtype=np.bool_)


def action(state: State, choice: int) -> Action:
    """The action of `CHOICES[choice]`: a burst of sources ends with its unit and with the time left."""
    if choice == CHOICES.index("resend"):
        return RESEND
    if choice > 0:
        return Action(ActionKind.REPAIR, REPAIR_BURSTS[choice - 1])
    burst = min(MAX_SOURCE_BURST, state.unit_packets - state.unit_position, state.slots_left)
    return Action(ActionKind.SOURCE, max(1, burst))
