"""`quic-pfec train`: small runs from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("gymnasium")
pytest.importorskip("torch")
pytest.importorskip("matplotlib")
from typer.testing import CliRunner

from quic_pfec.cli.main import app
from quic_pfec.schedule.network import load_network

SMALL = [
    "--distribution",
    "wide",
    "--transitions",
    "700",
    "--pretraining",
    "500",
    "--returns",
    "20",
    "--grid-seeds",
    "0",
]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quic_pfec.train.ddqn.VALIDATION_WORLDS", 2)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["train", *arguments])
    return result.exit_code, result.output


def test_ddqn_writes_weights_a_curve_figures_and_goes_on(tmp_path: Path) -> None:
    weights, checkpoint = tmp_path / "w" / "my-ddqn.npz", tmp_path / "run.npz"
    figures, picture = tmp_path / "f.json", tmp_path / "curve.png"
    code, text = run(
        "ddqn", "--weights", str(weights), "--checkpoint", str(checkpoint), "--json", str(figures),
        "--picture", str(picture), "--seed", "2", *SMALL,
    )  # fmt: skip
    assert code == 0, text
    network = load_network(weights)
    assert (network.name, network.kind, network.seed) == ("my-ddqn", "q", 2)
    assert network.command.startswith("quic-pfec")
    values = json.loads(figures.read_text())
    assert values["settings"]["transitions"] == 700
    assert values["curve"][-1]["j_block"] > 0
    assert picture.read_bytes()[:4] == b"\x89PNG"
    code, text = run("ddqn", "--weights", str(tmp_path / "again.npz"), "--resume", str(checkpoint), "--grid-seeds", "0")
    assert code == 0, text
    assert (load_network(tmp_path / "again.npz").w1 == network.w1).all()  # nothing was left to learn


def test_override_without_a_gate_never_acts(tmp_path: Path) -> None:
    weights = tmp_path / "hybrid-override.npz"
    code, text = run(
        "override", "--weights", str(weights), "--states", "20", "--steps", "5", "--validation", "2",
        "--gate-seeds", "0", "--grid-seeds", "0", "--json", str(tmp_path / "o.json"),
    )  # fmt: skip
    assert code == 0, text
    assert load_network(weights).margin is None
    assert json.loads((tmp_path / "o.json").read_text())["passed"] is False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--distribution", "narrow"], "--distribution"),
        (["--transitions", "200", "--pretraining", "300"], "--pretraining"),
        (["--resume", "absent.npz"], "absent.npz"),
    ],
)
def test_misuse_ends_in_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run("ddqn", "--weights", str(tmp_path / "w.npz"), *arguments)
    assert code == 1
    assert said in text
    assert "Traceback" not in text


def test_help_says_what_there_is() -> None:
    code, text = run("--help")
    assert code == 0
    assert "ddqn" in text
    assert "override" in text
