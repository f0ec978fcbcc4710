"""The receiving half of one hand-off: frames in, units and feedback out, frozen at the deadline.

Symbols may come before the manifest: they are kept up to the initial credit. Everything here came from the peer, so
every number meets a limit before it costs anything (security note, section 2): what breaks a rule raises PeerError and
closes the connection, what is late, known or too costly is dropped and counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quic_pfec.fec.codec import Decoder, RepairOutcome, SourceOutcome
from quic_pfec.transfer.report import symbols_digest, to_bitmap
from quic_pfec.transfer.units import FragmentTaken, UnitSink, UnitTable
from quic_pfec.wire.errors import AppCode, ErrorCode, PeerError
from quic_pfec.wire.frames import AckStatus, ManifestFrame, PfecAckFrame, RepairFrame, SourceFrame
from quic_pfec.wire.limits import MIN_SYMBOL_SIZE, USELESS_REPAIRS, Limits

POLL_SLICE = 32  # symbols materialised per call: the event loop is never held for much more than a packet slot
FEEDBACK_MIN_S = 0.001  # wire-format section 10
FEEDBACK_FINAL = 3  # copies of the last PFEC_ACK; it is not retransmitted


@dataclass(frozen=True, slots=True)
class ManifestReceived:
    """All bytes of the manifest are here; the shell decodes it and calls `accept`, or refuses."""

    data: bytes


@dataclass(frozen=True, slots=True)
class UnitReceived:
    """A unit is complete and its sink took it."""

    unit: int


@dataclass(frozen=True, slots=True)
class Frozen:
    """The transfer is over for the receiver: at its deadline, or early because everything is known."""

    complete: bool


Event = ManifestReceived | UnitReceived | Frozen


@dataclass(slots=True)
class ReceiverStats:
    """Counters of one transfer, in symbols unless said."""

    source: int = 0
    duplicate: int = 0
    recovered: int = 0
    repairs_useful: int = 0
    repairs_useless: int = 0
    repairs_dropped: int = 0
    late: int = 0
    repairs_late: int = 0
    contradictions: int = 0
    corrupt_units: int = 0
    misplaced: int = 0
    feedback: int = 0


class Receiver:
    """Receives one transfer; see the module text. `now` is any monotonic clock in seconds."""

    def __init__(self, transfer_id: int, limits: Limits, now: float) -> None:
        self.transfer_id = transfer_id
        self.limits = limits
        self.stats = ReceiverStats()
        self.rtt_s = 0.1  # the shell corrects it when it has samples
        self.opened_s = now
        self.deadline_s: float | None = None
        self.frozen_s: float | None = None
        self.units: UnitTable | None = None
        self.status = AckStatus.RUNNING
        self._decoder: Decoder | None = None
        self._symbol_size = 0
        self._credit = limits.initial_credit
        self._sink: UnitSink | None = None
        self._symbols: int | None = None
        self._manifest = bytearray()
        self._manifest_missing: list[tuple[int, int]] | None = None
        self._manifest_done = False
        self._sequence = 0
        self._newest_s = now
        self._progress = False  # something new since the last feedback
        self._urgent = False  # a gap or a finished unit: worth telling at once
        self._highest = 0
        self._last_feedback_s = -1e9
        self._final_left = 0
        self._useless_left = USELESS_REPAIRS
        self._recovered: list[int] = []
        self._final: tuple[int, int, int, tuple[tuple[int, int], ...]] | None = None

    # deadline

    def note_remaining(self, remaining_s: float, now: float) -> None:
        """The sender said how long is left; the earliest result of all copies stands (wire-format section 8)."""
        deadline_s = now + remaining_s
        if self.deadline_s is None or deadline_s < self.deadline_s:
            self.deadline_s = deadline_s

    # frames

    def receive_batch(self, frames: Sequence[SourceFrame | RepairFrame | ManifestFrame], now: float) -> list[Event]:
        """Takes a batch of parsed frames. Raises PeerError when the peer broke a rule.

        What comes after the deadline is late even if the timer has not fired yet: freezing comes first then.
        """
        events: list[Event] = []
        if self.status is AckStatus.RUNNING and self.deadline_s is not None and now >= self.deadline_s:
            self._freeze(now, AckStatus.FROZEN, events)
        if self.status is not AckStatus.RUNNING:
            self.stats.late += len(frames)
            self.stats.repairs_late += sum(isinstance(frame, RepairFrame) for frame in frames)
            return events  # row 27: never an error
        for frame in frames:
            if isinstance(frame, SourceFrame):
                self._on_source(frame, events)
            elif isinstance(frame, RepairFrame):
                self._on_repair(frame)
            else:
                self._on_manifest(frame, now, events)
        self._newest_s = now
        self._materialise(POLL_SLICE, events)
        self._check_complete(now, events)
        return events

    def _decoder_for(self, symbol_size: int) -> Decoder:
        if self._decoder is None:
            if not MIN_SYMBOL_SIZE <= symbol_size <= self.limits.max_symbol_size:
                raise PeerError(ErrorCode.PROTOCOL_VIOLATION, f"symbol of {symbol_size} bytes")
            self._symbol_size = symbol_size
            self._decoder = Decoder(
                symbol_size,
                min(self._credit, self._symbols or self._credit),
                max_unknown=self.limits.max_unknown,
                max_degree=self.limits.max_degree,
                max_span=self.limits.max_window,
                row_ops_per_repair=self.limits.row_operations_per_repair,
            )
        elif symbol_size != self._symbol_size:
            raise PeerError(ErrorCode.PROTOCOL_VIOLATION, "symbols of different size in one transfer")  # row 5
        return self._decoder

    def _check_ids(self, stop: int) -> None:
        if self._symbols is not None and stop > self._symbols:
            raise PeerError(ErrorCode.PROTOCOL_VIOLATION, "symbol id beyond the transfer")  # row 6
        if stop > self._credit:
            raise PeerError(ErrorCode.FLOW_CONTROL_ERROR, "symbol id beyond the credit")  # rows 7 and 11

    def _on_source(self, frame: SourceFrame, events: list[Event]) -> None:
        decoder = self._decoder_for(len(frame.symbol))
        sid = frame.sid
        self._check_ids(sid + 1)
        replaced = bytes(decoder.symbol(sid)) if decoder.known(sid) and not decoder.received(sid) else None
        outcome = decoder.source(sid, frame.symbol)
        if outcome == SourceOutcome.CONFLICT:
            raise PeerError(ErrorCode.PROTOCOL_VIOLATION, f"symbol {sid} came twice with different bytes")  # row 9
        if outcome == SourceOutcome.DUPLICATE:
            self.stats.duplicate += 1
            return
        if outcome == SourceOutcome.REPLACED:  # a repair had been poisoned: what was received wins (row 9)
            self.stats.contradictions += 1
            if self.units is not None and replaced is not None:
                self.units.withdraw(sid, memoryview(replaced))
        else:
            self.stats.source += 1
        self._useless_left = min(USELESS_REPAIRS, self._useless_left + 1)
        self._progress = True
        if sid > self._highest:
            self._urgent = True
        self._highest = max(self._highest, sid + 1)
        self._place(sid, events, received=True)

    def _on_repair(self, frame: RepairFrame) -> None:
        decoder = self._decoder_for(len(frame.symbol))
        header = frame.header
        self._check_ids(header.first_sid + header.span)
        if self._useless_left <= 0:
            self.stats.repairs_dropped += 1  # row 14
            return
        outcome = decoder.repair(
            header.transfer_id, header.repair_number, header.first_sid, header.degree, header.head_span, header.head,
            header.tail_offset, header.tail_span, frame.symbol,
        )  # fmt: skip
        match outcome:
            case RepairOutcome.INNOVATIVE:
                self.stats.repairs_useful += 1
                self._useless_left = min(USELESS_REPAIRS, self._useless_left + 1)
                self._progress = True
            case RepairOutcome.REDUNDANT:
                self.stats.repairs_useless += 1
                self._useless_left -= 1
            case RepairOutcome.TOO_COSTLY:
                self.stats.repairs_dropped += 1  # row 13
            case RepairOutcome.CONTRADICTS:
                self.stats.contradictions += 1
                if self.stats.contradictions > 1:  # row 15
                    raise PeerError(AppCode.KV_INTEGRITY, "repairs contradict the sources", application=True)

    def _on_manifest(self, frame: ManifestFrame, now: float, events: list[Event]) -> None:
        self.note_remaining(frame.remaining_us / 1e6, now)
        if self._manifest_missing is None:
            self._manifest = bytearray(frame.total_length)
            self._manifest_missing = [(0, frame.total_length)]
        if frame.total_length != len(self._manifest):
            raise PeerError(AppCode.KV_MANIFEST, "copies of the manifest differ in length", application=True)
        start, stop = frame.offset, frame.offset + len(frame.data)
        still: list[tuple[int, int]] = []
        position = start
        for low, high in self._manifest_missing:
            if high <= start or low >= stop:
                still.append((low, high))
                continue
            if low < start:
                still.append((low, start))
            if high > stop:
                still.append((stop, high))
            self._match_manifest(frame, position, low)
            cut = slice(max(low, start), min(high, stop))
            self._manifest[cut] = frame.data[cut.start - start : cut.stop - start]
            position = cut.stop
        self._match_manifest(frame, position, stop)
        # A hostile peer can punch at most total/1 holes; cap what we remember of them.
        if len(still) > self.limits.max_manifest_pieces:
            raise PeerError(AppCode.KV_MANIFEST, "manifest in too many pieces", application=True)
        self._manifest_missing = still
        if not still and not self._manifest_done:
            self._manifest_done = True
            events.append(ManifestReceived(bytes(self._manifest)))

    def _match_manifest(self, frame: ManifestFrame, start: int, stop: int) -> None:
        """Bytes that came before must be the same again."""
        stop = min(stop, frame.offset + len(frame.data))
        if start < stop:
            again = frame.data[start - frame.offset : stop - frame.offset]
            if self._manifest[start:stop] != again:
                raise PeerError(AppCode.KV_MANIFEST, "copies of the manifest differ", application=True)

    def receive_manifest(self, data: bytes, now: float) -> list[Event]:
        """The same manifest by the transfer's stream. Both must be equal (wire-format section 8)."""
        if self._manifest_done:
            if data != self._manifest:
                raise PeerError(AppCode.KV_MANIFEST, "manifest by frame and by stream differ", application=True)
            return []
        events: list[Event] = []
        remaining_us = 0 if self.deadline_s is None else int(max(0.0, self.deadline_s - now) * 1e6)
        known_deadline_s = self.deadline_s
        self._on_manifest(ManifestFrame(self.transfer_id, len(data), 0, remaining_us, data), now, events)
        self.deadline_s = known_deadline_s
        return events

    # after the manifest

    def accept(
        self, unit_sizes: NDArray[np.int64], symbols: int, symbol_size: int, sink: UnitSink, now: float
    ) -> list[Event]:
        """The manifest was judged good: the destination exists, so credit for the whole transfer is granted.

        Raises PeerError if symbols that came before it do not fit what it says.
        """
        units = UnitTable(unit_sizes, symbol_size)
        if units.symbols != symbols:
            raise PeerError(AppCode.KV_MANIFEST, "symbol count does not fit the units", application=True)
        decoder = self._decoder_for(symbol_size)
        if decoder.highest > symbols:
            raise PeerError(ErrorCode.PROTOCOL_VIOLATION, "symbol id beyond the transfer")  # row 6
        self._symbols = symbols
        if symbols > decoder.capacity:
            decoder.grow(symbols)
        self._credit = max(self._credit, symbols)
        self._sink = sink
        self.units = units
        self._progress = self._urgent = True
        events: list[Event] = []
        if decoder.highest:
            for start, stop in [(0, decoder.prefix), *decoder.known_ranges(decoder.highest)]:
                for sid in range(start, stop):
                    self._place(sid, events, received=decoder.received(sid))
        self._check_complete(now, events)
        return events

    def _place(self, sid: int, events: list[Event], *, received: bool) -> None:
        units, sink, decoder = self.units, self._sink, self._decoder
        if units is None or sink is None or decoder is None:
            return
        try:
            unit = units.place(sid, decoder.symbol(sid))
        except FragmentTaken as error:
            if received and not decoder.received(error.sid):  # decoded from a poisoned repair: what came wins (row 9)
                self.stats.misplaced += 1
                units.withdraw(error.sid, decoder.symbol(error.sid))
                self._place(sid, events, received=True)
                return
            if received:
                raise PeerError(ErrorCode.PROTOCOL_VIOLATION, str(error)) from None
            self.stats.misplaced += 1
            return
        except ValueError as error:
            if received:
                raise PeerError(ErrorCode.PROTOCOL_VIOLATION, str(error)) from None
            self.stats.misplaced += 1  # a poisoned repair; the honest symbol may still come
            return
        if unit is None:
            return
        data, _ = units.collect(unit, decoder)
        if sink.write_unit(unit, data):
            units.complete[unit] = True
            self._urgent = True
            events.append(UnitReceived(unit))
        else:
            units.corrupt[unit] = True
            self.stats.corrupt_units += 1  # row 25: counts as missing

    def _materialise(self, budget: int, events: list[Event]) -> None:
        decoder = self._decoder
        if decoder is None or decoder.pending == 0:
            return
        for sid in decoder.poll(budget):
            self.stats.recovered += 1
            self._recovered.append(sid)
            self._progress = True
            self._place(sid, events, received=False)

    def _check_complete(self, now: float, events: list[Event]) -> None:
        decoder = self._decoder
        if self.status is not AckStatus.RUNNING or self.units is None or decoder is None:
            return
        if decoder.prefix == self._symbols:
            self._freeze(now, AckStatus.COMPLETE, events)

    # time

    def next_timer(self) -> float | None:
        """When something is to be done next: `on_timer`, or sending feedback; None = never."""
        times = [time_s for time_s in (self.event_timer(), self.feedback_time()) if time_s is not None]
        return min(times) if times else None

    def event_timer(self) -> float | None:
        """When `on_timer` must be called next, or None."""
        if self.status is not AckStatus.RUNNING:
            return None
        times = [self.opened_s + self.limits.manifest_timeout_us / 1e6] if self.units is None else []
        if self._decoder is not None and self._decoder.pending:
            times.append(self._newest_s)
        if self.deadline_s is not None:
            times.append(self.deadline_s)
        return min(times) if times else None

    def on_timer(self, now: float) -> list[Event]:
        """Materialises what waits; freezes at the deadline, or when the manifest is overdue."""
        events: list[Event] = []
        if self.status is not AckStatus.RUNNING:
            return events
        if self.deadline_s is not None and now >= self.deadline_s:
            self._freeze(now, AckStatus.FROZEN, events)
            return events
        if self.units is None and now >= self.opened_s + self.limits.manifest_timeout_us / 1e6:
            self._freeze(now, AckStatus.FROZEN, events)
            return events
        self._materialise(POLL_SLICE, events)
        self._check_complete(now, events)
        return events

    def _freeze(self, now: float, status: AckStatus, events: list[Event]) -> None:
        while self._decoder is not None and self._decoder.pending:
            self._materialise(POLL_SLICE, events)
        if status is AckStatus.FROZEN and self.units is not None and bool(self.units.complete.all()):
            status = AckStatus.COMPLETE
        self.status = status
        self.frozen_s = now
        self._final_left = FEEDBACK_FINAL
        self._progress = self._urgent = True
        complete = self.units is not None and bool(self.units.complete.all())
        events.append(Frozen(complete))

    # feedback

    def feedback_time(self) -> float | None:
        """When the next PFEC_ACK is due, possibly in the past; None when none is (wire-format section 10)."""
        if self._decoder is None and self.units is None and self._final is None:
            return None
        if self.status is AckStatus.RUNNING and not self._manifest_done:
            return None  # the first PFEC_ACK ends the repetition of the manifest (wire-format section 8)
        last_s = self._last_feedback_s
        if self._final_left == FEEDBACK_FINAL:
            return last_s + FEEDBACK_MIN_S
        if self._final_left:
            return last_s + max(FEEDBACK_MIN_S, self.rtt_s / 4)
        if self.status is not AckStatus.RUNNING:
            return None
        if self._urgent:
            return last_s + FEEDBACK_MIN_S
        if self._progress:
            return last_s + max(FEEDBACK_MIN_S, self.rtt_s / 16)
        return max(last_s, self._newest_s) + 1.5 * self.rtt_s + 0.025  # stalled: about a PTO (RFC 9002 §6.2.1)

    def feedback_due(self, now: float) -> bool:
        due_s = self.feedback_time()
        return due_s is not None and now >= due_s

    def _knowledge(self) -> tuple[int, int, int, tuple[tuple[int, int], ...]]:
        """Decoded prefix, span seen beyond it, deficit, and the known ranges in that span."""
        decoder = self._decoder
        if decoder is None:
            return 0, 0, 0, ()
        prefix = decoder.prefix
        ranges = tuple(decoder.known_ranges(self.limits.max_ack_ranges))
        return prefix, max(0, decoder.highest - prefix), decoder.deficit, ranges

    def feedback(self, now: float) -> PfecAckFrame:
        """The PFEC_ACK to send now: what is known, what is missing, what is allowed."""
        next_sid, seen_span, deficit, ranges = self._final or self._knowledge()
        remaining_s = 0.0 if self.deadline_s is None else max(0.0, self.deadline_s - now)
        frame = PfecAckFrame(
            transfer_id=self.transfer_id,
            sequence=self._sequence,
            status=self.status,
            next_sid=next_sid,
            seen_span=seen_span,
            deficit=deficit,
            credit=self._credit if self._symbols is None else max(self._credit, self._symbols),
            remaining_us=int(remaining_s * 1e6),
            ack_delay_us=int(max(0.0, now - self._newest_s) * 1e6),
            ranges=ranges,
        )
        self._sequence += 1
        self._last_feedback_s = now
        self._progress = self._urgent = False
        self._final_left = max(0, self._final_left - 1)
        self.stats.feedback += 1
        return frame

    # the result

    def known_bitmap(self) -> bytes:
        """Bit i of byte j: symbol 8j + i is known (received or decoded)."""
        return b"" if self._decoder is None else self._decoder.known_bitmap()

    def recovered_symbols(self) -> tuple[bytes, int]:
        """Bitmap of the symbols known by decoding alone, and their digest (`transfer.report.symbols_digest`)."""
        decoder = self._decoder
        if decoder is None:
            return b"", symbols_digest((), lambda sid: memoryview(b""))
        sids = sorted({sid for sid in self._recovered if decoder.known(sid) and not decoder.received(sid)})
        flags = np.zeros(sids[-1] + 1 if sids else 0, dtype=np.bool_)
        flags[sids] = True
        return to_bitmap(flags), symbols_digest(sids, decoder.symbol)

    def partial_units(
        self, known: Mapping[int, int] | None = None, limit: int | None = None
    ) -> list[tuple[int, bytes, list[tuple[int, int]]]]:
        """(unit, bytes with zeros where nothing came, byte ranges that came) of every unit that came in part."""
        if self.units is None or self._decoder is None:
            return []
        table, seen = self.units, known or {}
        fresh = [unit for unit in table.partial_units() if seen.get(unit) != table.present(unit)]
        return [(unit, *table.collect(unit, self._decoder)) for unit in fresh[:limit]]

    def release(self) -> None:
        """Frees the arena: nothing of this transfer is kept but what the last feedback says."""
        self._final = self._final or self._knowledge()
        self._decoder = None
        self.units = None
        self._sink = None
