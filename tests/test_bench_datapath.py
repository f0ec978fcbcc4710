"""The data-path bench: its arithmetic, and a small run of real processes in which every packet is delivered."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.datapath import Row, figures_of, rows, summary
from bench.datapath_bare import CYCLE, DATAGRAM, Frames, lateness_ms
from bench.datapath_meter import percentile
from quic_pfec.fec.codec import Encoder
from quic_pfec.wire.frames import FRAME_TYPE_SIZE, REPAIR, parse_repair, parse_source
from quic_pfec.wire.limits import Limits


@pytest.mark.parametrize("repairs", [0.0, 0.1, 0.5])
def test_the_cycle_holds_the_share_of_repairs_and_every_frame_is_a_real_one(repairs: float) -> None:
    frames = Frames(repairs, seed=7)
    assert sum(frame.frame_type == REPAIR for frame in frames.cycle) == pytest.approx(repairs * CYCLE, abs=1)
    out = bytearray(2048)
    for index, frame in enumerate(frames.cycle[:120]):
        length = frames.write(index + CYCLE, out, 10)
        data = memoryview(out)[10 + FRAME_TYPE_SIZE : 10 + length]
        if frame.frame_type == REPAIR:
            repair, used = parse_repair(data, 0, Limits())
            assert repair.symbol == frames.encoder.repair(*(frame.header or ()))
        else:
            source, used = parse_source(data, 0, Limits())
            assert source.symbol == frames.encoder.symbol(source.sid)
        assert used == len(data)
    assert isinstance(frames.encoder, Encoder)
    assert frames.wire_bytes > DATAGRAM + 28


def test_lateness_is_behind_the_even_stream_that_nobody_was_ahead_of() -> None:
    even = [(5.0 + n / 1000, n + 1) for n in range(100)]
    assert lateness_ms(even, 1000) == pytest.approx([0.0] * 100, abs=1e-6)
    bursts = [(5.0 + n / 1000, n + 10) for n in range(0, 100, 10)]
    assert lateness_ms(bursts, 1000) == pytest.approx(sorted(list(range(10)) * 10), abs=1e-6)
    late = lateness_ms([*even, (5.5, 101)], 1000)
    assert late[-1] == pytest.approx(400.0)
    assert percentile(late, 0.5) == pytest.approx(0.0, abs=1e-6)
    assert percentile(late, 1.0) == late[-1]


def test_each_end_divides_by_its_own_packets() -> None:
    sent = {"packets": 100.0, "cpu_s": 1e-3, "wall_s": 0.01}
    found = figures_of(sent, {"packets": 40.0, "seen": 50.0, "cpu_s": 4e-4, "wall_s": 0.02})
    assert found["tx_us_per_packet"] == pytest.approx(10.0)
    assert found["rx_us_per_packet"] == pytest.approx(10.0)
    assert found["pps"] == pytest.approx(2000.0)
    assert found["received_share"] == 0.5
    assert found["core_share"] == pytest.approx(0.14)


def test_figures_are_of_the_rows_that_ran() -> None:
    assert summary({}) == {}
    stock = {"tx_us_per_packet": 60.0, "rx_us_per_packet": 90.0, "pps": 5000.0}
    fast = {"tx_us_per_packet": 6.0, "rx_us_per_packet": 9.0, "pps": 80_000.0}
    figures = summary({"datagram": stock, "fast-10": fast})
    assert figures["tx_speedup_over_stock"] == figures["rx_speedup_over_stock"] == 10.0
    assert figures["unpaced_pps"] == 80_000.0
    assert not any(name.startswith(("paced", "handoff")) for name in figures)


def test_a_row_whose_peer_is_not_there_says_so() -> None:
    (one, *_) = rows("", "")
    assert one.lacks() == ""
    assert Row("x", one.receive, one.send, needs=("no_such_module",)).lacks() == "no_such_module is not installed"


@pytest.mark.sockets
@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    out, picture = tmp_path / "datapath.json", tmp_path / "datapath.png"
    wanted = ["datagram", "slow", "fast-10", "paced", "handoff-fast"]
    command = [sys.executable, "-m", "bench.datapath", "--packets", "500", "--tokens", "256", "--rounds", "1"]
    command += ["--rate", "100Mbps", "--rows", *wanted, "--json", str(out), "--picture", str(picture)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    figures = json.loads(out.read_text())
    assert set(figures["rows"]) == set(wanted)
    assert figures["absent"] == {}
    measured = {name: rounds[0] for name, rounds in figures["rows"].items()}
    for name in ("slow", "fast-10", "paced"):
        assert measured[name]["received_share"] == 1.0
    assert measured["handoff-fast"]["j_block"] == 1.0
    assert measured["fast-10"]["tx_us_per_packet"] < measured["slow"]["tx_us_per_packet"] / 1.5
    wanted = ["tx_speedup_over_stock", "rx_speedup_over_stock", "unpaced_pps", "paced_pps", "paced_p50_late_ms"]
    wanted += ["paced_p99_late_ms", "paced_core_share", "handoff_tx_us_per_packet", "handoff_mbit_s"]
    assert set(wanted) <= set(figures)
    assert figures["settings"]["seed"] == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
