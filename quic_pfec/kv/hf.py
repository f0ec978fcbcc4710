"""Hugging Face caches to raw arrays and back: the only place that knows what a transformers cache looks like inside.

The hand-off cuts every layer into blocks of token rows, so it can carry exactly those caches in which row t of a
layer is the key and value of token t. Layers that forget rows, mix them (linear attention, Mamba) or store something
else (quantised) are refused by name before anything is sent. Keys are stored after RoPE, so a rebuilt cache continues
at its absolute positions.

What "intact" means: with `wire_dtype` equal to the cache's own dtype, a completely received cache is bit-equal to the
sender's. With fp32 computation and bf16 on the wire it is bit-equal to `as_sent(cache)`, the sender's cache rounded
once; compare with that where equality is meant, and with the sender's own cache where quality is.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

try:
    import torch
    from torch import Tensor
    from transformers.cache_utils import (
        Cache,
        DynamicCache,
        DynamicLayer,
        DynamicSlidingWindowLayer,
        EncoderDecoderCache,
        StaticLayer,
    )
except ImportError as error:
    raise ImportError('quic_pfec.kv.hf needs torch and transformers: pip install "quic-pfec[hf]"') from error

import numpy as np
import numpy.typing as npt

from quic_pfec.kv.attention import PartialCache, PartialLayer, PartialSlidingLayer
from quic_pfec.kv.layout import LayerShape, Layout
from quic_pfec.kv.units import KVArrays, as_received
from quic_pfec.wire.manifest import QUANTISED

DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""torch dtype of each dtype name of the wire."""

DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_BITS: Final = {"bf16": torch.int16, "fp16": torch.int16, "fp32": torch.int32}

_SHARABLE: Final = (DynamicLayer, DynamicSlidingWindowLayer, PartialLayer, PartialSlidingLayer)

Validity = Sequence[npt.NDArray[np.bool_] | None]
"""Per layer: which rows came, bool `[kv_heads, tokens]`; None for a complete layer."""


@dataclass(frozen=True, slots=True, eq=False)
class Extracted:
    """Rows `first_token .. first_token + arrays.tokens` of a cache, on the host, ready to be packed.

    `arrays` holds raw bits in the wire dtype; `dtype` is what the cache was computed in; `shapes` has one entry a
    layer.
    """

    arrays: KVArrays
    shapes: tuple[LayerShape, ...]
    dtype: str
    first_token: int

    @property
    def wire_dtype(self) -> str:
        return self.arrays.dtype


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """One layer's filled rows, `[batch, kv_heads, rows, head_dim]`, and its attention window (0 = full)."""

    keys: Tensor
    values: Tensor
    window: int


def cache_kwarg(model: Any) -> str:
    """Name of the model's cache argument: `cache` from transformers 5.24 on, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def extract(
    cache: Any, wire_dtype: str | None = "bf16", *, first_token: int = 0, tokens: int | None = None
) -> Extracted:
    """Copy the rows `first_token .. first_token + tokens` (default: to the end) of every layer to the host.

    `cache` is a DynamicCache, a StaticCache (its filled rows) or a sequence of `(keys, values)` pairs of
    `[1, kv_heads, tokens, head_dim]`, on any device, in bf16, fp16 or fp32. `wire_dtype` is its own dtype (also None)
    or "bf16".
    Sliding-window layers are accepted while they still hold every row.

    Raises ValueError with one line that names the layer and its type for everything that cannot be handed over:
    another batch size, forgotten rows, holes, linear-attention, quantised, empty or unknown layers, encoder-decoder
    caches, values that are not finite.
    """
    if wire_dtype is not None and wire_dtype not in DTYPES:
        raise ValueError(f"unknown wire dtype {wire_dtype!r}, expected one of {', '.join(DTYPES)}")
    layers = [_checked(index, rows) for index, rows in enumerate(_layers(cache))]
    if not layers:
        raise ValueError("the cache is empty: prefill it first")
    first = layers[0]
    dtype = DTYPE_NAMES[first.keys.dtype]
    wire_dtype = wire_dtype or dtype
    if wire_dtype not in (dtype, "bf16"):
        raise ValueError(f"a {dtype} cache can be sent as {dtype} or bf16, not as {wire_dtype}")
    total = first.keys.shape[2]
    stop = total if tokens is None else first_token + tokens
    if not 0 <= first_token < stop <= total:
        raise ValueError(f"rows {first_token}..{stop} are not in a cache of {total} tokens")
    arrays = []
    for index, rows in enumerate(layers):
        if rows.keys.shape[2] != total or rows.keys.dtype != first.keys.dtype:
            raise ValueError(
                f"layer {index} holds {rows.keys.shape[2]} rows of {rows.keys.dtype}, layer 0 holds {total} of"
                f" {first.keys.dtype}"
            )
        pair = [part[0, :, first_token:stop].detach().to(DTYPES[wire_dtype]) for part in (rows.keys, rows.values)]
        if not all(bool(torch.isfinite(part).all()) for part in pair):
            raise ValueError(f"layer {index} holds NaN or infinity in {wire_dtype}: the receiver would refuse it")
        arrays.append((_to_bits(pair[0], wire_dtype), _to_bits(pair[1], wire_dtype)))
    kv = KVArrays(tuple(arrays), wire_dtype)
    return Extracted(kv, kv.shapes([rows.window for rows in layers]), dtype, first_token)


@dataclass(frozen=True, slots=True, eq=False)
class LayerRows:
    """Every row of one layer of a cache that is being rebuilt.

    keys, values: `[1, kv_heads, tokens, head_dim]`; valid: bool `[1, kv_heads, tokens]`, None = all are; layer: the
    model's own kind of layer, empty.
    """

    keys: Tensor
    values: Tensor
    valid: Tensor | None
    layer: Any

    @property
    def window(self) -> int:
        """Attention window in tokens, 0 = full attention."""
        return int(getattr(self.layer, "sliding_window", None) or 0)


@dataclass(frozen=True, slots=True, eq=False)
class Rebuilt:
    """All rows that are there and the empty cache that they will be: the last stage at which holes can be filled."""

    cache: Any
    layers: tuple[LayerRows, ...]

    def to_cache(self) -> Any:
        """The cache, for one use of this object. Layers with holes leave them out of attention; others are plain."""
        built: list[Any] = []
        for rows in self.layers:
            layer = rows.layer
            if rows.valid is not None:
                layer = PartialSlidingLayer(rows.valid, rows.window) if rows.window else PartialLayer(rows.valid)
            _fill(layer, rows.keys, rows.values)
            built.append(layer)
        if any(rows.valid is not None for rows in self.layers):
            return PartialCache(built)
        self.cache.layers = built
        return self.cache


def to_cache(
    arrays: KVArrays,
    validity: Validity | None,
    config: Any,
    *,
    missing: Literal["mask", "zero"] = "mask",
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    first_token: int = 0,
    base: Any = None,
    room: Room | None = None,
    frame: Frame | None = None,
) -> Any:
    """Build a cache of `config`'s model from received rows, for `model.generate()` and the model's forward pass.

    `validity` says which rows are whole, None = all; `arrays` holds zeros in the others (an `Assembler` sees to that).
    With missing="mask" they are left out of attention (`attention.attach(model)` is needed once a model); with "zero"
    they stay as they are. Layers without holes are plain layers, bit-identical to the sender's after the wire dtype.

    `first_token > 0` extends `base`, a cache that holds exactly the rows before it, with or without holes; `base`
    itself is not changed. `room`, made from the same base by `make_room`, spares copying it now; `frame`, made from the
    same arrays by `make_frame`, spares everything but the holes. Where no conversion is needed the cache shares the
    memory of `arrays`: do not write to them again. Raises ValueError when the pieces do not fit together.
    """
    return rebuild(
        arrays, validity, config, missing=missing, dtype=dtype, device=device, first_token=first_token, base=base,
        room=room, frame=frame,
    ).to_cache()  # fmt: skip


def rebuild(
    arrays: KVArrays,
    validity: Validity | None,
    config: Any,
    *,
    missing: Literal["mask", "zero"] = "mask",
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    first_token: int = 0,
    base: Any = None,
    room: Room | None = None,
    frame: Frame | None = None,
) -> Rebuilt:
    """What `to_cache` makes its cache of, before it is one; the arguments are the same.

    The rows of `base` come first, with its holes.
    """
    if missing not in ("mask", "zero"):
        raise ValueError(f"missing must be 'mask' or 'zero', got {missing!r}")
    frame = frame or make_frame(arrays, config, dtype=dtype, device=device)
    count = len(frame.layers)
    if validity is not None and len(validity) != count:
        raise ValueError(f"{len(validity)} validity maps for {count} layers")
    before = _base_rows(base, first_token, count)
    layers: list[LayerRows] = []
    for index, (layer, (keys, values)) in enumerate(zip(frame.layers, frame.rows, strict=True)):
        valid = _valid_tensor(index, validity, keys, missing)
        if before is not None:
            old, old_valid = before[index]
            if old.keys.shape[:2] != keys.shape[:2] or old.keys.shape[3] != keys.shape[3]:
                raise ValueError(f"layer {index} of the base cache has another shape than the received rows")
            valid = _joined(old_valid, valid, first_token, keys)
            keys, values = _joined_rows(old, keys, values, None if room is None else room.layers[index])
        layers.append(LayerRows(keys, values, valid, layer))
    return Rebuilt(frame.cache, tuple(layers))


def rebuildable(config: Any) -> Any:
    """An empty cache of `config`'s model. Raises ValueError naming the layer that cannot be rebuilt from rows."""
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ValueError(
                f"layer {index} of the model is a {type(layer).__name__}, which cannot be rebuilt from rows"
            )
    return cache


def check_base(base: Any) -> None:
    """Raises ValueError naming the first layer of `base` that no longer holds every row and so cannot be extended."""
    _base_rows(base, length(base), len(base.layers))


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A cache without its rows' state: an empty cache of the model, its layers, and the tensors they will hold.

    For one `to_cache`, which puts the layers to use.
    """

    cache: Any
    layers: tuple[Any, ...]
    rows: tuple[tuple[Tensor, Tensor], ...]


def make_frame(arrays: KVArrays, config: Any, *, dtype: torch.dtype | str, device: torch.device | str = "cpu") -> Frame:
    """What of `to_cache` does not depend on which rows came.

    Where neither dtype nor device differ the tensors share the memory of `arrays`, so that a frame made while rows are
    still being filled in shows them all; elsewhere it shows what was there when it was made. Raises ValueError when the
    arrays are not this model's.
    """
    target = DTYPES[dtype] if isinstance(dtype, str) else dtype
    cache = rebuildable(config)
    if len(cache.layers) != len(arrays.layers):
        raise ValueError(f"the model has {len(cache.layers)} layers, the received cache {len(arrays.layers)}")
    rows = [
        tuple(from_bits(raw, arrays.dtype).to(device=device, dtype=target)[None] for raw in pair)
        for pair in arrays.layers
    ]
    return Frame(cache, tuple(cache.layers), tuple((keys, values) for keys, values in rows))


def as_sent(cache: Any, config: Any, wire_dtype: str = "bf16") -> Any:
    """The cache a receiver holds when everything came: `cache` rounded once to the wire dtype, or quantised and turned
    back, in its own dtype and device."""
    extracted = extract(cache, None if wire_dtype in QUANTISED else wire_dtype)
    arrays = extracted.arrays
    if wire_dtype in QUANTISED:
        arrays = as_received(Layout(extracted.shapes, arrays.tokens, wire_dtype=wire_dtype), arrays)
    device = _layers(cache)[0].keys.device
    return to_cache(arrays, None, config, dtype=extracted.dtype, device=device)


def fork(cache: Any) -> Any:
    """A second cache with the same rows, to be extended apart from the first, at the cost of a few references.

    Dynamic layers never write into the tensors they hold (they concatenate), so both may share them. Raises
    ValueError for caches that are written in place.
    """
    if not isinstance(cache, DynamicCache) or not all(type(layer) in _SHARABLE for layer in cache.layers):
        raise ValueError(f"a {type(cache).__name__} is written in place and cannot share its rows: use copy.deepcopy")
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin


def length(cache: Any) -> int:
    """Tokens the cache stands for, holes included: the absolute position of the next token."""
    return int(cache.get_seq_length())


def _layers(cache: Any) -> list[_Rows]:
    if isinstance(cache, EncoderDecoderCache):
        raise ValueError("an EncoderDecoderCache cannot be handed over: only decoder-only models are supported")
    if isinstance(cache, Cache):
        return [_rows_of(index, layer) for index, layer in enumerate(cache.layers)]
    if isinstance(cache, tuple | list) and all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in cache):
        return [_Rows(keys, values, 0) for keys, values in cache]
    raise ValueError(
        f"a {type(cache).__name__} is not a KV cache: expected a transformers Cache or (keys, values) pairs"
    )


def _rows_of(index: int, layer: Any) -> _Rows:
    kind = type(layer)
    name = kind.__name__
    if kind in (PartialLayer, PartialSlidingLayer):
        raise ValueError(f"layer {index} has holes from an earlier hand-off: a partial cache cannot be handed on")
    if kind not in (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer):
        raise ValueError(
            f"layer {index} is a {name}, which has no row of its own for each token: only DynamicLayer, StaticLayer and"
            " DynamicSlidingWindowLayer can be handed over (dequantise a quantised cache first)"
        )
    filled = int(layer.get_seq_length())
    if filled == 0 or layer.keys is None:
        raise ValueError(f"layer {index} ({name}) is empty: prefill the cache first")
    if layer.keys.shape[2] < filled:
        raise ValueError(
            f"layer {index} is a {name} that has forgotten {filled - layer.keys.shape[2]} of {filled} rows: hand the"
            f" cache over before it is longer than the window of {layer.sliding_window} tokens"
        )
    window = layer.sliding_window if kind is DynamicSlidingWindowLayer else 0
    return _Rows(layer.keys[:, :, :filled], layer.values[:, :, :filled], window)


def _checked(index: int, rows: _Rows) -> _Rows:
    keys, values = rows.keys, rows.values
    if keys.ndim != 4 or keys.shape != values.shape:
        raise ValueError(
            f"layer {index}: keys and values must both be [1, kv_heads, tokens, head_dim], got {list(keys.shape)} and"
            f" {list(values.shape)}"
        )
    if keys.shape[0] != 1:
        raise ValueError(f"the cache holds a batch of {keys.shape[0]}: hand over one sequence at a time")
    if keys.dtype not in DTYPE_NAMES or keys.dtype != values.dtype:
        raise ValueError(f"layer {index} is {keys.dtype}/{values.dtype}: a cache must be bf16, fp16 or fp32")
    return rows


def _base_rows(base: Any, first_token: int, count: int) -> list[tuple[_Rows, Tensor | None]] | None:
    if base is None:
        if first_token:
            raise ValueError(f"rows from token {first_token} on need the base cache that holds the rows before them")
        return None
    if length(base) != first_token:
        raise ValueError(f"the base cache holds {length(base)} tokens, the received rows start at {first_token}")
    if len(base.layers) != count:
        raise ValueError(f"the base cache has {len(base.layers)} layers, the model {count}")
    found = []
    for index, layer in enumerate(base.layers):
        if not isinstance(layer, DynamicLayer) or layer.keys.shape[2] != first_token:
            raise ValueError(f"layer {index} of the base cache, a {type(layer).__name__}, does not hold all its rows")
        valid = layer.valid if isinstance(layer, PartialLayer | PartialSlidingLayer) else None
        found.append((_Rows(layer.keys, layer.values, 0), valid))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """Memory for a base cache and the rows that will follow it, the base's rows in place and zeros behind them."""

    layers: tuple[tuple[Tensor, Tensor], ...]


def make_room(base: Any, tokens: int, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Room:
    """Room for `tokens` rows behind `base`, to be made while they are still in flight; `base` is not changed."""
    layers = []
    for layer in base.layers:
        pair = []
        for old in (layer.keys, layer.values):
            heads, rows, dim = old.shape[1:]
            whole = torch.zeros((1, heads, rows + tokens, dim), dtype=dtype, device=device)
            whole[:, :, :rows] = old
            pair.append(whole)
        layers.append((pair[0], pair[1]))
    return Room(tuple(layers))


def _joined_rows(old: _Rows, keys: Tensor, values: Tensor, room: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """The base's rows and the new ones behind them."""
    rows = old.keys.shape[2]
    if room is None or room[0].shape[2] != rows + keys.shape[2] or room[0].dtype != keys.dtype:
        return torch.cat([old.keys.to(keys), keys], dim=2), torch.cat([old.values.to(values), values], dim=2)
    for whole, new in zip(room, (keys, values), strict=True):
        whole[:, :, rows:] = new
    return room


def _fill(layer: Any, keys: Tensor, values: Tensor) -> None:
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.update(keys, values)  # keeps count of the rows beyond its window
        return
    # As `update` does on an empty layer, but without a copy: decoding is to start within milliseconds of the freeze.
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values


def _valid_tensor(index: int, validity: Validity | None, keys: Tensor, missing: str) -> Tensor | None:
    """Valid rows as bool `[1, kv_heads, tokens]` on the keys' device; None where nothing is to be left out."""
    rows = None if validity is None else validity[index]
    if rows is None:
        return None
    if rows.shape != keys.shape[1:3]:
        raise ValueError(f"layer {index}: validity {list(rows.shape)} for rows {list(keys.shape[1:3])}")
    if missing == "zero" or bool(rows.all()):
        return None
    return torch.from_numpy(np.ascontiguousarray(rows, dtype=np.bool_).copy()).to(keys.device)[None]


def _joined(old: Tensor | None, new: Tensor | None, old_rows: int, keys: Tensor) -> Tensor | None:
    if old is None and new is None:
        return None
    batch, heads, rows = keys.shape[:3]
    parts = []
    for valid, count in ((old, old_rows), (new, rows)):
        if valid is None:
            valid = torch.ones(batch, heads, count, dtype=torch.bool, device=keys.device)
        # Rows decoded after a hand-off lie past the end of its map, and are whole.
        grown = torch.nn.functional.pad(valid.to(keys.device), (0, count - valid.shape[2]), value=True)
        parts.append(grown)
    return torch.cat(parts, dim=2)


def _to_bits(tensor: Tensor, dtype: str) -> npt.NDArray[Any]:
    signed = tensor.to("cpu").contiguous().view(_BITS[dtype]).numpy()
    bits: npt.NDArray[Any] = signed.view(np.uint16 if signed.itemsize == 2 else np.uint32)
    return bits


def from_bits(bits: npt.NDArray[Any], dtype: str) -> Tensor:
    """Raw bits of `dtype`, uint16 or uint32 of any shape, as a tensor; memory that is contiguous is shared."""
    # Signed views, because not every torch has unsigned ones; writable, because torch warns of memory that is not.
    writable = np.require(bits, requirements=["C", "W"])
    signed = writable.view(np.int16 if writable.itemsize == 2 else np.int32)
    return torch.from_numpy(signed).view(DTYPES[dtype])
