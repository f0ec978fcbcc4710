"""Settings of the bottleneck between two namespaces: one validated object, and its channel.

Fields that the relay has too mean the same there; sizes count whole IP packets, since that is what passes a TUN device.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from quic_pfec.sim.channel import GilbertElliott, channel_factory, direction_seed
from quic_pfec.sim.link import Clock, Link, default_queue_bytes, default_slot_s
from quic_pfec.sim.trace import load_trace

__all__ = ["MAX_MTU", "Program", "TunOptions"]

Program = Literal["auto", "c", "python"]

MAX_MTU = 1500
"""Bytes of the largest IP packet: the emulator's buffers are made for Ethernet's."""

_MIN_MTU = 1280  # IPv6 asks for it (RFC 8200 §5)


@dataclass(frozen=True, slots=True)
class TunOptions:
    """What the bottleneck does to the packets between left and right; forward is left to right.

    - `rate_bps`, `owd_s`, `queue_bytes` (None = one bandwidth-delay product, at least 30 kB): each way.
    - `loss`: Gilbert-Elliott parameters; `trace`: a file of losses instead (see `sim.trace.load_trace`). Neither = no
      loss. `loss_both`: backward loses too, with a seed of its own.
    - `clock`, `slot_s` (None = 1,440 bytes at the rate): when the channel makes a step (see `sim.link`).
    - `seed`: of the losses. `loss_from_start`: each direction loses from its first packet on, instead of from the first
      epoch.
    - `corrupt`: share of packets that arrive damaged, a UDP datagram in its payload and with a checksum that fits;
      `reorder`: share that arrive `reorder_s` late.
    - `mtu`: of both devices, 1,280 to MAX_MTU bytes.
    - `fifo`: ask for real-time priority (SCHED_FIFO). `program`: the emulator in C, its twin in Python, or ("auto")
      the twin only where no compiler is.
    - `paced`: the senders stay below the rate, so that a drop at the queue voids the run.

    ECN marks are not made. Raises ValueError for a value out of range.
    """

    rate_bps: float = 20e6
    owd_s: float = 0.010
    queue_bytes: int | None = None
    loss: GilbertElliott | None = None
    trace: str | None = None
    loss_both: bool = False
    clock: Clock = "slot"
    slot_s: float | None = None
    seed: int = 0
    loss_from_start: bool = False
    corrupt: float = 0.0
    reorder: float = 0.0
    reorder_s: float = 0.005
    mtu: int = MAX_MTU
    fifo: bool = True
    program: Program = "auto"
    paced: bool = False

    def __post_init__(self) -> None:
        if self.loss is not None and self.trace is not None:
            raise ValueError("loss and trace are both given; a link has one channel")
        if not _MIN_MTU <= self.mtu <= MAX_MTU:
            raise ValueError(f"mtu is between {_MIN_MTU} and {MAX_MTU}, got {self.mtu}")
        if self.program not in get_args(Program):
            raise ValueError(f"program is one of {', '.join(get_args(Program))}, got {self.program!r}")
        for direction in (0, 1):
            self._link(direction, None)

    def trace_bits(self) -> npt.NDArray[np.bool_] | None:
        """The trace's losses, bool[steps], or None without a trace. Raises ValueError or OSError for a bad file."""
        return None if self.trace is None else load_trace(self.trace)

    def links(self) -> tuple[Link, Link]:
        """The two directions, forward and backward. Reads the trace file, if there is one."""
        model = self.loss if self.trace is None else self.trace_bits()
        return self._link(0, model), self._link(1, model if self.loss_both else None)

    def _link(self, direction: int, model: GilbertElliott | npt.NDArray[np.bool_] | None) -> Link:
        seed = direction_seed(self.seed, direction)
        return Link(
            self.rate_bps,
            self.owd_s,
            self.queue_bytes,
            channel_factory(model, seed),
            clock=self.clock,
            slot_s=self.slot_s,
            overhead=0,  # the packets have their headers
            corrupt=self.corrupt,
            reorder=self.reorder,
            reorder_s=self.reorder_s,
            noise_seed=~seed,
            loss_from_start=self.loss_from_start,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the defaults that depend on others filled in."""
        values = asdict(self)
        values["slot_s"] = default_slot_s(self.rate_bps) if self.slot_s is None else self.slot_s
        if self.queue_bytes is None:
            values["queue_bytes"] = default_queue_bytes(self.rate_bps, self.owd_s)
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TunOptions:
        """The inverse of `to_json`."""
        known = dict(values)
        if known["loss"] is not None:
            known["loss"] = GilbertElliott(**known["loss"])
        return cls(**known)
