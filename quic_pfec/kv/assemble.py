"""Rebuild of a cache from the units that came, whole or in part.

The destination is zero before anything is written and nothing is ever published that did not arrive in this hand-off:
memory that showed through a hole would hand one request's text to another (security section 5). Units are written
to their final place as they complete, so that little is left to do at the deadline. What came is kept element by
element, with the validity of each row beside it: enough for both ways of treating holes, chosen at the end.

- `zero`: an element survives if all its bytes came, all others are 0 (the paper's receiver);
- `mask`: a row of a head survives if its keys and values wholly came, and attention skips all other rows.

In a quantised wire dtype an element has come when its scale has, too. In the progressive one a block is there when its
base is; a refinement that came whole makes it finer, in whichever order the two come, and one that did not is no hole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from quic_pfec.kv.layout import Layout
from quic_pfec.kv.quantise import Form
from quic_pfec.kv.units import (
    RAW_DTYPE,
    BytesLike,
    KVArrays,
    RawArray,
    all_finite,
    byte_view,
    convert,
    digest_ok,
    form_of,
    non_finite,
)
from quic_pfec.wire.errors import LocalError
from quic_pfec.wire.manifest import DIGEST_SIZE

__all__ = [
    "MISSING",
    "AssembledKV",
    "Assembler",
    "Missing",
]

Missing = Literal["zero", "mask"]
MISSING: Final[tuple[str, ...]] = get_args(Missing)


@dataclass(frozen=True, slots=True, eq=False)
class AssembledKV:
    """A cache as it stood at the freeze. Holes are zero in both modes.

    - `arrays`: raw bits in the assembler's dtype; `arrays.convert(dtype)` gives another
    - `row_valid`: per layer bool [kv_heads, tokens]: keys and values of this row came whole; `mask` hides the others
    - `complete`: bool [unit_count]: came whole and its digest is right
    - `fraction`: float32 [layers, columns]: share of each unit's KV bytes that came; for pictures and reports. In the
      progressive form [2 * layers, columns], refinements below
    """

    layout: Layout
    missing: str
    arrays: KVArrays
    row_valid: tuple[npt.NDArray[np.bool_], ...]
    complete: npt.NDArray[np.bool_]
    fraction: npt.NDArray[np.float32]

    def layer_complete(self, layer: int) -> bool:
        """Whether every row of the layer is valid, so that it needs no mask."""
        return bool(self.row_valid[layer].all())


class Assembler:
    """Destination of one hand-off. Not thread-safe; allocates the whole cache, zeroed, on construction.

    `dtype` is what the destination holds, by default the wire dtype, or bf16 if that is quantised. With the dtype the
    model computes in, units are converted while others are still in flight, and nothing is left to convert at the
    freeze.
    """

    __slots__ = (
        "_finished",
        "_forms",
        "_fraction",
        "_keys",
        "_partial",
        "_values",
        "_waiting",
        "complete",
        "dtype",
        "layout",
        "rejected",
        "row_valid",
    )

    def __init__(self, layout: Layout, dtype: str | None = None) -> None:
        self.dtype: Final = dtype or ("bf16" if layout.quantised else layout.wire_dtype)
        if self.dtype not in RAW_DTYPE:
            raise LocalError(f"unknown dtype {dtype!r}, expected one of {', '.join(RAW_DTYPE)}")
        self.layout: Final = layout
        self.complete: npt.NDArray[np.bool_] = np.zeros(layout.unit_count, dtype=np.bool_)
        """Units that came whole with the right digest, bool [unit_count]."""
        self.row_valid: tuple[npt.NDArray[np.bool_], ...] = tuple(
            np.zeros((shape.kv_heads, layout.tokens), dtype=np.bool_) for shape in layout.layers
        )
        """Rows whose keys and values came whole, per layer bool [kv_heads, tokens]."""
        self.rejected = 0
        """Units that came whole and were refused: wrong digest or non-finite values (docs/wire.md §10, row 25)."""
        self._forms = tuple(form_of(layout, layer) for layer in range(len(layout.layers)))
        self._keys = self._zeros()
        self._values = self._zeros()
        self._fraction = np.zeros(layout.unit_count, dtype=np.float32)
        self._partial: set[int] = set()
        self._waiting: dict[int, npt.NDArray[np.uint8]] = {}  # by block, of two units the one that came first
        self._finished: str | None = None

    def write_unit(self, unit: int, data: BytesLike) -> bool:
        """Write a unit of which every byte came, digest included. Returns whether it was accepted.

        A wrong digest, a NaN or infinite value, or a scale that no sender writes makes the whole unit missing: what
        earlier calls wrote of it is zeroed, and `rejected` counts it. A unit that is complete already stays as it is.
        Raises LocalError for a unit or a size that is not the layout's, and after `finish`.
        """
        view = self._checked(unit, data)
        if self.complete[unit]:
            return True
        accepted = digest_ok(unit, view) and self._place_whole(unit, view[:-DIGEST_SIZE])
        if accepted:
            self._fraction[unit] = 1.0
            self.complete[unit] = True
        else:
            self.rejected += 1
            self._fraction[unit] = 0.0
            if self.layout.precision_of(unit) == 0:
                self._clear(unit)
        self._partial.discard(unit)
        return accepted

    @property
    def arrays(self) -> KVArrays:
        """The cache being filled, zeros where nothing came yet. Shares memory with this object and with `finish`."""
        return KVArrays(tuple(zip(self._keys, self._values, strict=True)), self.dtype)

    def write_partial(
        self, unit: int, data: BytesLike, present: Sequence[tuple[int, int]], *, whole_rows: bool = False
    ) -> None:
        """Write what came of an incomplete unit.

        `whole_rows`: only its valid rows, as `finish("mask")` leaves them; it then has nothing to do for this unit.

        `data` has the unit's size; `present` lists the byte ranges [start, stop) that came, ascending and without
        overlap. Bytes outside of them are not looked at. No digest covers a part: the packets' AEAD vouches for it.
        A row of a head with a NaN or infinite value, or with a scale that no sender writes, counts as missing in both
        modes. If the ranges cover the unit,
        this is `write_unit`. Later calls replace earlier ones; a complete unit stays as it is. Raises LocalError for
        ranges outside the unit or out of order, for a wrong unit or size, and after `finish`.
        """
        view = self._checked(unit, data)
        ranges = _merged(present, view.nbytes)
        if ranges == [(0, view.nbytes)]:
            self.write_unit(unit, data)
            return
        if self.complete[unit]:
            return
        layer = self.layout.layer_of(unit)
        source = np.frombuffer(view[:-DIGEST_SIZE], dtype=np.uint8)
        ranges = [(start, min(stop, source.nbytes)) for start, stop in ranges if start < source.nbytes]
        if self.layout.precision_of(unit):
            self._fraction[unit] = sum(stop - start for start, stop in ranges) / source.nbytes
            return
        if self.layout.quantised:
            self._place_coded(unit, layer, source, ranges, whole_rows)
        else:
            self._place_plain(unit, layer, source, ranges, whole_rows)
        self._fraction[unit] = sum(stop - start for start, stop in ranges) / source.nbytes
        if whole_rows:
            self._partial.discard(unit)
        else:
            self._partial.add(unit)

    def _place_plain(
        self, unit: int, layer: int, came: npt.NDArray[np.uint8], ranges: list[tuple[int, int]], whole_rows: bool
    ) -> None:
        source = came.view(RAW_DTYPE[self.layout.wire_dtype])
        itemsize = source.itemsize
        row_items = 2 * self.layout.layers[layer].head_dim
        block = np.zeros(source.size, dtype=source.dtype)
        valid = np.zeros(source.size // row_items, dtype=np.bool_)
        for start, stop in ranges:
            first, last = -(-start // itemsize), stop // itemsize
            block[first:last] = source[first:last]
            valid[-(-first // row_items) : last // row_items] = True
        bad = non_finite(block, self.layout.wire_dtype)
        if bad.any():
            bad_rows = bad.reshape(-1, row_items).any(axis=1)
            block.reshape(-1, row_items)[bad_rows] = 0
            valid[bad_rows] = False
        if whole_rows:
            block.reshape(-1, row_items)[~valid] = 0
        rows = self.layout.rows(unit)
        self._place(unit, block, valid.reshape(rows, -1).T)

    def _place_coded(
        self, unit: int, layer: int, source: npt.NDArray[np.uint8], ranges: list[tuple[int, int]], whole_rows: bool
    ) -> None:
        form = self._forms[layer]
        came = np.zeros(source.size, dtype=np.bool_)
        for start, stop in ranges:
            came[start:stop] = True
        known = form.elements(came[None])[0]
        # Of bytes that did not come nothing is looked at: scales that count as good stand in their place.
        body = np.where(came, source, form.blank(self.layout.rows(unit)))
        known[form.bad_rows(body)] = False
        valid = known.all(axis=(2, 3))
        if whole_rows:
            known &= valid[:, :, None, None]
        keys, values = form.decode(body)
        keys[~known[:, :, 0]] = 0
        values[~known[:, :, 1]] = 0
        self._place_floats(unit, keys, values, valid.T)

    def layer_complete(self, layer: int) -> bool:
        """Whether every unit of the layer is complete."""
        by_layer = self.complete.reshape(len(self.layout.forms), -1, self.layout.columns)
        return bool(by_layer[:, layer].all())

    def to_units_map(self) -> npt.NDArray[np.float32]:
        """Share of each unit's KV bytes that came, float32 as `AssembledKV.fraction`; 0 for refused units. A copy."""
        return self._fraction.reshape(-1, self.layout.columns).copy()

    def finish(self, missing: str) -> AssembledKV:
        """End the hand-off and give the cache out, with its holes treated as `missing` says ("zero" or "mask").

        The result shares memory with this object, which takes no more units. "mask" costs one pass over the partial
        units, "zero" nothing. Raises LocalError for an unknown mode and for a second call.
        """
        if missing not in MISSING:
            raise LocalError(f"unknown mode {missing!r}, expected one of {', '.join(MISSING)}")
        self._check_open()
        self._finished = missing
        self._waiting.clear()
        if missing == "mask":
            self._drop_invalid_rows()
        return AssembledKV(
            layout=self.layout,
            missing=missing,
            arrays=self.arrays,
            row_valid=self.row_valid,
            complete=self.complete,
            fraction=self.to_units_map(),
        )

    def _zeros(self) -> tuple[RawArray, ...]:
        shapes = [(shape.kv_heads, self.layout.tokens, shape.head_dim) for shape in self.layout.layers]
        return tuple(np.zeros(shape, dtype=RAW_DTYPE[self.dtype]) for shape in shapes)

    def _place_whole(self, unit: int, body: memoryview) -> bool:
        """Writes a unit whose digest is right; False, and nothing written, if a value in it cannot be used."""
        if self.layout.quantised:
            form, coded = self._forms[self.layout.layer_of(unit)], np.frombuffer(body, dtype=np.uint8)
            if len(self.layout.forms) > 1:
                return self._place_precision(unit, form, coded)
            if bool(form.bad_rows(coded).any()):
                return False
            self._place_floats(unit, *form.decode(coded), True)
            return True
        block = np.frombuffer(body, dtype=RAW_DTYPE[self.layout.wire_dtype])
        if not all_finite(block, self.layout.wire_dtype):
            return False
        self._place(unit, block, True)
        return True

    def _place_precision(self, unit: int, form: Form, coded: npt.NDArray[np.uint8]) -> bool:
        """Writes a base, or base and refinement once both have come; keeps the one that came first for the other."""
        refines, block = self.layout.precision_of(unit) > 0, unit % self.layout.block_count
        if not refines and bool(form.bad_rows(coded).any()):
            return False
        other = self._waiting.pop(block, None)
        if other is None:
            self._waiting[block] = coded.copy()
        base: npt.NDArray[np.uint8] | None = coded
        finer = other
        if refines:
            base, finer = other, coded
        if base is not None:
            self._place_floats(block, *form.decode(base, finer), True)
        return True

    def _place_floats(
        self,
        unit: int,
        keys: npt.NDArray[np.float32],
        values: npt.NDArray[np.float32],
        valid: npt.NDArray[np.bool_] | bool,
    ) -> None:
        """`keys`, `values`: [rows, kv_heads, head_dim]."""
        layer = self.layout.layer_of(unit)
        start, stop = self.layout.row_range(unit)
        for target, part in ((self._keys, keys), (self._values, values)):
            bits = convert(part.view(np.uint32), "fp32", self.dtype)
            target[layer][:, start:stop] = bits.transpose(1, 0, 2)
        self.row_valid[layer][:, start:stop] = valid

    def _place(self, unit: int, block: RawArray, valid: npt.NDArray[np.bool_] | bool) -> None:
        layer = self.layout.layer_of(unit)
        start, stop = self.layout.row_range(unit)
        shape = self.layout.layers[layer]
        block = convert(block, self.layout.wire_dtype, self.dtype)
        rows = block.reshape(stop - start, shape.kv_heads, 2, shape.head_dim)
        self._keys[layer][:, start:stop] = rows[:, :, 0].transpose(1, 0, 2)
        self._values[layer][:, start:stop] = rows[:, :, 1].transpose(1, 0, 2)
        self.row_valid[layer][:, start:stop] = valid

    def _clear(self, unit: int) -> None:
        layer = self.layout.layer_of(unit)
        start, stop = self.layout.row_range(unit)
        for array in (self._keys[layer], self._values[layer], self.row_valid[layer]):
            array[:, start:stop] = 0

    def _drop_invalid_rows(self) -> None:
        for unit in self._partial:
            layer = self.layout.layer_of(unit)
            start, stop = self.layout.row_range(unit)
            hidden = ~self.row_valid[layer][:, start:stop]
            self._keys[layer][:, start:stop][hidden] = 0
            self._values[layer][:, start:stop][hidden] = 0

    def _checked(self, unit: int, data: BytesLike) -> memoryview:
        self._check_open()
        view = byte_view(data)
        if view.nbytes != self.layout.unit_nbytes(unit):
            raise LocalError(f"unit {unit} has {self.layout.unit_nbytes(unit)} bytes, got {view.nbytes}")
        return view

    def _check_open(self) -> None:
        if self._finished is not None:
            raise LocalError(f"the hand-off is finished ({self._finished}): nothing can be added")


def _merged(present: Sequence[tuple[int, int]], nbytes: int) -> list[tuple[int, int]]:
    """Ranges with touching neighbours joined, so that an element or row across two fragments counts as whole."""
    merged: list[tuple[int, int]] = []
    end = 0
    for start, stop in present:
        if not end <= start <= stop <= nbytes:
            raise LocalError(f"range {start}..{stop} is out of order or outside the unit's {nbytes} bytes")
        end = stop
        if start == stop:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged
