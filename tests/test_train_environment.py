"""The environments: gymnasium's own checks, rewards, masks, and many hand-offs at once."""

from __future__ import annotations

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")
from gymnasium.utils.env_checker import check_env  # noqa: E402

from quic_pfec.schedule.policies import make_policy  # noqa: E402
from quic_pfec.sim.channel import SplitMix64  # noqa: E402
from quic_pfec.sim.engine import make_scenario  # noqa: E402
from quic_pfec.sim.episode import Settings  # noqa: E402
from quic_pfec.train.environment import Crowd, PriorityFecEnv  # noqa: E402
from quic_pfec.train.world import World  # noqa: E402
from quic_pfec.wire.errors import LocalError  # noqa: E402


def small_world(seed: int = 1, slots: int = 300) -> World:
    packets, chance = np.full(20, 12, dtype=np.int64), np.random.default_rng(seed)
    settings = Settings(slots, 20, repair_budget=0.2, seed=seed)
    scenario = make_scenario(packets, np.linspace(2.0, 1.0, 20), chance.random(slots) < 0.1, settings)
    return World(scenario, settings, 20)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("resend", [False, True])
def test_gymnasium_is_content(resend: bool) -> None:
    check_env(PriorityFecEnv("wide", features=2, resend=resend), skip_render_check=True)


def play(env: PriorityFecEnv, seed: int) -> tuple[float, dict[str, float]]:
    chance, total, over = SplitMix64(seed), 0.0, False
    info: dict[str, float] = {}
    while not over:
        allowed = np.flatnonzero(env.action_masks())
        features, reward, over, cut, info = env.step(allowed[int(chance.uniform() * len(allowed))])
        assert env.observation_space.contains(features)
        assert not cut
        assert not info["replaced"]
        total += reward
    return total, info


def test_rewards_sum_to_what_was_delivered() -> None:
    env = PriorityFecEnv()
    for seed in range(5):
        _, first = env.reset(seed=seed, options={"world": small_world(seed)})
        assert first["action_mask"].tolist() == env.action_masks().tolist()
        total, info = play(env, seed)
        assert total == pytest.approx(info["j_block"], abs=1e-9)
        assert 0.0 < info["j_block"] <= info["j_frac"] <= 1.0


def test_a_masked_action_is_replaced_and_said_to_be() -> None:
    env = PriorityFecEnv()
    env.reset(options={"world": small_world()})
    assert not env.action_masks()[1]  # nothing was sent: nothing to repair
    *_, info = env.step(np.int64(1))
    assert info["replaced"]


def test_after_the_end_only_reset_helps() -> None:
    env = PriorityFecEnv()
    env.reset(options={"world": small_world()})
    play(env, 3)
    assert not env.action_masks().any()
    with pytest.raises(ValueError, match="reset"):
        env.step(np.int64(0))


def test_a_crowd_steps_masked_actions_never_and_deals_anew() -> None:
    crowd, chance = Crowd(6, "wide", 40), np.random.default_rng(0)
    assert crowd.masks.shape == (6, 4)
    while len(crowd.finished) < 8:
        assert crowd.masks.any(axis=1).all()
        moves = crowd.step((crowd.masks * chance.random(crowd.masks.shape)).argmax(axis=1))
        assert moves.lanes.tolist() == list(range(6))
        assert not moves.masks[moves.done].any()
    assert crowd.next_seed >= 40 + 6 + 8
    assert all(0.0 <= block <= frac <= 1.0 and decisions > 0 for block, frac, decisions in crowd.finished)
    forbidden = np.argwhere(~crowd.masks)
    if len(forbidden):
        actions = np.full(6, -1)
        actions[forbidden[0][0]] = forbidden[0][1]
        with pytest.raises(LocalError, match="may not"):
            crowd.step(actions)


def test_a_crowd_is_its_seed() -> None:
    def run() -> list[tuple[float, float, int]]:
        crowd, chance = Crowd(3, "wide", 7, window="sack"), np.random.default_rng(1)
        for _ in range(150):
            crowd.step((crowd.masks * chance.random(crowd.masks.shape)).argmax(axis=1))
        return [*crowd.finished, (float(crowd.features.sum()), 0.0, 0)]

    assert run() == run()


def test_a_crowd_with_a_policy_knows_what_it_would_do() -> None:
    crowd = Crowd(4, "wide", 3, policy=make_policy("deficit"))
    assert set(crowd.lanes.rule_actions()) == {0}  # nothing lost yet
