"""Labels by paired roll-outs, the regression, the margin and the gate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("gymnasium")
pytest.importorskip("torch")
from quic_pfec.sim.engine import ACTIONS, Lanes, reset
from quic_pfec.sim.points import cells
from quic_pfec.train.override import (
    Args,
    Bench,
    Gain,
    base_rule,
    choose_margin,
    collect,
    fit,
    gate_cells,
    judge_cells,
    label_world,
    passes,
)
from quic_pfec.train.world import draw
from tests.test_train_environment import small_world

TINY = Args(states=40, steps=30, batch=16, validation=2, margins=(0.1, 5.0))


def test_labels_are_what_a_hand_gives() -> None:
    world = small_world(4)
    bench = Bench(True)
    data = label_world(world, range(0, 300, 7), bench)
    assert len(data.features) > 20
    lanes = Lanes(1, resend=True, features=2)
    checked = 0
    reset(lanes, 0, world.scenario, world.settings, base_rule())
    lanes.finish()
    plain = lanes.j_block()[0]
    for row, seen in enumerate(data.features):
        for choice in np.flatnonzero(data.known[row]):
            # Find the decision again and play it out alone.
            reset(lanes, 0, world.scenario, world.settings, base_rule())
            lanes.advance(np.array([0]))
            while (lanes.observe()[0] != seen).any():
                lanes.advance(lanes.slots() + 1)
            own = int(lanes.rule_actions()[0])
            if choice == own:
                assert data.labels[row, choice] == 0.0
                continue
            lanes.step(np.array([choice]))
            lanes.finish()
            wanted = np.clip((lanes.j_block()[0] - plain) * world.units, -6, 6)
            assert data.labels[row, choice] == pytest.approx(wanted, abs=1e-5)
            checked += 1
    assert checked > 20
    assert (data.labels != 0).any()


def test_the_rules_own_choice_gains_nothing() -> None:
    bench = Bench(True)
    for seed in range(6):
        data = label_world(draw("wide", seed), [0, 50, 200, 400, 600], bench)
        assert not data.labels[~data.known].any()
        # One of the known is the rule's, and its label is 0.
        assert ((data.labels == 0) & data.known).any(axis=1).all()


def test_without_resends_there_is_no_fifth_choice() -> None:
    bench = Bench(False)
    data = label_world(small_world(2), range(0, 300, 10), bench)
    own = data.known.sum(axis=1)
    assert own.max() <= len(ACTIONS)
    assert not data.labels[:, 4].any()


def test_collecting_and_fitting_are_their_seed() -> None:
    first, again = collect(TINY), collect(TINY)
    assert (first.features == again.features).all()
    assert (first.labels == again.labels).all()
    assert len(first.features) == 40
    network, curve = fit(TINY, first)
    assert (network.w1 == fit(TINY, again)[0].w1).all()
    assert (network.kind, network.features, network.resend, network.margin) == ("advantage", 2, True, None)
    assert (network.low <= first.features).all()
    assert (first.features <= network.high).all()
    assert curve[-1]["updates"] == 30
    margin, tried = choose_margin(network, TINY)
    assert [one.label for one in tried] == ["margin 0.1", "margin 5"]
    assert margin in (None, 0.1, 5.0)
    assert tried[1].acted <= tried[0].acted


def test_a_net_that_never_acts_is_its_base() -> None:
    network, _ = fit(replace(TINY, steps=2), collect(replace(TINY, states=10)))
    cell = next(cell for cell in cells("short") if cell.t_rtt == 1.0)
    for margin in (None, 1e6):
        (one,) = judge_cells(replace(network, margin=margin), [cell], 2)
        assert (one.gain, one.half, one.acted) == (0.0, 0.0, 0)


def test_the_gate() -> None:
    won, same, lost = (Gain("", 0.9, gain, 0.001, 1) for gain in (0.01, 0.0, -0.002))
    unsure = Gain("", 0.9, -0.0015, 0.01, 1)
    assert passes([won, same])
    assert not passes([same])
    assert not passes([won, lost])
    assert not passes([won, unsure])
    assert not passes([])
    assert {cell.point for cell in gate_cells()} == {"short", "paper", "heldout"}
