"""Why a connection did not come about, in words that a user can act on.

A TLS alert names a number and a library's own phrase, and an address where nothing listens names nothing at all: both
are what a first try usually ends with.
"""

from __future__ import annotations

import asyncio
from typing import cast

from aioquic.quic.connection import NetworkAddress
from aioquic.quic.packet import QuicErrorCode

__all__ = ["failure", "unanswered", "until_refused"]

REFUSED_AFTER_S = 1.0  # no answer for so long: ask the host whether anything listens there
REFUSED_GRACE_S = 0.5  # then the handshake may still finish: anybody on the path can forge an ICMP message

# RFC 8446 §6; aioquic puts every fault of a certificate under bad_certificate and says which in the phrase.
BAD_CERTIFICATE, CERTIFICATE_EXPIRED, UNKNOWN_CA = 42, 45, 48
CERTIFICATE_REQUIRED, NO_APPLICATION_PROTOCOL = 116, 120


def failure(code: int, reason: str, *, ours: bool) -> str:
    """One line for a connection that ended with QUIC's `code` and the phrase `reason`, and what to do about it.

    ours: we found the fault in the peer's certificate, and not the peer in ours.
    """
    what = f"{reason or 'no reason given'} (0x{code:x})"
    remedy = _remedy(code, reason, ours)
    return f"{what}: {remedy}" if remedy else what


def _remedy(code: int, reason: str, ours: bool) -> str:
    if code == QuicErrorCode.CONNECTION_REFUSED:
        return "the server has as many connections as it takes; try again later"
    alert = code - QuicErrorCode.CRYPTO_ERROR
    if alert == CERTIFICATE_REQUIRED:
        return "pass yours as client_certificate= (--certificate and --private-key)"
    if alert == NO_APPLICATION_PROTOCOL:
        return "the server speaks another protocol than ours"
    if alert not in (BAD_CERTIFICATE, CERTIFICATE_EXPIRED, UNKNOWN_CA):
        return ""
    if not ours:
        return "the server does not accept our certificate; its --client-ca must have signed it"
    if "doesn't match" in reason:
        return (
            "the server's certificate is for another name; connect by one that it is valid for, pass that as "
            "server_name= (--server-name), or make one with `quic-pfec cert FOLDER --name HOST`"
        )
    if alert == CERTIFICATE_EXPIRED or "expired" in reason:
        return "the server's certificate is too old; make a new one (`quic-pfec cert`)"
    return (
        "the server's certificate is not trusted; pass the cert.pem that it was started with as ca_certs= (--ca-certs)"
    )


def unanswered(host: str, port: int, after: str) -> str:
    """One line for a server that did not answer; `after` says how long was waited, or what came instead."""
    return (
        f"no answer from {host} port {port} (UDP) {after}: is `quic-pfec serve` running there, on this port, "
        "with --host for other machines, and does a firewall let UDP through? Where a tunnel drops large packets both "
        "sides need its MTU, such as --mtu 1280"
    )


class _Prober(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.refused = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # One byte that no QUIC endpoint takes for a packet: its fixed bit is clear (RFC 9000 §17).
        cast(asyncio.DatagramTransport, transport).sendto(b"\0")

    def error_received(self, exc: Exception) -> None:
        if isinstance(exc, ConnectionRefusedError):
            self.refused.set()


async def until_refused(address: NetworkAddress) -> None:
    """Returns once the host has said that nothing listens on this UDP port (ICMP), and never if it says nothing.

    Asks only after a second, from a socket of its own: one that is connected hears such errors.
    """
    await asyncio.sleep(REFUSED_AFTER_S)
    try:
        transport, prober = await asyncio.get_running_loop().create_datagram_endpoint(
            _Prober, remote_addr=(address[0], address[1])
        )
    except OSError:
        await asyncio.get_running_loop().create_future()  # no route: the timeout of the handshake decides
        return
    try:
        await prober.refused.wait()
        await asyncio.sleep(REFUSED_GRACE_S)
    finally:
        transport.close()
