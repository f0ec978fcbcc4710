"""The intake of packets: native and twin alike on any input, plain packets taken, everything else left untouched."""

from __future__ import annotations

import gc
import pickle
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec import _codec
from quic_pfec.fec import reference
from tests.codec_world import header, known, random_header, repair_symbol, state, symbols

SIZE = 20
PAYLOAD = SIZE - 4
COUNTS = [3, 1, 4, 2, 5, 1, 4]
COUNT = sum(COUNTS)
UNIT_OF = [unit for unit, count in enumerate(COUNTS) for _ in range(count)]
FRAGMENT_OF = [fragment for count in COUNTS for fragment in range(count)]
BODIES = symbols(COUNT, PAYLOAD, 41)
TRUTH = [
    (unit << 8 | fragment).to_bytes(4, "big") + body
    for unit, fragment, body in zip(UNIT_OF, FRAGMENT_OF, BODIES, strict=True)
]
SIZES = np.array([count * PAYLOAD - unit % 3 for unit, count in enumerate(COUNTS)], dtype=np.int64)
BASE = np.concatenate(([0], np.cumsum(COUNTS))).astype(np.int64)
END, ODD, CONTRADICTS = _codec.INTAKE_END, _codec.INTAKE_ODD, _codec.INTAKE_CONTRADICTS
both = pytest.mark.parametrize("codec", [_codec, reference], ids=["native", "twin"])


class Side:
    """An intake with its decoder and its table."""

    def __init__(self, codec: Any, useless: int = 6, bound: bool = True, **limits: int) -> None:
        self.decoder = codec.Decoder(SIZE, COUNT, **limits)
        self.intake = codec.Intake(self.decoder, useless)
        self.sid_of = np.full(COUNT, -1, dtype=np.int32)
        self.missing = np.array(COUNTS, dtype=np.int64)
        if bound:
            self.bind()

    def bind(self) -> None:
        self.intake.bind(SIZES, BASE, self.sid_of, self.missing)

    def everything(self) -> tuple[Any, ...]:
        intake = self.intake
        return (
            state(self.decoder), self.sid_of.tolist(), self.missing.tolist(), intake.useless_left, intake.highest,
        )  # fmt: skip


def unit_bytes(unit: int) -> bytes:
    return b"".join(BODIES[BASE[unit] : BASE[unit + 1]])[: SIZES[unit]]


def test_the_reasons_to_stop_are_the_same_numbers() -> None:
    for name in ("END", "ODD", "CONTRADICTS"):
        assert getattr(_codec, f"INTAKE_{name}") == getattr(reference, f"INTAKE_{name}") < 0


def wild_packet(rng: random.Random, number: int) -> Any:
    kind = rng.randrange(16)
    sid = rng.randrange(COUNT)
    if kind < 7:
        return sid, TRUTH[sid]
    if kind < 11:
        low = rng.randrange(COUNT)
        h = random_header(rng, number, low, rng.randint(low + 1, COUNT), rng.randint(1, 12))
        return (*h, repair_symbol(TRUTH, h))
    if kind == 11:  # a repair that lies, often over one symbol
        high = min(COUNT, sid + rng.choice([1, 1, 3]))
        return (*header(number, [], range(sid, high), 3), bytes(SIZE))
    h = header(number, [], range(sid, COUNT), 4)
    return rng.choice(
        [
            (sid, TRUTH[rng.randrange(COUNT)]),  # the fragment of another
            (sid, b"\xff" * 4 + TRUTH[sid][4:]),  # no such unit
            (sid, TRUTH[sid][:3] + b"\x09" + TRUTH[sid][4:]),  # no such fragment
            (COUNT, TRUTH[0]), (-1, TRUTH[0]), (2**64, TRUTH[0]), (sid, TRUTH[sid][:-1]), (sid, TRUTH[sid] + b"x"),
            (sid, b""), (sid,), (), [sid, TRUTH[sid]], None, (sid, None), ("1", TRUTH[sid]), (sid, "text"),
            (*h[:3], 0, *h[4:], bytes(SIZE)), (*h[:5], b"\0", *h[6:], bytes(SIZE)), (*h[:5], None, *h[6:], bytes(SIZE)),
            (*h[:7], COUNT, bytes(SIZE)), (*h[:2], -1, *h[3:], bytes(SIZE)), (*h, bytes(3)),
            (2**63, *h[1:], bytes(SIZE)), (*h[:4], 2**62, *h[5:], bytes(SIZE)),
        ]
    )  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    useless=st.integers(0, 4),
    end=st.sampled_from([COUNT, COUNT, COUNT - 5, 3 * COUNT]),
    bind_after=st.integers(0, 8),
)
def test_native_and_twin_agree_on_hostile_batches(seed: int, useless: int, end: int, bind_after: int) -> None:
    """Also with the twin's intake in front of the native decoder, and on the state that every stop leaves behind."""
    rng = random.Random(seed)
    limits = {"max_unknown": rng.choice([2, 5, 64]), "row_ops_per_repair": rng.choice([1, 1024])}
    native, twin = (Side(codec, useless, bound=False, **limits) for codec in (_codec, reference))
    poisoned = False
    for step in range(rng.randrange(10)):
        if step == bind_after:
            native.bind()
            twin.bind()
        batch = [wild_packet(rng, 100 * step + i) for i in range(rng.randrange(12))]
        at = 0
        while at < len(batch):
            before, total = native.everything(), sum(native.decoder.counters().values())
            stop = native.intake.take(batch, at, end)
            assert stop == twin.intake.take(batch, at, end)
            assert native.everything() == twin.everything()
            if stop == (at, ODD):
                assert native.everything() == before
                assert sum(native.decoder.counters().values()) == total
            at, what = stop
            if what >= 0:
                assert native.missing[what] == 0
                assert native.intake.collect(what) == twin.intake.collect(what)
            at += what == ODD
        counts = native.intake.counts()
        assert counts == twin.intake.counts()
        assert native.intake.counts() == (0, 0, 0, 0, 0, False)
        found = native.decoder.poll(4)
        assert found == twin.decoder.poll(4)
        poisoned |= any(native.decoder.symbol(sid) != twin.decoder.symbol(sid) for sid in found)
        if poisoned:  # inconsistent equations have no one solution
            return
        if step >= bind_after:
            at = 0
            while at < len(found):
                stop = native.intake.place(found, at)
                assert stop == twin.intake.place(found, at)
                assert native.everything() == twin.everything()
                at = stop[0] + (stop[1] == ODD)


@both
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), loss=st.floats(0.0, 0.5))
def test_true_packets_make_true_units_without_a_judgement(codec: Any, seed: int, loss: float) -> None:
    rng = random.Random(seed)
    side = Side(codec, 1000)
    packets: list[Any] = [(sid, TRUTH[sid]) for sid in range(COUNT) if rng.random() >= loss]
    for number in range(COUNT):
        h = random_header(rng, number, 0, COUNT, rng.randint(1, COUNT))
        packets.append((*h, memoryview(bytearray(repair_symbol(TRUTH, h)))))
    packets += rng.sample(packets, len(packets) // 3)
    rng.shuffle(packets)
    done: list[int] = []
    at = 0
    while at < len(packets):
        at, what = side.intake.take(packets, at, COUNT)
        assert what != ODD
        if what >= 0:
            done.append(what)
        found = side.decoder.poll(3)
        placed = 0
        while placed < len(found):
            placed, what = side.intake.place(found, placed)
            assert what != ODD
            if what >= 0:
                done.append(what)
    source, duplicate, useful, useless, dropped, _ = side.intake.counts()
    assert source + duplicate + useful + useless + dropped == len(packets)
    assert len(done) == len(set(done))
    assert sorted(done) == [unit for unit in range(len(COUNTS)) if side.missing[unit] == 0]
    assert all(side.intake.collect(unit) == unit_bytes(unit) for unit in done)
    for unit in set(range(len(COUNTS))) - set(done):
        got, expected = side.intake.collect(unit), unit_bytes(unit)
        for fragment in range(COUNTS[unit]):
            part = slice(fragment * PAYLOAD, (fragment + 1) * PAYLOAD)
            there = int(BASE[unit]) + fragment in known(side.decoder) and side.sid_of[BASE[unit] + fragment] >= 0
            assert got[part] == (expected[part] if there else bytes(len(expected[part])))


@both
def test_where_it_stops(codec: Any) -> None:
    side = Side(codec, useless=2)
    packets = [(0, TRUTH[0]), (1, TRUTH[1]), (2, TRUTH[2]), (3, TRUTH[3]), (3, TRUTH[3]), (3, TRUTH[4]), (9, TRUTH[9])]
    assert side.intake.take(packets, 0, COUNT) == (3, 0)
    assert side.intake.take(packets, 3, COUNT) == (4, 1)
    assert side.intake.take(packets, 4, COUNT) == (5, ODD)  # received with other bytes
    assert side.intake.take(packets, 6, COUNT) == (7, END)
    assert side.intake.take(packets, 7, COUNT) == (7, END)
    assert side.intake.highest == 10
    assert side.intake.counts() == (5, 1, 0, 0, 0, True)
    repairs = [(*header(n, [], range(4), 4), bytes(SIZE)) for n in range(4)]
    assert side.intake.take(repairs, 0, COUNT) == (4, END)
    assert side.intake.counts() == (0, 0, 0, 2, 2, False)  # two redundant ones, then no more
    assert side.intake.useless_left == 0
    lie = (*header(9, [0], range(0), 1), bytes(SIZE))
    assert side.intake.take([(4, TRUTH[4]), lie], 0, COUNT) == (2, CONTRADICTS)
    assert side.intake.take([(5, TRUTH[5])], 0, 5) == (0, ODD)  # beyond the end that counts now


@both
def test_a_decoded_symbol_of_other_bytes_is_left_to_the_receiver(codec: Any) -> None:
    side = Side(codec)
    side.decoder.repair(*header(1, [7], range(0), 1), bytes(SIZE))
    assert side.decoder.poll(1) == [7]
    assert side.intake.take([(7, TRUTH[7])], 0, COUNT) == (0, ODD)
    assert not side.decoder.received(7)
    assert side.decoder.symbol(7) == bytes(SIZE)


@both
def test_places(codec: Any) -> None:
    side = Side(codec, bound=False)
    with pytest.raises(ValueError, match="bound"):
        side.intake.place([], 0)
    with pytest.raises(ValueError, match="bound"):
        side.intake.collect(0)
    assert side.intake.take([(sid, TRUTH[sid]) for sid in range(8)], 0, COUNT) == (8, END)
    side.decoder.source(8, TRUTH[9])
    side.bind()
    assert side.intake.place(list(range(9)), 0) == (3, 0)
    assert side.intake.place(list(range(9)), 3) == (4, 1)
    assert side.intake.place(list(range(9)), 4) == (8, 2)
    assert side.intake.place(list(range(9)), 8) == (9, END)  # sid 8 says that it is fragment 1 of unit 3
    side.decoder.source(9, TRUTH[9])
    assert side.intake.place([9], 0) == (0, ODD)
    assert side.intake.place([8, 0, 3], 0) == (3, END)  # again
    assert side.intake.take([(10, TRUTH[9])], 0, COUNT) == (0, ODD)
    for wrong in ([COUNT], [-1]):
        with pytest.raises(ValueError):
            side.intake.place(wrong, 0)
    with pytest.raises(KeyError):
        side.intake.place([COUNT - 1], 0)
    for unit in (-1, len(COUNTS), 2**40):
        with pytest.raises(ValueError):
            side.intake.collect(unit)


@both
def test_tables_refused(codec: Any) -> None:
    side = Side(codec, bound=False)
    good = {"sizes": SIZES, "base": BASE, "sid_of": side.sid_of, "missing": side.missing}
    for name, wrong in (
        ("sizes", SIZES[:-1]), ("sizes", SIZES + PAYLOAD), ("sizes", SIZES - PAYLOAD), ("base", BASE + 1),
        ("base", BASE[::-1].copy()), ("base", BASE[:-1]), ("sid_of", side.sid_of[:-1]), ("missing", side.missing[1:]),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            side.intake.bind(**(good | {name: wrong}))
    nothing = np.zeros(0, dtype=np.int64)
    with pytest.raises(ValueError):
        side.intake.bind(nothing, BASE[:1], np.zeros(0, dtype=np.int32), nothing)
    with pytest.raises(ValueError):
        codec.Intake(side.decoder, -1)
    small = codec.Intake(codec.Decoder(4, 3), 1)
    with pytest.raises(ValueError):
        small.bind(**good)
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(small)


def test_memory_is_safe_whatever_the_shared_arrays_say() -> None:
    side = Side(_codec)
    side.sid_of[:] = 2**31 - 1
    with pytest.raises(ValueError, match="capacity"):
        side.intake.collect(2)
    assert side.intake.take([(0, TRUTH[0])], 0, COUNT) == (0, ODD)
    side.sid_of[:] = -7
    assert side.intake.collect(0) == bytes(SIZES[0])
    side.missing[:] = -5
    assert side.intake.take([(0, TRUTH[0])], 0, COUNT) == (1, END)


@both
def test_nothing_of_a_packet_is_kept(codec: Any) -> None:
    side = Side(codec)
    data = bytearray(TRUTH[0])
    h = header(1, [], range(4), 4)
    repair = bytearray(repair_symbol(TRUTH, h))
    packets = [(0, data), (*h, repair), (0, data), (1, data)]
    assert side.intake.take(packets, 0, COUNT) == (3, ODD)
    data.append(0)  # BufferError if a view of it were left
    repair.append(0)
    data[:] = repair[:] = bytes(SIZE)
    assert side.decoder.symbol(0) == TRUTH[0]


class Shrinking(int):
    """A sid whose reading empties the batch."""

    batch: list[Any]

    def __index__(self) -> int:
        self.batch.clear()
        return 1


def test_a_batch_that_changes_while_it_is_read() -> None:
    side = Side(_codec)
    sid = Shrinking(1)
    sid.batch = batch = [(sid, TRUTH[1]), (2, TRUTH[2])]
    assert side.intake.take(batch, 0, COUNT)[1] == END
    gc.collect()
    assert not side.decoder.known(2) or batch
