"""The mask receiver: what is left out has no influence at all, what is whole is untouched, and requests stay apart."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import Tensor  # noqa: E402

from quic_pfec.kv import attention, hf  # noqa: E402
from quic_pfec.kv.attention import PartialCache, PartialLayer, PartialSlidingLayer  # noqa: E402
from quic_pfec.llm import generate, models  # noqa: E402

from .kv_world import mistral  # noqa: E402

pytestmark = pytest.mark.model
torch.set_num_threads(1)  # tensors this small gain nothing from a second thread, and lose much on a busy machine

CONTEXT = [int(token) for token in torch.randint(0, 256, (96,), generator=torch.Generator().manual_seed(5))]
PROMPT = [17, 200, 3, 99, 4]


@pytest.fixture(scope="module")
def m() -> models.LoadedModel:
    return models.tiny(seed=1)


@pytest.fixture(scope="module")
def whole(m: models.LoadedModel) -> Any:
    return generate.prefill(m, CONTEXT)


def with_holes(cache: Any, valid: list[Tensor | None]) -> PartialCache:
    """`cache` with the rows of `valid` (bool [kv_heads, rows] a layer, None = all) left out."""
    layers = []
    for layer, rows in zip(cache.layers, valid, strict=True):
        twin = copy.copy(layer)
        if rows is not None:
            twin = PartialLayer(rows[None])
            twin.lazy_initialization(layer.keys, layer.values)
            twin.keys, twin.values = layer.keys, layer.values
        layers.append(twin)
    return PartialCache(layers)


def random_rows(seed: int, layers: int = 4, keep: float = 0.6, rows: int = 96) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(2, rows, generator=generator) < keep for _ in range(layers)]


def last_logits(m: models.LoadedModel, cache: Any, ids: list[int] = PROMPT) -> Tensor:
    return generate.logits(m, hf.fork(cache), ids, keep=len(ids))


@pytest.mark.parametrize("base", ["sdpa", "eager"])
@pytest.mark.parametrize("noise", [1e4, 0.5])
def test_noise_in_masked_rows_changes_nothing(base: str, noise: float) -> None:
    model = models.tiny(seed=1)
    model.model.set_attn_implementation(base)
    attention.attach(model.model)
    assert model.model.config._attn_implementation == {"sdpa": "quic_pfec", "eager": "quic_pfec_eager"}[base]
    cache = generate.prefill(model, CONTEXT)
    valid = random_rows(2)
    before = last_logits(model, with_holes(cache, valid))
    for layer, rows in zip(cache.layers, valid, strict=True):
        assert rows is not None
        layer.keys = layer.keys + torch.randn_like(layer.keys) * noise * ~rows[None, :, :, None]
        layer.values = layer.values + torch.randn_like(layer.values) * noise * ~rows[None, :, :, None]
    assert torch.equal(last_logits(model, with_holes(cache, valid)), before)
    one = last_logits(model, with_holes(cache, valid), [7])  # a single query takes another path through sdpa
    assert torch.isfinite(one).all()


def test_layers_without_holes_take_the_plain_kernel(m: models.LoadedModel, whole: Any) -> None:
    plain = copy.deepcopy(m.model)
    plain.set_attn_implementation("sdpa")
    untouched = models.LoadedModel(plain, m.tokenizer, m.name, m.fingerprint, m.eos_ids)
    assert torch.equal(last_logits(m, whole), last_logits(untouched, whole))
    assert torch.equal(last_logits(m, with_holes(whole, [None] * 4)), last_logits(untouched, whole))


@pytest.mark.parametrize(("base", "name"), [("sdpa", "sdpa_attention_forward"), ("eager", "_merge")])
def test_only_layers_with_holes_are_given_a_mask(base: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted at the kernel: of four layers, two have holes, one of them in rows that all came after all."""
    model = models.tiny(seed=1)
    model.model.set_attn_implementation(base)
    attention.attach(model.model)
    cache = generate.prefill(model, CONTEXT)
    rows = random_rows(2)[0]
    masks: list[bool] = []
    kernel = getattr(attention, name)

    def counting(*args: Any, **options: Any) -> Any:
        masks.append(base == "eager" or args[4] is not None)
        return kernel(*args, **options)

    monkeypatch.setattr(attention, name, counting)
    partial = with_holes(cache, [None, rows, torch.ones(2, 96, dtype=torch.bool), rows])
    last_logits(model, partial, [7])
    assert masks == ([False, True, False, True] if base == "sdpa" else [True, True])


def test_one_hole_changes_the_output(m: models.LoadedModel, whole: Any) -> None:
    rows = torch.ones(2, 96, dtype=torch.bool)
    rows[1, :32] = False
    assert not torch.equal(last_logits(m, with_holes(whole, [rows, None, None, None])), last_logits(m, whole))


@pytest.mark.parametrize("ids", [PROMPT, [9]])
@pytest.mark.parametrize("base", ["sdpa", "eager"])
def test_whole_columns_equal_the_padding_mask_of_transformers(base: str, ids: list[int]) -> None:
    """Holes that are the same for all layers and heads are what a 2-D attention mask says, by an independent path."""
    model = models.tiny(seed=3)
    model.model.set_attn_implementation(base)
    attention.attach(model.model)
    cache = generate.prefill(model, CONTEXT)
    columns = torch.rand(96, generator=torch.Generator().manual_seed(1)) < 0.5
    ours = last_logits(model, with_holes(cache, [columns.expand(2, -1)] * 4), ids)
    mask = torch.cat([columns, torch.ones(len(ids), dtype=torch.bool)])[None].long()
    reference = model.model(
        input_ids=torch.tensor([ids]),
        position_ids=torch.arange(96, 96 + len(ids))[None],
        attention_mask=mask,
        **{hf.cache_kwarg(model.model): hf.fork(cache)},
    )
    torch.testing.assert_close(ours, reference.logits[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("forward", [attention._sdpa_forward, attention._eager_forward])
def test_each_head_attends_to_its_own_rows_only(m: models.LoadedModel, queries: int, forward: Any) -> None:
    """Against softmax over the rows that are there, head by head: 4 heads share 2 KV heads (GQA)."""
    generator = torch.Generator().manual_seed(queries)
    module = m.model.model.layers[0].self_attn
    valid = torch.rand(1, 2, 20, generator=generator) < 0.4
    layer = PartialLayer(valid)
    layer.lazy_initialization(torch.zeros(1, 2, 1, 64), torch.zeros(1, 2, 1, 64))
    layer.keys, layer.values = (
        torch.randn(1, 2, 20, 64, generator=generator),
        torch.randn(1, 2, 20, 64, generator=generator),
    )
    new = torch.randn(1, 2, queries, 64, generator=generator)
    keys, values = layer.update(new, -new)
    query = torch.randn(1, 4, queries, 64, generator=generator)
    out, _ = forward(module, query, keys, values, None, scaling=0.125, dropout=0.0)
    for head in range(4):
        for q in range(queries):
            rows = torch.cat([valid[0, head // 2], torch.arange(queries) <= q])
            weights = torch.softmax(query[0, head, q] @ keys[0, head // 2, rows].T * 0.125, dim=-1)
            torch.testing.assert_close(out[0, q, head], weights @ values[0, head // 2, rows], rtol=0, atol=1e-5)


def test_two_caches_on_one_model_do_not_see_each_other(m: models.LoadedModel, whole: Any) -> None:
    first, second = random_rows(10), random_rows(11)

    def steps(cache: Any) -> list[Tensor]:
        return [generate.logits(m, cache, [token], keep=1) for token in PROMPT]

    alone = [steps(with_holes(whole, first)), steps(with_holes(whole, second)), steps(hf.fork(whole))]
    caches = [with_holes(whole, first), with_holes(whole, second), hf.fork(whole)]
    woven = [[generate.logits(m, cache, [token], keep=1) for cache in caches] for token in PROMPT]
    for index in range(3):
        for step in range(len(PROMPT)):
            assert torch.equal(woven[step][index], alone[index][step])


def test_rows_appended_while_decoding_are_valid(m: models.LoadedModel, whole: Any) -> None:
    """Decoding token by token must equal one pass over the same tokens: a forgotten new row would tell them apart."""
    valid = random_rows(4)
    cache = with_holes(whole, valid)
    stepwise = torch.cat([generate.logits(m, cache, [token], keep=1) for token in PROMPT])
    torch.testing.assert_close(stepwise, last_logits(m, with_holes(whole, valid)), rtol=0, atol=2e-5)
    assert hf.length(cache) == 96 + len(PROMPT)


@pytest.mark.parametrize("base", ["sdpa", "eager"])
def test_a_layer_of_which_nothing_came_gives_no_nan(base: str) -> None:
    model = models.tiny(seed=1)
    model.model.set_attn_implementation(base)
    attention.attach(model.model)
    nothing = torch.zeros(2, 96, dtype=torch.bool)
    cache = with_holes(generate.prefill(model, CONTEXT), [nothing, nothing, nothing, nothing])
    assert torch.isfinite(last_logits(model, cache)).all()
    cache.batch_repeat_interleave(2)
    padded = torch.ones(2, 96 + 3, dtype=torch.long)
    padded[1, 96:98] = 0  # the padded queries of the second sequence have no key but their own
    out = model.model(
        input_ids=torch.tensor([[1, 2, 3], [0, 0, 3]]), attention_mask=padded, **{hf.cache_kwarg(model.model): cache}
    )
    assert torch.isfinite(out.logits).all()


def test_left_padded_batch_behind_a_partial_cache(m: models.LoadedModel, whole: Any) -> None:
    valid = random_rows(6)
    alone = [last_logits(m, with_holes(whole, valid), ids)[-1] for ids in ([5, 6, 7, 8], [7, 8])]
    cache = with_holes(whole, valid)
    cache.batch_repeat_interleave(2)
    mask = torch.ones(2, 96 + 4, dtype=torch.long)
    mask[1, 96:98] = 0
    out = m.model(
        input_ids=torch.tensor([[5, 6, 7, 8], [0, 0, 7, 8]]),
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1)[:, 96:],
        **{hf.cache_kwarg(m.model): cache},
    )
    for row in range(2):
        torch.testing.assert_close(out.logits[row, -1], alone[row], rtol=0, atol=2e-5)


def test_generate_of_transformers_agrees_with_ours(m: models.LoadedModel, whole: Any) -> None:
    valid = random_rows(8)
    ours = list(generate.greedy(m, with_holes(whole, valid), PROMPT, 12))
    theirs = m.model.generate(
        torch.tensor([CONTEXT + PROMPT]),
        max_new_tokens=12,
        do_sample=False,
        **{hf.cache_kwarg(m.model): with_holes(whole, valid)},
    )
    assert theirs[0, -12:].tolist() == ours


def test_a_model_that_was_not_attached_is_refused(whole: Any) -> None:
    plain = models.tiny(seed=1)
    plain.model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="attach"):
        last_logits(plain, with_holes(whole, random_rows(1)))


def test_attach_refuses_attention_that_cannot_leave_out_rows() -> None:
    config = SimpleNamespace(_attn_implementation="flash_attention_2")
    config.get_text_config = lambda decoder: config
    with pytest.raises(ValueError, match="flash_attention_2"):
        attention.attach(SimpleNamespace(config=config))


def test_attach_is_idempotent(m: models.LoadedModel) -> None:
    attention.attach(m.model)
    assert m.model.config._attn_implementation == attention.SDPA


def test_valid_rows_follow_crop_and_batch_operations(m: models.LoadedModel, whole: Any) -> None:
    valid = random_rows(12)
    cache = with_holes(whole, valid)
    assert cache.hole_count() == sum(int((~rows).sum()) for rows in valid if rows is not None)
    generate.logits(m, cache, PROMPT, keep=1)
    cache.crop(-len(PROMPT))
    assert torch.equal(last_logits(m, cache), last_logits(m, with_holes(whole, valid)))
    cache.crop(-40)
    shorter = generate.prefill(m, CONTEXT[:56], chunk=96)
    cut = [rows[:, :56] for rows in valid if rows is not None]
    torch.testing.assert_close(last_logits(m, cache), last_logits(m, with_holes(shorter, cut)), rtol=0, atol=2e-5)
    layer = PartialLayer(torch.tensor([[[True, False]], [[False, True]]]))
    layer.lazy_initialization(torch.zeros(2, 1, 2, 4), torch.zeros(2, 1, 2, 4))
    layer.keys = layer.values = torch.zeros(2, 1, 2, 4)
    layer.reorder_cache(torch.tensor([1, 0]))
    assert layer.valid.tolist() == [[[False, True]], [[True, False]]]
    layer.batch_select_indices(torch.tensor([1]))
    assert layer.valid.tolist() == [[[True, False]]]
    layer.reset()
    assert layer.valid.shape[-1] == 0


def test_sliding_window_layers_with_holes() -> None:
    """A hole is left out while the window covers it, and rows are found by position after the window has moved."""
    m = mistral(24, initializer_range=0.2)
    cache = generate.prefill(m, CONTEXT[:20])
    valid = random_rows(3, layers=2, rows=20)

    def partial(noise: float) -> PartialCache:
        layers = []
        for layer, rows in zip(cache.layers, valid, strict=True):
            assert rows is not None
            twin = PartialSlidingLayer(rows[None], layer.sliding_window)
            hidden = ~rows[None, :, :, None]
            twin.update(layer.keys + noise * hidden, layer.values + noise * hidden)
            layers.append(twin)
        return PartialCache(layers)

    quiet, noisy = partial(0.0), partial(1e4)
    for token in range(30):  # beyond the window, and beyond the last hole
        assert torch.equal(generate.logits(m, quiet, [token], keep=1), generate.logits(m, noisy, [token], keep=1))
    assert hf.length(quiet) == 50
    torch.testing.assert_close(
        generate.logits(m, partial(0.0), list(range(30)), keep=30)[-1:],
        generate.logits(m, partial(1e4), list(range(30)), keep=30)[-1:],
        rtol=0,
        atol=0,
    )


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_every_query_keeps_its_own_row(kind: str) -> None:
    """Not left to the kernel: some turn a row without any key into NaN."""
    rows = attention._Rows(torch.tensor([[[False, False, True, True], [True, False, True, True]]]))
    mask = torch.zeros(1, 1, 2, 4, dtype=torch.bool)  # both queries are padding
    if kind == "additive":
        mask = torch.zeros(1, 1, 2, 4).masked_fill(~mask, torch.finfo(torch.float32).min)
    merged = attention._merge(rows, torch.zeros(1, 2, 2, 8), mask)
    visible = merged if kind == "bool" else merged == 0
    assert visible.tolist() == [[[[False, False, True, False], [False, False, False, True]]] * 2]
