"""Two network namespaces with a TUN device each: what is on the two sides of a bottleneck.

Everything here needs root, and everything must be gone afterwards, whatever happened: names carry the process id, so
that what a killed process left behind is found and removed by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

__all__ = ["ADDRESSES", "ADDRESSES6", "NamespacePair", "Side", "TunUnavailable", "why_unavailable"]

Side = Literal["left", "right"]
SIDES: tuple[Side, Side] = ("left", "right")

ADDRESSES: dict[Side, str] = {"left": "10.99.0.1", "right": "10.99.0.2"}
ADDRESSES6: dict[Side, str] = {"left": "fd99::1", "right": "fd99::2"}
"""Addresses inside the namespaces; nothing outside sees them."""

_DEVICE = Path("/dev/net/tun")
_PROC = Path("/proc")
_NAME = re.compile(r"qpfec-(\d+)-\d+-(?:left|right)")
_QUEUE_PACKETS = 2_000  # of the device: what a sender may write while the emulator is away

# linux/if_tun.h
_TUNSETIFF = 0x400454CA
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000
_IFREQ = struct.Struct("16sH22x")

_counter = itertools.count()


class TunUnavailable(RuntimeError):
    """This machine, or this user, cannot have the namespaces; the message says what to do about it."""


def why_unavailable() -> str | None:
    """What is missing for a pair of namespaces, in one line with the remedy; None if nothing obvious is."""
    if os.geteuid() != 0:
        return "network namespaces need root: run it with sudo (the relay, quic-pfec link, needs no rights)"
    if shutil.which("ip") is None:
        return "the command ip is missing: apt-get install iproute2"
    if not _DEVICE.exists():
        return f"{_DEVICE} is missing: modprobe tun, or start the container with --device {_DEVICE}"
    try:
        os.close(os.open(_DEVICE, os.O_RDWR))
    except OSError as error:
        return f"{_DEVICE} cannot be opened ({error.strerror}): start the container with --device {_DEVICE}"
    return None


def _ip(*arguments: str, batch: Sequence[str] = ()) -> str:
    """Runs ip(8) and returns what it prints. Raises TunUnavailable with its complaint."""
    run = subprocess.run(
        ["ip", *arguments],
        input="".join(f"{line}\n" for line in batch),
        capture_output=True,
        text=True,
        check=False,
        process_group=0,  # Ctrl-C must not stop the cleaning up
    )
    if run.returncode:
        complaint = (run.stderr.strip() or f"exit status {run.returncode}").splitlines()[0]
        raise TunUnavailable(
            f"ip {' '.join(arguments)}: {complaint} (in a container: --cap-add NET_ADMIN --cap-add SYS_ADMIN)"
        )
    return run.stdout


def sweep() -> list[str]:
    """Removes namespaces left behind by processes that are no more; returns their names."""
    gone = []
    for line in _ip("netns", "list").splitlines():
        match = _NAME.match(line)
        if match and not (_PROC / match[1]).exists():
            gone.append(match[0])
            with contextlib.suppress(TunUnavailable):
                _ip("netns", "del", match[0])
    return gone


class NamespacePair:
    """Made in two steps: the constructor makes namespaces and devices, `move` puts the devices in and gives addresses.

    `descriptors` are the devices', non-blocking, one IP packet a read or write; whoever runs the emulator hands them
    over and calls `close_descriptors`. They stay valid when the device moves. Close it to remove everything. Raises
    TunUnavailable.
    """

    def __init__(self, mtu: int = 1500) -> None:
        missing = why_unavailable()
        if missing is not None:
            raise TunUnavailable(missing)
        self._mtu = mtu
        self.descriptors: list[int] = []
        number = f"{os.getpid()}-{next(_counter)}"
        self.names: dict[Side, str] = {side: f"qpfec-{number}-{side}" for side in SIDES}
        self._devices: dict[Side, str] = {side: f"qp{number}{side[0]}" for side in SIDES}
        try:
            sweep()
            for side in SIDES:
                _ip("netns", "add", self.names[side])
                self.descriptors.append(_open_tun(self._devices[side]))
        except BaseException:
            self.close()
            raise

    def move(self) -> None:
        """Put each device into its namespace, with addresses and up; loopback too."""
        ipv6 = (_PROC / "sys/net/ipv6").exists()
        for side in SIDES:
            device = self._devices[side]
            _ip("link", "set", device, "netns", self.names[side])
            lines = ["link set lo up"]
            if ipv6:  # no link-local address: its announcements would be the first packets of every run
                lines.append(f"link set dev {device} addrgenmode none")
            lines.append(f"link set dev {device} mtu {self._mtu} txqueuelen {_QUEUE_PACKETS} up")
            lines.append(f"addr add {ADDRESSES[side]}/24 dev {device}")
            if ipv6:
                lines.append(f"addr add {ADDRESSES6[side]}/64 dev {device} nodad")
            _ip("-n", self.names[side], "-batch", "-", batch=lines)

    def device_drops(self) -> int:
        """Packets that the kernel dropped at the devices, because their queues were full."""
        return sum(
            json.loads(_ip("-n", self.names[side], "-j", "-s", "link", "show", "dev", self._devices[side]))[0][
                "stats64"
            ]["tx"]["dropped"]
            for side in SIDES
        )

    def command(self, side: Side, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` on one side."""
        return ["ip", "netns", "exec", self.names[side], *argv]

    def close_descriptors(self) -> None:
        """Close this process's copies of the descriptors; may be called twice."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def close(self) -> None:
        """Remove namespaces and devices; may be called twice, and when only some were made."""
        self.close_descriptors()
        for side in SIDES:
            with contextlib.suppress(TunUnavailable):
                _ip("netns", "del", self.names[side])


def _open_tun(name: str) -> int:
    descriptor = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, _IFREQ.pack(name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError as error:
        os.close(descriptor)
        raise TunUnavailable(
            f"a TUN device cannot be made ({error.strerror}): in a container, --cap-add NET_ADMIN"
        ) from None
    return descriptor
