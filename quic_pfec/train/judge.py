"""How good a network is: its policy played through the compiled simulator, beside rules on the same losses.

The network decides in numpy, many hand-offs at a time , by the rules of the compiled
inference: a value network takes the best allowed choice; an advantage network takes one only where its advantage
exceeds the margin and the features are within their range in training, and else its base, `hybrid`, goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quic_pfec.schedule.network import Network
from quic_pfec.schedule.policies import Hybrid, Policy, compiled, make_policy
from quic_pfec.sim.engine import Lanes, make_scenario, reset
from quic_pfec.sim.points import Cell, hand_off
from quic_pfec.train.world import World

__all__ = ["Scores", "cell_world", "play_network", "play_rule"]


@dataclass(frozen=True, slots=True)
class Scores:
    """float64 of each hand-off; acted: decisions of an advantage network that were not the base's."""

    j_block: NDArray[np.float64]
    j_frac: NDArray[np.float64]
    acted: int = 0


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
    return Scores(lanes.j_block(), lanes.j_frac())


def play_network(network: Network, worlds: Sequence[World]) -> Scores:
    """Hand-offs decided by a network, side by side."""
    lanes = Lanes(len(worlds), resend=network.resend, features=network.features)
    base = compiled(Hybrid()) if network.kind == "advantage" else None
    for lane, world in enumerate(worlds):
        reset(lanes, lane, world.scenario, world.settings, base, network.window)
    if base is None:
        _play_values(network, lanes)
        return Scores(lanes.j_block(), lanes.j_frac())
    acted = _play_advantages(network, lanes)
    return Scores(lanes.j_block(), lanes.j_frac(), acted)


def _outputs(network: Network, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """`schedule.network.forward` but for the order of its sums: fast for many rows."""
    first = np.maximum(x @ network.w1 + network.b1, 0.0)
    out: NDArray[np.float32] = np.maximum(first @ network.w2 + network.b2, 0.0) @ network.w3 + network.b3
    return out


def _play_values(network: Network, lanes: Lanes) -> None:
    while not lanes.done().all():
        masks = lanes.masks()[:, : network.choices]
        best = np.where(masks, _outputs(network, lanes.observe()), -np.inf).argmax(axis=1)
        lanes.step(np.where(masks.any(axis=1), best, -1))


def _play_advantages(network: Network, lanes: Lanes) -> int:
    if network.margin is None:
        lanes.finish()
        return 0
    acted, rows = 0, np.arange(len(lanes))
    lanes.advance(np.zeros(len(lanes), dtype=np.int64))
    while not lanes.done().all():
        features, rule, slots = lanes.observe(), lanes.rule_actions(), lanes.slots()
        masks = lanes.masks()[:, : network.choices]
        values = _outputs(network, features)
        own = np.clip(rule, 0, network.choices - 1)
        best = np.where(masks, values, -np.inf).argmax(axis=1)
        inside = ((features >= network.low) & (features <= network.high)).all(axis=1)
        acts = inside & (best != rule) & (values[rows, best] - values[rows, own] > network.margin)
        acts &= (rule >= 0) & (rule < network.choices)
        lanes.step(np.where(acts, best, -1))
        lanes.advance(np.where(acts, -1, slots + 1))
        acted += int(acts.sum())
    return acted
