"""What the tests of the link between two namespaces share: rights or a skip, nothing left behind, programs to run."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quic_pfec.link.namespaces import NamespacePair, TunUnavailable

PATIENCE_S = 60.0  # only how long a broken test waits


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
    # Other processes of this machine may have theirs.
    left = {name for name in listed() - before if (pid := name.split("-")[1]) == str(os.getpid()) or not alive(pid)}
    assert left == set()


def alive(pid: str) -> bool:
    return Path("/proc", pid).exists()


def listed() -> set[str]:
    """Names of the namespaces that links have made."""
    text = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in text.splitlines() if line.startswith("qpfec-")}


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


def first_line(child: subprocess.Popen[Any]) -> str:
    assert child.stdout is not None
    assert select.select([child.stdout], [], [], PATIENCE_S)[0]
    line = child.stdout.readline()
    return line if isinstance(line, str) else line.decode()


def start(*arguments: str) -> subprocess.Popen[str]:
    """The command as a process."""
    return subprocess.Popen(
        [sys.executable, "-m", "quic_pfec.link", "tun", "--rate", "5Mbps", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
