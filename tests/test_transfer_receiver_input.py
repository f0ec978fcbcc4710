"""Every way in which a peer can be wrong, and what the receiver answers."""

from __future__ import annotations

import tracemalloc

import pytest

from quic_pfec.fec.codec import Encoder
from quic_pfec.transfer import receiver as module
from quic_pfec.transfer.receiver import Frozen, Receiver
from quic_pfec.transfer.units import DigestSink
from quic_pfec.wire.errors import AppCode, ErrorCode
from quic_pfec.wire.frames import (
    AckStatus,
    ManifestFrame,
    RepairFrame,
    SourceFrame,
)
from quic_pfec.wire.limits import Limits
from tests.receiver_world import SMALL, WORLD, Keep, expected, fails, feed, frozen, piece, units
from tests.transfer_world import SIZE, manifest_frame, receiver, world

# bad input; the numbers are rows of docs/wire.md §10


def test_row_5_symbols_of_another_size() -> None:
    got = receiver(WORLD)
    feed(got, [0])
    with fails(ErrorCode.PROTOCOL_VIOLATION):
        got.receive_batch([SourceFrame(0, 1, bytes(SIZE + 1))], 0.1)
    with fails(ErrorCode.PROTOCOL_VIOLATION):
        header = WORLD.repair(0, 0, 4).header
        got.receive_batch([RepairFrame(header, bytes(SIZE - 1))], 0.1)


@pytest.mark.parametrize("size", [0, 63, 1415, 16_000])
def test_row_5_the_first_symbol_sets_a_size_within_limits(size: int) -> None:
    with fails(ErrorCode.PROTOCOL_VIOLATION):
        Receiver(0, Limits(), 0.0).receive_batch([SourceFrame(0, 0, bytes(size))], 0.1)


def test_row_5_early_symbols_must_have_the_size_of_the_manifest() -> None:
    got = Receiver(0, Limits(), 0.0)
    got.receive_batch([SourceFrame(0, 0, bytes(SIZE + 8)), manifest_frame()], 0.0)
    with fails(ErrorCode.PROTOCOL_VIOLATION):
        got.accept(WORLD.sizes, WORLD.symbols, SIZE, DigestSink(), 0.0)


def test_row_6_ids_beyond_the_transfer() -> None:
    got = receiver(WORLD)
    with fails(ErrorCode.PROTOCOL_VIOLATION):
        got.receive_batch([SourceFrame(0, 40, bytes(SIZE))], 0.1)
    larger = world([4] * 11)
    with fails(ErrorCode.PROTOCOL_VIOLATION):
        got.receive_batch([larger.repair(0, 30, 11)], 0.1)


@pytest.mark.parametrize("kind", ["source", "repair"])
def test_row_6_early_ids_are_checked_when_the_manifest_comes(kind: str) -> None:
    larger = world([4] * 11)
    got = Receiver(0, Limits(), 0.0)
    frame = larger.source(40) if kind == "source" else larger.repair(0, 30, 11)
    got.receive_batch([frame, manifest_frame()], 0.0)
    with fails(ErrorCode.PROTOCOL_VIOLATION):
        got.accept(WORLD.sizes, WORLD.symbols, SIZE, DigestSink(), 0.0)


def test_rows_7_and_11_ids_beyond_the_credit() -> None:
    got = Receiver(0, SMALL, 0.0)
    feed(got, [15])
    with fails(ErrorCode.FLOW_CONTROL_ERROR):
        feed(got, [16])
    got.receive_batch([WORLD.repair(0, 10, 6)], 0.1)
    with fails(ErrorCode.FLOW_CONTROL_ERROR):
        got.receive_batch([WORLD.repair(1, 10, 7)], 0.1)


def test_row_8_duplicates_are_counted_and_ignored() -> None:
    got = receiver(WORLD)
    feed(got, [0, 1, 2])
    feed(got, [2, 1, 1])
    assert (got.stats.source, got.stats.duplicate) == (3, 3)


def test_row_9_two_versions_of_a_received_symbol() -> None:
    got = receiver(WORLD)
    feed(got, [0])
    with fails(ErrorCode.PROTOCOL_VIOLATION):
        got.receive_batch([WORLD.source(0, of=1)], 0.1)


def test_row_9_what_was_received_wins_over_what_was_decoded() -> None:
    sink = Keep()
    got = receiver(WORLD, sink=sink)
    feed(got, [0, 1, 3])
    got.receive_batch([WORLD.repair(0, 0, 4, lie=True)], 0.1)  # gives a wrong symbol 2
    assert (got.stats.recovered, got.stats.corrupt_units + got.stats.misplaced) == (1, 1)
    assert units(feed(got, [2])) == [0]
    assert sink.data[0] == expected(WORLD, 0)
    assert got.stats.contradictions == 1
    assert units(feed(got, range(4, 8))) == [1]


def test_row_9_a_poisoned_symbol_that_poses_as_another_closes_no_honest_resend() -> None:
    """Symbol 1 is decoded as a copy of symbol 2, header and all; then the honest symbols 1 and 2 come."""
    poisoned = Encoder(SIZE, 4)
    for sid in (0, 2, 2, 3):
        poisoned.push(WORLD.encoder.symbol(sid))
    header = WORLD.repair(0, 1, 1).header
    lie = poisoned.repair(0, 0, 1, 255, 0, b"", 0, 1)
    for honest in ([2, 1], [1, 2]):
        sink = Keep()
        got = receiver(WORLD, sink=sink)
        feed(got, [0, 3])
        got.receive_batch([RepairFrame(header, lie)], 0.1)
        assert got.stats.recovered == 1
        events = feed(got, honest[:1]) + feed(got, honest[1:])
        assert units(events) == [0]
        assert sink.data[0] == expected(WORLD, 0)


def test_row_12_repairs_of_known_symbols() -> None:
    got = receiver(WORLD)
    feed(got, range(8))
    got.receive_batch([WORLD.repair(0, 0, 8), WORLD.repair(1, 2, 3)], 0.1)
    assert (got.stats.repairs_useless, got.stats.repairs_useful) == (2, 0)


def test_row_13_more_unknowns_than_the_decoder_takes() -> None:
    got = receiver(WORLD, limits=Limits(max_unknown=8))
    got.receive_batch([WORLD.repair(0, 0, 20)], 0.1)
    assert (got.stats.repairs_dropped, got.stats.repairs_useful) == (1, 0)
    assert frozen(feed(got, range(40)))  # no harm done


def test_row_14_a_flood_of_useless_repairs_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "USELESS_REPAIRS", 50)
    got = receiver(WORLD)
    got.receive_batch([WORLD.repair(n, 0, 30) for n in range(29)], 0.1)
    assert got.stats.repairs_useful == 29
    assert got._decoder is not None
    repeated = WORLD.repair(0, 0, 30)
    for _ in range(50):
        got.receive_batch([repeated], 0.1)
    work = got._decoder.counters()["row_operations"]
    for _ in range(500):
        got.receive_batch([repeated], 0.1)
    assert got._decoder.counters()["row_operations"] == work
    assert (got.stats.repairs_useless, got.stats.repairs_dropped) == (50, 500)
    feed(got, [35])  # useful traffic earns the right to another one
    got.receive_batch([WORLD.repair(29, 0, 30)], 0.1)
    assert got.stats.repairs_useful == 30


def test_row_15_contradicting_repairs_close_the_second_time() -> None:
    got = receiver(WORLD)
    feed(got, range(4))
    got.receive_batch([WORLD.repair(0, 2, 1, lie=True)], 0.1)
    assert got.stats.contradictions == 1
    with fails(AppCode.KV_INTEGRITY, application=True):
        got.receive_batch([WORLD.repair(1, 3, 1, lie=True)], 0.1)


def test_row_23_symbol_count_that_does_not_fit_the_units() -> None:
    got = Receiver(0, Limits(), 0.0)
    with fails(AppCode.KV_MANIFEST, application=True):
        got.accept(WORLD.sizes, WORLD.symbols + 1, SIZE, DigestSink(), 0.0)


def test_row_23_a_symbol_that_names_no_fragment() -> None:
    other = world([4] * 11)
    got = receiver(WORLD)
    with fails(ErrorCode.PROTOCOL_VIOLATION):
        got.receive_batch([SourceFrame(0, 0, bytes(other.encoder.symbol(41)))], 0.1)
    got = Receiver(0, Limits(), 0.0)
    got.receive_batch([SourceFrame(0, 0, bytes(other.encoder.symbol(41)))], 0.1)
    with fails(ErrorCode.PROTOCOL_VIOLATION):
        got.accept(WORLD.sizes, WORLD.symbols, SIZE, DigestSink(), 0.0)


def test_row_23_two_symbols_that_claim_one_fragment() -> None:
    got = receiver(WORLD)
    feed(got, [0])
    with fails(ErrorCode.PROTOCOL_VIOLATION):
        got.receive_batch([WORLD.source(1, of=0)], 0.1)


def test_row_25_a_corrupt_unit_counts_as_missing() -> None:
    body = bytearray(WORLD.encoder.symbol(1))
    body[20] ^= 1
    got = receiver(WORLD)
    events = got.receive_batch([WORLD.source(0), SourceFrame(0, 1, bytes(body)), *map(WORLD.source, (2, 3))], 0.1)
    assert units(events) == []
    assert got.stats.corrupt_units == 1
    assert got.units is not None
    assert (bool(got.units.complete[0]), bool(got.units.corrupt[0])) == (False, True)
    feed(got, [4, 5])
    assert [unit for unit, _, _ in got.partial_units()] == [1]  # no part of it is used either
    assert frozen(feed(got, range(6, 40))) == [Frozen(complete=False)]
    assert got.status is AckStatus.COMPLETE  # nothing more can come


def test_row_27_what_comes_after_the_freeze_is_dropped_and_counted() -> None:
    got = receiver(WORLD, deadline_s=0.5)
    feed(got, range(10))
    assert got.on_timer(0.5) == [Frozen(complete=False)]
    known = got.known_bitmap()
    evil: list[SourceFrame | RepairFrame | ManifestFrame] = [
        WORLD.source(0, of=1),
        SourceFrame(0, 999, b""),
        WORLD.repair(0, 0, 40),
        manifest_frame(data=b"other"),
    ]
    assert got.receive_batch(evil, 0.6) == []
    assert feed(got, range(10, 40), 0.6) == []
    assert (got.stats.late, got.stats.repairs_late) == (34, 1)
    assert got.known_bitmap() == known


# memory


def test_memory_before_the_manifest_is_bounded_by_the_credit() -> None:
    got = Receiver(0, SMALL, 0.0)
    symbol = bytes(WORLD.encoder.symbol(0))
    tracemalloc.start()
    try:
        for number in range(5000):
            got.receive_batch([SourceFrame(0, number % 16, symbol), WORLD.repair(number, number % 8, 8)], 0.1)
            got.receive_batch([piece(3 * (number % 30), 2)], 0.1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert got._decoder is not None
    assert got._decoder.capacity == 16
    assert peak < 200_000
