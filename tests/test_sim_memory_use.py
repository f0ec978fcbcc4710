"""A peak belongs to the stretch it was asked of."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from quic_pfec.sim import memory_use
from quic_pfec.sim.memory_use import PeakMemory
from quic_pfec.sim.points import cells
from quic_pfec.sim.sweep import parse_scheme, play_cell

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/clear_refs")


@linux
def test_each_stretch_has_its_own() -> None:
    memory = PeakMemory()
    memory.restart()
    large = np.ones(8 << 20)  # 64 MiB
    peak_mb = memory.peak_mb()
    assert peak_mb is not None
    assert 60 < peak_mb < 100
    del large
    assert memory.peak_mb() == pytest.approx(peak_mb, abs=4)  # the kernel counts in batches
    memory.restart()
    after_mb = memory.peak_mb()
    assert after_mb is not None
    assert after_mb < 30


@linux
def test_a_small_hand_off_after_a_large_one() -> None:
    small = next(cell for cell in cells("short") if cell.slots < 200)
    large = next(cell for cell in cells("context") if cell.columns == 256)
    scheme = [parse_scheme("hybrid")]
    play_cell(small, 1, scheme)
    peaks = [play_cell(cell, 1, scheme)[0].peak_mb for cell in (large, small)]
    assert peaks[0] is not None
    assert peaks[1] is not None
    assert peaks[0] > 8 > peaks[1]


def test_where_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory_use, "_CLEAR", tmp_path / "nowhere" / "clear_refs")
    memory = PeakMemory()
    memory.restart()
    assert memory.peak_mb() is None
    monkeypatch.setattr(memory_use, "_STATUS", tmp_path / "status")
    assert PeakMemory().peak_mb() is None
