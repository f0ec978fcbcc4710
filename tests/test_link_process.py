"""The relay as a child process, and the command line it speaks."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quic_pfec.link.__main__ import main
from quic_pfec.link.options import RelayOptions
from quic_pfec.link.process import RelayProcess
from quic_pfec.sim.channel import PRESETS, GilbertElliottChannel, direction_seed, losses

pytestmark = pytest.mark.sockets

PATIENCE_S = 20.0


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.settimeout(PATIENCE_S)
        yield sock


@pytest.fixture
def client() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(PATIENCE_S)
        yield sock


def start(server: socket.socket, *arguments: str) -> subprocess.Popen[str]:
    host, port = server.getsockname()
    return subprocess.Popen(
        [sys.executable, "-m", "quic_pfec.link", "--upstream", f"{host}:{port}", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_exchange_with_report(server: socket.socket, client: socket.socket) -> None:
    options = RelayOptions(server.getsockname(), rate_bps=5e6, owd_s=0.001, loss=PRESETS["paper"], seed=4)
    with RelayProcess(options) as relay:
        assert relay.report().log is None
        client.connect(("127.0.0.1", relay.port))
        client.send(b"there")
        data, address = server.recvfrom(100)
        server.sendto(data + b" and back", address)
        assert client.recv(100) == b"there and back"

        epoch_s = relay.epoch()
        for number in range(50):
            client.send(bytes([number]) * 1000)
        report = relay.report()
        while report.forward.link.packets < 50 or report.forward.in_flight:
            report = relay.report()
        assert report.epoch_clock_s == epoch_s
        assert report.options.to_json() == options.to_json()
        link = report.forward.link
        assert link.lost + link.delivered + link.queue_drops == 50
        assert report.forward.sent == link.delivered
        assert report.log is not None
        channel = GilbertElliottChannel(PRESETS["paper"], direction_seed(4, 0))
        assert report.log.losses.tolist() == losses(channel, len(report.log.losses)).tolist()
        numbers = [server.recv(2000)[0] for _ in range(link.delivered)]
        assert numbers == sorted(set(numbers))


def test_close_twice_and_commands_after_it(server: socket.socket) -> None:
    relay = RelayProcess(RelayOptions(server.getsockname()))
    relay.close()
    relay.close()
    assert relay._process.returncode == 0
    with pytest.raises(RuntimeError, match="closed"):
        relay.epoch()


def test_a_child_that_cannot_start_says_why(server: socket.socket) -> None:
    with pytest.raises(RuntimeError, match="in use"):
        RelayProcess(RelayOptions(server.getsockname(), listen=server.getsockname()))


def test_a_child_that_was_killed_is_reported(server: socket.socket) -> None:
    with RelayProcess(RelayOptions(server.getsockname())) as relay:
        relay._process.kill()
        relay._process.wait()
        with pytest.raises(RuntimeError, match="relay"):
            relay.report()


def test_commands_on_standard_input(server: socket.socket, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    process = start(server, "--ge", "ge2", "--json", str(path))
    out, _ = process.communicate("report\nepoch\n\nhello\nreport\nquit\nreport\n", timeout=PATIENCE_S)
    ready, first, epoch, error, second = (json.loads(line) for line in out.splitlines())
    assert process.returncode == 0
    assert ready == {"ready": True, "port": ready["port"]}
    assert first["epoch_clock_s"] is None
    assert second["epoch_clock_s"] == epoch["epoch_clock_s"]
    assert "hello" in error["error"]
    assert second["options"]["loss"] == {"loss_good": 0.001, "loss_bad": 0.5, "p_good_bad": 0.01, "p_bad_good": 0.25}
    assert json.loads(path.read_text())["epoch_clock_s"] == epoch["epoch_clock_s"]


@pytest.mark.parametrize("arguments", [["--no-control"], []])
def test_a_background_job_runs_on_and_loses_from_the_start(
    arguments: list[str], server: socket.socket, client: socket.socket, tmp_path: Path
) -> None:
    """A shell gives it /dev/null: the end of that input is not for it, and nobody can say `epoch`."""
    host, port = server.getsockname()
    path = tmp_path / "run.json"
    command = [sys.executable, "-m", "quic_pfec.link", "--upstream", f"{host}:{port}", "--json", str(path)]
    process = subprocess.Popen(
        [*command, "--ge", "0,1,0.5,0.5", "--clock", "packet", *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        client.connect(("127.0.0.1", json.loads(process.stdout.readline())["port"]))
        for _ in range(40):
            client.send(b"hello")
        assert server.recv(100) == b"hello"
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate()
    assert json.loads(path.read_text())["forward"]["link"]["lost"] > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_cleanly(server: socket.socket, tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "run.json"
    process = start(server, "--no-control", "--loss-from-start", "--json", str(path))
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["ready"]
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()  # where it did not end, waiting for it would not either
        process.communicate()
    assert json.loads(path.read_text())["forward"]["sent"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--upstream"),
        (["--upstream", "nowhere"], "HOST:PORT"),
        (["--upstream", "127.0.0.1:1", "--ge", "rain"], "paper"),
        (["--upstream", "127.0.0.1:1", "--trace", "/does/not/exist"], "exist"),
    ],
)
def test_misuse_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
