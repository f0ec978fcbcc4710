"""`quic-pfec evaluate` from the outside: tables, figures, picture, and how it fails."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from rich.console import Console

from quic_pfec.cli.evaluate import print_tables
from quic_pfec.llm import quality_run
from quic_pfec.llm.quality_report import cells
from tests.test_cli_commands import failure, run
from tests.test_llm_quality import BESIDE
from tests.test_llm_quality import beside as beside
from tests.test_llm_quality import m as m

pytestmark = pytest.mark.model

SMALL = (
    "evaluate", "--model", "tiny-random", "--tokens", "1536", "--examples", "1", "--losses", "1", "--rho", "0.8",
    "--kept", "40,100", "--positions", "4", "--profile-prompts", "1", "--batch", "16", "--threads", "1",
)  # fmt: skip


def test_the_whole_of_it_small(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures, picture = tmp_path / "out" / "quality.json", tmp_path / "out" / "quality.png"
    result = run(*SMALL, "--json", figures, "--picture", picture)
    assert result.exit_code == 0, result.output
    for part in ("receiver mask: tiny-random:0, corpus, 1536 tokens, wire bf16", "wrong cache", "hybrid (per request)"):
        assert part in result.output
    values = json.loads(figures.read_text())
    assert {cell["arm"] for cell in values["cells"]} == {
        "intact", "wrong_cache", "no_context", "retention", "handoff",
    }  # fmt: skip
    hybrid = [cell for cell in values["cells"] if cell["name"] == "hybrid"]
    assert {cell["receiver"] for cell in hybrid} == {"zero", "mask"}
    assert all(cell["agreement"]["low"] <= cell["agreement"]["mean"] <= cell["agreement"]["high"] for cell in hybrid)
    assert values["settings"]["wire_dtype"] == "bf16"
    assert values["profiles"]["paper:zero"]["receiver"] == "zero"
    assert values["fingerprint"]
    assert {one["policy"] for one in values["completion"]} >= {"none", "hybrid"}
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = run(*SMALL, "--json", figures)
    assert again.exit_code == 0
    resumed = json.loads(figures.read_text())
    assert resumed["resumed"] == 1
    assert resumed["cells"] == values["cells"]


def test_wire_dtypes_in_the_same_time(beside: quality_run.Run, tmp_path: Path) -> None:
    table, output = cells(beside.records), io.StringIO()
    print_tables(Console(file=output, width=130), table, BESIDE, "tiny", "made-up")
    said = output.getvalue()
    assert said.count("wire dtypes in the same time: rho 0.5 of tiny") == 1
    assert "receiver zero" not in said
    for row in ("auto (progressive)", "int8", "hybrid (per request)"):
        assert row in said
    sent = {(cell.wire, cell.sent) for cell in table if cell.arm == "handoff"}
    assert sent == {("bf16", ""), ("int8", ""), ("progressive", ""), ("auto", "progressive")}
    [auto] = [cell.as_dict() for cell in table if (cell.wire, cell.name) == ("auto", "hybrid")]
    assert 0 <= auto["finer"]["mean"] <= auto["blocks"]["mean"] <= 1
    pytest.importorskip("matplotlib")
    from quic_pfec.cli.quality_picture import draw_quality

    draw_quality(table, beside.completions, tmp_path / "quality.png", "tiny")
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    assert "--point is quality" in failure("evaluate", "--point", "nowhere")
    assert "percentages" in failure(*SMALL, "--kept", "ten")
    assert "neither a channel" in failure(*SMALL, "--channel", "calm")
    assert "none.jsonl" in failure(*SMALL, "--data", tmp_path / "none.jsonl")
    assert "multiple of 16" in failure(*SMALL, "--tokens", "1537")
    assert "others of bf16, fp16" in failure(*SMALL, "--beside", "int3")
    assert "receivers are zero and mask" in failure(*SMALL, "--receiver", "guess")
    assert "wire_dtype is one of" in failure(*SMALL, "--wire-dtype", "auto")
