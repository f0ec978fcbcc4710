"""The codec's tests once per level that the processor has, each in a process of its own: a level is chosen at import.

The run that collects this file tests the level in use, at full length; here are the others, with a shorter stream and
without what no kernel can change. `make test-isa` runs this file alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quic_pfec import _codec

ROOT = Path(__file__).parent.parent
SUITE = [
    f"tests/test_{name}.py"
    for name in (
        "codec_batch",
        "codec_decoder",
        "codec_gf256",
        "codec_intake",
        "codec_memory",
        "codec_properties",
        "codec_units",
        "fuzz_corpus",
        "transfer_symbols",
    )
]
COMMON = "not odds and not second_thread"  # odds of the coefficients, and locks: the same code at every level
OTHERS = [level for level in _codec.isa_levels() if level != _codec.isa()]
ALL_LEVELS = ["scalar", "ssse3", "avx2", "avx512", "gfni256", "gfni512", "neon"]


def forced(level: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"QUIC_PFEC_ISA": level}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("level", OTHERS)
def test_the_suite(level: str) -> None:
    done = forced(level, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", COMMON, *SUITE)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_the_suite_has_every_test_file_that_arithmetic_can_break() -> None:
    """Not in it: the C code by itself (test_codec_native runs every level), and this file."""
    files = {f"tests/{path.name}" for path in (ROOT / "tests").glob("test_codec_*.py")}
    assert files - set(SUITE) == {"tests/test_codec_native.py", "tests/test_codec_isa.py"}
    assert all((ROOT / name).exists() for name in SUITE)


@pytest.mark.parametrize("level", [level for level in ALL_LEVELS if level not in _codec.isa_levels()] + ["mmx", "AVX2"])
def test_a_level_that_is_not_there_is_an_error(level: str) -> None:
    done = forced(level, "-c", "import quic_pfec.fec.codec")
    assert done.returncode != 0
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith(f"ImportError: QUIC_PFEC_ISA={level!r} is not a level of this build and processor; it has ")
    assert error.endswith(", ".join(_codec.isa_levels()))


def test_every_level_is_known() -> None:
    assert set(_codec.isa_levels()) <= set(ALL_LEVELS)
