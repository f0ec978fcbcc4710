"""Caches to raw arrays and back: bit for bit, or refused by name."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers.cache_utils import (  # noqa: E402
    Cache,
    DynamicCache,
    DynamicLayer,
    EncoderDecoderCache,
    LinearAttentionLayer,
    StaticCache,
)

from quic_pfec.client import prepare  # noqa: E402
from quic_pfec.kv import attention, hf  # noqa: E402
from quic_pfec.kv.assemble import Assembler  # noqa: E402
from quic_pfec.kv.prepared import prepare_arrays  # noqa: E402
from quic_pfec.kv.units import KVArrays  # noqa: E402
from quic_pfec.llm import generate, models  # noqa: E402
from quic_pfec.wire.manifest import QUANTISED  # noqa: E402

from .kv_world import mistral  # noqa: E402

pytestmark = pytest.mark.model
torch.set_num_threads(1)  # tensors this small gain nothing from a second thread, and lose much on a busy machine

CONTEXT = [int(token) for token in torch.randint(0, 256, (75,), generator=torch.Generator().manual_seed(7))]
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def m() -> models.LoadedModel:
    return models.tiny(seed=2)


@pytest.fixture(scope="module")
def cache(m: models.LoadedModel) -> Any:
    return generate.prefill(m, CONTEXT)


def same_bits(first: Any, second: Any) -> bool:
    return all(
        torch.equal(getattr(a, part), getattr(b, part)) and getattr(a, part).dtype == getattr(b, part).dtype
        for a, b in zip(first.layers, second.layers, strict=True)
        for part in ("keys", "values")
    )


def random_cache(dtype: Any, batch: int = 1, tokens: int = 20, layers: int = 3) -> DynamicCache:
    generator = torch.Generator().manual_seed(0)
    cache = DynamicCache()
    for layer in range(layers):
        shape = (batch, 2, tokens, 8)
        cache.update(
            torch.randn(shape, generator=generator).to(dtype), torch.randn(shape, generator=generator).to(dtype), layer
        )
    return cache


class TestExtract:
    @pytest.mark.parametrize(
        ("dtype", "wire"),
        [("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("fp16", "bf16"), ("fp32", "bf16")],
    )
    def test_bits_are_those_of_the_cache_cast_to_the_wire(self, dtype: str, wire: str) -> None:
        cache = random_cache(hf.DTYPES[dtype])
        got = hf.extract(cache, wire)
        assert (got.dtype, got.wire_dtype, got.first_token, got.arrays.tokens) == (dtype, wire, 0, 20)
        assert [(shape.kv_heads, shape.head_dim, shape.sliding_window) for shape in got.shapes] == [(2, 8, 0)] * 3
        for layer, pair in zip(cache.layers, got.arrays.layers, strict=True):
            for tensor, bits in zip((layer.keys, layer.values), pair, strict=True):
                assert bits.tobytes() == tensor[0].to(hf.DTYPES[wire]).contiguous().view(torch.uint8).numpy().tobytes()

    def test_rows_of_an_increment(self) -> None:
        cache = random_cache(torch.float32)
        got = hf.extract(cache, "fp32", first_token=13, tokens=5)
        whole = hf.extract(cache, "fp32")
        assert got.first_token == 13
        for (keys, values), (all_keys, all_values) in zip(got.arrays.layers, whole.arrays.layers, strict=True):
            assert np.array_equal(keys, all_keys[:, 13:18])
            assert np.array_equal(values, all_values[:, 13:18])

    @pytest.mark.parametrize(("first", "tokens"), [(-1, 5), (0, 0), (20, 1), (10, 11), (0, -3)])
    def test_rows_outside_the_cache(self, first: int, tokens: int) -> None:
        with pytest.raises(ValueError, match="not in a cache of 20 tokens"):
            hf.extract(random_cache(torch.float32), first_token=first, tokens=tokens)

    def test_static_cache_is_cropped_to_what_is_filled(self, m: models.LoadedModel, cache: Any) -> None:
        static = StaticCache(config=m.config, max_cache_len=128)
        for index, layer in enumerate(cache.layers):
            static.update(layer.keys, layer.values, index)
        got = hf.extract(static, "fp32")
        assert got.arrays.tokens == 75
        assert same_bits(hf.to_cache(got.arrays, None, m.config), cache)

    def test_pairs_of_keys_and_values(self, m: models.LoadedModel, cache: Any) -> None:
        pairs = tuple((layer.keys, layer.values) for layer in cache.layers)
        assert same_bits(hf.to_cache(hf.extract(pairs, "fp32").arrays, None, m.config), cache)

    def test_sliding_layers_while_they_hold_every_row(self) -> None:
        m = mistral(window=64)
        cache = generate.prefill(m, CONTEXT[:40])
        got = hf.extract(cache, "fp32")
        assert [shape.sliding_window for shape in got.shapes] == [64, 64]
        back = hf.to_cache(got.arrays, None, m.config)
        assert same_bits(back, cache)
        ours, theirs = (list(generate.greedy(m, hf.fork(c), PROMPT, 40)) for c in (back, cache))  # beyond the window
        assert ours == theirs

    def test_sliding_layers_that_forgot_rows(self) -> None:
        m = mistral(window=16)
        cache = generate.prefill(m, CONTEXT[:40])
        with pytest.raises(
            ValueError, match=r"layer 0 is a DynamicSlidingWindowLayer that has forgotten 25 of 40 rows"
        ):
            hf.extract(cache)

    def test_partial_cache(self, m: models.LoadedModel, cache: Any) -> None:
        arrays = hf.extract(cache).arrays
        valid = [np.zeros((2, 75), dtype=np.bool_)] * 4
        with pytest.raises(ValueError, match="layer 0 has holes"):
            hf.extract(hf.to_cache(arrays, valid, m.config))

    def test_unknown_layers_are_refused_by_name(self) -> None:
        class FancyQuantizedLayer(DynamicLayer):
            pass

        cache = random_cache(torch.float32)
        cache.layers[1] = FancyQuantizedLayer()
        with pytest.raises(ValueError, match=r"layer 1 is a FancyQuantizedLayer.*dequantise"):
            hf.extract(cache)

    def test_linear_attention_is_refused_by_name(self) -> None:
        cache = random_cache(torch.float32)
        cache.layers[2] = LinearAttentionLayer.__new__(LinearAttentionLayer)
        with pytest.raises(ValueError, match="layer 2 is a LinearAttentionLayer"):
            hf.extract(cache)

    def test_encoder_decoder_is_refused(self) -> None:
        both = EncoderDecoderCache(random_cache(torch.float32), random_cache(torch.float32))
        with pytest.raises(ValueError, match="EncoderDecoderCache"):
            hf.extract(both)

    @pytest.mark.parametrize(
        ("cache", "reason"),
        [
            (random_cache(torch.float32, batch=2), "a batch of 2: hand over one sequence"),
            (random_cache(torch.float64), "must be bf16, fp16 or fp32"),
            (DynamicCache(), "the cache is empty"),
            (Cache(layers=[DynamicLayer()]), "layer 0 .DynamicLayer. is empty"),
            ((), "the cache is empty"),
            ("a cache", "a str is not a KV cache"),
            ([(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 4))], "keys and values must both be"),
            ([(torch.zeros(2, 5, 8), torch.zeros(2, 5, 8))], "keys and values must both be"),
            ([(torch.zeros(1, 2, 5, 8),) * 2, (torch.zeros(1, 2, 6, 8),) * 2], "layer 1 holds 6 rows"),
            ([(torch.full((1, 2, 5, 8), float("nan")),) * 2], "layer 0 holds NaN or infinity"),
            ([(torch.full((1, 2, 5, 8), 3.4e38),) * 2], "layer 0 holds NaN or infinity in bf16"),
        ],
    )
    def test_refusals(self, cache: Any, reason: str) -> None:
        with pytest.raises(ValueError, match=reason) as caught:
            hf.extract(cache)
        assert "\n" not in str(caught.value)

    def test_wire_dtype_must_be_the_caches_own_or_bf16(self) -> None:
        with pytest.raises(ValueError, match="a bf16 cache can be sent as bf16 or bf16, not as fp32"):
            hf.extract(random_cache(torch.bfloat16), "fp32")
        with pytest.raises(ValueError, match="unknown wire dtype 'int3'"):
            hf.extract(random_cache(torch.bfloat16), "int3")

    def test_none_is_the_caches_own_dtype(self) -> None:
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")):
            got = hf.extract(random_cache(dtype), None)
            assert (got.dtype, got.wire_dtype) == (name, name)


class TestToCache:
    @pytest.mark.parametrize("wire_dtype", QUANTISED)
    def test_a_complete_quantised_cache_is_as_sent(self, m: models.LoadedModel, cache: Any, wire_dtype: str) -> None:
        kv = prepare(cache, wire_dtype=wire_dtype)
        assembler = Assembler(kv.layout, "fp32")
        for position in range(kv.layout.unit_count):
            assert assembler.write_unit(*kv.unit_at(position))
        done = assembler.finish("mask")
        back = hf.to_cache(done.arrays, done.row_valid, m.config, dtype=m.dtype)
        assert same_bits(back, hf.as_sent(cache, m.config, wire_dtype))
        assert not same_bits(back, cache)
        for layer, twin in zip(back.layers, cache.layers, strict=True):
            assert torch.isfinite(layer.keys).all()
            assert (layer.keys - twin.keys).abs().mean() < 0.1 * twin.keys.abs().mean()

    def test_complete_cache_continues_with_the_same_tokens(self, m: models.LoadedModel, cache: Any) -> None:
        """Through packing and assembly: what arrives whole is the sender's cache after the wire dtype, to the bit."""
        got = hf.extract(cache, "bf16")
        prepared = prepare_arrays(got.arrays.layers, dtype="bf16", model=m.fingerprint, rope=m.rope)
        assembler = Assembler(prepared.layout)
        for position in range(prepared.layout.unit_count):
            assert assembler.write_unit(*prepared.unit_at(position))
        done = assembler.finish("mask")
        back = hf.to_cache(done.arrays, done.row_valid, m.config, dtype=m.dtype)
        intact = hf.as_sent(cache, m.config)
        assert type(back) is DynamicCache
        assert same_bits(back, intact)
        assert not same_bits(back, cache)
        tokens = list(generate.greedy(m, hf.fork(intact), PROMPT, 24))
        assert list(generate.greedy(m, back, PROMPT, 24)) == tokens

    def test_half_of_the_units(self, m: models.LoadedModel, cache: Any) -> None:
        got = hf.extract(cache, "bf16")
        prepared = prepare_arrays(got.arrays.layers, dtype="bf16", model=m.fingerprint)
        assembler = Assembler(prepared.layout)
        kept = [position for position in range(prepared.layout.unit_count) if position % 2]
        for position in kept:
            assembler.write_unit(*prepared.unit_at(position))
        done = assembler.finish("mask")
        masked = hf.to_cache(done.arrays, done.row_valid, m.config)
        zeroed = hf.to_cache(done.arrays, done.row_valid, m.config, missing="zero")
        assert isinstance(masked, attention.PartialCache)
        assert masked.hole_count() == sum(int((~rows).sum()) for rows in done.row_valid) > 0
        assert type(zeroed) is DynamicCache
        assert same_bits(masked, zeroed)
        assert hf.length(masked) == hf.length(zeroed) == 75
        outputs = [generate.logits(m, c, PROMPT, keep=1) for c in (masked, zeroed, hf.fork(cache))]
        assert all(torch.isfinite(out).all() for out in outputs)
        assert not torch.equal(outputs[0], outputs[1])

    def test_layers_without_holes_are_plain(self, m: models.LoadedModel, cache: Any) -> None:
        valid: list[Any] = [None, np.ones((2, 75), dtype=np.bool_), np.ones((2, 75), dtype=np.bool_), None]
        valid[2][0, 3] = False
        back = hf.to_cache(hf.extract(cache).arrays, valid, m.config)
        assert [type(layer).__name__ for layer in back.layers] == [
            "DynamicLayer",
            "DynamicLayer",
            "PartialLayer",
            "DynamicLayer",
        ]

    @pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
    def test_dtype_of_the_receiver(self, m: models.LoadedModel, cache: Any, dtype: str) -> None:
        back = hf.to_cache(hf.extract(cache).arrays, None, m.config, dtype=dtype)
        assert back.layers[0].keys.dtype == hf.DTYPES[dtype]
        expected = cache.layers[3].values.to(torch.bfloat16).to(hf.DTYPES[dtype])
        assert torch.equal(back.layers[3].values, expected)

    @pytest.mark.parametrize("holes", ["none", "base", "increment", "both"])
    def test_increment_on_a_base(self, m: models.LoadedModel, cache: Any, holes: str) -> None:
        rng = np.random.default_rng(3)
        valid = [rng.random((2, 75)) < 0.7 for _ in range(4)]
        for rows in valid:
            if holes in ("none", "increment"):
                rows[:, :50] = True
            if holes in ("none", "base"):
                rows[:, 50:] = True
        parts = [
            hf.extract(cache, "bf16", first_token=first, tokens=count).arrays for first, count in ((0, 50), (50, 25))
        ]
        base = hf.to_cache(parts[0], [rows[:, :50] for rows in valid], m.config)
        joined = hf.to_cache(parts[1], [rows[:, 50:] for rows in valid], m.config, first_token=50, base=base)
        at_once = hf.to_cache(hf.extract(cache).arrays, valid, m.config)
        assert same_bits(joined, at_once)
        assert torch.equal(generate.logits(m, joined, PROMPT, keep=5), generate.logits(m, at_once, PROMPT, keep=5))
        assert hf.length(base) == 50

    def test_increment_behind_rows_that_were_decoded_here(self, m: models.LoadedModel, cache: Any) -> None:
        """A partial base that has grown since its hand-off: its map of valid rows is shorter than its rows."""
        valid = [np.random.default_rng(1).random((2, 50)) < 0.5 for _ in range(4)]
        base = hf.to_cache(hf.extract(cache, first_token=0, tokens=50).arrays, valid, m.config)
        generate.logits(m, base, PROMPT, keep=1)
        holes = base.hole_count()
        joined = hf.to_cache(
            hf.extract(cache, first_token=55, tokens=20).arrays, None, m.config, first_token=55, base=base
        )
        assert joined.hole_count() == holes
        assert hf.length(joined) == 75
        assert torch.isfinite(generate.logits(m, joined, PROMPT, keep=1)).all()

    def test_pieces_that_do_not_fit(self, m: models.LoadedModel, cache: Any) -> None:
        arrays = hf.extract(cache).arrays
        base = hf.to_cache(arrays, None, m.config)
        with pytest.raises(ValueError, match="missing must be"):
            hf.to_cache(arrays, None, m.config, missing="guess")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="the model has 4 layers, the received cache 3"):
            hf.to_cache(KVArrays(arrays.layers[:3], "bf16"), None, m.config)
        with pytest.raises(ValueError, match="1 validity maps for 4 layers"):
            hf.to_cache(arrays, [None], m.config)
        with pytest.raises(ValueError, match="layer 0: validity"):
            hf.to_cache(arrays, [np.ones((2, 74), dtype=np.bool_)] * 4, m.config)
        with pytest.raises(ValueError, match="need the base cache"):
            hf.to_cache(arrays, None, m.config, first_token=5)
        with pytest.raises(ValueError, match="the base cache holds 75 tokens, the received rows start at 70"):
            hf.to_cache(arrays, None, m.config, first_token=70, base=base)
        with pytest.raises(ValueError, match="layer 0 of the base cache has another shape"):
            hf.to_cache(arrays, None, m.config, first_token=20, base=random_cache(torch.float32, layers=4))


def test_fork_leaves_the_original_alone(m: models.LoadedModel, cache: Any) -> None:
    before = generate.logits(m, hf.fork(cache), PROMPT, keep=1)
    twin = hf.fork(cache)
    list(generate.greedy(m, twin, PROMPT, 8))
    assert hf.length(twin) == 75 + len(PROMPT) + 7
    assert hf.length(cache) == 75
    assert twin.layers[0].keys is not cache.layers[0].keys
    assert torch.equal(generate.logits(m, hf.fork(cache), PROMPT, keep=1), before)


def test_fork_refuses_caches_that_are_written_in_place(m: models.LoadedModel) -> None:
    with pytest.raises(ValueError, match="StaticCache is written in place"):
        hf.fork(StaticCache(config=m.config, max_cache_len=16))


def test_cache_argument_follows_the_signature() -> None:
    class New:
        def forward(self, input_ids: Any, cache: Any = None) -> None: ...

    class Old:
        def forward(self, input_ids: Any, past_key_values: Any = None) -> None: ...

    assert (hf.cache_kwarg(New()), hf.cache_kwarg(Old())) == ("cache", "past_key_values")


@pytest.mark.parametrize("module", ["kv.hf", "kv.attention", "llm.models", "llm.generate", "llm.profiler"])
def test_missing_extra_names_the_command(module: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; import quic_pfec.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().endswith('pip install "quic-pfec[hf]"')


def test_a_frame_made_ahead_shows_the_rows_that_came_later(m: models.LoadedModel, cache: Any) -> None:
    sent = prepare_arrays(hf.extract(cache, "fp32").arrays.layers, dtype="fp32", wire_dtype="fp32", model="m")
    assembler = Assembler(sent.layout)
    frame = hf.make_frame(assembler.arrays, m.config, dtype="fp32")
    for position in range(sent.layout.unit_count - 1):
        assembler.write_unit(*sent.unit_at(position))
    done = assembler.finish("mask")
    built = hf.to_cache(done.arrays, done.row_valid, m.config, dtype="fp32", frame=frame)
    assert same_bits(built, hf.to_cache(done.arrays, done.row_valid, m.config, dtype="fp32"))
    assert built.hole_count() > 0
    with pytest.raises(ValueError, match="layers"):
        hf.make_frame(KVArrays(done.arrays.layers[:-1], "fp32"), m.config, dtype="fp32")
