"""The emulator in C against the simulator, number by number, and its twin beside it over sockets. No rights needed."""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quic_pfec.link.emulator import Emulator, c_arguments, compiled, trace_file
from quic_pfec.link.tun_options import Program, TunOptions
from quic_pfec.link.tun_report import TunReport
from quic_pfec.link.twin import damage
from quic_pfec.sim.channel import PRESETS, GilbertElliottChannel, direction_seed, losses
from quic_pfec.sim.link import Delivery, Drop, Link

PATIENCE_S = 30.0  # only how long a broken test waits
PROGRAM = compiled()
needs_compiler = pytest.mark.skipif(PROGRAM is None, reason="no C compiler")


def udp(payload: bytes, version: int = 4, protocol: int = 17) -> bytes:
    """An IP packet with a UDP header whose checksum is right (its IPv4 header checksum is left out)."""
    length = 8 + len(payload)
    addresses = bytes([10, 99, 0, 1, 10, 99, 0, 2]) if version == 4 else bytes(range(32))
    header = struct.pack("!HHHH", 1111, 2222, length, 0)
    pseudo = addresses + struct.pack("!HH", 17, length)
    total = ones_sum(pseudo + header + payload)
    header = header[:6] + struct.pack("!H", (~total & 0xFFFF) or 0xFFFF)
    if version == 4:
        ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + length, 0, 0x4000, 64, protocol, 0) + addresses
    else:
        ip = struct.pack("!IHBB", 6 << 28, length, protocol, 64) + addresses
    return ip + header + payload


def ones_sum(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def checksum_fits(packet: bytes) -> bool:
    head = 20 if packet[0] >> 4 == 4 else 40
    addresses = packet[12:20] if head == 20 else packet[8:40]
    rest = packet[head:]
    return ones_sum(addresses + struct.pack("!HH", 17, len(rest)) + rest) == 0xFFFF


# Virtual time: the program in C and sim.link.Link on the same schedule.


def schedule(seed: int, packets: int = 3_000) -> list[tuple[float, int]]:
    """Bursts and silences about as long as a queue."""
    rng = np.random.default_rng(seed)
    gaps = rng.choice([0.0, 1e-4, 6e-4, 0.05], packets, p=[0.5, 0.2, 0.29, 0.01]) * rng.random(packets)
    return list(zip((1e4 + np.cumsum(gaps)).tolist(), rng.integers(20, 1_500, packets).tolist(), strict=True))


def replayed(options: TunOptions, sent: list[tuple[float, int]], epochs: list[int]) -> list[str]:
    lines = []
    for index, (now, size) in enumerate(sent):
        if index in epochs:
            lines.append(f"epoch {now.hex()}")
        lines.append(f"{now.hex()} {size}")
    assert PROGRAM is not None
    with trace_file(options) as trace_fd:
        run = subprocess.run(
            [str(PROGRAM), "replay", *c_arguments(options, trace_fd)],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            check=True,
            pass_fds=() if trace_fd is None else (trace_fd,),
        )
    return run.stdout.splitlines()


def simulated(link: Link, sent: list[tuple[float, int]], epochs: list[int]) -> list[str]:
    lines = []
    for index, (now, size) in enumerate(sent):
        if index in epochs:
            link.epoch(now)
        outcome = link.send(now, size)
        if isinstance(outcome, Delivery):
            slot = -1 if outcome.slot is None else outcome.slot
            offset, mask = outcome.flip or (0, 0)
            lines.append(f"d {outcome.due_s.hex()} {slot} {offset} {mask}")
        else:
            lines.append("q" if outcome is Drop.QUEUE else "l")
    return lines


def same_form(line: str) -> str:
    """A line of the program in the form of `simulated`: doubles as Python writes them, no slot of a lost packet."""
    kind, *rest = line.split()
    return " ".join([kind, float.fromhex(rest[0]).hex(), *rest[1:]]) if kind == "d" else kind


@needs_compiler
@pytest.mark.parametrize(
    "options",
    [
        TunOptions(loss=PRESETS["paper"], seed=11),
        TunOptions(loss=PRESETS["paper"], seed=11, clock="packet"),
        TunOptions(loss=PRESETS["long8"], seed=-3, loss_from_start=True, rate_bps=5e6, slot_s=1e-4),
        TunOptions(loss=PRESETS["iid5"], seed=2**70, corrupt=0.2, reorder=0.3, reorder_s=0.007, queue_bytes=20_001),
        TunOptions(corrupt=1.0, owd_s=0.0, rate_bps=100e6),
    ],
    ids=["slot", "packet", "from-start", "noise", "no-loss"],
)
def test_c_and_simulator_agree_to_the_last_bit(options: TunOptions) -> None:
    for seed in range(3):
        sent = schedule(seed)
        epochs = [] if options.loss_from_start else [100, 1_500]
        expected = simulated(options.links()[0], sent, epochs)
        assert list(map(same_form, replayed(options, sent, epochs))) == expected
        kinds = {line[0] for line in expected}
        assert kinds >= ({"d"} if options.loss is None else {"d", "l"})


@needs_compiler
def test_c_replays_a_trace_and_wraps_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    path.write_text("1000110" * 11)
    options = TunOptions(trace=str(path), slot_s=5e-4)
    sent = schedule(5)
    assert list(map(same_form, replayed(options, sent, [7]))) == simulated(options.links()[0], sent, [7])


@needs_compiler
def test_c_keeps_the_rate_and_drops_the_tail_in_virtual_time() -> None:
    rate_bps, queue_bytes, size = 8e6, 30_000, 1_000
    options = TunOptions(rate_bps=rate_bps, queue_bytes=queue_bytes, owd_s=0.01)
    sent = [(i * size * 8 / (2 * rate_bps), size) for i in range(20_000)]  # twice what the link carries
    lines = replayed(options, sent, [])
    due_s = [float.fromhex(line.split()[1]) for line in lines if line[0] == "d"]
    carried_bps = (len(due_s) - 1) * size * 8 / (due_s[-1] - due_s[0])
    assert carried_bps == pytest.approx(rate_bps, rel=0.01)
    delays = [due - now for (now, _), line in zip(sent, lines, strict=True) if line[0] == "d"
              for due in [float.fromhex(line.split()[1])]]  # fmt: skip
    assert max(delays) == pytest.approx(0.01 + queue_bytes * 8 / rate_bps, rel=0.01)
    assert lines.count("q") == len(sent) - len(due_s) > 9_000


@needs_compiler
@pytest.mark.parametrize("clock", ["slot", "packet"])
def test_gilbert_elliott_statistics_in_c(clock: str) -> None:
    ge = PRESETS["paper"]
    options = TunOptions(loss=ge, seed=1, clock="slot" if clock == "slot" else "packet", queue_bytes=10**9)
    slot_s = 1440 * 8 / options.rate_bps
    lines = replayed(options, [(i * slot_s, 1440) for i in range(200_000)], [0])
    lost = np.array([line[0] == "l" for line in lines])
    assert lost.mean() == pytest.approx(ge.mean_loss, abs=0.004)
    starts = int(np.count_nonzero(lost[1:] & ~lost[:-1]))
    assert lost.sum() / starts == pytest.approx(ge.mean_loss_run, rel=0.03)
    assert lost.tolist() == losses(GilbertElliottChannel(ge, direction_seed(1, 0)), len(lost)).tolist()


# Over sockets: both programs, real loop, packets in and out.

PROGRAMS = [pytest.param("c", marks=needs_compiler), "python"]


class Ends:
    """The two ends of an emulator, each a socket that carries one packet a call."""

    def __init__(self, options: TunOptions) -> None:
        self.left, left = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.right, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in (left, right):
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        self.left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        try:
            self.emulator = Emulator(left.fileno(), right.fileno(), options)
        finally:
            left.close()
            right.close()

    def close(self) -> None:
        self.emulator.close()
        self.left.close()
        self.right.close()

    def settled(self, packets: int) -> TunReport:
        """The report when so many packets came forward and none is under way."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            report = self.emulator.report()
            if report.forward.packets >= packets and not report.forward.in_flight:
                return report
            time.sleep(0.005)
        raise AssertionError("the packets did not come through")

    def received(self) -> list[bytes]:
        packets = []
        while select.select([self.right], [], [], 0)[0]:
            packets.append(self.right.recv(2_000))
        return packets


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> Program:
    chosen: Program = request.param
    return chosen


@pytest.fixture
def ends(program: Program) -> Iterator[list[Ends]]:
    opened: list[Ends] = []
    yield opened
    for each in opened:
        each.close()


def opened(ends: list[Ends], program: Program, **options: object) -> Ends:
    ends.append(Ends(TunOptions(program=program, **options)))  # type: ignore[arg-type]
    return ends[-1]


@pytest.mark.realtime
def test_packets_cross_in_order_and_are_counted(ends: list[Ends], program: Program) -> None:
    link = opened(ends, program, rate_bps=20e6, owd_s=0.002, queue_bytes=10**6)
    packets = [udp(number.to_bytes(2, "big") * 300, 4 if number % 2 else 6) for number in range(100)]
    packets += [udp(b"x" * 100, protocol=6), b"\x00" * 30]
    for packet in packets:
        link.left.send(packet)
    report = link.settled(len(packets))
    assert link.received() == packets
    side = report.forward
    assert (side.packets, side.sent, side.delivered) == (102, 102, 102)
    assert side.bytes == side.sent_bytes == side.delivered_bytes == sum(map(len, packets))
    assert side.udp_bytes_in == side.udp_bytes_out == sum(map(len, packets[:100]))
    assert side.tcp_bytes_in == side.tcp_bytes_out == len(packets[100])
    assert side.lateness.count == side.queue_delay.count == sum(side.lateness.counts) == 102
    assert side.queue_delay.largest_s <= side.queue_delay.total_s
    assert 0 < side.largest_queue_bytes <= side.bytes
    assert report.emulator == link.emulator.program == program
    assert report.backward.packets == 0
    assert report.epoch_clock_s is None
    link.right.send(b"back")
    link.left.settimeout(PATIENCE_S)
    assert link.left.recv(100) == b"back"


@pytest.mark.realtime
def test_losses_are_the_simulators(ends: list[Ends], program: Program) -> None:
    options = {"loss": PRESETS["paper"], "loss_both": True, "seed": 5, "clock": "packet"}
    link = opened(ends, program, rate_bps=1e9, owd_s=0.0, **options)
    link.left.send(b"before the epoch nothing is lost")
    link.settled(1)
    link.received()
    link.emulator.epoch()
    for first in range(0, 2_000, 100):
        for number in range(first, first + 100):
            link.left.send(number.to_bytes(4, "big"))
        report = link.settled(first + 100)
        got = [int.from_bytes(packet, "big") for packet in link.received()]
        expected = losses(GilbertElliottChannel(PRESETS["paper"], direction_seed(5, 0)), 2_000)
        assert got == [number for number in range(first, first + 100) if not expected[number]]
    assert report.forward.lost == report.forward.slots_lost == int(expected.sum())
    assert report.forward.slots_drawn == 2_000
    assert report.forward.loss_share == report.forward.lost / 2_000
    assert report.epoch_clock_s is not None


@pytest.mark.realtime
def test_slots_go_on_while_nobody_sends(ends: list[Ends], program: Program) -> None:
    link = opened(ends, program, loss=PRESETS["paper"], loss_both=True, seed=8, slot_s=1e-5)
    link.emulator.epoch()
    time.sleep(0.05)
    report = link.emulator.report()
    for direction, side in enumerate((report.forward, report.backward)):
        expected = losses(GilbertElliottChannel(PRESETS["paper"], direction_seed(8, direction)), side.slots_drawn)
        assert side.slots_drawn > 4_000
        assert side.slots_lost == int(expected.sum())


@pytest.mark.realtime
def test_a_trace_over_sockets(ends: list[Ends], program: Program, tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    path.write_text("01100")
    link = opened(ends, program, trace=str(path), clock="packet", rate_bps=1e9, owd_s=0.0)
    link.emulator.epoch()
    for number in range(20):
        link.left.send(bytes([number]))
    assert link.settled(20).forward.lost == 8
    assert [packet[0] for packet in link.received()] == [n for n in range(20) if n % 5 not in (1, 2)]


@pytest.mark.realtime
def test_tail_drop_and_mark(ends: list[Ends], program: Program) -> None:
    link = opened(ends, program, rate_bps=1e5, owd_s=0.0, queue_bytes=3_000)
    for _ in range(10):
        link.left.send(bytes(1_000))
    report = link.settled(10)  # 240 ms on the link
    assert report.forward.queue_drops >= 6
    assert report.forward.sent == 10 - report.forward.queue_drops
    assert report.forward.largest_queue_bytes in range(2_900, 3_001)
    assert any("queue" in reason for reason in TunReport.void_reasons(paced(report)))
    marked_s = link.emulator.mark()
    report = link.emulator.report()
    assert report.forward.packets == report.forward.queue_drops == report.forward.lateness.count == 0
    assert report.forward.largest_queue_bytes > 0  # since the epoch
    assert 0 <= report.wall_s <= report.clock_s - marked_s + 1e-6


def paced(report: TunReport) -> TunReport:
    values = report.to_json()
    values["options"]["paced"] = True
    return TunReport.from_json(values)


@pytest.mark.realtime
def test_held_back_packets_arrive_behind_later_ones(ends: list[Ends], program: Program) -> None:
    options: dict[str, Any] = {"rate_bps": 1e9, "owd_s": 0.0, "reorder": 0.2, "reorder_s": 1.0, "seed": 4}
    link = opened(ends, program, **options)
    link.emulator.epoch()
    for number in range(200):
        link.left.send(bytes([number]))
    report = link.settled(200)
    mirror = TunOptions(**options).links()[0]
    mirror.epoch(0.0)
    arrivals = [mirror.send(0.0, 1) for _ in range(200)]
    held = [number for number, each in enumerate(arrivals) if isinstance(each, Delivery) and each.due_s >= 1.0]
    # Each of the two groups in order; and all of them are sent in far less than the second of the holding back.
    assert [packet[0] for packet in link.received()] == [n for n in range(200) if n not in held] + held
    assert report.forward.reordered == len(held) > 20
    assert report.forward.queue_delay.largest_s < 1.0  # the holding back is no queue


@pytest.mark.realtime
def test_damage_is_the_same_and_checksums_fit(ends: list[Ends], program: Program) -> None:
    link = opened(ends, program, rate_bps=1e9, owd_s=0.0, corrupt=1.0, seed=4)
    mirror = TunOptions(rate_bps=1e9, owd_s=0.0, corrupt=1.0, seed=4).links()[0]
    link.emulator.epoch()
    mirror.epoch(0.0)
    packets = [udp(os.urandom(number + 1), 4 if number % 2 else 6) for number in range(60)]
    packets += [udp(b"", 4), udp(b"not UDP" * 9, 4, protocol=6), udp(b"", 6), b"short", b"\x4f" + bytes(28)]
    for packet in packets:
        link.left.send(packet)
    report = link.settled(len(packets))
    assert report.forward.corrupted == len(packets)
    expected = []
    for packet in packets:
        outcome = mirror.send(0.0, len(packet))
        assert isinstance(outcome, Delivery)
        assert outcome.flip is not None
        expected.append(damage(packet, *outcome.flip))
    got = link.received()
    assert got == expected
    for before, after in zip(packets[:60], got, strict=False):
        assert before != after
        assert before[:26] == after[:26]
        assert checksum_fits(after)


@pytest.mark.realtime
def test_a_checksum_of_zero_is_written_as_ones(ends: list[Ends], program: Program) -> None:
    """Zero would mean that the datagram has none (RFC 768)."""
    options: dict[str, Any] = {"rate_bps": 1e9, "owd_s": 0.0, "corrupt": 1.0, "seed": 6}
    mirror = TunOptions(**options).links()[0]
    mirror.epoch(0.0)
    outcome = mirror.send(0.0, len(udp(bytes(2))))
    assert isinstance(outcome, Delivery)
    assert outcome.flip is not None
    candidates = (udp(number.to_bytes(2, "big")) for number in range(1 << 16))
    packet = next(each for each in candidates if damage(each, *outcome.flip)[26:28] == b"\xff\xff")
    link = opened(ends, program, **options)
    link.emulator.epoch()
    link.left.send(packet)
    link.settled(1)
    assert link.received() == [damage(packet, *outcome.flip)]


@pytest.mark.realtime
def test_loss_from_the_first_packet(ends: list[Ends], program: Program) -> None:
    link = opened(ends, program, rate_bps=1e9, owd_s=0.0, loss=PRESETS["paper"], clock="packet", loss_from_start=True)
    for _ in range(300):
        link.left.send(b"x")
    report = link.settled(300)
    expected = losses(GilbertElliottChannel(PRESETS["paper"], 0), 300)
    assert (report.forward.packets, report.forward.lost) == (300, int(expected.sum()))
    assert report.epoch_clock_s is not None


@pytest.mark.realtime
def test_what_the_kernel_refuses_is_a_write_error(ends: list[Ends], program: Program) -> None:
    link = opened(ends, program, rate_bps=1e9, owd_s=0.0)
    link.right.close()
    link.left.send(b"into nothing")
    report = link.settled(1)
    assert (report.forward.write_errors, report.forward.sent) == (1, 0)
    assert report.void_reasons() == ["forward: 1 write errors"]


@pytest.mark.realtime
def test_unknown_commands_are_answered(ends: list[Ends], program: Program) -> None:
    link = opened(ends, program)
    assert "epoch" in link.emulator._command("hello " * 200)["error"]
    assert link.emulator.report().forward.packets == 0
    link.emulator.close()
    with pytest.raises(RuntimeError, match="the emulator was closed"):
        link.emulator.report()


# The compiler.


def test_without_a_compiler_the_twin_runs_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert compiled() is None
    link = Ends(TunOptions())
    try:
        assert link.emulator.program == link.emulator.report().emulator == "python"
    finally:
        link.close()
    with pytest.raises(RuntimeError, match="no C compiler"):
        Emulator(0, 0, TunOptions(program="c"))


@needs_compiler
def test_it_is_compiled_once(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = compiled(cache)
    assert first is not None
    stamp = first.stat().st_mtime_ns
    assert compiled(cache) == first
    assert (first.stat().st_mtime_ns, list(cache.iterdir())) == (stamp, [first])


@needs_compiler
def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="chmod 700"):
        compiled(tmp_path)


def test_a_compiler_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho no space left >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(RuntimeError, match="no space left"):
        compiled(tmp_path / "cache")
