"""Units after the freeze: judged as before it, given out as rows, and never written where somebody reads."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from quic_pfec.kv.assemble import Assembler
from quic_pfec.kv.late import LateRows, LateUnits
from quic_pfec.kv.layout import LayerShape, Layout
from quic_pfec.kv.units import KVArrays
from quic_pfec.wire.errors import LocalError
from tests.test_kv_assemble import finite_arrays, packed_units

SHAPES = (LayerShape(2, 4), LayerShape(1, 6))
PLAIN = Layout(SHAPES, 40, wire_dtype="bf16")


def frozen_in_the_middle(layout: Layout, units: list[np.ndarray], came: list[int], dtype: str = "fp32") -> Assembler:
    assembler = Assembler(layout, dtype)
    for unit in came:
        assert assembler.write_unit(unit, units[unit])
    return assembler


def put(into: list[tuple[np.ndarray, np.ndarray]], rows: list[LateRows]) -> None:
    for late in rows:
        keys, values = into[late.layer]
        keys[:, late.start : late.stop] = late.keys
        values[:, late.start : late.stop] = late.values


def quantised(layout: Layout) -> list[np.ndarray]:
    arrays = KVArrays(
        tuple(
            tuple(
                np.random.default_rng(7).normal(size=(shape.kv_heads, 40, shape.head_dim)).astype("f4").view("u4")
                for _ in range(2)
            )
            for shape in SHAPES
        ),  # type: ignore[arg-type]
        "fp32",
    )
    return packed_units(layout, arrays)


@pytest.mark.parametrize("wire_dtype", ["bf16", "int8", "int4", "progressive"])
def test_what_came_on_time_and_what_came_late_make_the_whole(wire_dtype: str) -> None:
    layout = Layout(SHAPES, 40, wire_dtype=wire_dtype)
    units = packed_units(layout, finite_arrays(layout, 3)) if wire_dtype == "bf16" else quantised(layout)
    order = np.random.default_rng(1).permutation(layout.unit_count).tolist()
    early, later = order[: len(order) // 2], order[len(order) // 2 :]
    whole = frozen_in_the_middle(layout, units, order)
    cut = frozen_in_the_middle(layout, units, early)
    late = LateUnits(cut)
    shown = [(keys.copy(), values.copy()) for keys, values in cut.finish("mask").arrays.layers]
    before = [(keys.copy(), values.copy()) for keys, values in shown]
    for unit in later:
        assert late.write_unit(unit, units[unit])
    assert bool(late.complete.all())
    rows = late.take()
    assert late.take() == []
    for pair, same in zip(cut.arrays.layers, before, strict=True):  # nobody wrote to what is being read
        assert all(np.array_equal(one, other) for one, other in zip(pair, same, strict=True))
    put(shown, rows)
    for pair, wanted in zip(shown, whole.arrays.layers, strict=True):
        assert all(np.array_equal(one, other) for one, other in zip(pair, wanted, strict=True))


def test_units_are_judged_and_taken_once() -> None:
    units = packed_units(PLAIN, finite_arrays(PLAIN, 3))
    late = LateUnits(frozen_in_the_middle(PLAIN, units, [0]))
    broken = units[1].copy()
    broken[3] ^= 1
    assert not late.write_unit(1, broken)
    assert late.rejected == 1
    assert late.write_unit(0, units[0])  # came before the freeze: nothing to give out
    assert late.write_unit(2, units[2])
    assert late.write_unit(2, units[2])
    with pytest.raises(LocalError):
        late.write_unit(1, units[1][:-1])
    (row,) = late.take()
    assert (row.unit, row.layer, row.start, row.stop, row.dtype) == (2, 0, 32, 40, "fp32")
    assert not late.complete[1]


def test_rows_do_not_share_the_buffer_they_came_in() -> None:
    units = packed_units(PLAIN, finite_arrays(PLAIN, 3))
    late = LateUnits(Assembler(PLAIN))
    buffer = units[0].copy()
    late.write_unit(0, buffer)
    (row,) = late.take()
    kept = row.keys.copy()
    buffer[:] = 0
    assert np.array_equal(row.keys, kept)


def test_closed_it_keeps_nothing_but_rows_that_wait() -> None:
    layout = Layout(SHAPES, 40, wire_dtype="progressive")
    units = quantised(layout)
    late = LateUnits(frozen_in_the_middle(layout, units, [0]))
    late.write_unit(1, units[1])
    assert not late.closed
    late.close()
    late.close()
    assert late.closed
    assert not late._waiting
    assert [row.unit for row in late.take()] == [1]


def test_another_thread_takes_every_row_once() -> None:
    units = packed_units(PLAIN, finite_arrays(PLAIN, 3))
    late = LateUnits(Assembler(PLAIN))
    got: list[int] = []

    def reader() -> None:
        while len(got) < PLAIN.unit_count:
            got.extend(row.unit for row in late.take())

    thread = threading.Thread(target=reader, daemon=True)
    thread.start()
    for unit in range(PLAIN.unit_count):
        late.write_unit(unit, units[unit])
    thread.join(30)
    assert got == list(range(PLAIN.unit_count))
