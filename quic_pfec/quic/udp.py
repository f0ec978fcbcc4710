"""One UDP socket on an event loop: batches in, no waiting out."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from aioquic.quic.connection import NetworkAddress

__all__ = ["UdpSocket"]

BATCH = 64  # datagrams a wake-up may read before others get their turn; the socket stays readable for the rest
BUFFER_BYTES = 4 << 20  # 40 ms at 1 Gbit/s; the kernel may grant less
BACKLOG = 1024  # datagrams kept while the kernel's buffer is full; beyond it they are lost, as in any queue
MAX_DATAGRAM = 65535


class UdpSocket:
    """Owns `sock` and reads it until `close`. `on_datagram` gets every datagram, empty ones too.

    Sending never blocks and never raises: a datagram that the system refuses is lost, which is what the connection
    above can handle, and counted in `send_errors`.
    """

    def __init__(self, sock: socket.socket, on_datagram: Callable[[bytes, NetworkAddress], None]) -> None:
        self.send_errors = 0
        self.receive_errors = 0
        self._sock = sock
        self._on_datagram = on_datagram
        self._backlog: deque[tuple[bytes, NetworkAddress]] = deque()
        self._closed = False
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        self._loop.add_reader(sock, self._readable)

    def sendto(self, data: bytes, addr: NetworkAddress) -> None:
        if self._closed:
            return
        if self._backlog:
            self._keep(data, addr)
            return
        try:
            self._sock.sendto(data, addr)
        except (BlockingIOError, InterruptedError):
            self._keep(data, addr)
            self._loop.add_writer(self._sock, self._writable)
        except OSError:
            self.send_errors += 1

    def close(self) -> None:
        """Stops at once; what is still in the backlog is lost."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._backlog.clear()
        self._sock.close()

    def _readable(self) -> None:
        for _ in range(BATCH):
            if self._closed:
                return
            try:
                data, addr = self._sock.recvfrom(MAX_DATAGRAM)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # an ICMP error of an earlier datagram; anyone may forge one, so it closes nothing
                self.receive_errors += 1
                continue
            self._on_datagram(data, addr)

    def _writable(self) -> None:
        while self._backlog:
            data, addr = self._backlog[0]
            try:
                self._sock.sendto(data, addr)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.send_errors += 1
            self._backlog.popleft()
        self._loop.remove_writer(self._sock)

    def _keep(self, data: bytes, addr: NetworkAddress) -> None:
        if len(self._backlog) >= BACKLOG:
            self.send_errors += 1
        else:
            self._backlog.append((data, addr))
