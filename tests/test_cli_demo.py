"""The demo whole, with the tiny model: three processes, a table, a picture, and the figures that others read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from quic_pfec.cli.main import app

pytestmark = [pytest.mark.model, pytest.mark.sockets]

KEYS = {
    "j_block",
    "j_frac",
    "oracle_j_frac",
    "agreement",
    "deadline_s",
    "frozen_s",
    "decode_started_s",
    "recovered",
    "repairs_useful",
    "blocks_complete",
    "blocks_total",
    "rho",
}
"""What other programs read of every scheme."""


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    figures, picture = tmp_path / "out" / "demo.json", tmp_path / "out" / "demo.png"
    # Whether coding pays is measured with a real model on a quiet machine; here only that all of it runs and adds up.
    arguments = ["--model", "tiny-random", "--tokens", "256", "--point", "both", "--seed", "2", "--no-require"]
    result = CliRunner().invoke(app, ["demo", *arguments, "--json", str(figures), "--picture", str(picture)])
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    for said in (
        "rho: ",
        "oracle: the bound",
        "agreement: ",
        "fifo, no FEC",
        "priorityfec-paper (ddqn)",
        "hybrid",
        "set-up",
        "run",
        "intact cache",
    ):
        assert said in result.output

    values = json.loads(figures.read_text())
    schemes = {key: values[key] for key in ("fifo", "priorityfec_paper", "hybrid")}
    for scheme in (*schemes.values(), *values["short"].values()):
        assert scheme.keys() >= KEYS
        assert 0 <= scheme["j_block"] <= scheme["j_frac"] + 1e-9 <= 1 + 2e-9
        assert 0 <= scheme["agreement"] <= 1
        assert 0 <= scheme["blocks_complete"] <= scheme["blocks_total"]
        assert 0 < scheme["frozen_s"] < scheme["decode_started_s"]
        assert scheme["recovered_verified"] is not False
        assert scheme["confirmed"]
        assert isinstance(scheme["void"], list)
    late = sum(bool(scheme["void"]) for scheme in (values["arq"], *schemes.values(), *values["short"].values()))
    assert result.output.count("(late)") == late
    assert ("so the row measured this machine" in result.output) == bool(late)
    assert [scheme["rho"] for scheme in schemes.values()] == pytest.approx([0.8, 0.8, 0.8])
    assert {scheme["blocks_total"] for scheme in schemes.values()} == {64}
    for scheme in schemes.values():
        assert scheme["deadline_s"] == pytest.approx(values["fifo"]["deadline_s"])
    assert schemes["fifo"]["repair"] == schemes["fifo"]["resent"] == schemes["priorityfec_paper"]["resent"] == 0
    assert schemes["priorityfec_paper"]["repairs_useful"] > 0
    assert values["short"].keys() == {"arq", "hybrid"}
    assert {scheme["blocks_total"] for scheme in values["short"].values()} == {4}
    settings = values["settings"]
    assert (settings["seed"], settings["tokens"], settings["model"]) == (2, 256, "tiny-random:0")
    assert settings["positions"] == 64


def test_failures_are_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--point", "nowhere"])
    assert result.exit_code == 1
    assert result.stderr.splitlines() == ["quic-pfec: --point is paper, short or both, not 'nowhere'"]


@pytest.mark.slow
def test_a_context_without_room_is_one_line() -> None:
    result = CliRunner().invoke(app, ["demo", "--model", "tiny-random", "--tokens", "64"])
    assert result.exit_code == 1
    assert "no room" in result.stderr.splitlines()[-1]
