"""Networks played through the simulator beside rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quic_pfec.schedule.network import Network
from quic_pfec.sim.points import cells
from quic_pfec.train.judge import GRID_RULES, cell_world, compare_grid, grid, play_network, play_rule

CELL = next(cell for cell in cells("short") if cell.t_rtt == 2.0 and cell.rtt_slots == 179)


def constant(outputs: list[float], **fixed: object) -> Network:
    """A network that says the same of every state."""
    values: dict[str, object] = {
        "w1": np.zeros((15, 64), np.float32), "b1": np.zeros(64, np.float32), "w2": np.zeros((64, 64), np.float32),
        "b2": np.zeros(64, np.float32), "w3": np.zeros((64, len(outputs)), np.float32),
        "b3": np.array(outputs, np.float32), "low": np.full(15, -9, np.float32), "high": np.full(15, 9, np.float32),
        "kind": "q", "name": "constant",
    }  # fmt: skip
    return Network(**(values | fixed))  # type: ignore[arg-type]


def test_sources_first_are_no_protection_until_the_end() -> None:
    worlds = [cell_world(CELL, seed) for seed in range(3)]
    assert worlds[0].units == CELL.layers * CELL.columns
    played, rule = play_network(constant([9.0, 2.0, 1.0, 0.0]), worlds), play_rule("none", worlds)
    assert played.j_block == pytest.approx(rule.j_block, abs=1e-12)  # rho 0.8: sources never run out


def test_an_advantage_acts_above_its_margin_alone() -> None:
    worlds = [cell_world(CELL, seed) for seed in range(2)]
    network = constant([0.0, 1.0, 0.0, 0.0, 0.0], kind="advantage", features=2, resend=True)
    rule = play_rule("hybrid", worlds)
    for never in (replace(network, margin=None), replace(network, margin=1.0)):
        played = play_network(never, worlds)
        assert played.acted == 0
        assert (played.j_block == rule.j_block).all()
    acting = play_network(replace(network, margin=0.5), worlds)
    assert acting.acted > 0
    assert (acting.j_block != rule.j_block).any()


def test_a_feature_out_of_range_is_left_to_the_rule() -> None:
    worlds = [cell_world(CELL, 0)]
    narrow = constant(
        [0.0, 1.0, 0.0, 0.0, 0.0], kind="advantage", features=2, resend=True, margin=0.5,
        high=np.full(15, -0.5, np.float32),
    )  # fmt: skip
    assert play_network(narrow, worlds).acted == 0


def test_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = grid()
    assert [cell.budget for cell in chosen[:3]] == [0.03, 0.05, 0.1]
    assert len(chosen) == 8
    monkeypatch.setattr("quic_pfec.train.judge.grid", lambda: [CELL])
    rows = compare_grid(constant([9.0, 2.0, 1.0, 0.0]), 2)
    assert [row.policy for row in rows] == ["constant", *GRID_RULES]
    by = {row.policy: row for row in rows}
    assert by["constant"].j_block == pytest.approx(by["none"].j_block)
    assert by["hybrid"].j_block > by["none"].j_block
