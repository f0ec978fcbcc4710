"""The arithmetic of bench.bottleneck, and one short run of it where that is possible."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import bottleneck
from bench.bottleneck import ALONE_VALUES, Keys, Plan, Skipped, medians, plans, run_all, table, until_it_counts

from .tun_world import nothing_left, rights

__all__ = ["nothing_left", "rights"]  # fixtures


def row(void: bool = False, **values: Any) -> dict[str, Any]:
    return {"flow": "rate", "channel": "paper", "void": ["late"] if void else [], **values}


def test_void_runs_are_repeated_and_listed_and_never_counted() -> None:
    outcomes = iter([row(True, n=1), row(True, n=2), row(n=3)])
    voided: list[dict[str, Any]] = []
    kept = until_it_counts(lambda: next(outcomes), voided)
    assert kept is not None
    assert kept["n"] == 3
    assert [each["n"] for each in voided] == [1, 2]
    voided.clear()
    assert until_it_counts(lambda: row(True), voided) is None
    assert len(voided) == 1 + bottleneck.REPEATS


def test_what_cannot_run_is_skipped_once_with_the_reason() -> None:
    calls = []

    def cannot() -> dict[str, Any]:
        calls.append(1)
        raise Skipped("unknown controller")

    results = run_all([Plan("a", "bbr", cannot), Plan("b", "bbr", cannot), Plan("c", "rate", row)])
    assert len(calls) == 1
    assert results["skipped"] == [{"flow": "bbr", "reason": "unknown controller"}]
    assert [each["flow"] for each in results["alone"]] == ["rate"]
    assert results["shared"] == results["void"] == []


def test_medians_are_by_flow_and_channel() -> None:
    rows = [dict.fromkeys(ALONE_VALUES, share) | row() for share in (0.1, 0.9, 0.8)]
    rows.append(dict.fromkeys(ALONE_VALUES, 0.5) | row() | {"channel": "none"})
    cells = medians(rows, "channel", ALONE_VALUES)
    assert [(cell["channel"], cell["runs"], cell["offered_share"]) for cell in cells] == [
        ("paper", 3, 0.8),
        ("none", 1, 0.5),
    ]
    assert "queue_delay_mean_ms" in table(cells)
    assert "800.000" in table(cells)  # milliseconds
    assert table([]) == "(no run)"


def test_plans_cover_what_was_asked_for() -> None:
    options = argparse.Namespace(
        parts=["alone", "shared"], seeds=2, flows=["tcp-bbr", "rate"], seconds=1.0, shared_seconds=1.0, cap=1.0
    )
    labels = [plan.label for plan in plans(options, Keys("", ""))]
    assert labels == [
        "alone, tcp-bbr, channel none, seed 0",
        "alone, tcp-bbr, channel paper, seed 0",
        "alone, rate, channel none, seed 0",
        "alone, rate, channel paper, seed 0",
        "alone, tcp-bbr, channel paper, seed 1",
        "alone, rate, channel paper, seed 1",
        *(f"shared, rate beside {tcp}, seed {seed}" for seed in (0, 1) for tcp in ("tcp-cubic", "tcp-bbr")),
    ]


@pytest.mark.slow
@pytest.mark.sockets
@pytest.mark.timeout(200)
def test_a_short_run(nothing_left: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a twentieth of its rates, for a busy machine; no share is asserted, only that figures are there."""
    monkeypatch.setattr(bottleneck, "ALONE_BPS", 3e6)
    monkeypatch.setattr(bottleneck, "SHARED_BPS", 2e6)
    monkeypatch.setattr(bottleneck, "HEAD_START_S", 0.5)
    path, picture = tmp_path / "out" / "run.json", tmp_path / "out" / "run.png"
    words = f"bench --seeds 1 --seconds 0.5 --shared-seconds 1 --json {path} --picture {picture}"
    words += " --flows tcp-cubic rate no-such-controller"
    monkeypatch.setattr(sys, "argv", words.split())
    assert bottleneck.main() == 0
    results = json.loads(path.read_text())
    assert [entry["flow"] for entry in results["skipped"]] == ["no-such-controller"]
    void = {entry["flow"] for entry in results["void"]}
    for flow in ("tcp-cubic", "rate"):
        rows = [entry for entry in results["alone"] if entry["flow"] == flow]
        assert rows or flow in void
        assert all(entry["offered_share"] >= entry["delivered_share"] * 0.5 > 0 for entry in rows)
    for entry in results["shared"]:
        assert entry["tcp_retransmissions"] >= 0
        assert 0.5 <= entry["jain"] <= 1.0
    assert picture.stat().st_size > 5_000
    assert set(results["settings"]) >= {"command", "kernel", "cpus", "versions", "cap", "alone", "shared"}
