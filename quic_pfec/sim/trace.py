"""Files of measured losses, read into one bit a packet.

Traces come as captures, spreadsheets and strings of digits, each with its own columns. One loader turns them into what
`channel.TraceChannel` replays, and refuses what it cannot read by file and line: a trace misread silently is a
different channel.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_TRACE_PACKETS", "TraceColumns", "load_trace"]

Bits = npt.NDArray[np.bool_]

MAX_TRACE_PACKETS = 100_000_000
"""Packets a sequence column may span: hours of the fastest published trace. One that spans more counts something
else."""


@dataclass(frozen=True, slots=True)
class TraceColumns:
    """Where a CSV says which packets were lost: exactly one of three columns, by header name or by position.

    - `lost`: 1 or true = lost (the layout of quic-trace exports: `t_us,size_bytes,lost`).
    - `arrival`: the time of arrival; empty, nan or negative = lost. One row a packet sent.
    - `sequence`: the numbers of the packets that arrived, in any order; what is missing between the smallest and the
      largest was lost. One row a packet received, as captures at a receiver have it (the 5G campus measurements, IEEE
      DataPort 10.21227/xe3c-e968, come as captures: name their columns here).

    A column given as a position (0-based) means that the file has no header line.
    """

    lost: str | int | None = "lost"
    arrival: str | int | None = None
    sequence: str | int | None = None
    delimiter: str = ","

    def __post_init__(self) -> None:
        if sum(column is not None for column in (self.lost, self.arrival, self.sequence)) != 1:
            raise ValueError("name exactly one of the columns lost, arrival and sequence")

    @property
    def column(self) -> str | int:
        """The one column that was named."""
        named = next(c for c in (self.lost, self.arrival, self.sequence) if c is not None)
        return named


def load_trace(path: str | Path, columns: TraceColumns | None = None, *, skip_packets: int = 0) -> Bits:
    """The losses of a measured trace, bool[packets], True = lost.

    Reads a text file of '0' and '1' (white space and lines starting with '#' ignored), or a CSV laid out as `columns`
    says; given none, a file whose first line holds anything but '0' and '1' is taken for a CSV with a `lost` column.
    `skip_packets` leaves out the part used for calibration, so that it is never replayed. Raises ValueError, naming
    file and line, for anything else.
    """
    with open(path, newline="", encoding="utf-8") as file:
        if columns is None and _is_bit_text(file):
            bits = _read_bit_text(file, path)
        else:
            bits = _read_csv(file, path, columns or TraceColumns())
    if len(bits) <= skip_packets:
        raise ValueError(f"{path}: {len(bits)} packets, nothing left after skipping {skip_packets}")
    return bits[skip_packets:]


def _is_bit_text(file: TextIO) -> bool:
    first = next((line for line in file if line.strip() and not line.startswith("#")), "")
    file.seek(0)
    return not first.strip("01 \t\r\n")


def _read_bit_text(file: TextIO, path: str | Path) -> Bits:
    digits = []
    for number, line in enumerate(file, 1):
        if line.startswith("#"):
            continue
        row = "".join(line.split())
        if row.strip("01"):
            raise ValueError(f"{path}, line {number}: a bit trace holds only 0 and 1")
        digits.append(row)
    bits: Bits = np.frombuffer("".join(digits).encode(), dtype=np.uint8) == ord("1")
    return bits


def _read_csv(file: TextIO, path: str | Path, columns: TraceColumns) -> Bits:
    values = _csv_column(file, path, columns)
    if columns.sequence is not None:
        return _missing_numbers(values, path)
    read = _lost_value if columns.lost is not None else _no_arrival
    bits = []
    for number, value in values:
        try:
            bits.append(read(value))
        except ValueError:
            raise ValueError(f"{path}, line {number}: cannot read {value!r} in column {columns.column!r}") from None
    return np.array(bits, dtype=np.bool_)


def _csv_column(file: TextIO, path: str | Path, columns: TraceColumns) -> Iterator[tuple[int, str]]:
    """(line number, text) of the named column, row by row."""
    rows = csv.reader(file, delimiter=columns.delimiter)
    column = columns.column
    if isinstance(column, int):
        index = column
    else:
        header = [name.strip() for name in next(rows, [])]
        if column not in header:
            raise ValueError(f"{path}: no column {column!r} among {', '.join(header) or 'none'}")
        index = header.index(column)
    for row in rows:
        if not row:
            continue
        if not 0 <= index < len(row):
            raise ValueError(f"{path}, line {rows.line_num}: no column {column!r}")
        yield rows.line_num, row[index].strip()


def _lost_value(text: str) -> bool:
    words = {"0": False, "false": False, "1": True, "true": True}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


def _no_arrival(text: str) -> bool:
    if not text:
        return True
    # Written so that nan, which compares as neither, counts as lost.
    return not float(text) >= 0.0


def _missing_numbers(values: Iterator[tuple[int, str]], path: str | Path) -> Bits:
    seen = []
    for number, value in values:
        try:
            seen.append(int(value))
        except ValueError:
            raise ValueError(f"{path}, line {number}: {value!r} is not a sequence number") from None
    if not seen:
        return np.zeros(0, dtype=np.bool_)
    first, span = min(seen), max(seen) - min(seen) + 1
    if span > MAX_TRACE_PACKETS:
        raise ValueError(f"{path}: sequence numbers span {span} packets, more than {MAX_TRACE_PACKETS}")
    bits = np.ones(span, dtype=np.bool_)
    bits[np.array(seen, dtype=np.int64) - first] = False
    return bits
