"""Hand-offs by the compiled engine, with the settings and results of `sim.episode`.

`sim.episode` drives the classes that ship, payloads and all; this engine runs the same C scheduler and the same
elimination on coefficients alone. Both do the same in every slot, which a test compares; sweeps and training use this
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quic_pfec.schedule.policies import Policy, make_policy
from quic_pfec.sim._engine import ACTIONS, FEATURES_COUNT, Lanes, Scenario
from quic_pfec.sim.episode import Settings
from quic_pfec.wire.errors import LocalError

__all__ = ["ACTIONS", "FEATURES_COUNT", "Lanes", "Outcome", "Scenario", "make_scenario", "play", "reset"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the receiver had at its deadline; counters as of `Lanes`."""

    j_block: float
    j_frac: float
    sender: dict[str, int]
    receiver: dict[str, int]


def make_scenario(
    unit_packets: NDArray[np.int64], utility: NDArray[np.float64], losses: NDArray[np.bool_], settings: Settings
) -> Scenario:
    """The hand-off of `sim.episode.run_episode` without its policy. Raises LocalError for what that would refuse."""
    if len(losses) < settings.slots:
        raise LocalError(f"{settings.slots} slots need as many losses, {len(losses)} given")
    time = settings.timeline()
    return Scenario(
        unit_packets,
        utility,
        losses[: settings.slots],
        time.times_s,
        np.array([step.slot for step in time.steps], dtype=np.int64),
        np.array([step.rtt_s for step in time.steps]),
        np.array([step.slot_s for step in time.steps]),
        time.deadline_s,
    )


def reset(
    lanes: Lanes,
    lane: int,
    scenario: Scenario,
    settings: Settings,
    policy: Policy | None,
    window: Literal["sack", "full"] = "sack",
) -> None:
    """`Lanes.reset` with the settings' values; what is in the scenario is not read again."""
    share = settings.repair_budget
    lanes.reset(
        lane,
        scenario,
        policy,
        window=window,
        budget=np.inf if share is None else float(int(share * scenario.symbols + 1e-9)),
        degree=settings.degree,
        symbol_size=settings.symbol_size,
        history=settings.history,
        feedback_loss=settings.feedback_loss,
        fates_loss=settings.fates_loss,
        feedback_delay_s=settings.feedback_delay_s,
        fates_delay_s=settings.fates_delay_s,
        reordering=settings.reordering,
        reordering_s=settings.reordering_s,
        seed=settings.seed,
    )


def play(scenario: Scenario, settings: Settings, policies: Sequence[str | Policy]) -> list[Outcome]:
    """The same hand-off under each policy, a name of `schedule.policies` or a compiled one."""
    lanes = Lanes(1)
    outcomes = []
    for policy in policies:
        reset(lanes, 0, scenario, settings, make_policy(policy) if isinstance(policy, str) else policy)
        lanes.finish()
        outcomes.append(
            Outcome(
                float(lanes.j_block()[0]),
                float(lanes.j_frac()[0]),
                lanes.sender_counters(0),
                lanes.receiver_counters(0),
            )
        )
    return outcomes
