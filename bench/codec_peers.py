"""Other codecs on the same shape, where they are installed: one repair over 48 symbols of 1,408 bytes.

None is a dependency, and none but the block codes comes close to a sliding window; they are here to show what is
installable. A peer that is absent is reported as absent.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from typing import Any


def _us(call: Callable[[], object], times: int) -> float:
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(times):
            call()
        best = min(best, 1e6 * (time.perf_counter() - started) / times)
    return best


def _zfec(sources: int, size: int) -> float:
    zfec: Any = importlib.import_module("zfec")
    blocks = [os.urandom(size) for _ in range(sources)]
    encoder = zfec.Encoder(sources, sources + 1)
    return _us(lambda: encoder.encode(blocks, [sources]), 200)


def _raptorq(sources: int, size: int) -> float:
    """Repairs only: the set-up for a block, some 100 us, is left out."""
    raptorq: Any = importlib.import_module("raptorq")
    encoder = raptorq.Encoder.with_defaults(os.urandom(sources * size), size)
    extra = 200
    return (_us(lambda: encoder.get_encoded_packets(extra), 3) - _us(lambda: encoder.get_encoded_packets(0), 3)) / extra


def _galois(sources: int, size: int) -> float:
    galois: Any = importlib.import_module("galois")
    field = galois.GF(2**8, irreducible_poly=0x11D, compile="jit-lookup")
    row, matrix = field.Random((1, sources), low=1), field.Random((sources, size))
    row @ matrix
    return _us(lambda: row @ matrix, 3)


def measure(sources: int, size: int) -> dict[str, float | None]:
    """Best us of one repair from Python by each peer; None = not installed."""
    figures: dict[str, float | None] = {}
    for name, run in (("zfec", _zfec), ("raptorq", _raptorq), ("galois", _galois)):
        try:
            figures[name] = run(sources, size)
        except ImportError:
            figures[name] = None
    return figures
