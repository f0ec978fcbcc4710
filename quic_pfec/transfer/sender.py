"""The sending half of one hand-off: it answers "what does the next packet carry?" at the moment a packet may leave.

Nothing waits in a queue: `plan` asks the policy with everything known at `now`, and what it returns is sent. Packet
fates (`on_fate`) and the receiver's PFEC_ACK (`on_feedback`) come back in. The shell around it (QUIC, UDP, the
simulator) owns sockets, pacing and congestion control, and tells the sender the path as plain numbers. Here arguments
and feedback are checked and frames made; what to send is planned in compiled code (`transfer.planner` says how). Rows
are those of docs/wire.md §10.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from quic_pfec.schedule import compiled
from quic_pfec.schedule.flec import FlecCounters
from quic_pfec.schedule.policies import Policy
from quic_pfec.schedule.state import State
from quic_pfec.transfer import ledger, planner
from quic_pfec.transfer.ledger import LossEstimate, repair_header
from quic_pfec.wire.errors import ErrorCode, LocalError, PeerError
from quic_pfec.wire.frames import AckStatus, ManifestFrame, PfecAckFrame, RepairFrame, SourceFrame, source_overhead
from quic_pfec.wire.limits import SPARE_FEEDBACK


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


_KINDS = tuple(FrameKind)


@dataclass(frozen=True, slots=True)
class FrameRun:
    """What `Sender.plan_into` wrote: frame i, its type first, is lengths[i] bytes at `offset + i * stride`.

    kinds: a `FrameKind` each; tokens: as `Outgoing.token`.
    """

    kinds: list[int]
    lengths: list[int]
    tokens: list[int | None]


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
    """Counters of one transfer; bytes are those of frames. slots_credit: times that a new symbol lacked credit.

    overridden, guarded: `planner.Planner.overrides`.
    """

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
    overridden: int = 0
    guarded: int = 0


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

    def symbol_into(self, sid: int, out: Any, offset: int, /) -> None: ...

    def repair_into(
        self, transfer_id: int, repair_number: int, first_sid: int, degree: int, head_span: int, head: bytes,
        tail_offset: int, tail_span: int, out: Any, offset: int, /,
    ) -> None: ...  # fmt: skip


class Sender:
    """Plans the frames of one transfer.

    encoder: holds all N symbols, sid order = transmission order.
    unit_of_sid: int32[N]; unit_utility: float64 per unit id, any scale.
    deadline_s: when the receiver freezes, on the clock of `now`.
    repair_budget: repairs plus resends allowed, as a share of N; None = unlimited.
    credit, max_window, max_degree: the peer's transport parameter, already capped by our own limits.
    degree: K, symbols combined in one repair, unless the policy asks for more.
    policy: compiled, as `make_policy` gives it, or any object of the protocol; that one is called at every decision,
    and told of packets and fates if it is a `schedule.flec.Listener`. Losses are resent by utility, or in the order of
    sending if it has a true `oldest_first`.
    late_s: late repair was asked for (docs/wire.md §8): from the cut-off on, the same policy goes on by a second
    deadline, so long after the first, under the same budget. It ends earlier when a PFEC_ACK says so.

    Raises LocalError on an empty transfer or manifest, a budget that is no share or a degree out of range.
    """

    # The compiled ones, where they were built; the twins have the same interface, and stand for both in annotations.
    ledger_type: ClassVar[Any] = compiled.native.Ledger if compiled.AVAILABLE else ledger.Ledger
    planner_type: ClassVar[Any] = compiled.native.Planner if compiled.AVAILABLE else planner.Planner

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
        late_s: float = 0.0,
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
        source_overhead(transfer_id)  # LocalError if it is none
        self.transfer_id = transfer_id
        self.symbols = symbols
        self.symbol_size = encoder.symbol_size
        self.deadline_s = deadline_s
        self.status = AckStatus.RUNNING
        self.remaining_reported_s: float | None = None
        self._encoder = encoder
        self._manifest = manifest
        self._initial_credit = credit
        self._observer = observer
        self._path = path
        self._late_s = late_s
        self._first: tuple[SenderStats, int] | None = None  # stats and slots of the time before the deadline
        self._feedback = 0
        self._feedback_ignored = 0
        self._feedback_sequence = -1
        self._feedback_prefix = 0
        self._feedback_credit = 0
        self._feedback_deficit = 0
        counts = np.bincount(unit_of_sid, minlength=len(unit_utility))
        density = unit_utility / np.maximum(1, counts)
        # Units are contiguous in transmission order.
        starts = np.flatnonzero(np.concatenate(([True], unit_of_sid[1:] != unit_of_sid[:-1])))
        lengths = np.diff(np.concatenate((starts, [symbols])))
        oldest_first = getattr(policy, "oldest_first", False)
        priority = np.arange(symbols, dtype=np.float64) if oldest_first else (-density[unit_of_sid]).astype(np.float64)
        self.ledger: ledger.Ledger = self.ledger_type(priority, LossEstimate() if loss is None else loss)
        self._planner: planner.Planner = self.planner_type(
            self.ledger,
            policy,
            np.repeat(lengths, lengths).astype(np.int32),
            (np.arange(symbols) - np.repeat(starts, lengths)).astype(np.int32),
            bytes(manifest),
            now=now,
            deadline_s=deadline_s,
            transfer_id=transfer_id,
            symbol_size=self.symbol_size,
            degree=degree,
            max_degree=max_degree,
            max_window=max_window,
            credit=credit,
            budget=float("inf") if repair_budget is None else float(int(repair_budget * symbols + 1e-9)),
            rtt_s=path.rtt_s,
            min_rtt_s=path.min_rtt_s,
            slot_s=path.slot_s,
            reserved_s=path.reserved_s,
            unit_utility=np.asarray(unit_utility, dtype=np.float64)[unit_of_sid[starts]],
        )

    @property
    def _policy(self) -> Policy:
        return self._planner.policy

    @_policy.setter
    def _policy(self, policy: Policy) -> None:
        self._planner.policy = policy

    @property
    def stats(self) -> SenderStats:
        """The counters as they are now; a copy."""
        source, repair, resent, manifests, frame_bytes, losses, slots_credit, first_s, last_s = self._planner.counters
        return SenderStats(
            source, repair, resent, manifests, frame_bytes, losses, self._feedback, self._feedback_ignored,
            slots_credit, first_s, last_s, *self._planner.overrides,
        )  # fmt: skip

    @property
    def on_time(self) -> SenderStats:
        """The counters as they were when late repair began; as they are now, if it has not."""
        return self.stats if self._first is None else self._first[0]

    @property
    def flec(self) -> FlecCounters | None:
        """What a policy of `schedule.flec` goes by, now; None under any other policy."""
        counters = self._planner.flec
        return None if counters is None else FlecCounters(*counters)

    # the path

    def update_path(self, path: Path) -> None:
        """The controller's present rate and the round-trip time; call it when they change noticeably."""
        if path != self._path:
            self._path = path
            self._planner.set_path(path.rtt_s, path.min_rtt_s, path.slot_s, path.reserved_s)

    @property
    def send_cutoff_s(self) -> float:
        """Nothing sent after this arrives before the freeze (deadline minus the one-way delay)."""
        return self._planner.send_cutoff_s

    @property
    def slots_total(self) -> int:
        """Packets that the path had room for before the first deadline, as it looked at the start."""
        return self._planner.slots_total if self._first is None else self._first[1]

    # deciding

    @property
    def is_late(self) -> bool:
        """Whether the first deadline has passed, and what is sent is late repair."""
        return self._first is not None

    def _turn(self, now: float) -> None:
        """To late repair, once what is sent cannot be in time for the freeze any more, or that has come already.

        Not towards a receiver that was never heard: it may have none of the transfer.
        """
        if self._late_s <= 0 or self._first is not None or self._feedback_sequence < 0:
            return
        if now >= self.send_cutoff_s or self.status is AckStatus.FROZEN:
            self._first = self.stats, self.slots_total
            self.deadline_s += self._late_s
            self._planner.extend(now, self.deadline_s)

    def finished(self, now: float) -> bool:
        """True when nothing more can help: the receiver froze or has everything, or the last packet would be late."""
        self._turn(now)
        return self._planner.finished(now)

    def pending_packets(self) -> int:
        """A lower bound of the packets this transfer still wants: new symbols and known losses."""
        return self.symbols - self.ledger.next + self.ledger.known_lost

    def ready(self, now: float) -> bool:
        """Is there a frame to send now? Cheap, and `plan` then sends exactly what was chosen."""
        self._turn(now)
        return self._planner.ready(now)

    def next_timer(self) -> float | None:
        """When to ask again without any other event: the next copy of the manifest, or the cut-off; None = never."""
        return self._planner.next_timer()

    def state(self, now: float) -> State:
        """The policy's view at `now`; the object is reused by later calls."""
        self._turn(now)
        return self._planner.state(now)

    # planning

    def plan(self, now: float, max_packets: int = 1, bytes_free: int = 1425) -> list[Outgoing]:
        """The next frames, one a packet, at most `max_packets`; each fits `bytes_free` bytes (frame type included).

        What is returned counts as sent. An empty list: nothing to send now, or the next frame does not fit.
        """
        self._turn(now)
        plans = self._planner.plan(now, max_packets, bytes_free)
        if self._observer is not None:
            self._observe(now, [plan[0] for plan in plans])
        return [self._outgoing(now, *plan) for plan in plans]

    def _outgoing(
        self, now: float, kind: int, number: int, token: int | None, coding_set: planner.CodingSet | None, degree: int
    ) -> Outgoing:
        frame: SourceFrame | RepairFrame | ManifestFrame
        if coding_set is not None:
            first_sid, *rest = coding_set
            header = repair_header(self.transfer_id, number, degree, coding_set)
            symbol = self._encoder.repair(self.transfer_id, number, first_sid, degree, *rest)  # type: ignore[arg-type]
            frame = RepairFrame(header, symbol)
        elif token is None:
            # The sender states what is left, because only it has RTT samples (docs/wire.md §8).
            remaining_s = max(0.0, self.deadline_s - now - self._path.min_rtt_s / 2)
            data = self._manifest[number : number + planner.MANIFEST_CHUNK]
            frame = ManifestFrame(self.transfer_id, len(self._manifest), number, int(remaining_s * 1e6), data)
        else:
            frame = SourceFrame(self.transfer_id, number, self._encoder.symbol(number))
        return Outgoing(_KINDS[kind], frame, token)

    def plan_into(
        self, now: float, max_packets: int, bytes_free: int, out: bytearray | memoryview, stride: int, offset: int = 0
    ) -> FrameRun:
        """As `plan`, but the frames are written: frame i, its type first, at `offset + i * stride` of `out`.

        The bytes are those of `plan` and `frame.body()`. Raises LocalError, with nothing sent, if `out` cannot take
        `max_packets` frames of `bytes_free` bytes, or the symbols are not of 64..16383 bytes.
        """
        self._turn(now)
        kinds, lengths, tokens = self._planner.plan_into(
            self._encoder, now, max_packets, bytes_free, out, stride, offset
        )
        if self._observer is not None:
            self._observe(now, kinds)
        return FrameRun(kinds, lengths, tokens)

    def _observe(self, now: float, kinds: Sequence[int]) -> None:
        assert self._observer is not None
        prefix = self.ledger.prefix  # planning moves `next` alone
        following = self.ledger.next - kinds.count(FrameKind.SOURCE)
        for kind in kinds:
            following += kind == FrameKind.SOURCE
            if kind != FrameKind.MANIFEST:
                row = TraceRow(now, _KINDS[kind], prefix, following, following - prefix, self._feedback_deficit)
                self._observer(row)

    # learning

    def on_fate(self, token: int, delivered: bool, *, probe: bool = False) -> None:
        """What became of the packet that carried `token`; `probe`: declared lost only to probe (RFC 9002 §6.2.4)."""
        self._planner.fate(token, delivered, probe)

    def on_fates(self, tokens: Sequence[int], delivered: bool) -> None:
        """`on_fate` of many packets with one fate. Raises IndexError at a token that was never given."""
        self._planner.fates(tokens, delivered)

    def on_feedback(self, frame: PfecAckFrame) -> None:
        """A PFEC_ACK. Old ones are ignored; one that contradicts what we sent raises PeerError (docs/wire.md §10)."""
        self._feedback += 1
        if frame.sequence <= self._feedback_sequence or self._feedback > self._planner.packets + SPARE_FEEDBACK:
            self._feedback_ignored += 1  # rows 19 and 21
            return
        if frame.next_sid < self._feedback_prefix or frame.credit < self._feedback_credit:
            raise PeerError(ErrorCode.PROTOCOL_VIOLATION, "PFEC_ACK goes backwards")  # row 16
        if frame.credit > max(self.symbols, self._initial_credit):
            raise PeerError(ErrorCode.FLOW_CONTROL_ERROR, "PFEC_ACK grants more than the transfer has")  # row 17
        next_sid = self.ledger.next
        if frame.next_sid + frame.seen_span > next_sid or frame.deficit > frame.seen_span:
            raise PeerError(ErrorCode.PROTOCOL_VIOLATION, "PFEC_ACK knows symbols never sent")  # row 18
        self._feedback_sequence = frame.sequence
        self._feedback_prefix = frame.next_sid
        self._feedback_credit = frame.credit
        self._feedback_deficit = frame.deficit
        self.remaining_reported_s = frame.remaining_us / 1e6
        self.status = AckStatus(max(self.status, frame.status))
        # Frozen, with time remaining: it takes late symbols, if we asked for that (docs/wire.md §8).
        goes_on = self.status is AckStatus.FROZEN and self._late_s > 0 and frame.remaining_us > 0
        self._planner.feedback(frame.deficit, frame.credit, self.status is AckStatus.RUNNING or goes_on)
        learn_known = self.ledger.learn_known
        learn_known(0, frame.next_sid)
        for start, stop in frame.ranges:
            learn_known(start, stop)
