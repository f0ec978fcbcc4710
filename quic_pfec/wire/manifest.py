"""The manifest: what a transfer is about, in one packet (docs/wire.md §6).

It gives the geometry of the cache, from which both ends derive the same units and the same number of symbols, so no map
of blocks has to travel. It is the first structured thing that an endpoint reads from a peer and decides how much memory
it sets aside, hence the order of work here: bounded decoding, then every number against its limit, then the products
(in Python's integers, which do not overflow), and only the caller allocates.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

import msgspec

from quic_pfec.wire.errors import AppCode, LocalError, PeerError
from quic_pfec.wire.limits import MAX_FRAGMENTS, MAX_UNITS, MIN_SYMBOL_SIZE, UNIT_HEADER_SIZE, Limits

__all__ = [
    "DIGEST_SIZE",
    "FORMAT_VERSION",
    "ITEM_SIZES",
    "MISSING_MODES",
    "MODEL_UNSTATED",
    "QUANTISED",
    "REFINEMENT",
    "WIRE_DTYPES",
    "LayerRun",
    "Manifest",
    "cast_problem",
    "decode_manifest",
    "encode_manifest",
    "fragments",
    "held_nbytes",
    "precisions",
    "row_nbytes",
    "scale_nbytes",
    "unit_nbytes",
    "unit_runs",
    "vector_nbytes",
]

FORMAT_VERSION = 1
DIGEST_SIZE = 8
"""Bytes of xxh3_64 at the end of each unit."""
ITEM_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of one element, by dtype name: the dtypes that a cache may have, and that travel as they are."""
QUANTISED = ("int8", "fp8", "int4", "progressive")
"""Wire dtypes that no cache has: made at the sender, turned back at the receiver (docs/wire.md §3)."""
WIRE_DTYPES = (*ITEM_SIZES, *QUANTISED)
REFINEMENT = "refinement"
"""The form of units that refine those of "int4"; no wire dtype of its own."""
MISSING_MODES = ("mask", "zero", "recompute")
"""What a receiver can be asked to do about rows that did not come."""
MODEL_UNSTATED = "unstated"
"""The `model` of a sender that does not know its fingerprint: the receiver then has only shapes to go by."""
MAX_BLOCK_TOKENS = 256
TOKENS_HASH_SIZE = 16

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]
_Word = Annotated[str, msgspec.Meta(max_length=16)]
_Name = Annotated[str, msgspec.Meta(max_length=64)]


class LayerRun(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """A run of `count` consecutive layers of one shape; `sliding_window` is in tokens, 0 = full attention."""

    count: _Count
    kv_heads: _Count
    head_dim: _Count
    sliding_window: _Count = 0


class Manifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """Description of one transfer; written as a MessagePack array in this order, all fields present.

    Positional, so a duplicate key cannot be written. Sizes are bytes, positions and counts are tokens unless said.
    """

    format_version: _Count = FORMAT_VERSION
    model: Annotated[str, msgspec.Meta(max_length=128)]
    """Fingerprint of the model whose cache this is, or MODEL_UNSTATED."""
    tokens: _Count
    """Rows in this transfer."""
    first_token: _Count
    """Absolute position of the first row."""
    base: _Count
    """Handle of an earlier transfer that this one extends, 0 = none."""
    block_tokens: _Count
    """Rows in a unit; the last column may have fewer."""
    dtype: _Word
    """Element type of the cache at the sender."""
    wire_dtype: _Word
    """Element type in the units: `dtype` itself, bf16, or one of QUANTISED."""
    layers: Annotated[tuple[LayerRun, ...], msgspec.Meta(max_length=4096)]
    symbol_size: _Count
    """Bytes of every symbol, unit header included."""
    symbols: _Count
    """N, the number of source symbols; must equal what the geometry gives."""
    order: _Name
    """Name of the order in which the sender ranks units: for reports, no receiver depends on it."""
    missing: _Word
    """One of MISSING_MODES."""
    profile: _Name
    """Name of the utility profile behind the order; may be empty."""
    tokens_hash: Annotated[bytes, msgspec.Meta(max_length=TOKENS_HASH_SIZE)]
    """16 bytes over the token ids 0..first_token+tokens, or empty = not given."""
    rope: _Name
    """Name of the rotary embedding and its parameters that the keys carry."""


_decoder = msgspec.msgpack.Decoder(Manifest)
_encoder = msgspec.msgpack.Encoder()
_WHERE = re.compile(r" - at `\$\[(\d+)\].*`$")


_ELEMENT_BITS = {name: 8 * size for name, size in ITEM_SIZES.items()} | {"int8": 8, "fp8": 8, "int4": 4, REFINEMENT: 4}
_SCALE_NBYTES = {"int8": 2, "int4": 4}  # fp16: a scale; a minimum and a scale


def precisions(wire_dtype: str) -> tuple[str, ...]:
    """The forms of the units that a block makes, in the order of their ids: one, but for "progressive".

    The functions of sizes below are of forms, which have the names of the wire dtypes that have only one.
    """
    return ("int4", REFINEMENT) if wire_dtype == "progressive" else (wire_dtype,)


def vector_nbytes(head_dim: int, form: str) -> int:
    """Bytes of the elements of one key or value vector."""
    return -(-head_dim * _ELEMENT_BITS[form] // 8)


def scale_nbytes(form: str) -> int:
    """Bytes that scale one channel of the keys or one value vector; 0 for forms without scales."""
    return _SCALE_NBYTES.get(form, 0)


def row_nbytes(head_dim: int, form: str) -> int:
    """Bytes of one row of one head: scale of the values, keys, values."""
    return scale_nbytes(form) + 2 * vector_nbytes(head_dim, form)


def unit_nbytes(kv_heads: int, head_dim: int, rows: int, form: str) -> int:
    """Bytes of a unit: scales of the key channels, K and V of `rows` rows of one layer, and the digest."""
    return kv_heads * (head_dim * scale_nbytes(form) + rows * row_nbytes(head_dim, form)) + DIGEST_SIZE


def cast_problem(dtype: str, wire_dtype: str) -> str | None:
    """Why a cache of `dtype` cannot travel as `wire_dtype`, None if it can. Both must exist."""
    if wire_dtype in (dtype, "bf16", *QUANTISED):
        return None
    return f"no cast from {dtype} to {wire_dtype} is defined"


def fragments(nbytes: int, symbol_size: int) -> int:
    """Symbols that a unit of `nbytes` takes; each holds `symbol_size` less the 4-byte unit header."""
    if nbytes < 1 or symbol_size <= UNIT_HEADER_SIZE:
        raise LocalError(f"cannot cut {nbytes} bytes into symbols of {symbol_size}")
    return -(-nbytes // (symbol_size - UNIT_HEADER_SIZE))


def unit_runs(manifest: Manifest) -> Iterator[tuple[int, int]]:
    """The units of a checked manifest in the order of their ids, as runs (count, nbytes) of one size.

    For each precision, each layer gives its whole columns, then its last column where `tokens` is no multiple of
    `block_tokens`.
    """
    whole, rest = divmod(manifest.tokens, manifest.block_tokens)
    for form in precisions(manifest.wire_dtype):
        for run in manifest.layers:
            for _ in range(run.count):
                if whole:
                    yield whole, unit_nbytes(run.kv_heads, run.head_dim, manifest.block_tokens, form)
                if rest:
                    yield 1, unit_nbytes(run.kv_heads, run.head_dim, rest, form)


def held_nbytes(manifest: Manifest) -> int:
    """Bytes that a receiver must be ready to hold: of all units or, if it is more, of a quantised cache turned back;
    of both in "progressive", where a unit is kept for the one that belongs to it.

    `manifest` must have passed its checks, but for the totals.
    """
    total = sum(count * nbytes for count, nbytes in unit_runs(manifest))
    if manifest.wire_dtype not in QUANTISED:
        return total
    elements = manifest.tokens * sum(run.count * run.kv_heads * 2 * run.head_dim for run in manifest.layers)
    cache = elements * ITEM_SIZES[manifest.dtype]
    return max(total, cache) if len(precisions(manifest.wire_dtype)) == 1 else total + cache


def encode_manifest(manifest: Manifest, limits: Limits | None = None) -> bytes:
    """The manifest's bytes. With `limits`, also checks it as a receiver with these limits would.

    Raises `LocalError` when it contradicts itself or a limit.
    """
    data = _encoder.encode(manifest)
    if limits is not None:
        try:
            decode_manifest(data, limits)
        except PeerError as error:
            raise LocalError(error.reason) from error
    return data


def decode_manifest(data: bytes | memoryview, limits: Limits) -> Manifest:
    """Read and check a manifest; a returned one is consistent, within `limits`, and safe to allocate for.

    Raises `PeerError` with the application code KV_MANIFEST and one reason for each kind of fault.
    """
    if len(data) > limits.max_manifest_bytes:
        raise _invalid(f"{len(data)} bytes are above the limit of {limits.max_manifest_bytes}")
    version = _peek_version(data)
    if version is not None and version != FORMAT_VERSION:
        raise _invalid(f"format version {version} is not supported")
    try:
        manifest = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise _invalid(_WHERE.sub(_name_field, str(error))) from error
    problem = (
        _names_problem(manifest)
        or _numbers_problem(manifest, limits)
        or _layers_problem(manifest, limits)
        or _totals_problem(manifest, limits)
    )
    if problem is not None:
        raise _invalid(problem)
    return manifest


def _peek_version(data: bytes | memoryview) -> int | None:
    # Another version may have another number of fields, which the decoder would report instead. Small positive numbers
    # only: anything else is left to the decoder.
    if len(data) >= 2 and data[0] >> 4 == 0x9:
        first = data[1]
    elif len(data) >= 4 and data[0] == 0xDC:
        first = data[3]
    else:
        return None
    return first if first < 0x80 else None


def _names_problem(manifest: Manifest) -> str | None:
    if manifest.format_version != FORMAT_VERSION:
        return f"format version {manifest.format_version} is not supported"
    # These names reach logs and terminals.
    for name in ("model", "dtype", "wire_dtype", "order", "missing", "profile", "rope"):
        if not getattr(manifest, name).isprintable():
            return f"{name} is not printable"
    if not manifest.model:
        return "model is empty"
    if manifest.dtype not in ITEM_SIZES:
        return f"unknown dtype {manifest.dtype!r}"
    if manifest.wire_dtype not in WIRE_DTYPES:
        return f"unknown wire_dtype {manifest.wire_dtype!r}"
    problem = cast_problem(manifest.dtype, manifest.wire_dtype)
    if problem is not None:
        return problem
    if manifest.missing not in MISSING_MODES:
        return f"unknown missing mode {manifest.missing!r}"
    if len(manifest.tokens_hash) not in (0, TOKENS_HASH_SIZE):
        return f"tokens_hash has {len(manifest.tokens_hash)} bytes instead of 0 or {TOKENS_HASH_SIZE}"
    return None


def _numbers_problem(manifest: Manifest, limits: Limits) -> str | None:
    for name, value, low, high in (
        ("tokens", manifest.tokens, 1, limits.max_tokens),
        ("first_token", manifest.first_token, 0, limits.max_tokens - manifest.tokens),
        ("block_tokens", manifest.block_tokens, 1, MAX_BLOCK_TOKENS),
        ("symbol_size", manifest.symbol_size, MIN_SYMBOL_SIZE, limits.max_symbol_size),
        ("symbols", manifest.symbols, 1, limits.max_symbols),
        ("number of layer runs", len(manifest.layers), 1, limits.max_layers),
    ):
        if not low <= value <= high:
            return _out_of_range(name, value, low, high)
    return None


def _layers_problem(manifest: Manifest, limits: Limits) -> str | None:
    for run in manifest.layers:
        for name, value, low, high in (
            ("layers of a run", run.count, 1, limits.max_layers),
            ("kv_heads", run.kv_heads, 1, limits.max_kv_heads),
            ("head_dim", run.head_dim, 1, limits.max_head_dim),
        ):
            if not low <= value <= high:
                return _out_of_range(name, value, low, high)
    layers = sum(run.count for run in manifest.layers)
    if layers > limits.max_layers:
        return _out_of_range("number of layers", layers, 1, limits.max_layers)
    return None


def _totals_problem(manifest: Manifest, limits: Limits) -> str | None:
    units = symbols = 0
    for count, nbytes in unit_runs(manifest):  # at most two steps a layer and precision
        parts = fragments(nbytes, manifest.symbol_size)
        if parts > MAX_FRAGMENTS:
            return f"a unit of {nbytes} bytes takes {parts} symbols, at most {MAX_FRAGMENTS} can be numbered"
        units += count
        symbols += count * parts
    if units > MAX_UNITS:
        return f"{units} units, at most {MAX_UNITS} can be numbered"
    total_bytes = held_nbytes(manifest)
    if total_bytes > limits.max_transfer_bytes:
        return f"{total_bytes} bytes are above the limit of {limits.max_transfer_bytes}"
    if symbols != manifest.symbols:
        return f"symbols is {manifest.symbols}, the geometry gives {symbols}"
    return None


def _out_of_range(name: str, value: int, low: int, high: int) -> str:
    return f"{name} must be {low} to {high}, not {value}"


def _name_field(match: re.Match[str]) -> str:
    return f" in {Manifest.__struct_fields__[int(match.group(1))]}"


def _invalid(problem: str) -> PeerError:
    return PeerError(AppCode.KV_MANIFEST, f"manifest: {problem}", application=True)
