"""What importing costs: no framework is loaded by somebody who does not use it. Each case is a fresh interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.metadata import version
from typing import get_type_hints

import pytest

import quic_pfec

HEAVY = frozenset({"torch", "transformers", "gymnasium", "matplotlib", "typer", "rich"})


def loaded(*modules: str) -> set[str]:
    """Names in sys.modules that importing `modules` adds to what numpy alone loads."""
    code = f"""
import sys, numpy
before = set(sys.modules)
import {", ".join(modules)}
print(sorted(set(sys.modules) - before))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(ast.literal_eval(run.stdout))


def test_the_package_itself_loads_nothing() -> None:
    assert {name for name in loaded("quic_pfec") if not name.startswith("quic_pfec")} == set()


@pytest.mark.parametrize("module", ["quic_pfec.client", "quic_pfec.server", "quic_pfec.sync"])
def test_endpoints_load_no_framework(module: str) -> None:
    names = loaded(module)
    assert "aioquic" in names
    assert names & HEAVY == set()


def test_the_core_loads_no_event_loop() -> None:
    core = ["sender", "receiver", "ledger", "report", "units"]
    names = loaded("quic_pfec.wire.frames", *(f"quic_pfec.transfer.{name}" for name in core))
    assert "quic_pfec.schedule.policies" in names
    assert names & (HEAVY | {"asyncio", "aioquic", "socket", "ssl", "logging", "random"}) == set()


def test_the_command_line_loads_no_model() -> None:
    names = loaded("quic_pfec.cli.main")
    assert "typer" in names
    assert names & {"torch", "transformers", "gymnasium", "matplotlib", "aioquic"} == set()


def test_public_names() -> None:
    assert set(quic_pfec.__all__) <= set(dir(quic_pfec))
    for name in quic_pfec.__all__:
        assert getattr(quic_pfec, name) is not None
    assert quic_pfec.__version__ == version("quic-pfec")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = quic_pfec.nonsense


def test_lazy_names_are_those_that_type_checkers_see() -> None:
    """The imports under TYPE_CHECKING and the lazy table are two lists of one thing."""
    with open(quic_pfec.__file__, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    typed = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == quic_pfec._HOMES
    assert set(quic_pfec.__all__) == {*typed, "__version__"}
    assert get_type_hints(quic_pfec.send_kv)["return"] is quic_pfec.KVReport
