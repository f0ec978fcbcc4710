"""One hand-off on the slot clock: the shipped sender and receiver, joined by a lossy link in virtual time.

One packet a slot; the loss of slot t is the same for every scheme. Fates reach the sender
one round trip after the slot, feedback half a round trip after it was made. Nothing here decides anything: what is
measured is what ships.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import xxhash
from numpy.typing import NDArray

from quic_pfec.fec.codec import Encoder
from quic_pfec.schedule.policies import make_policy
from quic_pfec.sim.channel import SplitMix64
from quic_pfec.sim.oracle import OracleBound, oracle
from quic_pfec.transfer.ledger import LossEstimate
from quic_pfec.transfer.receiver import Frozen, ManifestReceived, Receiver, ReceiverStats
from quic_pfec.transfer.sender import FrameKind, Path, Sender, SenderStats, TraceRow
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
    (fates, losses) that the connection has seen before this transfer.
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


def run_episode(
    unit_packets: NDArray[np.int64],
    utility: NDArray[np.float64],
    losses: NDArray[np.bool_],
    settings: Settings,
    *,
    keep_trace: bool = False,
) -> EpisodeResult:
    """Runs one hand-off of units that are sent in the order given.

    unit_packets: packets of each unit, in transmission order; utility: of each unit; losses: bool per slot, at least
    `settings.slots` long.
    """
    if len(losses) < settings.slots:
        raise ValueError(f"{settings.slots} slots need as many losses, {len(losses)} given")
    slot_s, rtt_s = settings.slot_s, settings.rtt_slots * settings.slot_s
    encoder, unit_of_sid = fill_encoder(unit_packets, settings.symbol_size, settings.seed)
    manifest = bytes(range(250))
    deadline_s = (settings.slots + 0.5) * slot_s + rtt_s / 2
    trace: list[TraceRow] = []
    sender = Sender(
        0,
        encoder,
        unit_of_sid,
        utility,
        manifest,
        make_policy(settings.scheduler),
        now=0.0,
        deadline_s=deadline_s,
        path=Path(rtt_s, rtt_s, slot_s),
        repair_budget=settings.repair_budget,
        degree=settings.degree,
        loss=LossEstimate(*settings.history),
        observer=trace.append if keep_trace else None,
    )
    receiver = Receiver(0, Limits(), 0.0)
    receiver.rtt_s = rtt_s
    sizes = np.array([unit_bytes(int(p), settings.symbol_size) for p in unit_packets], dtype=np.int64)
    chance = SplitMix64(settings.seed ^ 0x5EED)
    arrivals: deque[tuple[float, SourceFrame | RepairFrame | ManifestFrame]] = deque()
    fates: deque[tuple[float, int, bool]] = deque()
    feedback: deque[tuple[float, PfecAckFrame]] = deque()
    carried = np.full(settings.slots, 255, dtype=np.uint8)

    def receive(until: float) -> None:
        while True:
            timer_s = receiver.next_timer()
            arrival_s = arrivals[0][0] if arrivals else float("inf")
            now = min(arrival_s, timer_s if timer_s is not None else float("inf"))
            if now > until:
                return
            if arrival_s <= now:
                events = receiver.receive_batch([arrivals.popleft()[1]], now)
            else:
                events = receiver.on_timer(now)
            for event in events:
                if isinstance(event, ManifestReceived):
                    receiver.accept(sizes, encoder.count, settings.symbol_size, DigestSink(), now)
            if receiver.feedback_due(now):
                frame = receiver.feedback(now)
                if chance.uniform() >= settings.feedback_loss:
                    feedback.append((now + rtt_s / 2, frame))

    for slot in range(settings.slots):
        now = slot * slot_s
        receive(now)
        while feedback and feedback[0][0] <= now:
            sender.on_feedback(feedback.popleft()[1])
        while fates and fates[0][0] <= now:
            _, token, delivered = fates.popleft()
            sender.on_fate(token, delivered)
        for outgoing in sender.plan(now):
            carried[slot] = outgoing.kind
            lost = bool(losses[slot])
            if not lost:
                arrivals.append((now + rtt_s / 2, outgoing.frame))
            if outgoing.token is not None:
                seen = not lost and not (settings.fates_loss and chance.uniform() < settings.fates_loss)
                fates.append((now + rtt_s, outgoing.token, seen))
    receive(deadline_s + 1.0)

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
    frozen_s = receiver.frozen_s if receiver.frozen_s is not None else deadline_s
    return EpisodeResult(
        j_block=float((utility * complete).sum()) / total,
        j_frac=float((utility * present).sum()) / total,
        bound=oracle(losses[: settings.slots], unit_packets, utility),
        sender=sender.stats,
        receiver=receiver.stats,
        wrong_symbols=wrong,
        frozen_slot=frozen_s / slot_s,
        trace=trace,
        carried=carried,
        known=known,
    )


__all__ = ["EpisodeResult", "FrameKind", "Frozen", "Settings", "fill_encoder", "run_episode", "unit_bytes"]
