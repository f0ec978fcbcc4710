"""The data-path bench runs, small: real processes, every packet delivered, the fast path cheaper than the slow one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.sockets, pytest.mark.slow]


def test_it_measures_three_cases(tmp_path: Path) -> None:
    out = tmp_path / "datapath.json"
    command = [sys.executable, "-m", "bench.datapath", "--packets", "300", "--tokens", "256", "--rounds", "1"]
    subprocess.run([*command, "--rate", "100Mbps", "--json", str(out)], check=True, timeout=120, capture_output=True)
    figures = json.loads(out.read_text())
    assert set(figures["cases"]) == {"stock", "slow", "fast"}
    for case in ("slow", "fast"):
        assert figures["cases"][case][0]["j_block"] == 1.0
    slow, fast = (figures["cases"][case][0] for case in ("slow", "fast"))
    assert fast["tx_us_per_packet"] < slow["tx_us_per_packet"] / 1.5
    assert figures["settings"]["seed"] == 1
