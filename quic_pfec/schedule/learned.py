"""The policies that ask a network: the paper's Double DQN, and a rule that a network may override.

These classes are the specification, and the twins of schedule/network.c. Both remember a transfer's past by its
features; the planner makes that memory, keeps it, and gives it to the policy. The paper's policy chooses once a burst;
an overridden rule is asked at every packet and goes on to be, whatever was chosen before. A decision is bounded work
(see `schedule.network`), so nothing measures its time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from quic_pfec.schedule.features import FeatureMemory, action, masks
from quic_pfec.schedule.network import Network, forward
from quic_pfec.schedule.state import IDLE, Action, ActionKind, State
from quic_pfec.wire.errors import LocalError

__all__ = ["Ddqn", "Learned", "Overridden", "Verdict"]


class Verdict(IntEnum):
    """Whose the last decision was: the rule's (or there is none), the network's, the rule's because a guard said so."""

    RULE = 0
    OVERRIDE = 1
    GUARD = 2


@runtime_checkable
class Learned(Protocol):
    """A policy that decides by the features of a transfer."""

    @property
    def verdict(self) -> int: ...

    def enter(self, memory: FeatureMemory) -> None:
        """A transfer begins; the planner keeps its memory up to date."""

    def decide(self, state: State) -> Action: ...


class Rule(Protocol):
    """What may be overridden: `schedule.policies.Hybrid`."""

    def decide(self, state: State) -> Action: ...

    def degree(self, state: State, usual: int, most: int) -> int: ...

    def ranks(self, state: State) -> bool: ...


def _choice_of(chosen: Action) -> int:
    """The choice that a rule's action is; -1 for idling."""
    match chosen.kind:
        case ActionKind.SOURCE:
            return 0
        case ActionKind.REPAIR:
            return {4: 2, 16: 3}.get(chosen.count, 1)
        case ActionKind.RESEND:
            return 4
    return -1


def _highest(values: Iterable[float], allowed: Iterable[bool]) -> int:
    """The first of the highest values that are allowed; one at least is."""
    best, most = -1, 0.0
    for choice, (value, may) in enumerate(zip(values, allowed, strict=False)):
        if may and (best < 0 or value > most):
            best, most = choice, value
    return best


@dataclass(slots=True)
class Ddqn:
    """The paper's policy (arXiv 2610.21390, section IV): what is allowed and has the highest value."""

    network: Network
    window: Literal["sack", "full"] = "full"
    _memory: FeatureMemory | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.network.kind != "q":
            raise LocalError(f"ddqn needs values of the choices, not {self.network!r}")

    @property
    def verdict(self) -> int:
        return Verdict.RULE

    def enter(self, memory: FeatureMemory) -> None:
        self._memory = memory

    def decide(self, state: State) -> Action:
        if self._memory is None:
            raise LocalError("a learned policy decides within a transfer, whose past its features hold")
        allowed = masks(state, resend=self.network.resend)
        if not allowed.any():
            return IDLE
        x = self._memory.look(state, self.network.features)
        return action(state, _highest(forward(self.network, x[None])[0].tolist(), allowed.tolist()))


@dataclass(slots=True)
class Overridden:
    """The rule, unless another choice should gain more than the network's margin over the rule's own.

    The rule also has its way where a feature is outside the range in which the network was trained, an output is not
    finite, the rule idles, its action is none of the network's choices, or nothing else is allowed. Outside a transfer
    it is the rule.
    """

    base: Rule
    network: Network
    window: Literal["sack", "full"] = "sack"
    _memory: FeatureMemory | None = field(default=None, repr=False, compare=False)
    _verdict: Verdict = field(default=Verdict.RULE, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.network.kind != "advantage":
            raise LocalError(f"a rule is overridden by the advantages of the choices, not by {self.network!r}")

    @property
    def verdict(self) -> int:
        return self._verdict

    def enter(self, memory: FeatureMemory) -> None:
        self._memory = memory

    def degree(self, state: State, usual: int, most: int) -> int:
        """Symbols that a repair combines, at most `most`: as the rule says."""
        return self.base.degree(state, usual, most)

    def ranks(self, state: State) -> bool:
        """Are losses to be resent by what completes units? As the rule says."""
        return self.base.ranks(state)

    def decide(self, state: State) -> Action:
        self._verdict = Verdict.RULE
        own, network = self.base.decide(state), self.network
        choice = _choice_of(own)
        if self._memory is None or network.margin is None or not 0 <= choice < network.choices:
            return own
        allowed = masks(state, resend=network.resend)
        if not allowed[np.arange(len(allowed)) != choice].any():
            return own
        x = self._memory.look(state, network.features)
        if not ((x >= network.low) & (x <= network.high)).all():
            self._verdict = Verdict.GUARD
            return own
        gains = forward(network, x[None])[0].tolist()
        if not np.isfinite(gains).all():
            self._verdict = Verdict.GUARD
            return own
        best = _highest(gains, allowed.tolist())
        if best == choice or not gains[best] - gains[choice] > network.margin:
            return own
        self._verdict = Verdict.OVERRIDE
        return action(state, best)
