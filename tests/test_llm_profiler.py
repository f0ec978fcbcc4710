"""The profiler: its shared-row evaluation against the model's own path, and the profiles that ship."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from quic_pfec.kv import hf, profile  # noqa: E402
from quic_pfec.kv.layout import Layout  # noqa: E402
from quic_pfec.kv.units import KVArrays  # noqa: E402
from quic_pfec.llm import corpus, generate, models, profiler  # noqa: E402
from tests.test_llm_models import needs_weights  # noqa: E402

pytestmark = pytest.mark.model
torch.set_num_threads(1)  # tensors this small gain nothing from a second thread, and lose much on a busy machine

SMALL = {"context_tokens": 99, "prompts": 2, "positions": 5, "batch": 7}


@pytest.fixture(scope="module")
def m() -> models.LoadedModel:
    return models.tiny(seed=6)


@pytest.mark.parametrize("receiver", ["mask", "zero"])
def test_equals_one_pass_per_lost_cell(m: models.LoadedModel, receiver: Any) -> None:
    """Against caches rebuilt with the cell missing, one at a time, through the receiver's own code."""
    settings = profiler.Settings(receiver=receiver, **SMALL)  # type: ignore[arg-type]
    prompt = corpus.profile_context(m.tokenizer, settings.context_tokens, 0)
    cache = generate.prefill(m, prompt.ids)
    cue, forced = m.encode(corpus.CUE), list(b"text")
    cells = [(layer, index) for layer in range(4) for index in range(settings.bins)]
    found = profiler.cell_damage(m, cache, cue, forced, cells, settings)

    whole = hf.extract(cache, "fp32").arrays
    intact = torch.log_softmax(generate.forced_logits(m, cache, cue, forced), dim=-1)
    edges = [round(99 * index / 8) for index in range(9)]
    for (layer, index), damage in zip(cells, found.tolist(), strict=True):
        lost = slice(edges[index], edges[index + 1])
        pairs = [(keys.copy(), values.copy()) for keys, values in whole.layers]
        valid = [np.ones((2, 99), dtype=np.bool_) for _ in range(4)]
        for part in (*pairs[layer], valid[layer]):
            part[:, lost] = 0
        partial = hf.to_cache(KVArrays(tuple(pairs), "fp32"), valid, m.config, missing=receiver)
        lossy = torch.log_softmax(generate.forced_logits(m, partial, cue, forced), dim=-1)
        expected = float((intact.exp() * (intact - lossy)).sum(-1).mean())
        assert damage == pytest.approx(expected, abs=2e-5)
        assert damage > 0


def test_measure(m: models.LoadedModel) -> None:
    settings = profiler.Settings(**SMALL)  # type: ignore[arg-type]
    calls: list[tuple[int, int]] = []
    before = m.config._attn_implementation
    first = profiler.measure(m, settings, lambda done, total: calls.append((done, total)))
    assert m.config._attn_implementation == before
    assert calls[-1] == (64, 64)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert (first.layers, first.bins, first.receiver) == (4, 8, "mask")
    assert (first.model, first.fingerprint) == ("tiny-random:6", m.fingerprint)
    assert first.command.endswith("--prompts 2 --positions 5 --seed 0 --model tiny-random:6")
    assert profile.decode_profile(profile.encode_profile(first)) == first
    again = profiler.measure(m, settings)
    assert again == first
    other = profiler.measure(m, profiler.Settings(seed=1, **SMALL))  # type: ignore[arg-type]
    assert other.values != first.values


def test_groups_lose_their_layers_together(m: models.LoadedModel) -> None:
    """One group of all layers and one bin: nothing of the context is left, whatever the single layers say."""
    one = profiler.measure(m, profiler.Settings(groups=1, **{**SMALL, "bins": 1}))  # type: ignore[arg-type]
    assert (one.groups, one.layers, len(one.values)) == (1, 4, 1)
    prompt = corpus.profile_context(m.tokenizer, 99, 0)
    cache = generate.prefill(m, prompt.ids)
    cue = m.encode(corpus.CUE)
    forced = profiler.continuation(m, cache, cue, 5)
    settings = profiler.Settings(groups=2, **SMALL)  # type: ignore[arg-type]
    found = profiler.cell_damage(m, cache, cue, forced, [(1, 3)], settings)
    whole = hf.extract(cache, "fp32").arrays
    valid = [np.ones((2, 99), dtype=np.bool_) for _ in range(4)]
    for layer in (2, 3):
        valid[layer][:, round(99 * 3 / 8) : round(99 * 4 / 8)] = False
    pairs = tuple((keys * rows[..., None], values * rows[..., None])
                  for (keys, values), rows in zip(whole.layers, valid, strict=True))  # fmt: skip
    partial = hf.to_cache(KVArrays(pairs, "fp32"), valid, m.config)
    intact, lossy = (
        torch.log_softmax(generate.forced_logits(m, one_cache, cue, forced), dim=-1) for one_cache in (cache, partial)
    )
    assert float(found[0]) == pytest.approx(float((intact.exp() * (intact - lossy)).sum(-1).mean()), abs=2e-5)


def test_data_of_ones_own(m: models.LoadedModel) -> None:
    from quic_pfec.llm.dataset import Dataset, Example, Source

    def example(name: str) -> Example:
        passages = (Source("t", f"{name} " * 20, True), Source("u", "filler " * 30))
        return Example(name, "Who?", ("he",), passages)

    data = Dataset("file.jsonl", "ab" * 32, (example("p"), example("q")), (example("r"),))
    settings = profiler.Settings(**{**SMALL, "context_tokens": 240})  # type: ignore[arg-type]
    found = profiler.measure(m, settings, data=data)
    assert (found.data_hash, found.data[:12]) == ("ab" * 32, "file.jsonl: ")
    assert found.command.endswith("--model tiny-random:6 --data file.jsonl")
    assert found.values != profiler.measure(m, settings).values
    with pytest.raises(ValueError, match=r"file\.jsonl has 2 examples for profiles, 3 were asked for"):
        profiler.measure(m, profiler.Settings(**{**SMALL, "prompts": 3}), data=data)  # type: ignore[arg-type]


def test_continuation_can_do_without_tokens(m: models.LoadedModel) -> None:
    cache = generate.prefill(m, list(range(99)))
    free = profiler.continuation(m, cache, [1], 8)
    kept = profiler.continuation(m, cache, [1], 8, {free[0]})
    assert free[0] not in kept
    assert len(kept) == 8
    assert cache.get_seq_length() == 99
    assert profiler.control_ids(m) == m.eos_ids


def test_batch_size_does_not_matter(m: models.LoadedModel) -> None:
    tables = [
        profiler.measure(m, profiler.Settings(**{**SMALL, "batch": batch})).table()  # type: ignore[arg-type]
        for batch in (1, 32)
    ]
    np.testing.assert_allclose(tables[0], tables[1], atol=1e-5)


def test_attention_is_restored_after_an_error(m: models.LoadedModel) -> None:
    settings = profiler.Settings(**SMALL)  # type: ignore[arg-type]
    cache = generate.prefill(m, list(range(99)))
    valid = [np.zeros((2, 99), dtype=np.bool_)] * 4
    partial = hf.to_cache(hf.extract(cache).arrays, valid, m.config)
    before = m.config._attn_implementation
    with pytest.raises(ValueError, match="layer 0 is a PartialLayer: only full attention"):
        profiler.cell_damage(m, partial, [1], [2], [(0, 0)], settings)
    assert m.config._attn_implementation == before


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"receiver": "guess"}, "receiver must be"),
        ({"bins": 0}, "bins must be at least 1"),
        ({"groups": -1}, "groups must not be negative"),
        ({"prompts": 0}, "prompts must be at least 1"),
        ({"positions": 0}, "positions must be at least 1"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"context_tokens": 7}, "7 tokens cannot be divided into 8 bins"),
    ],
)
def test_settings(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        profiler.Settings(**wrong)


@pytest.fixture(scope="module")
def smollm2() -> models.LoadedModel:
    return models.load()


@pytest.mark.weights
@needs_weights
class TestShipped:
    @pytest.mark.parametrize("receiver", ["mask", "zero"])
    def test_belongs_to_the_default_model(self, smollm2: models.LoadedModel, receiver: Any) -> None:
        shipped = profile.builtin(smollm2.name, receiver)
        assert shipped is not None
        assert shipped == profile.builtin(smollm2.fingerprint, receiver)
        assert (shipped.layers, shipped.bins, shipped.receiver) == (30, 8, receiver)
        assert "PROFILE" in shipped.data

    def test_keeps_more_of_the_model_than_chance(self, smollm2: models.LoadedModel) -> None:
        """Half of the units, once by the profile and once at random, on text that the profile was not measured on."""
        shipped = profile.builtin(smollm2.name)
        assert shipped is not None
        prompt = corpus.demo_context(smollm2.tokenizer, 384, seed=1)
        cache = generate.prefill(smollm2, prompt.ids)
        cue = smollm2.encode(corpus.CUE)
        forced = list(generate.greedy(smollm2, hf.fork(cache), cue, 32))
        got = hf.extract(cache)
        layout = Layout(got.shapes, got.arrays.tokens)
        by_profile = np.argsort(-profile.unit_utility(layout, shipped))
        at_random = np.random.default_rng(0).permutation(layout.unit_count)

        def divergence(order: Any) -> float:
            valid = np.zeros(layout.unit_count, dtype=np.bool_)
            valid[order[: layout.unit_count // 2]] = True
            rows = np.repeat(valid.reshape(30, layout.columns), layout.block_tokens, axis=1)[:, : layout.tokens]
            partial = hf.to_cache(got.arrays, [np.tile(row, (3, 1)) for row in rows], smollm2.config)
            intact = torch.log_softmax(generate.forced_logits(smollm2, cache, cue, forced), dim=-1)
            lossy = torch.log_softmax(generate.forced_logits(smollm2, partial, cue, forced), dim=-1)
            return float((intact.exp() * (intact - lossy)).sum(-1).mean())

        assert divergence(by_profile) < 0.7 * divergence(at_random)
