"""What an extension of QUIC implements: the frames it sends and the hooks through which a connection drives it.

Stands apart from `compat` so that the contract between the two can be read without a line of aioquic in the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quic_pfec.wire import varint
from quic_pfec.wire.errors import LocalError
from quic_pfec.wire.limits import Limits

__all__ = ["Extension", "FrameRun", "OutFrame", "Pacer", "Symbol"]


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


@dataclass(slots=True)
class FrameRun:
    """Frames for a run of packets, in a buffer of the caller: their lengths, types included, and their tokens."""

    lengths: list[int]
    tokens: list[Any]


Symbol = (
    tuple[int, memoryview]
    | tuple[int, int, int, int, int, bytes, int, int, memoryview]
)  # fmt: skip
"""A SOURCE frame as (sid, symbol), or a REPAIR frame as (transfer id, repair number, first sid, degree, head span,
head, tail offset, tail span, symbol)."""


class Pacer(Protocol):
    """What the connection asks before and tells after each packet. aioquic's own has those up to `update_rate`."""

    next_size: int | None
    """Set before `update_after_send` when the UDP payload of the packet being built is known, else None."""

    def next_send_time(self, now: float) -> float | None: ...

    def update_after_send(self, now: float) -> None: ...

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None: ...

    def take(self, now: float, most: int) -> int:
        """How many full packets may be sent now, at most `most`; they are charged until `settle` knows their sizes."""

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

    def frame_fates(self, tokens: Sequence[object], acked: bool, now: float, expired: bool = False) -> None:
        """`frame_fate` for tokens whose fate is the same and became known together."""
        for token in tokens:
            self.frame_fate(token, acked, now, expired=expired)

    # the fast path

    def fills_packets(self, space: int) -> bool:
        """Whether no two of the frames to be sent now fit `space` bytes together.

        Only then `next_run` is asked, and each frame has a packet of its own; else packets are filled by `next_frame`.
        """
        return False

    def next_run(
        self, now: float, max_packets: int, space: int, out: bytearray, stride: int, offset: int
    ) -> FrameRun | None:
        """`next_frame` for up to `max_packets` packets at once, all of which may leave now.

        Frame i is written to `out` from i * stride + offset on, type included, and has at most `space` bytes. All are
        ack-eliciting. What is returned is sent.
        """
        run = FrameRun([], [])
        while len(run.lengths) < max_packets and self.has_frame(now):
            frame = self.next_frame(now, space)
            if frame is None:
                break
            data = varint.encode(frame.frame_type) + frame.body
            start = len(run.lengths) * stride + offset
            if len(data) > space:
                raise LocalError(f"a frame of {len(data)} bytes was chosen for a space of {space}")
            out[start : start + len(data)] = data
            run.lengths.append(len(data))
            run.tokens.append(frame.token)
        return run

    def symbol_limits(self) -> Limits | None:
        """What `symbols_received` accepts; None: it does not want to be asked."""
        return None

    def symbols_received(self, transfer_id: int, packets: Sequence[Symbol], now: float) -> None:
        """SOURCE and REPAIR frames of one transfer in the order of their coming, parsed and within `symbol_limits`.

        May raise `PeerError`. The views must not be kept.
        """

    def stream_is_urgent(self, stream_id: int) -> bool:
        """Urgent streams get up to three packets in four while frames of ours wait, the others one in two."""
        return False
