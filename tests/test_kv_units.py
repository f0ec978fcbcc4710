"""quic_pfec.kv.units: byte order inside a unit, digests, dtype conversion, finite check."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.fec.codec import Encoder
from quic_pfec.kv.layout import LayerShape, Layout
from quic_pfec.kv.units import (
    RAW_DTYPE,
    KVArrays,
    all_finite,
    bf16_to_fp32,
    check_geometry,
    convert,
    digest,
    digest_ok,
    fp32_to_bf16,
    non_finite,
    pack_symbols,
    write_unit,
)
from quic_pfec.wire.errors import LocalError


def random_arrays(layout: Layout, seed: int) -> KVArrays:
    """Random bits of the layout's geometry and wire dtype, any finite pattern."""
    rng = np.random.default_rng(seed)
    raw = RAW_DTYPE[layout.wire_dtype]
    lowest_exponent_bit = {"bf16": 1 << 7, "fp16": 1 << 10, "fp32": 1 << 23}[layout.wire_dtype]

    def bits(shape: LayerShape) -> np.ndarray:
        size = (shape.kv_heads, layout.tokens, shape.head_dim)
        return rng.integers(0, 1 << (8 * raw.itemsize), size, dtype=np.uint64).astype(raw) & ~raw.type(
            lowest_exponent_bit
        )

    return KVArrays(tuple((bits(shape), bits(shape)) for shape in layout.layers), layout.wire_dtype)


def slow_unit(layout: Layout, arrays: KVArrays, unit: int) -> bytes:
    """The unit's bytes element by element, as docs/wire.md §3 states them."""
    keys, values = arrays.layers[unit // layout.columns]
    heads, tokens, dim = keys.shape
    code = {2: "<H", 4: "<I"}[keys.dtype.itemsize]
    first = (unit % layout.columns) * layout.block_tokens
    body = b""
    for token in range(first, min(first + layout.block_tokens, tokens)):
        for head in range(heads):
            for array in (keys, values):
                for index in range(dim):
                    body += struct.pack(code, array[head, token, index])
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body, unit))


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.builds(LayerShape, st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=3),
    tokens=st.integers(1, 20),
    block_tokens=st.sampled_from([1, 4, 16]),
    wire_dtype=st.sampled_from(sorted(RAW_DTYPE)),
    seed=st.integers(0, 2**32 - 1),
)
def test_packing_is_the_stated_byte_order(
    shapes: list[LayerShape], tokens: int, block_tokens: int, wire_dtype: str, seed: int
) -> None:
    layout = Layout(tuple(shapes), tokens, 0, block_tokens, wire_dtype)
    arrays = random_arrays(layout, seed)
    order = np.random.default_rng(seed).permutation(layout.unit_count).astype(np.int32)
    packed = packed_units(layout, arrays, order)
    assert list(packed) == order.tolist()
    for unit, data in packed.items():
        assert data == slow_unit(layout, arrays, unit)
        alone = np.full(len(data), 0xA5, dtype=np.uint8)
        write_unit(layout, arrays, unit, alone)
        assert alone.tobytes() == data
        assert digest_ok(unit, data)


def packed_units(layout: Layout, arrays: KVArrays, order: np.ndarray, size: int = 68) -> dict[int, bytes]:
    """Bytes of every unit as they lie in the symbols, in the order of sending."""
    encoder = Encoder(size, layout.symbols(size))
    first, saturated = pack_symbols(layout, arrays, order, encoder.reserve_run(encoder.capacity), size)
    assert saturated == 0
    assert encoder.commit_run() == 0
    assert np.array_equal(first[order], np.sort(first))
    units = {unit: encoder.gather(int(first[unit]), layout.unit_nbytes(unit)) for unit in order.tolist()}
    assert units == {
        unit: b"".join(
            bytes(encoder.symbol(int(first[unit]) + i))[4:] for i in range(-(-layout.unit_nbytes(unit) // (size - 4)))
        )[: layout.unit_nbytes(unit)]
        for unit in order.tolist()
    }
    return units


def test_arrays_need_not_be_contiguous() -> None:
    layout = Layout((LayerShape(2, 4),), 20)
    arrays = random_arrays(layout, 1)
    pairs = ((k.transpose(2, 0, 1).copy().transpose(1, 2, 0), v[::-1].copy()[::-1]) for k, v in arrays.layers)
    strided = KVArrays(tuple(pairs), "bf16")
    order = np.arange(layout.unit_count, dtype=np.int32)
    assert packed_units(layout, strided, order) == packed_units(layout, arrays, order)


def test_digest_vectors() -> None:
    # xxh3_64 of nothing with seed 0 is a published constant; little endian on the wire.
    assert digest(0, b"") == bytes.fromhex("2d06800538d394c2")[::-1]
    assert digest(7, b"abc") != digest(8, b"abc")


def test_digest_ok_sees_any_flipped_bit_and_another_unit() -> None:
    data = bytearray(b"a unit's worth of bytes")
    data += digest(5, data)
    assert digest_ok(5, data)
    assert digest_ok(5, bytes(data))
    assert digest_ok(5, memoryview(data))
    assert not digest_ok(6, data)
    for position in range(len(data)):
        data[position] ^= 0x10
        assert not digest_ok(5, data)
        data[position] ^= 0x10
    assert not digest_ok(5, b"short")


def reference_bf16(value: float) -> int:
    """Nearest bf16 of a float32 value, ties to even, by searching the two neighbours in exact arithmetic."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    low = bits >> 16
    below = struct.unpack("<f", struct.pack("<I", low << 16))[0]
    if low & 0x7FFF == 0x7F7F:
        above = 2.0**128 if value > 0 else -(2.0**128)
    else:
        above = struct.unpack("<f", struct.pack("<I", (low + 1) << 16))[0]
    down, up = abs(value - below), abs(above - value)
    return low + (up < down or (up == down and low & 1))


@settings(max_examples=400, deadline=None)
@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bf16_rounds_to_nearest_even(value: float) -> None:
    bits = np.array([value], dtype=np.float32).view(np.uint32)
    assert int(fp32_to_bf16(bits)[0]) == reference_bf16(value)


def test_bf16_special_values() -> None:
    cases = {
        0x3F808000: 0x3F80,  # a tie goes to the even neighbour, below
        0x3F818000: 0x3F82,  # and above
        0x3F808001: 0x3F81,
        0x7F7FFFFF: 0x7F80,  # beyond the largest bf16: infinity, as IEEE rounds
        0x7F800000: 0x7F80,
        0xFF800000: 0xFF80,
        0x80000000: 0x8000,
        0x7F800001: 0x7FC0,  # NaN whose payload lies in the cut bits stays NaN
        0xFFFFFFFF: 0xFFFF,  # NaN that would wrap to zero
    }
    got = fp32_to_bf16(np.array(list(cases), dtype=np.uint32))
    assert got.dtype == np.uint16
    assert [hex(value) for value in got.tolist()] == [hex(value) for value in cases.values()]


def test_bf16_widens_exactly_and_back() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    wide = bf16_to_fp32(every)
    assert wide.dtype == np.uint32
    nan = non_finite(every, "bf16") & ((every & 0x7F) != 0)
    assert np.array_equal(fp32_to_bf16(wide)[~nan], every[~nan])
    assert np.isnan(wide.view(np.float32)[nan]).all()


def test_conversions_through_every_fp16() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    values = every.view(np.float16)
    assert np.array_equal(convert(every, "fp16", "fp32").view(np.float32), values.astype(np.float32), equal_nan=True)
    back = convert(convert(every, "fp16", "bf16"), "bf16", "fp16").view(np.float16)
    finite = np.isfinite(values)
    assert np.isfinite(back[finite]).all()  # 65,504 rounds to 65,536 in bf16, which fp16 cannot hold
    # bf16 keeps 8 significant bits; below fp16's normal range the error is bounded absolutely.
    with np.errstate(invalid="ignore"):
        error = np.abs(back.astype(np.float64) - values.astype(np.float64))
    assert (error[finite] <= np.abs(values[finite].astype(np.float64)) * 2.0**-8).all()
    assert np.array_equal(np.isnan(back), np.isnan(values))
    assert np.array_equal(np.isinf(back), np.isinf(values))


def test_convert_refuses_and_passes_through() -> None:
    bits = np.zeros(3, dtype=np.uint16)
    assert convert(bits, "bf16", "bf16") is bits
    with pytest.raises(LocalError, match="unknown dtype 'int8'"):
        convert(bits, "bf16", "int8")
    fp32 = np.array([1e-3, 7e4, -1e9], dtype=np.float32).view(np.uint32)
    assert convert(fp32, "fp32", "fp16").view(np.float16).tolist() == [np.float16(1e-3), 65504.0, -65504.0]


@pytest.mark.parametrize("dtype", sorted(RAW_DTYPE))
def test_finite_check_matches_ieee(dtype: str) -> None:
    rng = np.random.default_rng(3)
    raw = RAW_DTYPE[dtype]
    bits = (
        np.arange(1 << 16, dtype=np.uint16) if raw.itemsize == 2 else rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    )
    if dtype == "fp32":
        bits = rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
        bits[:4] = [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF]
    values = convert(bits, dtype, "fp32").view(np.float32)
    assert np.array_equal(non_finite(bits, dtype), ~np.isfinite(values))
    assert not all_finite(bits, dtype)
    assert all_finite(bits[np.isfinite(values)], dtype)


def test_kv_arrays_take_native_floats_without_copy() -> None:
    keys = np.ones((2, 3, 4), dtype=np.float16)
    arrays = KVArrays.of([(keys, keys)], "fp16")
    assert arrays.layers[0][0].dtype == np.uint16
    assert np.shares_memory(arrays.layers[0][0], keys)
    assert arrays.tokens == 3
    assert arrays.shapes([512]) == (LayerShape(2, 4, 512),)
    wide = KVArrays.of([(keys.astype(np.float32), keys.astype(np.float32))], "fp32")
    assert wide.convert("fp32") is wide
    assert wide.convert("bf16").layers[0][0].tolist() == np.full((2, 3, 4), 0x3F80).tolist()


def zeros(*shape: int, dtype: object = np.uint16) -> np.ndarray:
    return np.zeros(shape, dtype=dtype)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("layers", "dtype", "reason"),
    [
        ([], "bf16", "no layers"),
        ([(zeros(1, 2, 3), zeros(1, 2, 3))], "int8", "unknown dtype"),
        ([(zeros(1, 2, 3), zeros(1, 2, 4))], "bf16", "layer 0: keys and values must both be"),
        ([(zeros(2, 3), zeros(2, 3))], "bf16", "layer 0: keys and values must both be"),
        ([(zeros(1, 0, 3), zeros(1, 0, 3))], "bf16", "layer 0 is empty"),
        ([(zeros(1, 2, 3), zeros(1, 2, 3)), (zeros(1, 1, 3), zeros(1, 1, 3))], "bf16", "layer 1 holds 1 tokens"),
        ([(zeros(1, 2, 3, dtype=np.float32), zeros(1, 2, 3))], "bf16", "layer 0: bf16 needs uint16 bits"),
        ([(zeros(1, 2, 3), zeros(1, 2, 3))], "fp32", "layer 0: fp32 needs uint32 bits"),
    ],
)
def test_kv_arrays_refuse(layers: list[tuple[np.ndarray, np.ndarray]], dtype: str, reason: str) -> None:
    with pytest.raises(LocalError, match=reason):
        KVArrays.of(layers, dtype)


def test_packing_refuses_what_does_not_fit() -> None:
    layout = Layout((LayerShape(2, 4), LayerShape(2, 4)), 20)
    arrays = random_arrays(layout, 1)
    order = np.arange(layout.unit_count, dtype=np.int32)
    for wrong in (order[:-1], np.zeros_like(order), order + 1):
        with pytest.raises(LocalError, match="permutation"):
            packed_units(layout, arrays, wrong)
    with pytest.raises(LocalError, match="sends fp16"):
        check_geometry(Layout(layout.layers, 20, wire_dtype="fp16"), arrays)
    with pytest.raises(LocalError, match="2 layers, the arrays 1"):
        check_geometry(layout, KVArrays(arrays.layers[:1], "bf16"))
    with pytest.raises(LocalError, match="layer 0"):
        check_geometry(Layout(layout.layers, 19), arrays)
    with pytest.raises(LocalError, match="destination"):
        write_unit(layout, arrays, 0, np.zeros(3, dtype=np.uint8))
    with pytest.raises(LocalError, match="1 sliding windows for 2 layers"):
        arrays.shapes([0])
