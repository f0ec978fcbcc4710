"""The size of datagrams follows the route, or what the user says of the path."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quic_pfec.client import connect, send_kv
from quic_pfec.quic import endpoint
from quic_pfec.quic.route import HEADERS, LARGEST_MTU, LEAST_MTU, datagram_size, route_mtu
from quic_pfec.quic.udp import UdpSocket
from quic_pfec.wire.errors import LocalError

from .handoff_world import arrays, assert_bit_equal, connecting, serving, until


def test_an_mtu_leaves_what_ip_and_udp_do_not_take() -> None:
    assert (datagram_size(LEAST_MTU), datagram_size(1280), datagram_size(LARGEST_MTU)) == (1200, 1232, 1452)


@pytest.mark.parametrize("mtu", [0, 1247, 1501, 1300.5, "1300", True])
def test_an_mtu_that_cannot_be(mtu: Any) -> None:
    with pytest.raises(LocalError, match="mtu is a whole number from 1248 to 1500"):
        datagram_size(mtu)


async def test_connect_says_so_before_it_connects() -> None:
    with pytest.raises(LocalError, match="mtu"):
        async with connect("127.0.0.1", 9, mtu=576):
            pass


@pytest.mark.sockets
@pytest.mark.parametrize("address", [("127.0.0.1", 9), ("::1", 9, 0, 0)])
def test_large_and_unknown_routes_count_as_1500(address: Any) -> None:
    assert route_mtu(address) == LARGEST_MTU  # of loopback: 65,536


ASK = """
from quic_pfec.quic.route import route_mtu
print(route_mtu(("127.0.0.1", 9)), route_mtu(("192.0.2.1", 9)))
"""


@pytest.mark.sockets
@pytest.mark.parametrize(("device", "expected"), [(1300, 1300), (9000, LARGEST_MTU), (600, LEAST_MTU)])
def test_the_route_is_asked(device: int, expected: int) -> None:
    """In a network namespace of our own, whose loopback is as narrow as a tunnel; 192.0.2.1 has no route there."""
    unshare, ip = shutil.which("unshare"), shutil.which("ip")
    if unshare is None or ip is None:
        pytest.skip("needs unshare and ip")
    space = [unshare, "-rn", "sh", "-c"]
    if subprocess.run([*space, f"{ip} link set lo mtu {device} up"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make network namespaces")
    script = f'{ip} link set lo mtu {device} up && exec "$0" -c "$1"'
    run = subprocess.run(
        [*space, script, sys.executable, ASK], capture_output=True, text=True, check=True, timeout=60,
        cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert run.stdout.split() == [str(expected), str(LARGEST_MTU)]


@pytest.mark.sockets
@pytest.mark.parametrize("by", ["route", "user"])
async def test_a_hand_off_through_a_tunnel(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    one, many = UdpSocket.sendto, UdpSocket._sent_together

    def sendto(self: UdpSocket, data: bytes | memoryview, addr: Any) -> None:
        sizes.append(len(data))
        one(self, data, addr)

    def together(self: UdpSocket, data: bytes | memoryview, size: int, addr: Any) -> bool:
        sizes.append(size)
        return many(self, data, size, addr)

    monkeypatch.setattr(UdpSocket, "sendto", sendto)
    monkeypatch.setattr(UdpSocket, "_sent_together", together)
    cache = arrays(4, 100)
    options: dict[str, Any] = {"mtu": 1280} if by == "user" else {}
    if by == "route":
        monkeypatch.setattr(endpoint, "route_mtu", lambda address: 1280)
    async with serving(**options) as server, connecting(server, rate="100Mbps", **options) as conn:
        report = await send_kv(conn, cache, 30.0)
        assert report.j_block == 1.0
        await until(lambda: len(server.received) == 1)
        assert_bit_equal(server.received[0], cache)
        await until(server.idle)
    assert max(sizes) == 1280 - HEADERS
