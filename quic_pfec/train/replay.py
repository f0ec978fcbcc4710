"""What the Double DQN learns from: transitions in a ring, plain arrays that a checkpoint keeps as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quic_pfec.sim.engine import FEATURES_COUNT

__all__ = ["Replay"]


class Replay:
    """The last `capacity` transitions. `arrays` are its rows, of which the first `size` count."""

    def __init__(self, capacity: int, choices: int) -> None:
        self.capacity, self.size, self._next = capacity, 0, 0
        self.arrays: dict[str, NDArray[Any]] = {
            "features": np.zeros((capacity, FEATURES_COUNT), dtype=np.float32),
            "actions": np.zeros(capacity, dtype=np.int64),
            "rewards": np.zeros(capacity, dtype=np.float32),
            "done": np.zeros(capacity, dtype=np.float32),
            "following": np.zeros((capacity, FEATURES_COUNT), dtype=np.float32),
            "masks": np.zeros((capacity, choices), dtype=np.bool_),
        }

    def add(self, **rows: NDArray[Any]) -> None:
        """Rows for every name of `arrays`, as many for each; `masks` are those of `following`."""
        count = len(rows["actions"])
        at = (self._next + np.arange(count)) % self.capacity
        for name, values in self.arrays.items():
            values[at] = rows[name]
        self._next = (self._next + count) % self.capacity
        self.size = min(self.capacity, self.size + count)

    def sample(self, count: int, chance: np.random.Generator) -> dict[str, NDArray[Any]]:
        """`count` of them, with replacement."""
        at = chance.integers(self.size, size=count)
        return {name: values[at] for name, values in self.arrays.items()}

    def saved(self) -> dict[str, NDArray[Any]]:
        """The rows that count, oldest first."""
        at = (self._next - self.size + np.arange(self.size)) % self.capacity
        return {name: values[at] for name, values in self.arrays.items()}
