"""What the bottleneck between two namespaces says about a run, and whether the run counts.

Both programs, C and Python, write the same object; this module gives it types, derives the figures one wants to read
(rates, shares) and judges it. A run that is void measured this machine and is repeated, never averaged in.
"""

from __future__ import annotations

import itertools
from array import array
from dataclasses import asdict, dataclass, fields
from typing import Any

from quic_pfec.link.report import LATENESS_BOUNDS_S
from quic_pfec.link.tun_options import TunOptions

__all__ = [
    "BUCKETS",
    "COARSE_BUCKETS",
    "LATENESS_UNIT_S",
    "QUEUE_DELAY_UNIT_S",
    "Distribution",
    "Histogram",
    "TunDirection",
    "TunReport",
]

BUCKETS = 16_384
"""Buckets of a histogram; one more takes all above."""

LATENESS_UNIT_S = 1e-6
QUEUE_DELAY_UNIT_S = 1e-4
"""Widths of a bucket."""

COARSE_BUCKETS = (0, 10, 50, 100, 250, 1_000, 5_000)
"""First bucket of each of the sums that are reported. For lateness the borders between them are LATENESS_BOUNDS_S, for
the queue delay a hundred times that."""

VOID_LATENESS_S = 1e-3


@dataclass(frozen=True, slots=True)
class Distribution:
    """Times in seconds: how many, their sum, the largest, two quantiles (upper ends of fine buckets), coarse counts."""

    count: int
    total_s: float
    largest_s: float
    p50_s: float
    p99_s: float
    counts: list[int]

    @property
    def mean_s(self) -> float:
        """0 when there is nothing."""
        return self.total_s / max(1, self.count)


class Histogram:
    """Collects times in BUCKETS buckets of `unit_s`: what the emulator in C has, for its twin."""

    __slots__ = ("_buckets", "_largest_s", "_total_s", "_unit_s")

    def __init__(self, unit_s: float) -> None:
        self._unit_s = unit_s
        self._buckets = array("L", bytes(array("L").itemsize * (BUCKETS + 1)))
        self._total_s = self._largest_s = 0.0

    def add(self, value_s: float) -> None:
        """Count one time; a negative one counts as 0."""
        self._buckets[max(0, min(BUCKETS, int(value_s / self._unit_s)))] += 1
        self._total_s += value_s
        self._largest_s = max(self._largest_s, value_s)

    def distribution(self) -> Distribution:
        """What was counted so far."""
        ends = (*COARSE_BUCKETS[1:], BUCKETS + 1)
        return Distribution(
            count=sum(self._buckets),
            total_s=self._total_s,
            largest_s=self._largest_s,
            p50_s=self._quantile(0.5),
            p99_s=self._quantile(0.99),
            counts=[sum(self._buckets[start:end]) for start, end in zip(COARSE_BUCKETS, ends, strict=True)],
        )

    def _quantile(self, share: float) -> float:
        wanted = share * sum(self._buckets)
        if not wanted:
            return 0.0
        sums = itertools.accumulate(self._buckets)
        bucket = next(bucket for bucket, seen in enumerate(sums) if seen >= wanted)
        return self._largest_s if bucket == BUCKETS else (bucket + 1) * self._unit_s


@dataclass(frozen=True, slots=True)
class TunDirection:
    """One direction since the last mark or epoch; bytes are of whole IP packets.

    packets = queue_drops + lost + delivered; what is delivered is then `sent`, still `in_flight`, or was refused by the
    kernel (`write_errors`). `ring_drops` came when the emulator could hold no more, and are in none of these.
    `tcp_bytes_in`, `udp_bytes_in` are what arrived at the bottleneck, ..._out what left it. `largest_queue_bytes`,
    `slots_drawn` and `slots_lost` (steps of the channel, and those that lose) count since the epoch, whatever was
    marked. `queue_delay` is the time from arrival until the last bit has left, of the packets delivered.
    """

    in_flight: int
    packets: int
    bytes: int
    queue_drops: int
    lost: int
    delivered: int
    delivered_bytes: int
    corrupted: int
    reordered: int
    sent: int
    sent_bytes: int
    ring_drops: int
    write_errors: int
    tcp_bytes_in: int
    tcp_bytes_out: int
    udp_bytes_in: int
    udp_bytes_out: int
    largest_queue_bytes: int
    slots_drawn: int
    slots_lost: int
    lateness: Distribution
    queue_delay: Distribution

    @property
    def loss_share(self) -> float:
        """Share of the packets that entered the link and that the channel lost."""
        return self.lost / max(1, self.lost + self.delivered)

    def to_json(self, wall_s: float) -> dict[str, Any]:
        """Plain values, with rates over `wall_s` and shares."""
        values = asdict(self)
        values["offered_bps"] = self.bytes * 8 / wall_s if wall_s else 0.0
        values["sent_bps"] = self.sent_bytes * 8 / wall_s if wall_s else 0.0
        values["loss_share"] = self.loss_share
        for name, scale in (("lateness", 1), ("queue_delay", 100)):
            values[name]["mean_s"] = getattr(self, name).mean_s
            values[name]["bounds_s"] = [bound * scale for bound in LATENESS_BOUNDS_S]
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TunDirection:
        """The inverse of `to_json`, and the reading of what an emulator says."""
        known = {field.name: values[field.name] for field in fields(cls)}
        for name in ("lateness", "queue_delay"):
            known[name] = Distribution(**{field.name: known[name][field.name] for field in fields(Distribution)})
        return cls(**known)


@dataclass(frozen=True, slots=True)
class TunReport:
    """A bottleneck since its last mark, epoch or start: `wall_s` and `cpu_s` are since then.

    `emulator` is "c" or "python"; `real_time` and `locked` say whether SCHED_FIFO and mlockall were granted.
    `epoch_clock_s` is on time.monotonic(), None before the first epoch. `device_drops` are packets that the kernel
    dropped before the emulator could read them, since the start (0 where there is no device).
    """

    options: TunOptions
    emulator: str
    clock_s: float
    wall_s: float
    cpu_s: float
    real_time: bool
    locked: bool
    epoch_clock_s: float | None
    forward: TunDirection
    backward: TunDirection
    device_drops: int = 0

    def void_reasons(self) -> list[str]:
        """Why the run does not count; empty if it does."""
        reasons = []
        for name, side in (("forward", self.forward), ("backward", self.backward)):
            if side.lateness.p99_s > VOID_LATENESS_S:
                reasons.append(f"{name}: lateness p99 {side.lateness.p99_s * 1e3:.1f} ms, above 1 ms")
            if side.ring_drops:
                reasons.append(f"{name}: {side.ring_drops} ring drops")
            if side.write_errors:
                reasons.append(f"{name}: {side.write_errors} write errors")
            if self.options.paced and side.queue_drops:
                reasons.append(f"{name}: {side.queue_drops} queue drops of a paced sender")
        if self.device_drops:
            reasons.append(f"{self.device_drops} packets dropped before the emulator read them")
        return reasons

    def to_json(self) -> dict[str, Any]:
        """Plain values, and under "void" the reasons."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["options"] = self.options.to_json()
        values["forward"] = self.forward.to_json(self.wall_s)
        values["backward"] = self.backward.to_json(self.wall_s)
        values["void"] = self.void_reasons()
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TunReport:
        """The inverse of `to_json`."""
        known = {field.name: values[field.name] for field in fields(cls)}
        known["options"] = TunOptions.from_json(known["options"])
        for name in ("forward", "backward"):
            known[name] = TunDirection.from_json(known[name])
        return cls(**known)
