"""The wire dtype "auto": all of the cache as it is where there is time for that, else in two precisions.

With time enough nothing is worth rounding for; without it the progressive form lets what does not fit cost precision
first, and blocks only when not even the bases fit. Which of the two it is depends on deadline and rate, so it is
decided when a hand-off begins and not when a cache is prepared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from quic_pfec.kv.layout import Layout

__all__ = ["AUTO", "WireChoice", "choose_wire_dtype", "weigh"]

AUTO: Final = "auto"


class _Path(Protocol):
    @property
    def slot_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class WireChoice:
    """What "auto" chose, and on what grounds.

    `needed_s`: seconds that all of it takes in bf16, the lost packets twice; `remaining_s`: seconds there are; `loss`:
    share of packets that the path is expected to lose, 0..1.
    """

    wire_dtype: str
    needed_s: float
    remaining_s: float
    loss: float

    @property
    def reason(self) -> str:
        """The grounds in a line."""
        kept = "that fits" if self.wire_dtype == "bf16" else "that does not fit"
        return (
            f"bf16 needs {self.needed_s:.3g} s of the {max(0.0, self.remaining_s):.3g} s that are left,"
            f" with {self.loss:.0%} lost: {kept}"
        )


def weigh(layout: Layout, path: Callable[[int], _Path], remaining_s: float, loss: float) -> WireChoice:
    """ "bf16" if all symbols of it can be sent, the lost ones twice, in `remaining_s`; else "progressive".

    path: by symbol size in bytes, its `slot_s` is the seconds that a packet with one symbol takes. remaining_s: until
    the last packet must have left. loss: share of packets that the path is expected to lose, 0..1.
    """
    plain = replace(layout, wire_dtype="bf16")
    size = plain.symbol_size()
    needed_s = plain.symbols(size) * path(size).slot_s * (1 + loss)
    return WireChoice("bf16" if needed_s <= remaining_s else "progressive", needed_s, remaining_s, loss)


def choose_wire_dtype(layout: Layout, path: Callable[[int], _Path], remaining_s: float, loss: float) -> str:
    """The wire dtype that `weigh` chooses."""
    return weigh(layout, path, remaining_s, loss).wire_dtype
