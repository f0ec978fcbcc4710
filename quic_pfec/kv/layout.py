"""Geometry of one hand-off: which bytes of the cache belong to which unit, and how many symbols they make.

Both ends must agree on every number here before a byte of KV is read, so all of it follows from a handful of fields
that travel in the manifest. Units are numbered `layer * columns + column`, a column being `block_tokens` consecutive
tokens; only the last column may be shorter. These are the blocks of a cache; in the progressive wire dtype each block
makes a second unit, which refines the first, and those are numbered behind all of the first kind. The formulas for
sizes live in `wire.manifest`, which checks a peer's claims with them; this module applies the same functions to whole
caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
import numpy.typing as npt

from quic_pfec.wire.errors import LocalError
from quic_pfec.wire.limits import MAX_FRAGMENTS, MAX_UNITS, MIN_SYMBOL_SIZE, UNIT_HEADER_SIZE
from quic_pfec.wire.manifest import (
    ITEM_SIZES,
    MAX_BLOCK_TOKENS,
    QUANTISED,
    WIRE_DTYPES,
    LayerRun,
    Manifest,
    fragments,
    precisions,
    unit_nbytes,
)

__all__ = [
    "BLOCK_TOKENS",
    "MAX_PAYLOAD",
    "LayerShape",
    "Layout",
]

BLOCK_TOKENS: Final = 16
"""Tokens of a full unit (paper section III-B)."""

MAX_PAYLOAD: Final = 1368
"""KV bytes of a symbol at most, by default: the paper's packet; an MTU of 1,500 holds it (docs/wire.md §3)."""


PACKET_OVERHEAD: Final = 70
"""Bytes of a packet beside its KV, about, IP header included: what few large symbols spare against more small ones."""
MORE_PARTS: Final = 4
"""Fragments of a unit that are tried: from the fewest possible on, so many numbers."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of one layer's cache. `sliding_window` is the attention window in tokens, 0 = full attention."""

    kv_heads: int
    head_dim: int
    sliding_window: int = 0

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.head_dim < 1:
            raise LocalError(f"kv_heads and head_dim must be at least 1, got {self.kv_heads} x {self.head_dim}")
        if self.sliding_window < 0:
            raise LocalError(f"sliding_window must be 0 (full attention) or positive, got {self.sliding_window}")


@dataclass(frozen=True, slots=True)
class Layout:
    """Geometry of the rows `first_token .. first_token + tokens` of a cache, for every layer.

    `tokens` counts the rows of this hand-off and `first_token` the rows that the receiver already holds (0 unless it
    extends an earlier hand-off). Raises LocalError for impossible numbers.
    """

    layers: tuple[LayerShape, ...]
    tokens: int
    first_token: int = 0
    block_tokens: int = BLOCK_TOKENS
    wire_dtype: str = "bf16"

    def __post_init__(self) -> None:
        if not self.layers:
            raise LocalError("the cache has no layers")
        if self.tokens < 1:
            raise LocalError(f"the cache is empty: {self.tokens} tokens")
        if self.first_token < 0:
            raise LocalError(f"first_token must not be negative, got {self.first_token}")
        if not 1 <= self.block_tokens <= MAX_BLOCK_TOKENS:
            raise LocalError(f"block_tokens must be 1 to {MAX_BLOCK_TOKENS}, got {self.block_tokens}")
        if self.wire_dtype not in WIRE_DTYPES:
            raise LocalError(f"unknown dtype {self.wire_dtype!r}, expected one of {', '.join(WIRE_DTYPES)}")
        if self.unit_count > MAX_UNITS:
            raise LocalError(f"{self.unit_count} units do not fit in 24 bits: raise block_tokens")

    @property
    def columns(self) -> int:
        """Token columns: ceil(tokens / block_tokens)."""
        return -(-self.tokens // self.block_tokens)

    @property
    def block_count(self) -> int:
        """Blocks: layers x columns. The ids of their first units are 0 .. block_count - 1."""
        return len(self.layers) * self.columns

    @property
    def forms(self) -> tuple[str, ...]:
        """How the units of each precision are written (`wire.manifest.precisions`)."""
        return precisions(self.wire_dtype)

    @property
    def unit_count(self) -> int:
        """Units: one for each block and precision."""
        return len(self.forms) * self.block_count

    @property
    def quantised(self) -> bool:
        """Whether units hold codes and scales (`kv.quantise`) instead of the elements as they are."""
        return self.wire_dtype in QUANTISED

    @property
    def context_tokens(self) -> int:
        """Length of the context once this hand-off is complete."""
        return self.first_token + self.tokens

    def precision_of(self, unit: int) -> int:
        """0, or 1 for a unit that refines another. Raises LocalError if there is no such unit."""
        self._check(unit)
        return unit // self.block_count

    def layer_of(self, unit: int) -> int:
        """Layer of a unit id. Raises LocalError if there is no such unit."""
        self._check(unit)
        return unit % self.block_count // self.columns

    def column_of(self, unit: int) -> int:
        """Token column of a unit id. Raises LocalError if there is no such unit."""
        self._check(unit)
        return unit % self.columns

    def row_range(self, unit: int) -> tuple[int, int]:
        """Rows [start, stop) of the unit, counted from the first row of this hand-off."""
        start = self.column_of(unit) * self.block_tokens
        return start, min(start + self.block_tokens, self.tokens)

    def rows(self, unit: int) -> int:
        """Token rows in the unit: block_tokens, fewer only in the last column."""
        start, stop = self.row_range(unit)
        return stop - start

    def unit_nbytes(self, unit: int) -> int:
        """Bytes of the unit, its 8-byte digest included."""
        shape = self.layers[self.layer_of(unit)]
        form = self.forms[self.precision_of(unit)]
        return unit_nbytes(shape.kv_heads, shape.head_dim, self.rows(unit), form)

    def unit_sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of every unit by unit id, digests included: int64 [unit_count]."""
        sizes = np.empty((len(self.forms), len(self.layers), self.columns), dtype=np.int64)
        last_rows = self.tokens - (self.columns - 1) * self.block_tokens
        for form, of_form in zip(self.forms, sizes, strict=True):
            for layer, shape in enumerate(self.layers):
                of_form[layer, :-1] = unit_nbytes(shape.kv_heads, shape.head_dim, self.block_tokens, form)
                of_form[layer, -1] = unit_nbytes(shape.kv_heads, shape.head_dim, last_rows, form)
        return sizes.reshape(-1)

    def cache_nbytes(self, dtype: str) -> int:
        """Bytes of these rows as a cache of `dtype` holds them: bf16, fp16 or fp32."""
        elements = sum(self.tokens * shape.kv_heads * 2 * shape.head_dim for shape in self.layers)
        return elements * ITEM_SIZES[dtype]

    def symbol_size(self, max_payload: int = MAX_PAYLOAD) -> int:
        """Symbol size in bytes, unit header included, at which the largest unit divides evenly (docs/wire.md §3).

        `max_payload` is what the path leaves for KV bytes. The number of packets is the same as with the largest
        symbol, without its padding. Where blocks make units of two sizes it is the size at which they cost the fewest
        bytes together, packet overhead included. Raises LocalError if a unit would need more fragments than can be
        numbered.
        """
        least = MIN_SYMBOL_SIZE - UNIT_HEADER_SIZE
        if max_payload < least:
            raise LocalError(f"max_payload must be at least {least} bytes, got {max_payload}")
        largest = int(self.unit_sizes().max())
        count = -(-largest // max_payload)
        if count > MAX_FRAGMENTS:
            raise LocalError(
                f"a unit of {largest} bytes takes {count} symbols, over {MAX_FRAGMENTS}: lower block_tokens"
            )
        if len(self.forms) > 1:
            return self._symbol_size_of_forms(max_payload)
        return max(MIN_SYMBOL_SIZE, UNIT_HEADER_SIZE + -(-largest // count))

    def _symbol_size_of_forms(self, max_payload: int) -> int:
        sizes, counts = np.unique(self.unit_sizes(), return_counts=True)
        found: list[tuple[int, int]] = []
        for nbytes in self.unit_sizes().reshape(len(self.forms), -1).max(axis=1).tolist():
            least = -(-nbytes // max_payload)
            for parts in range(least, least + MORE_PARTS):
                payload = max(MIN_SYMBOL_SIZE - UNIT_HEADER_SIZE, -(-nbytes // parts))
                pieces = -(-sizes // payload)
                if pieces.max() <= MAX_FRAGMENTS:
                    cost = int((pieces * counts).sum()) * (payload + PACKET_OVERHEAD)
                    found.append((cost, -(payload + UNIT_HEADER_SIZE)))
        return -min(found)[1]

    def fragment_counts(self, symbol_size: int) -> npt.NDArray[np.int32]:
        """Symbols of every unit by unit id: int32 [unit_count]. Raises LocalError if a unit takes more than 256."""
        sizes, where = np.unique(self.unit_sizes(), return_inverse=True)
        counts = np.array([fragments(int(nbytes), symbol_size) for nbytes in sizes], dtype=np.int32)
        if counts.max() > MAX_FRAGMENTS:
            raise LocalError(f"a unit takes {counts.max()} symbols of {symbol_size} bytes, at most {MAX_FRAGMENTS}")
        return counts[where]

    def symbols(self, symbol_size: int) -> int:
        """N: source symbols of the whole hand-off."""
        return int(self.fragment_counts(symbol_size).sum(dtype=np.int64))

    def layer_runs(self) -> tuple[LayerRun, ...]:
        """The layers as the manifest writes them: runs of equal consecutive ones."""
        return tuple(
            LayerRun(
                count=sum(1 for _ in run),
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                sliding_window=shape.sliding_window,
            )
            for shape, run in groupby(self.layers)
        )

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> Layout:
        """Layout described by a manifest, which must have passed `wire.manifest.decode_manifest`."""
        return cls(
            layers=tuple(
                LayerShape(run.kv_heads, run.head_dim, run.sliding_window)
                for run in manifest.layers
                for _ in range(run.count)
            ),
            tokens=manifest.tokens,
            first_token=manifest.first_token,
            block_tokens=manifest.block_tokens,
            wire_dtype=manifest.wire_dtype,
        )

    def _check(self, unit: int) -> None:
        if not 0 <= unit < self.unit_count:
            raise LocalError(f"no unit {unit}: the layout has {self.unit_count}")
