"""The RFC 8681 mode: the vectors of its generator, densities, and its repairs computed by our kernels."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from interop import make_vectors
from quic_pfec import _codec
from quic_pfec.fec import rfc8681
from tests.codec_world import symbols

RFC8682_SEED_1 = """
2545341989 981918433 3715302833 2387538352 3591001365 3820442102 2114400566 2196103051 2783359912 764534509
643179475 1822416315 881558334 4207026366 3690273640 3240535687 2921447122 3984931427 4092394160 44209675
2188315343 2908663843 1834519336 3774670961 3019990707 4065554902 1239765502 4035716197 3412127188 552822483
161364450 353727785 140085994 149132008 2547770827 4064042525 4078297538 2057335507 622384752 2041665899
2193913817 1080849512 33160901 662956935 642999063 3384709977 1723175122 3866752252 521822317 2292524454
"""
PUBLISHED = json.loads((Path(make_vectors.__file__).parent / "rfc8681.json").read_text())


def test_tinymt32_of_rfc_8682() -> None:
    assert list(itertools.islice(rfc8681.tinymt32(1), 50)) == [int(value) for value in RFC8682_SEED_1.split()]


def test_full_density_is_the_low_bytes_without_zeros() -> None:
    low = [int(value) & 0xFF for value in RFC8682_SEED_1.split()]
    assert low[:10] == [37, 225, 177, 176, 21, 246, 54, 139, 168, 237]
    assert rfc8681.coefficients(1, 50, 15) == [value for value in low if value][:50]
    assert rfc8681.coefficients(1, 50, 15, m=1) == [1] * 50
    # A zero byte is drawn again: some key has one among its first 200.
    key = next(k for k in range(100) if 0 in [x & 0xFF for x in itertools.islice(rfc8681.tinymt32(k), 200)])
    assert 0 not in rfc8681.coefficients(key, 200, 15)


def test_sparse_draws_alternate() -> None:
    """Four bits decide, eight follow where the decision is yes."""
    outputs = rfc8681.tinymt32(9)
    expected = []
    for _ in range(40):
        expected.append(0 if next(outputs) & 15 > 5 else next(v for o in outputs if (v := o & 255)))
    assert rfc8681.coefficients(9, 40, 5) == expected
    decisions = rfc8681.tinymt32(9)
    assert rfc8681.coefficients(9, 40, 5, m=1) == [int(next(decisions) & 15 <= 5) for _ in range(40)]


@pytest.mark.parametrize("dt", [0, 3, 7, 14, 15])
def test_density(dt: int) -> None:
    nonzero = sum(c != 0 for key in range(100) for c in rfc8681.coefficients(key, 400, dt))
    p = (dt + 1) / 16
    assert abs(nonzero - 40_000 * p) <= 5 * (40_000 * p * (1 - p)) ** 0.5


def test_threshold() -> None:
    assert [rfc8681.density_threshold(48, w) for w in (10, 48, 49, 96, 768, 4000)] == [15, 15, 15, 7, 0, 0]
    for w in (60, 100, 300, 700):
        assert (rfc8681.density_threshold(48, w) + 1) * w / 16 >= 48
    for wrong in ((0, 5), (5, 0)):
        with pytest.raises(ValueError):
            rfc8681.density_threshold(*wrong)


@pytest.mark.parametrize("wrong", [(-1, 5, 5), (65_536, 5, 5), (1, 5, 16), (1, 5, -1), (1, 4096, 5), (1, 5, 5, 4)])
def test_refused(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        rfc8681.coefficients(*wrong)


@pytest.mark.parametrize("level", _codec.isa_levels())
def test_repairs_by_our_kernels(level: str) -> None:
    sources = symbols(30, 128, 3)
    for key, dt in ((1, 15), (2, 7), (65_535, 0)):
        y = np.empty(128, dtype=np.uint8)
        arrays = [np.frombuffer(source, np.uint8) for source in sources]
        _codec._dot(level, y, arrays, bytes(rfc8681.coefficients(key, 30, dt)))
        assert y.tobytes() == rfc8681.repair_symbol(sources, key, dt)


def test_published_vectors() -> None:
    assert make_vectors.rfc8681_vectors() == PUBLISHED
    for vector in PUBLISHED:
        found = rfc8681.coefficients(vector["repair_key"], vector["window"], vector["dt"], vector["m"])
        assert found == vector["coefficients"]
