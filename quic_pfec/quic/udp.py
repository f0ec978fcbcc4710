"""One UDP socket on an event loop: batches in, runs out, no waiting.

Where the kernel can, one system call carries a run of datagrams: UDP_GRO hands over what came back to back from one
address, UDP_SEGMENT takes packets of one size of which only the last may be shorter (Linux). Where it cannot, or says
so later, each datagram goes by itself; nothing above notices.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from aioquic.quic.connection import NetworkAddress

__all__ = ["UdpSocket"]

SOL_UDP = 17
UDP_SEGMENT, UDP_GRO = 103, 104  # linux/udp.h
READS = 16  # reads of a wake-up before others get their turn; the socket stays readable for the rest
BUFFER_BYTES = 4 << 20  # 40 ms at 1 Gbit/s; the kernel may grant less
BACKLOG = 1024  # datagrams kept while the kernel's buffer is full; beyond it they are lost, as in any queue
MAX_DATAGRAM = 65535
MAX_SEGMENTS = 44  # of 1,452 bytes: within the 64 KiB and the 64 segments that one call may carry
_NO_SEGMENTATION = {errno.EIO, errno.EINVAL, errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EMSGSIZE}


class UdpSocket:
    """Owns `sock` and reads it until `close`. `on_datagrams` gets every datagram, empty ones too.

    They come in batches, each from one address. Sending never blocks and never raises: a datagram that the system
    refuses is lost, which is what the connection above can handle, and counted in `send_errors`. offload=False: a
    system call for every datagram.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_datagrams: Callable[[Sequence[bytes], NetworkAddress], None],
        *,
        offload: bool = True,
    ) -> None:
        self.send_errors = 0
        self.receive_errors = 0
        self.runs_sent = 0
        """Runs of more than one datagram that left by one system call."""
        self.runs_received = 0
        self._sock = sock
        self._on_datagrams = on_datagrams
        self._backlog: deque[tuple[bytes, NetworkAddress]] = deque()
        self._closed = False
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        self._segmentation = self._has(UDP_SEGMENT, 0) if offload else False
        self._gro = self._has(UDP_GRO, 1) if offload else False
        self._loop.add_reader(sock, self._readable)

    def _has(self, option: int, value: int) -> bool:
        try:
            self._sock.setsockopt(SOL_UDP, option, value)
        except (OSError, AttributeError):
            return False
        return True

    # sending

    def sendto(self, data: bytes | memoryview, addr: NetworkAddress) -> None:
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

    def send_run(self, data: bytes | memoryview, size: int, addr: NetworkAddress) -> None:
        """Datagrams of `size` bytes, one behind the other in `data`, of which the last may be shorter.

        `data` may change once this has returned.
        """
        step = size * MAX_SEGMENTS
        for start in range(0, len(data), step):
            part = data[start : start + step]
            if len(part) <= size or not self._sent_together(part, size, addr):
                for cut in range(0, len(part), size):
                    self.sendto(part[cut : cut + size], addr)

    def _sent_together(self, data: bytes | memoryview, size: int, addr: NetworkAddress) -> bool:
        if not self._segmentation or self._backlog or self._closed:
            return False
        try:
            self._sock.sendmsg([data], [(SOL_UDP, UDP_SEGMENT, struct.pack("=H", size))], 0, addr)
        except (BlockingIOError, InterruptedError):
            return False  # singly, into the backlog
        except OSError as error:
            if error.errno in _NO_SEGMENTATION:  # this route or device cannot
                self._segmentation = False
                return False
            self.send_errors += -(-len(data) // size)
            return True
        self.runs_sent += 1
        return True

    def close(self) -> None:
        """Stops at once; what is still in the backlog is lost."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._backlog.clear()
        self._sock.close()

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

    def _keep(self, data: bytes | memoryview, addr: NetworkAddress) -> None:
        if len(self._backlog) >= BACKLOG:
            self.send_errors += 1
        else:
            self._backlog.append((bytes(data), addr))

    # receiving

    def _readable(self) -> None:
        batch: list[bytes] = []
        source: NetworkAddress | None = None
        for _ in range(READS):
            if self._closed:
                return
            try:
                data, size, addr = self._read()
            except (BlockingIOError, InterruptedError):
                break
            except OSError:  # an ICMP error of an earlier datagram; anyone may forge one, so it closes nothing
                self.receive_errors += 1
                continue
            if addr != source:
                if source is not None:
                    self._on_datagrams(batch, source)
                batch, source = [], addr
            if len(data) > size > 0:
                self.runs_received += 1
                batch.extend(data[start : start + size] for start in range(0, len(data), size))
            else:
                batch.append(data)
        if source is not None and not self._closed:
            self._on_datagrams(batch, source)

    def _read(self) -> tuple[bytes, int, NetworkAddress]:
        """What one call brought, the size of its datagrams (0: one), and where it is from."""
        if not self._gro:
            data, addr = self._sock.recvfrom(MAX_DATAGRAM)
            return data, 0, addr
        data, ancillary, _, addr = self._sock.recvmsg(MAX_DATAGRAM, socket.CMSG_SPACE(4))
        for level, kind, value in ancillary:
            if level == SOL_UDP and kind == UDP_GRO:
                return data, int.from_bytes(value[:2], "little" if struct.pack("=H", 1)[0] else "big"), addr
        return data, 0, addr
