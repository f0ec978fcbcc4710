from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from aioquic.buffer import Buffer
from aioquic.quic import connection as aioquic_connection
from aioquic.quic.connection import QuicConnection, QuicConnectionError
from aioquic.quic.events import ConnectionTerminated, DatagramFrameReceived, StreamDataReceived
from aioquic.quic.packet import QuicErrorCode, QuicFrameType
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.quic.rangeset import RangeSet

from quic_pfec.quic import contract
from quic_pfec.quic.compat import ExtensionConnection
from quic_pfec.quic.extension import OutFrame
from quic_pfec.wire.errors import AppCode, ErrorCode, LocalError, PeerError
from quic_pfec.wire.frames import MANIFEST, PFEC_ACK, REPAIR, SOURCE
from quic_pfec.wire.parameter import PARAMETER_ID
from quic_pfec.wire.varint import encode

from .quic_pair import Direction, Pair, client_configuration, make_pair, random_loss, server_configuration

BIG = 1383  # a SOURCE frame with the largest symbol
VALUE = bytes([1, 1, 0x45, 0x5C, 0x50, 0x00, 0x40, 0xFF, 4, 0x50, 0x00])


class Toy(ExtensionConnection):
    """Sends what a test queues: frames are a 2-byte length and content; every frame and every fate is recorded."""

    skip_random = random.Random(7)
    announce: tuple[int, bytes] | None = (PARAMETER_ID, VALUE)

    def setup(self, *, total: int = 0, size: int = BIG, announce: Any = "default") -> None:
        self.total, self.size = total, size
        self.sent = 0
        self.queue: deque[OutFrame] = deque()
        self.feedback: deque[OutFrame] = deque()
        self.received: list[tuple[int, bytes]] = []
        self.fates: list[tuple[object, bool, bool]] = []
        self.parameters: list[bytes | None] = []
        self.spaces: list[int] = []
        self.urgent: set[int] = set()
        self.on_frame: Any = None
        self.unlimited = False
        if announce != "default":
            self.announce = announce

    def local_parameter(self) -> tuple[int, bytes] | None:
        return self.announce

    def peer_parameter(self, value: bytes | None) -> bool:
        self.parameters.append(value)
        return value is not None

    def extension_frame(self, frame_type: int, data: memoryview, now: float) -> int:
        length = int.from_bytes(data[:2], "big")
        content = bytes(data[2 : 2 + length])
        self.received.append((frame_type, content))
        if self.on_frame is not None:
            return int(self.on_frame(frame_type, content) or 2 + length)
        return 2 + length

    def has_frame(self, now: float) -> bool:
        return bool(self.queue) or self.sent < self.total

    def next_frame(self, now: float, space: int) -> OutFrame | None:
        self.spaces.append(space)
        if self.queue:
            size = 4 + len(self.queue[0].body)
            return self.queue.popleft() if size <= space else None
        if self.size > space:
            return None
        self.sent += 1
        return OutFrame(SOURCE, body(self.size - 6), self.sent)

    def has_feedback(self, now: float) -> bool:
        return bool(self.feedback)

    def next_feedback(self, now: float, space: int) -> OutFrame | None:
        return self.feedback.popleft() if 4 + len(self.feedback[0].body) <= space else None

    def frame_fate(self, token: object, acked: bool, now: float, expired: bool = False) -> None:
        self.fates.append((token, acked, expired))

    def stream_is_urgent(self, stream_id: int) -> bool:
        return stream_id in self.urgent


def body(length: int) -> bytes:
    return length.to_bytes(2, "big") + bytes(length)


def frame(frame_type: int = SOURCE, content: bytes = b"x", token: object | None = None) -> OutFrame:
    return OutFrame(frame_type, len(content).to_bytes(2, "big") + content, token)


def toys(**options: Any) -> tuple[Pair, Any, Any]:
    pair = make_pair(Toy, Toy, **options)
    pair.connect()
    return pair, pair.client, pair.server


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


def test_both_sides_see_the_parameter_once() -> None:
    _, client, server = toys()
    assert client.parameters == [VALUE]
    assert server.parameters == [VALUE]
    assert client.extension_on
    assert server.extension_on


@pytest.mark.parametrize("stock", ["client", "server"])
def test_a_stock_peer_means_none(stock: str) -> None:
    classes = {"client": Toy, "server": Toy} | {stock: QuicConnection}
    pair = make_pair(classes["client"], classes["server"])
    pair.connect()
    ours: Any = pair.end("server" if stock == "client" else "client")
    assert ours.parameters == [None]
    assert not ours.extension_on
    ours.queue.append(frame())
    pair.run(0.5)
    assert len(ours.queue) == 1  # nothing was sent
    assert pair.terminated(stock) is None


def test_a_side_that_announces_nothing_has_the_extension_off() -> None:
    pair = make_pair(Toy, Toy, client_options={"announce": None})
    pair.connect()
    assert not pair.client.extension_on  # type: ignore[attr-defined]
    assert not pair.server.extension_on  # type: ignore[attr-defined]


@pytest.mark.parametrize("problem", ["duplicate", "refused", "bug"])
def test_a_bad_parameter_closes(problem: str) -> None:
    class Bad(Toy):
        def _serialize_transport_parameters(self) -> bytes:
            block = super()._serialize_transport_parameters()
            return block + encode(PARAMETER_ID) + encode(len(VALUE)) + VALUE if problem == "duplicate" else block

    class Judge(Toy):
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


def test_adopting_a_connection_that_aioquic_made() -> None:
    pair = make_pair(Toy, QuicConnection)
    pair.server = Toy.adopt(pair.server, {"total": 3})
    pair.connect()
    pair.run(0.2)
    assert len(pair.client.received) == 3  # type: ignore[attr-defined]
    with pytest.raises(LocalError):
        Toy.adopt(pair.server)


# ---- frames ----------------------------------------------------------------------------------------------------------


def test_frames_of_every_type_arrive_in_both_directions() -> None:
    pair, client, server = toys()
    for source, target in ((client, server), (server, client)):
        expected = [(kind, bytes([kind & 0xFF]) * 20) for kind in (SOURCE, REPAIR, MANIFEST)]
        source.queue.extend(frame(kind, content) for kind, content in expected)
        source.feedback.append(frame(PFEC_ACK, b"ack"))
        pair.run(0.1)
        assert target.received == [(PFEC_ACK, b"ack"), *expected]


def test_every_token_gets_one_fate_and_probes_are_marked() -> None:
    pair = make_pair(Toy, Toy, client_options={"total": 400}, up=Direction(drop=random_loss(0.1, seed=3)))
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


def test_a_probe_is_not_a_loss() -> None:
    pair, client, _ = toys()
    pair.run(0.5)
    client.queue.append(frame(token="tail"))
    blackout = pair.up.offered
    pair.up.drop = lambda index, size: index == blackout
    pair.run(2.0)
    assert client.fates == [("tail", False, True)]


def test_nothing_is_asked_before_the_window_allows_it() -> None:
    pair = make_pair(Toy, Toy, client_options={"total": 10_000})
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


def test_a_frame_that_does_not_fit_blocks_nobody() -> None:
    pair, client, server = toys()
    client.queue.append(frame(content=bytes(2000)))
    client.send_stream_data(0, b"hello")
    client.feedback.append(frame(PFEC_ACK, b"ack"))
    pair.run(0.2)
    assert server.received == [(PFEC_ACK, b"ack")]
    assert any(isinstance(e, StreamDataReceived) and e.data == b"hello" for e in pair.events["server"])
    assert len(client.queue) == 1


def test_frame_space_is_exactly_what_a_packet_takes() -> None:
    pair, client, server = toys()
    assert client.frame_space == 1425
    client.queue.append(OutFrame(SOURCE, body(1425 - 4 - 2), None))
    sizes: list[int] = []
    pair.up.drop = lambda index, size: sizes.append(size) is not None
    pair.run(0.005)
    assert max(sizes) == 1452
    pair.run(0.1)
    assert [len(content) for _, content in server.received] == [1419]


def test_datagrams_of_the_application_keep_working() -> None:
    both = {"max_datagram_frame_size": 65536}
    pair = make_pair(Toy, Toy, client_options={"total": 50}, client_changes=both, server_changes=both)
    pair.connect()
    for content in (b"", b"one", bytes(1400)):
        pair.client.send_datagram_frame(content)
    pair.run(1.0)
    got = [e.data for e in pair.events["server"] if isinstance(e, DatagramFrameReceived)]
    assert got == [b"", b"one", bytes(1400)]
    assert len(pair.server.received) == 50  # type: ignore[attr-defined]
    with pytest.raises(LocalError):
        pair.client.send_datagram_frame(bytes(1424))


def test_a_datagram_that_the_peer_refuses_is_refused_here() -> None:
    _, client, _ = toys()
    with pytest.raises(LocalError):
        client.send_datagram_frame(b"x")


@pytest.mark.parametrize(("urgent", "least", "most"), [(False, 0.4, 0.6), (True, 0.65, 0.85)])
def test_streams_and_frames_share_the_packets(urgent: bool, least: float, most: float) -> None:
    pair = make_pair(Toy, Toy, client_options={"total": 300})
    pair.connect()
    client: Any = pair.client
    if urgent:
        client.urgent.add(0)
    client.send_stream_data(0, bytes(600_000))
    start = pair.up.delivered_bytes
    pair.run_until(lambda: client.sent == 100, 30.0)
    stream = (pair.up.delivered_bytes - start - 100 * BIG) / (pair.up.delivered_bytes - start)
    assert least < stream < most


def test_streams_that_cannot_send_do_not_stop_frames() -> None:
    changes = {"max_stream_data": 1000}
    pair = make_pair(Toy, Toy, client_options={"total": 100}, server_changes=changes)
    pair.connect()
    pair.server._local_max_stream_data_bidi_remote = 0
    pair.client.send_stream_data(0, bytes(100_000))
    pair.client._streams[0].max_stream_data_remote = 0  # flow control closed
    pair.run(1.0)
    assert len(pair.server.received) == 100  # type: ignore[attr-defined]


def test_a_packet_left_to_streams_in_vain_is_ours_the_next_time() -> None:
    pair, client, server = toys()
    client._stream_share = lambda: 1  # streams wait, as it seems, but never write
    client.queue.extend(frame() for _ in range(20))
    pair.run(0.5)
    for _ in range(40):
        pair.transmit()
    pair.run(0.5)
    assert len(server.received) == 20


def test_a_datagram_queued_while_a_frame_is_chosen_is_not_lost() -> None:
    both = {"max_datagram_frame_size": 65536}
    pair, client, server = toys(client_changes=both, server_changes=both)
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


def test_ours_stand_last_in_a_packet() -> None:
    pair = make_pair(Toy, Toy, client_options={"total": 200, "size": 400})
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


def test_feedback_is_outside_the_congestion_window_and_needs_no_acknowledgement() -> None:
    pair, client, server = toys()
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


def test_ack_eliciting_feedback_brings_a_fate_and_a_round_trip() -> None:
    pair, client, _ = toys()
    pair.run(1.0)
    client.feedback.append(OutFrame(PFEC_ACK, body(30), "token", ack_eliciting=True))
    pair.run(0.2)
    assert client.fates == [("token", True, False)]


def test_a_sender_of_feedback_alone_forgets_its_packets() -> None:
    pair, client, _ = toys()
    for _ in range(300):
        client.feedback.append(OutFrame(PFEC_ACK, body(30), None, ack_eliciting=False))
        pair.run(0.005)
    pair.run(0.2)
    from aioquic import tls

    assert len(client._spaces[tls.Epoch.ONE_RTT].sent_packets) < 20


# ---- bad input -------------------------------------------------------------------------------------------------------


def inject(pair: Pair, payload: bytes, packet_type: Any = None) -> None:
    """Put raw frames into a 1-RTT packet of the client."""
    client = pair.client
    original = client._write_application

    def write(builder: QuicPacketBuilder, path: Any, now: float) -> None:
        from aioquic import tls
        from aioquic.quic.packet import QuicPacketType

        builder.start_packet(QuicPacketType.ONE_RTT, client._cryptos[tls.Epoch.ONE_RTT])
        builder.start_frame(QuicFrameType.PING, capacity=1)
        builder._buffer.push_bytes(payload)

    client.send_ping(0)  # so that there is something to send
    client._write_application = write  # type: ignore[method-assign]
    try:
        pair.transmit()
    finally:
        client._write_application = original  # type: ignore[method-assign]
    pair.run(0.5)


@pytest.mark.parametrize("stock_server", [True, False])
def test_a_frame_without_negotiation_closes_as_an_unknown_type(stock_server: bool) -> None:
    if stock_server:
        pair = make_pair(Toy, QuicConnection)
    else:
        pair = make_pair(Toy, Toy, server_options={"announce": None})
    pair.connect()
    inject(pair, encode(SOURCE) + body(4))
    closed = pair.terminated("client")
    assert closed.error_code == QuicErrorCode.FRAME_ENCODING_ERROR
    assert closed.frame_type == SOURCE
    assert "Unknown frame type" in closed.reason_phrase


def test_a_frame_in_the_wrong_epoch_is_a_violation() -> None:
    from aioquic import tls

    server = Toy(configuration=server_configuration(), original_destination_connection_id=bytes(8))
    for epoch in (tls.Epoch.INITIAL, tls.Epoch.HANDSHAKE, tls.Epoch.ZERO_RTT):
        context = SimpleNamespace(epoch=epoch, time=0.0, quic_logger_frames=None)
        with pytest.raises(QuicConnectionError) as info:
            server._payload_received(context, encode(SOURCE) + body(4))  # type: ignore[arg-type]
        assert info.value.error_code == QuicErrorCode.PROTOCOL_VIOLATION


@pytest.mark.parametrize(
    ("error", "code", "frame_type"),
    [
        (PeerError(ErrorCode.PROTOCOL_VIOLATION, "why"), 0xA, SOURCE),
        (PeerError(ErrorCode.FLOW_CONTROL_ERROR, "why", frame_type=REPAIR), 0x3, REPAIR),
        (PeerError(AppCode.KV_INTEGRITY, "why", application=True), AppCode.KV_INTEGRITY, None),
        (KeyError("a bug"), QuicErrorCode.INTERNAL_ERROR, SOURCE),
    ],
)
def test_errors_of_a_handler_close_the_connection(error: Exception, code: int, frame_type: int | None) -> None:
    pair, client, server = toys()

    def fault(kind: int, content: bytes) -> None:
        raise error

    server.on_frame = fault
    client.queue.append(frame())
    pair.run(0.5)
    closed = pair.terminated("client")
    assert closed.error_code == code
    assert closed.frame_type == frame_type
    assert server.bugs == isinstance(error, KeyError)
    assert server.last_bug is (error if isinstance(error, KeyError) else None)


@pytest.mark.parametrize("used", [-1, 10**6])
def test_a_handler_that_consumes_nonsense_is_a_bug(used: int) -> None:
    pair, client, server = toys()
    server.on_frame = lambda kind, content: used
    client.queue.append(frame())
    pair.run(0.5)
    assert server.bugs == 1
    assert pair.terminated("client").error_code == QuicErrorCode.INTERNAL_ERROR


@pytest.mark.parametrize("hook", ["has_frame", "next_frame", "has_feedback", "next_feedback", "frame_fate", "oversize"])
def test_bugs_of_the_sender_end_the_connection_and_nothing_else(hook: str) -> None:
    pair, client, _ = toys()
    client.queue.append(frame(token=1))
    if hook == "next_feedback":
        client.feedback.append(frame(PFEC_ACK))
    if hook == "oversize":
        client.next_frame = lambda now, space: OutFrame(SOURCE, bytes(space - 3), None)
    else:

        def broken(*args: Any, **rest: Any) -> Any:
            raise ZeroDivisionError(hook)

        setattr(client, hook, broken)
    pair.run(1.0)
    assert client.bugs >= 1
    assert pair.terminated("server").error_code == QuicErrorCode.INTERNAL_ERROR


def test_a_long_reason_does_not_stop_the_close() -> None:
    pair, client, _ = toys()
    client.fail(PeerError(ErrorCode.PROTOCOL_VIOLATION, "é" * 3000))
    pair.run(0.5)
    assert pair.terminated("server").error_code == ErrorCode.PROTOCOL_VIOLATION


# ---- repairs of aioquic ----------------------------------------------------------------------------------------------


def test_packets_far_behind_are_accepted() -> None:
    pair = make_pair(Toy, Toy, client_options={"total": 400})
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


def test_an_acknowledgement_of_the_future_closes() -> None:
    pair, _, server = toys()
    before = server.cwnd
    inject(pair, forged_ack(10**9, 10**9))
    assert pair.terminated("client").error_code == QuicErrorCode.PROTOCOL_VIOLATION
    assert server.cwnd == before


def test_an_acknowledgement_of_a_skipped_number_closes() -> None:
    pair = make_pair(Toy, Toy, server_options={"total": 300})
    pair.connect()
    server: Any = pair.server
    pair.run_until(lambda: server.sent == 300, 30.0)
    assert 1 <= len(server._skipped) <= 3
    assert server.packets_sent == server._packet_number - len(server._skipped)
    pair.run(0.5)
    assert pair.terminated("client") is None
    inject(pair, forged_ack(server._packet_number - 1, server._packet_number - 1))
    assert pair.terminated("client").error_code == QuicErrorCode.PROTOCOL_VIOLATION


def test_honest_acknowledgements_pass_the_check() -> None:
    _, client, _ = toys()
    acked = RangeSet([range(client._packet_number)])
    client._check_ack(acked)
    acked.add(client._packet_number)
    with pytest.raises(QuicConnectionError):
        client._check_ack(acked)


def test_keys_are_updated_before_the_limit_in_both_directions() -> None:
    class Short(Toy):
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


def test_a_key_that_cannot_be_updated_is_not_used_beyond_its_limit() -> None:
    class Short(Toy):
        key_update_packets = 100
        key_limit_packets = 200

        def request_key_update(self) -> None:
            pass

    pair = make_pair(Short, Toy, client_options={"total": 1000})
    pair.connect()
    pair.run(10.0)
    closed = pair.terminated("client")
    assert isinstance(closed, ConnectionTerminated)
    assert closed.error_code == QuicErrorCode.AEAD_LIMIT_REACHED


def test_other_connections_of_the_process_do_not_know_the_frames() -> None:
    stock = QuicConnection(configuration=client_configuration())
    assert SOURCE not in stock._QuicConnection__frame_handlers  # type: ignore[attr-defined]
    assert not isinstance(Buffer(data=b"x"), bytes)


def test_measures() -> None:
    pair, client, server = toys()
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
