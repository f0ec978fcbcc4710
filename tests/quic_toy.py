"""The connection that the tests of `quic/` put on `quic_pair`: it sends what a test queues and records what comes."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
from aioquic import tls
from aioquic.quic.packet import QuicFrameType, QuicPacketType
from aioquic.quic.packet_builder import QuicPacketBuilder

from quic_pfec.quic.compat import ExtensionConnection
from quic_pfec.quic.extension import OutFrame
from quic_pfec.quic.fast_send import FastSendConnection
from quic_pfec.wire.frames import SOURCE
from quic_pfec.wire.parameter import PARAMETER_ID

from .quic_pair import Pair, make_pair

BIG = 1383  # a SOURCE frame with the largest symbol
VALUE = bytes([1, 1, 0x45, 0x5C, 0x50, 0x00, 0x40, 0xFF, 4, 0x50, 0x00])


class Toy(ExtensionConnection):
    """Sends what a test queues: frames are a 2-byte length and content; every frame and every fate is recorded."""

    announce: tuple[int, bytes] | None = (PARAMETER_ID, VALUE)

    def _install_guards(self) -> None:
        self.skip_random = random.Random(7)  # its own: with one for all, what a test sees would hang on those before it
        super()._install_guards()

    def setup(self, *, total: int = 0, size: int = BIG, announce: Any = "default") -> None:
        self.total, self.size = total, size
        self.sent = 0
        self.queue: deque[OutFrame] = deque()
        self.feedback: deque[OutFrame] = deque()
        self.received: list[tuple[int, bytes]] = []
        self.fates: list[tuple[object, bool, bool]] = []
        self.parameters: list[bytes | None] = []
        self.spaces: list[int] = []
        self.urgent: set[int] = set()
        self.on_frame: Any = None
        self.unlimited = False
        if announce != "default":
            self.announce = announce

    def local_parameter(self) -> tuple[int, bytes] | None:
        return self.announce

    def peer_parameter(self, value: bytes | None) -> bool:
        self.parameters.append(value)
        return value is not None

    def extension_frame(self, frame_type: int, data: memoryview, now: float) -> int:
        length = int.from_bytes(data[:2], "big")
        content = bytes(data[2 : 2 + length])
        self.received.append((frame_type, content))
        if self.on_frame is not None:
            return int(self.on_frame(frame_type, content) or 2 + length)
        return 2 + length

    def has_frame(self, now: float) -> bool:
        return bool(self.queue) or self.sent < self.total

    def next_frame(self, now: float, space: int) -> OutFrame | None:
        self.spaces.append(space)
        if self.queue:
            size = 4 + len(self.queue[0].body)
            return self.queue.popleft() if size <= space else None
        if self.size > space:
            return None
        self.sent += 1
        return OutFrame(SOURCE, body(self.size - 6), self.sent)

    def has_feedback(self, now: float) -> bool:
        return bool(self.feedback)

    def next_feedback(self, now: float, space: int) -> OutFrame | None:
        return self.feedback.popleft() if 4 + len(self.feedback[0].body) <= space else None

    def frame_fate(self, token: object, acked: bool, now: float, expired: bool = False) -> None:
        self.fates.append((token, acked, expired))

    def stream_is_urgent(self, stream_id: int) -> bool:
        return stream_id in self.urgent


class FastToy(Toy, FastSendConnection):
    """Sends what a test queues in runs, where it is large."""

    def setup(self, *, fast_path: bool = True, total: int = 0, size: int = BIG, announce: Any = "default") -> None:
        FastSendConnection.setup(self, fast_path=fast_path)
        super().setup(total=total, size=size, announce=announce)

    def fills_packets(self, space: int) -> bool:
        smallest = min(
            [4 + len(frame.body) for frame in self.queue] + [self.size] * (self.sent < self.total), default=0
        )
        return 2 * smallest > space


class QuietToy(FastToy):
    """Asks aioquic all the same where the fast path would not, and insists that it had nothing to send."""

    def _aioquic_has_something(self, now: float) -> bool:
        something = super()._aioquic_has_something(now)
        if not something:
            assert self._built_by_aioquic(now) == []
        return something


def body(length: int) -> bytes:
    return length.to_bytes(2, "big") + bytes(length)


def frame(frame_type: int = SOURCE, content: bytes = b"x", token: object | None = None) -> OutFrame:
    return OutFrame(frame_type, len(content).to_bytes(2, "big") + content, token)


def toys(kind: type[Toy] = Toy, **options: Any) -> tuple[Pair, Any, Any]:
    """A connected pair of `kind` with both its ends."""
    pair = make_pair(kind, kind, **options)
    pair.connect()
    return pair, pair.client, pair.server


def inject(pair: Pair, payload: bytes) -> None:
    """Put raw frames into a 1-RTT packet of the client."""
    client = pair.client
    original = client._write_application

    def write(builder: QuicPacketBuilder, path: Any, now: float) -> None:
        builder.start_packet(QuicPacketType.ONE_RTT, client._cryptos[tls.Epoch.ONE_RTT])
        builder.start_frame(QuicFrameType.PING, capacity=1)
        builder._buffer.push_bytes(payload)

    client.send_ping(0)  # so that there is something to send
    client._write_application = write  # type: ignore[method-assign]
    try:
        pair.transmit()
    finally:
        client._write_application = original  # type: ignore[method-assign]
    pair.run(0.5)


@pytest.fixture(params=[Toy, FastToy, QuietToy], ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> type[Toy]:
    """What holds of the extension holds with the fast path, and with a watch on its quiet turns."""
    chosen: type[Toy] = request.param
    return chosen
