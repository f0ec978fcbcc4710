"""Reports: lateness counted in the right bucket, void runs named, JSON without loss."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from quic_pfec.link.options import RelayOptions
from quic_pfec.link.report import LATENESS_BOUNDS_S, DirectionReport, Lateness, RelayReport
from quic_pfec.sim.channel import PRESETS
from quic_pfec.sim.link import LinkStats, SlotLog

QUIET = DirectionReport(LinkStats(), Lateness(), sent=0, ring_drops=0, write_errors=0, orphaned=0, in_flight=0)


def report(
    forward: DirectionReport = QUIET, backward: DirectionReport = QUIET, log: SlotLog | None = None
) -> RelayReport:
    options = RelayOptions(("127.0.0.1", 4433), loss=PRESETS["paper"], seed=3)
    return RelayReport(options, 576e-6, forward, backward, log, 1, 0, real_time=False, kernel_stamps=True)


def late(*seconds: float) -> Lateness:
    lateness = Lateness()
    for value in seconds:
        lateness.add(value)
    return lateness


def test_lateness_buckets() -> None:
    lateness = late(0.0, 9e-6, 11e-6, 60e-6, 200e-6, 0.9e-3, 2e-3, 6e-3, 1.0)
    assert lateness.counts == [2, 1, 1, 1, 1, 1, 2]
    assert sum(lateness.counts) == 9
    assert lateness.largest_s == 1.0
    assert lateness.mean_s == pytest.approx((9e-6 + 11e-6 + 60e-6 + 200e-6 + 0.9e-3 + 2e-3 + 6e-3 + 1.0) / 9)
    assert lateness.share_above(1e-3) == pytest.approx(3 / 9)
    assert lateness.share_above(5e-3) == pytest.approx(2 / 9)


def test_no_datagram_no_lateness() -> None:
    assert Lateness().mean_s == 0
    assert Lateness().share_above(LATENESS_BOUNDS_S[0]) == 0


def test_a_quiet_run_counts() -> None:
    assert report().void_reasons(paced=True) == []


def test_lateness_voids_by_its_99th_percentile() -> None:
    on_time = [0.0] * 99
    assert report(replace(QUIET, lateness=late(*on_time, 2e-3))).void_reasons() == []
    assert "lateness" in report(replace(QUIET, lateness=late(*on_time, 2e-3, 2e-3))).void_reasons()[0]


@pytest.mark.parametrize(("change", "word"), [({"ring_drops": 1}, "1 ring"), ({"write_errors": 2}, "2 write")])
def test_losses_of_the_relay_void(change: dict[str, int], word: str) -> None:
    (reason,) = report(backward=replace(QUIET, **change)).void_reasons()
    assert reason.startswith("backward")
    assert word in reason


def test_queue_drops_void_only_paced_runs() -> None:
    dropped = report(replace(QUIET, link=LinkStats(packets=5, queue_drops=5)))
    assert dropped.void_reasons() == []
    assert len(dropped.void_reasons(paced=True)) == 1


@pytest.mark.parametrize("slot_s", [576e-6, None])
def test_json_round_trip(slot_s: float | None) -> None:
    log = SlotLog(12.25, slot_s, 20, np.arange(20) % 3 == 0, np.arange(20) % 2 == 0)
    forward = replace(QUIET, link=LinkStats(packets=3, delivered=2, lost=1), lateness=late(1e-5, 2e-3), sent=2)
    before = report(forward, log=log)
    if slot_s is None:
        before = replace(before, options=replace(before.options, clock="packet"))
    values = json.loads(json.dumps(before.to_json()))
    after = RelayReport.from_json(values)
    assert (after.forward, after.backward) == (before.forward, before.backward)
    assert after.log is not None
    assert (after.log.slot_s, after.epoch_clock_s, after.slot_s) == (slot_s, 12.25, 576e-6)
    assert after.log.lost.tolist() == log.lost.tolist()
    assert after.options.to_json() == before.options.to_json()
    assert json.loads(json.dumps(after.to_json())) == values


def test_json_before_the_first_epoch() -> None:
    after = RelayReport.from_json(json.loads(json.dumps(report().to_json())))
    assert (after.log, after.epoch_clock_s) == (None, None)
