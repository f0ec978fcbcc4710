"""A server against peers that say the wrong thing on a transfer's stream, or say it in the wrong order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from quic_pfec.client import send_kv
from quic_pfec.kv.prepared import PreparedKV, hash_tokens, prepare_arrays
from quic_pfec.quic.handler import Freeze, Reply
from quic_pfec.server import CallbackHandler
from quic_pfec.wire import frames, messages
from quic_pfec.wire.errors import AppCode, ErrorCode
from quic_pfec.wire.limits import Limits
from quic_pfec.wire.manifest import Manifest, encode_manifest

from .handoff_world import (
    Hostile,
    Served,
    arrays,
    attacking,
    connecting,
    opening,
    prepared,
    serving,
    sources,
    still_serves,
    until,
)

pytestmark = pytest.mark.sockets

KV = prepared(2, 32)
SIZE = KV.layout.symbol_size()


def manifest(**changes: Any) -> Manifest:
    return msgspec.structs.replace(KV.manifest(SIZE, "mask"), **changes)


def unit_message(kv: PreparedKV, position: int) -> bytes:
    unit, data = kv.unit_at(position)
    return messages.encode_message(messages.Unit(unit, data))


async def refused(server: Served, hostile: Hostile, code: AppCode) -> messages.Refused:
    """The transfer was refused, nothing of it is left, and the connection stays."""
    refusal = await hostile.refused()
    assert refusal.code == code
    assert refusal.reason
    await until(lambda: hostile.on(0).stopped == code)
    await until(server.idle)
    assert hostile.terminated is None
    return refusal


# openings that are refused


@pytest.mark.parametrize("mode", ["symbols", "stream"])
@pytest.mark.parametrize("remaining_us", [0, 999, 601_000_000, (1 << 62) - 1])
async def test_deadline_outside_the_limits_is_refused(remaining_us: int, mode: str) -> None:
    async with serving() as server, attacking(server) as hostile:
        hostile.write(0, opening(KV, remaining_us=remaining_us, mode=mode), True)
        await refused(server, hostile, AppCode.DEADLINE)
        await still_serves(server)


@pytest.mark.parametrize("mode", ["symbols", "stream"])
async def test_a_transfer_too_large_for_the_server_is_refused(mode: str) -> None:
    async with serving(max_bytes=1000) as server, attacking(server) as hostile:
        hostile.write(0, opening(KV, mode=mode), True)
        await refused(server, hostile, AppCode.TOO_LARGE)


async def test_an_endpoint_that_takes_nothing_refuses() -> None:
    async with serving() as server, attacking(server) as hostile:
        await until(lambda: len(server.listener.protocols) == 1)
        (protocol,) = server.listener.protocols
        protocol.handler = None  # type: ignore[attr-defined]
        hostile.write(0, opening(KV), True)
        assert (await hostile.refused()).code == AppCode.UNSUPPORTED
        again = messages.STREAM_PREAMBLE + messages.encode_message(messages.Generate(handle=1))
        hostile.write(4, again)
        assert (await hostile.refused(4)).code == AppCode.UNSUPPORTED


async def test_tokens_that_are_not_the_manifests_are_refused() -> None:
    data = encode_manifest(manifest(tokens_hash=b"x" * 16))
    parts = (messages.Tokens.from_ids(np.arange(32)), messages.Start())
    async with serving() as server, attacking(server) as hostile:
        rest = b"".join(map(messages.encode_message, parts))
        hostile.write(0, opening(KV, manifest=data, start=False) + rest, True)
        await refused(server, hostile, AppCode.TOKENS_MISMATCH)
        assert hostile.on(0).ended
        assert not server.received


IDS = np.arange(32)


def recomputing(**changes: Any) -> bytes:
    return encode_manifest(manifest(**({"missing": "recompute", "tokens_hash": hash_tokens(IDS)} | changes)))


@pytest.mark.parametrize("mode", ["symbols", "stream"])
@pytest.mark.parametrize(
    ("data", "ids", "code"),
    [
        (recomputing(tokens_hash=b""), IDS, AppCode.UNSUPPORTED),
        (recomputing(), None, AppCode.UNSUPPORTED),
        (recomputing(tokens_hash=hash_tokens(IDS[:31])), IDS[:31], AppCode.TOKENS_MISMATCH),
        (recomputing(), IDS[::-1], AppCode.TOKENS_MISMATCH),
    ],
    ids=["no-hash", "no-ids", "too-few", "others"],
)
async def test_recompute_without_its_token_ids_is_refused(data: bytes, ids: Any, code: AppCode, mode: str) -> None:
    parts: list[messages.Message] = [] if ids is None else [messages.Tokens.from_ids(ids)]
    rest = b"".join(map(messages.encode_message, [*parts, messages.Start()]))
    async with serving() as server, attacking(server) as hostile:
        hostile.write(0, opening(KV, manifest=data, mode=mode, start=False) + rest)
        refusal = await refused(server, hostile, code)
        assert "token" in refusal.reason
        await still_serves(server)


async def test_token_ids_are_kept_for_recompute_alone_counted_and_freed() -> None:
    nbytes = int(KV.layout.unit_sizes().sum())
    async with serving() as server, attacking(server) as hostile:
        rest = b"".join(map(messages.encode_message, (messages.Tokens.from_ids(IDS), messages.Start())))
        asked = encode_manifest(manifest(tokens_hash=hash_tokens(IDS)))
        hostile.write(0, opening(KV, manifest=asked, start=False, remaining_us=60_000_000) + rest)
        hostile.write(4, opening(KV, manifest=recomputing(), start=False, remaining_us=60_000_000) + rest)
        await until(lambda: server.admissions.active == 2)
        (protocol,) = server.listener.protocols
        kept = protocol._incoming  # type: ignore[attr-defined]
        assert kept[0]._tokens is None
        assert kept[4]._tokens.tolist() == IDS.tolist()
        assert protocol.admitted_bytes == 2 * nbytes + 4 * 32  # type: ignore[attr-defined]
        incoming = kept[4]
        hostile.quic.reset_stream(4, AppCode.CANCELLED)
        hostile.transmit()
        await until(lambda: server.admissions.active == 1)
        assert incoming._tokens is None
        assert protocol.admitted_bytes == nbytes  # type: ignore[attr-defined]


async def test_a_library_receiver_gets_the_token_ids_with_the_hand_off() -> None:
    kv = prepare_arrays(arrays(2, 32), dtype="fp32", model="test", tokens=IDS)
    async with serving() as server, connecting(server) as conn:
        await send_kv(conn, kv, 20.0, missing="recompute")
        await send_kv(conn, kv, 20.0)
        await until(lambda: len(server.received) == 2)
        assert server.received[0].tokens is not None
        assert server.received[0].tokens.tolist() == IDS.tolist()
        assert server.received[1].tokens is None


async def test_bytes_of_one_connection_are_limited() -> None:
    nbytes = int(KV.layout.unit_sizes().sum())
    limits = Limits(max_connection_bytes=2 * nbytes, max_transfer_bytes=2 * nbytes)
    async with serving(limits=limits) as server:
        async with attacking(server) as hostile:
            for stream_id in (0, 4):
                hostile.write(stream_id, opening(KV, remaining_us=60_000_000))
                await until(lambda stream_id=stream_id: bool(hostile.on(stream_id).messages))
            hostile.write(8, opening(KV))
            assert (await hostile.refused(8)).code == AppCode.BUSY
            (protocol,) = server.listener.protocols
            assert protocol.admitted_bytes == 2 * nbytes  # type: ignore[attr-defined]
            hostile.quic.reset_stream(0, AppCode.CANCELLED)
            hostile.transmit()
            await until(lambda: protocol.admitted_bytes == nbytes)  # type: ignore[attr-defined]
            hostile.write(12, opening(KV))
            await until(lambda: any(isinstance(m, messages.Accepted) for m in hostile.on(12).messages))
        await until(server.idle)
        assert protocol.admitted_bytes == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["symbols", "stream"])
async def test_transfers_of_one_connection_are_limited(mode: str) -> None:
    async with serving(max_transfers=64, limits=Limits(max_transfers=3)) as server, attacking(server) as hostile:
        for number in range(3):
            hostile.write(4 * number, opening(KV, mode=mode, remaining_us=60_000_000))
            await until(lambda number=number: bool(hostile.on(4 * number).messages))
        hostile.write(12, opening(KV, mode=mode))
        assert (await hostile.refused(12)).code == AppCode.BUSY
        hostile.quic.reset_stream(0, AppCode.CANCELLED)
        hostile.transmit()
        await until(lambda: server.admissions.active == 2)
        hostile.write(16, opening(KV, mode=mode))
        await until(lambda: any(isinstance(m, messages.Accepted) for m in hostile.on(16).messages))


# manifests


@pytest.mark.parametrize("mode", ["symbols", "stream"])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"not a manifest",
        encode_manifest(manifest(dtype="fp8")),
        encode_manifest(manifest(wire_dtype="int3")),
        encode_manifest(manifest(symbols=1)),
        encode_manifest(manifest(tokens=0)),
        encode_manifest(manifest(tokens=1 << 20, block_tokens=1)),
        encode_manifest(manifest(layers=())),
        encode_manifest(manifest(missing="pray")),
        encode_manifest(manifest(model="")),
        encode_manifest(manifest(format_version=2)),
        encode_manifest(manifest())[:-1],
        encode_manifest(manifest()) + b"\0",
    ],
    ids=lambda data: data[:12].hex() + f"-{len(data)}",
)
async def test_a_bad_manifest_on_the_stream_closes(data: bytes, mode: str) -> None:
    async with serving() as server:
        async with attacking(server) as hostile:
            hostile.write(0, opening(KV, manifest=data, mode=mode), True)
            assert await hostile.closed() == AppCode.KV_MANIFEST
            assert hostile.terminated is not None
            assert "manifest" in hostile.terminated.reason_phrase
            assert "\n" not in hostile.terminated.reason_phrase
        await until(server.idle)
        await still_serves(server)


async def test_the_reason_names_the_unknown_dtype() -> None:
    async with serving() as server, attacking(server) as hostile:
        hostile.write(0, opening(KV, manifest=encode_manifest(manifest(dtype="fp8"))), True)
        await hostile.closed()
        assert hostile.terminated is not None
        assert "unknown dtype 'fp8'" in hostile.terminated.reason_phrase


async def test_an_oversized_manifest_on_the_stream_closes() -> None:
    # Judged by its length alone: the body is never sent.
    head = messages.STREAM_PREAMBLE + b"\x01" + (70_000).to_bytes(4, "big").replace(b"\0", b"\x80", 1)
    async with serving() as server, attacking(server) as hostile:
        hostile.write(0, head)
        assert await hostile.closed() == AppCode.MESSAGE_ERROR


async def test_an_oversized_manifest_by_frame_closes() -> None:
    async with serving() as server, attacking(server) as hostile:
        hostile.send(frames.ManifestFrame(0, 65_537, 0, 1_000_000, b"x" * 100))
        assert await hostile.closed() == AppCode.KV_MANIFEST


async def test_a_bad_manifest_by_frame_closes() -> None:
    data = encode_manifest(manifest(dtype="fp8"))
    async with serving() as server:
        async with attacking(server) as hostile:
            hostile.send(frames.ManifestFrame(0, len(data), 0, 1_000_000, data))
            assert await hostile.closed() == AppCode.KV_MANIFEST
        await until(server.idle)


@pytest.mark.parametrize("first", ["frame", "stream"])
async def test_manifests_that_differ_by_frame_and_by_stream_close(first: str) -> None:
    one, two = encode_manifest(manifest()), encode_manifest(manifest(profile="other"))
    async with serving() as server:
        async with attacking(server) as hostile:
            steps: list[Callable[[], None]] = [
                lambda: hostile.send(frames.ManifestFrame(0, len(one), 0, 5_000_000, one)),
                lambda: hostile.write(0, opening(KV, manifest=two)),
            ]
            if first == "stream":
                steps.reverse()
            steps[0]()
            await until(lambda: server.admissions.active == 1)
            steps[1]()
            assert await hostile.closed() == AppCode.KV_MANIFEST
        await until(server.idle)


async def test_manifest_by_frame_alone_opens_where_no_token_is_missing() -> None:
    data = encode_manifest(manifest())
    async with serving() as server, attacking(server) as hostile:
        hostile.send(frames.ManifestFrame(0, len(data), 0, 5_000_000, data), *sources(KV))
        await until(lambda: server.admissions.active == 1)
        hostile.write(0, opening(KV), True)
        await until(lambda: len(server.received) == 1)
        assert server.received[0].is_complete


async def test_manifest_by_frame_alone_opens_nothing_where_a_token_is_missing() -> None:
    data = encode_manifest(manifest())
    limits = Limits(manifest_timeout_us=300_000)
    async with serving(token="right", limits=limits) as server, attacking(server) as hostile:
        hostile.send(frames.ManifestFrame(0, len(data), 0, 5_000_000, data), *sources(KV))
        await until(lambda: server.receivers() == 1)
        assert server.admissions.active == 0
        hostile.write(0, opening(KV, token="wrong"), True)
        await refused(server, hostile, AppCode.UNAUTHORIZED)
        assert server.admissions.active == 0
        assert not server.received


async def test_symbols_without_a_manifest_are_forgotten_in_time() -> None:
    limits = Limits(manifest_timeout_us=200_000)
    async with serving(limits=limits) as server, attacking(server) as hostile:
        hostile.send(*sources(KV)[:5])
        await until(lambda: server.receivers() == 1)
        await until(server.idle)
        assert hostile.terminated is None


async def test_the_streams_after_a_refusal_by_frame_hear_of_it() -> None:
    data = encode_manifest(manifest())
    async with serving(max_transfers=0) as server, attacking(server) as hostile:
        hostile.send(frames.ManifestFrame(0, len(data), 0, 5_000_000, data), *sources(KV))
        await until(lambda: server.admissions.refused == 1)
        hostile.write(0, opening(KV), True)
        assert (await hostile.refused()).code == AppCode.BUSY


# order and form of messages


@pytest.mark.parametrize(
    "data",
    [
        b"\x07\x07\x07\x07\x07\x07\x07\x07",
        messages.STREAM_PREAMBLE + b"\x04\x00",  # START before OPEN
        messages.STREAM_PREAMBLE + b"\x05\x03abc",  # UNIT before OPEN
        messages.STREAM_PREAMBLE + b"\x10\x02\x91\x07",  # ACCEPTED, which only a receiver says
        messages.STREAM_PREAMBLE + b"\x3f\x00",  # no such kind
        messages.STREAM_PREAMBLE + b"\x01\x03\xff\xff\xff",  # OPEN that is no MessagePack
        opening(KV) + opening(KV)[4:],  # a second OPEN
        opening(KV) + b"\x04\x00",  # a second START
        opening(KV) + unit_message(KV, 0),  # a unit in mode symbols
        opening(KV, mode="stream") + b"\x03\x00",
        opening(KV, start=False) + 2 * messages.encode_message(messages.Generate("x")),
        opening(KV, mode="stream", start=False) + unit_message(KV, 0),  # a unit before START
    ],
    ids=lambda data: f"{data[4:8].hex()}-{len(data)}",
)
async def test_messages_out_of_form_or_order_close(data: bytes) -> None:
    async with serving() as server:
        async with attacking(server) as hostile:
            hostile.write(0, data)
            assert await hostile.closed() == AppCode.MESSAGE_ERROR
        await until(server.idle)
        await still_serves(server)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        messages.STREAM_PREAMBLE,
        opening(KV)[:-1],
        opening(KV, start=False),
        opening(KV, mode="stream") + unit_message(KV, 0)[:-1],
    ],
    ids=len,
)
async def test_a_stream_that_ends_too_early_closes(data: bytes) -> None:
    async with serving() as server:
        async with attacking(server) as hostile:
            hostile.write(0, data, True)
            assert await hostile.closed() == AppCode.MESSAGE_ERROR
        await until(server.idle)


@pytest.mark.parametrize("unit", [4, 5, (1 << 24) - 1])
async def test_units_outside_the_layout_close(unit: int) -> None:
    _, data = KV.unit_at(0)
    message = messages.encode_message(messages.Unit(unit, data))
    async with serving() as server:
        async with attacking(server) as hostile:
            hostile.write(0, opening(KV, mode="stream") + message)
            assert await hostile.closed() == AppCode.MESSAGE_ERROR
        await until(server.idle)


async def test_a_unit_of_the_wrong_size_closes() -> None:
    unit, data = KV.unit_at(0)
    message = messages.encode_message(messages.Unit(unit, bytes(data)[:-1]))
    async with serving() as server, attacking(server) as hostile:
        hostile.write(0, opening(KV, mode="stream") + message)
        assert await hostile.closed() == AppCode.MESSAGE_ERROR


async def test_a_unit_with_a_wrong_digest_counts_as_missing() -> None:
    unit, data = KV.unit_at(0)
    spoiled = bytes([data[0] ^ 1]) + bytes(data)[1:]
    others = b"".join(unit_message(KV, position) for position in range(1, len(KV.send_order)))
    async with serving() as server, attacking(server) as hostile:
        first = messages.encode_message(messages.Unit(unit, spoiled))
        hostile.write(0, opening(KV, mode="stream", remaining_us=500_000) + first + others, True)
        await until(lambda: len(server.received) == 1)
        await until(lambda: any(isinstance(m, messages.Report) for m in hostile.on(0).messages))
        (report,) = (m for m in hostile.on(0).messages if isinstance(m, messages.Report))
        assert report.corrupt == 1
        got = server.received[0]
        assert int((~got.complete).sum()) == 1
        assert not got.complete[unit]
        assert hostile.terminated is None


async def test_stream_mode_after_frames_closes() -> None:
    async with serving() as server, attacking(server) as hostile:
        hostile.send(*sources(KV)[:2])
        await until(lambda: server.receivers() == 1)
        hostile.write(0, opening(KV, mode="stream"))
        assert await hostile.closed() == AppCode.MESSAGE_ERROR


# giving up


@pytest.mark.parametrize("mode", ["symbols", "stream"])
@pytest.mark.parametrize("code", [AppCode.CANCELLED, AppCode.NO_ERROR, 0, (1 << 62) - 1])
async def test_a_reset_before_the_opening_is_whole_leaves_nothing(code: int, mode: str) -> None:
    data = opening(KV, mode=mode)[:-2]
    async with serving() as server, attacking(server) as hostile:
        hostile.write(0, data)
        await until(lambda: server.admissions.active == 1)
        hostile.quic.reset_stream(0, code)
        hostile.transmit()
        await until(server.idle)
        assert hostile.terminated is None
        if code == AppCode.NO_ERROR:  # it has not given up: it waits for an answer
            assert (await hostile.refused()).code == AppCode.DEADLINE
        await still_serves(server)


async def test_a_sender_whose_opening_never_came_hears_of_it() -> None:
    """All packets of a short hand-off on a stream were lost, and its deadline passed before they could be resent."""
    async with serving() as server, attacking(server) as hostile:
        hostile.quic.send_stream_data(0, opening(KV, mode="stream"), False)
        hostile.quic.reset_stream(0, AppCode.NO_ERROR)  # what has not left goes with it
        hostile.transmit()
        refusal = await hostile.refused()
        assert (refusal.code, refusal.reason) == (
            AppCode.DEADLINE, "the sender's deadline came before its opening was whole"
        )  # fmt: skip
        for code in (AppCode.CANCELLED, AppCode.NO_ERROR):  # of the next streams; they are limited as others are
            stream_id = hostile.quic.get_next_available_stream_id()
            hostile.quic.send_stream_data(stream_id, b"", False)
            hostile.quic.reset_stream(stream_id, code)
        hostile.transmit()
        await until(lambda: hostile.on(8).refusal() is not None)
        assert hostile.on(4).refusal() is None
        await until(server.idle)
        await still_serves(server)


@pytest.mark.parametrize("mode", ["symbols", "stream"])
async def test_stop_sending_in_mid_transfer_frees_it(mode: str) -> None:
    async with serving() as server, attacking(server) as hostile:
        hostile.write(0, opening(KV, mode=mode, remaining_us=60_000_000))
        if mode == "symbols":
            hostile.send(*sources(KV)[:5])
        else:
            hostile.write(0, unit_message(KV, 0))
        await until(lambda: server.admissions.active == 1)
        hostile.quic.stop_stream(0, AppCode.CANCELLED)
        hostile.transmit()
        await until(server.idle)
        assert not server.received
        assert hostile.terminated is None


async def test_stop_sending_while_the_reply_is_written_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """Messages for a stream that the peer has just stopped are swallowed, whoever writes them."""

    class Chatty(CallbackHandler):
        async def received(self, freeze: Freeze, request: messages.Generate | None, reply: Reply) -> None:
            for index in range(2000):
                reply.text("word " * 100, 1, index)
                await asyncio.sleep(0)
            reply.done("length", 2000)

    async with serving(Chatty(lambda kv: None)) as server, attacking(server) as hostile:
        hostile.write(0, opening(KV), True)
        hostile.send(*sources(KV))
        await until(lambda: any(isinstance(m, messages.Text) for m in hostile.on(0).messages))
        (protocol,) = server.listener.protocols
        # As it happens when a worker's text comes between the datagram and the events in it:
        protocol.quic._streams[0].sender.reset(AppCode.CANCELLED)  # type: ignore[attr-defined]
        protocol.send(0, b"late", False)  # type: ignore[attr-defined]
        hostile.quic.stop_stream(0, AppCode.CANCELLED)
        hostile.transmit()
        await until(server.idle)
        assert hostile.terminated is None
        assert protocol.bugs == 0
    assert "internal error" not in caplog.text


async def test_an_opening_that_never_becomes_whole_is_refused_in_time() -> None:
    async with serving(limits=Limits(manifest_timeout_us=200_000)) as server, attacking(server) as hostile:
        hostile.write(0, opening(KV)[:20])
        hostile.write(4, messages.STREAM_PREAMBLE + b"\x03" + b"\x80\x09\x00\x00" + bytes(50_000))
        assert (await hostile.refused(0)).code == AppCode.CANCELLED
        assert (await hostile.refused(4)).code == AppCode.CANCELLED
        await until(server.idle)


async def test_a_start_that_never_comes_ends_the_transfer() -> None:
    async with serving(limits=Limits(manifest_timeout_us=200_000)) as server, attacking(server) as hostile:
        hostile.write(0, opening(KV, start=False))
        hostile.send(*sources(KV))
        await until(lambda: any(isinstance(m, messages.Failed) for m in hostile.on(0).messages))
        await until(server.idle)
        assert not server.received  # the handler never saw it


async def test_openings_that_are_not_whole_are_limited() -> None:
    async with serving(limits=Limits(max_openings=4)) as server, attacking(server) as hostile:
        for number in range(4):
            hostile.write(4 * number, opening(KV)[:20])
        hostile.write(16, opening(KV)[:20])
        assert (await hostile.refused(16)).code == AppCode.BUSY
        assert all(hostile.on(4 * number).refusal() is None for number in range(4))
        (protocol,) = server.listener.protocols
        await until(lambda: len(protocol._incoming) == 4)  # type: ignore[attr-defined]
        hostile.write(0, opening(KV)[20:], True)
        await until(lambda: any(isinstance(m, messages.Accepted) for m in hostile.on(0).messages))


async def test_a_refused_transfer_stores_nothing_more() -> None:
    async with serving(max_transfers=0) as server, attacking(server) as hostile:
        hostile.write(0, opening(KV), True)
        await hostile.refused()
        (protocol,) = server.listener.protocols
        assert not protocol.quic.receivers
        before = protocol.quic.extension_stats.dropped_closed
        hostile.send(*sources(KV))
        await until(lambda: protocol.quic.extension_stats.dropped_closed == before + len(sources(KV)))
        assert not protocol.quic.receivers
        assert hostile.terminated is None


async def test_a_wrong_token_is_refused_even_where_another_was_right_before() -> None:
    async with serving(token="right") as server, attacking(server) as hostile:
        hostile.write(0, opening(KV, token="right"), True)
        hostile.send(*sources(KV))
        await until(lambda: len(server.received) == 1)
        hostile.write(4, opening(KV, token="wrong"), True)
        assert (await hostile.refused(4)).code == AppCode.UNAUTHORIZED
        again = messages.STREAM_PREAMBLE + messages.encode_message(messages.Generate(handle=1, token="no"))
        hostile.write(8, again)
        assert (await hostile.refused(8)).code == AppCode.UNAUTHORIZED


async def test_a_callback_that_times_out_is_a_failure_of_the_receiver(caplog: pytest.LogCaptureFixture) -> None:
    def late(_: object) -> None:
        raise TimeoutError("the database is slow")

    async with serving(on_kv=late) as server, attacking(server) as hostile:
        hostile.write(0, opening(KV), True)
        hostile.send(*sources(KV))
        await until(lambda: any(isinstance(m, messages.Failed) for m in hostile.on(0).messages))
        (failed,) = (m for m in hostile.on(0).messages if isinstance(m, messages.Failed))
        assert failed.code == AppCode.INTERNAL
        assert "never came whole" not in failed.reason
    assert "the database is slow" in caplog.text


async def test_frames_of_the_wrong_stream_type_close() -> None:
    async with serving() as server, attacking(server) as hostile:
        hostile.send(*sources(KV, transfer_id=2)[:1])
        assert await hostile.closed() == ErrorCode.PROTOCOL_VIOLATION
