"""The size of datagrams, found downwards: large until the path is seen to swallow large ones.

A path with a smaller MTU and no word of it (ICMP is often filtered) takes handshakes and acknowledgements and loses
every full packet: a black hole. aioquic looks for none. Here handshakes have the size that every path must carry, and
what follows is large at once, since a hand-off has no time to feel its way up. The size falls, once and for good, when
large packets alone are lost, again and again, with small ones sent later acknowledged each time. An outage takes small
ones too, and after random loss a large one is acknowledged: either starts the count anew.
"""

from __future__ import annotations

__all__ = ["FLOOR", "PathSize"]

FLOOR = 1200
"""UDP payload that every path of QUIC carries (RFC 9000 §14)."""
ROUNDS = 3  # times that large ones were lost and a small one that was sent later arrived
MISSES = 8  # large ones lost meanwhile: at a loss of 20 % without a reason, 3 in a million


class PathSize:
    """Counts what became of the packets of one path, by packet number; `most` bytes to begin with. Pure."""

    def __init__(self, most: int) -> None:
        self.size = most
        self.missed = 0
        """Large packets given up since one was acknowledged."""
        self._newest_missed = -1
        self._rounds = 0
        self._round_ended = -1  # the small packet that did

    def is_large(self, size: int) -> bool:
        """Whether a datagram of so many bytes would have to be smaller on the smallest of paths."""
        return size > FLOOR

    def size_now(self, probe_timeouts: int) -> int:
        """What the next datagrams may have, after so many probe timeouts in a row: small ones find out the cause."""
        patience = 1 if self._rounds else 2
        return FLOOR if self.missed and probe_timeouts >= patience else self.size

    def on_lost(self, number: int) -> None:
        """A large packet was given up, by loss detection or to probe with its content."""
        if self.size > FLOOR:
            self.missed += 1
            self._newest_missed = max(self._newest_missed, number)

    def on_acked(self, largest: int, large: bool) -> bool:
        """An acknowledgement came, after the losses that it implies; `large`: of a large packet among others.

        True: the size has fallen just now.
        """
        if large:
            self.missed = self._rounds = 0
            self._newest_missed = -1
            return False
        if not largest > self._newest_missed > self._round_ended:
            return False
        self._rounds += 1
        self._round_ended = largest
        if self._rounds < ROUNDS or self.missed < MISSES:
            return False
        self.size = FLOOR
        self.missed = 0
        return True
