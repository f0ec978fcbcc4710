"""Rates as people write them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from quic_pfec.quantities import parse_rate
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
