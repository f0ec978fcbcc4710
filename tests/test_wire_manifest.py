"""The manifest: geometry, golden bytes, and hostile ones that must not cost memory."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.wire.errors import AppCode, LocalError, PeerError
from quic_pfec.wire.limits import Limits
from quic_pfec.wire.manifest import (
    ITEM_SIZES,
    QUANTISED,
    WIRE_DTYPES,
    LayerRun,
    Manifest,
    decode_manifest,
    encode_manifest,
    fragments,
    held_nbytes,
    precisions,
    unit_nbytes,
    unit_runs,
)

LIMITS = Limits()
# SmolLM2-135M: 30 layers, 3 KV heads of 64; a unit has 12,296 bytes, 9 symbols of 4 + 1,367.
SMOLLM2 = Manifest(
    model="sha256:0123456789abcdef",
    tokens=512,
    first_token=0,
    base=0,
    block_tokens=16,
    dtype="bf16",
    wire_dtype="bf16",
    layers=(LayerRun(count=30, kv_heads=3, head_dim=64),),
    symbol_size=1371,
    symbols=8640,
    order="utility",
    missing="mask",
    profile="smollm2",
    tokens_hash=bytes(range(16)),
    rope="default:100000",
)
SMOLLM2_BYTES = bytes.fromhex(
    "dc0010 01 b77368613235363a30313233343536373839616263646566 cd0200 00 00 10 a462663136 a462663136"
    "91 941e034000 cd055b cd21c0 a77574696c697479 a46d61736b a7736d6f6c6c6d32"
    "c410000102030405060708090a0b0c0d0e0f ae64656661756c743a313030303030"
)
FIELDS = Manifest.__struct_fields__


def with_fields(**changes: Any) -> bytes:
    """The golden manifest with raw values in place of some fields."""
    values = dict(zip(FIELDS, msgspec.msgpack.decode(SMOLLM2_BYTES), strict=True))
    assert changes.keys() <= values.keys()
    return msgspec.msgpack.encode(list((values | changes).values()))


def refused(data: bytes, limits: Limits = LIMITS) -> str:
    with pytest.raises(PeerError) as caught:
        decode_manifest(data, limits)
    assert caught.value.code == AppCode.KV_MANIFEST
    assert caught.value.application
    assert caught.value.reason.startswith("manifest: ")
    assert len(caught.value.reason) < 200
    assert caught.value.reason.isprintable()
    return caught.value.reason.removeprefix("manifest: ")


def geometry(manifest: Manifest) -> int:
    """N, counted one unit at a time."""
    total = 0
    for run in manifest.layers:
        for _ in range(run.count):
            for first in range(0, manifest.tokens, manifest.block_tokens):
                rows = min(manifest.block_tokens, manifest.tokens - first)
                for form in precisions(manifest.wire_dtype):
                    total += fragments(unit_nbytes(run.kv_heads, run.head_dim, rows, form), manifest.symbol_size)
    return total


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    dtype = draw(st.sampled_from(sorted(ITEM_SIZES)))
    run = st.builds(
        LayerRun,
        count=st.integers(1, 4),
        kv_heads=st.integers(1, 4),
        head_dim=st.integers(1, 32),
        sliding_window=st.integers(0, 4096),
    )
    manifest = Manifest(
        model=draw(st.text("abc:-é", min_size=1, max_size=128)),
        tokens=draw(st.integers(1, 100)),
        first_token=draw(st.integers(0, 1000)),
        base=draw(st.integers(0, (1 << 62) - 1)),
        block_tokens=draw(st.integers(1, 32)),
        dtype=dtype,
        wire_dtype=draw(st.sampled_from([dtype, "bf16", *QUANTISED])),
        layers=tuple(draw(st.lists(run, min_size=1, max_size=4))),
        symbol_size=draw(st.integers(300, 1414)),
        symbols=0,
        order=draw(st.sampled_from(["utility", "prefix", "fifo"])),
        missing=draw(st.sampled_from(["mask", "zero", "recompute"])),
        profile=draw(st.text("abc", max_size=64)),
        tokens_hash=draw(st.just(b"") | st.binary(min_size=16, max_size=16)),
        rope=draw(st.text("abc", max_size=64)),
    )
    return msgspec.structs.replace(manifest, symbols=geometry(manifest))


def test_golden_bytes() -> None:
    assert encode_manifest(SMOLLM2, LIMITS) == SMOLLM2_BYTES
    assert decode_manifest(SMOLLM2_BYTES, LIMITS) == SMOLLM2
    assert decode_manifest(memoryview(SMOLLM2_BYTES), LIMITS) == SMOLLM2


def test_document_shows_the_golden_bytes() -> None:
    document = (Path(__file__).parents[1] / "docs" / "wire.md").read_text(encoding="utf-8")
    assert SMOLLM2_BYTES.hex() in "".join(document.split())


@settings(deadline=None, max_examples=150)
@given(manifests())
def test_round_trip(manifest: Manifest) -> None:
    assert decode_manifest(encode_manifest(manifest, LIMITS), LIMITS) == manifest


@settings(deadline=None, max_examples=100)
@given(manifests(), st.sampled_from([-1, 1]))
def test_wrong_number_of_symbols(manifest: Manifest, error: int) -> None:
    wrong = msgspec.structs.replace(manifest, symbols=manifest.symbols + error)
    assert "symbols" in refused(encode_manifest(wrong))
    with pytest.raises(LocalError):
        encode_manifest(wrong, LIMITS)


@settings(deadline=None, max_examples=100)
@given(manifests())
def test_runs_give_every_unit_in_order(manifest: Manifest) -> None:
    sizes = [nbytes for count, nbytes in unit_runs(manifest) for _ in range(count)]
    columns = -(-manifest.tokens // manifest.block_tokens)
    layers = [run for run in manifest.layers for _ in range(run.count)]
    forms = precisions(manifest.wire_dtype)
    assert len(sizes) == len(forms) * len(layers) * columns
    for unit, nbytes in enumerate(sizes):
        precision, block = divmod(unit, len(layers) * columns)
        layer, column = layers[block // columns], unit % columns
        rows = min(manifest.block_tokens, manifest.tokens - column * manifest.block_tokens)
        assert nbytes == unit_nbytes(layer.kv_heads, layer.head_dim, rows, forms[precision])


@pytest.mark.parametrize(
    ("shape", "nbytes", "symbol_size", "parts"),
    [
        ((3, 64, 16, "bf16"), 12_296, 1371, 9),
        ((4, 128, 16, "fp16"), 32_776, 1370, 24),  # Qwen2.5-7B, 24 packets as in the paper
        ((8, 128, 16, "bf16"), 65_544, 1370, 48),  # Llama-3.1-8B, 48
        ((1, 1, 1, "fp32"), 16, 64, 1),
        ((4, 128, 16, "int8"), 4 * (256 + 16 * (2 + 256)) + 8, 1370, 13),
        ((4, 128, 16, "int4"), 4 * (512 + 16 * (4 + 128)) + 8, 1370, 8),
        ((4, 128, 16, "fp8"), 4 * 16 * 256 + 8, 1370, 12),
        ((2, 5, 3, "int4"), 2 * (20 + 3 * (4 + 6)) + 8, 64, 2),  # an odd vector ends in half a byte
    ],
)
def test_units_and_fragments(shape: tuple[int, int, int, str], nbytes: int, symbol_size: int, parts: int) -> None:
    assert unit_nbytes(*shape) == nbytes
    assert fragments(nbytes, symbol_size) == parts


@pytest.mark.parametrize(("nbytes", "symbol_size"), [(0, 100), (-1, 100), (1, 4), (1, 0)])
def test_what_cannot_be_cut(nbytes: int, symbol_size: int) -> None:
    with pytest.raises(LocalError):
        fragments(nbytes, symbol_size)


def test_fragments_at_the_edge() -> None:
    assert fragments(1, 5) == fragments(1, 64) == fragments(60, 64) == 1
    assert fragments(61, 64) == 2


HUGE = 1 << 62
MAX = HUGE - 1


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"format_version": 2}, "format version 2"),
        ({"format_version": 0}, "format version 0"),
        ({"format_version": 300}, "format version 300"),
        ({"model": ""}, "model is empty"),
        ({"model": "a\nb"}, "model is not printable"),
        ({"model": "a" * 129}, "model"),
        ({"order": "\x1b[2J"}, "order is not printable"),
        ({"rope": "r" * 65}, "rope"),
        ({"profile": "p" * 65}, "profile"),
        ({"dtype": "int3"}, "unknown dtype 'int3'"),
        ({"wire_dtype": "int3"}, "unknown wire_dtype 'int3'"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"wire_dtype": "fp32"}, "no cast"),
        ({"wire_dtype": "fp16"}, "no cast"),
        ({"missing": "guess"}, "unknown missing mode"),
        ({"tokens_hash": bytes(15)}, "tokens_hash has 15 bytes"),
        ({"tokens_hash": bytes(17)}, "tokens_hash"),
        ({"tokens": 0}, "tokens must be"),
        ({"tokens": -1}, "tokens"),
        ({"tokens": MAX}, "tokens must be"),
        ({"tokens": HUGE}, "tokens"),
        ({"first_token": (1 << 20) - 511}, "first_token must be"),
        ({"first_token": MAX}, "first_token must be"),
        ({"base": -1}, "base"),
        ({"base": HUGE}, "base"),
        ({"block_tokens": 0}, "block_tokens must be"),
        ({"block_tokens": 257}, "block_tokens must be"),
        ({"symbol_size": 63}, "symbol_size must be"),
        ({"symbol_size": 1415}, "symbol_size must be"),
        ({"symbols": 0}, "symbols must be"),
        ({"symbols": (1 << 20) + 1}, "symbols must be"),
        ({"symbols": 8639}, "the geometry gives 8640"),
        ({"layers": []}, "number of layer runs must be"),
        ({"layers": [[0, 3, 64, 0]]}, "layers of a run must be"),
        ({"layers": [[257, 3, 64, 0]]}, "layers of a run must be"),
        ({"layers": [[256, 3, 64, 0], [1, 3, 64, 0]]}, "number of layers must be"),
        ({"layers": [[1, 1, 1, 0]] * 257}, "number of layer runs must be"),
        ({"layers": [[1, 1, 1, 0]] * 4097}, "layers"),
        ({"layers": [[30, 0, 64, 0]]}, "kv_heads must be"),
        ({"layers": [[30, 257, 64, 0]]}, "kv_heads must be"),
        ({"layers": [[30, 3, 0, 0]]}, "head_dim must be"),
        ({"layers": [[30, 3, 1025, 0]]}, "head_dim must be"),
        ({"layers": [[MAX, MAX, MAX, 0]]}, "layers of a run must be"),
        ({"layers": [[1, MAX, MAX, 0]]}, "kv_heads must be"),
        ({"layers": [[1, 1, MAX, 0]]}, "head_dim must be"),
        ({"layers": [[30, 3, -64, 0]]}, "layers"),
        ({"layers": [[30, 3, 64, 0, 9]]}, "layers"),
        ({"layers": [[30, 3]]}, "layers"),
        ({"layers": [[30, 3, 64.0, 0]]}, "layers"),
        ({"tokens": 512.0}, "tokens"),
        ({"tokens": float("nan")}, "tokens"),
        ({"tokens": float("inf")}, "tokens"),
        ({"tokens": "512"}, "tokens"),
        ({"tokens": None}, "tokens"),
        ({"tokens": True}, "tokens"),
        ({"model": b"raw"}, "model"),
        ({"tokens_hash": "0123456789abcdef"}, "tokens_hash"),
        ({"layers": {"count": 1}}, "layers"),
    ],
)
def test_one_reason_each(changes: dict[str, Any], word: str) -> None:
    assert word in refused(with_fields(**changes))


def test_products_are_bounded() -> None:
    # Every dimension is within its limit; only the products are not.
    everything = [[256, 256, 1024, 0]]
    assert "can be numbered" in refused(with_fields(layers=everything))
    many = with_fields(layers=[[256, 1, 1, 0]], tokens=1 << 20, block_tokens=1, symbol_size=64, symbols=1 << 20)
    assert "units" in refused(many)
    bulky = {"layers": [[256, 8, 128, 0]], "tokens": 1 << 18, "symbols": 1 << 20}
    assert "bytes are above the limit" in refused(with_fields(**bulky))


def test_numbering_is_used_to_the_end() -> None:
    # 2 rows x 19 heads x 101 elements and the digest: 256 fragments of 60 bytes exactly.
    largest = {"layers": [[1, 19, 101, 0]], "tokens": 2, "block_tokens": 2, "symbol_size": 64, "symbols": 256}
    assert decode_manifest(with_fields(**largest), LIMITS).symbols == 256
    assert "259 symbols" in refused(with_fields(**largest | {"layers": [[1, 19, 102, 0]]}))
    most = {"layers": [[16, 1, 1, 0]], "tokens": 1 << 20, "block_tokens": 1, "symbol_size": 64, "symbols": 1 << 24}
    limits = Limits(max_symbols=1 << 25)
    assert decode_manifest(with_fields(**most), limits).symbols == 1 << 24
    assert "units" in refused(with_fields(**most | {"layers": [[17, 1, 1, 0]]}), limits)


def test_byte_limit_is_exact() -> None:
    total = sum(count * nbytes for count, nbytes in unit_runs(SMOLLM2))
    assert total == 30 * 32 * 12_296
    assert decode_manifest(SMOLLM2_BYTES, Limits(max_transfer_bytes=total)) == SMOLLM2
    assert "above the limit" in refused(SMOLLM2_BYTES, Limits(max_transfer_bytes=total - 1))


@pytest.mark.parametrize("dtype", sorted(ITEM_SIZES))
@pytest.mark.parametrize("wire_dtype", QUANTISED)
def test_what_is_held_is_limited_and_not_what_travels(dtype: str, wire_dtype: str) -> None:
    """A quantised cache takes its full size at the receiver: the limit is of that."""
    changed = msgspec.structs.replace(SMOLLM2, dtype=dtype, wire_dtype=wire_dtype)
    data = encode_manifest(msgspec.structs.replace(changed, symbols=geometry(changed)))
    units = sum(count * nbytes for count, nbytes in unit_runs(changed))
    total = 30 * 512 * 3 * 2 * 64 * ITEM_SIZES[dtype] + (units if wire_dtype == "progressive" else 0)
    manifest = decode_manifest(data, Limits(max_transfer_bytes=total))
    assert held_nbytes(manifest) == total > units
    assert "above the limit" in refused(data, Limits(max_transfer_bytes=total - 1))


def test_units_can_be_more_than_the_cache_is() -> None:
    """One row of one element is mostly scales and digest."""
    tiny = msgspec.structs.replace(
        SMOLLM2, wire_dtype="int4", block_tokens=1, layers=(LayerRun(count=1, kv_heads=1, head_dim=1),), symbols=512
    )
    assert held_nbytes(decode_manifest(encode_manifest(tiny), LIMITS)) == 512 * (4 + 4 + 2 + 8)


def test_every_wire_dtype_has_a_size() -> None:
    assert set(ITEM_SIZES) | set(QUANTISED) == set(WIRE_DTYPES)
    for wire_dtype in WIRE_DTYPES:
        assert unit_nbytes(2, 3, 4, precisions(wire_dtype)[0]) > 2 * 2 * 3 * 4 // 2
    assert precisions("progressive") == ("int4", "refinement")
    assert unit_nbytes(2, 5, 3, "refinement") == 2 * 3 * 2 * 3 + 8


def test_size_is_judged_first() -> None:
    limits = Limits(max_manifest_bytes=len(SMOLLM2_BYTES))
    assert decode_manifest(SMOLLM2_BYTES, limits) == SMOLLM2
    assert "above the limit" in refused(SMOLLM2_BYTES + b"\x00", limits)


@pytest.mark.parametrize("cut", range(len(SMOLLM2_BYTES)))
def test_every_truncation(cut: int) -> None:
    refused(SMOLLM2_BYTES[:cut])


@pytest.mark.parametrize("data", [b"\x91\x02", b"\x9f\x02\xc0", b"\xdc\x00\x01\x02", b"\xdc\xff\xff\x02\xc0"])
def test_another_version_is_named_whatever_follows(data: bytes) -> None:
    assert "format version 2 is not supported" in refused(data)


@pytest.mark.parametrize("data", [b"\x91\x80", b"\x91\xff", b"\x91", b"\xdc\x00\x01", b"\xdd\x00\x00\x02"])
def test_only_a_small_number_is_taken_for_a_version(data: bytes) -> None:
    assert "format version" not in refused(data)


HOSTILE = {
    "trailing byte": SMOLLM2_BYTES + b"\x00",
    "two manifests": SMOLLM2_BYTES * 2,
    "invalid UTF-8": SMOLLM2_BYTES.replace(b"utility", b"util\xff\xfey"),
    "surrogate": SMOLLM2_BYTES.replace(b"utility", b"util\xed\xa0\x80"),
    "a map": msgspec.msgpack.encode(msgspec.structs.asdict(SMOLLM2)),
    "one field more": b"\xdc\x00\x11" + SMOLLM2_BYTES[3:] + b"\x00",
    "one field less": b"\xdc\x00\x0f" + SMOLLM2_BYTES[3:],
    "array of 2^32 - 1": b"\xdd\xff\xff\xff\xff" + SMOLLM2_BYTES[3:],
    "string of 2^32 - 1": b"\xdc\x00\x10\x01\xdb\xff\xff\xff\xff",
    "bytes of 2^32 - 1": SMOLLM2_BYTES.replace(b"\xc4\x10", b"\xc6\xff\xff\xff\xff"),
    "2^32 - 1 layer runs": SMOLLM2_BYTES.replace(b"\x91\x94", b"\xdd\xff\xff\xff\xff\x94"),
    "deep nesting": b"\x91" * 65_000,
    "deep nesting in a field": SMOLLM2_BYTES[:3] + b"\x91" * 65_000,
    "extension type": b"\xc7\x08\x01" + bytes(8),
    "JSON": msgspec.json.encode(SMOLLM2),
    "nothing": b"",
    "nil": b"\xc0",
    "64-bit product": with_fields(layers=[[1 << 16, 1 << 16, 1 << 16, 0]], tokens=1 << 16),
    "huge floats": struct.pack(">BHBd", 0xDC, 16, 0xCB, 1e308),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_cost_no_memory(name: str) -> None:
    tracemalloc.start()
    try:
        refused(HOSTILE[name])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@settings(deadline=None, max_examples=500)
@given(
    st.binary(max_size=100)
    | st.tuples(st.integers(0, 110), st.binary(max_size=4)).map(
        lambda cut: SMOLLM2_BYTES[: cut[0]] + cut[1] + SMOLLM2_BYTES[cut[0] + len(cut[1]) :]
    )
)
def test_any_bytes_raise_only_peer_errors(data: bytes) -> None:
    manifest: Manifest | None = None
    with contextlib.suppress(PeerError):
        manifest = decode_manifest(data, LIMITS)
    if manifest is None:
        refused(data)
    else:
        assert geometry(manifest) == manifest.symbols
        assert decode_manifest(encode_manifest(manifest, LIMITS), LIMITS) == manifest
