"""The mask receiver: attention that leaves out the cache rows that never came.

A zero-filled hole still takes softmax mass (q·0 = 0 is a score like any other). Excluding the hole instead keeps more
of the model's output for the same bytes (`docs/decisions.md`), but the excluded rows differ by layer and by key/value
head, which no argument of a model can express. So the rows travel with the tensors: a cache layer with holes tags the
key tensor that its `update` returns, and the attention implementation registered here reads the tag. Nothing about a
request is global: two caches interleaved on one model never see each other's holes, and a layer without holes takes
the model's own kernel, unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

try:
    import torch
    from torch import Tensor
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import eager_mask, sdpa_mask
except ImportError as error:
    raise ImportError('quic_pfec.kv.attention needs torch and transformers: pip install "quic-pfec[hf]"') from error

SDPA = "quic_pfec"
"""Attention implementation for models that run on `sdpa` (the default of transformers)."""
EAGER = "quic_pfec_eager"
"""Attention implementation for models that run on `eager`."""

_NAME_BY_BASE = {"sdpa": SDPA, "eager": EAGER}
_TAG = "_quic_pfec_rows"
NOT_ATTACHED = (
    "the model's attention ignored the holes of a partial KV cache: call quic_pfec.kv.attention.attach(model) first"
)


class _Rows:
    """The valid rows of one key tensor, and whether attention has taken them into account.

    `valid` is bool, `[batch, kv_heads, rows]`, with one entry for each row of the tensor it is attached to.
    """

    __slots__ = ("applied", "valid")

    def __init__(self, valid: Tensor) -> None:
        self.valid = valid
        self.applied = False


class _Columns:
    """The whole mask of a pass over scattered columns: it stands in the place of the model's own.

    `mask` is bool, `[1, 1, q, rows]`.
    """

    __slots__ = ("applied", "mask")

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self.applied = False


class ColumnsLayer(DynamicLayer):  # type: ignore[misc]
    """A layer whose `update` puts rows into their holes in the middle of it, for passes over scattered columns.

    keys, values: `[1, kv_heads, tokens, head_dim]`, written in place, in holes only; valid: bool `[1, kv_heads,
    tokens]`, None = all. `begin` says which columns the next pass is over; attention then sees what `window` (tokens,
    0 = all) and causality let it, through a model given to `attach`.
    """

    def __init__(self, keys: Tensor, values: Tensor, valid: Tensor | None, window: int) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self._valid = valid
        self.window = window
        self._columns: Tensor | None = None
        self._rows: _Columns | None = None

    def begin(self, columns: Tensor, mask: Tensor) -> None:
        """The next pass is over `columns` (positions, ascending, int64 [q]); `mask` is bool `[q, rows]`."""
        self._columns = columns
        self._rows = _Columns(mask[None, None])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self._columns is not None
        assert self._rows is not None
        if self._valid is not None:
            hole = ~self._valid[:, :, self._columns, None]
            for whole, new in ((self.keys, key_states), (self.values, value_states)):
                whole[:, :, self._columns] = torch.where(hole, new, whole[:, :, self._columns])
        # Slices, as a tag on the tensor itself would outlive this pass.
        stop = self._rows.mask.shape[-1]
        keys, values = self.keys[:, :, :stop], self.values[:, :, :stop]
        setattr(keys, _TAG, self._rows)
        return keys, values

    def check_applied(self) -> None:
        """Raises RuntimeError when the model's attention ignored the mask of the last pass."""
        if self._rows is not None and not self._rows.applied:
            raise RuntimeError(NOT_ATTACHED)


class _PartialLayer:
    """What a layer with holes adds to a transformers layer: the valid rows, kept in step with every change of the rows.

    `valid` is bool, `[batch, kv_heads, rows]`, indexed by absolute position; rows past its end were appended here and
    are valid.
    """

    valid: Tensor
    first_whole: int
    keys: Any
    values: Any

    def _set_valid(self, valid: Tensor) -> None:
        self.valid = valid
        holes = (~valid).flatten(0, 1).any(dim=0).nonzero()
        self.first_whole = int(holes[-1]) + 1 if holes.numel() else 0

    def fill(self, start: int, stop: int) -> None:
        """Rows `start .. stop`, absolute positions, are there now, for all heads. Copies of this layer keep theirs."""
        valid = self.valid.clone()
        valid[..., start:stop] = True
        self._set_valid(valid)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        total = int(self.get_seq_length())  # type: ignore[attr-defined]
        first = total - keys.shape[-2]  # a sliding layer returns only its latest rows
        if first < self.first_whole:
            grown = torch.nn.functional.pad(self.valid, (0, total - self.valid.shape[-1]), value=True)
            setattr(keys, _TAG, _Rows(grown[..., first:]))
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)  # type: ignore[misc]
        self._set_valid(self.valid[..., : int(self.get_seq_length())])  # type: ignore[attr-defined]

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self._set_valid(self.valid[..., :0])

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self._set_valid(self.valid.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._set_valid(self.valid[indices])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._set_valid(self.valid.index_select(0, beam_idx.to(self.valid.device)))


class PartialLayer(_PartialLayer, DynamicLayer):  # type: ignore[misc]
    """A full-attention layer with holes. `valid`: bool `[batch, kv_heads, rows]`."""

    def __init__(self, valid: Tensor) -> None:
        DynamicLayer.__init__(self)
        self._set_valid(valid)


class PartialSlidingLayer(_PartialLayer, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A sliding-window layer with holes. `valid`: bool `[batch, kv_heads, rows]`, by absolute position."""

    def __init__(self, valid: Tensor, sliding_window: int) -> None:
        DynamicSlidingWindowLayer.__init__(self, sliding_window=sliding_window)
        self._set_valid(valid)


class PartialCache(DynamicCache):  # type: ignore[misc]
    """A cache some of whose layers have holes; usable wherever a `DynamicCache` is, on a model given to `attach`.

    Raises RuntimeError in the forward pass when the model's attention ignores the holes (the model was not attached,
    or does something to the keys between cache and attention): a wrong continuation must never pass for a right one.
    Holes in the last layer alone are noticed one pass late.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        Cache.__init__(self, layers=list(layers))
        self._handed_out: _Rows | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self._handed_out is not None and not self._handed_out.applied:
            raise RuntimeError(NOT_ATTACHED)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._handed_out = getattr(keys, _TAG, None)
        return keys, values

    def hole_count(self) -> int:
        """Head-token rows left out of attention, over all layers and the batch."""
        return sum(int((~layer.valid).sum()) for layer in self.layers if isinstance(layer, _PartialLayer))


def _merge(rows: _Rows | _Columns, query: Tensor, mask: Tensor | None) -> Tensor:
    """The attention mask of one layer: causal and padding mask of the model, and the layer's own valid rows.

    query `[batch, heads, q, head_dim]`; mask None, bool, or additive `[batch, 1 | heads, q, rows]`. Returns the same
    kind, bool for None, `[batch, heads, q or 1, rows]`. Every query keeps its own row: softmax over nothing would be
    NaN, and a padded query's output is read by no one.
    """
    rows.applied = True
    if isinstance(rows, _Columns):
        return rows.mask
    queries, total = query.shape[2], rows.valid.shape[-1]
    allowed = rows.valid.repeat_interleave(query.shape[1] // rows.valid.shape[1], dim=1)[:, :, None, :]
    if mask is None:
        if queries == 1:
            return allowed
        step = torch.arange(total, device=query.device)
        return allowed & (step[None, :] <= step[total - queries :, None])
    own_query = torch.arange(queries, device=query.device)
    own_row = own_query + total - queries
    if mask.dtype == torch.bool:
        merged = allowed & mask[..., :total]
        merged[:, :, own_query, own_row] = True
    else:
        merged = mask[..., :total].masked_fill(~allowed, torch.finfo(mask.dtype).min)
        merged[:, :, own_query, own_row] = 0
    return merged


def _sdpa_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Any:
    rows: _Rows | _Columns | None = getattr(key, _TAG, None)
    if rows is not None:
        attention_mask = _merge(rows, query, attention_mask)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _eager_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Any:
    rows: _Rows | _Columns | None = getattr(key, _TAG, None)
    if rows is not None:
        merged = _merge(rows, query, attention_mask)
        if merged.dtype == torch.bool:
            merged = torch.zeros_like(merged, dtype=query.dtype).masked_fill(~merged, torch.finfo(query.dtype).min)
        attention_mask = merged
    # Eager attention differs by family (soft caps, sinks): the model's own is the one to call.
    own: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
    return own(module, query, key, value, attention_mask, **kwargs)


# Both registries: with only the first, transformers drops padding and sliding-window masks without a word.
for _name, _forward, _mask in ((SDPA, _sdpa_forward, sdpa_mask), (EAGER, _eager_forward, eager_mask)):
    AttentionInterface.register(_name, _forward)
    AttentionMaskInterface.register(_name, _mask)


def attach(model: Any) -> None:
    """Let `model` use caches with holes. Idempotent; changes nothing for caches without holes.

    Raises ValueError when the model's attention is neither `sdpa` nor `eager`, or is not built on transformers'
    interface.
    """
    config = model.config.get_text_config(decoder=True)
    current = config._attn_implementation
    if current in _NAME_BY_BASE.values():
        return
    if current not in _NAME_BY_BASE:
        raise ValueError(
            f"attention {current!r} cannot leave out rows: load the model with attn_implementation='sdpa' or 'eager',"
            " or receive with missing='zero'"
        )
    wanted = _NAME_BY_BASE[current]
    model.set_attn_implementation(wanted)
    if config._attn_implementation != wanted:
        raise ValueError(
            f"{type(model).__name__} does not take another attention implementation: receive with missing='zero'"
        )
