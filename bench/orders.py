"""What the best 40 % of the blocks keep of SmolLM2 by each order: `python -m bench.orders`.

Contexts are the demo's, which no shipped profile was measured on; the receiver masks. Top-1 agreement along the greedy
continuation of the intact cache. For intervals and other receivers: `quic-pfec evaluate`.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

from quic_pfec.kv import hf, profile
from quic_pfec.kv.layout import Layout
from quic_pfec.llm import corpus, generate, models


def agreement(
    m: models.LoadedModel, got: hf.Extracted, layout: Layout, kept: Any, cue: Any, forced: list[int]
) -> float:
    """Share of positions whose likeliest token is that of the intact cache, which are `forced`."""
    valid = np.zeros(layout.unit_count, dtype=np.bool_)
    valid[kept] = True
    shape = (len(got.shapes), layout.columns)
    rows = np.repeat(valid.reshape(shape), layout.block_tokens, axis=1)[:, : layout.tokens]
    masks = [np.tile(row, (layer.kv_heads, 1)) for row, layer in zip(rows, got.shapes, strict=True)]
    logits = generate.forced_logits(m, hf.to_cache(got.arrays, masks, m.config), cue, forced)
    return float((logits.argmax(-1)[: len(forced)] == torch.tensor(forced)).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=5, help="contexts, of seeds 1, 2, ... (default 5)")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--kept", type=float, default=0.4, help="share of the blocks (default 0.4)")
    parser.add_argument("--positions", type=int, default=64)
    options = parser.parse_args()
    m = models.load(threads=1)
    shipped = profile.builtin(m.name)
    assert shipped is not None
    found: dict[str, list[float]] = {"profile": [], "generic": [], "random": [], "fifo": []}
    for seed in range(1, options.prompts + 1):
        cache = generate.prefill(m, corpus.demo_context(m.tokenizer, options.tokens, seed=seed).ids)
        cue = m.encode(corpus.CUE)
        forced = list(generate.greedy(m, hf.fork(cache), cue, options.positions))
        got = hf.extract(cache)
        layout = Layout(got.shapes, got.arrays.tokens)
        orders = {
            "profile": np.argsort(-profile.unit_utility(layout, shipped), kind="stable"),
            "generic": np.argsort(-profile.generic_utility(layout), kind="stable"),
            "random": np.random.default_rng(seed).permutation(layout.unit_count),
            "fifo": np.arange(layout.unit_count),
        }
        for name, order in orders.items():
            kept = order[: round(options.kept * layout.unit_count)]
            found[name].append(agreement(m, got, layout, kept, cue, forced))
        print(f"seed {seed}: " + ", ".join(f"{name} {values[-1]:.2f}" for name, values in found.items()), flush=True)
    for name, values in found.items():
        print(f"{name:<8} {np.mean(values):.2f}")


if __name__ == "__main__":
    main()
