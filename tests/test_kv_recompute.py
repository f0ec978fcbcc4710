"""Holes computed again: the rows of the intact cache, whatever was missing, and nothing else touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM  # noqa: E402
from transformers.cache_utils import DynamicCache  # noqa: E402

from quic_pfec.kv import attention, hf, recompute  # noqa: E402
from quic_pfec.llm import generate, models  # noqa: E402

pytestmark = pytest.mark.model
torch.set_num_threads(1)

CONTEXT = [int(token) for token in torch.randint(0, 256, (90,), generator=torch.Generator().manual_seed(3))]
PROMPT = [17, 200, 3, 99, 4]
FORCED = [int(token) for token in torch.randint(0, 256, (64,), generator=torch.Generator().manual_seed(4))]

GEMMA = {
    "head_dim": 16,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}


def tiny(base: str) -> models.LoadedModel:
    m = models.tiny(seed=1)
    m.model.set_attn_implementation(base)
    attention.attach(m.model)
    return m


def windowed(kind: str, window: int) -> models.LoadedModel:
    """A model all of whose layers have a window (mistral), or every second one (gemma)."""
    config_class, model_class = {
        "mistral": (MistralConfig, MistralForCausalLM),
        "gemma": (Gemma3TextConfig, Gemma3ForCausalLM),
    }[kind]
    config = config_class(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=window,
        initializer_range=0.2,
        pad_token_id=None,
        **(GEMMA if kind == "gemma" else {"head_dim": 16}),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).eval()
    attention.attach(model)
    return models.LoadedModel(model, models.ByteTokenizer(), kind, "", frozenset())


def holes(kind: str, layers: int = 4, heads: int = 2, rows: int = 90) -> list[Any]:
    """Which rows came."""
    rng = np.random.default_rng(len(kind))
    valid = [np.ones((heads, rows), dtype=np.bool_) for _ in range(layers)]
    if kind == "scattered":  # blocks of 16 tokens of single layers, and single rows of single heads
        for layer in valid:
            for start in range(0, rows, 16):
                layer[:, start : start + 16] = rng.random() < 0.5
            layer[rng.random(layer.shape) < 0.05] = False
    elif kind == "first":
        valid[layers - 1][1, 0] = False
    elif kind == "last":
        valid[0][0, rows - 1] = False
    else:
        for layer in valid:
            layer[:] = False
    return valid


def rebuilt_with_holes(m: models.LoadedModel, cache: Any, valid: list[Any], wire: str = "fp32") -> hf.Rebuilt:
    """As a hand-off leaves it: zeros where nothing came."""
    arrays = hf.extract(cache, wire).arrays
    for pair, rows in zip(arrays.layers, valid, strict=True):
        for part in pair:
            part.setflags(write=True)
            part[~rows] = 0
    return hf.rebuild(arrays, valid, m.config, dtype=m.dtype)


def forced(m: models.LoadedModel, cache: Any) -> Any:
    return generate.forced_logits(m, cache, PROMPT, FORCED)


@pytest.mark.parametrize("chunk", [256, 7])
@pytest.mark.parametrize("base", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["scattered", "first", "last", "everything"])
def test_the_rows_are_those_of_the_intact_cache(kind: str, base: str, chunk: int) -> None:
    m = tiny(base)
    whole = generate.prefill(m, CONTEXT)
    valid = holes(kind)
    rebuilt = rebuilt_with_holes(m, whole, valid)
    before = [(rows.keys.clone(), rows.values.clone()) for rows in rebuilt.layers]
    filled = recompute.fill(m.model, rebuilt, CONTEXT, chunk=chunk)
    cache = filled.to_cache()
    assert type(cache) is DynamicCache
    for layer, intact, (keys, values), came in zip(cache.layers, whole.layers, before, valid, strict=True):
        torch.testing.assert_close(layer.keys, intact.keys, rtol=0, atol=1e-3)
        torch.testing.assert_close(layer.values, intact.values, rtol=0, atol=1e-3)
        assert torch.equal(layer.keys[0][came], keys[0][came])  # what came stays to the bit
        assert torch.equal(layer.values[0][came], values[0][came])
    ours, theirs = forced(m, cache), forced(m, whole)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_only_the_columns_with_holes_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    m = tiny("sdpa")
    whole = generate.prefill(m, CONTEXT)
    valid = holes("first")
    valid[2][0, 40:44] = False
    rebuilt = rebuilt_with_holes(m, whole, valid)
    seen = []
    forward = m.model.model.forward
    monkeypatch.setattr(
        m.model.model, "forward", lambda *a, **k: (seen.append(k["position_ids"].tolist()), forward(*a, **k))[1]
    )
    assert recompute.hole_columns(rebuilt).tolist() == [0, 40, 41, 42, 43]
    recompute.fill(m.model, rebuilt, CONTEXT)
    assert seen == [[[0, 40, 41, 42, 43]]]


def test_nothing_missing_costs_nothing() -> None:
    m = tiny("sdpa")
    rebuilt = rebuilt_with_holes(m, generate.prefill(m, CONTEXT), holes("first"))
    whole = recompute.fill(m.model, rebuilt, CONTEXT)
    assert recompute.hole_columns(whole).tolist() == []
    assert recompute.fill(None, whole, []) is whole  # neither model nor ids are looked at


def test_what_there_was_no_time_for_stays_masked() -> None:
    """It may stop between passes: what was filled by then is exact, and the mask leaves out the rest."""
    m = tiny("sdpa")
    whole = generate.prefill(m, CONTEXT)
    valid = holes("scattered")
    rebuilt = rebuilt_with_holes(m, whole, valid)
    columns = recompute.hole_columns(rebuilt)
    answers = iter([True, True, False])
    filled = recompute.fill(m.model, rebuilt, CONTEXT, chunk=10, proceed=lambda: next(answers))
    assert recompute.hole_columns(filled).tolist() == columns[20:].tolist()
    for rows, intact in zip(filled.layers, whole.layers, strict=True):
        upto = int(columns[20])
        torch.testing.assert_close(rows.keys[:, :, :upto], intact.keys[:, :, :upto], rtol=0, atol=1e-3)
    partial = filled.to_cache()
    assert isinstance(partial, attention.PartialCache)
    left = [rows.copy() for rows in valid]
    for rows in left:
        rows[:, : int(columns[20])] = True
    reference = hf.to_cache(hf.extract(whole, "fp32").arrays, left, m.config)
    torch.testing.assert_close(forced(m, partial), forced(m, reference), rtol=0, atol=1e-3)
    untouched = rebuilt_with_holes(m, whole, valid)
    assert recompute.hole_columns(recompute.fill(m.model, untouched, CONTEXT, proceed=lambda: False)).tolist() == (
        columns.tolist()
    )


@pytest.mark.parametrize("kind", ["scattered", "everything"])
@pytest.mark.parametrize("family", ["mistral", "gemma"])
def test_windows_and_hybrid_caches(family: str, kind: str) -> None:
    """The cache still holds every row, as every cache that can be handed over; the continuation goes beyond."""
    m = windowed(family, window=100)
    whole = generate.prefill(m, CONTEXT)
    valid = holes(kind, layers=2)
    cache = recompute.fill(m.model, rebuilt_with_holes(m, whole, valid), CONTEXT).to_cache()
    assert [type(layer) for layer in cache.layers] == [type(layer) for layer in whole.layers]
    torch.testing.assert_close(forced(m, cache), forced(m, whole), rtol=0, atol=1e-3)


@pytest.mark.parametrize("family", ["mistral", "gemma"])
def test_the_mask_on_windows_and_hybrid_caches(family: str) -> None:
    """Not filled but left out: noise in the holes changes nothing, also once the window has moved on."""
    m = windowed(family, window=100)
    whole = generate.prefill(m, CONTEXT)
    valid = holes("scattered", layers=2)
    out = []
    for noise in (0.0, 1e4):
        rebuilt = rebuilt_with_holes(m, whole, valid)
        for rows in rebuilt.layers:
            assert rows.valid is not None
            for part in (rows.keys, rows.values):
                part += noise * ~rows.valid[..., None]
        out.append(forced(m, rebuilt.to_cache()))
    assert torch.equal(*out)
    assert not torch.allclose(out[0], forced(m, whole), atol=1e-2)


@pytest.mark.parametrize("family", ["mistral", "gemma"])
def test_a_window_shorter_than_the_context(family: str) -> None:
    """Rows that a sender kept beyond the window: a column sees no further than the model lets it."""
    m = windowed(family, window=24)
    intact = generate.prefill(m, CONTEXT)  # its window layers keep the last 23 rows
    # All rows of the short window's own computation, one token at a time.
    kept: list[list[Any]] = [[], []]
    stepwise = DynamicCache(config=m.config)
    for token in CONTEXT:
        generate.logits(m, stepwise, [token], keep=1)
        for index, layer in enumerate(stepwise.layers):
            kept[index].append((layer.keys[0, :, -1:].clone(), layer.values[0, :, -1:].clone()))
    pairs = tuple(
        (torch.cat([k for k, _ in layer], 1)[None], torch.cat([v for _, v in layer], 1)[None]) for layer in kept
    )
    valid = holes("scattered", layers=2)
    valid[0][:, 60:80] = False  # holes that the window still needs at the end
    cache = recompute.fill(m.model, rebuilt_with_holes(m, pairs, valid), CONTEXT).to_cache()
    assert hf.length(cache) == hf.length(intact) == 90
    for layer, other in zip(cache.layers, intact.layers, strict=True):
        assert layer.keys.shape == other.keys.shape
        torch.testing.assert_close(layer.keys, other.keys, rtol=0, atol=1e-3)
    torch.testing.assert_close(forced(m, cache), forced(m, intact), rtol=0, atol=1e-3)


def test_holes_of_a_base_are_filled_with_those_of_its_increment() -> None:
    m = tiny("sdpa")
    whole = generate.prefill(m, CONTEXT)
    valid = holes("scattered")
    base_arrays, increment = (
        hf.extract(whole, "fp32", first_token=first, tokens=count).arrays for first, count in ((0, 50), (50, 40))
    )
    base = hf.to_cache(base_arrays, [rows[:, :50] for rows in valid], m.config)
    kept = [(layer.keys.clone(), layer.valid.clone()) for layer in base.layers]
    rebuilt = hf.rebuild(increment, [rows[:, 50:] for rows in valid], m.config, first_token=50, base=base)
    cache = recompute.fill(m.model, rebuilt, CONTEXT).to_cache()
    torch.testing.assert_close(forced(m, cache), forced(m, whole), rtol=0, atol=1e-3)
    assert hf.length(cache) == 90
    for layer, (keys, rows_valid) in zip(base.layers, kept, strict=True):  # the base is as it was
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.valid, rows_valid)


def test_what_cannot_be_computed() -> None:
    m = tiny("sdpa")
    whole = generate.prefill(m, CONTEXT)

    def ready() -> hf.Rebuilt:
        return rebuilt_with_holes(m, whole, holes("scattered"))

    for ids, reason in (
        (CONTEXT[:-1], "token ids for a context of 90"),
        ([256] * 90, r"0 \.\. 255"),
        ([-1] * 90, r"0 \.\. 255"),
    ):
        with pytest.raises(ValueError, match=reason):
            recompute.fill(m.model, ready(), ids)
    with pytest.raises(ValueError, match="chunk"):
        recompute.fill(m.model, ready(), CONTEXT, chunk=0)
    layers = [
        hf.LayerRows(*(part.expand(2, -1, -1, -1) for part in (rows.keys, rows.values)), rows.valid, rows.layer)
        for rows in ready().layers
    ]
    with pytest.raises(ValueError, match="a batch of 2"):
        recompute.fill(m.model, hf.Rebuilt(None, tuple(layers)), CONTEXT)
    plain = models.tiny(seed=1)
    plain.model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="attach"):
        recompute.fill(plain.model, ready(), CONTEXT)


@pytest.mark.weights
@pytest.mark.slow
def test_smollm2_continues_as_from_the_intact_cache() -> None:
    m = models.load("smollm2-135m", threads=1)
    ids = m.encode("A mill that grinds by the tide has no need of a river. " * 16)[:192]
    whole = generate.prefill(m, ids)
    valid = holes("scattered", layers=30, heads=3, rows=len(ids))
    cache = recompute.fill(m.model, rebuilt_with_holes(m, whole, valid), ids).to_cache()
    prompt = m.encode(" The miller")
    said = list(generate.greedy(m, hf.fork(whole), prompt, 32))
    ours, theirs = (generate.forced_logits(m, c, prompt, said) for c in (cache, whole))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.cuda
def test_on_a_gpu() -> None:
    m = models.tiny(seed=1, device="cuda")
    whole = generate.prefill(m, CONTEXT)
    arrays = hf.extract(whole, "fp32").arrays
    rebuilt = hf.rebuild(arrays, holes("scattered"), m.config, dtype=m.dtype, device="cuda")
    cache = recompute.fill(m.model, rebuilt, CONTEXT).to_cache()
    torch.testing.assert_close(forced(m, cache), forced(m, whole), rtol=0, atol=1e-2)
