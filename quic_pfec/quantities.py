"""Quantities as people write them, checked in one place: a rate, a time, a count. Each error is one line that says what
is expected and what came."""

from __future__ import annotations

import math
import re
from numbers import Integral, Real

from quic_pfec.wire.errors import LocalError

MIN_RATE_BPS, MAX_RATE_BPS = 1e4, 1e12

_RATE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:bit/s|bits/s|bps|b/s|bit)?\s*", re.IGNORECASE)
_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_rate(rate: str | float) -> float:
    """A rate in bit/s from a number of bit/s or a text such as "50Mbps", "1.5 Gbit/s", "800 kb/s", "20M".

    Prefixes are powers of 1,000. Raises `LocalError` for anything else, for bytes per second, and outside 10 kbit/s ..
    1 Tbit/s.
    """
    if isinstance(rate, str):
        match = _RATE.fullmatch(rate)
        if match is None or "B/s" in rate or "Bps" in rate:
            raise LocalError(f"rate {rate!r}: write bits per second with a unit, such as '50Mbps' or '1.5 Gbit/s'")
        value = float(match[1]) * _PREFIX[match[2].lower()]
    elif isinstance(rate, bool) or not isinstance(rate, (int, float)):
        raise LocalError(f"rate must be a number of bit/s or a text such as '50Mbps', not {type(rate).__name__}")
    else:
        value = float(rate)
    if not (math.isfinite(value) and MIN_RATE_BPS <= value <= MAX_RATE_BPS):
        raise LocalError(f"rate {rate!r} is outside 10 kbit/s .. 1 Tbit/s")
    return value


def number(name: str, value: object, meaning: str) -> float:
    """A finite number as float. `meaning` says what of: "a number of seconds, such as 2.0". Raises `LocalError`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise LocalError(f"{name} is {meaning}, not {described(value)}")
    return float(value)


def integer(name: str, value: object, low: int, high: int, meaning: str = "a whole number") -> int:
    """A whole number of low..high. Raises `LocalError`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise LocalError(f"{name} is {meaning} from {low} to {high}, not {described(value)}")
    return int(value)


def described(value: object) -> str:
    """A short value as it was written, and the kind of any other: a cache does not belong into a message."""
    if value is None or (isinstance(value, bool | int | float | str) and len(repr(value)) <= 60):
        return repr(value)
    return f"{'an' if type(value).__name__[0].lower() in 'aeiou' else 'a'} {type(value).__name__}"
