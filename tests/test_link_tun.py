"""The link between two namespaces: real UDP and kernel TCP over it. Skipped without rights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from quic_pfec.link.namespaces import ADDRESSES, ADDRESSES6, Side
from quic_pfec.link.tun import TunLink
from quic_pfec.link.tun_options import TunOptions
from quic_pfec.sim.channel import PRESETS, GilbertElliott, GilbertElliottChannel, direction_seed, losses

from .tun_world import ASK_UDP, ECHO_UDP, PATIENCE_S, RECEIVE_TCP, SEND_TCP, first_line, nothing_left, rights

__all__ = ["nothing_left", "rights"]  # fixtures

pytestmark = pytest.mark.sockets

RATE_BPS = 5e6


def python(link: TunLink, side: Side, code: str, *arguments: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", code, *arguments]
    return link.popen(side, argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)


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
