"""Symbols back to units: places, claims, partial bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.fec.reference import Intake
from quic_pfec.transfer.units import DigestSink, FragmentTaken, UnitTable
from quic_pfec.wire.frames import pack_unit_header

SIZE = 64
PAYLOAD = 60


class Symbols:
    """Symbols by sid, made by hand: as much of a decoder as it takes to collect units."""

    symbol_size = SIZE

    def __init__(self) -> None:
        self.held: dict[int, memoryview] = {}

    def add(self, sid: int, unit: int, fragment: int, fill: int) -> memoryview:
        self.held[sid] = memoryview(pack_unit_header(unit, fragment) + bytes([fill]) * PAYLOAD)
        return self.held[sid]

    def symbol(self, sid: int, /) -> memoryview:
        return self.held[sid]


def collected(of: UnitTable, unit: int, symbols: Symbols) -> tuple[bytes, list[tuple[int, int]]]:
    intake: Any = Intake(symbols, 0)
    of.attach(intake)
    return intake.collect(unit), of.ranges(unit)


def table(*sizes: int) -> UnitTable:
    return UnitTable(np.array(sizes, dtype=np.int64), SIZE)


def test_fragments_of_each_unit() -> None:
    of = table(1, 60, 61, 150)
    assert of.fragments.tolist() == [1, 1, 2, 3]
    assert of.symbols == 7


def test_a_unit_is_there_with_its_last_fragment_whatever_the_order() -> None:
    of, symbols = table(100, 150), Symbols()
    assert of.place(9, symbols.add(9, 1, 2, 3)) is None
    assert of.place(0, symbols.add(0, 1, 0, 1)) is None
    assert of.place(5, symbols.add(5, 0, 1, 7)) is None
    assert (of.present(0), of.present(1)) == (1, 2)
    assert of.place(2, symbols.add(2, 1, 1, 2)) == 1
    data, ranges = collected(of, 1, symbols)
    assert data == b"\1" * 60 + b"\2" * 60 + b"\3" * 30
    assert ranges == [(0, 150)]
    assert of.place(2, symbols.symbol(2)) is None  # again


def test_partial_bytes_and_their_ranges() -> None:
    of, symbols = table(270), Symbols()
    for sid, fragment in ((4, 0), (1, 1), (7, 3)):
        of.place(sid, symbols.add(sid, 0, fragment, fragment + 1))
    data, ranges = collected(of, 0, symbols)
    assert ranges == [(0, 120), (180, 240)]
    assert data == b"\1" * 60 + b"\2" * 60 + bytes(60) + b"\4" * 60 + bytes(30)
    of.place(2, symbols.add(2, 0, 4, 5))  # the last one is cut at the unit's size
    data, ranges = collected(of, 0, symbols)
    assert ranges == [(0, 120), (180, 270)]
    assert len(data) == 270
    assert collected(of, 0, symbols)[0][240:] == b"\5" * 30


@pytest.mark.parametrize(("unit", "fragment"), [(2, 0), (0, 2), (1, 255), (0xFFFFFF, 0)])
def test_fragments_that_do_not_exist(unit: int, fragment: int) -> None:
    of = table(100, 150)
    with pytest.raises(ValueError, match="does not exist"):
        of.place(0, Symbols().add(0, unit, fragment, 1))
    assert of.partial_units() == []


def test_two_claims() -> None:
    of, symbols = table(100), Symbols()
    of.place(3, symbols.add(3, 0, 1, 1))
    with pytest.raises(FragmentTaken, match="symbols 3 and 4 both claim fragment 1 of unit 0") as caught:
        of.place(4, symbols.add(4, 0, 1, 2))
    assert caught.value.sid == 3
    assert of.present(0) == 1


def test_withdrawn_fragments_may_come_again() -> None:
    of, symbols = table(100), Symbols()
    of.place(0, symbols.add(0, 0, 0, 1))
    assert of.place(1, symbols.add(1, 0, 1, 9)) == 0
    of.corrupt[0] = True
    of.withdraw(1, symbols.symbol(1))
    assert (of.present(0), bool(of.corrupt[0])) == (1, False)
    of.withdraw(1, symbols.symbol(1))  # it holds no place now
    of.withdraw(5, symbols.add(5, 0, 0, 1))  # that place is symbol 0's
    of.withdraw(6, symbols.add(6, 9, 9, 1))  # no place at all
    assert of.present(0) == 1
    assert of.place(2, symbols.add(2, 0, 1, 2)) == 0
    assert collected(of, 0, symbols)[0] == b"\1" * 60 + b"\2" * 40


def test_partial_units() -> None:
    of, symbols = table(100, 100, 100, 100), Symbols()
    for sid, (unit, fragment) in enumerate([(0, 0), (0, 1), (1, 1), (3, 0), (3, 1)]):
        of.place(sid, symbols.add(sid, unit, fragment, 1))
    of.complete[0] = True
    of.corrupt[3] = True
    assert of.partial_units() == [1]


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=6), data=st.data())
def test_what_was_cut_is_put_together(sizes: list[int], data: st.DataObject) -> None:
    of, symbols = table(*sizes), Symbols()
    bodies = [bytes((unit + i) % 251 for i in range(size)) for unit, size in enumerate(sizes)]
    places = [(unit, fragment) for unit in range(len(sizes)) for fragment in range(int(of.fragments[unit]))]
    order = data.draw(st.permutations(places))
    done = []
    for sid, (unit, fragment) in enumerate(order):
        part = bodies[unit][fragment * PAYLOAD : (fragment + 1) * PAYLOAD].ljust(PAYLOAD, b"\0")
        symbols.held[sid] = memoryview(pack_unit_header(unit, fragment) + part)
        finished = of.place(sid, symbols.held[sid])
        if finished is not None:
            done.append(finished)
            assert collected(of, finished, symbols) == (bodies[finished], [(0, sizes[finished])])
    assert sorted(done) == list(range(len(sizes)))


def test_the_digest_sink() -> None:
    body = b"some KV" * 10
    good = body + xxhash.xxh3_64_intdigest(body, seed=5).to_bytes(8, "little")
    assert DigestSink().write_unit(5, good)
    assert not DigestSink().write_unit(6, good)
    assert not DigestSink().write_unit(5, b"x" + good[1:])
