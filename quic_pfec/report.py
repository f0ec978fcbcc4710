"""What `send_kv` returns: how much arrived, what it cost, what held it back, and the text that came of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

LimitedBy = Literal["nothing", "deadline", "congestion_control", "credit", "cpu"]

HINTS: dict[LimitedBy, str] = {
    "nothing": "everything arrived before the deadline",
    "deadline": "the link had no room for more: a later deadline, a narrower wire dtype or a faster link would help",
    "congestion_control": "the congestion controller held the sender back: on a path known to lose packets pass its "
    "rate (rate=), or lossy=True where that is unknown; where a rate is set, a lower one",
    "credit": "the receiver granted no more symbols in time",
    "cpu": "this machine could not build packets as fast as the link takes them",
}


@dataclass(frozen=True, slots=True)
class Symbols:
    """Packets of one hand-off. `lost`: declared lost by QUIC; useless repairs told the receiver nothing."""

    total: int
    source: int = 0
    repair: int = 0
    resent: int = 0
    lost: int = 0
    recovered: int = 0
    repairs_useful: int = 0
    repairs_useless: int = 0
    repairs_late: int = 0


@dataclass(slots=True, eq=False)
class KVReport:
    """One hand-off as its sender knows it.

    handle: names the cache at the receiver (0 = unknown). confirmed: False if no report came by deadline + 3 PTO; the
    numbers of units are then unknown (zero). extension: "on", or "off" where the hand-off went over a plain stream.
    j_block, j_frac: utility of complete units, and weighted by what is there of each, in [0, 1]. unit_share: float64
    [layers, columns], in the progressive form [2 * layers, columns], refinements below, which count as units.
    deadline_s, frozen_s, decode_started_s: seconds since the call, by the receiver's account.
    recovered_verified: whether every symbol that the receiver decoded is bit-equal to the one sent (None = not known).
    started_clock_s, first_packet_clock_s: our monotonic clock. frozen_clock_s, decode_clock_s: the receiver's own
    monotonic clock, comparable with ours only on one host. missing: what was asked for about holes. missing_used: what
    was done, known once decoding began: "mask" in the place of "recompute" where the receiver had no time for it.
    wire_dtype: what the cache travelled as. late: what becomes of units after the freeze: "patch" where that was asked
    for and the peer knows it. patched_before: (step, units) patched in before that pass of the model, counted from the
    one over the prompt; None until the text has ended, and where the receiver granted no late repair. All other figures
    are those of the freeze: packets and bytes of late repair are not among them.
    congestion_control: the controller that ran; loss_threshold: the share of losses in a round trip that `bbr` bore,
    0.02 as in its draft unless the path was declared lossy.
    """

    handle: int
    confirmed: bool
    extension: Literal["on", "off"]
    scheduler: str
    j_block: float
    j_frac: float
    units_complete: int
    units_partial: int
    units_missing: int
    units_corrupt: int
    unit_share: NDArray[np.float64]
    symbols: Symbols
    bytes_sent: int
    deadline_s: float
    frozen_s: float | None
    limited_by: LimitedBy
    started_clock_s: float
    first_packet_clock_s: float | None = None
    recovered_verified: bool | None = None
    frozen_clock_s: float | None = None
    decode_started_s: float | None = None
    decode_clock_s: float | None = None
    missing: str = "mask"
    wire_dtype: str = ""
    missing_used: str | None = None
    late: Literal["drop", "patch"] = "drop"
    patched_before: tuple[tuple[int, int], ...] | None = None
    scores: tuple[int, ...] = ()
    finish_reason: str = ""
    congestion_control: str = ""
    loss_threshold: float | None = None
    text: AsyncIterator[str] = field(repr=False, default_factory=lambda: _no_text())

    @property
    def hint(self) -> str:
        """One line on what held the hand-off back."""
        hint = HINTS[self.limited_by]
        return hint.replace(", a narrower wire dtype", "") if self.wire_dtype == "progressive" else hint

    @property
    def patched(self) -> int | None:
        """Units that late repair brought into the cache; None as `patched_before`."""
        return None if self.patched_before is None else sum(units for _, units in self.patched_before)

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        symbols = self.symbols
        return {
            "confirmed": self.confirmed,
            "extension": self.extension,
            "scheduler": self.scheduler,
            "j_block": self.j_block,
            "j_frac": self.j_frac,
            "blocks_complete": self.units_complete,
            "blocks_partial": self.units_partial,
            "blocks_missing": self.units_missing,
            "blocks_corrupt": self.units_corrupt,
            "blocks_total": self.units_complete + self.units_partial + self.units_missing,
            "symbols": symbols.total,
            "source": symbols.source,
            "repair": symbols.repair,
            "resent": symbols.resent,
            "lost": symbols.lost,
            "recovered": symbols.recovered,
            "repairs_useful": symbols.repairs_useful,
            "repairs_useless": symbols.repairs_useless,
            "repairs_late": symbols.repairs_late,
            "bytes_sent": self.bytes_sent,
            "deadline_s": self.deadline_s,
            "frozen_s": self.frozen_s,
            "decode_started_s": self.decode_started_s,
            "missing": self.missing,
            "missing_used": self.missing_used,
            "late": self.late,
            "patched": self.patched,
            "patched_before": self.patched_before,
            "wire_dtype": self.wire_dtype,
            "limited_by": self.limited_by,
            "congestion_control": self.congestion_control,
            "loss_threshold": self.loss_threshold,
        }


async def _no_text() -> AsyncIterator[str]:
    nothing: tuple[str, ...] = ()
    for part in nothing:
        yield part
