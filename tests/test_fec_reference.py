"""The twin against a third opinion: determinacy by rank alone, repairs by their definition."""

from __future__ import annotations

import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.fec import reference
from tests.codec_world import determined, known, random_header, repair_symbol, symbols

SIZE = 8


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 12), repairs=st.integers(0, 10), loss=st.floats(0, 1))
def test_recovers_exactly_what_is_determined(seed: int, count: int, repairs: int, loss: float) -> None:
    rng = random.Random(seed)
    truth = symbols(count, SIZE, seed)
    received = [sid for sid in range(count) if rng.random() >= loss]
    headers = [random_header(rng, number, 0, count, rng.randint(1, count)) for number in range(repairs)]
    decoder = reference.Decoder(SIZE, count)
    for event in rng.sample(range(len(received) + len(headers)), len(received) + len(headers)):
        if event < len(received):
            decoder.source(received[event], truth[received[event]])
        else:
            h = headers[event - len(received)]
            decoder.repair(*h, repair_symbol(truth, h))
    decoder.poll(count)
    assert known(decoder) == determined(count, received, headers)
    assert all(decoder.symbol(sid) == truth[sid] for sid in known(decoder))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 20), degree=st.integers(1, 30))
def test_encoder_follows_the_definition(seed: int, count: int, degree: int) -> None:
    truth = symbols(count, SIZE, seed)
    encoder = reference.Encoder(SIZE, count)
    for symbol in truth:
        encoder.push(symbol)
    h = random_header(random.Random(seed), 3, 0, count, degree)
    assert encoder.repair(*h) == repair_symbol(truth, h)


def test_inverse_of_zero_and_beyond() -> None:
    for a in (0, 256, -1):
        with pytest.raises(ValueError):
            reference.inverse(a)


def test_a_second_thread_is_refused() -> None:
    """Seen through re-entry, which is the same lock: `source` while `poll` holds the decoder."""
    decoder = reference.Decoder(SIZE, 4)
    with decoder._exclusive, pytest.raises(RuntimeError, match="another thread"):
        decoder.source(0, bytes(SIZE))
    assert decoder.source(0, bytes(SIZE)) == 0


def test_pickling_is_refused() -> None:
    for thing in (reference.Encoder(SIZE, 1), reference.Decoder(SIZE, 1)):
        with pytest.raises(TypeError):
            pickle.dumps(thing)


def test_isa() -> None:
    assert reference.isa_levels() == [reference.isa()] == ["python"]
