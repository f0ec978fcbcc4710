"""Rows patched into a cache in use: bit for bit in their places, the mask lifted, and nobody else's cache changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import MistralConfig, MistralForCausalLM  # noqa: E402

from quic_pfec.kv import attention, hf  # noqa: E402
from quic_pfec.kv.assemble import Assembler  # noqa: E402
from quic_pfec.kv.late import LateUnits  # noqa: E402
from quic_pfec.kv.patch import Patcher, patch  # noqa: E402
from quic_pfec.kv.prepared import PreparedKV, prepare_arrays  # noqa: E402
from quic_pfec.llm import generate, models  # noqa: E402
from quic_pfec.wire import messages  # noqa: E402

pytestmark = pytest.mark.model
torch.set_num_threads(1)

CONTEXT = [(5 * i * i + i) % 250 for i in range(75)]
PROMPT = [3, 1, 4]


@pytest.fixture(scope="module")
def m() -> models.LoadedModel:
    return models.tiny(seed=2)


@pytest.fixture(scope="module")
def whole(m: models.LoadedModel) -> Any:
    return generate.prefill(m, CONTEXT)


def packed(cache: Any, first_token: int = 0) -> PreparedKV:
    extracted = hf.extract(cache, "fp32", first_token=first_token)
    return prepare_arrays(extracted.arrays.layers, dtype="fp32", model="m", wire_dtype="fp32", first_token=first_token)


class Half:
    """A hand-off of `cache` of which every second unit came before its freeze."""

    def __init__(self, m: models.LoadedModel, cache: Any, missing: str, first_token: int = 0, base: Any = None) -> None:
        kv = packed(cache, first_token)
        units = dict(kv.unit_at(place) for place in range(kv.layout.unit_count))
        assembler = Assembler(kv.layout, "fp32")
        for unit in range(0, kv.layout.unit_count, 2):
            assembler.write_unit(unit, units[unit])
        self.late = LateUnits(assembler)
        frozen = assembler.finish(missing)
        self.cache = hf.to_cache(
            frozen.arrays, None if missing == "zero" else frozen.row_valid, m.config, missing=missing,  # type: ignore[arg-type]
            first_token=first_token, base=base,
        )  # fmt: skip
        self.rest = {unit: data for unit, data in units.items() if unit % 2}

    def come(self, units: list[int] | None = None) -> None:
        for unit in sorted(self.rest) if units is None else units:
            assert self.late.write_unit(unit, self.rest[unit])


def rows_equal(cache: Any, whole: Any, rows: int = len(CONTEXT)) -> bool:
    return all(
        torch.equal(getattr(a, part)[:, :, :rows], getattr(b, part)[:, :, :rows])
        for a, b in zip(cache.layers, whole.layers, strict=True)
        for part in ("keys", "values")
    )


@pytest.mark.parametrize("missing", ["mask", "zero"])
def test_before_the_first_pass_it_is_as_if_it_had_come_in_time(m: models.LoadedModel, whole: Any, missing: str) -> None:
    half = Half(m, whole, missing)
    mine = hf.fork(half.cache)
    half.come()
    patch(mine, half.late.take(), shared=half.cache)
    assert rows_equal(mine, whole)
    assert not rows_equal(half.cache, whole)  # the cache it is a fork of keeps its holes
    if missing == "mask":
        assert half.cache.hole_count() > 0
        assert mine.hole_count() == 0
    expected = generate.logits(m, hf.fork(whole), PROMPT, keep=3)
    assert torch.equal(generate.logits(m, mine, PROMPT, keep=3), expected)


@pytest.mark.parametrize("missing", ["mask", "zero"])
def test_between_two_passes_rows_come_and_rows_decoded_meanwhile_stay(
    m: models.LoadedModel, whole: Any, missing: str
) -> None:
    half = Half(m, whole, missing)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in half.cache.layers]
    mine = hf.fork(half.cache)
    patcher = Patcher(half.late, mine, shared=half.cache)
    said, kept = [], []
    steps = iter(range(100))
    order = sorted(half.rest)

    def before_step() -> None:
        step = next(steps)
        if step in (2, 5):
            half.come(order[:3] if step == 2 else order[3:])
        patcher.step()
        if step == 2:
            kept.extend(layer.keys[:, :, len(CONTEXT) :].clone() for layer in mine.layers)

    for token in generate.greedy(m, mine, PROMPT, 8, before_step=before_step):
        said.append(token)
    assert len(said) == 8
    assert patcher.patched == ((2, 3), (5, len(order) - 3))
    assert rows_equal(mine, whole)
    for layer, decoded in zip(mine.layers, kept, strict=True):
        there = layer.keys[:, :, len(CONTEXT) : len(CONTEXT) + decoded.shape[2]]
        assert torch.equal(there, decoded)
    for layer, (keys, values) in zip(half.cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)
    # And what follows is what a cache gives that has these very rows and no hole.
    plain = hf.to_cache(hf.extract(_plain(mine), "fp32").arrays, None, m.config)
    again = generate.logits(m, hf.fork(mine), PROMPT, keep=1)
    assert torch.equal(again, generate.logits(m, plain, PROMPT, keep=1))


def _plain(cache: Any) -> list[tuple[Any, Any]]:
    return [(layer.keys, layer.values) for layer in cache.layers]


def test_an_increment_is_patched_behind_its_base(m: models.LoadedModel, whole: Any) -> None:
    base = generate.prefill(m, CONTEXT[:32])
    half = Half(m, whole, "mask", first_token=32, base=base)
    mine = hf.fork(half.cache)
    half.come()
    patch(mine, half.late.take(), first_token=32, shared=half.cache)
    assert rows_equal(mine, whole)
    assert mine.hole_count() == 0


@pytest.mark.parametrize("missing", ["mask", "zero"])
def test_a_sliding_layer_takes_the_rows_that_it_still_holds(missing: str) -> None:
    config = MistralConfig(
        vocab_size=250, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=24, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MistralForCausalLM(config).eval()
    attention.attach(model)
    ids = torch.tensor([CONTEXT[:23]])  # all rows are still there to be sent
    with torch.no_grad():
        whole = model(ids, use_cache=True).past_key_values
        half = Half(_Config(config), whole, missing)  # type: ignore[arg-type]
        mine = hf.fork(half.cache)
        for token in (7, 8, 9):  # the window moves on over the holes
            step = {hf.cache_kwarg(model): mine, "position_ids": torch.tensor([[hf.length(mine)]])}
            model(torch.tensor([[token]]), use_cache=True, **step)
        half.come()
        patch(mine, half.late.take(), shared=half.cache)
    for layer, other in zip(mine.layers, whole.layers, strict=True):
        held = layer.keys.shape[2] - 3  # of the context
        assert 0 < held < 23
        assert torch.equal(layer.keys[:, :, :held], other.keys[:, :, 23 - held :])
        assert torch.equal(layer.values[:, :, :held], other.values[:, :, 23 - held :])
        assert missing == "zero" or bool(layer.valid.all())


class _Config:
    def __init__(self, config: Any) -> None:
        self.config = config


def test_the_account_is_bounded(monkeypatch: pytest.MonkeyPatch, m: models.LoadedModel, whole: Any) -> None:
    monkeypatch.setattr("quic_pfec.kv.patch.MAX_PATCHES", 2)
    half = Half(m, whole, "mask")
    patcher = Patcher(half.late, hf.fork(half.cache), shared=half.cache)
    for unit in sorted(half.rest)[:5]:
        half.come([unit])
        patcher.step()
    assert patcher.patched == ((0, 1), (1, 4))
    assert messages.encode_message(messages.Done("stop", 5, patcher.patched))


def test_a_dtype_of_the_device_is_rounded_once() -> None:
    """Rows in fp32 into a bf16 cache, as on a GPU."""
    model = models.tiny(seed=2)
    cache = generate.prefill(model, CONTEXT[:16])
    half = Half(model, cache, "mask")
    for layer in half.cache.layers:
        layer.keys, layer.values = layer.keys.bfloat16(), layer.values.bfloat16()
    mine = hf.fork(half.cache)
    half.come()
    patch(mine, half.late.take(), shared=half.cache)
    for layer, other in zip(mine.layers, cache.layers, strict=True):
        assert layer.keys.dtype is torch.bfloat16
        assert torch.equal(layer.keys, other.keys.bfloat16())
    assert np.all(half.late.complete)
