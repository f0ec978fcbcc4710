"""Virtual time: endpoints are called when, and only when, something happens to them, and every run repeats."""

from __future__ import annotations

import math

import pytest

from quic_pfec.sim.channel import PRESETS, channel_factory
from quic_pfec.sim.link import Link
from quic_pfec.sim.virtual import Livelock, SharedNetwork, VirtualNetwork


class Script:
    """An endpoint that records its calls. `outbox` leaves at the next pull; `timer` fires once."""

    def __init__(self, *outbox: bytes, timer: float | None = None) -> None:
        self.outbox = list(outbox)
        self.timer = timer
        self.calls: list[tuple[str, float, bytes]] = []
        self.pulls = 0

    def receive(self, data: bytes, now: float) -> None:
        self.calls.append(("receive", now, data))

    def pull(self, now: float) -> list[bytes]:
        self.pulls += 1
        sent, self.outbox = self.outbox, []
        return sent

    def next_timer(self) -> float | None:
        return self.timer

    def on_timer(self, now: float) -> None:
        self.calls.append(("timer", now, b""))
        self.timer = None


class Echo(Script):
    def receive(self, data: bytes, now: float) -> None:
        super().receive(data, now)
        self.outbox.append(data)


class Paced(Script):
    """Sends `count` numbered datagrams, one each `interval_s`."""

    def __init__(self, count: int, interval_s: float) -> None:
        super().__init__(timer=0.0)
        self.count, self.interval_s, self.sent = count, interval_s, 0

    def on_timer(self, now: float) -> None:
        self.outbox.append(self.sent.to_bytes(4, "big") + bytes(968))
        self.sent += 1
        self.timer = self.sent * self.interval_s if self.sent < self.count else None


def link(owd_s: float = 0.010, **options) -> Link:
    return Link(8e6, owd_s, 1 << 20, **options)


def test_a_ping_takes_both_links() -> None:
    client, server = Script(bytes(972)), Echo()
    network = VirtualNetwork(client, server, link(0.010), link(0.020))
    assert network.run() == pytest.approx(0.001 + 0.010 + 0.001 + 0.020)
    assert server.calls == [("receive", pytest.approx(0.011), bytes(972))]
    assert client.calls == [("receive", pytest.approx(0.032), bytes(972))]
    assert (network.events, network.in_flight) == (2, 0)


def test_endpoints_are_asked_only_when_something_happened_to_them() -> None:
    client, server = Script(*[bytes([n]) for n in range(10)]), Script()
    VirtualNetwork(client, server, link(), link()).run()
    assert client.pulls == 1
    assert server.pulls == 1 + 10


def test_order_of_sending_is_kept() -> None:
    client, server = Script(*[n.to_bytes(2, "big") for n in range(500)]), Script()
    VirtualNetwork(client, server, link(), link()).run()
    assert [data for _, _, data in server.calls] == [n.to_bytes(2, "big") for n in range(500)]
    times = [now for _, now, _ in server.calls]
    assert times == sorted(times)


def test_timers_fire_at_their_time_and_past_ones_at_once() -> None:
    first, second = Script(timer=0.5), Script(timer=-1.0)
    network = VirtualNetwork(first, second, link(), link(), now=0.2)
    assert network.run() == 0.5
    assert second.calls == [("timer", 0.2, b"")]
    assert first.calls == [("timer", 0.5, b"")]


def test_a_delivery_goes_before_a_timer_of_the_same_instant() -> None:
    server = Script(timer=0.001)
    VirtualNetwork(Script(bytes(972)), server, link(0.0), link()).run()
    assert [(call, now) for call, now, _ in server.calls] == [("receive", 0.001), ("timer", 0.001)]


def test_until_includes_its_instant_and_moves_time_on() -> None:
    client = Script(timer=1.0)
    network = VirtualNetwork(client, Script(), link(), link())
    assert network.run(until=0.5) == 0.5
    assert client.calls == []
    assert network.run(until=1.0) == 1.0
    assert len(client.calls) == 1
    assert network.run(until=3.0) == network.now == 3.0
    assert network.run(until=2.0) == 3.0


def test_stop_ends_a_run_after_the_event_that_met_it() -> None:
    client, server = Paced(100, 0.01), Script()
    network = VirtualNetwork(client, server, link(), link())
    network.run(stop=lambda: len(server.calls) == 7)
    assert len(server.calls) == 7
    network.run()
    assert len(server.calls) == 100


def test_what_the_caller_did_between_runs_takes_effect() -> None:
    client, server = Script(), Script()
    network = VirtualNetwork(client, server, link(), link())
    network.run(until=5.0)
    client.outbox.append(b"late")
    network.run()
    assert server.calls == [("receive", pytest.approx(5.010032), b"late")]


def test_runs_repeat_to_the_bit_from_an_epoch_on() -> None:
    def run(handshakes: int) -> tuple[list[tuple[float, bytes]], list[bool]]:
        """Some datagrams before the epoch, then a paced exchange; what came back, and what the channel lost."""
        client, server = Script(*[b"hello"] * handshakes), Echo()
        lossy = [link(channel=channel_factory(PRESETS["paper"], seed), corrupt=0.01, slot_s=0.0013) for seed in (2, 3)]
        network = VirtualNetwork(client, server, *lossy)
        network.run(until=1.0)
        assert len(client.calls) == handshakes
        network.epoch()
        client.calls.clear()
        for _ in range(1500):
            client.outbox.append(bytes(972))
            network.run(until=network.now + 0.0013)
        return [(now, data) for _, now, data in client.calls], lossy[0].log().losses.tolist()

    few, many = run(1), run(20)
    assert few == run(1)
    assert few == many
    assert 1150 < len(few[0]) < 1400


def test_a_timer_that_never_moves_on_is_reported() -> None:
    class Stuck(Script):
        def on_timer(self, now: float) -> None:
            self.timer = now

    network = VirtualNetwork(Stuck(timer=0.25), Script(), link(), link(), max_events_at_once=1000)
    with pytest.raises(Livelock, match=r"endpoint 0 does not move on at 0\.25"):
        network.run()
    assert network.events == 1001


def test_a_burst_without_end_is_reported() -> None:
    network = VirtualNetwork(
        Echo(b"ping"),
        Echo(),
        Link(1e30, 0.0, overhead=0),
        Link(1e30, 0.0, overhead=0),
        max_events_at_once=1000,
        now=0.25,
    )
    with pytest.raises(Livelock, match=r"1001 of them at 0\.25 s"):
        network.run()


def test_a_timer_missed_by_a_rounding_comes_again() -> None:
    class Rounding(Script):
        """Asks for 0.4 s and is content only with more, as a comparison off by one rounding would be."""

        def next_timer(self) -> float | None:
            return None if self.calls and self.calls[-1][1] > 0.4 else 0.4

    endpoint = Rounding()
    VirtualNetwork(endpoint, Script(), link(), link()).run()
    assert [now for _, now, _ in endpoint.calls] == [0.4, pytest.approx(0.400001)]


def test_a_run_without_end_is_reported() -> None:
    network = VirtualNetwork(Echo(b"ping"), Echo(), link(), link(), max_events=5000)
    with pytest.raises(Livelock):
        network.run()
    assert network.events == 5001


def test_nothing_to_do() -> None:
    network = VirtualNetwork(Script(), Script(timer=math.inf), link(), link(), now=3.0)
    assert network.run() == 3.0


def test_pairs_share_one_way_and_have_their_own_way_back() -> None:
    senders = [Paced(3, 0.001), Paced(3, 0.001)]
    echoes = [Echo(), Echo()]
    shared = Link(8e6, 0.010, 1 << 20, overhead=0)
    backs = [Link(8e6, owd_s, 1 << 20, overhead=0) for owd_s in (0.010, 0.050)]
    network = SharedNetwork(list(zip(senders, echoes, strict=True)), shared, backs)
    network.run(until=1.0)
    assert [len(echo.calls) for echo in echoes] == [3, 3]
    # 972 bytes take 0.972 ms: the second of each instant waits for the first, whoever sent it.
    arrivals = sorted(now for echo in echoes for _, now, _ in echo.calls)
    assert arrivals == pytest.approx([0.010 + 0.000972 * n for n in range(1, 7)], abs=1e-6)
    for sender, echo, owd_s in zip(senders, echoes, (0.010, 0.050), strict=True):
        sent = [now for what, now, _ in echo.calls if what == "receive"]
        back = [now for what, now, _ in sender.calls if what == "receive"]
        assert back == pytest.approx([now + 0.000972 + owd_s for now in sent], abs=1e-6)
    assert shared.stats().packets == 6


def test_pairs_and_ways_back_must_match() -> None:
    for pairs, backs in (([], []), ([(Script(), Script())], [])):
        with pytest.raises(ValueError, match="ways back"):
            SharedNetwork(pairs, link(), backs)
