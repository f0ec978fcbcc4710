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
    "ORDERS",
    "Order",
    "check_utility",
    "order_units",
]

Order = Literal["utility", "prefix", "fifo"]
ORDERS: Final[tuple[str, ...]] = get_args(Order)


def check_utility(layout: Layout, utility: npt.NDArray[np.float64]) -> None:
    """Raise LocalError unless `utility` has one finite value >= 0 per unit, and not only zeros."""
    if utility.shape != (layout.unit_count,):
        raise LocalError(f"utility has shape {list(utility.shape)}, there are {layout.unit_count} units")
    if not np.isfinite(utility).all() or (utility < 0).any():
        raise LocalError("utility must be finite and not negative")
    if not utility.any():
        raise LocalError("utility is zero everywhere")


def order_units(layout: Layout, order: str, utility: npt.NDArray[np.float64] | None = None) -> npt.NDArray[np.int32]:
    """Permutation of unit ids in the order of sending, int32 [unit_count].

    - `utility`: descending `utility` (float64 [unit_count] by unit id, required). Equal values go column by column,
      then by layer, so that a token column is finished before the next one is begun.
    - `prefix`: column by column from the first token, all layers of a column adjacent; for receivers that can use
      only a valid prefix.
    - `fifo`: layer by layer as the cache lies in memory; the baseline.

    Raises LocalError for an unknown order and for a missing or malformed utility.
    """
    columns, count = layout.columns, layout.unit_count
    if order == "fifo":
        return np.arange(count, dtype=np.int32)
    if order == "prefix":
        return np.arange(count, dtype=np.int32).reshape(-1, columns).T.reshape(-1)
    if order != "utility":
        raise LocalError(f"unknown order {order!r}, expected one of {', '.join(ORDERS)}")
    if utility is None:
        raise LocalError("order 'utility' needs a utility for each unit")
    check_utility(layout, utility)
    layer, column = np.divmod(np.arange(count), columns)
    return np.lexsort((layer, column, -utility)).astype(np.int32)
