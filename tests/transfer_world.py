"""What the transfer tests share: a transfer of random units, frames of it by hand, and a sender under any policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quic_pfec.fec.codec import Encoder
from quic_pfec.schedule.policies import Policy, Window, make_policy
from quic_pfec.schedule.state import Action, State
from quic_pfec.sim.episode import fill_encoder, unit_bytes
from quic_pfec.transfer.receiver import Receiver
from quic_pfec.transfer.sender import Path, Sender
from quic_pfec.transfer.units import DigestSink, UnitSink
from quic_pfec.wire.frames import AckStatus, ManifestFrame, PfecAckFrame, RepairFrame, RepairHeader, SourceFrame
from quic_pfec.wire.limits import Limits

SIZE = 64  # bytes a symbol
SLOT_S = 1e-3
MANIFEST = bytes(range(200))


@dataclass(frozen=True)
class World:
    """One transfer as both sides know it: its symbols, the unit of each, and the units' sizes in bytes."""

    encoder: Encoder
    unit_of_sid: NDArray[np.int32]
    sizes: NDArray[np.int64]

    @property
    def symbols(self) -> int:
        return self.encoder.count

    def source(self, sid: int, *, of: int | None = None) -> SourceFrame:
        """The SOURCE of `sid`; `of`: with the bytes of another symbol."""
        return SourceFrame(0, sid, bytes(self.encoder.symbol(sid if of is None else of)))

    def repair(self, number: int, first: int, span: int, *, degree: int = 255, lie: bool = False) -> RepairFrame:
        """A repair over [first, first + span); `lie`: with bytes that no honest sender writes."""
        symbol = self.encoder.repair(0, number, first, degree, 0, b"", 0, span)
        if lie:
            symbol = bytes(byte ^ 0x55 for byte in symbol)
        return RepairFrame(RepairHeader(0, number, first, degree, 0, b"", 0, span), symbol)


def world(units: list[int], seed: int = 1) -> World:
    """A transfer of units with so many packets each."""
    packets = np.array(units, dtype=np.int64)
    encoder, unit_of_sid = fill_encoder(packets, SIZE, seed)
    return World(encoder, unit_of_sid, np.array([unit_bytes(count, SIZE) for count in units], dtype=np.int64))


def manifest_frame(remaining_s: float = 1.0, data: bytes = MANIFEST) -> ManifestFrame:
    return ManifestFrame(0, len(data), 0, round(remaining_s * 1e6), data)


def receiver(
    of: World, *, limits: Limits | None = None, deadline_s: float = 1.0, sink: UnitSink | None = None
) -> Receiver:
    """A receiver that took the manifest at 0.0 and accepted it."""
    made = Receiver(0, limits or Limits(), 0.0)
    made.receive_batch([manifest_frame(deadline_s)], 0.0)
    made.accept(of.sizes, of.symbols, SIZE, sink or DigestSink(), 0.0)
    return made


@dataclass
class Always:
    """A policy that knows one answer; `asked` counts."""

    action: Action
    window: Window = "sack"
    asked: int = 0

    def decide(self, state: State) -> Action:
        self.asked += 1
        return self.action


def sender(of: World, policy: Policy | str = "none", *, utility: list[float] | None = None, **options: Any) -> Sender:
    """A sender of `of`: one packet a millisecond, RTT 10 ms, deadline at 1 s unless told otherwise."""
    arguments: dict[str, Any] = {"now": 0.0, "deadline_s": 1.0, "path": Path(0.010, 0.010, SLOT_S)} | options
    values = np.ones(len(of.sizes)) if utility is None else np.array(utility)
    manifest = arguments.pop("manifest", MANIFEST)
    chosen = make_policy(policy) if isinstance(policy, str) else policy
    return Sender(
        arguments.pop("transfer_id", 0), of.encoder, of.unit_of_sid, values, manifest, chosen, **arguments
    )  # fmt: skip


def ack(sequence: int, next_sid: int, seen_span: int = 0, **fields: Any) -> PfecAckFrame:
    """A PFEC_ACK by hand: credit 4096 and nothing lacking unless told otherwise."""
    times = {"remaining_us": 500_000, "ack_delay_us": 0}
    values: dict[str, Any] = {"status": AckStatus.RUNNING, "deficit": 0, "credit": 4096, "ranges": ()} | times
    return PfecAckFrame(transfer_id=0, sequence=sequence, next_sid=next_sid, seen_span=seen_span, **(values | fields))
