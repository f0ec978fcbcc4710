"""When slots begin and how long the path is in each: a link whose rate or delay changes under way.

Both engines of the simulator take their instants from here, so that they meet the same floating-point numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from quic_pfec.wire.errors import LocalError

__all__ = ["PathStep", "Timeline", "timeline"]


@dataclass(frozen=True, slots=True)
class PathStep:
    """From `slot` on a packet takes `slot_s` seconds to send and a round trip `rtt_s`."""

    slot: int
    rtt_s: float
    slot_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """times_s: float64[T], when each slot begins; steps: the first at slot 0; deadline_s: the receiver's freeze."""

    times_s: NDArray[np.float64]
    steps: tuple[PathStep, ...]
    deadline_s: float


def timeline(slots: int, rtt_s: float, slot_s: float, steps: tuple[PathStep, ...] = ()) -> Timeline:
    """`slots` slots of `slot_s`, or of what `steps` say, whose slots ascend from 1 on.

    The deadline lets the last packet arrive: half a slot later, and half a round trip of the last step. Raises
    LocalError for no slots or steps out of order.
    """
    if slots < 1:
        raise LocalError(f"{slots} slots")
    path = (PathStep(0, rtt_s, slot_s), *steps)
    starts = [step.slot for step in path]
    if any(later <= earlier for earlier, later in pairwise(starts)):
        raise LocalError(f"steps of the path ascend from slot 1 on: {starts[1:]}")
    times_s: NDArray[np.float64] = np.arange(slots, dtype=np.float64) * slot_s
    end_s = slots * slot_s
    for step in path[1:]:
        if step.slot >= slots:
            break
        begin_s = float(times_s[step.slot])
        times_s[step.slot :] = begin_s + np.arange(slots - step.slot) * step.slot_s
        end_s = begin_s + (slots - step.slot) * step.slot_s
        slot_s, rtt_s = step.slot_s, step.rtt_s
    return Timeline(times_s, path, end_s + 0.5 * slot_s + rtt_s / 2)
