"""The four frames: golden bytes, round trips, exact sizes, one encoding per coding set, no foreign exceptions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.wire import frames, varint
from quic_pfec.wire.errors import AppCode, ErrorCode, LocalError, PeerError
from quic_pfec.wire.frames import (
    AckStatus,
    ManifestFrame,
    PfecAckFrame,
    RepairFrame,
    RepairHeader,
    SourceFrame,
    pack_unit_header,
    parse_manifest,
    parse_pfec_ack,
    parse_repair,
    parse_source,
    repair_overhead,
    source_overhead,
    unpack_unit_header,
)
from quic_pfec.wire.limits import Limits

Frame = SourceFrame | RepairFrame | PfecAckFrame | ManifestFrame
Parser = Callable[[bytes | memoryview, int, Limits], tuple[Frame, int]]

LIMITS = Limits(max_window=16_384, max_degree=16_384)
PARSERS: dict[int, Parser] = {
    frames.SOURCE: parse_source,
    frames.REPAIR: parse_repair,
    frames.PFEC_ACK: parse_pfec_ack,
    frames.MANIFEST: parse_manifest,
}
TYPES = {
    SourceFrame: frames.SOURCE,
    RepairFrame: frames.REPAIR,
    PfecAckFrame: frames.PFEC_ACK,
    ManifestFrame: frames.MANIFEST,
}

SYMBOL = pack_unit_header(0x000102, 3) + bytes(1364)
GOLDEN: list[tuple[str, Frame]] = [
    ("8fda91ab 04 800003e8 4558", SourceFrame(4, 1000, SYMBOL)),
    (
        # docs/wire.md §5
        "91e8e783 04 00000007 800003e8 06 13 190004 4065 40b2 4558",
        RepairFrame(RepairHeader(4, 7, 1000, 6, 19, bytes.fromhex("190004"), 101, 178), SYMBOL),
    ),
    (
        "b5a291cd 04 09 00 43e8 4117 01 61c0 8003d090 415e 02 0001 004112",
        PfecAckFrame(4, 9, AckStatus.RUNNING, 1000, 279, 1, 8640, 250_000, 350, ((1001, 1003), (1004, 1279))),
    ),
    ("b0192341 04 4064 405f 8003d090 05", ManifestFrame(4, 100, 95, 250_000, b"hello")),
]

STREAM_IDS = st.integers(0, varint.MAX) | st.integers(0, 130)
SYMBOLS = st.integers(64, 1414).map(bytes) | st.binary(min_size=64, max_size=80)
SOURCES = st.builds(SourceFrame, STREAM_IDS, st.integers(0, LIMITS.max_symbols - 1), SYMBOLS)


@st.composite
def repair_headers(draw: st.DrawFn) -> RepairHeader:
    head_span = draw(st.integers(0, 300))
    tail_span = draw(st.integers(0 if head_span else 1, 5000))
    tail_offset = draw(st.integers(0, 5000)) if head_span and tail_span else 0
    bits = draw(st.integers(0, (1 << head_span) - 1)) | 1 | 1 << (head_span - 1) if head_span else 0
    return RepairHeader(
        transfer_id=draw(STREAM_IDS),
        repair_number=draw(st.integers(0, 0xFFFF_FFFF)),
        first_sid=draw(st.integers(0, LIMITS.max_symbols - head_span - tail_span - tail_offset)),
        degree=draw(st.integers(1, 16_384)),
        head_span=head_span,
        head=bits.to_bytes((head_span + 7) // 8, "little"),
        tail_offset=tail_offset,
        tail_span=tail_span,
    )


REPAIRS = st.builds(RepairFrame, repair_headers(), SYMBOLS)


@st.composite
def pfec_acks(draw: st.DrawFn) -> PfecAckFrame:
    next_sid = draw(st.integers(0, 5000))
    ranges = []
    stop = next_sid
    for gap, length in draw(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), max_size=64)):
        start = stop + gap
        stop = start + length
        ranges.append((start, stop))
    seen_span = stop - next_sid + draw(st.integers(0, 300))
    return PfecAckFrame(
        transfer_id=draw(STREAM_IDS),
        sequence=draw(st.integers(0, varint.MAX)),
        status=draw(st.sampled_from(AckStatus)),
        next_sid=next_sid,
        seen_span=seen_span,
        deficit=draw(st.integers(0, seen_span)),
        credit=draw(st.integers(next_sid + seen_span, LIMITS.max_symbols)),
        remaining_us=draw(st.integers(0, varint.MAX)),
        ack_delay_us=draw(st.integers(0, varint.MAX)),
        ranges=tuple(ranges),
    )


@st.composite
def manifests(draw: st.DrawFn) -> ManifestFrame:
    data = draw(st.binary(min_size=1, max_size=200))
    offset = draw(st.integers(0, LIMITS.max_manifest_bytes - len(data)))
    total = draw(st.integers(offset + len(data), LIMITS.max_manifest_bytes))
    return ManifestFrame(draw(STREAM_IDS), total, offset, draw(st.integers(0, varint.MAX)), data)


def document() -> str:
    return (Path(__file__).parents[1] / "docs" / "wire.md").read_text(encoding="utf-8")


def attempt(parse: Parser, data: bytes, limits: Limits) -> tuple[Frame | None, PeerError | None]:
    try:
        return parse(data, 0, limits)[0], None
    except PeerError as error:
        return None, error


def payload(frame: Frame) -> bytes | memoryview:
    if isinstance(frame, ManifestFrame):
        return frame.data
    return b"" if isinstance(frame, PfecAckFrame) else frame.symbol


@pytest.mark.parametrize(("header", "frame"), GOLDEN)
def test_golden_bytes(header: str, frame: Frame) -> None:
    frame_type, pos = varint.decode(bytes.fromhex(header), 0)
    assert frame_type == TYPES[type(frame)]
    body = bytes.fromhex(header)[pos:] + payload(frame)
    assert frame.body() == body
    assert PARSERS[frame_type](body, 0, LIMITS) == (frame, len(body))


@pytest.mark.parametrize("header", [header for header, _ in GOLDEN])
def test_document_shows_the_golden_bytes(header: str) -> None:
    assert header in document()


@pytest.mark.parametrize("frame_type", PARSERS)
def test_types_take_four_bytes(frame_type: int) -> None:
    assert varint.size(frame_type) == frames.FRAME_TYPE_SIZE


@settings(deadline=None, max_examples=300)
@given(SOURCES | REPAIRS | pfec_acks() | manifests(), st.binary(max_size=9), st.binary(max_size=9))
def test_round_trip_and_size(frame: Frame, before: bytes, after: bytes) -> None:
    body = frame.body()
    frame_type = TYPES[type(frame)]
    assert frame.size() == frames.FRAME_TYPE_SIZE + len(body)
    for data in (before + body + after, memoryview(before + body + after)):
        parsed, pos = PARSERS[frame_type](data, len(before), LIMITS)
        assert parsed == frame
        assert pos == len(before) + len(body)


@settings(deadline=None, max_examples=100)
@given(SOURCES, st.sampled_from([1, 2, 4, 8]), st.sampled_from([4, 8]), st.sampled_from([2, 4, 8]))
def test_source_in_every_varint_width(frame: SourceFrame, id_width: int, sid_width: int, length_width: int) -> None:
    frame = dataclasses.replace(frame, transfer_id=frame.transfer_id % 64)
    body = (
        varint.encode_fixed(frame.transfer_id, id_width)
        + varint.encode_fixed(frame.sid, sid_width)
        + varint.encode_fixed(len(frame.symbol), length_width)
        + frame.symbol
    )
    assert parse_source(body, 0, LIMITS) == (frame, len(body))


@pytest.mark.parametrize(
    ("head", "transfer_id", "sid"),
    [
        ("4096 80000045 4040", 150, 0x45),  # a Transfer ID of 2 bytes that begins like one of 1
        ("04 4005 4040", 4, 5),  # a SID of 2 bytes, and a symbol that looks like a Length
        ("04 80000005 80000040", 4, 5),  # a Length of 4 bytes
    ],
)
def test_unusual_widths_are_not_taken_for_the_usual(head: str, transfer_id: int, sid: int) -> None:
    symbol = b"\x41" * 64
    body = bytes.fromhex(head) + symbol
    assert parse_source(body, 0, LIMITS) == (SourceFrame(transfer_id, sid, symbol), len(body))


def test_symbol_is_a_view_of_the_packet() -> None:
    for frame, parse in ((GOLDEN[0][1], parse_source), (GOLDEN[1][1], parse_repair)):
        body = frame.body()
        parsed, _ = parse(body, 0, LIMITS)
        assert isinstance(parsed.symbol, memoryview)
        assert parsed.symbol.obj is body


@settings(deadline=None, max_examples=200)
@given(SOURCES | REPAIRS | pfec_acks() | manifests(), st.data())
def test_every_truncation_is_an_encoding_error(frame: Frame, data: st.DataObject) -> None:
    body = frame.body()
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(PeerError) as caught:
        PARSERS[TYPES[type(frame)]](body[:cut], 0, LIMITS)
    assert caught.value.code == ErrorCode.FRAME_ENCODING_ERROR
    assert caught.value.frame_type == TYPES[type(frame)]


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 40), st.binary(min_size=5, max_size=5), st.integers(0, 3), st.integers(0, 50))
def test_accepted_repairs_have_one_encoding(head_span: int, bitmap: bytes, tail_offset: int, tail_span: int) -> None:
    head = bitmap[: (head_span + 7) // 8]
    body = (
        bytes.fromhex("04 00000007 800003e8 06")
        + varint.encode(head_span)
        + head
        + varint.encode(tail_offset)
        + varint.encode(tail_span)
        + varint.encode_fixed(64, 2)
        + bytes(64)
    )
    bits = int.from_bytes(head, "little")
    canonical = bits & 1 == 1 and bits.bit_length() == head_span and (tail_span > 0 or tail_offset == 0)
    frame, error = attempt(parse_repair, body, LIMITS)
    assert (error is None) is canonical
    if error is None:
        assert frame is not None
        assert frame.body() == body
    else:
        assert error.code == ErrorCode.PROTOCOL_VIOLATION


APPLICATION_CODES = (AppCode.KV_MANIFEST,)
TRANSPORT_CODES = (ErrorCode.FRAME_ENCODING_ERROR, ErrorCode.PROTOCOL_VIOLATION, ErrorCode.FLOW_CONTROL_ERROR)
BYTES = st.binary(max_size=120)
PLAUSIBLE = st.lists(
    st.sampled_from([0, 1, 2, 7, 63, 64, 300, 1 << 20, varint.MAX - 1, varint.MAX]).map(varint.encode)
    | st.binary(max_size=3),
    max_size=24,
).map(lambda parts: b"".join(parts) + bytes(70))


@settings(deadline=None, max_examples=600)
@given(st.sampled_from(sorted(PARSERS)), BYTES | PLAUSIBLE)
def test_any_bytes_raise_only_peer_errors(frame_type: int, data: bytes) -> None:
    frame, error = attempt(PARSERS[frame_type], data, Limits())
    if error is not None:
        assert error.frame_type == frame_type
        assert len(error.reason) < 200
        assert error.code in (APPLICATION_CODES if error.application else TRANSPORT_CODES)
    else:
        assert frame is not None
        # What was accepted can be written, and means the same: only the widths of varints may differ.
        assert PARSERS[frame_type](frame.body(), 0, Limits()) == (frame, len(frame.body()))


def test_overheads() -> None:
    assert frames.SOURCE_OVERHEAD == source_overhead(0) == source_overhead(63) == 11
    assert source_overhead(64) == 12
    assert repair_overhead(0, 0, 0, 1) == 19
    assert repair_overhead(4, 19, 101, 178) == 21 + 3
    assert repair_overhead(4, 19, 101, 178, degree=64) == 22 + 3


def test_spans_of_a_repair() -> None:
    header = RepairHeader(4, 7, 1000, 6, 19, bytes.fromhex("190004"), 101, 178)
    assert header.span == 298
    assert header.last_sid == 1298


@pytest.mark.parametrize(
    "frame",
    [
        SourceFrame(4, (1 << 30) - 1, bytes(16_383)),
        SourceFrame(4, 0, bytes(64)),
        RepairFrame(RepairHeader(4, 0xFFFF_FFFF, 0, 1, 0, b"", 0, 1), bytes(64)),
        PfecAckFrame(4, 0, AckStatus.COMPLETE, 0, 128, 128, 128, 0, 0, tuple((i, i + 1) for i in range(1, 128, 2))),
        PfecAckFrame(0, 0, AckStatus.FROZEN, 0, 0, 0, 0, 0, 0, ()),
        ManifestFrame(4, 1, 0, 0, b"x"),
    ],
)
def test_extremes_are_written_and_read(frame: Frame) -> None:
    body = frame.body()
    widest = Limits(max_symbol_size=16_383, max_symbols=1 << 30)
    assert PARSERS[TYPES[type(frame)]](body, 0, widest) == (frame, len(body))


HEADER = RepairHeader(4, 7, 1000, 6, 19, bytes.fromhex("190004"), 101, 178)
ACK = PfecAckFrame(4, 9, AckStatus.RUNNING, 1000, 279, 1, 8640, 0, 0, ((1001, 1003),))


@pytest.mark.parametrize(
    "frame",
    [
        SourceFrame(4, -1, SYMBOL),
        SourceFrame(4, 1 << 30, SYMBOL),
        SourceFrame(-4, 0, SYMBOL),
        SourceFrame(4, 0, bytes(63)),
        SourceFrame(4, 0, bytes(16_384)),
        RepairFrame(HEADER, bytes(63)),
        *(
            RepairFrame(dataclasses.replace(HEADER, **changes), SYMBOL)
            for changes in (
                {"repair_number": 1 << 32},
                {"repair_number": -1},
                {"degree": 0},
                {"first_sid": -1},
                {"first_sid": (1 << 30) - 100},
                {"tail_offset": -1},
                {"head": b"\x19\x00"},
                {"head": b"\x18\x00\x04"},
                {"head": b"\x19\x00\x0c"},
                {"head_span": 0, "head": b"", "tail_offset": 1},
                {"tail_span": 0},
                {"head_span": 0, "head": b"", "tail_offset": 0, "tail_span": 0},
            )
        ),
        *(
            dataclasses.replace(ACK, **changes)
            for changes in (
                {"ranges": ((1000, 1003),)},
                {"ranges": ((1001, 1001),)},
                {"ranges": ((1001, 1003), (1003, 1004))},
                {"ranges": ((1005, 1006), (1001, 1003))},
                {"ranges": ((1001, 1280),)},
                {"ranges": tuple((1001 + 2 * i, 1002 + 2 * i) for i in range(65))},
                {"deficit": 280},
                {"credit": 1278},
                {"remaining_us": -1},
            )
        ),
        ManifestFrame(4, 10, 0, 0, b""),
        ManifestFrame(4, 10, 8, 0, b"abc"),
        ManifestFrame(4, 10, 8, -1, b"ab"),
    ],
)
def test_what_a_peer_would_refuse_is_not_written(frame: Frame) -> None:
    with pytest.raises(LocalError):
        frame.body()


@pytest.mark.parametrize(("unit", "fragment"), [(0, 0), (0x010203, 4), ((1 << 24) - 1, 255)])
def test_unit_header(unit: int, fragment: int) -> None:
    header = pack_unit_header(unit, fragment)
    assert len(header) == frames.UNIT_HEADER_SIZE
    assert unpack_unit_header(header + b"payload") == unpack_unit_header(memoryview(header)) == (unit, fragment)


def test_unit_header_bytes() -> None:
    assert pack_unit_header(0x010203, 4) == bytes((1, 2, 3, 4))


@pytest.mark.parametrize(("unit", "fragment"), [(1 << 24, 0), (0, 256), (-1, 0), (0, -1)])
def test_unit_header_out_of_range(unit: int, fragment: int) -> None:
    with pytest.raises(LocalError):
        pack_unit_header(unit, fragment)


def test_unit_header_of_a_short_symbol() -> None:
    with pytest.raises(LocalError):
        unpack_unit_header(b"abc")
