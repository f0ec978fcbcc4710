"""The one place that spells aioquic's private names, turned into a small typed base class for an extension.

aioquic has no public way to add a frame type, to choose a frame at the moment a packet is built, or to learn the fate
of what a packet carried. `ExtensionConnection` does these through a few private names that have kept their meaning from
1.2 to 1.7, each listed in `contract` and checked at construction, so that an aioquic that moved on fails at once with
the missing name instead of misbehaving. What aioquic leaves open besides is closed in `guards`.

Subclasses override the hooks of `extension.Extension` and never touch an underscored name of aioquic.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self, cast

from aioquic import tls
from aioquic.buffer import Buffer, BufferReadError, size_uint_var  # type: ignore[attr-defined]
from aioquic.quic import connection as aioquic_connection
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.congestion.base import QuicCongestionControl
from aioquic.quic.connection import (
    NetworkAddress,
    QuicConnection,
    QuicConnectionError,
    QuicReceiveContext,
    QuicTokenHandler,
)
from aioquic.quic.events import QuicEvent
from aioquic.quic.packet import QuicErrorCode, QuicFrameType
from aioquic.quic.packet_builder import QuicDeliveryState, QuicPacketBuilder, QuicPacketBuilderStop
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream

from quic_pfec.quic.adapters import ASK_EXTENSION, FrameSource, Recovery, exempt_from_congestion_control
from quic_pfec.quic.contract import missing_names
from quic_pfec.quic.extension import Extension, OutFrame, Pacer
from quic_pfec.quic.guards import GuardedConnection
from quic_pfec.wire.errors import ErrorCode, LocalError, PeerError
from quic_pfec.wire.frames import MANIFEST, PFEC_ACK, REPAIR, SOURCE
from quic_pfec.wire.parameter import find_parameter

__all__ = ["ExtensionConnection", "OutFrame", "Pacer", "SendRun"]

logger = logging.getLogger("quic_pfec.quic")

SendRun = Callable[[bytes | memoryview, int, NetworkAddress], None]
"""Sends a buffer of datagrams of the given size, the last of which may be shorter; it may not keep the buffer."""

FRAME_NAMES = {SOURCE: "pfec_source", REPAIR: "pfec_repair", PFEC_ACK: "pfec_ack", MANIFEST: "pfec_manifest"}

MAX_REASON_BYTES = 256  # a CONNECTION_CLOSE that does not fit its packet would never leave


exempt_from_congestion_control(PFEC_ACK)


class ExtensionConnection(Extension, GuardedConnection):
    """A QUIC connection with room for an extension: hooks to override, and the repairs that they rest on.

    Sans-IO like its base: `now` is whatever clock the caller uses throughout. Frames of the extension go into 1-RTT
    packets after the handshake, last in their packet. Raises RuntimeError at construction when aioquic lacks a name of
    the contract.
    """

    smallest_frame = 8
    """Bytes below which `next_frame` is not asked: no frame of ours is smaller."""
    feedback_ping_s = 0.025
    """A sender of feedback asks for an acknowledgement once per RTT or this often, whichever is rarer (RFC 9000
    §13.2.4): it gets RTT samples and can forget its packets."""
    # ---- construction ------------------------------------------------------------------------------------------------

    def __init__(
        self,
        *,
        configuration: QuicConfiguration,
        original_destination_connection_id: bytes | None = None,
        retry_source_connection_id: bytes | None = None,
        session_ticket_fetcher: tls.SessionTicketFetcher | None = None,
        session_ticket_handler: tls.SessionTicketHandler | None = None,
        token_handler: QuicTokenHandler | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            configuration=configuration,
            original_destination_connection_id=original_destination_connection_id,
            retry_source_connection_id=retry_source_connection_id,
            session_ticket_fetcher=session_ticket_fetcher,
            session_ticket_handler=session_ticket_handler,
            token_handler=token_handler,
        )
        self._install()
        self.setup(**(options or {}))

    @classmethod
    def adopt(cls, quic: QuicConnection, options: Mapping[str, Any] | None = None) -> Self:
        """Turn a connection that aioquic constructed, for example in its `serve()`, into one of this class.

        Raises `LocalError` when it has started: our transport parameter would be missing from its handshake.
        """
        if quic._spaces:
            raise LocalError("a connection can be adopted only before its first packet")
        quic.__class__ = cls
        adopted = cast(Self, quic)
        adopted._install()
        adopted.setup(**(options or {}))
        return adopted

    def _install(self) -> None:
        missing = missing_names(self)
        if missing:
            raise RuntimeError(f"this aioquic lacks {', '.join(missing)}: use a release that quic_pfec names")

        self.bugs = 0
        self.last_bug: Exception | None = None
        self.blocked_cwnd = 0
        self.blocked_pacer = 0
        self._now = 0.0
        self._announced = False
        self._peer_parameter_seen = False
        self._extension_on = False
        self._feedback_wanted = False
        self._frame_wanted = False
        self._cwnd_blocked = False
        self._granted_packet = -1
        self._extension_packet = -1
        self._stream_packet = -1
        self._stream_run = 0
        self._streams_passed = False
        self._feedback_ping_at = 0.0
        self._own_pacer: Pacer | None = None
        self._frames_held = False  # for the fast path, which follows
        self._fates: dict[tuple[bool, bool], list[object]] = {}
        self._install_guards()

        # One entry per epoch rule: any other epoch is a PROTOCOL_VIOLATION, by aioquic.
        handlers: dict[int, Any] = self._QuicConnection__frame_handlers  # type: ignore[attr-defined]
        for frame_type in FRAME_NAMES:
            handlers[frame_type] = (self._handle_extension_frame, aioquic_connection.EPOCHS("1"))
        self._datagrams_pending = cast("deque[bytes]", FrameSource(self._wants_packet, self._datagrams_pending))
        # aioquic hard-codes the class of its loss recovery; ours adds methods and no state to construct.
        self._loss.__class__ = Recovery
        self._recovery = cast(Recovery, self._loss)
        self._recovery.check_ack = self._check_ack
        self._recovery.settle_fates = self._settle_fates

    # ---- state -------------------------------------------------------------------------------------------------------

    @property
    def extension_on(self) -> bool:
        """Whether both sides announced the parameter and `peer_parameter` agreed."""
        return self._extension_on

    @property
    def send_rate_bps(self) -> float:
        """The rate at which the connection may send now: the pacer's, or cwnd/RTT with aioquic's pacer; bit/s."""
        if self._own_pacer is not None:
            return self._own_pacer.rate_bps
        return 8 * self.cwnd / max(self.rtt_s, 1e-6)

    @property
    def has_own_pacer(self) -> bool:
        """Whether the rate is ours to set (`set_congestion_control`) rather than grown by aioquic's controller."""
        return self._own_pacer is not None

    @property
    def rate_reduced(self) -> bool:
        """Whether a provisioned controller has backed off from its stated rate."""
        return self._own_pacer is not None and self._own_pacer.reduced

    def set_congestion_control(self, controller: QuicCongestionControl, pacer: Pacer) -> None:
        """Replace controller and pacer; what is in flight stays accounted for."""
        controller.bytes_in_flight = self._loss._cc.bytes_in_flight
        self._loss._cc = controller
        self._loss._pacer = cast(Any, pacer)
        self._own_pacer = pacer

    # ---- aioquic's public surface ------------------------------------------------------------------------------------

    def close(
        self, error_code: int = QuicErrorCode.NO_ERROR, frame_type: int | None = None, reason_phrase: str = ""
    ) -> None:
        short = reason_phrase.encode("utf8")[:MAX_REASON_BYTES].decode("utf8", "ignore")
        super().close(error_code=error_code, frame_type=frame_type, reason_phrase=short)

    def emit(self, event: QuicEvent) -> None:
        """Queue an event of ours among those of `next_event()`."""
        self._events.append(event)

    def send_datagram_frame(self, data: bytes) -> None:
        """Queue a DATAGRAM frame (RFC 9221). Raises `LocalError` for one that could never leave.

        aioquic checks neither the packet nor the peer's limit; one frame too large would block all that follow.
        """
        size = 1 + size_uint_var(len(data)) + len(data)
        limit = self.frame_space
        if self._handshake_complete:
            limit = min(limit, self._remote_max_datagram_frame_size or 0)
        if size > limit:
            raise LocalError(f"a DATAGRAM frame of {size} bytes exceeds the limit of {limit}")
        super().send_datagram_frame(data)

    def receive_datagram(self, data: bytes, addr: NetworkAddress, now: float) -> None:
        self._now = now
        super().receive_datagram(data, addr, now)

    @property
    def now_s(self) -> float:
        """The time of the latest call."""
        return self._now

    def handle_timer(self, now: float) -> None:
        self._now = now
        super().handle_timer(now)

    def datagrams_to_send(self, now: float) -> list[tuple[bytes, NetworkAddress]]:
        self._begin_sending(now)
        datagrams = self._built_by_aioquic(now)
        self._end_sending()
        return datagrams

    def _begin_sending(self, now: float) -> None:
        self._now = now
        self._cwnd_blocked = False
        self._skip_packet_number()
        self._watch_key()
        space = self._spaces.get(tls.Epoch.ONE_RTT)
        # An acknowledgement that waits goes with feedback, which is due now: half the datagrams (RFC 9000 §13.2.1).
        if space is not None and space.ack_at is not None and space.ack_at > now and self._wants_feedback():
            space.ack_at = now

    def _built_by_aioquic(self, now: float) -> list[tuple[bytes, NetworkAddress]]:
        closing = self._close_pending
        datagrams = super().datagrams_to_send(now)
        if self._close_pending and not closing:  # a bug of ours showed while the packets were built
            datagrams += super().datagrams_to_send(now)
        if self._own_pacer is not None:
            self._own_pacer.settle(now, [len(data) for data, _ in datagrams])
        return datagrams

    def _end_sending(self) -> None:
        if self._cwnd_blocked:
            self.blocked_cwnd += 1
        if self._pacing_at is not None and self._wants_packet():
            self.blocked_pacer += 1

    def send_runs(self, now: float, send: SendRun) -> None:
        """`datagrams_to_send` for a socket: hands `send` datagrams of one size in one buffer, where there are such."""
        for data, addr in self.datagrams_to_send(now):
            send(data, len(data), addr)

    def receive_datagrams(self, datagrams: Sequence[bytes | memoryview], addr: NetworkAddress, now: float) -> None:
        """Datagrams from one address, in the order of their arrival. The views may change afterwards."""
        for data in datagrams:
            self.receive_datagram(bytes(data), addr, now)

    # ---- transport parameter -----------------------------------------------------------------------------------------

    def _serialize_transport_parameters(self) -> bytes:
        block = super()._serialize_transport_parameters()
        parameter = self.local_parameter()
        self._announced = parameter is not None
        if parameter is None:
            return block
        identifier, value = parameter
        buf = Buffer(capacity=16 + len(value))
        buf.push_uint_var(identifier)
        buf.push_uint_var(len(value))
        buf.push_bytes(value)
        return block + buf.data

    def _parse_transport_parameters(self, data: bytes, from_session_ticket: bool = False) -> None:
        super()._parse_transport_parameters(data, from_session_ticket=from_session_ticket)
        # The parameter is never remembered with a session ticket: the frames are prohibited in 0-RTT (docs/wire.md §2).
        if from_session_ticket or self._peer_parameter_seen:
            return
        self._peer_parameter_seen = True
        try:
            value = find_parameter(data)
            agreed = self.peer_parameter(value)
        except Exception as exc:
            raise self._close_reason(exc, QuicFrameType.CRYPTO) from exc
        self._extension_on = agreed and self._announced and value is not None

    # ---- receiving ---------------------------------------------------------------------------------------------------

    def _handle_extension_frame(self, context: QuicReceiveContext, frame_type: int, buf: Buffer) -> None:
        if not self._extension_on:
            # What aioquic answers to a type that nobody registered (RFC 9000 §12.4).
            raise QuicConnectionError(ErrorCode.FRAME_ENCODING_ERROR, frame_type, "Unknown frame type")
        start = buf.tell()
        data = buf.data_slice(start, buf.capacity)
        try:
            used = self.extension_frame(frame_type, memoryview(data), context.time)
            if not 0 <= used <= len(data):
                raise LocalError(f"extension_frame consumed {used} of {len(data)} bytes")
        except BufferReadError:
            raise  # FRAME_ENCODING_ERROR, by aioquic
        except Exception as exc:
            raise self._close_reason(exc, frame_type) from exc
        buf.seek(start + used)
        if context.quic_logger_frames is not None:
            context.quic_logger_frames.append({"frame_type": FRAME_NAMES[frame_type], "length": used})

    def _on_extension_delivery(self, delivery: QuicDeliveryState, token: object) -> None:
        # Collected while aioquic works through an acknowledgement or a timer, and told in one go when it is done.
        fate = (delivery is QuicDeliveryState.ACKED, self._recovery.expiring)
        self._fates.setdefault(fate, []).append(token)

    def _settle_fates(self) -> None:
        if not self._fates:
            return
        fates, self._fates = self._fates, {}
        try:
            for (acked, expired), tokens in fates.items():
                self.frame_fates(tokens, acked, self._now, expired)
        except Exception as exc:
            self._contain(exc)

    # ---- errors ------------------------------------------------------------------------------------------------------

    def _close_reason(self, exc: Exception, frame_type: int) -> QuicConnectionError:
        """The one place where a fault of the peer, or a bug of ours, becomes a QUIC close."""
        if isinstance(exc, QuicConnectionError):
            return exc
        if isinstance(exc, PeerError):
            if exc.application:  # aioquic takes a close without a frame type for one of the application
                return QuicConnectionError(exc.code, cast(int, None), exc.reason)
            return QuicConnectionError(
                exc.code, exc.frame_type if exc.frame_type is not None else frame_type, exc.reason
            )
        self._contain(exc, frame_type)
        return QuicConnectionError(QuicErrorCode.INTERNAL_ERROR, frame_type, "internal error")

    def fail(self, error: PeerError) -> None:
        """Close on a fault of the peer that was found outside a frame handler, by a timer for example."""
        reason = self._close_reason(error, QuicFrameType.PADDING)
        self.close(reason.error_code, reason.frame_type, reason.reason_phrase)

    def _contain(self, exc: Exception, frame_type: int = QuicFrameType.PADDING) -> None:
        """A bug of ours ends this connection, visibly, and nothing else."""
        self.bugs += 1
        self.last_bug = exc
        logger.error("closing a connection on an internal error", exc_info=exc)
        self.close(error_code=QuicErrorCode.INTERNAL_ERROR, frame_type=frame_type, reason_phrase="internal error")

    # ---- sending -----------------------------------------------------------------------------------------------------

    def _wants_packet(self) -> bool:
        if not self._extension_on or not self._handshake_complete or self._close_pending:
            return False
        try:
            self._feedback_wanted = self.has_feedback(self._now)
            self._frame_wanted = self.has_frame(self._now)
        except Exception as exc:
            self._contain(exc)
            return False
        return self._feedback_wanted or self._frame_wanted

    def _wants_feedback(self) -> bool:
        if not self._extension_on:
            return False
        try:
            return self.has_feedback(self._now)
        except Exception as exc:
            self._contain(exc)
            return True

    def _write_datagram_frame(self, builder: QuicPacketBuilder, data: bytes, frame_type: QuicFrameType) -> bool:
        if data is not ASK_EXTENSION:
            return super()._write_datagram_frame(builder, data, frame_type)
        try:
            written = self._write_feedback(builder) or self._write_frame(builder)
        except QuicPacketBuilderStop:
            raise
        except Exception as exc:
            self._contain(exc)
            written = False
        if not written:
            raise QuicPacketBuilderStop  # ends the datagrams of this packet; streams may still fill it
        return True

    def _write_feedback(self, builder: QuicPacketBuilder) -> bool:
        space = builder.remaining_buffer_space
        if not self._feedback_wanted or space < self.smallest_frame:
            return False
        frame = self.next_feedback(self._now, space)
        if frame is None:
            return False
        self._put(builder, frame, space)
        return True

    def _write_frame(self, builder: QuicPacketBuilder) -> bool:
        if not self._frame_wanted or (self._frames_held and builder.packet_is_empty and not self._stream_share()):
            return False
        packet = builder.packet_number
        if packet != self._granted_packet:
            # A packet that exists only because an ACK was due must not outrun the pacer.
            if self._paced_out() or self._streams_turn():
                return False
            self._granted_packet = packet
        room, window = builder.remaining_buffer_space, builder.remaining_flight_space
        space = min(room, window)
        frame = self.next_frame(self._now, space) if space >= self.smallest_frame else None
        if frame is None:
            self._cwnd_blocked |= window < room and packet != self._extension_packet
            return False
        self._put(builder, frame, space)
        self._stream_run = 0
        return True

    def _put(self, builder: QuicPacketBuilder, frame: OutFrame, space: int) -> None:
        size = size_uint_var(frame.frame_type) + len(frame.body)
        if size > space:
            raise LocalError(f"a frame of {size} bytes was chosen for a space of {space}")
        wants_ack = frame.ack_eliciting or self._now >= self._feedback_ping_at
        if frame.frame_type == PFEC_ACK and wants_ack and size < builder.remaining_buffer_space:
            with suppress(QuicPacketBuilderStop):
                self._write_ping_frame(builder, comment="feedback")
                self._feedback_ping_at = self._now + max(self.rtt_s, self.feedback_ping_s)
        handler = self._on_extension_delivery if frame.token is not None else None
        buf = builder.start_frame(frame.frame_type, capacity=size, handler=handler, handler_args=(frame.token,))
        buf.push_bytes(frame.body)
        self._size_known(builder)
        self._extension_packet = builder.packet_number
        if self._quic_logger is not None and builder.quic_logger_frames is not None:
            builder.quic_logger_frames.append(
                {"frame_type": FRAME_NAMES.get(frame.frame_type, "unknown"), "length": size}
            )

    def _write_stream_frame(
        self, builder: QuicPacketBuilder, space: QuicPacketSpace, stream: QuicStream, max_offset: int
    ) -> int:
        packet = builder.packet_number
        if packet == self._extension_packet or (packet != self._stream_packet and self._paced_out()):
            return 0
        room = builder.remaining_buffer_space
        used = super()._write_stream_frame(builder=builder, space=space, stream=stream, max_offset=max_offset)
        if builder.remaining_buffer_space != room:
            self._size_known(builder)
            if packet != self._stream_packet:
                self._stream_packet = packet
                self._stream_run += 1
                self._streams_passed = False
        return used

    def _size_known(self, builder: QuicPacketBuilder) -> None:
        if self._own_pacer is not None:
            self._own_pacer.next_size = self._max_datagram_size - builder.remaining_buffer_space

    def _paced_out(self) -> bool:
        return self._own_pacer is not None and self._own_pacer.next_send_time(self._now) is not None

    def _streams_turn(self) -> bool:
        """Whether this packet is left to the streams, because they wait and have not had their share."""
        if self._stream_run >= self._stream_share():
            return False
        # Streams that were left a packet and could not use it (no window for it, say) must not stop us a second time.
        self._streams_passed = not self._streams_passed
        return self._streams_passed

    def _stream_share(self) -> int:
        """Packets that streams may have before one of ours: 0 when none can send now."""
        share = 0
        for stream in self._streams_queue:
            sender = stream.sender
            if stream.receiver.stop_pending or sender.reset_pending:
                return 3
            if stream.is_blocked or sender.buffer_is_empty:
                continue
            if len(sender._pending):
                credit = sender.highest_offset + self._remote_max_data - self._remote_max_data_used
                if sender.next_offset >= min(credit, stream.max_stream_data_remote):
                    continue  # the peer's flow control, not us, holds it
            elif not sender._pending_eof:
                continue
            if stream.stream_id is not None and self.stream_is_urgent(stream.stream_id):
                return 3
            share = 1
        return share
