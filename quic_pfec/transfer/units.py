"""Symbols back to units: which fragment of which unit has arrived.

A unit (a KV block) is opaque here: a number of bytes. What a finished unit means is the sink's affair. The table is
shared: the codec's Intake files the symbols that are plain, a batch in one call, and this module the others.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from quic_pfec.fec.codec import Intake
from quic_pfec.wire.frames import UNIT_HEADER_SIZE, unpack_unit_header

DIGEST_SIZE = 8


class UnitSink(Protocol):
    """Takes finished units. Returns False if the unit is no good (digest, non-finite values): it counts as missing."""

    def write_unit(self, unit: int, data: bytes) -> bool: ...


class DigestSink:
    """Checks each unit's digest and keeps nothing: for transfers whose bytes nobody wants (simulation, tests)."""

    def write_unit(self, unit: int, data: bytes) -> bool:
        body = memoryview(data)
        return xxhash.xxh3_64_intdigest(body[:-DIGEST_SIZE], seed=unit) == int.from_bytes(body[-DIGEST_SIZE:], "little")


class FragmentTaken(ValueError):
    """Another symbol, `sid`, already is the fragment that this one claims to be."""

    def __init__(self, sid: int, reason: str) -> None:
        super().__init__(reason)
        self.sid = sid


class UnitTable:
    """Where each unit's fragments are. unit_sizes: int64 bytes per unit id; symbol_size includes the unit header."""

    def __init__(self, unit_sizes: NDArray[np.int64], symbol_size: int) -> None:
        self.payload = symbol_size - UNIT_HEADER_SIZE
        self.sizes = unit_sizes
        self.fragments: NDArray[np.int64] = -(-unit_sizes // self.payload)
        self.symbols = int(self.fragments.sum())
        self._base = np.concatenate(([0], np.cumsum(self.fragments)))
        self._sid_of: NDArray[np.int32] = np.full(self.symbols, -1, dtype=np.int32)
        self._missing = self.fragments.copy()
        self.complete: NDArray[np.bool_] = np.zeros(len(unit_sizes), dtype=np.bool_)
        self.corrupt: NDArray[np.bool_] = np.zeros(len(unit_sizes), dtype=np.bool_)

    def place(self, sid: int, symbol: memoryview) -> int | None:
        """Files `sid` under the unit its header names. Returns that unit when it has all its fragments now, else None.

        Raises ValueError if the header names no fragment of this transfer, FragmentTaken if another symbol already is
        that fragment.
        """
        unit, fragment = unpack_unit_header(symbol)
        if unit >= len(self.sizes) or fragment >= self.fragments[unit]:
            raise ValueError(f"symbol {sid} names fragment {fragment} of unit {unit}, which does not exist")
        slot = self._base[unit] + fragment
        other = int(self._sid_of[slot])
        if other == sid:
            return None
        if other >= 0:
            raise FragmentTaken(other, f"symbols {other} and {sid} both claim fragment {fragment} of unit {unit}")
        self._sid_of[slot] = sid
        self._missing[unit] -= 1
        return unit if self._missing[unit] == 0 else None

    def withdraw(self, sid: int, symbol: memoryview) -> None:
        """Takes back a symbol that turned out to be wrong; its unit is open again."""
        unit, fragment = unpack_unit_header(symbol)
        if unit < len(self.sizes) and fragment < self.fragments[unit]:
            slot = self._base[unit] + fragment
            if self._sid_of[slot] == sid:
                self._sid_of[slot] = -1
                self._missing[unit] += 1
                self.complete[unit] = self.corrupt[unit] = False

    def present(self, unit: int) -> int:
        """Fragments of `unit` that have arrived."""
        return int(self.fragments[unit] - self._missing[unit])

    def attach(self, intake: Intake) -> None:
        """From now on `intake` files symbols in this table too: those that no rule is about, without a call each."""
        intake.bind(self.sizes, self._base, self._sid_of, self._missing)

    def ranges(self, unit: int) -> list[tuple[int, int]]:
        """The byte ranges (start, stop) of `unit` that came, ascending; neighbours joined."""
        size, base = int(self.sizes[unit]), int(self._base[unit])
        ranges: list[tuple[int, int]] = []
        for fragment, sid in enumerate(self._sid_of[base : base + int(self.fragments[unit])].tolist()):
            if sid < 0:
                continue
            start = fragment * self.payload
            stop = min(size, start + self.payload)
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        return ranges

    def partial_units(self) -> list[int]:
        """Units that have some fragments but not all. One that failed its digest is no good in part either."""
        some = (self._missing < self.fragments) & ~self.complete & ~self.corrupt
        return [int(unit) for unit in np.flatnonzero(some)]
