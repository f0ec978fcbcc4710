"""What a hand-off achieved, in the two measures of the project.

J_block is the utility of complete units over all utility: the paper's definition. J_frac weighs each unit by the share
of its symbols that is there. The receiver knows no utilities, so it reports bitmaps and the sender computes both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

DIGEST_MASK = (1 << 62) - 1  # what a varint holds


@dataclass(frozen=True, slots=True)
class Outcome:
    """The state of the receiver's freeze. j_block, j_frac in [0, 1]; unit_share: float64 per unit id, share present."""

    j_block: float
    j_frac: float
    units_complete: int
    units_partial: int
    units_missing: int
    unit_share: NDArray[np.float64]


def bits(data: bytes, count: int) -> NDArray[np.bool_]:
    """The first `count` bits of a bitmap, bit i of byte j being number 8j + i; missing bytes are zeros."""
    array = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little").astype(np.bool_)
    if len(array) >= count:
        return array[:count]
    return np.concatenate((array, np.zeros(count - len(array), dtype=np.bool_)))


def to_bitmap(flags: NDArray[np.bool_]) -> bytes:
    """The inverse of `bits`."""
    return np.packbits(flags, bitorder="little").tobytes()


def symbols_digest(sids: Iterable[int], symbol: Callable[[int], memoryview]) -> int:
    """Low 62 bits of xxh3_64 over the symbols in the order given: whether both ends hold the same bytes."""
    state = xxhash.xxh3_64()
    for sid in sids:
        state.update(symbol(sid))
    return state.intdigest() & DIGEST_MASK


def outcome(
    known: NDArray[np.bool_],
    complete: NDArray[np.bool_],
    unit_of_sid: NDArray[np.int32],
    utility: NDArray[np.float64],
) -> Outcome:
    """Judges a freeze. known: bool per sid; complete: bool per unit id; utility: per unit id, any scale."""
    total = np.bincount(unit_of_sid, minlength=len(utility))
    present = np.bincount(unit_of_sid[known[: len(unit_of_sid)]], minlength=len(utility))
    share = present / np.maximum(1, total)
    share[(share == 1) & ~complete] = 0.0  # all there, but its digest or its values were wrong: no use
    weight = max(float(utility.sum()), 1e-300)
    partial = (share > 0) & ~complete
    return Outcome(
        j_block=float((utility * complete).sum()) / weight,
        j_frac=float((utility * share).sum()) / weight,
        units_complete=int(complete.sum()),
        units_partial=int(partial.sum()),
        units_missing=int((~complete & ~partial).sum()),
        unit_share=share,
    )
