"""The relay on loopback: counts, order, bytes, and exactly the simulator's losses. No time is asserted."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from quic_pfec.link import relay as relay_module
from quic_pfec.link.options import RelayOptions
from quic_pfec.link.relay import Relay
from quic_pfec.sim.channel import PRESETS, GilbertElliott, GilbertElliottChannel, direction_seed, losses

pytestmark = pytest.mark.sockets

PATIENCE_S = 20.0  # only how long a broken test waits
RATE_BPS = 4e6
SIZE = 300
PACKET_S = (SIZE + 28) * 8 / RATE_BPS


class Peer:
    """A UDP socket that receives with patience."""

    def __init__(self) -> None:
        self.inbox: list[bytes] = []
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.address = self.socket.getsockname()

    def send(self, data: bytes, port: int) -> None:
        self.socket.sendto(data, ("127.0.0.1", port))

    def receive(self) -> tuple[bytes, tuple[str, int]]:
        self.socket.settimeout(PATIENCE_S)
        return self.socket.recvfrom(65535)

    def drain(self) -> None:
        """Move what is there now to the inbox, before it overflows the socket's buffer."""
        while select.select([self.socket], [], [], 0)[0]:
            self.inbox.append(self.socket.recv(65535))

    def received(self) -> list[bytes]:
        """All that came since the last call."""
        self.drain()
        inbox, self.inbox = self.inbox, []
        return inbox


@pytest.fixture
def peer() -> Iterator[Callable[[], Peer]]:
    peers: list[Peer] = []

    def make() -> Peer:
        peers.append(Peer())
        return peers[-1]

    yield make
    for each in peers:
        each.socket.close()


def numbered(count: int) -> list[bytes]:
    return [number.to_bytes(2, "big") * (SIZE // 2) for number in range(count)]


def settle(relay: Relay, packets: int, server: Peer) -> None:
    """Wait until `packets` entered the forward direction and those that survive have reached the server."""
    give_up_s = time.monotonic() + PATIENCE_S
    while True:
        forward = relay.report().forward
        server.drain()
        if forward.link.packets + forward.ring_drops == packets and forward.in_flight == 0:
            return
        assert time.monotonic() < give_up_s, forward
        time.sleep(0.01)


def test_bytes_and_order_are_kept(peer: Callable[[], Peer]) -> None:
    client, server = peer(), peer()
    with Relay(RelayOptions(server.address, rate_bps=RATE_BPS, owd_s=0.005, queue_bytes=1 << 20)) as relay:
        sent = [os.urandom(n) for n in (0, 1, 2, 1200, 1472, 9000, 65_507)] + numbered(150)
        for count, data in enumerate(sent, 1):
            client.send(data, relay.port)
            if count % 10 == 0 or count == len(sent):
                settle(relay, count, server)
        forward = relay.report().forward
    assert server.received() == sent
    assert forward.sent == forward.link.delivered == len(sent)
    assert forward.link.lost == forward.link.queue_drops == 0
    assert forward.link.bytes == sum(map(len, sent))
    assert sum(forward.lateness.counts) == len(sent)


def test_losses_are_the_simulators_slot_by_slot(peer: Callable[[], Peer]) -> None:
    """A burst keeps the link busy, one packet a slot: packet n is lost exactly where the sequence of the seed says.

    The large datagram before it gives a sender on a busy machine 120 ms to get the burst behind it.
    """
    client, server = peer(), peer()
    options = RelayOptions(
        server.address,
        rate_bps=RATE_BPS,
        owd_s=0.0,
        queue_bytes=1 << 20,
        loss=PRESETS["paper"],
        seed=21,
        slot_s=PACKET_S,
    )
    expected = losses(GilbertElliottChannel(PRESETS["paper"], direction_seed(21, 0)), 100_000)
    with Relay(options) as relay:
        for _ in range(2):  # an epoch begins the same sequence again
            before = time.monotonic()
            epoch_s = relay.epoch()
            assert before <= epoch_s <= time.monotonic()
            sent = numbered(200)
            for data in [bytes(60_000), *sent]:
                client.send(data, relay.port)
            settle(relay, 1 + len(sent), server)
            report = relay.report()
            assert report.log is not None
            assert report.epoch_clock_s == epoch_s
            assert report.log.losses.tolist() == expected[: len(report.log.losses)].tolist()
            large, first, *_ = np.flatnonzero(report.log.used)
            assert np.flatnonzero(report.log.used).tolist() == [large, *range(first, first + len(sent))]
            fates = expected[first : first + len(sent)]
            arrived = [data for data in server.received() if len(data) == SIZE]
            assert arrived == [data for data, lost in zip(sent, fates, strict=True) if not lost]
            assert report.forward.link.lost == np.count_nonzero(report.log.lost)
            assert report.forward.link.lost == np.count_nonzero(fates) + expected[large]


def test_nothing_is_lost_before_the_first_epoch(peer: Callable[[], Peer]) -> None:
    client, server = peer(), peer()
    everything_lost = GilbertElliott(1.0, 1.0, 0.5, 0.5)
    with Relay(RelayOptions(server.address, rate_bps=RATE_BPS, loss=everything_lost)) as relay:
        client.send(b"hello", relay.port)
        assert server.receive()[0] == b"hello"
        assert relay.report().log is None
        relay.epoch()
        client.send(b"lost", relay.port)
        settle(relay, 1, server)
        assert relay.report().forward.link.lost == 1
    assert server.received() == []


def test_clients_are_kept_apart(peer: Callable[[], Peer]) -> None:
    server = peer()
    clients = [peer() for _ in range(5)]
    with Relay(RelayOptions(server.address, rate_bps=RATE_BPS, owd_s=0.001)) as relay:
        for round_ in range(3):
            for number, client in enumerate(clients):
                client.send(b"%d from %d" % (round_, number), relay.port)
            for _ in clients:
                data, sender = server.receive()
                server.socket.sendto(b"re: " + data, sender)
            for number, client in enumerate(clients):
                data, sender = client.receive()
                assert data == b"re: %d from %d" % (round_, number)
                assert sender == relay.address
        assert relay.report().clients == 5
        assert relay.report().backward.sent == 15


def test_the_client_silent_for_longest_makes_room(peer: Callable[[], Peer]) -> None:
    server = peer()
    first, second, third = peer(), peer(), peer()
    with Relay(RelayOptions(server.address, rate_bps=RATE_BPS, owd_s=0.001, max_clients=2)) as relay:
        seen = []
        for client in (first, second, first, third, first):
            client.send(b"x", relay.port)
            seen.append(server.receive()[1])
        assert seen[0] == seen[2] == seen[4]
        assert len(set(seen)) == 3
        report = relay.report()
        assert (report.clients, report.evicted) == (2, 1)


def test_datagrams_of_a_client_that_made_room_are_counted(peer: Callable[[], Peer]) -> None:
    server, first, second = peer(), peer(), peer()
    with Relay(RelayOptions(server.address, rate_bps=RATE_BPS, owd_s=1.0, max_clients=1)) as relay:
        for client in (first, second):
            client.send(client.address[1].to_bytes(2, "big"), relay.port)
        assert server.receive()[0] == second.address[1].to_bytes(2, "big")
        settle(relay, 2, server)
        assert relay.report().forward.orphaned == 1


def test_a_server_that_comes_later_is_reached(peer: Callable[[], Peer]) -> None:
    client, server = peer(), peer()
    server.socket.close()
    with Relay(RelayOptions(server.address, rate_bps=RATE_BPS, owd_s=0.001)) as relay:
        for _ in range(5):
            client.send(b"anybody?", relay.port)
            time.sleep(0.01)
        late = peer()
        late.socket.close()
        late.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        late.socket.bind(server.address)
        client.send(b"now", relay.port)
        assert late.receive()[0] == b"now"
        assert relay.report().forward.write_errors == 0


def test_damage(peer: Callable[[], Peer]) -> None:
    client, server = peer(), peer()
    with Relay(RelayOptions(server.address, rate_bps=RATE_BPS, owd_s=0.001, corrupt=1.0)) as relay:
        relay.epoch()
        client.send(bytes(SIZE), relay.port)
        data, _ = server.receive()
        assert len(data) == SIZE
        assert sum(byte != 0 for byte in data) == 1
        assert relay.report().forward.link.corrupted == 1


def test_reordering(peer: Callable[[], Peer]) -> None:
    client, server = peer(), peer()
    options = RelayOptions(
        server.address, rate_bps=RATE_BPS, owd_s=0.0, queue_bytes=1 << 20, reorder=0.2, reorder_s=0.02, seed=1
    )
    with Relay(options) as relay:
        relay.epoch()
        sent = numbered(150)
        for data in sent:
            client.send(data, relay.port)
        settle(relay, len(sent), server)
        assert relay.report().forward.link.reordered > 0
    received = server.received()
    assert received != sent
    assert sorted(received) == sent


def test_a_full_queue_and_a_full_ring_are_told_apart(peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    client, server = peer(), peer()
    with Relay(RelayOptions(server.address, rate_bps=100e3, owd_s=0.1, queue_bytes=3280)) as relay:
        for data in numbered(30):
            client.send(data, relay.port)
        settle(relay, 30, server)
        forward = relay.report().forward
        assert forward.link.queue_drops > 0
        assert forward.sent + forward.link.queue_drops == 30
        assert forward.ring_drops == 0
    monkeypatch.setattr(relay_module, "RING_DATAGRAMS", 5)
    with Relay(RelayOptions(server.address, rate_bps=RATE_BPS, owd_s=1.0)) as relay:
        for data in numbered(9):
            client.send(data, relay.port)
        settle(relay, 9, server)
        report = relay.report()
        assert (report.forward.ring_drops, report.forward.sent) == (4, 5)
        assert "forward: 4 ring drops" in report.void_reasons()


def test_nothing_is_left_open(peer: Callable[[], Peer]) -> None:
    server = peer()
    clients = [peer() for _ in range(8)]

    def once() -> None:
        with Relay(RelayOptions(server.address, rate_bps=RATE_BPS, owd_s=0.001, max_clients=4)) as relay:
            for client in clients:
                client.send(b"x", relay.port)
                server.receive()

    once()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        once()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads


def test_commands_without_a_thread_and_after_the_end(peer: Callable[[], Peer]) -> None:
    relay = Relay(RelayOptions(peer().address))
    relay.epoch()
    assert relay.report().forward.link.packets == 0
    relay.close()
    relay.close()
    assert relay.report().clients == 0


def test_arrivals_carry_the_kernels_time(peer: Callable[[], Peer]) -> None:
    client, server = peer(), peer()
    with Relay(RelayOptions(server.address, rate_bps=RATE_BPS, owd_s=0.001)) as relay:
        client.send(b"x", relay.port)
        server.receive()
        assert relay.report().kernel_stamps


def test_a_failure_in_the_thread_is_not_swallowed(peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    relay = Relay(RelayOptions(peer().address))

    def fail(_: float) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(relay._forward.link.__class__, "advance", lambda self, now: fail(now))
    relay.start()
    assert relay._thread is not None
    relay._thread.join(PATIENCE_S)
    with pytest.raises(RuntimeError, match="failed"):
        relay.report()
    with pytest.raises(ZeroDivisionError):
        relay.close()


def test_a_port_in_use_is_refused(peer: Callable[[], Peer]) -> None:
    taken = peer()
    with pytest.raises(OSError):
        Relay(RelayOptions(taken.address, listen=taken.address))


def test_ipv6(peer: Callable[[], Peer]) -> None:
    try:
        server = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        server.bind(("::1", 0))
    except OSError:
        # A machine without IPv6: the relay must say so at once instead of later, in its thread.
        with pytest.raises(OSError):
            Relay(RelayOptions(("::1", 9), listen=("::1", 0)))
        return
    client = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    with server, client, Relay(RelayOptions(("::1", server.getsockname()[1]), listen=("::1", 0))) as relay:
        server.settimeout(PATIENCE_S)
        client.sendto(b"six", ("::1", relay.port))
        assert server.recv(100) == b"six"
