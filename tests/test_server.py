"""`serve()`: several clients at once, places and memory, credentials, and settings that contradict each other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quic_pfec.client import KVReport, send_kv
from quic_pfec.kv.received import ReceivedKV
from quic_pfec.quic.outgoing import HandoffRefused
from quic_pfec.server import CallbackHandler, serve
from quic_pfec.wire.errors import AppCode
from quic_pfec.wire.limits import Limits

from .handoff_world import (
    arrays,
    assert_bit_equal,
    certificate,
    connecting,
    prepared,
    serving,
    until,
)

pytestmark = pytest.mark.sockets


async def hand_over(server: Any, cache: Any, deadline_s: float) -> KVReport | HandoffRefused:
    async with connecting(server) as conn:
        try:
            return await send_kv(conn, cache, deadline_s)
        except HandoffRefused as refused:
            return refused


async def test_eight_clients_at_once_each_with_its_own_deadline() -> None:
    caches = [arrays(2, 64, seed) for seed in range(8)]
    async with serving() as server:
        reports = await asyncio.gather(
            *(hand_over(server, cache, 10.0 + number) for number, cache in enumerate(caches))
        )
        assert all(isinstance(report, KVReport) and report.confirmed for report in reports)
        await until(lambda: len(server.received) == 8)
        by_handle = {got.handle: got for got in server.received}
        for report, cache in zip(reports, caches, strict=True):
            assert isinstance(report, KVReport)
            assert_bit_equal(by_handle[report.handle], cache)
        await until(server.idle)


async def test_beyond_its_places_the_server_says_busy_and_works_again_later() -> None:
    leave = asyncio.Event()

    async def wait(_: ReceivedKV) -> None:
        await leave.wait()

    async with serving(max_transfers=3, on_kv=wait) as server:
        results = await asyncio.gather(*(hand_over(server, arrays(1, 16, n), 20.0) for n in range(3)))
        assert all(isinstance(result, KVReport) for result in results)
    # The clients above are gone and their places with them; these stay.
    async with serving(max_transfers=3, on_kv=wait) as server:
        async with connecting(server) as one, connecting(server) as two:
            held = [await send_kv(conn, arrays(1, 16), 20.0) for conn in (one, one, two)]
            assert server.admissions.active == 3
            for conn in (one, two):
                with pytest.raises(HandoffRefused, match="try again later") as raised:
                    await send_kv(conn, arrays(1, 16), 20.0)
                assert raised.value.busy
            assert server.admissions.refused == 2
            leave.set()
            await until(lambda: server.admissions.active == 0)
            again = await send_kv(two, arrays(1, 16), 20.0)
            assert again.confirmed
            assert again.handle not in {report.handle for report in held}
        await until(server.idle)


async def test_eight_clients_for_fewer_places_are_all_served_or_told_busy() -> None:
    async def slow(_: ReceivedKV) -> None:
        await asyncio.sleep(0.3)

    async with serving(max_transfers=3, on_kv=slow) as server:
        results = await asyncio.gather(*(hand_over(server, arrays(2, 64, n), 10.0) for n in range(8)))
        served = [result for result in results if isinstance(result, KVReport)]
        refused = [result for result in results if isinstance(result, HandoffRefused)]
        assert len(served) >= 3
        assert len(served) + len(refused) == 8
        assert all(report.confirmed and report.j_block == 1.0 for report in served)
        assert all(error.busy for error in refused)
        await until(server.idle)


async def test_memory_of_all_transfers_is_limited() -> None:
    leave = asyncio.Event()
    kv = prepared(2, 32)
    nbytes = int(kv.layout.unit_sizes().sum())

    async def wait(_: ReceivedKV) -> None:
        await leave.wait()

    async with serving(max_bytes=2 * nbytes, on_kv=wait) as server, connecting(server) as conn:
        for _ in range(2):
            await send_kv(conn, kv, 20.0)
        with pytest.raises(HandoffRefused) as raised:
            await send_kv(conn, kv, 20.0)
        assert raised.value.busy
        with pytest.raises(HandoffRefused) as raised:
            await send_kv(conn, prepared(5, 32), 20.0)
        assert raised.value.code is AppCode.TOO_LARGE
        leave.set()
        await until(server.idle)
        assert (await send_kv(conn, kv, 20.0)).confirmed


async def test_serve_takes_its_memory_limit_from_the_limits() -> None:
    kept: list[ReceivedKV] = []
    cert, key = certificate()
    small = Limits(max_transfer_bytes=10_000, max_connection_bytes=10_000, max_server_bytes=10_000)
    async with (
        await serve(port=0, certificate=cert, private_key=key, on_kv=kept.append, limits=small) as listener,
        connecting(listener.port) as conn,
    ):
        protocol = next(iter(listener.protocols))
        handler = protocol.handler  # type: ignore[attr-defined]
        assert isinstance(handler, CallbackHandler)
        assert handler.admissions.max_bytes == 10_000
        assert (await send_kv(conn, arrays(1, 16), 20.0)).confirmed
        await until(lambda: len(kept) == 1)


async def test_contradictory_settings_are_value_errors() -> None:
    cert, key = certificate()
    with pytest.raises(ValueError, match="exactly one"):
        await serve(port=0, certificate=cert, private_key=key)
    with pytest.raises(ValueError, match="exactly one"):
        await serve(port=0, certificate=cert, private_key=key, on_kv=print, handler=CallbackHandler(print))
    with pytest.raises(ValueError, match="rate"):
        await serve(port=0, certificate=cert, private_key=key, on_kv=print, congestion_control="rate")
    with pytest.raises(OSError, match="nowhere"):
        await serve(port=0, certificate="/nowhere.pem", private_key=key, on_kv=print)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"port": "x"}, "port is a whole number from 0 to 65535, not 'x'"),
        ({"port": 80_000}, "not 80000"),
        ({"max_transfers": 0}, "max_transfers is a whole number from 1"),
        ({"max_connections": 0}, "max_connections is a whole number from 1"),
        ({"max_bytes": "1G"}, "max_bytes is a whole number from 1"),
        ({"token": ""}, "token is a text of 1 to 256 characters, not 0 of them"),  # it would admit everybody
        ({"on_kv": "f"}, "on_kv is a function that takes a ReceivedKV, not 'f'"),
        ({"on_kv": None, "handler": CallbackHandler(print), "token": "x"}, "a handler has a token of its own"),
    ],
)
async def test_settings_of_serve_are_checked_before_it_binds(wrong: dict[str, Any], said: str) -> None:
    cert, key = certificate()
    with pytest.raises(ValueError, match=said):
        await serve(**{"port": 0, "certificate": cert, "private_key": key, "on_kv": print, **wrong})


async def test_client_certificates_are_insisted_on() -> None:
    cert, key = certificate()
    async with serving(client_ca=cert) as server:
        with pytest.raises(ConnectionError, match="certificate"):
            async with connecting(server) as conn:
                await send_kv(conn, arrays(1, 16), 5.0)
        async with connecting(server, client_certificate=(cert, key)) as conn:
            assert (await send_kv(conn, arrays(1, 16), 20.0)).confirmed


async def test_a_handoff_after_the_listener_closed_is_a_connection_error() -> None:
    async with serving() as server, connecting(server) as conn:
        assert (await send_kv(conn, arrays(1, 16), 20.0)).confirmed
        server.listener.close()
        await until(lambda: conn.protocol.quic.is_closing)
        with pytest.raises(ConnectionError):
            await send_kv(conn, arrays(1, 16), 5.0)
