"""The way of received packets into a decoder and into units: the twin of `quic_pfec._codec.Intake`.

What is plain is done here, one packet after the other, and whatever calls for a judgement stops the batch untouched:
the rules of the protocol are the receiver's affair and stand there once.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn, final

import numpy as np
from numpy.typing import NDArray

from quic_pfec.fec.outcome import RepairOutcome, SourceOutcome
from quic_pfec.wire.limits import MAX_FRAGMENTS, UNIT_HEADER_SIZE

__all__ = ["INTAKE_CONTRADICTS", "INTAKE_END", "INTAKE_ODD", "Intake"]

INTAKE_END: Final = -1
INTAKE_ODD: Final = -2
INTAKE_CONTRADICTS: Final = -3


@final
class Intake:
    """See `quic_pfec._codec.Intake`. Works with a decoder of either kind."""

    def __init__(self, decoder: Any, useless_repairs: int) -> None:
        if not 0 <= useless_repairs < 1 << 31:
            raise ValueError("useless_repairs is out of range")
        self.most_useless = self.useless_left = useless_repairs
        self.highest = 0
        self._decoder = decoder
        self._counts = [0] * 5
        self._urgent = False
        self._sizes: NDArray[np.int64] | None = None
        self._base: NDArray[np.int64]
        self._sid_of: NDArray[np.int32]
        self._missing: NDArray[np.int64]

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Intake cannot be pickled")

    def bind(
        self,
        sizes: NDArray[np.int64],
        base: NDArray[np.int64],
        sid_of: NDArray[np.int32],
        missing: NDArray[np.int64],
    ) -> None:
        payload = self._decoder.symbol_size - UNIT_HEADER_SIZE
        units = len(sizes)
        if payload < 1:
            raise ValueError("symbols without room behind the unit header")
        if not units or len(base) != units + 1 or len(missing) != units or base[0] or base[-1] != len(sid_of):
            raise ValueError("the arrays do not belong together")
        for unit, (size, count) in enumerate(zip(sizes.tolist(), np.diff(base).tolist(), strict=True)):
            if not (1 <= count <= MAX_FRAGMENTS and (count - 1) * payload < size <= count * payload):
                raise ValueError(f"unit {unit} of {size} bytes does not make {count} symbols")
        self._sizes, self._base, self._sid_of, self._missing = sizes, base, sid_of, missing

    def take(self, packets: list[Any], start: int, end: int) -> tuple[int, int]:
        for at in range(start, len(packets)):
            what = self._one(packets[at], min(end, self._decoder.capacity))
            if what == INTAKE_ODD:
                return at, what
            if what != INTAKE_END:
                return at + 1, what
        return max(start, len(packets)), INTAKE_END

    def _one(self, packet: Any, end: int) -> int:
        if not isinstance(packet, tuple) or len(packet) not in (2, 9):
            return INTAKE_ODD
        try:
            data = bytes(memoryview(packet[-1]).cast("B"))
        except TypeError:
            return INTAKE_ODD
        if len(data) != self._decoder.symbol_size:
            return INTAKE_ODD
        return self._source(packet[0], data, end) if len(packet) == 2 else self._repair(packet[:8], data, end)

    def _source(self, sid: Any, data: bytes, end: int) -> int:
        decoder = self._decoder
        if not isinstance(sid, int) or not 0 <= sid < end:
            return INTAKE_ODD
        if decoder.known(sid):
            if decoder.symbol(sid) != data:
                return INTAKE_ODD
            decoder.source(sid, data)
            self._counts[1] += 1
            return INTAKE_END
        unit, at = self._place_of(data)
        if self._sizes is not None and (at < 0 or self._sid_of[at] >= 0):
            return INTAKE_ODD
        if decoder.source(sid, data) != SourceOutcome.NEW:
            raise RuntimeError("an unknown symbol was not new")
        self._counts[0] += 1
        self._earn()
        self._urgent |= sid > self.highest
        self.highest = max(self.highest, sid + 1)
        return INTAKE_END if self._sizes is None else self._file(sid, unit, at)

    def _repair(self, header: tuple[Any, ...], data: bytes, end: int) -> int:
        *fields, head, tail_offset, tail_span = header
        fields += [tail_offset, tail_span]
        if not isinstance(head, bytes) or not all(isinstance(value, int) and 0 <= value <= 1 << 62 for value in fields):
            return INTAKE_ODD
        if header[2] + header[4] + header[6] + header[7] > end:
            return INTAKE_ODD
        if self.useless_left <= 0:
            self._counts[4] += 1
            return INTAKE_END
        try:
            outcome = self._decoder.repair(*header, data)
        except ValueError:
            return INTAKE_ODD
        match outcome:
            case RepairOutcome.INNOVATIVE:
                self._counts[2] += 1
                self._earn()
            case RepairOutcome.REDUNDANT:
                self._counts[3] += 1
                self.useless_left -= 1
            case RepairOutcome.TOO_COSTLY:
                self._counts[4] += 1
            case _:
                return INTAKE_CONTRADICTS
        return INTAKE_END

    def _earn(self) -> None:
        self.useless_left = min(self.most_useless, self.useless_left + 1)

    def _place_of(self, symbol: bytes | memoryview) -> tuple[int, int]:
        """Unit and index into sid_of of the fragment that a symbol claims to be; -1 if there is no such fragment."""
        unit, fragment = int.from_bytes(symbol[:3], "big"), symbol[3]
        if self._sizes is None or unit >= len(self._sizes):
            return unit, -1
        at = int(self._base[unit]) + fragment
        return unit, at if at < self._base[unit + 1] else -1

    def _file(self, sid: int, unit: int, at: int) -> int:
        self._sid_of[at] = sid
        self._missing[unit] -= 1
        return unit if self._missing[unit] == 0 else INTAKE_END

    def place(self, sids: list[int], start: int) -> tuple[int, int]:
        if self._sizes is None:
            raise ValueError("no units are bound")
        for index in range(start, len(sids)):
            sid = sids[index]
            unit, at = self._place_of(self._decoder.symbol(sid))
            if at < 0 or (self._sid_of[at] >= 0 and self._sid_of[at] != sid):
                return index, INTAKE_ODD
            if self._sid_of[at] < 0 and (what := self._file(sid, unit, at)) != INTAKE_END:
                return index + 1, what
        return max(start, len(sids)), INTAKE_END

    def collect(self, unit: int) -> bytes:
        if self._sizes is None:
            raise ValueError("no units are bound")
        if not 0 <= unit < len(self._sizes):
            raise ValueError(f"unit must be in 0..{len(self._sizes) - 1}, not {unit}")
        blank = bytes(self._decoder.symbol_size)
        sids = self._sid_of[int(self._base[unit]) : int(self._base[unit + 1])].tolist()
        parts = (blank if sid < 0 else self._decoder.symbol(sid) for sid in sids)
        return b"".join(part[UNIT_HEADER_SIZE:] for part in parts)[: int(self._sizes[unit])]

    def counts(self) -> tuple[int, int, int, int, int, bool]:
        source, duplicate, useful, useless, dropped = self._counts
        urgent = self._urgent
        self._counts = [0] * 5
        self._urgent = False
        return source, duplicate, useful, useless, dropped, urgent
