"""What a receiver reports: events to act on, and the counters of one transfer."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Event", "Frozen", "LateOver", "ManifestReceived", "ReceiverStats", "UnitReceived"]


@dataclass(frozen=True, slots=True)
class ManifestReceived:
    """All bytes of the manifest are here; the shell decodes it and calls `accept`, or refuses."""

    data: bytes


@dataclass(frozen=True, slots=True)
class UnitReceived:
    """A unit is complete and its sink took it."""

    unit: int


@dataclass(frozen=True, slots=True)
class Frozen:
    """The transfer is over for the receiver: at its deadline, or early because everything is known."""

    complete: bool


@dataclass(frozen=True, slots=True)
class LateOver:
    """A frozen transfer takes no more symbols: its time is up, or everything is known. Its arena is free."""


Event = ManifestReceived | UnitReceived | Frozen | LateOver


@dataclass(slots=True)
class ReceiverStats:
    """Counters of one transfer, in symbols unless said."""

    source: int = 0
    duplicate: int = 0
    recovered: int = 0
    repairs_useful: int = 0
    repairs_useless: int = 0
    repairs_dropped: int = 0
    late: int = 0
    repairs_late: int = 0
    contradictions: int = 0
    corrupt_units: int = 0
    misplaced: int = 0
    feedback: int = 0
