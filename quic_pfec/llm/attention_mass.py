"""What this request will look at: the attention its last prompt tokens pay to each block of the cache.

An offline profile cannot know where the evidence of a question lies; the question's own queries do. One pass of the
last few prompt tokens over the finished cache yields them, and one product of those queries with each layer's keys the
attention mass of every row. No attention tensor of the context's length squared is made: 32 queries over 8,192 tokens
take 9 MB a layer (9 heads). Weighed with what a layer is worth offline, the mass orders the blocks of a hand-off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

try:
    import torch
except ImportError as error:
    raise ImportError('quic_pfec.llm needs torch and transformers: pip install "quic-pfec[hf]"') from error

from quic_pfec.kv.hf import length
from quic_pfec.kv.layout import BLOCK_TOKENS, LayerShape, Layout
from quic_pfec.kv.profile import Profile, request_utility
from quic_pfec.llm.models import LoadedModel
from quic_pfec.llm.shared import SharedCache, exchanged_attention, forward

__all__ = ["QUERIES", "attention_mass", "score_request"]

QUERIES: Final = 32
"""Prompt tokens, from the end, whose queries are asked."""


def attention_mass(
    m: LoadedModel, cache: Any, input_ids: Sequence[int], queries: int = QUERIES
) -> npt.NDArray[np.float64]:
    """Share of attention that each row gets from the last `queries` tokens: float64 [layers, tokens], a layer's sum 1.

    `cache` holds exactly the rows of `input_ids` and is not changed. The pass runs on the model's device; the model
    must not be used by anyone else meanwhile. Raises ValueError if cache and tokens do not fit, and for models with
    sliding-window or other layers that do not attend to the whole context.
    """
    tokens = len(input_ids)
    if tokens != length(cache):
        raise ValueError(f"the cache holds {length(cache)} tokens, {tokens} ids were given")
    if queries < 1:
        raise ValueError(f"queries must be at least 1, got {queries}")
    if tokens == 1:
        return np.ones((len(cache.layers), 1))
    asked = min(queries, tokens - 1)
    shared = SharedCache(cache, rows=tokens - asked, record=True)
    with exchanged_attention(m.model):
        forward(m, shared, torch.tensor([list(input_ids[-asked:])], device=m.device), keep=1)
    mass = shared.masses().double().cpu().numpy()
    shares: npt.NDArray[np.float64] = mass / mass.sum(axis=1, keepdims=True)
    return shares


def score_request(
    m: LoadedModel,
    cache: Any,
    input_ids: Sequence[int],
    profile: Profile | None = None,
    *,
    first_token: int = 0,
    block_tokens: int = BLOCK_TOKENS,
) -> npt.NDArray[np.float64]:
    """Utility of each unit for this very request: attention mass times the layer's score in `profile`, by unit id.

    Give it to `prepare(..., utility=...)` with the same `first_token`. Without a profile all layers weigh the same.
    Raises ValueError as `attention_mass` does, and for a profile of another number of layers.
    """
    mass = attention_mass(m, cache, input_ids)
    shapes = tuple(LayerShape(layer.keys.shape[1], layer.keys.shape[3]) for layer in cache.layers)
    layout = Layout(shapes, len(input_ids) - first_token, first_token, block_tokens)
    return request_utility(layout, mass, profile)
