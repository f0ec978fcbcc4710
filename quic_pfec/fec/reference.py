"""Decoder in plain Python, and with the Encoder beside it the specification that the native codec is tested against.

Same names, arguments, results and errors as `quic_pfec._codec`, by the most direct method there is: every held repair
carries its payload through exact Gauss-Jordan elimination over dictionaries. It chooses pivots as the native decoder
does, so that also the row operations can be compared; `payload_macs` counts its own, larger, payload work.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, final

from quic_pfec.fec.coefficients import MAX_SPAN, check_header, expand
from quic_pfec.fec.field import PRODUCTS, Buffer, added, inverse, multiply, scaled
from quic_pfec.fec.outcome import RepairOutcome, SourceOutcome
from quic_pfec.fec.reference_encoder import Arena, Encoder, check_range, scatter_unit
from quic_pfec.fec.reference_intake import INTAKE_CONTRADICTS, INTAKE_END, INTAKE_ODD, Intake

__all__ = [
    "INTAKE_CONTRADICTS",
    "INTAKE_END",
    "INTAKE_ODD",
    "Decoder",
    "Encoder",
    "Intake",
    "inverse",
    "isa",
    "isa_levels",
    "multiply",
    "scatter_unit",
]

_MAX_UNKNOWN = 4_096


def isa() -> str:
    """Name of the arithmetic in use: "python"."""
    return "python"


def isa_levels() -> list[str]:
    """Names that `isa` can take: one."""
    return ["python"]


@dataclass(slots=True, eq=False)
class _Row:
    """One equation: the sum of coefficient * symbol over `terms` (SID -> nonzero coefficient) is `payload`."""

    terms: dict[int, int]
    payload: bytes
    pivot: int = -1

    @property
    def determined(self) -> bool:
        return len(self.terms) == 1

    def add(self, other: _Row, c: int) -> None:
        """self += c * other."""
        for sid, coefficient in other.terms.items():
            value = self.terms.get(sid, 0) ^ PRODUCTS[c][coefficient]
            if value:
                self.terms[sid] = value
            else:
                del self.terms[sid]
        self.payload = added(self.payload, scaled(other.payload, c))


class _Exclusive:
    """Context in which an object belongs to one thread; a second entry raises RuntimeError."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("the decoder is in use by another thread")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@final
class Decoder:
    """See `quic_pfec._codec.Decoder`."""

    def __init__(
        self,
        symbol_size: int,
        capacity: int,
        *,
        max_unknown: int = 512,
        max_degree: int = 255,
        max_span: int = 4096,
        row_ops_per_repair: int = 1024,
    ) -> None:
        self._max_unknown = check_range(max_unknown, "max_unknown", 1, _MAX_UNKNOWN)
        self._max_degree = check_range(max_degree, "max_degree", 1, MAX_SPAN)
        self._max_span = check_range(max_span, "max_span", 1, MAX_SPAN)
        self._row_ops_per_repair = check_range(row_ops_per_repair, "row_ops_per_repair", 0, 0x7FFFFFFF)
        self._arena = Arena(symbol_size, capacity)
        self._rows: list[_Row] = []
        self._known: set[int] = set()
        self._received: set[int] = set()
        self._prefix = 0
        self._highest = 0
        self._counters = dict.fromkeys(
            (
                "redundant",
                "rejected",
                "row_operations",
                "payload_macs",
                "recovered",
                "contradictions",
                "discarded",
                "compactions",
            ),
            0,
        )
        self._exclusive = _Exclusive()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Decoder cannot be pickled")

    # Rows

    def _add(self, row: _Row, other: _Row, c: int) -> None:
        row.add(other, c)
        self._counters["row_operations"] += 1
        self._counters["payload_macs"] += 1

    def _set_pivot(self, row: _Row, pivot: int) -> None:
        """Scale the pivot of `row` to 1 and clear it in every other row."""
        c = inverse(row.terms[pivot])
        row.terms = {sid: multiply(coefficient, c) for sid, coefficient in row.terms.items()}
        row.payload = scaled(row.payload, c)
        row.pivot = pivot
        for other in self._rows:
            if other is not row and pivot in other.terms:
                self._add(other, row, other.terms[pivot])

    def _mark_known(self, sid: int) -> None:
        self._known.add(sid)
        self._highest = max(self._highest, sid + 1)
        while self._prefix in self._known:
            self._prefix += 1

    def _columns(self) -> set[int]:
        return {sid for row in self._rows for sid in row.terms}

    # Events

    def _check_sid(self, sid: int) -> int:
        if not 0 <= sid < self.capacity:
            raise ValueError(f"sid {sid} is not below the capacity {self.capacity}")
        return sid

    def source(self, sid: int, data: Buffer) -> int:
        symbol = self._arena.check(data)
        with self._exclusive:
            return self._source(self._check_sid(sid), symbol)

    def _source(self, sid: int, symbol: bytes) -> int:
        if sid in self._known:
            if self._arena.read(sid) == symbol:
                self._received.add(sid)
                return SourceOutcome.DUPLICATE.value
            if sid in self._received:
                return SourceOutcome.CONFLICT.value
            self._arena.write(sid, symbol)
            self._received.add(sid)
            self._counters["discarded"] += len(self._rows)
            self._rows.clear()
            return SourceOutcome.REPLACED.value
        self._arena.write(sid, symbol)
        self._received.add(sid)
        self._mark_known(sid)
        orphan = None
        for row in self._rows:
            coefficient = row.terms.pop(sid, 0)
            if coefficient:
                row.payload = added(row.payload, scaled(symbol, coefficient))
                self._counters["payload_macs"] += 1
            if row.pivot == sid:
                orphan = row
        if orphan is not None:
            if orphan.terms:
                self._set_pivot(orphan, min(orphan.terms))
            else:
                self._rows.remove(orphan)
        return SourceOutcome.NEW.value

    def repair(
        self,
        transfer_id: int,
        repair_number: int,
        first_sid: int,
        degree: int,
        head_span: int,
        head: bytes,
        tail_offset: int,
        tail_span: int,
        data: Buffer,
    ) -> int:
        header = (transfer_id, repair_number, first_sid, degree, head_span, head, tail_offset, tail_span)
        payload = self._arena.check(data)
        with self._exclusive:
            check_header(*header, max_degree=self._max_degree, max_span=self._max_span, end=self.capacity)
            self._highest = max(self._highest, first_sid + head_span + tail_offset + tail_span)
            return self._repair(dict(expand(*header)), payload).value

    def receive_batch(self, packets: Iterable[tuple[Any, ...]]) -> list[int]:
        held = list(packets)
        for packet in held:
            self._arena.check(packet[-1])
            if len(packet) == 2:
                self._check_sid(packet[0])
            elif len(packet) == 9:
                check_header(*packet[:-1], max_degree=self._max_degree, max_span=self._max_span, end=self.capacity)
            else:
                raise ValueError(f"a packet is (sid, data) or a header of eight and data, not {len(packet)} items")
        return [self.source(*packet) if len(packet) == 2 else self.repair(*packet) for packet in held]

    def _repair(self, terms: dict[int, int], payload: bytes) -> RepairOutcome:
        columns = self._columns()
        unknown = {sid: c for sid, c in terms.items() if sid not in self._known}
        fresh = unknown.keys() - columns
        pivots = {row.pivot: row for row in self._rows}
        present = [pivots[sid] for sid in unknown if sid in pivots]
        if not unknown:
            if len(terms) == 1:
                ((sid, c),) = terms.items()
                if sid in self._received and scaled(self._arena.read(sid), c) != payload:
                    self._counters["contradictions"] += 1
                    return RepairOutcome.CONTRADICTS
            self._counters["redundant"] += 1
            return RepairOutcome.REDUNDANT
        if len(columns) + len(fresh) > self._max_unknown or len(present) > self._row_ops_per_repair:
            self._counters["rejected"] += 1
            return RepairOutcome.TOO_COSTLY
        for sid in terms.keys() - unknown.keys():
            payload = added(payload, scaled(self._arena.read(sid), terms[sid]))
            self._counters["payload_macs"] += 1
        row = _Row(unknown, payload)
        for other in present:
            self._add(row, other, row.terms[other.pivot])
        if not row.terms:
            self._counters["redundant"] += 1
            return RepairOutcome.REDUNDANT
        # A fresh column is in no other row: nothing to clear. Otherwise the oldest unknown.
        pivot = min(fresh or row.terms)
        if len(present) + sum(pivot in other.terms for other in self._rows) > self._row_ops_per_repair:
            self._counters["rejected"] += 1
            return RepairOutcome.TOO_COSTLY
        self._set_pivot(row, pivot)
        self._rows.append(row)
        return RepairOutcome.INNOVATIVE

    def poll(self, max_symbols: int, order: Iterable[int] | None = None, *, max_macs: int | None = None) -> list[int]:
        """As the native one; symbols cost no multiply-add here, so `max_macs` ends no slice."""
        check_range(max_symbols, "max_symbols", 0, 0xFFFFFFFF)
        if max_macs is not None:
            check_range(max_macs, "max_macs", 1, 0xFFFFFFFF)
        if max_symbols == 0 or self.pending == 0:
            return []
        first = [check_range(sid, "sid", 0, 0xFFFFFFFF) for sid in order or ()]
        with self._exclusive:
            determined = {row.pivot: row for row in self._rows if row.determined}
            wanted = dict.fromkeys([*first, *sorted(determined)])
            found = [sid for sid in wanted if sid in determined][:max_symbols]
            for sid in found:
                self._arena.write(sid, determined[sid].payload)
                self._rows.remove(determined[sid])
                self._mark_known(sid)
            self._counters["recovered"] += len(found)
            return found

    def grow(self, capacity: int) -> None:
        with self._exclusive:
            self._arena.grow(capacity)

    # Questions

    def symbol(self, sid: int) -> memoryview:
        if self._check_sid(sid) not in self._known:
            raise KeyError(sid)
        return self._arena.view(sid).toreadonly()

    def known(self, sid: int) -> bool:
        return self._check_sid(sid) in self._known

    def received(self, sid: int) -> bool:
        return self._check_sid(sid) in self._received

    def known_ranges(self, max_ranges: int) -> list[tuple[int, int]]:
        check_range(max_ranges, "max_ranges", 0, 0xFFFFFFFF)
        ranges: list[tuple[int, int]] = []
        for sid in sorted(sid for sid in self._known if sid > self._prefix):
            if ranges and ranges[-1][1] == sid:
                ranges[-1] = (ranges[-1][0], sid + 1)
            elif len(ranges) < max_ranges:
                ranges.append((sid, sid + 1))
            else:
                break
        return ranges

    def known_bitmap(self) -> bytes:
        return sum(1 << sid for sid in self._known).to_bytes((self.capacity + 7) // 8, "little")

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    @property
    def payload_macs(self) -> int:
        return self._counters["payload_macs"]

    @property
    def symbol_size(self) -> int:
        return self._arena.symbol_size

    @property
    def capacity(self) -> int:
        return self._arena.capacity

    @property
    def pending(self) -> int:
        return sum(row.determined for row in self._rows)

    @property
    def prefix(self) -> int:
        return self._prefix

    @property
    def highest(self) -> int:
        return self._highest

    @property
    def deficit(self) -> int:
        return self._highest - len(self._known) - len(self._rows)

    @property
    def unknown_columns(self) -> int:
        return len(self._columns())

    @property
    def rank(self) -> int:
        return len(self._rows)
