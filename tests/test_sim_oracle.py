"""The bound: against brute force on small instances, and on windows cut from a link's log."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.sim.channel import PRESETS, channel_factory
from quic_pfec.sim.link import Delivery, Link, SlotLog
from quic_pfec.sim.oracle import opportunities, oracle


def slots(survivors: int) -> np.ndarray:
    """Losses of which `survivors` slots survive."""
    return np.array([True, False, True] + [False] * max(0, survivors - 1))[: None if survivors else 1]


def brute_force(survivors: int, packets: list[int], utility: list[float]) -> float:
    sets = itertools.chain.from_iterable(
        itertools.combinations(range(len(packets)), n) for n in range(len(packets) + 1)
    )
    best = max(
        sum(utility[unit] for unit in chosen) for chosen in sets if sum(packets[unit] for unit in chosen) <= survivors
    )
    return best / sum(utility)


units = st.lists(st.tuples(st.integers(1, 6), st.floats(0.01, 10)), min_size=1, max_size=9)


@given(units=units, survivors=st.integers(0, 40))
@settings(deadline=None, max_examples=150)
def test_is_the_best_set_of_whole_units(units: list[tuple[int, float]], survivors: int) -> None:
    packets, utility = [list(column) for column in zip(*units, strict=True)]
    bound = oracle(slots(survivors), packets, utility)
    assert bound.survivors == survivors
    assert bound.j_block == pytest.approx(brute_force(survivors, packets, utility))
    assert bound.j_block <= bound.j_frac + 1e-12


@given(units=units, survivors=st.integers(0, 40), data=st.data())
@settings(deadline=None, max_examples=100)
def test_no_allocation_of_packets_does_better(
    units: list[tuple[int, float]], survivors: int, data: st.DataObject
) -> None:
    packets, utility = (np.array(column) for column in zip(*units, strict=True))
    bound = oracle(slots(survivors), packets, utility)
    order = data.draw(st.permutations(range(len(packets))))
    left, frac = survivors, 0.0
    for unit in order:
        arrived = min(left, data.draw(st.integers(0, int(packets[unit]))))
        left -= arrived
        frac += utility[unit] * arrived / packets[unit]
    assert frac / utility.sum() <= bound.j_frac + 1e-9
    in_order = oracle(slots(survivors), packets, utility, order)
    assert in_order.j_block <= bound.j_block + 1e-9
    assert in_order.j_frac <= bound.j_frac + 1e-9


def test_by_hand() -> None:
    # Seven packets: whole units 1 and 2 (4 + 3 packets); by the packet 1, then 2; in order 0, then two of 1.
    bound = oracle(slots(7), [5, 4, 3], [5.0, 8.0, 4.0])
    assert bound.j_block == pytest.approx(12 / 17)
    assert bound.j_frac == pytest.approx(12 / 17)
    fifo = oracle(slots(7), [5, 4, 3], [5.0, 8.0, 4.0], order=[0, 1, 2])
    assert fifo.j_block == pytest.approx(5 / 17)
    assert fifo.j_frac == pytest.approx((5 + 4) / 17)
    partial = oracle(slots(7), [5, 4, 3], [5.0, 8.0, 4.0], order=[2])
    assert (partial.j_block, partial.j_frac) == (pytest.approx(4 / 17), pytest.approx(4 / 17))


def test_everything_and_nothing() -> None:
    assert oracle(np.zeros(30, dtype=bool), [10, 10, 9], [1, 2, 3]).j_block == 1.0
    nothing = oracle(np.ones(30, dtype=bool), [10, 10, 9], [1, 2, 3])
    assert (nothing.j_block, nothing.j_frac, nothing.survivors) == (0.0, 0.0, 0)
    assert oracle([], [1], [1.0]).survivors == 0


def test_size_of_a_large_model() -> None:
    """28 layers x 2,048 blocks, the last of each shorter: exact and quick enough to run beside every episode."""
    random = np.random.default_rng(1)
    packets = np.tile([24] * 2047 + [13], 28)
    utility = random.random(len(packets)) ** 4
    survivors = int(packets.sum() * 0.7)
    bound = oracle(np.zeros(survivors, dtype=bool), packets, utility)
    assert bound.j_frac - utility.max() / utility.sum() < bound.j_block <= bound.j_frac


@pytest.mark.parametrize(
    ("packets", "utility", "order"),
    [
        ([1, 2], [1.0], None),
        ([[1]], [[1.0]], None),
        ([0, 1], [1.0, 1.0], None),
        ([1, 1], [1.0, -1.0], None),
        ([1, 1], [0.0, 0.0], None),
        ([1, 1], [np.nan, 1.0], None),
        ([1, 1], [1.0, 1.0], [0, 0]),
        ([1, 1], [1.0, 1.0], [0, 2]),
        ([1, 1], [1.0, 1.0], [-1]),
    ],
)
def test_refuses(packets: list[int], utility: list[float], order: list[int] | None) -> None:
    with pytest.raises(ValueError):
        oracle([False], packets, utility, order)


class TestOpportunities:
    RATE_BPS, OWD_S, SLOT_S = 20e6, 0.010, 576e-6

    def log(self, start_s: float, packet_bytes: int, until_s: float) -> tuple[SlotLog, int]:
        """A saturated link's log, and the packets that arrived by `until_s`, when sent from `start_s` on."""
        link = Link(self.RATE_BPS, self.OWD_S, 1 << 30, channel_factory(PRESETS["paper"], 11))
        link.epoch(1000.0)
        arrived = 0
        for _ in range(2000):
            outcome = link.send(start_s, packet_bytes - 28)
            arrived += isinstance(outcome, Delivery) and outcome.due_s <= until_s + 1e-9
        return link.log(), arrived

    @pytest.mark.parametrize("offset_s", [0.0, 0.0001, 0.0123456])
    @pytest.mark.parametrize("packet_bytes", [1440, 1428, 700])
    def test_a_saturating_sender_has_exactly_these(self, offset_s: float, packet_bytes: int) -> None:
        start_s = 1000.0 + offset_s
        packet_s = packet_bytes * 8 / self.RATE_BPS
        deadline_s = start_s + 800 * packet_s + self.OWD_S
        log, arrived = self.log(start_s, packet_bytes, deadline_s)
        lost = opportunities(log, start_s=start_s, deadline_s=deadline_s, owd_s=self.OWD_S, packet_s=packet_s)
        assert len(lost) == 800
        assert np.count_nonzero(~lost) == arrived

    def test_a_slot_is_the_default_packet(self) -> None:
        log, _ = self.log(1000.0, 1440, 1001.0)
        lost = opportunities(log, start_s=1000.0, deadline_s=1000.0 + 0.010 + 10.5 * self.SLOT_S, owd_s=0.010)
        assert lost.tolist() == log.losses[:10].tolist()

    def test_no_time(self) -> None:
        log, _ = self.log(1000.0, 1440, 1001.0)
        assert len(opportunities(log, start_s=1000.0, deadline_s=1000.005, owd_s=0.010)) == 0

    def test_refuses_what_the_log_does_not_hold(self) -> None:
        log, _ = self.log(1000.0, 1440, 1001.0)
        with pytest.raises(ValueError, match="begins"):
            opportunities(log, start_s=999.9, deadline_s=1000.5, owd_s=0.010)
        with pytest.raises(ValueError, match="is needed"):
            opportunities(log, start_s=1000.0, deadline_s=1010.0, owd_s=0.010)
        packet_log = SlotLog(1000.0, None, 1, np.array([True]), np.array([True]))
        with pytest.raises(ValueError, match="packet clock"):
            opportunities(packet_log, start_s=1000.0, deadline_s=1001.0, owd_s=0.010)
