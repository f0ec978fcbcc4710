"""The short operating point in virtual time: one round trip for a 16-token increment of SmolLM2's cache.

The geometry and the utilities are those of the demo (`quic-pfec demo --point short`); its base hand-off has told the
sender what the path loses. A resend cannot arrive in time, so this is where the code earns its keep.
"""

from __future__ import annotations

import numpy as np

from quic_pfec.kv.layout import LayerShape, Layout
from quic_pfec.kv.order import order_units
from quic_pfec.kv.profile import builtin, unit_utility
from quic_pfec.sim.channel import PRESETS, GilbertElliottChannel, losses
from quic_pfec.sim.episode import EpisodeResult, Settings, run_episode

SEEDS = 20
LAYOUT = Layout(tuple(LayerShape(3, 64) for _ in range(30)), tokens=16, first_token=496)
SLOT_S = 1437 * 8 / 10e6  # one SOURCE packet at 10 Mbit/s
RTT_SLOTS = round(0.250 / SLOT_S)


def point(scheduler: str, history: tuple[int, int]) -> list[EpisodeResult]:
    profile = builtin("smollm2-135m-instruct", "mask")
    assert profile is not None
    utility = unit_utility(LAYOUT, profile)
    order = order_units(LAYOUT, "utility", utility)
    packets = LAYOUT.fragment_counts(LAYOUT.symbol_size()).astype(np.int64)[order]
    return [
        run_episode(
            packets,
            utility[order],
            losses(GilbertElliottChannel(PRESETS["paper"], seed), RTT_SLOTS),
            Settings(RTT_SLOTS, RTT_SLOTS, SLOT_S, scheduler, history=history, seed=seed),
        )
        for seed in range(SEEDS)
    ]


def test_hybrid_is_a_tenth_above_resending() -> None:
    history = (8400, 707)  # the base: 8,370 packets of the paper's channel
    hybrid, arq = point("hybrid", history), point("arq", history)
    assert np.mean([r.j_block for r in hybrid]) >= np.mean([r.j_block for r in arq]) + 0.10
    assert sum(r.receiver.recovered for r in hybrid) > 0
    assert all(r.wrong_symbols == 0 for r in hybrid)
    assert all(r.j_frac <= r.bound.j_frac + 1e-9 for r in hybrid)


def test_hybrid_is_above_resending_also_without_history() -> None:
    hybrid, arq = point("hybrid", (0, 0)), point("arq", (0, 0))
    assert np.mean([r.j_block for r in hybrid]) >= np.mean([r.j_block for r in arq]) + 0.10
