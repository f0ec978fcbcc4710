"""quic_pfec.kv.layout: numbering, sizes and the symbol-size rule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.kv.layout import MAX_PAYLOAD, LayerShape, Layout
from quic_pfec.wire.errors import LocalError
from quic_pfec.wire.manifest import ITEM_SIZES, WIRE_DTYPES

SMOLLM2 = Layout((LayerShape(3, 64),) * 30, tokens=1536)

shapes = st.builds(LayerShape, st.integers(1, 4), st.integers(1, 16), st.sampled_from([0, 512]))
layouts = st.builds(
    Layout,
    layers=st.lists(shapes, min_size=1, max_size=6).map(tuple),
    tokens=st.integers(1, 70),
    first_token=st.integers(0, 50),
    block_tokens=st.sampled_from([1, 3, 16, 32]),
    wire_dtype=st.sampled_from(sorted(WIRE_DTYPES)),
)


def test_a_known_model() -> None:
    # models-and-data: 30 layers, 12,288 B a block; the digest makes it 12,296 B in 9 packets.
    assert (SMOLLM2.columns, SMOLLM2.unit_count, SMOLLM2.quantised) == (96, 2880, False)
    assert SMOLLM2.unit_nbytes(2879) == 12_296
    assert SMOLLM2.unit_sizes().sum() == 2880 * 12_296
    assert SMOLLM2.symbol_size() == 4 + 1367
    assert set(SMOLLM2.fragment_counts(1371).tolist()) == {9}
    assert SMOLLM2.symbols(1371) == 25_920


def test_the_papers_models_keep_their_packet_counts_give_or_take_the_digest() -> None:
    qwen = Layout((LayerShape(4, 128),) * 28, tokens=1536)
    llama = Layout((LayerShape(8, 128),) * 32, tokens=1536)
    for layout, units, nbytes, packets in ((qwen, 2688, 32_776, 24), (llama, 3072, 65_544, 48)):
        assert (layout.unit_count, layout.unit_nbytes(0)) == (units, nbytes)
        assert set(layout.fragment_counts(layout.symbol_size()).tolist()) == {packets}


@pytest.mark.parametrize(
    ("wire_dtype", "nbytes", "share"), [("int8", 6632, 0.539), ("fp8", 6152, 0.5), ("int4", 4040, 0.328)]
)
def test_quantised_units_are_smaller_by_the_stated_shares(wire_dtype: str, nbytes: int, share: float) -> None:
    layout = Layout(SMOLLM2.layers, SMOLLM2.tokens, wire_dtype=wire_dtype)
    assert (layout.unit_count, layout.unit_nbytes(0), layout.quantised) == (2880, nbytes, True)
    assert (nbytes - 8) / 12_288 == pytest.approx(share, abs=5e-4)
    for dtype, size in ITEM_SIZES.items():  # the cache itself is as large as ever
        assert layout.cache_nbytes(dtype) == SMOLLM2.cache_nbytes(dtype) == 30 * 1536 * 3 * 2 * 64 * size


def test_progressive_blocks_make_two_units() -> None:
    layout = Layout(SMOLLM2.layers, SMOLLM2.tokens, wire_dtype="progressive")
    assert (layout.block_count, layout.unit_count, layout.forms) == (2880, 5760, ("int4", "refinement"))
    assert (layout.unit_nbytes(0), layout.unit_nbytes(2880)) == (4040, 3080)
    for unit in (0, 95, 96, 2879):
        twin = 2880 + unit
        assert (layout.precision_of(unit), layout.precision_of(twin)) == (0, 1)
        assert layout.layer_of(twin) == layout.layer_of(unit)
        assert layout.column_of(twin) == layout.column_of(unit)
        assert layout.row_range(twin) == layout.row_range(unit)
    with pytest.raises(LocalError, match="no unit"):
        layout.precision_of(5760)
    # Symbols as large as bases alone would have leave a third of a refinement's last one empty.
    assert layout.symbol_size() == 4 + 1027
    assert set(layout.fragment_counts(1031)[:2880].tolist()) == {4}
    assert set(layout.fragment_counts(1031)[2880:].tolist()) == {3}


def test_short_last_column() -> None:
    layout = Layout((LayerShape(2, 8), LayerShape(1, 4)), tokens=35, first_token=100, wire_dtype="fp32")
    assert layout.columns == 3
    assert [layout.rows(unit) for unit in range(6)] == [16, 16, 3, 16, 16, 3]
    assert layout.row_range(5) == (32, 35)
    assert (layout.layer_of(5), layout.column_of(5), layout.context_tokens) == (1, 2, 135)
    assert layout.unit_sizes().tolist() == [2056, 2056, 392, 520, 520, 104]


@settings(max_examples=80, deadline=None)
@given(layout=layouts, max_payload=st.integers(60, 1500))
def test_sizes_agree_with_each_other(layout: Layout, max_payload: int) -> None:
    sizes = layout.unit_sizes()
    assert sizes.dtype == np.int64
    assert sizes.tolist() == [layout.unit_nbytes(unit) for unit in range(layout.unit_count)]
    rows = [layout.rows(unit) for unit in range(layout.columns)]
    assert sum(rows) == layout.tokens
    largest = int(sizes.max())
    if -(-largest // max_payload) > 256:
        with pytest.raises(LocalError, match="over 256"):
            layout.symbol_size(max_payload)
        return
    symbol_size = layout.symbol_size(max_payload)
    if len(layout.forms) > 1:
        assert 64 <= symbol_size <= 4 + max_payload
        assert layout.symbols(symbol_size) == int(-(-sizes // (symbol_size - 4)).sum())
        return
    counts = layout.fragment_counts(symbol_size)
    assert counts.dtype == np.int32
    assert 64 <= symbol_size <= 4 + max_payload
    # As few packets as the largest symbol needs, and less than a byte a fragment of padding in the largest unit.
    assert counts.max() == -(-largest // max_payload)
    assert symbol_size == 64 or counts.max() * (symbol_size - 4) - largest < counts.max()
    payload = symbol_size - 4
    assert ((counts - 1) * payload < sizes).all()
    assert (sizes <= counts * payload).all()
    assert layout.symbols(symbol_size) == sum(counts.tolist())


@settings(max_examples=50, deadline=None)
@given(layout=layouts)
def test_layer_runs_restore_the_layers(layout: Layout) -> None:
    runs = layout.layer_runs()
    assert all(run.count >= 1 for run in runs)
    expanded = [LayerShape(run.kv_heads, run.head_dim, run.sliding_window) for run in runs for _ in range(run.count)]
    assert tuple(expanded) == layout.layers
    assert len(runs) == 1 + sum(a != b for a, b in zip(layout.layers, layout.layers[1:], strict=False))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layers": ()}, "no layers"),
        ({"tokens": 0}, "empty"),
        ({"tokens": -1}, "empty"),
        ({"first_token": -1}, "first_token"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"block_tokens": 257}, "block_tokens must be 1 to 256"),
        ({"wire_dtype": "int3"}, "unknown dtype 'int3'"),
        ({"tokens": 1 << 24, "block_tokens": 1}, "24 bits"),
    ],
)
def test_impossible_layouts(change: dict[str, object], reason: str) -> None:
    fields: dict[str, object] = {"layers": (LayerShape(1, 4), LayerShape(1, 4)), "tokens": 5}
    with pytest.raises(LocalError, match=reason):
        Layout(**(fields | change))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(0, 4, 0), (1, 0, 0), (1, 4, -1)])
def test_impossible_layers(shape: tuple[int, int, int]) -> None:
    with pytest.raises(LocalError):
        LayerShape(*shape)


@pytest.mark.parametrize("unit", [-1, 2880])
def test_units_outside_the_layout(unit: int) -> None:
    for method in (SMOLLM2.layer_of, SMOLLM2.column_of, SMOLLM2.rows, SMOLLM2.row_range, SMOLLM2.unit_nbytes):
        with pytest.raises(LocalError, match="no unit"):
            method(unit)


def test_units_that_no_header_can_number() -> None:
    wide = Layout((LayerShape(64, 256),), tokens=16, wire_dtype="fp32")
    with pytest.raises(LocalError, match="lower block_tokens"):
        wide.symbol_size(MAX_PAYLOAD)
    with pytest.raises(LocalError, match="at most 256"):
        wide.fragment_counts(1372)
    with pytest.raises(LocalError, match="cannot cut"):
        SMOLLM2.fragment_counts(4)
    with pytest.raises(LocalError, match="max_payload"):
        SMOLLM2.symbol_size(59)
