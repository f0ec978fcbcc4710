"""Rates, times and counts as people write them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from quic_pfec.quantities import described, integer, number, parse_rate
from quic_pfec.wire.errors import LocalError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("50Mbps", 50e6),
        ("1.5 Gbit/s", 1.5e9),
        ("800 kb/s", 800e3),
        ("  20000 bit/s ", 2e4),
        ("20M", 20e6),
        ("20000000", 20e6),
        ("500KBPS", 500e3),
        (2e7, 2e7),
        (100_000, 1e5),
    ],
)
def test_rates(text: Any, value: float) -> None:
    assert parse_rate(text) == pytest.approx(value)


@pytest.mark.parametrize(
    "text",
    [
        *("", "50", "0", "50 MB/s", "50MBps", "fast", "-1Mbps", "1e9bps", "20 M b", "2Tbps"),
        *(0, 1.0, math.nan, math.inf, True, None),
    ],
)
def test_bad_rates_are_refused(text: Any) -> None:
    with pytest.raises(LocalError, match="rate"):
        parse_rate(text)


def test_numbers_of_every_library_pass() -> None:
    assert [number("deadline", value, "seconds") for value in (2, 2.0, np.float32(2), np.int64(2))] == [2.0] * 4
    assert [integer("port", value, 0, 9) for value in (4, np.int32(4))] == [4, 4]


@pytest.mark.parametrize("value", ["1", True, None, math.nan, math.inf, [1.0], 1j, np.zeros(2)])
def test_what_is_no_number_is_named(value: Any) -> None:
    with pytest.raises(LocalError, match=r"^deadline is a number of seconds, such as 2\.0, not ") as error:
        number("deadline", value, "a number of seconds, such as 2.0")
    assert described(value) in str(error.value)


@pytest.mark.parametrize("value", ["4", True, None, 1.0, -1, 10])
def test_counts_say_their_range(value: Any) -> None:
    with pytest.raises(LocalError, match=r"^port is a whole number from 0 to 9, not "):
        integer("port", value, 0, 9)


def test_a_long_value_is_named_by_its_kind() -> None:
    assert described("1") == "'1'"
    assert described("x" * 100) == "a str"
    assert described(np.zeros(9)) == "a ndarray"
    assert described([1] * 9) == "a list"
