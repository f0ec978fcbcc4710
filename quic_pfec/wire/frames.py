"""The four frames of the extension: frozen dataclasses, their bytes, and their parsers (docs/wire.md §4).

SOURCE carries one symbol, REPAIR one combination of symbols, PFEC_ACK the receiver's knowledge, MANIFEST a fragment of
the description of the transfer. All travel in 1-RTT packets only. Parsers start behind the frame type, which the
connection has read already, and check everything that can be judged without a session; a symbol is returned as a
view of the packet, never copied here. `body()` writes what a parser reads; `size()` counts the type as well.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from quic_pfec.wire import varint
from quic_pfec.wire.errors import AppCode, ErrorCode, LocalError, PeerError
from quic_pfec.wire.limits import (
    MAX_ACK_RANGES,
    MAX_INITIAL_CREDIT,
    MAX_SID,
    MAX_SYMBOL_SIZE,
    MIN_SYMBOL_SIZE,
    UNIT_HEADER_SIZE,
    Limits,
)

__all__ = [
    "FRAME_TYPE_SIZE",
    "MANIFEST",
    "PFEC_ACK",
    "REPAIR",
    "SOURCE",
    "SOURCE_OVERHEAD",
    "UNIT_HEADER_SIZE",
    "AckStatus",
    "ManifestFrame",
    "PfecAckFrame",
    "RepairFrame",
    "RepairHeader",
    "SourceFrame",
    "pack_unit_header",
    "parse_manifest",
    "parse_pfec_ack",
    "parse_repair",
    "parse_source",
    "repair_overhead",
    "source_overhead",
    "unpack_unit_header",
]

# Experimental and unregistered; all four take the 4-byte varint form.
SOURCE = 0x0FDA91AB
REPAIR = 0x11E8E783
PFEC_ACK = 0x35A291CD
MANIFEST = 0x30192341

FRAME_TYPE_SIZE = 4

# Everything of SOURCE between the Transfer ID and the symbol: SID in the 4-byte form, Length in the 2-byte form.
_SID_LENGTH = struct.Struct(">IH")
_USUAL_SOURCE = struct.Struct(">BIH")
_NUMBER_SID = struct.Struct(">II")

SOURCE_OVERHEAD = FRAME_TYPE_SIZE + 1 + _SID_LENGTH.size
"""Bytes of a SOURCE frame besides its symbol, for Transfer IDs below 64 (the first 16 bidirectional streams a side)."""


class AckStatus(IntEnum):
    """What the receiver of a transfer is doing."""

    RUNNING = 0
    COMPLETE = 1
    FROZEN = 2
    """The deadline came first: nothing that arrives now is used."""


@dataclass(frozen=True, slots=True)
class SourceFrame:
    """One symbol as it is. `sid` counts from 0 in order of first transmission; a resend has the same sid."""

    transfer_id: int
    sid: int
    symbol: bytes | memoryview

    def size(self) -> int:
        """Bytes on the wire, frame type included."""
        return source_overhead(self.transfer_id) + len(self.symbol)

    def body(self) -> bytes:
        """The frame without its type. Raises `LocalError` for a sid above 2^30-1 or a symbol not of 64..16383 bytes."""
        _check_sid(self.sid)
        _check_symbol(self.symbol)
        return b"".join(
            (
                varint.encode(self.transfer_id),
                _SID_LENGTH.pack(0x8000_0000 | self.sid, 0x4000 | len(self.symbol)),
                self.symbol,
            )
        )


@dataclass(frozen=True, slots=True)
class RepairHeader:
    """Which symbols a repair combines; with Transfer ID and Repair Number it also fixes the coefficients.

    The coding set is a head, given bit by bit (bit i of byte j stands for `first_sid + 8j + i`), and a tail of
    `tail_span` unbroken ids that begins `tail_offset` ids behind the head. Head ids are always coded, tail ids are
    sampled to fill up `degree`. There is one encoding per head and tail: the first and last bit of the head are set,
    unused bits are clear, and the offset is 0 where head or tail is empty.
    """

    transfer_id: int
    repair_number: int
    first_sid: int
    degree: int
    head_span: int
    head: bytes
    tail_offset: int
    tail_span: int

    @property
    def span(self) -> int:
        """Ids from the first to the last of the coding set, gaps included."""
        return self.head_span + self.tail_offset + self.tail_span

    @property
    def last_sid(self) -> int:
        """One past the last id of the coding set."""
        return self.first_sid + self.span


@dataclass(frozen=True, slots=True)
class RepairFrame:
    """One combination of symbols, as large as each of them."""

    header: RepairHeader
    symbol: bytes | memoryview

    def size(self) -> int:
        """Bytes on the wire, frame type included."""
        header = self.header
        return len(self.symbol) + repair_overhead(
            header.transfer_id, header.head_span, header.tail_offset, header.tail_span, header.degree
        )

    def body(self) -> bytes:
        """The frame without its type. Raises `LocalError` for a header that no receiver would accept."""
        header = self.header
        _check_symbol(self.symbol)
        if not 0 <= header.repair_number <= 0xFFFF_FFFF:
            raise LocalError(f"repair number {header.repair_number} does not fit 32 bits")
        if header.degree < 1:
            raise LocalError("a repair combines at least one symbol")
        if min(header.first_sid, header.head_span, header.tail_offset, header.tail_span) < 0:
            raise LocalError("a coding set has no negative field")
        _check_sid(header.last_sid - 1)
        problem = _noncanonical_spans(header.head_span, header.tail_offset, header.tail_span)
        if problem is None:
            problem = _noncanonical_head(header.head_span, header.head)
        if problem is not None:
            raise LocalError(problem)
        return b"".join(
            (
                varint.encode(header.transfer_id),
                _NUMBER_SID.pack(header.repair_number, 0x8000_0000 | header.first_sid),
                varint.encode(header.degree),
                varint.encode(header.head_span),
                header.head,
                varint.encode(header.tail_offset),
                varint.encode(header.tail_span),
                varint.encode_fixed(len(self.symbol), 2),
                self.symbol,
            )
        )


@dataclass(frozen=True, slots=True)
class PfecAckFrame:
    """What the receiver knows, lacks and still accepts; each frame supersedes those of lower `sequence`.

    `next_sid` is the length of the known prefix, `seen_span` reaches from it to one past the highest id received or
    named by a repair, `deficit` is the rank still missing there, `credit` the first sid not accepted. `ranges` are the
    known ids above `next_sid` as [start, stop), ascending and not touching, oldest first; they may be incomplete.
    """

    transfer_id: int
    sequence: int
    status: AckStatus
    next_sid: int
    seen_span: int
    deficit: int
    credit: int
    remaining_us: int
    ack_delay_us: int
    ranges: tuple[tuple[int, int], ...]

    def size(self) -> int:
        """Bytes on the wire, frame type included."""
        return FRAME_TYPE_SIZE + sum(map(varint.size, self._fields()))

    def body(self) -> bytes:
        """The frame without its type. Raises `LocalError` when the ranges or counts contradict each other."""
        end = self.next_sid + self.seen_span
        if len(self.ranges) > MAX_ACK_RANGES:
            raise LocalError(f"{len(self.ranges)} ranges, at most {MAX_ACK_RANGES} fit a frame")
        if self.ranges and self.ranges[-1][1] > end:
            raise LocalError("a known range ends past the seen span")
        if self.deficit > self.seen_span or end > self.credit:
            raise LocalError("deficit exceeds the seen span, or the seen span exceeds the credit")
        return b"".join(map(varint.encode, self._fields()))

    def _fields(self) -> list[int]:
        values = [
            self.transfer_id,
            self.sequence,
            self.status,
            self.next_sid,
            self.seen_span,
            self.deficit,
            self.credit,
            self.remaining_us,
            self.ack_delay_us,
            len(self.ranges),
        ]
        # Differences minus one: a range that overlaps, touches or precedes its neighbour would be negative.
        previous = self.next_sid
        for start, stop in self.ranges:
            values += (start - previous - 1, stop - start - 1)
            previous = stop
        return values


@dataclass(frozen=True, slots=True)
class ManifestFrame:
    """`data` is the manifest's bytes from `offset` on; `remaining_us` is the time until the receiver must freeze."""

    transfer_id: int
    total_length: int
    offset: int
    remaining_us: int
    data: bytes

    def size(self) -> int:
        """Bytes on the wire, frame type included."""
        return FRAME_TYPE_SIZE + sum(map(varint.size, self._fields())) + len(self.data)

    def body(self) -> bytes:
        """The frame without its type. Raises `LocalError` when the fragment is empty or reaches past the total."""
        if not self.data or self.offset + len(self.data) > self.total_length:
            raise LocalError("a manifest fragment is not empty and lies within the total length")
        return b"".join((*map(varint.encode, self._fields()), self.data))

    def _fields(self) -> tuple[int, ...]:
        return self.transfer_id, self.total_length, self.offset, self.remaining_us, len(self.data)


def source_overhead(transfer_id: int) -> int:
    """Bytes of a SOURCE frame besides its symbol, frame type included."""
    return FRAME_TYPE_SIZE + varint.size(transfer_id) + _SID_LENGTH.size


def repair_overhead(transfer_id: int, head_span: int, tail_offset: int, tail_span: int, degree: int = 48) -> int:
    """Bytes of a REPAIR frame besides its symbol, frame type included. Degrees below 64 all take one byte."""
    return (
        FRAME_TYPE_SIZE
        + varint.size(transfer_id)
        + _NUMBER_SID.size
        + varint.size(degree)
        + varint.size(head_span)
        + (head_span + 7) // 8
        + varint.size(tail_offset)
        + varint.size(tail_span)
        + 2
    )


def pack_unit_header(unit: int, fragment: int) -> bytes:
    """The 4 bytes that open a symbol: unit id (24 bits), fragment (8 bits), network order."""
    if not (0 <= unit < 1 << 24 and 0 <= fragment < 1 << 8):
        raise LocalError(f"unit {unit}, fragment {fragment} do not fit 24 + 8 bits")
    return (unit << 8 | fragment).to_bytes(UNIT_HEADER_SIZE, "big")


def unpack_unit_header(symbol: bytes | memoryview) -> tuple[int, int]:
    """(unit id, fragment) of a symbol. Raises `LocalError` when there are fewer than 4 bytes."""
    if len(symbol) < UNIT_HEADER_SIZE:
        raise LocalError("a unit header has 4 bytes")
    word = int.from_bytes(symbol[:UNIT_HEADER_SIZE], "big")
    return word >> 8, word & 0xFF


def parse_source(data: bytes | memoryview, pos: int, limits: Limits) -> tuple[SourceFrame, int]:
    """Read a SOURCE frame behind its type; the symbol is a view of `data`.

    Raises `PeerError`: FRAME_ENCODING_ERROR when truncated, PROTOCOL_VIOLATION for a symbol size outside 64..Max
    Symbol Size or a sid at the edge of 62 bits, FLOW_CONTROL_ERROR for a sid above any credit that can be granted.
    """
    try:
        transfer_id, sid, length, pos = _source_fields(data, pos)
        end = _symbol_end(data, pos, length, limits)
        if sid >= limits.max_symbols:
            raise _beyond_symbols(sid + 1)
    except PeerError as error:
        error.frame_type = SOURCE
        raise
    return SourceFrame(transfer_id, sid, memoryview(data)[pos:end]), end


def parse_repair(data: bytes | memoryview, pos: int, limits: Limits) -> tuple[RepairFrame, int]:
    """Read a REPAIR frame behind its type; the symbol is a view of `data`.

    Raises `PeerError`: FRAME_ENCODING_ERROR when truncated; PROTOCOL_VIOLATION for a degree outside 1..Max Degree, a
    span above Max Window or past 62 bits, a coding set that is empty or not canonical, or a symbol size out of range;
    FLOW_CONTROL_ERROR when it names a sid above any credit that can be granted.
    """
    try:
        header, pos = _repair_header(data, pos, limits)
        length, pos = varint.decode(data, pos)
        end = _symbol_end(data, pos, length, limits)
    except PeerError as error:
        error.frame_type = REPAIR
        raise
    return RepairFrame(header, memoryview(data)[pos:end]), end


def parse_pfec_ack(data: bytes | memoryview, pos: int, limits: Limits) -> tuple[PfecAckFrame, int]:
    """Read a PFEC_ACK frame behind its type.

    Raises `PeerError`: FRAME_ENCODING_ERROR when truncated, for an unknown status, more than 64 ranges, a sum past 62
    bits or a range past the seen span; FLOW_CONTROL_ERROR for a credit above any that can be granted;
    PROTOCOL_VIOLATION when deficit exceeds the seen span or the seen span the credit. What was really sent, only the
    session knows.
    """
    try:
        return _pfec_ack(data, pos, limits)
    except PeerError as error:
        error.frame_type = PFEC_ACK
        raise


def parse_manifest(data: bytes | memoryview, pos: int, limits: Limits) -> tuple[ManifestFrame, int]:
    """Read a MANIFEST frame behind its type; its bytes are copied.

    Raises `PeerError`: FRAME_ENCODING_ERROR when truncated, empty, or reaching past the total length; application
    error KV_MANIFEST when the total is above `limits.max_manifest_bytes`.
    """
    try:
        transfer_id, pos = varint.decode(data, pos)
        total_length, pos = varint.decode(data, pos)
        offset, pos = varint.decode(data, pos)
        remaining_us, pos = varint.decode(data, pos)
        length, pos = varint.decode(data, pos)
        if total_length > limits.max_manifest_bytes:
            reason = f"a manifest of {total_length} bytes is above the limit of {limits.max_manifest_bytes}"
            raise PeerError(AppCode.KV_MANIFEST, reason, application=True)
        if length == 0 or offset + length > total_length:
            raise _malformed("a manifest fragment is empty or reaches past the total length")
        end = pos + length
        if end > len(data):
            raise _malformed("a manifest fragment reaches past the end of the packet")
    except PeerError as error:
        error.frame_type = MANIFEST
        raise
    return ManifestFrame(transfer_id, total_length, offset, remaining_us, bytes(data[pos:end])), end


def _source_fields(data: bytes | memoryview, pos: int) -> tuple[int, int, int, int]:
    # Per-packet path: our own senders always produce this shape; the general one follows.
    if len(data) - pos >= _USUAL_SOURCE.size:
        transfer_id, sid, length = _USUAL_SOURCE.unpack_from(data, pos)
        if transfer_id < 0x40 and sid >> 30 == 2 and length >> 14 == 1:
            return transfer_id, sid & 0x3FFF_FFFF, length & 0x3FFF, pos + _USUAL_SOURCE.size
    transfer_id, pos = varint.decode(data, pos)
    sid, pos = varint.decode(data, pos)
    length, pos = varint.decode(data, pos)
    return transfer_id, sid, length, pos


def _repair_header(data: bytes | memoryview, pos: int, limits: Limits) -> tuple[RepairHeader, int]:
    transfer_id, pos = varint.decode(data, pos)
    if len(data) - pos < 4:
        raise _malformed("truncated repair number")
    repair_number = int.from_bytes(data[pos : pos + 4], "big")
    first_sid, pos = varint.decode(data, pos + 4)
    degree, pos = varint.decode(data, pos)
    head_span, pos = varint.decode(data, pos)
    if not 1 <= degree <= limits.max_degree:
        raise _violation(f"degree {degree}, accepted are 1 to {limits.max_degree}")
    if head_span > limits.max_window:
        raise _violation(f"a head of {head_span} ids, accepted are {limits.max_window}")
    head_end = pos + (head_span + 7) // 8
    if head_end > len(data):
        raise _malformed("truncated head bitmap")
    head = bytes(data[pos:head_end])
    tail_offset, pos = varint.decode(data, head_end)
    tail_span, pos = varint.decode(data, pos)
    span = head_span + tail_offset + tail_span
    if span > limits.max_window:
        raise _violation(f"a span of {span} ids, accepted are {limits.max_window}")
    problem = _noncanonical_spans(head_span, tail_offset, tail_span) or _noncanonical_head(head_span, head)
    if problem is not None:
        raise _violation(problem)
    if first_sid + span > limits.max_symbols:
        raise _beyond_symbols(first_sid + span)
    return RepairHeader(transfer_id, repair_number, first_sid, degree, head_span, head, tail_offset, tail_span), pos


def _pfec_ack(data: bytes | memoryview, pos: int, limits: Limits) -> tuple[PfecAckFrame, int]:
    transfer_id, pos = varint.decode(data, pos)
    sequence, pos = varint.decode(data, pos)
    status, pos = varint.decode(data, pos)
    next_sid, pos = varint.decode(data, pos)
    seen_span, pos = varint.decode(data, pos)
    deficit, pos = varint.decode(data, pos)
    credit, pos = varint.decode(data, pos)
    remaining_us, pos = varint.decode(data, pos)
    ack_delay_us, pos = varint.decode(data, pos)
    count, pos = varint.decode(data, pos)
    if status > AckStatus.FROZEN:
        raise _malformed(f"unknown status {status}")
    if count > MAX_ACK_RANGES:
        raise _malformed(f"{count} ranges, at most {MAX_ACK_RANGES} fit a frame")
    end = next_sid + seen_span
    if end > varint.MAX:
        raise _malformed("the seen span ends past 62 bits")
    # A peer may announce more initial credit than our own transfers can use.
    if credit > max(limits.max_symbols, MAX_INITIAL_CREDIT):
        raise _beyond_symbols(credit)
    if end > credit:
        raise _violation("the seen span ends past the credit")
    if deficit > seen_span:
        raise _violation(f"a deficit of {deficit} in a span of {seen_span}")
    ranges = []
    stop = next_sid
    for _ in range(count):
        gap, pos = varint.decode(data, pos)
        length, pos = varint.decode(data, pos)
        start = stop + gap + 1
        stop = start + length + 1
        if stop > end:
            raise _malformed("a known range ends past the seen span")
        ranges.append((start, stop))
    known = (next_sid, seen_span, deficit, credit, remaining_us, ack_delay_us, tuple(ranges))
    return PfecAckFrame(transfer_id, sequence, AckStatus(status), *known), pos


def _symbol_end(data: bytes | memoryview, pos: int, length: int, limits: Limits) -> int:
    end = pos + length
    if end > len(data):
        raise _malformed("a symbol reaches past the end of the packet")
    if not MIN_SYMBOL_SIZE <= length <= limits.max_symbol_size:
        raise _violation(f"a symbol of {length} bytes, accepted are {MIN_SYMBOL_SIZE} to {limits.max_symbol_size}")
    return end


def _noncanonical_spans(head_span: int, tail_offset: int, tail_span: int) -> str | None:
    if head_span == 0 and tail_span == 0:
        return "an empty coding set"
    if tail_offset != 0 and (head_span == 0 or tail_span == 0):
        return "a tail offset without both head and tail"
    return None


def _noncanonical_head(head_span: int, head: bytes) -> str | None:
    if len(head) != (head_span + 7) // 8:
        return f"a head bitmap of {len(head)} bytes for {head_span} ids"
    if head_span == 0:
        return None
    # The last byte, shifted past the last covered bit, must be empty; that bit and the very first must be set.
    last_bit = (head_span - 1) % 8
    if not head[0] & 1 or head[-1] >> last_bit != 1:
        return "a head bitmap that does not begin and end with a set bit"
    return None


def _check_sid(sid: int) -> None:
    if not 0 <= sid <= MAX_SID:
        raise LocalError(f"sid {sid} does not fit 30 bits")


def _check_symbol(symbol: bytes | memoryview) -> None:
    if not MIN_SYMBOL_SIZE <= len(symbol) <= MAX_SYMBOL_SIZE:
        raise LocalError(f"a symbol of {len(symbol)} bytes, possible are {MIN_SYMBOL_SIZE} to {MAX_SYMBOL_SIZE}")


def _malformed(reason: str) -> PeerError:
    return PeerError(ErrorCode.FRAME_ENCODING_ERROR, reason)


def _violation(reason: str) -> PeerError:
    return PeerError(ErrorCode.PROTOCOL_VIOLATION, reason)


def _beyond_symbols(end: int) -> PeerError:
    # No credit reaches past the symbol limit, so the session would say the same (RFC 9000 §4.1); past 62 bits an id
    # cannot exist at all.
    if end > varint.MAX:
        return _violation("symbol ids past 62 bits")
    return PeerError(ErrorCode.FLOW_CONTROL_ERROR, f"{end} symbols, above the limit for any transfer")
