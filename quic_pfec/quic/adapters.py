"""Parts that take the place of aioquic's own: a queue of datagrams, loss recovery, the kinds of frames it knows.

Neither needs a private name; `compat` puts them in their places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from aioquic import tls
from aioquic.quic import connection as aioquic_connection
from aioquic.quic import packet_builder as aioquic_builder
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketRecovery, QuicPacketSpace

__all__ = ["ASK_EXTENSION", "FrameSource", "Recovery", "SentSymbol", "exempt_from_congestion_control"]


class _Marker(bytes):
    """Has an identity of its own, which `b""`, a possible datagram, has not."""


ASK_EXTENSION = _Marker()
"""What the queue of datagrams offers when it is the extension's turn."""


class FrameSource:
    """Takes the place of aioquic's queue of datagrams and is asked only when a packet is really being built.

    aioquic touches the queue by append, truth, `[0]` and popleft. Datagrams of the application come first, as in
    aioquic; behind them stands the extension, which chooses its frame when the packet exists and never earlier.
    """

    def __init__(self, wants_packet: Callable[[], bool], queued: Iterable[bytes]) -> None:
        self._wants_packet = wants_packet
        self._datagrams = deque(queued)
        self._offered: bytes = ASK_EXTENSION

    def append(self, data: bytes) -> None:
        self._datagrams.append(data)

    def __len__(self) -> int:
        return len(self._datagrams)

    def __bool__(self) -> bool:
        return bool(self._datagrams) or self._wants_packet()

    def __getitem__(self, index: int) -> bytes:
        self._offered = self._datagrams[0] if self._datagrams else ASK_EXTENSION
        return self._offered

    def popleft(self) -> None:
        if self._offered is not ASK_EXTENSION:
            self._datagrams.popleft()


class Recovery(QuicPacketRecovery):
    """aioquic's loss recovery, which sees acknowledgements first and says when a loss is only a probe."""

    check_ack: Callable[[RangeSet], None]
    settle_fates: Callable[[], None]
    """Called when a batch of delivery handlers has run."""
    expiring = False

    def on_ack_received(self, *, ack_rangeset: RangeSet, ack_delay: float, now: float, space: QuicPacketSpace) -> None:
        self.check_ack(ack_rangeset)
        super().on_ack_received(ack_rangeset=ack_rangeset, ack_delay=ack_delay, now=now, space=space)
        self.settle_fates()

    def on_loss_detection_timeout(self, *, now: float) -> None:
        super().on_loss_detection_timeout(now=now)
        self.settle_fates()

    def on_run_sent(self, *, packets: Sequence[QuicSentPacket], now: float, space: QuicPacketSpace) -> None:
        """As `on_packet_sent` for each: ack-eliciting 1-RTT packets of an established connection."""
        sent, on_packet_sent = space.sent_packets, self._cc.on_packet_sent
        for packet in packets:
            sent[packet.packet_number] = packet
            on_packet_sent(packet=packet)
        space.ack_eliciting_in_flight += len(packets)
        self._time_of_last_sent_ack_eliciting_packet = now

    def reschedule_data(self, *, now: float, speed_up_handshake: bool = False) -> None:
        # A PTO declares the oldest packet lost to have something to probe with; that is not a loss.
        self.expiring = True
        try:
            super().reschedule_data(now=now, speed_up_handshake=speed_up_handshake)
        finally:
            self.expiring = False
        self.settle_fates()


class SentSymbol(QuicSentPacket):
    """A 1-RTT packet with one frame of ours: all that differs between two of them is set on the instance."""

    epoch = tls.Epoch.ONE_RTT
    in_flight = True
    is_ack_eliciting = True
    is_crypto_packet = False
    packet_type = QuicPacketType.ONE_RTT
    quic_logger_frames: list[dict[str, object]] = []  # noqa: RUF012  a fast path writes no log


def exempt_from_congestion_control(frame_type: int) -> None:
    """For a frame that supplements ACK: neither ack-eliciting nor in flight (RFC 9000 §19.21, docs/wire.md §9).

    aioquic decides by two sets that its modules import by name. Other connections of the process do not notice: for
    them the frame type stays unknown and closes the connection.
    """
    for module, name in (
        (aioquic_builder, "NON_ACK_ELICITING_FRAME_TYPES"),
        (aioquic_builder, "NON_IN_FLIGHT_FRAME_TYPES"),
        (aioquic_connection, "NON_ACK_ELICITING_FRAME_TYPES"),
    ):
        setattr(module, name, getattr(module, name) | {frame_type})
