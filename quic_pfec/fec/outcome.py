"""What the decoder says about one packet, as enums whose values are the integers that both codecs return."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["RepairOutcome", "SourceOutcome"]


class SourceOutcome(IntEnum):
    """Result of `Decoder.source`."""

    NEW = 0
    """The symbol was unknown and is known now."""
    DUPLICATE = 1
    """Known already, received or decoded, with the same bytes."""
    CONFLICT = 2
    """Received before with other bytes. Nothing changed; the peer breaks the protocol."""
    REPLACED = 3
    """Decoded before with other bytes: the received ones stand, and every repair held was discarded with its rank."""


class RepairOutcome(IntEnum):
    """Result of `Decoder.repair`."""

    INNOVATIVE = 0
    """Held; the rank grew by one."""
    REDUNDANT = 1
    """Says nothing new; dropped without payload work."""
    TOO_COSTLY = 2
    """Dropped because of a limit: unknown columns, row operations or memory. Nothing but counters changed."""
    CONTRADICTS = 3
    """Disagrees with a received symbol. Seen only where the look is free: a repair of one received symbol."""
