"""One direction of a lossy bottleneck, as arithmetic on the times passed in.

The same object stands behind the simulator and behind the relay of real datagrams, so that both treat a packet alike,
in this order: rate limiter, tail drop of the queue, loss by the channel, delay. A packet that the channel loses still
takes its time on the link: losses happen after the bottleneck, and a slot that loses is a slot gone.

**Slots.** With `clock="slot"` the channel makes one step every `slot_s` of time, whatever is sent, as a radio channel
does; a packet meets the step in which the middle of its transmission lies. (The middle, because then packets of exactly
one slot, sent back to back, each have a slot of their own whatever rounding does at the borders.) With
`clock="packet"` the channel makes one step a packet that enters the link, and stands still while nobody sends.

**Epochs.** `epoch(now)` begins an experiment: slot 0 starts, the losses start from the seed, counters and log are
empty. Before the first epoch nothing is lost, so a handshake is no part of an experiment, and two schemes whose
hand-offs begin at different times after it still meet the same losses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from quic_pfec.sim.channel import ChannelFactory, NoLoss, SplitMix64, losses

__all__ = [
    "IP_UDP_OVERHEAD",
    "MAX_LOG_SLOTS",
    "SLOT_BYTES",
    "Clock",
    "Delivery",
    "Drop",
    "Link",
    "LinkStats",
    "SlotLog",
    "default_queue_bytes",
    "default_slot_s",
]

Bits = npt.NDArray[np.bool_]
Clock = Literal["slot", "packet"]

IP_UDP_OVERHEAD = 28
"""Bytes an IPv4 and a UDP header add to every datagram."""

SLOT_BYTES = 1440
"""Size on the link of the packet that lasts one slot by default: the largest datagram this project sends, with its
headers, rounded up."""

MAX_LOG_SLOTS = 1 << 23
"""Slots kept in the log, one byte each twice: 80 minutes at 20 Mbit/s. Later slots are drawn but not logged."""

# A queue this small still holds some twenty packets on a link of a few Mbit/s (shorter ones cannot be kept busy).
_MIN_DEFAULT_QUEUE = 30_000

# Backlogs come out of times in doubles; packets are whole bytes, so half a byte swallows the rounding and nothing else.
_BACKLOG_SLACK = 0.5

# Steps of the channel drawn at a time, at most, which bounds the memory it takes.
_DRAW_STEPS = 1 << 16


def default_queue_bytes(rate_bps: float, owd_s: float) -> int:
    """One bandwidth-delay product of the round trip (2 x `owd_s`), at least 30 kB."""
    return max(_MIN_DEFAULT_QUEUE, round(rate_bps * 2 * owd_s / 8))


def default_slot_s(rate_bps: float) -> float:
    """Duration of SLOT_BYTES at `rate_bps`."""
    return SLOT_BYTES * 8 / rate_bps


class Drop(Enum):
    """Why a link did not deliver a packet."""

    QUEUE = "queue"
    CHANNEL = "channel"


@dataclass(frozen=True, slots=True)
class Delivery:
    """A packet that arrives: when, in which slot it crossed (None before the first epoch), and damaged where.

    `flip` is (offset, mask): the byte at offset arrives XORed with mask.
    """

    due_s: float
    slot: int | None = None
    flip: tuple[int, int] | None = None

    def apply(self, data: bytes) -> bytes:
        """What arrives when `data` was sent."""
        if self.flip is None:
            return data
        offset, mask = self.flip
        return data[:offset] + bytes([data[offset] ^ mask]) + data[offset + 1 :]


@dataclass(slots=True)
class LinkStats:
    """Counters since the last epoch. packets = queue_drops + lost + delivered; bytes are payload, without headers."""

    packets: int = 0
    bytes: int = 0
    queue_drops: int = 0
    lost: int = 0
    delivered: int = 0
    delivered_bytes: int = 0
    corrupted: int = 0
    reordered: int = 0
    largest_queue_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SlotLog:
    """What the channel did since the epoch, slot by slot.

    `losses` is the channel's whole sequence, the same for whatever is sent; `used` marks the slots in which a packet
    crossed. Both are bool[slots], slot 0 beginning at `epoch_s`. `slot_s` is None on the packet clock, where a slot is
    a packet and has no duration. `drawn` counts the steps made, more than the arrays hold only when the log is full.
    """

    epoch_s: float
    slot_s: float | None
    drawn: int
    losses: Bits
    used: Bits

    @property
    def lost(self) -> Bits:
        """Slots in which something was sent and lost, bool[slots]."""
        return self.used & self.losses

    def to_json(self) -> dict[str, Any]:
        """Plain values; bitmaps as hexadecimal, bit i of byte j standing for slot 8 j + i."""
        return {
            "epoch_clock_s": self.epoch_s,
            "slot_s": self.slot_s,
            "slots": len(self.losses),
            "slots_drawn": self.drawn,
            "losses": _hex(self.losses),
            "used": _hex(self.used),
            "lost": _hex(self.lost),
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> SlotLog:
        """The inverse of `to_json`."""
        slots = fields["slots"]
        return cls(
            epoch_s=fields["epoch_clock_s"],
            slot_s=fields["slot_s"],
            drawn=fields["slots_drawn"],
            losses=_bits(fields["losses"], slots),
            used=_bits(fields["used"], slots),
        )


def _hex(bits: Bits) -> str:
    return np.packbits(bits, bitorder="little").tobytes().hex()


def _bits(text: str, count: int) -> Bits:
    packed = np.frombuffer(bytes.fromhex(text), dtype=np.uint8)
    return np.unpackbits(packed, count=count, bitorder="little").astype(np.bool_)


class Link:
    """One direction of a bottleneck.

    - `rate_bps`: bits per second, `overhead` bytes of headers counted with every packet.
    - `owd_s`: one-way delay, added after the last bit has left.
    - `queue_bytes`: tail drop beyond this backlog; None = `default_queue_bytes`.
    - `channel`: makes the loss process from its first step, at each epoch (see `channel.channel_factory`); None = no
      loss.
    - `slot_s`: duration of a slot, None = `default_slot_s`; `clock`: see the module.
    - `corrupt`: probability that a delivered packet arrives with one byte damaged; `reorder`: that it arrives
      `reorder_s` later than due, behind packets sent after it. Both drawn from `noise_seed`, apart from the losses, and
      restarted by an epoch too.
    - `loss_from_start`: the first packet begins an epoch by itself.

    Raises ValueError for a value out of range. Times passed to one link must not run backwards.
    """

    __slots__ = (
        "_begun",
        "_bit",
        "_busy_until_s",
        "_channel",
        "_clock",
        "_corrupt",
        "_dead",
        "_drawn",
        "_epoch_s",
        "_factory",
        "_loss_from_start",
        "_loss_log",
        "_noise",
        "_noise_seed",
        "_now_s",
        "_overhead",
        "_owd_s",
        "_queue_bytes",
        "_reorder",
        "_reorder_s",
        "_seconds_per_byte",
        "_slot_s",
        "_stats",
        "_used_log",
    )

    def __init__(
        self,
        rate_bps: float,
        owd_s: float,
        queue_bytes: int | None = None,
        channel: ChannelFactory | None = None,
        *,
        clock: Clock = "slot",
        slot_s: float | None = None,
        overhead: int = IP_UDP_OVERHEAD,
        corrupt: float = 0.0,
        reorder: float = 0.0,
        reorder_s: float = 0.0,
        noise_seed: int = 0,
        loss_from_start: bool = False,
    ) -> None:
        if not rate_bps > 0:
            raise ValueError(f"rate_bps must be positive, got {rate_bps!r}")
        if slot_s is None:
            slot_s = default_slot_s(rate_bps)
        if queue_bytes is None:
            queue_bytes = default_queue_bytes(rate_bps, owd_s)
        for name, value in (("owd_s", owd_s), ("overhead", overhead), ("reorder_s", reorder_s)):
            if not value >= 0:
                raise ValueError(f"{name} must not be negative, got {value!r}")
        for name, value in (("slot_s", slot_s), ("queue_bytes", queue_bytes)):
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value!r}")
        for name, value in (("corrupt", corrupt), ("reorder", reorder)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is a probability, got {value!r}")
        if clock not in ("slot", "packet"):
            raise ValueError(f"clock is 'slot' or 'packet', got {clock!r}")
        self._seconds_per_byte = 8 / rate_bps
        self._owd_s = owd_s
        self._queue_bytes = queue_bytes
        self._factory: ChannelFactory = NoLoss if channel is None else channel
        self._clock = clock
        self._slot_s = slot_s
        self._overhead = overhead
        self._corrupt = corrupt
        self._reorder = reorder
        self._reorder_s = reorder_s
        self._noise_seed = noise_seed
        self._loss_from_start = loss_from_start
        self._dead = False
        self._busy_until_s = float("-inf")
        self._now_s = float("-inf")
        self._epoch_s = 0.0
        self._begun = False
        self._begin()

    def _begin(self) -> None:
        self._channel = self._factory()
        self._noise = SplitMix64(self._noise_seed)
        self._stats = LinkStats()
        self._drawn = 0
        self._bit = False
        self._loss_log = bytearray()
        self._used_log = bytearray()

    @property
    def owd_s(self) -> float:
        """One-way delay in seconds."""
        return self._owd_s

    @property
    def slot_s(self) -> float:
        """Duration of a slot in seconds."""
        return self._slot_s

    @property
    def queue_bytes(self) -> int:
        """Backlog beyond which packets are dropped."""
        return self._queue_bytes

    @property
    def epoch_s(self) -> float | None:
        """When the current epoch began, None before the first."""
        return self._epoch_s if self._begun else None

    def epoch(self, now: float) -> None:
        """Begin an experiment at `now`; packets already on their way keep their fate and their place in the queue."""
        self._advance_clock(now)
        self._epoch_s = now
        self._begun = True
        self._begin()

    def change(
        self, now: float, *, rate_bps: float | None = None, owd_s: float | None = None, dead: bool | None = None
    ) -> None:
        """From `now` on another rate or delay, or with `dead` an outage: everything sent is lost.

        Packets that are in the queue keep the time at which they arrive. Slots keep their duration. Raises ValueError
        for a value out of range.
        """
        self._advance_clock(now)
        if rate_bps is not None:
            if not rate_bps > 0:
                raise ValueError(f"rate_bps must be positive, got {rate_bps!r}")
            self._seconds_per_byte = 8 / rate_bps
        if owd_s is not None:
            if not owd_s >= 0:
                raise ValueError(f"owd_s must not be negative, got {owd_s!r}")
            self._owd_s = owd_s
        if dead is not None:
            self._dead = dead

    def queue_delay_s(self, now: float) -> float:
        """How long a packet that enters at `now` would wait before its first bit leaves."""
        return max(0.0, self._busy_until_s - now)

    def send(self, now: float, size: int) -> Delivery | Drop:
        """A packet of `size` payload bytes enters at `now`: when it arrives, or why it does not."""
        self._advance_clock(now)
        if self._loss_from_start and not self._begun:
            self.epoch(now)
        stats = self._stats
        stats.packets += 1
        stats.bytes += size
        start_s = max(self._busy_until_s, now)
        wire_bytes = size + self._overhead
        queued_bytes = (start_s - now) / self._seconds_per_byte + wire_bytes
        if queued_bytes > self._queue_bytes + _BACKLOG_SLACK:
            stats.queue_drops += 1
            return Drop.QUEUE
        stats.largest_queue_bytes = max(stats.largest_queue_bytes, round(queued_bytes))
        end_s = start_s + wire_bytes * self._seconds_per_byte
        self._busy_until_s = end_s
        due_s = end_s + self._owd_s
        if self._dead:
            stats.lost += 1
            return Drop.CHANNEL
        if not self._begun:
            slot, flip = None, None
        else:
            slot = self._drawn if self._clock == "packet" else self._slot_at((start_s + end_s) / 2)
            self._draw_to(slot)
            if slot < len(self._used_log):
                self._used_log[slot] = 1
            if self._bit:
                stats.lost += 1
                return Drop.CHANNEL
            flip = self._damage(size)
            if self._reorder and self._noise.uniform() < self._reorder:
                stats.reordered += 1
                due_s += self._reorder_s
        stats.delivered += 1
        stats.delivered_bytes += size
        return Delivery(due_s, slot, flip)

    def advance(self, now: float) -> None:
        """Draw the losses of the slots up to `now`; `send` does it too, this keeps a long silence cheap to end."""
        self._advance_clock(now)
        if self._begun and self._clock == "slot":
            self._draw_to(self._slot_at(now))

    def stats(self) -> LinkStats:
        """A copy of the counters."""
        return replace(self._stats)

    def log(self) -> SlotLog:
        """A copy of the slot log, up to the last slot drawn. Raises ValueError before the first epoch."""
        if not self._begun:
            raise ValueError("no epoch has begun, so no slot exists")
        return SlotLog(
            epoch_s=self._epoch_s,
            slot_s=self._slot_s if self._clock == "slot" else None,
            drawn=self._drawn,
            losses=np.frombuffer(bytes(self._loss_log), dtype=np.bool_),
            used=np.frombuffer(bytes(self._used_log), dtype=np.bool_),
        )

    def _advance_clock(self, now: float) -> None:
        if now < self._now_s:
            raise ValueError(f"time ran backwards, from {self._now_s!r} to {now!r}")
        self._now_s = now

    def _slot_at(self, time_s: float) -> int:
        return int((time_s - self._epoch_s) / self._slot_s)

    def _draw_to(self, slot: int) -> None:
        """Step the channel so that `_bit` is the loss of `slot`, which is never before the last one drawn."""
        while self._drawn < slot:  # several at once: the clock ran on while nobody sent
            fresh = losses(self._channel, min(slot - self._drawn, _DRAW_STEPS))
            room = MAX_LOG_SLOTS - len(self._loss_log)
            self._loss_log += fresh[:room].tobytes()
            self._used_log += bytes(min(room, len(fresh)))
            self._drawn += len(fresh)
        if self._drawn == slot:
            self._bit = self._channel.lost()
            if slot < MAX_LOG_SLOTS:
                self._loss_log.append(self._bit)
                self._used_log.append(0)
            self._drawn += 1

    def _damage(self, size: int) -> tuple[int, int] | None:
        if not self._corrupt or self._noise.uniform() >= self._corrupt or size == 0:
            return None
        self._stats.corrupted += 1
        return self._noise.next() % size, 1 + self._noise.next() % 255
