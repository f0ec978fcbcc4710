"""Incomplete units are filed ahead of the freeze, again where more of them came, and taken back where they must be."""

from __future__ import annotations

from quic_pfec.kv.assemble import Assembler
from quic_pfec.quic.partial import PartialUnits
from quic_pfec.transfer.receiver import Receiver
from quic_pfec.wire.frames import ManifestFrame, SourceFrame
from quic_pfec.wire.limits import Limits
from quic_pfec.wire.manifest import encode_manifest
from tests.handoff_world import prepared, sources, until

KV = prepared(4, 64)
FRAGMENTS = int(KV.layout.fragment_counts(KV.layout.symbol_size())[0])


def halves() -> list[SourceFrame]:
    """Of every unit all fragments but the last."""
    return [frame for frame in sources(KV) if (frame.sid + 1) % FRAGMENTS]


def receiving() -> tuple[Receiver, Assembler]:
    size = KV.layout.symbol_size()
    data = encode_manifest(KV.manifest(size, "mask"))
    receiver, assembler = Receiver(0, Limits(), 0.0), Assembler(KV.layout)
    receiver.receive_batch([ManifestFrame(0, len(data), 0, 1_000_000, data)], 0.0)
    receiver.accept(KV.layout.unit_sizes(), KV.layout.symbols(size), size, assembler, 0.0)
    return receiver, assembler


async def test_what_was_filed_is_not_filed_again_unless_more_came() -> None:
    receiver, assembler = receiving()
    receiver.receive_batch(halves()[:-1], 0.1)  # the last unit lacks two
    partial = PartialUnits(receiver, assembler, 0.0, whole_rows=True)
    await until(lambda: bool((assembler.to_units_map() > 0).all()))
    partial.stop()
    assert partial.left() == []
    receiver.receive_batch(halves()[-1:], 0.2)
    assert [unit for unit, _, _ in partial.left()] == [int(KV.send_order[-1])]
    assert assembler.row_valid[0].any()
    assert not assembler.complete.any()


async def test_after_a_poisoned_repair_all_is_filed_at_the_freeze_and_what_is_gone_is_cleared() -> None:
    receiver, assembler = receiving()
    receiver.receive_batch(halves(), 0.1)
    partial = PartialUnits(receiver, assembler, 0.0, whole_rows=True)
    await until(lambda: bool((assembler.to_units_map() > 0).all()))
    receiver.stats.contradictions = 1
    assert receiver.units is not None
    for sid in range(FRAGMENTS - 1):  # what was decoded of the first unit turns out to be wrong
        receiver.units.withdraw(sid, KV.symbols(KV.layout.symbol_size())[0].symbol(sid))
    left = partial.left()
    assert len(left) == KV.layout.unit_count
    unit, data, ranges = left[-1]
    assert (unit, data, ranges) == (int(KV.send_order[0]), bytes(KV.layout.unit_nbytes(unit)), [])
    partial.stop()


async def test_stopped_it_files_nothing() -> None:
    receiver, assembler = receiving()
    receiver.receive_batch(halves(), 0.1)
    partial = PartialUnits(receiver, assembler, 600.0, whole_rows=False)
    partial.stop()
    partial.stop()
    assert not assembler.to_units_map().any()
    assert len(partial.left()) == KV.layout.unit_count
