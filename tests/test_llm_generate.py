"""Prefill and continuation: absolute positions, no side effects, and measures that can be trusted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from quic_pfec.kv import hf  # noqa: E402
from quic_pfec.llm import generate, models  # noqa: E402

pytestmark = pytest.mark.model
torch.set_num_threads(1)  # tensors this small gain nothing from a second thread, and lose much on a busy machine

CONTEXT = list(b"A cache with holes still stands for all of its tokens.")
PROMPT = list(b"So where does the next one stand?")


@pytest.fixture(scope="module")
def m() -> models.LoadedModel:
    return models.tiny(seed=4)


@pytest.fixture(scope="module")
def cache(m: models.LoadedModel) -> Any:
    return generate.prefill(m, CONTEXT)


def partial(m: models.LoadedModel, cache: Any) -> Any:
    rng = np.random.default_rng(0)
    return hf.to_cache(hf.extract(cache).arrays, [rng.random((2, len(CONTEXT))) < 0.5 for _ in range(4)], m.config)


def test_prefill_in_chunks_is_prefill_at_once(m: models.LoadedModel) -> None:
    calls: list[tuple[int, int]] = []
    chunked = generate.prefill(m, CONTEXT, lambda done, total: calls.append((done, total)), chunk=20)
    assert calls == [(20, 54), (40, 54), (54, 54)]
    at_once = generate.prefill(m, CONTEXT, chunk=54)
    for a, b in zip(chunked.layers, at_once.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, rtol=0, atol=1e-5)
        torch.testing.assert_close(a.values, b.values, rtol=0, atol=1e-5)


def test_prefill_extends_a_cache(m: models.LoadedModel, cache: Any) -> None:
    grown = hf.fork(cache)
    assert generate.prefill(m, PROMPT, cache=grown) is grown
    assert hf.length(grown) == len(CONTEXT) + len(PROMPT)


def test_continuation_equals_the_model_without_a_cache(m: models.LoadedModel, cache: Any) -> None:
    ours = list(generate.greedy(m, hf.fork(cache), PROMPT, 10))
    ids = [*CONTEXT, *PROMPT]
    for token in ours:
        assert token == int(m.model(torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token)


@pytest.mark.parametrize("holes", [False, True])
def test_positions_are_absolute(
    m: models.LoadedModel, cache: Any, holes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    forward = m.model.model.rotary_emb.forward

    def spy(hidden: Any, position_ids: Any) -> Any:
        seen.extend(position_ids[0].tolist())
        return forward(hidden, position_ids)

    monkeypatch.setattr(m.model.model.rotary_emb, "forward", spy)
    list(generate.greedy(m, partial(m, cache) if holes else hf.fork(cache), PROMPT, 4))
    assert seen == list(range(len(CONTEXT), len(CONTEXT) + len(PROMPT) + 3))


def test_greedy_ends_before_a_stop_token(m: models.LoadedModel, cache: Any) -> None:
    free = list(generate.greedy(m, hf.fork(cache), PROMPT, 12))
    end = free[5]
    stopped = list(generate.greedy(m, hf.fork(cache), PROMPT, 12, stop=[end]))
    assert stopped == free[: free.index(end)]
    with_eos = models.LoadedModel(m.model, m.tokenizer, m.name, m.fingerprint, frozenset([end]))
    assert list(generate.greedy(with_eos, hf.fork(cache), PROMPT, 12)) == stopped


def test_greedy_yields_each_token_as_it_is_computed(m: models.LoadedModel, cache: Any) -> None:
    twin = hf.fork(cache)
    stream = generate.greedy(m, twin, PROMPT, 5)
    next(stream)
    assert hf.length(twin) == len(CONTEXT) + len(PROMPT)
    next(stream)
    assert hf.length(twin) == len(CONTEXT) + len(PROMPT) + 1


@pytest.mark.parametrize("holes", [False, True])
def test_score_is_what_greedy_would_have_said(m: models.LoadedModel, cache: Any, holes: bool) -> None:
    from_cache = partial(m, cache) if holes else cache
    forced = list(generate.greedy(m, hf.fork(from_cache), PROMPT, 16))
    assert generate.score(m, from_cache, PROMPT, forced) == forced
    assert hf.length(from_cache) == len(CONTEXT)
    assert generate.score(m, from_cache, PROMPT, forced) == forced


def test_score_of_another_text_disagrees(m: models.LoadedModel, cache: Any) -> None:
    forced = list(b"an entirely different continuation")
    predicted = generate.score(m, cache, PROMPT, forced)
    assert len(predicted) == len(forced)
    assert generate.agreement(predicted, forced) < 0.5


def test_agreement() -> None:
    assert generate.agreement([1, 2, 3, 4], [1, 2, 0, 4]) == 0.75
    for predicted, forced in (([], []), ([1], [1, 2])):
        with pytest.raises(ValueError, match="agreement needs"):
            generate.agreement(predicted, forced)


def test_empty_input_is_refused(m: models.LoadedModel, cache: Any) -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        generate.prefill(m, [])
    with pytest.raises(ValueError, match="chunk must be"):
        generate.prefill(m, CONTEXT, chunk=0)
    with pytest.raises(ValueError, match="at least one prompt token"):
        next(generate.greedy(m, hf.fork(cache), [], 4))
    with pytest.raises(ValueError, match="at least one prompt token"):
        generate.score(m, cache, [], [1])


def test_text_stream_holds_back_half_a_character(m: models.LoadedModel) -> None:
    stream = generate.TextStream(m)
    pieces = [stream.push(byte) for byte in "aé€!".encode()]
    assert pieces == ["a", "", "é", "", "", "€", "!"]
    assert stream.push(0xC3) == ""
    assert stream.close() == "\ufffd"
    assert stream.close() == ""


def test_a_context_beyond_the_positions_of_the_model_is_refused() -> None:
    m = models.tiny()
    with pytest.raises(ValueError, match="does not fit"):
        generate.prefill(m, range(m.max_tokens + 1))
