"""Real servers and clients on loopback, well-behaved and hostile, and small caches to hand over."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from aioquic.quic.events import QuicEvent, StopSendingReceived, StreamDataReceived, StreamReset

from quic_pfec.cli.cert import make_certificate
from quic_pfec.client import Connection, connect
from quic_pfec.kv.prepared import PreparedKV, prepare_arrays
from quic_pfec.kv.received import ReceivedKV
from quic_pfec.link.options import RelayOptions
from quic_pfec.link.relay import Relay
from quic_pfec.quic.admission import Admissions
from quic_pfec.quic.configuration import configuration
from quic_pfec.quic.connection import PfecConnection
from quic_pfec.quic.endpoint import ExtensionProtocol, Listener, listen, open_connection
from quic_pfec.quic.extension import OutFrame
from quic_pfec.quic.protocol import PfecProtocol
from quic_pfec.server import CallbackHandler, serve
from quic_pfec.sim.channel import GilbertElliott
from quic_pfec.wire import frames, messages
from quic_pfec.wire.limits import Limits
from quic_pfec.wire.manifest import encode_manifest

PATIENCE_S = 30.0
"""How long a test waits for what must happen; nothing is asserted about how long it took."""


@functools.cache
def certificate() -> tuple[str, str]:
    """Paths of a certificate for localhost and its key, made once a test run."""
    folder = _folder()
    made = make_certificate(Path(folder.name))
    return str(made[0]), str(made[1])


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="quic-pfec-tests-")


# caches


def arrays(layers: int = 4, tokens: int = 64, seed: int = 0, heads: int = 2) -> list[tuple[Any, Any]]:
    """A cache of float32 arrays whose values bf16 holds exactly, so that a hand-off can be compared bit by bit."""
    rng = np.random.default_rng(seed)

    def one() -> Any:
        bits = rng.normal(size=(heads, tokens, 64)).astype(np.float32).view(np.uint32) & 0xFFFF0000
        return bits.view(np.float32)

    return [(one(), one()) for _ in range(layers)]


def prepared(layers: int = 4, tokens: int = 64, seed: int = 0) -> PreparedKV:
    return prepare_arrays(arrays(layers, tokens, seed), dtype="fp32", model="test", wire_dtype="bf16")


def as_float(kv: ReceivedKV) -> list[tuple[Any, Any]]:
    """The received cache as float32."""
    return list(kv.float32())


def assert_bit_equal(kv: ReceivedKV, sent: list[tuple[Any, Any]]) -> None:
    assert kv.is_complete
    got = as_float(kv)
    assert len(got) == len(sent)
    for got_pair, sent_pair in zip(got, sent, strict=True):
        for got_part, sent_part in zip(got_pair, sent_pair, strict=True):
            assert np.array_equal(got_part.view(np.uint32), sent_part.view(np.uint32))


def assert_nothing_foreign(kv: ReceivedKV, sent: list[tuple[Any, Any]]) -> None:
    """Every element is the one sent or zero: no memory of anybody else shows through the holes."""
    for got_pair, sent_pair in zip(as_float(kv), sent, strict=True):
        for got_part, sent_part in zip(got_pair, sent_pair, strict=True):
            got_bits, sent_bits = got_part.view(np.uint32), sent_part.view(np.uint32)
            assert bool(((got_bits == sent_bits) | (got_bits == 0)).all())


# waiting


async def until(done: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not done():  # noqa: ASYNC110  (a condition over several objects)
            await asyncio.sleep(0.005)


# servers


@dataclass
class Served:
    """A listening server and what it received."""

    listener: Listener
    handler: Any
    received: list[ReceivedKV]
    limits: Limits

    @property
    def port(self) -> int:
        return self.listener.port

    @property
    def admissions(self) -> Admissions:
        admissions: Admissions = self.handler.admissions
        return admissions

    def receivers(self) -> int:
        """Transfers that any connection still holds anything of."""
        return sum(len(protocol.quic.receivers) for protocol in self.listener.protocols)

    def idle(self) -> bool:
        """Nothing of any hand-off is left: no place, no byte, no receiver, no record of the stream."""
        return (
            self.admissions.active == 0
            and self.admissions.bytes == 0
            and self.receivers() == 0
            and not any(protocol._incoming for protocol in self.listener.protocols)  # type: ignore[attr-defined]
        )


@asynccontextmanager
async def serving(
    handler: Any = None,
    *,
    token: str | None = None,
    max_transfers: int = 8,
    max_bytes: int = 1 << 30,
    limits: Limits | None = None,
    on_kv: Callable[[ReceivedKV], Any] | None = None,
    **options: Any,
) -> AsyncIterator[Served]:
    """A server on a free port of loopback that keeps what it received, or that `handler` decides for."""
    received: list[ReceivedKV] = []
    if handler is None:

        def keep(kv: ReceivedKV) -> Any:
            received.append(kv)
            return on_kv(kv) if on_kv is not None else None

        handler = CallbackHandler(keep, token=token, admissions=Admissions(max_transfers, max_bytes))
    cert, key = certificate()
    limits = limits or Limits()
    listener = await serve(port=0, certificate=cert, private_key=key, handler=handler, limits=limits, **options)
    try:
        yield Served(listener, handler, received, limits)
    finally:
        listener.close()
        for protocol in listener.protocols:
            protocol.abandon()
        async with asyncio.timeout(PATIENCE_S):
            await listener.wait_closed()


def connecting(server: Served | int, **options: Any) -> Any:
    """`connect` to a server or port of loopback."""
    port = server if isinstance(server, int) else server.port
    options.setdefault("server_name", "localhost")
    return connect("127.0.0.1", port, ca_certs=certificate()[0], **options)


@contextmanager
def relaying(
    server: Served, *, rate_bps: float = 5e6, owd_s: float = 0.010, loss: GilbertElliott | None = None, seed: int = 1
) -> Iterator[Relay]:
    """A relay before the server, in a thread."""
    options = RelayOptions(upstream=("127.0.0.1", server.port), rate_bps=rate_bps, owd_s=owd_s, loss=loss, seed=seed)
    with Relay(options) as relay:
        yield relay


# hostile peers


class HostileConnection(PfecConnection):
    """Sends the frames that it is given, whatever they say; looks at nobody's feedback."""

    def setup(self, *args: Any, **options: Any) -> None:
        super().setup(*args, **options)
        self.queue: deque[OutFrame] = deque()
        self.acks: list[frames.PfecAckFrame] = []

    def has_frame(self, now: float) -> bool:
        return bool(self.queue)

    def next_frame(self, now: float, space: int) -> OutFrame | None:
        if not self.queue or 4 + len(self.queue[0].body) > space:
            return None
        return self.queue.popleft()

    def _feedback_received(self, ack: frames.PfecAckFrame) -> None:
        self.acks.append(ack)


@dataclass
class Heard:
    """What came on one stream."""

    messages: list[messages.Message] = field(default_factory=list)
    ended: bool = False
    stopped: int | None = None
    reset: int | None = None

    def refusal(self) -> messages.Refused | None:
        return next((message for message in self.messages if isinstance(message, messages.Refused)), None)


class Hostile(ExtensionProtocol[HostileConnection]):
    """A client that does as it is told."""

    def __init__(self, quic: HostileConnection) -> None:
        super().__init__(quic)
        self.heard: dict[int, Heard] = {}
        self._readers: dict[int, messages.MessageReader] = {}

    def quic_event_received(self, event: QuicEvent) -> None:
        if isinstance(event, StreamDataReceived):
            reader = self._readers.setdefault(event.stream_id, messages.MessageReader(Limits(), messages.Role.SENDER))
            heard = self.on(event.stream_id)
            heard.messages += reader.feed(event.data)
            heard.ended |= event.end_stream
        elif isinstance(event, StopSendingReceived):
            self.on(event.stream_id).stopped = event.error_code
        elif isinstance(event, StreamReset):
            self.on(event.stream_id).reset = event.error_code

    def on(self, stream_id: int) -> Heard:
        return self.heard.setdefault(stream_id, Heard())

    def write(self, stream_id: int, data: bytes, last: bool = False) -> None:
        self.quic.send_stream_data(stream_id, data, last)
        self.transmit()

    def send(self, *sent: Any) -> None:
        """Queues frames of the extension, and sends as many as congestion control lets."""
        kinds = {
            frames.SourceFrame: frames.SOURCE,
            frames.RepairFrame: frames.REPAIR,
            frames.ManifestFrame: frames.MANIFEST,
            frames.PfecAckFrame: frames.PFEC_ACK,
        }
        self.quic.queue.extend(OutFrame(kinds[type(frame)], frame.body(), None) for frame in sent)
        self.transmit()

    async def refused(self, stream_id: int = 0) -> messages.Refused:
        await until(lambda: self.on(stream_id).refusal() is not None or self.terminated is not None)
        refusal = self.on(stream_id).refusal()
        assert refusal is not None, f"closed instead: {self.terminated}"
        return refusal

    async def closed(self) -> int:
        """The error code with which the server closed."""
        await until(lambda: self.terminated is not None)
        assert self.terminated is not None
        return self.terminated.error_code


@asynccontextmanager
async def attacking(server: Served, **options: Any) -> AsyncIterator[Hostile]:
    config = configuration(is_client=True, ca_certs=certificate()[0], server_name="localhost")
    async with open_connection(
        "127.0.0.1", server.port, configuration=config, make_protocol=Hostile, connection_class=HostileConnection,
        options={"limits": Limits(), **options},
    ) as hostile:  # fmt: skip
        yield hostile
        hostile.close()
        hostile.abandon()  # the closing period of three PTO is another test's affair


def opening(
    kv: PreparedKV,
    *,
    remaining_us: int = 5_000_000,
    mode: Any = "symbols",
    token: str = "",
    manifest: bytes | None = None,
    start: bool = True,
    base: int = 0,
) -> bytes:
    """The first bytes of a transfer's stream."""
    data = encode_manifest(kv.manifest(kv.layout.symbol_size(), "mask", base)) if manifest is None else manifest
    parts: list[messages.Message] = [messages.Open(remaining_us, data, mode, token)]
    if start:
        parts.append(messages.Start())
    return messages.STREAM_PREAMBLE + b"".join(map(messages.encode_message, parts))


def sources(kv: PreparedKV, transfer_id: int = 0) -> list[frames.SourceFrame]:
    """Every symbol of a cache as a frame."""
    encoder, _ = kv.symbols(kv.layout.symbol_size())
    return [frames.SourceFrame(transfer_id, sid, bytes(encoder.symbol(sid))) for sid in range(encoder.count)]


def repair(
    kv: PreparedKV,
    number: int,
    first: int,
    span: int,
    *,
    degree: int = 48,
    transfer_id: int = 0,
    symbol: bytes | None = None,
) -> frames.RepairFrame:
    """A repair over `span` ids from `first` on; honest unless `symbol` is given."""
    size = kv.layout.symbol_size()
    header = frames.RepairHeader(transfer_id, number, first, degree, 0, b"", 0, span)
    if symbol is None:
        symbol = kv.symbols(size)[0].repair(transfer_id, number, first, degree, 0, b"", 0, span)
    return frames.RepairFrame(header, symbol)


async def still_serves(server: Served, seed: int = 99) -> None:
    """The server takes an honest hand-off, whatever happened to it before."""
    from quic_pfec.client import send_kv

    cache = arrays(2, 16, seed)
    before = len(server.received)
    async with connecting(server) as conn:
        report = await send_kv(conn, cache, 20.0)
    assert report.confirmed
    assert report.j_block == 1.0
    if len(server.received) > before:
        assert_bit_equal(server.received[-1], cache)


def protocol_of(conn: Connection) -> PfecProtocol:
    return conn.protocol


def descriptors() -> int:
    """Open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    """Memory of this process that is in RAM, without what the allocator only keeps for later (glibc)."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class SilentConnection(HostileConnection):
    """A receiver that tells nobody what it has."""

    def has_feedback(self, now: float) -> bool:
        return False


@asynccontextmanager
async def hostile_server(connection_class: type[HostileConnection] = SilentConnection) -> AsyncIterator[Listener]:
    """A server that shakes hands, extension included, and then does only what a test tells it to."""
    config = configuration(is_client=False, certificate=certificate())
    listener = await listen(
        "127.0.0.1", 0, configuration=config, make_protocol=HostileServer, connection_class=connection_class
    )
    try:
        yield listener
    finally:
        listener.close()
        for protocol in listener.protocols:
            protocol.abandon()
        await listener.wait_closed()


class HostileServer(Hostile):
    """Reads what a sender says on its streams."""

    def quic_event_received(self, event: QuicEvent) -> None:
        if isinstance(event, StreamDataReceived):
            reader = self._readers.setdefault(event.stream_id, messages.MessageReader(Limits(), messages.Role.RECEIVER))
            heard = self.on(event.stream_id)
            heard.messages += reader.feed(event.data)
            heard.ended |= event.end_stream
        else:
            super().quic_event_received(event)


async def only(listener: Listener) -> HostileServer:
    """The one connection of a hostile server."""
    await until(lambda: len(listener.protocols) == 1)
    (protocol,) = listener.protocols
    assert isinstance(protocol, HostileServer)
    return protocol
