"""The receiving half of one hand-off: frames in, units and feedback out, frozen at the deadline.

Symbols may come before the manifest: they are kept up to the initial credit. Everything here came from the peer, so
every number meets a limit of `wire.limits` before it costs anything: what breaks a rule raises PeerError and closes the
connection, what is late, known or too costly is dropped and counted (rows are those of docs/wire.md §10).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quic_pfec.fec.codec import (
    INTAKE_CONTRADICTS,
    INTAKE_ODD,
    Decoder,
    Intake,
    RepairOutcome,
    SourceOutcome,
)
from quic_pfec.transfer.events import Event, Frozen, ManifestReceived, ReceiverStats, UnitReceived
from quic_pfec.transfer.pieces import ManifestPieces, as_packet
from quic_pfec.transfer.report import symbols_digest, to_bitmap
from quic_pfec.transfer.units import FragmentTaken, UnitSink, UnitTable
from quic_pfec.wire.errors import AppCode, ErrorCode, PeerError
from quic_pfec.wire.frames import AckStatus, ManifestFrame, PfecAckFrame, RepairFrame, SourceFrame
from quic_pfec.wire.limits import MIN_SYMBOL_SIZE, USELESS_REPAIRS, Limits

__all__ = ["Event", "Frozen", "ManifestReceived", "Receiver", "ReceiverStats", "UnitReceived"]

# What one call materialises at most: the event loop is held for about a packet slot, the rest comes with the next call
# or the timer, due at once. No symbol is begun after so many multiply-adds; one takes 3 * max_unknown at most, a call
# about 3,000: 30 us with GFNI, 120 us with AVX2. A completed unit costs its sink a digest and a copy, 4 to 15 us.
POLL_SLICE, POLL_MACS, POLL_UNITS = 32, 1_500, 4
POLL_STEP = 4  # symbols between two looks at the bounds
FEEDBACK_MIN_S = 0.001  # docs/wire.md §9
FEEDBACK_FINAL = 3  # copies of the last PFEC_ACK; it is not retransmitted


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
        self._intake: Intake | None = None
        self._symbol_size = 0
        self._credit = limits.initial_credit
        self._sink: UnitSink | None = None
        self._symbols: int | None = None
        self._manifest = ManifestPieces()
        self._sequence = 0
        self._newest_s = now
        self._progress = False  # something new since the last feedback
        self._urgent = False  # a gap or a finished unit: worth telling at once
        self._last_feedback_s = -1e9
        self._final_left = 0
        self._recovered: list[int] = []
        self._shown = 0  # units shown to the sink
        self._final: tuple[int, int, int, tuple[tuple[int, int], ...]] | None = None
        self.takes_late = False  # see transfer.late

    # deadline

    def note_remaining(self, remaining_s: float, now: float) -> None:
        """The sender said how long is left; the earliest result of all copies stands (docs/wire.md §8)."""
        deadline_s = now + remaining_s
        if self.deadline_s is None or deadline_s < self.deadline_s:
            self.deadline_s = deadline_s

    # packets

    def receive_symbols(self, packets: Sequence[tuple[Any, ...]], now: float) -> list[Event]:
        """Takes a batch of symbols in the order of their arrival. Raises PeerError when the peer broke a rule.

        A packet is (sid, symbol), or a repair: (transfer_id, repair_number, first_sid, degree, head_span, head,
        tail_offset, tail_span, symbol). Symbols are contiguous buffers, read during the call alone. What comes after
        the deadline is late even if the timer has not fired yet: freezing comes first then.
        """
        events: list[Event] = []
        if self._open(now, events):
            self._take(list(packets), events)
            self._settle(now, events)
        else:
            self._come_late(packets, now, events)
        return events

    def _come_late(self, packets: Sequence[tuple[Any, ...]], now: float, events: list[Event]) -> None:
        self.stats.late += len(packets)  # row 27: never an error
        self.stats.repairs_late += sum(len(packet) != 2 for packet in packets)

    def receive_batch(self, frames: Sequence[SourceFrame | RepairFrame | ManifestFrame], now: float) -> list[Event]:
        """`receive_symbols` for parsed frames, those of the manifest among them."""
        events: list[Event] = []
        if not self._open(now, events):
            symbols = [as_packet(frame) for frame in frames if not isinstance(frame, ManifestFrame)]
            self.stats.late += len(frames) - len(symbols)
            self._come_late(symbols, now, events)
            return events
        for is_manifest, group in groupby(frames, lambda frame: isinstance(frame, ManifestFrame)):
            if not is_manifest:
                self._take([as_packet(frame) for frame in group], events)
                continue
            for frame in group:
                self._on_manifest(frame, now, events)  # type: ignore[arg-type]
        self._settle(now, events)
        return events

    def _open(self, now: float, events: list[Event]) -> bool:
        """Whether packets are still of use. The deadline comes before them."""
        if self.status is AckStatus.RUNNING and self.deadline_s is not None and now >= self.deadline_s:
            self._freeze(now, AckStatus.FROZEN, events)
        return self.status is AckStatus.RUNNING

    def _settle(self, now: float, events: list[Event]) -> None:
        self._newest_s = now
        self._materialise(events)
        self._check_complete(now, events)

    def _take(self, packets: list[tuple[Any, ...]], events: list[Event]) -> None:
        """What is plain happens inside `Intake.take`, one crossing a unit; here is what calls for a judgement."""
        at = 0
        while at < len(packets):
            intake = self._intake
            if intake is None:
                what = INTAKE_ODD
            else:
                at, what = intake.take(packets, at, min(self._credit, self._symbols or self._credit))
                self._count(intake)
            if what >= 0:
                self._finish(what, events)
            elif what == INTAKE_CONTRADICTS:
                self._on_contradiction()
            elif what == INTAKE_ODD:
                self._judge(packets[at], events)
                at += 1

    def _count(self, intake: Intake) -> None:
        source, duplicate, useful, useless, dropped, urgent = intake.counts()
        stats = self.stats
        stats.source += source
        stats.duplicate += duplicate
        stats.repairs_useful += useful
        stats.repairs_useless += useless
        stats.repairs_dropped += dropped
        self._progress |= bool(source or useful)
        self._urgent |= urgent

    def _judge(self, packet: tuple[Any, ...], events: list[Event]) -> None:
        """One packet by every rule there is, in the order of the rules."""
        decoder, intake = self._decoder_for(len(packet[-1]))
        if len(packet) == 2:
            self._on_source(decoder, intake, packet[0], packet[1], events)
        else:
            self._on_repair(decoder, intake, packet)

    def _decoder_for(self, symbol_size: int) -> tuple[Decoder, Intake]:
        if self._decoder is None or self._intake is None:
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
            self._intake = Intake(self._decoder, USELESS_REPAIRS)  # row 14
        elif symbol_size != self._symbol_size:
            raise PeerError(ErrorCode.PROTOCOL_VIOLATION, "symbols of different size in one transfer")  # row 5
        return self._decoder, self._intake

    def _check_ids(self, stop: int) -> None:
        if self._symbols is not None and stop > self._symbols:
            raise PeerError(ErrorCode.PROTOCOL_VIOLATION, "symbol id beyond the transfer")  # row 6
        if stop > self._credit:
            raise PeerError(ErrorCode.FLOW_CONTROL_ERROR, "symbol id beyond the credit")  # rows 7 and 11

    def _on_source(self, decoder: Decoder, intake: Intake, sid: int, symbol: bytes, events: list[Event]) -> None:
        self._check_ids(sid + 1)
        replaced = bytes(decoder.symbol(sid)) if decoder.known(sid) and not decoder.received(sid) else None
        outcome = decoder.source(sid, symbol)
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
        intake.useless_left = min(USELESS_REPAIRS, intake.useless_left + 1)
        self._progress = True
        if sid > intake.highest:
            self._urgent = True
        intake.highest = max(intake.highest, sid + 1)
        if self.units is not None:
            self._place(sid, events, received=True)

    def _on_repair(self, decoder: Decoder, intake: Intake, repair: tuple[Any, ...]) -> None:
        _, _, first_sid, _, head_span, _, tail_offset, tail_span, _ = repair
        self._check_ids(first_sid + head_span + tail_offset + tail_span)
        if intake.useless_left <= 0:
            self.stats.repairs_dropped += 1  # row 14
            return
        match decoder.repair(*repair):
            case RepairOutcome.INNOVATIVE:
                self.stats.repairs_useful += 1
                intake.useless_left = min(USELESS_REPAIRS, intake.useless_left + 1)
                self._progress = True
            case RepairOutcome.REDUNDANT:
                self.stats.repairs_useless += 1
                intake.useless_left -= 1
            case RepairOutcome.TOO_COSTLY:
                self.stats.repairs_dropped += 1  # row 13
            case RepairOutcome.CONTRADICTS:
                self._on_contradiction()

    def _on_contradiction(self) -> None:
        self.stats.contradictions += 1
        if self.stats.contradictions > 1:  # row 15
            raise PeerError(AppCode.KV_INTEGRITY, "repairs contradict the sources", application=True)

    def _on_manifest(self, frame: ManifestFrame, now: float, events: list[Event]) -> None:
        self.note_remaining(frame.remaining_us / 1e6, now)
        if self._manifest.add(frame, self.limits.max_manifest_pieces):
            events.append(ManifestReceived(self._manifest.data))

    def receive_manifest(self, data: bytes, now: float) -> list[Event]:
        """The same manifest by the transfer's stream. Both must be equal (docs/wire.md section 8)."""
        if self._manifest.done:
            if data != self._manifest.data:
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
        decoder, intake = self._decoder_for(symbol_size)
        if decoder.highest > symbols:
            raise PeerError(ErrorCode.PROTOCOL_VIOLATION, "symbol id beyond the transfer")  # row 6
        self._symbols = symbols
        if symbols > decoder.capacity:
            decoder.grow(symbols)
        self._credit = max(self._credit, symbols)
        self._sink = sink
        self.units = units
        units.attach(intake)
        self._progress = self._urgent = True
        events: list[Event] = []
        if decoder.highest:
            for start, stop in [(0, decoder.prefix), *decoder.known_ranges(decoder.highest)]:
                self._place_all(list(range(start, stop)), events)
        self._check_complete(now, events)
        return events

    def _place_all(self, sids: list[int], events: list[Event]) -> None:
        intake, decoder = self._intake, self._decoder
        at = 0
        while intake is not None and decoder is not None and at < len(sids):
            at, what = intake.place(sids, at)
            if what >= 0:
                self._finish(what, events)
            elif what == INTAKE_ODD:
                self._place(sids[at], events, received=decoder.received(sids[at]))
                at += 1

    def _place(self, sid: int, events: list[Event], *, received: bool) -> None:
        """Files one symbol by every rule; `Intake` files those that none of them is about."""
        units, decoder = self.units, self._decoder
        if units is None or decoder is None:
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
        if unit is not None:
            self._finish(unit, events)

    def _finish(self, unit: int, events: list[Event]) -> None:
        """All fragments of `unit` are here: one copy out of the arena, and the sink's judgement."""
        units, sink, intake = self.units, self._sink, self._intake
        if units is None or sink is None or intake is None:
            return
        self._shown += 1
        if sink.write_unit(unit, intake.collect(unit)):
            units.complete[unit] = True
            self._urgent = True
            events.append(UnitReceived(unit))
        else:
            units.corrupt[unit] = True
            self.stats.corrupt_units += 1  # row 25: counts as missing

    def _materialise(self, events: list[Event]) -> None:
        """A slice of the symbols that are determined; see POLL_SLICE, POLL_MACS and POLL_UNITS."""
        decoder = self._decoder
        shown, macs_left = self._shown + POLL_UNITS, POLL_MACS
        for _ in range(POLL_SLICE // POLL_STEP):
            if decoder is None or decoder.pending == 0 or self._shown >= shown or macs_left <= 0:
                return
            before = decoder.payload_macs
            sids = decoder.poll(POLL_STEP, max_macs=macs_left)
            macs_left -= decoder.payload_macs - before
            self.stats.recovered += len(sids)
            self._recovered += sids
            self._progress = True
            if self.units is not None:
                self._place_all(sids, events)

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
        self._materialise(events)
        self._check_complete(now, events)
        return events

    def _freeze(self, now: float, status: AckStatus, events: list[Event]) -> None:
        while self._decoder is not None and self._decoder.pending:
            self._materialise(events)
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
        """When the next PFEC_ACK is due, possibly in the past; None when none is (docs/wire.md §9)."""
        if self._decoder is None and self.units is None and self._final is None:
            return None
        if self.status is AckStatus.RUNNING and not self._manifest.done:
            return None  # the first PFEC_ACK ends the repetition of the manifest (docs/wire.md §6)
        last_s = self._last_feedback_s
        if self._final_left == FEEDBACK_FINAL:
            return last_s + FEEDBACK_MIN_S
        if self._final_left:
            return last_s + max(FEEDBACK_MIN_S, self.rtt_s / 4)
        if self.status is not AckStatus.RUNNING and not self.takes_late:
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
        frame = PfecAckFrame(
            transfer_id=self.transfer_id,
            sequence=self._sequence,
            status=self.status,
            next_sid=next_sid,
            seen_span=seen_span,
            deficit=deficit,
            credit=self._credit if self._symbols is None else max(self._credit, self._symbols),
            remaining_us=int(self._remaining_s(now) * 1e6),
            ack_delay_us=int(max(0.0, now - self._newest_s) * 1e6),
            ranges=ranges,
        )
        self._sequence += 1
        self._last_feedback_s = now
        self._progress = self._urgent = False
        self._final_left = max(0, self._final_left - 1)
        self.stats.feedback += 1
        return frame

    def _remaining_s(self, now: float) -> float:
        return 0.0 if self.deadline_s is None else max(0.0, self.deadline_s - now)

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
        intake = self._intake
        if self.units is None or intake is None:
            return []
        table, seen = self.units, known or {}
        fresh = [unit for unit in table.partial_units() if seen.get(unit) != table.present(unit)]
        return [(unit, intake.collect(unit), table.ranges(unit)) for unit in fresh[:limit]]

    def release(self) -> None:
        """Frees the arena: nothing of this transfer is kept but what the last feedback says."""
        self._final = self._final or self._knowledge()
        self._decoder = self._intake = self.units = self._sink = None
