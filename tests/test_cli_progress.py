"""Bars where somebody looks, lines where nobody does."""

from __future__ import annotations

import pytest

from quic_pfec.cli import progress
from quic_pfec.cli.progress import LINE_EVERY_S, progress_on_stderr


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_log_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    say = progress._Lines(clock)
    for done in range(1, 11):
        clock.now += 10.0
        say("examples", done, 10)
        say("short", done, 10)  # between two lines: it does not get a turn before it ends
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "examples: 3 of 10 after 0 min 30 s",
        "examples: 6 of 10 after 1 min 00 s",
        "examples: 9 of 10 after 1 min 30 s",
        "examples: 10 of 10 after 1 min 40 s",
    ]


def test_quick_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    say = progress._Lines(clock)
    clock.now += LINE_EVERY_S - 1
    say("examples", 1, 1)
    assert capsys.readouterr().err == ""


def test_without_a_terminal_there_is_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_on_stderr() as step:
        step("examples", 1, 2)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    monkeypatch.setenv("TERM", "xterm")
    with progress_on_stderr() as step:
        step("examples", 1, 2)
        step("examples", 2, 2)
    assert "examples" in capsys.readouterr().err
