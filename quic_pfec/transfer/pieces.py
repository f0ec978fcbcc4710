"""What frames bring, in the form the receiver works with.

Symbols as the codec takes them, and the manifest put together from fragments of any of its copies, which must all be
equal (docs/wire.md §6).
"""

from __future__ import annotations

from typing import Any

from quic_pfec.wire.errors import AppCode, PeerError
from quic_pfec.wire.frames import ManifestFrame, SourceFrame

__all__ = ["ManifestPieces", "as_packet"]


def as_packet(frame: Any) -> tuple[Any, ...]:
    """A SourceFrame or RepairFrame as the codec takes it; see `Receiver.receive_symbols`."""
    if isinstance(frame, SourceFrame):
        return frame.sid, frame.symbol
    header = frame.header
    return (
        header.transfer_id, header.repair_number, header.first_sid, header.degree, header.head_span, header.head,
        header.tail_offset, header.tail_span, frame.symbol,
    )  # fmt: skip


class ManifestPieces:
    """`done` once every byte is here; `data` is the manifest then."""

    def __init__(self) -> None:
        self.done = False
        self._bytes = bytearray()
        self._missing: list[tuple[int, int]] | None = None

    @property
    def data(self) -> bytes:
        return bytes(self._bytes)

    def add(self, frame: ManifestFrame, max_pieces: int) -> bool:
        """Take one fragment; True when it completed the manifest. Raises PeerError for a copy that differs.

        Its length was checked against the limit by the parser of the frame.
        """
        if self._missing is None:
            self._bytes = bytearray(frame.total_length)
            self._missing = [(0, frame.total_length)]
        if frame.total_length != len(self._bytes):
            raise PeerError(AppCode.KV_MANIFEST, "copies of the manifest differ in length", application=True)
        start, stop = frame.offset, frame.offset + len(frame.data)
        still: list[tuple[int, int]] = []
        position = start
        for low, high in self._missing:
            if high <= start or low >= stop:
                still.append((low, high))
                continue
            if low < start:
                still.append((low, start))
            if high > stop:
                still.append((stop, high))
            self._match(frame, position, low)
            cut = slice(max(low, start), min(high, stop))
            self._bytes[cut] = frame.data[cut.start - start : cut.stop - start]
            position = cut.stop
        self._match(frame, position, stop)
        # A hostile peer can punch at most total/1 holes; cap what we remember of them.
        if len(still) > max_pieces:
            raise PeerError(AppCode.KV_MANIFEST, "manifest in too many pieces", application=True)
        self._missing = still
        if still or self.done:
            return False
        self.done = True
        return True

    def _match(self, frame: ManifestFrame, start: int, stop: int) -> None:
        """Bytes that came before must be the same again."""
        stop = min(stop, frame.offset + len(frame.data))
        if start < stop:
            again = frame.data[start - frame.offset : stop - frame.offset]
            if self._bytes[start:stop] != again:
                raise PeerError(AppCode.KV_MANIFEST, "copies of the manifest differ", application=True)
