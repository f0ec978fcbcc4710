"""The fast path of receiving: packets of symbols are opened and parsed by the batch.

A packet goes this way only when nothing about it can surprise: known address and connection id, an established
connection, the present key, and a payload of SOURCE, REPAIR and PADDING frames without a fault. It is then entered in
aioquic's books exactly as aioquic would have done, and its symbols are handed to the extension together with those of
its neighbours. Any other packet is left untouched for aioquic, which decrypts it itself and judges it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from aioquic import tls
from aioquic.quic.connection import NetworkAddress, QuicConnectionState
from aioquic.quic.recovery import MAX_ACK_RANGES

from quic_pfec.quic._fast import Opener, PacketWindow
from quic_pfec.quic.fast_send import FastSendConnection, RunKey, run_key
from quic_pfec.wire.frames import REPAIR, SOURCE

__all__ = ["FastReceiveConnection"]


class FastReceiveConnection(FastSendConnection):
    """Also sends fast. Off with `fast_path=False`, and for an extension without `symbol_limits`."""

    def setup(self, **options: Any) -> None:
        super().setup(**options)
        self.fast_packets_received = 0
        self._opener: Opener | None = None
        self._opener_cid = b""
        self._receive_key: RunKey | None = None
        self._receive_aead: object = None

    def receive_datagram(self, data: bytes, addr: NetworkAddress, now: float) -> None:
        self.receive_datagrams((data,), addr, now)

    def receive_datagrams(self, datagrams: Sequence[bytes | memoryview], addr: NetworkAddress, now: float) -> None:
        self._now = now
        index, loaded = 0, False
        while index < len(datagrams):
            key = self._key_to_open(addr)
            opener = self._opener
            if key is not None and opener is not None:
                if not loaded or self._opener_cid != self.host_cid:
                    self._opener_cid = self.host_cid
                    opener.load(datagrams, self.host_cid, key.mask)
                    loaded = True
                pair = self._cryptos[tls.Epoch.ONE_RTT]
                space = self._spaces[tls.Epoch.ONE_RTT]
                window = cast(PacketWindow, space.received_packets)
                index = opener.open(index, key.crypt, key.iv, pair.recv.key_phase, window, space.expected_packet_number)
                if opener.numbers:
                    self._record(opener, now)
                    self._hand_out(opener, now)
                if index == len(datagrams):
                    break
            super().receive_datagram(bytes(datagrams[index]), addr, now)
            index += 1
        if loaded and self._opener is not None:
            self._opener.release()

    def _key_to_open(self, addr: NetworkAddress) -> RunKey | None:
        """The key for packets from `addr`, None when aioquic must look at each."""
        if (
            not self.fast_path
            or not self._handshake_confirmed
            or not self._extension_on
            or self._close_pending
            or self._state is not QuicConnectionState.CONNECTED
            or self._quic_logger is not None
        ):
            return None
        path = self._network_paths[0]
        if not path.is_validated or path.addr != addr:
            return None
        if not self._is_client and self._cryptos[tls.Epoch.ZERO_RTT].recv.is_valid():
            return None  # aioquic drops these keys with the first 1-RTT packet that it sees itself
        if self._opener is None:
            limits = self.symbol_limits()
            if limits is None:
                return None
            self._opener = Opener(limits.max_symbols, limits.max_symbol_size, limits.max_degree, limits.max_window)
        context = self._cryptos[tls.Epoch.ONE_RTT].recv
        if context.aead is not self._receive_aead:
            self._receive_aead = context.aead
            self._receive_key = run_key(context, sending=False)
        return self._receive_key

    def _record(self, opener: Opener, now: float) -> None:
        """What `receive_datagram` of aioquic notes of a packet, for all of them."""
        space = self._spaces[tls.Epoch.ONE_RTT]
        space.expected_packet_number = opener.expected
        if opener.largest > self._spin_highest_pn:
            self._spin_highest_pn = opener.largest
            self._spin_bit = opener.spin != self._is_client
        self._close_at = now + self._idle_timeout()
        self._ack_eliciting_sent_since_receipt = False
        if opener.largest > space.largest_received_packet:
            space.largest_received_packet = opener.largest
            space.largest_received_time = now
        for start, stop in opener.numbers:
            space.ack_queue.add(start, stop)
            if len(space.ack_queue) > MAX_ACK_RANGES:
                space.ack_queue.shift()
            self.fast_packets_received += stop - start
        if space.ack_at is None:
            space.ack_at = now + self._ack_delay

    def _hand_out(self, opener: Opener, now: float) -> None:
        for transfer_id, packets in opener.groups.items():
            try:
                self.symbols_received(transfer_id, packets, now)
            except Exception as exc:
                frame_type = SOURCE if any(len(packet) == 2 for packet in packets) else REPAIR
                reason = self._close_reason(exc, frame_type)
                self._logger.warning(reason)
                self.close(reason.error_code, reason.frame_type, reason.reason_phrase)
                return
