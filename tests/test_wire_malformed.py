"""Malformed and over-limit input, one line each: what arrives, the code it costs, the clause that says so.

Covers the reactions of docs/wire.md ("Reactions to bad input") that need no session, in the manner of h3spec.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quic_pfec.wire import frames, varint
from quic_pfec.wire.errors import AppCode, ErrorCode, PeerError
from quic_pfec.wire.frames import parse_manifest, parse_pfec_ack, parse_repair, parse_source
from quic_pfec.wire.limits import Limits
from quic_pfec.wire.manifest import decode_manifest
from quic_pfec.wire.parameter import PARAMETER_ID, find_parameter, parse_parameter

ENCODING = ErrorCode.FRAME_ENCODING_ERROR
VIOLATION = ErrorCode.PROTOCOL_VIOLATION
FLOW = ErrorCode.FLOW_CONTROL_ERROR
PARAMETER = ErrorCode.TRANSPORT_PARAMETER_ERROR
MANIFEST = AppCode.KV_MANIFEST

LIMITS = Limits()
MAX = varint.MAX
SYMBOLS = LIMITS.max_symbols


def numbers(*values: int) -> bytes:
    return b"".join(map(varint.encode, values))


def source(sid: int = 0, length: int = 64, present: int | None = None) -> bytes:
    return numbers(4, sid, length) + bytes(length if present is None else present)


def repair(
    first: int = 0,
    degree: int = 3,
    head_span: int = 0,
    head: str = "",
    tail_offset: int = 0,
    tail_span: int = 8,
    length: int = 64,
    present: int | None = None,
) -> bytes:
    return (
        numbers(4)
        + bytes(4)
        + numbers(first, degree, head_span)
        + bytes.fromhex(head)
        + numbers(tail_offset, tail_span, length)
        + bytes(length if present is None else present)
    )


def ack(
    status: int = 0,
    next_sid: int = 10,
    seen_span: int = 20,
    deficit: int = 0,
    credit: int = 100,
    ranges: tuple[tuple[int, int], ...] = (),
    count: int | None = None,
) -> bytes:
    head = numbers(4, 1, status, next_sid, seen_span, deficit, credit, 0, 0, len(ranges) if count is None else count)
    return head + b"".join(numbers(gap, length) for gap, length in ranges)


def manifest(total: int = 10, offset: int = 0, length: int = 10, present: int | None = None) -> bytes:
    return numbers(4, total, offset, 0, length) + bytes(length if present is None else present)


def parameter(*values: int) -> bytes:
    return numbers(*values)


SOURCE = (parse_source, frames.SOURCE)
REPAIR = (parse_repair, frames.REPAIR)
ACK = (parse_pfec_ack, frames.PFEC_ACK)
FRAGMENT = (parse_manifest, frames.MANIFEST)

FRAMES = [
    # truncated varint, or a length past the end of the packet
    (SOURCE, b"", ENCODING, "RFC 9000 §16, §20.1"),
    (SOURCE, b"\x40", ENCODING, "RFC 9000 §16, §20.1"),
    (SOURCE, b"\x04\x80\x00", ENCODING, "RFC 9000 §16, §20.1"),
    (SOURCE, b"\x04\x00\xc0", ENCODING, "RFC 9000 §16, §20.1"),
    (SOURCE, source(present=63), ENCODING, "RFC 9000 §20.1"),
    (SOURCE, source(length=MAX, present=64), ENCODING, "RFC 9000 §20.1"),
    (REPAIR, numbers(4) + bytes(3), ENCODING, "RFC 9000 §20.1"),
    (REPAIR, repair(present=63), ENCODING, "RFC 9000 §20.1"),
    (REPAIR, repair(length=MAX, present=64), ENCODING, "RFC 9000 §20.1"),
    (REPAIR, numbers(4) + bytes(4) + numbers(0, 3, 4096) + b"\x01" * 511, ENCODING, "RFC 9000 §20.1"),
    (ACK, ack(count=1), ENCODING, "RFC 9000 §16, §20.1"),
    (FRAGMENT, manifest(present=9), ENCODING, "RFC 9000 §20.1"),
    # symbol size that no transfer can have
    (SOURCE, source(length=63), VIOLATION, "docs/wire.md SOURCE"),
    (SOURCE, source(length=0), VIOLATION, "docs/wire.md SOURCE"),
    (SOURCE, source(length=1415), VIOLATION, "Max Symbol Size"),
    (REPAIR, repair(length=63), VIOLATION, "docs/wire.md REPAIR"),
    (REPAIR, repair(length=1415), VIOLATION, "Max Symbol Size"),
    # sid at the arithmetic edge, and above any credit
    (SOURCE, source(sid=MAX), VIOLATION, "edge of 62 bits"),
    (SOURCE, source(sid=MAX - 1), FLOW, "RFC 9000 §4.1"),
    (SOURCE, source(sid=SYMBOLS), FLOW, "RFC 9000 §4.1"),
    # coding sets
    (REPAIR, repair(degree=0), VIOLATION, "Degree"),
    (REPAIR, repair(degree=256), VIOLATION, "Max Degree"),
    (REPAIR, repair(degree=MAX), VIOLATION, "Max Degree"),
    (REPAIR, repair(tail_span=4097), VIOLATION, "Max Window"),
    (REPAIR, repair(tail_span=MAX), VIOLATION, "Max Window"),
    (REPAIR, repair(head_span=4097), VIOLATION, "Max Window, before the bitmap is looked for"),
    (REPAIR, repair(head_span=MAX), VIOLATION, "Max Window, before the bitmap is looked for"),
    (REPAIR, repair(head_span=1, head="01", tail_offset=MAX, tail_span=MAX), VIOLATION, "sum of 64 bits"),
    (REPAIR, repair(head_span=1, head="01", tail_offset=4088, tail_span=8), VIOLATION, "Max Window, all three"),
    (REPAIR, repair(tail_span=0), VIOLATION, "empty coding set"),
    (REPAIR, repair(tail_offset=1), VIOLATION, "offset without head"),
    (REPAIR, repair(head_span=1, head="01", tail_offset=1, tail_span=0), VIOLATION, "offset without tail"),
    (REPAIR, repair(head_span=3, head="04"), VIOLATION, "first bit of the head clear"),
    (REPAIR, repair(head_span=3, head="01"), VIOLATION, "last bit of the head clear"),
    (REPAIR, repair(head_span=3, head="0d"), VIOLATION, "bit set past the head"),
    (REPAIR, repair(head_span=9, head="0100"), VIOLATION, "last bit of the head clear"),
    (REPAIR, repair(first=MAX, tail_span=1), VIOLATION, "edge of 62 bits"),
    (REPAIR, repair(first=SYMBOLS, tail_span=1), FLOW, "RFC 9000 §4.1"),
    (REPAIR, repair(first=SYMBOLS - 7), FLOW, "RFC 9000 §4.1"),
    # feedback
    (ACK, ack(status=3), ENCODING, "Status"),
    (ACK, ack(status=MAX), ENCODING, "Status"),
    (ACK, ack(credit=SYMBOLS + 1), FLOW, "credit above the symbol limit"),
    (ACK, ack(credit=MAX), FLOW, "credit above the symbol limit"),
    (ACK, ack(credit=29), VIOLATION, "knows what was never allowed"),
    (ACK, ack(next_sid=MAX, seen_span=0), VIOLATION, "knows what was never allowed"),
    (ACK, ack(next_sid=101, seen_span=0), VIOLATION, "knows what was never allowed"),
    (ACK, ack(deficit=21), VIOLATION, "deficit above span"),
    (ACK, ack(next_sid=MAX, seen_span=1), ENCODING, "sum of 62 bits"),
    (ACK, ack(seen_span=MAX), ENCODING, "sum of 62 bits"),
    (ACK, ack(seen_span=80, ranges=((0, 0),) * 39 + ((0, 3),)), ENCODING, "range past the seen span"),
    (ACK, ack(seen_span=0, ranges=((0, 0),)), ENCODING, "range past the seen span"),
    (ACK, ack(ranges=((MAX, MAX),)), ENCODING, "range past the seen span"),
    (ACK, ack(ranges=((0, MAX),)), ENCODING, "range past the seen span"),
    (ACK, ack(next_sid=0, seen_span=500, credit=500, ranges=((0, 0),) * 65), ENCODING, "at most 64 ranges"),
    (ACK, ack(count=MAX), ENCODING, "at most 64 ranges, before any loop"),
    # manifest fragments
    (FRAGMENT, manifest(total=65_537), MANIFEST, "manifest limit"),
    (FRAGMENT, manifest(total=MAX), MANIFEST, "manifest limit"),
    (FRAGMENT, manifest(offset=1), ENCODING, "past the total length"),
    (FRAGMENT, manifest(offset=MAX), ENCODING, "past the total length"),
    (FRAGMENT, manifest(length=0), ENCODING, "empty fragment"),
    (FRAGMENT, manifest(total=0, length=0), ENCODING, "empty fragment"),
]


@pytest.mark.parametrize(("parser", "data", "code", "clause"), FRAMES)
def test_frame(parser: tuple[Callable[..., object], int], data: bytes, code: int, clause: str) -> None:
    parse, frame_type = parser
    with pytest.raises(PeerError) as caught:
        parse(data, 0, LIMITS)
    assert caught.value.code == code, clause
    assert caught.value.application is (code in set(AppCode))
    assert caught.value.frame_type == frame_type


EDGES = [
    (parse_source, source(sid=SYMBOLS - 1)),
    (parse_source, source(length=1414)),
    (parse_repair, repair(degree=255)),
    (parse_repair, repair(tail_span=4096)),
    (parse_repair, repair(head_span=1, head="01", tail_offset=4087, tail_span=8)),
    (parse_repair, repair(first=SYMBOLS - 8)),
    (parse_repair, repair(head_span=9, head="0101", tail_span=0)),
    (parse_pfec_ack, ack(credit=SYMBOLS)),
    (parse_pfec_ack, ack(credit=30, deficit=20)),
    (parse_pfec_ack, ack(next_sid=0, seen_span=0, credit=0)),
    (parse_pfec_ack, ack(ranges=((0, 18),))),
    (parse_pfec_ack, ack(next_sid=0, seen_span=128, credit=128, ranges=((0, 0),) * 64)),
    (parse_manifest, manifest(total=65_536, offset=65_526)),
]


@pytest.mark.parametrize(("parse", "data"), EDGES)
def test_the_value_just_inside_is_accepted(parse: Callable[..., tuple[object, int]], data: bytes) -> None:
    _, pos = parse(data, 0, LIMITS)
    assert pos == len(data)


LEGAL = (1, 1, 1414, 4096, 255, 4, 4096)
PARAMETERS = [
    (b"", "empty"),
    (parameter(*LEGAL)[:-1], "wrong length"),
    (parameter(*LEGAL[:6]), "a field less"),
    (parameter(*LEGAL) + b"\x00", "trailing byte"),
    (parameter(1, 1, 63, 4096, 255, 4, 4096), "Max Symbol Size"),
    (parameter(1, 1, 16_384, 4096, 255, 4, 4096), "Max Symbol Size"),
    (parameter(1, 1, 1414, 0, 255, 4, 4096), "Max Window"),
    (parameter(1, 1, 1414, 16_385, 255, 4, 4096), "Max Window"),
    (parameter(1, 1, 1414, 4096, 0, 4, 4096), "Max Degree"),
    (parameter(1, 1, 1414, 4096, 4097, 4, 4096), "Max Degree above Max Window"),
    (parameter(1, 1, 1414, 4096, 255, 65, 4096), "Max Transfers"),
    (parameter(1, 1, 1414, 4096, 255, 4, 0), "Initial Credit"),
    (parameter(1, 1, 1414, 4096, 255, 4, (1 << 20) + 1), "Initial Credit"),
    (parameter(1, 1, 1414, MAX, MAX, 4, MAX), "huge"),
    (parameter(1, 2, 1414, 0, 255, 4, 4096), "out of range even where no scheme is shared"),
]


@pytest.mark.parametrize(("data", "clause"), PARAMETERS)
def test_parameter(data: bytes, clause: str) -> None:
    with pytest.raises(PeerError) as caught:
        parse_parameter(data)
    assert (caught.value.code, caught.value.application) == (PARAMETER, False), clause


@pytest.mark.parametrize(
    "block",
    [
        (numbers(PARAMETER_ID, 7) + bytes(7)) * 2,
        numbers(PARAMETER_ID, 7) + bytes(7) + varint.encode_fixed(PARAMETER_ID, 8) + numbers(0),
        numbers(PARAMETER_ID, 8) + bytes(7),
        numbers(PARAMETER_ID, MAX),
        numbers(PARAMETER_ID),
        numbers(PARAMETER_ID)[:2],
        numbers(5, 1),
    ],
)
def test_parameter_block(block: bytes) -> None:
    with pytest.raises(PeerError) as caught:
        find_parameter(block)
    assert (caught.value.code, caught.value.application) == (PARAMETER, False)


def test_a_lower_limit_of_our_own_counts() -> None:
    limits = Limits(max_symbol_size=100, max_window=16, max_degree=8, max_symbols=50, initial_credit=50)
    for parse, data, code in (
        (parse_source, source(length=101), VIOLATION),
        (parse_source, source(sid=50), FLOW),
        (parse_repair, repair(tail_span=17), VIOLATION),
        (parse_repair, repair(degree=9), VIOLATION),
        (parse_repair, repair(first=43), FLOW),
    ):
        with pytest.raises(PeerError) as caught:
            parse(data, 0, limits)
        assert caught.value.code == code


def test_a_peer_may_grant_more_than_we_can_use() -> None:
    limits = Limits(max_symbols=50, initial_credit=50)
    frame, _ = parse_pfec_ack(ack(credit=1 << 20), 0, limits)
    assert frame.credit == 1 << 20


def test_manifest_above_its_limit() -> None:
    # The rest of the manifest's row is in test_wire_manifest.py, one reason each.
    with pytest.raises(PeerError) as caught:
        decode_manifest(bytes(LIMITS.max_manifest_bytes + 1), LIMITS)
    assert (caught.value.code, caught.value.application) == (MANIFEST, True)
