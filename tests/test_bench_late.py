"""The bench of late repair runs, small: what the deadline cut is patched in, and the ends of both ways agree."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from bench.late import judge, play, run  # noqa: E402
from quic_pfec.client import prepare  # noqa: E402
from quic_pfec.kv.hf import as_sent, fork, to_cache  # noqa: E402
from quic_pfec.kv.patch import patch  # noqa: E402
from quic_pfec.llm.corpus import CUE  # noqa: E402
from quic_pfec.llm.generate import forced_logits, prefill  # noqa: E402
from quic_pfec.llm.models import tiny  # noqa: E402

pytestmark = pytest.mark.model
torch.set_num_threads(1)  # tensors this small gain nothing from a second thread, and lose much on a busy machine


def options(**changes: Any) -> argparse.Namespace:
    values = {
        "contexts": 1,
        "tokens": 128,
        "receivers": ["mask", "zero"],
        "positions": 8,
        "rho": [0.5],
        "seeds": 1,
        "mbps": 5.0,
        "step_ms": 60.0,
    }
    return argparse.Namespace(**(values | {"channel": "paper", "scheduler": "hybrid"} | changes))


def test_it_compares_drop_and_patch_with_the_same_losses() -> None:
    drop, patched, *zero = run(tiny(seed=2), options())
    assert (drop["late"], patched["late"]) == ("drop", "patch")
    assert 0 < drop["complete_at_freeze"] == patched["complete_at_freeze"] < 1
    assert drop["complete_at_freeze"] + drop["patched"] == 1.0
    assert 0 < drop["last_step"] < 8
    assert drop["kl"] > 0
    assert patched["kl"] != drop["kl"]
    assert [record["receiver"] for record in zero] == ["zero", "zero"]


def test_with_everything_patched_before_the_first_pass_it_is_the_intact_cache() -> None:
    m = tiny(seed=2)
    ids = [(3 * i * i) % 250 for i in range(96)]
    cache = prefill(m, ids)
    kv = prepare(cache, tokens=ids)
    played = play(kv, options(), 0.5, "mask", 0)
    forced = [5, 6, 7]
    sent = as_sent(cache, m.config, "bf16")
    reference = forced_logits(m, sent, m.encode(CUE), forced).log_softmax(-1)
    frozen = to_cache(played.frozen.arrays, played.frozen.row_valid, m.config, dtype=m.dtype)
    whole = fork(frozen)
    patch(whole, [rows for _, rows in played.later], shared=frozen)
    for layer, intact in zip(whole.layers, sent.layers, strict=True):
        assert np.array_equal(layer.keys.numpy(), intact.keys.numpy())
    at_once = type(played)(played.frozen, [(0, rows) for _, rows in played.later])
    assert judge(m, at_once, "mask", forced, reference, True)["kl"] == pytest.approx(0.0, abs=1e-6)
    assert judge(m, played, "mask", forced, reference, False)["kl"] > 1e-6
