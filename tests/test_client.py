"""What a user of the library sees: hand-offs over real sockets, whole, cut, refused, cancelled, and their reports."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from quic_pfec.client import Generate, connect, prepare, send_kv
from quic_pfec.kv.units import KVArrays, as_received
from quic_pfec.link.options import RelayOptions
from quic_pfec.link.process import RelayProcess
from quic_pfec.quic.outgoing import HandoffRefused
from quic_pfec.sim.channel import PRESETS
from quic_pfec.wire.errors import AppCode
from quic_pfec.wire.limits import Limits
from quic_pfec.wire.manifest import QUANTISED

from .handoff_world import (
    arrays,
    assert_bit_equal,
    assert_nothing_foreign,
    connecting,
    prepared,
    relaying,
    serving,
    until,
)

pytestmark = pytest.mark.sockets


async def test_lossless_hand_off_is_bit_equal_and_ends_early() -> None:
    cache = arrays(6, 100)
    async with serving() as server, connecting(server, rate="100Mbps") as conn:
        assert conn.extension == "on"
        report = await send_kv(conn, cache, 30.0)
        assert report.confirmed
        assert report.extension == "on"
        assert report.limited_by == "nothing"
        assert report.j_block == report.j_frac == 1.0
        assert report.units_complete == 6 * 7
        assert report.frozen_s is not None
        assert report.frozen_s < report.deadline_s - 1.0  # it did not wait for the deadline
        assert report.handle != 0
        assert [part async for part in report.text] == []
        await until(lambda: len(server.received) == 1)
        assert_bit_equal(server.received[0], cache)
        await until(server.idle)


@pytest.mark.parametrize("extension", [True, False])
@pytest.mark.parametrize("wire_dtype", QUANTISED)
async def test_quantised_hand_offs_are_what_both_ends_compute(wire_dtype: str, extension: bool) -> None:
    cache = arrays(4, 100)
    layout = prepare(cache, wire_dtype=wire_dtype).layout
    expected = as_received(layout, KVArrays.of(cache, "fp32")).layers
    async with serving() as server, connecting(server, rate="100Mbps", extension=extension) as conn:
        report = await send_kv(conn, cache, 30.0, wire_dtype=wire_dtype)
        assert report.confirmed
        assert report.j_block == 1.0
        assert report.units_corrupt == 0
        await until(lambda: len(server.received) == 1)
        got = server.received[0]
        assert (got.manifest.dtype, got.manifest.wire_dtype, got.kv.arrays.dtype) == ("fp32", wire_dtype, "fp32")
        assert_bit_equal(got, [(keys.view(np.float32), values.view(np.float32)) for keys, values in expected])
        await until(server.idle)


@pytest.mark.parametrize("asked", [{}, {"wire_dtype": "auto"}])  # at a provisioned rate that is the default
async def test_auto_rounds_nothing_while_there_is_time(asked: dict[str, str]) -> None:
    cache = arrays(6, 128)  # 393 kB in bf16: 0.66 s at 5 Mbit/s; 0.40 s in both precisions, 0.23 s the bases
    said = []
    async with serving() as server:
        with relaying(server, rate_bps=5e6) as relay:
            async with connecting(relay.port, rate="5Mbps") as conn:
                for deadline in (20.0, 0.33):
                    relay.epoch()
                    report = await send_kv(conn, cache, deadline, **asked)  # type: ignore[arg-type]
                    said.append((report.wire_dtype, report.j_block == 1.0))
                    assert report.as_dict()["wire_dtype"] == report.wire_dtype
        await until(lambda: len(server.received) == 2)
    assert said == [("bf16", True), ("progressive", False)]
    assert_bit_equal(server.received[0], cache)
    got = server.received[1]
    assert got.manifest.wire_dtype == "progressive"
    assert report.unit_share.shape == (12, 8)
    bases, refinements = got.complete.reshape(2, -1)
    assert bases.mean() > refinements.mean()
    assert [bool(valid.all()) for valid in got.kv.row_valid] == bases.reshape(6, -1).all(axis=1).tolist()


async def test_the_papers_design_sends_bf16_unless_told() -> None:
    cache = arrays(6, 128)
    async with serving() as server, connecting(server, rate="1Mbps") as conn:
        report = await send_kv(conn, cache, 0.1, scheduler="priorityfec-paper")
    assert (report.scheduler, report.wire_dtype) == ("priorityfec-paper", "bf16")


async def test_weigh_says_what_auto_would_do() -> None:
    layout = prepared(6, 128).layout
    async with serving() as server, connecting(server, rate="5Mbps") as conn:
        fits, does_not = conn.weigh(layout, 20.0), conn.weigh(layout, 0.33)
        assert (fits.wire_dtype, does_not.wire_dtype) == ("bf16", "progressive")
        assert fits.needed_s == does_not.needed_s == pytest.approx(0.7, abs=0.1)
        assert 0.2 < does_not.remaining_s <= 0.33
        assert "with 5% lost: that does not fit" in does_not.reason


async def test_a_quantised_hand_off_over_a_lossy_link_leaves_nothing_foreign() -> None:
    cache = arrays(6, 128)
    expected = as_received(prepare(cache, wire_dtype="int8").layout, KVArrays.of(cache, "fp32")).layers
    async with serving() as server:
        with relaying(server, rate_bps=3e6, loss=PRESETS["paper"]) as relay:
            async with connecting(relay.port, rate="3Mbps") as conn:
                relay.epoch()
                report = await send_kv(conn, cache, 0.3, wire_dtype="int8")
        await until(lambda: len(server.received) == 1)
    assert 0 < report.j_frac < 1
    assert report.units_corrupt == 0
    assert_nothing_foreign(
        server.received[0], [(keys.view(np.float32), values.view(np.float32)) for keys, values in expected]
    )


@pytest.mark.parametrize("congestion_control", ["cubic", "reno"])
async def test_the_standard_controllers_carry_a_hand_off(congestion_control: str) -> None:
    cache = arrays()
    async with serving() as server, connecting(server, congestion_control=congestion_control) as conn:
        report = await send_kv(conn, cache, 30.0)
        await until(lambda: len(server.received) == 1)
    assert report.confirmed
    assert_bit_equal(server.received[0], cache)


async def test_lossy_link_recovers_symbols_that_are_bit_equal() -> None:
    cache = arrays(6, 128)
    async with serving() as server:
        options = RelayOptions(
            upstream=("127.0.0.1", server.port), rate_bps=5e6, owd_s=0.02, loss=PRESETS["paper"], seed=3
        )
        with RelayProcess(options) as relay:
            async with connecting(relay.port, rate="5Mbps") as conn:
                relay.epoch()
                report = await send_kv(conn, cache, 2.0, scheduler="deficit")
        await until(lambda: len(server.received) == 1)
    assert report.confirmed
    assert report.symbols.lost > 0
    assert report.symbols.repairs_useful > 0
    assert report.symbols.recovered > 0
    assert report.recovered_verified is True
    assert report.units_corrupt == 0
    assert_nothing_foreign(server.received[0], cache)


async def test_short_deadline_on_a_lossy_link_freezes_a_part() -> None:
    cache = arrays(6, 128)
    async with serving() as server:
        with relaying(server, rate_bps=3e6, loss=PRESETS["paper"]) as relay:
            async with connecting(relay.port, rate="3Mbps") as conn:
                relay.epoch()
                report = await send_kv(conn, cache, 0.4, wire_dtype="bf16")
        await until(lambda: len(server.received) == 1)
    assert report.confirmed
    assert 0 < report.j_frac < 1
    assert report.units_partial + report.units_missing > 0
    assert report.recovered_verified is True
    got = server.received[0]
    assert not got.is_complete
    assert int(got.complete.sum()) == report.units_complete
    assert_nothing_foreign(got, cache)


@pytest.mark.parametrize("off_at", ["client", "server"])
async def test_without_the_extension_units_go_over_the_stream(off_at: str) -> None:
    cache = arrays(6, 100)
    async with (
        serving(extension=off_at != "server") as server,
        connecting(server, extension=off_at != "client") as conn,
    ):
        assert conn.extension == "off"
        report = await send_kv(conn, cache, 30.0)
        assert report.confirmed
        assert report.extension == "off"
        assert report.scheduler == "stream"
        assert report.j_block == 1.0
        await until(lambda: len(server.received) == 1)
        assert_bit_equal(server.received[0], cache)
        await until(server.idle)


async def test_the_stream_is_cut_at_the_deadline() -> None:
    cache = arrays(8, 256)
    async with serving() as server:
        with relaying(server, rate_bps=2e6) as relay:
            async with connecting(relay.port, extension=False) as conn:
                report = await send_kv(conn, cache, 0.8)
                assert report.confirmed
                assert 0 < report.j_block < 1
                assert report.units_missing > 0
                assert report.limited_by in ("congestion_control", "deadline")
                await until(lambda: len(server.received) == 1)
                assert_nothing_foreign(server.received[0], cache)
                await until(server.idle)
                # The connection is as good as before.
                again = await send_kv(conn, arrays(1, 16), 20.0)
                assert again.j_block == 1.0


@pytest.mark.parametrize(("options", "threshold"), [({"lossy": True}, 0.4), ({"congestion_control": "bbr"}, 0.02)])
async def test_bbr_carries_a_hand_off_and_the_report_names_its_threshold(
    options: dict[str, Any], threshold: float
) -> None:
    async with serving() as server:
        with relaying(server, rate_bps=5e6, owd_s=0.01, loss=PRESETS["iid5"] if "lossy" in options else None) as relay:
            async with connecting(relay.port, **options) as conn:
                kv = prepared()
                report = await send_kv(conn, kv, 20.0)
    assert report.confirmed
    assert report.units_missing == report.units_partial == 0
    assert (report.congestion_control, report.loss_threshold) == ("bbr", threshold)
    assert report.as_dict()["loss_threshold"] == threshold


async def test_a_standard_controller_on_a_lossy_link_is_named_as_what_held_back() -> None:
    cache = arrays(8, 256)
    async with serving() as server:
        with relaying(server, rate_bps=5e6, owd_s=0.03, loss=PRESETS["paper"]) as relay:
            async with connecting(relay.port) as conn:
                relay.epoch()
                report = await send_kv(conn, cache, 1.0)
    assert report.confirmed
    assert report.limited_by == "congestion_control"
    assert "rate=" in report.hint


async def test_a_prepared_cache_can_be_sent_to_several_peers() -> None:
    cache = arrays(3, 48)
    kv = prepare(cache)
    async with serving() as first, serving() as second:
        for server in (first, second):
            async with connecting(server) as conn:
                assert (await send_kv(conn, kv, 20.0)).j_block == 1.0
                await until(server.idle)
            assert_bit_equal(server.received[0], cache)


async def test_two_transfers_at_once_are_both_confirmed() -> None:
    first, second = arrays(4, 64, seed=1), arrays(4, 64, seed=2)
    async with serving() as server, connecting(server, rate="50Mbps") as conn:
        reports = await asyncio.gather(send_kv(conn, first, 20.0), send_kv(conn, second, 25.0))
        assert all(report.confirmed and report.j_block == 1.0 for report in reports)
        assert reports[0].handle != reports[1].handle
        await until(lambda: len(server.received) == 2)
        by_handle = {got.handle: got for got in server.received}
        assert_bit_equal(by_handle[reports[0].handle], first)
        assert_bit_equal(by_handle[reports[1].handle], second)


async def test_two_transfers_at_once_share_a_slow_link_by_deadline() -> None:
    first, second = arrays(4, 128, seed=1), arrays(4, 128, seed=2)
    async with serving() as server:
        with relaying(server, rate_bps=4e6) as relay:
            async with connecting(relay.port, rate="4Mbps") as conn:
                late, soon = await asyncio.gather(send_kv(conn, first, 4.0), send_kv(conn, second, 0.9))
    assert late.confirmed
    assert soon.confirmed
    assert soon.j_frac > 0.5  # alone it needs about 0.6 s: the earlier deadline went first
    assert late.j_block == 1.0


async def test_many_hand_offs_in_a_row_on_one_connection() -> None:
    kv = prepared(1, 16)
    async with serving() as server, connecting(server) as conn:
        for _ in range(12):
            report = await send_kv(conn, kv, 20.0)
            assert report.j_block == 1.0
        await until(server.idle)


SECONDS = r"^deadline is a number of seconds from now, such as 2\.0, not "


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "exactly one of deadline"),
        ({"deadline": 1.0, "deadline_at": 5.0}, "exactly one of deadline"),
        ({"deadline": 0.0}, r"in the past: deadline=0\.0"),
        ({"deadline": -1.0}, r"in the past: deadline=-1\.0 is -1\.000 s from now"),
        ({"deadline": float("nan")}, SECONDS + "nan"),
        ({"deadline": float("inf")}, SECONDS + "inf"),
        ({"deadline": "1"}, SECONDS + "'1'"),
        ({"deadline": True}, SECONDS + "True"),
        ({"deadline": [1.0]}, SECONDS + "a list"),
        ({"deadline_at": -1.0}, r"in the past: deadline_at=-1\.0"),
        ({"deadline_at": "5"}, r"deadline_at is a number of seconds on time\.monotonic\(\), such as 2\.0, not '5'"),
        ({"deadline": 1.0, "scheduler": "best"}, "choose one of none, fixed, arq"),
        ({"deadline": 1.0, "scheduler": None}, "choose one of none, fixed, arq"),
        ({"deadline": 1.0, "missing": "guess"}, "one of mask, zero, recompute"),
        ({"deadline": 1.0, "missing": "recompute"}, "needs the token ids"),
        ({"deadline": 1.0, "late": "mend"}, "late must be 'drop' or 'patch'"),
        ({"deadline": 1.0, "late": "patch"}, "give then=Generate"),
        ({"deadline": 1.0, "late": "patch", "then": Generate("", 0)}, "with new tokens"),
        ({"deadline": 1.0, "late": "patch", "missing": "recompute"}, "choose one of them"),
        ({"deadline": 1.0, "repair_budget": -0.1}, r"cannot be negative: -0\.1"),
        ({"deadline": 1.0, "repair_budget": float("nan")}, r"a share of the symbols, such as 0\.1, not nan"),
        ({"deadline": 1.0, "repair_budget": "3"}, r"a share of the symbols, such as 0\.1, not '3'"),
        ({"deadline": 1.0, "order": "random"}, "expected one of utility, prefix, fifo"),
        ({"deadline": 1.0, "wire_dtype": "int3"}, "wire_dtype must be one of fp32, bf16, int8, fp8, int4, progressive"),
        ({"deadline": 1.0, "tokens": "the text"}, "ids of the whole context, a tensor, an array or a list of ints"),
        ({"deadline": 1.0, "tokens": [0.5] * 16}, "ids of the whole context"),
        ({"deadline": 1.0, "tokens": [[1], [2, 3]]}, "ids of the whole context"),
        ({"deadline": 1.0, "tokens": [1]}, "the context has 16 tokens"),
        ({"deadline": 1.0, "profile": "mine.json"}, "profile is a Profile .* not 'mine.json'"),
        ({"deadline": 1.0, "base": "x"}, r"base is the handle .* not 'x'"),
        ({"deadline": 1.0, "then": "go on"}, r"then is a quic_pfec\.Generate\(prompt, \.\.\.\), not 'go on'"),
        ({"deadline": 1.0, "then": Generate((-1,))}, "prompt is token ids from 0 to 4294967295, not -1"),
        ({"deadline": 1.0, "then": Generate(None)}, "prompt is text or a sequence of token ids, not None"),  # type: ignore[arg-type]
        ({"deadline": 1.0, "then": Generate("x", score="ab")}, "score is a sequence of token ids, not 'ab'"),  # type: ignore[arg-type]
        ({"deadline": 1.0, "then": Generate("x", max_new_tokens=-1)}, "max_new_tokens is a whole number from 0 to"),
        ({"deadline": 1.0, "then": Generate("x" * 70_000)}, "GENERATE"),
    ],
)  # fmt: skip
async def test_misuse_is_a_value_error_with_one_line(arguments: dict[str, Any], said: str) -> None:
    async with serving() as server, connecting(server) as conn:
        with pytest.raises(ValueError, match=said) as raised:
            await send_kv(conn, arrays(1, 16), **arguments)
        assert "\n" not in str(raised.value)
        assert (await send_kv(conn, arrays(1, 16), deadline_at=time.monotonic() + 20.0)).confirmed
        assert server.admissions.refused == 0


@pytest.mark.parametrize(
    ("late", "name"),
    [
        ({"order": "fifo"}, "order"),
        ({"wire_dtype": "bf16"}, "wire_dtype"),
        ({"tokens": [1]}, "tokens"),
    ],
)
async def test_what_belongs_to_prepare_is_not_ignored_later(late: dict[str, Any], name: str) -> None:
    async with serving() as server, connecting(server) as conn:
        with pytest.raises(ValueError, match=rf"give {name}= to prepare\(\)"):
            await send_kv(conn, prepared(1, 16), 5.0, **late)


async def test_other_mistakes_name_what_was_expected() -> None:
    with pytest.raises(ValueError, match=r"conn is what `async with quic_pfec\.connect"):
        await send_kv("edge-b", arrays(1, 16), 5.0)  # type: ignore[arg-type]
    async with serving() as server, connecting(server) as conn:
        with pytest.raises(ValueError, match=r"KVReport\.handle"):
            await conn.generate("x", Generate("x"))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"request is a quic_pfec\.Generate"):
            await conn.generate(5, "x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"port": "4433"}, "port is a whole number from 1 to 65535, not '4433'"),
        ({"port": 0}, "port is a whole number from 1 to 65535, not 0"),
        ({"timeout_s": "5"}, r"timeout_s is a number of seconds, such as 10\.0, not '5'"),
        ({"timeout_s": 0}, "above 0"),
        ({"token": 5}, "token is a text of 1 to 256 characters, not 5"),
        ({"token": "x" * 257}, "not 257 of them"),
        ({"client_certificate": "cert.pem"}, r"\(certificate, key\), two file names"),
    ],
)
async def test_settings_of_connect_are_checked_before_a_packet_leaves(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        async with connect("127.0.0.1", **{"port": 9, **wrong}):
            pytest.fail("connected")


async def test_a_deadline_beyond_the_peers_limit_is_refused() -> None:
    async with (
        serving(limits=Limits(max_deadline_us=1_000_000)) as server,
        connecting(server) as conn,
    ):
        with pytest.raises(HandoffRefused, match=r"is [45]\.\d{4} s away; this receiver takes 0\.001 to 1 s") as raised:
            await send_kv(conn, arrays(1, 16), 5.0)
        assert raised.value.code is AppCode.DEADLINE
        assert (await send_kv(conn, arrays(1, 16), 0.9)).confirmed


@pytest.mark.parametrize("extension", [True, False])
@pytest.mark.parametrize("given", ["wrong", "", None])
async def test_wrong_or_missing_token_is_refused_with_the_reason(given: str | None, extension: bool) -> None:
    async with serving(token="right") as server:
        async with connecting(server, token=given, extension=extension) as conn:
            for _ in range(2):
                with pytest.raises(HandoffRefused, match="the token is missing or wrong") as raised:
                    await send_kv(conn, arrays(1, 16), 5.0)
                assert raised.value.code is AppCode.UNAUTHORIZED
                assert not raised.value.busy
                with pytest.raises(HandoffRefused, match="the token is missing or wrong"):
                    await conn.authorise()
            await until(server.idle)
        async with connecting(server, token="right", extension=extension) as conn:
            await conn.authorise()
            assert (await send_kv(conn, arrays(1, 16), 20.0)).confirmed
        assert len(server.received) == 1


async def test_a_server_that_is_not_there_is_a_connection_error() -> None:
    async with serving() as server:
        port = server.port
    with pytest.raises(ConnectionError, match="no answer"):
        async with connecting(port, timeout_s=0.3):
            pass


async def test_generate_on_a_receiver_that_does_not_generate_is_refused() -> None:
    async with serving() as server, connecting(server) as conn:
        report = await send_kv(conn, arrays(1, 16), 20.0, then=Generate("on", 4))
        assert report.confirmed
        with pytest.raises(HandoffRefused, match="does not generate"):
            _ = [part async for part in report.text]
        text = await conn.generate(report.handle, Generate("on", 4))
        with pytest.raises(HandoffRefused, match="does not generate") as raised:
            await text.whole()
        assert raised.value.code is AppCode.UNSUPPORTED


async def test_a_failing_receiver_says_so_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: object) -> None:
        raise OSError("disk full")

    async with serving(on_kv=fail) as server, connecting(server) as conn:
        for _ in range(2):
            report = await send_kv(conn, arrays(1, 16), 20.0)
            assert report.confirmed
            with pytest.raises(HandoffRefused, match="receiver failed"):
                _ = [part async for part in report.text]
        await until(server.idle)
    assert "disk full" in caplog.text


@pytest.mark.parametrize("extension", [True, False])
@pytest.mark.parametrize("wait_s", [0.0, 0.001, 0.02, 0.1, 0.3])
async def test_cancelling_a_hand_off_frees_both_sides(wait_s: float, extension: bool) -> None:
    kv = prepared(8, 256)
    async with serving() as server:
        with relaying(server, rate_bps=4e6) as relay:
            async with connecting(relay.port, rate="4Mbps", extension=extension) as conn:
                task = asyncio.create_task(send_kv(conn, kv, 60.0))
                await asyncio.sleep(wait_s)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert not conn.protocol.quic.senders
                assert not conn.protocol._outgoing
                await until(server.idle)
                assert not server.received
                assert (await send_kv(conn, arrays(1, 16), 20.0)).j_block == 1.0


async def test_a_reader_that_gives_up_frees_the_server() -> None:
    gone = asyncio.Event()

    async def slow(_: object) -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            gone.set()
            raise

    async with serving(on_kv=slow) as server, connecting(server) as conn:
        report = await send_kv(conn, arrays(1, 16), 20.0)
        assert server.admissions.active == 1
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                _ = [part async for part in report.text]
        async with asyncio.timeout(20):
            await gone.wait()
        await until(server.idle)


async def test_the_report_does_not_keep_the_cache_alive() -> None:
    import gc
    import weakref

    async with serving() as server, connecting(server) as conn:
        kv = prepare(arrays(1, 16))
        dead = weakref.ref(kv.send_order)
        report = await send_kv(conn, kv, 20.0)
        del kv
        gc.collect()
        assert dead() is None
        assert report.as_dict()["blocks_total"] == 1
