"""From a cache to what can be sent: `prepare`, which packs, scores and orders outside of any deadline.

A cache comes as a Hugging Face object or as numpy arrays, its tokens as a tensor, an array or a list. Whatever cannot
be sent is refused here, in one line, before anybody waits for it; `kv.prepared` works on clean arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quic_pfec.kv.auto import AUTO
from quic_pfec.kv.layout import Layout
from quic_pfec.kv.prepared import PreparedKV, prepare_arrays
from quic_pfec.kv.profile import Profile, builtin
from quic_pfec.quantities import described, integer
from quic_pfec.wire.errors import LocalError
from quic_pfec.wire.manifest import MODEL_UNSTATED, QUANTISED

__all__ = ["Order", "prepare"]

Order = Literal["utility", "prefix", "fifo"]


def prepare(
    cache: Any,
    *,
    tokens: Any = None,
    profile: Profile | None = None,
    utility: NDArray[np.float64] | None = None,
    order: Order = "utility",
    wire_dtype: str | Callable[[Layout], str] | None = None,
    first_token: int = 0,
    model: str = MODEL_UNSTATED,
    rope: str = "",
) -> PreparedKV:
    """Packs, scores and orders a cache, outside of any deadline; the result may be sent several times.

    cache: a Hugging Face cache (batch one), or a list of (keys, values) numpy arrays [kv_heads, tokens, head_dim].
    tokens: ids of the whole context (tensor, array or list), so that the receiver can check it means the same text.
    profile or utility (float64 per unit id): what matters; neither = the profile that ships for `model`, or else a
    generic guess. wire_dtype: "bf16" by default; the cache's own dtype, bf16, or quantised: "int8" (with heads of 64
    elements 0.54 of bf16's bytes), "fp8" (0.50), "int4" (0.33), "progressive" (0.58: int4 for all blocks, then what is
    left to about int8, by utility per byte); or a function that names one, given the geometry (see `Connection.weigh`).
    first_token: send only the rows from here on (the receiver holds those
    before).
    model: fingerprint that the receiver compares with its own (`llm.models.fingerprint`); not stated, it checks shapes.

    Raises ValueError with one line for whatever cannot be sent, ImportError naming the extra for a Hugging Face cache.
    """
    if wire_dtype == AUTO:
        raise LocalError("wire_dtype='auto' depends on deadline and rate: give it and the cache itself to send_kv")
    wire_dtype = wire_dtype or "bf16"
    ids = None if tokens is None else _token_ids(tokens)
    integer("first_token", first_token, 0, 1 << 20, "the position of the first row that is sent, a whole number")
    for name, text in (("model", model), ("rope", rope)):
        if not isinstance(text, str):
            raise LocalError(f"{name} is a text that both ends compare, not {described(text)}")
    if profile is not None and not isinstance(profile, Profile):
        raise LocalError(f"profile is a Profile (kv.profile.load_profile reads one), not {described(profile)}")
    if profile is None and utility is None and model != MODEL_UNSTATED:
        profile = builtin(model, "mask")
    if isinstance(cache, list) and cache and all(isinstance(pair, tuple) and _is_numpy(pair) for pair in cache):
        dtype = {"float32": "fp32", "float16": "fp16", "uint16": "bf16", "uint32": "fp32"}.get(
            str(cache[0][0].dtype), ""
        )
        if not dtype:
            raise LocalError(f"arrays of {cache[0][0].dtype} cannot be sent: float32, float16, or bf16 bits as uint16")
        if first_token >= cache[0][0].shape[1]:
            raise LocalError(f"first_token is {first_token}, the cache has {cache[0][0].shape[1]} tokens")
        rows = cache if first_token == 0 else [(k[:, first_token:], v[:, first_token:]) for k, v in cache]
        return prepare_arrays(
            rows, dtype=dtype, model=model, wire_dtype=wire_dtype, order=order, profile=profile,
            utility=utility, tokens=ids, first_token=first_token, rope=rope,
        )  # fmt: skip
    from quic_pfec.kv import hf

    own = callable(wire_dtype) or wire_dtype in QUANTISED
    extracted = hf.extract(cache, None if own else str(wire_dtype), first_token=first_token)
    return prepare_arrays(
        extracted.arrays.layers, dtype=extracted.wire_dtype, model=model, wire_dtype=wire_dtype, order=order,
        profile=profile, utility=utility, tokens=ids, first_token=first_token, rope=rope,
        sliding_windows=[shape.sliding_window for shape in extracted.shapes],
    )  # fmt: skip


def _token_ids(tokens: Any) -> NDArray[np.int64]:
    if hasattr(tokens, "detach"):  # a tensor, on whatever device
        tokens = tokens.detach().cpu()
    try:
        ids = np.asarray(tokens)
    except (TypeError, ValueError):  # a ragged list, say
        ids = np.empty(0, dtype=object)
    if not np.issubdtype(ids.dtype, np.integer):
        raise LocalError(
            f"tokens are the ids of the whole context, a tensor, an array or a list of ints, not {described(tokens)}"
        )
    return ids.astype(np.int64).reshape(-1)


def _is_numpy(pair: tuple[Any, ...]) -> bool:
    return len(pair) == 2 and all(isinstance(part, np.ndarray) for part in pair)
