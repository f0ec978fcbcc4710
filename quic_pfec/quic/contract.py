"""The private names of aioquic that `compat` relies on, as data, so that their absence is reported by name.

aioquic makes no promise about them. An update that renames one fails at the construction of the first connection, and
in the contract test, with the missing names; it never runs on with a hook that is no longer called.
"""

from __future__ import annotations

from types import SimpleNamespace

from aioquic import tls
from aioquic._crypto import AEAD, HeaderProtection
from aioquic.quic import connection as aioquic_connection
from aioquic.quic import packet_builder as aioquic_builder
from aioquic.quic.connection import QuicConnection, QuicConnectionId, QuicNetworkPath
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream

__all__ = ["CONTRACT", "missing_names"]

CONTRACT = (
    "_QuicConnection__frame_handlers",
    "_ack_delay",
    "_ack_eliciting_sent_since_receipt",
    "_close_at",
    "_close_event",
    "_close_pending",
    "_configuration",
    "_confirm_handshake",
    "_crypto_streams",
    "_cryptos",
    "_datagrams_pending",
    "_events",
    "_handshake_complete",
    "_handshake_confirmed",
    "_handshake_done_pending",
    "_host_cids",
    "_idle_timeout",
    "_initialize",
    "_is_client",
    "_local_max_data.sent",
    "_local_max_data.used",
    "_local_max_data.value",
    "_local_max_streams_bidi.sent",
    "_local_max_streams_bidi.value",
    "_local_max_streams_uni.sent",
    "_logger",
    "_remote_max_streams_bidi",
    "_loss",
    "_loss._cc.bytes_in_flight",
    "_loss._cc.congestion_window",
    "_loss._cc.on_packet_sent",
    "_loss._pacer.next_send_time",
    "_loss._pacer.update_after_send",
    "_loss._pacer.update_rate",
    "_loss._rtt_initialized",
    "_loss._rtt_latest",
    "_loss._rtt_min",
    "_loss._rtt_smoothed",
    "_loss._time_of_last_sent_ack_eliciting_packet",
    "_loss.get_probe_timeout",
    "_loss.on_ack_received",
    "_loss.on_loss_detection_timeout",
    "_loss.reschedule_data",
    "_max_datagram_size",
    "_network_paths",
    "_pacing_at",
    "_packet_number",
    "_parse_transport_parameters",
    "_peer_cid.cid",
    "_ping_pending",
    "_probe_pending",
    "_quic_logger",
    "_remote_max_data",
    "_remote_max_data_used",
    "_remote_max_datagram_frame_size",
    "_remote_preferred_address",
    "_retire_connection_ids",
    "_serialize_transport_parameters",
    "_spaces",
    "_spin_bit",
    "_spin_highest_pn",
    "_state",
    "_streams",
    "_streams_blocked_pending",
    "_streams_queue",
    "_write_datagram_frame",
    "_write_ping_frame",
    "_write_stream_frame",
    "host_cid",
)
"""Attributes of a fresh `QuicConnection`, as dotted paths."""

_ELSEWHERE = (
    (
        "tls.Context",
        lambda: tls.Context(is_client=False),
        ("_peer_certificate", "_peer_certificate_chain", "_request_client_certificate"),
    ),
    (
        "recovery.QuicPacketSpace",
        QuicPacketSpace,
        (
            "ack_at",
            "ack_eliciting_in_flight",
            "ack_queue.shift",
            "expected_packet_number",
            "largest_acked_packet",
            "largest_received_packet",
            "largest_received_time",
            "received_packets.__contains__",
            "received_packets.add",
            "sent_packets",
        ),
    ),
    (
        "connection.QuicNetworkPath",
        lambda: QuicNetworkPath(("", 0)),
        ("addr", "bytes_sent", "is_validated", "remote_challenges"),
    ),
    (
        "connection.QuicConnectionId",
        lambda: QuicConnectionId(b"", 0),
        ("cid", "was_sent"),
    ),
    ("crypto.CryptoPair", CryptoPair, ("_update_key_requested", "key_phase", "recv.aead", "recv.hp", "send.is_valid")),
    ("_crypto.AEAD", lambda: AEAD(b"aes-128-gcm", bytes(16), bytes(12)), ("_aead.decrypt", "_aead.encrypt", "_iv")),
    (
        "_crypto.HeaderProtection",
        lambda: HeaderProtection(b"aes-128-ecb", bytes(16)),
        ("_encryptor.update", "_is_chacha20"),
    ),
    (
        "packet_builder.QuicSentPacket",
        lambda: SimpleNamespace(**QuicSentPacket.__dataclass_fields__),
        (
            "delivery_handlers",
            "epoch",
            "in_flight",
            "is_ack_eliciting",
            "is_crypto_packet",
            "packet_number",
            "packet_type",
            "quic_logger_frames",
            "sent_bytes",
            "sent_time",
        ),
    ),
    (
        "stream.QuicStream",
        QuicStream,
        (
            "is_blocked",
            "is_finished",
            "max_stream_data_local",
            "max_stream_data_local_sent",
            "max_stream_data_remote",
            "receiver.highest_offset",
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
