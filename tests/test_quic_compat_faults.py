"""What a peer or a handler does wrong ends the connection with the code that says so, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from aioquic.quic.connection import QuicConnection, QuicConnectionError
from aioquic.quic.packet import QuicErrorCode

from quic_pfec.quic.extension import OutFrame
from quic_pfec.wire.errors import AppCode, ErrorCode, PeerError
from quic_pfec.wire.frames import PFEC_ACK, REPAIR, SOURCE
from quic_pfec.wire.varint import encode

from .quic_pair import make_pair, server_configuration
from .quic_toy import Toy, body, frame, inject, toys
from .quic_toy import kind as kind


@pytest.mark.parametrize("stock_server", [True, False])
def test_a_frame_without_negotiation_closes_as_an_unknown_type(stock_server: bool, kind: type[Toy]) -> None:
    if stock_server:
        pair = make_pair(kind, QuicConnection)
    else:
        pair = make_pair(kind, kind, server_options={"announce": None})
    pair.connect()
    inject(pair, encode(SOURCE) + body(4))
    closed = pair.terminated("client")
    assert closed.error_code == QuicErrorCode.FRAME_ENCODING_ERROR
    assert closed.frame_type == SOURCE
    assert "Unknown frame type" in closed.reason_phrase


def test_a_frame_in_the_wrong_epoch_is_a_violation(kind: type[Toy]) -> None:
    from aioquic import tls

    server = kind(configuration=server_configuration(), original_destination_connection_id=bytes(8))
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
def test_errors_of_a_handler_close_the_connection(
    error: Exception, code: int, frame_type: int | None, kind: type[Toy]
) -> None:
    pair, client, server = toys(kind)

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
def test_a_handler_that_consumes_nonsense_is_a_bug(used: int, kind: type[Toy]) -> None:
    pair, client, server = toys(kind)
    server.on_frame = lambda kind, content: used
    client.queue.append(frame())
    pair.run(0.5)
    assert server.bugs == 1
    assert pair.terminated("client").error_code == QuicErrorCode.INTERNAL_ERROR


@pytest.mark.parametrize("hook", ["has_frame", "next_frame", "has_feedback", "next_feedback", "frame_fate", "oversize"])
def test_bugs_of_the_sender_end_the_connection_and_nothing_else(hook: str, kind: type[Toy]) -> None:
    pair, client, _ = toys(kind)
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


def test_a_long_reason_does_not_stop_the_close(kind: type[Toy]) -> None:
    pair, client, _ = toys(kind)
    client.fail(PeerError(ErrorCode.PROTOCOL_VIOLATION, "é" * 3000))
    pair.run(0.5)
    assert pair.terminated("server").error_code == ErrorCode.PROTOCOL_VIOLATION
