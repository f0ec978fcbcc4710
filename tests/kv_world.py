"""What the tests of torch caches share."""

from __future__ import annotations

from typing import Any

import torch
from transformers import MistralConfig, MistralForCausalLM

from quic_pfec.kv import attention
from quic_pfec.llm import models


def mistral(window: int, **changes: Any) -> models.LoadedModel:
    """Two layers with a sliding window of `window` tokens, the same weights each time."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=window,
        **changes,
    )
    model = MistralForCausalLM(config).eval()
    attention.attach(model)
    return models.LoadedModel(model, models.ByteTokenizer(), "mistral", "", frozenset())
