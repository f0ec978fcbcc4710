"""The operating points at which schemes are compared, as cells that a sweep can run.

A cell is everything but the policy and the seed. The points: `paper` (the paper's geometry and channel), `short`
(deadlines of half a round trip to 32, where a link with somebody waiting lives), `heldout` (channels and paths outside
every range that anything was tuned or trained on), `context` (1.5k to 32k tokens), `5g`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quic_pfec.kv.profile import synthetic_utility
from quic_pfec.sim.channel import GilbertElliott, GilbertElliottChannel, SplitMix64, TraceChannel, losses, parse
from quic_pfec.sim.episode import Settings
from quic_pfec.sim.timeline import PathStep
from quic_pfec.sim.trace import load_trace
from quic_pfec.wire.errors import LocalError

__all__ = ["FIVE_G", "POINTS", "Cell", "cells", "draw_losses", "hand_off"]

SLOT_S = 112e-6  # 1,400 bytes at 100 Mbit/s
RTT_SLOTS = 179  # 20 ms
MODELS = {"qwen2.5-7b": (28, 24), "llama-3.1-8b": (32, 48)}  # layers, packets of 1,368 bytes a block of 16 tokens
SHORT_CHANNELS = ("paper", "iid5", "ge2", "long8")
FIVE_G = "0.001,0.5,0.0302,0.1"
"""11.65 % lost in bursts like the paper's: a label and a mean, not a measurement. A real trace is `trace:FILE`."""

POINTS = ("paper", "short", "heldout", "context", "5g")


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of a table, for any policy. Times in slots of `slot_s` seconds.

    layers, columns: blocks of the cache; packets: of each block; share: utility of its top 73 %; slots: T; channel: a
    preset, four numbers, `trace:FILE`, `A>B` (changes half-way) or `A+S` (and S seconds of silence); rate_step,
    rtt_step: factors from half-way on.
    """

    point: str
    model: str
    rho: float
    channel: str
    layers: int
    columns: int
    slots: int
    budget: float | None = None
    packets: int = 24
    share: float = 0.93
    rtt_slots: int = RTT_SLOTS
    slot_s: float = SLOT_S
    rate_step: float = 1.0
    rtt_step: float = 1.0

    @property
    def t_rtt(self) -> float:
        """T/RTT, the time to send in round trips."""
        return round(self.slots / self.rtt_slots, 2)

    def settings(self, seed: int) -> Settings:
        """For the engines. The rate step is one of slots: time goes on at another pace."""
        steps: tuple[PathStep, ...] = ()
        if self.rate_step != 1.0 or self.rtt_step != 1.0:
            rtt_s = self.rtt_slots * self.slot_s
            steps = (PathStep(self.slots // 2, rtt_s * self.rtt_step, self.slot_s / self.rate_step),)
        return Settings(
            self.slots, self.rtt_slots, slot_s=self.slot_s, repair_budget=self.budget, seed=seed, steps=steps
        )


@dataclass(frozen=True, slots=True)
class HandOff:
    """A cell drawn with a seed. utility: in the order of blocks (layer by layer); ranked: their order by utility."""

    unit_packets: NDArray[np.int64]
    utility: NDArray[np.float64]
    ranked: NDArray[np.int64]
    losses: NDArray[np.bool_]


def hand_off(cell: Cell, seed: int) -> HandOff:
    """The blocks and losses of `seed`, the same for every policy."""
    utility = synthetic_utility((cell.layers, cell.columns), cell.share, seed)
    ranked = np.argsort(-utility, kind="stable").astype(np.int64)
    packets = np.full(len(utility), cell.packets, dtype=np.int64)
    return HandOff(packets, utility, ranked, draw_losses(cell.channel, cell.slots, cell.slot_s, seed))


def draw_losses(channel: str, slots: int, slot_s: float, seed: int) -> NDArray[np.bool_]:
    """The losses of a cell's channel, bool[slots]. Raises ValueError for a channel that is none."""
    if ">" in channel:
        before, after = channel.split(">", 1)
        half = slots // 2
        return np.concatenate(
            (draw_losses(before, half, slot_s, seed), draw_losses(after, slots - half, slot_s, seed ^ 0xA17E))
        )
    if "+" in channel:
        steady, silence = channel.rsplit("+", 1)
        bits = draw_losses(steady, slots, slot_s, seed)
        length = min(slots, round(float(silence) / slot_s))
        begin = int(SplitMix64(seed ^ 0x0F7A6E).uniform() * (slots - length))
        bits[begin : begin + length] = True
        return bits
    if channel.startswith("trace:"):
        trace = load_trace(Path(channel.removeprefix("trace:")))
        start = int(SplitMix64(seed).uniform() * len(trace))
        return losses(TraceChannel(trace, start=start), slots)
    params: GilbertElliott = parse(channel)
    return losses(GilbertElliottChannel(params, seed), slots)


def _square(packets: float) -> tuple[int, int]:
    """Layers and columns of about `packets` packets in blocks of 24."""
    blocks = round(packets / 24)
    layers = max(1, round(blocks**0.5))
    return layers, max(1, round(blocks / layers))


def _model(point: str, model: str, rho: float, tokens: int = 1536, **others: object) -> Cell:
    layers, packets = MODELS[model]
    columns = tokens // 16
    values: dict[str, object] = {"channel": "paper", "share": 0.99} | others
    return Cell(
        point, model, rho, layers=layers, columns=columns, packets=packets,
        slots=int(rho * layers * columns * packets), **values,  # type: ignore[arg-type]
    )  # fmt: skip


def _short(
    ratio: float, channel: str, rtt_slots: int, slot_s: float, model: str, point: str = "short", **more: Any
) -> Cell:
    slots = int(ratio * rtt_slots)
    layers, columns = _square(slots / 0.8)
    return Cell(point, model, 0.8, channel, layers, columns, slots, rtt_slots=rtt_slots, slot_s=slot_s, **more)


def _paper(models: tuple[str, ...]) -> list[Cell]:
    return [
        _model("paper", model, rho, budget=budget)
        for model in models
        for rho in (0.8, 1.0)
        for budget in (0.03, 0.05, 0.1, 0.15, None)
    ]


def _short_cells() -> list[Cell]:
    slow = [_short(ratio, channel, RTT_SLOTS, SLOT_S, "100Mbps") for channel in SHORT_CHANNELS
            for ratio in (0.5, 1, 2, 4, 8, 16, 32)]  # fmt: skip
    fast = [
        _short(ratio, channel, 1786, 0.02 / 1786, "1Gbps") for channel in SHORT_CHANNELS for ratio in (0.5, 1, 2, 4, 8)
    ]
    return slow + fast


def _heldout() -> list[Cell]:
    """Bursts of 100 slots, 25 % lost; 5 and 100 ms, 20 and 400 Mbit/s; what changes under way."""
    cases: list[tuple[str, int, float, str, dict[str, float]]] = [
        ("0.001,0.5,0.001,0.01", RTT_SLOTS, SLOT_S, "bursts 100", {}),
        ("0.05,0.9,0.02,0.06", RTT_SLOTS, SLOT_S, "26 % lost", {}),
        ("paper", 45, SLOT_S, "RTT 5 ms", {}),
        ("paper", 893, SLOT_S, "RTT 100 ms", {}),
        ("paper", 36, 5 * SLOT_S, "20 Mbit/s", {}),
        ("paper", 714, SLOT_S / 4, "400 Mbit/s", {}),
        ("iid5>paper", RTT_SLOTS, SLOT_S, "losses rise", {}),
        ("paper>ge2", RTT_SLOTS, SLOT_S, "losses fall", {}),
        ("paper", RTT_SLOTS, SLOT_S, "rate halves", {"rate_step": 0.5}),
        ("paper", RTT_SLOTS, SLOT_S, "rate doubles", {"rate_step": 2.0}),
        ("paper", RTT_SLOTS, SLOT_S, "RTT doubles", {"rtt_step": 2.0}),
        ("paper", RTT_SLOTS, SLOT_S, "RTT halves", {"rtt_step": 0.5}),
        ("paper+0.05", RTT_SLOTS, SLOT_S, "silent 50 ms", {}),
        ("paper+0.15", RTT_SLOTS, SLOT_S, "silent 150 ms", {}),
        ("paper+0.3", RTT_SLOTS, SLOT_S, "silent 300 ms", {}),
    ]
    return [
        _short(ratio, channel, rtt, slot_s, model, "heldout", **more)
        for channel, rtt, slot_s, model, more in cases
        for ratio in ((32,) if channel in ("paper+0.15", "paper+0.3") else (4, 32))  # 4 RTT are 80 ms
    ]


def cells(point: str, trace: str | None = None) -> list[Cell]:
    """The cells of a point; `trace` is a file of losses in the place of the labelled ones of `5g`.

    Raises LocalError for a name that is none of `POINTS`.
    """
    if point == "paper":
        return _paper(tuple(MODELS))
    if point == "short":
        return _short_cells()
    if point == "heldout":
        return _heldout()
    if point == "context":
        return [_model("context", "qwen2.5-7b", 0.8, tokens, budget=0.1) for tokens in (1536, 4096, 8192, 32768)]
    if point == "5g":
        slot_s = 1400 * 8 / 20.48e6
        return [
            _model(
                "5g", "qwen2.5-7b", rho, budget=budget, channel=f"trace:{trace}" if trace else FIVE_G,
                slot_s=slot_s, rtt_slots=round(0.02255 / slot_s),
            )
            for rho in (0.8, 1.0) for budget in (0.03, 0.05, 0.1, None)
        ]  # fmt: skip
    raise LocalError(f"no point {point!r}: choose one of {', '.join(POINTS)}")
