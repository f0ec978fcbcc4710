"""The compiled parts of the fast path against what they replace: aioquic's cryptography and window, and our parsers."""

from __future__ import annotations

import random
from typing import Any

import pytest
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import QuicProtocolVersion
from aioquic.quic.recovery import QuicPacketNumberWindow
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.quic._fast import Opener, PacketWindow, seal, sent_packets
from quic_pfec.quic.adapters import SentSymbol
from quic_pfec.quic.fast_send import run_key
from quic_pfec.wire import frames, varint
from quic_pfec.wire.errors import PeerError
from quic_pfec.wire.limits import Limits

LIMITS = Limits(max_symbols=5000, initial_credit=4096, max_window=300, max_degree=60)
CID = b"connecti"


def opener(limits: Limits = LIMITS) -> Opener:
    return Opener(limits.max_symbols, limits.max_symbol_size, limits.max_degree, limits.max_window)


def crypto() -> tuple[CryptoPair, CryptoPair]:
    """Two ends with the keys of an Initial packet: AES-128-GCM."""
    pairs = CryptoPair(), CryptoPair()
    for pair, is_client in zip(pairs, (True, False), strict=True):
        pair.setup_initial(cid=b"12345678", is_client=is_client, version=QuicProtocolVersion.VERSION_1)
    return pairs


# ---- parsing: the slow path is the judge ----------------------------------------------------------------------------

varints = st.one_of(
    st.integers(0, 80), st.integers(0, 70_000), st.sampled_from([4999, 5000, 2**30 - 1, 2**30, varint.MAX])
)
lengths = st.sampled_from([1, 2, 4, 8])


@st.composite
def encoded(draw: Any, values: Any = varints) -> bytes:
    """A varint in any of its forms."""
    value = draw(values)
    return varint.encode_fixed(value, max(draw(lengths), varint.size(value)))


symbols = st.one_of(st.sampled_from([63, 64, 65, 200, 1414, 1415]), st.integers(0, 80))


@st.composite
def source(draw: Any) -> bytes:
    size = draw(symbols)
    return (
        varint.encode(frames.SOURCE)
        + draw(encoded(st.sampled_from([0, 4, 64, 70_000])))
        + draw(encoded(st.one_of(st.integers(0, 6000), st.just(varint.MAX))))
        + draw(encoded(st.just(size)))
        + bytes([draw(st.integers(0, 255))]) * size
    )


@st.composite
def repair(draw: Any) -> bytes:
    size, head_span = draw(symbols), draw(st.one_of(st.just(0), st.integers(0, 40), st.integers(290, 310)))
    bits = draw(st.integers(0, 2**head_span - 1)) | (1 | 1 << head_span - 1 if head_span else 0)
    head = bits.to_bytes((head_span + 7) // 8, "little")
    if head and draw(st.integers(0, 5)) == 0:
        head = bytes([head[0] ^ draw(st.sampled_from([1, 128]))]) + head[1:]
    return (
        varint.encode(frames.REPAIR)
        + draw(encoded(st.sampled_from([0, 4, 64])))
        + draw(st.binary(min_size=4, max_size=4))
        + draw(encoded(st.one_of(st.integers(0, 5200), st.just(varint.MAX))))
        + draw(encoded(st.integers(0, 64)))
        + draw(encoded(st.just(head_span)))
        + head
        + draw(encoded(st.one_of(st.just(0), st.integers(0, 310), st.just(varint.MAX))))
        + draw(encoded(st.one_of(st.integers(0, 310), st.just(varint.MAX))))
        + draw(encoded(st.just(size)))
        + bytes([draw(st.integers(0, 255))]) * size
    )


padding = st.integers(0, 5).map(bytes)
others = st.sampled_from(
    [b"\x01", b"\x02\x00\x00\x00\x00", b"\x1e", varint.encode(frames.MANIFEST), b"\x80\x00\x00\x00"]
)
payloads = st.lists(st.one_of(source(), source(), repair(), repair(), padding), max_size=4).map(b"".join)


def judged(payload: bytes, limits: Limits) -> list[tuple[int, Any]] | None:
    """What the fast path must say: the frames, by the parsers of `wire`, or None for whatever it should leave alone."""
    found: list[tuple[int, Any]] = []
    pos = 0
    try:
        while pos < len(payload):
            if payload[pos] == 0:
                pos += 1
            elif payload[pos : pos + 4] == varint.encode(frames.SOURCE):
                one, pos = frames.parse_source(payload, pos + 4, limits)
                found.append((one.transfer_id, (one.sid, one.symbol)))
            elif payload[pos : pos + 4] == varint.encode(frames.REPAIR):
                two, pos = frames.parse_repair(payload, pos + 4, limits)
                header = two.header
                found.append(
                    (
                        header.transfer_id,
                        (
                            header.transfer_id, header.repair_number, header.first_sid, header.degree, header.head_span,
                            header.head, header.tail_offset, header.tail_span, two.symbol,
                        ),
                    )
                )  # fmt: skip
            else:
                return None
    except PeerError:
        return None
    return found or None


def same(payload: bytes, limits: Limits = LIMITS) -> bool:
    """Asserts that both judges agree; returns whether they accepted."""
    got, expected = opener(limits).parse(payload), judged(payload, limits)
    assert got == expected
    return got is not None


@settings(max_examples=250, deadline=None)
@given(payloads)
def test_it_accepts_what_the_parsers_accept(payload: bytes) -> None:
    same(payload)


@settings(max_examples=250, deadline=None)
@given(payloads, st.data())
def test_it_agrees_on_mutated_payloads(payload: bytes, data: st.DataObject) -> None:
    mutated = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 4))):
        if mutated:
            mutated[data.draw(st.integers(0, min(60, len(mutated)) - 1))] = data.draw(st.integers(0, 255))
    same(bytes(mutated[: data.draw(st.integers(0, len(mutated)))]))
    same(bytes(mutated))


@given(payloads, others, payloads)
def test_whatever_is_not_ours_is_left_alone(before: bytes, other: bytes, after: bytes) -> None:
    assert opener().parse(before + other + after) is None or other == b"\x80\x00\x00\x00"


def test_both_verdicts_are_common_among_plausible_frames() -> None:
    rng = random.Random(1)
    accepted = 0
    for _ in range(300):
        header = frames.RepairHeader(4, rng.randrange(2**32), rng.randrange(4950), rng.randrange(0, 62), 0, b"", 0, 20)
        accepted += same(
            varint.encode(frames.REPAIR)
            + varint.encode(4)
            + header.repair_number.to_bytes(4, "big")
            + varint.encode(header.first_sid)
            + bytes([header.degree, 0, 0, 20])
            + varint.encode_fixed(64, 2)
            + bytes(64)
        )
    assert 200 < accepted < 300


def test_it_agrees_on_many_mutants() -> None:
    rng = random.Random(2)
    seeds = [
        varint.encode(frames.SOURCE) + frames.SourceFrame(4, 1000, bytes(64)).body() + bytes(3),
        varint.encode(frames.REPAIR)
        + frames.RepairFrame(frames.RepairHeader(4, 9, 900, 48, 20, b"\x01\x80\x08", 7, 200), bytes(64)).body(),
        varint.encode(frames.REPAIR)
        + frames.RepairFrame(frames.RepairHeader(70, 9, 4000, 3, 0, b"", 0, 299), bytes(64)).body(),
    ]
    accepted = 0
    for _ in range(20_000):
        mutant = bytearray(rng.choice(seeds))
        for _ in range(rng.randrange(1, 3)):
            mutant[rng.randrange(4, 32)] = rng.choice([0, 1, 0x40, 0x41, 0x80, 0xC0, 0xFF, rng.randrange(256)])
        accepted += same(bytes(mutant))
    assert 1000 < accepted < 19_000


@pytest.mark.parametrize("cut", range(1, 90))
def test_every_truncation_is_left_alone(cut: int) -> None:
    frame = varint.encode(frames.SOURCE) + frames.SourceFrame(4, 1000, bytes(range(80))).body()
    assert opener().parse(frame) is not None
    assert opener().parse(frame[:-cut] if cut < len(frame) else b"") is None


def test_a_symbol_is_a_view_of_the_payload() -> None:
    payload = varint.encode(frames.SOURCE) + frames.SourceFrame(4, 7, bytes(range(100))).body()
    found = opener().parse(payload)
    assert found is not None
    view = found[0][1][-1]
    assert isinstance(view, memoryview)
    assert view.obj is payload
    assert view.readonly


# ---- sealing: byte for byte what aioquic makes ----------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(2, 300), min_size=1, max_size=10),
    st.integers(0, 2**40),
    st.binary(max_size=20),
    st.sampled_from([0x41, 0x45, 0x61]),
)
def test_sealed_packets_are_those_of_aioquic(sizes: list[int], number: int, cid: bytes, first: int) -> None:
    sender, _ = crypto()
    key = run_key(sender.send, sending=True)
    assert key is not None
    stride, header = 400, 3 + len(cid)
    rng = random.Random(number)
    plain, wire = bytearray(rng.randbytes(stride * len(sizes))), bytearray(10_000)
    got = seal(key.crypt, key.iv, key.mask, plain, stride, sizes, cid, first, number, wire, 5)
    position = 5
    for index, (length, size) in enumerate(zip(sizes, got, strict=True)):
        head = bytes([first]) + cid + ((number + index) & 0xFFFF).to_bytes(2, "big")
        start = index * stride + header
        expected = sender.encrypt_packet(head, bytes(plain[start : start + length]), number + index)
        assert wire[position : position + size] == expected
        position += size


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": [1]},
        {"lengths": [600]},
        {"lengths": [500, 500, 500]},
        {"wire": bytearray(500)},
        {"position": 600},
        {"cid": bytes(21)},
        {"iv": bytes(11)},
        {"stride": 5},
        {"number": 2**62 - 1},
        {"lengths": [-1]},
        {"mask": lambda samples: b""},
        {"encrypt": lambda nonce, data, head: bytes(data)},
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    sender, _ = crypto()
    key = run_key(sender.send, sending=True)
    assert key is not None
    arguments: dict[str, Any] = {
        "encrypt": key.crypt, "iv": key.iv, "mask": key.mask, "plain": bytearray(1100), "stride": 550,
        "lengths": [500], "cid": CID, "first": 0x41, "number": 1, "wire": bytearray(1100), "position": 0,
    }  # fmt: skip
    seal(*arguments.values())
    with pytest.raises((ValueError, OverflowError)):
        seal(*(arguments | change).values())


def test_packets_for_the_books() -> None:
    fates: list[tuple[object, ...]] = []
    packets = sent_packets(SentSymbol, 7, [100, 90], [None, "token"], lambda *args: fates.append(args), 1.5)
    assert [(p.packet_number, p.sent_bytes, p.sent_time) for p in packets] == [(7, 100, 1.5), (8, 90, 1.5)]
    assert packets[0].delivery_handlers == []
    ((handler, args),) = packets[1].delivery_handlers
    handler("acked", *args)
    assert fates == [("acked", "token")]
    assert all(p.in_flight and p.is_ack_eliciting and not p.is_crypto_packet for p in packets)


# ---- opening --------------------------------------------------------------------------------------------------------


def datagram(
    pair: CryptoPair, number: int, payload: bytes, first: int = 0x41, cid: bytes = CID, width: int = 2
) -> bytes:
    head = bytes([first & ~3 | width - 1]) + cid + (number & (1 << 8 * width) - 1).to_bytes(width, "big")
    return pair.encrypt_packet(head, payload, number)


def symbol(sid: int, size: int = 100, transfer_id: int = 4) -> bytes:
    return varint.encode(frames.SOURCE) + frames.SourceFrame(transfer_id, sid, bytes([sid & 0xFF]) * size).body()


class End:
    """A receiver with its key, window and expectation."""

    def __init__(self) -> None:
        self.sender, receiver = crypto()
        key = run_key(receiver.recv, sending=False)
        assert key is not None
        self.key = key
        self.opener = opener()
        self.window = PacketWindow(4096)
        self.expected = 0

    def open(self, *datagrams: bytes, start: int = 0) -> int:
        self.opener.load(datagrams, CID, self.key.mask)
        stopped = self.opener.open(start, self.key.crypt, self.key.iv, 0, self.window, self.expected)
        self.expected = self.opener.expected
        return stopped

    def sids(self) -> dict[int, list[Any]]:
        return {transfer: [packet[0] for packet in packets] for transfer, packets in self.opener.groups.items()}


def test_a_batch_is_opened_and_grouped() -> None:
    end = End()
    batch = [datagram(end.sender, number, symbol(number, transfer_id=4 * (number % 2))) for number in (0, 1, 2, 5, 4)]
    batch.insert(2, batch[0])
    assert end.open(*batch) == 6
    assert end.sids() == {0: [0, 2, 4], 4: [1, 5]}
    assert end.opener.numbers == [(0, 3), (5, 6), (4, 5)]
    assert (end.opener.largest, end.opener.duplicates, end.opener.expected) == (5, 1, 6)
    assert end.open(*batch) == 6
    assert (end.opener.numbers, end.opener.duplicates, end.opener.groups) == ([], 6, {})
    end.opener.release()
    assert end.open() == 0


@pytest.mark.parametrize(
    "refused",
    [
        lambda end: datagram(end.sender, 1, symbol(1), first=0x45),  # other key phase
        lambda end: datagram(end.sender, 1, symbol(1), first=0x49),  # reserved bit
        lambda end: datagram(end.sender, 1, symbol(1), first=0x01),  # fixed bit
        lambda end: datagram(end.sender, 1, symbol(1), first=0xC1),  # long header
        lambda end: datagram(end.sender, 1, symbol(1), width=4),
        lambda end: datagram(end.sender, 1, symbol(1), cid=b"ITECNNOC"),
        lambda end: datagram(end.sender, 1, b"\x01\x01\x01"),
        lambda end: datagram(end.sender, 1, bytes(30)),
        lambda end: datagram(end.sender, 1, symbol(1) + b"\x01"),
        lambda end: datagram(end.sender, 1, symbol(1))[:-1] + b"?",
        lambda end: datagram(end.sender, 1, symbol(1))[:28],
        lambda end: b"",
        lambda end: b"\x41",
    ],
)
def test_what_is_refused_changes_nothing(refused: Any) -> None:
    end = End()
    first, last = datagram(end.sender, 0, symbol(0)), datagram(end.sender, 2, symbol(2))
    assert end.open(first, refused(end), last) == 1
    assert end.opener.numbers == [(0, 1)]
    assert 1 not in end.window
    assert end.open(first, b"", last, start=2) == 3
    assert end.opener.numbers == [(2, 3)]


def test_numbers_beyond_sixteen_bits() -> None:
    end = End()
    numbers = [0, 30_000, 60_000, 65_535, 65_536, 90_000, 65_534]
    end.open(*(datagram(end.sender, number, symbol(1)) for number in numbers))
    assert end.opener.numbers == [(0, 1), (30_000, 30_001), (60_000, 60_001), (65_535, 65_537), (90_000, 90_001)]
    assert end.opener.duplicates == 1  # 65,534 lies 24,466 behind: outside the window


def test_it_wants_a_mask_a_sample_and_a_real_index() -> None:
    end = End()
    with pytest.raises(ValueError):
        end.opener.load([bytes(100)], CID, lambda samples: b"")
    with pytest.raises(ValueError):
        end.opener.load([bytes(100)], bytes(21), end.key.mask)
    with pytest.raises(ValueError):
        end.opener.open(-1, end.key.crypt, end.key.iv, 0, end.window, 0)


# ---- the window of packet numbers -----------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 400), st.integers(0, 5000), st.integers(0, 2**61)), max_size=60))
def test_the_window_is_that_of_aioquic(numbers: list[int]) -> None:
    ours, theirs = PacketWindow(128), QuicPacketNumberWindow()
    theirs._size = 128
    for number in numbers:
        for near in (number, number - 1, number + 1, number - 127, number - 128, number + 128):
            if near >= 0:
                assert (near in ours) == (near in theirs)
        ours.add(number)
        theirs.add(number)
    assert len(ours) == 128


@pytest.mark.parametrize("size", [0, 63, 100, 2**21, -64])
def test_a_window_has_a_power_of_two(size: int) -> None:
    with pytest.raises(ValueError):
        PacketWindow(size)
