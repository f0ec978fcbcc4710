"""A QUIC connection that carries hand-offs: frames to and from the transfer layer, still sans-IO.

One sender or receiver per transfer, named by the stream id of the transfer's bidirectional stream (docs/wire.md §3).
Frames are chosen when a packet is really built; packet fates go straight to the sender they belong to. Rows are those
of docs/wire.md §10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from aioquic.quic.events import QuicEvent

from quic_pfec.quic.extension import FrameRun, OutFrame, Symbol
from quic_pfec.quic.fast_receive import FastReceiveConnection
from quic_pfec.transfer.late import LateReceiver
from quic_pfec.transfer.ledger import LossEstimate
from quic_pfec.transfer.receiver import Event
from quic_pfec.transfer.sender import FrameKind, Path, Sender
from quic_pfec.wire import frames, varint
from quic_pfec.wire.errors import ErrorCode, PeerError
from quic_pfec.wire.limits import Limits
from quic_pfec.wire.parameter import PARAMETER_ID, PfecParameter, parse_parameter

PACKET_OVERHEAD = 27 + 28  # short header and tag, IP and UDP: bytes a full packet has beyond its frame
PATH_REFRESH_S = 0.002
CLOSED_REMEMBERED = 4096  # stream ids only grow; a closed transfer older than these is below the low-water mark

_TYPES = {
    FrameKind.MANIFEST: frames.MANIFEST,
    FrameKind.SOURCE: frames.SOURCE,
    FrameKind.RESEND: frames.SOURCE,
    FrameKind.REPAIR: frames.REPAIR,
}
_TYPE_BYTES = {kind: varint.encode(frame_type) for kind, frame_type in _TYPES.items()}


@dataclass
class TransferEvent(QuicEvent):
    """Something happened to an incoming transfer; comes out of `next_event()`."""

    transfer_id: int
    event: Event


@dataclass(slots=True)
class ExtensionStats:
    """Frames of the extension on this connection that led nowhere, by reason, and feedback."""

    dropped_closed: int = 0
    dropped_busy: int = 0
    feedback_sent: int = 0
    feedback_received: int = 0


class EarlyBudget:
    """Transfers of one server that may hold symbols before their manifest was accepted.

    An honest one needs that for a round trip, until its opening is here. So where there is no room the one that has
    waited longest goes: whoever opens many and says nothing more keeps nobody out.
    """

    def __init__(self, limits: Limits) -> None:
        self._most = self.transfers(limits.early_symbols_per_server, limits)
        self._held: dict[tuple[PfecConnection, int], None] = {}  # in the order of their coming

    @property
    def free(self) -> int:
        return self._most - len(self._held)

    def take(self, connection: PfecConnection, transfer_id: int) -> None:
        if self.free <= 0:
            oldest, oldest_id = next(iter(self._held))
            oldest.turn_away(oldest_id)
        self._held[connection, transfer_id] = None

    def give_back(self, connection: PfecConnection, transfer_id: int) -> None:
        self._held.pop((connection, transfer_id), None)

    @staticmethod
    def transfers(symbols: int, limits: Limits) -> int:
        """Transfers whose initial credit fits into `symbols`, at least one."""
        return max(1, symbols // limits.initial_credit)


class PfecConnection(FastReceiveConnection):
    """See the module text. Options at construction: those of `setup`."""

    def setup(
        self,
        limits: Limits | None = None,
        *,
        enabled: bool = True,
        early: EarlyBudget | None = None,
        late: bool = False,
        **options: Any,
    ) -> None:
        """`enabled=False` announces nothing: hand-offs then go over plain streams. `late`: announce late repair."""
        super().setup(**options)
        limits = limits or Limits()
        self.limits = limits
        self.extension: PfecParameter | None = None
        self.extension_stats = ExtensionStats()
        self.senders: dict[int, Sender] = {}
        self.receivers: dict[int, LateReceiver] = {}
        self.loss_history = LossEstimate()
        self._enabled = enabled
        self._late = late and limits.max_late_us > 0
        self._early = early or EarlyBudget(limits)
        self._early_held: set[int] = set()
        self._closed: set[int] = set()
        self._turned_away: set[int] = set()
        self._closed_below = [-1, -1]  # by initiator
        self._path_s = -1.0

    # negotiation (docs/wire.md §2)

    def local_parameter(self) -> tuple[int, bytes] | None:
        if not self._enabled:
            return None
        return PARAMETER_ID, PfecParameter.from_limits(self.limits, late=self._late).serialize()

    def peer_parameter(self, value: bytes | None) -> bool:
        announced = None if value is None or not self._enabled else parse_parameter(value)
        self.extension = None if announced is None else announced.capped(self.limits)
        return self.extension is not None

    # transfers

    def add_sender(self, sender: Sender) -> None:
        self.senders[sender.transfer_id] = sender
        self._path_s = -1.0

    def remove_transfer(self, transfer_id: int) -> None:
        """Forgets a transfer of either direction; what still comes for it is dropped and counted (row 27)."""
        self.senders.pop(transfer_id, None)
        receiver = self.receivers.pop(transfer_id, None)
        if receiver is not None:
            receiver.release()
        self._release_early(transfer_id)
        self._closed.add(transfer_id)
        self._turned_away.discard(transfer_id)
        if len(self._closed) > CLOSED_REMEMBERED:
            # Ids of one initiator are used in order, so everything up to the oldest half is closed for good.
            for initiator in (0, 1):
                ordered = sorted(other for other in self._closed if other & 1 == initiator)
                oldest = ordered[: len(ordered) // 2]
                if oldest:
                    self._closed_below[initiator] = oldest[-1]
                    self._closed.difference_update(oldest)

    def is_over(self, transfer_id: int) -> bool:
        """Whether this transfer existed and was removed."""
        return transfer_id in self._closed or transfer_id <= self._closed_below[transfer_id & 1]

    def transfer_accepted(self, transfer_id: int) -> None:
        """Its destination exists, so its symbols no longer count as early ones."""
        self._release_early(transfer_id)

    def turn_away(self, transfer_id: int) -> None:
        """Forgets what came early of a transfer. Its opening, if it ever comes, is answered with BUSY."""
        receiver = self.receivers.pop(transfer_id, None)
        if receiver is not None:
            receiver.release()
        self._release_early(transfer_id)
        self._turned_away.add(transfer_id)

    def _take_early(self, transfer_id: int) -> bool:
        limits = self.limits
        if len(self._early_held) >= EarlyBudget.transfers(limits.early_symbols_per_connection, limits):
            return False
        self._early.take(self, transfer_id)
        self._early_held.add(transfer_id)
        return True

    def _release_early(self, transfer_id: int) -> None:
        self._early_held.discard(transfer_id)
        self._early.give_back(self, transfer_id)

    def open_receiver(self, transfer_id: int, now: float, *, early: bool = True) -> LateReceiver | None:
        """The receiver of `transfer_id`, made if need be; None if it is closed or there is no room (dropped, counted).

        early: nobody has vouched for it yet, so it counts against the limits on early symbols.
        Raises PeerError if the peer may not use that id (row 31).
        """
        receiver = self.receivers.get(transfer_id)
        if receiver is not None:
            return receiver
        ours = 0 if self.is_client else 1
        if transfer_id & 2 or transfer_id & 1 == ours:
            raise PeerError(ErrorCode.PROTOCOL_VIOLATION, "transfer id of the wrong stream type")
        if transfer_id // 4 >= self.peer_stream_limit:
            raise PeerError(ErrorCode.STREAM_LIMIT_ERROR, "transfer id beyond the stream limit")
        if self.is_over(transfer_id):
            self.extension_stats.dropped_closed += 1
            return None
        running = sum(receiver.status is frames.AckStatus.RUNNING for receiver in self.receivers.values())
        busy = running >= self.limits.max_transfers or transfer_id in self._turned_away
        if busy or (early and not self._take_early(transfer_id)):
            # QUIC acknowledges what is dropped here, so the sender takes it for arrived: it cannot be let in later.
            self.extension_stats.dropped_busy += 1
            self._turned_away.add(transfer_id)
            return None
        receiver = LateReceiver(transfer_id, self.limits, now)
        receiver.rtt_s = self.rtt_s
        self.receivers[transfer_id] = receiver
        return receiver

    # frames in

    def extension_frame(self, frame_type: int, data: memoryview, now: float) -> int:
        if frame_type == frames.SOURCE:
            source, used = frames.parse_source(data, 0, self.limits)
            self._receive(source, now)
        elif frame_type == frames.REPAIR:
            repair, used = frames.parse_repair(data, 0, self.limits)
            self._receive(repair, now)
        elif frame_type == frames.MANIFEST:
            manifest, used = frames.parse_manifest(data, 0, self.limits)
            self._receive(manifest, now)
        else:
            ack, used = frames.parse_pfec_ack(data, 0, self.limits)
            self._feedback_received(ack)
        return used

    def symbol_limits(self) -> Limits:
        return self.limits

    def symbols_received(self, transfer_id: int, packets: Sequence[Symbol], now: float) -> None:
        for index in range(len(packets)):
            receiver = self.open_receiver(transfer_id, now)
            if receiver is not None:  # each that is dropped is counted
                for event in receiver.receive_symbols(packets[index:], now):
                    self.emit(TransferEvent(transfer_id, event))
                return

    def _receive(self, frame: frames.SourceFrame | frames.RepairFrame | frames.ManifestFrame, now: float) -> None:
        transfer_id = frame.header.transfer_id if isinstance(frame, frames.RepairFrame) else frame.transfer_id
        receiver = self.open_receiver(transfer_id, now)
        if receiver is None:
            return
        for event in receiver.receive_batch((frame,), now):
            self.emit(TransferEvent(transfer_id, event))

    def _feedback_received(self, ack: frames.PfecAckFrame) -> None:
        self.extension_stats.feedback_received += 1
        sender = self.senders.get(ack.transfer_id)
        if sender is not None:
            sender.on_feedback(ack)
        elif not self.is_over(ack.transfer_id):
            raise PeerError(ErrorCode.PROTOCOL_VIOLATION, "feedback for a transfer that we never sent")  # row 31

    # frames out

    def has_feedback(self, now: float) -> bool:
        return any(receiver.feedback_due(now) for receiver in self.receivers.values())

    def next_feedback(self, now: float, space: int) -> OutFrame | None:
        for receiver in self.receivers.values():
            if receiver.feedback_due(now):
                receiver.rtt_s = self.rtt_s
                ack = receiver.feedback(now)
                self.extension_stats.feedback_sent += 1
                frame = OutFrame(frames.PFEC_ACK, ack.body(), None, False)
                # With all its ranges it may not fit beside an ACK with all of its own: the next packet has room.
                return frame if ack.size() <= space else None
        return None

    def has_frame(self, now: float) -> bool:
        if not self.senders:
            return False
        self._refresh_paths(now)
        return any(self._ready(sender, now) for sender in self.senders.values())

    def _ready(self, sender: Sender, now: float) -> bool:
        # Frames of a stream that the peer has not granted yet would close the connection (row 31).
        return self.may_open(sender.transfer_id) and sender.ready(now)

    def fills_packets(self, space: int) -> bool:
        smallest = min((sender.symbol_size for sender in self.senders.values()), default=0)
        return 2 * (smallest + frames.SOURCE_OVERHEAD) > space

    def next_run(
        self, now: float, max_packets: int, space: int, out: bytearray, stride: int, offset: int
    ) -> FrameRun | None:
        for sender in self._by_deadline():
            if not self._ready(sender, now):
                continue
            run = sender.plan_into(now, max_packets, space, out, stride, offset)
            if run.lengths:
                return FrameRun(run.lengths, [None if token is None else (sender, token) for token in run.tokens])
        return None

    def next_frame(self, now: float, space: int) -> OutFrame | None:
        for sender in self._by_deadline():
            if not self._ready(sender, now):
                continue
            for outgoing in sender.plan(now, 1, space):
                token = None if outgoing.token is None else (sender, outgoing.token)
                return OutFrame(_TYPES[outgoing.kind], outgoing.frame.body(), token)
        return None

    def frame_fate(self, token: object, acked: bool, now: float, expired: bool = False) -> None:
        assert isinstance(token, tuple)
        sender, slot = token
        sender.on_fate(slot, acked, probe=expired)

    def stream_is_urgent(self, stream_id: int) -> bool:
        return stream_id in self.senders or stream_id in self.receivers

    # the path, as the scheduler sees it

    def _by_deadline(self) -> list[Sender]:
        if len(self.senders) == 1:
            return list(self.senders.values())
        # Late repair yields to every hand-off that can still be in time.
        return sorted(self.senders.values(), key=lambda sender: (sender.is_late, sender.deadline_s))

    def path(self, symbol_size: int) -> Path:
        """Round-trip time, and the time a packet with one such symbol takes at the controller's present rate."""
        packet = symbol_size + frames.SOURCE_OVERHEAD + PACKET_OVERHEAD
        rtt_s = max(self.rtt_s, 1e-4)
        return Path(rtt_s, min(self.min_rtt_s, rtt_s), packet * 8 / max(self.send_rate_bps, 1.0))

    def _refresh_paths(self, now: float) -> None:
        if now - self._path_s < PATH_REFRESH_S:
            return
        self._path_s = now
        reserved_s = 0.0
        for sender in self._by_deadline():
            path = self.path(sender.symbol_size)
            sender.update_path(replace(path, reserved_s=reserved_s))
            if not sender.finished(now):
                reserved_s += sender.pending_packets() * path.slot_s

    # time

    def get_timer(self) -> float | None:
        times = [super().get_timer()]
        if self.is_closing:
            return times[0]
        for receiver in self.receivers.values():
            times.append(receiver.event_timer())
            feedback_s = receiver.feedback_time()
            # Feedback that is due but did not leave waits for the pacer, whose timer is aioquic's: no spinning on it.
            if feedback_s is not None and feedback_s > self.now_s:
                times.append(feedback_s)
        for sender in self.senders.values():
            retry_s = sender.next_timer()
            if retry_s is not None and retry_s > self.now_s:  # once due, it is the pacer's affair
                times.append(retry_s)
        known = [time_s for time_s in times if time_s is not None]
        return min(known) if known else None

    def handle_timer(self, now: float) -> None:
        own_s = super().get_timer()
        if own_s is not None and now >= own_s:
            super().handle_timer(now)
        for transfer_id, receiver in list(self.receivers.items()):
            timer_s = receiver.event_timer()
            if timer_s is not None and now >= timer_s:
                try:
                    events = receiver.on_timer(now)
                except PeerError as error:
                    self.fail(error)
                    return
                for event in events:
                    self.emit(TransferEvent(transfer_id, event))
