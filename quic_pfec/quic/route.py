"""How large a datagram the way to an address takes.

A tunnel (WireGuard, PPPoE) carries less than 1,500 bytes. What does not fit is cut into IP fragments by Linux, which a
lossy link loses twice as often, or refused. The route knows its MTU before the first packet; what lies behind it is not
probed, so a path that swallows large packets without a word needs `mtu=`.
"""

from __future__ import annotations

import socket
import sys

from aioquic.quic.configuration import SMALLEST_MAX_DATAGRAM_SIZE
from aioquic.quic.connection import NetworkAddress

from quic_pfec.quantities import integer

__all__ = ["HEADERS", "LARGEST_MTU", "LEAST_MTU", "datagram_size", "route_mtu"]

HEADERS = 48
"""IPv6 and UDP; what IPv4 would leave besides is not used."""
LARGEST_MTU = 1500  # a symbol and its frame fit; what jumbo frames would add, receivers do not take (`wire.limits`)
LEAST_MTU = SMALLEST_MAX_DATAGRAM_SIZE + HEADERS  # RFC 9000 §14
IP_MTU, IPV6_MTU = 14, 24  # linux/in.h, linux/in6.h: the MTU of a connected socket's route


def datagram_size(mtu: int) -> int:
    """UDP payload that an MTU of 1,248 to 1,500 leaves: 1,200 to 1,452 bytes. Raises `LocalError` for another."""
    return integer("mtu", mtu, LEAST_MTU, LARGEST_MTU) - HEADERS


def route_mtu(address: NetworkAddress) -> int:
    """The MTU of the route to `address`, between what QUIC needs and 1,500; 1,500 where the system does not say.

    Sends nothing. A narrower route than QUIC allows counts as the narrowest allowed: fragments are better than nothing.
    """
    if sys.platform != "linux":
        return LARGEST_MTU
    family = socket.AF_INET6 if ":" in str(address[0]) else socket.AF_INET
    level, option = (socket.IPPROTO_IPV6, IPV6_MTU) if family == socket.AF_INET6 else (socket.IPPROTO_IP, IP_MTU)
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            mtu = probe.getsockopt(level, option)
    except OSError:
        return LARGEST_MTU  # no route: whoever sends will hear of it
    return min(max(mtu, LEAST_MTU), LARGEST_MTU)
