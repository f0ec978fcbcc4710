"""Many loss patterns of one context at the price of one cache: a batch whose sequences share its rows.

What a hole costs is asked hundreds of times of the same context: for every cell of a profile, for every order and every
loss realisation of an evaluation. A cache for each would take an hour of copying. Here every sequence of a batch has
the same tokens and reads one copy of the context's rows, and an attention implementation of its own leaves out, or
zeroes, what each sequence has lost. The result equals the model's own path within rounding
(`tests/test_llm_shared.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

try:
    import torch
    from torch import Tensor
    from transformers import AttentionInterface
    from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
except ImportError as error:
    raise ImportError('quic_pfec.llm needs torch and transformers: pip install "quic-pfec[hf]"') from error

from quic_pfec.kv.hf import cache_kwarg
from quic_pfec.kv.profile import Receiver
from quic_pfec.llm.models import LoadedModel

__all__ = ["Pattern", "SharedCache", "Verdict", "answers", "exchanged_attention", "log_probabilities", "verdicts"]

_IMPLEMENTATION: Final = "quic_pfec_shared"
_TAG: Final = "_quic_pfec_shared"

Bits = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """What one receiver holds of a context: per layer one bool array, True = came; None = a complete layer.

    - `[rows]` or `[kv_heads, rows]`: whole rows, keys and values together (either receiver);
    - `[kv_heads, rows, 2, head_dim]`: single elements, keys first (receiver "zero" only).
    """

    layers: tuple[Bits | None, ...]

    @classmethod
    def whole(cls, layers: int) -> Pattern:
        """Nothing is missing."""
        return cls((None,) * layers)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How near a pattern comes to the intact cache, teacher-forced: share of positions with its top-1 token (0..1), and
    mean KL(intact || pattern) in nats."""

    agreement: float
    kl: float


class SharedLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of the context, `[1, kv_heads, rows, head_dim]`, what each sequence of a batch holds of it, and the
    rows each has added.

    `rows` is bool `[batch, kv_heads | 1, rows]`, or None if no sequence lost any; `elements` bool
    `[batch, kv_heads, rows, 2, head_dim]`, in its place. With `record`, `mass` is the attention that each row got,
    `[rows + new]`, summed over heads and queries.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        receiver: Receiver = "mask",
        *,
        rows: Tensor | None = None,
        elements: Tensor | None = None,
        record: bool = False,
    ) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.receiver = keys, values, receiver
        self.rows, self.elements, self.record = rows, elements, record
        self.near: tuple[Tensor, Tensor] | None = None
        self.mass: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.near is not None:
            key_states = torch.cat([self.near[0], key_states], dim=2)
            value_states = torch.cat([self.near[1], value_states], dim=2)
        self.near = (key_states, value_states)
        setattr(key_states, _TAG, self)
        return key_states, value_states


class SharedCache(DynamicCache):  # type: ignore[misc]
    """A cache for one batch of patterns. `cache` is whole, of one sequence, and only read; its first `rows` rows count.

    Raises ValueError for layers that do not attend to the whole context, and for patterns that do not fit.
    """

    def __init__(
        self,
        cache: Any,
        patterns: Sequence[Pattern] = (),
        receiver: Receiver = "mask",
        *,
        rows: int | None = None,
        record: bool = False,
    ) -> None:
        layers = []
        for index, layer in enumerate(cache.layers):
            if type(layer) is not DynamicLayer:
                raise ValueError(f"layer {index} is a {type(layer).__name__}: only full attention can be measured")
            keys, values = layer.keys[:, :, :rows], layer.values[:, :, :rows]
            held = [pattern.layers[index] for pattern in patterns]
            kept, elements = _stacked(index, held, keys, receiver)
            layers.append(SharedLayer(keys, values, receiver, rows=kept, elements=elements, record=record))
        Cache.__init__(self, layers=layers)
        self.past = int(layers[0].keys.shape[2])
        self.added = 0

    def masses(self) -> Tensor:
        """Attention by layer and row, `[layers, rows + new]`, after a pass with `record`."""
        return torch.stack([layer.mass for layer in self.layers])


def _stacked(
    index: int, held: Sequence[Bits | None], keys: Tensor, receiver: Receiver
) -> tuple[Tensor | None, Tensor | None]:
    """The rows and the elements of a batch in one layer; at most one of them is not None."""
    lossy = [part for part in held if part is not None and not part.all()]
    if not lossy:
        return None, None
    _, heads, count, dim = keys.shape
    fine = any(part.ndim == 4 for part in lossy)
    if fine and receiver != "zero":
        raise ValueError("single elements can be missing under the receiver 'zero' only")
    shape = (heads, count, 2, dim) if fine else (max(1 if part.ndim == 1 else heads for part in lossy), count)
    stacked = np.ones((len(held), *shape), dtype=np.bool_)
    for row, part in enumerate(held):
        if part is None:
            continue
        if part.shape not in ((count,), (heads, count), (heads, count, 2, dim)):
            raise ValueError(f"layer {index}: a pattern of {list(part.shape)} for rows {[heads, count]}")
        stacked[row] = part[..., None, None] if fine and part.ndim < 4 else part
    tensor = torch.from_numpy(stacked).to(keys.device)
    return (None, tensor) if fine else (tensor, None)


@contextmanager
def exchanged_attention(model: Any) -> Iterator[None]:
    """The model understands `SharedCache`, and nothing else, until this ends."""
    before = model.config.get_text_config(decoder=True)._attn_implementation
    model.set_attn_implementation(_IMPLEMENTATION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def forward(m: LoadedModel, shared: SharedCache, ids: Tensor, keep: int) -> Tensor:
    """One pass of `ids` (int64 [batch, new]) behind what `shared` holds: logits of the last `keep`, fp32 [batch, keep,
    vocab]. Only inside `exchanged_attention`."""
    start = shared.past + shared.added
    positions = torch.arange(start, start + ids.shape[1], device=m.device)[None].expand(len(ids), -1)
    with torch.no_grad():
        out = m.model(
            input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=keep, **{cache_kwarg(m.model): shared}
        )
    shared.added += ids.shape[1]
    logits: Tensor = out.logits[:, -keep:].float()
    return logits


def log_probabilities(
    m: LoadedModel,
    cache: Any,
    prompt_ids: Sequence[int],
    forced_ids: Sequence[int],
    patterns: Sequence[Pattern],
    receiver: Receiver,
) -> Tensor:
    """Log-probabilities that predict each token of `forced_ids`, one batch: fp32 [patterns, forced, vocab]."""
    given = torch.tensor([[*prompt_ids, *forced_ids[:-1]]], device=m.device).expand(len(patterns), -1)
    with exchanged_attention(m.model):
        found = forward(m, SharedCache(cache, patterns, receiver), given, len(forced_ids))
    return torch.log_softmax(found, dim=-1)


def verdicts(
    m: LoadedModel,
    cache: Any,
    prompt_ids: Sequence[int],
    forced_ids: Sequence[int],
    patterns: Sequence[Pattern],
    receiver: Receiver,
    reference: Tensor,
    batch: int = 8,
) -> list[Verdict]:
    """Judge each pattern along `forced_ids`. `reference`: the intact run's log-probabilities, [forced, vocab].

    `batch` patterns at once: memory grows with it (vocab x forced x 4 bytes each), results do not change.
    """
    probability, top = reference.exp(), reference.argmax(dim=-1)
    found = []
    for start in range(0, len(patterns), batch):
        lossy = log_probabilities(m, cache, prompt_ids, forced_ids, patterns[start : start + batch], receiver)
        for one in lossy:
            kl = float((probability * (reference - one)).sum(dim=-1).mean())
            found.append(Verdict(float((one.argmax(dim=-1) == top).float().mean()), max(0.0, kl)))
    return found


def answers(
    m: LoadedModel,
    cache: Any,
    prompt_ids: Sequence[int],
    patterns: Sequence[Pattern],
    receiver: Receiver,
    max_new_tokens: int,
    batch: int = 8,
) -> list[list[int]]:
    """Greedy continuation of each pattern, up to the model's end of sequence or `max_new_tokens`."""
    found: list[list[int]] = []
    for start in range(0, len(patterns), batch):
        part = patterns[start : start + batch]
        step = torch.tensor([list(prompt_ids)], device=m.device).expand(len(part), -1)
        tokens: list[list[int]] = []
        with exchanged_attention(m.model):
            shared = SharedCache(cache, part, receiver)
            ended = torch.zeros(len(part), dtype=torch.bool, device=m.device)
            ends = torch.tensor(sorted(m.eos_ids), dtype=torch.long, device=m.device)
            while len(tokens) < max_new_tokens and not bool(ended.all()):
                step = forward(m, shared, step, 1)[:, 0].argmax(dim=-1, keepdim=True)
                tokens.append(step[:, 0].tolist())
                ended |= torch.isin(step[:, 0], ends)
        for row in zip(*tokens, strict=True):
            places = [place for place, token in enumerate(row) if token in m.eos_ids]
            found.append(list(row[: places[0]] if places else row))
    return found


def _shared_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of a batch over rows it shares (any number, blanked by sequence) and its own added rows (causal).

    query `[batch, heads, new, head_dim]`, key and value `[batch, kv_heads, added + new, head_dim]`.
    """
    shared: SharedLayer = getattr(key, _TAG)
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError(f"{type(module).__name__} uses soft caps or sinks, which cannot be measured here")
    batch, heads, new, head_dim = query.shape
    kv_heads, own = key.shape[1], key.shape[2]
    scale = kwargs.get("scaling") or head_dim**-0.5
    keys, values = shared.keys[0], shared.values[0]
    # [kv_heads, batch, queries of one sequence, head_dim]: all queries of a KV head meet the shared rows in one
    # product.
    grouped = (query * scale).reshape(batch, kv_heads, -1, head_dim).transpose(0, 1)
    if shared.elements is None:
        far = (grouped.flatten(1, 2) @ keys.transpose(1, 2)).view(kv_heads, batch, grouped.shape[2], -1)
    else:
        held = torch.where(shared.elements[:, :, :, 0], keys, 0.0).transpose(0, 1)
        far = grouped @ held.transpose(2, 3)
    near = grouped @ key.permute(1, 0, 3, 2)
    causal = torch.ones(new, own, dtype=torch.bool, device=query.device).tril(own - new)
    near.masked_fill_(~causal.repeat(heads // kv_heads, 1), float("-inf"))
    # [kv_heads | 1, batch, 1, rows]
    holes = None if shared.rows is None else ~shared.rows.transpose(0, 1)[:, :, None, :]
    if holes is not None:
        far.masked_fill_(holes, float("-inf") if shared.receiver == "mask" else 0.0)
    weights = torch.softmax(torch.cat([far, near], dim=-1), dim=-1)
    if shared.record:
        shared.mass = weights.sum(dim=(0, 1, 2))
    far, near = weights[..., : far.shape[-1]], weights[..., far.shape[-1] :]
    if holes is not None and shared.receiver == "zero":
        far = far.masked_fill(holes, 0.0)  # a zeroed row keeps its share of the softmax and adds nothing
    if shared.elements is None:
        mixed = (far.flatten(1, 2) @ values).view_as(grouped)
    else:
        mixed = far @ torch.where(shared.elements[:, :, :, 1], values, 0.0).transpose(0, 1)
    mixed = mixed + near @ value.transpose(0, 1)
    return mixed.transpose(0, 1).reshape(batch, heads, new, head_dim).transpose(1, 2).contiguous(), None


AttentionInterface.register(_IMPLEMENTATION, _shared_attention)
