"""Memory and threads: arenas are lazy and grow, no view outlives its slot, one object serves one thread at a time."""

from __future__ import annotations

import gc
import pickle
import random
import resource
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec import _codec
from quic_pfec.fec import reference
from tests.codec_world import header, random_header, repair_symbol, symbols

SIZE = 100
encoders = pytest.mark.parametrize("make", [_codec.Encoder, reference.Encoder], ids=["native", "twin"])
decoders = pytest.mark.parametrize("make", [_codec.Decoder, reference.Decoder], ids=["native", "twin"])


@encoders
def test_encoder_fills_in_order(make: Any) -> None:
    truth = symbols(4, SIZE, 1)
    encoder = make(SIZE, 4)
    assert (encoder.symbol_size, encoder.capacity, encoder.count) == (SIZE, 4, 0)
    assert encoder.push(truth[0]) == 0
    view = encoder.reserve()
    assert (len(view), view.readonly, encoder.count) == (SIZE, False, 1)
    with pytest.raises(ValueError, match="reserved"):
        encoder.push(truth[1])
    view[:] = truth[1]
    assert encoder.commit() == 1
    with pytest.raises(ValueError):
        encoder.commit()
    assert encoder.push(memoryview(truth[2])) == 2
    assert encoder.push(np.frombuffer(truth[3], np.uint8)) == 3
    assert [bytes(encoder.symbol(sid)) for sid in range(4)] == truth
    assert encoder.symbol(0).readonly
    for call in (lambda: encoder.push(truth[0]), encoder.reserve):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(KeyError):
        encoder.symbol(4)
    assert encoder.count == 4


@encoders
def test_encoder_refuses(make: Any) -> None:
    encoder = make(SIZE, 4)
    for wrong in (b"", bytes(SIZE - 1), bytes(SIZE + 1)):
        with pytest.raises(ValueError):
            encoder.push(wrong)
    encoder.push(bytes(SIZE))
    with pytest.raises(ValueError, match="beyond"):
        encoder.repair(0, 0, 0, 2, 0, b"", 0, 2)
    assert len(encoder.repair(0, 0, 0, 2, 0, b"", 0, 1)) == SIZE
    for arguments in ((0, 1), (65_536, 1), (8, 0), (8, 2**24 + 1), (-1, 4)):
        with pytest.raises(ValueError):
            make(*arguments)


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 2**32),
    size=st.one_of(st.integers(1, 300), st.sampled_from([1372, 1408, 1116])),
    count=st.integers(1, 40),
    degree=st.integers(1, 60),
)
def test_native_encoder_equals_twin(seed: int, size: int, count: int, degree: int) -> None:
    native, twin = _codec.Encoder(size, count), reference.Encoder(size, count)
    for symbol in symbols(count, size, seed):
        native.push(symbol)
        twin.push(symbol)
    h = random_header(random.Random(seed), seed % 2**32, 0, count, degree)
    assert native.repair(*h) == twin.repair(*h)


def test_a_view_keeps_the_memory_of_its_object() -> None:
    encoder, decoder = _codec.Encoder(SIZE, 100), _codec.Decoder(SIZE, 100)
    truth = symbols(100, SIZE, 2)
    for sid, symbol in enumerate(truth):
        encoder.push(symbol)
        decoder.source(sid, symbol)
    views = [encoder.symbol(7), decoder.symbol(8), np.frombuffer(decoder.symbol(9), np.uint8)]
    del encoder, decoder
    gc.collect()
    spoiler = [_codec.Decoder(SIZE, 100) for _ in range(20)]  # would reuse the addresses
    for other in spoiler:
        other.source(7, bytes(SIZE))
    assert [bytes(view) for view in views] == truth[7:10]
    with pytest.raises(TypeError):
        views[0][0] = 1  # type: ignore[index]


@decoders
def test_grow(make: Any) -> None:
    truth = symbols(3000, SIZE, 3)
    decoder = make(SIZE, 10)
    for sid in (0, 1, 4, 9):
        decoder.source(sid, truth[sid])
    h = header(1, [2, 3], range(0), 2)
    decoder.repair(*h, repair_symbol(truth, h))
    view = decoder.symbol(4)
    decoder.grow(10)
    with pytest.raises(ValueError, match="exported"):
        decoder.grow(3000)
    with pytest.raises(ValueError):
        decoder.grow(9)
    assert decoder.capacity == 10
    view.release()
    gc.collect()
    decoder.grow(3000)
    assert decoder.capacity == 3000
    assert len(decoder.known_bitmap()) == 375
    assert decoder.known_ranges(9) == [(4, 5), (9, 10)]
    for sid in range(10, 3000):
        assert not decoder.known(sid)
    for sid in range(10, 3000, 7):
        assert decoder.source(sid, truth[sid]) == _codec.SOURCE_NEW
    decoder.source(3, truth[3])
    assert decoder.poll(9) == [2]
    for sid in (0, 1, 2, 3, 4, 9, *range(10, 3000, 7)):
        assert decoder.symbol(sid) == truth[sid]
    assert (decoder.prefix, decoder.highest) == (5, 3000)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 128, 200])
def test_prefix_at_word_borders(count: int) -> None:
    decoder = _codec.Decoder(4, count)
    for sid in reversed(range(count)):
        assert decoder.prefix == 0
        assert decoder.known_ranges(5) == ([(sid + 1, count)] if sid + 1 < count else [])
        decoder.source(sid, bytes(4))
    assert decoder.prefix == count == decoder.highest
    assert decoder.known_ranges(5) == []
    assert decoder.known_bitmap() == ((1 << count) - 1).to_bytes((count + 7) // 8, "little")


def test_arenas_are_touched_only_where_used() -> None:
    """Two arenas of 22 GiB each: far more than is ever resident."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    encoder, decoder = _codec.Encoder(1372, 2**24), _codec.Decoder(1372, 2**24)
    encoder.push(bytes(1372))
    decoder.source(2**24 - 1, bytes(1372))
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 64 * 1024
    assert decoder.symbol(2**24 - 1) == encoder.symbol(0)


def test_objects_are_freed() -> None:
    def resident_kib() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize() // 1024

    def one() -> None:
        decoder = _codec.Decoder(1372, 2000)
        for sid in range(0, 2000, 2):
            decoder.source(sid, bytes(1372))
        decoder.symbol(0)

    one()
    before = resident_kib()
    for _ in range(100):
        one()
    assert resident_kib() - before < 20_000, "100 decoders of 1.4 MB each"


def test_pickling_is_refused() -> None:
    for thing in (_codec.Encoder(SIZE, 1), _codec.Decoder(SIZE, 1)):
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(thing)
        with pytest.raises(TypeError):
            type("Derived", (type(thing),), {})


@pytest.mark.realtime
def test_a_second_thread_is_refused_while_poll_works() -> None:
    count, size = 128, 65_535
    rng = random.Random(9)
    encoder = _codec.Encoder(size, count)
    for _ in range(count):
        encoder.push(rng.randbytes(size))
    refused = False
    for attempt in range(20):
        decoder = _codec.Decoder(size, count)
        for number in range(count):
            h = (0, attempt << 16 | number, 0, 255, 0, b"", 0, count)
            decoder.repair(*h, encoder.repair(*h))
        found: list[int] = []
        worker = threading.Thread(target=lambda d=decoder, f=found: f.extend(d.poll(count)))
        worker.start()
        try:
            while worker.is_alive():
                decoder.known_ranges(1)
        except RuntimeError as error:
            refused = "another thread" in str(error)
        worker.join()
        assert len(found) == decoder.prefix or decoder.rank < count
        assert all(decoder.symbol(sid) == encoder.symbol(sid) for sid in found)
        if refused:
            break
    assert refused
