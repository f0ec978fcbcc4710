"""Coefficients: the vectors of the wire format, native against plain Python, hostile headers, uniformity."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec import _codec
from quic_pfec.fec import coefficients
from tests.codec_world import header, random_header

both = pytest.mark.parametrize("expand", [_codec.expand, coefficients.expand], ids=["native", "twin"])
Expand = Callable[..., list[tuple[int, int]]]


def parsed(text: str) -> list[tuple[int, int]]:
    return [(int(sid), int(c)) for sid, c in (term.split(":") for term in text.split())]


@both
def test_vectors_of_the_wire_format(expand: Expand) -> None:
    """Section 5, the three normative vectors."""
    assert expand(0, 0, 0, 4, 0, b"", 0, 8) == parsed("0:28 2:84 4:45 7:197")
    assert expand(0, 1, 40, 3, 5, bytes([0b10111]), 0, 0) == parsed("41:114 42:114 44:195")
    third = header(7, [1000, 1003, 1004, 1018], range(1120, 1298), 6, transfer=4)
    assert third[4:5] + third[6:] == (19, 101, 178)
    assert expand(*third) == parsed("1000:112 1003:139 1004:22 1018:71 1132:33 1151:144")


def test_splitmix64_of_zero() -> None:
    """First outputs for state 0, as published with the generator."""
    outputs = coefficients.splitmix64(0)
    assert [next(outputs) for _ in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@settings(deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    number=st.integers(0, 2**32 - 1),
    transfer=st.integers(0, 2**62 - 1),
    low=st.integers(0, 2**30 - 700),
    span=st.integers(1, 700),
    degree=st.one_of(st.integers(1, 60), st.integers(1, 2**32)),
)
def test_native_equals_twin(seed: int, number: int, transfer: int, low: int, span: int, degree: int) -> None:
    drawn = random_header(random.Random(seed), number, low, low + span, degree)
    h = (transfer, *drawn[1:])
    terms = _codec.expand(*h)
    assert terms == coefficients.expand(*h)
    sids = [sid for sid, _ in terms]
    first, head_span, head, offset, tail_span = h[2], h[4], h[5], h[6], h[7]
    head_sids = {first + i for i in range(head_span) if head[i // 8] >> i % 8 & 1}
    tail = range(first + head_span + offset, first + head_span + offset + tail_span)
    assert sids == sorted(set(sids))
    assert len(sids) == min(degree, len(head_sids) + tail_span)
    assert set(sids) <= head_sids | set(tail)
    assert len(head_sids) >= degree or head_sids <= set(sids), "the head is coded whole before the tail is sampled"
    assert all(1 <= c <= 255 for _, c in terms)


LEGAL = {
    "transfer_id": 4,
    "repair_number": 7,
    "first_sid": 100,
    "degree": 4,
    "head_span": 5,
    "head": b"\x15",
    "tail_offset": 2,
    "tail_span": 9,
}
HOSTILE = {
    "negative": {"first_sid": -1},
    "negative span": {"tail_span": -9},
    "huge transfer": {"transfer_id": 2**62},
    "huge repair number": {"repair_number": 2**32},
    "degree 0": {"degree": 0},
    "degree no varint can carry": {"degree": 2**62},
    "beyond 64 bits": {"degree": 2**64},
    "head span": {"head_span": 2**62},
    "tail offset": {"tail_offset": 2**62},
    "tail span": {"tail_span": 2**62},
    "spans that add up to 2^64": {"tail_offset": 2**63, "tail_span": 2**63},
    "sum above the cap": {"tail_offset": 8190, "tail_span": 8190},
    "first sid": {"first_sid": 2**62},
    "last sid": {"first_sid": 2**30 - 15},
    "empty set": {"head_span": 0, "head": b"", "tail_offset": 0, "tail_span": 0},
    "offset without head": {"head_span": 0, "head": b""},
    "offset without tail": {"tail_span": 0},
    "head too short": {"head": b""},
    "head too long": {"head": b"\x15\x00"},
    "first bit clear": {"head": b"\x14"},
    "last bit clear": {"head": b"\x05"},
    "unused bit set": {"head": b"\x35"},
}


@both
def test_a_legal_header(expand: Expand) -> None:
    assert len(expand(**LEGAL)) == 4
    assert len(expand(**LEGAL | {"first_sid": 2**30 - 16})) == 4


@both
@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_headers(expand: Expand, change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        expand(**LEGAL | change)


def test_sids_and_coefficients_are_uniform() -> None:
    """Chi-square over 20,000 repairs; each bound is five standard deviations above the mean. Seed: transfer 3."""
    sids = [0] * 178
    values = [0] * 256
    for number in range(20_000):
        for sid, c in _codec.expand(3, number, 0, 12, 0, b"", 0, 178):
            sids[sid] += 1
            values[c] += 1
    total = sum(sids)
    assert values[0] == 0
    assert sum((n - total / 178) ** 2 for n in sids) / (total / 178) < 177 + 5 * (2 * 177) ** 0.5
    assert sum((n - total / 255) ** 2 for n in values[1:]) / (total / 255) < 254 + 5 * (2 * 254) ** 0.5
