"""The sorting of events to hand-offs, in both directions, and what is left of them afterwards."""

from __future__ import annotations

import asyncio

import pytest

from quic_pfec.client import send_kv
from quic_pfec.quic.admission import Admissions
from quic_pfec.quic.connection import EarlyBudget, PfecConnection, TransferEvent
from quic_pfec.quic.outgoing import HandoffRefused, Outgoing, SendOptions
from quic_pfec.server import CallbackHandler
from quic_pfec.transfer.receiver import Frozen
from quic_pfec.wire import messages
from quic_pfec.wire.errors import AppCode
from quic_pfec.wire.limits import Limits

from .handoff_world import (
    arrays,
    assert_bit_equal,
    attacking,
    connecting,
    opening,
    prepared,
    serving,
    sources,
    until,
)
from .quic_pair import client_configuration

pytestmark = pytest.mark.sockets

KV = prepared(2, 32)


async def test_the_server_may_send_too() -> None:
    received = []
    handler = CallbackHandler(received.append, admissions=Admissions())
    async with serving() as server, connecting(server, handler=handler) as conn:
        await until(lambda: len(server.listener.protocols) == 1)
        (protocol,) = server.listener.protocols
        cache = arrays(2, 32)
        outgoing = Outgoing(
            protocol,  # type: ignore[arg-type]
            prepared(2, 32),
            SendOptions(deadline_s=outgoing_deadline()),
            None,
        )
        protocol.begin(outgoing)  # type: ignore[attr-defined]
        report = await asyncio.wait_for(outgoing.report, 20)
        assert report.complete
        there = await send_kv(conn, arrays(1, 16), 20.0)
        assert there.confirmed
        await until(lambda: len(received) == 1)
        assert_bit_equal(received[0], cache)


def outgoing_deadline() -> float:
    import time

    return time.monotonic() + 20.0


async def test_a_client_without_a_handler_takes_and_stores_nothing() -> None:
    async with serving() as server, connecting(server) as conn:
        await until(lambda: len(server.listener.protocols) == 1)
        (protocol,) = server.listener.protocols
        await until(lambda: protocol.quic.extension is not None)
        assert protocol.quic.extension.max_transfers == 0
        outgoing = Outgoing(protocol, KV, SendOptions(outgoing_deadline()), None)  # type: ignore[arg-type]
        protocol.begin(outgoing)  # type: ignore[attr-defined]
        with pytest.raises(HandoffRefused, match="takes no hand-offs"):
            await asyncio.wait_for(outgoing.report, 20)
        assert not conn.protocol.quic.receivers
        assert (await send_kv(conn, KV, 20.0)).confirmed  # the other direction is as before


async def test_nothing_is_left_of_finished_hand_offs() -> None:
    async with serving() as server, connecting(server) as conn:
        for _ in range(3):
            report = await send_kv(conn, KV, 20.0)
            assert [part async for part in report.text] == []
        await until(server.idle)
        await until(lambda: not conn.protocol._outgoing)
        assert not conn.protocol.quic.senders


async def test_an_event_of_a_transfer_that_is_over_is_dropped() -> None:
    async with serving() as server, attacking(server) as hostile:
        hostile.write(0, opening(KV), True)
        hostile.send(*sources(KV))
        await until(lambda: len(server.received) == 1)
        await until(server.idle)
        (protocol,) = server.listener.protocols
        protocol.quic_event_received(TransferEvent(0, Frozen(True)))
        assert not protocol._incoming  # type: ignore[attr-defined]


async def test_late_stream_data_of_a_transfer_that_is_over_is_dropped() -> None:
    async with serving(max_transfers=0) as server, attacking(server) as hostile:
        hostile.write(0, opening(KV))
        await hostile.refused()
        await until(server.idle)
        (protocol,) = server.listener.protocols
        from aioquic.quic.events import StreamDataReceived

        protocol.quic_event_received(StreamDataReceived(data=b"\xff" * 100, end_stream=True, stream_id=0))
        assert not protocol._incoming  # type: ignore[attr-defined]
        assert hostile.terminated is None


async def test_unidirectional_streams_are_ignored() -> None:
    async with serving() as server, attacking(server) as hostile:
        hostile.write(2, b"\xff" * 100, True)
        hostile.write(0, opening(KV), True)
        hostile.send(*sources(KV))
        await until(lambda: len(server.received) == 1)
        assert hostile.terminated is None


async def test_early_symbols_of_a_connection_are_limited() -> None:
    limits = Limits(early_symbols_per_connection=2 * 4096, early_symbols_per_server=65_536, max_transfers=8)
    async with serving(limits=limits) as server, attacking(server) as hostile:
        for transfer_id in (0, 4, 8):
            hostile.send(*sources(KV, transfer_id)[:1])
        (protocol,) = server.listener.protocols
        await until(lambda: protocol.quic.extension_stats.dropped_busy == 1)
        assert set(protocol.quic.receivers) == {0, 4}
        # One that is turned away stays so (its symbols count as delivered), but an opening needs no early credit.
        hostile.write(8, opening(KV), True)
        assert (await hostile.refused(8)).code == AppCode.BUSY
        hostile.write(12, opening(KV), True)
        await until(lambda: any(isinstance(m, messages.Accepted) for m in hostile.on(12).messages))


async def test_strangers_early_symbols_do_not_keep_others_out() -> None:
    limits = Limits(early_symbols_per_connection=4096, early_symbols_per_server=4096)
    async with serving(token="right", limits=limits) as server, attacking(server) as hostile:
        hostile.send(*sources(KV)[:1])  # no token, no opening: takes all of the server's early credit
        await until(lambda: server.receivers() == 1)
        async with connecting(server, token="right") as conn:
            for _ in range(3):
                report = await send_kv(conn, KV, 20.0)
                assert report.j_block == 1.0


def test_early_budget_counts_whole_transfers() -> None:
    assert EarlyBudget(Limits()).free == 16
    assert EarlyBudget(Limits(initial_credit=1 << 16, max_symbols=1 << 20)).free == 1


def test_many_closed_transfers_of_one_initiator_do_not_close_the_others() -> None:
    quic = PfecConnection(configuration=client_configuration())
    for number in range(6000):
        quic.remove_transfer(4 * number)
    assert quic.is_over(0)
    assert quic.is_over(4 * 5999)
    assert not quic.is_over(4 * 6000)
    assert not quic.is_over(1)
    assert not quic.is_over(9)
    assert len(quic._closed) <= 4096
    quic.remove_transfer(1)
    assert quic.is_over(1)
