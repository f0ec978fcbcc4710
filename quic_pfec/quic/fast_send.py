"""The fast path of sending: frames of the extension leave in runs of packets that are sealed together.

aioquic builds one packet at a time from Python objects, 15 to 50 us each. Here it first sends what it must (handshake,
acknowledgements, feedback, streams, probes), then the packets that hold one frame of ours and nothing else are built,
sealed and registered in its loss recovery by the run. The bytes and the books are the same as if aioquic had built
them, and whenever anything out of the ordinary is under way it does build them. aioquic is not even asked when it has
nothing to say: an empty answer costs as much as a packet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from aioquic import tls
from aioquic.quic.connection import NetworkAddress, QuicConnectionState
from aioquic.quic.crypto import CryptoContext, CryptoPair

from quic_pfec.quic._fast import seal, sent_packets
from quic_pfec.quic.adapters import FrameSource, SentSymbol
from quic_pfec.quic.compat import ExtensionConnection, SendRun
from quic_pfec.quic.extension import FrameRun
from quic_pfec.wire.errors import LocalError

__all__ = ["MAX_RUN", "FastSendConnection", "RunKey", "run_key"]

MAX_RUN = 44
"""Packets in a run: of 1,452 bytes each they stay below 64 KiB, the most that one system call takes."""
TAG_BYTES = 16
SPIN_SHIFT, KEY_PHASE_SHIFT, FIRST_BYTE = 5, 2, 0x41  # fixed bit, packet number of two bytes (RFC 9000 §17.3.1)


@dataclass(frozen=True, slots=True)
class RunKey:
    """What protects one direction: the AEAD's function, its IV, and the header protection of whole batches."""

    crypt: Callable[[bytes, Any, bytes], bytes]
    iv: bytes
    mask: Callable[[bytes], bytes]


def run_key(context: CryptoContext, *, sending: bool) -> RunKey | None:
    """The present key of a direction; None for ChaCha20, whose masks cannot be made by the batch."""
    aead, hp = context.aead, context.hp
    if aead is None or hp is None or hp._is_chacha20:
        return None
    crypt = aead._aead.encrypt if sending else aead._aead.decrypt
    return RunKey(cast(Any, crypt), aead._iv.to_bytes(12, "big"), hp._encryptor.update)


class FastSendConnection(ExtensionConnection):
    """`fast_path=False`, an option of the constructor, leaves everything to aioquic."""

    pacing_tick_s = 0.0
    """Whoever waits for the pacer waits at least this long: packets then leave in bursts, as the pacer's own depth and
    catch-up allow, and wake-ups stay few. Real endpoints use a millisecond."""

    def setup(self, *, fast_path: bool = True, **options: Any) -> None:
        super().setup(**options)
        self.fast_path = fast_path
        self.fast_packets_sent = 0
        self.quiet_turns = 0
        """How often aioquic was not asked, because it had nothing to send."""
        self._burst_at: float | None = None  # until then whoever waits for the pacer sends nothing
        self._send_key: RunKey | None = None
        self._send_aead: object = None
        self._plain = bytearray()
        self._wire = bytearray()

    # ---- one turn ----------------------------------------------------------------------------------------------------

    def datagrams_to_send(self, now: float) -> list[tuple[bytes, NetworkAddress]]:
        datagrams: list[tuple[bytes, NetworkAddress]] = []

        def collect(data: bytes | memoryview, size: int, addr: NetworkAddress) -> None:
            datagrams.extend((bytes(data[start : start + size]), addr) for start in range(0, len(data), size))

        self.send_runs(now, collect)
        return datagrams

    def send_runs(self, now: float, send: SendRun) -> None:
        self._begin_sending(now)
        key = self._run_key()
        self._frames_held = key is not None and self._wants_run()
        try:
            if key is None or (not self._frames_held and self._wants_packet()) or self._aioquic_has_something(now):
                for data, addr in self._built_by_aioquic(now):
                    send(data, len(data), addr)
            else:
                self.quiet_turns += 1
                self._pacing_at = None
            if self._burst_at is not None and now < self._burst_at:
                # An acknowledgement came in between: half a burst now would cost both ends a wake-up more.
                self._pacing_at = self._burst_at if self._frames_held else self._pacing_at
            elif self._frames_held and key is not None and self._can_run():
                try:
                    self._send_own(now, key, send)
                except Exception as exc:
                    self._contain(exc)
        finally:
            self._frames_held = False
        if self._close_pending:  # a bug of ours showed while the packets were built
            for data, addr in self._built_by_aioquic(now):
                send(data, len(data), addr)
        if self._pacing_at is None or self._own_pacer is None:
            self._burst_at = None
        elif self._burst_at is None or now >= self._burst_at:
            self._burst_at = now + self.pacing_tick_s
            self._pacing_at = max(self._pacing_at, self._burst_at)
        self._end_sending()

    def _run_key(self) -> RunKey | None:
        """The key for runs, None when aioquic must build every packet."""
        if not (self.fast_path and self._handshake_confirmed and self._can_run()) or self._quic_logger is not None:
            return None
        pair: CryptoPair = self._cryptos[tls.Epoch.ONE_RTT]
        if pair._update_key_requested:  # the phase shows the new key already, the secret is still the old one
            return None
        if pair.send.aead is not self._send_aead:  # an update replaces the object
            self._send_aead = pair.send.aead
            self._send_key = run_key(pair.send, sending=True)
        return self._send_key

    def _can_run(self) -> bool:
        return (
            not self._close_pending
            and self._state is QuicConnectionState.CONNECTED
            and self._network_paths[0].is_validated
        )

    def _wants_run(self) -> bool:
        if not self._extension_on:
            return False
        try:
            return self.fills_packets(self.frame_space) and self.has_frame(self._now)
        except Exception as exc:
            self._contain(exc)
            return False

    def _aioquic_has_something(self, now: float) -> bool:
        """Whether it could send anything but frames of ours; it asks itself the same in `_write_application`."""
        if self._close_pending or len(self._network_paths) > 1 or self._remote_preferred_address is not None:
            return True
        path = self._network_paths[0]
        space = self._spaces[tls.Epoch.ONE_RTT]
        if (
            (space.ack_at is not None and space.ack_at <= now)
            or self._probe_pending
            or self._ping_pending
            or self._handshake_done_pending
            or self._retire_connection_ids
            or self._streams_blocked_pending
            or path.remote_challenges
            or len(cast(FrameSource, self._datagrams_pending))
            or not self._crypto_streams[tls.Epoch.ONE_RTT].sender.buffer_is_empty
            or any(not connection_id.was_sent for connection_id in self._host_cids)
        ):
            return True
        if self._wants_feedback():
            return True
        data = self._local_max_data
        if data.used * 2 > data.value or data.value != data.sent:
            return True
        for limit in (self._local_max_streams_bidi, self._local_max_streams_uni):
            if limit.value != limit.sent and limit.sent - limit.used < limit.value - limit.sent:
                return True
        for stream in self._streams.values():
            local = stream.max_stream_data_local
            if stream.max_stream_data_local_sent != local or (local and stream.receiver.highest_offset * 2 > local):
                return True
        for stream in self._streams_queue:
            sender = stream.sender
            if stream.is_finished or stream.receiver.stop_pending or sender.reset_pending:
                return True
            if not stream.is_blocked and not sender.buffer_is_empty:
                return True
        return False

    # ---- runs --------------------------------------------------------------------------------------------------------

    def _send_own(self, now: float, key: RunKey, send: SendRun) -> None:
        if self._stream_share():
            return  # they were given their share, and now window or pacer holds both back
        path = self._network_paths[0]
        cid = self._peer_cid.cid
        stride = self._max_datagram_size
        header = 3 + len(cid)
        if len(self._plain) < MAX_RUN * stride:
            self._plain, self._wire = bytearray(MAX_RUN * stride), bytearray(MAX_RUN * stride)
        while self.has_frame(now):
            packets, space = self._allowance(now)
            if not packets:
                break
            run = self.next_run(now, packets, space, self._plain, stride, header)
            if run is None or not run.lengths:
                self._settle(now, [])
                # Less than a packet's worth of window, and the frame did not fit that.
                self._cwnd_blocked |= space < self.frame_space
                break
            if max(run.lengths) > space or len(run.lengths) > packets:
                raise LocalError(f"a run of {run.lengths} was chosen for {packets} packets with a space of {space}")
            number = self._packet_number
            phase = self._cryptos[tls.Epoch.ONE_RTT].key_phase
            first = FIRST_BYTE | self._spin_bit << SPIN_SHIFT | phase << KEY_PHASE_SHIFT
            sizes = seal(
                key.crypt, key.iv, key.mask, self._plain, stride, run.lengths, cid, first, number, self._wire, 0
            )
            self._register(now, sizes, run)
            path.bytes_sent += sum(sizes)
            self._settle(now, sizes)
            self._send_sizes(sizes, path.addr, send)
        else:  # more may have been asked of the pacer than there was to send
            self._pacing_at = (self._own_pacer or self._loss._pacer).next_send_time(now=now)

    def _allowance(self, now: float) -> tuple[int, int]:
        """Packets that congestion window and pacer allow now, and the room of a frame in each; 0 packets: none.

        An own pacer is charged a full packet for each; `_settle` then charges what they really had.
        """
        pacer = self._own_pacer
        window = self.cwnd - self.bytes_in_flight
        most, space = window // self._max_datagram_size, self.frame_space
        if most <= 0:
            most, space = 1, space - (self._max_datagram_size - window)
        if pacer is None:
            self._pacing_at = self._loss._pacer.next_send_time(now=now)
            packets = int(self._pacing_at is None)
        else:
            most = min(most, MAX_RUN)
            packets = pacer.take(now, most)
            self._pacing_at = pacer.next_send_time(now) if packets < most else None
        if packets and space < self.smallest_frame:
            self._cwnd_blocked = True
            self._settle(now, [])
            return 0, 0
        return packets, space

    def _settle(self, now: float, sizes: list[int]) -> None:
        if self._own_pacer is not None:
            self._own_pacer.settle(now, sizes)
        elif sizes:
            self._loss._pacer.update_after_send(now=now)

    def _register(self, now: float, sizes: list[int], run: FrameRun) -> None:
        packets = sent_packets(SentSymbol, self._packet_number, sizes, run.tokens, self._on_extension_delivery, now)
        self._packet_number += len(packets)
        self._recovery.on_run_sent(packets=packets, now=now, space=self._spaces[tls.Epoch.ONE_RTT])
        if not self._ack_eliciting_sent_since_receipt:  # RFC 9000 §10.1
            self._close_at = now + self._idle_timeout()
            self._ack_eliciting_sent_since_receipt = True
        self._extension_packet = self._packet_number - 1
        self._stream_run = 0
        self.fast_packets_sent += len(packets)

    def _send_sizes(self, sizes: list[int], addr: NetworkAddress, send: SendRun) -> None:
        """Cuts the sealed packets into runs of one size, of which the last may be shorter."""
        wire = memoryview(self._wire)
        start = index = 0
        while index < len(sizes):
            size = sizes[index]
            stop = start
            while index < len(sizes) and sizes[index] == size:
                stop += size
                index += 1
            if index < len(sizes) and sizes[index] < size:
                stop += sizes[index]
                index += 1
            send(wire[start:stop], size, addr)
            start = stop
