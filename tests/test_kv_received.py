"""One hand-off, three receivers: each behaves as it says under generate(), in padded batches, on both kernels."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from quic_pfec.client import prepare  # noqa: E402
from quic_pfec.kv import attention, hf  # noqa: E402
from quic_pfec.kv.assemble import Assembler  # noqa: E402
from quic_pfec.kv.prepared import PreparedKV  # noqa: E402
from quic_pfec.kv.received import ReceivedKV  # noqa: E402
from quic_pfec.llm import generate, models  # noqa: E402

pytestmark = pytest.mark.model
torch.set_num_threads(1)

CONTEXT = [int(token) for token in torch.randint(0, 256, (80,), generator=torch.Generator().manual_seed(9))]
PROMPT = [17, 200, 3, 99]
MODES = ["zero", "mask", "recompute"]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
    ),
]


def model(base: str = "sdpa", device: str = "cpu") -> models.LoadedModel:
    m = models.tiny(seed=4, device=device)
    m.model.set_attn_implementation(base)
    attention.attach(m.model)
    return m


def received(m: models.LoadedModel, missing: str, keep: float = 0.5, *, first: int = 0) -> ReceivedKV:
    """The rows from `first` on as a receiver has them at its freeze: some units whole, some in part, most of the rest
    not at all."""
    kv: PreparedKV = prepare(
        generate.prefill(m, CONTEXT), tokens=CONTEXT, wire_dtype="fp32", model=m.fingerprint, first_token=first
    )
    mode = "zero" if missing == "zero" else "mask"
    assembler = Assembler(kv.layout)
    rng = np.random.default_rng(5)
    for position in range(kv.layout.unit_count):
        unit, data = kv.unit_at(position)
        if rng.random() < keep:
            assembler.write_unit(unit, data)
        elif rng.random() < keep:
            assembler.write_partial(unit, data, [(0, 3000)], whole_rows=mode == "mask")
    manifest = msgspec.structs.replace(kv.manifest(kv.layout.symbol_size(), missing), base=1 if first else 0)
    ids = np.array(CONTEXT, dtype=np.uint32) if missing == "recompute" else None
    return ReceivedKV(manifest, assembler.finish(mode), 7, 0.0, 0.0, ids)


def cache_of(m: models.LoadedModel, missing: str, **options: Any) -> Any:
    return received(m, missing, **options).to_cache(m.config, device=m.device, model=m.model)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("base", ["sdpa", "eager"])
@pytest.mark.parametrize("missing", MODES)
def test_generate_of_transformers_agrees_with_ours(missing: str, base: str, device: str) -> None:
    m = model(base, device)
    cache = cache_of(m, missing)
    ours = list(generate.greedy(m, hf.fork(cache), PROMPT, 12))
    ids = torch.tensor([CONTEXT + PROMPT], device=device)
    theirs = m.model.generate(ids, max_new_tokens=12, do_sample=False, **{hf.cache_kwarg(m.model): cache})
    assert theirs[0, -12:].tolist() == ours


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("base", ["sdpa", "eager"])
@pytest.mark.parametrize("missing", MODES)
def test_left_padded_batches(missing: str, base: str, device: str) -> None:
    m = model(base, device)
    cache = cache_of(m, missing)
    alone = [generate.logits(m, hf.fork(cache), ids, keep=1)[0] for ids in ([5, 6, 7, 8], [7, 8])]
    cache.batch_repeat_interleave(2)
    mask = torch.ones(2, len(CONTEXT) + 4, dtype=torch.long, device=device)
    mask[1, len(CONTEXT) : len(CONTEXT) + 2] = 0
    out = m.model(
        input_ids=torch.tensor([[5, 6, 7, 8], [0, 0, 7, 8]], device=device),
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1)[:, len(CONTEXT) :],
        **{hf.cache_kwarg(m.model): cache},
    )
    for row in range(2):
        torch.testing.assert_close(out.logits[row, -1].float(), alone[row], rtol=0, atol=1e-4)


@pytest.mark.parametrize("missing", MODES)
def test_all_rows_there_is_the_plain_kernel_bit_for_bit(missing: str) -> None:
    m = model()
    plain = copy.deepcopy(m.model)
    plain.set_attn_implementation("sdpa")
    untouched = models.LoadedModel(plain, m.tokenizer, m.name, m.fingerprint, m.eos_ids)
    cache = cache_of(m, missing, keep=1.1)
    for ids in (PROMPT, [9]):
        expected = generate.logits(untouched, generate.prefill(m, CONTEXT), ids, keep=len(ids))
        assert torch.equal(generate.logits(m, hf.fork(cache), ids, keep=len(ids)), expected)


def test_the_receivers_differ_as_they_say() -> None:
    m = model()
    intact = generate.logits(m, generate.prefill(m, CONTEXT), PROMPT, keep=4)
    caches = {missing: cache_of(m, missing) for missing in MODES}
    out = {missing: generate.logits(m, hf.fork(cache), PROMPT, keep=4) for missing, cache in caches.items()}
    torch.testing.assert_close(out["recompute"], intact, rtol=0, atol=1e-3)
    assert torch.equal(out["recompute"].argmax(-1), intact.argmax(-1))
    assert not torch.allclose(out["mask"], intact, atol=1e-2)
    assert not torch.allclose(out["zero"], intact, atol=1e-2)
    assert not torch.allclose(out["zero"], out["mask"], atol=1e-2)
    # Positions are absolute, holes counted, in all of them.
    assert {hf.length(cache) for cache in caches.values()} == {len(CONTEXT)}


def test_recompute_needs_model_and_ids() -> None:
    m = model()
    kv = received(m, "recompute")
    assert isinstance(kv.to_cache(m.config), attention.PartialCache)  # without a model it can only mask
    ids = received(m, "mask")
    lacking = ReceivedKV(kv.manifest, ids.kv, 7, 0.0, 0.0)
    with pytest.raises(ValueError, match="token ids did not come"):
        lacking.to_cache(m.config, model=m.model)


@pytest.mark.parametrize("missing", MODES)
def test_an_increment_behind_a_base(missing: str) -> None:
    m = model()
    base = generate.prefill(m, CONTEXT[:48])
    kv = received(m, missing, first=48)
    cache = kv.to_cache(m.config, base=base, model=m.model)
    assert hf.length(cache) == len(CONTEXT)
    for layer, held in zip(cache.layers, base.layers, strict=True):
        assert torch.equal(layer.keys[:, :, :48], held.keys)
    if missing == "recompute":
        out, intact = (generate.logits(m, c, PROMPT, keep=4) for c in (cache, generate.prefill(m, CONTEXT)))
        torch.testing.assert_close(out, intact, rtol=0, atol=1e-3)


def test_plain_numbers_are_those_of_the_sender_where_they_came() -> None:
    m = model()
    got = received(m, "mask")
    sent = hf.extract(generate.prefill(m, CONTEXT), "fp32").arrays.layers
    assert len(got.float32()) == len(sent)
    for (keys, values), (sent_keys, sent_values), valid in zip(got.float32(), sent, got.kv.row_valid, strict=True):
        assert keys.dtype == values.dtype == np.float32
        assert np.array_equal(keys[valid], sent_keys.view(np.float32)[valid])
        assert np.array_equal(values[valid], sent_values.view(np.float32)[valid])
        assert not keys[~valid].any()
    assert not all(valid.all() for valid in got.kv.row_valid)
