"""The compiled engine against the classes that ship, slot by slot; and its lanes: rewards, copies, misuse."""

from __future__ import annotations

import pickle
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

from interop.make_network_vectors import random_network
from quic_pfec.schedule.learned import Ddqn, Overridden
from quic_pfec.schedule.policies import POLICY_NAMES, Hybrid, compiled, make_policy, make_twin
from quic_pfec.sim.engine import ACTIONS, FEATURES_COUNT, Lanes, Scenario, make_scenario, play, reset
from quic_pfec.sim.episode import Settings, run_episode
from quic_pfec.sim.timeline import PathStep
from quic_pfec.wire.errors import LocalError
from tests.engine_world import world

HYBRID = make_policy("hybrid")
LEARNED = [
    Ddqn(random_network("q", 3, window="full")),
    Ddqn(random_network("q", 4, resend=True, features=2), window="sack"),
    Overridden(Hybrid(), random_network("advantage", 7, margin=0.0, features=2)),
    Overridden(Hybrid(), random_network("advantage", 5, margin=0.02, resend=True)),
]


def lane_of(seed: int, policy: Any = None, **fixed: Any) -> Lanes:
    packets, utility, lost, settings = world(seed, **fixed)
    lanes = Lanes(2, resend=True)
    for lane in range(2):
        reset(lanes, lane, make_scenario(packets, utility, lost, settings), settings, policy)
    return lanes


# both engines


def same(seed: int, policy: Any, twin: Any = None, **fixed: Any) -> int:
    """How often a network overrode its rule."""
    packets, utility, lost, settings = world(seed, **fixed)
    slow = run_episode(packets, utility, lost, settings, policy=policy)
    if twin is not None:
        slower = run_episode(packets, utility, lost, settings, policy=twin)
        assert slower.carried.tolist() == slow.carried.tolist()
        assert slower.sender == slow.sender
    lanes = Lanes(1)
    reset(lanes, 0, make_scenario(packets, utility, lost, settings), settings, policy)
    lanes.finish()
    assert lanes.carried(0).tolist() == slow.carried.tolist()
    assert lanes.known(0).tolist() == slow.known.tolist()
    assert slow.wrong_symbols == 0
    assert (lanes.j_block()[0], lanes.j_frac()[0]) == pytest.approx((slow.j_block, slow.j_frac), abs=1e-12)
    assert lanes.complete(0).sum() <= (lanes.present(0) > 0).sum()
    for name, value in lanes.sender_counters(0).items():
        assert value == getattr(slow.sender, name), name
    for name, value in lanes.receiver_counters(0).items():
        assert value == getattr(slow.receiver, name), name
    if lanes.frozen_s(0) < inf:
        assert lanes.frozen_s(0) / settings.slot_s == slow.frozen_slot
    return slow.sender.overridden


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_both_engines_agree(name: str) -> None:
    for seed in range(30):
        same(1000 * POLICY_NAMES.index(name) + seed, make_policy(name))


@pytest.mark.parametrize("name", ["deficit", "epoch", "hybrid"])
def test_both_engines_agree_over_the_full_window(name: str) -> None:
    for seed in range(10):
        same(seed, compiled(replace(make_twin(name), window="full")))  # type: ignore[type-var]


@pytest.mark.parametrize("policy", LEARNED, ids=lambda policy: policy.network.name)
def test_both_engines_agree_on_learned_policies(policy: Any) -> None:
    """Compiled, and the twin in the compiled planner."""
    acted = 0
    for seed in range(6):
        acted += same(seed, compiled(policy), policy)
    assert acted > 20 or isinstance(policy, Ddqn)


def test_both_engines_agree_when_repairs_are_wide() -> None:
    for seed in range(10):
        same(seed, compiled(Hybrid(crowd=4.0)), rtt_slots=60)


def test_both_engines_agree_when_the_budget_binds() -> None:
    for seed in range(20):
        same(seed, HYBRID, rtt_slots=3, slot_s=112e-6, repair_budget=0.03, history=(500, 60), steps=())


def test_both_engines_agree_beyond_the_credit() -> None:
    """More symbols than may be sent before the manifest, which is lost many times."""
    packets, utility = np.full(250, 24, dtype=np.int64), np.linspace(2.0, 1.0, 250)
    lost = np.random.default_rng(1).random(7000) < 0.1
    lost[:5000:17] = True
    settings = Settings(7000, 300, slot_s=112e-6)
    slow = run_episode(packets, utility, lost, settings)
    fast = play(make_scenario(packets, utility, lost, settings), settings, ["hybrid"])[0]
    assert slow.sender.slots_credit > 100
    assert fast.sender["slots_credit"] == slow.sender.slots_credit
    assert (fast.j_block, fast.j_frac) == pytest.approx((slow.j_block, slow.j_frac), abs=1e-12)


def test_no_manifest_in_ten_seconds() -> None:
    packets, utility = np.full(3, 4, dtype=np.int64), np.ones(3)
    lost = np.zeros(1200, dtype=np.bool_)
    lost[::17] = True
    lost[40:] = True
    settings = Settings(1200, 20, slot_s=0.01)
    slow = run_episode(packets, utility, lost, settings)
    fast = play(make_scenario(packets, utility, lost, settings), settings, ["hybrid"])[0]
    assert fast.j_block == slow.j_block
    assert fast.receiver["feedback"] == slow.receiver.feedback


# lanes


@pytest.mark.parametrize("seed", range(15))
def test_rewards_sum_to_what_was_delivered(seed: int) -> None:
    """The potential is 0 at the start and at the end, so that shaping changes no comparison of policies."""
    lanes = lane_of(seed)
    chance, total = np.random.default_rng(seed), 0.0
    potential_moved = False
    while not lanes.done()[0]:
        before = lanes.j_block()[0]
        rewards, _ = lanes.step(np.array([chance.choice(np.flatnonzero(lanes.masks()[0])), -1]))
        total += rewards[0]
        potential_moved |= abs(rewards[0] - (lanes.j_block()[0] - before)) > 1e-6
    assert total == pytest.approx(lanes.j_block()[0], abs=1e-9)
    assert potential_moved


@pytest.mark.parametrize("name", ["hybrid", "deficit", "flec-rt-spread", "flec-rt", "ddqn", "overridden"])
@pytest.mark.parametrize("seed", range(8))
def test_a_copy_has_the_same_future(name: str, seed: int) -> None:
    def make() -> Any:  # nobody else holds the weights
        return compiled({"ddqn": LEARNED[0], "overridden": LEARNED[3]}[name]) if name in learned else make_policy(name)

    learned = ("ddqn", "overridden")
    lanes = lane_of(seed, make())
    half = len(lanes.carried(0)) // 2
    lanes.advance(np.array([half, -1]))
    assert lanes.slots()[0] >= half
    assert lanes.slots()[1] == 0
    lanes.copy(0, 1)
    before = lanes.observe()
    assert before[0].tolist() == before[1].tolist()
    lanes.finish(np.array([0]))
    assert lanes.observe()[1].tolist() == before[1].tolist()  # nothing is shared
    lanes.finish()
    assert lanes.carried(0).tolist() == lanes.carried(1).tolist()
    assert lanes.known(0).tolist() == lanes.known(1).tolist()
    assert lanes.receiver_counters(0) == lanes.receiver_counters(1)
    alone = lane_of(seed, make())
    alone.finish()
    assert alone.carried(0).tolist() == lanes.carried(0).tolist()


def test_copies_of_other_sizes() -> None:
    lanes = Lanes(3)
    for lane, seed in enumerate((1, 2, 3)):
        packets, utility, lost, settings = world(seed)
        reset(lanes, lane, make_scenario(packets, utility, lost, settings), settings, HYBRID)
    lanes.finish()
    ends = [lanes.carried(lane).tolist() for lane in range(3)]
    for source, target in ((0, 1), (1, 2), (2, 2)):
        lanes.copy(source, target)
    assert [lanes.carried(lane).tolist() for lane in range(3)] == [ends[0]] * 3


def test_an_override_counts_once() -> None:
    """A lane with a rule takes a choice from outside and goes on by its rule; told the rule's own, nothing changes."""
    plain, told = lane_of(7, make_policy("epoch")), lane_of(7, make_policy("epoch"))
    plain.finish()
    taken = 0
    told.advance(np.array([0, -1]))
    while not told.done()[0]:
        own = int(told.rule_actions()[0])
        if own >= 1:  # a burst of the rule is one choice; its sources come one by one
            told.step(np.array([own, -1]))
            taken += 1
        else:
            told.advance(np.array([told.slots()[0] + 1, -1]))
    assert taken > 0
    assert told.carried(0).tolist() == plain.carried(0).tolist()
    assert told.rule_actions()[0] == -1


def test_a_policy_may_change() -> None:
    lanes = lane_of(5, HYBRID, repair_budget=None)
    lanes.set_policy(0, make_policy("none"))
    lanes.finish()
    assert lanes.sender_counters(0)["resent"] == 0
    packets, utility, lost, settings = world(5, repair_budget=None)
    assert play(make_scenario(packets, utility, lost, settings), settings, ["none"])[0].j_block == lanes.j_block()[0]


def test_a_step_of_the_path_is_met_by_both() -> None:
    packets, utility = np.full(30, 20, dtype=np.int64), np.linspace(2.0, 1.0, 30)
    lost = np.random.default_rng(4).random(500) < 0.08
    for step in (PathStep(200, 0.01, 112e-6), PathStep(200, 0.04, 300e-6), PathStep(499, 0.02, 50e-6)):
        settings = Settings(500, 179, steps=(step,))
        slow = run_episode(packets, utility, lost, settings)
        fast = play(make_scenario(packets, utility, lost, settings), settings, ["hybrid"])[0]
        assert (fast.j_block, fast.sender["resent"]) == (pytest.approx(slow.j_block), slow.sender.resent)


def test_shapes() -> None:
    lanes = lane_of(1)
    assert lanes.observe().shape == (2, FEATURES_COUNT)
    assert lanes.masks().shape == (2, len(ACTIONS))
    out, allowed = np.full((2, 15), np.nan, dtype=np.float32), np.ones((2, 5), dtype=np.bool_)
    assert lanes.observe(out) is out
    assert lanes.masks(allowed) is allowed
    assert np.isfinite(out).all()
    assert lanes.state(0).sources_total > 0
    assert len(lanes) == 2


def test_misuse_is_refused() -> None:
    lanes, never = lane_of(1), Lanes(2)
    packets, utility, lost, settings = world(1)
    made = make_scenario(packets, utility, lost, settings)
    for wrong in (
        lambda: never.observe(),
        lambda: never.step(np.zeros(2, dtype=np.int64)),
        lambda: lanes.step(np.array([7, -1])),
        lambda: lanes.step(np.array([0])),
        lambda: lanes.step(np.array([4, -1])),  # nothing is known to be lost at the start
        lambda: lanes.advance(np.array([0, 0])),
        lambda: lanes.finish(),
        lambda: lanes.finish(np.array([2])),
        lambda: lanes.copy(0, 2),
        lambda: lanes.copy(-1, 0),
        lambda: lanes.observe(np.zeros((3, 15), dtype=np.float32)),
        lambda: lanes.masks(np.zeros((2, 4), dtype=np.bool_)),
        lambda: Lanes(0),
        lambda: Lanes(1, features=3),  # type: ignore[arg-type]
        lambda: never.reset(0, made, make_twin("hybrid")),
        lambda: never.reset(0, made, budget=-1.0),
        lambda: never.reset(0, made, degree=256),
        lambda: never.reset(0, made, symbol_size=1),
        lambda: never.reset(0, made, feedback_loss=1.5),
        lambda: never.reset(0, made, fates_delay_s=inf),
        lambda: never.reset(2, made),
        lambda: never.reset(0, made, window="half"),  # type: ignore[arg-type]
        lambda: make_scenario(packets, utility, lost[:5], settings),
    ):
        with pytest.raises(LocalError):
            wrong()
    for object_ in (lanes, made):
        with pytest.raises(TypeError):
            pickle.dumps(object_)


@pytest.mark.parametrize(
    "change",
    [
        {"unit_packets": np.array([0, 3])},
        {"utility": np.array([1.0, -1.0])},
        {"utility": np.array([0.0, 0.0])},
        {"utility": np.array([1.0])},
        {"losses": np.zeros(0, dtype=np.bool_), "times_s": np.zeros(0)},
        {"times_s": np.array([0.0, 2.0, 1.0])},
        {"step_slots": np.array([1])},
        {"step_rtt_s": np.array([0.0])},
        {"step_slot_s": np.array([np.inf])},
        {"deadline_s": inf},
        {"losses": np.zeros((3, 1), dtype=np.bool_)},
    ],
)
def test_scenarios_are_checked(change: dict[str, Any]) -> None:
    right: dict[str, Any] = {
        "unit_packets": np.array([2, 3]), "utility": np.array([2.0, 1.0]), "losses": np.zeros(3, dtype=np.bool_),
        "times_s": np.arange(3.0), "step_slots": np.array([0]), "step_rtt_s": np.array([0.1]),
        "step_slot_s": np.array([0.01]), "deadline_s": 5.0,
    }  # fmt: skip
    assert Scenario(**right).symbols == 5
    with pytest.raises(LocalError):
        Scenario(**(right | change))
