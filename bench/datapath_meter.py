"""What the ends of `bench.datapath` are told, and how they measure themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

DATAGRAM = 1400
"""Bytes of payload in every packet of every row: a DATAGRAM frame's, a symbol, a plain datagram."""
IDLE_S = 0.5  # without a packet: the rest is lost


@dataclass(frozen=True, slots=True)
class Task:
    """One end of one row. `pps`: to be kept, 0 = as fast as it goes. `library`: aioquic or qh3. `offload`: GSO, GRO."""

    packets: int
    cert: str
    key: str
    seed: int = 1
    repairs: float = 0.0
    pps: float = 0.0
    burst_s: float = 0.001
    fast_path: bool = True
    uvloop: bool = False
    library: str = "aioquic"
    offload: bool = False
    tokens: int = 0
    rate: str = ""


class Meter:
    """CPU time of this process from the first packet to the latest."""

    def __init__(self) -> None:
        self.seen = 0
        self._after_first = 0
        self._first_s = self._last_s = self._first_at_s = self._last_at_s = 0.0

    def count(self, packets: int) -> None:
        self._last_s, self._last_at_s = time.process_time(), time.monotonic()
        if self.seen == 0:  # what the first batch cost lies before the first reading
            self._first_s, self._first_at_s = self._last_s, self._last_at_s
        else:
            self._after_first += packets
        self.seen += packets

    @property
    def idle(self) -> bool:
        """Whether packets came, and none for a while."""
        return self.seen > 0 and time.monotonic() - self._last_at_s > IDLE_S

    async def all_here(self, packets: int) -> None:
        """Waits for that many, or until no more come."""
        while self.seen < packets and not self.idle:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    def figures(self) -> dict[str, float]:
        """packets: those that cpu_s and wall_s cover; seen: all."""
        return {
            "packets": self._after_first,
            "seen": self.seen,
            "cpu_s": self._last_s - self._first_s,
            "wall_s": self._last_at_s - self._first_at_s,
        }


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest of the ascending values that `share` (0..1) of them do not exceed."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
