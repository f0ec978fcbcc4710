"""Clients and servers: the sockets around sans-IO connections, and how a connection comes about.

Own instead of aioquic's because its server constructs a fixed connection class, transmits once for every datagram it
reads (half of a receiver's CPU time) and keeps any number of connections. Here a wake-up of the socket reads a batch,
each connection then handles its events and transmits once (`driver`). Packets are sent with the kernel's path MTU
discovery as configured; the sizes fit an MTU of 1,500.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aioquic.buffer import Buffer  # type: ignore[attr-defined]
from aioquic.quic.configuration import SMALLEST_MAX_DATAGRAM_SIZE, QuicConfiguration
from aioquic.quic.connection import NetworkAddress
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import (
    QuicErrorCode,
    QuicFrameType,
    QuicHeader,
    QuicPacketType,
    encode_quic_retry,
    encode_quic_version_negotiation,
    pull_quic_header,
)
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.quic.retry import QuicRetryTokenHandler

from quic_pfec.quic.compat import ExtensionConnection
from quic_pfec.quic.configuration import configuration
from quic_pfec.quic.congestion import DEFAULT_BURST_S, Congestion
from quic_pfec.quic.connection import PfecConnection
from quic_pfec.quic.driver import ExtensionProtocol
from quic_pfec.quic.fast_send import FastSendConnection
from quic_pfec.quic.handshake import unanswered, until_refused
from quic_pfec.quic.route import datagram_size, route_mtu
from quic_pfec.quic.udp import UdpSocket

__all__ = ["ExtensionProtocol", "Listener", "configuration", "listen", "open_connection"]

logger = logging.getLogger("quic_pfec.quic")

FALLBACK_AFTER_S = 1.0  # a host with several addresses: how long one is tried before the next

P = TypeVar("P", bound="ExtensionProtocol[Any]")


class Listener:
    """A server's socket and its connections. Made by `listen`; also an async context manager."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        configuration: QuicConfiguration,
        make_connection: Callable[..., ExtensionConnection],
        make_protocol: Callable[[Any], ExtensionProtocol[Any]],
        max_connections: int,
        retry: bool,
    ) -> None:
        self.refused = 0
        self._configuration = configuration
        self._make_connection = make_connection
        self._make_protocol = make_protocol
        self._max_connections = max_connections
        self._retry = QuicRetryTokenHandler() if retry else None
        self._routes: dict[bytes, ExtensionProtocol[Any]] = {}
        self._protocols: set[ExtensionProtocol[Any]] = set()
        self._closing = False
        self._over = asyncio.Event()
        self.address: NetworkAddress = sock.getsockname()
        self._udp = UdpSocket(sock, self._received)

    @property
    def port(self) -> int:
        return int(self.address[1])

    @property
    def protocols(self) -> frozenset[ExtensionProtocol[Any]]:
        """The connections that are not over yet."""
        return frozenset(self._protocols)

    def close(self) -> None:
        """Take no new connections and close those there are; the socket goes with the last of them."""
        self._closing = True
        for protocol in list(self._protocols):
            protocol.close()
        self._close_if_empty()

    async def wait_closed(self) -> None:
        await self._over.wait()

    async def __aenter__(self) -> Listener:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()
        await self.wait_closed()

    # ---- for protocols -----------------------------------------------------------------------------------------------

    def route(self, cid: bytes, protocol: ExtensionProtocol[Any]) -> None:
        self._routes[cid] = protocol

    def unroute(self, cid: bytes, protocol: ExtensionProtocol[Any]) -> None:
        if self._routes.get(cid) is protocol:
            del self._routes[cid]

    def forget(self, protocol: ExtensionProtocol[Any]) -> None:
        self._protocols.discard(protocol)
        for cid in [cid for cid, other in self._routes.items() if other is protocol]:
            del self._routes[cid]
        self._close_if_empty()

    def _close_if_empty(self) -> None:
        if self._closing and not self._protocols:
            self._udp.close()
            self._over.set()

    # ---- datagrams ---------------------------------------------------------------------------------------------------

    def _received(self, datagrams: Sequence[bytes], addr: NetworkAddress) -> None:
        """Each connection gets what came for it back to back together."""
        batch: list[bytes] = []
        owner: ExtensionProtocol[Any] | None = None
        end = 1 + self._configuration.connection_id_length
        last: bytes | None = None  # the connection id of the packet before, had it a short header
        protocol: ExtensionProtocol[Any] | None = None
        for data in datagrams:
            cid = data[1:end] if data and not data[0] & 0x80 else None
            if cid is None or cid != last:
                protocol = self._route(data, addr)
                last = cid
            if protocol is not owner:
                if owner is not None:
                    owner.datagrams_received(batch, addr)
                batch, owner = [], protocol
            batch.append(data)
        if owner is not None:
            owner.datagrams_received(batch, addr)

    def _route(self, data: bytes, addr: NetworkAddress) -> ExtensionProtocol[Any] | None:
        if not data:
            return None
        if not data[0] & 0x80:  # a short header: the connection id is all there is to read (RFC 9000 §17.3)
            return self._routes.get(data[1 : 1 + self._configuration.connection_id_length])
        return self._route_long_header(data, addr)

    def _route_long_header(self, data: bytes, addr: NetworkAddress) -> ExtensionProtocol[Any] | None:
        try:
            header = pull_quic_header(Buffer(data=data), host_cid_length=self._configuration.connection_id_length)
        except ValueError:
            return None
        protocol = self._routes.get(header.destination_cid)
        if protocol is not None:
            return protocol
        if len(data) < SMALLEST_MAX_DATAGRAM_SIZE or header.packet_type is QuicPacketType.VERSION_NEGOTIATION:
            return None  # answering these could be used to reflect traffic at a third party (RFC 9000 §6.1, §14.1)
        versions = self._configuration.supported_versions
        if header.version not in versions:
            self._udp.sendto(
                encode_quic_version_negotiation(
                    source_cid=header.destination_cid, destination_cid=header.source_cid, supported_versions=versions
                ),
                addr,
            )
            return None
        if header.packet_type is not QuicPacketType.INITIAL:
            return None
        return self._accept(header, addr)

    def _accept(self, header: QuicHeader, addr: NetworkAddress) -> ExtensionProtocol[Any] | None:
        if self._closing or len(self._protocols) >= self._max_connections:
            self.refused += 1
            self._udp.sendto(_close_packet(header, QuicErrorCode.CONNECTION_REFUSED), addr)
            return None
        original, retry_source = header.destination_cid, None
        if self._retry is not None:
            if not header.token:
                self._udp.sendto(self._retry_packet(header, addr), addr)
                return None
            try:
                original = self._retry.validate_token(
                    address=addr, destination_cid=header.destination_cid, token=header.token, now=time.monotonic()
                )
            except ValueError:
                self._udp.sendto(_close_packet(header, QuicErrorCode.INVALID_TOKEN), addr)
                return None
            retry_source = header.destination_cid
        try:
            quic = self._make_connection(
                addr, original_destination_connection_id=original, retry_source_connection_id=retry_source
            )
            protocol = self._make_protocol(quic)
        except Exception as exc:
            logger.error("a connection could not be made", exc_info=exc)
            return None
        protocol.attach(self._udp, self)
        self._protocols.add(protocol)
        self.route(header.destination_cid, protocol)
        self.route(quic.host_cid, protocol)
        return protocol

    def _retry_packet(self, header: QuicHeader, addr: NetworkAddress) -> bytes:
        assert self._retry is not None
        source_cid = os.urandom(8)
        token = self._retry.create_token(
            address=addr,
            original_destination_connection_id=header.destination_cid,
            retry_source_connection_id=source_cid,
            now=time.monotonic(),
        )
        return encode_quic_retry(
            version=header.version or 0,
            source_cid=source_cid,
            destination_cid=header.source_cid,
            original_destination_cid=header.destination_cid,
            retry_token=token,
        )


def _close_packet(header: QuicHeader, error_code: int) -> bytes:
    """An Initial packet that refuses a connection without keeping state for it (RFC 9000 §5.2.2)."""
    version = header.version or 0
    crypto = CryptoPair()
    crypto.setup_initial(cid=header.destination_cid, is_client=False, version=version)
    builder = QuicPacketBuilder(
        host_cid=header.destination_cid,
        is_client=False,
        max_datagram_size=SMALLEST_MAX_DATAGRAM_SIZE,
        peer_cid=header.source_cid,
        version=version,
    )
    builder.start_packet(QuicPacketType.INITIAL, crypto)
    buf = builder.start_frame(QuicFrameType.TRANSPORT_CLOSE, capacity=16)
    buf.push_uint_var(error_code)
    buf.push_uint_var(QuicFrameType.PADDING)
    buf.push_uint_var(0)
    datagrams, _ = builder.flush()
    return datagrams[0]


async def listen(
    host: str,
    port: int,
    *,
    configuration: QuicConfiguration,
    make_protocol: Callable[[Any], ExtensionProtocol[Any]],
    connection_class: type[ExtensionConnection] = PfecConnection,
    options: Mapping[str, Any] | None = None,
    congestion: Congestion | None = None,
    max_connections: int = 256,
    retry: bool = False,
) -> Listener:
    """Bind a server; port 0 takes any. `options` go to `setup` of every connection; `congestion` is its controller.

    Beyond `max_connections` clients are refused at once. `retry` makes every client prove its address first, at the
    cost of a round trip. Raises OSError when the address cannot be bound.
    """
    family, address = (await _resolve(host, port, passive=True))[0]
    sock = _bound(family, address)
    return Listener(
        sock,
        configuration=configuration,
        make_connection=_connection_maker(connection_class, configuration, options, congestion),
        make_protocol=make_protocol,
        max_connections=max_connections,
        retry=retry,
    )


@asynccontextmanager
async def open_connection(
    host: str,
    port: int,
    *,
    configuration: QuicConfiguration,
    make_protocol: Callable[[Any], P],
    connection_class: type[ExtensionConnection] = PfecConnection,
    options: Mapping[str, Any] | None = None,
    congestion: Congestion | None = None,
    timeout_s: float = 10.0,
) -> AsyncIterator[P]:
    """Connect to a server and close on exit. Arguments as in `listen`.

    A host with several addresses is tried in the order of the resolver, each but the last for one second. Raises
    ConnectionError when none completes the handshake within `timeout_s`, or the name cannot be resolved.
    """
    if configuration.server_name is None:
        configuration = dataclasses.replace(configuration, server_name=host)
    make_connection = _connection_maker(connection_class, configuration, options, congestion)
    addresses = await _resolve(host, port, passive=False)
    give_up = time.monotonic() + timeout_s
    for index, (family, address) in enumerate(addresses):
        left_s = max(0.0, give_up - time.monotonic())
        last = index == len(addresses) - 1
        protocol, udp = await _attempt(
            family, address, make_connection, make_protocol, left_s if last else min(left_s, FALLBACK_AFTER_S)
        )
        if protocol is not None:
            break
    else:
        raise ConnectionError(unanswered(host, port, f"within {timeout_s:g} s"))
    try:
        yield protocol
    finally:
        protocol.close()
        try:
            await protocol.wait_closed()
        finally:
            protocol.abandon()
            udp.close()


async def _attempt(
    family: int,
    address: NetworkAddress,
    make_connection: Callable[..., ExtensionConnection],
    make_protocol: Callable[[Any], P],
    timeout_s: float,
) -> tuple[P | None, UdpSocket]:
    """One handshake; no protocol when nobody answered in time. Raises ConnectionError when it was refused."""
    protocol = make_protocol(make_connection(address))
    udp = UdpSocket(_bound(family, ("::" if family == socket.AF_INET6 else "0.0.0.0", 0)), protocol.datagrams_received)
    protocol.attach(udp)
    connected = False
    try:
        protocol.start(address)
        try:
            async with asyncio.timeout(timeout_s):
                await _connected_or_refused(protocol, address)
        except TimeoutError:
            return None, udp
        connected = True
        return protocol, udp
    finally:
        if not connected:
            protocol.close()  # tells a server that answered too late
            protocol.abandon()
            udp.close()


async def _connected_or_refused(protocol: ExtensionProtocol[Any], address: NetworkAddress) -> None:
    connected = asyncio.ensure_future(protocol.wait_connected())
    refused = asyncio.ensure_future(until_refused(address))
    try:
        await asyncio.wait((connected, refused), return_when=asyncio.FIRST_COMPLETED)
        if not connected.done():
            raise ConnectionError(unanswered(str(address[0]), int(address[1]), "(the host says nothing listens there)"))
        connected.result()
    finally:
        for task in (connected, refused):
            task.cancel()
        await asyncio.gather(connected, refused, return_exceptions=True)


def _connection_maker(
    connection_class: type[ExtensionConnection],
    configuration: QuicConfiguration,
    options: Mapping[str, Any] | None,
    congestion: Congestion | None,
) -> Callable[..., ExtensionConnection]:
    def make(address: NetworkAddress, **arguments: Any) -> ExtensionConnection:
        size = min(configuration.max_datagram_size, datagram_size(route_mtu(address)))
        chosen = dataclasses.replace(configuration, max_datagram_size=size)
        quic = connection_class(configuration=chosen, options=options, **arguments)
        if congestion is not None:
            congestion.install(quic, size)
        if isinstance(quic, FastSendConnection):
            quic.pacing_tick_s = DEFAULT_BURST_S if congestion is None else congestion.burst_s
        return quic

    return make


async def _resolve(host: str, port: int, *, passive: bool) -> list[tuple[int, NetworkAddress]]:
    loop = asyncio.get_running_loop()
    flags = socket.AI_PASSIVE if passive else 0
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM, flags=flags)
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: a name that cannot be one
        raise ConnectionError(f"there is no host {host!r}: {error}") from None
    return [(int(info[0]), info[4]) for info in found]


def _bound(family: int, address: NetworkAddress) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot bind {address[0]} port {address[1]}: {error.strerror}") from None
    return sock
