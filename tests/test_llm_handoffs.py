"""quic_pfec.llm.handoffs: simulated hand-offs by place in the order of sending."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quic_pfec.kv.layout import LayerShape, Layout
from quic_pfec.kv.order import order_units
from quic_pfec.kv.reception import complete_units, fragments_by_unit
from quic_pfec.llm.handoffs import (
    BESIDE,
    SCHEMES,
    SLOT_S,
    airtime,
    completion,
    deliver,
    deliver_units,
    open_channel,
    resolve,
)
from quic_pfec.schedule.policies import POLICY_NAMES
from quic_pfec.sim.channel import losses
from quic_pfec.wire.errors import LocalError

LAYOUT = Layout((LayerShape(3, 64),) * 10, 320)  # 200 units of 9 packets
TOTAL = 1800


def test_every_scheme_has_a_policy() -> None:
    assert {scheme.policy for scheme in SCHEMES} <= set(POLICY_NAMES)
    assert len({scheme.key for scheme in SCHEMES}) == len(SCHEMES)
    assert set(BESIDE) <= {scheme.key for scheme in SCHEMES if scheme.ranking == "request"}


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


def test_wire_dtypes_have_the_same_time() -> None:
    own = airtime(LAYOUT, 0.4)
    assert (own.slots, own.slot_s) == (720, SLOT_S)
    for wire_dtype in ("int8", "fp8", "int4", "progressive", "fp32"):
        layout = replace(LAYOUT, wire_dtype=wire_dtype)
        time = airtime(layout, 0.4, LAYOUT)
        assert time.slots * time.slot_s == pytest.approx(own.slots * own.slot_s, rel=1e-3)
        assert time.rtt_slots * time.slot_s == pytest.approx(own.rtt_slots * own.slot_s, rel=5e-3)
        assert time.slot_s <= 1.01 * SLOT_S  # their symbols are no larger than what a packet holds
    known = deliver(replace(LAYOUT, wire_dtype="int8"), "none", 0.4, open_channel("none"), 0, None, LAYOUT)
    sent = known.mean()  # int8 has 0.54 of the bytes
    assert sent == pytest.approx(0.4 / 0.54, abs=0.05)


def test_auto_is_bf16_where_all_of_it_fits() -> None:
    assert resolve("int8", LAYOUT, 9.0) == "int8"
    assert [resolve("auto", LAYOUT, rho) for rho in (0.4, 1.0, 1.04, 1.06, 2.0)] == [
        *["progressive"] * 3,
        *["bf16"] * 2,
    ]


def test_an_episode_of_a_request_equals_that_of_all_where_units_are_equal() -> None:
    rng = np.random.default_rng(3)
    utility, channel = rng.uniform(1, 2, LAYOUT.block_count), open_channel("paper")
    order = order_units(LAYOUT, "utility", utility)
    for policy in ("arq", "hybrid"):
        known = deliver_units(LAYOUT, order, utility, policy, 0.8, channel, 2, None)
        assert np.array_equal(known, deliver(LAYOUT, policy, 0.8, channel, 2, None))


def test_running_out_of_time_costs_precision_before_blocks() -> None:
    layout = replace(LAYOUT, wire_dtype="progressive")
    utility = np.random.default_rng(5).uniform(1, 2, layout.block_count)
    order, size = order_units(layout, "utility", utility), layout.symbol_size()
    found = {}
    for rho in (0.25, 0.5, 1.0):  # the bases take 0.33, both 0.58
        known = deliver_units(layout, order, utility, "hybrid", rho, open_channel("paper"), 1, None, LAYOUT)
        complete = complete_units(layout, size, fragments_by_unit(layout, size, order, known))
        found[rho] = complete.reshape(2, -1).mean(axis=1)
    assert 0.5 < found[0.25][0] < 0.8
    assert found[0.25][1] == 0
    assert found[0.5][0] == 1
    assert 0 < found[0.5][1] < 0.8
    assert found[1.0].tolist() == [1, 1]


def test_units_of_several_sizes_are_refused() -> None:
    with pytest.raises(LocalError, match="multiple of 16 tokens"):
        deliver(Layout((LayerShape(3, 64),), 20), "none", 1.0, open_channel("none"), 0, None)
