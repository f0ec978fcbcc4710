"""Incomplete units of an incoming hand-off: filed ahead of its freeze, so that little is left to do when it comes.

A unit that has been filed is filed again if more of it came since. Only what a poisoned repair may have brought is not
filed before the freeze, because it may have to be taken back.
"""

from __future__ import annotations

import asyncio

from quic_pfec.kv.assemble import Assembler
from quic_pfec.transfer.receiver import Receiver

SETTLE_S = 0.05  # before the deadline, incomplete units are filed as they are; what still comes replaces them
SETTLE_UNITS = 8  # at a time: about 0.3 ms of the event loop

Part = tuple[int, bytes, list[tuple[int, int]]]
"""A unit, its bytes with zeros where nothing came, and the byte ranges that came."""


class PartialUnits:
    """Files what `receiver` has of incomplete units in `assembler`; `whole_rows`: as `Assembler.write_partial` has it.

    Begins shortly before the deadline, which is `remaining_s` away, on the running event loop.
    """

    def __init__(self, receiver: Receiver, assembler: Assembler, remaining_s: float, *, whole_rows: bool) -> None:
        self._receiver = receiver
        self._assembler = assembler
        self._whole_rows = whole_rows
        self._filed: dict[int, int] = {}  # fragments that were there
        self._timer = asyncio.get_running_loop().call_later(remaining_s - SETTLE_S, self._settle)

    def stop(self) -> None:
        """Files nothing more. Idempotent."""
        self._timer.cancel()

    def left(self) -> list[Part]:
        """At the freeze: what is still to be filed."""
        receiver = self._receiver
        if not receiver.stats.contradictions:
            return receiver.partial_units(self._filed)
        partial = receiver.partial_units()
        gone = set(self._filed) - {unit for unit, _, _ in partial}
        return partial + [(unit, bytes(self._assembler.layout.unit_nbytes(unit)), []) for unit in sorted(gone)]

    def _settle(self) -> None:
        receiver = self._receiver
        if receiver.units is None or receiver.stats.contradictions:
            return
        some = receiver.partial_units(self._filed, SETTLE_UNITS)
        for unit, data, ranges in some:
            self._assembler.write_partial(unit, data, ranges, whole_rows=self._whole_rows)
            self._filed[unit] = receiver.units.present(unit)
        pause_s = 0.0 if some else SETTLE_S / 10
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._settle)
