"""Messages of the transfer stream: bodies, order, any cutting into pieces, and bounds before buffers."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.wire import messages, varint
from quic_pfec.wire.errors import AppCode, LocalError, PeerError
from quic_pfec.wire.frames import AckStatus
from quic_pfec.wire.limits import Limits
from quic_pfec.wire.messages import (
    STREAM_PREAMBLE,
    Accepted,
    Decoding,
    Done,
    Failed,
    Generate,
    Kind,
    Message,
    MessageReader,
    Open,
    Refused,
    Report,
    Role,
    Scores,
    Start,
    Text,
    Tokens,
    Unit,
    encode_message,
    one_line,
)

LIMITS = Limits()
COUNTS = st.integers(0, (1 << 62) - 1)
TOKEN_IDS = st.integers(0, (1 << 32) - 1)
TOKEN_TUPLES = st.lists(TOKEN_IDS, max_size=40).map(tuple)
CLOCKS = st.floats(0, 1e12)
PRINTABLE = st.text("abc é", max_size=64)
OPENS = st.builds(
    Open, COUNTS, st.binary(max_size=300), st.sampled_from(["symbols", "stream"]), st.text(max_size=256), COUNTS
)
TOKENS = TOKEN_TUPLES.map(Tokens.from_ids)
GENERATES = st.builds(
    Generate,
    st.text(max_size=40),
    TOKEN_TUPLES,
    st.integers(0, 1 << 16),
    st.booleans(),
    TOKEN_TUPLES,
    COUNTS,
    st.text(max_size=256),
)
UNITS = st.builds(Unit, st.integers(0, (1 << 24) - 1), st.binary(max_size=300))
ACCEPTED = st.builds(Accepted, COUNTS)
ANSWERS = st.one_of(
    st.builds(
        Report,
        st.sampled_from(AckStatus),
        st.integers(-(1 << 62), (1 << 62) - 1),
        CLOCKS,
        st.binary(max_size=99),
        st.binary(max_size=99),
        COUNTS,
        st.binary(max_size=99),
        *[COUNTS] * 4,
    ),
    st.builds(Decoding, COUNTS, CLOCKS, st.sampled_from(["", "mask", "recompute"])),
    st.builds(Text, st.text(max_size=99), st.integers(-1, (1 << 32) - 1), st.integers(0, 1 << 16)),
    st.builds(Scores, TOKEN_TUPLES),
    st.builds(
        Done,
        PRINTABLE,
        st.integers(0, 1 << 16),
        st.none() | st.lists(st.tuples(st.integers(0, 65_537), st.integers(1, 1 << 24)), max_size=5).map(tuple),
    ),
)
LAST = st.builds(Failed, COUNTS, PRINTABLE) | st.builds(Refused, COUNTS, PRINTABLE)

OPEN_SYMBOLS = Open(350_000, b"manifest", "symbols", "secret")
OPEN_STREAM = Open(350_000, b"manifest", "stream", "")
LATER_TURN = Generate("and then?", max_new_tokens=9, handle=7, token="secret")


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Role, list[Message]]:
    """Who reads, and a legal sequence of messages."""
    if draw(st.booleans()):
        accepted = draw(st.lists(ACCEPTED, max_size=1))
        return Role.SENDER, [*accepted, *draw(st.lists(ANSWERS, max_size=5)), *draw(st.lists(LAST, max_size=1))]
    if draw(st.booleans()):
        return Role.RECEIVER, [draw(GENERATES), Start()]
    first = draw(OPENS)
    opening = draw(st.permutations([draw(TOKENS), draw(GENERATES)]))[: draw(st.integers(0, 2))]
    units = draw(st.lists(UNITS, max_size=4)) if first.mode == "stream" else []
    return Role.RECEIVER, [first, *opening, Start(), *units]


def stream(role: Role, conversation: Iterable[Message]) -> bytes:
    preamble = STREAM_PREAMBLE if role is Role.RECEIVER else b""
    return preamble + b"".join(map(encode_message, conversation))


def raw(kind: int, body: bytes = b"") -> bytes:
    return varint.encode(kind) + varint.encode(len(body)) + body


def refused(reader: MessageReader, data: bytes) -> str:
    with pytest.raises(PeerError) as caught:
        reader.feed(data)
    assert caught.value.code == AppCode.MESSAGE_ERROR
    assert caught.value.application
    assert caught.value.reason.isprintable()
    assert len(caught.value.reason) <= messages.MAX_REASON
    return caught.value.reason


def opened(*after: Message, mode: Message = OPEN_SYMBOLS, limits: Limits = LIMITS) -> MessageReader:
    reader = MessageReader(limits, Role.RECEIVER)
    reader.feed(stream(Role.RECEIVER, [mode, *after]))
    return reader


def answered(limits: Limits = LIMITS) -> MessageReader:
    reader = MessageReader(limits, Role.SENDER)
    reader.feed(encode_message(Accepted(1)))
    return reader


@settings(deadline=None, max_examples=200)
@given(conversations(), st.data())
def test_any_cutting_gives_the_same_messages(talk: tuple[Role, list[Message]], data: st.DataObject) -> None:
    role, conversation = talk
    whole = stream(role, conversation)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    reader = MessageReader(LIMITS, role)
    got: list[Message] = []
    for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        got += reader.feed(memoryview(whole)[start:stop])
    assert got == conversation
    assert reader.buffered == 0
    reader.finish()


@settings(deadline=None, max_examples=40)
@given(conversations())
def test_byte_by_byte(talk: tuple[Role, list[Message]]) -> None:
    role, conversation = talk
    reader = MessageReader(LIMITS, role)
    got: list[Message] = []
    for byte in stream(role, conversation):
        got += reader.feed(bytes((byte,)))
    assert got == conversation


@pytest.mark.parametrize(
    ("message", "encoded"),
    [
        (OPEN_SYMBOLS, "01 1f 94 ce00055730 c4086d616e6966657374 a773796d626f6c73 a6736563726574"),
        (
            Open(350_000, b"manifest", "symbols", "secret", 5_000_000),
            "01 24 95 ce00055730 c4086d616e6966657374 a773796d626f6c73 a6736563726574 ce004c4b40",
        ),
        (Tokens.from_ids([1, 49_151]), "02 08 01000000 ffbf0000"),
        (Generate("hi", (5, 300), 64, True, (), 7, "t"), "03 0f 97 a26869 9205cd012c 40 c3 90 07 a174"),
        (Start(), "04 00"),
        (Unit(0x010203, b"\x0a\x0b"), "05 05 010203 0a0b"),
        (Accepted(7), "10 02 91 07"),
        (Refused(AppCode.BUSY, "full"), "11 09 92 cd0103 a466756c6c"),
        (
            Report(AckStatus.FROZEN, -40, 1.5, b"\xff", b"\x01", 0, b"\x06", 2, 3, 4, 5),
            "12 1b 9b 02 d0d8 cb3ff8000000000000 c401ff c40101 00 c40106 02 03 04 05",
        ),
        (Decoding(900, 1.5), "13 0d 92 cd0384 cb3ff8000000000000"),  # as earlier releases read it: two elements
        (Decoding(900, 1.5, "mask"), "13 12 93 cd0384 cb3ff8000000000000 a46d61736b"),
        (Text("hi", 20, 0), "14 06 93 a26869 14 00"),
        (Scores((1, 2)), "15 04 91 920102"),
        (Done("length", 64), "16 09 92 a66c656e677468 40"),
        (Done("length", 64, ((0, 3), (5, 7))), "16 10 93 a66c656e677468 40 92 920003 920507"),
        (Failed(AppCode.INTERNAL, "oom"), "17 08 92 cd010b a36f6f6d"),
    ],
)
def test_golden_bytes(message: Message, encoded: str) -> None:
    assert encoded in (Path(__file__).parents[1] / "docs" / "wire.md").read_text(encoding="utf-8")
    assert encode_message(message) == bytes.fromhex(encoded)


def test_preamble() -> None:
    assert STREAM_PREAMBLE.hex() == "ba18e740"


def test_token_ids() -> None:
    assert Tokens.from_ids(range(5)).array().tolist() == [0, 1, 2, 3, 4]
    assert Tokens.from_ids([]) == Tokens(b"")
    for bad in ([-1], [1 << 32], ["a"], [0.5], [[1]]):
        with pytest.raises(LocalError):
            Tokens.from_ids(bad)  # type: ignore[arg-type]


def test_credential_stays_out_of_logs() -> None:
    for message in (OPEN_SYMBOLS, LATER_TURN):
        assert message.token == "secret"
        assert "secret" not in repr(message)
        assert "secret" not in str([message])


# Order


@pytest.mark.parametrize(
    ("before", "kind"),
    [
        ([], Kind.TOKENS),
        ([], Kind.START),
        ([], Kind.UNIT),
        ([OPEN_SYMBOLS], Kind.OPEN),
        ([OPEN_STREAM], Kind.UNIT),
        ([OPEN_STREAM, Tokens(b"")], Kind.TOKENS),
        ([OPEN_STREAM, Generate("", (), 1, False)], Kind.GENERATE),
        ([OPEN_STREAM, Start()], Kind.OPEN),
        ([OPEN_STREAM, Start()], Kind.TOKENS),
        ([OPEN_STREAM, Start()], Kind.START),
        ([OPEN_SYMBOLS, Start()], Kind.UNIT),
        ([LATER_TURN], Kind.OPEN),
        ([LATER_TURN], Kind.TOKENS),
        ([LATER_TURN], Kind.GENERATE),
        ([LATER_TURN, Start()], Kind.UNIT),
        ([OPEN_SYMBOLS], Kind.ACCEPTED),
        ([OPEN_SYMBOLS, Start()], Kind.TEXT),
    ],
)
def test_out_of_order_for_the_receiver(before: list[Message], kind: Kind) -> None:
    reader = MessageReader(LIMITS, Role.RECEIVER)
    reader.feed(stream(Role.RECEIVER, before))
    # The kind alone is enough: neither length nor body is waited for.
    assert f"{kind.name} out of order" in refused(reader, varint.encode(kind))


@pytest.mark.parametrize(
    ("before", "kind"),
    [
        ([Accepted(1)], Kind.ACCEPTED),
        ([Refused(0x103, "busy")], Kind.ACCEPTED),
        ([Refused(0x103, "busy")], Kind.REPORT),
        ([Accepted(1), Failed(0x10B, "")], Kind.TEXT),
        ([Accepted(1), Refused(0x106, "")], Kind.REPORT),
        ([], Kind.OPEN),
        ([Accepted(1)], Kind.UNIT),
    ],
)
def test_out_of_order_for_the_sender(before: list[Message], kind: Kind) -> None:
    reader = MessageReader(LIMITS, Role.SENDER)
    reader.feed(stream(Role.SENDER, before))
    assert f"{kind.name} out of order" in refused(reader, varint.encode(kind))


@pytest.mark.parametrize("kind", [0, 6, 15, 24, 63, 64, varint.MAX])
def test_unknown_kind(kind: int) -> None:
    assert f"unknown kind {kind}" in refused(opened(), varint.encode(kind))
    assert f"unknown kind {kind}" in refused(answered(), varint.encode(kind))


def test_wrong_stream_type() -> None:
    assert "stream type 0x0" in refused(MessageReader(LIMITS, Role.RECEIVER), b"\x00")


# Bounds


@pytest.mark.parametrize(
    ("reader", "kind", "longest"),
    [
        (MessageReader(LIMITS, Role.RECEIVER), Kind.OPEN, 65_536 + 1024 + 64),
        (opened(), Kind.TOKENS, 4 << 20),
        (opened(), Kind.GENERATE, 4 * (65_536 + 256) + 5 * (65_536 + 4096) + 64),
        (opened(), Kind.START, 0),
        (opened(Start(), mode=OPEN_STREAM), Kind.UNIT, (4 << 20) + 3),
        (MessageReader(LIMITS, Role.SENDER), Kind.ACCEPTED, 64),
        (MessageReader(LIMITS, Role.SENDER), Kind.REFUSED, 1024 + 64),
        (answered(), Kind.REPORT, (1 << 18) + (1 << 21) + 128),
        (answered(), Kind.DECODING, 128),
        (answered(), Kind.TEXT, 4 * 4096 + 64),
        (answered(), Kind.SCORES, 5 * 4096 + 64),
        (answered(), Kind.DONE, 1024 + 11 * 1024 + 64),
        (answered(), Kind.FAILED, 1024 + 64),
    ],
)
def test_length_is_judged_before_the_body(reader: MessageReader, kind: Kind, longest: int) -> None:
    preamble = STREAM_PREAMBLE if kind is Kind.OPEN else b""
    reason = refused(reader, preamble + varint.encode(kind) + varint.encode(longest + 1))
    assert f"{kind.name} of {longest + 1} bytes, at most {longest}" in reason
    assert reader.buffered == 0


def test_the_longest_of_each_kind_fit() -> None:
    receiver = MessageReader(LIMITS, Role.RECEIVER)
    sent: list[Message] = [
        Open((1 << 62) - 1, bytes(LIMITS.max_manifest_bytes), "stream", "\U0001f600" * 256),
        Tokens(bytes(4 * LIMITS.max_tokens)),
        Generate(
            "\U0001f600" * (1 << 16),
            ((1 << 32) - 1,) * (1 << 16),
            1 << 16,
            True,
            ((1 << 32) - 1,) * 4096,
            (1 << 62) - 1,
            "\U0001f600" * 256,
        ),
        Start(),
        Unit((1 << 24) - 1, bytes(LIMITS.max_unit_bytes)),
    ]
    assert receiver.feed(stream(Role.RECEIVER, sent)) == sent
    sender = MessageReader(LIMITS, Role.SENDER)
    most = (1 << 62) - 1
    answers: list[Message] = [
        Accepted(most),
        Report(AckStatus.FROZEN, -most, 1e12, bytes(1 << 17), bytes(1 << 21), most, bytes(1 << 17), *[most] * 4),
        Decoding(most, 1e12, "\U0001f600" * 16),
        Text("\U0001f600" * 4096, (1 << 32) - 1, 1 << 16),
        Scores(((1 << 32) - 1,) * 4096),
        Done("\U0001f600" * 64, 1 << 16, ((65_537, 1 << 24),) * 1024),
        Failed(most, "\U0001f600" * 256),
    ]
    assert sender.feed(stream(Role.SENDER, answers)) == answers


def test_memory_follows_what_arrived_not_what_was_announced() -> None:
    reader = opened(Start(), mode=OPEN_STREAM)
    tracemalloc.start()
    try:
        reader.feed(varint.encode(Kind.UNIT) + varint.encode(4 << 20) + bytes(100))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert reader.buffered == 100
    assert peak < 1 << 16


def test_own_limits_bound_the_fields_inside() -> None:
    limits = Limits(max_manifest_bytes=1000, max_symbols=80, initial_credit=80, max_tokens=3, max_unit_bytes=10)
    reader = MessageReader(limits, Role.RECEIVER)
    assert "manifest above the limit" in refused(
        reader, STREAM_PREAMBLE + encode_message(Open(1, bytes(1001), "symbols"))
    )
    report = Report(AckStatus.COMPLETE, 0, 0.0, bytes(10), b"", 0, bytes(10), 0, 0, 0, 0)
    assert answered(limits).feed(encode_message(report)) == [report]
    for field in ("known", "recovered"):
        longer = msgspec.structs.replace(report, **{field: bytes(11)})
        assert "more symbols" in refused(answered(limits), encode_message(longer))
    assert "TOKENS of 16 bytes" in refused(opened(limits=limits), encode_message(Tokens(bytes(16))))
    assert "UNIT of 14 bytes" in refused(
        opened(Start(), mode=OPEN_STREAM, limits=limits), encode_message(Unit(0, bytes(11)))
    )


# Bodies

BIG = 1 << 62
BODIES = [
    (Kind.OPEN, [1, b"", "other", ""]),
    (Kind.OPEN, [-1, b"", "symbols", ""]),
    (Kind.OPEN, [BIG, b"", "symbols", ""]),
    (Kind.OPEN, [1, "text", "symbols", ""]),
    (Kind.OPEN, [1, b"", "symbols", "t" * 257]),
    (Kind.OPEN, [1, b"", "symbols", "", 0, 0]),
    (Kind.OPEN, [1, b""]),
    (Kind.OPEN, {"remaining_us": 1}),
    (Kind.OPEN, [1, b"", "\x1b[2J" + "x" * 500, ""]),
    (Kind.GENERATE, ["", [-1], 1, True, [], 0, ""]),
    (Kind.GENERATE, ["", [1 << 32], 1, True, [], 0, ""]),
    (Kind.GENERATE, ["", [0] * 65_537, 1, True, [], 0, ""]),
    (Kind.GENERATE, ["", [], 65_537, True, [], 0, ""]),
    (Kind.GENERATE, ["", [], -1, True, [], 0, ""]),
    (Kind.GENERATE, ["", [], 1, 1, [], 0, ""]),
    (Kind.GENERATE, ["", [], 1, True, [0] * 4097, 0, ""]),
    (Kind.GENERATE, ["", [1.0], 1, True, [], 0, ""]),
    (Kind.GENERATE, ["p" * 65_537]),
    (Kind.GENERATE, ["", [], 1, True, [], -1, ""]),
    (Kind.GENERATE, ["", [], 1, True, [], 0, "t" * 257]),
    (Kind.ACCEPTED, [-1]),
    (Kind.ACCEPTED, [BIG]),
    (Kind.ACCEPTED, []),
    (Kind.REFUSED, [1, "r" * 257]),
    (Kind.REFUSED, [1, "two\nlines"]),
    (Kind.REFUSED, ["1", ""]),
    (Kind.REPORT, [3, 0, 0.0, b"", b"", 0, b"", 0, 0, 0, 0]),
    (Kind.REPORT, [1, -BIG - 1, 0.0, b"", b"", 0, b"", 0, 0, 0, 0]),
    (Kind.REPORT, [1, 0, float("nan"), b"", b"", 0, b"", 0, 0, 0, 0]),
    (Kind.REPORT, [1, 0, float("inf"), b"", b"", 0, b"", 0, 0, 0, 0]),
    (Kind.REPORT, [1, 0, -1.0, b"", b"", 0, b"", 0, 0, 0, 0]),
    (Kind.REPORT, [1, 0, 0.0, b"", bytes((1 << 21) + 1), 0, b"", 0, 0, 0, 0]),
    (Kind.REPORT, [1, 0, 0.0, b"", b"", -1, b"", 0, 0, 0, 0]),
    (Kind.DECODING, [0, float("nan")]),
    (Kind.DECODING, [-1, 0.0]),
    (Kind.TEXT, ["t" * 4097, 0, 0]),
    (Kind.TEXT, ["", -2, 0]),
    (Kind.TEXT, ["", 1 << 32, 0]),
    (Kind.TEXT, ["", 0, 65_537]),
    (Kind.SCORES, [[0] * 4097]),
    (Kind.SCORES, [[-1]]),
    (Kind.DONE, ["r" * 65, 0]),
    (Kind.DONE, ["\x00", 0]),
    (Kind.DONE, ["", -1]),
    (Kind.FAILED, [1, "\x07"]),
]


def reader_for(kind: Kind) -> MessageReader:
    if kind is Kind.OPEN:
        reader = MessageReader(LIMITS, Role.RECEIVER)
        reader.feed(STREAM_PREAMBLE)
        return reader
    if kind in (Kind.ACCEPTED, Kind.REFUSED):
        return MessageReader(LIMITS, Role.SENDER)
    if kind is Kind.UNIT:
        return opened(Start(), mode=OPEN_STREAM)
    return opened() if kind < 16 else answered()


@pytest.mark.parametrize(("kind", "fields"), BODIES)
def test_malformed_body(kind: Kind, fields: object) -> None:
    assert kind.name in refused(reader_for(kind), raw(kind, msgspec.msgpack.encode(fields)))


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.TOKENS, bytes(7)),
        (Kind.UNIT, bytes(2)),
        (Kind.ACCEPTED, b""),
        (Kind.ACCEPTED, b"\x91\x01\x00"),
        (Kind.REFUSED, b"\x92\x01\xa2\xff\xfe"),
        (Kind.SCORES, b"\x91\xdd\xff\xff\xff\xff"),
        (Kind.TEXT, b"\x91" * 5000),
    ],
)
def test_malformed_bytes(kind: Kind, body: bytes) -> None:
    assert kind.name in refused(reader_for(kind), raw(kind, body))


def test_a_fault_is_final() -> None:
    reader = opened()
    first = refused(reader, b"\x3f")
    assert refused(reader, encode_message(Start())) == first
    with pytest.raises(PeerError):
        reader.finish()


@pytest.mark.parametrize("cut", [0, 3, 4, 5, 6, 20])
def test_stream_that_ends_too_soon(cut: int) -> None:
    whole = stream(Role.RECEIVER, [OPEN_SYMBOLS])
    reader = MessageReader(LIMITS, Role.RECEIVER)
    reader.feed(whole[:cut])
    with pytest.raises(PeerError) as caught:
        reader.finish()
    assert caught.value.code == AppCode.MESSAGE_ERROR


def test_stream_that_ends_before_start() -> None:
    with pytest.raises(PeerError, match="before START"):
        opened(Tokens(b"")).finish()
    opened(Start()).finish()


@pytest.mark.parametrize("piece", [b"\x40", varint.encode(Kind.TEXT), raw(Kind.TEXT, b"\x93\xa2hi")[:-1]])
def test_answer_that_ends_inside_a_message(piece: bytes) -> None:
    reader = answered()
    reader.finish()
    reader.feed(piece)
    with pytest.raises(PeerError, match="inside a message"):
        reader.finish()


@pytest.mark.parametrize(
    "message",
    [
        Open(-1, b"", "symbols"),
        Open(1, b"", "other"),  # type: ignore[arg-type]
        Open(1, b"", "symbols", "t" * 257),
        Generate("", (-1,)),
        Generate(max_new_tokens=65_537),
        Done("two\nlines", 1),
        Done("stop", 1, ((0, 0),)),
        Done("stop", 1, ((65_538, 1),)),
        Done("stop", 1, ((0, 1),) * 1025),
        Open(1, b"", "symbols", "", -1),
        Refused(-1, ""),
        Text("t" * 4097, 0, 0),
        Decoding(0, float("nan")),
        Decoding(0, 0.0, "x" * 17),
        Decoding(0, 0.0, "two\nlines"),
        Tokens(b"abc"),
        Unit(1 << 24, b""),
        Unit(-1, b""),
    ],
)
def test_what_a_peer_would_refuse_is_not_written(message: Message) -> None:
    with pytest.raises(LocalError):
        encode_message(message)


def test_one_line_makes_a_reason_of_anything() -> None:
    assert one_line("two\nlines\t\x1b[2J") == "two lines  [2J"
    assert one_line("x" * 300) == "x" * 255 + "…"
    assert one_line("x" * 256) == "x" * 256


@pytest.mark.parametrize("kind", [Refused, Failed])
def test_an_error_can_always_be_told(kind: type[Refused] | type[Failed]) -> None:
    [message] = MessageReader(LIMITS, Role.SENDER).feed(encode_message(kind(1, "first\nsecond" + "x" * 400)))
    assert isinstance(message, kind)
    assert message.reason == one_line("first second" + "x" * 400)


HEADS = st.sampled_from([STREAM_PREAMBLE, *map(encode_message, (OPEN_STREAM, LATER_TURN, Start(), Accepted(1)))])


@settings(deadline=None, max_examples=400)
@given(
    st.sampled_from(Role),
    st.lists(HEADS, max_size=3).map(b"".join),
    st.binary(max_size=40) | st.builds(raw, st.sampled_from(Kind), st.binary(max_size=30)),
)
def test_any_bytes_raise_only_peer_errors(role: Role, head: bytes, tail: bytes) -> None:
    reader = MessageReader(LIMITS, role)
    with contextlib.suppress(PeerError):
        reader.feed(head)
        reader.feed(tail)
        reader.finish()
