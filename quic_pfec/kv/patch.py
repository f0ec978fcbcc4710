"""Rows that came late, written into a cache between two decode steps.

The rows that were decoded meanwhile stay as they are: what they computed over the holes is not computed again, only
later tokens see the patched rows. A cache that shares its rows with the one being patched (`kv.hf.fork`) is not
changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

try:
    import torch
except ImportError as error:
    raise ImportError('quic_pfec.kv.patch needs torch: pip install "quic-pfec[hf]"') from error

from quic_pfec.kv.attention import PartialLayer, PartialSlidingLayer
from quic_pfec.kv.hf import from_bits
from quic_pfec.kv.late import LateRows, LateUnits
from quic_pfec.wire.messages import MAX_PATCHES

__all__ = ["Patcher", "patch"]


def patch(cache: Any, rows: Sequence[LateRows], *, first_token: int = 0, shared: Any = None) -> None:
    """Writes `rows` into `cache`, a dynamic one with or without holes, and lifts the mask for them.

    first_token: absolute position of the hand-off's first row. shared: the cache that `cache` is a fork of; layers that
    still share its tensors get tensors of their own. Rows that a sliding layer has forgotten are passed over.
    """
    for late in rows:
        layer = cache.layers[late.layer]
        start, stop = first_token + late.start, first_token + late.stop
        # A sliding layer holds only its latest rows.
        forgotten = int(layer.get_seq_length()) - layer.keys.shape[-2]
        skip = max(0, forgotten - start)
        if start + skip < stop:
            if shared is not None and layer.keys is shared.layers[late.layer].keys:
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
            at = slice(start + skip - forgotten, stop - forgotten)
            with torch.no_grad():
                layer.keys[0, :, at] = from_bits(late.keys[:, skip:], late.dtype).to(layer.keys)
                layer.values[0, :, at] = from_bits(late.values[:, skip:], late.dtype).to(layer.values)
        if isinstance(layer, PartialLayer | PartialSlidingLayer):
            layer.fill(start, stop)


class Patcher:
    """Takes from `late` what has come and patches `cache` with it; call `step` before each pass of the model.

    cache, first_token, shared: as in `patch`. For one thread, which is the one that decodes.
    """

    def __init__(self, late: LateUnits, cache: Any, *, first_token: int = 0, shared: Any = None) -> None:
        self._late = late
        self._cache = cache
        self._first_token = first_token
        self._shared = shared
        self._steps = 0
        self._patches: list[tuple[int, int]] = []

    def step(self) -> None:
        """Patches what came since the last call. The first call is before pass 0, the one over the prompt."""
        step, self._steps = self._steps, self._steps + 1
        rows = self._late.take()
        if not rows:
            return
        patch(self._cache, rows, first_token=self._first_token, shared=self._shared)
        if len(self._patches) < MAX_PATCHES:
            self._patches.append((step, len(rows)))
        else:
            step, units = self._patches[-1]
            self._patches[-1] = step, units + len(rows)

    @property
    def patched(self) -> tuple[tuple[int, int], ...]:
        """(step, units): how many units came in time for each pass, passes without any left out.

        After MAX_PATCHES entries the last one counts all that follow. What the last call patched came too late for the
        answer where no pass followed it, but not for later turns.
        """
        return tuple(self._patches)
