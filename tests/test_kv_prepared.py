"""quic_pfec.kv.prepared: from a cache to symbols, and every reason to refuse one."""

from __future__ import annotations

import hashlib
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.kv.layout import LayerShape, Layout
from quic_pfec.kv.prepared import PreparedKV, hash_tokens, prepare_arrays
from quic_pfec.kv.profile import Profile, generic_utility, synthetic_utility
from quic_pfec.kv.units import RAW_DTYPE, KVArrays, convert, digest_ok, write_unit
from quic_pfec.wire.errors import LocalError
from quic_pfec.wire.frames import unpack_unit_header
from quic_pfec.wire.limits import Limits
from quic_pfec.wire.manifest import decode_manifest, encode_manifest

Arrays = list[tuple[np.ndarray, np.ndarray]]


def cache(shapes: list[tuple[int, int]], tokens: int, dtype: type = np.float32, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)

    def values(heads: int, dim: int) -> np.ndarray:
        return rng.standard_normal((heads, tokens, dim)).astype(dtype)

    return [(values(*shape), values(*shape)) for shape in shapes]


def test_everything_is_kept_and_normalised() -> None:
    arrays = cache([(3, 64)] * 4, 100)
    profile = Profile(
        model="Tiny", receiver="mask", layers=4, bins=2, values=((8.0, 1.0),) * 4,
        data="made up", context_tokens=64, seed=0, command="none", versions={},
    )  # fmt: skip
    kv = prepare_arrays(
        arrays, dtype="fp32", model="tiny:1", profile=profile, tokens=list(range(100)), rope="theta=1e4",
        sliding_windows=[0, 0, 32, 0],
    )  # fmt: skip
    assert kv.layout == Layout(tuple(LayerShape(3, 64, 32 * (i == 2)) for i in range(4)), 100)
    assert (kv.dtype, kv.layout.wire_dtype, kv.order) == ("fp32", "bf16", "utility")
    assert (kv.model, kv.rope, kv.profile) == ("tiny:1", "theta=1e4", profile.id)
    assert kv.utility.sum() == pytest.approx(1.0)
    assert (np.diff(kv.utility[kv.send_order]) <= 0).all()
    assert kv.tokens is not None
    assert kv.tokens.dtype == np.uint32
    assert kv.tokens_hash == hash_tokens(kv.tokens)
    for array in (kv.send_order, kv.utility, kv.tokens):
        assert not array.flags.writeable
    sent = [kv.unit_at(position) for position in range(kv.layout.unit_count)]
    assert [unit for unit, _ in sent] == kv.send_order.tolist()
    assert all(digest_ok(unit, data) for unit, data in sent)
    assert sum(len(data) for _, data in sent) == kv.nbytes == kv.layout.unit_sizes().sum()


def test_utility_sources() -> None:
    arrays = cache([(1, 4)] * 2, 40)
    layout = Layout((LayerShape(1, 4),) * 2, 40)
    generic = prepare_arrays(arrays, dtype="fp32", model="m", order="fifo")
    assert generic.profile == "generic"
    assert np.allclose(generic.utility, generic_utility(layout) / generic_utility(layout).sum())
    assert generic.send_order.tolist() == [0, 1, 2, 3, 4, 5]
    huge = np.arange(1, 7) / 6 * 1.7e308  # the sum overflows
    custom = prepare_arrays(arrays, dtype="fp32", model="m", utility=huge)
    assert custom.profile == "custom"
    assert np.allclose(custom.utility, np.arange(1, 7) / 21)
    assert huge.flags.writeable
    assert custom.send_order.tolist() == [5, 4, 3, 2, 1, 0]


def test_wire_dtype_casts_once() -> None:
    arrays = cache([(2, 4)], 5)
    cast = prepare_arrays(arrays, dtype="fp32", model="m", order="fifo")
    exact = prepare_arrays(arrays, dtype="fp32", wire_dtype="fp32", model="m", order="fifo")
    bits = np.frombuffer(exact.unit_at(0)[1][:-8], np.uint32)
    assert np.array_equal(np.frombuffer(cast.unit_at(0)[1][:-8], np.uint16), convert(bits, "fp32", "bf16"))
    half = cache([(2, 4)], 5, np.float16)
    assert prepare_arrays(half, dtype="fp16", wire_dtype="fp16", model="m").nbytes == cast.nbytes


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 24)), min_size=1, max_size=3),
    tokens=st.integers(1, 40),
    max_payload=st.integers(60, 400),
    order=st.sampled_from(["utility", "prefix", "fifo"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_symbols_carry_the_units(
    shapes: list[tuple[int, int]], tokens: int, max_payload: int, order: str, seed: int
) -> None:
    arrays = cache(shapes, tokens, seed=seed)
    kv = prepare_arrays(arrays, dtype="fp32", model="m", order=order)
    narrow = kv.layout.symbol_size(max_payload)
    bits = KVArrays.of(arrays, "fp32").convert("bf16")
    whole = []
    for position, unit in enumerate(kv.send_order.tolist()):
        expected = np.empty(kv.layout.unit_nbytes(unit), dtype=np.uint8)
        write_unit(kv.layout, bits, unit, expected)
        assert kv.unit_at(position) == (unit, expected.tobytes())
        whole.append((unit, expected.tobytes()))
    for symbol_size in (kv.symbol_size, narrow):  # as packed, and cut anew
        encoder, unit_of_sid = kv.symbols(symbol_size)
        assert (encoder.symbol_size, encoder.count) == (symbol_size, kv.layout.symbols(symbol_size))
        symbols = [bytes(encoder.symbol(sid)) for sid in range(encoder.count)]
        again, fragment_of_sid = kv.sid_units(symbol_size)
        assert np.array_equal(again, unit_of_sid)
        assert (unit_of_sid.dtype, fragment_of_sid.dtype) == (np.int32, np.uint8)
        headers = [unpack_unit_header(symbol[:4]) for symbol in symbols]
        assert headers == list(zip(unit_of_sid.tolist(), fragment_of_sid.tolist(), strict=True))
        units: dict[int, bytes] = {}
        for (unit, fragment), symbol in zip(headers, symbols, strict=True):
            assert len(units.get(unit, b"")) == fragment * (symbol_size - 4)
            units[unit] = units.get(unit, b"") + symbol[4:]
        assert list(units) == kv.send_order.tolist()
        for unit, data in whole:
            assert units[unit].rstrip(b"\0") == data.rstrip(b"\0")  # the padding is zero
            assert 0 <= len(units[unit]) - len(data) < symbol_size - 4
        assert kv.symbols(symbol_size)[0] is encoder  # made once


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_packing_makes_no_second_copy_of_the_cache(dtype: str) -> None:
    """Beside the arena, which tracemalloc does not see, packing works in a layer's memory at a time."""
    bits = np.random.default_rng(3).integers(0, 0x70, (16, 2, 2, 512, 64 * (1 + (dtype == "fp32"))), dtype=np.uint8)
    arrays = [tuple(pair.view(RAW_DTYPE[dtype])) for pair in np.repeat(bits, 2, axis=-1)]
    layer_nbytes = 2 * 2 * 512 * 64 * 4
    tracemalloc.start()
    try:
        kv = prepare_arrays(arrays, dtype=dtype, model="m")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kv.nbytes > 16 * layer_nbytes / 2
    assert peak < 4 * layer_nbytes < kv.nbytes


def test_manifest_survives_the_receivers_checks() -> None:
    kv = prepare_arrays(
        cache([(2, 8), (2, 8), (1, 16)], 35), dtype="fp32", model="tiny:1", tokens=range(100, 200), first_token=65,
        rope="theta=1e4", sliding_windows=[0, 0, 512],
    )  # fmt: skip
    symbol_size = kv.layout.symbol_size()
    manifest = decode_manifest(encode_manifest(kv.manifest(symbol_size, "mask", base=3)), Limits())
    assert manifest == kv.manifest(symbol_size, "mask", base=3)
    assert Layout.from_manifest(manifest) == kv.layout
    assert (manifest.base, manifest.missing, manifest.order, manifest.profile) == (3, "mask", "utility", "generic")
    assert (manifest.dtype, manifest.wire_dtype, manifest.first_token, manifest.tokens) == ("fp32", "bf16", 65, 35)
    assert manifest.tokens_hash == hash_tokens(np.arange(100, 200, dtype=np.uint32))
    assert manifest.symbols == kv.layout.symbols(symbol_size)
    bare = prepare_arrays(cache([(2, 8)], 16), dtype="fp32", model="m")
    assert bare.tokens is None
    assert (
        decode_manifest(encode_manifest(bare.manifest(bare.layout.symbol_size(), "zero")), Limits()).tokens_hash == b""
    )


def test_token_hash_is_a_stated_function() -> None:
    ids = np.array([1, 2, 70_000], dtype=np.uint32)
    body = b"\x01\0\0\0\x02\0\0\0\x70\x11\x01\0"
    assert hash_tokens(ids) == hashlib.blake2b(body, digest_size=16, person=b"quic_pfec/tokens").digest()
    assert hash_tokens(ids[::-1]) != hash_tokens(ids)


def refused(**changes: object) -> PreparedKV:
    fields: dict[str, object] = {"arrays": cache([(2, 4)] * 2, 20), "dtype": "fp32", "model": "m"}
    fields |= changes
    return prepare_arrays(fields.pop("arrays"), **fields)  # type: ignore[arg-type]


def with_value(value: float, dtype: type = np.float32) -> Arrays:
    arrays = cache([(2, 4)] * 2, 20, dtype)
    arrays[1][1][1, 19, 3] = value
    return arrays


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"arrays": []}, "no layers"),
        ({"arrays": cache([(2, 4)], 0)}, "layer 0 is empty"),
        ({"arrays": [(np.zeros((2, 4), np.float32),) * 2]}, r"\[kv_heads, tokens, head_dim\]"),
        ({"arrays": cache([(2, 4)], 20) + cache([(2, 4)], 19)}, "layer 1 holds 19 tokens"),
        ({"dtype": "bf16"}, "layer 0: bf16 needs uint16 bits, got float32"),
        ({"dtype": "fp8"}, "unknown dtype 'fp8'"),
        (
            {"wire_dtype": "fp16"},
            "wire_dtype must be one of fp32, bf16, int8, fp8, int4, progressive for a cache in fp32, got 'fp16'",
        ),
        ({"wire_dtype": "int3"}, "wire_dtype must be"),
        ({"arrays": with_value(np.nan), "wire_dtype": "int8"}, "layer 1: values hold NaN or infinite values in fp32"),
        ({"arrays": with_value(np.inf), "wire_dtype": "fp8"}, "layer 1: values hold NaN or infinite values in fp32"),
        ({"arrays": with_value(-np.inf), "wire_dtype": "int4"}, "layer 1: values hold NaN or infinite values in fp32"),
        ({"order": "random"}, "unknown order"),
        ({"utility": np.ones(3)}, "there are 4 units"),
        ({"utility": np.ones(4), "profile": object()}, "not both"),
        ({"tokens": [1] * 19}, "the context has 20 tokens"),
        ({"tokens": [1] * 20, "first_token": 5}, "the context has 25 tokens"),
        ({"tokens": [0.5] * 20}, "must be integers"),
        ({"tokens": [-1] * 20}, "0 .. 2"),
        ({"tokens": [1 << 32] * 20}, "0 .. 2"),
        ({"first_token": -1}, "first_token"),
        ({"model": ""}, "model is empty"),
        ({"model": "a\nb"}, "model is not printable"),
        ({"model": "m" * 129}, "model has 129 characters"),
        ({"rope": "r" * 65}, "rope has 65 characters"),
        ({"sliding_windows": [0]}, "1 sliding windows for 2 layers"),
        ({"arrays": with_value(np.nan)}, "layer 1: values hold NaN or infinite values in bf16"),
        ({"arrays": with_value(-np.inf), "wire_dtype": "fp32"}, "layer 1: values hold NaN or infinite values in fp32"),
        ({"arrays": with_value(3.4e38)}, "infinite values in bf16"),
        ({"arrays": with_value(np.inf, np.float16), "dtype": "fp16", "wire_dtype": "fp16"}, "infinite values in fp16"),
    ],
)
def test_one_line_reasons(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        refused(**changes)
    assert isinstance(caught.value, LocalError)
    assert "\n" not in str(caught.value)


def test_a_full_size_cache_makes_every_symbol() -> None:
    kv = prepare_arrays(
        cache([(3, 64)] * 30, 1536), dtype="fp32", model="m", utility=synthetic_utility((30, 96), 0.95, 1)
    )
    unit_of_sid, fragment_of_sid = kv.sid_units(kv.layout.symbol_size())
    assert unit_of_sid.size == fragment_of_sid.size == 25_920
    assert np.array_equal(unit_of_sid[::9], kv.send_order)
