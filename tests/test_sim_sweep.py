"""Sweeps: paired, resumable, the same on any number of processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interop.make_network_vectors import random_network
from quic_pfec.schedule.network import save_network
from quic_pfec.sim import sweep
from quic_pfec.sim.points import Cell, cells, hand_off
from quic_pfec.sim.sweep import Scheme, half_width, parse_scheme, run_sweep

CELLS = [cell for cell in cells("short") if cell.slots < 200][:3]
SCHEMES = [parse_scheme(name) for name in ("hybrid", "arq", "deficit@full", "arq@fifo")]


def figures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in ("cpu_us", "peak_mb")} for row in rows]


def test_schemes() -> None:
    assert parse_scheme("arq") == Scheme("arq", "arq", "sack", "utility")
    assert parse_scheme("deficit@full@fifo") == Scheme("deficit@full@fifo", "deficit", "full", "fifo")
    assert parse_scheme("paper-deficit").window == "full"
    spread = parse_scheme("fixed@budget")
    assert spread.spread
    assert repr(sweep.policy_of(spread, 0.03)) == "Policy('fixed', 'sack', **{'rate': 0.03})"
    assert repr(sweep.policy_of(spread)) == "Policy('fixed', 'sack', **{'rate': 0.1})"
    for wrong in ("nobody", "arq@sideways", "arq@budget", ""):
        with pytest.raises(ValueError):
            parse_scheme(wrong)


def test_the_window_is_the_policy_s() -> None:
    assert sweep.policy_of(parse_scheme("deficit@full")).window == "full"
    assert sweep.policy_of(parse_scheme("flec-rt-window@sack")).window == "sack"


def test_weights_of_a_file(tmp_path: Path) -> None:
    for name, kind in (("ddqn", "q"), ("hybrid", "advantage")):
        path = tmp_path / f"{name}.npz"
        save_network(random_network(kind, 7, margin=0.0, window="full"), path)  # type: ignore[arg-type]
        text = f"{name}:{path}"
        assert parse_scheme(text) == Scheme(text, text, "full", "utility")
        assert sweep.policy_of(parse_scheme(f"{text}@sack")).window == "sack"
        mine = [parse_scheme(text), parse_scheme(f"{text}@sack@fifo"), parse_scheme("hybrid-rule")]
        rows = run_sweep(CELLS[:1], mine, range(3)).rows()
        assert [row["window"] for row in rows] == ["full", "sack", "sack"]
        assert len({row["j_block"] for row in rows}) > 1
        before = sweep._key(CELLS[0], mine[0], 1)
        save_network(random_network(kind, 8, margin=0.0, window="full"), path)  # type: ignore[arg-type]
        os.utime(path, ns=(1, 1))
        assert sweep._key(CELLS[0], mine[0], 1) != before


def test_rows() -> None:
    rows = run_sweep(CELLS, SCHEMES, range(4)).rows()
    assert len(rows) == len(CELLS) * len(SCHEMES)
    for row in rows:
        assert 0 <= row["j_block"] <= row["oracle_j_block"] + 1e-9
        assert row["j_block"] <= row["j_frac"] + 1e-9
        assert {"point", "model", "rho", "budget", "channel", "t_rtt", "policy", "window", "seeds", "j_block",
                "j_block_ci", "j_frac", "j_frac_ci", "oracle_j_block", "oracle_j_frac"} <= set(row)  # fmt: skip
    by_scheme = {row["scheme"]: row for row in rows[: len(SCHEMES)]}
    assert by_scheme["hybrid"]["j_block_less_hybrid"] == 0
    difference = by_scheme["arq"]["j_block"] - by_scheme["hybrid"]["j_block"]
    assert by_scheme["arq"]["j_block_less_hybrid"] == pytest.approx(difference)
    assert any(row["j_block_less_hybrid_ci"] > 0 for row in rows)
    assert "j_block_less_hybrid" not in run_sweep(CELLS[:1], SCHEMES[1:2], range(2)).rows()[0]


def test_half_width() -> None:
    assert half_width(np.array([1.0])) == 0
    assert half_width(np.array([0.0, 2.0])) == pytest.approx(1.96 * np.sqrt(2) / np.sqrt(2))


def test_orders_meet_the_same_losses() -> None:
    drawn = hand_off(CELLS[0], 1)
    fifo, ranked = sweep._ordered(drawn, "fifo"), sweep._ordered(drawn, "utility")
    assert fifo[1].tolist() == drawn.utility.tolist()
    assert sorted(fifo[1].tolist(), reverse=True) == ranked[1].tolist()


def test_a_sweep_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = tmp_path / "sweep.jsonl"
    whole = run_sweep(CELLS, SCHEMES, range(3), journal=journal)
    assert len(journal.read_text().splitlines()) == len(CELLS) * len(SCHEMES) * 3
    counts: list[tuple[int, int]] = []
    played: list[tuple[str, ...]] = []
    play = sweep.play_cell

    def watched(cell: Cell, seed: int, schemes: tuple[Scheme, ...]) -> list[sweep.Outcome]:
        played.append(tuple(scheme.name for scheme in schemes))
        return play(cell, seed, schemes)

    monkeypatch.setattr(sweep, "play_cell", watched)
    again = run_sweep(CELLS, SCHEMES, range(3), journal=journal, progress=lambda *count: counts.append(count))
    assert played == []
    assert counts == [(9, 9)]
    assert again.rows() == whole.rows()
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join(lines[:-2]) + "\n" + lines[-2][:40])  # killed while it wrote
    assert figures(run_sweep(CELLS, SCHEMES, range(3), journal=journal).rows()) == figures(whole.rows())
    assert sum(map(len, played)) == 2
    more = [*SCHEMES, parse_scheme("none")]
    run_sweep(CELLS, more, range(3), journal=journal)
    assert played[-9:] == [("none",)] * 9
    assert all(json.loads(line) for line in journal.read_text().splitlines() if line.endswith("]"))


def test_other_parameters_are_other_rows() -> None:
    keys = {sweep._key(CELLS[0], scheme, 1) for scheme in SCHEMES} | {sweep._key(CELLS[1], SCHEMES[0], 1)}
    assert len(keys) == len(SCHEMES) + 1
    assert sweep._key(CELLS[0], SCHEMES[0], 1) != sweep._key(CELLS[0], SCHEMES[0], 2)


@pytest.mark.slow
def test_processes_change_nothing() -> None:
    alone = run_sweep(CELLS[:2], SCHEMES[:2], range(3)).rows()
    assert figures(run_sweep(CELLS[:2], SCHEMES[:2], range(3), jobs=2).rows()) == figures(alone)
