"""Random hand-offs for the tests of the compiled engine."""

from __future__ import annotations

from math import inf
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quic_pfec.schedule.features import FeatureMemory, action, masks
from quic_pfec.schedule.flec import Book
from quic_pfec.schedule.state import IDLE, Action, ActionKind, State
from quic_pfec.sim.channel import PRESETS, GilbertElliottChannel, losses
from quic_pfec.sim.engine import Lanes, make_scenario, reset
from quic_pfec.sim.episode import Settings
from quic_pfec.sim.timeline import PathStep

World = tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_], Settings]


def world(seed: int, **fixed: Any) -> World:
    """Units, utility, losses and settings, everything that both engines know in a random mixture."""
    chance = np.random.default_rng(seed)
    units = int(chance.integers(3, 40))
    packets = chance.integers(1, 40, units) if chance.random() < 0.5 else np.full(units, chance.integers(2, 40))
    utility = np.sort(chance.random(units))[::-1] + 1e-3
    slots = max(10, int(packets.sum() * chance.uniform(0.4, 1.4)))
    rtt_slots = int(chance.choice([3, 20, 60, 179, 500]))
    slot_s = float(chance.choice([112e-6, 11.2e-6, 1e-3]))
    steps: tuple[PathStep, ...] = ()
    if chance.random() < 0.3:
        rtt_s, step_s = rtt_slots * slot_s * chance.choice([0.3, 0.5, 2, 3]), slot_s * chance.choice([0.5, 1, 3])
        steps = (PathStep(int(chance.integers(1, slots)), float(rtt_s), float(step_s)),)
    fixed.pop("resend", None)
    settings = Settings(
        **{
            "slots": slots,
            "rtt_slots": rtt_slots,
            "slot_s": slot_s,
            "seed": seed,
            "repair_budget": (None, 0.03, 0.1, 0.3)[chance.integers(4)],
            "degree": int(chance.choice([48, 4, 192])),
            "feedback_loss": float(chance.choice([0, 0, 0.3, 1])),
            "fates_loss": float(chance.choice([0, 0, 0.05])),
            "history": ((0, 0), (500, 30))[chance.integers(2)],
            "feedback_delay_s": float(chance.choice([0, 0, 0.004])),
            "fates_delay_s": float(chance.choice([0, 0, 0.005])),
            "reordering": float(chance.choice([0, 0, 0.1])),
            "reordering_s": float(chance.choice([0.001, 0.01])),
            "steps": steps,
        }
        | fixed
    )
    channel = PRESETS[("paper", "iid5", "ge2", "long8")[chance.integers(4)]]
    return packets.astype(np.int64), utility, losses(GilbertElliottChannel(channel, seed), slots), settings


class Scripted:
    """A policy in Python that chooses at random what its masks allow, and writes down what it saw."""

    window: Literal["sack", "full"] = "sack"

    def __init__(
        self,
        packets: NDArray[np.int64],
        utility: NDArray[np.float64],
        settings: Settings,
        seed: int,
        version: Literal[1, 2] = 1,
    ) -> None:
        self._arguments = (packets, utility, settings)
        self._memory: FeatureMemory | None = None
        self._chance = np.random.default_rng(seed)
        self._version = version
        self.decisions: list[tuple[int, NDArray[np.float32], NDArray[np.bool_]]] = []

    def _remember(self, state: State) -> FeatureMemory:
        if self._memory is None:
            packets, utility, settings = self._arguments
            share = settings.repair_budget
            budget = inf if share is None else float(int(share * packets.sum() + 1e-9))
            self._memory = FeatureMemory(packets, utility, state.slots_total, budget, settings.degree)
        return self._memory

    def decide(self, state: State) -> Action:
        memory = self._remember(state)
        memory.view(state)
        allowed = masks(state, resend=True)
        if not allowed.any():
            return IDLE
        choice = int(self._chance.choice(np.flatnonzero(allowed)))
        self.decisions.append((choice, memory.look(state, self._version), allowed))
        return action(state, choice)

    def start(self, ledger: Book) -> None: ...

    def on_sent(
        self, state: State, kind: ActionKind, sid: int, token: int, stretch: tuple[int, int] | None, now: float
    ) -> None:
        self._remember(state).view(state)

    def on_fate(self, token: int, delivered: bool, probe: bool) -> None:
        if self._memory is not None and not probe:
            self._memory.on_fate(not delivered)


def crowd(count: int, only: int | None = None) -> list[tuple[list[float], list[int]]]:
    """Rewards and choices of `count` random hand-offs side by side, or of one of them alone."""
    chosen = range(count) if only is None else [only]
    lanes = Lanes(len(chosen), resend=True)
    chances = [np.random.default_rng(100 + seed) for seed in chosen]
    for lane, seed in enumerate(chosen):
        packets, utility, lost, settings = world(seed)
        reset(lanes, lane, make_scenario(packets, utility, lost, settings), settings, None)
    history: list[tuple[list[float], list[int]]] = [([], []) for _ in chosen]
    while not lanes.done().all():
        allowed = lanes.masks()
        actions = np.full(len(chosen), -1)
        for lane in np.flatnonzero(allowed.any(axis=1)):
            actions[lane] = chances[lane].choice(np.flatnonzero(allowed[lane]))
        rewards, _ = lanes.step(actions)
        for lane in np.flatnonzero(actions >= 0):
            history[lane][0].append(float(rewards[lane]))
            history[lane][1].append(int(actions[lane]))
    return history
