"""Which elements and rows of a cache a set of packets amounts to, without sending a byte.

The simulator knows which symbols a receiver ends up with; what the model sees are elements and rows. The rules are
those of `assemble`, applied to all units at once: an element counts if all its bytes and those of its scale came, a row
of a head if its keys and values wholly came. In the progressive form those are the rows of bases, and a block is finer
if base and refinement wholly came. Used to judge thousands of simulated hand-offs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quic_pfec.kv.layout import Layout
from quic_pfec.kv.units import form_of
from quic_pfec.wire.errors import LocalError
from quic_pfec.wire.limits import UNIT_HEADER_SIZE

__all__ = ["complete_units", "fragments_by_unit", "kept_elements", "kept_rows", "refined_rows"]

Bits = npt.NDArray[np.bool_]


def fragments_by_unit(layout: Layout, symbol_size: int, send_order: npt.NDArray[np.int32], known: Bits) -> Bits:
    """Symbols known by id, bool [N], sent in `send_order`, as bool [unit_count, fragments]: row u is unit u.

    Units with fewer fragments than the largest have False in the places they do not use. Raises LocalError if `known`
    does not have one entry for each symbol.
    """
    counts = layout.fragment_counts(symbol_size)
    sent = counts[send_order]
    if known.shape != (int(sent.sum()),):
        raise LocalError(f"known has shape {list(known.shape)}, the hand-off {int(sent.sum())} symbols")
    by_unit = np.zeros((layout.unit_count, int(counts.max())), dtype=np.bool_)
    fragment = np.arange(len(known)) - np.repeat(np.cumsum(sent) - sent, sent)
    by_unit[np.repeat(send_order, sent), fragment] = known
    return by_unit


def kept_elements(layout: Layout, symbol_size: int, fragments: Bits) -> list[Bits]:
    """Elements all of whose bytes, and those of their scales, came.

    Per layer bool [kv_heads, tokens, 2, head_dim], keys first. `fragments`: bool [unit_count, fragments], see
    `fragments_by_unit`. In the progressive form the elements of bases; `refined_rows` tells which are finer.
    """
    payload = symbol_size - UNIT_HEADER_SIZE
    by_layer = fragments[: layout.block_count].reshape(len(layout.layers), layout.columns, -1)
    kept = []
    for layer, (shape, held) in enumerate(zip(layout.layers, by_layer, strict=True)):
        form = form_of(layout, layer)
        # A short last unit ends early: of its bytes past the end, and their rows, nothing is kept.
        places = np.minimum(np.arange(form.body_nbytes(layout.block_tokens)) // payload, held.shape[1] - 1)
        elements = form.elements(held[:, places])
        rows = elements.reshape(-1, shape.kv_heads, 2, shape.head_dim)[: layout.tokens]
        kept.append(np.ascontiguousarray(rows.transpose(1, 0, 2, 3)))
    return kept


def complete_units(layout: Layout, symbol_size: int, fragments: Bits) -> Bits:
    """Units all of whose symbols came, bool [unit_count]. `fragments` as of `fragments_by_unit`."""
    complete: Bits = fragments.sum(axis=1) == layout.fragment_counts(symbol_size)
    return complete


def refined_rows(layout: Layout, symbol_size: int, fragments: Bits) -> list[Bits]:
    """Rows of blocks of which base and refinement wholly came, in the progressive form: per layer bool [tokens].

    Raises LocalError for a wire dtype of one precision.
    """
    if len(layout.forms) < 2:
        raise LocalError(f"{layout.wire_dtype} has no refinements")
    finer = complete_units(layout, symbol_size, fragments).reshape(2, len(layout.layers), layout.columns).all(axis=0)
    rows = np.repeat(finer, layout.block_tokens, axis=1)[:, : layout.tokens]
    return list(np.ascontiguousarray(rows))


def kept_rows(elements: list[Bits]) -> list[Bits]:
    """Rows of a head whose keys and values wholly came: per layer bool [kv_heads, tokens]."""
    return [np.asarray(layer.all(axis=(2, 3))) for layer in elements]
