"""The bench of wire dtypes runs, small, and its figures are of the right order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.model, pytest.mark.slow]


def test_it_compares_wire_dtypes(tmp_path: Path) -> None:
    out = tmp_path / "wire_dtypes.json"
    command = [
        sys.executable,
        "-m",
        "bench.wire_dtypes",
        "--model",
        "tiny-random",
        "--contexts",
        "1",
        "--tokens",
        "1200",
    ]
    subprocess.run([*command, "--positions", "8", "--json", str(out)], check=True, timeout=120, capture_output=True)
    mean = json.loads(out.read_text())["mean"]
    assert [mean[name]["nbytes"] < 0.6 * mean["bf16"]["nbytes"] for name in ("int8", "fp8", "int4")] == [True] * 3
    assert mean["bf16"]["kl"] == 0.0
    assert mean["bf16"]["agreement"] == 1.0
    assert 0 < mean["int8"]["kl"] < mean["fp8"]["kl"]
    assert mean["progressive"]["kl"] < mean["int4"]["kl"] < mean["bf16, 50% missing"]["kl"]
