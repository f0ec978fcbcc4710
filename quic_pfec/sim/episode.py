"""One hand-off on the slot clock: the shipped sender and receiver, joined by a lossy link in virtual time.

One packet a slot; the loss of slot t is the same for every scheme. Fates reach the sender one round trip after the
slot, feedback half a round trip after it was made; computing takes no time. Nothing here decides anything: what is
measured is what ships. The compiled engine (`sim.engine`) does the same, packet by packet, some hundred times faster.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

import numpy as np
import xxhash
from numpy.typing import NDArray

from quic_pfec.fec.codec import Encoder
from quic_pfec.schedule.policies import Policy, make_policy
from quic_pfec.sim.channel import SplitMix64
from quic_pfec.sim.oracle import OracleBound, oracle
from quic_pfec.sim.timeline import PathStep, Timeline, timeline
from quic_pfec.transfer.ledger import LossEstimate
from quic_pfec.transfer.receiver import Frozen, ManifestReceived, Receiver, ReceiverStats
from quic_pfec.transfer.sender import FrameKind, Outgoing, Path, Sender, SenderStats, TraceRow
from quic_pfec.transfer.units import DIGEST_SIZE, DigestSink
from quic_pfec.wire.frames import (
    UNIT_HEADER_SIZE,
    ManifestFrame,
    PfecAckFrame,
    RepairFrame,
    SourceFrame,
    pack_unit_header,
)
from quic_pfec.wire.limits import Limits


@dataclass(frozen=True, slots=True)
class Settings:
    """One operating point.

    slots: T, packets that can leave and still arrive in time; rtt_slots: round-trip time in slots; slot_s: seconds a
    slot; scheduler: a name of `schedule.policies`; repair_budget: share of N or None; feedback_loss: share of PFEC_ACKs
    lost on the way back; fates_loss: share of packet fates that are reported lost although the packet arrived; history:
    (fates, losses) that the connection has seen before this transfer; feedback_delay_s, fates_delay_s: how much later
    than the path allows a PFEC_ACK and a fate come; reordering: share of packets that arrive, and whose fate comes,
    reordering_s later than the others; steps: changes of the path, times in slots being those before them.
    """

    slots: int
    rtt_slots: int
    slot_s: float = 112e-6
    scheduler: str = "hybrid"
    repair_budget: float | None = None
    degree: int = 48
    symbol_size: int = 64
    feedback_loss: float = 0.0
    fates_loss: float = 0.0
    history: tuple[int, int] = (0, 0)
    seed: int = 0
    feedback_delay_s: float = 0.0
    fates_delay_s: float = 0.0
    reordering: float = 0.0
    reordering_s: float = 0.0
    steps: tuple[PathStep, ...] = ()

    def timeline(self) -> Timeline:
        """The instants of this hand-off. Raises LocalError for steps out of order."""
        return timeline(self.slots, self.rtt_slots * self.slot_s, self.slot_s, self.steps)


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """What the receiver had at its deadline, beside the bound of the same losses.

    `wrong_symbols` counts known symbols that differ from the sender's: it must be 0. `carried`: uint8 per slot, the
    `FrameKind` that it carried, 255 for none. `known`: bool per symbol, received or decoded in time.
    """

    j_block: float
    j_frac: float
    bound: OracleBound
    sender: SenderStats
    receiver: ReceiverStats
    wrong_symbols: int
    frozen_slot: float
    trace: list[TraceRow] = field(default_factory=list)
    carried: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, dtype=np.uint8))
    known: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))


def unit_bytes(packets: int, symbol_size: int) -> int:
    """A unit size that fills `packets` symbols of `symbol_size` bytes."""
    return packets * (symbol_size - UNIT_HEADER_SIZE)


def fill_encoder(unit_packets: NDArray[np.int64], symbol_size: int, seed: int) -> tuple[Encoder, NDArray[np.int32]]:
    """An encoder full of seeded random units, in the order of their ids, and the unit of every sid."""
    payload = symbol_size - UNIT_HEADER_SIZE
    encoder = Encoder(symbol_size, int(unit_packets.sum()))
    rng = np.random.default_rng(seed)
    for unit, packets in enumerate(unit_packets):
        body = rng.bytes(int(packets) * payload - DIGEST_SIZE)
        data = body + xxhash.xxh3_64_intdigest(body, seed=unit).to_bytes(DIGEST_SIZE, "little")
        for fragment in range(int(packets)):
            part = data[fragment * payload : (fragment + 1) * payload]
            encoder.push(pack_unit_header(unit, fragment) + part)
    return encoder, np.repeat(np.arange(len(unit_packets), dtype=np.int32), unit_packets)


class _Link:
    """What is on the way, there and back, and the receiver at the far end. Heaps of (time, number, ...)."""

    def __init__(
        self, settings: Settings, sender: Sender, receiver: Receiver, sizes: NDArray[np.int64], symbols: int
    ) -> None:
        self.rtt_s = settings.rtt_slots * settings.slot_s
        self._settings = settings
        self._sender = sender
        self._receiver = receiver
        self._sizes = sizes
        self._symbols = symbols
        self._chance = SplitMix64(settings.seed ^ 0x5EED)
        self._arrivals: list[tuple[float, int, SourceFrame | RepairFrame | ManifestFrame]] = []
        self._fates: list[tuple[float, int, int, bool]] = []
        self._feedback: list[tuple[float, int, PfecAckFrame]] = []
        self._number = 0
        receiver.rtt_s = self.rtt_s

    def send(self, outgoing: Outgoing, lost: bool, now: float) -> None:
        chosen = self._settings
        late_s = 0.0
        self._number += 1
        if chosen.reordering and self._chance.uniform() < chosen.reordering:
            late_s = chosen.reordering_s
        if not lost:
            heappush(self._arrivals, (now + (self.rtt_s / 2 + late_s), self._number, outgoing.frame))
        if outgoing.token is not None:
            seen = not lost and not (chosen.fates_loss and self._chance.uniform() < chosen.fates_loss)
            back_s = self.rtt_s + late_s
            heappush(self._fates, (now + back_s + chosen.fates_delay_s, self._number, outgoing.token, seen))

    def turn(self, now: float) -> None:
        """Everything that happens until `now`."""
        self.receive(now)
        while self._feedback and self._feedback[0][0] <= now:
            self._sender.on_feedback(heappop(self._feedback)[2])
        while self._fates and self._fates[0][0] <= now:
            _, _, token, delivered = heappop(self._fates)
            self._sender.on_fate(token, delivered)

    def receive(self, until: float) -> None:
        receiver = self._receiver
        while True:
            timer_s = receiver.next_timer()
            arrival_s = self._arrivals[0][0] if self._arrivals else inf
            now = min(arrival_s, inf if timer_s is None else timer_s)
            if now > until:
                return
            if arrival_s <= now:
                events = receiver.receive_batch([heappop(self._arrivals)[2]], now)
            else:
                events = receiver.on_timer(now)
            for event in events:
                if isinstance(event, ManifestReceived):
                    receiver.accept(self._sizes, self._symbols, self._settings.symbol_size, DigestSink(), now)
            # A slice of what waits is materialised in each call. Here the rest follows at once, before any feedback.
            while (due_s := receiver.event_timer()) is not None and due_s <= now:
                receiver.on_timer(now)
            if receiver.feedback_due(now):
                frame = receiver.feedback(now)
                if self._chance.uniform() >= self._settings.feedback_loss:
                    at_s = now + self.rtt_s / 2 + self._settings.feedback_delay_s
                    heappush(self._feedback, (at_s, frame.sequence, frame))


def run_episode(
    unit_packets: NDArray[np.int64],
    utility: NDArray[np.float64],
    losses: NDArray[np.bool_],
    settings: Settings,
    *,
    keep_trace: bool = False,
    policy: Policy | None = None,
) -> EpisodeResult:
    """Runs one hand-off of units that are sent in the order given.

    unit_packets: packets of each unit, in transmission order; utility: of each unit; losses: bool per slot, at least
    `settings.slots` long; policy: in the place of the one that the settings name.
    """
    if len(losses) < settings.slots:
        raise ValueError(f"{settings.slots} slots need as many losses, {len(losses)} given")
    slots = settings.timeline()
    path = slots.steps[0]
    encoder, unit_of_sid = fill_encoder(unit_packets, settings.symbol_size, settings.seed)
    manifest = bytes(range(250))
    trace: list[TraceRow] = []
    sender = Sender(
        0,
        encoder,
        unit_of_sid,
        utility,
        manifest,
        make_policy(settings.scheduler) if policy is None else policy,
        now=0.0,
        deadline_s=slots.deadline_s,
        path=Path(path.rtt_s, path.rtt_s, path.slot_s),
        repair_budget=settings.repair_budget,
        degree=settings.degree,
        loss=LossEstimate(*settings.history),
        observer=trace.append if keep_trace else None,
    )
    receiver = Receiver(0, Limits(), 0.0)
    sizes = np.array([unit_bytes(int(p), settings.symbol_size) for p in unit_packets], dtype=np.int64)
    link = _Link(settings, sender, receiver, sizes, encoder.count)
    carried = np.full(settings.slots, 255, dtype=np.uint8)
    changes = {step.slot: step for step in slots.steps}
    min_rtt_s = path.rtt_s
    for slot, now in enumerate(slots.times_s.tolist()):
        if slot in changes:
            path = changes[slot]
            min_rtt_s = min(min_rtt_s, path.rtt_s)
            sender.update_path(Path(path.rtt_s, min_rtt_s, path.slot_s))
            receiver.rtt_s = link.rtt_s = path.rtt_s
        link.turn(now)
        for outgoing in sender.plan(now):
            carried[slot] = outgoing.kind
            link.send(outgoing, bool(losses[slot]), now)
    link.receive(slots.deadline_s + 1.0)

    table = receiver.units
    if table is None:  # no copy of the manifest came
        present = np.zeros(len(unit_packets))
        complete = np.zeros(len(unit_packets), dtype=np.bool_)
    else:
        present = np.array([table.present(unit) for unit in range(len(unit_packets))]) / unit_packets
        complete = table.complete
    total = float(utility.sum())
    decoder = receiver._decoder
    wrong = 0
    known = np.zeros(encoder.count, dtype=np.bool_)
    if decoder is not None:
        for start, stop in [(0, decoder.prefix), *decoder.known_ranges(encoder.count)]:
            known[start:stop] = True
            wrong += sum(decoder.symbol(sid) != encoder.symbol(sid) for sid in range(start, stop))
    frozen_s = receiver.frozen_s if receiver.frozen_s is not None else slots.deadline_s
    return EpisodeResult(
        j_block=float((utility * complete).sum()) / total,
        j_frac=float((utility * present).sum()) / total,
        bound=oracle(losses[: settings.slots], unit_packets, utility),
        sender=sender.stats,
        receiver=receiver.stats,
        wrong_symbols=wrong,
        frozen_slot=frozen_s / settings.slot_s,
        trace=trace,
        carried=carried,
        known=known,
    )


__all__ = ["EpisodeResult", "FrameKind", "Frozen", "Settings", "fill_encoder", "run_episode", "unit_bytes"]
