"""`quic-pfec evaluate` at simulated points: tables, rows, pictures, and how it fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from quic_pfec.cli import evaluate_points, points_picture
from quic_pfec.sim.points import cells
from quic_pfec.sim.sweep import parse_scheme, run_sweep
from tests.test_cli_commands import failure, run


def test_short_from_the_outside(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures, picture = tmp_path / "out" / "short.json", tmp_path / "out" / "short.png"
    words = ("evaluate", "--point", "short", "--seeds", "2", "--jobs", "1", "--scheduler", "hybrid", "--scheduler",
             "arq@fifo", "--json", figures, "--picture", picture)  # fmt: skip
    result = run(*words)
    assert result.exit_code == 0, result.output
    assert "1Gbps, long8 channel, T/RTT 8" in result.output
    assert "hand-offs in which another scheme is certainly above hybrid" in result.output
    rows = json.loads(figures.read_text())
    assert len(rows) == 2 * 48
    assert {(row["policy"], row["order"]) for row in rows} == {("hybrid", "utility"), ("arq", "fifo")}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(figures.with_suffix(".jsonl").read_text().splitlines()) == 2 * 2 * 48
    again = run(*words)
    assert json.loads(figures.read_text()) == rows
    assert again.exit_code == 0


def small(point: str) -> list[dict[str, Any]]:
    """Rows of a point as it would have them, on cells that take no time."""
    from dataclasses import replace

    chosen = [replace(cell, layers=2, columns=4, slots=200) for cell in cells(point)]
    return run_sweep(chosen, [parse_scheme("hybrid"), parse_scheme("none@fifo")], range(2)).rows()


@pytest.mark.parametrize("point", ["paper", "5g", "context", "heldout"])
def test_pictures(point: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    points_picture.draw_points(small(point), tmp_path / "a" / "picture.png")
    assert (tmp_path / "a" / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_where_another_is_above(capsys: pytest.CaptureFixture[str]) -> None:
    rows = small("5g")
    for row in rows:
        row["j_block_less_hybrid"], row["j_block_less_hybrid_ci"] = 0.003, 0.002
    evaluate_points.say_above(rows)
    assert ": 0" in capsys.readouterr().out
    rows[0]["j_block_less_hybrid"] = 0.0045
    evaluate_points.say_above(rows)
    out = capsys.readouterr().out
    assert ": 1" in out
    assert "+0.0045" in out
    evaluate_points.say_above([{"scheme": "arq"}])
    assert capsys.readouterr().out == ""


def test_ray_is_asked_for_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    said = failure("evaluate", "--point", "short", "--scheduler", "none", "--seeds", "1", "--executor", "ray")
    assert said.endswith("pip install ray")


def test_mistakes_are_one_line() -> None:
    assert "--point is quality, paper, short" in failure("evaluate", "--point", "nowhere")
    assert "unknown scheduler 'nobody'" in failure("evaluate", "--point", "short", "--scheduler", "nobody")
    assert "@full, @sack or @fifo" in failure("evaluate", "--point", "short", "--scheduler", "arq@up")
    assert "an executor is local or ray" in failure("evaluate", "--point", "short", "--executor", "slurm")
    assert "--trace belongs to --point 5g" in failure("evaluate", "--point", "short", "--trace", "x")
    assert "missing.txt" in failure(
        "evaluate", "--point", "5g", "--trace", "missing.txt", "--seeds", "1", "--jobs", "1", "--scheduler", "none"
    )
