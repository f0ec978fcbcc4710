"""The sending half of one hand-off: it answers "what does the next packet carry?" at the moment a packet may leave.

Nothing waits in a queue: `plan` asks the policy with everything known at `now`, and what it returns is sent. Packet
fates (`on_fate`) and the receiver's PFEC_ACK (`on_feedback`) come back in. The shell around it (QUIC, UDP, the
simulator) owns sockets, pacing and congestion control, and tells the sender the path as plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quic_pfec.schedule.policies import Policy
from quic_pfec.schedule.state import IDLE, Action, ActionKind, State
from quic_pfec.transfer.ledger import Ledger, LossEstimate, repair_header
from quic_pfec.wire.errors import ErrorCode, LocalError, PeerError
from quic_pfec.wire.frames import (
    AckStatus,
    ManifestFrame,
    PfecAckFrame,
    RepairFrame,
    SourceFrame,
    repair_overhead,
    source_overhead,
)
from quic_pfec.wire.limits import SPARE_FEEDBACK

MANIFEST_EVERY = 16  # packets; beyond a mean bad spell of 10 (wire-format section 8)
MANIFEST_COPIES = 3  # at least, even when feedback comes at once
MANIFEST_CHUNK = 1024  # bytes of manifest a frame: fits a 1,200-byte datagram
MAX_HEAD_SPAN = 256  # ids in a repair's bitmap: 32 bytes, what a 1,452-byte datagram has room for


class FrameKind(IntEnum):
    MANIFEST = 0
    SOURCE = 1
    REPAIR = 2
    RESEND = 3


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One frame that must now be sent. `token` comes back through `on_fate`; None for a manifest copy."""

    kind: FrameKind
    frame: SourceFrame | RepairFrame | ManifestFrame
    token: int | None


@dataclass(frozen=True, slots=True)
class Path:
    """The path as the scheduler sees it. Seconds; `slot_s` is the time one packet takes at the present rate.

    `reserved_s`: link time already promised to transfers with an earlier deadline.
    """

    rtt_s: float
    min_rtt_s: float
    slot_s: float
    reserved_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TraceRow:
    """The window at one packet: what was sent, the decoded prefix, the next new symbol, its span, the deficit."""

    now: float
    kind: FrameKind
    prefix: int
    next: int
    window: int
    deficit: int


@dataclass(slots=True)
class SenderStats:
    """Counters of one transfer; bytes are those of frames. slots_credit: times that a new symbol lacked credit."""

    source: int = 0
    repair: int = 0
    resent: int = 0
    manifests: int = 0
    frame_bytes: int = 0
    losses: int = 0
    feedback: int = 0
    feedback_ignored: int = 0
    slots_credit: int = 0
    first_packet_s: float | None = None
    last_packet_s: float | None = None


class SymbolStore(Protocol):
    """The part of the codec's Encoder that the sender uses."""

    @property
    def count(self) -> int: ...

    @property
    def symbol_size(self) -> int: ...

    def symbol(self, sid: int, /) -> memoryview: ...

    def repair(
        self, transfer_id: int, repair_number: int, first_sid: int, degree: int, head_span: int, head: bytes,
        tail_offset: int, tail_span: int, /,
    ) -> bytes: ...  # fmt: skip


class Sender:
    """Plans the frames of one transfer.

    encoder: holds all N symbols, sid order = transmission order.
    unit_of_sid: int32[N]; unit_utility: float64 per unit id, any scale.
    deadline_s: when the receiver freezes, on the clock of `now`.
    repair_budget: repairs plus resends allowed, as a share of N; None = unlimited.
    credit, max_window, max_degree: the peer's transport parameter, already capped by our own limits.
    degree: K, symbols combined in one repair.

    Raises LocalError on an empty transfer or manifest, a budget that is no share or a degree out of range.
    """

    def __init__(
        self,
        transfer_id: int,
        encoder: SymbolStore,
        unit_of_sid: NDArray[np.int32],
        unit_utility: NDArray[np.float64],
        manifest: bytes,
        policy: Policy,
        *,
        now: float,
        deadline_s: float,
        path: Path,
        repair_budget: float | None = None,
        credit: int = 4096,
        max_window: int = 4096,
        max_degree: int = 255,
        degree: int = 48,
        loss: LossEstimate | None = None,
        observer: Callable[[TraceRow], None] | None = None,
    ) -> None:
        symbols = encoder.count
        if symbols == 0 or len(unit_of_sid) != symbols:
            raise LocalError(f"a transfer needs at least one symbol and a unit for each: {symbols}, {len(unit_of_sid)}")
        if not manifest:
            raise LocalError("a transfer needs a manifest")
        if repair_budget is not None and not 0 <= repair_budget < float("inf"):
            raise LocalError(f"repair_budget is a share of the symbols, finite and not negative: {repair_budget}")
        if not 1 <= degree <= max_degree:
            raise LocalError(f"degree must be in 1..{max_degree}: {degree}")
        self.transfer_id = transfer_id
        self.symbols = symbols
        self.symbol_size = encoder.symbol_size
        self.stats = SenderStats()
        self.deadline_s = deadline_s
        self.status = AckStatus.RUNNING
        self.remaining_reported_s: float | None = None
        self._encoder = encoder
        self._manifest = manifest
        self._policy = policy
        self._degree = degree
        self._max_window = max_window
        self._credit = credit
        self._budget = float("inf") if repair_budget is None else float(int(repair_budget * symbols + 1e-9))
        self._observer = observer
        counts = np.bincount(unit_of_sid, minlength=len(unit_utility))
        density = unit_utility / np.maximum(1, counts)
        self.ledger = Ledger(-density[unit_of_sid], loss or LossEstimate())
        # For every sid: packets of its unit, and its place in it (units are contiguous in transmission order).
        starts = np.flatnonzero(np.concatenate(([True], unit_of_sid[1:] != unit_of_sid[:-1])))
        lengths = np.diff(np.concatenate((starts, [symbols])))
        self._unit_packets = np.repeat(lengths, lengths).astype(np.int32).data
        self._unit_position = (np.arange(symbols) - np.repeat(starts, lengths)).astype(np.int32).data
        self._path = path
        self._repair_number = 0
        self._burst: Action | None = None
        self._since_manifest = MANIFEST_EVERY
        self._manifest_retry_s = float("inf")
        self._manifest_queue: list[int] = []
        self._feedback_sequence = -1
        self._feedback_prefix = 0
        self._feedback_credit = 0
        self._feedback_deficit = 0
        self._heard = False
        self._chosen: tuple[float, Action] | None = None
        self._state = State(sources_total=symbols)
        self._state.slots_total = max(1, self._slots_left(now))

    # the path

    def update_path(self, path: Path) -> None:
        """The controller's present rate and the round-trip time; call it when they change noticeably."""
        if path != self._path:
            self._path = path
            self._chosen = None

    @property
    def send_cutoff_s(self) -> float:
        """Nothing sent after this arrives before the freeze (deadline minus the one-way delay)."""
        return self.deadline_s - self._path.min_rtt_s / 2

    def _slots_left(self, now: float) -> int:
        return max(0, int((self.send_cutoff_s - now - self._path.reserved_s) / self._path.slot_s))

    @property
    def slots_total(self) -> int:
        return self._state.slots_total

    # deciding

    def finished(self, now: float) -> bool:
        """True when nothing more can help: the receiver froze or has everything, or the last packet would be late."""
        return (
            self.status is not AckStatus.RUNNING
            or self.ledger.known == self.symbols
            or now >= self.send_cutoff_s
        )  # fmt: skip

    def pending_packets(self) -> int:
        """A lower bound of the packets this transfer still wants: new symbols and known losses."""
        return self.symbols - self.ledger.next + self.ledger.known_lost

    def ready(self, now: float) -> bool:
        """Is there a frame to send now? Cheap, and `plan` then sends exactly what was chosen."""
        if self.finished(now):
            return False
        return self._manifest_due(now) or self._choose(now) is not IDLE

    def next_timer(self) -> float | None:
        """When to ask again without any other event: the next copy of the manifest, or the cut-off; None = never."""
        if self.status is not AckStatus.RUNNING:
            return None
        return self.send_cutoff_s if self._heard else min(self._manifest_retry_s, self.send_cutoff_s)

    def state(self, now: float) -> State:
        """The policy's view at `now`; the object is reused by later calls."""
        ledger, state = self.ledger, self._state
        state.slots_left = self._slots_left(now)
        state.rtt_slots = self._path.rtt_s / self._path.slot_s
        state.sources_sent = ledger.next
        more = ledger.next < self.symbols
        state.unit_packets = self._unit_packets[ledger.next] if more else 0
        state.unit_position = self._unit_position[ledger.next] if more else 0
        state.in_flight = ledger.in_flight
        state.repairs_in_flight = ledger.repairs_in_flight
        state.repairs_sent = self.stats.repair
        state.known_lost = ledger.known_lost
        state.unresolved = ledger.unresolved
        state.window = ledger.next - ledger.prefix
        state.feedback_deficit = self._feedback_deficit
        state.loss_short = ledger.loss.short
        state.loss_long = ledger.loss.long
        state.budget_left = self._budget
        state.can_source = more and ledger.next < self._credit
        state.can_repair = self._budget >= 1 and ledger.unresolved > 0
        state.can_resend = self._budget >= 1 and ledger.known_lost > 0
        return state

    def _choose(self, now: float) -> Action:
        if self._chosen is not None and self._chosen[0] == now:
            return self._chosen[1]
        state = self.state(now)
        action = self._burst
        if action is None or not _allowed(action, state):
            self._burst = None
            action = self._policy.decide(state)
            if not _allowed(action, state):
                action = IDLE
        if action.kind is ActionKind.IDLE:
            action = IDLE
        if action.kind is not ActionKind.RESEND and _blocked_by_credit(state):
            self.stats.slots_credit += 1
        self._chosen = (now, action)
        return action

    def _manifest_due(self, now: float) -> bool:
        if self._manifest_queue:
            return True
        if not self._heard and (self._since_manifest >= MANIFEST_EVERY or now >= self._manifest_retry_s):
            return True
        all_out = self.ledger.next == self.symbols
        return self.stats.manifests < MANIFEST_COPIES and (all_out or self._since_manifest >= MANIFEST_EVERY)

    def plan(self, now: float, max_packets: int = 1, bytes_free: int = 1425) -> list[Outgoing]:
        """The next frames, one a packet, at most `max_packets`; each fits `bytes_free` bytes (frame type included).

        What is returned counts as sent. An empty list: nothing to send now, or the next frame does not fit.
        """
        batch: list[Outgoing] = []
        while len(batch) < max_packets and not self.finished(now):
            outgoing = (
                self._plan_manifest(now, bytes_free) if self._manifest_due(now) else self._plan_symbol(now, bytes_free)
            )
            if outgoing is None:
                break
            if self.stats.first_packet_s is None:
                self.stats.first_packet_s = now
            self.stats.last_packet_s = now
            self.stats.frame_bytes += outgoing.frame.size()
            batch.append(outgoing)
        return batch

    def _plan_manifest(self, now: float, bytes_free: int) -> Outgoing | None:
        if not self._manifest_queue:
            self._manifest_queue = list(range(0, len(self._manifest), MANIFEST_CHUNK))
        offset = self._manifest_queue[0]
        # The sender states what is left, because only it has RTT samples (wire-format section 8).
        remaining_s = max(0.0, self.deadline_s - now - self._path.min_rtt_s / 2)
        frame = ManifestFrame(
            transfer_id=self.transfer_id,
            total_length=len(self._manifest),
            offset=offset,
            remaining_us=int(remaining_s * 1e6),
            data=self._manifest[offset : offset + MANIFEST_CHUNK],
        )
        if frame.size() > bytes_free:
            return None
        self._manifest_queue.pop(0)
        if not self._manifest_queue:
            self.stats.manifests += 1
            self._since_manifest = 0
            # Also while nothing else may be sent, for want of credit say: about a PTO later (RFC 9002 §6.2.1).
            self._manifest_retry_s = now + 1.5 * self._path.rtt_s + 0.025
        return Outgoing(FrameKind.MANIFEST, frame, None)

    def _plan_symbol(self, now: float, bytes_free: int) -> Outgoing | None:
        action = self._choose(now)
        if action is IDLE:
            return None
        size = self._encoder.symbol_size
        ledger = self.ledger
        if action.kind is ActionKind.REPAIR:
            room = bytes_free - size - repair_overhead(self.transfer_id, 0, 0, self._max_window) - 8
            if room < 1:
                return None
            header = repair_header(
                self.transfer_id,
                self._repair_number,
                self._degree,
                ledger.full_set(self._max_window)
                if self._policy.window == "full"
                else ledger.sack_set(self._max_window, min(MAX_HEAD_SPAN, 8 * room)),
            )
            symbol = self._encoder.repair(
                header.transfer_id, header.repair_number, header.first_sid, header.degree, header.head_span,
                header.head, header.tail_offset, header.tail_span,
            )  # fmt: skip
            self._repair_number += 1
            self._budget -= 1
            self.stats.repair += 1
            outgoing = Outgoing(FrameKind.REPAIR, RepairFrame(header, symbol), ledger.send_repair())
        else:
            if size + source_overhead(self.transfer_id) > bytes_free:
                return None
            if action.kind is ActionKind.RESEND:
                sid, token = ledger.send_lost()
                self._budget -= 1
                self.stats.resent += 1
                kind = FrameKind.RESEND
            else:
                sid, token = ledger.send_source()
                self.stats.source += 1
                kind = FrameKind.SOURCE
            frame = SourceFrame(self.transfer_id, sid, self._encoder.symbol(sid))
            outgoing = Outgoing(kind, frame, token)
        self._burst = Action(action.kind, action.count - 1) if action.count > 1 else None
        self._since_manifest += 1
        self._chosen = None
        if self._observer is not None:
            row = TraceRow(
                now, outgoing.kind, ledger.prefix, ledger.next, ledger.next - ledger.prefix, self._feedback_deficit
            )
            self._observer(row)
        return outgoing

    # learning

    def on_fate(self, token: int, delivered: bool, *, probe: bool = False) -> None:
        """What became of the packet that carried `token`; `probe`: declared lost only to probe (RFC 9002 §6.2.4)."""
        self._chosen = None
        self.stats.losses += not delivered and not probe
        self.ledger.fate(token, delivered, probe=probe)

    def on_feedback(self, frame: PfecAckFrame) -> None:
        """A PFEC_ACK. Old ones are ignored; one that contradicts what we sent raises PeerError (security note 3)."""
        stats = self.stats
        stats.feedback += 1
        sent = stats.source + stats.repair + stats.resent + stats.manifests
        if frame.sequence <= self._feedback_sequence or stats.feedback > sent + SPARE_FEEDBACK:
            stats.feedback_ignored += 1  # rows 19 and 21
            return
        if frame.next_sid < self._feedback_prefix or frame.credit < self._feedback_credit:
            raise PeerError(ErrorCode.PROTOCOL_VIOLATION, "PFEC_ACK goes backwards")  # row 16
        if frame.credit > max(self.symbols, self._credit):
            raise PeerError(ErrorCode.FLOW_CONTROL_ERROR, "PFEC_ACK grants more than the transfer has")  # row 17
        next_sid = self.ledger.next
        if frame.next_sid + frame.seen_span > next_sid or frame.deficit > frame.seen_span:
            raise PeerError(ErrorCode.PROTOCOL_VIOLATION, "PFEC_ACK knows symbols never sent")  # row 18
        self._chosen = None
        self._heard = True
        self._feedback_sequence = frame.sequence
        self._feedback_prefix = frame.next_sid
        self._feedback_credit = frame.credit
        self._feedback_deficit = frame.deficit
        self._credit = max(self._credit, frame.credit)
        self.remaining_reported_s = frame.remaining_us / 1e6
        self.status = AckStatus(max(self.status, frame.status))
        ledger = self.ledger
        ledger.learn_known(0, frame.next_sid)
        for start, stop in frame.ranges:
            ledger.learn_known(start, stop)


def _allowed(action: Action, state: State) -> bool:
    """The masks every policy is under: budget, credit, time (a burst must fit what is left)."""
    match action.kind:
        case ActionKind.SOURCE:
            return state.can_source
        case ActionKind.REPAIR:
            return state.can_repair and action.count <= min(state.budget_left, max(1, state.slots_left))
        case ActionKind.RESEND:
            return state.can_resend
    return False


def _blocked_by_credit(state: State) -> bool:
    """Only missing credit keeps the sender from sending new symbols."""
    return state.sources_sent < state.sources_total and not state.can_source
