"""A sender against peers that are silent, refuse, lie about what they have, or vanish."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from quic_pfec.client import send_kv
from quic_pfec.quic import outgoing as outgoing_module
from quic_pfec.quic.outgoing import HandoffRefused
from quic_pfec.wire import frames, messages
from quic_pfec.wire.errors import AppCode

from .handoff_world import (
    HostileServer,
    arrays,
    connecting,
    hostile_server,
    only,
    prepared,
    relaying,
    serving,
    until,
)

pytestmark = pytest.mark.sockets

KV = prepared(2, 32)


def report(**changes: Any) -> messages.Report:
    nothing = messages.Report(frames.AckStatus.FROZEN, 0, 1.0, b"", b"", 0, b"", 0, 0, 0, 0)
    return msgspec.structs.replace(nothing, **changes)


async def sending(listener: Any, conn: Any, deadline_s: float = 20.0) -> tuple[asyncio.Task[Any], HostileServer]:
    """A hand-off whose opening has arrived at a hostile server."""
    task = asyncio.create_task(send_kv(conn, KV, deadline_s))
    peer = await only(listener)
    await until(lambda: any(isinstance(m, messages.Start) for m in peer.on(0).messages))
    return task, peer


async def test_a_silent_peer_leaves_the_hand_off_unconfirmed() -> None:
    async with hostile_server() as listener, connecting(listener.port) as conn:
        result = await send_kv(conn, KV, 0.2)
        assert not result.confirmed
        assert result.frozen_s is None
        assert result.recovered_verified is None
        assert result.units_complete == 0
        assert result.symbols.source > 0
        assert not conn.protocol.quic.senders  # row 30: nothing is kept for a peer that says nothing
        (outgoing,) = conn.protocol._outgoing.values()
        assert outgoing.sender is None
        assert outgoing._kv is None
        # What comes later is heard and does no harm.
        peer = await only(listener)
        peer.write(0, messages.encode_message(report()))
        peer.write(0, messages.encode_message(messages.Text("late", 1, 0)), True)
        assert [part async for part in result.text] == ["late"]
        assert not conn.protocol._outgoing
        assert conn.protocol.terminated is None


async def test_losing_all_feedback_does_not_stall_the_sender() -> None:
    kv = prepared(6, 128)
    async with hostile_server() as listener, connecting(listener.port, rate="100Mbps") as conn:
        result = await send_kv(conn, kv, 1.0)
    assert result.symbols.source == result.symbols.total


@pytest.mark.parametrize("stop_first", [True, False])
async def test_the_reason_of_a_refusal_is_told_whatever_comes_first(stop_first: bool) -> None:
    refused = messages.encode_message(messages.Refused(AppCode.BUSY, "come back tomorrow"))
    async with hostile_server() as listener, connecting(listener.port) as conn:
        task, peer = await sending(listener, conn)
        if stop_first:
            peer.quic.stop_stream(0, AppCode.BUSY)
            peer.transmit()
            await asyncio.sleep(0.02)
        peer.write(0, refused, True)
        with pytest.raises(HandoffRefused, match="come back tomorrow") as raised:
            await task
        assert raised.value.busy
        assert not conn.protocol.quic.senders
        assert not conn.protocol._outgoing


async def test_a_stop_without_a_reason_is_a_refusal_too() -> None:
    async with hostile_server() as listener, connecting(listener.port) as conn:
        task, peer = await sending(listener, conn)
        peer.quic.stop_stream(0, 0x7777)
        peer.transmit()
        with pytest.raises(HandoffRefused, match="stopped") as raised:
            await task
        assert raised.value.code is AppCode.INTERNAL  # no code of ours
        assert conn.protocol.terminated is None


async def test_a_reset_reply_is_a_refusal() -> None:
    async with hostile_server() as listener, connecting(listener.port) as conn:
        task, peer = await sending(listener, conn)
        peer.quic.reset_stream(0, AppCode.CANCELLED)
        peer.transmit()
        with pytest.raises(HandoffRefused) as raised:
            await task
        assert raised.value.code is AppCode.CANCELLED


async def test_a_reply_that_ends_without_a_report_is_a_connection_error() -> None:
    async with hostile_server() as listener, connecting(listener.port) as conn:
        task, peer = await sending(listener, conn)
        peer.write(0, b"", True)
        with pytest.raises(ConnectionError, match="without a report"):
            await task


@pytest.mark.parametrize(
    "data",
    [
        b"\x3f\x00",
        b"\x01\x00",
        b"\x12\x01\xff",
        b"\x14\xbf\xff\xff\xff",
        messages.encode_message(messages.Accepted(1)) * 2,
        messages.encode_message(report(known=bytes(4000))),
    ],
    ids=lambda data: f"{data[:4].hex()}-{len(data)}",
)
async def test_nonsense_in_the_reply_closes(data: bytes) -> None:
    async with hostile_server() as listener, connecting(listener.port) as conn:
        task, peer = await sending(listener, conn)
        peer.write(0, data)
        with pytest.raises(ConnectionError):
            await task
        assert await peer.closed() == AppCode.MESSAGE_ERROR
        assert not conn.protocol.quic.senders
        with pytest.raises(ConnectionError, match="closed"):
            await send_kv(conn, KV, 1.0)


@pytest.mark.parametrize("field", ["complete", "recovered"])
async def test_a_report_may_claim_anything_about_units(field: str) -> None:
    """Long bitmaps and wild numbers are cut, not trusted."""
    claim = report(**{field: b"\xff" * 5000}, frozen_early_us=-(1 << 62), corrupt=(1 << 62) - 1)
    async with hostile_server() as listener, connecting(listener.port) as conn:
        task, peer = await sending(listener, conn)
        peer.write(0, messages.encode_message(claim), True)
        result = await task
    assert result.confirmed
    assert result.j_block <= 1
    assert result.recovered_verified is (field != "recovered")


async def test_feedback_that_knows_what_was_never_sent_closes() -> None:
    async with hostile_server() as listener, connecting(listener.port) as conn:
        task, peer = await sending(listener, conn)
        peer.send(frames.PfecAckFrame(0, 0, frames.AckStatus.RUNNING, 10**6, 0, 0, 10**6, 0, 0, ()))
        with pytest.raises(ConnectionError):
            await task


async def test_a_peer_that_goes_in_mid_transfer_is_a_connection_error() -> None:
    async with serving() as server:
        with relaying(server, rate_bps=2e6) as relay:
            async with connecting(relay.port, rate="2Mbps") as conn:
                task = asyncio.create_task(send_kv(conn, prepared(8, 256), 60.0))
                await until(lambda: server.admissions.active == 1)
                server.listener.close()
                with pytest.raises(ConnectionError):
                    await task
                assert not conn.protocol.quic.senders
        await until(lambda: server.admissions.active == server.admissions.bytes == 0)


async def test_text_of_a_dead_connection_ends_with_an_error() -> None:
    async with hostile_server() as listener, connecting(listener.port) as conn:
        task, peer = await sending(listener, conn)
        peer.write(0, messages.encode_message(report()) + messages.encode_message(messages.Text("half", 1, 0)))
        result = await task
        peer.close(0, "power cut")
        assert await anext(result.text) == "half"
        with pytest.raises(ConnectionError, match="power cut"):
            await anext(result.text)


async def test_a_stop_that_no_event_has_told_of_yet_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """STOP_SENDING resets the stream when its datagram is read; units may be written before its event is handled."""
    async with hostile_server() as listener, connecting(listener.port, extension=False, rate="20Mbps") as conn:
        task = asyncio.create_task(send_kv(conn, prepared(8, 512), 20.0))
        peer = await only(listener)
        await until(lambda: any(isinstance(m, messages.Unit) for m in peer.on(0).messages))
        conn.protocol.quic._streams[0].sender.reset(AppCode.BUSY)
        monkeypatch.setattr(outgoing_module, "STREAM_WATERMARK", 1 << 30)  # there is room for the next unit
        conn.protocol.transmit()
        assert conn.protocol.bugs == 0
        assert conn.protocol.terminated is None
        peer.write(0, messages.encode_message(messages.Refused(AppCode.BUSY, "full")), True)
        with pytest.raises(HandoffRefused, match="full"):
            await task
        assert not conn.protocol.quic.is_closing


async def test_more_hand_offs_than_streams_at_once_are_each_answered() -> None:
    kv = prepared(1, 16)
    async with serving() as server, connecting(server) as conn:
        results = await asyncio.gather(*(send_kv(conn, kv, 20.0) for _ in range(150)), return_exceptions=True)
        assert conn.protocol.terminated is None
        served = [result for result in results if not isinstance(result, BaseException)]
        assert served
        assert all(result.confirmed for result in served)
        refused = [result for result in results if isinstance(result, BaseException)]
        assert all(isinstance(error, HandoffRefused) and error.busy for error in refused), refused
        await until(server.idle)
        assert (await send_kv(conn, arrays(1, 16), 20.0)).confirmed
