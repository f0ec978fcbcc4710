"""Namespaces and devices: made, found again after a kill, and refused in one line where they cannot be had."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from quic_pfec.link import namespaces
from quic_pfec.link.namespaces import NamespacePair, TunUnavailable, sweep, why_unavailable
from quic_pfec.link.tun import TunLink
from quic_pfec.link.tun_options import TunOptions

from .tun_world import PATIENCE_S, listed, nothing_left, rights, start

__all__ = ["nothing_left", "rights"]  # fixtures

pytestmark = pytest.mark.sockets


def test_two_steps_and_two_closings(nothing_left: None) -> None:
    with_mtu = NamespacePair(1_400)
    assert set(with_mtu.names.values()) <= listed()
    assert len(with_mtu.descriptors) == 2
    with_mtu.move()
    assert with_mtu.device_drops() == 0
    with_mtu.close_descriptors()
    assert with_mtu.descriptors == []
    with_mtu.close()
    with_mtu.close()


def test_half_made_is_removed(nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second device cannot be made; the first namespace is gone all the same, and its descriptor closed."""
    made = []
    opened = namespaces._open_tun

    def second_fails(name: str) -> int:
        if made:
            raise TunUnavailable("no more devices")
        made.append(opened(name))
        return made[0]

    monkeypatch.setattr(namespaces, "_open_tun", second_fails)
    with pytest.raises(TunUnavailable, match="no more"):
        NamespacePair()
    with pytest.raises(OSError):
        os.fstat(made[0])


def test_what_ip_complains_of_is_said(rights: None) -> None:
    with pytest.raises(TunUnavailable, match="--cap-add"):
        namespaces._ip("netns", "del", "qpfec-no-such-thing")


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


def test_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "sudo" in str(why_unavailable())


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
