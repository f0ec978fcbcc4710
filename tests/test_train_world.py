"""Hand-offs to learn from: their ranges, their seeds."""

from __future__ import annotations

import numpy as np
import pytest

from quic_pfec.train.world import DISTRIBUTIONS, GATE, TRAINING, VALIDATION, draw
from quic_pfec.wire.errors import LocalError


def test_the_papers_range() -> None:
    for seed in range(20):
        world = draw("paper", seed)
        settings = world.settings
        assert min(abs(settings.slot_s - 11200 / rate) for rate in (50e6, 100e6, 200e6)) < 1e-12
        assert 0.0138 <= settings.rtt_slots * settings.slot_s <= 0.0262
        assert 0.6 <= settings.slots / world.scenario.symbols < 1.1 + 1e-3
        assert settings.repair_budget is not None
        assert 0.02 <= settings.repair_budget <= 0.15
        assert settings.steps == ()


def test_the_wide_range_reaches_from_half_a_round_trip_to_hundreds() -> None:
    worlds = [draw("wide", seed) for seed in range(150)]
    ratios = np.array([world.t_rtt for world in worlds])
    assert ratios.min() < 1.0
    assert ratios.max() > 100.0
    assert 0.1 < np.mean([world.settings.repair_budget is None for world in worlds]) < 0.5
    assert any(world.settings.steps for world in worlds)
    assert any(world.settings.history != (0, 0) for world in worlds)
    assert all(world.units >= 8 for world in worlds)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_seed_is_a_hand_off(distribution: str) -> None:
    first, again, other = draw(distribution, 5), draw(distribution, 5), draw(distribution, 6)
    assert first.settings == again.settings
    assert first.scenario.symbols == again.scenario.symbols
    assert first.settings != other.settings


def test_seeds_of_training_choice_and_judgement_do_not_meet() -> None:
    assert TRAINING + (1 << 24) * 1000 < VALIDATION < GATE


def test_an_unknown_distribution() -> None:
    with pytest.raises(LocalError, match="paper, wide"):
        draw("narrow", 0)
