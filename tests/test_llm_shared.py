"""quic_pfec.llm.shared: a batch of loss patterns against the model's own path, one cache at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from quic_pfec.kv import hf  # noqa: E402
from quic_pfec.kv.units import KVArrays  # noqa: E402
from quic_pfec.llm import generate, models, shared  # noqa: E402
from quic_pfec.llm.shared import Pattern  # noqa: E402

pytestmark = pytest.mark.model
torch.set_num_threads(1)

TOKENS, LAYERS, HEADS, DIM = 99, 4, 2, 64
CUE, FORCED = [65, 66], list(b"what it says")


@pytest.fixture(scope="module")
def m() -> models.LoadedModel:
    return models.tiny(seed=6)


@pytest.fixture(scope="module")
def cache(m: models.LoadedModel) -> Any:
    return generate.prefill(m, [number * 7 % 256 for number in range(TOKENS)])


def patterns(kind: str, seed: int = 0) -> list[Pattern]:
    """Whole, a few whole layers among lossy ones, and nothing at all."""
    shape = {"rows": (TOKENS,), "heads": (HEADS, TOKENS), "elements": (HEADS, TOKENS, 2, DIM)}[kind]
    rng = np.random.default_rng(seed)
    lossy: list[Pattern] = [
        Pattern(tuple(rng.random(shape) < 0.7 if layer != number else None for layer in range(LAYERS)))
        for number in range(3)
    ]
    nothing = Pattern((np.zeros(shape, dtype=np.bool_),) * LAYERS)
    return [Pattern.whole(LAYERS), *lossy, nothing]


def rebuilt(m: models.LoadedModel, cache: Any, pattern: Pattern, receiver: Any) -> Any:
    """The cache a receiver of this pattern holds, by the receiver's own code."""
    pairs, valid = [], []
    for (keys, values), held in zip(hf.extract(cache, "fp32").arrays.layers, pattern.layers, strict=True):
        full = np.ones((HEADS, TOKENS, 2, DIM), dtype=np.bool_)
        if held is not None:
            full &= held if held.ndim == 4 else held[..., None, None]
        pairs.append((np.where(full[:, :, 0], keys, 0), np.where(full[:, :, 1], values, 0)))
        valid.append(full.all(axis=(2, 3)))
    return hf.to_cache(KVArrays(tuple(pairs), "fp32"), valid, m.config, missing=receiver)


@pytest.mark.parametrize(
    ("receiver", "kind"),
    [("mask", "rows"), ("mask", "heads"), ("zero", "rows"), ("zero", "heads"), ("zero", "elements")],
)
def test_equals_the_models_own_path(m: models.LoadedModel, cache: Any, receiver: Any, kind: str) -> None:
    batch = patterns(kind)
    found = shared.log_probabilities(m, cache, CUE, FORCED, batch, receiver)
    for pattern, got in zip(batch, found, strict=True):
        partial = rebuilt(m, cache, pattern, receiver)
        expected = torch.log_softmax(generate.forced_logits(m, partial, CUE, FORCED), dim=-1)
        assert float((got - expected).abs().max()) < 1e-4
    assert float((found[0] - found[1]).abs().max()) > 0.01


def test_kinds_may_be_mixed(m: models.LoadedModel, cache: Any) -> None:
    """Rows and elements in one batch, under zero."""
    batch = [patterns("rows")[1], patterns("heads")[2], patterns("elements")[3]]
    together = shared.log_probabilities(m, cache, CUE, FORCED, batch, "zero")
    for pattern, got in zip(batch, together, strict=True):
        alone = shared.log_probabilities(m, cache, CUE, FORCED, [pattern], "zero")[0]
        assert float((got - alone).abs().max()) < 1e-4


@pytest.mark.parametrize(("receiver", "kind"), [("mask", "heads"), ("zero", "elements")])
def test_answers_equal_greedy_decoding(m: models.LoadedModel, cache: Any, receiver: Any, kind: str) -> None:
    batch = patterns(kind, seed=3)
    found = shared.answers(m, cache, CUE, batch, receiver, 9, batch=2)
    for pattern, got in zip(batch, found, strict=True):
        expected = list(generate.greedy(m, rebuilt(m, cache, pattern, receiver), CUE, 9))
        assert got == expected
    assert len({tuple(one) for one in found}) > 1


def test_answers_end_where_the_model_does(m: models.LoadedModel, cache: Any) -> None:
    [full] = shared.answers(m, cache, CUE, [Pattern.whole(LAYERS)], "mask", 6)
    from dataclasses import replace

    ending = replace(m, eos_ids=frozenset({full[2]}))
    stop = full.index(full[2])
    assert shared.answers(ending, cache, CUE, [Pattern.whole(LAYERS)] * 2, "mask", 6) == [full[:stop]] * 2


def test_verdicts(m: models.LoadedModel, cache: Any) -> None:
    batch = patterns("heads")
    reference = shared.log_probabilities(m, cache, CUE, FORCED, batch[:1], "mask")[0]
    one = shared.verdicts(m, cache, CUE, FORCED, batch, "mask", reference, batch=1)
    all_at_once = shared.verdicts(m, cache, CUE, FORCED, batch, "mask", reference, batch=5)
    for a, b in zip(one, all_at_once, strict=True):
        assert a.agreement == b.agreement
        assert a.kl == pytest.approx(b.kl, abs=1e-5)
    assert one[0].agreement == 1.0
    assert one[0].kl < 1e-6
    lossy = shared.log_probabilities(m, cache, CUE, FORCED, batch[1:2], "mask")[0]
    assert one[1].kl == pytest.approx(float((reference.exp() * (reference - lossy)).sum(-1).mean()), abs=1e-5)
    assert one[1].agreement == float((lossy.argmax(-1) == reference.argmax(-1)).float().mean())
    assert one[-1].kl > one[1].kl > 0


def test_the_cache_is_only_read_and_the_attention_restored(m: models.LoadedModel, cache: Any) -> None:
    before = [layer.keys.clone() for layer in cache.layers]
    implementation = m.config._attn_implementation
    shared.log_probabilities(m, cache, CUE, FORCED, patterns("elements"), "zero")
    assert m.config._attn_implementation == implementation
    assert all(torch.equal(layer.keys, old) for layer, old in zip(cache.layers, before, strict=True))
    with pytest.raises(ValueError, match="layer 1: a pattern of"):
        shared.log_probabilities(
            m, cache, CUE, FORCED, [Pattern((None, np.zeros((3, TOKENS), dtype=np.bool_), None, None))], "zero"
        )
    assert m.config._attn_implementation == implementation


def test_refusals(m: models.LoadedModel, cache: Any) -> None:
    with pytest.raises(ValueError, match="receiver 'zero' only"):
        shared.SharedCache(cache, patterns("elements"), "mask")
    partial = rebuilt(m, cache, patterns("rows")[-1], "mask")
    with pytest.raises(ValueError, match="layer 0 is a PartialLayer"):
        shared.SharedCache(partial)
