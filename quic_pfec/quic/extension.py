"""What an extension of QUIC implements: the frames it sends and the hooks through which a connection drives it.

Stands apart from `compat` so that the contract between the two can be read without a line of aioquic in the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Extension", "OutFrame", "Pacer"]


@dataclass(frozen=True, slots=True)
class OutFrame:
    """One frame to put in a packet, chosen and thereby consumed.

    `body` is everything after the frame type. `token` comes back with the packet's fate; None: no fate wanted.
    `ack_eliciting` matters for PFEC_ACK only: True adds a PING beside it, so that the peer acknowledges the packet.
    """

    frame_type: int
    body: bytes
    token: object | None
    ack_eliciting: bool = True


class Pacer(Protocol):
    """What the connection asks before and tells after each packet. aioquic's own pacer has the first three."""

    next_size: int | None
    """Set before `update_after_send` when the UDP payload of the packet being built is known, else None."""

    def next_send_time(self, now: float) -> float | None: ...

    def update_after_send(self, now: float) -> None: ...

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None: ...

    def settle(self, now: float, datagram_sizes: Sequence[int]) -> None:
        """The datagrams that really left since the last call, all of them, in bytes of UDP payload."""

    @property
    def rate_bps(self) -> float:
        """The rate that the pacer allows now, in bit/s."""

    @property
    def reduced(self) -> bool:
        """Whether that is below the rate that was asked for."""


class Extension:
    """Hooks of a connection; every default means "no extension".

    Where a hook says that it may raise `PeerError`, the connection closes with that code. Any other exception is a bug
    of ours: it closes this connection with INTERNAL_ERROR, is logged with its traceback and kept in `last_bug`.
    """

    def setup(self, *args: Any, **options: Any) -> None:
        """Called once when the connection is constructed or adopted, with the options given there; override freely."""

    def local_parameter(self) -> tuple[int, bytes] | None:
        """Transport parameter to announce, as (id, value); None: announce nothing, the extension stays off."""
        return None

    def peer_parameter(self, value: bytes | None) -> bool:
        """The peer's value of our parameter, once, None when absent. Return whether the extension is on.

        May raise `PeerError` or `QuicConnectionError`.
        """
        return False

    def extension_frame(self, frame_type: int, data: memoryview, now: float) -> int:
        """Handle one received frame; `data` runs from after its type to the end of the packet. Return bytes used.

        May raise `PeerError` or `QuicConnectionError`. `data` must not be kept.
        """
        return 0

    def has_frame(self, now: float) -> bool:
        """Whether a congestion-controlled frame is to be sent now. Cheap: asked for every packet."""
        return False

    def next_frame(self, now: float, space: int) -> OutFrame | None:
        """Choose the next frame of at most `space` bytes, type included, for the packet being built.

        Congestion window and pacer have agreed. What is returned is sent. None: nothing to send, or nothing fits.
        """
        return None

    def has_feedback(self, now: float) -> bool:
        """Whether a frame that supplements ACK is to be sent now: it asks neither congestion window nor streams."""
        return False

    def next_feedback(self, now: float, space: int) -> OutFrame | None:
        """As `next_frame`, for PFEC_ACK."""
        return None

    def frame_fate(self, token: object, acked: bool, now: float, expired: bool = False) -> None:
        """The packet that carried `token` was acknowledged or declared lost: once a token while the connection lives.

        `expired`: a PTO gave the packet up to have something to probe with. Send its content again if that is useful,
        but do not count a loss. A packet declared lost that is acknowledged later stays lost.
        """

    def stream_is_urgent(self, stream_id: int) -> bool:
        """Urgent streams get up to three packets in four while frames of ours wait, the others one in two."""
        return False
