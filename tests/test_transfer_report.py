"""The two measures by hand, and the bitmaps that carry them."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from quic_pfec.transfer.report import DIGEST_MASK, bits, outcome, symbols_digest, to_bitmap

UNIT_OF_SID = np.array([0, 0, 1, 1, 1, 1, 2, 2, 3], dtype=np.int32)
UTILITY = np.array([4.0, 3.0, 2.0, 1.0])


def flags(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.array(numbers, dtype=np.bool_)


def test_by_hand() -> None:
    known = flags(1, 1, 1, 0, 1, 1, 0, 0, 1)
    result = outcome(known, flags(1, 0, 0, 1), UNIT_OF_SID, UTILITY)
    assert result.j_block == pytest.approx((4 + 1) / 10)
    assert result.j_frac == pytest.approx((4 + 3 * 3 / 4 + 0 + 1) / 10)
    assert (result.units_complete, result.units_partial, result.units_missing) == (2, 1, 1)
    assert result.unit_share.tolist() == [1, 0.75, 0, 1]


def test_everything_and_nothing() -> None:
    whole = outcome(np.ones(9, dtype=np.bool_), flags(1, 1, 1, 1), UNIT_OF_SID, UTILITY)
    assert (whole.j_block, whole.j_frac, whole.units_complete) == (1, 1, 4)
    nothing = outcome(np.zeros(9, dtype=np.bool_), flags(0, 0, 0, 0), UNIT_OF_SID, UTILITY)
    assert (nothing.j_block, nothing.j_frac, nothing.units_missing) == (0, 0, 4)


def test_a_unit_that_failed_its_digest_is_of_no_use() -> None:
    result = outcome(np.ones(9, dtype=np.bool_), flags(1, 0, 1, 1), UNIT_OF_SID, UTILITY)
    assert result.j_block == result.j_frac == pytest.approx(0.7)
    assert (result.units_partial, result.units_missing) == (0, 1)


def test_a_bitmap_may_be_longer_than_the_transfer() -> None:
    known = np.ones(4096, dtype=np.bool_)  # the receiver's room, not the transfer's size
    assert outcome(known, flags(1, 1, 1, 1), UNIT_OF_SID, UTILITY).j_block == 1


def test_utility_of_zero() -> None:
    result = outcome(np.ones(9, dtype=np.bool_), flags(1, 1, 1, 1), UNIT_OF_SID, np.zeros(4))
    assert (result.j_block, result.j_frac) == (0, 0)


def test_a_digest_of_symbols() -> None:
    symbols = {sid: memoryview(bytes([sid]) * 64) for sid in range(5)}
    whole = symbols_digest(range(5), symbols.__getitem__)
    assert whole == xxhash.xxh3_64_intdigest(b"".join(symbols.values())) & DIGEST_MASK
    assert 0 <= whole < 1 << 62
    assert symbols_digest([0, 1, 2, 4, 3], symbols.__getitem__) != whole
    assert symbols_digest(range(4), symbols.__getitem__) != whole


def test_bits_by_hand() -> None:
    assert bits(b"\x05\x80", 16).nonzero()[0].tolist() == [0, 2, 15]
    assert bits(b"\x05\x80", 3).tolist() == [True, False, True]
    assert bits(b"\x01", 10).tolist() == [True] + [False] * 9
    assert bits(b"", 2).tolist() == [False, False]
    assert to_bitmap(flags(1, 0, 1)) == b"\x05"


@given(st.lists(st.booleans(), max_size=100))
def test_bits_round_trip(values: list[bool]) -> None:
    assert bits(to_bitmap(flags(*values)), len(values)).tolist() == values
