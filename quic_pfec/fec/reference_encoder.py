"""Encoder in plain Python: the twin of `quic_pfec._codec.Encoder`, with its arena and the cutting of units.

Slots handed out for writing are a buffer of their own until they are committed: nothing that a caller keeps can reach a
symbol afterwards.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn, final

from quic_pfec.fec.coefficients import MAX_SPAN, check_header, expand
from quic_pfec.fec.field import Buffer, added, scaled
from quic_pfec.wire.limits import MAX_FRAGMENTS, UNIT_HEADER_SIZE

__all__ = ["Arena", "Encoder", "check_range", "scatter_unit"]

_MAX_SYMBOL_SIZE = 65_535
_MAX_CAPACITY = 1 << 24
_MAX_BURST = 64
_MAX_UNIT = 1 << 24


def check_range(value: int, name: str, low: int, high: int) -> int:
    """`value` if it is in low..high, else ValueError."""
    if not low <= value <= high:
        raise ValueError(f"{name} must be in {low}..{high}, not {value}")
    return value


class Arena:
    """Slots of equal size in one bytearray, which refuses to move while a view of it is alive."""

    def __init__(self, symbol_size: int, capacity: int) -> None:
        self.symbol_size = check_range(symbol_size, "symbol_size", 1, _MAX_SYMBOL_SIZE)
        self.capacity = check_range(capacity, "capacity", 1, _MAX_CAPACITY)
        self._memory = bytearray(symbol_size * capacity)

    def check(self, data: Buffer) -> bytes:
        """Return a copy of `data`, which must have the symbol size."""
        symbol = bytes(memoryview(data).cast("B"))
        if len(symbol) != self.symbol_size:
            raise ValueError(f"a symbol has {self.symbol_size} bytes, not {len(symbol)}")
        return symbol

    def view(self, index: int) -> memoryview:
        return memoryview(self._memory)[index * self.symbol_size : (index + 1) * self.symbol_size]

    def read(self, index: int) -> bytes:
        return bytes(self.view(index))

    def write(self, index: int, symbol: bytes) -> None:
        self._memory[index * self.symbol_size : (index + 1) * self.symbol_size] = symbol

    def grow(self, capacity: int) -> None:
        check_range(capacity, "capacity", self.capacity, _MAX_CAPACITY)
        try:
            self._memory.extend(bytes((capacity - self.capacity) * self.symbol_size))
        except BufferError:
            raise ValueError("views of symbols are exported") from None
        self.capacity = capacity


@final
class Encoder:
    """See `quic_pfec._codec.Encoder`."""

    def __init__(self, symbol_size: int, capacity: int) -> None:
        self._arena = Arena(symbol_size, capacity)
        self._count = 0
        self._reserved = bytearray()  # the slots handed out; empty when there are none
        self._run = False
        self._handed: weakref.ref[memoryview] | None = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Encoder cannot be pickled")

    @property
    def symbol_size(self) -> int:
        return self._arena.symbol_size

    @property
    def capacity(self) -> int:
        return self._arena.capacity

    @property
    def count(self) -> int:
        return self._count

    def _check_room(self, slots: int) -> None:
        if self._count == self.capacity:
            raise ValueError(f"all {self.capacity} symbols are taken")
        if slots > self.capacity - self._count:
            raise ValueError(f"{slots} symbols do not fit, {self.capacity - self._count} are left")

    def _take_back(self) -> None:
        """End the view handed out, or ValueError while something made from it lives."""
        view = None if self._handed is None else self._handed()
        try:
            if view is not None:
                view.release()
            self._reserved.append(0)  # refused while a view of it is alive
            self._reserved.pop()
        except BufferError:
            raise ValueError("views of the reserved slots are held") from None
        self._handed = None

    def _hand_out(self, slots: int, run: bool) -> memoryview:
        self._check_room(slots)
        self._take_back()
        self._reserved = bytearray(slots * self.symbol_size)
        self._run = run
        view = memoryview(self._reserved)
        if run:
            view = view.cast("B", (slots, self.symbol_size))
        self._handed = weakref.ref(view)
        return view

    def _accept(self, run: bool) -> int:
        first = self._count
        if not self._reserved or self._run != run:
            raise ValueError("no run is reserved" if run else "no slot is reserved")
        self._take_back()
        size = self.symbol_size
        for start in range(0, len(self._reserved), size):
            self._arena.write(self._count, bytes(self._reserved[start : start + size]))
            self._count += 1
        self._reserved = bytearray()
        return first

    def push(self, data: Buffer) -> int:
        symbol = self._arena.check(data)
        if self._reserved:
            raise ValueError("a reserved slot waits for commit()")
        self._check_room(1)
        self._arena.write(self._count, symbol)
        self._count += 1
        return self._count - 1

    def reserve(self) -> memoryview:
        return self._hand_out(1, False)

    def reserve_run(self, count: int) -> memoryview:
        return self._hand_out(check_range(count, "count", 1, _MAX_CAPACITY), True)

    def commit(self) -> int:
        return self._accept(False)

    def commit_run(self) -> int:
        return self._accept(True)

    def symbol(self, sid: int) -> memoryview:
        if check_range(sid, "sid", 0, 1 << 62) >= self._count:
            raise KeyError(sid)
        return self._arena.view(sid).toreadonly()

    def symbol_into(self, sid: int, out: Any, offset: int) -> None:
        with self._target(out, offset) as target:
            target[:] = self.symbol(sid)

    def _target(self, out: Any, offset: int) -> memoryview:
        view = memoryview(out)
        if view.readonly or not view.c_contiguous:
            raise ValueError("cannot be written to: read-only or not contiguous")
        view = view.cast("B")
        if not 0 <= offset <= len(view) - self.symbol_size:
            raise ValueError(f"{len(view)} bytes have no room for a symbol of {self.symbol_size} at {offset}")
        return view[offset : offset + self.symbol_size]

    def gather(self, first_sid: int, nbytes: int) -> bytes:
        payload = self.symbol_size - UNIT_HEADER_SIZE
        check_range(nbytes, "nbytes", 1, MAX_FRAGMENTS * _MAX_SYMBOL_SIZE)
        if payload < 1:
            raise ValueError("symbols without room behind the unit header")
        symbols = [self.symbol(sid) for sid in range(first_sid, first_sid - -nbytes // payload)]
        return b"".join(symbol[UNIT_HEADER_SIZE:] for symbol in symbols)[:nbytes]

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
    ) -> bytes:
        header = (transfer_id, repair_number, first_sid, degree, head_span, head, tail_offset, tail_span)
        check_header(*header, max_degree=max(degree, 1), max_span=MAX_SPAN, end=self._count)
        symbol = bytes(self.symbol_size)
        for sid, coefficient in expand(*header):
            symbol = added(symbol, scaled(self._arena.read(sid), coefficient))
        return symbol

    def repair_into(
        self,
        transfer_id: int,
        repair_number: int,
        first_sid: int,
        degree: int,
        head_span: int,
        head: bytes,
        tail_offset: int,
        tail_span: int,
        out: Any,
        offset: int,
    ) -> None:
        header = (transfer_id, repair_number, first_sid, degree, head_span, head, tail_offset, tail_span)
        with self._target(out, offset) as target:
            target[:] = self.repair(*header)

    def repairs(
        self,
        count: int,
        transfer_id: int,
        repair_number: int,
        first_sid: int,
        degree: int,
        head_span: int,
        head: bytes,
        tail_offset: int,
        tail_span: int,
    ) -> list[bytes]:
        numbers = range(repair_number, repair_number + check_range(count, "count", 1, _MAX_BURST))
        rest = (first_sid, degree, head_span, head, tail_offset, tail_span)
        check_header(transfer_id, numbers[-1], *rest, max_degree=max(degree, 1), max_span=MAX_SPAN, end=self._count)
        return [self.repair(transfer_id, number, *rest) for number in numbers]


def scatter_unit(run: Any, first: int, unit: int, body: Buffer, tail: Buffer = b"") -> int:
    """See `quic_pfec._codec.scatter_unit`."""
    check_range(unit, "unit", 0, _MAX_UNIT - 1)
    check_range(first, "first", 0, _MAX_CAPACITY)
    rows = memoryview(run)
    if rows.readonly:
        raise ValueError("cannot be written to")
    if rows.ndim != 2 or rows.itemsize != 1 or not rows.c_contiguous:
        raise ValueError("symbols are the rows of a two-dimensional array of bytes")
    slots, size = rows.shape or (0, 0)
    payload = size - UNIT_HEADER_SIZE
    if payload < 1:
        raise ValueError("symbols without room behind the unit header")
    data = bytes(memoryview(body).cast("B")) + bytes(memoryview(tail).cast("B"))
    count = -(-len(data) // payload)
    if not 1 <= count <= MAX_FRAGMENTS:
        raise ValueError(f"a unit of {len(data)} bytes does not make 1 to {MAX_FRAGMENTS} symbols of {size}")
    if first + count > slots:
        raise ValueError(f"{count} symbols from {first} on do not fit {slots}")
    flat = rows.cast("B")
    for fragment in range(count):
        start = (first + fragment) * size
        part = data[fragment * payload : (fragment + 1) * payload]
        header = (unit << 8 | fragment).to_bytes(UNIT_HEADER_SIZE, "big")
        flat[start : start + size] = header + part.ljust(payload, b"\0")
    return count
