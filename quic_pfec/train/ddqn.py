"""The paper's learner (arXiv 2610.21390, section IV-C): a Double DQN over hand-offs at random, in one flat file.

Warm start: the replay first holds what a heuristic does, without any imitation loss. Then the net decides, or chance
with a probability that falls; every 16 decisions one batch is learned. Everything that the paper does not name (batch,
size of the replay, scale of the reward, what the ranges are drawn from) is a field of `Args` and listed in
docs/training.md. One thread, one generator: the same seed gives the same weights on the same machine.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from quic_pfec.schedule.network import Network
from quic_pfec.schedule.policies import Policy, compiled, make_twin
from quic_pfec.sim.engine import FEATURES_COUNT
from quic_pfec.train.environment import Crowd, Window
from quic_pfec.train.judge import play_network
from quic_pfec.train.module import NAMES, Arrays, arrays, load_arrays, make_module, versions
from quic_pfec.train.replay import Replay
from quic_pfec.train.world import VALIDATION, Distribution, World, draw
from quic_pfec.wire.errors import LocalError

__all__ = ["Args", "Learner", "Result", "load_checkpoint", "save_checkpoint", "train"]


VALIDATION_WORLDS = 48
RANDOM_WEIGHTS = np.array([1.0, 1.0, 0.25, 1 / 16, 1.0])  # source, repair1, repair4, repair16, resend
WARM_LANES = 4  # few, so that most of their hand-offs end
_COUNTERS = ("transitions", "updates", "episodes", "next_seed", "loss")
_VECTORS = ("low", "high", "middle", "spread")
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Args:
    """Settings of a training run. The defaults are the paper's where it names them."""

    seed: int = 0
    """of everything: weights, hand-offs, exploration, batches"""
    distribution: Distribution = "paper"
    """what hand-offs are drawn from (`train.world`)"""
    window: Window = "full"
    """coding set of repairs; the paper's is everything after the decoded prefix"""
    resend: bool = False
    """is a resend among the choices? (not in the paper)"""
    transitions: int = 321_032
    """decisions in all (paper)"""
    pretraining: int = 56_232
    """of them the heuristic's: the paper's total less 16 for each of its 16,550 updates"""
    heuristic: str = "deficit"
    """whose decisions the replay begins with (paper: the deficit heuristic)"""
    returns: int = 5_000
    """updates on the returns that the heuristic's decisions had, before any are bootstrapped (ours; 0 = none)"""
    learning_rate: float = 1e-4
    """of Adam (paper)"""
    decay: float = 1.0
    """what the learning rate has fallen to, linearly, at the end (ours: 1 = constant)"""
    gamma: float = 1.0
    """discount (paper)"""
    clip: float = 5.0
    """norm of the gradient (paper)"""
    every: int = 16
    """decisions per update (paper)"""
    sync: int = 500
    """updates per copy to the target net (paper)"""
    epsilon: tuple[float, float] = (0.25, 0.05)
    """share of random decisions, from and to (paper), in the mean of the lanes"""
    epsilon_share: float = 0.8
    """share of the run over which it falls (paper)"""
    batch: int = 128
    """transitions an update (ours)"""
    replay: int = 400_000
    """transitions kept (ours: all of the paper's)"""
    reward_scale: float = 10.0
    """what rewards are multiplied by (ours)"""
    standardise: bool = True
    """features to mean 0 and deviation 1 over the pretraining, which the first layer takes up afterwards (ours)"""
    lanes: int = 16
    """hand-offs side by side (ours)"""
    episodes: int | None = None
    """ends after so many hand-offs if that comes first (paper: 120, about what the transitions amount to)"""
    choose: int = 30
    """times that the greedy policy is measured on validation seeds; the best net is kept (ours; 0 = the last one)"""


@dataclass(slots=True)
class Result:
    """The network, and the curve: a row for each measurement (transitions, updates, J_block, J_frac, loss)."""

    network: Network
    curve: list[dict[str, float]] = field(default_factory=list)


def heuristic(args: Args) -> Policy:
    """The compiled rule that fills the replay, over the window that is trained for."""
    return compiled(replace(make_twin(args.heuristic), window=args.window))  # type: ignore[type-var]


class Learner:
    """A run that may be cut anywhere between two steps, written to a file and continued."""

    def __init__(self, args: Args) -> None:
        self.args = args
        choices = 5 if args.resend else 4
        self.online, self.target = make_module(choices, args.seed), make_module(choices, args.seed)
        self.adam = torch.optim.Adam(self.online.parameters(), lr=args.learning_rate, fused=True)
        self.replay = Replay(min(args.replay, args.transitions), choices)
        self.chance = np.random.default_rng(args.seed)
        self.transitions = self.updates = self.episodes = 0
        self.loss = 0.0
        self.low = np.full(FEATURES_COUNT, np.inf, dtype=np.float32)
        self.high = np.full(FEATURES_COUNT, -np.inf, dtype=np.float32)
        self.middle = np.zeros(FEATURES_COUNT, dtype=np.float32)
        self.spread = np.ones(FEATURES_COUNT, dtype=np.float32)
        self.curve: list[dict[str, float]] = []
        self.best: Arrays = arrays(self.online)
        self.best_score = -np.inf
        self.next_seed = args.seed << 24
        self._crowd: Crowd | None = None
        self._worlds: list[World] = []

    # the steps

    @property
    def share(self) -> float:
        """How much of the learning is done, 0..1."""
        args = self.args
        done = (self.transitions - args.pretraining) / max(1, args.transitions - args.pretraining)
        if args.episodes is not None:
            done = max(done, self.episodes / args.episodes)
        return min(1.0, max(0.0, done))

    def warm_up(self) -> None:
        """Fills the replay with the heuristic's decisions, unless it is."""
        args = self.args
        if self.transitions >= args.pretraining:
            return
        crowd = Crowd(
            WARM_LANES, args.distribution, self.next_seed, window=args.window, resend=args.resend,
            policy=heuristic(args),
        )  # fmt: skip
        while self.transitions < args.pretraining:
            wanted, masks = crowd.lanes.rule_actions(), crowd.masks
            legal = (wanted >= 0) & masks[np.arange(WARM_LANES), np.maximum(wanted, 0)]
            wanted = np.where(legal, wanted, masks.argmax(axis=1))  # it may wait, or repair where d = 0
            self._move(crowd, self._explore(masks, wanted, args.epsilon[0]))
        self.next_seed = crowd.next_seed
        if args.standardise:
            seen = self.replay.arrays["features"][: self.replay.size]
            self.middle, self.spread = seen.mean(axis=0), np.maximum(seen.std(axis=0), np.float32(0.01))
        if args.returns:
            self._regress_returns()

    def _regress_returns(self) -> None:
        """Where a value net starts from: what the heuristic, with its random decisions, came to. No imitation: nothing
        asks the net to do the same.

        33 copies of the target net carry a reward 33 decisions far, so that without this the net never learns that a
        repair now is one less at the end.
        """
        args, rows = self.args, self.replay.arrays
        returns, known = np.zeros(self.replay.size, dtype=np.float32), np.zeros(self.replay.size, dtype=np.bool_)
        for lane in range(WARM_LANES):
            mine = np.arange(lane, self.replay.size, WARM_LANES)
            total, ended = np.float32(0), False
            for row in mine[::-1]:
                ended = ended or bool(rows["done"][row])
                total = rows["rewards"][row] + (np.float32(0) if rows["done"][row] else total)
                returns[row], known[row] = total, ended
        learned = np.flatnonzero(known)
        if not len(learned):
            return
        with torch.no_grad():
            list(self.online.parameters())[-1].fill_(float(returns[learned].mean()))  # the last bias
        adam = torch.optim.Adam(self.online.parameters(), lr=1e-3, fused=True)
        features = torch.from_numpy(self._inputs(rows["features"][: self.replay.size]))
        actions, wanted = torch.from_numpy(rows["actions"][: self.replay.size]), torch.from_numpy(returns)
        for step in range(args.returns):
            for group in adam.param_groups:
                group["lr"] = 1e-3 * (1.0 - 0.9 * step / args.returns)
            at = torch.from_numpy(self.chance.choice(learned, args.batch))
            values = self.online(features[at]).gather(1, actions[at].unsqueeze(1)).squeeze(1)
            loss = nn.functional.smooth_l1_loss(values, wanted[at])
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
            self.loss += 0.01 * (float(loss.detach()) - self.loss)
        self.target.load_state_dict(self.online.state_dict())

    def learn(self) -> None:
        """One decision in each lane, and the updates that are due."""
        args = self.args
        if self._crowd is None:
            self._crowd = Crowd(args.lanes, args.distribution, self.next_seed, window=args.window, resend=args.resend)
        crowd = self._crowd
        reached = min(1.0, self.share / args.epsilon_share)
        epsilon = args.epsilon[0] + (args.epsilon[1] - args.epsilon[0]) * reached
        with torch.no_grad():
            values = self.online(torch.from_numpy(self._inputs(crowd.features))).numpy()
        greedy = np.where(crowd.masks, values, -np.inf).argmax(axis=1)
        self._move(crowd, self._explore(crowd.masks, greedy, epsilon))
        self.episodes += len(crowd.finished)
        crowd.finished.clear()
        self.next_seed = crowd.next_seed
        while self.updates < (self.transitions - args.pretraining) // args.every:
            self._update()

    def _inputs(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        return (features - self.middle) / self.spread

    def folded(self) -> Arrays:
        """The parameters for features as they are: the first layer standardises."""
        values = arrays(self.online)
        values["w1"] = values["w1"] / self.spread[:, None]
        values["b1"] = values["b1"] - self.middle @ values["w1"]
        return values

    def _explore(self, masks: NDArray[np.bool_], wanted: NDArray[np.int64], epsilon: float) -> NDArray[np.int64]:
        """`wanted` but for a share of random choices, `epsilon` in the mean: from almost none in the first lane to four
        times that in the last. A choice is the less likely the more it sends. Else chance alone would have spent every
        budget long before the deadline, and nothing could be learned of what a budget is good for then.
        """
        lanes = np.arange(1, len(masks) + 1) ** 3
        waits = (
            self.chance.exponential(size=masks.shape) / RANDOM_WEIGHTS[: masks.shape[1]]
        )  # the first of these is drawn by weight
        random = np.where(masks, waits, np.inf).argmin(axis=1)
        return np.where(self.chance.random(len(masks)) < epsilon * lanes / lanes.mean(), random, wanted)

    def _move(self, crowd: Crowd, actions: NDArray[np.int64]) -> None:
        features = crowd.features
        moves = crowd.step(actions)
        self.replay.add(
            features=features[moves.lanes],
            actions=actions[moves.lanes],
            rewards=moves.rewards.astype(np.float32) * np.float32(self.args.reward_scale),
            done=moves.done.astype(np.float32),
            following=moves.features,
            masks=moves.masks,
        )
        self.transitions += len(moves.lanes)
        np.minimum(self.low, features.min(axis=0), out=self.low)
        np.maximum(self.high, features.max(axis=0), out=self.high)

    def _update(self) -> None:
        args = self.args
        drawn = self.replay.sample(args.batch, self.chance)
        for name in ("features", "following"):
            drawn[name] = self._inputs(drawn[name])
        rows = {name: torch.from_numpy(values) for name, values in drawn.items()}
        for group in self.adam.param_groups:
            group["lr"] = args.learning_rate * (1.0 + (args.decay - 1.0) * self.share)
        with torch.no_grad():
            choice = self.online(rows["following"]).masked_fill(~rows["masks"], -torch.inf).argmax(dim=1, keepdim=True)
            following = self.target(rows["following"]).gather(1, choice).squeeze(1)
            wanted = rows["rewards"] + args.gamma * (1.0 - rows["done"]) * following
        values = self.online(rows["features"]).gather(1, rows["actions"].unsqueeze(1)).squeeze(1)
        loss = nn.functional.smooth_l1_loss(values, wanted)
        self.adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.online.parameters(), args.clip)
        self.adam.step()
        self.updates += 1
        self.loss += 0.01 * (float(loss.detach()) - self.loss)
        if self.updates % args.sync == 0:
            self.target.load_state_dict(self.online.state_dict())

    # looking

    @property
    def due(self) -> bool:
        """Is it time to measure again?"""
        return self.share >= (len(self.curve) + 1) / max(1, self.args.choose)

    def measure(self) -> None:
        """Plays the greedy policy on validation seeds: a row of the curve, and the best net so far."""
        if not self._worlds:
            self._worlds = [draw(self.args.distribution, VALIDATION + number) for number in range(VALIDATION_WORLDS)]
        now = self.folded()
        scores = play_network(self.network(now), self._worlds)
        row = {
            "transitions": float(self.transitions), "updates": float(self.updates), "episodes": float(self.episodes),
            "j_block": float(scores.j_block.mean()), "j_frac": float(scores.j_frac.mean()), "loss": self.loss,
        }  # fmt: skip
        self.curve.append(row)
        if self.args.choose == 0 or row["j_block"] > self.best_score:
            self.best, self.best_score = now, row["j_block"]

    def network(self, values: Arrays, name: str = "", command: str = "") -> Network:
        """The parameters as a network that can be saved."""
        settings = asdict(self.args) | {"epsilon": list(self.args.epsilon)}
        return Network(
            **values, low=self.low, high=self.high, kind="q", name=name or f"ddqn-{self.args.distribution}",
            window=self.args.window, resend=self.args.resend, seed=self.args.seed, command=command,
            versions=versions(), settings=settings,
        )  # fmt: skip


def train(
    learner: Learner,
    *,
    name: str = "",
    command: str = "",
    checkpoint: Path | None = None,
    progress: Callable[[Learner], None] = lambda learner: None,
) -> Result:
    """Learns to the end. `checkpoint` is written at every measurement; `progress` is called after every decision."""
    learner.warm_up()
    while learner.share < 1.0:
        learner.learn()
        progress(learner)
        if learner.due:
            learner.measure()
            if checkpoint is not None:
                save_checkpoint(learner, checkpoint)
    if not learner.curve or learner.curve[-1]["updates"] < learner.updates:
        learner.measure()
    return Result(learner.network(learner.best, name, command), learner.curve)


# a run on disk: arrays and JSON, nothing that could run


def save_checkpoint(learner: Learner, path: Path) -> None:
    """All that a run needs to go on, in an .npz; whole or not at all.

    Hand-offs under way are not in it: after `load_checkpoint` the next seeds begin, so that a run that was cut differs
    from one that was not, and both are runs of the same method.
    """
    state = learner.adam.state_dict()["state"]
    values: dict[str, NDArray[Any]] = {f"replay_{name}": rows for name, rows in learner.replay.saved().items()}
    nets = {"online": arrays(learner.online), "target": arrays(learner.target), "best": learner.best}
    for prefix, held in nets.items():
        values |= {f"{prefix}_{name}": held[name] for name in NAMES}
    for index, moments in state.items():
        values |= {f"adam_{index}_{name}": moments[name].numpy() for name in _MOMENTS}
    meta = {
        "args": asdict(learner.args), "chance": learner.chance.bit_generator.state, "curve": learner.curve,
        "best_score": learner.best_score if np.isfinite(learner.best_score) else None,
    } | {name: getattr(learner, name) for name in _COUNTERS}  # fmt: skip
    values |= {name: getattr(learner, name) for name in _VECTORS}
    values["meta"] = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".new")
    with unfinished.open("wb") as file:
        np.savez(file, allow_pickle=False, **values)
    unfinished.replace(path)


def load_checkpoint(path: Path) -> Learner:
    """The run of a file of `save_checkpoint`. Raises LocalError for a file that is none; OSError as `open` does."""
    try:
        with np.load(path, allow_pickle=False) as file:
            values = {name: file[name] for name in file.files}
        meta = json.loads(values["meta"].tobytes())
        learner = Learner(Args(**(meta["args"] | {"epsilon": tuple(meta["args"]["epsilon"])})))
        for prefix, module in (("online", learner.online), ("target", learner.target)):
            load_arrays(module, {name: values[f"{prefix}_{name}"] for name in NAMES})
        kept = make_module(5 if learner.args.resend else 4, learner.args.seed)
        load_arrays(kept, {name: values[f"best_{name}"] for name in NAMES})
        learner.best = arrays(kept)
        state = {
            index: {name: torch.from_numpy(values[f"adam_{index}_{name}"]) for name in _MOMENTS}
            for index in range(len(NAMES)) if f"adam_{index}_step" in values
        }  # fmt: skip
        learner.adam.load_state_dict({"state": state, "param_groups": learner.adam.state_dict()["param_groups"]})
        learner.replay.add(**{name: values[f"replay_{name}"] for name in learner.replay.arrays})
        learner.chance.bit_generator.state = meta["chance"]
        learner.curve = meta["curve"]
        learner.best_score = -np.inf if meta["best_score"] is None else float(meta["best_score"])
        for name in _VECTORS:
            setattr(learner, name, values[name].astype(np.float32).reshape(FEATURES_COUNT))
        for name in _COUNTERS:
            setattr(learner, name, meta[name])
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise LocalError(f"{path} is no checkpoint of a training run: {error}") from None
    return learner
