"""Two connections in memory on a link in virtual time: no socket, no sleep, every run the same."""

from __future__ import annotations

import datetime
import functools
import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import QuicEvent
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from quic_pfec.quic.compat import ExtensionConnection

CLIENT_ADDRESS = ("10.0.0.1", 1111)
SERVER_ADDRESS = ("10.0.0.2", 4433)


@functools.cache
def certificate() -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A self-signed certificate for "localhost", made once a test run."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return made, key


def client_configuration(**changes: Any) -> QuicConfiguration:
    made, _ = certificate()
    made_pem = made.public_bytes(_pem())
    options: dict[str, Any] = {"alpn_protocols": ["pfec/1"], "max_datagram_size": 1452, "server_name": "localhost"}
    configuration = QuicConfiguration(is_client=True, **(options | changes))
    configuration.load_verify_locations(cadata=made_pem)
    return configuration


def server_configuration(**changes: Any) -> QuicConfiguration:
    made, key = certificate()
    options: dict[str, Any] = {"alpn_protocols": ["pfec/1"], "max_datagram_size": 1452}
    configuration = QuicConfiguration(is_client=False, **(options | changes))
    configuration.certificate = made
    configuration.private_key = key
    return configuration


def _pem() -> Any:
    from cryptography.hazmat.primitives.serialization import Encoding

    return Encoding.PEM


@dataclass
class Direction:
    """One direction of the link. `drop(index, size)` is asked for every datagram that is offered to it."""

    delay_s: float = 0.01
    drop: Callable[[int, int], bool] = lambda index, size: False
    rate_bps: float | None = None
    queue_bytes: int = 1 << 30
    offered: int = 0
    dropped: int = 0
    delivered_bytes: int = 0
    wire_bytes: int = 0
    _free_at: float = 0.0

    def arrival(self, now: float, size: int) -> float | None:
        """When a datagram that is sent now arrives, None if it is lost. 28 bytes of headers count on the wire."""
        index = self.offered
        self.offered += 1
        self.wire_bytes += size + 28
        leaves = now
        if self.rate_bps is not None:
            wire_s = (size + 28) * 8 / self.rate_bps
            if (self._free_at - now) * self.rate_bps / 8 > self.queue_bytes:
                self.dropped += 1
                return None
            leaves = max(now, self._free_at) + wire_s
            self._free_at = leaves
        if self.drop(index, size):
            self.dropped += 1
            return None
        self.delivered_bytes += size
        return leaves + self.delay_s


def random_loss(share: float, seed: int) -> Callable[[int, int], bool]:
    generator = random.Random(seed)
    return lambda index, size: generator.random() < share


@dataclass
class Pair:
    """A client and a server with a link between them; `now` starts at 100 s so that a forgotten zero shows."""

    client: QuicConnection
    server: QuicConnection
    up: Direction = field(default_factory=Direction)
    down: Direction = field(default_factory=Direction)
    now: float = 100.0
    events: dict[str, list[QuicEvent]] = field(default_factory=lambda: {"client": [], "server": []})
    on_step: Callable[[float], None] | None = None
    _flying: list[tuple[float, int, str, bytes]] = field(default_factory=list)
    _sequence: int = 0

    def end(self, name: str) -> QuicConnection:
        return self.client if name == "client" else self.server

    def connect(self, timeout_s: float = 5.0) -> None:
        self.client.connect(SERVER_ADDRESS, now=self.now)
        self.run_until(self.connected, timeout_s)

    def connected(self) -> bool:
        return all(getattr(quic, "_handshake_confirmed") for quic in (self.client, self.server))  # noqa: B009

    def run_until(self, done: Callable[[], bool], timeout_s: float = 5.0) -> None:
        limit = self.now + timeout_s
        while not done():
            if not self.step(limit):
                raise AssertionError(f"not reached within {timeout_s} s of virtual time")

    def run(self, duration_s: float) -> None:
        limit = self.now + duration_s
        while self.step(limit):
            pass
        self.now = limit

    def step(self, limit: float) -> bool:
        """Send what there is, then go to the next arrival or timer; False when there is none before `limit`."""
        self.transmit()
        times = [self._flying[0][0]] if self._flying else []
        timers = {name: self._timer(name) for name in ("client", "server")}
        times += [time_s for time_s in timers.values() if time_s is not None]
        if not times or min(times) > limit:
            return False
        # A timer that is due and stays due (aioquic compares an ACK's time with < in one place, <= in another) would
        # hold virtual time still; real time moves on.
        self.now = max(self.now + 1e-6, min(times))
        while self._flying and self._flying[0][0] <= self.now:
            _, _, name, data = heapq.heappop(self._flying)
            source = SERVER_ADDRESS if name == "client" else CLIENT_ADDRESS
            self.end(name).receive_datagram(data, source, now=self.now)
        for name, time_s in timers.items():
            if time_s is not None and time_s <= self.now:
                self.end(name).handle_timer(now=self.now)
        self._collect()
        if self.on_step is not None:
            self.on_step(self.now)
        return True

    def transmit(self) -> None:
        for name, peer, direction in (("client", "server", self.up), ("server", "client", self.down)):
            if self._started(name):
                for data, _ in self.end(name).datagrams_to_send(now=self.now):
                    arrival = direction.arrival(self.now, len(data))
                    if arrival is not None:
                        self._sequence += 1
                        heapq.heappush(self._flying, (arrival, self._sequence, peer, data))
        self._collect()

    def terminated(self, name: str) -> Any:
        """The ConnectionTerminated event of one end, or None."""
        return next((e for e in self.events[name] if type(e).__name__ == "ConnectionTerminated"), None)

    def _collect(self) -> None:
        for name in ("client", "server"):
            while (event := self.end(name).next_event()) is not None:
                self.events[name].append(event)

    def _started(self, name: str) -> bool:
        return self.end(name).get_peer_address() is not None

    def _timer(self, name: str) -> float | None:
        return self.end(name).get_timer() if self._started(name) else None


def make_pair(
    client_class: type[QuicConnection] = ExtensionConnection,
    server_class: type[QuicConnection] = ExtensionConnection,
    *,
    client_options: Mapping[str, Any] | None = None,
    server_options: Mapping[str, Any] | None = None,
    client_changes: Mapping[str, Any] | None = None,
    server_changes: Mapping[str, Any] | None = None,
    up: Direction | None = None,
    down: Direction | None = None,
) -> Pair:
    """A pair that has not connected yet. `*_changes` go to the configuration, `*_options` to `setup`."""

    def build(cls: type[QuicConnection], options: Mapping[str, Any] | None, **rest: Any) -> QuicConnection:
        if issubclass(cls, ExtensionConnection):
            rest["options"] = options
        return cls(**rest)

    client = build(client_class, client_options, configuration=client_configuration(**(client_changes or {})))
    server = build(
        server_class,
        server_options,
        configuration=server_configuration(**(server_changes or {})),
        original_destination_connection_id=client.original_destination_connection_id,
    )
    return Pair(client, server, up or Direction(), down or Direction())
