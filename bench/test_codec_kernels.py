"""The kernels under pytest-benchmark: `python -m pytest bench/test_codec_kernels.py`. Not part of the tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quic_pfec import _codec

SIZE = 1408
LEVELS = _codec.isa_levels()


def symbol(rng: np.random.Generator, size: int = SIZE) -> np.ndarray:
    """Random bytes on a 64-byte border."""
    memory = rng.integers(0, 256, size + 64, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sources", [1, 16, 48, 200])
def test_dot(benchmark: Any, level: str, sources: int) -> None:
    rng = np.random.default_rng(1)
    y, x, c = symbol(rng), [symbol(rng) for _ in range(sources)], bytes(rng.integers(1, 256, sources, dtype=np.uint8))
    benchmark(_codec._dot, level, y, x, c)


@pytest.mark.parametrize("level", LEVELS)
def test_axpy(benchmark: Any, level: str) -> None:
    rng = np.random.default_rng(2)
    benchmark(_codec._axpy, level, symbol(rng), symbol(rng), 77)


@pytest.mark.parametrize("tail", [48, 200])
def test_repair(benchmark: Any, tail: int) -> None:
    encoder = _codec.Encoder(1372, 200)
    for _ in range(200):
        encoder.push(bytes(1372))
    benchmark(encoder.repair, 4, 7, 0, 48, 0, b"", 0, tail)


@pytest.mark.parametrize("count", [4, 16])
def test_burst(benchmark: Any, count: int) -> None:
    encoder = _codec.Encoder(1372, 200)
    for _ in range(200):
        encoder.push(bytes(1372))
    benchmark(encoder.repairs, count, 4, 7, 0, 48, 0, b"", 0, 200)
