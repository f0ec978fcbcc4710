"""The UDP socket: runs arrive as they were sent, by one system call or by many, and refusals are taken in stride."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from quic_pfec.quic import udp as udp_module
from quic_pfec.quic.udp import UdpSocket

from .handoff_world import until

pytestmark = pytest.mark.sockets


class Ends:
    """Two sockets; what came to the right one, datagram by datagram and batch by batch."""

    def __init__(self, family: int, left: bool, right: bool, wrap: Callable[[socket.socket], Any]) -> None:
        host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
        socks = [socket.socket(family, socket.SOCK_DGRAM) for _ in range(2)]
        for sock in socks:
            sock.bind((host, 0))
        self.got: list[bytes] = []
        self.batches: list[int] = []
        self.address = socks[1].getsockname()
        self.sender = UdpSocket(wrap(socks[0]), lambda datagrams, addr: None, offload=left)
        self.receiver = UdpSocket(socks[1], self._came, offload=right)

    def _came(self, datagrams: Sequence[bytes], addr: Any) -> None:
        self.got.extend(datagrams)
        self.batches.append(len(datagrams))


@asynccontextmanager
async def ends(
    left: bool = True, right: bool = True, family: int = socket.AF_INET, wrap: Callable[[Any], Any] = lambda sock: sock
) -> AsyncIterator[Ends]:
    made = Ends(family, left, right, wrap)
    try:
        yield made
    finally:
        made.sender.close()
        made.receiver.close()


def run_of(count: int, size: int, last: int) -> tuple[bytes, list[bytes]]:
    cuts = [bytes([number]) * size for number in range(count)] + ([bytes([255]) * last] if last else [])
    return b"".join(cuts), cuts


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize(("count", "size", "last"), [(1, 1452, 0), (20, 1452, 0), (100, 1300, 700), (44, 1200, 1)])
async def test_runs_arrive_datagram_by_datagram(
    left: bool, right: bool, family: int, count: int, size: int, last: int
) -> None:
    async with ends(left, right, family) as both:
        data, cuts = run_of(count, size, last)
        buffer = bytearray(data)
        both.sender.send_run(memoryview(buffer), size, both.address)
        buffer[:] = bytes(len(buffer))  # it may change as soon as the call has returned
        await until(lambda: len(both.got) == len(cuts))
        assert both.got == cuts
        assert both.sender.send_errors == 0
        if not left:
            assert both.sender.runs_sent == 0
        if not right:
            assert both.receiver.runs_received == 0


async def test_datagrams_of_nothing_are_delivered() -> None:
    async with ends() as both:
        both.sender.sendto(b"", both.address)
        both.sender.sendto(b"x", both.address)
        await until(lambda: both.got == [b"", b"x"])


class Refusing:
    """A socket that will not send runs."""

    def __init__(self, real: socket.socket, code: int) -> None:
        self.real = real
        self.code = code
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def sendmsg(self, *args: Any) -> int:
        self.asked += 1
        raise OSError(self.code, "refused")


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL])
async def test_a_route_that_cannot_segment_is_asked_once(code: int) -> None:
    refusing: list[Refusing] = []

    def wrap(sock: socket.socket) -> Refusing:
        refusing.append(Refusing(sock, code))
        return refusing[0]

    async with ends(wrap=wrap) as both:
        both.sender._segmentation = True  # also where this system has none
        data, cuts = run_of(5, 100, 3)
        for _ in range(2):
            both.sender.send_run(data, 100, both.address)
        await until(lambda: both.got == cuts * 2)
        assert refusing[0].asked == 1
        assert both.sender.runs_sent == 0


async def test_a_run_behind_a_backlog_keeps_the_order() -> None:
    class Full:
        def __init__(self, real: socket.socket) -> None:
            self.real, self.full = real, True

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

        def sendto(self, data: bytes, addr: Any) -> int:
            if self.full:
                raise BlockingIOError
            return self.real.sendto(data, addr)

        def sendmsg(self, *args: Any) -> int:
            if self.full:
                raise BlockingIOError
            return self.real.sendmsg(*args)

    async with ends(wrap=Full) as both:
        first, cuts = run_of(5, 100, 3)
        both.sender.send_run(bytearray(first), 100, both.address)
        await asyncio.sleep(0.01)
        assert both.got == []
        both.sender._sock.full = False  # type: ignore[attr-defined]
        both.sender.send_run(first, 100, both.address)
        await until(lambda: both.got == cuts * 2)


async def test_one_wake_up_reads_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(udp_module, "READS", 2)
    async with ends(right=False) as both:
        for number in range(10):
            both.sender.sendto(bytes([number]), both.address)
        await until(lambda: len(both.got) == 10)
        assert max(both.batches) <= 2
