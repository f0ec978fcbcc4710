"""Wire dtypes that no cache has: int8, fp8 and int4, made by the sender and turned back by the receiver.

Half the bytes or a third of them is worth more before a deadline than any code over twice as many. Each unit is
quantised by itself and carries its own scales: there is no state across units, so whichever of them come can be used.
Scales of the keys stand at the start of a unit, one for each channel over the unit's rows, since keys have channels
that are large in every row; those of the values stand in each row (docs/wire.md §3). What the receiver computes is
exact in float32 up to the last addition, so both ends know the same cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from quic_pfec.wire.manifest import REFINEMENT, row_nbytes, scale_nbytes, vector_nbytes

__all__ = [
    "FP8_MAX",
    "REFINEMENT_ZERO",
    "SCALE_MAX",
    "SCALE_MIN",
    "Form",
    "decode_fp8",
    "encode_fp8",
]

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Bits = npt.NDArray[np.bool_]

SCALE_MIN: Final = 2.0**-14
"""Least scale: below fp16's normal numbers it loses digits, then becomes zero, and a division by it NaN."""
SCALE_MAX: Final = 65504.0
FP8_MAX: Final = 448.0
"""Largest value of e4m3fn, which has no infinity."""

REFINEMENT_ZERO: Final = 8
"""The code of a refinement that changes nothing; one step is a sixteenth of the scale."""

_LEAST_SCALE_BITS: Final = 0x0400  # of SCALE_MIN in fp16; SCALE_MAX is 0x7BFF
_FP8_NAN: Final = 0x7F
_STEPS: Final = {"int8": 127, "int4": 15}


def encode_fp8(values: Floats) -> Bytes:
    """e4m3fn of finite values: rounded to nearest even, what is beyond the largest becomes the largest."""
    magnitude = np.minimum(np.abs(values), np.float32(FP8_MAX))
    bits = magnitude.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1)))) >> np.uint32(20)
    codes = (rounded - np.uint32((127 - 7) << 3)).astype(np.uint8)
    small = magnitude < 2.0**-6  # below the normal numbers: multiples of 2^-9
    codes[small] = np.rint(magnitude[small] * np.float32(512)).astype(np.uint8)
    sign: Bytes = np.signbit(values).astype(np.uint8) << np.uint8(7)
    return codes | sign


def _fp8_table() -> Floats:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    magnitude[(codes & _FP8_NAN) == _FP8_NAN] = np.nan
    table: Floats = np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)
    return table


_FP8: Final = _fp8_table()


def decode_fp8(codes: Bytes) -> Floats:
    """Values of e4m3fn codes, exact; NaN for 0x7f and 0xff."""
    values: Floats = _FP8[codes]
    return values


@dataclass(frozen=True, slots=True)
class Form:
    """How the units of one layer and precision are written. `dtype`: any form of `wire.manifest`.

    Encoding and decoding are of quantised forms, and of refinements together with what they refine.
    "Bodies" are units without their digests, uint8 [units, body bytes], all with the same number of rows.
    """

    dtype: str
    kv_heads: int
    head_dim: int

    @property
    def lead_nbytes(self) -> int:
        """Bytes before the first row: the scales of the keys."""
        return self.kv_heads * self.head_dim * scale_nbytes(self.dtype)

    def body_nbytes(self, rows: int) -> int:
        return self.lead_nbytes + rows * self.kv_heads * row_nbytes(self.head_dim, self.dtype)

    def bodies(
        self, keys: Floats, values: Floats, block_tokens: int, *, refined: bool = False
    ) -> Iterator[tuple[Bytes, Bytes | None, int]]:
        """Bodies of all columns of a layer, in runs of equal size, their refinements if `refined` (of "int4"), and the
        number of values that were saturated.

        keys, values: finite, `[kv_heads, tokens, head_dim]`. What a dtype cannot hold becomes its nearest: fp8 beyond
        448, scales beyond fp16.
        """
        whole = keys.shape[1] // block_tokens * block_tokens
        for start, stop, rows in ((0, whole, block_tokens), (whole, keys.shape[1], keys.shape[1] - whole)):
            if start < stop:
                blocks = (self.kv_heads, (stop - start) // rows, rows, self.head_dim)
                parts = keys[:, start:stop].reshape(blocks), values[:, start:stop].reshape(blocks)
                bodies, saturated = self._encode(*parts)
                yield bodies, self._refine(bodies, parts) if refined else None, saturated

    def _refine(self, bodies: Bytes, parts: tuple[Floats, Floats]) -> Bytes:
        lead, row_scales, codes = self._views(bodies)
        fields = lead.transpose(2, 1, 0, 3)[:, :, :, None], row_scales.transpose(3, 2, 0, 1)[..., None]
        rows = codes[0].shape[1]
        refined = np.empty((len(bodies), Form(REFINEMENT, self.kv_heads, self.head_dim).body_nbytes(rows)), np.uint8)
        _, _, fine = Form(REFINEMENT, self.kv_heads, self.head_dim)._views(refined)
        for part, (minimum, scale), coarse, out in zip(parts, fields, codes, fine, strict=True):
            with np.errstate(over="ignore"):
                steps = np.rint((part - minimum.astype(np.float32)) / (scale.astype(np.float32) / 16))
            known = unpack_nibbles(coarse, self.head_dim).transpose(2, 0, 1, 3).astype(np.float32) * 16
            left = np.clip(steps - known + REFINEMENT_ZERO, 0, 15).astype(np.uint8)
            out[...] = pack_nibbles(left).transpose(1, 2, 0, 3)
        return refined

    def _encode(self, keys: Floats, values: Floats) -> tuple[Bytes, int]:
        _, count, rows, _ = keys.shape
        bodies = np.empty((count, self.body_nbytes(rows)), dtype=np.uint8)
        lead, row_scales, codes = self._views(bodies)
        saturated = 0
        # Scales over the rows of a unit for keys, over the channels of a row for values: the axis that they lack.
        for which, (part, axis) in enumerate(((keys, 2), (values, 3))):
            if self.dtype == "fp8":
                made = encode_fp8(part)
                saturated += int(np.count_nonzero(np.abs(part) > FP8_MAX))
            else:
                made, scales, beyond = _quantise(part, axis, self.dtype)
                saturated += beyond
                if which == 0:
                    lead[...] = scales[:, :, :, 0].transpose(2, 1, 0, 3)
                else:
                    row_scales[...] = scales[:, :, :, :, 0].transpose(2, 3, 1, 0)
            codes[which][...] = made.transpose(1, 2, 0, 3)
        return bodies, saturated

    def _views(self, bodies: Bytes) -> tuple[Any, Any, tuple[Bytes, Bytes]]:
        """Scales of keys, fp16 [units, kv_heads, fields, head_dim]; of values, fp16 [units, rows, kv_heads, fields];
        codes of both, uint8 [units, rows, kv_heads, vector bytes]. Views; fields are minimum and scale, or scale."""
        count, vector, scale = len(bodies), vector_nbytes(self.head_dim, self.dtype), scale_nbytes(self.dtype)
        rows = bodies[:, self.lead_nbytes :].reshape(count, -1, self.kv_heads, row_nbytes(self.head_dim, self.dtype))
        codes = (rows[..., scale : scale + vector], rows[..., scale + vector :])
        if not scale:
            return None, None, codes
        lead = bodies[:, : self.lead_nbytes].reshape(count, self.kv_heads, -1).view("<f2")
        return lead.reshape(count, self.kv_heads, scale // 2, -1), rows[..., :scale].view("<f2"), codes

    def blank(self, rows: int) -> Bytes:
        """A body without `bad_rows`, uint8 [body bytes]."""
        body = np.zeros((1, self.body_nbytes(rows)), dtype=np.uint8)
        lead, row_scales, _ = self._views(body)
        if lead is not None:
            lead[...] = row_scales[...] = 1
        blank: Bytes = body[0]
        return blank

    def decode(self, body: Bytes, refinement: Bytes | None = None) -> tuple[Floats, Floats]:
        """Keys and values of one body, each float32 `[rows, kv_heads, head_dim]`.

        Finite where `bad_rows` finds nothing; elsewhere anything. `refinement`: the body that refines it, of "int4".
        """
        lead, row_scales, codes = self._views(body[None])
        if refinement is not None:
            _, _, fine = Form(REFINEMENT, self.kv_heads, self.head_dim)._views(refinement[None])
            keys = self._refined(codes[0][0], fine[0][0], lead[0].transpose(1, 0, 2)[:, None])
            return keys, self._refined(codes[1][0], fine[1][0], row_scales[0].transpose(2, 0, 1)[..., None])
        if self.dtype == "fp8":
            return decode_fp8(codes[0][0]), decode_fp8(codes[1][0])
        with np.errstate(invalid="ignore"):
            keys = self._scaled(codes[0][0], lead[0].transpose(1, 0, 2)[:, None])
            return keys, self._scaled(codes[1][0], row_scales[0].transpose(2, 0, 1)[..., None])

    def _scaled(self, codes: Bytes, scales: npt.NDArray[np.float16]) -> Floats:
        wide = scales.astype(np.float32)
        if self.dtype == "int8":
            values: Floats = codes.view(np.int8) * wide[0]
        else:
            values = unpack_nibbles(codes, self.head_dim) * wide[1] + wide[0]
        return values

    def _refined(self, codes: Bytes, fine: Bytes, scales: npt.NDArray[np.float16]) -> Floats:
        wide = scales.astype(np.float32)
        steps = unpack_nibbles(codes, self.head_dim).astype(np.int16) * 16
        steps += unpack_nibbles(fine, self.head_dim)
        values: Floats = (steps - np.int16(REFINEMENT_ZERO)) * (wide[1] / 16) + wide[0]
        return values

    def bad_rows(self, body: Bytes) -> Bits:
        """Rows of heads that no intact sender writes, bool [rows, kv_heads]: of scales that are not normal positive
        fp16 numbers, minima that are not finite, NaN."""
        lead, row_scales, codes = self._views(body[None])
        if self.dtype == "fp8":
            bad: Bits = np.zeros(codes[0].shape[1:3], dtype=np.bool_)
            for part in codes:
                np.logical_or(bad, ((part[0] & _FP8_NAN) == _FP8_NAN).any(axis=-1), out=bad)
            return bad
        of_head = np.asarray(_nonsense(lead[0].transpose(1, 0, 2)).any(axis=1))
        return _nonsense(row_scales[0].transpose(2, 0, 1)) | of_head

    def elements(self, came: Bits) -> Bits:
        """Elements that can be known, bool [units, rows, kv_heads, 2, head_dim], keys first.

        came: which bytes of the bodies are there, bool [units, body bytes]. An element needs its own bytes and those
        of its scale. For every wire dtype.
        """
        count, scale, vector = len(came), scale_nbytes(self.dtype), vector_nbytes(self.head_dim, self.dtype)
        rows = came[:, self.lead_nbytes :].reshape(count, -1, self.kv_heads, row_nbytes(self.head_dim, self.dtype))
        vectors = rows[..., scale:].reshape(*rows.shape[:3], 2, vector)
        known: Bits
        if vector >= self.head_dim:
            known = np.logical_and.reduce(vectors.reshape(*vectors.shape[:4], self.head_dim, -1), axis=-1)
        else:
            known = np.repeat(vectors, 2, axis=-1)[..., : self.head_dim]
        if scale:
            lead = came[:, : self.lead_nbytes].reshape(count, 1, self.kv_heads, -1, self.head_dim, 2)
            known[..., 0, :] &= lead.all(axis=(3, 5))
            known[..., 1, :] &= rows[..., :scale].all(axis=-1, keepdims=True)
        return known

    def as_received(
        self, keys: Floats, values: Floats, block_tokens: int, *, refined: bool = False
    ) -> tuple[Floats, Floats]:
        """Keys and values, `[kv_heads, tokens, head_dim]`, as a receiver of all units has them, in float32."""
        parts = []
        for bodies, finer, _ in self.bodies(keys, values, block_tokens, refined=refined):
            for index, body in enumerate(bodies):
                parts.append(self.decode(body, None if finer is None else finer[index]))
        there, back = (np.concatenate([part[which] for part in parts]).transpose(1, 0, 2) for which in (0, 1))
        return np.ascontiguousarray(there), np.ascontiguousarray(back)


def _quantise(part: Floats, axis: int, dtype: str) -> tuple[Bytes, npt.NDArray[np.float16], int]:
    """Codes [kv_heads, units, rows, vector bytes], scales [fields, ...] with `axis` of length one, values saturated."""
    steps = np.float32(_STEPS[dtype])
    low, high = part.min(axis=axis, keepdims=True), part.max(axis=axis, keepdims=True)
    with np.errstate(over="ignore"):
        if dtype == "int8":
            scale = _scale(np.maximum(high, -low) / steps)
            codes = np.rint(part / scale.astype(np.float32))
            least: float = -127.0
            fields = scale[None]
        else:
            minimum = _below(low)
            scale = _scale((high - minimum.astype(np.float32)) / steps)
            codes = np.rint((part - minimum.astype(np.float32)) / scale.astype(np.float32))
            least = 0.0
            fields = np.stack([minimum, scale])
    beyond = 0
    if float(high.max()) > SCALE_MAX or float(low.min()) < -SCALE_MAX:  # else the scales hold everything
        beyond = int(np.count_nonzero((codes < least - 1) | (codes > steps + 1)))
    np.clip(codes, least, steps, out=codes)
    if dtype == "int8":
        return codes.astype(np.int8).view(np.uint8), fields, beyond
    return pack_nibbles(codes.astype(np.uint8)), fields, beyond


def _scale(wanted: Floats) -> npt.NDArray[np.float16]:
    return np.clip(wanted, np.float32(SCALE_MIN), np.float32(SCALE_MAX)).astype(np.float16)


def _below(low: Floats) -> npt.NDArray[np.float16]:
    """The largest fp16 number not above: channels far from zero with a small range keep their digits."""
    rounded = np.clip(low, np.float32(-SCALE_MAX), np.float32(SCALE_MAX)).astype(np.float16)
    lower = np.nextafter(rounded, np.float16(-np.inf))
    return np.where((rounded > low) & np.isfinite(lower), lower, rounded)


def pack_nibbles(codes: Bytes) -> Bytes:
    """Codes 0..15, two a byte along the last axis, the first of each pair in the low half; an odd end is padded."""
    packed = codes[..., ::2].copy()
    packed[..., : codes.shape[-1] // 2] |= codes[..., 1::2] << np.uint8(4)
    return packed


def unpack_nibbles(packed: Bytes, count: int) -> Bytes:
    """The first `count` codes along the last axis."""
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=np.uint8)
    np.bitwise_and(packed, np.uint8(15), out=codes[..., ::2])
    np.right_shift(packed, np.uint8(4), out=codes[..., 1::2])
    return codes[..., :count]


def _nonsense(fields: npt.NDArray[np.float16]) -> Bits:
    """Where a scale is not a normal positive number, or a minimum not finite; `fields` [minimum and scale, ...]."""
    bad: Bits = (fields[-1].view(np.uint16) - np.uint16(_LEAST_SCALE_BITS)) >= np.uint16(0x7C00 - _LEAST_SCALE_BITS)
    if len(fields) == 2:
        bad |= ~np.isfinite(fields[0])
    return bad
