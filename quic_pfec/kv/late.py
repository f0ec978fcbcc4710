"""Units that come after the freeze, on their way into a cache that is in use already: late repair.

The event loop judges and decodes them as it did before the freeze, but must not write to a cache that another thread
reads. So they wait here as rows, and that thread takes them between two decode steps (`kv.patch`). Only whole units are
of use: digest right, values finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np
import numpy.typing as npt

from quic_pfec.kv.assemble import Assembler
from quic_pfec.kv.units import RawArray, convert

__all__ = ["LateRows", "LateUnits"]


@dataclass(frozen=True, slots=True, eq=False)
class LateRows:
    """The rows of one unit: raw bits `[kv_heads, stop - start, head_dim]` in `dtype`, the assembler's.

    unit: a refined block has the id of its base. start, stop: rows of the hand-off, not of the whole context.
    """

    unit: int
    layer: int
    start: int
    stop: int
    keys: RawArray
    values: RawArray
    dtype: str


class LateUnits(Assembler):
    """Takes whole units like the assembler that froze, `frozen`, and gives them out as rows.

    `write_unit` and `close` are for the thread of the event loop, `take` for another one. Each unit is taken once, so
    the rows that wait are never more than the cache, twice that where blocks are refined. Refinements of bases that
    came before the freeze are of use, too.
    """

    __slots__ = ("_closed", "_ready")

    def __init__(self, frozen: Assembler) -> None:
        super().__init__(frozen.layout, frozen.dtype)
        self.complete[:] = frozen.complete
        self._waiting = dict(frozen._waiting)
        self._ready: SimpleQueue[LateRows] = SimpleQueue()
        self._closed = False

    def take(self) -> list[LateRows]:
        """What completed since the last call, in the order of its coming; empty once closed and emptied."""
        rows: list[LateRows] = []
        try:
            while True:
                rows.append(self._ready.get_nowait())
        except Empty:
            return rows

    def close(self) -> None:
        """Nothing more comes, and what was kept for it is free; rows that wait can still be taken. Idempotent."""
        self._closed = True
        self._waiting.clear()

    @property
    def closed(self) -> bool:
        return self._closed

    # where the assembler writes to its destination

    def _zeros(self) -> tuple[RawArray, ...]:
        return ()

    def _clear(self, unit: int) -> None:
        """Nothing of a refused unit was given out."""

    def _place(self, unit: int, block: RawArray, valid: npt.NDArray[np.bool_] | bool) -> None:
        shape = self.layout.layers[self.layout.layer_of(unit)]
        bits = convert(block, self.layout.wire_dtype, self.dtype)
        rows = bits.reshape(self.layout.rows(unit), shape.kv_heads, 2, shape.head_dim)
        self._give(unit, rows[:, :, 0], rows[:, :, 1])

    def _place_floats(
        self,
        unit: int,
        keys: npt.NDArray[np.float32],
        values: npt.NDArray[np.float32],
        valid: npt.NDArray[np.bool_] | bool,
    ) -> None:
        bits = [convert(part.view(np.uint32), "fp32", self.dtype) for part in (keys, values)]
        self._give(unit, *bits)

    def _give(self, unit: int, keys: RawArray, values: RawArray) -> None:
        """keys, values: `[rows, kv_heads, head_dim]`; copied, since they may lie in the caller's buffer."""
        layer = self.layout.layer_of(unit)
        start, stop = self.layout.row_range(unit)
        parts = [np.array(part.transpose(1, 0, 2), order="C") for part in (keys, values)]
        self._ready.put(LateRows(unit, layer, start, stop, parts[0], parts[1], self.dtype))
