"""How good a network is: its policy played through the compiled simulator, beside rules on the same losses.

The network decides in numpy, many hand-offs at a time (`schedule.network.forward`), by the rules of the compiled
inference: a value network takes the best allowed choice; an advantage network takes one only where its advantage exceeds
the margin and the features are within their range in training, and else its base, `hybrid`, goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quic_pfec.schedule.network import Network, forward
from quic_pfec.schedule.policies import Policy, make_policy
from quic_pfec.sim.engine import Lanes, make_scenario, reset
from quic_pfec.sim.points import Cell, hand_off
from quic_pfec.sim.sweep import half_width
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
    base = make_policy("hybrid") if network.kind == "advantage" else None
    for lane, world in enumerate(worlds):
        reset(lanes, lane, world.scenario, world.settings, base, network.window)
    if base is None:
        _play_values(network, lanes)
        return Scores(lanes.j_block(), lanes.j_frac())
    acted = _play_advantages(network, lanes)
    return Scores(lanes.j_block(), lanes.j_frac(), acted)


def _play_values(network: Network, lanes: Lanes) -> None:
    while not lanes.done().all():
        masks = lanes.masks()[:, : network.choices]
        best = np.where(masks, forward(network, lanes.observe()), -np.inf).argmax(axis=1)
        lanes.step(np.where(masks.any(axis=1), best, -1))


def _play_advantages(network: Network, lanes: Lanes) -> int:
    if network.margin is None:
        lanes.finish()
        return 0
    acted = 0
    lanes.advance(np.zeros(len(lanes), dtype=np.int64))
    while not lanes.done().all():
        features, rule = lanes.observe(), lanes.rule_actions()
        masks = lanes.masks()[:, : network.choices]
        gain = np.where(masks, forward(network, features), -np.inf)
        gain[np.arange(len(rule)), np.maximum(rule, 0)] = np.where(rule >= 0, -np.inf, gain[:, 0])
        best = gain.argmax(axis=1)
        inside = ((features >= network.low) & (features <= network.high)).all(axis=1)
        acts = inside & (gain[np.arange(len(best)), best] > network.margin) & ~lanes.done()
        waits = ~acts & ~lanes.done()
        slots = lanes.slots()
        lanes.step(np.where(acts, best, -1))
        lanes.advance(np.where(waits, slots + 1, -1))
        acted += int(acts.sum())
    return acted
