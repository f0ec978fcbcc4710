"""Bulk flows through one bottleneck in virtual time: controllers and aioquic's loss recovery, without encryption.

A controller is judged by what it does to a queue over tens of seconds, alone and beside others. With whole connections
that takes a second of processor for two thousand packets, most of it encryption. Here the parts that matter are the
shipped ones: controller, pacer and aioquic's recovery, which detects losses, fires probe timeouts and measures the
round trip. The receiver acknowledges as aioquic does, 1 ms after the first packet, in up to 64 ranges.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aioquic import tls
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketPacer, QuicPacketRecovery, QuicPacketSpace

from quic_pfec.quic.bbr import bbr_control
from quic_pfec.quic.extension import Pacer
from quic_pfec.quic.rate import rate_control
from quic_pfec.sim.channel import ChannelFactory
from quic_pfec.sim.link import Link
from quic_pfec.sim.virtual import SharedNetwork

__all__ = ["PAYLOAD", "WIRE", "Bottleneck", "Flow", "jain"]

PAYLOAD = 1452
WIRE = PAYLOAD + 28
ACK_DELAY_S = 0.001
ACK_RANGES = 64
FORGET_PACKETS = 4096  # far below the newest packet nothing is acknowledged any more
TRACE_STEP_S = 0.01


class _Recovery(QuicPacketRecovery):
    """aioquic's recovery with a controller and a pacer of ours, unless `controller` is a name of aioquic's."""

    def __init__(self, controller: Any, pacer: Pacer | None, send_probe: Callable[[], None]) -> None:
        own = pacer is not None
        super().__init__(
            congestion_control_algorithm="reno" if own else controller,
            initial_rtt=0.1,
            max_datagram_size=PAYLOAD,
            peer_completed_address_validation=True,
            send_probe=send_probe,
            logger=logging.LoggerAdapter(logging.getLogger("bench")),
        )
        if own:
            self._cc, self._pacer = controller, pacer
        self.controller = self._cc
        self.pacer: Any = self._pacer
        self.handshake_confirmed = True

    @property
    def rate_bps(self) -> float:
        if isinstance(self._pacer, QuicPacketPacer):
            return 8 * self.congestion_window / max(self._rtt_smoothed, 1e-3)
        return self.pacer.rate_bps


@dataclass
class Flow:
    """One sender and its receiver. `control`: cubic, reno, bbr, bbr-lossy, or rate:<bit/s>.

    `wants(now)`: whether there is something to send. Figures are of packets on the wire.
    """

    control: str
    start_s: float = 0.0
    stop_s: float = float("inf")
    wants: Callable[[float], bool] = lambda now: True
    seed: int = 1
    loss_threshold: float | None = None
    arrived: list[float] = field(default_factory=list)
    sent_at: list[float] = field(default_factory=list)
    trace: list[tuple[float, float, float, float]] = field(default_factory=list)  # time, cwnd, rate, in flight

    def __post_init__(self) -> None:
        name, _, rate = self.control.partition(":")
        controller: Any = name
        pacer: Pacer | None = None
        if name == "rate":
            controller, pacer = rate_control(float(rate), max_datagram_size=PAYLOAD)
        elif name in ("bbr", "bbr-lossy"):
            controller, pacer = bbr_control(
                lossy=name == "bbr-lossy", loss_threshold=self.loss_threshold, max_datagram_size=PAYLOAD, seed=self.seed
            )
        self.space = QuicPacketSpace(is_application_data=True)
        self.recovery = _Recovery(controller, pacer, self._probe)
        self.recovery.spaces = [self.space]
        self.controller: Any = self.recovery.controller
        self._own_pacer = pacer
        self._pacing_s: float | None = None
        self._probe_pending = False
        self._number = 0
        self.receiver = _Receiver(self)

    # the sender as an endpoint of the virtual network

    def receive(self, data: bytes, now: float) -> None:
        acked = RangeSet()
        for start, stop in reversed(list(struct.iter_unpack("!II", data))):  # a RangeSet is searched from its start
            acked.add(start, stop)
        self.recovery.on_ack_received(ack_rangeset=acked, ack_delay=0.0, now=now, space=self.space)
        self._note(now)

    def pull(self, now: float) -> list[bytes]:
        self._pacing_s = None
        out: list[bytes] = []
        if now < self.start_s or now >= self.stop_s:
            return out
        while self._probe_pending or self.wants(now):
            if not self._probe_pending:
                self._pacing_s = self.recovery.pacer.next_send_time(now)
                if self._pacing_s is not None:
                    break
                if self.recovery.bytes_in_flight + PAYLOAD > self.recovery.congestion_window:
                    break
            self._probe_pending = False
            self.recovery.pacer.update_after_send(now)
            packet = QuicSentPacket(
                tls.Epoch.ONE_RTT, True, True, False, self._number, QuicPacketType.ONE_RTT, now, PAYLOAD
            )
            self.recovery.on_packet_sent(packet=packet, space=self.space)
            out.append(struct.pack("!I", self._number).ljust(PAYLOAD, b"\0"))
            self.sent_at.append(now)
            self._number += 1
        if self._own_pacer is not None:
            self._own_pacer.settle(now, [PAYLOAD] * len(out))
        return out

    def next_timer(self) -> float | None:
        times = [self._pacing_s, self.recovery.get_loss_detection_time(amplification_limited=False)]
        if not self.sent_at:
            times.append(self.start_s)
        known = [time_s for time_s in times if time_s is not None]
        return min(known) if known else None

    def on_timer(self, now: float) -> None:
        due_s = self.recovery.get_loss_detection_time(amplification_limited=False)
        if due_s is not None and now >= due_s:
            self.recovery.on_loss_detection_timeout(now=now)

    def _probe(self) -> None:
        self._probe_pending = True

    def _note(self, now: float) -> None:
        if not self.trace or now >= self.trace[-1][0] + TRACE_STEP_S:
            recovery = self.recovery
            self.trace.append((now, recovery.congestion_window, recovery.rate_bps, recovery.bytes_in_flight))

    # figures

    @property
    def packets_lost(self) -> int:
        """Sent and never arrived, or still on the way."""
        return len(self.sent_at) - len(self.arrived)

    def delivered_bps(self, start_s: float, end_s: float) -> float:
        """Bits on the wire per second that arrived between two times."""
        return 8 * WIRE * sum(start_s <= time_s < end_s for time_s in self.arrived) / (end_s - start_s)

    def offered_bps(self, start_s: float, end_s: float) -> float:
        """Bits on the wire per second that were sent between two times."""
        return 8 * WIRE * sum(start_s <= time_s < end_s for time_s in self.sent_at) / (end_s - start_s)

    def mean_rate_bps(self, start_s: float, end_s: float) -> float:
        """Mean of the rate that the controller allowed."""
        chosen = [rate for time_s, _, rate, _ in self.trace if start_s <= time_s < end_s]
        return sum(chosen) / len(chosen)


class _Receiver:
    """Acknowledges 1 ms after the first packet that is not yet acknowledged."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._got = RangeSet()
        self._ack_s: float | None = None
        self._due = False

    def receive(self, data: bytes, now: float) -> None:
        (number,) = struct.unpack_from("!I", data)
        self._flow.arrived.append(now)
        self._got.add(number, number + 1)
        if self._ack_s is None:
            self._ack_s = now + ACK_DELAY_S

    def pull(self, now: float) -> list[bytes]:
        if not self._due:
            return []
        self._due = False
        self._ack_s = None
        newest = self._got.bounds().stop
        while len(self._got) > ACK_RANGES or self._got[0].stop < newest - FORGET_PACKETS:
            self._got.shift()
        return [b"".join(struct.pack("!II", part.start, part.stop) for part in self._got)]

    def next_timer(self) -> float | None:
        return self._ack_s

    def on_timer(self, now: float) -> None:
        self._due = True


class Bottleneck:
    """`flows` through one link of `rate_bps` with `queue_bytes` (tail drop), round trip `rtt_s` when it is empty."""

    def __init__(
        self,
        flows: list[Flow],
        *,
        rate_bps: float,
        rtt_s: float,
        queue_bytes: int | None = None,
        channel: ChannelFactory | None = None,
    ) -> None:
        self.flows = flows
        self.rate_bps = rate_bps
        self.link = Link(
            rate_bps, rtt_s / 2, queue_bytes, channel, slot_s=WIRE * 8 / rate_bps, loss_from_start=channel is not None
        )
        self._back = [Link(1e9, rtt_s / 2, 1 << 24) for _ in flows]
        self._network = SharedNetwork([(flow, flow.receiver) for flow in flows], self.link, self._back)
        self.queue: list[tuple[float, float]] = []  # (time, delay in seconds), every 5 ms

    @property
    def now(self) -> float:
        return self._network.now

    def run(self, until_s: float) -> Bottleneck:
        """Run on to a time, sampling the queue."""
        step_s = 0.005
        while self._network.now < until_s:
            self._network.run(until=min(self._network.now + step_s, until_s))
            self.queue.append((self._network.now, self.link.queue_delay_s(self._network.now)))
        return self

    def change(self, *, rate_bps: float | None = None, rtt_s: float | None = None, dead: bool | None = None) -> None:
        """Change the path now; an outage holds both ways."""
        half_s = None if rtt_s is None else rtt_s / 2
        self.link.change(self.now, rate_bps=rate_bps, owd_s=half_s, dead=dead)
        for link in self._back:
            link.change(self.now, owd_s=half_s, dead=dead)

    def shares(self, start_s: float, end_s: float) -> list[float]:
        """What each flow delivered, as a share of the link."""
        return [flow.delivered_bps(start_s, end_s) / self.rate_bps for flow in self.flows]

    def queue_delay(self, start_s: float, end_s: float) -> tuple[float, float]:
        """Mean and 95th percentile of the time that a packet would have waited, in seconds."""
        chosen = sorted(delay_s for time_s, delay_s in self.queue if start_s <= time_s < end_s)
        return sum(chosen) / len(chosen), chosen[int(0.95 * (len(chosen) - 1))]


def jain(shares: list[float]) -> float:
    """Jain's index of fairness: 1 for equal shares, 1/n when one has all."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))
