"""Bytes of a unit: packing, digest, dtype conversion and the finite check, all on raw bit patterns.

numpy has no bfloat16, and a transport has no business interpreting values: a cache is held as unsigned integers of the
element's width, and the little that must be known of its meaning (rounding to bf16, what is not finite) is bit
arithmetic written out here; wire dtypes with scales are made in `quantise`. Within a unit the order is row, head, K
then V, so that a row and head whose bytes all came is usable although the rest of its unit is lost; 8 bytes of xxh3_64
with the unit id as seed end it, because one bad repair can corrupt every symbol recovered with it (docs/wire.md §3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from quic_pfec.fec.codec import scatter_unit
from quic_pfec.kv.layout import LayerShape, Layout
from quic_pfec.kv.quantise import Form
from quic_pfec.wire.errors import LocalError
from quic_pfec.wire.manifest import DIGEST_SIZE

__all__ = [
    "RAW_DTYPE",
    "BytesLike",
    "KVArrays",
    "RawArray",
    "all_finite",
    "as_received",
    "bf16_to_fp32",
    "byte_view",
    "check_geometry",
    "convert",
    "digest",
    "digest_ok",
    "floats",
    "form_of",
    "fp32_to_bf16",
    "non_finite",
    "pack_symbols",
    "write_unit",
]

RawArray = npt.NDArray[Any]
"""Bit patterns of KV elements: uint16 for bf16 and fp16, uint32 for fp32."""

RAW_DTYPE: Final[dict[str, np.dtype[Any]]] = {"bf16": np.dtype("<u2"), "fp16": np.dtype("<u2"), "fp32": np.dtype("<u4")}
"""Raw dtype of each dtype name; little endian, as on the wire."""

BytesLike = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
"""Contiguous bytes in any of the forms that reach this package."""

_NATIVE: Final[dict[str, np.dtype[Any]]] = {"fp16": np.dtype("<f2"), "fp32": np.dtype("<f4")}
_EXPONENT: Final[dict[str, int]] = {"bf16": 0x7F80, "fp16": 0x7C00, "fp32": 0x7F800000}
_FP16_MAX: Final = 65504.0


@dataclass(frozen=True, slots=True, eq=False)
class KVArrays:
    """Keys and values of a cache, per layer, as raw bits `[kv_heads, tokens, head_dim]` of RAW_DTYPE[dtype].

    Layers may differ in heads and head_dim, never in tokens. Raises LocalError with the layer that is wrong.
    """

    layers: tuple[tuple[RawArray, RawArray], ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in RAW_DTYPE:
            raise LocalError(f"unknown dtype {self.dtype!r}, expected one of {', '.join(RAW_DTYPE)}")
        if not self.layers:
            raise LocalError("the cache has no layers")
        raw = RAW_DTYPE[self.dtype]
        for index, (keys, values) in enumerate(self.layers):
            if keys.dtype != raw or values.dtype != raw:
                raise LocalError(f"layer {index}: {self.dtype} needs {raw} bits, got {keys.dtype} and {values.dtype}")
            if keys.ndim != 3 or keys.shape != values.shape:
                raise LocalError(
                    f"layer {index}: keys and values must both be [kv_heads, tokens, head_dim], "
                    f"got {list(keys.shape)} and {list(values.shape)}"
                )
            if 0 in keys.shape:
                raise LocalError(f"layer {index} is empty: {list(keys.shape)}")
            if keys.shape[1] != self.tokens:
                raise LocalError(f"layer {index} holds {keys.shape[1]} tokens, layer 0 holds {self.tokens}")

    @classmethod
    def of(cls, layers: Sequence[tuple[RawArray, RawArray]], dtype: str) -> KVArrays:
        """Wrap arrays that may also be native floats: float16 as fp16, float32 as fp32 (viewed, never copied).

        bfloat16 must come as uint16 bits. Raises LocalError.
        """
        native = _NATIVE.get(dtype)

        def raw(array: RawArray) -> RawArray:
            return array.view(RAW_DTYPE[dtype]) if native is not None and array.dtype == native else array

        return cls(tuple((raw(keys), raw(values)) for keys, values in layers), dtype)

    @property
    def tokens(self) -> int:
        return int(self.layers[0][0].shape[1])

    def shapes(self, sliding_windows: Sequence[int] | None = None) -> tuple[LayerShape, ...]:
        """Shape of every layer; `sliding_windows` gives each one's attention window (0 = full), None = all full."""
        if sliding_windows is not None and len(sliding_windows) != len(self.layers):
            raise LocalError(f"{len(sliding_windows)} sliding windows for {len(self.layers)} layers")
        windows = sliding_windows or [0] * len(self.layers)
        return tuple(
            LayerShape(int(keys.shape[0]), int(keys.shape[2]), window)
            for (keys, _), window in zip(self.layers, windows, strict=True)
        )

    def convert(self, dtype: str) -> KVArrays:
        """The same cache in another dtype (see `convert`); self if it is that already."""
        if dtype == self.dtype:
            return self
        pairs = ((convert(keys, self.dtype, dtype), convert(values, self.dtype, dtype)) for keys, values in self.layers)
        return KVArrays(tuple(pairs), dtype)


def fp32_to_bf16(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    """Round float32 bit patterns to bfloat16, to nearest even; NaN stays NaN, overflow becomes Inf."""
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    # The carry would turn a NaN into Inf or wrap it to zero: truncate it instead, with the quiet bit set.
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if nan.any():
        rounded[nan] = (bits[nan] >> np.uint32(16)) | np.uint32(0x40)
    return rounded.astype(np.uint16)


def bf16_to_fp32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint32]:
    """Widen bfloat16 bit patterns to float32, exactly."""
    return bits.astype(np.uint32) << np.uint32(16)


def convert(bits: RawArray, source: str, target: str) -> RawArray:
    """Convert raw bits of dtype `source` to raw bits of `target`, rounding to nearest even.

    Finite values beyond fp16's range become its largest: the bf16 neighbour of an fp16 value may lie just outside it,
    and an infinity there would ruin every logit. NaN and Inf keep their kind. Raises LocalError for unknown dtypes.
    """
    for dtype in (source, target):
        if dtype not in RAW_DTYPE:
            raise LocalError(f"unknown dtype {dtype!r}, expected one of {', '.join(RAW_DTYPE)}")
    if source == target:
        return bits
    if source == "fp16":
        wide = bits.view(_NATIVE["fp16"]).astype(_NATIVE["fp32"]).view(np.uint32)
    else:
        wide = bf16_to_fp32(bits) if source == "bf16" else bits
    if target == "fp32":
        return wide
    if target == "bf16":
        return fp32_to_bf16(wide)
    values = wide.view(_NATIVE["fp32"])
    narrow = np.where(np.isinf(values), values, np.clip(values, -_FP16_MAX, _FP16_MAX))
    return narrow.astype(_NATIVE["fp16"]).view(RAW_DTYPE["fp16"])


def floats(bits: RawArray, dtype: str) -> npt.NDArray[np.float32]:
    """Raw bits as the numbers they are, exactly."""
    values: npt.NDArray[np.float32] = convert(bits, dtype, "fp32").view(np.float32)
    return values


def form_of(layout: Layout, layer: int) -> Form:
    """How the layer's units are written, those that refine others apart."""
    shape = layout.layers[layer]
    return Form(layout.forms[0], shape.kv_heads, shape.head_dim)


def as_received(layout: Layout, arrays: KVArrays) -> KVArrays:
    """The cache that a receiver has of all units, in the dtype of `arrays`: rounded once, or quantised and turned back.

    Raises LocalError if `arrays` is not of the layout's geometry.
    """
    _check_shapes(layout, arrays)
    if not layout.quantised:
        return arrays.convert(layout.wire_dtype).convert(arrays.dtype)
    layers = []
    for layer, pair in enumerate(arrays.layers):
        keys, values = (floats(bits, arrays.dtype) for bits in pair)
        refined = len(layout.forms) > 1
        back = form_of(layout, layer).as_received(keys, values, layout.block_tokens, refined=refined)
        layers.append((convert(back[0].view(np.uint32), "fp32", arrays.dtype),
                       convert(back[1].view(np.uint32), "fp32", arrays.dtype)))  # fmt: skip
    return KVArrays(tuple(layers), arrays.dtype)


def non_finite(bits: RawArray, dtype: str) -> npt.NDArray[np.bool_]:
    """Which elements are NaN or infinite: all exponent bits set. Same shape as `bits`."""
    exponent = bits.dtype.type(_EXPONENT[dtype])
    result: npt.NDArray[np.bool_] = np.equal(bits & exponent, exponent)
    return result


def all_finite(bits: RawArray, dtype: str) -> bool:
    """Whether no element is NaN or infinite."""
    return not bool(non_finite(bits, dtype).any())


def byte_view(data: BytesLike) -> memoryview:
    """Contiguous bytes as a view of bytes, without a copy. Raises TypeError if they are not contiguous."""
    return (data.data if isinstance(data, np.ndarray) else memoryview(data)).cast("B")


def digest(unit: int, body: BytesLike) -> bytes:
    """Digest of a unit's KV bytes: xxh3_64 with the unit id as seed, little endian (docs/wire.md §3)."""
    return xxhash.xxh3_64_intdigest(byte_view(body), seed=unit).to_bytes(DIGEST_SIZE, "little")


def digest_ok(unit: int, data: BytesLike) -> bool:
    """Whether the last 8 bytes of `data` are the digest of the others, as unit `unit`; never for fewer bytes."""
    view = byte_view(data)
    if view.nbytes < DIGEST_SIZE:
        return False
    return view[-DIGEST_SIZE:] == digest(unit, view[:-DIGEST_SIZE])


def write_unit(layout: Layout, arrays: KVArrays, unit: int, out: npt.NDArray[np.uint8]) -> None:
    """Pack one unit with its digest into `out`, uint8 [layout.unit_nbytes(unit)], contiguous.

    `arrays` must fit the layout (`check_geometry`). Raises LocalError for a wrong unit or a wrong size.
    """
    start, stop = layout.row_range(unit)
    if out.nbytes != layout.unit_nbytes(unit):
        raise LocalError(f"unit {unit} has {layout.unit_nbytes(unit)} bytes, the destination {out.nbytes}")
    keys, values = arrays.layers[layout.layer_of(unit)]
    shape = layout.layers[layout.layer_of(unit)]
    if layout.quantised:
        rows = [floats(part[:, start:stop], arrays.dtype) for part in (keys, values)]
        form, refined = form_of(layout, layout.layer_of(unit)), layout.precision_of(unit) > 0
        [(bodies, finer, _)] = form.bodies(rows[0], rows[1], stop - start, refined=refined)
        out[:-DIGEST_SIZE] = bodies[0] if finer is None else finer[0]
    else:
        body = out[:-DIGEST_SIZE].view(keys.dtype).reshape(stop - start, shape.kv_heads, 2, shape.head_dim)
        body[:, :, 0] = keys[:, start:stop].transpose(1, 0, 2)
        body[:, :, 1] = values[:, start:stop].transpose(1, 0, 2)
    out[-DIGEST_SIZE:] = np.frombuffer(digest(unit, out[:-DIGEST_SIZE]), dtype=np.uint8)


def check_geometry(layout: Layout, arrays: KVArrays) -> None:
    """Raise LocalError unless `arrays` has the layout's wire dtype (any, if it quantises), tokens and layer shapes."""
    if not layout.quantised and arrays.dtype != layout.wire_dtype:
        raise LocalError(f"the layout sends {layout.wire_dtype}, the arrays hold {arrays.dtype}")
    _check_shapes(layout, arrays)


def _check_shapes(layout: Layout, arrays: KVArrays) -> None:
    expected = [(shape.kv_heads, layout.tokens, shape.head_dim) for shape in layout.layers]
    actual = [keys.shape for keys, _ in arrays.layers]
    if len(actual) != len(expected):
        raise LocalError(f"the layout has {len(expected)} layers, the arrays {len(actual)}")
    for index, (want, have) in enumerate(zip(expected, actual, strict=True)):
        if want != have:
            raise LocalError(f"layer {index}: the layout has {list(want)}, the arrays {list(have)}")


def pack_symbols(
    layout: Layout, arrays: KVArrays, order: npt.NDArray[np.int32], run: memoryview, symbol_size: int
) -> tuple[npt.NDArray[np.int64], int]:
    """Pack every unit, digests included, straight into the symbols of `run`, in the order of sending.

    `order` is a permutation of all unit ids, int32 [unit_count]; `run` is writable, uint8 [N, symbol_size], as
    `Encoder.reserve_run` gives it. Arrays of another dtype are converted to the wire dtype layer by layer, so that no
    second copy of the cache ever exists. Returns the first symbol id of each unit by unit id, int64 [unit_count], and
    how many values were beyond the range of a quantised wire dtype and became the nearest that it holds.
    Raises LocalError, also for a layer that is NaN or infinite somewhere.
    """
    _check_shapes(layout, arrays)
    if order.shape != (layout.unit_count,) or not np.array_equal(np.sort(order), np.arange(layout.unit_count)):
        raise LocalError(f"the order must be a permutation of {layout.unit_count} units")
    counts = layout.fragment_counts(symbol_size)[order]
    first = np.empty(layout.unit_count, dtype=np.int64)
    first[order] = np.cumsum(counts, dtype=np.int64) - counts
    saturated = 0
    for layer in range(len(layout.layers)):
        firsts = first.reshape(len(layout.forms), -1, layout.columns)[:, layer].tolist()
        if layout.quantised:
            saturated += _quantise_layer(layout, arrays, layer, firsts, run)
        else:
            _pack_layer(layout, arrays, layer, firsts[0], run)
    return first, saturated


def _quantise_layer(layout: Layout, arrays: KVArrays, layer: int, firsts: list[list[int]], run: memoryview) -> int:
    wide = []
    for name, bits in zip(("keys", "values"), arrays.layers[layer], strict=True):
        _refuse_non_finite(layer, name, bits, arrays.dtype)
        wide.append(floats(bits, arrays.dtype))
    saturated = column = 0
    refined = len(layout.forms) > 1
    for bodies, finer, beyond in form_of(layout, layer).bodies(wide[0], wide[1], layout.block_tokens, refined=refined):
        saturated += beyond
        for precision, made in enumerate((bodies, finer)):
            for index, body in enumerate(() if made is None else made):
                unit = precision * layout.block_count + layer * layout.columns + column + index
                scatter_unit(run, firsts[precision][column + index], unit, body, digest(unit, body))
        column += len(bodies)
    return saturated


def _refuse_non_finite(layer: int, name: str, bits: RawArray, dtype: str) -> None:
    if not all_finite(bits, dtype):
        raise LocalError(f"layer {layer}: {name} hold NaN or infinite values in {dtype}")


def _pack_layer(layout: Layout, arrays: KVArrays, layer: int, firsts: list[int], run: memoryview) -> None:
    # The layer is interleaved at once, in cache; its units are then slices of it that go to their symbols in one copy.
    shape = layout.layers[layer]
    rows = np.empty((layout.tokens, shape.kv_heads, 2, shape.head_dim), dtype=RAW_DTYPE[layout.wire_dtype])
    for part, (name, bits) in enumerate(zip(("keys", "values"), arrays.layers[layer], strict=True)):
        wire = convert(bits, arrays.dtype, layout.wire_dtype)
        _refuse_non_finite(layer, name, wire, layout.wire_dtype)
        rows[:, :, part] = wire.transpose(1, 0, 2)
    source = byte_view(rows.reshape(-1).view(np.uint8))
    column_nbytes = layout.block_tokens * shape.kv_heads * 2 * shape.head_dim * rows.itemsize
    for column, first in enumerate(firsts):
        unit = layer * layout.columns + column
        body = source[column * column_nbytes : (column + 1) * column_nbytes]
        scatter_unit(run, first, unit, body, digest(unit, body))
