"""The bench of online costs, small: a real transfer, and parts that fit into the whole."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import overhead
from quic_pfec.sim.episode import Settings, run_episode


def test_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out" / "overhead.json"
    words = f"bench --packets 480 --rounds 1 --policy hybrid --policy paper-deficit --json {path}"
    monkeypatch.setattr(sys, "argv", words.split())
    overhead.main()
    report = json.loads(path.read_text())
    rows = report["rows"]
    assert [(row["geometry"], row["rho"], row["policy"]) for row in rows] == [
        (geometry, rho, policy)
        for geometry in overhead.GEOMETRIES
        for rho in (0.8, 1.0)
        for policy in ("hybrid", "paper-deficit")
    ]
    for row in rows:
        parts = [row[name] for name in overhead.PARTS]
        assert all(part >= 0 for part in parts)
        assert row["encode_ms"] > 0
        assert 0 < sum(parts) < 4 * row["total_ms"]  # one short round each: only the order of magnitude is sure
        assert row["total_ms"] >= max(row["sender_ms"], row["receiver_ms"]) > 0
        assert row["control_mean_us"] >= row["decision_mean_us"]
        assert row["control_p99_us"] >= row["decision_p99_us"] > 0
        assert 0 <= row["over_slot_share"] <= 1
        assert 0 < row["packets"] <= row["decisions"] == int(row["rho"] * 480)
    out = capsys.readouterr().out
    assert "the paper's Table II, its machine" in out
    assert "10.3-11.3" in out


@pytest.mark.parametrize("policy", ["hybrid", "arq", "paper-deficit"])
def test_the_transfer_is_the_simulator_s(policy: str) -> None:
    world = overhead.make_world("qwen2.5-7b", 0.8, 720, None, 3)
    for whole in (True, False):
        tape = overhead.Tape(world.encoder)
        played = overhead.play(world, policy, 0.1, whole=whole, tape=tape)
        settings = Settings(len(world.losses), overhead.RTT_SLOTS, scheduler=policy, repair_budget=0.1, seed=3)
        there = run_episode(world.unit_packets, world.utility, np.array(world.losses), settings)
        assert played.j_block == pytest.approx(there.j_block, abs=1e-12)
        sent = there.sender
        assert len(tape.calls) == sent.source + sent.repair + sent.resent
        assert played.packets == len(tape.calls) + sent.manifests
        assert len(played.sent) == (len(world.losses) if whole else 0)
        assert len(played.decide) == len(played.plan) == (0 if whole else len(world.losses))


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {"geometry": "g", "rho": 0.8, "policy": "arq", "total_ms": 9.0} | dict.fromkeys(overhead.PARTS, 2.0)
    overhead.draw([row], tmp_path / "a" / "picture.png")
    assert (tmp_path / "a" / "picture.png").read_bytes().startswith(b"\x89PNG")
