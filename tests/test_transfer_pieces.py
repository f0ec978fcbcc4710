"""quic_pfec.transfer.pieces: fragments of several copies make one manifest or close the connection."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.transfer.pieces import ManifestPieces
from quic_pfec.wire.errors import AppCode, PeerError
from quic_pfec.wire.frames import ManifestFrame

DATA = bytes(range(1, 101))


def piece(offset: int, length: int, data: bytes = DATA) -> ManifestFrame:
    return ManifestFrame(0, len(data), offset, 0, data[offset : offset + length])


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 60))
def test_done_exactly_when_every_byte_came(seed: int, count: int) -> None:
    rng = random.Random(seed)
    pieces, came = ManifestPieces(), set[int]()
    for _ in range(count):
        offset = rng.randrange(100)
        length = rng.randint(0, 40)
        was_done = pieces.done
        came |= set(range(offset, min(100, offset + length)))
        assert pieces.add(piece(offset, length), 100) == (len(came) == 100 and not was_done)
        assert pieces.done == (len(came) == 100)
    if pieces.done:
        assert pieces.data == DATA


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32), changed=st.integers(0, 99))
def test_a_byte_that_differs_is_seen_when_it_came_before(seed: int, changed: int) -> None:
    rng = random.Random(seed)
    wrong = DATA[:changed] + b"\0" + DATA[changed + 1 :]
    start, stop = rng.randint(0, changed), rng.randint(changed + 1, 100)
    pieces = ManifestPieces()
    pieces.add(piece(0, 100) if rng.random() < 0.5 else piece(start, stop - start), 100)
    with pytest.raises(PeerError) as caught:
        pieces.add(piece(start, stop - start, wrong), 100)
    assert (caught.value.code, caught.value.application) == (AppCode.KV_MANIFEST, True)


def test_holes_are_limited() -> None:
    pieces = ManifestPieces()
    for offset in range(1, 8, 2):
        pieces.add(piece(offset, 1), 5)
    with pytest.raises(PeerError, match="too many pieces"):
        pieces.add(piece(9, 1), 5)
    with pytest.raises(PeerError, match="length"):
        pieces.add(piece(0, 1, DATA + b"x"), 5)
