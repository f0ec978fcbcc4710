"""What a partial cache keeps of its model, example by example: by share of blocks, and after simulated hand-offs.

The measure is how the model continues: teacher-forced along the greedy continuation of the intact cache (ends of
sequence left out), the share of positions with the same top-1 token and the KL divergence; and the F1 of the answer it
gives by itself. Retention keeps a share of the blocks, best first by some order, and asks how good the order is. A
hand-off keeps what the simulator delivered, packets of incomplete blocks included, in one wire dtype or in several that
have the same time. Three arms stand beside them: the whole cache as sent, another prompt's cache, and no context at
all, because a small model agrees with itself on much that needs no context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

try:
    import torch
except ImportError as error:
    raise ImportError('quic_pfec.llm needs torch and transformers: pip install "quic-pfec[hf]"') from error

from quic_pfec.kv.auto import AUTO
from quic_pfec.kv.hf import as_sent, fork
from quic_pfec.kv.layout import LayerShape, Layout
from quic_pfec.kv.order import order_units
from quic_pfec.kv.profile import Profile, Receiver, request_utility, unit_utility
from quic_pfec.kv.reception import complete_units, fragments_by_unit, kept_elements, kept_rows, refined_rows
from quic_pfec.llm.attention_mass import attention_mass
from quic_pfec.llm.dataset import ANSWER_CUE, Example, f1_score, question_prompt, text_prompt
from quic_pfec.llm.generate import prefill
from quic_pfec.llm.handoffs import BESIDE, SCHEMES, Ranking, Scheme, deliver_units, open_channel, resolve
from quic_pfec.llm.models import LoadedModel
from quic_pfec.llm.profiler import continuation, control_ids
from quic_pfec.llm.shared import Pattern, Verdict, answers, log_probabilities, verdicts
from quic_pfec.wire.manifest import WIRE_DTYPES

__all__ = [
    "RANKINGS",
    "RECEIVERS",
    "Deliveries",
    "Profiles",
    "Record",
    "Settings",
    "blended",
    "evaluate_example",
    "layout_of",
    "realisation",
    "wires",
]

RECEIVERS: Final[tuple[Receiver, ...]] = ("zero", "mask")
RANKINGS: Final[tuple[Ranking, ...]] = ("random", "fifo", "paper", "layer", "request")

Bits = npt.NDArray[np.bool_]
Profiles = dict[tuple[Ranking, Receiver], Profile]
"""The profiles of the rankings "paper" and "layer", for each receiver."""
Deliveries = dict[tuple[str, str, float, int], Bits]
"""Symbols that arrived, in the order of sending, by (wire dtype, policy, rho, loss realisation), of wire dtypes whose
units are of one size: see `handoffs.deliver`."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured. The defaults are those of the paper's operating point.

    - `tokens`: of each context; `positions`: of the continuation that is judged; `answer_tokens`: of the answer at most
    - `kept`: shares of the blocks for retention; empty = none
    - `rhos`: slots as a share of the packets; `losses`: realisations of the channel, the same for every example
    - `channel`, `repair_budget`: see `handoffs`
    - `wire_dtype`: of all arms, and what `rhos` are shares of; `beside`: wire dtypes, or "auto", in which the schemes
      `handoffs.BESIDE` have the same time
    - `receivers`: under which the caches are judged, each with profiles of its own
    - `profile_prompts`, `profile_positions`: what the profiles are measured on
    - `batch`: patterns judged at once; memory, not results
    """

    tokens: int = 1536
    positions: int = 64
    answer_tokens: int = 16
    kept: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    rhos: tuple[float, ...] = (0.8, 1.0)
    losses: int = 5
    channel: str = "paper"
    repair_budget: float | None = None
    profile_prompts: int = 8
    profile_positions: int = 16
    seed: int = 0
    wire_dtype: str = "bf16"
    beside: tuple[str, ...] = ()
    receivers: tuple[Receiver, ...] = RECEIVERS
    batch: int = 8

    def __post_init__(self) -> None:
        for name in ("tokens", "positions", "answer_tokens", "losses", "profile_prompts", "profile_positions", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.wire_dtype not in WIRE_DTYPES:
            raise ValueError(f"wire_dtype is one of {', '.join(WIRE_DTYPES)}, not {self.wire_dtype!r}")
        named = [self.wire_dtype, *self.beside]
        if not set(self.beside) <= {*WIRE_DTYPES, AUTO} or len(set(named)) != len(named):
            raise ValueError(f"beside {self.wire_dtype} are others of {', '.join((*WIRE_DTYPES, AUTO))}: {self.beside}")
        if not set(self.receivers) <= set(RECEIVERS) or not self.receivers:
            raise ValueError(f"receivers are {' and '.join(RECEIVERS)}, or one of them, not {self.receivers}")
        if not all(0 < share <= 1 for share in self.kept):
            raise ValueError(f"a share of blocks lies between 0 and 1, got {self.kept}")
        if not all(0 < rho < 100 for rho in self.rhos):
            raise ValueError(f"rho must be positive and below 100, got {self.rhos}")


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One judgement.

    `arm`: retention, handoff, intact, wrong_cache or no_context. `name`: the ranking or the scheme's key. `share`: of
    blocks kept, or rho. `loss`: number of the realisation. `wire`: of a hand-off, as in the settings; `sent`: what that
    was, where it was "auto". `f1` only where an answer was generated; `blocks`: share of the blocks that are complete,
    their bases where they have two precisions; `finer`: the share of which both are.
    """

    example: str
    arm: str
    agreement: float
    kl: float
    name: str = ""
    receiver: str = ""
    share: float = 0.0
    loss: int = 0
    wire: str = ""
    sent: str = ""
    f1: float | None = None
    blocks: float | None = None
    finer: float | None = None


def layout_of(m: LoadedModel, settings: Settings, wire_dtype: str | None = None) -> Layout:
    """Geometry of a hand-off of `settings.tokens` tokens of a full-attention model, in the settings' wire dtype or
    another."""
    config = m.config
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    shapes = (LayerShape(heads, dim),) * int(config.num_hidden_layers)
    return Layout(shapes, settings.tokens, wire_dtype=wire_dtype or settings.wire_dtype)


def wires(m: LoadedModel, settings: Settings) -> list[str]:
    """All wire dtypes that hand-offs are made in: `wire_dtype` first, then those beside it, "auto" resolved."""
    layout = layout_of(m, settings)
    beside = (resolve(name, layout, rho) for name in settings.beside for rho in settings.rhos)
    return list(dict.fromkeys((settings.wire_dtype, *beside)))


def evaluate_example(
    m: LoadedModel,
    examples: Sequence[Example],
    number: int,
    settings: Settings,
    profiles: Profiles,
    deliveries: Deliveries,
    schemes: Sequence[Scheme] = SCHEMES,
) -> list[Record]:
    """Every judgement of `examples[number]`; the other examples top up its context and lend the wrong cache.

    Raises ValueError if a prompt of `settings.tokens` cannot be made, or a layer does not attend to the whole context.
    """
    task = _Task(m, examples, number, settings, profiles)
    return [*task.arms(), *task.retention(), *task.handoffs(deliveries, schemes)]


def realisation(settings: Settings, loss: int) -> int:
    """Seed of a loss realisation's channel."""
    return 1000 * settings.seed + loss


def blended(coarse: Any, fine: Any, refined: Sequence[Bits]) -> Any:
    """A cache with the rows of `fine` where `refined` (per layer bool [tokens]), and those of `coarse` elsewhere.

    Both are whole, of one sequence and one geometry; neither is changed.
    """
    cache = fork(coarse)
    for layer, other, rows in zip(cache.layers, fine.layers, refined, strict=True):
        if rows.any():
            which = torch.from_numpy(rows).to(layer.keys.device)[:, None]
            layer.keys = torch.where(which, other.keys, layer.keys)
            layer.values = torch.where(which, other.values, layer.values)
    return cache


@dataclass(frozen=True, slots=True)
class _Run:
    scheme: Scheme
    rho: float
    loss: int


class _Task:
    """One example: its cache, the intact run it is judged by, and the orders of its blocks."""

    def __init__(
        self, m: LoadedModel, examples: Sequence[Example], number: int, settings: Settings, profiles: Profiles
    ) -> None:
        self.m, self.settings, self.example = m, settings, examples[number]
        self.other = examples[(number + 1) % len(examples)]
        self.examples = examples
        self.layout = layout_of(m, settings)
        self.blocks = layout_of(m, settings, "bf16")  # one unit a block
        self._ranked: dict[tuple[Ranking, Receiver], npt.NDArray[np.float64]] = {}
        ids = self._ids(self.example)
        cache = prefill(m, ids)
        self.cue = m.encode(ANSWER_CUE)
        self.forced = continuation(m, cache, self.cue, settings.positions, control_ids(m))
        self.whole = Pattern.whole(len(self.layout.layers))
        self.reference = log_probabilities(m, cache, self.cue, self.forced, [self.whole], "mask")[0]
        self.mass = attention_mass(m, cache, ids)
        self.wires = {name: as_sent(cache, m.config, name) for name in wires(m, settings)}
        if "progressive" in self.wires:  # what a block is without its refinement
            self.wires.setdefault("int4", as_sent(cache, m.config, "int4"))
        self.wire = self.wires[settings.wire_dtype]
        rng = np.random.default_rng([settings.seed, number])
        self.shuffled = rng.permutation(self.blocks.unit_count).astype(np.int32)
        self.profiles = profiles

    @property
    def together(self) -> int:
        """Patterns that are held, and answered, at once."""
        return 4 * self.settings.batch

    def arms(self) -> list[Record]:
        """The whole cache, another prompt's, and none."""
        m, found = self.m, []
        bare = text_prompt(m.tokenizer, self.example)[-self.settings.tokens :]
        for arm, ids in (("intact", None), ("wrong_cache", self._ids(self.other)), ("no_context", bare)):
            cache = self.wire if ids is None else prefill(m, ids)
            [verdict] = verdicts(m, cache, self.cue, self.forced, [self.whole], "mask", self.reference)
            [f1] = self._f1(cache, [self.whole], "mask")
            found.append(Record(example=self.example.id, arm=arm, agreement=verdict.agreement, kl=verdict.kl, f1=f1))
        return found

    def retention(self) -> list[Record]:
        """The best share of the blocks by each ranking, under each receiver."""
        found = []
        shares = [share for share in self.settings.kept if share < 1]
        for receiver in self.settings.receivers:
            cells = [(ranking, share) for ranking in RANKINGS for share in shares]
            patterns = [self._best(self.order(ranking, receiver, self.blocks), share) for ranking, share in cells]
            if 1.0 in self.settings.kept:
                cells += [(ranking, 1.0) for ranking in RANKINGS]
            judged = self._judge(self.wire, [*patterns, self.whole], receiver)
            judged += [judged[-1]] * (len(cells) - len(judged))  # all blocks are all blocks, in any order
            for (ranking, share), verdict in zip(cells, judged, strict=False):
                found.append(
                    Record(
                        example=self.example.id,
                        arm="retention",
                        name=ranking,
                        receiver=receiver,
                        share=share,
                        agreement=verdict.agreement,
                        kl=verdict.kl,
                    )
                )
        return found

    def handoffs(self, deliveries: Deliveries, schemes: Sequence[Scheme]) -> list[Record]:
        """What each scheme delivered, under each receiver, in each wire dtype."""
        settings, found = self.settings, []
        beside = [scheme for scheme in schemes if scheme.key in BESIDE]
        for receiver in self.settings.receivers:
            judged: dict[tuple[str, _Run], Record] = {}
            for wire in (settings.wire_dtype, *settings.beside):
                runs = [
                    _Run(scheme, rho, loss)
                    for scheme in (schemes if wire == settings.wire_dtype else beside)
                    for rho in settings.rhos
                    for loss in range(settings.losses)
                ]
                sent = {run: resolve(wire, self.layout, run.rho) for run in runs}
                for name in dict.fromkeys(sent.values()):
                    todo = [run for run in runs if sent[run] == name and (name, run) not in judged]
                    # A pattern of elements is as large as the cache has elements: never those of all runs at once.
                    for start in range(0, len(todo), self.together):
                        part = todo[start : start + self.together]
                        for run, record in zip(part, self._handed_over(name, part, receiver, deliveries), strict=True):
                            judged[name, run] = record
                found += [
                    msgspec.structs.replace(judged[sent[run], run], wire=wire, sent="" if wire != AUTO else sent[run])
                    for run in runs
                ]
        return found

    def _handed_over(self, wire: str, runs: Sequence[_Run], receiver: Receiver, deliveries: Deliveries) -> list[Record]:
        """Records of `runs` in one wire dtype."""
        layout = layout_of(self.m, self.settings, wire)
        size, two = layout.symbol_size(), len(layout.forms) > 1
        arrived = []
        for run in runs:
            order = self.order(run.scheme.ranking, receiver, layout)
            if two:
                known = self._deliver(layout, order, run, receiver)
            else:
                known = deliveries[wire, run.scheme.policy, run.rho, run.loss]
            arrived.append(fragments_by_unit(layout, size, order, known))
        patterns = []
        for fragments in arrived:
            elements = kept_elements(layout, size, fragments)
            patterns.append(Pattern(tuple(kept_rows(elements) if receiver == "mask" else elements)))
        if two:  # every hand-off has values of its own
            verdict, scores = [], []
            for fragments, pattern in zip(arrived, patterns, strict=True):
                cache = blended(self.wires["int4"], self.wires[wire], refined_rows(layout, size, fragments))
                verdict += self._judge(cache, [pattern], receiver)
                scores += self._f1(cache, [pattern], receiver)
        else:
            verdict = self._judge(self.wires[wire], patterns, receiver)
            scores = self._f1(self.wires[wire], patterns, receiver)
        found = []
        for run, fragments, one, f1 in zip(runs, arrived, verdict, scores, strict=True):
            complete = complete_units(layout, size, fragments).reshape(len(layout.forms), -1)
            found.append(
                Record(
                    example=self.example.id,
                    arm="handoff",
                    name=run.scheme.key,
                    receiver=receiver,
                    share=run.rho,
                    loss=run.loss,
                    agreement=one.agreement,
                    kl=one.kl,
                    f1=f1,
                    blocks=float(complete[0].mean()),
                    finer=float(complete.all(axis=0).mean()) if two else None,
                )
            )
        return found

    def _deliver(self, layout: Layout, order: npt.NDArray[np.int32], run: _Run, receiver: Receiver) -> Bits:
        settings, ranking = self.settings, run.scheme.ranking
        utility = np.ones(layout.block_count) if ranking in ("random", "fifo") else self.utility(ranking, receiver)
        return deliver_units(
            layout, order, utility, run.scheme.policy, run.rho, open_channel(settings.channel),
            realisation(settings, run.loss), settings.repair_budget, self.layout,
        )  # fmt: skip

    def order(self, ranking: Ranking, receiver: Receiver, layout: Layout | None = None) -> npt.NDArray[np.int32]:
        """Unit ids in the order of sending, int32 [unit_count]; `layout`: the settings', or one of another wire dtype.

        The order "random" is one of blocks.
        """
        layout = layout or self.layout
        if ranking == "random":
            return self.shuffled
        if ranking == "fifo":
            return order_units(layout, "fifo")
        return order_units(layout, "utility", self.utility(ranking, receiver))

    def utility(self, ranking: Ranking, receiver: Receiver) -> npt.NDArray[np.float64]:
        """Of each block by a profile or the request, float64 [block_count]."""
        if (ranking, receiver) not in self._ranked:
            if ranking == "request":
                made = request_utility(self.blocks, self.mass, self.profiles["layer", receiver])
            else:
                made = unit_utility(self.blocks, self.profiles[ranking, receiver])
            self._ranked[ranking, receiver] = made
        return self._ranked[ranking, receiver]

    def _best(self, order: npt.NDArray[np.int32], share: float) -> Pattern:
        """The pattern of whole blocks that keeps the first `share` of `order`."""
        layout = self.blocks
        units = np.zeros(layout.unit_count, dtype=np.bool_)
        units[order[: round(share * len(order))]] = True
        rows = np.repeat(units.reshape(-1, layout.columns), layout.block_tokens, axis=1)[:, : layout.tokens]
        return Pattern(tuple(rows))

    def _judge(self, cache: Any, patterns: Sequence[Pattern], receiver: Receiver) -> list[Verdict]:
        return verdicts(self.m, cache, self.cue, self.forced, patterns, receiver, self.reference, self.settings.batch)

    def _f1(self, cache: Any, patterns: Sequence[Pattern], receiver: Receiver) -> list[float]:
        # A step of one token costs reading the weights: the more sequences share it, the better.
        given = answers(self.m, cache, self.cue, patterns, receiver, self.settings.answer_tokens, self.together)
        return [f1_score(self.m.decode(ids), self.example.answers) for ids in given]

    def _ids(self, example: Example) -> tuple[int, ...]:
        return question_prompt(self.m.tokenizer, example, self.examples, self.settings.tokens, self.settings.seed)
