"""Numbers left out, acknowledgements checked, keys changed in time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from aioquic.quic import connection as aioquic_connection
from aioquic.quic.connection import QuicConnectionError
from aioquic.quic.events import ConnectionTerminated
from aioquic.quic.packet import QuicErrorCode, QuicFrameType
from aioquic.quic.rangeset import RangeSet

from quic_pfec.wire.varint import encode

from .quic_pair import make_pair
from .quic_toy import Toy, frame, inject, toys
from .quic_toy import kind as kind


def test_packets_far_behind_are_accepted(kind: type[Toy]) -> None:
    pair = make_pair(kind, kind, client_options={"total": 400})
    pair.connect()
    held: list[bytes] = []
    server: Any = pair.server
    original = server.receive_datagram

    def hold(data: bytes, addr: Any, now: float) -> None:
        if len(held) < 5 and len(data) > 1000:
            held.append(data)
        else:
            original(data, addr, now)

    server.receive_datagram = hold
    pair.run_until(lambda: len(server.received) == 395, 30.0)
    for data in held:
        original(data, ("10.0.0.1", 1111), pair.now)
        original(data, ("10.0.0.1", 1111), pair.now)  # a replay
    assert len(server.received) == 400


def forged_ack(largest: int, length: int) -> bytes:
    return bytes([QuicFrameType.ACK]) + encode(largest) + encode(0) + encode(0) + encode(length)


def test_an_acknowledgement_of_the_future_closes(kind: type[Toy]) -> None:
    pair, _, server = toys(kind)
    before = server.cwnd
    inject(pair, forged_ack(10**9, 10**9))
    assert pair.terminated("client").error_code == QuicErrorCode.PROTOCOL_VIOLATION
    assert server.cwnd == before


def test_an_acknowledgement_of_a_skipped_number_closes(kind: type[Toy]) -> None:
    pair = make_pair(kind, kind, server_options={"total": 300})
    pair.connect()
    server: Any = pair.server
    pair.run_until(lambda: server.sent == 300, 30.0)
    assert 1 <= len(server._skipped) <= 3
    assert server.packets_sent == server._packet_number - len(server._skipped)
    pair.run(0.5)
    assert pair.terminated("client") is None
    inject(pair, forged_ack(server._packet_number - 1, server._packet_number - 1))
    assert pair.terminated("client").error_code == QuicErrorCode.PROTOCOL_VIOLATION


def test_honest_acknowledgements_pass_the_check(kind: type[Toy]) -> None:
    _, client, _ = toys(kind)
    acked = RangeSet([range(client._packet_number)])
    client._check_ack(acked)
    acked.add(client._packet_number)
    with pytest.raises(QuicConnectionError):
        client._check_ack(acked)


def test_keys_are_updated_before_the_limit_in_both_directions(kind: type[Toy]) -> None:
    class Short(kind):
        key_update_packets = 100
        key_limit_packets = 200

    pair = make_pair(Short, Short, client_options={"total": 1000}, server_options={"total": 700})
    pair.connect()
    phases: set[int] = set()
    pair.on_step = lambda now: phases.add(pair.client._cryptos[aioquic_connection.tls.Epoch.ONE_RTT].send.key_phase)
    pair.run(10.0)
    # What the other direction has in flight under the old key is lost: aioquic keeps no old key.
    assert len(pair.server.received) + len(pair.client.received) > 1500  # type: ignore[attr-defined]
    assert phases == {0, 1}
    assert pair.terminated("client") is None
    assert pair.terminated("server") is None


def test_an_update_asked_for_too_early_waits_for_the_peer(kind: type[Toy]) -> None:
    """RFC 9001 §6.1. Of two updates within a round trip the peer would see neither, and open no packet any more."""
    pair, client, server = toys(kind)
    phases: list[int] = []
    pair.on_step = lambda now: phases.append(client._cryptos[aioquic_connection.tls.Epoch.ONE_RTT].send.key_phase)

    def send(requests: int) -> None:
        for _ in range(requests):
            client.request_key_update()
        client.queue.append(frame(content=b"x" * 1300))

    send(0)
    pair.run(0.3)
    for _ in range(8):
        send(2)
        pair.run(0.001)
    pair.run(0.3)
    send(0)
    pair.run(0.3)
    assert sum(one != other for one, other in pairwise(phases)) == 2  # the first, and one for all before it was known
    assert len(server.received) == 10
    assert pair.terminated("client") is None


def test_a_key_that_cannot_be_updated_is_not_used_beyond_its_limit(kind: type[Toy]) -> None:
    class Short(kind):
        key_update_packets = 100
        key_limit_packets = 200

        def _change_key(self) -> None:
            pass

    pair = make_pair(Short, kind, client_options={"total": 1000})
    pair.connect()
    pair.run(10.0)
    closed = pair.terminated("client")
    assert isinstance(closed, ConnectionTerminated)
    assert closed.error_code == QuicErrorCode.AEAD_LIMIT_REACHED
