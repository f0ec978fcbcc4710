"""A cache made ready to send: packed, scored and ordered before the deadline clock starts.

Packing 35 MB costs tens of milliseconds and a hand-off may have 200: so everything that does not depend on the peer is
done here, once, and the result can be sent to several peers. The packed cache exists once, as the symbols in the arena
of an encoder. What does depend on the peer (symbol size, receiver mode) enters as an argument of the methods.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from quic_pfec.fec.codec import Encoder, scatter_unit
from quic_pfec.kv.layout import BLOCK_TOKENS, Layout
from quic_pfec.kv.order import check_utility, order_units, spread_utility
from quic_pfec.kv.profile import GENERIC_PROFILE_ID, Profile, generic_utility, unit_utility
from quic_pfec.kv.units import KVArrays, RawArray, pack_symbols
from quic_pfec.wire.errors import LocalError
from quic_pfec.wire.manifest import QUANTISED, WIRE_DTYPES, Manifest, cast_problem

__all__ = [
    "CUSTOM_PROFILE_ID",
    "PreparedKV",
    "hash_tokens",
    "prepare_arrays",
]

TOKENS_HASH_SIZE: Final = 16
CUSTOM_PROFILE_ID: Final = "custom"
MAX_MODEL_CHARS: Final = 128
MAX_ROPE_CHARS: Final = 64
"""Bounds of the manifest's text fields."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedKV:
    """A packed cache with everything its manifest says. Made by `prepare_arrays`; its arrays are read-only.

    - `send_order`: unit ids in the order of sending, int32 [unit_count]
    - `utility`: of each unit by unit id, float64 [unit_count], sum 1
    - `symbol_size`: bytes of the symbols it was packed into, header included; `symbols` gives others where a path is
      too narrow for them
    - `tokens`: ids of the whole context, uint32 [first_token + tokens], or None; `tokens_hash` is empty then
    - `dtype`: of the cache itself; `layout.wire_dtype` is what travels
    - `saturated`: values beyond the range of a quantised wire dtype, sent as the nearest that it holds
    """

    layout: Layout
    dtype: str
    model: str
    rope: str
    order: str
    profile: str
    send_order: npt.NDArray[np.int32]
    utility: npt.NDArray[np.float64]
    symbol_size: int
    tokens: npt.NDArray[np.uint32] | None
    tokens_hash: bytes
    saturated: int
    _encoder: Encoder = field(repr=False)
    _first_sid: npt.NDArray[np.int64] = field(repr=False)
    _others: dict[int, Encoder] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all units, digests included: what a hand-off carries without its headers."""
        return int(self.layout.unit_sizes().sum())

    def symbols(self, symbol_size: int) -> tuple[Encoder, npt.NDArray[np.int32]]:
        """An encoder holding all symbols in the order of sending, and the unit of each symbol, int32 [N].

        The encoder of `symbol_size` is there from the start, one of another size is made once, from that one. It may
        serve several transfers: repairs only read it.
        """
        return self._encoder_of(symbol_size), self.sid_units(symbol_size)[0]

    def _encoder_of(self, symbol_size: int) -> Encoder:
        if symbol_size == self.symbol_size:
            return self._encoder
        if symbol_size not in self._others:
            encoder = Encoder(symbol_size, self.layout.symbols(symbol_size))
            run = encoder.reserve_run(encoder.capacity)
            sid = 0
            for position in range(self.layout.unit_count):
                sid += scatter_unit(run, sid, *self.unit_at(position))
            encoder.commit_run()
            self._others[symbol_size] = encoder
        return self._others[symbol_size]

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

    def unit_at(self, position: int) -> tuple[int, bytes]:
        """Unit id and bytes, digest included, of the unit sent at `position`: for a peer that takes no symbols."""
        unit = int(self.send_order[position])
        return unit, self._encoder.gather(int(self._first_sid[unit]), self.layout.unit_nbytes(unit))

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
    wire_dtype: str | Callable[[Layout], str] = "bf16",
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
    the whole context, those before `first_token` included. `wire_dtype` is `dtype` itself, bf16, or one of
    `wire.manifest.QUANTISED` (int8, fp8, int4, progressive), or a function that names it, given the layout in bf16.
    The utility of blocks comes from `profile`, from `utility` (float64 by block, layer * columns + column), or else
    from `generic_utility`, which is a guess; it is kept for scoring also where `order` does not use it.
    Raises LocalError (a ValueError) with one line of reason for anything that cannot be sent: wrong shapes or dtypes,
    an empty cache, a utility of the wrong length, NaN or infinite values.
    """
    cache = KVArrays.of(arrays, dtype)
    if callable(wire_dtype):
        wire_dtype = wire_dtype(Layout(cache.shapes(sliding_windows), cache.tokens, first_token, block_tokens))
    if wire_dtype not in WIRE_DTYPES or cast_problem(dtype, wire_dtype):
        ours = dict.fromkeys((dtype, "bf16", *QUANTISED))
        raise LocalError(f"wire_dtype must be one of {', '.join(ours)} for a cache in {dtype}, got {wire_dtype!r}")
    if not model:
        raise LocalError("model is empty: the receiver checks that it runs the same one")
    _check_text("model", model, MAX_MODEL_CHARS)
    _check_text("rope", rope, MAX_ROPE_CHARS)
    layout = Layout(cache.shapes(sliding_windows), cache.tokens, first_token, block_tokens, wire_dtype)
    token_ids = None if tokens is None else _token_ids(tokens, layout)
    scores, profile_id = _score(layout, profile, utility)
    send_order, worth = order_units(layout, order, scores), spread_utility(layout, scores)
    symbol_size = layout.symbol_size()
    encoder = Encoder(symbol_size, layout.symbols(symbol_size))
    first_sid, saturated = pack_symbols(layout, cache, send_order, encoder.reserve_run(encoder.capacity), symbol_size)
    encoder.commit_run()
    for array in (send_order, worth, first_sid):
        array.setflags(write=False)
    return PreparedKV(
        layout=layout,
        dtype=dtype,
        model=model,
        rope=rope,
        order=order,
        profile=profile_id,
        send_order=send_order,
        utility=worth,
        symbol_size=symbol_size,
        tokens=token_ids,
        tokens_hash=b"" if token_ids is None else hash_tokens(token_ids),
        saturated=saturated,
        _encoder=encoder,
        _first_sid=first_sid,
    )


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
