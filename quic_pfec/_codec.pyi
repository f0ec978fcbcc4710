"""The native codec: GF(2^8) streaming random-linear code over symbols of one size.

Repair headers are eight integers-and-a-bitmap as in the REPAIR frame (docs/wire.md §4): `transfer_id` < 2^62,
`repair_number` < 2^32, `first_sid`, `degree` >= 1, `head_span` SIDs covered by `head` (bit i of byte j is SID
first_sid + 8j + i; first and last covered bit set, unused bits clear), `tail_span` SIDs from
first_sid + head_span + tail_offset on. Span = head_span + tail_offset + tail_span <= 16,384. Anything else is a
ValueError.
"""

from collections.abc import Iterable
from typing import Any, NoReturn, TypeAlias, final

import numpy as np
import numpy.typing as npt

_Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[Any]
_Bytes: TypeAlias = npt.NDArray[np.uint8]

SOURCE_NEW: int
SOURCE_DUPLICATE: int
SOURCE_CONFLICT: int
SOURCE_REPLACED: int
REPAIR_INNOVATIVE: int
REPAIR_REDUNDANT: int
REPAIR_TOO_COSTLY: int
REPAIR_CONTRADICTS: int
INTAKE_END: int
INTAKE_ODD: int
INTAKE_CONTRADICTS: int

def isa() -> str:
    """Name of the kernels in use: the best of `isa_levels()`, or the one QUIC_PFEC_ISA named at import."""

def isa_levels() -> list[str]:
    """Levels this build and processor have, slowest first; "scalar" always."""

def expand(
    transfer_id: int,
    repair_number: int,
    first_sid: int,
    degree: int,
    head_span: int,
    head: bytes,
    tail_offset: int,
    tail_span: int,
) -> list[tuple[int, int]]:
    """Terms of a repair as (SID, coefficient in 1..255), ascending, at most `degree` (docs/wire.md §5).

    ValueError if the header is not legal; SIDs must stay below 2^30.
    """

def scatter_unit(run: Any, first: int, unit: int, body: _Buffer, tail: _Buffer = b"") -> int:
    """Cut a unit, `body` and `tail` joined, into symbols: the rows of `run` from `first` on. Returns how many.

    `run` is a writable array of bytes [slots, symbol_size] with contiguous rows, as `Encoder.reserve_run` gives it. A
    symbol is the unit header (docs/wire.md: 24 bits of `unit`, 8 of the fragment) and symbol_size - 4 bytes; the last
    one is filled up with zeros. `body` must not lie in `run`. ValueError: a unit of no or more than 256 symbols, an id
    of more than 24 bits, a run that is read-only, of another shape, or too short.
    """

@final
class Encoder:
    """The symbols of one transfer, and repairs over them.

    `symbol_size` in bytes, 1..65,535; `capacity` in symbols, 1..2^24. Memory is touched only as symbols come. SIDs are
    given in order from 0. `repairs` works without the interpreter lock; any other use of the object meanwhile raises
    RuntimeError.
    """

    def __init__(self, symbol_size: int, capacity: int) -> None: ...
    def __reduce__(self) -> NoReturn: ...
    @property
    def symbol_size(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def count(self) -> int:
        """Symbols held; the next SID."""

    def push(self, data: _Buffer) -> int:
        """Copy a symbol of exactly `symbol_size` bytes; returns its SID.

        ValueError: wrong length, arena full, or a reserved slot not committed.
        """

    def reserve(self) -> memoryview:
        """Writable view of the next slot, `symbol_size` bytes, to be filled in place before `commit()`.

        The view ends with the commit. Asked again before, the same slot comes in a new view and the earlier one ends.
        ValueError when the arena is full.
        """

    def commit(self) -> int:
        """Make the reserved slot a symbol; returns its SID.

        ValueError if nothing is reserved, or while something made from the view (a slice, an array) lives: it could
        write to a symbol that is on its way. Drop it and reserve again then; what was written is still there.
        """

    def reserve_run(self, count: int) -> memoryview:
        """Writable view of the next `count` slots, uint8 [count, symbol_size], rows apart by the stride of the arena.

        All of its memory is there when this returns, by large pages where the system has them: for packing a whole
        transfer in any order. Otherwise as `reserve`; `commit_run()` ends it. ValueError if so many do not fit.
        """

    def commit_run(self) -> int:
        """Make the slots of the run symbols; returns the SID of the first. ValueError as `commit`."""

    def symbol(self, sid: int) -> memoryview:
        """Read-only view, valid as long as it is held. KeyError if sid >= count."""

    def symbol_into(self, sid: int, out: bytearray | memoryview | npt.NDArray[Any], offset: int) -> None:
        """Write a symbol, `symbol_size` bytes, into the contiguous buffer `out` from byte `offset` on.

        KeyError if sid >= count. ValueError: `out` read-only, or too short.
        """

    def gather(self, first_sid: int, nbytes: int) -> bytes:
        """The first `nbytes` of the unit cut into the symbols from `first_sid` on (see `scatter_unit`), in one copy.

        KeyError if they reach beyond `count`; ValueError for no bytes, or symbols of 4 bytes or less.
        """

    def repair(
        self,
        transfer_id: int,
        repair_number: int,
        first_sid: int,
        degree: int,
        head_span: int,
        head: bytes,
        tail_offset: int,
        tail_span: int,
    ) -> bytes:
        """The repair symbol of a header, `symbol_size` bytes. ValueError as `expand`, or if it names SIDs >= count."""

    def repair_into(
        self,
        transfer_id: int,
        repair_number: int,
        first_sid: int,
        degree: int,
        head_span: int,
        head: bytes,
        tail_offset: int,
        tail_span: int,
        out: bytearray | memoryview | npt.NDArray[Any],
        offset: int,
    ) -> None:
        """Write the repair symbol of a header into `out` from byte `offset` on. Errors: `repair`, `symbol_into`."""

    def repairs(
        self,
        count: int,
        transfer_id: int,
        repair_number: int,
        first_sid: int,
        degree: int,
        head_span: int,
        head: bytes,
        tail_offset: int,
        tail_span: int,
    ) -> list[bytes]:
        """A burst of `count` (1..64) repairs over one coding set, numbered from `repair_number`, in one call.

        Equal to as many calls of `repair`, without the interpreter lock. ValueError as `repair`, or if the last number
        does not fit 32 bits.
        """

@final
class Decoder:
    """Recovers symbols of one transfer from sources and repairs, each as early as it is determined.

    `symbol_size` in bytes, 1..65,535; `capacity` in symbols, 1..2^24. Limits (security section 2): `max_unknown`
    unknown SIDs that held repairs may name together, 1..4,096; `max_degree` and `max_span` of one repair, 1..16,384;
    `row_ops_per_repair` operations on coefficient rows one repair may cause. ValueError beyond them.

    A determined symbol becomes known when `poll` computes it, not before. `poll` works without the interpreter lock;
    any other use of the object meanwhile raises RuntimeError.
    """

    def __init__(
        self,
        symbol_size: int,
        capacity: int,
        *,
        max_unknown: int = 512,
        max_degree: int = 255,
        max_span: int = 4096,
        row_ops_per_repair: int = 1024,
    ) -> None: ...
    def __reduce__(self) -> NoReturn: ...
    def source(self, sid: int, data: _Buffer) -> int:
        """Take a received symbol of exactly `symbol_size` bytes. Returns a `SourceOutcome` value.

        ValueError: sid >= capacity or wrong length.
        """

    def repair(
        self,
        transfer_id: int,
        repair_number: int,
        first_sid: int,
        degree: int,
        head_span: int,
        head: bytes,
        tail_offset: int,
        tail_span: int,
        data: _Buffer,
    ) -> int:
        """Take a received repair. Returns a `RepairOutcome` value; a dropped one changes only counters and `highest`.

        ValueError: header not legal, degree or span above the limits, SIDs >= capacity, wrong length of `data`.
        """

    def receive_batch(self, packets: Iterable[tuple[Any, ...]]) -> list[int]:
        """Take several packets, in their order: (sid, data) is a source, the eight header fields and data a repair.

        Returns one `SourceOutcome` or `RepairOutcome` value a packet, as `source` and `repair` would; works without the
        interpreter lock. ValueError and TypeError as theirs, before any packet was taken.
        """

    def poll(self, max_symbols: int, order: Iterable[int] | None = None, *, max_macs: int | None = None) -> list[int]:
        """Compute at most `max_symbols` determined symbols and return their SIDs.

        Those of `order` come first, in its order; the others follow by ascending SID. SIDs in `order` that are not
        determined are passed over. One symbol costs at most about 3 * max_unknown multiply-adds, normally a few dozen:
        slices of 32 keep an event loop responsive. Where the kernels are slow, `max_macs` (1..2^32 - 1) bounds a slice
        by its work: none is begun once that many multiply-adds are done (8 to 80 ns each by level, 0.7 us scalar).
        """

    @property
    def pending(self) -> int:
        """Symbols determined and not yet computed."""

    def symbol(self, sid: int) -> memoryview:
        """Read-only view, valid as long as it is held. KeyError if the symbol is not known.

        The bytes under a view change in one case only: `source` returns REPLACED for that SID.
        """

    def known(self, sid: int) -> bool:
        """Received or decoded."""

    def received(self, sid: int) -> bool:
        """Received as a source, before or after it was decoded."""

    @property
    def symbol_size(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def prefix(self) -> int:
        """All SIDs below are known; this one is not."""

    @property
    def highest(self) -> int:
        """One past the highest SID that was received or lies in the coding set of any repair."""

    @property
    def rank(self) -> int:
        """Independent repairs held, those of pending symbols included."""

    @property
    def deficit(self) -> int:
        """Unknown SIDs below `highest`, minus `rank`: how many more useful packets complete the transfer so far."""

    @property
    def unknown_columns(self) -> int:
        """Unknown SIDs that held repairs name; at most `max_unknown`."""

    def known_ranges(self, max_ranges: int) -> list[tuple[int, int]]:
        """The first `max_ranges` runs [start, stop) of known SIDs above `prefix`, ascending."""

    def known_bitmap(self) -> bytes:
        """Bit i of byte j: SID 8j + i is known. ceil(capacity / 8) bytes."""

    def grow(self, capacity: int) -> None:
        """Raise the capacity. ValueError if it is below the present one, or while a view of a symbol is held.

        The present capacity is accepted and changes nothing.
        """

    @property
    def payload_macs(self) -> int:
        """That counter alone."""

    def counters(self) -> dict[str, int]:
        """Work and events since the beginning.

        redundant, rejected (beyond a limit), contradictions: repairs dropped. row_operations: on coefficient rows.
        payload_macs: multiply-adds over a symbol. recovered: symbols decoded. discarded: held repairs thrown away
        because a decoded symbol proved wrong. compactions: of the stored repairs (rare), each
        spread over many calls.
        """

@final
class Intake:
    """The way of received packets into a decoder and, once the units are known, into their places; see `take`.

    `useless_repairs` >= 0: so many redundant repairs are taken beyond the useful packets; further ones are dropped
    unseen. One thread at a time, as the decoder.
    """

    useless_left: int
    """Redundant repairs that will still be taken; a useful packet earns another one, up to `most_useless`."""
    highest: int
    """One past the highest SID taken as a source."""
    def __init__(self, decoder: Decoder, useless_repairs: int) -> None: ...
    def __reduce__(self) -> NoReturn: ...
    @property
    def most_useless(self) -> int: ...
    def bind(
        self,
        sizes: npt.NDArray[np.int64],
        base: npt.NDArray[np.int64],
        sid_of: npt.NDArray[np.int32],
        missing: npt.NDArray[np.int64],
    ) -> None:
        """File symbols under their units from now on, in arrays that the caller shares and may change between calls.

        sizes [units]: bytes of each unit; base [units + 1]: index into `sid_of` of its first fragment;
        sid_of [base[-1]]: the SID that is this fragment, -1 = none; missing [units]: fragments not there yet.
        ValueError if they do not belong together or to the symbol size.
        """

    def take(self, packets: list[tuple[Any, ...]], start: int, end: int) -> tuple[int, int]:
        """Take packets from index `start` on, up to the first that calls for a judgement: (next index, what).

        A packet is (sid, symbol) or the eight fields of a repair header and the symbol; buffers are read during the
        call alone. SIDs must be below `end`. `what` is INTAKE_END: all were taken; a unit id >= 0: the last packet
        taken completed it; INTAKE_CONTRADICTS: the last one taken contradicts a received symbol; INTAKE_ODD: the packet
        at the index was left untouched, because a size, a SID, a header, a known symbol of other bytes or the claim to
        a fragment is not plain.
        """

    def place(self, sids: list[int], start: int) -> tuple[int, int]:
        """File known symbols under their units from index `start` on; as `take`, with INTAKE_ODD for a claim alone.

        KeyError for a symbol that is not known.
        """

    def collect(self, unit: int) -> bytes:
        """The bytes of a unit, zeros where no fragment came, in one copy."""

    def counts(self) -> tuple[int, int, int, int, int, bool]:
        """Since the last call: sources, duplicates, repairs useful, useless, dropped; whether a source left a gap."""

def _multiply(a: int, b: int) -> int: ...
def _inverse(a: int) -> int: ...
def _axpy(level: str, y: _Bytes, x: _Bytes, c: int) -> None: ...
def _scal(level: str, y: _Bytes, c: int) -> None: ...
def _dot(level: str, y: _Bytes, sources: list[_Bytes], coefficients: bytes) -> None: ...
