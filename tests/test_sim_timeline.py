"""Slots of a path that changes under way."""

from __future__ import annotations

import numpy as np
import pytest

from quic_pfec.sim.timeline import PathStep, timeline
from quic_pfec.wire.errors import LocalError


def test_a_steady_path() -> None:
    plain = timeline(4, 0.02, 0.001)
    assert plain.times_s.tolist() == [slot * 0.001 for slot in range(4)]
    assert plain.deadline_s == pytest.approx(4.5 * 0.001 + 0.01)
    assert plain.steps == (PathStep(0, 0.02, 0.001),)


def test_steps() -> None:
    path = timeline(10, 0.02, 0.001, (PathStep(4, 0.04, 0.002), PathStep(8, 0.01, 0.001)))
    assert np.diff(path.times_s) == pytest.approx([0.001] * 4 + [0.002] * 4 + [0.001])
    assert path.deadline_s == pytest.approx(path.times_s[-1] + 0.0015 + 0.005)
    late = timeline(4, 0.02, 0.001, (PathStep(9, 1.0, 1.0),))
    assert late.deadline_s == timeline(4, 0.02, 0.001).deadline_s


@pytest.mark.parametrize("steps", [(PathStep(0, 0.1, 0.1),), (PathStep(3, 0.1, 0.1), PathStep(3, 0.1, 0.1))])
def test_steps_out_of_order(steps: tuple[PathStep, ...]) -> None:
    with pytest.raises(LocalError):
        timeline(5, 0.1, 0.1, steps)


def test_no_slots() -> None:
    with pytest.raises(LocalError):
        timeline(0, 0.1, 0.1)
