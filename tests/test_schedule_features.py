"""The features and choices of a learned policy: the formulas by hand, and the compiled ones in whole hand-offs."""

from __future__ import annotations

from math import inf, log
from typing import Any

import numpy as np
import pytest

from quic_pfec.schedule.features import CHOICES, NAMES, FeatureMemory, action, deficit, masks
from quic_pfec.schedule.state import REPAIR, RESEND, SOURCE, Action, ActionKind, State
from quic_pfec.sim.engine import Lanes, make_scenario, reset
from quic_pfec.sim.episode import run_episode
from tests.engine_world import Scripted, crowd, world

PACKETS = np.full(10, 10, dtype=np.int64)
UTILITY = np.linspace(10.0, 1.0, 10)


def view(**changes: Any) -> State:
    plain: dict[str, Any] = {
        "slots_left": 60, "slots_total": 100, "rtt_slots": 20.0, "sources_total": 100, "sources_sent": 35,
        "unit_packets": 10, "unit_position": 5, "in_flight": 20, "repairs_in_flight": 2, "unresolved": 25,
        "window": 30, "feedback_deficit": 3, "loss_short": 0.1, "budget_left": 8.0, "packets_extra": 4,
        "can_source": True, "can_repair": True, "can_resend": True,
    }  # fmt: skip
    return State(**(plain | changes))


def look(state: State, budget: float = 12.0, version: Any = 1) -> dict[str, float]:
    memory = FeatureMemory(PACKETS, UTILITY, 100, budget)
    return dict(zip(NAMES, memory.look(state, version).tolist(), strict=True))


def test_by_hand() -> None:
    d = 3 + 0.1 * 20 - 0.9 * 2
    assert deficit(view()) == pytest.approx(d)
    unresolved, following = UTILITY[0:4].mean(), UTILITY[3:].mean()  # symbols 5 to 35; ten units, so fewer than 16
    assert look(view()) == pytest.approx(
        {
            "budget": 8 / 12, "time": 0.6, "pressure": 65 / 60 / 2, "slack": (60 - 65 - d / 0.9) / 100, "loss": 0.4,
            "burst": 0.3, "deficit_share": d / (d + 8), "deficit": log(1 + d) / log(65), "window": log(31) / log(101),
            "window_rtt": 30 / 68 / 4, "silence": 40 / 20 / 4, "position": 0.5, "utility": unresolved / 5.5 / 4,
            "utility_next": following / (following + unresolved), "failure": 1 - (1 - 5 / 30) ** 30,
        },
        abs=1e-6,
    )  # fmt: skip
    assert look(view(), version=2)["pressure"] == pytest.approx(60 / 80)


def test_at_the_borders() -> None:
    start = look(view(sources_sent=0, window=0, unresolved=0, in_flight=0, repairs_in_flight=0, feedback_deficit=0))
    assert (start["failure"], start["window"], start["deficit"]) == (0, 0, 0)
    end = look(view(sources_sent=100, window=0, unit_packets=0, unit_position=0))
    assert (end["position"], end["utility"], end["utility_next"]) == (0, 0, 0)
    assert look(view(), budget=0)["budget"] == 0
    unlimited = look(view(budget_left=inf), budget=inf)
    assert unlimited["budget"] == pytest.approx(96 / 100)  # the slots are the budget


def test_memory_of_losses_and_of_progress() -> None:
    memory = FeatureMemory(PACKETS, UTILITY, 100)
    for lost in (True, True, False, False):
        memory.on_fate(lost)
    expected = 0.3 + 0.02 * (1 - 0.3)
    expected += 0.02 * (0 - expected)
    assert memory.look(view())[NAMES.index("burst")] == pytest.approx(expected)
    silence = NAMES.index("silence")
    memory.view(view(slots_left=70))
    assert memory.look(view(slots_left=60))[silence] == pytest.approx(10 / 20 / 4)
    memory.view(view(slots_left=60))  # the same prefix
    assert memory.look(view(slots_left=50))[silence] == pytest.approx(20 / 20 / 4)


def test_masks() -> None:
    assert masks(view()).tolist() == [True, True, True, False, False]
    assert masks(view(), resend=True)[4]
    assert not masks(view(can_resend=False), resend=True)[4]
    assert masks(view(budget_left=16.0)).tolist() == [True, True, True, True, False]
    assert masks(view(budget_left=inf, slots_left=3)).tolist() == [True, True, False, False, False]
    assert masks(view(feedback_deficit=0, in_flight=0)).tolist() == [True, False, False, False, False]
    assert masks(view(window=0)).tolist() == [True, False, False, False, False]


def test_actions() -> None:
    assert [action(view(), CHOICES.index(name)) for name in ("repair1", "resend")] == [REPAIR, RESEND]
    assert action(view(), 3) == Action(ActionKind.REPAIR, 16)
    assert action(view(), 0) == Action(ActionKind.SOURCE, 5)  # to the unit's border
    assert action(view(unit_packets=30), 0) == Action(ActionKind.SOURCE, 8)
    assert action(view(slots_left=2), 0) == Action(ActionKind.SOURCE, 2)
    assert action(view(slots_left=0), 0) == SOURCE


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_the_compiled_ones_are_the_same_in_every_decision(seed: int, version: Any) -> None:
    """A policy in Python under the shipped sender, and the engine told the same choices."""
    packets, utility, lost, settings = world(seed, resend=True)
    scripted = Scripted(packets, utility, settings, seed, version)
    result = run_episode(packets, utility, lost, settings, policy=scripted)
    lanes = Lanes(1, resend=True, features=version)
    reset(lanes, 0, make_scenario(packets, utility, lost, settings), settings, None)
    for choice, features, allowed in scripted.decisions:
        assert not lanes.done()[0]
        assert lanes.masks()[0].tolist() == allowed.tolist()
        np.testing.assert_allclose(lanes.observe()[0], features, rtol=1e-6, atol=1e-7)
        lanes.step(np.array([choice]))
    assert lanes.done()[0]
    assert lanes.carried(0).tolist() == result.carried.tolist()
    assert len(scripted.decisions) > 10


def test_a_crowd_of_lanes_is_each_of_them_alone() -> None:
    together = crowd(8)
    for lane, (rewards, choices) in enumerate(together):
        alone = crowd(8, only=lane)[0]
        assert alone == (rewards, choices)
