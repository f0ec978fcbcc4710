"""What a connection of aioquic knows about itself, readable without spelling its private names.

The reading half of `compat`; both rest on the names listed in `contract`.
"""

from __future__ import annotations

from aioquic.quic.connection import END_STATES, QuicConnection

__all__ = ["ObservableConnection"]


class ObservableConnection(QuicConnection):
    """Round-trip times in seconds, windows and backlogs in bytes. Nothing here changes anything."""

    @property
    def is_client(self) -> bool:
        return self._is_client

    @property
    def handshake_complete(self) -> bool:
        return self._handshake_complete

    @property
    def is_closing(self) -> bool:
        """Whether the connection is closed, or about to send its close."""
        return self._close_pending or self._state in END_STATES

    @property
    def close_cause(self) -> tuple[int, str]:
        """Code and phrase of the close under way, whoever began it; (0, "") while there is none."""
        event = self._close_event
        return (0, "") if event is None else (event.error_code, event.reason_phrase)

    @property
    def frame_space(self) -> int:
        """Bytes that one frame of ours, type included, can have in a packet of its own: 1,425 with the defaults."""
        return self._max_datagram_size - (3 + len(self._peer_cid.cid)) - 16

    @property
    def rtt_s(self) -> float:
        """Smoothed RTT; the configured initial RTT before the first sample."""
        return self._loss._rtt_smoothed if self._loss._rtt_initialized else self._configuration.initial_rtt

    @property
    def latest_rtt_s(self) -> float:
        return self._loss._rtt_latest if self._loss._rtt_initialized else self._configuration.initial_rtt

    @property
    def min_rtt_s(self) -> float:
        return self._loss._rtt_min if self._loss._rtt_initialized else self._configuration.initial_rtt

    @property
    def has_rtt_sample(self) -> bool:
        return self._loss._rtt_initialized

    @property
    def pto_s(self) -> float:
        """The probe timeout without backoff (RFC 9002 §6.2.1)."""
        return self._loss.get_probe_timeout()

    @property
    def cwnd(self) -> int:
        """Congestion window in bytes."""
        return self._loss.congestion_window

    @property
    def congestion_control(self) -> str:
        """Name of the controller: one of ours, or the one that aioquic was configured with."""
        return str(getattr(self._loss._cc, "name", self._configuration.congestion_control_algorithm))

    @property
    def loss_threshold(self) -> float | None:
        """Share of losses in a round trip that the controller bears; None where that is no matter of a threshold."""
        return getattr(self._loss._cc, "loss_threshold", None)

    @property
    def bytes_in_flight(self) -> int:
        return self._loss.bytes_in_flight

    @property
    def peer_stream_limit(self) -> int:
        """How many bidirectional streams the peer may have opened so far: its ids stay below four times that."""
        return self._local_max_streams_bidi.value

    def may_open(self, stream_id: int) -> bool:
        """Whether the peer lets us use this bidirectional stream of ours now (RFC 9000 §4.6)."""
        return stream_id // 4 < self._remote_max_streams_bidi

    def stream_backlog(self, stream_id: int) -> int:
        """Bytes written to a stream that have not been sent once; 0 for a stream that is over or was never used.

        The watermark that aioquic's `send_stream_data` lacks. Bytes in flight are left out: the congestion window
        bounds them.
        """
        stream = self._streams.get(stream_id)
        return 0 if stream is None else stream.sender._buffer_stop - stream.sender.highest_offset
