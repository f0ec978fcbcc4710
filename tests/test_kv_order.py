"""quic_pfec.kv.order: permutations, ties, and the two scores."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.kv.layout import LayerShape, Layout
from quic_pfec.kv.order import BASE_SHARE, ORDERS, check_utility, order_units, spread_utility
from quic_pfec.wire.errors import LocalError


def layout_of(layers: int, columns: int) -> Layout:
    return Layout((LayerShape(1, 2),) * layers, tokens=16 * columns - 5)


@settings(max_examples=60, deadline=None)
@given(layers=st.integers(1, 8), columns=st.integers(1, 12), seed=st.integers(0, 2**32 - 1), levels=st.integers(1, 5))
def test_orders_are_permutations_and_utility_descends(layers: int, columns: int, seed: int, levels: int) -> None:
    layout = layout_of(layers, columns)
    # Few distinct levels: many ties.
    utility = np.random.default_rng(seed).integers(1, levels + 1, layout.unit_count).astype(np.float64)
    for order in ORDERS:
        permutation = order_units(layout, order, utility)
        assert permutation.dtype == np.int32
        assert sorted(permutation.tolist()) == list(range(layout.unit_count))
    sent = [
        (-utility[unit], unit % columns, unit // columns) for unit in order_units(layout, "utility", utility).tolist()
    ]
    assert sent == sorted(sent)


def test_the_three_orders_by_hand() -> None:
    layout = layout_of(2, 3)  # units 0 1 2 of layer 0, 3 4 5 of layer 1
    assert order_units(layout, "fifo").tolist() == [0, 1, 2, 3, 4, 5]
    assert order_units(layout, "prefix").tolist() == [0, 3, 1, 4, 2, 5]
    utility = np.array([1.0, 5.0, 1.0, 1.0, 5.0, 9.0])
    assert order_units(layout, "utility", utility).tolist() == [5, 1, 4, 0, 3, 2]
    assert order_units(layout, "utility", np.ones(6)).tolist() == order_units(layout, "prefix").tolist()


@pytest.mark.parametrize(
    ("utility", "reason"),
    [
        (None, "needs a utility"),
        (np.ones(5), "there are 6 units"),
        (np.ones((2, 3)), "there are 6 units"),
        (np.zeros(6), "zero everywhere"),
        (np.array([1, 1, 1, 1, 1, -1e-9]), "not negative"),
        (np.array([1, 1, 1, 1, 1, np.nan]), "finite"),
        (np.array([1, 1, 1, 1, 1, np.inf]), "finite"),
    ],
)
def test_utility_that_cannot_order(utility: np.ndarray | None, reason: str) -> None:
    with pytest.raises(LocalError, match=reason):
        order_units(layout_of(2, 3), "utility", utility)
    if utility is not None:
        with pytest.raises(LocalError, match=reason):
            check_utility(layout_of(2, 3), utility)


def test_unknown_order() -> None:
    with pytest.raises(LocalError, match=r"unknown order 'lifo', expected one of utility, prefix, fifo"):
        order_units(layout_of(1, 1), "lifo")


def test_refinements_go_by_utility_per_byte() -> None:
    layout = Layout((LayerShape(3, 64),) * 2, 40, wire_dtype="progressive")
    blocks = layout.block_count
    utility = np.array([1.0, 2.0, 1e-3, 4.0, 2.0, 3.0])
    spread = spread_utility(layout, utility)
    assert spread.shape == (2 * blocks,)
    assert spread.sum() == pytest.approx(utility.sum())
    assert np.allclose(spread[:blocks], BASE_SHARE * utility)
    sizes = layout.unit_sizes()
    order = order_units(layout, "utility", utility).tolist()
    assert (np.diff((spread / sizes)[order]) <= 0).all()
    # The base of a block with hardly any utility comes behind the refinements of the others; all other bases before.
    assert set(order[:5]) == set(range(6)) - {2}
    assert order.index(2) > order.index(6 + 3)
    assert order_units(layout, "fifo").tolist() == list(range(12))
    assert order_units(layout, "prefix").tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    plain = Layout(layout.layers, 40)
    assert spread_utility(plain, utility) is utility
