"""The recompute receiver: rows that never came are computed again, exactly, from the token ids and the rows that did.

A causal model's row at position p depends on the tokens and rows up to p alone. So only the token columns with a hole
in some layer are run through the model; at every other position the received rows stand for all that the model would
have computed there. What comes out differs from the sender's rows only as two orders of summation do
(`docs/decisions.md`). Columns go in ascending order and in pieces: whenever it stops, what is filled is exact, and what
is not yet can still be masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

try:
    import torch
    from torch import Tensor
    from transformers.cache_utils import Cache
except ImportError as error:
    raise ImportError('quic_pfec.kv.recompute needs torch and transformers: pip install "quic-pfec[hf]"') from error

import numpy as np
from numpy.typing import NDArray

from quic_pfec.kv.attention import ColumnsLayer
from quic_pfec.kv.hf import LayerRows, Rebuilt, cache_kwarg

CHUNK_COLUMNS: Final = 256
"""Columns of one pass: enough to amortise it, and a mask of at most this many times the context."""


def hole_columns(rebuilt: Rebuilt) -> NDArray[np.int64]:
    """Positions with a hole in any layer or head, ascending, int64 [columns]."""
    maps = [rows.valid for rows in rebuilt.layers if rows.valid is not None]
    if not maps:
        return np.empty(0, dtype=np.int64)
    whole = torch.stack([valid.all(dim=0).all(dim=0) for valid in maps]).all(dim=0)
    positions: NDArray[np.int64] = (~whole).nonzero()[:, 0].cpu().numpy()
    return positions


def fill(
    model: Any,
    rebuilt: Rebuilt,
    token_ids: Sequence[int] | NDArray[np.integer],
    *,
    chunk: int = CHUNK_COLUMNS,
    proceed: Callable[[], bool] | None = None,
) -> Rebuilt:
    """`rebuilt` with its holes computed by `model`, a causal language model given to `attention.attach`.

    token_ids: of every position. The rows are written in place, into the tensors of `rebuilt`; rows that came stay to
    the bit. `proceed` is asked before each pass of `chunk` columns; at False the rest stays masked.

    Raises ValueError if the ids do not fit the rows or the model, or the cache holds more than one sequence,
    RuntimeError if the model was not attached.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 column, got {chunk}")
    holes = hole_columns(rebuilt)
    if not len(holes):
        return rebuilt
    keys = rebuilt.layers[0].keys
    ids = np.asarray(token_ids, dtype=np.int64)
    if keys.shape[0] != 1:
        raise ValueError(f"the cache holds a batch of {keys.shape[0]}: holes are computed in one sequence at a time")
    if ids.shape != (keys.shape[2],):
        raise ValueError(f"{ids.shape} token ids for a context of {keys.shape[2]} tokens")
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise ValueError(f"token ids must lie in 0 .. {vocabulary - 1}, the model's vocabulary")
    layers = [ColumnsLayer(rows.keys, rows.values, rows.valid, rows.window) for rows in rebuilt.layers]
    cache = Cache(layers=layers)
    done = 0
    while done < len(holes) and (proceed is None or proceed()):
        columns = holes[done : done + chunk]
        _pass(model, cache, layers, torch.from_numpy(columns).to(keys.device), torch.from_numpy(ids[columns]))
        done += len(columns)
    return replace(rebuilt, layers=tuple(_whole_up_to(rows, holes, done) for rows in rebuilt.layers))


def _pass(model: Any, cache: Any, layers: Sequence[ColumnsLayer], columns: Tensor, ids: Tensor) -> None:
    step = torch.arange(int(columns[-1]) + 1, device=columns.device)
    causal = step[None, :] <= columns[:, None]
    masks = {0: causal}
    for layer in layers:
        if layer.window not in masks:  # a window of w tokens: a row itself and the w - 1 before it
            masks[layer.window] = causal & (step[None, :] > columns[:, None] - layer.window)
        layer.begin(columns, masks[layer.window])
    with torch.no_grad():
        model(
            input_ids=ids.to(columns.device)[None],
            position_ids=columns[None],
            attention_mask=causal[None, None],  # four dimensions: transformers then makes no mask of its own
            use_cache=True,
            logits_to_keep=1,
            **{cache_kwarg(model): cache},
        )
    for layer in layers:
        layer.check_applied()


def _whole_up_to(rows: LayerRows, holes: NDArray[np.int64], done: int) -> LayerRows:
    if rows.valid is None or done == len(holes):
        return replace(rows, valid=None)
    valid = rows.valid.clone()
    valid[:, :, torch.from_numpy(holes[:done]).to(valid.device)] = True
    return replace(rows, valid=None if bool(valid.all()) else valid)
