"""Confidence intervals for figures that come in clusters.

Five loss realisations of one prompt are not five prompts: an interval over all values as if they were independent would
be too narrow by half. Clusters (prompts, seeds) are drawn with replacement, whole, and the interval is what the mean
does then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Interval", "clustered"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the ends of its confidence interval; `clusters` is how many independent ones it rests on."""

    mean: float
    low: float
    high: float
    clusters: int

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {"mean": self.mean, "low": self.low, "high": self.high, "clusters": self.clusters}

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def clustered(
    values: npt.ArrayLike,
    clusters: Sequence[object] | npt.NDArray[np.generic],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Mean of `values` with its percentile bootstrap interval, drawn over `clusters` (a label for each value).

    The mean is over all values, so that larger clusters weigh more; with one cluster the interval is the mean itself.
    The same seed gives the same interval. Raises ValueError for no values, lengths that differ, values that are not
    finite, or a level outside (0, 1).
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array) or len(array) != len(clusters):
        raise ValueError(f"{array.shape} values and {len(clusters)} labels: one label a value is needed, at least one")
    if not np.isfinite(array).all():
        raise ValueError("a value is not finite")
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    _, label = np.unique(np.array([str(cluster) for cluster in clusters]), return_inverse=True)
    sums, counts = np.bincount(label, weights=array), np.bincount(label)
    drawn = np.random.default_rng(seed).integers(0, len(sums), (resamples, len(sums)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(array.mean()), float(low), float(high), len(sums))
