"""quic_pfec.sim.intervals: means whose intervals respect clusters."""

from __future__ import annotations

import numpy as np
import pytest

from quic_pfec.sim.intervals import clustered


def test_clusters_widen_the_interval() -> None:
    """Ten prompts of twenty equal values each hold no more than ten values."""
    means = np.random.default_rng(1).random(10)
    values, labels = np.repeat(means, 20), np.repeat(np.arange(10), 20)
    by_prompt, ten = clustered(values, labels), clustered(means, np.arange(10))
    independent = clustered(values, np.arange(200))
    assert (by_prompt.low, by_prompt.high) == pytest.approx((ten.low, ten.high))
    assert by_prompt.clusters == 10
    assert by_prompt.high - by_prompt.low > 3 * (independent.high - independent.low)


def test_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    hits = 0
    for trial in range(200):
        centre = rng.normal(0.5, 0.1, 30)
        values = (centre[:, None] + rng.normal(0, 0.02, (30, 5))).reshape(-1)
        interval = clustered(values, np.repeat(np.arange(30), 5), resamples=400, seed=trial)
        hits += interval.low <= 0.5 <= interval.high
    assert 0.88 < hits / 200 < 0.99


def test_seeded_and_ordered() -> None:
    values, labels = [0.1, 0.5, 0.9, 0.2], ["a", "a", "b", "c"]
    first = clustered(values, labels, seed=3)
    assert first == clustered(values, labels, seed=3)
    assert first.low <= first.mean <= first.high
    assert first.mean == pytest.approx(0.425)
    assert clustered(values, labels, level=0.5).high <= first.high
    assert first.as_dict() == {"mean": first.mean, "low": first.low, "high": first.high, "clusters": 3}
    assert str(clustered([0.25], ["a"])) == "0.250 [0.250, 0.250]"


@pytest.mark.parametrize(
    ("values", "labels", "options", "reason"),
    [
        ([], [], {}, "at least one"),
        ([1.0], ["a", "b"], {}, "one label a value"),
        ([[1.0]], ["a"], {}, "one label a value"),
        ([float("nan")], ["a"], {}, "not finite"),
        ([1.0], ["a"], {"level": 1.0}, "between 0 and 1"),
    ],
)
def test_refusals(values: list[float], labels: list[str], options: dict[str, float], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        clustered(values, labels, **options)  # type: ignore[arg-type]
