"""quic_pfec.kv.reception: what simulated packets amount to, against the assembler that real ones go through."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.kv.assemble import Assembler
from quic_pfec.kv.layout import LayerShape, Layout
from quic_pfec.kv.prepared import prepare_arrays
from quic_pfec.kv.reception import complete_units, fragments_by_unit, kept_elements, kept_rows, refined_rows
from quic_pfec.kv.units import KVArrays, as_received
from quic_pfec.wire.errors import LocalError
from quic_pfec.wire.limits import UNIT_HEADER_SIZE
from quic_pfec.wire.manifest import QUANTISED


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 70),
    payload=st.sampled_from([61, 131, 256, 300]),
    shapes=st.sampled_from([((2, 8), (2, 8)), ((1, 16), (3, 8))]),
    wire_dtype=st.sampled_from(["bf16", *(name for name in QUANTISED if name != "progressive")]),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_the_assembler(
    tokens: int, payload: int, shapes: tuple[tuple[int, int], ...], wire_dtype: str, seed: int
) -> None:
    """Units are cut, packets dropped, and the rest written as the receiver would: the same elements and rows."""
    rng = np.random.default_rng(seed)
    # No value is zero, nor becomes it: an element that is not zero came.
    arrays = [
        tuple(rng.integers(0x3F00, 0x4000, (heads, tokens, dim), dtype=np.uint16) for _ in range(2))
        for heads, dim in shapes
    ]
    layout = Layout(tuple(LayerShape(*shape) for shape in shapes), tokens, wire_dtype=wire_dtype)
    kv = prepare_arrays(  # type: ignore[arg-type]
        arrays, dtype="bf16", model="m", wire_dtype=wire_dtype, utility=rng.uniform(1, 2, layout.unit_count)
    )
    symbol_size = payload + UNIT_HEADER_SIZE
    known = rng.random(layout.symbols(symbol_size)) < 0.7
    fragments = fragments_by_unit(layout, symbol_size, kv.send_order, known)
    elements = kept_elements(layout, symbol_size, fragments)
    rows = kept_rows(elements)

    zero, mask = Assembler(layout), Assembler(layout)
    counts = layout.fragment_counts(symbol_size)
    for position, unit in enumerate(kv.send_order.tolist()):
        _, data = kv.unit_at(position)
        present = [
            (part * payload, min((part + 1) * payload, len(data)))
            for part in range(int(counts[unit]))
            if fragments[unit, part]
        ]
        for assembler in (zero, mask):
            assembler.write_partial(unit, data, present)
    got, masked = zero.finish("zero"), mask.finish("mask")
    for layer, pair in enumerate(got.arrays.layers):
        for kind in (0, 1):
            assert np.array_equal(pair[kind] != 0, elements[layer][:, :, kind])
        assert np.array_equal(masked.row_valid[layer], rows[layer])


def test_everything_and_nothing() -> None:
    layout = Layout((LayerShape(2, 8),) * 2, 40)
    order = np.arange(layout.unit_count, dtype=np.int32)
    for came in (False, True):
        known = np.full(layout.symbols(100), came)
        fragments = fragments_by_unit(layout, 100, order, known)
        rows = kept_rows(kept_elements(layout, 100, fragments))
        assert [row.shape for row in rows] == [(2, 40)] * 2
        assert all((row == came).all() for row in rows)


@pytest.mark.parametrize("share", [0.85, 0.95])
@pytest.mark.parametrize("tokens", [256, 262])
def test_two_precisions_equal_the_assembler(tokens: int, share: float) -> None:
    """Rows of bases, and which are finer, against what the assembler makes of the same packets, in any order."""
    rng = np.random.default_rng([tokens, int(100 * share)])
    shapes = (LayerShape(2, 16), LayerShape(1, 32))
    arrays = [
        tuple(rng.standard_normal((shape.kv_heads, tokens, shape.head_dim)).astype(np.float32) for _ in range(2))
        for shape in shapes
    ]
    layout = Layout(shapes, tokens, wire_dtype="progressive")
    kv = prepare_arrays(  # type: ignore[arg-type]
        arrays, dtype="fp32", model="m", wire_dtype="progressive", utility=rng.uniform(1, 900, layout.block_count)
    )
    size = kv.symbol_size
    payload, counts = size - UNIT_HEADER_SIZE, layout.fragment_counts(size)
    assert counts.min() < counts.max()
    fragments = fragments_by_unit(layout, size, kv.send_order, rng.random(layout.symbols(size)) < share)
    assembler = Assembler(layout, "fp32")
    for position in rng.permutation(layout.unit_count).tolist():
        unit, data = kv.unit_at(position)
        parts = [part for part in range(int(counts[unit])) if fragments[unit, part]]
        present = [(part * payload, min((part + 1) * payload, len(data))) for part in parts]
        assembler.write_partial(unit, data, present)
    got = assembler.finish("mask")
    complete, finer = complete_units(layout, size, fragments), refined_rows(layout, size, fragments)
    assert np.array_equal(complete, got.complete)
    assert 0 < np.concatenate(finer).sum() < complete[: layout.block_count].sum() * layout.block_tokens
    rows = kept_rows(kept_elements(layout, size, fragments))
    sent = KVArrays.of(arrays, "fp32")  # type: ignore[arg-type]
    coarse = as_received(replace(layout, wire_dtype="int4"), sent).layers
    fine = as_received(layout, sent).layers
    for layer, pair in enumerate(got.arrays.layers):
        assert np.array_equal(got.row_valid[layer], rows[layer])
        for kind in (0, 1):
            held = np.where(finer[layer][:, None], fine[layer][kind], coarse[layer][kind])
            assert np.array_equal(pair[kind], np.where(rows[layer][..., None], held, 0))


def test_one_precision_has_no_refinements() -> None:
    layout = Layout((LayerShape(2, 8),), 40)
    with pytest.raises(LocalError, match="bf16 has no refinements"):
        refined_rows(layout, 100, np.ones((layout.unit_count, 11), dtype=np.bool_))


def test_wrong_number_of_symbols() -> None:
    layout = Layout((LayerShape(2, 8),), 40)
    with pytest.raises(LocalError, match="symbols"):
        fragments_by_unit(layout, 100, np.arange(3, dtype=np.int32), np.ones(5, dtype=np.bool_))
