"""What the tests of the receiver share: one world of units, and short names for what comes out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from quic_pfec.transfer.receiver import Event, Frozen, Receiver, UnitReceived
from quic_pfec.transfer.units import DigestSink
from quic_pfec.wire.errors import PeerError
from quic_pfec.wire.frames import ManifestFrame
from quic_pfec.wire.limits import Limits
from tests.transfer_world import MANIFEST, World, world

WORLD = world([4] * 10)
SMALL = Limits(initial_credit=16)


def units(events: list[Event]) -> list[int]:
    return [event.unit for event in events if isinstance(event, UnitReceived)]


def frozen(events: list[Event]) -> list[Frozen]:
    return [event for event in events if isinstance(event, Frozen)]


@contextmanager
def fails(code: int, application: bool = False) -> Iterator[None]:
    with pytest.raises(PeerError) as caught:
        yield
    assert (caught.value.code, caught.value.application) == (code, application)


def feed(into: Receiver, sids: list[int] | range, now: float = 0.1, of: World = WORLD) -> list[Event]:
    return into.receive_batch([of.source(sid) for sid in sids], now)


class Keep(DigestSink):
    """Keeps the units that it accepts."""

    def __init__(self) -> None:
        self.data: dict[int, bytes] = {}

    def write_unit(self, unit: int, data: bytes) -> bool:
        accepted = super().write_unit(unit, data)
        if accepted:
            self.data[unit] = data
        return accepted


def expected(of: World, unit: int) -> bytes:
    return b"".join(bytes(of.encoder.symbol(int(sid)))[4:] for sid in np.flatnonzero(of.unit_of_sid == unit))


def piece(offset: int, length: int, remaining_s: float = 1.0, data: bytes = MANIFEST) -> ManifestFrame:
    return ManifestFrame(0, len(data), offset, round(remaining_s * 1e6), data[offset : offset + length])
