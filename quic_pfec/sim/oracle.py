"""The bound: what a sender that knows every loss beforehand would have delivered.

A figure of delivered utility means little without it: on a bad draw of the channel nobody could have done well. The
genie puts a packet that is useful into every slot that survives, needs no repair and no feedback, and picks the best
packets for the measure in question. Both measures are therefore bounds for every scheme on the same losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quic_pfec.sim.link import SlotLog

__all__ = ["OracleBound", "opportunities", "oracle"]

Bits = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class OracleBound:
    """The best that `survivors` packets can do, as shares of all utility (0 to 1).

    `j_block` counts units that are complete (the paper's measure), `j_frac` every unit by the share of its packets.
    """

    j_block: float
    j_frac: float
    survivors: int


def oracle(
    losses: npt.ArrayLike,
    unit_packets: npt.ArrayLike,
    utility: npt.ArrayLike,
    order: Sequence[int] | npt.NDArray[np.integer] | None = None,
) -> OracleBound:
    """The bound for slots with `losses` (bool[T]), units of `unit_packets` packets (int[B]) and `utility` (float[B]).

    Without `order` the genie chooses: for `j_frac` packets by utility a packet, which is the optimum; for `j_block`
    the best set of whole units that the surviving packets can pay for, exactly, also when units differ in size.
    With `order`, unit ids in the order of sending, it must keep to it, and the bound is one for senders of that order
    (a FIFO sender, say); units left out are never sent.

    Raises ValueError for shapes that differ, units without packets, negative utility, utility that sums to zero, or an
    order that names a unit twice or one that does not exist.
    """
    packets = np.asarray(unit_packets, dtype=np.int64)
    values = np.asarray(utility, dtype=np.float64)
    if packets.ndim != 1 or packets.shape != values.shape:
        raise ValueError(f"unit_packets {packets.shape} and utility {values.shape} are not two rows of one length")
    if (packets < 1).any():
        raise ValueError("every unit has at least one packet")
    total = float(values.sum())
    if not (values >= 0).all() or not 0 < total < np.inf:
        raise ValueError("utility must be finite, not negative, and not all zero")
    survivors = int(np.count_nonzero(~np.asarray(losses, dtype=np.bool_)))
    if order is None:
        by_density = np.argsort(-values / packets, kind="stable")
        _, frac = _send(survivors, packets[by_density], values[by_density])
        block = _best_set(survivors, packets, values)
    else:
        sequence = np.asarray(order, dtype=np.int64)
        if len(np.unique(sequence)) != len(sequence) or ((sequence < 0) | (sequence >= len(packets))).any():
            raise ValueError("order names units once each, by ids below the number of units")
        block, frac = _send(survivors, packets[sequence], values[sequence])
    return OracleBound(j_block=min(1.0, block / total), j_frac=min(1.0, frac / total), survivors=survivors)


def _send(survivors: int, packets: Ints, values: Floats) -> tuple[float, float]:
    """Utility of the complete units, and by share of packets, when units go out in the order given."""
    arrived = np.clip(survivors - (np.cumsum(packets) - packets), 0, packets)
    return float(values[arrived == packets].sum()), float((values * arrived / packets).sum())


def _best_set(survivors: int, packets: Ints, values: Floats) -> float:
    """Utility of the best set of units of at most `survivors` packets in all: a knapsack, exactly.

    Of units of one size the best come first, so a set is a count for each size. Sizes are few (a last, shorter block;
    layers of two kinds), so all counts of the rarer sizes are tried, the best kept for each number of packets used,
    and the commonest size, where nearly all units are, fills up what is left.
    """
    sizes, counts = np.unique(packets, return_counts=True)
    *rare, common = sizes[np.argsort(counts, kind="stable")]
    used: Ints = np.zeros(1, dtype=np.int64)
    best: Floats = np.zeros(1)
    for size in rare:
        sums = _prefix_sums(values[packets == size])
        next_used = (used[:, None] + size * np.arange(len(sums))).ravel()
        next_best = (best[:, None] + sums).ravel()
        fits = next_used <= survivors
        used, place = np.unique(next_used[fits], return_inverse=True)
        best = np.zeros(len(used))
        np.maximum.at(best, place, next_best[fits])
    sums = _prefix_sums(values[packets == common])
    fill = np.minimum((survivors - used) // common, len(sums) - 1)
    return float((best + sums[fill]).max())


def _prefix_sums(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.sort(values)[::-1])])


def opportunities(
    log: SlotLog, *, start_s: float, deadline_s: float, owd_s: float, packet_s: float | None = None
) -> Bits:
    """The losses a genie meets on the link of `log` between `start_s` and `deadline_s`: bool[T], for `oracle`.

    It sends packets of `packet_s` seconds each (None = one slot) back to back from `start_s`, and the last leaves so
    that it arrives, `owd_s` later, by the deadline: T = floor((deadline_s - owd_s - start_s) / packet_s). Each meets
    the slot in which its middle lies, as on the link. Times are on the clock of the log's epoch. Raises ValueError if
    the log is on the packet clock, began after `start_s` or ends too early.
    """
    if log.slot_s is None:
        raise ValueError("a log on the packet clock has no slots in time")
    if packet_s is None:
        packet_s = log.slot_s
    # A whole number of packets must not become one less by rounding.
    count = max(0, int((deadline_s - owd_s - start_s) / packet_s + 1e-6))
    if start_s < log.epoch_s:
        raise ValueError(f"the log begins {log.epoch_s - start_s:.6f} s after the start")
    middles = start_s - log.epoch_s + (np.arange(count) + 0.5) * packet_s
    slots = (middles / log.slot_s).astype(np.int64)
    if count and slots[-1] >= len(log.losses):
        raise ValueError(f"the log has {len(log.losses)} slots, slot {slots[-1]} is needed")
    return log.losses[slots]
