"""The weights that ship, on a frozen grid: what docs/training.md says of them stays true."""

from __future__ import annotations

import numpy as np
import pytest

from quic_pfec.schedule.network import load_network, packaged_networks
from quic_pfec.schedule.policies import Fixed, Hybrid, Overridden, compiled
from quic_pfec.sim.points import Cell, cells
from quic_pfec.train.judge import Scores, cell_world, play_network, play_rule

PAPER = next(cell for cell in cells("paper") if cell.rho == 0.8 and cell.budget == 0.03)
SHORT = [cell for cell in cells("short") if cell.rtt_slots == 179 and cell.channel in ("paper", "long8")]


def played(name: str, cell: Cell, seeds: int) -> tuple[Scores, Scores]:
    """A packaged network, and what sends no repairs, on the same losses."""
    worlds = [cell_world(cell, seed) for seed in range(seeds)]
    return play_network(load_network(name), worlds), play_rule("none", worlds)


def test_ddqn_paper_is_the_papers_design() -> None:
    network = load_network("ddqn-paper")
    assert (network.kind, network.window, network.features, network.resend) == ("q", "full", 1, False)
    settings = network.settings
    assert settings["distribution"] == "paper"
    assert (settings["transitions"] - settings["pretraining"]) / settings["every"] == 16_550
    assert (settings["learning_rate"], settings["decay"], settings["gamma"]) == (1e-4, 1.0, 1.0)


def test_ddqn_paper_at_the_papers_point() -> None:
    worlds = [cell_world(PAPER, seed) for seed in range(4)]
    net, none = play_network(load_network("ddqn-paper"), worlds), play_rule("none", worlds)
    fixed = play_rule(compiled(Fixed(rate=0.03, window="full")), worlds)
    assert net.j_frac.mean() >= 0.97
    assert (net.j_frac > none.j_frac + 0.03).all()
    assert net.j_frac.mean() > fixed.j_frac.mean()
    assert net.j_block.mean() > none.j_block.mean() + 0.2


@pytest.mark.parametrize("name", ["ddqn-paper", "ddqn-wide"])
def test_a_learned_policy_protects_at_short_deadlines(name: str) -> None:
    gains = []
    for cell in SHORT:
        if cell.t_rtt >= 4:
            net, none = played(name, cell, 6)
            gains.append(float((net.j_block - none.j_block).mean()))
    assert min(gains) > 0.0
    assert np.mean(gains) > 0.1


def test_an_override_is_not_below_its_rule() -> None:
    if "hybrid-override" not in packaged_networks():
        pytest.skip("no override passed its gate: none ships")
    network = load_network("hybrid-override")
    assert network.settings["passed"] is True
    rule, with_net = compiled(Hybrid()), compiled(Overridden(Hybrid(), network))
    losses = []
    for cell in SHORT:
        worlds = [cell_world(cell, seed) for seed in range(12)]
        losses.append(float((play_rule(rule, worlds).j_block - play_rule(with_net, worlds).j_block).mean()))
    assert max(losses) <= 0.001
