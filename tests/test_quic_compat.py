"""The extension inside aioquic: what it needs of it, negotiation, frames, feedback and measures."""

from __future__ import annotations

from typing import Any

import pytest
from aioquic.buffer import Buffer
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import DatagramFrameReceived, StreamDataReceived
from aioquic.quic.packet import QuicErrorCode

from quic_pfec.quic import contract
from quic_pfec.quic.compat import ExtensionConnection
from quic_pfec.quic.extension import OutFrame
from quic_pfec.wire.errors import ErrorCode, LocalError, PeerError
from quic_pfec.wire.frames import MANIFEST, PFEC_ACK, REPAIR, SOURCE
from quic_pfec.wire.parameter import PARAMETER_ID
from quic_pfec.wire.varint import encode

from .quic_pair import Direction, client_configuration, make_pair, random_loss
from .quic_toy import BIG, VALUE, Toy, body, frame, toys
from .quic_toy import kind as kind

# ---- the contract with aioquic ---------------------------------------------------------------------------------------


def test_this_aioquic_has_every_name() -> None:
    assert contract.missing_names(QuicConnection(configuration=client_configuration())) == []


@pytest.mark.parametrize("path", [path for path in contract.CONTRACT if path.startswith("_write")])
def test_a_missing_name_is_spelled_out(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(QuicConnection, path)
    with pytest.raises(RuntimeError, match=f"QuicConnection.{path}"):
        SpelledOut(configuration=client_configuration())


class SpelledOut(ExtensionConnection):
    """Without the overrides, which would hide that aioquic's own method is gone."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_write") and not hasattr(QuicConnection, name):
            raise AttributeError(name)
        return super().__getattribute__(name)


def test_a_missing_nested_name_is_spelled_out() -> None:
    quic = QuicConnection(configuration=client_configuration())
    quic._loss._pacer = object()
    assert "QuicConnection._loss._pacer.update_rate" in contract.missing_names(quic)


# ---- negotiation -----------------------------------------------------------------------------------------------------


def test_both_sides_see_the_parameter_once(kind: type[Toy]) -> None:
    _, client, server = toys(kind)
    assert client.parameters == [VALUE]
    assert server.parameters == [VALUE]
    assert client.extension_on
    assert server.extension_on


@pytest.mark.parametrize("stock", ["client", "server"])
def test_a_stock_peer_means_none(stock: str, kind: type[Toy]) -> None:
    classes = {"client": kind, "server": kind} | {stock: QuicConnection}
    pair = make_pair(classes["client"], classes["server"])
    pair.connect()
    ours: Any = pair.end("server" if stock == "client" else "client")
    assert ours.parameters == [None]
    assert not ours.extension_on
    ours.queue.append(frame())
    pair.run(0.5)
    assert len(ours.queue) == 1  # nothing was sent
    assert pair.terminated(stock) is None


def test_a_side_that_announces_nothing_has_the_extension_off(kind: type[Toy]) -> None:
    pair = make_pair(kind, kind, client_options={"announce": None})
    pair.connect()
    assert not pair.client.extension_on  # type: ignore[attr-defined]
    assert not pair.server.extension_on  # type: ignore[attr-defined]


@pytest.mark.parametrize("problem", ["duplicate", "refused", "bug"])
def test_a_bad_parameter_closes(problem: str, kind: type[Toy]) -> None:
    class Bad(kind):
        def _serialize_transport_parameters(self) -> bytes:
            block = super()._serialize_transport_parameters()
            return block + encode(PARAMETER_ID) + encode(len(VALUE)) + VALUE if problem == "duplicate" else block

    class Judge(kind):
        def peer_parameter(self, value: bytes | None) -> bool:
            if problem == "refused":
                raise PeerError(ErrorCode.TRANSPORT_PARAMETER_ERROR, "out of range")
            if problem == "bug":
                raise KeyError("a bug")
            return super().peer_parameter(value)

    pair = make_pair(Bad, Judge)
    pair.client.connect(("10.0.0.2", 4433), now=pair.now)
    pair.run(2.0)
    expected = QuicErrorCode.INTERNAL_ERROR if problem == "bug" else QuicErrorCode.TRANSPORT_PARAMETER_ERROR
    assert pair.terminated("client").error_code == expected


def test_adopting_a_connection_that_aioquic_made(kind: type[Toy]) -> None:
    pair = make_pair(kind, QuicConnection)
    pair.server = kind.adopt(pair.server, {"total": 3})
    pair.connect()
    pair.run(0.2)
    assert len(pair.client.received) == 3  # type: ignore[attr-defined]
    with pytest.raises(LocalError):
        kind.adopt(pair.server)


# ---- frames ----------------------------------------------------------------------------------------------------------


def test_frames_of_every_type_arrive_in_both_directions(kind: type[Toy]) -> None:
    pair, client, server = toys(kind)
    for source, target in ((client, server), (server, client)):
        expected = [(kind, bytes([kind & 0xFF]) * 20) for kind in (SOURCE, REPAIR, MANIFEST)]
        source.queue.extend(frame(kind, content) for kind, content in expected)
        source.feedback.append(frame(PFEC_ACK, b"ack"))
        pair.run(0.1)
        assert target.received == [(PFEC_ACK, b"ack"), *expected]


def test_every_token_gets_one_fate_and_probes_are_marked(kind: type[Toy]) -> None:
    pair = make_pair(kind, kind, client_options={"total": 400}, up=Direction(drop=random_loss(0.1, seed=3)))
    pair.connect()
    client: Any = pair.client
    pair.run_until(lambda: len(client.fates) == 400, 30.0)
    pair.run(2.0)
    tokens = [token for token, _, _ in client.fates]
    assert sorted(tokens) == list(range(1, 401))
    lost = [token for token, acked, expired in client.fates if not acked]
    delivered = len(pair.server.received)  # type: ignore[attr-defined]
    assert 20 < len(lost) < 60
    assert delivered >= 400 - len(lost)


def test_a_probe_is_not_a_loss(kind: type[Toy]) -> None:
    pair, client, _ = toys(kind)
    pair.run(0.5)
    client.queue.append(frame(token="tail"))
    blackout = pair.up.offered
    pair.up.drop = lambda index, size: index == blackout
    pair.run(2.0)
    assert client.fates == [("tail", False, True)]


def test_nothing_is_asked_before_the_window_allows_it(kind: type[Toy]) -> None:
    pair = make_pair(kind, kind, client_options={"total": 10_000})
    pair.connect()
    client: Any = pair.client
    client.spaces.clear()
    pair.transmit()
    assert client.bytes_in_flight <= client.cwnd
    asked, sent = len(client.spaces), client.sent
    for _ in range(5):
        pair.transmit()
    assert client.sent == sent
    assert len(client.spaces) - asked <= 5
    assert client.blocked_cwnd > 0


def test_a_frame_that_does_not_fit_blocks_nobody(kind: type[Toy]) -> None:
    pair, client, server = toys(kind)
    client.queue.append(frame(content=bytes(2000)))
    client.send_stream_data(0, b"hello")
    client.feedback.append(frame(PFEC_ACK, b"ack"))
    pair.run(0.2)
    assert server.received == [(PFEC_ACK, b"ack")]
    assert any(isinstance(e, StreamDataReceived) and e.data == b"hello" for e in pair.events["server"])
    assert len(client.queue) == 1


def test_frame_space_is_exactly_what_a_packet_takes(kind: type[Toy]) -> None:
    pair, client, server = toys(kind)
    assert client.frame_space == 1425
    client.queue.append(OutFrame(SOURCE, body(1425 - 4 - 2), None))
    sizes: list[int] = []
    pair.up.drop = lambda index, size: sizes.append(size) is not None
    pair.run(0.005)
    assert max(sizes) == 1452
    pair.run(0.1)
    assert [len(content) for _, content in server.received] == [1419]


def test_datagrams_of_the_application_keep_working(kind: type[Toy]) -> None:
    both = {"max_datagram_frame_size": 65536}
    pair = make_pair(kind, kind, client_options={"total": 50}, client_changes=both, server_changes=both)
    pair.connect()
    for content in (b"", b"one", bytes(1400)):
        pair.client.send_datagram_frame(content)
    pair.run(1.0)
    got = [e.data for e in pair.events["server"] if isinstance(e, DatagramFrameReceived)]
    assert got == [b"", b"one", bytes(1400)]
    assert len(pair.server.received) == 50  # type: ignore[attr-defined]
    with pytest.raises(LocalError):
        pair.client.send_datagram_frame(bytes(1424))


def test_a_datagram_that_the_peer_refuses_is_refused_here(kind: type[Toy]) -> None:
    _, client, _ = toys(kind)
    with pytest.raises(LocalError):
        client.send_datagram_frame(b"x")


@pytest.mark.parametrize(("urgent", "least", "most"), [(False, 0.4, 0.6), (True, 0.65, 0.85)])
def test_streams_and_frames_share_the_packets(urgent: bool, least: float, most: float, kind: type[Toy]) -> None:
    pair = make_pair(kind, kind, client_options={"total": 300})
    pair.connect()
    client: Any = pair.client
    if urgent:
        client.urgent.add(0)
    client.send_stream_data(0, bytes(600_000))
    start = pair.up.delivered_bytes
    pair.run_until(lambda: client.sent == 100, 30.0)
    stream = (pair.up.delivered_bytes - start - 100 * BIG) / (pair.up.delivered_bytes - start)
    assert least < stream < most


def test_streams_that_cannot_send_do_not_stop_frames(kind: type[Toy]) -> None:
    changes = {"max_stream_data": 1000}
    pair = make_pair(kind, kind, client_options={"total": 100}, server_changes=changes)
    pair.connect()
    pair.server._local_max_stream_data_bidi_remote = 0
    pair.client.send_stream_data(0, bytes(100_000))
    pair.client._streams[0].max_stream_data_remote = 0  # flow control closed
    pair.run(1.0)
    assert len(pair.server.received) == 100  # type: ignore[attr-defined]


def test_a_packet_left_to_streams_in_vain_is_ours_the_next_time(kind: type[Toy]) -> None:
    pair, client, server = toys(kind)
    client._stream_share = lambda: 1  # streams wait, as it seems, but never write
    client.queue.extend(frame() for _ in range(20))
    pair.run(0.5)
    for _ in range(40):
        pair.transmit()
    pair.run(0.5)
    assert len(server.received) == 20


def test_a_datagram_queued_while_a_frame_is_chosen_is_not_lost(kind: type[Toy]) -> None:
    both = {"max_datagram_frame_size": 65536}
    pair, client, server = toys(kind, client_changes=both, server_changes=both)
    original = client.next_frame

    def choose(now: float, space: int) -> OutFrame | None:
        client.send_datagram_frame(b"meanwhile")
        client.next_frame = original
        chosen: OutFrame | None = original(now, space)
        return chosen

    client.next_frame = choose
    client.queue.append(frame())
    pair.run(0.5)
    assert len(server.received) == 1
    assert [e.data for e in pair.events["server"] if isinstance(e, DatagramFrameReceived)] == [b"meanwhile"]


def test_ours_stand_last_in_a_packet(kind: type[Toy]) -> None:
    pair = make_pair(kind, kind, client_options={"total": 200, "size": 400})
    pair.connect()
    pair.client.send_stream_data(0, bytes(50_000))
    seen: list[list[int]] = []
    original = pair.server._payload_received

    def spy(context: Any, plain: bytes, **rest: Any) -> Any:
        kinds: list[int] = []
        seen.append(kinds)
        handlers = pair.server._QuicConnection__frame_handlers  # type: ignore[attr-defined]

        class Watch(dict):  # type: ignore[type-arg]
            def __getitem__(self, kind: int) -> Any:
                kinds.append(kind)
                return handlers[kind]

        pair.server._QuicConnection__frame_handlers = Watch()  # type: ignore[attr-defined]
        try:
            return original(context, plain, **rest)
        finally:
            pair.server._QuicConnection__frame_handlers = handlers  # type: ignore[attr-defined]

    pair.server._payload_received = spy  # type: ignore[method-assign]
    pair.run(1.0)
    mixed = [kinds for kinds in seen if SOURCE in kinds]
    assert len(pair.server.received) == 200  # type: ignore[attr-defined]
    assert mixed
    assert all(kind == SOURCE for kinds in mixed for kind in kinds[kinds.index(SOURCE) :])


# ---- feedback --------------------------------------------------------------------------------------------------------


def test_feedback_is_outside_the_congestion_window_and_needs_no_acknowledgement(kind: type[Toy]) -> None:
    pair, client, server = toys(kind)
    pair.run(1.0)
    client._loss._cc.congestion_window = 0
    client._feedback_ping_at = pair.now + 10.0
    before = pair.down.offered
    client.feedback.append(OutFrame(PFEC_ACK, body(30), None, ack_eliciting=False))
    client.queue.append(frame())
    pair.run(1.0)
    assert server.received == [(PFEC_ACK, bytes(30))]
    assert client.bytes_in_flight == 0
    assert pair.down.offered == before
    assert client.blocked_cwnd > 0


def test_ack_eliciting_feedback_brings_a_fate_and_a_round_trip(kind: type[Toy]) -> None:
    pair, client, _ = toys(kind)
    pair.run(1.0)
    client.feedback.append(OutFrame(PFEC_ACK, body(30), "token", ack_eliciting=True))
    pair.run(0.2)
    assert client.fates == [("token", True, False)]


def test_a_sender_of_feedback_alone_forgets_its_packets(kind: type[Toy]) -> None:
    pair, client, _ = toys(kind)
    for _ in range(300):
        client.feedback.append(OutFrame(PFEC_ACK, body(30), None, ack_eliciting=False))
        pair.run(0.005)
    pair.run(0.2)
    from aioquic import tls

    assert len(client._spaces[tls.Epoch.ONE_RTT].sent_packets) < 20


def test_other_connections_of_the_process_do_not_know_the_frames() -> None:
    stock = QuicConnection(configuration=client_configuration())
    assert SOURCE not in stock._QuicConnection__frame_handlers  # type: ignore[attr-defined]
    assert not isinstance(Buffer(data=b"x"), bytes)


def test_measures(kind: type[Toy]) -> None:
    pair, client, server = toys(kind)
    client.queue.append(frame(token=1))
    client.send_stream_data(0, bytes(100_000))
    assert client.stream_backlog(0) == 100_000
    pair.run_until(lambda: client.stream_backlog(0) == 0)
    assert client.has_rtt_sample
    assert client.min_rtt_s == pytest.approx(0.02, abs=0.003)
    assert client.min_rtt_s <= client.rtt_s < 0.05
    assert client.latest_rtt_s > 0
    assert client.cwnd > 0
    assert client.pto_s > client.rtt_s
    assert client.send_rate_bps == pytest.approx(8 * client.cwnd / client.rtt_s)
    assert client.is_client
    assert not server.is_client
    assert server.peer_stream_limit == 128
    assert client.stream_backlog(4) == 0
