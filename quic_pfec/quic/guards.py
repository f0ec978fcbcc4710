"""The gaps of aioquic 1.7 that every connection of ours inherits, closed.

It accepts acknowledgements of packets that were never sent, drops what comes 128 packets late as a duplicate, and
never changes a key. Each of these harms a sender at line rate, and the first is an attack.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any, cast

from aioquic import tls
from aioquic.quic.connection import QuicConnectionError
from aioquic.quic.packet import QuicErrorCode, QuicFrameType
from aioquic.quic.rangeset import RangeSet

from quic_pfec.quic._fast import PacketWindow
from quic_pfec.quic.client_auth import ClientAuthConnection
from quic_pfec.wire.errors import ErrorCode

__all__ = ["GuardedConnection"]


class GuardedConnection(ClientAuthConnection):
    """Numbers it leaves out, acknowledgements it checks, keys it changes; `compat` calls these at the right moments."""

    duplicate_window_packets = 4096
    """Packets this far behind the newest are still accepted: 46 ms of reordering at 1 Gbit/s; aioquic keeps 128."""
    key_update_packets = 1 << 22
    """A key is changed after this many packets, half of the AES-GCM limit (RFC 9001 §6.6)."""
    key_limit_packets = (1 << 23) - (1 << 12)
    """With no update possible the connection closes here, short of the limit by more than a burst."""
    skip_random: random.Random = random.SystemRandom()
    """Chooses the packet numbers left out; must be unpredictable to the peer. A test may put a seeded one here."""

    def _install_guards(self) -> None:
        self._skipped: deque[int] = deque(maxlen=16)
        self._skipped_count = 0
        self._skip_gap = 64
        self._skip_at = 32 + self.skip_random.randrange(64)
        self._key_phase = 0
        self._key_first_packet = 1  # number 0 is an Initial packet's, and what aioquic takes for acknowledged at first
        self._key_update_wanted = False

    @property
    def packets_sent(self) -> int:
        return self._packet_number - self._skipped_count

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        # Symbols have their own filter of duplicates, so that the window may be wide.
        self._spaces[tls.Epoch.ONE_RTT].received_packets = cast(Any, PacketWindow(self.duplicate_window_packets))

    def _check_ack(self, acked: RangeSet) -> None:
        """Close on an acknowledgement of what was never sent (RFC 9000 §13.1, §21.4): it would open the window."""
        bounds = acked.bounds()
        if bounds.stop > self._packet_number or any(number in bounds and number in acked for number in self._skipped):
            raise QuicConnectionError(
                ErrorCode.PROTOCOL_VIOLATION, QuicFrameType.ACK, "acknowledgement of a packet that was never sent"
            )

    def _skip_packet_number(self) -> None:
        """Leave out a packet number now and then, so that an acknowledgement of everything betrays itself."""
        if not self._handshake_confirmed or self._packet_number < self._skip_at:
            return
        self._skipped.append(self._packet_number)
        self._skipped_count += 1
        self._packet_number += 1
        self._skip_gap = min(2 * self._skip_gap, 1 << 16)
        self._skip_at = self._packet_number + self._skip_gap // 2 + self.skip_random.randrange(self._skip_gap)

    def request_key_update(self) -> None:
        """Changes the key now, or as soon as the peer has acknowledged a packet of the present one (RFC 9001 §6.1)."""
        self._key_update_wanted = True
        self._watch_key()

    def _change_key(self) -> None:
        super().request_key_update()

    def _watch_key(self) -> None:
        pair = self._cryptos.get(tls.Epoch.ONE_RTT)
        if pair is None or not self._handshake_confirmed:
            return
        if pair.send.key_phase != self._key_phase:
            self._key_phase = pair.send.key_phase
            self._key_first_packet = self._packet_number
        sent = self._packet_number - self._key_first_packet
        if sent >= self.key_update_packets:
            self._key_update_wanted = True
        # Not before the peer has acknowledged a packet of the present key (RFC 9001 §6.1): of two updates at once it
        # would see neither, and the connection would be lost.
        acked = self._spaces[tls.Epoch.ONE_RTT].largest_acked_packet >= self._key_first_packet
        if self._key_update_wanted and acked and not pair._update_key_requested:
            self._key_update_wanted = False
            self._change_key()
        if sent >= self.key_limit_packets:
            self.close(QuicErrorCode.AEAD_LIMIT_REACHED, QuicFrameType.PADDING, "key used up")
