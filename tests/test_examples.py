"""The examples run as they stand, with the tiny model, from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.model, pytest.mark.sockets, pytest.mark.slow]

FOLDER = Path(__file__).parent.parent / "examples"


def run(name: str, folder: Path) -> str:
    """Output of an example; it must not complain."""
    result = subprocess.run(
        [sys.executable, str(FOLDER / name)],
        cwd=folder,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def test_every_example_is_run_here_and_is_in_the_readme() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    names = {path.name for path in FOLDER.glob("*.py")}
    assert names == {"handoff.py", "two_agents.py", "own_receiver.py"}
    assert all(f"`{name}`" in readme for name in names)


def test_handoff(tmp_path: Path) -> None:
    lines = run("handoff.py", tmp_path).splitlines()
    assert "of 96 blocks in time" in lines[0]
    assert lines[1].startswith("limited by ")
    assert lines[2].startswith("According to the text,")
    assert len(lines[2]) > len("According to the text,")


def test_two_agents(tmp_path: Path) -> None:
    output = run("two_agents.py", tmp_path)
    assert output.startswith("A: read 384 tokens")
    first, second = output.index("B: The answer is"), output.index("B: In other words,")
    assert first < second < len(output.rstrip()) - len("B: In other words,")


def test_own_receiver(tmp_path: Path) -> None:
    output = run("own_receiver.py", tmp_path)
    assert "received: 4 layers, 384 tokens, bf16" in output
    assert "of 96 blocks whole" in output
    assert output.count("of its rows came") == 4
    assert "sent:     utility of whole blocks" in output
