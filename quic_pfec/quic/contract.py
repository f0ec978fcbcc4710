"""The private names of aioquic that `compat` relies on, as data, so that their absence is reported by name.

aioquic makes no promise about them. An update that renames one fails at the construction of the first connection, and
in the contract test, with the missing names; it never runs on with a hook that is no longer called.
"""

from __future__ import annotations

from aioquic import tls
from aioquic.quic import connection as aioquic_connection
from aioquic.quic import packet_builder as aioquic_builder
from aioquic.quic.connection import QuicConnection
from aioquic.quic.recovery import QuicPacketNumberWindow, QuicPacketSpace
from aioquic.quic.stream import QuicStream

__all__ = ["CONTRACT", "missing_names"]

CONTRACT = (
    "_QuicConnection__frame_handlers",
    "_close_event",
    "_close_pending",
    "_configuration",
    "_confirm_handshake",
    "_cryptos",
    "_datagrams_pending",
    "_events",
    "_handshake_complete",
    "_handshake_confirmed",
    "_initialize",
    "_is_client",
    "_local_max_streams_bidi.value",
    "_remote_max_streams_bidi",
    "_loss",
    "_loss._cc.bytes_in_flight",
    "_loss._cc.congestion_window",
    "_loss._pacer.next_send_time",
    "_loss._pacer.update_after_send",
    "_loss._pacer.update_rate",
    "_loss._rtt_initialized",
    "_loss._rtt_latest",
    "_loss._rtt_min",
    "_loss._rtt_smoothed",
    "_loss.get_probe_timeout",
    "_loss.on_ack_received",
    "_loss.reschedule_data",
    "_max_datagram_size",
    "_pacing_at",
    "_packet_number",
    "_parse_transport_parameters",
    "_peer_cid.cid",
    "_quic_logger",
    "_remote_max_data",
    "_remote_max_data_used",
    "_remote_max_datagram_frame_size",
    "_serialize_transport_parameters",
    "_spaces",
    "_state",
    "_streams",
    "_streams_queue",
    "_write_datagram_frame",
    "_write_ping_frame",
    "_write_stream_frame",
)
"""Attributes of a fresh `QuicConnection`, as dotted paths."""

_ELSEWHERE = (
    (
        "tls.Context",
        lambda: tls.Context(is_client=False),
        ("_peer_certificate", "_peer_certificate_chain", "_request_client_certificate"),
    ),
    ("recovery.QuicPacketNumberWindow", QuicPacketNumberWindow, ("_size",)),
    ("recovery.QuicPacketSpace", QuicPacketSpace, ("received_packets", "largest_acked_packet")),
    (
        "stream.QuicStream",
        QuicStream,
        (
            "is_blocked",
            "max_stream_data_remote",
            "receiver.stop_pending",
            "sender._buffer_stop",
            "sender._pending",
            "sender._pending_eof",
            "sender.buffer_is_empty",
            "sender.highest_offset",
            "sender.next_offset",
            "sender.reset_pending",
        ),
    ),
    (
        "packet_builder",
        lambda: aioquic_builder,
        ("NON_ACK_ELICITING_FRAME_TYPES", "NON_IN_FLIGHT_FRAME_TYPES", "QuicPacketBuilder.start_frame"),
    ),
    ("connection", lambda: aioquic_connection, ("NON_ACK_ELICITING_FRAME_TYPES", "EPOCHS", "END_STATES")),
)


def missing_names(quic: QuicConnection) -> list[str]:
    """The names of the contract that this aioquic lacks, empty when it can be used; `quic` is a fresh connection."""
    missing = [f"QuicConnection.{path}" for path in CONTRACT if not _has(quic, path)]
    for where, make, paths in _ELSEWHERE:
        root = make()
        missing += [f"{where}.{path}" for path in paths if not _has(root, path)]
    return missing


def _has(root: object, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(root, name):
            return False
        root = getattr(root, name)
    return True
