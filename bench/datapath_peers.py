"""The other stacks of `bench.datapath`: aioquic and qh3 as they are, plain UDP with and without offload, kernel TCP."""

from __future__ import annotations

import asyncio
import importlib
import socket
import ssl
import struct
import time
from multiprocessing.connection import Connection as Pipe
from typing import Any

from bench.datapath_meter import DATAGRAM, IDLE_S, Meter, Task

SOL_UDP, UDP_SEGMENT, UDP_GRO = 17, 103, 104  # linux/udp.h
SEGMENTS = 44
BUFFER_BYTES = 4 << 20
WINDOW_BYTES = 1 << 30  # no flow control in the way


def _config(task: Task, *, is_client: bool) -> Any:
    library = importlib.import_module(f"{task.library}.quic.configuration")
    config = library.QuicConfiguration(
        is_client=is_client, alpn_protocols=["bench"], max_datagram_frame_size=1500, max_datagram_size=1452,
        max_data=WINDOW_BYTES, max_stream_data=WINDOW_BYTES,
    )  # fmt: skip
    if is_client:
        config.server_name = "localhost"
        if task.library == "aioquic":
            config.load_verify_locations(task.cert)
        else:  # its TLS refuses an authority that is a server too
            config.verify_mode = ssl.CERT_NONE
    else:
        config.load_cert_chain(task.cert, task.key)
    return config


# DATAGRAM frames


async def receive_datagrams(pipe: Pipe, task: Task) -> dict[str, float]:
    quic, events = (importlib.import_module(f"{task.library}.{name}") for name in ("asyncio", "quic.events"))
    meter = Meter()

    class Counting(quic.QuicConnectionProtocol):  # type: ignore[name-defined,misc]
        def quic_event_received(self, event: Any) -> None:
            if isinstance(event, events.DatagramFrameReceived):
                meter.count(1)

    server = await quic.serve("127.0.0.1", 0, configuration=_config(task, is_client=False), create_protocol=Counting)
    pipe.send(server._transport.get_extra_info("sockname")[1])
    await meter.all_here(task.packets)
    server.close()
    return meter.figures()


async def send_datagrams(port: int, task: Task) -> dict[str, float]:
    quic = importlib.import_module(f"{task.library}.asyncio")
    data = bytes(DATAGRAM)
    async with quic.connect("127.0.0.1", port, configuration=_config(task, is_client=True)) as protocol:
        connection = protocol._quic
        started_s, began_s = time.process_time(), time.monotonic()
        for sent in range(task.packets):
            connection.send_datagram_frame(data)
            if sent % 16 == 15:
                protocol.transmit()
                while len(connection._datagrams_pending) > 64:  # noqa: ASYNC110  (aioquic has no back pressure)
                    await asyncio.sleep(0)
        while connection._datagrams_pending:
            protocol.transmit()
            await asyncio.sleep(0)
        return {
            "packets": task.packets,
            "cpu_s": time.process_time() - started_s,
            "wall_s": time.monotonic() - began_s,
        }


# one stream; packets are the datagrams that the receiver read


async def receive_stream(pipe: Pipe, task: Task) -> dict[str, float]:
    quic, events = (importlib.import_module(f"{task.library}.{name}") for name in ("asyncio", "quic.events"))
    meter, whole = Meter(), asyncio.Event()

    class Counting(quic.QuicConnectionProtocol):  # type: ignore[name-defined,misc]
        bytes_read = arrived = 0

        def datagram_received(self, data: Any, addr: Any) -> None:
            self.arrived += 1
            super().datagram_received(data, addr)

        def datagrams_received(self, data: list[bytes], addr: Any) -> None:  # qh3 alone has batches
            self.arrived += len(data)
            super().datagrams_received(data, addr)

        def quic_event_received(self, event: Any) -> None:
            if not isinstance(event, events.StreamDataReceived):
                return
            meter.count(self.arrived)
            self.arrived = 0
            self.bytes_read += len(event.data)
            if event.end_stream:
                self._quic.send_stream_data(event.stream_id, b"!", end_stream=True)
                whole.set()

    server = await quic.serve("127.0.0.1", 0, configuration=_config(task, is_client=False), create_protocol=Counting)
    pipe.send(server._transport.get_extra_info("sockname")[1])
    await whole.wait()
    figures = meter.figures()
    await asyncio.sleep(0.1)  # the answer leaves
    server.close()
    return figures


async def send_stream(port: int, task: Task) -> dict[str, float]:
    quic, events = (importlib.import_module(f"{task.library}.{name}") for name in ("asyncio", "quic.events"))
    answered = asyncio.Event()

    class Waiting(quic.QuicConnectionProtocol):  # type: ignore[name-defined,misc]
        def quic_event_received(self, event: Any) -> None:
            if isinstance(event, events.StreamDataReceived):
                answered.set()

    async with quic.connect(
        "127.0.0.1", port, configuration=_config(task, is_client=True), create_protocol=Waiting
    ) as protocol:
        connection = protocol._quic
        data = bytes(task.packets * DATAGRAM)
        started_s, began_s = time.process_time(), time.monotonic()
        connection.send_stream_data(connection.get_next_available_stream_id(), data, end_stream=True)
        protocol.transmit()
        await answered.wait()
        used_s, wall_s = time.process_time() - started_s, time.monotonic() - began_s
    return {"packets": 0, "cpu_s": used_s, "wall_s": wall_s}  # as many as the receiver saw


# UDP


def receive_udp(pipe: Pipe, task: Task) -> dict[str, float]:
    meter = Meter()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        sock.bind(("127.0.0.1", 0))
        if task.offload:
            sock.setsockopt(SOL_UDP, UDP_GRO, 1)
        pipe.send(sock.getsockname()[1])
        while meter.seen < task.packets:
            try:
                if task.offload:
                    data = sock.recvmsg(65535, socket.CMSG_SPACE(4))[0]
                else:
                    data = sock.recv(65535)
            except TimeoutError:
                break
            if meter.seen == 0:
                sock.settimeout(IDLE_S)
            meter.count(-(-len(data) // DATAGRAM))
    return meter.figures()


def send_udp(port: int, task: Task) -> dict[str, float]:
    """As fast as the sender can: what the receiver cannot keep up with is lost."""
    segments = SEGMENTS if task.offload else 1
    data, option = bytes(DATAGRAM * segments), [(SOL_UDP, UDP_SEGMENT, struct.pack("=H", DATAGRAM))]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        sock.connect(("127.0.0.1", port))
        sent = 0
        started_s, began_s = time.process_time(), time.monotonic()
        while sent < task.packets:
            if task.offload:
                sock.sendmsg([data], option)
            else:
                sock.send(data)
            sent += segments
        return {"packets": sent, "cpu_s": time.process_time() - started_s, "wall_s": time.monotonic() - began_s}


def has_offload() -> bool:
    """Whether this system takes UDP_SEGMENT and UDP_GRO."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.setsockopt(SOL_UDP, UDP_SEGMENT, 0)
            sock.setsockopt(SOL_UDP, UDP_GRO, 1)
        except OSError:
            return False
    return True


# kernel TCP, in units of 1,400 bytes


def receive_tcp(pipe: Pipe, task: Task) -> dict[str, float]:
    meter, rest = Meter(), 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        peer, _ = server.accept()
        with peer:
            while data := peer.recv(1 << 16):
                packets, rest = divmod(rest + len(data), DATAGRAM)
                meter.count(packets)
    return meter.figures()


def send_tcp(port: int, task: Task) -> dict[str, float]:
    data = bytes(DATAGRAM * SEGMENTS)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sent = 0
        started_s, began_s = time.process_time(), time.monotonic()
        while sent < task.packets:
            sock.sendall(data)
            sent += SEGMENTS
        return {"packets": sent, "cpu_s": time.process_time() - started_s, "wall_s": time.monotonic() - began_s}
