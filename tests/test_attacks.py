"""Abuse of a server: floods, lies, peers that die in mid-transfer; it stays small and goes on serving."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from quic_pfec import server as server_module
from quic_pfec.client import send_kv
from quic_pfec.kv.assemble import Assembler
from quic_pfec.kv.received import ReceivedKV
from quic_pfec.quic.configuration import configuration
from quic_pfec.quic.incoming import Incoming
from quic_pfec.transfer import receiver as receiver_module
from quic_pfec.transfer.late import LateReceiver
from quic_pfec.wire import frames, messages
from quic_pfec.wire.errors import AppCode, ErrorCode
from quic_pfec.wire.limits import Limits
from quic_pfec.wire.manifest import encode_manifest

from .handoff_world import (
    Hostile,
    Served,
    arrays,
    as_float,
    attacking,
    certificate,
    connecting,
    descriptors,
    opening,
    prepared,
    relaying,
    repair,
    resident_bytes,
    serving,
    sources,
    still_serves,
    until,
)

pytestmark = pytest.mark.sockets

KV = prepared(2, 32)
N = len(sources(KV))
CANARY = 8192.0  # no value of the other caches


async def accepted(server: Served, hostile: Hostile, remaining_us: int = 60_000_000) -> Any:
    """An accepted transfer 0; returns the server's receiver of it."""
    hostile.write(0, opening(KV, remaining_us=remaining_us), True)
    await until(lambda: server.admissions.active == 1)
    (protocol,) = server.listener.protocols
    return protocol.quic.receivers[0]


# what breaks a rule closes the connection with the code of the table


async def test_symbols_beyond_the_initial_credit_close() -> None:
    async with serving(limits=Limits(initial_credit=8)) as server:
        async with attacking(server) as hostile:
            symbol = sources(KV)[0].symbol
            hostile.send(*(frames.SourceFrame(0, sid, symbol) for sid in range(9)))
            assert await hostile.closed() == ErrorCode.FLOW_CONTROL_ERROR
        await until(server.idle)


async def test_repairs_beyond_the_initial_credit_close() -> None:
    async with serving(limits=Limits(initial_credit=8)) as server, attacking(server) as hostile:
        hostile.send(repair(KV, 0, 4, 5))
        assert await hostile.closed() == ErrorCode.FLOW_CONTROL_ERROR


@pytest.mark.parametrize("kind", ["source", "repair"])
async def test_symbols_beyond_the_transfer_close(kind: str) -> None:
    symbol = sources(KV)[0].symbol
    async with serving() as server:
        async with attacking(server) as hostile:
            await accepted(server, hostile)
            if kind == "source":
                hostile.send(frames.SourceFrame(0, N, symbol))
            else:
                hostile.send(repair(KV, 0, N - 1, 2, symbol=bytes(symbol)))
            assert await hostile.closed() == ErrorCode.PROTOCOL_VIOLATION
        await until(server.idle)
        await still_serves(server)


async def test_early_symbols_beyond_the_manifest_close_when_it_comes() -> None:
    async with serving() as server, attacking(server) as hostile:
        hostile.send(frames.SourceFrame(0, N, sources(KV)[0].symbol))
        await until(lambda: server.receivers() == 1)
        hostile.write(0, opening(KV), True)
        assert await hostile.closed() == ErrorCode.PROTOCOL_VIOLATION
        await until(lambda: server.admissions.active == 0)


async def test_a_symbol_that_changes_closes() -> None:
    first = sources(KV)[0]
    other = frames.SourceFrame(0, 0, bytes(first.symbol[:-1]) + b"\x55")
    async with serving() as server, attacking(server) as hostile:
        await accepted(server, hostile)
        hostile.send(first, first, other)
        assert await hostile.closed() == ErrorCode.PROTOCOL_VIOLATION


async def test_a_symbol_that_names_no_fragment_closes() -> None:
    bad = frames.pack_unit_header(99, 0) + bytes(len(sources(KV)[0].symbol) - 4)
    async with serving() as server, attacking(server) as hostile:
        await accepted(server, hostile)
        hostile.send(frames.SourceFrame(0, 0, bad))
        assert await hostile.closed() == ErrorCode.PROTOCOL_VIOLATION
        await until(server.idle)


async def test_a_symbol_of_another_size_closes() -> None:
    async with serving() as server, attacking(server) as hostile:
        await accepted(server, hostile)
        hostile.send(frames.SourceFrame(0, 0, bytes(100)))
        assert await hostile.closed() == ErrorCode.PROTOCOL_VIOLATION


async def test_repairs_that_contradict_close_at_the_second() -> None:
    lie = bytes(len(sources(KV)[0].symbol) - 1) + b"\x01"
    async with serving() as server, attacking(server) as hostile:
        receiver = await accepted(server, hostile)
        hostile.send(*sources(KV)[:8], *(repair(KV, number, 0, 8, symbol=lie) for number in range(2)))
        outcomes = receiver.stats
        await until(lambda: hostile.terminated is not None or outcomes.repairs_useless + outcomes.contradictions >= 2)
        if hostile.terminated is not None:
            assert hostile.terminated.error_code == AppCode.KV_INTEGRITY
        assert not server.received  # either way no unit of it is believed


# what is only too much is dropped and counted


async def test_a_flood_of_dependent_repairs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_module, "USELESS_REPAIRS", 100)
    limits = Limits(row_operations_per_repair=64)
    async with serving(limits=limits) as server, attacking(server) as hostile:
        receiver = await accepted(server, hostile)
        honest = sources(KV)
        hostile.send(*honest[4:])
        # Four unknowns: four repairs help if they are independent, all others can only cost.
        hostile.send(*(repair(KV, number, 0, 3) for number in range(600)))
        await until(lambda: receiver.stats.repairs_dropped > 300)
        await until(lambda: not hostile.quic.queue)
        stats, decoder = receiver.stats, receiver._decoder
        assert stats.repairs_useful == 3
        assert stats.repairs_useless <= 100 + N
        assert decoder.counters()["row_operations"] <= 64 * (stats.repairs_useful + stats.repairs_useless)
        assert hostile.terminated is None
        hostile.send(honest[3])  # the last one still completes the transfer
        await until(lambda: len(server.received) == 1)
        assert server.received[0].is_complete


async def test_more_unknowns_than_columns_are_dropped_and_counted() -> None:
    kv = prepared(8, 128)
    async with serving(limits=Limits(max_unknown=16)) as server, attacking(server) as hostile:
        hostile.write(0, opening(kv), True)
        await until(lambda: server.admissions.active == 1)
        (protocol,) = server.listener.protocols
        receiver = protocol.quic.receivers[0]
        hostile.send(*(repair(kv, number, 40 * (number % 8), 40) for number in range(60)))
        await until(lambda: receiver.stats.repairs_dropped + receiver.stats.repairs_useful == 60)
        assert receiver.stats.repairs_dropped >= 44
        assert receiver._decoder.unknown_columns <= 16
        hostile.send(*sources(kv))
        await until(lambda: len(server.received) == 1)
        assert server.received[0].is_complete


async def test_a_flood_after_the_end_is_dropped_and_counted() -> None:
    async with serving() as server, attacking(server) as hostile:
        await accepted(server, hostile)
        hostile.send(*sources(KV))
        await until(lambda: len(server.received) == 1)
        await until(server.idle)
        (protocol,) = server.listener.protocols
        hostile.send(*sources(KV), *(repair(KV, number, 0, 8) for number in range(50)))
        await until(lambda: protocol.quic.extension_stats.dropped_closed == N + 50)
        assert not protocol.quic.receivers
        assert hostile.terminated is None


async def test_a_poisoned_repair_spoils_no_unit() -> None:
    lie = bytes(len(sources(KV)[0].symbol))
    async with serving() as server, attacking(server) as hostile:
        await accepted(server, hostile, remaining_us=800_000)
        hostile.send(*sources(KV)[1:], repair(KV, 0, 0, 1, symbol=lie))
        await until(lambda: len(server.received) == 1)
        got, sent = server.received[0], arrays(2, 32)
        for layer, (keys, values) in enumerate(as_float(got)):
            for part, truth in zip((keys, values), sent[layer], strict=True):
                assert bool(((part == truth) | (part == 0)).all())
        assert hostile.terminated is None


async def test_manifest_fragments_are_limited() -> None:
    data = encode_manifest(KV.manifest(KV.layout.symbol_size(), "mask"))
    pieces = [frames.ManifestFrame(0, 60_000, offset, 5_000_000, data[:1]) for offset in range(0, 400, 2)]
    async with serving() as server:
        async with attacking(server) as hostile:
            hostile.send(*pieces)
            assert await hostile.closed() == AppCode.KV_MANIFEST
        await until(server.idle)


async def test_manifest_alone_for_many_transfers_holds_nothing_for_long() -> None:
    data = encode_manifest(KV.manifest(KV.layout.symbol_size(), "mask"))
    limits = Limits(manifest_timeout_us=200_000)
    async with serving(token="right", limits=limits) as server, attacking(server) as hostile:
        hostile.send(*(frames.ManifestFrame(4 * n, len(data), 0, 10_000, data) for n in range(100)))
        (protocol,) = server.listener.protocols
        await until(lambda: protocol.quic.extension_stats.dropped_busy >= 90)
        await until(server.idle)
        assert protocol.quic._early.free == 16  # type: ignore[attr-defined]
        async with connecting(server, token="right") as conn:
            assert (await send_kv(conn, KV, 20.0)).confirmed


async def test_symbols_of_connections_that_died_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "configuration", functools.partial(configuration, idle_timeout_s=0.5))
    async with serving() as server:
        for _ in range(5):
            async with attacking(server) as hostile:
                for transfer_id in range(0, 16, 4):
                    hostile.send(*sources(KV, transfer_id)[:1])
                await until(lambda: server.receivers() == 4)
                (protocol,) = server.listener.protocols
                early = protocol.quic._early  # type: ignore[attr-defined]
                assert early.free == 12
            await until(lambda: not server.listener.protocols)
            assert early.free == 16
        await still_serves(server)


async def test_a_connection_that_is_dropped_on_a_bug_gives_its_places_back() -> None:
    async with serving() as server, attacking(server) as hostile:
        await accepted(server, hostile)
        (protocol,) = server.listener.protocols
        protocol.abandon()
        await until(lambda: server.admissions.active == server.admissions.bytes == 0)
        assert not protocol.quic.receivers


# nothing of one request is seen in another


@pytest.mark.slow
async def test_holes_never_show_earlier_data() -> None:
    pattern = np.full((2, 256, 64), CANARY, np.float32)
    canary = [(pattern, pattern)] * 4
    seen: list[ReceivedKV] = []
    async with serving(on_kv=seen.append) as server:
        with relaying(server, rate_bps=4e6) as relay:
            async with connecting(relay.port, rate="4Mbps") as conn:
                for _ in range(2):
                    await send_kv(conn, canary, 20.0)
                    await until(server.idle)
                    server.received.clear()
                    seen.clear()
                    gc.collect()  # the canary's memory is free again
                    for extension_off in (False, True):
                        truth = arrays(4, 256, seed=5)
                        async with connecting(relay.port, rate="4Mbps", extension=not extension_off) as other:
                            report = await send_kv(other, truth, 0.4)
                        await until(server.idle)
                        assert 0 < report.j_frac < 1
                        for keys, values in as_float(seen[-1]):
                            assert not bool((keys == CANARY).any())
                            assert not bool((values == CANARY).any())
                        seen.clear()


def test_a_fresh_destination_is_zero() -> None:
    dirty = [np.full(1 << 20, 0xAB, np.uint8) for _ in range(8)]
    del dirty
    kv = Assembler(KV.layout).finish("mask")
    for keys, values in kv.arrays.layers:
        assert not keys.any()
        assert not values.any()


# peers that die


NURSERY = """
import asyncio, os, signal, sys
import numpy as np
from quic_pfec.client import connect, send_kv

async def main(extension):
    cache = [(np.ones((2, 512, 64), np.float32), np.ones((2, 512, 64), np.float32)) for _ in range(8)]
    options = {"ca_certs": sys.argv[2], "server_name": "localhost", "rate": "2Mbps", "extension": extension}
    async with connect("127.0.0.1", int(sys.argv[1]), **options) as conn:
        await send_kv(conn, cache, 120.0)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are reaped at once
for line in sys.stdin:
    for number in range(int(line)):
        pid = os.fork()
        if pid == 0:
            asyncio.run(main(number % 4 != 0))
        print(pid, flush=True)
"""


@asynccontextmanager
async def nursery(server: Served) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """Gives a function that starts so many client processes and kills them in mid-transfer.

    One process imports everything once and forks the clients: fifty interpreters would take a minute to start.
    """
    pipe = asyncio.subprocess.PIPE
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", NURSERY, str(server.port), certificate()[0], stdin=pipe, stdout=pipe
    )
    assert parent.stdin is not None
    assert parent.stdout is not None

    async def kill(processes: int) -> None:
        parent.stdin.write(f"{processes}\n".encode())
        victims = [int(await parent.stdout.readline()) for _ in range(processes)]
        # Under way: symbols of the extension have come, or units by the stream.
        await until(lambda: server.admissions.active == processes)
        await until(
            lambda: all(r.stats.source > 3 for p in server.listener.protocols for r in p.quic.receivers.values())
        )
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        await until(lambda: not any(alive(victim) for victim in victims))

    try:
        yield kill
    finally:
        parent.stdin.close()
        assert await parent.wait() == 0


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
async def test_fifty_clients_killed_in_mid_transfer_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "configuration", functools.partial(configuration, idle_timeout_s=1.0))

    async def settled() -> tuple[int, int, int]:
        await until(lambda: not server.listener.protocols)
        assert server.admissions.active == server.admissions.bytes == 0
        assert not server.listener._routes
        await asyncio.sleep(0.2)
        gc.collect()
        return descriptors(), len(asyncio.all_tasks()), resident_bytes()

    async with serving(max_transfers=64) as server, nursery(server) as kill:
        for _ in range(2):
            await kill(8)
            await until(lambda: not server.listener.protocols)
        await still_serves(server)
        server.received.clear()
        before = await settled()
        for _ in range(5):
            await kill(10)
            await until(lambda: not server.listener.protocols)
        await still_serves(server)
        server.received.clear()
        after = await settled()
        assert after[:2] == before[:2]
        # Each death left a destination of 2 MB and an arena in use: fifty of them would be more than 100 MB.
        assert after[2] - before[2] < 32 << 20
        await until(nothing_left)  # the last hand-off is remembered for two round trips, long ones on a busy machine


def nothing_left() -> bool:
    gc.collect()
    return not any(type(each) in (Assembler, LateReceiver, Incoming) for each in gc.get_objects())


async def test_a_server_that_loses_its_client_frees_the_transfer_at_its_deadline() -> None:
    """Not only when the connection times out, half a minute later."""
    async with serving() as server:
        async with attacking(server) as hostile:
            await accepted(server, hostile, remaining_us=300_000)
            hostile.send(*sources(KV)[:3])
            await until(lambda: server.receivers() == 1)
            hostile.abandon()
        await until(server.idle)
        assert len(server.received) == 1
        assert not server.received[0].is_complete
        await still_serves(server)


async def test_text_for_a_dead_client_is_bounded() -> None:
    """A reply nobody reads ends with the connection, not with the memory."""
    stopped = asyncio.Event()

    async def forever(_: ReceivedKV) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            stopped.set()

    async with serving(on_kv=forever) as server:
        async with attacking(server) as hostile:
            await accepted(server, hostile)
            hostile.send(*sources(KV))
            await until(lambda: any(isinstance(m, messages.Report) for m in hostile.on(0).messages))
        await until(server.idle)
        assert stopped.is_set()
