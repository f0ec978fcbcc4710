from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import ConnectionTerminated, QuicEvent, StreamDataReceived
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from quic_pfec.quic.configuration import configuration
from quic_pfec.quic.congestion import Congestion
from quic_pfec.quic.endpoint import ExtensionProtocol, Listener, listen, open_connection
from quic_pfec.quic.udp import UdpSocket
from quic_pfec.wire.errors import LocalError

from .quic_pair import certificate, client_configuration, server_configuration
from .quic_toy import FastToy, Toy, frame

pytestmark = pytest.mark.sockets


class Echo(ExtensionProtocol[Toy]):
    """Sends stream data back; remembers events; may be told to fail."""

    def __init__(self, quic: Toy, fail: Exception | None = None) -> None:
        super().__init__(quic)
        self.seen: list[QuicEvent] = []
        self.transmissions = 0
        self.fail = fail

    def quic_event_received(self, event: QuicEvent) -> None:
        self.seen.append(event)
        if isinstance(event, StreamDataReceived):
            if self.fail is not None:
                raise self.fail
            if not self.quic.is_client:
                self.quic.send_stream_data(event.stream_id, event.data, event.end_stream)
                self.transmit_soon()

    def after_transmit(self) -> None:
        self.transmissions += 1

    def stream(self) -> bytes:
        return b"".join(event.data for event in self.seen if isinstance(event, StreamDataReceived))


async def until(done: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not done():  # noqa: ASYNC110  (a condition over several objects)
            await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(
    make: Callable[[Any], ExtensionProtocol[Any]] = Echo, host: str = "127.0.0.1", **rest: Any
) -> AsyncIterator[Listener]:
    rest.setdefault("configuration", server_configuration())
    rest.setdefault("connection_class", Toy)
    async with await listen(host, 0, make_protocol=make, **rest) as listener:
        yield listener


def connecting(listener: Listener, host: str = "127.0.0.1", **rest: Any) -> Any:
    rest.setdefault("configuration", client_configuration())
    rest.setdefault("connection_class", Toy)
    return open_connection(host, listener.port, make_protocol=Echo, **rest)


async def exchange(client: Any) -> None:
    client.quic.send_stream_data(0, bytes(300_000), end_stream=True)
    client.quic.queue.extend(frame(content=bytes([n]) * 500) for n in range(20))
    client.transmit()
    await until(lambda: len(client.stream()) == 300_000)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_streams_and_frames_over_sockets(host: str) -> None:
    async with serving(host=host) as listener, connecting(listener, host) as client:
        await exchange(client)
        (server,) = listener.protocols
        await until(lambda: len(server.quic.received) == 20)
        assert client.transmissions > 0
    assert isinstance(client.seen[-1], ConnectionTerminated)


async def test_nothing_is_left_behind() -> None:
    before = set(asyncio.all_tasks())
    async with serving() as listener:
        for _ in range(3):
            async with connecting(listener) as client:
                await exchange(client)
        await until(lambda: not listener.protocols)
        assert listener._routes == {}
    assert set(asyncio.all_tasks()) == before
    assert client._timer.at_s is None
    assert not client._timer.precise  # its file is closed
    assert client._udp._sock.fileno() == -1
    assert listener._udp._sock.fileno() == -1
    gc.collect()  # a socket left open would warn here, and the warning is an error


async def test_many_datagrams_cause_one_transmission_a_turn() -> None:
    async with serving() as listener, connecting(listener) as client:
        await exchange(client)
        (server,) = listener.protocols
        before, packets = server.transmissions, len(server.quic.received)
        client.quic.queue.extend(frame(content=bytes(1300)) for _ in range(400))
        client.transmit()
        await until(lambda: len(server.quic.received) == packets + 400)
        assert server.transmissions - before < 400


@pytest.mark.parametrize("rate_bps", [20e6])
async def test_a_provisioned_rate_is_kept_by_real_timers(rate_bps: float) -> None:
    options = {"total": 10**9}
    async with (
        serving() as listener,
        connecting(listener, options=options, congestion=Congestion("rate", rate_bps)) as client,
    ):
        await until(lambda: client.quic.sent > 50)
        start_s, sent = time.monotonic(), client.quic.sent
        await until(lambda: client.quic.sent >= sent + 500)
        took_s = time.monotonic() - start_s
        assert client.quic.has_own_pacer
        # The pacer allows no more, however late or early timers come; how much less depends on the machine.
        assert (client.quic.sent - sent) * 1438 * 8 <= rate_bps * (took_s + 0.005) + 4 * 1480 * 8
        client.quic.total = 0


async def asleep(*protocols: Any) -> None:
    """Returns once a quarter of a second has passed in which no timer woke them."""
    before = -1
    async with asyncio.timeout(20):
        while (now := sum(protocol.wake_ups for protocol in protocols)) != before:
            before = now
            await asyncio.sleep(0.25)


async def test_an_idle_connection_is_not_woken() -> None:
    async with (
        serving() as listener,
        connecting(listener, options={"total": 300}, congestion=Congestion("rate", 20e6)) as client,
    ):
        (server,) = listener.protocols
        await until(lambda: len(server.quic.received) == 300)
        assert client.wake_ups > 10  # the pacer's: 300 packets take 100 ms and leave in tens
        await asleep(client, server)
        for protocol in (client, server):
            assert protocol._timer.at_s > time.monotonic() + 1.0  # the idle timeout alone
            assert not protocol._timer._file_set


async def test_a_larger_burst_wakes_less_often() -> None:
    wakes = []
    for burst_s in (0.002, 0.02):
        congestion = Congestion("rate", 20e6, burst_s=burst_s)
        async with (
            serving(connection_class=FastToy) as listener,
            connecting(listener, connection_class=FastToy, congestion=congestion) as client,
        ):
            assert client.quic.pacing_tick_s == burst_s
            (server,) = listener.protocols
            await asleep(client, server)
            before = client.wake_ups
            client.quic.total = 300
            client.transmit()
            await until(lambda: len(server.quic.received) == 300)  # noqa: B023
            wakes.append(client.wake_ups - before)
    assert wakes[1] < wakes[0]


def test_the_same_on_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test_an_idle_connection_is_not_woken())


async def test_a_failing_hook_closes_its_connection_only() -> None:
    made: list[Echo] = []

    def make(quic: Toy) -> Echo:
        made.append(Echo(quic, KeyError("a bug") if not made else None))
        return made[-1]

    async with serving(make) as listener, connecting(listener) as first, connecting(listener) as second:
        first.quic.send_stream_data(0, b"x")
        first.transmit()
        await exchange(second)
        await until(lambda: first.terminated is not None)
        assert first.terminated.error_code == 1
    assert made[0].bugs >= 1
    assert made[1].bugs == 0


@pytest.mark.parametrize("method", ["receive_datagram", "datagrams_to_send", "handle_timer", "get_timer"])
async def test_a_failing_connection_does_not_take_the_endpoint_down(method: str) -> None:
    def broken(*args: Any, **rest: Any) -> Any:
        raise AssertionError(method)

    async with serving() as listener, connecting(listener):
        (server,) = listener.protocols
        setattr(server.quic, method, broken)
        async with connecting(listener) as other:
            await exchange(other)
        server.transmit_soon()
        if method == "handle_timer":
            server._deadline = time.monotonic()
            server._on_timer()
        await until(lambda: server.bugs > 0)
        for _ in range(3):
            server._bug(AssertionError("to the end"))
        await server.wait_closed()
        assert server not in listener.protocols


async def test_datagrams_of_no_connection_are_ignored() -> None:
    async with serving() as listener:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for data in (b"", b"\x40", b"\xc0" + bytes(5), bytes([0x40]) + bytes(40), bytes([0xC0]) + bytes(1300)):
                sock.sendto(data, ("127.0.0.1", listener.port))
        async with connecting(listener) as client:
            await exchange(client)


async def test_unknown_versions_are_negotiated() -> None:
    changes = {"original_version": 0x1A2A3A4A}
    config = client_configuration(**changes)
    config.supported_versions = [0x1A2A3A4A, 1]
    async with serving() as listener, connecting(listener, configuration=config) as client:
        await exchange(client)


async def test_connections_beyond_the_limit_are_refused_at_once() -> None:
    async with serving(max_connections=1) as listener, connecting(listener):
        with pytest.raises(ConnectionError, match="0x2"):
            async with connecting(listener, timeout_s=10.0):
                pass
        assert listener.refused >= 1


async def test_retry_proves_the_address() -> None:
    async with serving(retry=True) as listener, connecting(listener) as client:
        await exchange(client)
        assert client.quic._retry_count == 1


async def test_a_retry_token_of_somebody_else_is_refused() -> None:
    async with serving(retry=True) as listener:
        with pytest.raises(ConnectionError, match="0xb"):
            async with connecting(listener, configuration=client_configuration(token=bytes(64))):
                pass


async def test_nobody_answers() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionError, match="no answer"):
            async with open_connection(
                "127.0.0.1",
                silent.getsockname()[1],
                configuration=client_configuration(),
                make_protocol=Echo,
                connection_class=Toy,
                timeout_s=0.2,
            ):
                pass


async def test_a_wrong_certificate_is_refused() -> None:
    async with serving() as listener:
        with pytest.raises(ConnectionError):
            async with connecting(listener, configuration=client_configuration(server_name="elsewhere")):
                pass


async def test_a_peer_that_disappears_is_noticed() -> None:
    config = server_configuration(idle_timeout=0.3)
    async with serving(configuration=config) as listener, connecting(listener) as client:
        (server,) = listener.protocols
        client._udp.close()
        await server.wait_closed()
        assert server.terminated.reason_phrase == "Idle timeout"
        client.abandon()


async def test_closing_the_server_tells_its_clients() -> None:
    async with serving() as listener, connecting(listener) as client:
        await exchange(client)
        listener.close()
        await listener.wait_closed()
        await client.wait_closed()
        assert client.terminated.error_code == 0
        client.transmit()
        client.transmit_soon()
        client.close()


async def test_an_address_that_is_taken() -> None:
    async with serving() as listener:
        with pytest.raises(OSError, match="in use"):
            await listen("127.0.0.1", listener.port, configuration=server_configuration(), make_protocol=Echo)


async def test_a_cancelled_connect_leaves_nothing() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))

        async def attempt() -> None:
            async with open_connection(
                "127.0.0.1",
                silent.getsockname()[1],
                configuration=client_configuration(),
                make_protocol=Echo,
                connection_class=Toy,
            ):
                pass

        task = asyncio.create_task(attempt())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    gc.collect()


# ---- the socket ------------------------------------------------------------------------------------------------------


class FullSocket:
    """A socket whose send buffer is full, then breaks for one datagram, then is empty."""

    def __init__(self, real: socket.socket) -> None:
        self.real = real
        self.full = True
        self.broken: set[bytes] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def sendto(self, data: bytes, addr: Any) -> int:
        if self.full:
            raise BlockingIOError
        if data in self.broken:
            raise OSError("refused")
        return self.real.sendto(data, addr)


async def test_a_full_send_buffer_keeps_the_order() -> None:
    got: list[bytes] = []
    left, right = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    for sock in (left, right):
        sock.bind(("127.0.0.1", 0))
    full = FullSocket(left)
    sender = UdpSocket(full, lambda datagrams, addr: None)  # type: ignore[arg-type]
    receiver = UdpSocket(right, lambda datagrams, addr: got.extend(datagrams))
    full.broken.add(b"bad")
    for data in (b"1", b"bad", b"2"):
        sender.sendto(data, right.getsockname())
    full.full = False
    sender.sendto(b"3", right.getsockname())
    await until(lambda: got == [b"1", b"2", b"3"])
    sender.sendto(b"bad", right.getsockname())
    assert sender.send_errors == 2
    full.full = True
    for _ in range(1100):
        sender.sendto(b"x", right.getsockname())
    assert sender.send_errors == 2 + 1100 - 1024
    for udp in (sender, receiver):
        udp.close()
        udp.close()
    sender.sendto(b"after the end", ("127.0.0.1", 9))


# ---- configuration ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    made, key = certificate()
    folder: Path = tmp_path_factory.mktemp("certificate")
    (folder / "cert.pem").write_bytes(made.public_bytes(Encoding.PEM))
    (folder / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return str(folder / "cert.pem"), str(folder / "key.pem")


async def test_files_make_a_working_pair(files: tuple[str, str], tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    server = configuration(is_client=False, certificate=files, secrets_log=str(secrets), quic_log=str(tmp_path))
    client = configuration(is_client=True, ca_certs=files[0], server_name="localhost")
    async with serving(configuration=server) as listener, connecting(listener, configuration=client) as protocol:
        await exchange(protocol)
    assert secrets.read_text().count("\n") >= 4
    assert "pfec_source" in "".join(path.read_text() for path in logs(tmp_path))
    assert server.secrets_log_file is not None
    server.secrets_log_file.close()


def logs(folder: Path) -> list[Path]:
    return list(folder.glob("*.qlog"))


@pytest.mark.parametrize("shown", [True, False])
async def test_mutual_tls(files: tuple[str, str], shown: bool) -> None:
    server = configuration(is_client=False, certificate=files, client_ca=files[0])
    client = configuration(
        is_client=True, ca_certs=files[0], server_name="localhost", certificate=files if shown else None
    )
    async with serving(configuration=server) as listener:
        if shown:
            async with connecting(listener, configuration=client) as protocol:
                await exchange(protocol)
            return
        async with connecting(listener, configuration=client) as protocol:
            # In TLS 1.3 a client has finished before the server judges its certificate.
            await until(lambda: protocol.terminated is not None)
            assert protocol.terminated.error_code == 0x100 + 116


async def test_mutual_tls_refuses_other_authorities(files: tuple[str, str], other: tuple[str, str]) -> None:
    server = configuration(is_client=False, certificate=files, client_ca=files[0])
    client = configuration(is_client=True, ca_certs=files[0], server_name="localhost", certificate=other)
    async with serving(configuration=server) as listener, connecting(listener, configuration=client) as protocol:
        protocol.quic.send_stream_data(0, b"let me in")
        protocol.transmit()
        await until(lambda: protocol.terminated is not None)
        assert 0x100 < protocol.terminated.error_code < 0x200
        assert protocol.stream() == b""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    made, key = certificate.__wrapped__()
    folder: Path = tmp_path_factory.mktemp("other")
    (folder / "cert.pem").write_bytes(made.public_bytes(Encoding.PEM))
    (folder / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return str(folder / "cert.pem"), str(folder / "key.pem")


def test_defaults() -> None:
    made = configuration(is_client=True, insecure=True)
    assert isinstance(made, QuicConfiguration)
    assert made.alpn_protocols == ["pfec/1"]
    assert made.max_datagram_size == 1452
    assert made.idle_timeout == 30.0
    assert made.max_datagram_frame_size is None


@pytest.mark.parametrize(
    "options",
    [
        {"is_client": True, "max_datagram_size": 1199},
        {"is_client": True, "idle_timeout_s": 0.0},
        {"is_client": True, "client_ca": "x"},
        {"is_client": False},
        {"is_client": False, "certificate": ("a", "b"), "insecure": True},
    ],
)
def test_contradictions_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(LocalError):
        configuration(**options)
