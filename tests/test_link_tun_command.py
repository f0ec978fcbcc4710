"""`quic-pfec link tun`: what it prints, how it ends, and that nothing is left behind. Skipped without rights."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quic_pfec.link import tun_command
from quic_pfec.link.namespaces import NamespacePair

from .tun_world import PATIENCE_S, RECEIVE_TCP, SEND_TCP, listed, nothing_left, rights, start

__all__ = ["nothing_left", "rights"]  # fixtures

pytestmark = pytest.mark.sockets


def test_commands_on_both_sides(nothing_left: None, tmp_path: Path) -> None:
    receive, send = tmp_path / "receive.py", tmp_path / "send.py"
    receive.write_text(RECEIVE_TCP)
    send.write_text(SEND_TCP)
    path = tmp_path / "run.json"
    process = start(
        *("--right", f"{sys.executable} {receive} 10.99.0.2", "--left", f"{sys.executable} {send} 10.99.0.2 50000"),
        *("--ge", "ge2", "--loss", "both", "--seed", "4", "--json", str(path)),
    )
    out, err = process.communicate(timeout=PATIENCE_S)
    values = json.loads(out)
    assert values == json.loads(path.read_text())
    assert values["statuses"] == {"right": 0, "left": 0}
    # 3: this machine was busy, and the run says so.
    assert process.returncode == (tun_command.EXIT_VOID if values["void"] else 0)
    assert err.count("50000 ") == 2
    assert values["options"]["loss_both"] is True
    assert values["options"]["queue_bytes"] == 30_000
    assert values["forward"]["tcp_bytes_in"] > 50_000
    for name in ("forward", "backward"):
        side = values[name]
        assert set(side) >= {
            *("packets", "sent", "offered_bps", "sent_bps", "lost", "loss_share", "queue_drops", "ring_drops"),
            *("write_errors", "largest_queue_bytes", "lateness", "queue_delay"),
        }
        assert set(side["lateness"]) == {
            *("count", "total_s", "mean_s", "largest_s", "p50_s", "p99_s", "counts", "bounds_s")
        }
    assert set(values) >= {"wall_s", "cpu_s", "emulator", "real_time", "void", "kernel", "load_average"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_and_remove_everything(nothing_left: None, number: signal.Signals) -> None:
    code = (
        f"trap '' INT; exec {sys.executable} -m quic_pfec.link tun --rate 5Mbps"  # as a shell starts a background job
    )
    process = subprocess.Popen(
        ["sh", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    try:
        assert process.stderr is not None
        assert select.select([process.stderr], [], [], PATIENCE_S)[0]
        line = process.stderr.readline().decode()
        assert "ip netns exec qpfec-" in line
        assert any(name in line for name in listed())
        process.send_signal(number)
        assert process.wait(PATIENCE_S) in (0, tun_command.EXIT_VOID)
        assert process.stdout is not None
        assert json.loads(process.stdout.read())["statuses"] == {}
    finally:
        process.kill()
        process.communicate()


def test_a_signal_while_a_command_runs(nothing_left: None) -> None:
    process = start("--left", "echo running; sleep 1000")
    assert process.stderr is not None
    assert select.select([process.stderr], [], [], PATIENCE_S)[0]
    process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert json.loads(out)["statuses"] == {"left": None}
    assert process.returncode in (0, tun_command.EXIT_VOID)


def test_a_command_that_fails_is_an_exit_status(nothing_left: None) -> None:
    process = start("--right", "sleep 1.3; exit 7", "--left", "sleep 1000")
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == tun_command.EXIT_COMMAND
    assert json.loads(out)["statuses"] == {"right": 7, "left": None}


def test_it_stops_by_itself(nothing_left: None) -> None:
    process = start("--duration-s", "0.1")
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert json.loads(out)["wall_s"] >= 0.1


def test_a_void_run_is_an_exit_status(
    nothing_left: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(NamespacePair, "device_drops", lambda self: 3)
    assert tun_command.main(["--duration-s", "0.05"]) == tun_command.EXIT_VOID
    assert json.loads(capsys.readouterr().out)["void"] == ["3 packets dropped before the emulator read them"]


# What is missing or wrong is said in one line. These need no rights.


def test_without_root(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert tun_command.main(["--rate", "5Mbps"]) == tun_command.EXIT_FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("quic-pfec link tun: ")
    assert "sudo" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ge", "rain"], "paper"),
        (["--mtu", "9000"], "mtu"),
        (["--rate", "5MBps"], "bits per second"),
        (["--trace", "/does/not/exist"], "exist"),
        (["--emulator", "rust"], "invalid choice"),
        (["--reorder", "2"], "probability"),
    ],
)
def test_misuse_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        tun_command.main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
