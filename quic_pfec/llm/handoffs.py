"""Simulated hand-offs of one geometry, run once and used for every prompt.

Which symbol arrives depends on the losses, the policy and the place of the symbol in the order of sending, not on what
it carries: an episode of the shipped sender and receiver gives the fate of each place, and any order of units can be
laid over it. The policies here see utility through the order alone (a resend takes the earliest known loss, which is
the most useful one when units go out by utility); a policy that looks at utility itself would need an episode for each
request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from quic_pfec.kv.layout import Layout
from quic_pfec.sim.channel import Channel, GilbertElliottChannel, TraceChannel, losses, parse
from quic_pfec.sim.episode import Settings, run_episode
from quic_pfec.sim.trace import load_trace
from quic_pfec.wire.errors import LocalError

__all__ = [
    "RTT_SLOTS",
    "SCHEMES",
    "SLOT_S",
    "Ranking",
    "Scheme",
    "completion",
    "deliver",
    "open_channel",
    "packets_of_a_unit",
]

SLOT_S: Final = 112e-6
"""A packet of 1,400 bytes at 100 Mbit/s (the paper's operating point)."""

RTT_SLOTS: Final = 179
"""20 ms."""

TRACE_PREFIX: Final = "trace:"

Bits = npt.NDArray[np.bool_]
Ranking = Literal["fifo", "random", "paper", "layer", "request"]
"""Orders of units: as they lie in memory, at random, by the paper's profile, by one of single layers, by request."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way of sending: which order, which policy of `schedule.policies`."""

    key: str
    label: str
    ranking: Ranking
    policy: str


SCHEMES: Final[tuple[Scheme, ...]] = (
    Scheme("fifo", "FIFO, unprotected", "fifo", "none"),
    Scheme("priority_only", "priority only (paper's profile)", "paper", "none"),
    Scheme("priority_fixed", "priority + fixed FEC (paper's profile)", "paper", "fixed"),
    Scheme("arq", "resends only (paper's profile)", "paper", "arq"),
    Scheme("priorityfec_paper", "priorityfec-paper (paper's profile, deficit heuristic)", "paper", "paper-deficit"),
    Scheme("arq_request", "resends only (per request)", "request", "arq"),
    Scheme("hybrid", "hybrid (per request)", "request", "hybrid"),
)
"""The paper's schemes and ours. `priorityfec-paper` has the deficit heuristic in the place of the learned policy."""


def open_channel(name: str) -> Callable[[int], Channel]:
    """The channel of a seed, for a preset's name, four Gilbert-Elliott numbers, or `trace:FILE`.

    A trace is started, for each seed, at a place of its own, spread by the golden ratio, and wraps. Raises ValueError
    for what is none of them, OSError for a file that cannot be read.
    """
    if not name.startswith(TRACE_PREFIX):
        params = parse(name)
        return lambda seed: GilbertElliottChannel(params, seed)
    trace = load_trace(name.removeprefix(TRACE_PREFIX))
    return lambda seed: TraceChannel(trace, start=int(seed * 0.6180339887498949 % 1.0 * len(trace)))


def packets_of_a_unit(layout: Layout) -> int:
    """Packets of every unit. Raises LocalError where units differ: then the fate of a place would depend on what stands
    there."""
    counts = layout.fragment_counts(layout.symbol_size())
    if counts.min() != counts.max():
        raise LocalError(
            f"units of {counts.min()} to {counts.max()} packets: give a multiple of {layout.block_tokens} tokens"
        )
    return int(counts[0])


def deliver(
    layout: Layout, policy: str, rho: float, channel: Callable[[int], Channel], seed: int, repair_budget: float | None
) -> Bits:
    """Symbols at the receiver at its deadline, bool [N], in the order of sending, N = `layout.symbols`.

    rho: slots until the deadline as a share of N. repair_budget: repairs plus resends as a share of N, None = no limit.
    The same seed has the same losses for every policy. Raises LocalError for a layout whose units differ in size.
    """
    packets = packets_of_a_unit(layout)
    total = packets * layout.unit_count
    slots = max(1, round(rho * total))
    utility = np.arange(layout.unit_count, 0, -1, dtype=np.float64)
    settings = Settings(
        slots, RTT_SLOTS, slot_s=SLOT_S, scheduler=policy, repair_budget=repair_budget, seed=seed
    )  # fmt: skip
    result = run_episode(np.full(layout.unit_count, packets), utility, losses(channel(seed), slots), settings)
    if result.wrong_symbols:
        raise RuntimeError(f"{policy}: {result.wrong_symbols} symbols were decoded wrongly")
    return result.known


def completion(layout: Layout, known: list[Bits], parts: int) -> npt.NDArray[np.float64]:
    """Probability that a unit is complete by its place in the order of sending, float64 [parts]: the share over the
    realisations `known`, the places divided evenly. Prop. 1 of the paper rests on its falling."""
    packets = packets_of_a_unit(layout)
    complete = np.stack([one.reshape(-1, packets).all(axis=1) for one in known]).mean(axis=0)
    return np.array([part.mean() for part in np.array_split(complete, parts)])
