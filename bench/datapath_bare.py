"""Bare packets of the extension for `bench.datapath`: the fast path without order, decisions and assembly.

The sender takes frames from a prepared cycle; its symbols are copied and its repairs computed for every packet, as in a
hand-off. The receiver counts. What holds the sender back is a fixed window, so that no controller is measured, and
where it is to keep a rate the pacer that ours share, at a constant one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any

import numpy as np
from aioquic.quic.congestion.base import QuicCongestionControl
from aioquic.quic.packet_builder import QuicSentPacket

from bench.datapath_meter import DATAGRAM, Meter, Task, percentile
from quic_pfec.fec.codec import Encoder
from quic_pfec.quic.configuration import configuration
from quic_pfec.quic.endpoint import ExtensionProtocol, listen, open_connection
from quic_pfec.quic.extension import FrameRun, OutFrame, Symbol
from quic_pfec.quic.fast_receive import FastReceiveConnection
from quic_pfec.quic.pacing import HEADER_BYTES, TokenBucket
from quic_pfec.wire import varint
from quic_pfec.wire.frames import REPAIR, SOURCE, RepairFrame, RepairHeader, SourceFrame, parse_repair, parse_source
from quic_pfec.wire.limits import Limits
from quic_pfec.wire.parameter import PARAMETER_ID, PfecParameter

SYMBOLS = 512
CYCLE = 500  # frames: any share of repairs in hundredths comes out even
DEGREE = 48
WINDOW_PACKETS = 512  # in flight: five milliseconds at 100,000 packets/s, an acknowledgement comes after one
PACKET_OVERHEAD = 27  # short header with a connection id of 8 bytes, and the tag
LIMITS = Limits()


class FixedWindow(QuicCongestionControl):
    """Neither grows nor shrinks."""

    def __init__(self, *, max_datagram_size: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self.congestion_window = WINDOW_PACKETS * max_datagram_size

    def on_packet_sent(self, *, packet: QuicSentPacket) -> None:
        self.bytes_in_flight += packet.sent_bytes

    def on_packet_acked(self, *, now: float, packet: QuicSentPacket) -> None:
        self.bytes_in_flight -= packet.sent_bytes

    def on_packets_lost(self, *, now: float, packets: Iterable[QuicSentPacket]) -> None:
        self.on_packets_expired(packets=packets)

    def on_packets_expired(self, *, packets: Iterable[QuicSentPacket]) -> None:
        self.bytes_in_flight -= sum(packet.sent_bytes for packet in packets)

    def on_persistent_congestion(self) -> None:
        pass

    def on_rtt_measurement(self, *, now: float, rtt: float) -> None:
        pass


class Steady(TokenBucket):
    """The pacer of our controllers at a constant rate in bytes/s."""

    reduced = False

    def __init__(self, rate: float, *, burst_s: float) -> None:
        super().__init__(burst_s=burst_s)
        self._rate = rate

    @property
    def rate_bytes_per_s(self) -> float:
        return self._rate

    @property
    def rate_bps(self) -> float:
        return 8 * self._rate


@dataclass(frozen=True, slots=True)
class Prepared:
    """A frame but for its symbol: `header` is what a repair combines, None for a source."""

    frame_type: int
    prefix: bytes
    sid: int
    header: tuple[Any, ...] | None


class Frames:
    """A cycle of frames of which the share `repairs` (0..1) are repairs over the 48 symbols before them."""

    def __init__(self, repairs: float, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.encoder = Encoder(DATAGRAM, SYMBOLS)
        for _ in range(SYMBOLS):
            self.encoder.push(rng.bytes(DATAGRAM))
        self.cycle: list[Prepared] = []
        sid, owed = DEGREE - 1, 0.0
        for number in range(CYCLE):
            owed += repairs
            if owed >= 1.0 - 1e-9:
                owed -= 1.0
                header = RepairHeader(0, number, sid - DEGREE + 1, DEGREE, DEGREE, bytes([255]) * (DEGREE // 8), 0, 0)
                body = RepairFrame(header, bytes(DATAGRAM)).body()
                self._add(REPAIR, body, sid, tuple(getattr(header, name) for name in RepairHeader.__slots__))
            else:
                sid = sid + 1 if sid + 1 < SYMBOLS else DEGREE - 1
                self._add(SOURCE, SourceFrame(0, sid, bytes(DATAGRAM)).body(), sid, None)

    def _add(self, frame_type: int, body: bytes, sid: int, header: tuple[Any, ...] | None) -> None:
        self.cycle.append(Prepared(frame_type, varint.encode(frame_type) + body[:-DATAGRAM], sid, header))

    @property
    def wire_bytes(self) -> float:
        """Of a packet on average, IP and UDP headers included."""
        mean = sum(len(frame.prefix) for frame in self.cycle) / len(self.cycle)
        return mean + DATAGRAM + PACKET_OVERHEAD + HEADER_BYTES

    def write(self, index: int, out: bytearray, at: int) -> int:
        """Writes frame `index` of the endless cycle; returns its length."""
        frame = self.cycle[index % CYCLE]
        start = at + len(frame.prefix)
        out[at:start] = frame.prefix
        if frame.header is None:
            self.encoder.symbol_into(frame.sid, out, start)
        else:
            self.encoder.repair_into(*frame.header, out, start)
        return len(frame.prefix) + DATAGRAM


class Bare(FastReceiveConnection):
    """Sends `total` frames of a cycle, or counts what comes."""

    def setup(self, *, task: Task, meter: Meter | None = None, **options: Any) -> None:
        super().setup(fast_path=task.fast_path, **options)
        self.total = self.sent = 0
        self.meter = meter
        self.frames: Frames | None = None
        self._scratch = bytearray(2048)
        if meter is None:
            self.frames = Frames(task.repairs, task.seed)
            rate = task.pps * self.frames.wire_bytes if task.pps else 1e12
            self.set_congestion_control(
                FixedWindow(max_datagram_size=1452), Steady(rate, burst_s=task.burst_s if task.pps else 1.0)
            )

    def local_parameter(self) -> tuple[int, bytes]:
        return PARAMETER_ID, PfecParameter.from_limits(LIMITS).serialize()

    def peer_parameter(self, value: bytes | None) -> bool:
        return value is not None

    # out

    def has_frame(self, now: float) -> bool:
        return self.sent < self.total

    def fills_packets(self, space: int) -> bool:
        return True

    def next_run(
        self, now: float, max_packets: int, space: int, out: bytearray, stride: int, offset: int
    ) -> FrameRun | None:
        assert self.frames is not None
        lengths: list[int] = []
        tokens: list[int] = []
        for index in range(min(max_packets, self.total - self.sent)):
            length = self.frames.write(self.sent, out, index * stride + offset)
            if length > space:  # the window has room for part of a packet
                break
            lengths.append(length)
            tokens.append(self.sent)
            self.sent += 1
        return FrameRun(lengths, tokens)

    def next_frame(self, now: float, space: int) -> OutFrame | None:
        assert self.frames is not None
        length = self.frames.write(self.sent, self._scratch, 0)
        if length > space:
            return None
        frame = self.frames.cycle[self.sent % CYCLE]
        self.sent += 1
        return OutFrame(frame.frame_type, bytes(self._scratch[4:length]), self.sent)

    def frame_fates(self, tokens: Sequence[object], acked: bool, now: float, expired: bool = False) -> None:
        pass

    # in

    def symbol_limits(self) -> Limits:
        return LIMITS

    def symbols_received(self, transfer_id: int, packets: Sequence[Symbol], now: float) -> None:
        assert self.meter is not None
        self.meter.count(len(packets))

    def extension_frame(self, frame_type: int, data: memoryview, now: float) -> int:
        assert self.meter is not None
        _, used = (parse_source if frame_type == SOURCE else parse_repair)(data, 0, LIMITS)
        self.meter.count(1)
        return used


class Sending(ExtensionProtocol[Bare]):
    """Notes when how much had left."""

    def __init__(self, quic: Bare) -> None:
        super().__init__(quic)
        self.left: list[tuple[float, int]] = []
        self.done = asyncio.Event()

    def after_transmit(self) -> None:
        if self.quic.sent > (self.left[-1][1] if self.left else 0):
            self.left.append((time.monotonic(), self.quic.sent))
        if self.quic.total and self.quic.sent >= self.quic.total:
            self.done.set()


def lateness_ms(left: list[tuple[float, int]], pps: float) -> list[float]:
    """By how much each packet left later than in an even stream of `pps` that no packet was ahead of.

    `left`: (time in seconds, packets gone by then), rising. Sorted.
    """
    offsets: list[float] = []
    gone = 0
    for time_s, count in left:
        offsets += [time_s - number / pps for number in range(gone, count)]
        gone = count
    first = min(offsets)
    return sorted(1e3 * (offset - first) for offset in offsets)


async def receive(pipe: Pipe, task: Task) -> dict[str, float]:
    meter = Meter()
    config = configuration(is_client=False, certificate=(task.cert, task.key))
    options = {"task": task, "meter": meter}
    async with await listen(
        "127.0.0.1", 0, configuration=config, make_protocol=ExtensionProtocol, connection_class=Bare, options=options
    ) as listener:
        pipe.send(listener.port)
        await meter.all_here(task.packets)
        return meter.figures()


async def send(port: int, task: Task) -> dict[str, float]:
    config = configuration(is_client=True, ca_certs=task.cert, server_name="localhost")
    async with open_connection(
        "127.0.0.1", port, configuration=config, make_protocol=Sending, connection_class=Bare, options={"task": task}
    ) as protocol:
        await asyncio.sleep(0.2)  # until the handshake is confirmed: the first packets are no others
        started_s, began_s = time.process_time(), time.monotonic()
        protocol.quic.pacing_tick_s = task.burst_s
        protocol.quic.total = task.packets
        protocol.transmit()
        done, closed = (asyncio.ensure_future(wait()) for wait in (protocol.done.wait, protocol.wait_closed))
        await asyncio.wait((done, closed), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise RuntimeError(f"the connection ended early: {protocol.quic.last_bug or protocol.quic.close_cause}")
        closed.cancel()
        used_s, wall_s = time.process_time() - started_s, time.monotonic() - began_s
    figures = {"packets": float(task.packets), "cpu_s": used_s, "wall_s": wall_s}
    if task.pps:
        late = lateness_ms(protocol.left, task.pps)
        figures |= {
            "offered_pps": (task.packets - protocol.left[0][1]) / (protocol.left[-1][0] - protocol.left[0][0]),
            "p50_late_ms": percentile(late, 0.5),
            "p99_late_ms": percentile(late, 0.99),
        }
    return figures
