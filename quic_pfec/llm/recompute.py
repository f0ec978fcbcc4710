"""Whether recomputing what is missing fits before decoding must begin: what a pass costs on this machine.

A pass over n columns behind a context of t tokens costs, near enough, a + n (b + c t): weights that are read whatever
n is, the layers' work for each column, and its attention over the context. The three are measured here, once, on the
model that is served; every recomputation done since corrects them by one common factor, since the machine is seldom as
quiet as when it started.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

try:
    import torch
except ImportError as error:
    raise ImportError('quic_pfec.llm needs torch and transformers: pip install "quic-pfec[hf]"') from error

import numpy as np
from numpy.typing import NDArray

from quic_pfec.kv.hf import LayerRows, Rebuilt, rebuildable
from quic_pfec.kv.recompute import CHUNK_COLUMNS, fill, hole_columns
from quic_pfec.llm.generate import prefill
from quic_pfec.llm.models import LoadedModel

PROBE_COLUMNS: Final = 64
PROBE_CONTEXTS: Final = (256, 1024)
MARGIN: Final = 1.25
"""A prediction must leave a fifth of the time unused: one that fails has cost its time and brought a part."""
MAX_CORRECTION: Final = 8.0
"""Factor by which one recomputation may correct the prediction, up or down."""
PROBES: Final = 3
"""Passes of each size; the fastest counts, as everything that disturbs one makes it slower."""


@dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds of a pass: `pass_s` + columns x (`column_s` + context x `pair_s`)."""

    pass_s: float
    column_s: float
    pair_s: float

    def seconds(self, columns: int, context: int, chunk: int = CHUNK_COLUMNS) -> float:
        """Of computing `columns` columns, in passes of `chunk`, of a context of so many tokens; 0 for none."""
        return -(-columns // chunk) * self.pass_s + columns * (self.column_s + context * self.pair_s)


def solve(one_s: float, many_s: float, long_s: float, columns: int, contexts: tuple[int, int]) -> PassCost:
    """The cost from three passes: 1 column and `columns` at the first context, `columns` at the second, longer one.

    What noise makes negative is taken as 0 and its time as that of the other terms.
    """
    pair_s = max(0.0, (long_s - many_s) / (columns * (contexts[1] - contexts[0])))
    pair_s = min(pair_s, many_s / (columns * contexts[0]))
    column_s = max(0.0, (many_s - one_s) / (columns - 1) - contexts[0] * pair_s)
    return PassCost(max(0.0, many_s - columns * (column_s + contexts[0] * pair_s)), column_s, pair_s)


class PassClock:
    """Predicts recomputation on one model, and does it where it fits. Safe to use from several threads."""

    def __init__(self, model: LoadedModel, clock: Callable[[], float] = time.monotonic) -> None:
        self.cost: PassCost | None = None
        self.correction = 1.0
        """How much slower than measured the latest recomputation was; halves its distance to 1 when none is tried."""
        self._model = model
        self._clock = clock
        self._lock = threading.Lock()

    def calibrate(self) -> PassCost:
        """The measured cost; the first call measures: nine passes, about as long as 400 tokens of prefill."""
        with self._lock:
            if self.cost is None:
                self.cost = self._measure()
            return self.cost

    def predict(self, columns: int, context: int) -> float:
        """Seconds that computing `columns` columns of a context of so many tokens is expected to take."""
        return self.calibrate().seconds(columns, context) * self.correction

    def fill(
        self,
        rebuilt: Rebuilt,
        token_ids: Sequence[int] | NDArray[np.integer],
        until_s: float,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> tuple[Rebuilt, str]:
        """Fills the holes of `rebuilt` if that is expected to be done by `until_s`, by this object's clock.

        Returns what it is then, and "recompute" if it has no hole any more or "mask": there was no time, or, between
        two passes, no longer; what was computed until then stays. Raises ValueError as `kv.recompute.fill`.
        """
        columns = len(hole_columns(rebuilt))
        if not columns:
            return rebuilt, "recompute"
        context = rebuilt.layers[0].keys.shape[2]
        expected_s = self.predict(columns, context)
        started_s = self._clock()
        if started_s + expected_s * MARGIN > until_s:
            self.correction = (1.0 + self.correction) / 2  # else one bad moment would forbid the next attempt for ever
            return rebuilt, "mask"
        filled = fill(
            self._model.model,
            rebuilt,
            token_ids,
            proceed=lambda: not cancelled() and self._clock() < until_s,
        )
        _wait_for(self._model)
        left = len(hole_columns(filled))
        if left < columns:
            took_s = self._clock() - started_s
            measured_s = self.calibrate().seconds(columns - left, context)
            self.correction = min(MAX_CORRECTION, max(1 / MAX_CORRECTION, took_s / max(measured_s, 1e-6)))
        return filled, "mask" if left else "recompute"

    def _measure(self) -> PassCost:
        longest = min(PROBE_CONTEXTS[1], self._model.max_tokens)
        contexts = (max(2, longest // 4), longest)
        columns = min(PROBE_COLUMNS, contexts[0])
        layers = prefill(self._model, [0, 0]).layers
        times = [
            self._time_pass(layers, count, context)
            for count, context in ((1, contexts[0]), (columns, contexts[0]), (columns, contexts[1]))
        ]
        return solve(times[0], times[1], times[2], columns, contexts)

    def _time_pass(self, like: Sequence[Any], columns: int, context: int) -> float:
        """The fastest of equal passes: the first of a size may also plan and allocate."""
        fastest_s = float("inf")
        for _ in range(PROBES):
            rebuilt = _hollow(self._model, like, columns, context)
            _wait_for(self._model)
            started_s = self._clock()
            fill(self._model.model, rebuilt, [0] * context)
            _wait_for(self._model)
            fastest_s = min(fastest_s, self._clock() - started_s)
        return fastest_s


def _hollow(m: LoadedModel, like: Sequence[Any], columns: int, context: int) -> Rebuilt:
    """Rows of zeros, the last `columns` of them missing, in the shapes of `like`."""
    cache = rebuildable(m.config)
    layers = []
    for layer, model in zip(cache.layers, like, strict=True):
        heads, dim = model.keys.shape[1], model.keys.shape[3]
        keys, values = (torch.zeros((1, heads, context, dim), dtype=m.dtype, device=m.device) for _ in range(2))
        valid = torch.ones((1, heads, context), dtype=torch.bool, device=m.device)
        valid[:, :, context - columns :] = False
        layers.append(LayerRows(keys, values, valid, layer))
    return Rebuilt(cache, tuple(layers))


def _wait_for(m: LoadedModel) -> None:
    if m.device.type == "cuda":
        torch.cuda.synchronize(m.device)
