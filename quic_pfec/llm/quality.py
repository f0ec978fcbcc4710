"""What a partial cache keeps of its model, example by example: by share of blocks, and after simulated hand-offs.

The measure is how the model continues: teacher-forced along the greedy continuation of the intact cache (ends of
sequence left out), the share of positions with the same top-1 token and the KL divergence; and the F1 of the answer it
gives by itself. Retention keeps
a share of the blocks, best first by some order, and asks how good the order is. A hand-off keeps what the simulator
delivered, packets of incomplete blocks included. Three arms stand beside them: the whole cache as sent, another
prompt's cache, and no context at all, because a small model agrees with itself on much that needs no context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from quic_pfec.kv.hf import as_sent
from quic_pfec.kv.layout import LayerShape, Layout
from quic_pfec.kv.order import order_units
from quic_pfec.kv.profile import Profile, Receiver, request_utility, unit_utility
from quic_pfec.kv.reception import fragments_by_unit, kept_elements, kept_rows
from quic_pfec.llm.attention_mass import attention_mass
from quic_pfec.llm.dataset import ANSWER_CUE, Example, f1_score, question_prompt, text_prompt
from quic_pfec.llm.generate import prefill
from quic_pfec.llm.handoffs import SCHEMES, Ranking, Scheme
from quic_pfec.llm.models import LoadedModel
from quic_pfec.llm.profiler import continuation, control_ids
from quic_pfec.llm.shared import Pattern, answers, log_probabilities, verdicts
from quic_pfec.wire.manifest import WIRE_DTYPES, precisions

__all__ = ["RANKINGS", "RECEIVERS", "Deliveries", "Profiles", "Record", "Settings", "evaluate_example", "layout_of"]

RECEIVERS: Final[tuple[Receiver, ...]] = ("zero", "mask")
RANKINGS: Final[tuple[Ranking, ...]] = ("random", "fifo", "paper", "layer", "request")

Bits = npt.NDArray[np.bool_]
Profiles = dict[tuple[Ranking, Receiver], Profile]
"""The profiles of the rankings "paper" and "layer", for each receiver."""
Deliveries = dict[tuple[str, float, int], Bits]
"""Symbols that arrived, in the order of sending, by (policy, rho, loss realisation): see `handoffs.deliver`."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured. The defaults are those of the paper's operating point.

    - `tokens`: of each context; `positions`: of the continuation that is judged; `answer_tokens`: of the answer at most
    - `kept`: shares of the blocks for retention; empty = none
    - `rhos`: slots as a share of the packets; `losses`: realisations of the channel, the same for every example
    - `channel`, `repair_budget`: see `handoffs`
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
    batch: int = 8

    def __post_init__(self) -> None:
        for name in ("tokens", "positions", "answer_tokens", "losses", "profile_prompts", "profile_positions", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        judged = [name for name in WIRE_DTYPES if len(precisions(name)) == 1]
        if self.wire_dtype not in judged:
            raise ValueError(f"wire_dtype is one of {', '.join(judged)}, not {self.wire_dtype!r}")
        if not all(0 < share <= 1 for share in self.kept):
            raise ValueError(f"a share of blocks lies between 0 and 1, got {self.kept}")
        if not all(0 < rho < 100 for rho in self.rhos):
            raise ValueError(f"rho must be positive and below 100, got {self.rhos}")


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One judgement.

    `arm`: retention, handoff, intact, wrong_cache or no_context. `name`: the ranking or the scheme's key. `share`: of
    blocks kept, or rho. `loss`: number of the realisation. `f1` only where an answer was generated; `blocks`: share of
    the blocks that are complete.
    """

    example: str
    arm: str
    agreement: float
    kl: float
    name: str = ""
    receiver: str = ""
    share: float = 0.0
    loss: int = 0
    f1: float | None = None
    blocks: float | None = None


def layout_of(m: LoadedModel, settings: Settings) -> Layout:
    """Geometry of a hand-off of `settings.tokens` tokens of a full-attention model."""
    config = m.config
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    shapes = (LayerShape(heads, dim),) * int(config.num_hidden_layers)
    return Layout(shapes, settings.tokens, wire_dtype=settings.wire_dtype)


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


class _Task:
    """One example: its cache, the intact run it is judged by, and the orders of its blocks."""

    def __init__(
        self, m: LoadedModel, examples: Sequence[Example], number: int, settings: Settings, profiles: Profiles
    ) -> None:
        self.m, self.settings, self.example = m, settings, examples[number]
        self.other = examples[(number + 1) % len(examples)]
        self.examples = examples
        self.layout = layout_of(m, settings)
        ids = self._ids(self.example)
        cache = prefill(m, ids)
        self.cue = m.encode(ANSWER_CUE)
        self.forced = continuation(m, cache, self.cue, settings.positions, control_ids(m))
        self.whole = Pattern.whole(len(self.layout.layers))
        self.reference = log_probabilities(m, cache, self.cue, self.forced, [self.whole], "mask")[0]
        self.mass = attention_mass(m, cache, ids)
        self.wire = as_sent(cache, m.config, settings.wire_dtype)
        rng = np.random.default_rng([settings.seed, number])
        self.shuffled = rng.permutation(self.layout.unit_count).astype(np.int32)
        self.profiles = profiles

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
        for receiver in RECEIVERS:
            cells = [(ranking, share) for ranking in RANKINGS for share in shares]
            patterns = [self._best(self.order(ranking, receiver), share) for ranking, share in cells]
            if 1.0 in self.settings.kept:
                cells += [(ranking, 1.0) for ranking in RANKINGS]
            judged = self._judge([*patterns, self.whole], receiver)
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
        """What each scheme delivered, under each receiver."""
        found = []
        size = self.layout.symbol_size()
        runs = [
            (scheme, rho, loss)
            for scheme in schemes
            for rho in self.settings.rhos
            for loss in range(self.settings.losses)
        ]
        for receiver in RECEIVERS:
            patterns, complete = [], []
            for scheme, rho, loss in runs:
                order = self.order(scheme.ranking, receiver)
                fragments = fragments_by_unit(self.layout, size, order, deliveries[scheme.policy, rho, loss])
                complete.append(float(fragments.all(axis=1).mean()))
                elements = kept_elements(self.layout, size, fragments)
                patterns.append(Pattern(tuple(kept_rows(elements) if receiver == "mask" else elements)))
            judged = self._judge(patterns, receiver)
            scores = self._f1(self.wire, patterns, receiver)
            for (scheme, rho, loss), verdict, f1, blocks in zip(runs, judged, scores, complete, strict=True):
                found.append(
                    Record(
                        example=self.example.id,
                        arm="handoff",
                        name=scheme.key,
                        receiver=receiver,
                        share=rho,
                        loss=loss,
                        agreement=verdict.agreement,
                        kl=verdict.kl,
                        f1=f1,
                        blocks=blocks,
                    )
                )
        return found

    def order(self, ranking: Ranking, receiver: Receiver) -> npt.NDArray[np.int32]:
        """Unit ids in the order of sending."""
        if ranking == "random":
            return self.shuffled
        if ranking == "fifo":
            return order_units(self.layout, "fifo")
        if ranking == "request":
            utility = request_utility(self.layout, self.mass, self.profiles["layer", receiver])
        else:
            utility = unit_utility(self.layout, self.profiles[ranking, receiver])
        return order_units(self.layout, "utility", utility)

    def _best(self, order: npt.NDArray[np.int32], share: float) -> Pattern:
        """The pattern of whole blocks that keeps the first `share` of `order`."""
        layout = self.layout
        units = np.zeros(layout.unit_count, dtype=np.bool_)
        units[order[: round(share * len(order))]] = True
        rows = np.repeat(units.reshape(-1, layout.columns), layout.block_tokens, axis=1)[:, : layout.tokens]
        return Pattern(tuple(rows))

    def _judge(self, patterns: Sequence[Pattern], receiver: Receiver) -> list[Any]:
        return verdicts(
            self.m, self.wire, self.cue, self.forced, patterns, receiver, self.reference, self.settings.batch
        )

    def _f1(self, cache: Any, patterns: Sequence[Pattern], receiver: Receiver) -> list[float]:
        # A step of one token costs reading the weights: the more sequences share it, the better.
        given = answers(
            self.m, cache, self.cue, patterns, receiver, self.settings.answer_tokens, 4 * self.settings.batch
        )
        return [f1_score(self.m.decode(ids), self.example.answers) for ids in given]

    def _ids(self, example: Example) -> tuple[int, ...]:
        return question_prompt(self.m.tokenizer, example, self.examples, self.settings.tokens, self.settings.seed)
