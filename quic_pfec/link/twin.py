"""The emulator's twin in Python: `sim.link.Link` between two descriptors, with the commands and answers of emulator.c.

It is the specification that the program in C is tested against, and what runs where no compiler is. There it is later
(p99 of milliseconds on a busy machine) and every report says "python".
"""

from __future__ import annotations

import gc
import heapq
import json
import os
import resource
import select
import signal
import sys
import time
from dataclasses import asdict, fields
from typing import Any

from quic_pfec.link.realtime import ask_for_real_time, sharpen_timers
from quic_pfec.link.tun_options import TunOptions
from quic_pfec.link.tun_report import LATENESS_UNIT_S, QUEUE_DELAY_UNIT_S, Histogram
from quic_pfec.sim.link import Delivery, Link, LinkStats

__all__ = ["Twin", "damage", "main"]

RING_PACKETS = 16_384
_PACKETS_PER_TURN = 64
_PACKET_BYTES = 1600
_IDLE_S = 0.25
_TCP, _UDP = 6, 17
_UDP_HEADER = 8
_CHECKSUM = slice(6, 8)  # in the UDP header


def _protocol(packet: bytes) -> int:
    """The transport protocol of an IP packet, -1 if it is none."""
    if len(packet) >= 20 and packet[0] >> 4 == 4:
        return packet[9]
    if len(packet) >= 40 and packet[0] >> 4 == 6:
        return packet[6]
    return -1


def damage(packet: bytes, offset: int, mask: int) -> bytes:
    """`packet` with one byte XORed with `mask`.

    In a UDP datagram that is whole the byte is one of the payload (`offset` modulo its length) and the checksum is
    made to fit (RFC 1624), since what a checksum misses is what an endpoint has to notice. Anything else is damaged at
    `offset` as it is, for the receiver's kernel to drop.
    """
    data = bytearray(packet)
    header = 4 * (data[0] & 15) if data[0] >> 4 == 4 else 40
    whole = data[0] >> 4 == 6 or (len(data) >= 20 and not (data[6] & 0x3F or data[7]))
    if _protocol(packet) != _UDP or not whole or header < 20 or len(data) <= header + _UDP_HEADER:
        data[offset] ^= mask
        return bytes(data)
    offset %= len(data) - header - _UDP_HEADER
    at, shift = header + _UDP_HEADER + offset, 0 if offset % 2 else 8
    before = data[at] << shift
    data[at] ^= mask
    place = slice(header + _CHECKSUM.start, header + _CHECKSUM.stop)
    old = int.from_bytes(data[place], "big")
    if old == 0:  # no checksum (IPv4 only)
        return bytes(data)
    fresh = (~old & 0xFFFF) + (~before & 0xFFFF) + (data[at] << shift)
    fresh = (fresh & 0xFFFF) + (fresh >> 16)
    fresh = (fresh & 0xFFFF) + (fresh >> 16)
    data[place] = ((~fresh & 0xFFFF) or 0xFFFF).to_bytes(2, "big")  # zero would mean that there is none
    return bytes(data)


class _Side:
    """One direction: what the link decided is on its way, and what became of it."""

    def __init__(self, link: Link, reorder_s: float) -> None:
        """`reorder_s`: by how much the link holds packets back; 0 if it holds none."""
        self.link = link
        self._reorder_s = reorder_s
        self.waiting: list[tuple[float, int, bytes]] = []
        self._entered = 0
        self.mark()

    def mark(self) -> None:
        self._before = self.link.stats()
        self._sent = self._sent_bytes = self._ring_drops = self._write_errors = 0
        self._bytes = {(protocol, way): 0 for protocol in (_TCP, _UDP) for way in ("in", "out")}
        self._lateness = Histogram(LATENESS_UNIT_S)
        self._queue_delay = Histogram(QUEUE_DELAY_UNIT_S)

    def epoch(self, now: float) -> None:
        self.link.epoch(now)
        self.mark()

    def accept(self, now: float, packet: bytes) -> None:
        """A packet arrives."""
        if len(self.waiting) >= RING_PACKETS:
            self._ring_drops += 1
            return
        begun = self.link.epoch_s is not None
        reordered = self.link.stats().reordered if self._reorder_s else 0
        outcome = self.link.send(now, len(packet))
        if not begun and self.link.epoch_s is not None:  # the first packet began the epoch
            self.mark()
            self._before, reordered = LinkStats(), 0
        self._count(packet, "in")
        if not isinstance(outcome, Delivery):
            return
        held = self._reorder_s and self.link.stats().reordered > reordered
        held_s = self._reorder_s if held else 0.0
        self._queue_delay.add(outcome.due_s - held_s - self.link.owd_s - now)
        if outcome.flip is not None:
            packet = damage(packet, *outcome.flip)
        self._entered += 1
        heapq.heappush(self.waiting, (outcome.due_s, self._entered, packet))

    def deliver(self, descriptor: int) -> None:
        """Write all that is due."""
        while self.waiting:
            now = time.monotonic()
            due_s, _, packet = self.waiting[0]
            if due_s > now:
                return
            heapq.heappop(self.waiting)
            try:
                written = os.write(descriptor, packet)
            except OSError:
                written = -1
            if written != len(packet):
                self._write_errors += 1
                continue
            self._count(packet, "out")
            self._sent += 1
            self._sent_bytes += len(packet)
            self._lateness.add(now - due_s)

    def report(self, now: float) -> dict[str, Any]:
        """The object that emulator.c prints for a direction."""
        self.link.advance(now)
        stats = self.link.stats()
        since = {field.name: getattr(stats, field.name) - getattr(self._before, field.name) for field in fields(stats)}
        log = None if self.link.epoch_s is None else self.link.log()
        return {
            **since,
            "in_flight": len(self.waiting),
            "sent": self._sent,
            "sent_bytes": self._sent_bytes,
            "ring_drops": self._ring_drops,
            "write_errors": self._write_errors,
            **{
                f"{name}_bytes_{way}": self._bytes[protocol, way]
                for name, protocol in (("tcp", _TCP), ("udp", _UDP))
                for way in ("in", "out")
            },
            "largest_queue_bytes": stats.largest_queue_bytes,
            "slots_drawn": 0 if log is None else log.drawn,
            "slots_lost": 0 if log is None else int(log.losses.sum()),
            "lateness": asdict(self._lateness.distribution()),
            "queue_delay": asdict(self._queue_delay.distribution()),
        }

    def _count(self, packet: bytes, way: str) -> None:
        protocol = _protocol(packet)
        if protocol in (_TCP, _UDP):
            self._bytes[protocol, way] += len(packet)


class Twin:
    """Both directions between two non-blocking descriptors, and the commands on a third."""

    def __init__(self, left_fd: int, right_fd: int, options: TunOptions, commands_fd: int = 0) -> None:
        self._sides = tuple(_Side(link, options.reorder_s if options.reorder else 0.0) for link in options.links())
        self._in = [left_fd, right_fd]
        self._out = (right_fd, left_fd)
        self._readable = {left_fd, right_fd, commands_fd}
        self._commands_fd = commands_fd
        self._fifo = options.fifo
        self._pending = b""
        self._epoch_s: float | None = None
        self._mark_s, self._cpu_mark_s = time.monotonic(), 0.0
        self._real_time = False

    def run(self) -> None:
        """Serve until the commands end."""
        sharpen_timers()
        self._real_time = self._fifo and ask_for_real_time()
        gc.disable()  # nothing here makes cycles, and a collection is a pause
        _reply({"ready": True})
        while self._turn():
            continue

    def _turn(self) -> bool:
        due_s = min((side.waiting[0][0] for side in self._sides if side.waiting), default=float("inf"))
        wait_s = max(0.0, min(due_s - time.monotonic(), _IDLE_S))
        readable, _, _ = select.select(list(self._readable), [], [], wait_s)
        for side, descriptor in zip(self._sides, self._in, strict=True):
            if descriptor in readable:
                self._read(side, descriptor)
        # After the packets that were there before it, so that an epoch has none of the past in it.
        if self._commands_fd in readable and not self._obey():
            return False
        for side, descriptor in zip(self._sides, self._out, strict=True):
            side.deliver(descriptor)
        if not readable:
            for side in self._sides:
                side.link.advance(time.monotonic())
        return True

    def _read(self, side: _Side, descriptor: int) -> None:
        for _ in range(_PACKETS_PER_TURN):
            try:
                packet = os.read(descriptor, _PACKET_BYTES)
            except BlockingIOError:
                return
            if not packet:  # a socket whose other end has gone; a device has no end
                self._readable.discard(descriptor)
                return
            side.accept(time.monotonic(), packet)

    def _obey(self) -> bool:
        chunk = os.read(self._commands_fd, 256)
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            _reply(self._answer(line))
        return bool(chunk)

    def _answer(self, command: bytes) -> dict[str, Any]:
        now = time.monotonic()
        if command in (b"epoch", b"mark"):
            for side in self._sides:
                if command == b"epoch":
                    side.epoch(now)
                    self._epoch_s = now
                else:
                    side.mark()
            self._mark_s, self._cpu_mark_s = now, _cpu_s()
            return {"clock_s": now}
        if command == b"report":
            sides = [side.report(now) for side in self._sides]
            return {
                "emulator": "python",
                "clock_s": now,
                "wall_s": now - self._mark_s,
                "cpu_s": _cpu_s() - self._cpu_mark_s,
                "real_time": self._real_time,
                "locked": False,
                "epoch_clock_s": self._sides[0].link.epoch_s if self._epoch_s is None else self._epoch_s,
                "forward": sides[0],
                "backward": sides[1],
            }
        return {"error": "unknown command; there are epoch, mark and report"}


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _reply(values: dict[str, Any]) -> None:
    print(json.dumps(values, separators=(",", ":")), flush=True)


def main(argv: list[str] | None = None) -> int:
    """`python -m quic_pfec.link.twin LEFT_FD RIGHT_FD OPTIONS`, as `emulator.Emulator` starts it."""
    left, right, options = sys.argv[1:] if argv is None else argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which still wants a report
    Twin(int(left), int(right), TunOptions.from_json(json.loads(options))).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
