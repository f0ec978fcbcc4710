"""The native decoder: against its twin event by event, against determinacy by rank, within its limits.

Sequences of operations are drawn, not bytes. `SOURCE_*` and `REPAIR_*` are compared as integers.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec import _codec
from quic_pfec.fec import reference
from quic_pfec.fec.outcome import RepairOutcome, SourceOutcome
from tests.codec_world import Header, determined, header, known, random_header, repair_symbol, state, stream, symbols

SIZE = 12
COUNT = 20
TRUTH = symbols(COUNT, SIZE, seed=11)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    low = draw(st.integers(0, COUNT - 1))
    high = draw(st.integers(low + 1, COUNT))
    seed = draw(st.integers(0, 999))
    return random_header(random.Random(seed), draw(st.integers(0, 9999)), low, high, draw(st.integers(1, 12)))


sources = st.tuples(st.just("source"), st.integers(0, COUNT - 1))
repairs = st.tuples(st.just("repair"), headers())
polls = st.tuples(st.just("poll"), st.integers(0, 3))
ordered = st.tuples(st.just("order"), st.lists(st.integers(0, COUNT - 1), max_size=4))
lies = st.tuples(st.just("lie"), st.integers(0, COUNT - 1))
wrong = st.tuples(st.just("wrong"), headers())
events = st.lists(st.one_of(sources, repairs, repairs, polls, ordered), max_size=60)
poisoned = st.lists(st.one_of(sources, repairs, polls, lies, wrong), max_size=60)


def apply(decoder: Any, event: tuple[str, Any]) -> object:
    kind, value = event
    if kind == "source":
        return decoder.source(value, TRUTH[value])
    if kind == "lie":
        return decoder.source(value, bytes(SIZE))
    if kind == "repair":
        return decoder.repair(*value, repair_symbol(TRUTH, value))
    if kind == "wrong":
        return decoder.repair(*value, bytes(SIZE))
    if kind == "poll":
        return decoder.poll(value)
    return decoder.poll(COUNT, value)


@settings(deadline=None, max_examples=200)
@given(events=events, max_unknown=st.sampled_from([1, 2, 3, 5, 64]), row_ops=st.sampled_from([0, 1, 3, 1024]))
def test_native_and_twin_agree_after_every_event(events: list[tuple[str, Any]], max_unknown: int, row_ops: int) -> None:
    limits = {"max_unknown": max_unknown, "row_ops_per_repair": row_ops}
    native, twin = _codec.Decoder(SIZE, COUNT, **limits), reference.Decoder(SIZE, COUNT, **limits)
    for event in [*events, ("poll", COUNT)]:
        assert apply(native, event) == apply(twin, event)
        assert state(native) == state(twin)
        assert native.prefix <= native.highest
        assert 0 <= native.pending <= native.rank <= native.unknown_columns <= max_unknown
        assert native.deficit >= 0
    for sid in known(native):
        assert native.symbol(sid) == twin.symbol(sid) == TRUTH[sid]
        assert native.received(sid) == twin.received(sid)


@settings(deadline=None, max_examples=100)
@given(events=poisoned)
def test_native_and_twin_agree_on_contradicting_input(events: list[tuple[str, Any]]) -> None:
    """Outcomes and ranks; also the bytes, as long as the repairs held are consistent, are those of the twin."""
    native, twin = _codec.Decoder(SIZE, COUNT), reference.Decoder(SIZE, COUNT)
    for event in events:
        if event[0] == "lie" and not native.received(event[1]):
            continue  # a false first source is the truth as far as any decoder can tell
        outcome = apply(native, event)
        if outcome != apply(twin, event):
            # Inconsistent equations have no one solution: a symbol decoded from them may differ between two correct
            # eliminations, and with it only whether its source is the same.
            assert event[0] in ("source", "lie")
            assert {outcome} <= {SourceOutcome.DUPLICATE, SourceOutcome.REPLACED}
            return
        assert state(native) == state(twin)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    received=st.sets(st.integers(0, 11)),
    drawn=st.lists(st.tuples(st.integers(0, 999), st.integers(1, 12)), max_size=10),
)
def test_recovers_exactly_what_is_determined_in_any_order(
    seed: int, received: set[int], drawn: list[tuple[int, int]]
) -> None:
    count = 12
    sent = [random_header(random.Random(number), number, 0, count, degree) for number, degree in dict(drawn).items()]
    expected = determined(count, received, sent)
    rng = random.Random(seed)
    for every in (1, 3, 1000):  # poll often, sometimes, at the end: never another result
        packets: list[tuple[str, Any]] = [("source", sid) for sid in received] + [("repair", h) for h in sent]
        packets += rng.sample(packets, len(packets) // 2)  # duplicates
        rng.shuffle(packets)
        decoder = _codec.Decoder(SIZE, count)
        for i, packet in enumerate(packets):
            apply(decoder, packet)
            if i % every == 0:
                decoder.poll(1)
        decoder.poll(count)
        assert known(decoder) == expected
        assert all(decoder.symbol(sid) == TRUTH[sid] for sid in expected)
        assert decoder.pending == 0
        assert decoder.deficit == decoder.highest - len(expected) - decoder.rank


def coded(count: int, lost: list[int], repairs: int, **limits: int) -> Any:
    """A decoder that received all but `lost` of the first `count` symbols and dense repairs over those lost."""
    decoder = _codec.Decoder(SIZE, COUNT, **limits)
    for sid in range(count):
        if sid not in lost:
            decoder.source(sid, TRUTH[sid])
    for number in range(repairs):
        h = header(number, lost, range(0), 255)
        decoder.repair(*h, repair_symbol(TRUTH, h))
    return decoder


def test_partial_recovery_before_the_prefix_completes() -> None:
    """Symbol 9 is determined while 2 and 3, older, are not; it is known at once and the prefix stays."""
    decoder = coded(15, [2, 3, 9], 0)
    first = header(1, [2, 3], range(0), 2)
    second = header(2, [9], range(10, 14), 5)
    assert decoder.repair(*first, repair_symbol(TRUTH, first)) == RepairOutcome.INNOVATIVE
    assert (decoder.pending, decoder.deficit) == (0, 2)
    assert decoder.repair(*second, repair_symbol(TRUTH, second)) == RepairOutcome.INNOVATIVE
    assert (decoder.pending, decoder.known(9)) == (1, False)
    assert decoder.poll(32) == [9]
    assert decoder.symbol(9) == TRUTH[9]
    assert (decoder.prefix, decoder.rank, decoder.deficit) == (2, 1, 1)
    assert decoder.known_ranges(64) == [(4, 15)]
    assert decoder.known_ranges(0) == []
    assert decoder.source(2, TRUTH[2]) == SourceOutcome.NEW
    assert decoder.pending == 1
    assert decoder.poll(32) == [3]
    assert (decoder.prefix, decoder.deficit, decoder.unknown_columns) == (15, 0, 0)
    assert decoder.symbol(3) == TRUTH[3]


def test_poll_in_slices_and_in_order() -> None:
    lost = [1, 4, 5, 8, 13]
    whole = coded(15, lost, 6)
    assert whole.pending == 5
    assert whole.poll(0) == []
    assert whole.poll(100) == lost
    sliced = coded(15, lost, 6)
    assert [sliced.poll(1) for _ in range(6)] == [[1], [4], [5], [8], [13], []]
    chosen = coded(15, lost, 6)
    assert chosen.poll(3, order=[8, 19, 0, 8, 4_000_000, 1]) == [8, 1, 4]
    assert chosen.poll(9, order=iter([13])) == [13, 5]
    for sid in lost:
        assert whole.symbol(sid) == sliced.symbol(sid) == chosen.symbol(sid) == TRUTH[sid]
    with pytest.raises(ValueError):
        coded(15, lost, 6).poll(3, order=[-1])
    with pytest.raises(ValueError):
        chosen.poll(-1)


def test_redundant_repairs_cost_no_payload_work() -> None:
    decoder = coded(15, [1, 4, 5], 4)
    before = decoder.counters()
    for number in range(100, 200):
        h = header(number, [1, 4, 5], range(6, 15), 12)
        assert decoder.repair(*h, repair_symbol(TRUTH, h)) == RepairOutcome.REDUNDANT
    after = decoder.counters()
    assert after["payload_macs"] == before["payload_macs"]
    assert after["redundant"] == before["redundant"] + 100 == 101
    assert decoder.rank == 3
    assert decoder.poll(9) == [1, 4, 5]
    macs = decoder.counters()["payload_macs"]
    for number in range(100, 110):
        h = header(number, [1, 4, 5], range(6, 15), 12)
        assert decoder.repair(*h, repair_symbol(TRUTH, h)) == RepairOutcome.REDUNDANT
    assert decoder.counters()["payload_macs"] == macs


def test_sources_that_never_were_columns_cost_no_row_operation() -> None:
    decoder = coded(10, [1, 4, 5], 2)
    operations = decoder.counters()["row_operations"]
    for sid in range(10, 15):
        decoder.source(sid, TRUTH[sid])
    assert decoder.counters()["row_operations"] == operations


def test_column_limit() -> None:
    decoder = coded(0, [0, 1, 2], 1, max_unknown=4)
    too_many = header(7, [0, 3, 4], range(0), 3)
    assert decoder.repair(*too_many, repair_symbol(TRUTH, too_many)) == RepairOutcome.TOO_COSTLY
    assert (decoder.rank, decoder.unknown_columns, decoder.counters()["rejected"]) == (1, 3, 1)
    fits = header(8, [0, 3], range(0), 2)
    assert decoder.repair(*fits, repair_symbol(TRUTH, fits)) == RepairOutcome.INNOVATIVE
    decoder.source(0, TRUTH[0])
    assert decoder.poll(9) == [3]
    assert decoder.unknown_columns == 2


def test_row_operation_limit_leaves_no_trace() -> None:
    """Row budget 0: only repairs that meet no pivot and clear nothing are taken; the others change nothing."""
    decoder = coded(0, [0, 1, 2, 3], 1, row_ops_per_repair=0)
    for number in range(1, 50):
        h = header(number, [0, 1, 2, 3], range(0), 4)
        assert decoder.repair(*h, repair_symbol(TRUTH, h)) == RepairOutcome.TOO_COSTLY
    clears = header(60, [1, 2], range(0), 2)  # its oldest column is in the row held
    assert decoder.repair(*clears, repair_symbol(TRUTH, clears)) == RepairOutcome.TOO_COSTLY
    assert (decoder.rank, decoder.unknown_columns) == (1, 4)
    assert decoder.counters()["row_operations"] == 0
    for sid in (0, 2, 3):
        decoder.source(sid, TRUTH[sid])
    assert decoder.poll(1) == [1]
    assert decoder.symbol(1) == TRUTH[1]


def test_a_received_symbol_wins_over_a_decoded_one() -> None:
    """docs/wire.md §10, row 9: a poisoned repair must not close an honest resend."""
    decoder = _codec.Decoder(SIZE, COUNT)
    h = header(1, [0], range(0), 1)
    assert decoder.repair(*h, bytes(SIZE)) == RepairOutcome.INNOVATIVE
    assert decoder.poll(1) == [0]
    other = header(2, [0, 1, 2], range(0), 3)
    decoder.repair(*other, repair_symbol(TRUTH, other))
    assert decoder.rank == 1
    assert decoder.source(0, TRUTH[0]) == SourceOutcome.REPLACED
    assert decoder.symbol(0) == TRUTH[0]
    assert (decoder.rank, decoder.unknown_columns, decoder.counters()["discarded"]) == (0, 0, 1)
    assert decoder.source(0, TRUTH[0]) == SourceOutcome.DUPLICATE
    assert decoder.source(0, bytes(SIZE)) == SourceOutcome.CONFLICT
    assert decoder.symbol(0) == TRUTH[0]
    for number in (3, 4):
        h = header(number, [1, 2], range(0), 2)
        decoder.repair(*h, repair_symbol(TRUTH, h))
    assert decoder.poll(9) == [1, 2]
    assert decoder.symbol(2) == TRUTH[2]


def test_a_decoded_symbol_confirmed_by_its_source() -> None:
    decoder = coded(3, [1], 1)
    assert decoder.poll(1) == [1]
    assert not decoder.received(1)
    assert decoder.source(1, TRUTH[1]) == SourceOutcome.DUPLICATE
    assert decoder.received(1)
    assert decoder.source(1, bytes(SIZE)) == SourceOutcome.CONFLICT


def test_contradiction_that_is_free_to_see() -> None:
    decoder = coded(3, [], 0)
    h = header(1, [1], range(0), 1)
    assert decoder.repair(*h, repair_symbol(TRUTH, h)) == RepairOutcome.REDUNDANT
    assert decoder.repair(*h, bytes(SIZE)) == RepairOutcome.CONTRADICTS
    assert decoder.counters()["contradictions"] == 1
    assert decoder.counters()["redundant"] == 1


def test_a_million_random_events_and_no_wrong_byte() -> None:
    """All that is held stays within the limits: the arenas are made once, only that of the symbols is long."""
    events = 100_000 if "QUIC_PFEC_ISA" in os.environ else 1_000_000  # the other levels: test_codec_isa.py
    decoder = _codec.Decoder(20, events, max_unknown=64, max_span=600)
    checked = stream(decoder, seed=2024, count=events, steps=events, window=120, size=20, resend=0.1)
    counters = decoder.counters()
    assert checked == counters["recovered"] > events // 10
    assert decoder.prefix > 4 * events // 10
    assert decoder.rank <= decoder.unknown_columns <= 64
    assert counters["discarded"] == counters["contradictions"] == 0


def test_stored_repairs_are_compacted_and_still_right() -> None:
    """Rows that rest on the raw repairs of symbols long decoded: slots run out, are compacted, nothing is lost.

    Step k links unknown symbol k and the common unknown 0 to a block of eight, decodes the block, and so leaves one row
    that rests on nine raw repairs. 24 columns have 64 slots.
    """
    steps, block = 12, 8
    count = 1 + steps + steps * block
    truth = symbols(count, SIZE, 17)
    decoder = _codec.Decoder(SIZE, count, max_unknown=24)
    for k in range(steps):
        first = 1 + steps + k * block
        link = header(1000 + k, [0, 1 + k, first], range(0), 3)
        assert decoder.repair(*link, repair_symbol(truth, link)) == RepairOutcome.INNOVATIVE
        for i in range(block):
            h = header(100 * k + i, [], range(first, first + block), block)
            assert decoder.repair(*h, repair_symbol(truth, h)) == RepairOutcome.INNOVATIVE
        assert decoder.poll(count) == list(range(first, first + block))
        assert (decoder.rank, decoder.unknown_columns) == (k + 1, k + 2)
    assert decoder.counters()["compactions"] > 0
    assert decoder.source(0, truth[0]) == SourceOutcome.NEW
    assert decoder.poll(count) == list(range(1, 1 + steps))
    assert [bytes(decoder.symbol(sid)) for sid in range(count)] == truth


def test_native_and_twin_agree_on_a_long_stream() -> None:
    class Both:
        """Feeds two decoders and insists on one answer."""

        def __init__(self) -> None:
            self.native = _codec.Decoder(SIZE, 500, max_unknown=40)
            self.twin = reference.Decoder(SIZE, 500, max_unknown=40)
            self.capacity = 500

        def __getattr__(self, name: str) -> Any:
            if name == "prefix":
                assert self.native.prefix == self.twin.prefix
                return self.native.prefix

            def call(*arguments: Any) -> Any:
                results = [getattr(decoder, name)(*arguments) for decoder in (self.native, self.twin)]
                assert results[0] == results[1]
                assert self.native.rank == self.twin.rank
                return results[0]

            return call

    both = Both()
    assert stream(both, seed=5, count=500, steps=1500, window=80, size=SIZE, resend=0.2) > 100
    assert state(both.native) == state(both.twin)


def test_window_larger_than_the_columns_and_far_ahead() -> None:
    """A huge gap costs a bitmap of nothing: SIDs 0 and 4,000 in one repair with two columns."""
    truth = symbols(5000, SIZE, 3)
    decoder = _codec.Decoder(SIZE, 5000, max_unknown=2, max_span=4096)
    for number in (1, 2):
        h = header(number, [0, 4000], range(0), 2)
        assert decoder.repair(*h, repair_symbol(truth, h)) == RepairOutcome.INNOVATIVE
    assert decoder.deficit == 4001 - 2
    assert decoder.poll(5) == [0, 4000]
    assert decoder.symbol(4000) == truth[4000]
    assert decoder.known_ranges(9) == [(4000, 4001)]
    assert decoder.highest == 4001


@pytest.mark.parametrize("make", [_codec.Decoder, reference.Decoder], ids=["native", "twin"])
def test_what_is_refused(make: Any) -> None:
    decoder = make(SIZE, 16, max_degree=8, max_span=10)
    legal = header(1, [0, 1], range(4, 10), 8)
    data = bytes(SIZE)
    assert decoder.repair(*legal, data) == RepairOutcome.INNOVATIVE
    before = state(decoder)
    for bad in (
        header(1, [0, 1], range(4, 10), 9),  # degree
        header(1, [0, 1], range(4, 11), 8),  # span
        header(1, [], range(10, 17), 8),  # beyond the capacity
        (4, 1, 2**62, 8, 0, b"", 0, 4),
        (4, 1, 0, 0, 0, b"", 0, 4),
        (4, 1, 0, 1, 9, b"\x01", 0, 0),  # bitmap too short
    ):
        with pytest.raises(ValueError):
            decoder.repair(*bad, data)
    for wrong_size in (b"", bytes(SIZE - 1), bytes(SIZE + 1)):
        with pytest.raises(ValueError, match="bytes"):
            decoder.repair(*legal, wrong_size)
        with pytest.raises(ValueError, match="bytes"):
            decoder.source(0, wrong_size)
    for sid in (16, -1, 2**64):
        for method in (decoder.known, decoder.received, decoder.symbol, lambda s: decoder.source(s, data)):
            with pytest.raises(ValueError):
                method(sid)
    with pytest.raises(KeyError):
        decoder.symbol(0)
    with pytest.raises(TypeError):
        decoder.repair(4, 1, 0, 4, 8, "\x81", 0, 0, data)
    assert state(decoder) == before
    for arguments, limits in (
        ((0, 1), {}),
        ((65_536, 1), {}),
        ((8, 0), {}),
        ((8, 2**24 + 1), {}),
        ((8, 8), {"max_unknown": 0}),
        ((8, 8), {"max_unknown": 4097}),
        ((8, 8), {"max_degree": 0}),
        ((8, 8), {"max_span": 16_385}),
        ((8, 8), {"row_ops_per_repair": -1}),
    ):
        with pytest.raises(ValueError):
            make(*arguments, **limits)
