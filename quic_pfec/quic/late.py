"""Late repair as a receiving endpoint keeps it within bounds: whether it is granted, and what it holds.

A sender asks in OPEN; nothing is answered but by the feedback after the freeze, which says that symbols are still taken
(docs/wire.md section 8). What is not granted is a hand-off as any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quic_pfec.kv.assemble import Assembler
from quic_pfec.kv.late import LateUnits
from quic_pfec.transfer.late import LateReceiver
from quic_pfec.wire.manifest import Manifest, held_nbytes
from quic_pfec.wire.messages import Generate, Open

if TYPE_CHECKING:
    from quic_pfec.quic.protocol import PfecProtocol


class LateRepair:
    """The late repair of one incoming hand-off: counts its memory against the connection's `Limits.max_late_bytes`."""

    def __init__(self, protocol: PfecProtocol) -> None:
        self._protocol = protocol
        self._nbytes = 0
        self._units: LateUnits | None = None

    def grant(self, receiver: LateReceiver, opening: Open, manifest: Manifest, request: Generate | None) -> None:
        """Grants it where it was asked for, tokens will be generated, and there is room. Call it before the freeze."""
        limits = self._protocol.limits
        late_us = min(opening.late_us, limits.max_late_us)
        if self._nbytes or not late_us or opening.mode != "symbols" or request is None or not request.max_new_tokens:
            return
        # The arena, and the rows that wait to be patched, once more where blocks are refined.
        nbytes = manifest.symbols * manifest.symbol_size + 2 * held_nbytes(manifest)
        if self._protocol.late_bytes + nbytes <= limits.max_late_bytes:
            self._protocol.late_bytes += nbytes
            self._nbytes = nbytes
            receiver.allow_late(late_us / 1e6)

    def begin(self, receiver: LateReceiver | None, frozen: Assembler) -> LateUnits | None:
        """The hand-off froze: where units go from now on; None where nothing late is taken."""
        if receiver is not None and receiver.takes_late:
            self._units = LateUnits(frozen)
        else:
            self.close()
        return self._units

    def close(self) -> None:
        """Frees what is kept. Idempotent."""
        if self._units is not None:
            self._units.close()
        self._protocol.late_bytes -= self._nbytes
        self._nbytes = 0
