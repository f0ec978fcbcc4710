"""Many packets in one call, and work spread over calls: the same answers as one by one, in bounded portions."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec import _codec
from quic_pfec.fec import reference
from quic_pfec.fec.outcome import RepairOutcome
from tests.codec_world import Header, header, known, random_header, repair_symbol, state, symbols

SIZE = 12
COUNT = 20
TRUTH = symbols(COUNT, SIZE, seed=12)
encoders = pytest.mark.parametrize("make", [_codec.Encoder, reference.Encoder], ids=["native", "twin"])
decoders = pytest.mark.parametrize("make", [_codec.Decoder, reference.Decoder], ids=["native", "twin"])


def filled(make: Any, truth: list[bytes]) -> Any:
    encoder = make(len(truth[0]), len(truth))
    for symbol in truth:
        encoder.push(symbol)
    return encoder


@encoders
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32), burst=st.integers(1, 16), degree=st.integers(1, 30))
def test_a_burst_is_as_many_repairs(make: Any, seed: int, burst: int, degree: int) -> None:
    encoder = filled(make, TRUTH)
    h = random_header(random.Random(seed), 7, 0, COUNT, degree)
    single = [encoder.repair(h[0], h[1] + i, *h[2:]) for i in range(burst)]
    assert encoder.repairs(burst, *h) == single
    assert single[0] == repair_symbol(TRUTH, h)


@encoders
def test_bursts_refused(make: Any) -> None:
    encoder = filled(make, TRUTH)
    h = header(2**32 - 4, [], range(COUNT), 4)
    assert len(encoder.repairs(4, *h)) == 4
    for count in (0, -1, 5, 65):  # 5: the last number would not fit
        with pytest.raises(ValueError):
            encoder.repairs(count, *h)
    with pytest.raises(ValueError, match="beyond"):
        encoder.repairs(2, *header(1, [], range(COUNT + 1), 4))
    with pytest.raises(ValueError, match="degree"):
        encoder.repairs(2, *header(1, [], range(COUNT), 0))
    assert len(encoder.repairs(64, *header(1, [], range(COUNT), 4))) == 64


@pytest.mark.realtime
def test_a_second_thread_is_refused_while_a_burst_is_made() -> None:
    encoder = _codec.Encoder(65_535, 256)
    for _ in range(255):
        encoder.push(bytes(65_535))
    h = header(1, [], range(255), 255)
    refused = False
    for _ in range(20):
        worker = threading.Thread(target=lambda: encoder.repairs(64, *h))
        worker.start()
        try:
            while worker.is_alive():
                encoder.repair(*h)
        except RuntimeError as error:
            refused = "another thread" in str(error)
        worker.join()
        if refused:
            break
    assert refused
    assert encoder.push(bytes(65_535)) == 255


def packets_of(rng: random.Random, n: int) -> list[tuple[Any, ...]]:
    packets: list[tuple[Any, ...]] = []
    for number in range(n):
        if rng.random() < 0.4:
            sid = rng.randrange(COUNT)
            packets.append((sid, TRUTH[sid]))
        else:
            low = rng.randrange(COUNT)
            h = random_header(rng, number, low, rng.randint(low + 1, COUNT), rng.randint(1, 12))
            packets.append((*h, repair_symbol(TRUTH, h)))
    return packets


@decoders
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), n=st.integers(0, 40), at_once=st.integers(1, 16))
def test_a_batch_is_as_many_packets(make: Any, seed: int, n: int, at_once: int) -> None:
    packets = packets_of(random.Random(seed), n)
    single, batched = _codec.Decoder(SIZE, COUNT), make(SIZE, COUNT)
    for at in range(0, n, at_once):
        batch = packets[at : at + at_once]
        expected = [(single.source if len(packet) == 2 else single.repair)(*packet) for packet in batch]
        assert batched.receive_batch(iter(batch)) == expected
        assert single.poll(2) == batched.poll(2)
        assert state(single) == state(batched)
    assert all(batched.symbol(sid) == TRUTH[sid] for sid in known(batched))


@decoders
def test_a_bad_packet_refuses_the_whole_batch(make: Any) -> None:
    decoder = make(SIZE, COUNT, max_degree=8)
    good = (0, TRUTH[0])
    h = header(1, [], range(4), 4)
    before = state(decoder)
    for bad in (
        (COUNT, TRUTH[0]),
        (1, bytes(SIZE - 1)),
        (1, TRUTH[0], TRUTH[0]),
        (*h[:3], 9, *h[4:], bytes(SIZE)),
        (*h, b""),
        (-1, TRUTH[0]),
    ):
        with pytest.raises(ValueError):
            decoder.receive_batch([good, bad])
        assert state(decoder) == before
    with pytest.raises(TypeError):
        decoder.receive_batch([good, None])
    with pytest.raises(TypeError):
        decoder.receive_batch([good, (1, "text")])
    assert state(decoder) == before
    assert decoder.receive_batch([]) == []
    assert decoder.receive_batch([good, (*h, repair_symbol(TRUTH, h)), good]) == [0, 0, 1]


def test_buffers_of_a_refused_batch_are_released() -> None:
    decoder = _codec.Decoder(SIZE, COUNT)
    data = bytearray(SIZE)
    with pytest.raises(ValueError):
        decoder.receive_batch([(0, data), (COUNT, data)])
    data.append(0)  # BufferError if a view of it were left


def chained(rng: random.Random, chains: int, links: int, block: int) -> tuple[int, Iterator[tuple[str, Any]]]:
    """Events that leave rows resting on raw repairs of symbols long decoded, so that slots run short.

    A link adds an equation of three symbols in a row and one of a block, then decodes the block. Somewhere a symbol in
    the middle arrives, which moves pivots; two at the end resolve the chain. Equations: `links`; unknowns: two more.
    """
    width = links + 2 + links * block

    def events() -> Iterator[tuple[str, Any]]:
        for chain in range(chains):
            base = chain * width
            early = rng.randrange(links)
            for k in range(links):
                first = base + links + 2 + k * block
                number = (chain * links + k) * (block + 2)
                yield "repair", header(number, [base + k, base + k + 1, base + k + 2, first], range(0), 4)
                for i in range(block + 1):  # one to spare: four may be dependent
                    yield "repair", header(number + 1 + i, [], range(first, first + block), block)
                yield "poll", block
                if k == max(early, 2 * links // 3):
                    yield "source", base + early
            yield "source", base + links + 1
            yield "source", base + links
            yield "poll", links + 2

    return chains * width, events()


@pytest.mark.parametrize("max_unknown", [24, 48, 80])
def test_slots_run_short_and_are_swept_in_bounded_portions(max_unknown: int) -> None:
    rng = random.Random(max_unknown)
    count, events = chained(rng, 8, max_unknown - 6, 4)
    truth = symbols(count, SIZE, 18)
    native = _codec.Decoder(SIZE, count, max_unknown=max_unknown)
    twin = reference.Decoder(SIZE, count, max_unknown=max_unknown)
    slots = 3 * max_unknown + 16
    most = macs = 0
    for kind, value in events:
        if kind == "source":
            assert native.source(value, truth[value]) == twin.source(value, truth[value])
        elif kind == "repair":
            payload = repair_symbol(truth, value)
            assert native.repair(*value, payload) == twin.repair(*value, payload)
            most = max(most, native.counters()["payload_macs"] - macs)
        else:
            found = native.poll(value)
            assert found == twin.poll(value)
            assert all(native.symbol(sid) == truth[sid] for sid in found)
        macs = native.counters()["payload_macs"]
        assert state(native) == state(twin)
    assert native.counters()["compactions"] >= 8
    # Its own terms, its own rebase, four rows of a sweep; each may fold late terms besides.
    assert most <= 2 * 6 * slots
    for sid in range(count):
        native.source(sid, truth[sid])
    assert native.prefix == count
    assert all(native.symbol(sid) == truth[sid] for sid in range(count))


def half_lost(lost: int, **limits: int) -> tuple[Any, list[bytes]]:
    truth = symbols(2 * lost, SIZE, 19)
    decoder = _codec.Decoder(SIZE, 2 * lost, **limits)
    for sid in range(0, 2 * lost, 2):
        decoder.source(sid, truth[sid])
    number = 0
    while decoder.pending < lost:
        h = header(number, list(range(1, 2 * lost, 2)), range(0), 255)
        decoder.repair(*h, repair_symbol(truth, h))
        number += 1
    return decoder, truth


def test_a_slice_is_bounded_by_its_work() -> None:
    lost = 64
    whole, truth = half_lost(lost)
    sliced, _ = half_lost(lost)
    expected = whole.poll(lost)
    found: list[int] = []
    while sliced.pending:
        before = sliced.counters()["payload_macs"]
        part = sliced.poll(32, max_macs=200)
        work = sliced.counters()["payload_macs"] - before
        assert part
        assert work < 200 + 2 * lost
        assert len(part) == 32 or work >= 200 or not sliced.pending
        found += part
    assert found == expected == list(range(1, 2 * lost, 2))
    assert all(sliced.symbol(sid) == whole.symbol(sid) == truth[sid] for sid in found)
    ordered, _ = half_lost(lost)
    assert ordered.poll(32, [9, 5], max_macs=1) == [9]
    for wrong in (0, -1, 2**32):
        with pytest.raises(ValueError):
            ordered.poll(1, max_macs=wrong)


def test_headers_of_the_batch_are_plain_tuples() -> None:
    h: Header = header(3, [1, 2], range(4, 9), 5)
    decoder = _codec.Decoder(SIZE, COUNT)
    assert decoder.receive_batch([(*h, repair_symbol(TRUTH, h))]) == [RepairOutcome.INNOVATIVE]
