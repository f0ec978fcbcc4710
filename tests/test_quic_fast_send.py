"""Runs of packets against packets that aioquic builds: same bytes, same books, same behaviour."""

from __future__ import annotations

import copy
import random
from contextlib import suppress
from typing import Any

import pytest
from aioquic import tls
from aioquic.quic.packet import QuicErrorCode

from quic_pfec.quic.compat import ExtensionConnection
from quic_pfec.quic.extension import FrameRun, OutFrame
from quic_pfec.quic.fast_send import MAX_RUN
from quic_pfec.quic.rate import rate_control
from quic_pfec.wire.frames import PFEC_ACK, SOURCE

from .quic_pair import Direction, Pair, make_pair, random_loss
from .quic_toy import BIG, FastToy, QuietToy, Toy, body, frame


def pair_of(kind: type[Toy] = FastToy, **options: Any) -> tuple[Pair, Any, Any]:
    pair = make_pair(kind, kind, **options)
    pair.connect()
    pair.run(0.3)
    return pair, pair.client, pair.server


# ---- the same bytes and books ---------------------------------------------------------------------------------------


def books(quic: Any) -> dict[str, Any]:
    """Whatever sending changes, comparable."""
    space = quic._spaces[tls.Epoch.ONE_RTT]
    return {
        "sent": [
            {
                name: getattr(packet, name)
                for name in ("packet_number", "packet_type", "epoch", "in_flight", "is_ack_eliciting", "sent_time",
                             "sent_bytes", "is_crypto_packet")
            } | {"tokens": [args for _, args in packet.delivery_handlers]}
            for packet in space.sent_packets.values()
        ],
        "eliciting": space.ack_eliciting_in_flight,
        "in flight": quic.bytes_in_flight,
        "last": quic._loss._time_of_last_sent_ack_eliciting_packet,
        "idle": quic._close_at,
        "receipt": quic._ack_eliciting_sent_since_receipt,
        "path": quic._network_paths[0].bytes_sent,
        "number": quic._packet_number,
        "pacing": quic._pacing_at,
        "blocked": (quic.blocked_cwnd, quic.blocked_pacer),
        "share": quic._stream_run,
        "timer": quic.get_timer(),
    }  # fmt: skip


class Rewound:
    """The state of a connection before a turn, to play it again another way."""

    def __init__(self, quic: Any) -> None:
        self.quic = quic
        skip = {"_network_paths", "_recovery", "_loss"}
        self.plain = {
            name: value
            for name, value in vars(quic).items()
            if name not in skip and isinstance(value, (int, float, bool, bytes, str, type(None)))
        }
        self.queue = list(quic.queue)
        self.sent = dict(quic._spaces[tls.Epoch.ONE_RTT].sent_packets)
        self.space = {name: value for name, value in vars(quic._spaces[tls.Epoch.ONE_RTT]).items()
                      if isinstance(value, (int, float, type(None)))}  # fmt: skip
        self.last = quic._loss._time_of_last_sent_ack_eliciting_packet
        self.path = quic._network_paths[0].bytes_sent
        self.cc, self.pacer = copy.deepcopy((quic._loss._cc, quic._loss._pacer))

    def back(self) -> None:
        quic = self.quic
        vars(quic).update(self.plain)
        quic.queue.clear()
        quic.queue.extend(self.queue)
        space = quic._spaces[tls.Epoch.ONE_RTT]
        vars(space).update(self.space)
        space.sent_packets = dict(self.sent)
        quic._loss._time_of_last_sent_ack_eliciting_packet = self.last
        quic._network_paths[0].bytes_sent = self.path
        quic._loss._cc, quic._loss._pacer = copy.deepcopy((self.cc, self.pacer))
        if quic._own_pacer is not None:
            quic._own_pacer = quic._loss._pacer


@pytest.mark.parametrize("seed", range(12))
def test_the_bytes_and_the_books_are_those_of_aioquic(seed: int) -> None:
    rng = random.Random(seed)
    changes = {"connection_id_length": rng.choice([4, 8, 18])} if seed % 3 == 0 else {}
    pair, client, _ = pair_of(client_changes=changes, server_changes=changes)
    if seed % 2:
        client.set_congestion_control(*rate_control(rng.choice([5e6, 50e6, 500e6])))
    fast_packets = 0
    for turn in range(40):
        for token in range(rng.randrange(1, 60)):
            client.queue.append(OutFrame(SOURCE, body(rng.randrange(800, 1419)), (turn, token)))
        if rng.random() < 0.2:
            client.send_stream_data(0, bytes(rng.randrange(3000)))
        if rng.random() < 0.2:
            client.feedback.append(frame(PFEC_ACK, b"ack"))
        if rng.random() < 0.1:
            client.request_key_update()
        before = Rewound(client)
        feedback = list(client.feedback)
        streams = copy.deepcopy(client._streams)
        if not (feedback or any(not stream.sender.buffer_is_empty for stream in streams.values())):
            pairs = []
            for fast in (False, True):
                before.back()
                client.fast_path = fast
                client.fast_packets_sent = 0
                client.spaces.clear()
                pairs.append((client.datagrams_to_send(pair.now), books(client), len(client.queue)))
            slow, quick = pairs
            assert quick[0] == slow[0]
            for name, value in slow[1].items():
                if name in ("pacing", "timer"):
                    assert quick[1][name] == pytest.approx(value, abs=1e-9), name
                else:
                    assert quick[1][name] == value, name
            assert quick[2] == slow[2]
            fast_packets += client.fast_packets_sent
            assert client.bugs == 0
        client.fast_path = True
        pair.run(rng.choice([0.001, 0.01, 0.05]))
        if len(client.queue) > 200:
            client.queue.clear()
    assert fast_packets > 0  # in the turns that were compared
    assert pair.terminated("client") is pair.terminated("server") is None


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_left_unsaid_by_a_quiet_turn(seed: int) -> None:
    """`QuietToy` asserts; here both ends do a little of everything."""
    rng = random.Random(seed)
    changes = {"max_datagram_frame_size": 2000, "max_data": 20_000, "max_stream_data": 8_000}
    pair = make_pair(
        QuietToy, QuietToy, client_changes=changes, server_changes=changes,
        up=Direction(0.01, random_loss(0.05, seed)), down=Direction(0.01, random_loss(0.05, seed + 1)),
    )  # fmt: skip
    pair.connect()
    for _ in range(150):
        quic: Any = rng.choice([pair.client, pair.server])
        match rng.randrange(9):
            case 0:
                stream = rng.choice(list(quic._streams) or [quic.get_next_available_stream_id()])
                if stream % 2 != quic.is_client and not quic._streams.get(stream):
                    stream = quic.get_next_available_stream_id()
                with suppress(AssertionError, ValueError, RuntimeError):  # a stream that is over takes nothing
                    quic.send_stream_data(stream, bytes(rng.randrange(1, 12_000)), rng.random() < 0.3)
            case 1:
                quic.send_stream_data(quic.get_next_available_stream_id(rng.random() < 0.5), b"hello", True)
            case 2:
                quic.send_datagram_frame(bytes(rng.randrange(1000)))
            case 3:
                quic.send_ping(rng.randrange(1000))
            case 4:
                quic.request_key_update()
            case 5:
                quic.feedback.append(frame(PFEC_ACK, b"ack"))
            case 6:
                quic.change_connection_id() if quic._peer_cid_available else None
            case _:
                quic.queue.extend(OutFrame(SOURCE, body(rng.randrange(750, 1419)), None) for _ in range(30))
        pair.run(rng.choice([0.0005, 0.003, 0.02]))
    for _ in range(40):  # what is queued goes at the pace of a controller that these losses keep small
        pair.run(5.0)
        if not (pair.client.queue or pair.server.queue):  # type: ignore[attr-defined]
            break
    for quic in (pair.client, pair.server):
        assert quic.bugs == 0  # type: ignore[attr-defined]
        assert quic.quiet_turns > 10  # type: ignore[attr-defined]
        assert quic.fast_packets_sent > 20  # type: ignore[attr-defined]
        assert not quic.queue  # type: ignore[attr-defined]
    assert pair.terminated("client") is pair.terminated("server") is None


# ---- when it stays away ---------------------------------------------------------------------------------------------


def test_off_means_off() -> None:
    pair, client, server = pair_of(client_options={"fast_path": False})
    client.queue.extend(OutFrame(SOURCE, body(1300), None) for _ in range(20))
    pair.run(0.5)
    assert len(server.received) == 20
    assert client.fast_packets_sent == client.quiet_turns == 0


def test_small_frames_share_packets_as_before() -> None:
    pair, client, server = pair_of()
    offered = pair.up.offered
    client.queue.extend(OutFrame(SOURCE, body(300), None) for _ in range(40))
    pair.run(0.5)
    assert len(server.received) == 40
    assert client.fast_packets_sent == 0
    assert pair.up.offered - offered < 30


def test_a_requested_key_update_happens_with_frames_alone() -> None:
    pair, client, server = pair_of()
    for phase in (1, 0, 1):
        client.request_key_update()
        client.queue.extend(OutFrame(SOURCE, body(1300), None) for _ in range(5))
        pair.run(0.3)
        assert client._cryptos[tls.Epoch.ONE_RTT].send.key_phase == phase
    assert len(server.received) == 15
    assert client.fast_packets_sent > 0


def test_an_address_that_is_not_validated_is_left_to_aioquic() -> None:
    pair, client, _ = pair_of(client_options={"total": 30})
    sent = client.fast_packets_sent
    client._network_paths[0].is_validated = False
    client._network_paths[0].bytes_received = 0
    client.total = 1000
    pair.transmit()
    assert client.fast_packets_sent == sent


def test_runs_are_cut_where_the_size_changes() -> None:
    _, client, _ = pair_of()
    client.set_congestion_control(*rate_control(1e9))
    client._loss._cc.congestion_window = 1 << 20
    client._loss._pacer.next_send_time(client.now_s)  # its bucket is full 0.1 s later
    sizes = [1300, 1300, 1300, 1000, 1300, 1400, 1400, 900, 900]
    client.queue.extend(OutFrame(SOURCE, body(size), size) for size in sizes)
    runs: list[tuple[bytes, int]] = []
    client.send_runs(client.now_s + 0.1, lambda data, size, addr: runs.append((bytes(data), size)))
    assert [(len(data) // size, len(data) % size > 0) for data, size in runs] == [
        (3, True),
        (1, False),
        (2, True),
        (1, False),
    ]
    assert sum(len(data) for data, _ in runs) == sum(sizes) + len(sizes) * (2 + 4 + 11 + 16)


def test_more_than_a_run_leaves_in_one_turn() -> None:
    pair, client, server = pair_of(client_options={"total": 3 * MAX_RUN + 5})
    client._loss._cc.congestion_window = 1 << 20
    client._loss._pacer.packet_time = None
    pair.transmit()
    assert client.sent == 3 * MAX_RUN + 5
    pair.run(0.5)
    assert len(server.received) == client.sent


def test_part_of_a_packet_is_used_when_the_window_ends_there() -> None:
    pair, client, _ = pair_of()
    client._loss._pacer.packet_time = None
    client._loss._cc.congestion_window = client.bytes_in_flight + 3 * 1452 - 100
    client.queue.extend(OutFrame(SOURCE, body(1300), None) for _ in range(5))
    pair.transmit()
    assert len(client.queue) == 2  # the third fits what is left
    assert client.blocked_cwnd > 0


@pytest.mark.parametrize("fault", ["too long", "too many", "exception"])
def test_a_bug_in_a_run_ends_the_connection_and_nothing_else(fault: str) -> None:
    pair, client, _ = pair_of()

    def broken(now: float, most: int, space: int, out: bytearray, stride: int, offset: int) -> FrameRun:
        if fault == "exception":
            raise ZeroDivisionError
        return (
            FrameRun([space + 1], [None]) if fault == "too long" else FrameRun([100] * (most + 1), [None] * (most + 1))
        )

    client.next_run = broken
    client.queue.append(OutFrame(SOURCE, body(1300), None))
    pair.run(0.5)
    assert client.bugs == 1
    assert pair.terminated("server").error_code == QuicErrorCode.INTERNAL_ERROR


def test_the_tick_only_delays_whoever_waits_for_its_own_pacer() -> None:
    pair, client, server = pair_of()
    client.set_congestion_control(*rate_control(50e6))
    client.pacing_tick_s = 0.001
    client.total = 10**6  # from here on: without a rate, this link would take hundreds of thousands
    pair.run(0.5)
    start, turns = client.sent, 0

    def count(now: float) -> None:
        nonlocal turns
        turns += 1

    pair.on_step = count
    pair.run(1.0)
    assert client.sent - start == pytest.approx(50e6 / 8 / (BIG + 27 + 28), rel=0.02)
    assert turns < 2 * 1000 + (client.sent - start)
    assert len(server.received) > 0


def test_what_comes_between_two_bursts_does_not_cut_them() -> None:
    _, client, _ = pair_of()
    client.set_congestion_control(*rate_control(100e6))
    client.pacing_tick_s = 0.001
    client.total = 10**6
    now = 1.0
    client.datagrams_to_send(now)
    due = client.get_timer()
    assert due == now + client.pacing_tick_s
    for share in (0.3, 0.6, 0.99):  # an acknowledgement, say: whoever gets one transmits
        assert client.datagrams_to_send(now + share * client.pacing_tick_s) == []
        assert client.get_timer() == due
    assert len(client.datagrams_to_send(due)) > 5
    assert client.get_timer() == due + client.pacing_tick_s


def test_a_wait_ends_early_when_the_rate_rises() -> None:
    _, client, _ = pair_of()
    controller, pacer = rate_control(20e3)  # a packet every 0.6 s
    client.set_congestion_control(controller, pacer)
    client.pacing_tick_s = 0.001
    client.total = 10**6
    now = 1.0
    client.datagrams_to_send(now)
    assert client._pacing_at > now + 0.3
    client.set_congestion_control(*rate_control(100e6))
    assert len(client.datagrams_to_send(now + 0.002)) > 0  # an acknowledgement came
    assert client.get_timer() < now + 0.004


def test_the_base_class_has_the_same_doors() -> None:
    pair = make_pair(Toy, Toy, client_options={"total": 10})
    pair.connect()
    client: Any = pair.client
    assert isinstance(client, ExtensionConnection)
    pair.run(0.2)
    client.total += 1
    runs: list[tuple[bytes, int]] = []
    client.send_runs(pair.now, lambda data, size, addr: runs.append((bytes(data), size)))
    assert [len(data) == size for data, size in runs] == [True]
    pair.server.receive_datagrams([memoryview(runs[0][0])], ("10.0.0.1", 1111), pair.now)  # type: ignore[attr-defined]
    assert len(pair.server.received) == 11  # type: ignore[attr-defined]
