"""Order of sending: which unit goes first.

The order is the whole point of a partial hand-off: what is sent first has the most chances to be repaired or resent
before the deadline. It is decided once, before the clock starts, as a permutation of unit ids.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from quic_pfec.kv.layout import Layout
from quic_pfec.wire.errors import LocalError

__all__ = [
    "BASE_SHARE",
    "ORDERS",
    "Order",
    "check_utility",
    "order_units",
    "spread_utility",
]

Order = Literal["utility", "prefix", "fifo"]
ORDERS: Final[tuple[str, ...]] = get_args(Order)


BASE_SHARE: Final = 0.996
"""Of a block's utility, what its base layer is worth; its refinement has the rest (docs/decisions.md)."""


def check_utility(layout: Layout, utility: npt.NDArray[np.float64]) -> None:
    """Raise LocalError unless `utility` has one finite value >= 0 per block, and not only zeros."""
    if utility.shape != (layout.block_count,):
        raise LocalError(f"utility has shape {list(utility.shape)}, there are {layout.block_count} units")
    if not np.isfinite(utility).all() or (utility < 0).any():
        raise LocalError("utility must be finite and not negative")
    if not utility.any():
        raise LocalError("utility is zero everywhere")


def spread_utility(layout: Layout, utility: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Utility of every unit, float64 [unit_count], of that of every block, float64 [block_count]; same sum.

    Where a block makes two units the base is worth BASE_SHARE of it.
    """
    if len(layout.forms) == 1:
        return utility
    return np.concatenate([utility * BASE_SHARE, utility * (1 - BASE_SHARE)])


def order_units(layout: Layout, order: str, utility: npt.NDArray[np.float64] | None = None) -> npt.NDArray[np.int32]:
    """Permutation of unit ids in the order of sending, int32 [unit_count].

    - `utility`: descending `utility` (float64 [block_count] by block, required). Equal values go column by column,
      then by layer, so that a token column is finished before the next one is begun. Where blocks have refinements,
      bases and refinements are interleaved by utility per byte.
    - `prefix`: column by column from the first token, all layers of a column adjacent; for receivers that can use
      only a valid prefix.
    - `fifo`: layer by layer as the cache lies in memory; the baseline.

    In the last two all refinements come behind all bases.

    Raises LocalError for an unknown order and for a missing or malformed utility.
    """
    columns, count = layout.columns, layout.unit_count
    if order == "fifo":
        return np.arange(count, dtype=np.int32)
    if order == "prefix":
        by_column = np.arange(count, dtype=np.int32).reshape(len(layout.forms), -1, columns).transpose(0, 2, 1)
        return by_column.reshape(-1)
    if order != "utility":
        raise LocalError(f"unknown order {order!r}, expected one of {', '.join(ORDERS)}")
    if utility is None:
        raise LocalError("order 'utility' needs a utility for each unit")
    check_utility(layout, utility)
    worth = utility if len(layout.forms) == 1 else spread_utility(layout, utility) / layout.unit_sizes()
    layer, column = np.divmod(np.arange(count), columns)
    return np.lexsort((layer, column, -worth)).astype(np.int32)
