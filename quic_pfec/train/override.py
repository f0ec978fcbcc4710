"""A net that may override `hybrid`: it learns what another choice would have gained, from pairs of roll-outs.

The rule plays a hand-off up to a random decision. From there every allowed choice is tried once on the same losses and
with the same code, and the rule plays on to the deadline: the label of a choice is how many blocks more (in the mean
block's utility) were complete than without it. What is regressed is a difference whose common part, most of the noise,
is gone; that is what a Q-net has to see through (docs/training.md has both). The margin above which the net may act is
chosen on seeds of its own, and a gate over held-out cells has the last word: `judge_cells`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from quic_pfec.schedule.network import Network
from quic_pfec.schedule.policies import Hybrid, Policy, compiled
from quic_pfec.sim.engine import ACTIONS, FEATURES_COUNT, Lanes, reset
from quic_pfec.sim.points import Cell, cells
from quic_pfec.sim.sweep import half_width
from quic_pfec.train.judge import cell_label, cell_world, play_network, play_rule
from quic_pfec.train.module import arrays, make_module, versions
from quic_pfec.train.world import GATE, TRAINING, VALIDATION, Distribution, World, draw

__all__ = [
    "Args",
    "Gain",
    "Labels",
    "choose_margin",
    "collect",
    "fit",
    "gate_cells",
    "judge_cells",
    "label_world",
    "passes",
]

RESEND = len(ACTIONS) - 1


@dataclass(frozen=True, slots=True)
class Args:
    """Settings of a training run."""

    seed: int = 0
    """of everything"""
    distribution: Distribution = "wide"
    """what hand-offs are drawn from (`train.world`)"""
    states: int = 80_000
    """decisions that are tried out"""
    per_world: int = 16
    """of them in each hand-off; half anywhere, half in its last two round trips"""
    clamp: float = 6.0
    """labels are cut off at so many blocks"""
    resend: bool = True
    """is a resend among the choices?"""
    learning_rate: float = 1e-3
    """of Adam"""
    batch: int = 512
    """decisions a step"""
    steps: int = 5_000
    """of Adam"""
    margins: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.8)
    """among which the margin is chosen, in blocks"""
    validation: int = 400
    """hand-offs it is chosen on"""


@dataclass(frozen=True, slots=True)
class Labels:
    """S decisions. features: float32[S, 15], version 2; labels: float32[S, 5], blocks gained, 0 for the rule's own
    choice; known: bool[S, 5], which labels there are."""

    features: NDArray[np.float32]
    labels: NDArray[np.float32]
    known: NDArray[np.bool_]


def base_rule() -> Policy:
    """`hybrid` without any network."""
    return compiled(Hybrid())


class Bench:
    """Lanes to try choices in: lane 0 plays the rule, the others branch off."""

    def __init__(self, resend: bool) -> None:
        self.lanes = Lanes(1 + len(ACTIONS), resend=resend, features=2)
        self._dealt = False

    def deal(self, world: World, rule: Policy) -> None:
        """The world in lane 0; in every lane the first time."""
        for lane in range(1 if self._dealt else len(self.lanes)):
            reset(self.lanes, lane, world.scenario, world.settings, rule)
        self._dealt = True


def label_world(
    world: World, slots: Sequence[int], bench: Bench, clamp: float = 6.0, rule: Policy | None = None
) -> Labels:
    """Tries out the rule's decisions at or after each of `slots`, ascending; fewer if there are fewer.

    A decision at which the rule would idle, or has no choice, is passed over: nothing may override it.
    """
    lanes = bench.lanes
    bench.deal(world, rule or base_rule())
    lanes.copy(0, 1)
    lanes.finish(np.array([1]))
    plain = float(lanes.j_block()[1])
    here = np.full(len(lanes), -1)
    features, labels, known = [], [], []
    last = -1
    for slot in slots:
        here[0] = slot
        if lanes.advance(here)[0]:
            break
        if lanes.slots()[0] == last:
            continue
        last = int(lanes.slots()[0])
        own, allowed = int(lanes.rule_actions()[0]), lanes.masks()[0]
        tried = [int(choice) for choice in np.flatnonzero(allowed) if choice != own]
        if own < 0 or not tried:
            continue
        seen = lanes.observe()[0]
        actions = np.full(len(lanes), -1)
        for choice in tried:
            lanes.copy(0, 1 + choice)
            actions[1 + choice] = choice
        lanes.step(actions)
        lanes.finish(1 + np.array(tried))
        gained = (lanes.j_block()[1:] - plain) * world.units
        row, there = np.zeros(len(ACTIONS), dtype=np.float32), np.zeros(len(ACTIONS), dtype=np.bool_)
        row[tried] = np.clip(gained[tried], -clamp, clamp)
        there[[own, *tried]] = True
        features.append(seen)
        labels.append(row)
        known.append(there)
    count = len(features)
    return Labels(
        np.array(features, dtype=np.float32).reshape(count, FEATURES_COUNT),
        np.array(labels, dtype=np.float32).reshape(count, len(ACTIONS)),
        np.array(known, dtype=np.bool_).reshape(count, len(ACTIONS)),
    )


def collect(args: Args, progress: Callable[[int, int], None] = lambda done, total: None) -> Labels:
    """Labels of `args.states` decisions."""
    chance, bench = np.random.default_rng(args.seed), Bench(args.resend)
    parts: list[Labels] = []
    done, number = 0, args.seed << 24
    while done < args.states:
        world = draw(args.distribution, TRAINING + number)
        number += 1
        slots, late = world.settings.slots, min(world.settings.slots, 2 * world.settings.rtt_slots)
        half = args.per_world // 2
        chosen = np.concatenate(
            (chance.integers(0, slots, args.per_world - half), chance.integers(slots - late, slots, half))
        )
        parts.append(label_world(world, np.sort(chosen).tolist(), bench, args.clamp))
        done += len(parts[-1].features)
        progress(done, args.states)
    return Labels(
        np.concatenate([part.features for part in parts])[: args.states],
        np.concatenate([part.labels for part in parts])[: args.states],
        np.concatenate([part.known for part in parts])[: args.states],
    )


def fit(
    args: Args, data: Labels, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[Network, list[dict[str, float]]]:
    """The net without a margin, and the loss as it fell."""
    choices = len(ACTIONS) if args.resend else RESEND
    module = make_module(choices, args.seed)
    adam = torch.optim.Adam(module.parameters(), lr=args.learning_rate, fused=True)
    chance = np.random.default_rng(args.seed + 1)
    features, labels = torch.from_numpy(data.features), torch.from_numpy(data.labels[:, :choices])
    known = torch.from_numpy(data.known[:, :choices])
    curve, smooth = [], 0.0
    for step in range(args.steps):
        rows = torch.from_numpy(chance.integers(len(features), size=args.batch))
        errors = nn.functional.smooth_l1_loss(module(features[rows]), labels[rows], reduction="none")
        loss = errors[known[rows]].mean()
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        smooth += max(0.01, 1.0 / (step + 1)) * (float(loss.detach()) - smooth)
        if (step + 1) % max(1, args.steps // 50) == 0:
            curve.append({"updates": float(step + 1), "loss": smooth})
            progress(step + 1, args.steps)
    settings = asdict(args) | {"margins": list(args.margins)}
    network = Network(
        **arrays(module), low=data.features.min(axis=0), high=data.features.max(axis=0), kind="advantage",
        name="hybrid-override", features=2, resend=args.resend, seed=args.seed, versions=versions(), settings=settings,
    )  # fmt: skip
    return network, curve


@dataclass(frozen=True, slots=True)
class Gain:
    """J_block with and without the net on the same hand-offs: mean difference and half its 95 % interval."""

    label: str
    base: float
    gain: float
    half: float
    acted: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _compare(network: Network, worlds: Sequence[World], label: str) -> Gain:
    plain, played = play_rule(base_rule(), worlds), play_network(network, worlds)
    gained = played.j_block - plain.j_block
    return Gain(label, float(plain.j_block.mean()), float(gained.mean()), half_width(gained), played.acted)


def choose_margin(
    network: Network, args: Args, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[float | None, list[Gain]]:
    """The margin that gains most on validation seeds, None if none certainly gains; and what each gained."""
    worlds = [draw(args.distribution, VALIDATION + number) for number in range(args.validation)]
    results = []
    for margin in args.margins:
        results.append(_compare(replace(network, margin=margin), worlds, f"margin {margin:g}"))
        progress(len(results), len(args.margins))
    best = max(range(len(results)), key=lambda index: results[index].gain)
    return (args.margins[best] if results[best].gain > results[best].half else None), results


def judge_cells(
    network: Network,
    chosen: Sequence[Cell],
    seeds: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Gain]:
    """The net against its base in each cell, on `seeds` hand-offs from `train.world.GATE` on."""
    results = []
    for cell in chosen:
        worlds = [cell_world(cell, GATE + seed) for seed in range(seeds)]
        results.append(_compare(network, worlds, cell_label(cell)))
        progress(len(results), len(chosen))
    return results


def gate_cells() -> list[Cell]:
    """What the gate looks at: `short` with its 1 Gbit/s, the paper's geometry, and half of `heldout`."""
    paper = [cell for cell in cells("paper") if cell.model.startswith("qwen")]
    return [*cells("short"), *cells("heldout")[::2], *paper]


def passes(gains: Sequence[Gain], below: float = 0.001) -> bool:
    """The gate: certainly above the base somewhere, certainly below it nowhere, and nowhere by more than `below`."""
    better = any(one.gain > one.half for one in gains)
    worse = any(one.gain < -one.half or one.gain < -below for one in gains)
    return better and not worse
