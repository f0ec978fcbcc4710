"""The fuzz targets without a fuzzer: the committed corpus is replayed, and seeded random inputs are tried."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "fuzz/corpus"


@pytest.mark.parametrize("name", TARGETS)
def test_corpus(name: str) -> None:
    inputs = sorted((CORPUS / name).iterdir())
    assert inputs, f"no corpus for {name}"
    for path in inputs:
        TARGETS[name](path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("seed", range(4))
def test_random_inputs(name: str, seed: int) -> None:
    rng = random.Random(f"{name} {seed}")
    for _ in range(12):
        TARGETS[name](rng.randbytes(rng.choice((3, 30, 200))))


@pytest.mark.parametrize("name", TARGETS)
def test_empty_input(name: str) -> None:
    TARGETS[name](b"")
