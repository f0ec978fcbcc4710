"""The self-test passes here, and would not if a hand-off brought something else than was sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from quic_pfec.cli import selftest
from quic_pfec.cli.main import app
from quic_pfec.kv.assemble import Assembler
from quic_pfec.kv.prepared import prepare_arrays
from quic_pfec.kv.received import ReceivedKV
from quic_pfec.report import KVReport, Symbols


@pytest.mark.sockets
@pytest.mark.slow
def test_selftest() -> None:
    result = CliRunner().invoke(app, ["selftest", "--json", "--seed", "3"])
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values["ok"]
    cases = {case["name"]: case for case in values["cases"]}
    assert len(cases) == len(selftest.CASES)
    assert cases["bursts of losses, code only"]["recovered"] > 0
    assert 0 < cases["half the time it needs"]["blocks_complete"] < cases["half the time it needs"]["blocks_total"]
    assert cases["peer without the extension"]["blocks_complete"] == cases["clean link"]["blocks_total"]


@pytest.mark.sockets
def test_a_failed_case_is_said_and_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "CASES", (selftest.Case("impossible", lossy=False, recovers=True),))
    result = CliRunner().invoke(app, ["selftest"])
    assert result.exit_code == 1
    assert "no loss was decoded" in result.stdout
    assert result.stderr == "quic-pfec: 1 of 1 cases failed\n"


def handoff(units: int | None = None) -> tuple[selftest.Cache, KVReport, ReceivedKV]:
    """A whole hand-off without a network; only its first `units` units if that is given."""
    cache = selftest.random_cache(seed=1)
    kv = prepare_arrays(cache, dtype="fp32", wire_dtype="fp32", model="none")  # type: ignore[arg-type]
    assembler = Assembler(kv.layout)
    count = kv.layout.unit_count if units is None else units
    for position in range(count):
        assembler.write_unit(*kv.unit_at(position))
    report = KVReport(
        handle=1,
        confirmed=True,
        extension="on",
        scheduler="hybrid",
        j_block=1.0,
        j_frac=1.0,
        units_complete=count,
        units_partial=0,
        units_missing=kv.layout.unit_count - count,
        units_corrupt=0,
        unit_share=np.ones((4, 16)),
        symbols=Symbols(total=768, recovered=1),
        bytes_sent=0,
        deadline_s=1.0,
        frozen_s=1.0,
        limited_by="nothing",
        started_clock_s=0.0,
        recovered_verified=True,
    )
    received = ReceivedKV(kv.manifest(kv.layout.symbol_size(), "mask"), assembler.finish("mask"), 1, 0.0, 0.0)
    return cache, report, received


def problem(case: selftest.Case, **changes: Any) -> str:
    cache, report, received = handoff()
    return selftest.find_problem(case, cache, replace(report, **changes), received)


def flip_bit(received: ReceivedKV) -> None:
    received.kv.arrays.layers[2][1].view(np.uint32)[1, 77, 5] ^= 1


def call_invalid(received: ReceivedKV) -> None:
    received.kv.row_valid[1][0, 20] = False


def forget_row(received: ReceivedKV) -> None:
    for array in received.kv.arrays.layers[3]:
        array[0, 99] = 0
    received.kv.row_valid[3][0, 99] = False


WHOLE = selftest.Case("whole")


def test_a_right_handoff_has_no_problem() -> None:
    assert problem(WHOLE) == ""
    assert problem(replace(WHOLE, recovers=True)) == ""
    cache, report, received = handoff(units=20)
    assert selftest.find_problem(replace(WHOLE, whole=False), cache, report, received) == ""


@pytest.mark.parametrize(
    ("damage", "said"),
    [(flip_bit, "not sent"), (call_invalid, "nothing came"), (forget_row, "called complete")],
)
def test_wrong_bits_are_found(damage: Callable[[ReceivedKV], None], said: str) -> None:
    cache, report, received = handoff()
    damage(received)
    assert said in selftest.find_problem(WHOLE, cache, report, received)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"confirmed": False}, "no report"),
        ({"extension": "off"}, "extension was off"),
        ({"units_corrupt": 3}, "3 blocks"),
        ({"recovered_verified": False}, "recovered symbol"),
        ({"units_complete": 63}, "count different"),
    ],
)
def test_a_report_that_does_not_fit_is_found(changes: dict[str, Any], said: str) -> None:
    assert said in problem(WHOLE, **changes)


def test_what_a_case_asks_for_is_checked() -> None:
    cache, report, received = handoff(units=20)
    assert "did not come" in selftest.find_problem(WHOLE, cache, report, received)
    assert "all or nothing" in problem(replace(WHOLE, whole=False))
    assert "no loss" in problem(replace(WHOLE, recovers=True), symbols=Symbols(total=768))
