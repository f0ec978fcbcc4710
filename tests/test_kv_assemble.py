"""quic_pfec.kv.assemble: bit-equal when whole, exactly what came when not, and never anyone else's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.kv import assemble as assemble_module
from quic_pfec.kv.assemble import Assembler
from quic_pfec.kv.layout import LayerShape, Layout
from quic_pfec.kv.units import RAW_DTYPE, KVArrays, digest, non_finite, write_unit
from quic_pfec.wire.errors import LocalError

INFINITY = {"bf16": 0x7F80, "fp16": 0x7C00, "fp32": 0x7F800000}


def finite_arrays(layout: Layout, seed: int) -> KVArrays:
    """Random bits without NaN and infinities, and without zero bytes, so that a hole shows."""
    rng = np.random.default_rng(seed)
    raw = RAW_DTYPE[layout.wire_dtype]

    def bits(shape: LayerShape) -> np.ndarray:
        size = (shape.kv_heads, layout.tokens, shape.head_dim, raw.itemsize)
        return rng.integers(1, 0x70, size, dtype=np.uint8).view(raw)[..., 0]

    return KVArrays(tuple((bits(shape), bits(shape)) for shape in layout.layers), layout.wire_dtype)


def packed_units(layout: Layout, arrays: KVArrays) -> list[np.ndarray]:
    units = [np.empty(layout.unit_nbytes(unit), dtype=np.uint8) for unit in range(layout.unit_count)]
    for unit, out in enumerate(units):
        write_unit(layout, arrays, unit, out)
    return units


layouts = st.builds(
    Layout,
    layers=st.lists(st.builds(LayerShape, st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=4).map(tuple),
    tokens=st.integers(1, 40),
    block_tokens=st.sampled_from([1, 5, 16]),
    wire_dtype=st.sampled_from(sorted(RAW_DTYPE)),
)


@settings(max_examples=60, deadline=None)
@given(layout=layouts, seed=st.integers(0, 2**32 - 1), missing=st.sampled_from(["zero", "mask"]))
def test_whole_caches_are_bit_equal(layout: Layout, seed: int, missing: str) -> None:
    arrays = finite_arrays(layout, seed)
    units = packed_units(layout, arrays)
    assembler = Assembler(layout)
    for unit in np.random.default_rng(seed).permutation(layout.unit_count).tolist():
        assert assembler.write_unit(unit, units[unit])
    assert assembler.complete.all()
    assert all(assembler.layer_complete(layer) for layer in range(len(layout.layers)))
    done = assembler.finish(missing)
    assert done.missing == missing
    assert done.arrays.dtype == layout.wire_dtype
    for layer, (got, sent) in enumerate(zip(done.arrays.layers, arrays.layers, strict=True)):
        assert np.array_equal(got[0], sent[0])
        assert np.array_equal(got[1], sent[1])
        assert got[0].flags.c_contiguous
        assert done.layer_complete(layer)
    assert done.fraction.shape == (len(layout.layers), layout.columns)
    assert (done.fraction == 1.0).all()


def slow_expected(
    layout: Layout, units: list[np.ndarray], came: list[np.ndarray], missing: str
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(keys, values, row_valid) of each layer, element by element from the byte maps of what came."""
    itemsize = RAW_DTYPE[layout.wire_dtype].itemsize
    raw = RAW_DTYPE[layout.wire_dtype]
    result = []
    for layer, shape in enumerate(layout.layers):
        pair = [np.zeros((shape.kv_heads, layout.tokens, shape.head_dim), dtype=raw) for _ in range(2)]
        valid = np.zeros((shape.kv_heads, layout.tokens), dtype=np.bool_)
        for token in range(layout.tokens):
            unit = layer * layout.columns + token // layout.block_tokens
            row = token % layout.block_tokens
            for head in range(shape.kv_heads):
                kept, bad = 0, False
                for which in range(2):
                    for index in range(shape.head_dim):
                        item = ((row * shape.kv_heads + head) * 2 + which) * shape.head_dim + index
                        where = slice(item * itemsize, (item + 1) * itemsize)
                        if all(came[unit][where]):
                            value = units[unit][where].tobytes()
                            pair[which][head, token, index] = np.frombuffer(value, dtype=raw)[0]
                            kept += 1
                            bad |= bool(non_finite(pair[which][head, token, index], layout.wire_dtype))
                valid[head, token] = kept == 2 * shape.head_dim and not bad
                if bad or (missing == "mask" and not valid[head, token]):
                    for array in pair:
                        array[head, token] = 0
        result.append((pair[0], pair[1], valid))
    return result


@settings(max_examples=120, deadline=None)
@given(
    layout=layouts,
    seed=st.integers(0, 2**32 - 1),
    payload=st.integers(1, 40),
    loss=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    poison=st.booleans(),
    missing=st.sampled_from(["zero", "mask"]),
    ahead=st.booleans(),
)
def test_parts_are_what_came_and_nothing_else(
    layout: Layout, seed: int, payload: int, loss: float, poison: bool, missing: str, ahead: bool
) -> None:
    rng = np.random.default_rng(seed)
    whole_rows = ahead and missing == "mask"  # invalid rows dropped unit by unit instead of at the end
    arrays = finite_arrays(layout, seed)
    if poison:
        for keys, _ in arrays.layers:
            keys[rng.integers(keys.shape[0]), rng.integers(keys.shape[1]), rng.integers(keys.shape[2])] = INFINITY[
                layout.wire_dtype
            ]
    units = packed_units(layout, arrays)
    came = []
    assembler = Assembler(layout)
    for unit, data in enumerate(units):
        fragments = [(start, min(start + payload, data.size)) for start in range(0, data.size, payload)]
        present = [fragment for fragment in fragments if rng.random() >= loss]
        got = np.zeros(data.size, dtype=np.bool_)
        for start, stop in present:
            got[start:stop] = True
        whole = bool(got.all())
        if whole and non_finite(data[:-8].view(RAW_DTYPE[layout.wire_dtype]), layout.wire_dtype).any():
            got[:] = False  # a whole unit with a non-finite value is missing altogether
        came.append(got)
        received = np.where(got | whole, data, 0).astype(np.uint8)
        # What lies outside the ranges must not matter, whatever the caller left there.
        if not whole and rng.random() < 0.5:
            received[~got] = 0xA5
        assembler.write_partial(unit, received, present, whole_rows=whole_rows)
        assert assembler.complete[unit] == (whole and got.all())
    fraction = assembler.to_units_map().reshape(-1)
    for unit, got in enumerate(came):
        assert fraction[unit] == pytest.approx(got[:-8].mean(), abs=1e-6)
    done = assembler.finish(missing)
    for layer, (keys, values, valid) in enumerate(slow_expected(layout, units, came, missing)):
        assert np.array_equal(done.arrays.layers[layer][0], keys)
        assert np.array_equal(done.arrays.layers[layer][1], values)
        assert np.array_equal(done.row_valid[layer], valid)
        assert done.layer_complete(layer) == valid.all()


SMALL = Layout((LayerShape(2, 4), LayerShape(1, 8)), tokens=20)


def small() -> tuple[Assembler, KVArrays, list[np.ndarray]]:
    arrays = finite_arrays(SMALL, 1)
    return Assembler(SMALL), arrays, packed_units(SMALL, arrays)


def is_empty(assembler: Assembler) -> bool:
    done = assembler.finish("zero")
    values = any(keys.any() or values.any() for keys, values in done.arrays.layers)
    return not values and not any(valid.any() for valid in done.row_valid)


def test_wrong_digest_is_missing_and_counted() -> None:
    assembler, _, units = small()
    bad = units[0].copy()
    bad[5] ^= 1
    assert not assembler.write_unit(0, bad)
    assert not assembler.write_unit(1, units[0][: units[1].size])  # bytes of another unit
    assert assembler.rejected == 2
    assert not assembler.complete.any()
    assert not assembler.to_units_map().any()
    assert is_empty(assembler)


@pytest.mark.parametrize("wire_dtype", sorted(RAW_DTYPE))
def test_non_finite_unit_is_missing_although_its_digest_is_right(wire_dtype: str) -> None:
    layout = Layout((LayerShape(1, 4),), 3, wire_dtype=wire_dtype)
    arrays = finite_arrays(layout, 2)
    arrays.layers[0][1][0, 2, 3] = INFINITY[wire_dtype] + 1
    assembler = Assembler(layout)
    assert not assembler.write_unit(0, packed_units(layout, arrays)[0])
    assert assembler.rejected == 1
    assert is_empty(assembler)


def test_a_refused_unit_takes_its_earlier_parts_with_it() -> None:
    assembler, _, units = small()
    assembler.write_partial(0, units[0], [(0, 64)])
    assert assembler.to_units_map()[0, 0] > 0
    bad = units[0].copy()
    bad[-1] ^= 1
    assert not assembler.write_unit(0, bad)
    assert is_empty(assembler)


def test_a_later_part_replaces_an_earlier_one_and_a_complete_unit_stays() -> None:
    assembler, arrays, units = small()
    assembler.write_partial(0, units[0], [(0, 64)])
    assembler.write_partial(0, units[0], [(64, 128)])
    assert assembler.row_valid[0][:, :4].tolist() == [[False, False, True, True]] * 2
    assert assembler.write_unit(0, units[0])
    assembler.write_partial(0, np.zeros_like(units[0]), [(0, 8)])
    assert assembler.write_unit(0, np.zeros_like(units[0]))  # not looked at any more
    assert assembler.to_units_map()[0, 0] == 1.0
    done = assembler.finish("mask")
    assert np.array_equal(done.arrays.layers[0][0][:, :16], arrays.layers[0][0][:, :16])
    assert not done.arrays.layers[0][0][:, 16:].any()


def test_all_values_without_the_digest_are_rows_but_not_a_complete_unit() -> None:
    assembler, _, units = small()
    assembler.write_partial(0, units[0], [(0, units[0].size - 8)])
    assert not assembler.complete[0]
    assert assembler.row_valid[0][:, :16].all()
    assert assembler.to_units_map()[0, 0] == 1.0


def test_modes_differ_as_stated() -> None:
    # One row of one head is 2 x 4 elements x 2 B = 16 B; 21 bytes are one row, two elements, and half of a third.
    for missing, kept in (("zero", 10), ("mask", 8)):
        assembler, _, units = small()
        assembler.write_partial(0, units[0], [(0, 21)])
        keys, values = assembler.finish(missing).arrays.layers[0]
        assert np.count_nonzero(keys) + np.count_nonzero(values) == kept
        assert assembler.row_valid[0].sum() == 1


def test_layer_complete() -> None:
    assembler, _, units = small()
    for unit in (0, 1, 2):
        assembler.write_unit(unit, units[unit])
    assert assembler.layer_complete(0)
    assert not assembler.layer_complete(1)


def test_nothing_of_another_request_shows_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Canary: every allocation that is not asked to be zero comes back full of a previous tenant's bytes."""
    canary = 0x5A
    empty = np.empty

    def dirty(*args: Any, **kwargs: Any) -> np.ndarray:
        array = empty(*args, **kwargs)
        array.view(np.uint8).fill(canary)
        return array

    class DirtyNumpy:
        empty = staticmethod(dirty)
        empty_like = staticmethod(lambda other, **kwargs: dirty(other.shape, kwargs.get("dtype", other.dtype)))

        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

    monkeypatch.setattr(assemble_module, "np", DirtyNumpy())
    layout = Layout((LayerShape(2, 64),) * 3, tokens=200)
    units = packed_units(layout, finite_arrays(layout, 4))
    for missing in ("zero", "mask"):
        # Freed blocks of the very sizes that the assembler asks for, full of the pattern.
        freed = [np.full((2, 200, 64), canary * 0x101, dtype=np.uint16) for _ in range(64)]
        freed_units = [np.full(units[0].size, canary, dtype=np.uint8) for _ in range(64)]
        del freed, freed_units
        assembler = Assembler(layout)
        assembler.write_unit(0, units[0])
        assembler.write_partial(1, units[1], [(100, 333), (700, 701)])
        bad = units[2].copy()
        bad[0] ^= 1
        assembler.write_unit(2, bad)
        done = assembler.finish(missing)
        keys, values = done.arrays.layers[0]
        assert not keys[:, 32:].any()
        assert not values[:, 32:].any()
        assert not done.row_valid[0][:, 32:].any()
        came = (333 - 100) // 2
        assert np.count_nonzero(keys[:, 16:32]) + np.count_nonzero(values[:, 16:32]) <= came
        for keys, values in done.arrays.layers[1:]:
            assert not keys.any()
            assert not values.any()


def test_misuse_is_refused() -> None:
    assembler, _, units = small()
    with pytest.raises(LocalError, match="no unit 4"):
        assembler.write_unit(4, units[0])
    with pytest.raises(LocalError, match="bytes, got"):
        assembler.write_unit(0, units[0][:-1])
    with pytest.raises(LocalError, match="bytes, got"):
        assembler.write_partial(0, units[0][:-1], [])
    for ranges in ([(0, units[0].size + 1)], [(-1, 4)], [(8, 4)], [(0, 8), (4, 12)], [(8, 12), (0, 4)]):
        with pytest.raises(LocalError, match="out of order or outside"):
            assembler.write_partial(0, units[0], ranges)
    with pytest.raises(LocalError, match="unknown mode 'recompute'"):
        assembler.finish("recompute")
    assembler.finish("zero")
    with pytest.raises(LocalError, match="finished"):
        assembler.finish("mask")
    with pytest.raises(LocalError, match="finished"):
        assembler.write_unit(0, units[0])
    with pytest.raises(LocalError, match="finished"):
        assembler.write_partial(0, units[0], [])


def test_empty_ranges_write_nothing() -> None:
    assembler, _, units = small()
    assembler.write_partial(0, units[0], [(3, 3)])
    assembler.write_partial(1, units[1], [])
    assembler.write_partial(2, units[2], [(units[2].size - 8, units[2].size)])  # the digest alone
    assert not assembler.to_units_map().any()
    assert is_empty(assembler)


def test_ranges_that_cover_the_unit_are_checked_as_a_whole() -> None:
    assembler, _, units = small()
    assembler.write_partial(0, units[0], [(0, 30), (30, units[0].size)])
    assert assembler.complete[0]
    bad = units[1].copy()
    bad[3] ^= 1
    assembler.write_partial(1, bad, [(0, bad.size)])
    assert not assembler.complete[1]
    assert assembler.rejected == 1
    assert bad[-8:].tobytes() != digest(1, bad[:-8])
