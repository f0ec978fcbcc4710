"""The C code without Python: built by every compiler at hand, under sanitisers, for AArch64 and for a big-endian one.

`native/check.c` tests kernels, coefficients and decoder by itself. No flag names an instruction set: what a level needs
is in its source, or the build would fail here.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from quic_pfec import _codec

ROOT = Path(__file__).parent.parent
FLAGS = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
SANITISE = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def built(compiler: str, folder: Path, *flags: str) -> Path:
    program = folder / "check"
    sources = [str(path) for path in sorted((ROOT / "codec").glob("*.c")) if path.stem != "_codec"]
    command = [compiler, *FLAGS, *flags, "-I", str(ROOT / "codec"), *sources, str(ROOT / "tests/native/check.c")]
    done = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return program


def levels(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("flags", [["-O3"], SANITISE], ids=["optimised", "sanitised"])
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_every_level_on_this_processor(compiler: str, flags: list[str], tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    assert levels(str(built(compiler, tmp_path, *flags))) == _codec.isa_levels()


@pytest.mark.parametrize(
    ("compiler", "emulator", "expected"),
    [
        ("aarch64-linux-gnu-gcc", "qemu-aarch64-static", ["scalar", "neon"]),
        ("s390x-linux-gnu-gcc", "qemu-s390x-static", ["scalar"]),  # big-endian
    ],
    ids=["aarch64", "s390x"],
)
def test_other_architectures_under_an_emulator(
    compiler: str, emulator: str, expected: list[str], tmp_path: Path
) -> None:
    if shutil.which(compiler) is None or shutil.which(emulator) is None:
        pytest.skip(f"no {compiler} or {emulator} (Debian: gcc-{compiler.removesuffix('-gcc')}, qemu-user-static)")
    assert levels(emulator, str(built(compiler, tmp_path, "-O3", "-static"))) == expected
