"""quic_pfec.kv.quantise: the stated bytes, stated errors, nothing that is not finite, and no use without scales."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.kv.assemble import Assembler
from quic_pfec.kv.layout import LayerShape, Layout
from quic_pfec.kv.prepared import PreparedKV, prepare_arrays
from quic_pfec.kv.quantise import FP8_MAX, SCALE_MAX, SCALE_MIN, Form, decode_fp8, encode_fp8
from quic_pfec.kv.units import KVArrays, as_received, digest, floats, write_unit
from quic_pfec.wire.errors import LocalError
from quic_pfec.wire.manifest import DIGEST_SIZE, QUANTISED, unit_nbytes

Pair = tuple[np.ndarray, np.ndarray]
HEADS, DIM, TOKENS = 2, 5, 21  # an odd vector, and a short last unit
NAN16 = 0x7E00


def normal(seed: int, heads: int = HEADS, tokens: int = TOKENS, dim: int = DIM) -> Pair:
    rng = np.random.default_rng(seed)
    keys, values = rng.standard_normal((2, heads, tokens, dim)).astype(np.float32)
    return keys * np.linspace(0.1, 30, dim, dtype=np.float32), values


def prepared(pair: Pair, wire_dtype: str, dtype: str = "fp32", **options: Any) -> PreparedKV:
    return prepare_arrays([pair], dtype=dtype, model="m", wire_dtype=wire_dtype, order="fifo", **options)


def assembled(kv: PreparedKV, dtype: str | None = None) -> Assembler:
    assembler = Assembler(kv.layout, dtype)
    for position in range(kv.layout.unit_count):
        assembler.write_unit(*kv.unit_at(position))
    return assembler


def test_fp8_is_the_nearest_of_all_codes_ties_to_even() -> None:
    codes = np.arange(0x7F, dtype=np.uint8)  # 0 .. 448
    values = decode_fp8(codes).astype(np.float64)
    assert (values[:2].tolist(), values[0x08], values[0x38], values[0x7E]) == ([0.0, 2.0**-9], 2.0**-6, 1.0, 448.0)
    assert (np.diff(values) > 0).all()
    middle = (values[1:] + values[:-1]) / 2  # exact in float32
    below, above = (np.nextafter(middle.astype(np.float32), np.float32(to)) for to in (0, 1000))
    assert np.array_equal(encode_fp8(values.astype(np.float32)), codes)
    assert np.array_equal(encode_fp8(below), codes[:-1])
    assert np.array_equal(encode_fp8(above), codes[1:])
    even = np.where(codes[1:] % 2 == 0, codes[1:], codes[:-1])
    assert np.array_equal(encode_fp8(middle.astype(np.float32)), even)
    assert np.array_equal(encode_fp8(-values.astype(np.float32)), codes | 0x80)
    assert encode_fp8(np.array([449, 464, 3e38, 1e-45], np.float32)).tolist() == [0x7E, 0x7E, 0x7E, 0]
    assert np.isnan(decode_fp8(np.array([0x7F, 0xFF], np.uint8))).all()


def test_fp8_is_torchs_cast() -> None:
    torch = pytest.importorskip("torch")
    bits = np.arange(1 << 16, dtype=np.uint16)
    for dtype in ("bf16", "fp16"):
        values = floats(bits, dtype)
        values = values[np.abs(values) <= FP8_MAX]  # not of NaN and infinity, nor beyond
        cast = torch.from_numpy(values).to(torch.float8_e4m3fn)
        assert np.array_equal(encode_fp8(values), cast.view(torch.uint8).numpy())
        assert np.array_equal(decode_fp8(encode_fp8(values)), cast.float().numpy())


def slow_unit(keys: np.ndarray, values: np.ndarray, wire_dtype: str) -> bytes:
    """A unit's body as docs/wire.md §3 states it, value by value. keys, values: [kv_heads, rows, head_dim]."""

    def half(value: float) -> float:
        return float(np.float16(value))

    def scales(vector: list[float]) -> list[float]:
        if wire_dtype == "int8":
            return [half(min(max(max(map(abs, vector)) / 127, SCALE_MIN), SCALE_MAX))]
        least = half(min(vector))
        if least > min(vector):
            least = float(np.nextafter(np.float16(least), np.float16(-np.inf)))
        return [least, half(min(max((max(vector) - least) / 15, SCALE_MIN), SCALE_MAX))]

    def code(value: float, by: list[float]) -> int:
        if wire_dtype == "int8":
            return max(-127, min(127, round(value / by[0])))
        return max(0, min(15, round((value - by[0]) / by[1])))

    def vector(codes: list[int]) -> bytes:
        if wire_dtype == "int8":
            return struct.pack(f"{len(codes)}b", *codes)
        pairs = [*codes, 0]
        return bytes(pairs[i] | pairs[i + 1] << 4 for i in range(0, len(codes), 2))

    heads, rows, dim = keys.shape
    body = b""
    of_channel = [[scales([float(k) for k in keys[head, :, index]]) for index in range(dim)] for head in range(heads)]
    for channels in of_channel:
        for field in range(len(channels[0])):
            body += struct.pack(f"<{dim}e", *(channel[field] for channel in channels))
    for row in range(rows):
        for head in range(heads):
            here = [float(v) for v in values[head, row]]
            by = scales(here)
            body += struct.pack(f"<{len(by)}e", *by)
            body += vector([code(float(keys[head, row, i]), of_channel[head][i]) for i in range(dim)])
            body += vector([code(value, by) for value in here])
    return body


@pytest.mark.parametrize("wire_dtype", ["int8", "int4"])
@pytest.mark.parametrize("seed", range(5))
def test_bytes_are_as_stated(wire_dtype: str, seed: int) -> None:
    # Few digits, so that no quotient lies within a rounding error of a tie.
    keys, values = (np.round(part, 2) for part in normal(seed))
    kv = prepared((keys, values), wire_dtype)
    assert kv.layout.rows(1) == 5
    for unit in range(kv.layout.unit_count):
        start, stop = kv.layout.row_range(unit)
        expected = slow_unit(keys[:, start:stop], values[:, start:stop], wire_dtype)
        assert kv.unit_at(unit) == (unit, expected + digest(unit, expected))
        assert len(expected) + DIGEST_SIZE == unit_nbytes(HEADS, DIM, stop - start, wire_dtype)
        alone = np.full(len(expected) + DIGEST_SIZE, 0xA5, dtype=np.uint8)
        write_unit(kv.layout, KVArrays.of([(keys, values)], "fp32"), unit, alone)
        assert alone.tobytes() == kv.unit_at(unit)[1]


def test_bytes_of_fp8_are_rows_of_codes() -> None:
    keys, values = normal(1)
    kv = prepared((keys, values), "fp8")
    rows = np.stack([keys[:, 16:], values[:, 16:]], axis=2).transpose(1, 0, 2, 3)  # row, head, keys and values
    assert kv.unit_at(1)[1][:-8] == encode_fp8(np.ascontiguousarray(rows)).tobytes()


@settings(max_examples=60, deadline=None)
@given(
    wire_dtype=st.sampled_from(QUANTISED),
    heads=st.integers(1, 3),
    tokens=st.integers(1, 40),
    dim=st.integers(1, 9),
    block_tokens=st.sampled_from([1, 5, 16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_errors_are_as_stated(wire_dtype: str, heads: int, tokens: int, dim: int, block_tokens: int, seed: int) -> None:
    """Half a step of the scale, which is over the unit's rows for keys and over the vector for values."""
    pair = normal(seed, heads, tokens, dim)
    kv = prepared(pair, wire_dtype, block_tokens=block_tokens)
    assert kv.saturated == 0
    got = assembled(kv, "fp32").finish("mask")
    assert got.complete.all()
    back = got.arrays.layers[0]
    twin = as_received(kv.layout, KVArrays.of([pair], "fp32")).layers[0]
    for which, (sent, bits) in enumerate(zip(pair, back, strict=True)):
        assert np.array_equal(bits, twin[which])  # what both ends believe
        error = np.abs(bits.view(np.float32) - sent)
        if wire_dtype == "fp8":
            assert (error <= np.maximum(np.abs(sent) / 16, 2.0**-10)).all()
            continue
        for start in range(0, tokens, block_tokens):
            block = sent[:, start : start + block_tokens]
            axis = 1 if which == 0 else 2
            low, high = block.min(axis=axis, keepdims=True), block.max(axis=axis, keepdims=True)
            if wire_dtype == "int8":
                step = np.maximum(high, -low) / 127
            else:
                step = (high - low + np.abs(low) / 1024) / 15  # a minimum has 11 bits
                if wire_dtype == "progressive":
                    step /= 8  # a sixteenth, but for the end of the range, which is short of it
            allowed = np.maximum(step, SCALE_MIN) * (0.5 + 127 / 2048)  # and so has a scale
            assert (error[:, start : start + block_tokens] <= allowed).all()


TINY, HUGE = float(np.finfo(np.float32).smallest_subnormal), float(np.finfo(np.float32).max)
EXTREME = st.sampled_from(
    [0.0, -0.0, TINY, -TINY, 1e-38, 6e-8, 6e-5, -6.1e-5, 1.0, -1.0, 448.0, -464.0, 1000.25, 65504.0, -65536.0, 8.4e6,
     1e30, HUGE, -HUGE]
)  # fmt: skip


@st.composite
def extremes(draw: st.DrawFn) -> Pair:
    """Any of it side by side, or one value throughout a channel, a row, or everything."""
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 18)), draw(st.integers(1, 6)))
    parts = []
    for _ in range(2):
        alike = draw(st.sampled_from([(), (1,), (2,), (0, 1, 2)]))
        size = tuple(1 if axis in alike else count for axis, count in enumerate(shape))
        count = int(np.prod(size))
        drawn = draw(st.lists(EXTREME | st.floats(width=32, allow_nan=False, allow_infinity=False),
                              min_size=min(count, 12), max_size=min(count, 12)))  # fmt: skip
        parts.append(np.broadcast_to(np.resize(np.array(drawn, np.float32), size), shape).copy())
    return parts[0], parts[1]


@pytest.mark.filterwarnings("error")
@settings(max_examples=400, deadline=None)
@given(pair=extremes(), wire_dtype=st.sampled_from(QUANTISED), held=st.sampled_from(["bf16", "fp16", "fp32"]))
def test_an_intact_hand_off_is_finite_whatever_was_sent(pair: Pair, wire_dtype: str, held: str) -> None:
    kv = prepared(pair, wire_dtype)
    assembler = assembled(kv, held)
    assert assembler.complete.all()
    assert assembler.rejected == 0
    keys, values = assembler.finish("mask").arrays.layers[0]
    for sent, bits in zip(pair, (keys, values), strict=True):
        got = floats(bits, held)
        assert np.isfinite(got).all()
        # Never larger than what was sent, but for half a step; the least of fp8 is 2^-9.
        assert float(np.abs(got).max()) <= float(np.abs(sent).max()) * 1.08 + 2.0**-10


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("wire_dtype", QUANTISED)
def test_caches_of_every_dtype(dtype: str, wire_dtype: str) -> None:
    wide = [part.astype(np.float16).astype(np.float32) for part in normal(3)]
    if dtype == "fp16":
        pair: Pair = (wide[0].astype(np.float16), wide[1].astype(np.float16))
        same = wide
    else:
        pair = ((wide[0].view(np.uint32) >> 16).astype(np.uint16), (wide[1].view(np.uint32) >> 16).astype(np.uint16))
        same = [(part.astype(np.uint32) << 16).view(np.float32) for part in pair]
    kv, twin = prepared(pair, wire_dtype, dtype), prepared((same[0], same[1]), wire_dtype)
    assert (kv.dtype, kv.layout.wire_dtype) == (dtype, wire_dtype)
    assert [kv.unit_at(unit) for unit in range(2)] == [twin.unit_at(unit) for unit in range(2)]
    assert assembled(kv).dtype == "bf16"


def test_what_is_saturated_is_counted() -> None:
    keys, values = (np.zeros((1, 16, 4), np.float32) for _ in range(2))
    keys[0, 3, 1] = values[0, 2, 2] = 1e9
    values[0, 2, 0] = -1e9
    for wire_dtype, largest in (("fp8", FP8_MAX), ("int8", 127 * SCALE_MAX), ("int4", 16 * SCALE_MAX)):
        kv = prepared((keys, values), wire_dtype)
        assert kv.saturated == 3
        got = assembled(kv, "fp32").finish("mask").arrays.layers[0]
        assert float(got[0].view(np.float32).max()) <= largest
    keys[:] = values[:] = 440
    assert [prepared((keys, values), wire_dtype).saturated for wire_dtype in QUANTISED] == [0, 0, 0, 0]


def test_a_channel_far_from_zero_keeps_its_digits() -> None:
    """Minima are rounded down: with one above the values a small range would be lost."""
    keys, values = normal(4)
    keys = np.float32(1000.3) + np.clip(keys, -1, 1) * np.float32(0.2)
    got = assembled(prepared((keys, values), "int4"), "fp32").finish("mask").arrays.layers[0][0].view(np.float32)
    assert np.abs(got - keys).max() < 0.05  # an fp16 number near 1,000 has steps of 0.5


def test_a_unit_depends_on_its_own_rows_alone() -> None:
    keys, values = normal(5)
    for wire_dtype in QUANTISED:
        first = prepared((keys, values), wire_dtype).unit_at(1)
        other = prepared((np.concatenate([keys[:, :16] * 9, keys[:, 16:]], axis=1), values), wire_dtype)
        assert other.unit_at(1) == first
        assert other.unit_at(0) != prepared((keys, values), wire_dtype).unit_at(0)


def lead_fields(wire_dtype: str) -> list[str]:
    return ["scale"] if wire_dtype == "int8" else ["minimum", "scale"]


def poisoned(kv: PreparedKV, offset: int, bits: int) -> bytes:
    """Unit 0 with another fp16 at byte `offset`, and the right digest of that."""
    body = bytearray(kv.unit_at(0)[1][:-DIGEST_SIZE])
    body[offset : offset + 2] = struct.pack("<H", bits)
    return bytes(body) + digest(0, body)


@pytest.mark.parametrize("wire_dtype", ["int8", "int4"])
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, NAN16, 0xFE00, 0x0000, 0x8000, 0x03FF, 0xBC00])
def test_nonsense_scales_make_a_unit_missing(wire_dtype: str, bits: int) -> None:
    kv = prepared(normal(6), wire_dtype)
    form = Form(wire_dtype, HEADS, DIM)
    scale = (len(lead_fields(wire_dtype)) - 1) * 2
    for offset in (DIM * scale + 2 * 3, form.lead_nbytes + scale):  # of a channel; of a value vector
        assembler = Assembler(kv.layout)
        assert not assembler.write_unit(0, poisoned(kv, offset, bits))
        assert assembler.rejected == 1
        done = assembler.finish("zero")
        assert not any(part.any() for part in done.arrays.layers[0])
        assert not done.row_valid[0].any()
    assert assembled(kv).complete.all()


def test_minima_may_be_anything_finite() -> None:
    kv = prepared(normal(6), "int4")
    for bits, good in ((0x0000, True), (0x8001, True), (0xFBFF, True), (0x7C00, False), (NAN16, False)):
        for offset in (2, Form("int4", HEADS, DIM).lead_nbytes):
            assert Assembler(kv.layout).write_unit(0, poisoned(kv, offset, bits)) == good


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_in_fp8_makes_a_unit_missing(code: int) -> None:
    kv = prepared(normal(6), "fp8")
    body = bytearray(kv.unit_at(0)[1][:-DIGEST_SIZE])
    body[-1] = code
    assembler = Assembler(kv.layout)
    assert not assembler.write_unit(0, bytes(body) + digest(0, body))
    assembler.write_partial(0, bytes(body) + digest(0, body), [(0, len(body))])
    valid = assembler.finish("zero").row_valid[0]
    assert not valid[-1, 15]  # that row of that head, no other
    assert valid[:, :16].sum() == HEADS * 16 - 1


def slow_known(came: np.ndarray, wire_dtype: str, rows: int) -> np.ndarray:
    """Which elements have come, bool [rows, heads, 2, dim], found byte by byte."""
    fields = {"int8": 1, "int4": 2, "fp8": 0}[wire_dtype]
    known = np.zeros((rows, HEADS, 2, DIM), dtype=np.bool_)
    vector = (DIM + 1) // 2 if wire_dtype == "int4" else DIM
    row_bytes = 2 * fields + 2 * vector
    for row in range(rows):
        for head in range(HEADS):
            at = HEADS * DIM * 2 * fields + (row * HEADS + head) * row_bytes
            for which in range(2):
                for index in range(DIM):
                    byte = index // 2 if wire_dtype == "int4" else index
                    needed = [at + 2 * fields + which * vector + byte]
                    if which:
                        needed += range(at, at + 2 * fields)
                    else:
                        for field in range(fields):
                            place = ((head * fields + field) * DIM + index) * 2
                            needed += [place, place + 1]
                    known[row, head, which, index] = came[needed].all()
    return known


@settings(max_examples=120, deadline=None)
@given(
    wire_dtype=st.sampled_from(["int8", "fp8", "int4"]),
    seed=st.integers(0, 2**32 - 1),
    payload=st.integers(1, 60),
    loss=st.sampled_from([0.05, 0.3, 0.8]),
    missing=st.sampled_from(["zero", "mask"]),
    ahead=st.booleans(),
    garbage=st.booleans(),
)
def test_parts_need_their_scales(
    wire_dtype: str, seed: int, payload: int, loss: float, missing: str, ahead: bool, garbage: bool
) -> None:
    rng = np.random.default_rng(seed)
    kv = prepared(normal(seed), wire_dtype)
    whole = assembled(kv, "fp32").finish("zero").arrays.layers[0]
    assembler = Assembler(kv.layout, "fp32")
    expected = [np.zeros((HEADS, TOKENS, DIM), np.uint32) for _ in range(2)]
    expected_valid = np.zeros((HEADS, TOKENS), np.bool_)
    for unit in range(kv.layout.unit_count):
        _, sent = kv.unit_at(unit)
        data = np.frombuffer(sent, np.uint8).copy()
        ranges = [(start, min(start + payload, data.size)) for start in range(0, data.size, payload)]
        ranges = [piece for piece in ranges if rng.random() >= loss]
        came = np.zeros(data.size, np.bool_)
        for start, stop in ranges:
            came[start:stop] = True
        if came.all():
            continue
        data[~came] = rng.integers(0, 256, int((~came).sum())) if garbage else 0
        assembler.write_partial(unit, data, ranges, whole_rows=ahead and missing == "mask")
        start, stop = kv.layout.row_range(unit)
        known = slow_known(came, wire_dtype, stop - start)
        valid = known.all(axis=(2, 3))
        if missing == "mask":
            known = known & valid[:, :, None, None]
        expected_valid[:, start:stop] = valid.T
        for which in range(2):
            there = known[:, :, which].transpose(1, 0, 2)
            expected[which][:, start:stop] = np.where(there, whole[which][:, start:stop], 0)
    done = assembler.finish(missing)
    assert np.array_equal(done.row_valid[0], expected_valid)
    for which in range(2):
        assert np.array_equal(done.arrays.layers[0][which], expected[which])


def test_nonsense_that_came_in_part_takes_the_rows_that_need_it() -> None:
    for wire_dtype in ("int8", "int4"):
        kv = prepared(normal(7), wire_dtype)
        form = Form(wire_dtype, HEADS, DIM)
        scale = (len(lead_fields(wire_dtype)) - 1) * 2
        size = len(kv.unit_at(0)[1])
        for offset, lost in ((DIM * scale, 16), (form.lead_nbytes + scale, 1)):  # all rows of head 0; one of them
            for bits in (NAN16, 0):
                assembler = Assembler(kv.layout)
                assembler.write_partial(0, poisoned(kv, offset, bits), [(0, size - DIGEST_SIZE)])
                done = assembler.finish("zero")
                assert done.row_valid[0][:, :16].sum() == 2 * 16 - lost
                hidden = ~done.row_valid[0][:, :16]
                assert not done.arrays.layers[0][0][:, :16][hidden].any()
                assert not done.arrays.layers[0][1][:, :16][hidden].any()


def test_without_the_lead_there_are_no_keys_and_no_rows() -> None:
    kv = prepared(normal(8), "int8")
    lead, size = Form("int8", HEADS, DIM).lead_nbytes, len(kv.unit_at(0)[1])
    assembler = Assembler(kv.layout)
    assembler.write_partial(0, kv.unit_at(0)[1], [(lead, size)])
    done = assembler.finish("zero")
    assert not done.row_valid[0].any()
    assert not done.arrays.layers[0][0].any()
    assert done.arrays.layers[0][1][:, :16].all()  # values have theirs in their rows


def test_a_base_alone_is_int4_and_a_refinement_nothing() -> None:
    pair = normal(10)
    kv, coarse = prepared(pair, "progressive"), prepared(pair, "int4")
    blocks = kv.layout.block_count
    assert [kv.unit_at(unit) for unit in range(blocks)] == [coarse.unit_at(unit) for unit in range(blocks)]
    base, only = Assembler(kv.layout, "fp32"), Assembler(kv.layout, "fp32")
    for unit in range(blocks):
        assert base.write_unit(*kv.unit_at(unit))
        assert only.write_unit(*kv.unit_at(blocks + unit))
    expected = assembled(coarse, "fp32").finish("mask").arrays.layers[0]
    done = base.finish("mask")
    assert all(np.array_equal(got, part) for got, part in zip(done.arrays.layers[0], expected, strict=True))
    assert done.row_valid[0].all()
    assert done.complete.tolist() == [True] * blocks + [False] * blocks
    assert done.fraction.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    nothing = only.finish("mask")
    assert not any(part.any() for part in nothing.arrays.layers[0])
    assert not nothing.row_valid[0].any()
    assert not base.layer_complete(0)


def test_a_refinement_is_a_sixteenth_of_the_step() -> None:
    """Code by code, as docs/wire.md §3 states it."""
    keys, values = (np.round(part, 2) for part in normal(11))
    kv = prepared((keys, values), "progressive")
    body, fine = (np.frombuffer(kv.unit_at(unit)[1][:-8], np.uint8) for unit in (0, kv.layout.block_count))
    got = [np.zeros((HEADS, 16, DIM)), np.zeros((HEADS, 16, DIM))]
    vector = 3
    for row in range(16):
        for head in range(HEADS):
            at = HEADS * DIM * 4 + (row * HEADS + head) * (4 + 2 * vector)
            for which in range(2):
                for index in range(DIM):
                    if which:
                        low, scale = body[at : at + 4].view("<f2").astype(np.float64)
                    else:
                        lead = body[head * DIM * 4 : (head + 1) * DIM * 4].view("<f2").astype(np.float64)
                        low, scale = lead[index], lead[DIM + index]
                    shift = 4 * (index % 2)
                    code = int(body[at + 4 + which * vector + index // 2]) >> shift & 15
                    more = int(fine[(row * HEADS + head) * 2 * vector + which * vector + index // 2]) >> shift & 15
                    got[which][head, row, index] = low + scale * (code + (more - 8) / 16)
    back = assembled(kv, "fp32").finish("mask").arrays.layers[0]
    for which, sent in enumerate((keys, values)):
        assert np.allclose(back[which][:, :16].view(np.float32), got[which], rtol=1e-6, atol=1e-6)
        coarse = assembled(prepared((keys, values), "int4"), "fp32").finish("mask").arrays.layers[0][which]
        errors = [np.abs(bits.view(np.float32) - sent).mean() for bits in (back[which], coarse)]
        assert errors[0] < errors[1] / 10


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    came=st.lists(st.booleans(), min_size=8, max_size=8),
    missing=st.sampled_from(["zero", "mask"]),
    bad=st.sampled_from([None, 0, 5]),
)
def test_precisions_come_in_any_order(seed: int, came: list[bool], missing: str, bad: int | None) -> None:
    """Four blocks: each is there if its base is, and fine if both are; a unit with a wrong digest did not come."""
    rng = np.random.default_rng(seed)
    pairs = [normal(seed), normal(seed + 1)]
    kv = prepare_arrays(pairs, dtype="fp32", model="m", wire_dtype="progressive", order="fifo")
    whole = assembled(kv, "fp32").finish("zero").arrays.layers
    coarse = assembled(prepare_arrays(pairs, dtype="fp32", model="m", wire_dtype="int4", order="fifo"), "fp32")
    rough = coarse.finish("zero").arrays.layers
    assembler = Assembler(kv.layout, "fp32")
    for unit in rng.permutation(8).tolist():
        data = bytearray(kv.unit_at(unit)[1])
        if unit == bad:
            data[-1] ^= 1
            assert not assembler.write_unit(unit, data)
        elif came[unit]:
            assert assembler.write_unit(unit, data)
            assert assembler.write_unit(unit, bytes(len(data)))  # not looked at any more
            data[:] = bytes(len(data))  # the packets' memory is used again
        elif unit >= 4:
            assembler.write_partial(unit, data, [(0, 9)])
    there = [flag and unit != bad for unit, flag in enumerate(came)]
    assert assembler.rejected == (bad is not None)
    assert assembler.complete.tolist() == there
    done = assembler.finish(missing)
    for block in range(4):
        layer, rows = block // 2, slice(*kv.layout.row_range(block))
        for which in range(2):
            got = done.arrays.layers[layer][which][:, rows]
            expected = np.zeros_like(got)
            if there[block]:
                expected = (whole if there[4 + block] else rough)[layer][which][:, rows]
            assert np.array_equal(got, expected)
        assert (done.row_valid[layer][:, rows] == there[block]).all()


def test_as_received_of_dtypes_that_are_not_quantised_rounds_once() -> None:
    arrays = KVArrays.of([normal(9)], "fp32")
    layout = Layout((LayerShape(HEADS, DIM),), TOKENS)
    got = as_received(layout, arrays)
    assert got.dtype == "fp32"
    assert np.array_equal(got.layers[0][0], arrays.convert("bf16").convert("fp32").layers[0][0])
    with pytest.raises(LocalError, match="layer 0"):
        as_received(Layout((LayerShape(HEADS, DIM),), TOKENS + 1), arrays)
