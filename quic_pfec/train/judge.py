"""How good a network is: its policy played through the compiled simulator, beside rules on the same losses.

What is played is the compiled inference that ships, on losses that every policy of a comparison shares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quic_pfec.schedule.learned import Ddqn, Overridden
from quic_pfec.schedule.network import Network
from quic_pfec.schedule.policies import Fixed, Hybrid, Policy, compiled, make_policy
from quic_pfec.sim.engine import Lanes, make_scenario, reset
from quic_pfec.sim.points import RTT_SLOTS, Cell, cells, hand_off
from quic_pfec.sim.sweep import half_width
from quic_pfec.train.world import World

__all__ = ["GRID_RULES", "Compared", "Scores", "cell_world", "compare_grid", "grid", "play_network", "play_rule"]

GRID_RULES = ("none", "fixed", "epoch", "deficit", "arq", "hybrid")


@dataclass(frozen=True, slots=True)
class Scores:
    """float64 of each hand-off; acted: packets that an advantage network chose."""

    j_block: NDArray[np.float64]
    j_frac: NDArray[np.float64]
    acted: int = 0


@dataclass(frozen=True, slots=True)
class Compared:
    """A policy in a cell: means and half their 95 % intervals."""

    cell: str
    policy: str
    j_block: float
    j_block_ci: float
    j_frac: float
    j_frac_ci: float
    seeds: int


def grid() -> list[Cell]:
    """Eight cells that every training run is measured on: the paper's geometry, and deadlines of a few round trips."""
    chosen = [cell for cell in cells("paper") if cell.model.startswith("qwen") and cell.rho == 0.8][:3]
    short = [cell for cell in cells("short") if cell.rtt_slots == RTT_SLOTS]
    chosen += [cell for cell in short if cell.channel == "paper" and cell.t_rtt in (0.99, 1.0, 2.0, 4.0, 16.0)]
    return [*chosen, *(cell for cell in short if cell.channel == "long8" and cell.t_rtt == 8.0)]


def cell_label(cell: Cell) -> str:
    """A cell in words."""
    budget = "no limit" if cell.budget is None else f"budget {100 * cell.budget:g} %"
    return f"{cell.point} {cell.model}, {cell.channel}, T/RTT {cell.t_rtt:g}, rho {cell.rho:g}, {budget}"


def compare_grid(
    network: Network, seeds: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Compared]:
    """The network and `GRID_RULES` in each cell of `grid`, on the same hand-offs. `fixed` has the cell's budget as its
    rate and the paper's window; `hybrid` is the rule alone."""
    rows, chosen = [], grid()
    for number, cell in enumerate(chosen):
        worlds = [cell_world(cell, seed) for seed in range(seeds)]
        rules: dict[str, str | Policy] = {name: name for name in GRID_RULES}
        rules["hybrid"] = compiled(Hybrid())
        rules["fixed"] = compiled(Fixed(rate=cell.budget or 0.1, window="full"))
        played = {network.name: play_network(network, worlds)}
        played |= {name: play_rule(rule, worlds) for name, rule in rules.items()}
        for name, scores in played.items():
            block, frac = scores.j_block, scores.j_frac
            rows.append(
                Compared(
                    cell_label(cell), name, float(block.mean()), half_width(block), float(frac.mean()),
                    half_width(frac), seeds,
                )
            )  # fmt: skip
        progress(number + 1, len(chosen))
    return rows


def cell_world(cell: Cell, seed: int) -> World:
    """A cell of `sim.points` drawn with a seed, in the order of utility."""
    drawn, settings = hand_off(cell, seed), cell.settings(seed)
    packets, utility = drawn.unit_packets[drawn.ranked], drawn.utility[drawn.ranked]
    return World(make_scenario(packets, utility, drawn.losses, settings), settings, len(packets))


def play_rule(policy: str | Policy, worlds: Sequence[World]) -> Scores:
    """Hand-offs under a compiled policy or the name of one."""
    rule = make_policy(policy) if isinstance(policy, str) else policy
    lanes = Lanes(len(worlds))
    for lane, world in enumerate(worlds):
        reset(lanes, lane, world.scenario, world.settings, rule)
    lanes.finish()
    acted = sum(lanes.sender_counters(lane).get("overridden", 0) for lane in range(len(worlds)))
    return Scores(lanes.j_block(), lanes.j_frac(), acted)


def play_network(network: Network, worlds: Sequence[World]) -> Scores:
    """Hand-offs under the compiled policy of a network; an advantage network's base is `hybrid` alone."""
    if network.kind == "q":
        return play_rule(compiled(Ddqn(network, window=network.window)), worlds)
    return play_rule(compiled(Overridden(Hybrid(), network, window=network.window)), worlds)
