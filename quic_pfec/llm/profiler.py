"""Measures which parts of a cache matter: one cell (some layers and a position bin) is lost at a time, and the damage
noted.

Damage is the KL divergence between the next-token distributions with the intact cache and without the cell, averaged
over prompts and over teacher-forced positions of the intact continuation. It depends on what the receiver does with a
hole, so a profile is measured for one receiver mode and says which. A cell is one layer by default; the paper's are
groups of neighbouring layers (section III-B). All cells of a prompt share one cache (`shared`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

import numpy as np

try:
    import torch
    from torch import Tensor
except ImportError as error:
    raise ImportError('quic_pfec.llm needs torch and transformers: pip install "quic-pfec[hf]"') from error

from quic_pfec.kv.hf import fork
from quic_pfec.kv.profile import BINS, Profile, Receiver, group_edges
from quic_pfec.llm.corpus import CUE, profile_context
from quic_pfec.llm.dataset import ANSWER_CUE, Dataset, question_prompt
from quic_pfec.llm.generate import logits, prefill
from quic_pfec.llm.models import LoadedModel
from quic_pfec.llm.shared import Pattern, log_probabilities, verdicts

Cell = tuple[int, int]
"""(layer or layer group, position bin)."""

_BUILTIN: Final = "quic_pfec.llm.corpus.PROFILE"


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure. The defaults take two to four minutes for SmolLM2 (30 layers) on two CPU cores.

    - `receiver`: what becomes of a hole, "mask" or "zero"
    - `bins`: position bins, dividing the context evenly (paper section III-B: 8)
    - `groups`: layer groups that are lost together (paper: 6); 0 = every layer by itself
    - `context_tokens`, `prompts`: length and number of the contexts
    - `positions`: tokens of the intact continuation at which damage is measured
    - `batch`: cells evaluated at once; memory grows with it, results do not change
    """

    receiver: Receiver = "mask"
    bins: int = BINS
    groups: int = 0
    context_tokens: int = 512
    prompts: int = 8
    positions: int = 16
    seed: int = 0
    batch: int = 40

    def __post_init__(self) -> None:
        if self.receiver not in ("mask", "zero"):
            raise ValueError(f"receiver must be 'mask' or 'zero', got {self.receiver!r}")
        if self.groups < 0:
            raise ValueError(f"groups must not be negative, got {self.groups}")
        for name in ("bins", "prompts", "positions", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.context_tokens < self.bins:
            raise ValueError(f"{self.context_tokens} tokens cannot be divided into {self.bins} bins")

    @property
    def command(self) -> str:
        """The command line that measures the same again, without its model and data."""
        groups = f" --groups {self.groups}" if self.groups else ""
        return (
            f"quic-pfec profile --receiver {self.receiver} --bins {self.bins}{groups} --context {self.context_tokens}"
            f" --prompts {self.prompts} --positions {self.positions} --seed {self.seed}"
        )


def measure(
    m: LoadedModel,
    settings: Settings,
    progress: Callable[[int, int], None] | None = None,
    data: Dataset | None = None,
) -> Profile:
    """Measure a profile of `m`; the same settings give the same profile on the same machine.

    `data`: whose `profile` part the contexts are made of; None = the passages that ship. `progress` is called with
    (cells done, cells in all). The model must not be used by anyone else meanwhile: its attention is exchanged until
    this returns or raises. Raises ValueError for a model with sliding-window or other layers that do not attend to the
    whole context, for more groups than layers, and for data with fewer profile examples than `prompts`.
    """
    layers = int(m.config.num_hidden_layers)
    rows = settings.groups or layers
    group_edges(layers, rows)
    cells = [(row, index) for row in range(rows) for index in range(settings.bins)]
    total = len(cells) * settings.prompts
    damage = torch.zeros(len(cells), dtype=torch.float64)
    cue = m.encode(CUE if data is None else ANSWER_CUE)
    banned = frozenset[int]() if data is None else control_ids(m)
    for number, ids in enumerate(_contexts(m, settings, data)):
        cache = prefill(m, ids)
        forced = continuation(m, cache, cue, settings.positions, banned)

        def report(done: int, before: int = number * len(cells)) -> None:
            if progress is not None:
                progress(before + done, total)

        damage += cell_damage(m, cache, cue, forced, cells, settings, report)
    table = (damage / settings.prompts).view(rows, settings.bins)
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    source = _BUILTIN if data is None else data.name
    return Profile(
        model=m.name[-48:],
        fingerprint=m.fingerprint,
        receiver=settings.receiver,
        layers=layers,
        bins=settings.bins,
        groups=settings.groups,
        values=tuple(tuple(float(f"{value:.5g}") for value in row) for row in table.tolist()),
        data=f"{source}: {settings.prompts} prompts x {settings.positions} positions, KL in nats",
        data_hash="" if data is None else data.digest,
        context_tokens=settings.context_tokens,
        seed=settings.seed,
        command=f"{settings.command} --model {m.name}" + ("" if data is None else f" --data {data.name}"),
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
    layers, tokens = len(cache.layers), int(cache.get_seq_length())
    edges = [round(tokens * index / settings.bins) for index in range(settings.bins + 1)]
    groups = group_edges(layers, settings.groups or layers)
    whole = [Pattern.whole(layers)]
    intact = log_probabilities(m, cache, prompt_ids, forced_ids, whole, settings.receiver)[0]
    found = torch.empty(len(cells), dtype=torch.float64)
    for start in range(0, len(cells), settings.batch):
        patterns = []
        for row, index in cells[start : start + settings.batch]:
            came = np.ones(tokens, dtype=np.bool_)
            came[edges[index] : edges[index + 1]] = False
            lost = range(groups[row], groups[row + 1])
            patterns.append(Pattern(tuple(came if layer in lost else None for layer in range(layers))))
        batch = verdicts(m, cache, prompt_ids, forced_ids, patterns, settings.receiver, intact, len(patterns))
        found[start : start + len(batch)] = torch.tensor([verdict.kl for verdict in batch], dtype=torch.float64)
        report(start + len(batch))
    return found


def continuation(
    m: LoadedModel, cache: Any, prompt_ids: Sequence[int], count: int, without: Collection[int] = ()
) -> list[int]:
    """Greedy continuation of exactly `count` tokens, none of them in `without`; an end of sequence is a token like any
    other. `cache` is not changed."""
    ahead, step, found = fork(cache), list(prompt_ids), list[int]()
    banned = torch.tensor(sorted(without), dtype=torch.long, device=m.device)
    for _ in range(count):
        scores = logits(m, ahead, step, keep=1)[0]
        scores[banned] = -torch.inf
        step = [int(scores.argmax())]
        found += step
    return found


def control_ids(m: LoadedModel) -> frozenset[int]:
    """Ids that end or structure a conversation instead of saying something.

    What a model says after its own end of sequence is a loop that hardly depends on the context: a continuation that is
    to measure the context must not contain one.
    """
    return m.eos_ids.union(getattr(m.tokenizer, "all_special_ids", ()))


def _contexts(m: LoadedModel, settings: Settings, data: Dataset | None) -> Iterator[tuple[int, ...]]:
    if data is None:
        for number in range(settings.prompts):
            yield profile_context(m.tokenizer, settings.context_tokens, settings.seed + number).ids
        return
    if len(data.profile) < settings.prompts:
        raise ValueError(
            f"{data.name} has {len(data.profile)} examples for profiles, {settings.prompts} were asked for"
        )
    for example in data.profile[: settings.prompts]:
        yield question_prompt(m.tokenizer, example, data.profile, settings.context_tokens, settings.seed)
