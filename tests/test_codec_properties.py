"""What holds for any input: linearity, idempotence, monotony, slices, wrap-around, and the odds of decoding.

Differential tests against the twin are in test_codec_decoder.py; here are the properties that need no second decoder.
"""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec import _codec
from quic_pfec.fec.outcome import RepairOutcome, SourceOutcome
from tests.codec_world import LEVELS, Header, header, known, random_header, repair_symbol, state, symbols

SIZE = 8
COUNT = 24
TRUTH = symbols(COUNT, SIZE, seed=21)
levels = pytest.mark.parametrize("level", LEVELS)
seeds = st.integers(0, 2**32 - 1)


def dot(level: str, sources: list[np.ndarray], factors: bytes, n: int) -> np.ndarray:
    y = np.full(n, 0xA5, dtype=np.uint8)
    _codec._dot(level, y, sources, factors)
    return y


@levels
@settings(deadline=None, max_examples=40)
@given(seed=seeds, blocks=st.integers(1, 24), k=st.integers(0, 50))
def test_dot_is_linear(level: str, seed: int, blocks: int, k: int) -> None:
    """In the sources and in the coefficients; it is the sum of multiply-adds in any order."""
    rng = np.random.default_rng(seed)
    n = 64 * blocks
    a, b = ([rng.integers(0, 256, n, dtype=np.uint8) for _ in range(k)] for _ in range(2))
    c, d = rng.bytes(k), rng.bytes(k)
    base = dot(level, a, c, n)
    assert np.array_equal(base ^ dot(level, b, c, n), dot(level, [x ^ y for x, y in zip(a, b, strict=True)], c, n))
    both = bytes(x ^ y for x, y in zip(c, d, strict=True))
    assert np.array_equal(base ^ dot(level, a, d, n), dot(level, a, both, n))
    y = np.zeros(n, dtype=np.uint8)
    for i in rng.permutation(k):
        _codec._axpy(level, y, a[i], c[i])
    assert np.array_equal(y, base)
    assert k or not base.any()


@levels
def test_axpy_onto_itself(level: str) -> None:
    """y ^= c * y is legal: the product by c + 1."""
    x = np.arange(256, dtype=np.uint8)
    for c in range(256):
        y = x.copy()
        _codec._axpy(level, y, y, c)
        assert y.tolist() == [_codec._multiply(c ^ 1, value) for value in range(256)]


Packet = tuple[Any, ...]


def packets_of(rng: random.Random, n: int) -> list[Packet]:
    packets: list[Packet] = []
    for number in range(n):
        if rng.random() < 0.3:
            sid = rng.randrange(COUNT)
            packets.append((sid, TRUTH[sid]))
        else:
            low = rng.randrange(COUNT)
            h = random_header(rng, number, low, rng.randint(low + 1, COUNT), rng.randint(1, 16))
            packets.append((*h, repair_symbol(TRUTH, h)))
    return packets


@settings(deadline=None, max_examples=80)
@given(seed=seeds, n=st.integers(0, 40))
def test_replay_changes_nothing(seed: int, n: int) -> None:
    """All packets again, before and after the symbols were computed: same rank, same knowledge, no payload work."""
    packets = packets_of(random.Random(seed), n)
    decoder = _codec.Decoder(SIZE, COUNT)
    decoder.receive_batch(packets)
    for poll in (0, COUNT):
        decoder.poll(poll)
        before = (decoder.rank, decoder.deficit, decoder.pending, decoder.known_bitmap(), decoder.unknown_columns)
        macs = decoder.counters()["payload_macs"]
        outcomes = decoder.receive_batch(packets)
        for packet, outcome in zip(packets, outcomes, strict=True):
            assert outcome == (SourceOutcome.DUPLICATE if len(packet) == 2 else RepairOutcome.REDUNDANT)
        assert before == (
            decoder.rank, decoder.deficit, decoder.pending, decoder.known_bitmap(), decoder.unknown_columns,
        )  # fmt: skip
        assert decoder.counters()["payload_macs"] == macs


@settings(deadline=None, max_examples=80)
@given(seed=seeds, n=st.integers(0, 60))
def test_knowledge_grows_and_a_packet_brings_at_most_one(seed: int, n: int) -> None:
    """Known symbols and prefix never shrink; known + rank rises by one with a useful packet and by nothing else."""
    rng = random.Random(seed)
    decoder = _codec.Decoder(SIZE, COUNT)
    bitmap = prefix = highest = dimensions = 0
    for packet in packets_of(rng, n):
        useful = decoder.receive_batch([packet]) == [0]
        assert decoder.poll(rng.randint(0, 3)) is not None
        now = int.from_bytes(decoder.known_bitmap(), "little")
        assert now & bitmap == bitmap
        assert (decoder.prefix >= prefix, decoder.highest >= highest) == (True, True)
        total = now.bit_count() + decoder.rank
        # A source whose symbol a held repair already determined is new as a packet, not as knowledge.
        assert total - dimensions in ((0, 1) if len(packet) == 2 else (int(useful),))
        assert decoder.rank <= decoder.unknown_columns <= decoder.highest - now.bit_count()
        assert decoder.deficit == decoder.highest - total >= 0
        bitmap, prefix, highest, dimensions = now, decoder.prefix, decoder.highest, total


@settings(deadline=None, max_examples=60)
@given(seed=seeds, n=st.integers(1, 60), data=st.data())
def test_slices_and_order_only_permute(seed: int, n: int, data: st.DataObject) -> None:
    packets = packets_of(random.Random(seed), n)
    whole, sliced = _codec.Decoder(SIZE, COUNT), _codec.Decoder(SIZE, COUNT)
    whole.receive_batch(packets)
    sliced.receive_batch(packets)
    expected = whole.poll(COUNT)
    assert expected == sorted(expected)
    found: list[int] = []
    while sliced.pending:
        order = data.draw(st.lists(st.integers(0, COUNT + 3), max_size=6))
        part = sliced.poll(data.draw(st.integers(1, 4)), order, max_macs=data.draw(st.integers(1, 40)))
        wanted = [sid for sid in dict.fromkeys(order) if sid in set(expected) - set(found)]
        assert part[: len(wanted)] == wanted[: len(part)]
        found += part
    assert sorted(found) == expected
    assert known(whole) == known(sliced)
    assert all(sliced.symbol(sid) == TRUTH[sid] for sid in known(sliced))


@pytest.mark.parametrize("transfer", [0, 2**32 - 1, 2**32, 2**62 - 1])
@pytest.mark.parametrize("number", [0, 2**31, 2**32 - 3])
def test_ends_of_the_number_ranges(transfer: int, number: int) -> None:
    """The last SIDs of the largest arena, the last repair numbers, the largest transfer ids."""
    count = 2**24
    decoder = _codec.Decoder(SIZE, count)
    truth = dict(zip(range(count - 4, count), symbols(4, SIZE, 5), strict=True))
    encoder = _codec.Encoder(SIZE, 4)
    for symbol in truth.values():
        encoder.push(symbol)
    decoder.source(count - 1, truth[count - 1])
    decoder.source(count - 3, truth[count - 3])
    for n in range(number, number + 3):
        # The coefficients depend on transfer and number alone: the same ones over SIDs 0..3.
        payload = encoder.repair(transfer, n, 0, 4, 0, b"", 0, 4)
        decoder.repair(transfer, n, count - 4, 4, 0, b"", 0, 4, payload)
    assert decoder.poll(9) == [count - 4, count - 2]
    assert all(decoder.symbol(sid) == symbol for sid, symbol in truth.items())
    assert (decoder.highest, decoder.prefix) == (count, 0)


def test_columns_and_slots_are_reused_for_ever() -> None:
    """50,000 losses through three columns and their slots: a loss, its repair, the next loss."""
    count = 50_000
    encoder, decoder = _codec.Encoder(SIZE, count), _codec.Decoder(SIZE, count, max_unknown=3)
    for sid in range(count):
        encoder.push(sid.to_bytes(8, "little"))
    for sid in range(0, count - 1, 2):
        batch: list[Packet] = [(4, n, sid, 2, 0, b"", 0, 2, encoder.repair(4, n, sid, 2, 0, b"", 0, 2)) for n in (7, 8)]
        assert decoder.receive_batch(batch) == [RepairOutcome.INNOVATIVE] * 2
        assert decoder.poll(2) == [sid, sid + 1]
    assert decoder.prefix == count
    assert decoder.counters()["rejected"] == 0
    assert all(decoder.symbol(sid) == sid.to_bytes(8, "little") for sid in range(0, count, 997))


# Bugs that other codecs had at the edges of their windows


def test_repairs_are_right_once_the_window_is_full() -> None:
    """irtf-nwcrg/swif-codec#8: repairs were wrong from the moment the encoding window was full."""
    count, window = 300, 32
    truth = symbols(count, SIZE, 8)
    encoder = _codec.Encoder(SIZE, count)
    for sid in range(count):
        encoder.push(truth[sid])
        low = max(0, sid + 1 - window)
        h = header(sid, [], range(low, sid + 1), window)
        assert encoder.repair(*h) == repair_symbol(truth, h)
    with pytest.raises(ValueError):
        encoder.push(truth[0])
    assert encoder.repair(*header(9, [], range(window), window)) == repair_symbol(
        truth, header(9, [], range(window), window)
    )


def test_not_stuck_after_wrong_pruning_or_lost_feedback() -> None:
    """catid/siamese#2: what the sender wrongly believes known, or learns late, can be recovered at any later time."""
    count = 400
    truth = symbols(count, SIZE, 9)
    encoder, decoder = _codec.Encoder(SIZE, count), _codec.Decoder(SIZE, count)
    for sid in range(count):
        encoder.push(truth[sid])
        if sid not in (7, 8, 200):
            decoder.source(sid, truth[sid])
    for number in range(50):  # the sender believes 7 and 8 known: its window starts behind them
        h = header(number, [], range(300, count), 48)
        assert decoder.repair(*h, encoder.repair(*h)) == RepairOutcome.REDUNDANT
    assert (decoder.prefix, decoder.deficit) == (7, 3)
    pair = header(100, [7, 8, 200], range(300, count), 48)
    assert decoder.repair(*pair, encoder.repair(*pair)) == RepairOutcome.INNOVATIVE
    assert decoder.source(8, truth[8]) == SourceOutcome.NEW
    late = header(101, [7], range(200, 300), 101)
    assert decoder.repair(*late, encoder.repair(*late)) == RepairOutcome.INNOVATIVE
    assert decoder.poll(9) == [7, 200]
    assert decoder.prefix == count
    assert all(decoder.symbol(sid) == truth[sid] for sid in range(count))


def test_a_corrupted_repair_harms_only_what_depends_on_it() -> None:
    count = 40
    truth = symbols(count, SIZE, 10)
    lost_left, lost_right = [1, 2], [21, 22]
    decoder = _codec.Decoder(SIZE, count)
    for sid in range(count):
        if sid not in lost_left + lost_right:
            decoder.source(sid, truth[sid])
    for number, lost in ((1, lost_left), (2, lost_left), (3, lost_right), (4, lost_right)):
        h = header(number, lost, range(0), 2)
        payload = repair_symbol(truth, h)
        decoder.repair(*h, bytes(SIZE) if number == 1 else payload)
    assert decoder.poll(9) == lost_left + lost_right
    wrong = [sid for sid in range(count) if decoder.symbol(sid) != truth[sid]]
    assert set(wrong) <= set(lost_left)
    assert wrong
    for sid in lost_left:
        assert decoder.source(sid, truth[sid]) in (SourceOutcome.REPLACED, SourceOutcome.DUPLICATE)
        assert decoder.symbol(sid) == truth[sid]


# The odds of decoding (seeded)


def repairs_needed(window: int, lost: int, degree: int, trial: int) -> int:
    """Repairs over a whole window until `lost` random losses of it are recovered."""
    rng = random.Random(trial)
    missing = set(rng.sample(range(window), lost))
    decoder = _codec.Decoder(1, window)
    decoder.receive_batch([(sid, b"\0") for sid in range(window) if sid not in missing])
    number = 0
    while decoder.rank < lost:
        h: Header = (trial, number, 0, degree, 0, b"", 0, window)
        decoder.repair(*h, b"\0")
        number += 1
    return number


@pytest.mark.parametrize(("window", "lost"), [(32, 8), (200, 16), (255, 64)])
def test_odds_of_exactly_as_many_dense_repairs(window: int, lost: int) -> None:
    """A random matrix over GF(256) is regular with probability 0.9961; within four standard deviations."""
    trials, p = 1500, math.prod(1 - 256.0**-i for i in range(1, lost + 1))
    enough = sum(repairs_needed(window, lost, 255, trial) == lost for trial in range(trials))
    assert abs(enough - trials * p) < 4 * math.sqrt(trials * p * (1 - p)) + 1


@pytest.mark.parametrize(
    ("window", "lost", "mean"),
    [(64, 1, 0.34), (64, 2, 0.24), (128, 1, 1.7), (128, 8, 0.7), (256, 4, 7.2), (256, 16, 3.4), (512, 64, 1.4)],
)
def test_odds_at_degree_48(window: int, lost: int, mean: float) -> None:
    """Mean number of repairs beyond the losses, as measured before this code was written (two digits)."""
    trials = 500
    extra = [repairs_needed(window, lost, 48, trial) - lost for trial in range(trials)]
    rounding = 0.05 if mean >= 1 else 0.006
    error = statistics.stdev(extra) / math.sqrt(trials)
    assert abs(statistics.fmean(extra) - mean) < 4 * error + rounding


def test_odds_of_the_last_loss_follow_the_closed_form() -> None:
    """One loss in 256: each repair touches it with probability 48/256, so the wait is geometric."""
    trials, p = 2000, 48 / 256
    needed = [repairs_needed(256, 1, 48, trial) for trial in range(trials)]
    assert abs(statistics.fmean(needed) - 1 / p) < 4 * math.sqrt(1 - p) / p / math.sqrt(trials)


def test_state_of_an_untouched_decoder() -> None:
    fresh = state(_codec.Decoder(SIZE, COUNT))
    assert (fresh.prefix, fresh.highest, fresh.deficit, fresh.rank, fresh.pending) == (0, 0, 0, 0, 0)
    assert fresh.ranges == ()
    assert not any(fresh.bitmap)
