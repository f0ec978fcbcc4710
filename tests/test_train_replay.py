"""The ring of transitions."""

from __future__ import annotations

import numpy as np

from quic_pfec.train.replay import Replay


def rows(first: int, count: int) -> dict[str, np.ndarray]:
    numbers = np.arange(first, first + count)
    return {
        "features": np.repeat(numbers[:, None], 15, axis=1), "following": np.repeat(numbers[:, None] + 1, 15, axis=1),
        "actions": numbers % 4, "rewards": numbers, "done": np.zeros(count), "masks": np.ones((count, 4), dtype=bool),
    }  # fmt: skip


def test_the_newest_stay() -> None:
    replay = Replay(10, 4)
    for first in range(0, 24, 4):
        replay.add(**rows(first, 4))
    assert replay.size == 10
    assert replay.saved()["rewards"].tolist() == list(range(14, 24))
    drawn = replay.sample(500, np.random.default_rng(0))
    assert set(drawn["rewards"]) == set(range(14, 24))
    assert (drawn["following"][:, 0] == drawn["features"][:, 0] + 1).all()


def test_what_was_not_filled_is_not_drawn() -> None:
    replay = Replay(100, 4)
    replay.add(**rows(5, 3))
    assert set(replay.sample(200, np.random.default_rng(0))["rewards"]) == {5, 6, 7}
    assert replay.saved()["rewards"].tolist() == [5, 6, 7]
