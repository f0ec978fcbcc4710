"""Simulated hand-offs of one geometry, run once and used for every prompt.

Which symbol arrives depends on the losses, the policy and the place of the symbol in the order of sending, not on what
it carries: an episode of the shipped sender and receiver gives the fate of each place, and any order of units can be
laid over it. The policies here see utility through the order alone (a resend takes the earliest known loss, which is
the most useful one when units go out by utility); a policy that looks at utility itself would need an episode for each
request. So does the progressive wire dtype, whose units differ in size: where the refinements stand between the bases,
and with that how many packets come before a place, depends on the utility of the request (`deliver_units`).

Wire dtypes are compared in equal time: `Airtime` is the time that a share rho of one of them takes, in slots of
another's packets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from quic_pfec.kv.auto import AUTO, choose_wire_dtype
from quic_pfec.kv.layout import PACKET_OVERHEAD, Layout
from quic_pfec.kv.order import spread_utility
from quic_pfec.sim.channel import Channel, GilbertElliottChannel, TraceChannel, losses, parse
from quic_pfec.sim.episode import Settings, run_episode
from quic_pfec.sim.trace import load_trace
from quic_pfec.transfer.ledger import LossEstimate
from quic_pfec.wire.errors import LocalError
from quic_pfec.wire.limits import UNIT_HEADER_SIZE

__all__ = [
    "BESIDE",
    "RTT_SLOTS",
    "SCHEMES",
    "SLOT_S",
    "Airtime",
    "Ranking",
    "Scheme",
    "airtime",
    "completion",
    "deliver",
    "deliver_units",
    "open_channel",
    "packets_of_a_unit",
    "resolve",
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
    Scheme("priorityfec_paper", "priorityfec-paper (paper's profile, ddqn)", "paper", "ddqn"),
    Scheme("fixed_request", "fixed FEC (per request)", "request", "fixed"),
    Scheme("arq_request", "resends only (per request)", "request", "arq"),
    Scheme("hybrid", "hybrid (per request)", "request", "hybrid"),
)
"""The paper's schemes and ours."""

BESIDE: Final = ("fixed_request", "arq_request", "hybrid")
"""Keys of the schemes that are measured in the wire dtypes beside the first."""


@dataclass(frozen=True, slots=True)
class Airtime:
    """Time to send in, as a sender with packets of one size counts it: `slots` of `slot_s` seconds, and the round-trip
    time in such slots."""

    slots: int
    rtt_slots: int
    slot_s: float


def airtime(layout: Layout, rho: float, reference: Layout | None = None) -> Airtime:
    """The share `rho` of the time that all packets of `reference` (None = `layout`) take, in packets of `layout`.

    Packets of `reference` take SLOT_S, those of `layout` in proportion to their bytes, headers included.
    """
    reference = layout if reference is None else reference
    size, usual = layout.symbol_size(), reference.symbol_size()
    ratio = (size - UNIT_HEADER_SIZE + PACKET_OVERHEAD) / (usual - UNIT_HEADER_SIZE + PACKET_OVERHEAD)
    slots = max(1, round(rho * reference.symbols(usual) / ratio))
    return Airtime(slots, max(1, round(RTT_SLOTS / ratio)), SLOT_S * ratio)


def resolve(wire_dtype: str, reference: Layout, rho: float) -> str:
    """What `send_kv` sends when it is told `wire_dtype`: itself, or what "auto" chooses for this time on a connection
    that has sent nothing yet. `reference`: see `airtime`."""
    if wire_dtype != AUTO:
        return wire_dtype
    time = airtime(reference, rho)
    usual = reference.symbol_size() - UNIT_HEADER_SIZE + PACKET_OVERHEAD

    def path(symbol_size: int) -> Airtime:
        return Airtime(0, 0, time.slot_s * (symbol_size - UNIT_HEADER_SIZE + PACKET_OVERHEAD) / usual)

    return choose_wire_dtype(reference, path, time.slots * time.slot_s, LossEstimate().long)


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
    layout: Layout,
    policy: str,
    rho: float,
    channel: Callable[[int], Channel],
    seed: int,
    repair_budget: float | None,
    reference: Layout | None = None,
) -> Bits:
    """Symbols at the receiver at its deadline, bool [N], in the order of sending, N = `layout.symbols`.

    rho: slots until the deadline as a share of N, or the time as a share of what `reference` takes (`airtime`).
    repair_budget: repairs plus resends as a share of N, None = no limit. The same seed has the same losses, slot by
    slot, for every policy. Raises LocalError for a layout whose units differ in size.
    """
    packets = np.full(layout.unit_count, packets_of_a_unit(layout))
    utility = np.arange(layout.unit_count, 0, -1, dtype=np.float64)
    return _known(packets, utility, policy, airtime(layout, rho, reference), channel, seed, repair_budget)


def deliver_units(
    layout: Layout,
    order: npt.NDArray[np.int32],
    utility: npt.NDArray[np.float64],
    policy: str,
    rho: float,
    channel: Callable[[int], Channel],
    seed: int,
    repair_budget: float | None,
    reference: Layout | None = None,
) -> Bits:
    """`deliver` for one request, for layouts whose units may differ in size: bool [N], in the order of sending.

    order: unit ids, int32 [unit_count]; utility: of blocks, float64 [block_count].
    """
    packets = layout.fragment_counts(layout.symbol_size())[order].astype(np.int64)
    worth = spread_utility(layout, utility)[order]
    return _known(packets, worth, policy, airtime(layout, rho, reference), channel, seed, repair_budget)


def _known(
    packets: npt.NDArray[np.int64], utility: npt.NDArray[np.float64], policy: str, time: Airtime,
    channel: Callable[[int], Channel], seed: int, repair_budget: float | None,
) -> Bits:  # fmt: skip
    settings = Settings(
        time.slots, time.rtt_slots, slot_s=time.slot_s, scheduler=policy, repair_budget=repair_budget, seed=seed
    )
    result = run_episode(packets, utility, losses(channel(seed), time.slots), settings)
    if result.wrong_symbols:
        raise RuntimeError(f"{policy}: {result.wrong_symbols} symbols were decoded wrongly")
    return result.known


def completion(layout: Layout, known: list[Bits], parts: int) -> npt.NDArray[np.float64]:
    """Probability that a unit is complete by its place in the order of sending, float64 [parts]: the share over the
    realisations `known`, the places divided evenly. Prop. 1 of the paper rests on its falling."""
    packets = packets_of_a_unit(layout)
    complete = np.stack([one.reshape(-1, packets).all(axis=1) for one in known]).mean(axis=0)
    return np.array([part.mean() for part in np.array_split(complete, parts)])
