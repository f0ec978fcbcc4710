"""Trace files: each layout read, each misreading refused by file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from quic_pfec.sim.trace import MAX_TRACE_PACKETS, TraceColumns, load_trace


@pytest.fixture
def trace(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "trace"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def bits(array: object) -> str:
    return "".join("01"[int(bit)] for bit in array)  # type: ignore[attr-defined]


def test_digits(trace) -> None:
    assert bits(load_trace(trace("# measured on a roof\n0010 1\n\n11\n"))) == "0010111"


def test_lost_column(trace) -> None:
    assert bits(load_trace(trace("t_us,size_bytes,lost\n0,1350,0\n0,1350,1\n9,40,True\n\n12,1350,false\n"))) == "0110"


def test_arrival_column(trace) -> None:
    path = trace("seq;sent;received\n1;0.0;0.02\n2;0.1;\n3;0.2;nan\n4;0.3;-1\n5;0.4;0\n")
    assert bits(load_trace(path, TraceColumns(lost=None, arrival="received", delimiter=";"))) == "01110"


def test_sequence_column(trace) -> None:
    path = trace("time,id\n0.1,17\n0.2,18\n0.3,21\n0.3,20\n0.4,20\n0.5,24\n")
    assert bits(load_trace(path, TraceColumns(lost=None, sequence="id"))) == "00100110"


def test_position_instead_of_header(trace) -> None:
    path = trace("7,0\n8,1\n9,0\n")
    assert bits(load_trace(path, TraceColumns(lost=1))) == "010"
    assert bits(load_trace(path, TraceColumns(lost=None, sequence=0))) == "000"


def test_skips_the_calibration_part(trace) -> None:
    assert bits(load_trace(trace("00111"), skip_packets=3)) == "11"
    with pytest.raises(ValueError, match="nothing left"):
        load_trace(trace("00111"), skip_packets=5)


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        ("", None, "nothing left"),
        ("0010\n0012\n", None, "line 2"),
        ("t_us,size\n0,1\n", None, "no column 'lost' among t_us, size"),
        ("t_us,lost\n0,0\n1,2\n", None, "line 3: cannot read '2'"),
        ("t_us,lost\n0,0\n1\n", None, "line 3: no column"),
        ("0,1\n", TraceColumns(lost=2), "line 1: no column 2"),
        ("id\n1\nx\n", TraceColumns(lost=None, sequence="id"), "line 3: 'x' is not a sequence number"),
        ("id\n", TraceColumns(lost=None, sequence="id"), "nothing left"),
        (f"id\n0\n{MAX_TRACE_PACKETS}\n", TraceColumns(lost=None, sequence="id"), "span"),
        ("a\nlate\n", TraceColumns(lost=None, arrival="a"), "line 2: cannot read 'late'"),
    ],
)
def test_refuses(trace, text: str, columns: TraceColumns | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_trace(trace(text), columns)


@pytest.mark.parametrize("named", [{"lost": None}, {"arrival": "a"}, {"lost": None, "arrival": "a", "sequence": "s"}])
def test_exactly_one_column_is_named(named: dict[str, str | None]) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        TraceColumns(**named)
