"""What became of each incoming hand-off, one line of the log: the operator of a server sees nothing else of them.

A line says who sent, which model's cache, how much came and how long it took, or why it was refused. It never holds
token ids or text, prompts and generated ones included. How much of the utility came (J) only the sender knows.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Entry", "Journal"]

logger = logging.getLogger("quic_pfec.handoffs")

LINES_PER_S = 50.0  # a peer that opens one refused hand-off after the other must not fill the disk
BURST_LINES = 200.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One hand-off, later turn or credential check that is over.

    outcome: what became of it; reason: why, if it was refused or failed. tokens: of the context that was sent;
    generated: new ones. received_s, total_s: from its first bytes to the freeze (None = there was none) and to its end.
    """

    peer: str
    kind: Literal["hand-off", "later turn", "credential check"]
    outcome: Literal["complete", "partial", "served", "accepted", "refused", "failed", "given up"]
    total_s: float
    reason: str = ""
    model: str = ""
    tokens: int = 0
    blocks_complete: int = 0
    blocks_total: int = 0
    received_s: float | None = None
    generated: int = 0

    def line(self) -> str:
        """For people."""
        parts = [f"{self.peer} {self.kind} {self.outcome}"]
        if self.reason:
            parts[0] += f": {self.reason}"
        if self.received_s is not None:
            parts.append(f"{self.blocks_complete} of {self.blocks_total} blocks after {self.received_s:.3f} s")
        if self.tokens:
            parts.append(f"{self.tokens} tokens of model {self.model}")
        if self.generated:
            parts.append(f"{self.generated} generated")
        parts.append(f"over after {self.total_s:.3f} s")
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


class Journal:
    """Writes entries to the logger `quic_pfec.handoffs`, so many a second and no more. `now`: seconds, any origin.

    The entry itself travels as the attribute `entry` of the log record.
    """

    def __init__(self) -> None:
        self.unwritten = 0
        """Entries since the last line for which there was no room."""
        self._room = BURST_LINES
        self._last_s: float | None = None

    def note(self, entry: Entry, now: float) -> None:
        if self._last_s is not None:
            self._room = min(BURST_LINES, self._room + (now - self._last_s) * LINES_PER_S)
        self._last_s = now
        if self._room < 1:
            self.unwritten += 1
            return
        self._room -= 1
        if self.unwritten:
            logger.warning("%d hand-offs ended without a line: too many in a short time", self.unwritten)
            self.unwritten = 0
        logger.info("%s", entry.line(), extra={"entry": entry})
