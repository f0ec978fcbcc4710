"""Units to symbols, symbols to datagrams, no copy between: runs of slots, and writing into a caller's buffer."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec import _codec
from quic_pfec.fec import reference
from tests.codec_world import header, random_header, symbols

SIZE = 68
both = pytest.mark.parametrize("codec", [_codec, reference], ids=["native", "twin"])


def filled(codec: Any, count: int, seed: int = 1, size: int = SIZE) -> Any:
    encoder = codec.Encoder(size, count)
    for symbol in symbols(count, size, seed):
        encoder.push(symbol)
    return encoder


# runs


@both
def test_a_run_is_filled_in_any_order(codec: Any) -> None:
    truth = symbols(9, SIZE, 2)
    encoder = codec.Encoder(SIZE, 12)
    encoder.push(truth[0])
    run = encoder.reserve_run(7)
    assert (run.shape, run.itemsize, run.readonly, run.nbytes) == ((7, SIZE), 1, False, 7 * SIZE)
    assert encoder.count == 1
    rows = np.asarray(run)
    for row in (6, 0, 3, 1, 2, 5, 4):
        rows[row] = np.frombuffer(truth[row + 1], dtype=np.uint8)
    del rows
    assert encoder.commit_run() == 1
    assert encoder.count == 8
    assert encoder.push(truth[8]) == 8
    assert [bytes(encoder.symbol(sid)) for sid in range(9)] == truth
    h = header(3, [], range(9), 9)
    assert encoder.repair(*h) == filled(codec, 9, 2).repair(*h)  # the padding of the slots is zero


@both
def test_runs_refused(codec: Any) -> None:
    encoder = filled(codec, 4)
    with pytest.raises(ValueError, match="all 4"):
        encoder.reserve_run(1)
    encoder = codec.Encoder(SIZE, 4)
    for count in (0, -1, 2**24 + 1):
        with pytest.raises(ValueError):
            encoder.reserve_run(count)
    with pytest.raises(ValueError, match="do not fit"):
        encoder.reserve_run(5)
    for call in (encoder.commit, encoder.commit_run):
        with pytest.raises(ValueError, match="is reserved"):
            call()
    encoder.reserve_run(4)
    for call in (encoder.commit, lambda: encoder.push(bytes(SIZE))):
        with pytest.raises(ValueError, match="reserved"):
            call()
    encoder.reserve()  # another thought
    with pytest.raises(ValueError, match="no run"):
        encoder.commit_run()
    assert encoder.commit() == 0


@both
@pytest.mark.parametrize("kind", ["slot", "run"])
def test_no_view_outlives_the_time_in_which_its_slot_may_be_written(codec: Any, kind: str) -> None:
    def reserve() -> memoryview:
        return encoder.reserve() if kind == "slot" else encoder.reserve_run(2)

    def commit() -> int:
        return encoder.commit() if kind == "slot" else encoder.commit_run()

    encoder = codec.Encoder(SIZE, 8)
    view = reserve()
    np.asarray(view).flat[:3] = (1, 2, 3)
    kept = view
    assert commit() == 0
    count = encoder.count
    with pytest.raises(ValueError, match="released"):
        kept[(0,) * view.ndim]
    for derive in (np.asarray, memoryview, lambda given: given[:1] if kind == "slot" else np.asarray(given)[1:]):
        derived = derive(reserve())
        with pytest.raises(ValueError, match="held"):
            commit()
        with pytest.raises(ValueError, match="held"):
            reserve()
        assert encoder.count == count
        del derived
    first, second = reserve(), reserve()
    with pytest.raises(ValueError, match="released"):
        first[(0,) * second.ndim]
    second[(0,) * second.ndim] = 77
    assert commit() == count
    assert bytes(encoder.symbol(0))[:3] == b"\1\2\3"
    assert encoder.symbol(count)[0] == 77
    del first, second, view, kept
    with reserve():  # let go of by hand
        pass
    assert commit() > count


@both
def test_a_reserved_view_keeps_the_memory_and_no_cycle_keeps_the_encoder(codec: Any) -> None:
    encoder = codec.Encoder(SIZE, 8)
    run = np.asarray(encoder.reserve_run(8))
    gc.disable()
    try:
        if codec is reference:  # the native one has no weak references; what it frees test_codec_memory counts
            gone = weakref.ref(encoder)
            del encoder
            assert gone() is None
        else:
            del encoder
        run[:] = 5
        assert run.sum() == 5 * 8 * SIZE
    finally:
        gc.enable()


def test_the_native_encoder_is_freed_with_a_view_handed_out() -> None:
    def resident_kib() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4

    def one() -> None:
        encoder = _codec.Encoder(1372, 4000)
        encoder.reserve_run(4000)

    one()
    before = resident_kib()
    for _ in range(20):
        one()
    assert resident_kib() - before < 30_000, "20 encoders of 5.5 MB each"


# units


@both
@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=8),
    symbol_size=st.integers(6, 90),
    seed=st.integers(0, 2**32),
)
def test_units_go_in_and_come_out(codec: Any, sizes: list[int], symbol_size: int, seed: int) -> None:
    rng = random.Random(seed)
    payload = symbol_size - 4
    counts = [-(-size // payload) for size in sizes]
    count = sum(counts)
    encoder = codec.Encoder(symbol_size, count + 1)
    encoder.push(b"\xa5" * symbol_size)
    run = encoder.reserve_run(count)
    np.asarray(run)[:] = 0x5A  # slots may be dirty
    bodies, first = {}, 0
    ids = [*rng.sample(range(2**24), len(sizes) - 1), 2**24 - 1]
    for unit, size, fragments in zip(ids, sizes, counts, strict=True):
        body = rng.randbytes(size)
        cut = rng.randint(0, size)
        assert codec.scatter_unit(run, first, unit, body[:cut], bytearray(body[cut:])) == fragments
        bodies[unit] = (first + 1, body)
        first += fragments
    encoder.commit_run()
    for unit, (sid, body) in bodies.items():
        assert encoder.gather(sid, len(body)) == body
        for fragment in range(-(-len(body) // payload)):
            part = body[fragment * payload : (fragment + 1) * payload]
            expected = (unit << 8 | fragment).to_bytes(4, "big") + part.ljust(payload, b"\0")
            assert encoder.symbol(sid + fragment) == expected


@both
def test_units_refused(codec: Any) -> None:
    run = codec.Encoder(SIZE, 300).reserve_run(300)
    scatter = codec.scatter_unit
    assert scatter(run, 44, 0, bytes(256 * 64)) == 256
    for first, unit, nbytes in (
        (0, 0, 256 * 64 + 1),
        (0, 0, 0),
        (45, 0, 256 * 64),
        (300, 0, 1),
        (-1, 0, 1),
        (0, 2**24, 1),
    ):
        with pytest.raises(ValueError):
            scatter(run, first, unit, bytes(nbytes))
    with pytest.raises(ValueError):
        scatter(run, 0, -1, b"x")
    for wrong in (
        run.toreadonly(),
        bytearray(SIZE),
        np.zeros((2, SIZE), np.uint16),
        np.zeros((SIZE, 2), np.uint8).T,
        np.zeros((2, 4), np.uint8),
        np.zeros((2, 2, SIZE), np.uint8),
    ):
        with pytest.raises(ValueError):
            scatter(wrong, 0, 0, b"x")
    encoder = filled(codec, 3)
    assert len(encoder.gather(1, 2 * 64)) == 128
    for sid in (0, 1, 2, 3, 2**62):
        with pytest.raises(KeyError):
            encoder.gather(sid, (3 - min(sid, 3)) * 64 + 1)
    for arguments in ((0, 0), (0, -1), (-1, 5), (0, 2**40)):
        with pytest.raises(ValueError):
            encoder.gather(*arguments)
    with pytest.raises(ValueError):
        filled(codec, 3, size=4).gather(0, 1)


# into a datagram


@both
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 200), offset=st.integers(0, 70), behind=st.integers(0, 70))
def test_written_in_place_and_nowhere_else(codec: Any, seed: int, size: int, offset: int, behind: int) -> None:
    rng = random.Random(seed)
    encoder = filled(codec, 20, seed, size)
    h = random_header(rng, 7, 0, 20, rng.randint(1, 25))
    for write, expected in (
        (lambda out: encoder.symbol_into(11, out, offset), bytes(encoder.symbol(11))),
        (lambda out: encoder.repair_into(*h, out, offset), encoder.repair(*h)),
    ):
        before = rng.randbytes(offset + size + behind)
        for make in (
            bytearray,
            lambda data: memoryview(bytearray(data)),
            lambda data: np.frombuffer(data, np.uint8).copy(),
        ):
            out = make(before)
            assert write(out) is None
            assert bytes(out) == before[:offset] + expected + before[offset + size :]


@both
def test_targets_refused(codec: Any) -> None:
    encoder = filled(codec, 5)
    h = header(1, [], range(5), 5)
    out = bytearray(SIZE)
    for target, offset in (
        (bytearray(SIZE - 1), 0), (out, 1), (out, -1), (out, SIZE), (out, 2**63), (out, 2**70), (bytearray(), 0),
        (bytes(SIZE), 0), (memoryview(out).toreadonly(), 0), (memoryview(bytearray(2 * SIZE))[::2], 0),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            encoder.symbol_into(1, target, offset)
        with pytest.raises(ValueError):
            encoder.repair_into(*h, target, offset)
    with pytest.raises(TypeError):
        encoder.symbol_into(1, "text", 0)
    with pytest.raises(KeyError):
        encoder.symbol_into(5, out, 0)
    with pytest.raises(ValueError, match="beyond"):
        encoder.repair_into(*header(1, [], range(6), 5), out, 0)
    with pytest.raises(ValueError, match="degree"):
        encoder.repair_into(*header(1, [], range(5), 0), out, 0)
    assert out == bytes(SIZE)
    out.append(0)  # BufferError if a view of it were left
