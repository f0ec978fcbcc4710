"""QUIC varints: the vectors of RFC 9000 and the edges of each width."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.wire import varint
from quic_pfec.wire.errors import ErrorCode, LocalError, PeerError

VALUES = st.integers(0, varint.MAX) | st.sampled_from([0, 63, 64, 16383, 16384, (1 << 30) - 1, 1 << 30, varint.MAX])


@pytest.mark.parametrize(
    ("encoded", "value"),
    [
        ("c2197c5eff14e88c", 151_288_809_941_952_652),
        ("9d7f3e7d", 494_878_333),
        ("7bbd", 15_293),
        ("25", 37),
        ("4025", 37),
    ],
)
def test_vectors_of_rfc_9000_appendix_a1(encoded: str, value: int) -> None:
    data = bytes.fromhex(encoded)
    assert varint.decode(data, 0) == (value, len(data))
    assert varint.encode_fixed(value, len(data)) == data


@settings(deadline=None, max_examples=200)
@given(VALUES, st.binary(max_size=4), st.binary(max_size=4))
def test_round_trip(value: int, before: bytes, after: bytes) -> None:
    encoded = varint.encode(value)
    assert len(encoded) == varint.size(value)
    for data in (before + encoded + after, memoryview(before + encoded + after)):
        assert varint.decode(data, len(before)) == (value, len(before) + len(encoded))


@settings(deadline=None, max_examples=200)
@given(VALUES, st.sampled_from([1, 2, 4, 8]))
def test_fixed_width(value: int, length: int) -> None:
    if varint.size(value) > length:
        with pytest.raises(LocalError):
            varint.encode_fixed(value, length)
    else:
        encoded = varint.encode_fixed(value, length)
        assert varint.decode(encoded, 0) == (value, length)
        assert len(encoded) == length


@pytest.mark.parametrize(("edge", "length"), [(63, 1), (16_383, 2), ((1 << 30) - 1, 4), (varint.MAX, 8)])
def test_widths_change_at_the_edges(edge: int, length: int) -> None:
    assert varint.size(edge) == length
    if edge < varint.MAX:
        assert varint.size(edge + 1) == 2 * length


@pytest.mark.parametrize("value", [-1, varint.MAX + 1])
def test_out_of_range(value: int) -> None:
    for function in (varint.size, varint.encode):
        with pytest.raises(LocalError):
            function(value)
    with pytest.raises(LocalError):
        varint.encode_fixed(value, 8)


def test_no_width_of_three() -> None:
    with pytest.raises(LocalError):
        varint.encode_fixed(1, 3)


@pytest.mark.parametrize("encoded", ["c2197c5eff14e88c", "9d7f3e7d", "7bbd", "25"])
def test_every_truncation(encoded: str) -> None:
    data = bytes.fromhex(encoded)
    for length in range(len(data)):
        with pytest.raises(PeerError) as caught:
            varint.decode(b"\x00" * 3 + data[:length], 3)
        assert caught.value.code == ErrorCode.FRAME_ENCODING_ERROR
        assert not caught.value.application
