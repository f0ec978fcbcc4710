"""A cache made ready to send: packed, scored and ordered before the deadline clock starts.

Packing 35 MB costs tens of milliseconds and a hand-off may have 200: so everything that does not depend on the peer is
done here, once, and the result can be sent to several peers. What does depend on the peer (symbol size, receiver mode)
enters as an argument of the methods.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from quic_pfec.fec.codec import Encoder
from quic_pfec.kv.layout import BLOCK_TOKENS, Layout
from quic_pfec.kv.order import check_utility, order_units
from quic_pfec.kv.profile import GENERIC_PROFILE_ID, Profile, generic_utility, unit_utility
from quic_pfec.kv.units import KVArrays, RawArray, all_finite, pack_units
from quic_pfec.wire.errors import LocalError
from quic_pfec.wire.frames import pack_unit_header
from quic_pfec.wire.limits import UNIT_HEADER_SIZE
from quic_pfec.wire.manifest import Manifest

__all__ = [
    "CUSTOM_PROFILE_ID",
    "PreparedKV",
    "SymbolSink",
    "hash_tokens",
    "prepare_arrays",
]

TOKENS_HASH_SIZE: Final = 16
CUSTOM_PROFILE_ID: Final = "custom"
MAX_MODEL_CHARS: Final = 128
MAX_ROPE_CHARS: Final = 64
"""Bounds of the manifest's text fields."""


class SymbolSink(Protocol):
    """Where symbols are written: the codec's encoder, or anything of its shape."""

    def reserve(self) -> memoryview:
        """Writable view of the next symbol, exactly symbol_size bytes, of any content."""

    def commit(self) -> int:
        """Accept the reserved symbol and return its id; ids count from 0."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedKV:
    """A packed cache with everything its manifest says. Made by `prepare_arrays`; its arrays are read-only.

    - `send_order`: unit ids in the order of sending, int32 [unit_count]
    - `utility`: of each unit by unit id, float64 [unit_count], sum 1
    - `packed`, `offsets`: the i-th unit *sent* is `packed[offsets[i]:offsets[i + 1]]`, digest included
    - `tokens`: ids of the whole context, uint32 [first_token + tokens], or None; `tokens_hash` is empty then
    - `dtype`: of the cache itself; `layout.wire_dtype` is what travels
    """

    layout: Layout
    dtype: str
    model: str
    rope: str
    order: str
    profile: str
    send_order: npt.NDArray[np.int32]
    utility: npt.NDArray[np.float64]
    packed: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.uint32] | None
    tokens_hash: bytes
    _encoders: dict[int, Encoder] = field(default_factory=dict, repr=False)

    def symbols(self, symbol_size: int) -> tuple[Encoder, npt.NDArray[np.int32]]:
        """An encoder holding all symbols in the order of sending, made once for a size, and the unit of each symbol.

        It may serve several transfers: repairs only read it.
        """
        if symbol_size not in self._encoders:
            encoder = Encoder(symbol_size, self.layout.symbols(symbol_size))
            self.fill(encoder, symbol_size)
            self._encoders[symbol_size] = encoder
        return self._encoders[symbol_size], self.sid_units(symbol_size)[0]

    def manifest(self, symbol_size: int, missing: str, base: int = 0) -> Manifest:
        """Manifest of this hand-off. `missing` is the receiver mode, `base` the handle it extends (0 = none)."""
        layout = self.layout
        return Manifest(
            model=self.model,
            tokens=layout.tokens,
            first_token=layout.first_token,
            base=base,
            block_tokens=layout.block_tokens,
            dtype=self.dtype,
            wire_dtype=layout.wire_dtype,
            layers=layout.layer_runs(),
            symbol_size=symbol_size,
            symbols=layout.symbols(symbol_size),
            order=self.order,
            missing=missing,
            profile=self.profile,
            tokens_hash=self.tokens_hash,
            rope=self.rope,
        )

    def unit_at(self, position: int) -> tuple[int, memoryview]:
        """Unit id and bytes, digest included, of the unit sent at `position`: for a peer that takes no symbols."""
        start, stop = int(self.offsets[position]), int(self.offsets[position + 1])
        return int(self.send_order[position]), self.packed.data[start:stop]

    def fill(self, sink: SymbolSink, symbol_size: int) -> int:
        """Write every source symbol into an empty `sink`, in the order of sending; returns N.

        A symbol is the 4-byte unit header and the payload, the last fragment of a unit padded with zeros. Payload goes
        from `packed` to the sink in one copy. Raises LocalError if the sink was not empty.
        """
        counts = self.layout.fragment_counts(symbol_size)
        payload = symbol_size - UNIT_HEADER_SIZE
        packed = self.packed.data
        bounds = self.offsets.tolist()
        sid = 0
        for position, unit in enumerate(self.send_order.tolist()):
            start, stop = bounds[position], bounds[position + 1]
            for fragment in range(int(counts[unit])):
                end = min(start + payload, stop)
                slot = sink.reserve()
                slot[:UNIT_HEADER_SIZE] = pack_unit_header(unit, fragment)
                filled = UNIT_HEADER_SIZE + end - start
                slot[UNIT_HEADER_SIZE:filled] = packed[start:end]
                if filled < symbol_size:
                    slot[filled:] = bytes(symbol_size - filled)
                if sink.commit() != sid:
                    raise LocalError("the symbols of a hand-off are numbered from 0: the encoder was not empty")
                sid += 1
                start = end
        return sid

    def sid_units(self, symbol_size: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Unit (int32) and fragment (uint8) of every source symbol by its id: two arrays [N]."""
        counts = self.layout.fragment_counts(symbol_size)[self.send_order]
        first = np.cumsum(counts) - counts
        fragment = np.arange(int(counts.sum())) - np.repeat(first, counts)
        return np.repeat(self.send_order, counts), fragment.astype(np.uint8)


def prepare_arrays(
    arrays: Sequence[tuple[RawArray, RawArray]],
    *,
    dtype: str,
    model: str,
    wire_dtype: str = "bf16",
    order: str = "utility",
    profile: Profile | None = None,
    utility: npt.NDArray[np.float64] | None = None,
    tokens: Sequence[int] | npt.NDArray[np.integer] | None = None,
    first_token: int = 0,
    block_tokens: int = BLOCK_TOKENS,
    rope: str = "",
    sliding_windows: Sequence[int] | None = None,
) -> PreparedKV:
    """Pack a cache for sending.

    `arrays` holds (keys, values) of each layer, `[kv_heads, tokens, head_dim]`: raw bits (uint16 for bf16 and fp16,
    uint32 for fp32) or native float16 and float32. They are the rows from `first_token` on; `tokens` are the ids of
    the whole context, those before `first_token` included. `wire_dtype` is `dtype` itself or bf16.
    The utility of units comes from `profile`, from `utility` (float64 by unit id), or else from `generic_utility`,
    which is a guess; it is kept for scoring also where `order` does not use it.
    Raises LocalError (a ValueError) with one line of reason for anything that cannot be sent: wrong shapes or dtypes,
    an empty cache, a utility of the wrong length, NaN or infinite values.
    """
    cache = KVArrays.of(arrays, dtype)
    if wire_dtype not in (dtype, "bf16"):
        raise LocalError(f"wire_dtype must be {dtype!r} or 'bf16', got {wire_dtype!r}")
    if not model:
        raise LocalError("model is empty: the receiver checks that it runs the same one")
    _check_text("model", model, MAX_MODEL_CHARS)
    _check_text("rope", rope, MAX_ROPE_CHARS)
    layout = Layout(cache.shapes(sliding_windows), cache.tokens, first_token, block_tokens, wire_dtype)
    token_ids = None if tokens is None else _token_ids(tokens, layout)
    scores, profile_id = _score(layout, profile, utility)
    send_order = order_units(layout, order, scores)
    wire = cache.convert(wire_dtype)
    for index, pair in enumerate(wire.layers):
        for name, bits in zip(("keys", "values"), pair, strict=True):
            if not all_finite(bits, wire_dtype):
                raise LocalError(f"layer {index}: {name} hold NaN or infinite values in {wire_dtype}")
    packed, offsets = pack_units(layout, wire, send_order)
    for array in (send_order, scores, packed, offsets):
        array.setflags(write=False)
    prepared = PreparedKV(
        layout=layout,
        dtype=dtype,
        model=model,
        rope=rope,
        order=order,
        profile=profile_id,
        send_order=send_order,
        utility=scores,
        packed=packed,
        offsets=offsets,
        tokens=token_ids,
        tokens_hash=b"" if token_ids is None else hash_tokens(token_ids),
    )
    prepared.symbols(layout.symbol_size())  # the arena of the usual symbol size, outside of any deadline
    return prepared


def hash_tokens(tokens: npt.NDArray[np.uint32]) -> bytes:
    """16-byte hash of token ids, the manifest's `tokens_hash`: BLAKE2b-128 of the ids as little-endian uint32.

    It lets the receiver see that both ends mean the same text; a cryptographic hash, as the receiver acts on equality.
    """
    ids = np.ascontiguousarray(tokens, dtype="<u4")
    return hashlib.blake2b(ids.tobytes(), digest_size=TOKENS_HASH_SIZE, person=b"quic_pfec/tokens").digest()


def _score(
    layout: Layout, profile: Profile | None, utility: npt.NDArray[np.float64] | None
) -> tuple[npt.NDArray[np.float64], str]:
    if profile is not None and utility is not None:
        raise LocalError("give a profile or a utility for each unit, not both")
    if utility is not None:
        scores, profile_id = np.array(utility, dtype=np.float64), CUSTOM_PROFILE_ID
    elif profile is not None:
        scores, profile_id = unit_utility(layout, profile), profile.id
    else:
        scores, profile_id = generic_utility(layout), GENERIC_PROFILE_ID
    check_utility(layout, scores)
    scores /= scores.max()  # first to a range whose sum cannot overflow
    return scores / scores.sum(), profile_id


def _token_ids(tokens: Sequence[int] | npt.NDArray[np.integer], layout: Layout) -> npt.NDArray[np.uint32]:
    ids = np.asarray(tokens)
    if ids.shape != (layout.context_tokens,):
        raise LocalError(f"tokens have shape {list(ids.shape)}, the context has {layout.context_tokens} tokens")
    if not np.issubdtype(ids.dtype, np.integer):
        raise LocalError(f"tokens must be integers, got {ids.dtype}")
    if int(ids.min()) < 0 or int(ids.max()) >= 1 << 32:
        raise LocalError("token ids must lie in 0 .. 2^32 - 1")
    ids = ids.astype(np.uint32)
    ids.setflags(write=False)
    return ids


def _check_text(name: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise LocalError(f"{name} has {len(text)} characters, at most {limit}")
    if not text.isprintable():
        raise LocalError(f"{name} is not printable")
