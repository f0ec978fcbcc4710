"""quic_pfec.llm.attention_mass: the mass against full attention weights of the model's eager path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from quic_pfec.kv import hf  # noqa: E402
from quic_pfec.kv.layout import LayerShape, Layout  # noqa: E402
from quic_pfec.kv.profile import request_utility  # noqa: E402
from quic_pfec.llm import generate, models  # noqa: E402
from quic_pfec.llm.attention_mass import QUERIES, attention_mass, score_request  # noqa: E402
from tests.test_kv_profile import make_profile  # noqa: E402

pytestmark = pytest.mark.model
torch.set_num_threads(1)

IDS = [number * 11 % 256 for number in range(137)]


@pytest.fixture(scope="module")
def m() -> models.LoadedModel:
    return models.tiny(seed=2)


@pytest.fixture(scope="module")
def cache(m: models.LoadedModel) -> Any:
    return generate.prefill(m, IDS)


def full_weights(m: models.LoadedModel, ids: list[int]) -> np.ndarray:
    """[layers, heads, queries, rows] of the model's own eager attention."""
    before = m.config._attn_implementation
    m.model.set_attn_implementation("eager")
    try:
        out = m.model(input_ids=torch.tensor([ids]), output_attentions=True, use_cache=False)
    finally:
        m.model.set_attn_implementation(before)
    return torch.stack(out.attentions)[:, 0].numpy()


@pytest.mark.parametrize("queries", [QUERIES, 1, 5, 500])
def test_equals_full_attention_weights(m: models.LoadedModel, cache: Any, queries: int) -> None:
    implementation = m.config._attn_implementation
    found = attention_mass(m, cache, IDS, queries)
    assert m.config._attn_implementation == implementation
    asked = min(queries, len(IDS) - 1)
    expected = full_weights(m, IDS)[:, :, -asked:].mean(axis=(1, 2))
    assert found.shape == (4, len(IDS))
    np.testing.assert_allclose(found, expected, atol=2e-6)
    np.testing.assert_allclose(found.sum(axis=1), 1.0)
    assert hf.length(cache) == len(IDS)


def test_short_contexts(m: models.LoadedModel) -> None:
    for count in (1, 2, 3):
        ids = IDS[:count]
        found = attention_mass(m, generate.prefill(m, ids), ids)
        expected = full_weights(m, ids)[:, :, -max(1, count - 1) :].mean(axis=(1, 2))
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_memory_does_not_grow_with_the_square(m: models.LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest weights that are made are 32 queries by all rows, whatever the context."""
    ids = (IDS * 20)[:2100]
    cache = generate.prefill(m, ids)
    largest = 0
    softmax = torch.softmax

    def spy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal largest
        largest = max(largest, tensor.numel())
        return softmax(tensor, *args, **kwargs)

    monkeypatch.setattr(torch, "softmax", spy)
    attention_mass(m, cache, ids)
    assert largest == 4 * QUERIES * len(ids)


def test_score_request_weighs_layers(m: models.LoadedModel, cache: Any) -> None:
    profile = make_profile([[1.0, 0.0], [2.0, 2.0], [0.0, 0.0], [4.0, 1.0]])
    mass = attention_mass(m, cache, IDS)
    found = score_request(m, cache, IDS, profile).reshape(4, 9)
    assert not found[2].any()
    for layer, weight in enumerate((0.1, 0.4, 0.0, 0.5)):
        assert found[layer, 3] == pytest.approx(weight * mass[layer, 48:64].sum())
    plain = score_request(m, cache, IDS)
    layout = Layout((LayerShape(2, 64),) * 4, len(IDS))
    np.testing.assert_allclose(plain, request_utility(layout, mass))
    tail = score_request(m, cache, IDS, first_token=100)
    assert tail.shape == (4 * 3,)
    assert tail[0] == pytest.approx(mass[0, 100:116].sum())


def test_refusals(m: models.LoadedModel, cache: Any) -> None:
    with pytest.raises(ValueError, match="holds 137 tokens, 136 ids"):
        attention_mass(m, cache, IDS[:-1])
    with pytest.raises(ValueError, match="queries must be at least 1"):
        attention_mass(m, cache, IDS, 0)
    with pytest.raises(ValueError, match="2 layers, the cache 4"):
        score_request(m, cache, IDS, make_profile())
