"""Records of an evaluation made into tables: a mean and a clustered interval for each cell, the receiver and the wire
dtype fixed for each table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from quic_pfec.llm.quality import Record
from quic_pfec.sim.intervals import Interval, clustered

__all__ = ["Cell", "cells"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of a table. `name`: ranking or scheme; `share`: of blocks kept, or rho; `wire`: of a hand-off, `sent`:
    what "auto" chose. F1, the shares of complete blocks and of those in both precisions where they were measured."""

    arm: str
    receiver: str
    share: float
    name: str
    agreement: Interval
    kl: Interval
    f1: Interval | None
    blocks: Interval | None
    finer: Interval | None = None
    wire: str = ""
    sent: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        head: dict[str, Any] = {"arm": self.arm, "receiver": self.receiver, "share": self.share, "name": self.name}
        head |= {key: value for key, value in (("wire", self.wire), ("sent", self.sent)) if value}
        for key in ("agreement", "kl", "f1", "blocks", "finer"):
            interval: Interval | None = getattr(self, key)
            if interval is not None:
                head[key] = interval.as_dict()
        return head


def cells(records: Iterable[Record], seed: int = 0) -> list[Cell]:
    """All cells, in the order in which they first occur; intervals are clustered by example."""
    grouped: dict[tuple[str, str, float, str, str, str], list[Record]] = {}
    for record in records:
        key = (record.arm, record.receiver, record.share, record.name, record.wire, record.sent)
        grouped.setdefault(key, []).append(record)

    def interval(group: list[Record], value: Callable[[Record], float | None]) -> Interval | None:
        values = [found for found in map(value, group) if found is not None]
        return clustered(values, [record.example for record in group], seed=seed) if len(values) == len(group) else None

    found = []
    for (arm, receiver, share, name, wire, sent), group in grouped.items():
        examples = [record.example for record in group]
        found.append(
            Cell(
                arm=arm,
                receiver=receiver,
                share=share,
                name=name,
                agreement=clustered([record.agreement for record in group], examples, seed=seed),
                kl=clustered([record.kl for record in group], examples, seed=seed),
                f1=interval(group, lambda record: record.f1),
                blocks=interval(group, lambda record: record.blocks),
                finer=interval(group, lambda record: record.finer),
                wire=wire,
                sent=sent,
            )
        )
    return found
