"""The bench of the two engines, small: both end with the same symbols."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import engines
from quic_pfec.schedule.policies import POLICY_NAMES


def test_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "engines.json"
    monkeypatch.setattr(sys, "argv", f"bench --slots 600 --repeats 1 --json {path}".split())
    engines.main()
    rows = json.loads(path.read_text())["rows"]
    assert [row["scheduler"] for row in rows] == list(POLICY_NAMES)
    assert all(row["same"] and row["engine_slots_per_s"] > row["episode_slots_per_s"] for row in rows)
