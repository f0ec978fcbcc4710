"""What a relay says about a run, and whether the run counts.

An emulator that was late measured its own machine, not the protocol: it must report its lateness and its own losses
beside the channel's, so that such runs can be thrown away instead of averaged in.
"""

from __future__ import annotations

import bisect
from dataclasses import asdict, dataclass, field
from typing import Any

from quic_pfec.link.options import RelayOptions
from quic_pfec.sim.link import LinkStats, SlotLog

__all__ = ["LATENESS_BOUNDS_S", "DirectionReport", "Lateness", "RelayReport"]

LATENESS_BOUNDS_S = (10e-6, 50e-6, 100e-6, 250e-6, 1e-3, 5e-3)
"""Upper bounds of the lateness histogram; a last bucket takes all above."""

_VOID_LATENESS_S = 1e-3


@dataclass(slots=True)
class Lateness:
    """How much later than due datagrams left: a histogram over LATENESS_BOUNDS_S, the sum and the largest."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENESS_BOUNDS_S) + 1))
    total_s: float = 0.0
    largest_s: float = 0.0

    def add(self, late_s: float) -> None:
        """Count one datagram."""
        self.counts[bisect.bisect_right(LATENESS_BOUNDS_S, late_s)] += 1
        self.total_s += late_s
        self.largest_s = max(self.largest_s, late_s)

    @property
    def mean_s(self) -> float:
        """Mean lateness, 0 when nothing was sent."""
        return self.total_s / max(1, sum(self.counts))

    def share_above(self, bound_s: float) -> float:
        """Share of the datagrams later than `bound_s`, one of LATENESS_BOUNDS_S."""
        first = LATENESS_BOUNDS_S.index(bound_s) + 1
        return sum(self.counts[first:]) / max(1, sum(self.counts))


@dataclass(frozen=True, slots=True)
class DirectionReport:
    """One direction since the epoch: the link's counters, and what the relay itself did to datagrams.

    `sent` left the relay; `ring_drops` found it full; `write_errors` were refused by the kernel; `orphaned` belonged to
    a client that had to make room. `in_flight` are still on their way.
    """

    link: LinkStats
    lateness: Lateness
    sent: int
    ring_drops: int
    write_errors: int
    orphaned: int
    in_flight: int

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        values = asdict(self)
        values["lateness"]["bounds_s"] = list(LATENESS_BOUNDS_S)
        values["lateness"]["mean_s"] = self.lateness.mean_s
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> DirectionReport:
        """The inverse of `to_json`."""
        rest = dict(values)
        late = rest.pop("lateness")
        return cls(
            link=LinkStats(**rest.pop("link")),
            lateness=Lateness(late["counts"], late["total_s"], late["largest_s"]),
            **rest,
        )


@dataclass(frozen=True, slots=True)
class RelayReport:
    """A relay since its last epoch (or its start). `log` is the forward direction's, None before the first epoch.

    `clients` are the addresses served now, `evicted` those that made room since the start. `real_time` says whether
    SCHED_FIFO was granted, `kernel_stamps` whether arrivals carry the kernel's time rather than the relay's.
    """

    options: RelayOptions
    slot_s: float
    forward: DirectionReport
    backward: DirectionReport
    log: SlotLog | None
    clients: int
    evicted: int
    real_time: bool
    kernel_stamps: bool

    @property
    def epoch_clock_s(self) -> float | None:
        """When the epoch began, on time.monotonic() of this machine."""
        return None if self.log is None else self.log.epoch_s

    def void_reasons(self, *, paced: bool = False) -> list[str]:
        """Why the run does not count; empty if it does. `paced`: the sender stayed below the link's rate, so that
        drops at the queue can only be the relay's own."""
        reasons = []
        for name, side in (("forward", self.forward), ("backward", self.backward)):
            if side.lateness.share_above(_VOID_LATENESS_S) > 0.01:
                reasons.append(f"{name}: lateness p99 above 1 ms")
            if side.ring_drops:
                reasons.append(f"{name}: {side.ring_drops} ring drops")
            if side.write_errors:
                reasons.append(f"{name}: {side.write_errors} write errors")
            if paced and side.link.queue_drops:
                reasons.append(f"{name}: {side.link.queue_drops} queue drops of a paced sender")
        return reasons

    def to_json(self) -> dict[str, Any]:
        """Plain values, the slot log's bitmaps at the top level as hexadecimal."""
        values: dict[str, Any] = {
            "options": self.options.to_json(),
            "slot_s": self.slot_s,
            "epoch_clock_s": None,
            "forward": self.forward.to_json(),
            "backward": self.backward.to_json(),
            "clients": self.clients,
            "evicted": self.evicted,
            "real_time": self.real_time,
            "kernel_stamps": self.kernel_stamps,
            "void": self.void_reasons(),
        }
        if self.log is not None:
            values |= self.log.to_json() | {"slot_s": self.slot_s}
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RelayReport:
        """The inverse of `to_json`."""
        options = RelayOptions.from_json(values["options"])
        log = None
        if values["epoch_clock_s"] is not None:
            log = SlotLog.from_json(values | {"slot_s": values["slot_s"] if options.clock == "slot" else None})
        return cls(
            options=options,
            slot_s=values["slot_s"],
            forward=DirectionReport.from_json(values["forward"]),
            backward=DirectionReport.from_json(values["backward"]),
            log=log,
            clients=values["clients"],
            evicted=values["evicted"],
            real_time=values["real_time"],
            kernel_stamps=values["kernel_stamps"],
        )
