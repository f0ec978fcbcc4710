"""What all commands say alike: errors in one line, logs as lines or JSON."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quic_pfec.cli.main import app
from quic_pfec.cli.output import JsonFormatter, check_outputs, fail, need_extra
from quic_pfec.quic.journal import Entry


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("quic_pfec", logging.WARNING, __file__, 1, message, (), None)
    made.__dict__.update(extra)
    return made


def test_json_log_is_an_object_a_line() -> None:
    entry = Entry("127.0.0.1:5", "hand-off", "partial", 1.0, "", "fp", 64, 3, 8, 0.5)
    line = JsonFormatter().format(record("two\nlines", entry=entry))
    assert "\n" not in line
    values = json.loads(line)
    assert values["message"] == "two\nlines"
    assert (values["level"], values["logger"], values["outcome"]) == ("warning", "quic_pfec", "partial")
    assert (values["blocks_complete"], values["blocks_total"], values["received_s"]) == (3, 8, 0.5)
    assert values["time"].endswith("+00:00")


def test_an_exception_stays_in_its_line() -> None:
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        made = record("it failed", exc_info=sys.exc_info())
    line = JsonFormatter().format(made)
    assert "\n" not in line
    assert "RuntimeError: broken" in json.loads(line)["exception"]


def test_failures_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        fail("a reason\n  of two lines", 3)
    assert ended.value.code == 3
    with pytest.raises(SystemExit), need_extra():
        raise ImportError('pip install "quic-pfec[hf]"')
    assert capsys.readouterr().err == ('quic-pfec: a reason of two lines\nquic-pfec: pip install "quic-pfec[hf]"\n')


def test_outputs_are_tried_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new, old = tmp_path / "a" / "b.json", tmp_path / "old.json"
    old.write_text("kept")
    check_outputs(new, None, old)
    assert new.parent.is_dir()
    assert not new.exists()
    assert old.read_text() == "kept"
    for wrong in (tmp_path, old / "c.json"):
        with pytest.raises(SystemExit):
            check_outputs(wrong)
        assert capsys.readouterr().err.startswith(f"quic-pfec: {wrong} cannot be written: ")


@pytest.mark.parametrize(
    "command",
    [
        ["evaluate", "--point", "short", "--json"],
        ["evaluate", "--point", "quality", "--picture"],
        ["profile", "--out"],
        ["train", "ddqn", "--weights"],
        ["train", "override", "--weights"],
        ["demo", "--trace"],
    ],
)
def test_every_long_command_tries_them(command: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*command, str(tmp_path)])  # a folder
    assert result.exit_code == 1
    assert result.stderr == f"quic-pfec: {tmp_path} cannot be written: Is a directory\n"
