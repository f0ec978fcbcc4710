"""The LLM endpoint over real sockets: what it refuses, and that continuations are those of the sender's cache."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transformers import Qwen3NextConfig  # noqa: E402
from transformers.cache_utils import DynamicSlidingWindowLayer  # noqa: E402

from quic_pfec.client import Generate, connect, prepare, send_kv  # noqa: E402
from quic_pfec.kv.attention import PartialCache  # noqa: E402
from quic_pfec.kv.device import DeviceMirror  # noqa: E402
from quic_pfec.kv.hf import as_sent, fork, length  # noqa: E402
from quic_pfec.kv.prepared import PreparedKV  # noqa: E402
from quic_pfec.llm.endpoint import Conversation, LLMHandler  # noqa: E402
from quic_pfec.llm.generate import greedy, prefill, score  # noqa: E402
from quic_pfec.llm.models import LoadedModel, load  # noqa: E402
from quic_pfec.llm.recompute import PassClock  # noqa: E402
from quic_pfec.quic.admission import Admissions, HandleStore  # noqa: E402
from quic_pfec.quic.outgoing import HandoffRefused  # noqa: E402
from quic_pfec.report import KVReport  # noqa: E402
from quic_pfec.sim.channel import PRESETS  # noqa: E402
from quic_pfec.wire.errors import AppCode  # noqa: E402
from quic_pfec.wire.manifest import QUANTISED  # noqa: E402

from .handoff_world import Served, arrays, certificate, connecting, relaying, serving, until  # noqa: E402

pytestmark = [pytest.mark.sockets, pytest.mark.model]

CONTEXT = [(7 * i * i + 3 * i) % 251 for i in range(100)]
PROMPT = (5, 17, 99)
NEW = 12


@functools.cache
def model() -> LoadedModel:
    return load("tiny-random", threads=1)


@functools.cache
def whole_cache() -> Any:
    return prefill(model(), CONTEXT)


@functools.cache
def continuation() -> tuple[int, ...]:
    return tuple(greedy(model(), fork(whole_cache()), PROMPT, NEW))


def ready(first_token: int = 0, **changes: Any) -> PreparedKV:
    options: dict[str, Any] = {
        "tokens": CONTEXT,
        "wire_dtype": "fp32",
        "model": model().fingerprint,
        "rope": model().rope,
        "first_token": first_token,
    }
    return prepare(whole_cache(), **(options | changes))


def truncated(tokens: int) -> Any:
    return prefill(model(), CONTEXT[:tokens])


@asynccontextmanager
async def endpoint(places: int = 4, **options: Any) -> AsyncIterator[Served]:
    handler = LLMHandler(model(), admissions=Admissions(places), **options)
    try:
        async with serving(handler) as server:
            yield server
    finally:
        handler.close()


async def refused(server: Served, kv: PreparedKV, code: AppCode, match: str, **options: Any) -> None:
    async with connecting(server) as conn:
        with pytest.raises(HandoffRefused, match=match) as raised:
            await send_kv(conn, kv, 20.0, **options)
    assert raised.value.code is code
    assert "\n" not in str(raised.value)
    await until(server.idle)


@pytest.mark.parametrize("extension", [True, False])
async def test_the_continuation_is_token_equal(extension: bool) -> None:
    async with endpoint() as server, connecting(server, extension=extension) as conn:
        then = Generate(PROMPT, max_new_tokens=NEW, score=continuation())
        report = await send_kv(conn, ready(), 20.0, then=then)
        assert report.j_block == 1.0
        text = "".join([part async for part in report.text])
        assert text == model().decode(continuation())
        assert report.scores == continuation()
        assert report.finish_reason == "length"
        assert report.decode_started_s is not None
        assert report.frozen_s is not None
        assert report.decode_started_s >= report.frozen_s
        assert len(server.handler.handles) == 1
        await until(server.idle)


@pytest.mark.parametrize("wire_dtype", QUANTISED)
async def test_a_quantised_cache_is_decoded_as_its_sender_would(wire_dtype: str) -> None:
    got = []
    async with endpoint(on_received=got.append) as server, connecting(server) as conn:
        then = Generate(PROMPT, max_new_tokens=0, score=continuation())
        report = await send_kv(conn, ready(wire_dtype=wire_dtype), 20.0, then=then)
        assert report.j_block == 1.0
        assert report.wire_dtype == wire_dtype
        assert [part async for part in report.text] == []
    expected = score(model(), as_sent(whole_cache(), model().config, wire_dtype), PROMPT, continuation())
    assert report.scores == tuple(expected)
    assert got[0].kv.arrays.dtype == "fp32"  # what the model computes in


async def test_over_a_lossy_link_the_endpoint_decodes_from_what_came() -> None:
    got = []
    async with endpoint(on_received=got.append) as server:
        with relaying(server, rate_bps=5e6, owd_s=0.02, loss=PRESETS["paper"], seed=3) as relay:
            async with connecting(relay.port, rate="5Mbps") as conn:
                relay.epoch()
                then = Generate(PROMPT, max_new_tokens=4, score=continuation())
                report = await send_kv(conn, ready(), 0.5, then=then, scheduler="deficit")
                text = "".join([part async for part in report.text])
        assert report.confirmed
        assert report.recovered_verified is True
        assert 0 < report.j_frac < 1
        assert len(report.scores) == NEW
        assert len(text) > 0
        assert not got[0].is_complete
        (conversation,) = (kept.value for kept in server.handler.handles._kept.values())
        assert conversation.tokens == len(CONTEXT) + len(PROMPT) + 3  # holes count as positions


async def lossy(server: Served, kv: PreparedKV, *, missing: Any, deadline: float = 0.5, base: int = 0) -> KVReport:
    """A hand-off of which only a part comes; its continuation is read to the end."""
    with relaying(server, rate_bps=5e6, owd_s=0.02, loss=PRESETS["paper"], seed=3) as relay:
        async with connecting(relay.port, rate="5Mbps") as conn:
            relay.epoch()
            then = Generate(PROMPT, max_new_tokens=4, score=continuation())
            report = await send_kv(
                conn, kv, deadline, then=then, scheduler="deficit", missing=missing, base=base, repair_budget=0.1
            )
            _ = [part async for part in report.text]
    assert report.confirmed
    assert 0 < report.j_frac < 1
    return report


async def test_rows_that_did_not_come_are_recomputed() -> None:
    got = []
    async with endpoint(on_received=got.append, recompute_budget_s=600.0) as server:
        report = await lossy(server, ready(), missing="recompute")
        assert not got[0].is_complete
        assert report.scores == continuation()  # as from the intact cache
        assert report.missing_used == "recompute"
        (conversation,) = (kept.value for kept in server.handler.handles._kept.values())
        whole = fork(whole_cache())
        for layer, intact in zip(conversation.cache.layers, whole.layers, strict=True):
            assert torch.allclose(layer.keys[:, :, :100], intact.keys, rtol=0, atol=1e-3)
        async with connecting(server) as conn:  # a later turn says on what kind of cache it stands
            turn = await conn.generate(report.handle, Generate(PROMPT, max_new_tokens=1))
            await turn.whole()
            assert turn.missing_used == "recompute"
        await until(server.idle)


async def test_where_there_is_no_time_it_masks_and_says_so() -> None:
    async with endpoint(recompute_budget_s=0.0) as server:
        report = await lossy(server, ready(), missing="recompute")
        assert report.missing_used == "mask"
        assert report.missing == "recompute"
        assert len(report.scores) == NEW
        (conversation,) = (kept.value for kept in server.handler.handles._kept.values())
        assert conversation.cache.hole_count() > 0
        assert server.handler.clock.cost is not None
        await until(server.idle)


async def test_the_time_to_recompute_is_by_default_what_the_deadline_granted() -> None:
    until_s = []

    class Clock(PassClock):
        def fill(self, rebuilt: Any, token_ids: Any, until: float, cancelled: Any = None) -> Any:
            until_s.append(until)
            return rebuilt, "mask"

    got: list[Any] = []
    async with endpoint(on_received=got.append) as server:
        server.handler.clock = Clock(model())
        await lossy(server, ready(), missing="recompute")
        granted_s = until_s[0] - got[0].deadline_s
        assert 0 < granted_s <= 0.5


@pytest.mark.parametrize("missing", ["zero", "mask", "recompute"])
async def test_a_mirror_on_the_device_takes_the_place_of_shared_memory(missing: Any) -> None:
    """As it runs where the model is on a GPU; here the device is the CPU."""
    mirrors: list[DeviceMirror] = []

    def frame_for(admission: Any) -> DeviceMirror:
        mirrors.append(DeviceMirror(admission.assembler, model().config, dtype=model().dtype, device="cpu"))
        return mirrors[-1]

    got: list[Any] = []
    async with endpoint(on_received=got.append, recompute_budget_s=600.0) as server:
        server.handler.frame_for = frame_for
        report = await lossy(server, ready(), missing=missing)
        assert 0 < mirrors[0].copied <= report.units_complete
        conversation = server.handler.handles.get(report.handle, 0.0)
        at_once = got[0].to_cache(model().config, model=model().model)
        for layer, other in zip(conversation.cache.layers, at_once.layers, strict=True):
            torch.testing.assert_close(layer.keys[:, :, :100], other.keys, rtol=0, atol=1e-5)
        assert report.scores == tuple(score(model(), at_once, PROMPT, continuation()))
        async with connecting(server, rate="1Mbps") as conn:  # given up in mid-transfer
            sending = asyncio.ensure_future(send_kv(conn, ready(), 20.0))
            await until(lambda: len(mirrors) == 2)
            sending.cancel()
        await until(server.idle)
        await until(lambda: not server.handler._waiting)


async def test_a_complete_hand_off_has_nothing_to_recompute() -> None:
    async with endpoint(recompute_budget_s=0.0) as server, connecting(server) as conn:
        then = Generate(PROMPT, max_new_tokens=NEW, score=continuation())
        report = await send_kv(conn, ready(), 20.0, missing="recompute", then=then)
        _ = [part async for part in report.text]
        assert report.missing_used == "recompute"
        assert report.scores == continuation()
        other = await send_kv(conn, ready(), 20.0, missing="mask", then=then)
        _ = [part async for part in other.text]
        assert other.missing_used == "mask"
        await until(server.idle)


@pytest.mark.parametrize("first_mode", ["mask", "recompute", "zero"])
@pytest.mark.parametrize("second_mode", ["mask", "recompute"])
async def test_an_increment_on_a_base_of_which_a_part_came(first_mode: Any, second_mode: Any) -> None:
    """Holes of the base stay masked, and are computed with those of the increment where that is asked for."""
    async with endpoint(recompute_budget_s=600.0 if second_mode == "recompute" else 0.0) as server:
        base = prepare(truncated(64), tokens=CONTEXT[:64], wire_dtype="fp32", model=model().fingerprint)
        first = await lossy(server, base, missing=first_mode, deadline=0.35)
        await until(server.idle)
        handles = server.handler.handles
        kept = handles.get(first.handle, 0.0)
        cache = fork(kept.cache)
        cache.crop(-(length(cache) - 64))  # without the continuation that was generated on it
        handles.put(first.handle, Conversation(cache, 64), 1, time.monotonic())
        # A base of zeros has none that anybody knows of; one recomputed in time has none left.
        base_holes = cache.hole_count() if isinstance(cache, PartialCache) else 0
        second = await lossy(server, ready(64), missing=second_mode, base=first.handle, deadline=0.12)
        conversation = handles.get(second.handle, 0.0)
        assert conversation.tokens == len(CONTEXT) + len(PROMPT) + 3
        assert second.missing_used == second_mode
        if second_mode == "mask":
            assert conversation.cache.hole_count() > base_holes
        elif first_mode != "zero":  # zeros of a base pass for rows
            assert second.scores == continuation()
        assert (base_holes > 0) == (first_mode == "mask" or (first_mode, second_mode) == ("recompute", "mask"))
        await until(server.idle)
        assert not server.handler._bases


async def test_recompute_without_token_ids_is_refused_at_once() -> None:
    no_ids = prepare(whole_cache(), wire_dtype="fp32", model=model().fingerprint)
    async with endpoint() as server:
        async with connecting(server) as conn:
            with pytest.raises(ValueError, match="needs the token ids") as raised:
                await send_kv(conn, no_ids, 20.0, missing="recompute")
            assert "\n" not in str(raised.value)
        assert server.admissions.refused == 0


async def test_an_increment_on_a_base_of_other_tokens_is_refused() -> None:
    """The receiver computes with both texts at once otherwise; it can tell only where the ids travel."""
    other = [(token + 1) % 256 for token in CONTEXT[:64]]
    async with endpoint() as server, connecting(server) as conn:
        base = prepare(truncated(64), tokens=other, wire_dtype="fp32", model=model().fingerprint)
        first = await send_kv(conn, base, 20.0)
        await until(server.idle)
        second = await send_kv(
            conn, ready(64), 20.0, base=first.handle, missing="recompute", then=Generate(PROMPT, max_new_tokens=1)
        )
        with pytest.raises(HandoffRefused, match="other tokens") as raised:
            _ = [part async for part in second.text]
        assert raised.value.code is AppCode.TOKENS_MISMATCH
        await until(server.idle)


async def test_token_ids_beyond_the_vocabulary_fail_the_transfer() -> None:
    strange = [*CONTEXT[:-1], 256]
    async with endpoint() as server, connecting(server) as conn:
        report = await send_kv(conn, ready(tokens=strange), 20.0, missing="recompute", then=Generate(PROMPT, 1))
        with pytest.raises(HandoffRefused, match="own tokens") as raised:
            _ = [part async for part in report.text]
        assert raised.value.code is AppCode.UNSUPPORTED
        await until(server.idle)


def test_a_model_whose_cache_is_not_rows_is_not_served() -> None:
    config = Qwen3NextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, layer_types=["full_attention", "linear_attention"],
    )  # fmt: skip
    with pytest.raises(ValueError, match="layer 1 of the model is a LinearAttentionLayer"):
        LLMHandler(SimpleNamespace(config=config))  # type: ignore[arg-type]


async def test_a_base_that_has_forgotten_rows_is_refused_by_layer() -> None:
    async with endpoint() as server, connecting(server) as conn:
        first = await send_kv(conn, prepare(truncated(64), tokens=CONTEXT[:64], wire_dtype="fp32"), 20.0)
        await until(server.idle)
        cache = fork(whole_cache())
        window = DynamicSlidingWindowLayer(sliding_window=16)
        window.update(cache.layers[2].keys[:, :, :64], cache.layers[2].values[:, :, :64])
        cache.layers = [fork(truncated(64)).layers[0], *truncated(64).layers[1:2], window, *truncated(64).layers[3:]]
        server.handler.handles.put(first.handle, Conversation(cache, 64), 1, time.monotonic())
        await refused(server, ready(64), AppCode.UNSUPPORTED, "layer 2 .* DynamicSlidingWindowLayer", base=first.handle)


async def test_a_worker_stands_by_from_admission_and_is_free_again_however_it_ends() -> None:
    async with endpoint(places=1) as server:
        handler = server.handler
        for _ in range(3):  # with one worker, one that waited for ever would stop the next hand-off
            async with connecting(server, rate="1Mbps") as conn:
                sending = asyncio.ensure_future(send_kv(conn, ready(), 20.0, then=Generate(PROMPT, max_new_tokens=2)))
                await until(lambda: len(handler._waiting) == 1)
                assert server.admissions.active == 1
                sending.cancel()
            await until(server.idle)
            await until(lambda: not handler._waiting)
        async with connecting(server) as conn:
            report = await send_kv(conn, ready(), 20.0, then=Generate(PROMPT, max_new_tokens=NEW))
            assert "".join([part async for part in report.text]) == model().decode(continuation())
        await until(server.idle)


async def test_an_endpoint_that_closes_leaves_no_worker_waiting() -> None:
    async with endpoint() as server, connecting(server, rate="1Mbps") as conn:
        handler = server.handler
        sending = asyncio.ensure_future(send_kv(conn, ready(), 20.0))
        await until(lambda: len(handler._waiting) == 1)
        handler.close()
        await until(lambda: not handler._waiting)
        sending.cancel()


async def test_an_increment_continues_like_the_whole_cache() -> None:
    async with endpoint() as server, connecting(server) as conn:
        first = await send_kv(conn, prepare(truncated(64), tokens=CONTEXT[:64], wire_dtype="fp32"), 20.0)
        await until(server.idle)
        then = Generate(PROMPT, max_new_tokens=NEW, score=continuation())
        second = await send_kv(conn, ready(64), 20.0, base=first.handle, then=then)
        assert second.j_block == 1.0
        _ = [part async for part in second.text]
        assert second.scores == tuple(score(model(), whole_cache(), PROMPT, continuation()))
        # And a second increment may continue the same base: it was not changed.
        third = await send_kv(conn, ready(64), 20.0, base=first.handle, then=then)
        _ = [part async for part in third.text]
        assert third.scores == second.scores
        await until(server.idle)
        assert not server.handler._bases
        assert not server.handler._rooms


async def test_a_base_that_expires_while_its_increment_is_under_way_still_serves_it() -> None:
    handles: HandleStore[Conversation] = HandleStore()
    async with endpoint(handles=handles) as server:
        async with connecting(server) as conn:
            first = await send_kv(conn, prepare(truncated(64), tokens=CONTEXT[:64], wire_dtype="fp32"), 20.0)
            await until(server.idle)
        with relaying(server, rate_bps=4e6) as relay:
            async with connecting(relay.port, rate="4Mbps") as conn:
                then = Generate(PROMPT, max_new_tokens=1, score=continuation())
                task = asyncio.create_task(send_kv(conn, ready(64), 20.0, base=first.handle, then=then))
                await until(lambda: server.admissions.active == 1)
                handles.sweep(float("inf"))
                assert len(handles) == 0
                report = await task
                _ = [part async for part in report.text]
    assert report.scores == continuation()


async def test_a_later_turn_goes_on_from_the_kept_cache() -> None:
    async with endpoint() as server, connecting(server) as conn:
        report = await send_kv(conn, ready(), 20.0)
        await until(server.idle)
        turn = await conn.generate(report.handle, Generate(PROMPT, max_new_tokens=NEW))
        await turn.whole()
        assert tuple(turn.tokens) == continuation()
        assert turn.finish_reason == "length"
        # The turn after that continues behind this one.
        cache = fork(whole_cache())
        said = list(greedy(model(), cache, PROMPT, NEW))
        assert length(cache) == len(CONTEXT) + len(PROMPT) + NEW - 1
        after = list(greedy(model(), cache, [8], 4))
        turn = await conn.generate(report.handle, Generate((8,), max_new_tokens=4))
        await turn.whole()
        assert said == list(continuation())
        assert turn.tokens == after
        await until(server.idle)


async def test_handles_that_are_unknown_or_expired_are_refused() -> None:
    handles: HandleStore[Conversation] = HandleStore(ttl_s=0.0)
    async with endpoint(handles=handles) as server, connecting(server) as conn:
        report = await send_kv(conn, ready(), 20.0)
        await until(server.idle)
        for handle in (report.handle, 12345):
            turn = await conn.generate(handle, Generate(PROMPT))
            with pytest.raises(HandoffRefused, match="unknown or has expired") as raised:
                await turn.whole()
            assert raised.value.code is AppCode.UNKNOWN_HANDLE
        await refused(server, ready(64), AppCode.UNKNOWN_HANDLE, "unknown or has expired", base=report.handle)


async def test_kept_caches_are_limited_by_memory() -> None:
    nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in whole_cache().layers)
    handles: HandleStore[Conversation] = HandleStore(max_bytes=2 * nbytes)
    async with endpoint(handles=handles) as server, connecting(server) as conn:
        reports = []
        for _ in range(3):
            reports.append(await send_kv(conn, ready(), 20.0))
            await until(server.idle)
        assert len(handles) == 2
        assert handles.bytes <= 2 * nbytes
        with pytest.raises(HandoffRefused, match="unknown or has expired"):
            await (await conn.generate(reports[0].handle, Generate(PROMPT))).whole()
        assert (await (await conn.generate(reports[2].handle, Generate(PROMPT, 2))).whole()) is not None


async def test_a_cache_of_another_model_is_refused() -> None:
    async with endpoint() as server:
        await refused(server, ready(model="f" * 32), AppCode.MODEL_MISMATCH, "this endpoint runs")
        await refused(server, ready(rope="default:1:abc"), AppCode.MODEL_MISMATCH, "rotary")
        await refused(server, prepare(arrays(4, 16, heads=3)), AppCode.MODEL_MISMATCH, "other shapes")
        await refused(server, prepare(arrays(3, 16)), AppCode.MODEL_MISMATCH, "other shapes")
        async with connecting(server) as conn:
            assert (await send_kv(conn, ready(), 20.0)).confirmed


async def test_an_unstated_model_is_refused_where_asked_for() -> None:
    async with endpoint(require_fingerprint=True) as server:
        await refused(server, prepare(arrays(4, 16)), AppCode.MODEL_MISMATCH, "which model")


async def test_increments_that_do_not_fit_are_refused() -> None:
    async with endpoint() as server:
        async with connecting(server) as conn:
            first = await send_kv(conn, ready(), 20.0)
        await until(server.idle)
        await refused(server, ready(64), AppCode.UNSUPPORTED, "base handle")
        await refused(server, ready(64), AppCode.UNKNOWN_HANDLE, "unknown", base=77)
        await refused(server, ready(64), AppCode.TOKENS_MISMATCH, "holds 100 tokens", base=first.handle)
        await refused(server, ready(), AppCode.UNSUPPORTED, "goes with rows", base=first.handle)
        assert server.admissions.refused == 0  # judged before any memory was reserved


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (Generate((256,)), "own tokens"),
        (Generate((1 << 32) - 1 for _ in range(1)), "own tokens"),
        (Generate((1,), score=(999,)), "own tokens"),
        (Generate(""), "own tokens"),
        (Generate((1,), max_new_tokens=65_536), "positions"),
        (Generate([1] * 40_000, max_new_tokens=1), "positions"),
    ],
    ids=["prompt", "huge", "score", "empty", "long", "long-prompt"],
)
async def test_a_request_beyond_the_model_is_refused_and_the_cache_kept(request_: Generate, match: str) -> None:
    if not isinstance(request_.prompt, str | list | tuple):
        request_ = Generate(tuple(request_.prompt))
    async with endpoint() as server, connecting(server) as conn:
        report = await send_kv(conn, ready(), 20.0, then=request_)
        assert report.confirmed
        with pytest.raises(HandoffRefused, match=match):
            _ = [part async for part in report.text]
        with pytest.raises(HandoffRefused, match=match):
            await (await conn.generate(report.handle, request_)).whole()
        turn = await conn.generate(report.handle, Generate(PROMPT, NEW))
        await turn.whole()
        assert tuple(turn.tokens) == continuation()
        await until(server.idle)


async def test_a_reader_that_gives_up_stops_the_generation() -> None:
    async with endpoint() as server, connecting(server) as conn:
        report = await send_kv(conn, ready(), 20.0)
        await until(server.idle)
        turn = await conn.generate(report.handle, Generate(PROMPT, max_new_tokens=20_000))

        async def read() -> None:
            async for _ in turn:
                pass

        reading = asyncio.create_task(read())
        await until(lambda: len(turn.tokens) > 3)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await until(server.idle)
        again = await conn.generate(report.handle, Generate(PROMPT, NEW))
        await again.whole()
        assert tuple(again.tokens) == continuation()


async def test_later_turns_take_places_too() -> None:
    async with endpoint(places=1) as server, connecting(server) as conn:
        report = await send_kv(conn, ready(), 20.0)
        await until(server.idle)
        turn = await conn.generate(report.handle, Generate(PROMPT, max_new_tokens=20_000))
        await until(lambda: server.admissions.active == 1)
        with pytest.raises(HandoffRefused) as raised:
            await send_kv(conn, ready(), 20.0)
        assert raised.value.busy
        turn._outgoing.cancel()
        await until(server.idle)


async def test_a_connection_that_dies_stops_the_generation() -> None:
    async with endpoint() as server:
        cert, _ = certificate()
        async with connect("127.0.0.1", server.port, ca_certs=cert, server_name="localhost") as conn:
            report = await send_kv(conn, ready(), 20.0, then=Generate(PROMPT, max_new_tokens=20_000))
            assert await anext(report.text) is not None
            assert server.admissions.active == 1
        await until(lambda: server.admissions.active == 0)
