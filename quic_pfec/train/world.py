"""Hand-offs to learn from, drawn at random: what a learned policy has seen is decided here and nowhere else.

`paper` is the training range that the paper names (arXiv 2610.21390, section IV-C: 50, 100 and 200 Mbit/s, round trips
of 14-26 ms, randomised Gilbert-Elliott channels, ranked blocks); what it does not name is ours (docs/training.md).
`wide` covers what a policy may meet: from half a round trip of sending to 300, losses from 0.5 to 20 % with and without
memory, budgets from 2 % to none, rates and channels that change half-way, slow and lossy feedback.
Seeds of training, validation and tests are far apart from each other by `TRAINING`, `VALIDATION` and `GATE`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from quic_pfec.kv.profile import synthetic_utility
from quic_pfec.sim.channel import GilbertElliott, GilbertElliottChannel, losses
from quic_pfec.sim.engine import Scenario, make_scenario
from quic_pfec.sim.episode import Settings
from quic_pfec.sim.timeline import PathStep
from quic_pfec.wire.errors import LocalError

__all__ = ["DISTRIBUTIONS", "GATE", "TRAINING", "VALIDATION", "Distribution", "World", "draw"]

Distribution = Literal["paper", "wide"]
DISTRIBUTIONS: tuple[str, ...] = get_args(Distribution)

TRAINING, VALIDATION, GATE = 1 << 40, 1 << 41, 1 << 42
"""Where the seeds begin of what is learned from, chosen by, and judged on. Tables use seeds from 0."""

PACKET_BITS = 1400 * 8
_PAPER_SYMBOLS = (8_000, 36_000)  # 120 of them are about 265,000 decisions, the paper's episodes and transitions
_WIDE_SYMBOLS = (400, 4_000)
_BLOCK_PACKETS = (6, 12, 24, 48)


@dataclass(frozen=True, slots=True)
class World:
    """One hand-off. units: B, the blocks that J counts; t_rtt: round trips of sending that there are."""

    scenario: Scenario
    settings: Settings
    units: int

    @property
    def t_rtt(self) -> float:
        return self.settings.slots / self.settings.rtt_slots


def draw(distribution: str, seed: int) -> World:
    """The hand-off of `seed` >= 0. Raises LocalError for a distribution that is none of `DISTRIBUTIONS`."""
    if distribution not in DISTRIBUTIONS:
        raise LocalError(f"no distribution {distribution!r}: choose one of {', '.join(DISTRIBUTIONS)}")
    chance = np.random.default_rng(seed)
    return _paper(chance, seed) if distribution == "paper" else _wide(chance, seed)


def _between(chance: np.random.Generator, low: float, high: float) -> float:
    """Log-uniform."""
    return float(np.exp(chance.uniform(np.log(low), np.log(high))))


def _blocks(
    chance: np.random.Generator, symbols: tuple[int, int], share: tuple[float, float], seed: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Packets and utility of ranked blocks, of one size; about log-uniform in all."""
    packets = int(chance.choice(_BLOCK_PACKETS))
    count = max(8.0, _between(chance, *symbols) / packets)
    layers = max(2, round(count**0.5))
    columns = max(4, round(count / layers))
    utility = synthetic_utility((layers, columns), float(chance.uniform(*share)), seed)
    return np.full(layers * columns, packets, dtype=np.int64), np.sort(utility)[::-1].copy()


def _paper(chance: np.random.Generator, seed: int) -> World:
    packets, utility = _blocks(chance, _PAPER_SYMBOLS, (0.8, 0.99), seed)
    slot_s = PACKET_BITS / float(chance.choice([50e6, 100e6, 200e6]))
    channel = GilbertElliott(
        float(chance.uniform(0.0, 0.01)), float(chance.uniform(0.3, 0.7)),
        _between(chance, 0.005, 0.04), _between(chance, 0.05, 0.3),
    )  # fmt: skip
    slots = int(chance.uniform(0.6, 1.1) * packets.sum())
    settings = Settings(
        slots,
        max(1, round(float(chance.uniform(14e-3, 26e-3)) / slot_s)),
        slot_s=slot_s,
        repair_budget=_between(chance, 0.02, 0.15),
        seed=seed,
    )
    return _world(packets, utility, _lost(channel, slots, seed), settings)


def _wide(chance: np.random.Generator, seed: int) -> World:
    packets, utility = _blocks(chance, _WIDE_SYMBOLS, (0.75, 0.995), seed)
    slots = int(chance.uniform(0.6, 1.2) * packets.sum())
    rtt_slots = max(4, round(slots / _between(chance, 0.5, 300.0)))
    lost = _lost(_any_channel(chance), slots, seed)
    if chance.random() < 0.15:
        lost[slots // 2 :] = _lost(_any_channel(chance), slots, seed + 1)[slots // 2 :]
    slot_s, steps = 112e-6, tuple[PathStep, ...]()
    if chance.random() < 0.15:
        pace, delay = _between(chance, 0.4, 2.5), _between(chance, 0.4, 2.5)
        steps = (PathStep(int(chance.integers(1, slots)), rtt_slots * slot_s * delay, slot_s * pace),)
    settings = Settings(
        slots,
        rtt_slots,
        slot_s=slot_s,
        repair_budget=None if chance.random() < 0.3 else _between(chance, 0.02, 0.25),
        history=(0, 0) if chance.random() < 0.5 else _history(chance, lost),
        feedback_loss=float(chance.choice([0.0, 0.0, 0.1])),
        feedback_delay_s=float(chance.choice([0.0, 0.125])) * rtt_slots * slot_s,
        seed=seed,
        steps=steps,
    )
    return _world(packets, utility, lost, settings)


def _any_channel(chance: np.random.Generator) -> GilbertElliott:
    """0.5-20 % lost: independently, or in bad states of 5-50 slots, seldom long enough to be all of the transfer."""
    mean = _between(chance, 0.005, 0.2)
    if chance.random() < 0.25:
        return GilbertElliott(mean, mean, 0.5, 0.5)
    bad, length = float(chance.uniform(0.3, 0.7)), _between(chance, 5.0, 50.0)
    good = float(chance.uniform(0.0, 0.2)) * mean
    share = (mean - good) / (bad - good)
    return GilbertElliott(good, bad, share / (1.0 - share) / length, 1.0 / length)


def _history(chance: np.random.Generator, lost: NDArray[np.bool_]) -> tuple[int, int]:
    """What the connection saw before: roughly the same loss."""
    fates = int(chance.integers(100, 2000))
    return fates, int(chance.binomial(fates, min(0.5, max(0.002, float(lost.mean())))))


def _lost(channel: GilbertElliott, slots: int, seed: int) -> NDArray[np.bool_]:
    return losses(GilbertElliottChannel(channel, seed), slots)


def _world(
    packets: NDArray[np.int64], utility: NDArray[np.float64], lost: NDArray[np.bool_], settings: Settings
) -> World:
    return World(make_scenario(packets, utility, lost, settings), settings, len(packets))
