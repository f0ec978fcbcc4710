"""The link between two namespaces: real UDP and kernel TCP over it, and nothing left behind. Skipped without rights."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quic_pfec.link import namespaces, tun_command
from quic_pfec.link.namespaces import ADDRESSES, ADDRESSES6, NamespacePair, TunUnavailable, sweep, why_unavailable
from quic_pfec.link.tun import TunLink
from quic_pfec.link.tun_options import TunOptions
from quic_pfec.sim.channel import PRESETS, GilbertElliott, GilbertElliottChannel, direction_seed, losses

pytestmark = pytest.mark.sockets

PATIENCE_S = 60.0  # only how long a broken test waits
RATE_BPS = 5e6


@pytest.fixture(scope="module")
def rights() -> None:
    """Skips where namespaces cannot be had, with the reason."""
    try:
        NamespacePair().close()
    except TunUnavailable as missing:
        pytest.skip(str(missing))


@pytest.fixture
def nothing_left(rights: None) -> Iterator[None]:
    """Namespaces of this process and its children are gone afterwards."""
    before = listed()
    yield
    assert listed() - before == set()


def listed() -> set[str]:
    text = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in text.splitlines()}


RECEIVE_TCP = """
import socket, sys, hashlib
server = socket.create_server((sys.argv[1], 5000), family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
print("ready", flush=True)
peer, _ = server.accept()
digest, count = hashlib.sha256(), 0
while data := peer.recv(65536):
    digest.update(data)
    count += len(data)
print(count, digest.hexdigest(), flush=True)
"""
SEND_TCP = """
import socket, sys, hashlib, random
data = random.Random(7).randbytes(int(sys.argv[2]))
with socket.create_connection((sys.argv[1], 5000), timeout=50) as sock:
    sock.sendall(data)
print(len(data), hashlib.sha256(data).hexdigest())
"""
ECHO_UDP = """
import socket, sys
sock = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET, socket.SOCK_DGRAM)
sock.bind((sys.argv[1], 5000))
print("ready", flush=True)
while True:
    data, sender = sock.recvfrom(2000)
    sock.sendto(data, sender)
"""
ASK_UDP = """
import socket, sys, time
sock = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET, socket.SOCK_DGRAM)
sock.connect((sys.argv[1], 5000))
sock.settimeout(0.5)
sent = {i: bytes([i]) * (20 + 7 * i) for i in range(int(sys.argv[2]))}
got, wrong = set(), 0
for i, data in sent.items():
    sock.send(data)
    time.sleep(0.002)
try:
    while True:
        data = sock.recv(2000)
        wrong += data != sent.get(data[0])
        got.add(data[0])
except TimeoutError:
    pass
print(len(got), wrong)
"""


def python(link: TunLink, side: namespaces.Side, code: str, *arguments: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", code, *arguments]
    return link.popen(side, argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)


def first_line(child: subprocess.Popen[Any]) -> str:
    assert child.stdout is not None
    assert select.select([child.stdout], [], [], PATIENCE_S)[0]
    line = child.stdout.readline()
    return line if isinstance(line, str) else line.decode()


@pytest.mark.parametrize("address", [ADDRESSES["right"], ADDRESSES6["right"]], ids=["ipv4", "ipv6"])
@pytest.mark.parametrize("program", ["auto", "python"])
def test_kernel_tcp_crosses_whole(nothing_left: None, address: str, program: Any) -> None:
    loss = GilbertElliott(0.0, 0.3, 0.02, 0.3)
    options = TunOptions(rate_bps=RATE_BPS, owd_s=0.005, loss=loss, clock="packet", seed=3, program=program)
    with TunLink(options) as link:
        server = python(link, "right", RECEIVE_TCP, address)
        assert first_line(server) == "ready\n"
        epoch_s = link.epoch()
        client = python(link, "left", SEND_TCP, address, "400000")
        sent, got = first_line(client), first_line(server)
        report = link.report()
    assert sent == got
    assert got.startswith("400000 ")
    forward = report.forward
    assert forward.tcp_bytes_in == forward.bytes > 400_000
    assert forward.lost > 0
    assert forward.packets == forward.lost + forward.delivered + forward.queue_drops
    assert forward.sent + forward.in_flight + forward.write_errors == forward.delivered
    assert report.epoch_clock_s == pytest.approx(epoch_s, abs=1e-6)
    expected = losses(GilbertElliottChannel(loss, direction_seed(3, 0)), forward.slots_drawn)
    assert forward.lost == forward.slots_lost == int(expected.sum())
    assert report.backward.lost == 0


@pytest.mark.parametrize("address", [ADDRESSES["right"], ADDRESSES6["right"]], ids=["ipv4", "ipv6"])
def test_datagrams_come_back_as_they_were(nothing_left: None, address: str) -> None:
    with TunLink(TunOptions(rate_bps=RATE_BPS, owd_s=0.005, reorder=0.2, seed=1)) as link:
        server = python(link, "right", ECHO_UDP, address)
        assert first_line(server) == "ready\n"
        link.epoch()
        assert first_line(python(link, "left", ASK_UDP, address, "100")) == "100 0\n"
        report = link.report()
    assert report.forward.udp_bytes_in == report.forward.udp_bytes_out == report.backward.udp_bytes_out
    assert report.forward.reordered > 0
    assert report.device_drops == 0


def test_losses_and_damage_of_datagrams(nothing_left: None) -> None:
    options = TunOptions(rate_bps=RATE_BPS, owd_s=0.001, loss=PRESETS["iid5"], corrupt=0.2, seed=9)
    with TunLink(options) as link:
        server = python(link, "right", ECHO_UDP, ADDRESSES["right"])
        assert first_line(server) == "ready\n"
        link.epoch()
        got, wrong = map(int, first_line(python(link, "left", ASK_UDP, ADDRESSES["right"], "200")).split())
        report = link.report()
    lost = report.forward.lost
    assert 0 < lost < 40
    assert wrong > 10  # the checksum fitted, so the damage got through to the application
    assert got <= 200 - lost
    assert report.forward.corrupted + report.backward.corrupted >= wrong


def test_one_direction_does_not_see_the_other(nothing_left: None) -> None:
    """The devices are in the namespaces and nowhere else."""
    with TunLink(TunOptions()) as link:
        assert not any(name.startswith(f"qp{os.getpid()}") for name in os.listdir("/sys/class/net"))
        child = link.popen("left", ["ip", "-j", "address"], stdout=subprocess.PIPE)
        devices = json.loads(child.communicate(timeout=PATIENCE_S)[0])
    found = {entry["local"] for device in devices for entry in device["addr_info"]}
    assert {ADDRESSES["left"], ADDRESSES6["left"]} <= found
    assert ADDRESSES["right"] not in found


def test_what_runs_inside_ends_with_the_link(nothing_left: None) -> None:
    link = TunLink(TunOptions())
    child = link.popen("left", ["sh", "-c", "sleep 1000 & echo started; wait"], stdout=subprocess.PIPE)
    assert first_line(child) == "started\n"
    link.close()
    link.close()
    assert child.poll() is not None
    assert child.stdout is not None
    assert child.stdout.read() == b""  # the sleep has gone too, or this would wait for it


def test_a_failing_emulator_leaves_nothing(nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match="no C compiler"):
        TunLink(TunOptions(program="c"))


# The command.


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "quic_pfec.link", "tun", "--rate", "5Mbps", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )


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


def test_what_a_killed_process_left_is_swept(rights: None) -> None:
    process = start()
    assert process.stderr is not None
    assert select.select([process.stderr], [], [], PATIENCE_S)[0]
    process.stderr.readline()
    mine = {name for name in listed() if name.startswith(f"qpfec-{process.pid}-")}
    assert len(mine) == 2
    assert mine.isdisjoint(sweep())  # it lives
    process.kill()
    process.communicate()
    assert mine <= listed()
    assert set(sweep()) >= mine
    assert mine.isdisjoint(listed())


# What is missing is said in one line, before anything is made. These need no rights.


def test_without_root(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "sudo" in str(why_unavailable())
    assert tun_command.main(["--rate", "5Mbps"]) == tun_command.EXIT_FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("quic-pfec link tun: ")
    assert "sudo" in line


def test_without_ip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "apt-get install iproute2" in str(why_unavailable())


@pytest.mark.parametrize("kind", ["missing", "not a device"])
def test_without_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: "/sbin/ip")
    device = tmp_path / "tun"
    if kind != "missing":
        device.mkdir()
    monkeypatch.setattr(namespaces, "_DEVICE", device)
    assert "--device" in str(why_unavailable())
    with pytest.raises(TunUnavailable, match="--device"):
        TunLink(TunOptions())


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
