"""Prefill and continuation, with the one thing a partial cache must not get wrong: absolute positions.

A cache with holes still stands for all of its tokens. Everything here takes positions from the cache's length, holes
included, and passes them to the model explicitly, so a continuation from a partial cache differs from the intact one
only by what the missing rows would have said.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

try:
    import torch
    from torch import Tensor
    from transformers.cache_utils import DynamicCache
except ImportError as error:
    raise ImportError('quic_pfec.llm needs torch and transformers: pip install "quic-pfec[hf]"') from error

from quic_pfec.kv.hf import cache_kwarg, fork, length
from quic_pfec.llm.models import LoadedModel

CHUNK_TOKENS: Final = 256
"""Prefill goes in pieces, so that progress can be shown and a long prompt needs no mask of its length squared."""

Progress = Callable[[int, int], None]
"""Called with (done, total)."""


def prefill(
    m: LoadedModel,
    token_ids: Sequence[int],
    progress: Progress | None = None,
    *,
    chunk: int = CHUNK_TOKENS,
    cache: Any = None,
) -> Any:
    """Run the model over `token_ids` and return the cache with their rows: a new one, or `cache`, extended in place.

    `progress` is called with (tokens done, tokens in all) after each chunk of `chunk` tokens. Raises ValueError for
    an empty prompt, or one that goes beyond the positions the model was made for.
    """
    if not token_ids:
        raise ValueError("there is nothing to prefill: the prompt is empty")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")
    cache = DynamicCache(config=m.config) if cache is None else cache
    whole = length(cache) + len(token_ids)
    if whole > m.max_tokens:
        raise ValueError(f"a context of {whole} tokens does not fit {m.name}, which has {m.max_tokens} positions")
    for start in range(0, len(token_ids), chunk):
        piece = token_ids[start : start + chunk]
        logits(m, cache, piece, keep=1)
        if progress is not None:
            progress(start + len(piece), len(token_ids))
    return cache


def logits(m: LoadedModel, cache: Any, token_ids: Sequence[int], *, keep: int) -> Tensor:
    """One forward pass of `token_ids` behind `cache`, which grows by their rows; logits of the last `keep`, fp32
    [keep, vocab].

    Positions are absolute: the first new token stands at the cache's length, holes counted.
    """
    past = length(cache)
    ids = torch.tensor([list(token_ids)], device=m.device)
    positions = torch.arange(past, past + ids.shape[1], device=m.device)[None]
    with torch.no_grad():
        out = m.model(
            input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=keep, **{cache_kwarg(m.model): cache}
        )
    result: Tensor = out.logits[0, -keep:].float()
    return result


def greedy(
    m: LoadedModel,
    cache: Any,
    input_ids: Sequence[int],
    max_new_tokens: int,
    stop: Collection[int] = (),
    *,
    before_step: Callable[[], None] | None = None,
) -> Iterator[int]:
    """Yield the most likely continuation of `cache` followed by `input_ids`, token by token, as it is computed.

    `input_ids` needs at least one token (the cache holds rows, not the logits behind the last of them). Ends after
    `max_new_tokens`, or before a token of `stop` or the model's end of sequence, which is not yielded. `cache` grows by
    `input_ids` and every yielded token but the last: give a `kv.hf.fork` to keep it. before_step: called before each
    pass of the model; it may change rows of `cache`. Raises ValueError for empty input.
    """
    if not input_ids:
        raise ValueError("a continuation needs at least one prompt token behind the cache")
    ends = m.eos_ids.union(stop)
    step = list(input_ids)
    for _ in range(max_new_tokens):
        if before_step is not None:
            before_step()
        token = int(logits(m, cache, step, keep=1)[0].argmax())
        if token in ends:
            return
        yield token
        step = [token]


def forced_logits(m: LoadedModel, cache: Any, prompt_ids: Sequence[int], forced_ids: Sequence[int]) -> Tensor:
    """Logits that predict each token of `forced_ids` when all before it are given, fp32 [len(forced_ids), vocab].

    One forward pass, on a `fork`: `cache` is not changed. Raises ValueError if either sequence is empty.
    """
    if not prompt_ids or not forced_ids:
        raise ValueError("scoring needs at least one prompt token and one forced token")
    given = [*prompt_ids, *forced_ids[:-1]]
    return logits(m, fork(cache), given, keep=len(forced_ids))


def score(m: LoadedModel, cache: Any, prompt_ids: Sequence[int], forced_ids: Sequence[int]) -> list[int]:
    """Teacher-forced top-1: what the model would have said at each position of `forced_ids`. `cache` is not changed.

    `forced_ids` is usually the greedy continuation of the intact cache; `agreement` compares. See `forced_logits`.
    """
    return [int(token) for token in forced_logits(m, cache, prompt_ids, forced_ids).argmax(dim=-1)]


def agreement(predicted: Sequence[int], forced: Sequence[int]) -> float:
    """Share of positions at which the two agree, 0..1. Raises ValueError unless both have the same length, at least
    one."""
    if not forced or len(predicted) != len(forced):
        raise ValueError(f"agreement needs two sequences of one length, got {len(predicted)} and {len(forced)}")
    return sum(a == b for a, b in zip(predicted, forced, strict=True)) / len(forced)


class TextStream:
    """Turns a stream of tokens into a stream of text: a character whose bytes span tokens is held back until it is
    whole."""

    def __init__(self, m: LoadedModel) -> None:
        self._m = m
        self._ids: list[int] = []
        self._given = ""

    def push(self, token: int) -> str:
        """Text that this token completes; "" while there is none."""
        self._ids.append(token)
        text = self._m.decode(self._ids)
        return "" if text.endswith("\ufffd") else self._advance(text)

    def close(self) -> str:
        """What was held back to the end, replacement characters included."""
        return self._advance(self._m.decode(self._ids))

    def _advance(self, text: str) -> str:
        new, self._given = text[len(self._given) :], text
        return new
