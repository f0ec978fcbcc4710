"""What a scheduling decision may see, and what it may answer.

The sender fills a `State` at every packet opportunity (a *slot*) and asks a policy for an `Action`. Everything a policy
needs is here as plain numbers, so that the simulator, the QUIC extension and a test call the very same policy. Budget,
credit and deadline are enforced by the sender, outside the policies: the `can_*` fields tell a policy what is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class ActionKind(IntEnum):
    """The choices of the paper's section IV-B, plus the resend of the hybrid design."""

    IDLE = 0
    SOURCE = 1
    REPAIR = 2
    RESEND = 3


@dataclass(frozen=True, slots=True)
class Action:
    """One decision: send `count` (>= 1) packets of `kind`, or idle until something changes."""

    kind: ActionKind
    count: int = 1


IDLE = Action(ActionKind.IDLE)
SOURCE = Action(ActionKind.SOURCE)
REPAIR = Action(ActionKind.REPAIR)
RESEND = Action(ActionKind.RESEND)

MAX_SOURCE_BURST = 8
REPAIR_BURSTS = (1, 4, 16)


@dataclass(slots=True)
class State:
    """The sender's causal view at one slot. Counts are in packets, times in slots (one packet opportunity each).

    slots_left: Trem, slots until the last packet that can still arrive in time (>= 0).
    slots_total: T, the same at the start of the transfer (>= 1).
    rtt_slots: round-trip time in slots (> 0).
    sources_total, sources_sent: N and n.
    unit_packets: packets of the unit that the next source belongs to (its P_b); 0 when no source is left.
    unit_position: packets of that unit already sent; 0 means that the next source opens a unit.
    in_flight: I, source symbols (resends included) whose fate is unknown.
    repairs_in_flight: R; repairs_sent: all so far.
    known_lost: symbols known to be lost and not resent since.
    unresolved: sent symbols not known to have arrived.
    window: W = n - a, the span after the decoded prefix.
    feedback_deficit: m_fb, the degrees of freedom the receiver last said it lacks.
    loss_short, loss_long: eps (moving average) and eps_L (long-run mean with a prior), both in (0, 0.6].
    packets_extra: repairs and resends sent so far.
    fates: packets of this connection whose fate is known: what loss_long rests on.
    budget_left: repairs plus resends still allowed (may be infinite).
    can_source, can_repair, can_resend: what the sender would accept now.
    """

    slots_left: int = 0
    slots_total: int = 1
    rtt_slots: float = 1.0
    sources_total: int = 0
    sources_sent: int = 0
    unit_packets: int = 0
    unit_position: int = 0
    in_flight: int = 0
    repairs_in_flight: int = 0
    repairs_sent: int = 0
    known_lost: int = 0
    unresolved: int = 0
    window: int = 0
    feedback_deficit: int = 0
    packets_extra: int = 0
    fates: int = 0
    loss_short: float = 0.05
    loss_long: float = 0.05
    budget_left: float = float("inf")
    can_source: bool = False
    can_repair: bool = False
    can_resend: bool = False
