"""quic_pfec.llm.handoffs: simulated hand-offs by place in the order of sending."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quic_pfec.kv.layout import LayerShape, Layout
from quic_pfec.llm.handoffs import SCHEMES, completion, deliver, open_channel
from quic_pfec.schedule.policies import POLICY_NAMES
from quic_pfec.sim.channel import losses
from quic_pfec.wire.errors import LocalError

LAYOUT = Layout((LayerShape(3, 64),) * 10, 320)  # 200 units of 9 packets
TOTAL = 1800


def test_every_scheme_has_a_policy() -> None:
    assert {scheme.policy for scheme in SCHEMES} <= set(POLICY_NAMES)
    assert len({scheme.key for scheme in SCHEMES}) == len(SCHEMES)


def test_without_protection_what_the_channel_leaves_arrives() -> None:
    channel = open_channel("paper")
    known = deliver(LAYOUT, "none", 0.8, channel, 4, None)
    assert known.shape == (TOTAL,)
    # The manifest takes slots of its own; the rest is the channel's bits in order.
    manifests = 1440 - int(np.flatnonzero(known)[-1] + 1)
    assert 0 <= manifests < 40
    assert abs(int(known.sum()) - int((~losses(channel(4), 1440)).sum())) < 40
    assert np.array_equal(known, deliver(LAYOUT, "none", 0.8, channel, 4, None))
    assert not np.array_equal(known, deliver(LAYOUT, "none", 0.8, channel, 5, None))


def test_hybrid_completes_the_front() -> None:
    channel = open_channel("paper")
    runs = {name: [deliver(LAYOUT, name, 0.8, channel, seed, None) for seed in range(3)] for name in ("none", "hybrid")}
    falling = completion(LAYOUT, runs["hybrid"], 10)
    assert falling[:6].min() == 1.0
    assert falling[-1] == 0.0
    assert (np.diff(falling) <= 0).all()
    flat = completion(LAYOUT, runs["none"], 10)
    assert flat[:7].max() < 0.9
    assert sum(one.sum() for one in runs["hybrid"]) < sum(one.sum() for one in runs["none"]) + 3 * 60


def test_a_budget_holds_repairs_back() -> None:
    channel = open_channel("paper")
    free = deliver(LAYOUT, "arq", 1.0, channel, 1, None)
    held = deliver(LAYOUT, "arq", 1.0, channel, 1, 0.0)
    assert completion(LAYOUT, [free], 1)[0] > completion(LAYOUT, [held], 1)[0]


def test_traces_start_elsewhere_for_each_seed(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    bits = np.random.default_rng(0).random(997) < 0.1
    path.write_text("".join("01"[bit] for bit in bits.astype(int)))
    channel = open_channel(f"trace:{path}")
    first, second = losses(channel(0), 997), losses(channel(1), 997)
    assert np.array_equal(first, bits)
    assert not np.array_equal(first, second)
    assert first.sum() == second.sum()
    with pytest.raises(OSError):
        open_channel("trace:/nowhere")
    with pytest.raises(ValueError, match="neither a channel"):
        open_channel("calm")


def test_units_of_several_sizes_are_refused() -> None:
    with pytest.raises(LocalError, match="multiple of 16 tokens"):
        deliver(Layout((LayerShape(3, 64),), 20), "none", 1.0, open_channel("none"), 0, None)
