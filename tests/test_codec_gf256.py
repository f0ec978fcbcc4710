"""The field and its kernels: axioms exhaustively, every level against the scalar one, nothing touched outside."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec import _codec
from quic_pfec.fec import reference
from tests.codec_world import LEVELS

TABLE = np.array([[_codec._multiply(a, b) for b in range(256)] for a in range(256)], dtype=np.uint8)
lengths = st.integers(0, 26).map(lambda blocks: 64 * blocks)
seeds = st.integers(0, 2**32 - 1)
offsets = st.integers(0, 63)


def guarded(rng: np.random.Generator, n: int, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """A random buffer and the n bytes of it at an offset from a 64-byte border, 64 bytes or more on either side."""
    memory = rng.integers(0, 256, n + 256, dtype=np.uint8)
    start = 64 - memory.ctypes.data % 64 + 64 + offset
    return memory, memory[start : start + n]


def assert_only_changed(memory: np.ndarray, before: np.ndarray, inside: np.ndarray) -> None:
    start = inside.ctypes.data - memory.ctypes.data
    assert np.array_equal(memory[:start], before[:start])
    assert np.array_equal(memory[start + len(inside) :], before[start + len(inside) :])


def test_levels_hold_scalar_and_the_one_in_use() -> None:
    assert _codec.isa_levels()[0] == "scalar"
    assert _codec.isa() == os.environ.get("QUIC_PFEC_ISA", _codec.isa_levels()[-1])


def test_product_table_is_the_bitwise_product() -> None:
    assert [[reference.multiply(a, b) for b in range(256)] for a in range(256)] == TABLE.tolist()


def test_field_axioms() -> None:
    a = np.arange(256)
    assert np.array_equal(TABLE, TABLE.T)
    assert np.array_equal(TABLE[1], a)
    assert not TABLE[0].any()
    for x in range(256):
        assert np.array_equal(TABLE[TABLE[x]], TABLE[x][TABLE]), "associative"
        assert np.array_equal(TABLE[x][a[:, None] ^ a], TABLE[x][:, None] ^ TABLE[x]), "distributive"
    assert all(_codec._multiply(x, _codec._inverse(x)) == 1 for x in range(1, 256))
    assert [_codec._inverse(x) for x in range(1, 256)] == [reference.inverse(x) for x in range(1, 256)]


@pytest.mark.parametrize("level", LEVELS)
def test_every_product_of_every_level(level: str) -> None:
    x = np.arange(256, dtype=np.uint8)
    for c in range(256):
        y = np.zeros(256, dtype=np.uint8)
        _codec._axpy(level, y, x, c)
        assert np.array_equal(y, TABLE[c])
        _codec._dot(level, y, [x], bytes([c]))
        assert np.array_equal(y, TABLE[c])
        y[:] = x
        _codec._scal(level, y, c)
        assert np.array_equal(y, TABLE[c])


@pytest.mark.parametrize("level", LEVELS)
@settings(deadline=None, max_examples=60)
@given(seed=seeds, n=lengths, c=st.integers(0, 255), at_y=offsets, at_x=offsets)
def test_axpy_and_scal(level: str, seed: int, n: int, c: int, at_y: int, at_x: int) -> None:
    rng = np.random.default_rng(seed)
    memory, y = guarded(rng, n, at_y)
    source, x = guarded(rng, n, at_x)
    before, source_before = memory.copy(), source.copy()
    expected = y ^ TABLE[c][x]
    _codec._axpy(level, y, x, c)
    assert np.array_equal(y, expected)
    _codec._scal(level, y, c)
    assert np.array_equal(y, TABLE[c][expected])
    assert_only_changed(memory, before, y)
    assert np.array_equal(source, source_before)


@pytest.mark.parametrize("level", LEVELS)
@settings(deadline=None, max_examples=60)
@given(seed=seeds, n=lengths, k=st.integers(0, 7), at=st.lists(offsets, min_size=8, max_size=8), into=st.booleans())
def test_dot_is_the_sum_of_products(level: str, seed: int, n: int, k: int, at: list[int], into: bool) -> None:
    """Also with the output itself among the sources, which accumulates."""
    rng = np.random.default_rng(seed)
    memory, y = guarded(rng, n, at[7])
    sources = [guarded(rng, n, at[i])[1] for i in range(k)]
    if into:
        sources.insert(int(rng.integers(0, k + 1)), y)
    factors = rng.bytes(len(sources))
    before = memory.copy()
    expected = np.zeros(n, dtype=np.uint8)
    for c, x in zip(factors, sources, strict=True):
        expected ^= TABLE[c][x]
    _codec._dot(level, y, sources, factors)
    assert np.array_equal(y, expected)
    assert_only_changed(memory, before, y)


@pytest.mark.parametrize("level", LEVELS)
def test_dot_of_many_sources_and_their_order(level: str) -> None:
    rng = np.random.default_rng(7)
    sources = [rng.integers(0, 256, 1408, dtype=np.uint8) for _ in range(300)]
    factors = rng.bytes(300)
    y = np.empty(1408, dtype=np.uint8)
    _codec._dot(level, y, sources, factors)
    order = rng.permutation(300)
    z = np.empty(1408, dtype=np.uint8)
    _codec._dot("scalar", z, [sources[i] for i in order], bytes(factors[i] for i in order))
    assert np.array_equal(y, z)


def test_doors_refuse_what_a_kernel_must_not_see() -> None:
    y = np.zeros(65, dtype=np.uint8)
    with pytest.raises(ValueError, match="multiple of 64"):
        _codec._scal("scalar", y, 1)
    with pytest.raises(ValueError, match="no level"):
        _codec._scal("mmx", y[:64], 1)
    with pytest.raises(ValueError, match="lengths differ"):
        _codec._axpy("scalar", y[:64], y[:0], 1)
