"""The log of a server: a line a hand-off, what it says, and what it never says."""

from __future__ import annotations

import asyncio
import logging

import pytest

from quic_pfec.client import Generate, prepare, send_kv
from quic_pfec.quic.handler import Freeze, Reply
from quic_pfec.quic.journal import BURST_LINES, LINES_PER_S, Entry, Journal
from quic_pfec.quic.outgoing import HandoffRefused
from quic_pfec.server import CallbackHandler
from quic_pfec.wire import messages
from quic_pfec.wire.errors import AppCode, Refusal

from .handoff_world import arrays, connecting, prepared, relaying, serving, until

SECRETS = ("hush", "31337", "murmur")


class Whisperer(CallbackHandler):
    """Keeps every hand-off, says something secret, knows one handle."""

    handle = 1

    def __init__(self, token: str | None = None) -> None:
        super().__init__(lambda kv: None, token=token)

    async def received(self, freeze: Freeze, request: messages.Generate | None, reply: Reply) -> None:
        self.handle = freeze.handle
        if request is not None:
            reply.text("murmur", 31337, 0)
            reply.done("stop", 1)

    async def resumed(self, request: messages.Generate, reply: Reply) -> None:
        if request.handle != self.handle:
            raise Refusal(AppCode.UNKNOWN_HANDLE, "the handle is unknown")
        reply.text("murmur", 31337, 0)
        reply.done("stop", 1)


def entries(caplog: pytest.LogCaptureFixture) -> list[Entry]:
    return [record.entry for record in caplog.records if record.name == "quic_pfec.handoffs"]  # type: ignore[attr-defined]


def test_lines() -> None:
    whole = Entry("192.0.2.7:5001", "hand-off", "complete", 3.2, "", "fp", 512, 960, 960, 2.0125, 64)
    assert whole.line() == (
        "192.0.2.7:5001 hand-off complete, 960 of 960 blocks after 2.013 s, 512 tokens of model fp, 64 generated, "
        "over after 3.200 s"
    )
    refused = Entry("[2001:db8::1]:5001", "later turn", "refused", 0.0, "the handle is unknown (unknown_handle)")
    assert refused.line() == (
        "[2001:db8::1]:5001 later turn refused: the handle is unknown (unknown_handle), over after 0.000 s"
    )
    assert whole.as_dict()["blocks_total"] == 960


def test_a_flood_of_hand_offs_does_not_fill_the_disk(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quic_pfec.handoffs")
    journal, entry = Journal(), Entry("x:1", "hand-off", "refused", 0.0)
    for _ in range(1000):
        journal.note(entry, 5.0)
    assert len(caplog.records) == BURST_LINES
    assert journal.unwritten == 1000 - BURST_LINES
    journal.note(entry, 5.0 + 2 / LINES_PER_S)
    assert "800 hand-offs ended without a line" in caplog.records[-2].message
    assert journal.unwritten == 0


@pytest.mark.sockets
async def test_every_way_to_end_is_one_entry_and_none_says_what_was_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quic_pfec.handoffs")
    handler = Whisperer(token="right")
    kv = prepare(arrays(2, 64), tokens=[31337] * 64, model="fp")
    ask = Generate("hush", max_new_tokens=1, score=(31337,))
    async with serving(handler) as server:
        async with connecting(server, token="right") as conn:
            await conn.authorise()
            report = await send_kv(conn, kv, 20.0, then=ask)
            assert await _text(report.text) == "murmur"
            assert await (await conn.generate(report.handle, ask)).whole() == "murmur"
            with pytest.raises(HandoffRefused, match="unknown_handle"):
                await (await conn.generate(report.handle ^ 2, ask)).whole()
        async with connecting(server, token="wrong") as conn:
            for refused in (conn.authorise(), send_kv(conn, kv, 20.0)):
                with pytest.raises(HandoffRefused):
                    await refused
        await until(lambda: len(entries(caplog)) == 6)
    assert [(entry.kind, entry.outcome, entry.generated) for entry in entries(caplog)] == [
        ("credential check", "accepted", 0),
        ("hand-off", "complete", 1),
        ("later turn", "served", 1),
        ("later turn", "refused", 0),
        ("credential check", "refused", 0),
        ("hand-off", "refused", 0),
    ]
    whole = entries(caplog)[1]
    assert (whole.model, whole.tokens, whole.blocks_complete, whole.blocks_total) == ("fp", 64, 8, 8)
    assert whole.peer.startswith("127.0.0.1:")
    assert whole.received_s is not None
    assert 0 <= whole.received_s <= whole.total_s
    assert entries(caplog)[-1].reason == "the token is missing or wrong (unauthorized)"
    assert not any(secret in caplog.text or secret in str(entries(caplog)) for secret in SECRETS)


@pytest.mark.sockets
async def test_a_part_and_a_hand_off_that_was_given_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quic_pfec.handoffs")
    async with serving() as server:
        with relaying(server, rate_bps=2e6) as relay:
            async with connecting(relay.port, rate="2Mbps") as conn:
                await send_kv(conn, prepared(8, 128), 0.3)
                task = asyncio.ensure_future(send_kv(conn, prepared(8, 128), 20.0))
                await until(lambda: server.admissions.active == 1)
                task.cancel()
                await until(lambda: len(entries(caplog)) == 2)
    part, gone = entries(caplog)
    assert (part.outcome, gone.outcome) == ("partial", "given up")
    assert 0 < part.blocks_complete < part.blocks_total
    assert gone.received_s is None


async def _text(parts: object) -> str:
    return "".join([part async for part in parts])  # type: ignore[attr-defined]
