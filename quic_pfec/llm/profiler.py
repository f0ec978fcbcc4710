"""Measures which parts of a cache matter: one cell (a layer and a position bin) is lost at a time, and the damage
noted.

Damage is the KL divergence between the next-token distributions with the intact cache and without the cell, averaged
over prompts and over teacher-forced positions of the intact continuation. It depends on what the receiver does with a
hole, so a profile is measured for one receiver mode and says which.

Hundreds of cells times some prompts would take an hour if each were a forward pass with its own cache. Here they are
one batch: every sequence of it has the same tokens and shares one copy of the context's rows, and an attention
implementation of its own blanks each sequence's cell. The result equals the model's own path within rounding
(`tests/test_llm_profiler.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

try:
    import torch
    from torch import Tensor
    from transformers import AttentionInterface
    from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
except ImportError as error:
    raise ImportError('quic_pfec.llm needs torch and transformers: pip install "quic-pfec[hf]"') from error

from quic_pfec.kv.hf import cache_kwarg, fork
from quic_pfec.kv.profile import BINS, Profile, Receiver
from quic_pfec.llm.corpus import CUE, profile_context
from quic_pfec.llm.generate import logits, prefill
from quic_pfec.llm.models import LoadedModel

_IMPLEMENTATION: Final = "quic_pfec_cells"
_TAG: Final = "_quic_pfec_shared"

Cell = tuple[int, int]
"""(layer, position bin)."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure. The defaults take two to four minutes for SmolLM2 (30 layers) on two CPU cores.

    - `receiver`: what becomes of a hole, "mask" or "zero"
    - `bins`: position bins, dividing the context evenly (paper section III-B: 8)
    - `context_tokens`, `prompts`: length and number of the contexts, from `corpus.PROFILE`
    - `positions`: tokens of the intact continuation at which damage is measured
    - `batch`: cells evaluated at once; memory grows with it, results do not change
    """

    receiver: Receiver = "mask"
    bins: int = BINS
    context_tokens: int = 512
    prompts: int = 8
    positions: int = 16
    seed: int = 0
    batch: int = 40

    def __post_init__(self) -> None:
        if self.receiver not in ("mask", "zero"):
            raise ValueError(f"receiver must be 'mask' or 'zero', got {self.receiver!r}")
        for name in ("bins", "prompts", "positions", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.context_tokens < self.bins:
            raise ValueError(f"{self.context_tokens} tokens cannot be divided into {self.bins} bins")

    @property
    def command(self) -> str:
        """The command line that measures the same again, without its model."""
        return (
            f"quic-pfec profile --receiver {self.receiver} --bins {self.bins} --context {self.context_tokens}"
            f" --prompts {self.prompts} --positions {self.positions} --seed {self.seed}"
        )


def measure(m: LoadedModel, settings: Settings, progress: Callable[[int, int], None] | None = None) -> Profile:
    """Measure a profile of `m`; the same settings give the same profile on the same machine.

    `progress` is called with (cells done, cells in all). The model must not be used by anyone else meanwhile: its
    attention is exchanged until this returns or raises. Raises ValueError for a model with sliding-window or other
    layers that do not attend to the whole context.
    """
    layers = int(m.config.num_hidden_layers)
    cells = [(layer, index) for layer in range(layers) for index in range(settings.bins)]
    total = len(cells) * settings.prompts
    damage = torch.zeros(len(cells), dtype=torch.float64)
    for number in range(settings.prompts):
        prompt = profile_context(m.tokenizer, settings.context_tokens, settings.seed + number)
        cache = prefill(m, prompt.ids)
        forced = _continuation(m, cache, m.encode(CUE), settings.positions)

        def report(done: int, before: int = number * len(cells)) -> None:
            if progress is not None:
                progress(before + done, total)

        damage += cell_damage(m, cache, m.encode(CUE), forced, cells, settings, report)
    table = (damage / settings.prompts).view(layers, settings.bins)
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    return Profile(
        model=m.name[-48:],
        fingerprint=m.fingerprint,
        receiver=settings.receiver,
        layers=layers,
        bins=settings.bins,
        values=tuple(tuple(float(f"{value:.5g}") for value in row) for row in table.tolist()),
        data=f"quic_pfec.llm.corpus.PROFILE: {settings.prompts} prompts x {settings.positions} positions, KL in nats",
        context_tokens=settings.context_tokens,
        seed=settings.seed,
        command=f"{settings.command} --model {m.name}",
        versions=versions,
    )


def cell_damage(
    m: LoadedModel,
    cache: Any,
    prompt_ids: Sequence[int],
    forced_ids: Sequence[int],
    cells: Sequence[Cell],
    settings: Settings,
    report: Callable[[int], None] = lambda done: None,
) -> Tensor:
    """KL(intact || cell lost) in nats, mean over the positions of `forced_ids`: float64 [len(cells)], each >= 0.

    `cache` holds the context, whole, and is not changed. `report` is called with the number of cells done.
    """
    edges = _bin_edges(cache.get_seq_length(), settings.bins)
    given = [*prompt_ids, *forced_ids[:-1]]
    found = torch.empty(len(cells), dtype=torch.float64)
    with _exchanged_attention(m.model), torch.no_grad():
        intact = _log_probabilities(m, cache, given, len(forced_ids), [None], edges, settings.receiver)[0]
        for start in range(0, len(cells), settings.batch):
            batch = list(cells[start : start + settings.batch])
            lossy = _log_probabilities(m, cache, given, len(forced_ids), batch, edges, settings.receiver)
            divergence = (intact.exp() * (intact - lossy)).sum(dim=-1).mean(dim=-1)
            found[start : start + len(batch)] = divergence.clamp(min=0).double().cpu()
            report(start + len(batch))
    return found


def _continuation(m: LoadedModel, cache: Any, prompt_ids: list[int], count: int) -> list[int]:
    """Greedy continuation of exactly `count` tokens; an end of sequence is a token like any other."""
    ahead, step, found = fork(cache), prompt_ids, list[int]()
    for _ in range(count):
        step = [int(logits(m, ahead, step, keep=1)[0].argmax())]
        found += step
    return found


def _bin_edges(tokens: int, bins: int) -> list[int]:
    return [round(tokens * index / bins) for index in range(bins + 1)]


class _SharedLayer(DynamicLayer):  # type: ignore[misc]
    """The context's rows of one layer, one copy for the whole batch, and the rows each sequence of the batch has lost.

    `holes` is bool [batch, rows], or None if no sequence has lost any here. New rows are handed through, not kept: a
    batch is one forward pass.
    """

    def __init__(self, keys: Tensor, values: Tensor, holes: Tensor | None, receiver: Receiver) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.holes, self.receiver = keys, values, holes, receiver

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        setattr(key_states, _TAG, self)
        return key_states, value_states


class _SharedCache(DynamicCache):  # type: ignore[misc]
    def __init__(self, layers: list[_SharedLayer]) -> None:
        Cache.__init__(self, layers=layers)


def _log_probabilities(
    m: LoadedModel,
    cache: Any,
    given: Sequence[int],
    keep: int,
    cells: Sequence[Cell | None],
    edges: Sequence[int],
    receiver: Receiver,
) -> Tensor:
    """Next-token log-probabilities at the last `keep` positions with each cell lost in turn: [len(cells), keep,
    vocab]."""
    past = edges[-1]
    layers = []
    for index, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            raise ValueError(f"layer {index} is a {type(layer).__name__}: only full attention can be profiled")
        holes = torch.zeros(len(cells), past, dtype=torch.bool, device=layer.keys.device)
        for row, cell in enumerate(cells):
            if cell is not None and cell[0] == index:
                holes[row, edges[cell[1]] : edges[cell[1] + 1]] = True
        layers.append(_SharedLayer(layer.keys, layer.values, holes if bool(holes.any()) else None, receiver))
    ids = torch.tensor([list(given)], device=m.device).expand(len(cells), -1)
    positions = torch.arange(past, past + ids.shape[1], device=m.device)[None]
    out = m.model(
        input_ids=ids,
        position_ids=positions.expand(len(cells), -1),
        use_cache=True,
        logits_to_keep=keep,
        **{cache_kwarg(m.model): _SharedCache(layers)},
    )
    return torch.log_softmax(out.logits[:, -keep:].float(), dim=-1)


def _shared_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of a batch over rows it shares (any number, blanked by sequence) and its own new rows (causal).

    query `[batch, heads, new, head_dim]`, key and value `[batch, kv_heads, new, head_dim]`.
    """
    shared: _SharedLayer = getattr(key, _TAG)
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError(f"{type(module).__name__} uses soft caps or sinks, which the profiler does not compute")
    batch, heads, new, head_dim = query.shape
    kv_heads = key.shape[1]
    scale = kwargs.get("scaling") or head_dim**-0.5
    # [kv_heads, batch, queries of one sequence, head_dim]: all queries of a KV head meet the shared rows in one
    # product.
    grouped = (query * scale).reshape(batch, kv_heads, -1, head_dim).transpose(0, 1)
    far = (grouped.flatten(1, 2) @ shared.keys[0].transpose(1, 2)).view(kv_heads, batch, grouped.shape[2], -1)
    near = grouped @ key.permute(1, 0, 3, 2)
    causal = torch.ones(new, new, dtype=torch.bool, device=query.device).tril()
    near.masked_fill_(~causal.repeat(heads // kv_heads, 1), float("-inf"))
    holes = None if shared.holes is None else shared.holes[None, :, None, :]
    if holes is not None:
        far.masked_fill_(holes, float("-inf") if shared.receiver == "mask" else 0.0)
    weights = torch.softmax(torch.cat([far, near], dim=-1), dim=-1)
    far, near = weights[..., : far.shape[-1]], weights[..., far.shape[-1] :]
    if holes is not None and shared.receiver == "zero":
        far = far.masked_fill(holes, 0.0)  # a zeroed row keeps its share of the softmax and adds nothing
    mixed = (far.flatten(1, 2) @ shared.values[0]).view_as(grouped) + near @ value.transpose(0, 1)
    return mixed.transpose(0, 1).reshape(batch, heads, new, head_dim).transpose(1, 2).contiguous(), None


AttentionInterface.register(_IMPLEMENTATION, _shared_attention)


@contextmanager
def _exchanged_attention(model: Any) -> Iterator[None]:
    before = model.config.get_text_config(decoder=True)._attn_implementation
    model.set_attn_implementation(_IMPLEMENTATION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
