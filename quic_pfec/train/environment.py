"""The paper's decision process as environments: one hand-off for any learner's toolbox, many at once for ours.

`PriorityFecEnv` is a `gymnasium.Env`; `Crowd` steps many hand-offs in one call of the compiled engine, each replaced by
the next seed's when it ends: a decision costs some 10 us. Rewards are the paper's, growth of J_block and of a potential
that is 0 at both ends, so that they sum to the J_block at the deadline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quic_pfec.schedule.policies import Policy
from quic_pfec.sim.engine import FEATURES_COUNT, Lanes, reset
from quic_pfec.train.world import TRAINING, Distribution, draw

try:
    import gymnasium
except ImportError as error:
    raise ImportError('training needs an extra: pip install "quic-pfec[train]"') from error

__all__ = ["HIGH", "LOW", "Crowd", "Moves", "PriorityFecEnv"]

Window = Literal["sack", "full"]

LOW = np.zeros(FEATURES_COUNT, dtype=np.float32)
LOW[3] = -1.0  # slack
HIGH = np.ones(FEATURES_COUNT, dtype=np.float32)
HIGH[7] = 4.0  # log(1 + d) / log 65, d at most the 2^24 symbols of a transfer


@dataclass(frozen=True, slots=True)
class Moves:
    """What one step of a `Crowd` gave, a row for each of `lanes` that moved.

    rewards: float64; done: bool; features, masks: of the decisions that follow in the same hand-off, float32[L, 15] and
    bool[L, A], zeros where it is over.
    """

    lanes: NDArray[np.int64]
    rewards: NDArray[np.float64]
    done: NDArray[np.bool_]
    features: NDArray[np.float32]
    masks: NDArray[np.bool_]


class Crowd:
    """`count` hand-offs of a distribution side by side, drawn with seeds that follow `seed`.

    features and masks, float32[count, 15] and bool[count, A], are of the decisions that are due. A is 4, or 5 with
    `resend`. `finished` are (J_block, J_frac, decisions) of the hand-offs that ended.
    """

    def __init__(
        self,
        count: int,
        distribution: Distribution,
        seed: int,
        *,
        window: Window = "full",
        features: Literal[1, 2] = 1,
        resend: bool = False,
        policy: Policy | None = None,
    ) -> None:
        self.lanes = Lanes(count, resend=resend, features=features)
        self.finished: list[tuple[float, float, int]] = []
        self.next_seed = seed
        self._distribution: Distribution = distribution
        self._window: Window = window
        self._policy = policy
        self._choices = 5 if resend else 4
        self._decisions = np.zeros(count, dtype=np.int64)
        for lane in range(count):  # every lane must hold something before any may be asked
            self._deal(lane)
        for empty in np.flatnonzero(self._begin(np.arange(count))):
            self._refill(int(empty))
        self._look()

    def _deal(self, lane: int) -> None:
        world = draw(self._distribution, TRAINING + self.next_seed)
        self.next_seed += 1
        reset(self.lanes, lane, world.scenario, world.settings, self._policy, self._window)
        self._decisions[lane] = 0

    def _begin(self, lanes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Goes to the first decision of new hand-offs; bool[count], which lanes have none."""
        if self._policy is not None:
            self.lanes.advance(np.where(np.isin(np.arange(len(self.lanes)), lanes), 0, -1))
        return self.lanes.done()

    def _refill(self, lane: int) -> None:
        self._deal(lane)
        while self._begin(np.array([lane]))[lane]:
            self._deal(lane)

    def _look(self) -> None:
        self.features = self.lanes.observe()
        self.masks = self.lanes.masks()[:, : self._choices]

    def step(self, actions: NDArray[np.int64]) -> Moves:
        """Takes actions, int64[count], -1 where a lane stays as it is.

        The next hand-offs are dealt where one ended. Raises LocalError for one that is masked."""
        moved = np.flatnonzero(actions >= 0)
        rewards, done = self.lanes.step(actions)
        self._decisions[moved] += 1
        self._look()
        moves = Moves(moved, rewards[moved], done[moved], self.features[moved], self.masks[moved])
        for lane in np.flatnonzero(done):
            self.finished.append(
                (float(self.lanes.j_block()[lane]), float(self.lanes.j_frac()[lane]), int(self._decisions[lane]))
            )
            self._refill(int(lane))
        if done.any():
            self._look()
        return moves


class PriorityFecEnv(gymnasium.Env[NDArray[np.float32], np.int64]):
    """One hand-off an episode: `Box(15)` of features, `Discrete(4)` of choices, 5 with `resend`.

    An environment must take any action of its space. One that its mask forbids is replaced by the first allowed one,
    and `info["replaced"]` says so; `action_masks()` (bool[A], also `info["action_mask"]`) is how to avoid that. At the
    end info has `j_block` and `j_frac`. `reset(options={"world": World})` plays a hand-off of the caller's choice.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (gymnasium's own type)

    def __init__(
        self,
        distribution: Distribution = "paper",
        *,
        window: Window = "full",
        features: Literal[1, 2] = 1,
        resend: bool = False,
    ) -> None:
        self._choices = 5 if resend else 4
        self.observation_space = gymnasium.spaces.Box(LOW, HIGH, dtype=np.float32)
        self.action_space = gymnasium.spaces.Discrete(self._choices)
        self._lanes = Lanes(1, resend=resend, features=features)
        self._distribution: Distribution = distribution
        self._window: Window = window

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """A new hand-off; `seed` determines it and those that follow. Raises ValueError for one without a decision."""
        super().reset(seed=seed)
        chosen = (options or {}).get("world")
        for _ in range(100):
            world = chosen or draw(self._distribution, TRAINING + int(self.np_random.integers(1 << 32)))
            reset(self._lanes, 0, world.scenario, world.settings, None, self._window)
            if not self._lanes.done()[0]:
                return self._lanes.observe()[0], self._info()
            if chosen is not None:
                break
        raise ValueError("a hand-off in which there is nothing to decide")

    def action_masks(self) -> NDArray[np.bool_]:
        """What may be chosen, bool[A]; all False at the end."""
        return self._lanes.masks()[0, : self._choices]

    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """gymnasium's five: features, reward, over, never cut off, info. Raises ValueError after the end."""
        allowed = self.action_masks()
        if not allowed.any():
            raise ValueError("the hand-off is over: reset() begins another")
        replaced = not allowed[action]
        taken = int(np.flatnonzero(allowed)[0]) if replaced else int(action)
        rewards, done = self._lanes.step(np.array([taken], dtype=np.int64))
        info = self._info() | {"replaced": replaced}
        if done[0]:
            info |= {"j_block": float(self._lanes.j_block()[0]), "j_frac": float(self._lanes.j_frac()[0])}
        return self._lanes.observe()[0], float(rewards[0]), bool(done[0]), False, info

    def _info(self) -> dict[str, Any]:
        return {"action_mask": self.action_masks()}
