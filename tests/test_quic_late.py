"""Late repair over real sockets: granted within bounds, told on the wire, freed whichever way it ends."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from quic_pfec.client import Generate, prepare, send_kv  # noqa: E402
from quic_pfec.kv.late import LateUnits  # noqa: E402
from quic_pfec.kv.prepared import PreparedKV  # noqa: E402
from quic_pfec.llm import endpoint as endpoint_module  # noqa: E402
from quic_pfec.llm.endpoint import LLMHandler  # noqa: E402
from quic_pfec.llm.generate import greedy, prefill  # noqa: E402
from quic_pfec.llm.models import LoadedModel, load  # noqa: E402
from quic_pfec.quic.admission import Admissions  # noqa: E402
from quic_pfec.report import KVReport  # noqa: E402
from quic_pfec.sim.channel import PRESETS  # noqa: E402
from quic_pfec.wire import messages  # noqa: E402
from quic_pfec.wire.errors import AppCode  # noqa: E402
from quic_pfec.wire.limits import Limits  # noqa: E402
from quic_pfec.wire.manifest import encode_manifest  # noqa: E402

from .handoff_world import (  # noqa: E402
    PATIENCE_S,
    Served,
    arrays,
    attacking,
    connecting,
    hostile_server,
    only,
    prepared,
    relaying,
    serving,
    until,
)

pytestmark = [pytest.mark.sockets, pytest.mark.model]

CONTEXT = [(7 * i * i + 3 * i) % 251 for i in range(100)]
THEN = Generate((5, 17, 99), max_new_tokens=6)


@functools.cache
def model() -> LoadedModel:
    return load("tiny-random", threads=1)


@functools.cache
def whole_cache() -> Any:
    return prefill(model(), CONTEXT)


@functools.cache
def ready() -> PreparedKV:
    return prepare(
        whole_cache(), tokens=CONTEXT, wire_dtype="fp32", model=model().fingerprint, rope=model().rope
    )  # fmt: skip


@asynccontextmanager
async def endpoint(limits: Limits | None = None) -> AsyncIterator[Served]:
    handler = LLMHandler(model(), admissions=Admissions(4))
    try:
        async with serving(handler, limits=limits) as server:
            yield server
    finally:
        handler.close()


class Pause:
    """Holds generation back before its third pass until `done(late)`: no machine is too slow or too fast then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, done: Callable[[LateUnits], bool]) -> None:
        self.reached = threading.Event()
        self.granted = False
        self._done = done
        monkeypatch.setattr(endpoint_module, "greedy", self._greedy)

    def _greedy(self, *args: Any, before_step: Any = None, **options: Any) -> Any:
        steps = 0
        late: LateUnits | None = None if before_step is None else before_step.__self__._late
        self.granted = late is not None

        def step() -> None:
            nonlocal steps
            if steps == 2:
                self.reached.set()
                waited = threading.Event()
                for _ in range(int(PATIENCE_S / 0.005)):
                    if late is not None and self._done(late):
                        break
                    waited.wait(0.005)
            steps += 1
            before_step()

        return greedy(*args, before_step=None if late is None else step, **options)


async def hand_over(server: Served, *, seed: int = 3, deadline: float = 0.25, **options: Any) -> KVReport:
    """A hand-off that its deadline cuts about in the middle, over a lossy link; the text is read to its end."""
    with relaying(server, rate_bps=1e7, owd_s=0.01, loss=PRESETS["paper"], seed=seed) as relay:
        async with connecting(relay.port, rate="10Mbps") as conn:
            relay.epoch()
            report = await send_kv(conn, ready(), deadline, **{"then": THEN, "late": "patch"} | options)
            _ = [part async for part in report.text]
            assert not conn.protocol.quic.senders
    assert report.confirmed
    assert 0 < report.j_frac < 1
    return report


def late_bytes(server: Served) -> int:
    return sum(protocol.late_bytes for protocol in server.listener.protocols)  # type: ignore[attr-defined]


def assert_rows_are_the_senders(server: Served, report: KVReport) -> None:
    kept = server.handler.handles.get(report.handle, 0.0).cache
    for layer, sent in zip(kept.layers, whole_cache().layers, strict=True):
        assert torch.equal(layer.keys[:, :, : len(CONTEXT)], sent.keys)
        assert torch.equal(layer.values[:, :, : len(CONTEXT)], sent.values)


@pytest.mark.parametrize("missing", ["mask", "zero"])
async def test_what_comes_late_is_patched_in_and_the_rows_are_those_sent(
    missing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = Pause(monkeypatch, lambda late: bool(late.complete.all()))
    async with endpoint() as server:
        report = await hand_over(server, missing=missing)
        assert pause.granted
        assert report.late == "patch"
        assert report.units_missing + report.units_partial > 0
        assert report.patched == report.units_missing + report.units_partial
        assert report.patched_before is not None
        assert {step for step, _ in report.patched_before} <= {0, 1, 2}
        assert report.as_dict()["patched"] == report.patched
        assert report.recovered_verified is not False
        assert_rows_are_the_senders(server, report)
        await until(server.idle)
        assert late_bytes(server) == 0


async def test_at_its_limit_the_memory_is_free_while_generation_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pause = Pause(monkeypatch, lambda late: late.closed and freed.is_set())
    freed = threading.Event()
    async with endpoint(Limits(max_late_us=60_000)) as server:
        sending = asyncio.ensure_future(hand_over(server))
        await until(pause.reached.is_set)
        await until(lambda: late_bytes(server) == 0)
        (protocol,) = server.listener.protocols
        (receiver,) = protocol.quic.receivers.values()  # type: ignore[attr-defined]
        assert receiver._decoder is None
        assert not receiver.takes_late
        freed.set()
        report = await sending
        assert report.late == "patch"
        assert report.patched is not None
        assert report.patched < report.units_missing + report.units_partial
        await until(server.idle)


async def test_where_there_is_no_room_it_is_a_hand_off_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pause = Pause(monkeypatch, lambda late: True)
    async with endpoint(Limits(max_late_bytes=1000)) as server:
        report = await hand_over(server)
        assert not pause.granted
        assert report.late == "patch"  # asked for, of a peer that knows it
        assert report.patched is None
        assert report.finish_reason == "length"
        await until(server.idle)


async def test_off_by_default_and_by_the_receivers_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    pause = Pause(monkeypatch, lambda late: True)
    async with endpoint() as server:
        report = await hand_over(server, late="drop")
        assert (report.late, report.patched, pause.granted) == ("drop", None, False)
    async with endpoint(Limits(max_late_us=0)) as server:
        report = await hand_over(server)
        assert (report.late, report.patched, pause.granted) == ("drop", None, False)


async def test_cancelled_in_the_middle_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    pause = Pause(monkeypatch, lambda late: late.closed)
    async with endpoint() as server:
        with relaying(server, rate_bps=2e6, owd_s=0.01) as relay:
            async with connecting(relay.port, rate="2Mbps") as conn:
                report = await send_kv(conn, ready(), 0.3, then=THEN, late="patch")
                text = asyncio.ensure_future(anext(aiter_of(report)))
                await until(pause.reached.is_set)
                assert late_bytes(server) > 0
                assert conn.protocol.quic.senders
                text.cancel()
                await until(lambda: not conn.protocol.quic.senders)
                await until(server.idle)
                assert late_bytes(server) == 0
        await until(lambda: not server.handler._waiting)


def aiter_of(report: KVReport) -> Any:
    async def last() -> AsyncIterator[str]:
        parts = [part async for part in report.text]
        yield "".join(parts)

    return last()


async def test_a_lost_connection_frees_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    pause = Pause(monkeypatch, lambda late: late.closed)
    async with endpoint() as server:
        with relaying(server, rate_bps=2e6, owd_s=0.01) as relay:
            async with connecting(relay.port, rate="2Mbps") as conn:
                await send_kv(conn, ready(), 0.3, then=THEN, late="patch")
                await until(pause.reached.is_set)
                (protocol,) = server.listener.protocols
                protocol.abandon()
                await until(lambda: protocol.late_bytes == 0)  # type: ignore[attr-defined]
        await until(lambda: server.admissions.active == 0)


async def test_a_peer_that_does_not_know_it_is_not_asked() -> None:
    """Nothing of it is on the wire: what the peer reads is what earlier releases write."""
    async with hostile_server() as listener:
        async with connecting(listener.port) as conn:
            peer = await only(listener)
            assert not conn.protocol.quic.extension.takes_late
            report = await send_kv(conn, arrays(2, 16), 0.2, then=THEN, late="patch")
            assert not conn.protocol.quic.senders
        assert report.late == "drop"
        opening = next(message for message in peer.on(0).messages if isinstance(message, messages.Open))
        assert opening.late_us == 0
        assert messages.encode_message(opening)[3] == 0x94  # four fields
    async with serving() as server, connecting(server) as conn:  # a callback has nothing to patch
        report = await send_kv(conn, arrays(2, 16), 5.0, then=THEN, late="patch")
        assert report.late == "drop"
        assert report.j_block == 1.0


async def test_over_a_plain_stream_there_is_none() -> None:
    async with endpoint() as server, connecting(server, extension=False) as conn:
        report = await send_kv(conn, ready(), 20.0, then=THEN, late="patch")
        _ = [part async for part in report.text]
        assert (report.extension, report.late, report.patched) == ("off", "drop", None)


def asking(kv: PreparedKV, late_us: int, missing: str = "mask", *then: messages.Message) -> bytes:
    data = encode_manifest(kv.manifest(kv.layout.symbol_size(), missing, 0))
    parts = [messages.Open(5_000_000, data, "symbols", "", late_us), *then, messages.Start()]
    return messages.STREAM_PREAMBLE + b"".join(map(messages.encode_message, parts))


async def test_with_recompute_it_is_refused() -> None:
    async with endpoint() as server, attacking(server) as hostile:
        hostile.write(0, asking(ready(), 1_000_000, "recompute", THEN.message()))
        refusal = await hostile.refused()
        assert refusal.code == AppCode.UNSUPPORTED
        assert "no holes" in refusal.reason or "none are left" in refusal.reason
        await until(server.idle)


@pytest.mark.parametrize("then", [(), (Generate("x", max_new_tokens=0).message(),)])
async def test_without_tokens_to_generate_it_is_not_granted(then: tuple[messages.Message, ...]) -> None:
    async with endpoint() as server, attacking(server) as hostile:
        hostile.write(0, asking(ready(), 1 << 61, "mask", *then))
        await until(lambda: server.admissions.active == 1)
        await asyncio.sleep(0)
        assert late_bytes(server) == 0


async def test_an_endpoint_that_patches_nothing_grants_nothing_whoever_asks() -> None:
    async with serving() as server, attacking(server) as hostile:
        hostile.write(0, asking(prepared(2, 16), 1 << 61, "mask", THEN.message()))
        await until(lambda: server.admissions.active == 1)
        assert late_bytes(server) == 0


async def test_the_memory_of_several_is_counted_together() -> None:
    kv = ready()
    one = kv.layout.symbols(kv.layout.symbol_size()) * kv.layout.symbol_size() + 2 * kv.nbytes
    async with endpoint(Limits(max_late_bytes=int(1.5 * one))) as server, attacking(server) as hostile:
        for stream_id in (0, 4, 8):
            hostile.write(stream_id, asking(kv, 1_000_000, "mask", THEN.message()))
        await until(lambda: server.admissions.active == 3)
        await until(lambda: late_bytes(server) > 0)
        assert late_bytes(server) == one
        hostile.quic.reset_stream(0, AppCode.CANCELLED)
        hostile.transmit()
        await until(lambda: server.admissions.active == 2)
        assert late_bytes(server) == 0
