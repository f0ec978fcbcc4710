"""Reports of the bottleneck: quantiles out of buckets, void runs named, JSON without loss."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from quic_pfec.link.report import LATENESS_BOUNDS_S
from quic_pfec.link.tun_options import TunOptions
from quic_pfec.link.tun_report import (
    BUCKETS,
    COARSE_BUCKETS,
    LATENESS_UNIT_S,
    Distribution,
    Histogram,
    TunDirection,
    TunReport,
)
from quic_pfec.sim.channel import PRESETS

NOTHING = Histogram(LATENESS_UNIT_S).distribution()
QUIET = TunDirection(*[0] * 20, lateness=NOTHING, queue_delay=NOTHING)
OPTIONS = TunOptions(loss=PRESETS["paper"], seed=2)


def report(
    forward: TunDirection = QUIET, backward: TunDirection = QUIET, drops: int = 0, paced: bool = False
) -> TunReport:
    options = replace(OPTIONS, paced=paced)
    return TunReport(options, "c", 20.0, 4.0, 0.5, True, True, 16.0, forward, backward, drops)


def distribution(*times_s: float) -> Distribution:
    histogram = Histogram(LATENESS_UNIT_S)
    for time_s in times_s:
        histogram.add(time_s)
    return histogram.distribution()


def test_coarse_borders_are_those_of_the_relay() -> None:
    assert [bucket * LATENESS_UNIT_S for bucket in COARSE_BUCKETS[1:]] == pytest.approx(LATENESS_BOUNDS_S)


def test_distribution() -> None:
    times_s = np.random.default_rng(1).exponential(2e-4, 5_000)
    found = distribution(*times_s)
    assert found.count == 5_000
    assert found.mean_s == pytest.approx(times_s.mean())
    assert found.largest_s == times_s.max()
    for quantile, value in ((0.5, found.p50_s), (0.99, found.p99_s)):
        assert value == pytest.approx(float(np.quantile(times_s, quantile)), abs=2 * LATENESS_UNIT_S)
    borders = [0.0, *LATENESS_BOUNDS_S, np.inf]
    assert found.counts == np.histogram(times_s, borders)[0].tolist()


def test_extremes() -> None:
    assert NOTHING.mean_s == NOTHING.p99_s == NOTHING.count == 0
    assert distribution(-1.0).counts[0] == 1
    far = distribution(1e-6, 99.0)
    assert (far.p50_s, far.p99_s) == (pytest.approx(2e-6), 99.0)
    assert far.counts[-1] == 1
    assert distribution(BUCKETS * LATENESS_UNIT_S * 0.999).p99_s < BUCKETS * LATENESS_UNIT_S


def test_a_quiet_run_counts() -> None:
    assert report(paced=True).void_reasons() == []


def test_lateness_voids_by_its_99th_percentile() -> None:
    on_time = [0.0] * 99
    assert report(replace(QUIET, lateness=distribution(*on_time, 2e-3))).void_reasons() == []
    (reason,) = report(backward=replace(QUIET, lateness=distribution(*on_time, 2e-3, 2e-3))).void_reasons()
    assert reason.startswith("backward: lateness p99 2.0 ms")


@pytest.mark.parametrize(("change", "word"), [({"ring_drops": 1}, "1 ring"), ({"write_errors": 2}, "2 write")])
def test_losses_of_the_emulator_void(change: dict[str, int], word: str) -> None:
    (reason,) = report(replace(QUIET, **change)).void_reasons()
    assert reason.startswith("forward")
    assert word in reason


def test_queue_drops_void_only_paced_runs() -> None:
    side = replace(QUIET, packets=5, queue_drops=5)
    assert report(side).void_reasons() == []
    assert len(report(side, paced=True).void_reasons()) == 1


def test_drops_before_the_emulator_void() -> None:
    assert report(drops=4).void_reasons() == ["4 packets dropped before the emulator read them"]


def test_rates_and_shares() -> None:
    side = replace(QUIET, packets=100, bytes=100_000, queue_drops=10, lost=9, delivered=81, sent=81, sent_bytes=81_000)
    values = report(side).to_json()["forward"]
    assert (values["offered_bps"], values["sent_bps"]) == (200_000, 162_000)
    assert values["loss_share"] == 0.1
    assert side.to_json(0.0)["sent_bps"] == 0.0


def test_json_round_trip() -> None:
    before = report(replace(QUIET, packets=3, lateness=distribution(1e-5, 2e-3)), drops=1)
    values = json.loads(json.dumps(before.to_json()))
    after = TunReport.from_json(values)
    assert (after.forward, after.backward, after.device_drops) == (before.forward, before.backward, 1)
    assert after.to_json() == before.to_json()
