"""The compiled simulator: hand-offs on the slot clock, coefficients only, many side by side.

The same C scheduler as the sender (schedule/core.h), the same elimination as the receiver (codec/decoder.h), and the
receiver's rules of `transfer/receiver.py`; `sim.episode` drives the shipped classes over the same slots and is its
specification: packet by packet the same, from the same seeds. Misuse raises LocalError. One thread at a time.

B is the number of lanes, T of slots, N of symbols, U of units, S of path steps.
"""

from typing import Literal, NoReturn, final

import numpy as np
from numpy.typing import NDArray

from quic_pfec.schedule.policies import Policy
from quic_pfec.schedule.state import State

FEATURES_COUNT: int
"""15, in the order of `schedule.features.NAMES`."""

ACTIONS: tuple[str, ...]
"""source (a burst of at most 8, not across a unit's border), repair1, repair4, repair16, resend (one packet)."""

@final
class Scenario:
    """What does not depend on the policy: units, losses and times. Shared by lanes, never changed.

    unit_packets: int64[U] >= 1, in the order of sending; utility: float64[U] >= 0, not all zero; losses: bool[T];
    times_s: float64[T], when each slot begins, ascending from 0. The path is (rtt_s, slot_s)[i] from slot step_slots[i]
    on: int64[S], float64[S], float64[S], the first step at slot 0. deadline_s: when the receiver freezes.
    """

    def __init__(
        self,
        unit_packets: NDArray[np.int64],
        utility: NDArray[np.float64],
        losses: NDArray[np.bool_],
        times_s: NDArray[np.float64],
        step_slots: NDArray[np.int64],
        step_rtt_s: NDArray[np.float64],
        step_slot_s: NDArray[np.float64],
        deadline_s: float,
    ) -> None: ...
    def __reduce__(self) -> NoReturn: ...
    @property
    def symbols(self) -> int: ...
    @property
    def slots(self) -> int: ...

@final
class Lanes:
    """B hand-offs, each in a lane of its own. A lane must be `reset` before anything else is asked of it.

    resend: whether `masks` and `step` know the resend action; features: 1 = the paper's state, 2 = with Trem/(4 RTT) in
    the place of the source pressure (docs/decisions.md).
    """

    def __init__(self, count: int, *, resend: bool = False, features: Literal[1, 2] = 1) -> None: ...
    def __reduce__(self) -> NoReturn: ...
    def __len__(self) -> int: ...
    def reset(
        self,
        lane: int,
        scenario: Scenario,
        policy: Policy | None = None,
        *,
        window: Literal["sack", "full"] = "sack",
        budget: float = ...,
        degree: int = 48,
        symbol_size: int = 64,
        history: tuple[int, int] = (0, 0),
        feedback_loss: float = 0.0,
        fates_loss: float = 0.0,
        feedback_delay_s: float = 0.0,
        fates_delay_s: float = 0.0,
        reordering: float = 0.0,
        reordering_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        """A new hand-off, at its first decision unless it has none.

        policy: a compiled rule, which `rule_actions`, `advance` and `finish` follow; None = every decision comes from
        `step`, and `window` says what repairs are over (else the policy's own window counts). budget: packets of repair
        and resend together, infinite by default. The others as in `sim.episode.Settings`.
        """

    # deciding: a lane stands at a decision, or is done. B lanes in one call each.

    def observe(self, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """The features, float32[B, 15]; zeros for a lane that is done."""

    def masks(self, out: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
        """What may be chosen, bool[B, 5] in the order of `ACTIONS`; the last column is False without `resend`.

        A lane that is not done has at least one: where nothing is allowed it waits by itself.
        """

    def step(self, actions: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Take actions, int64[B], and go on to the next decisions: (reward float64[B], done bool[B]).

        The reward is the paper's: growth of J_block plus that of the potential, which is 0 at the start and at the end,
        so that rewards sum to the J_block at the deadline. -1 leaves a lane as it is; so is a lane that is done, whose
        reward is 0. Raises LocalError for an action whose mask is False.
        """

    def rule_actions(self) -> NDArray[np.int64]:
        """What each lane's own policy would do, int64[B]: an index of `ACTIONS`, -1 = idle, done, or no policy."""

    def advance(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Follow each lane's own policy to its first decision at or after slot slots[b], int64[B]: done, bool[B].

        -1 leaves a lane as it is. Raises LocalError for a lane without a policy.
        """

    def finish(self, lanes: NDArray[np.int64] | None = None) -> None:
        """Follow the policies of `lanes` (default all) to the end."""

    def copy(self, source: int, target: int) -> None:
        """`target` becomes what `source` is now, random numbers included: same action, same future."""

    def set_policy(self, lane: int, policy: Policy | None) -> None:
        """From now on. A rule that remembers begins anew."""

    # looking

    def slots(self) -> NDArray[np.int64]:
        """The slot each lane stands at, int64[B]; T = done."""

    def done(self) -> NDArray[np.bool_]: ...
    def j_block(self) -> NDArray[np.float64]:
        """Utility of the units complete by now at the receiver, a share of all, float64[B]."""

    def j_frac(self) -> NDArray[np.float64]:
        """Utility of units by the share of their packets that is there by now, float64[B]."""

    def state(self, lane: int) -> State:
        """What a policy would see now."""

    def carried(self, lane: int) -> NDArray[np.uint8]:
        """`transfer.sender.FrameKind` of each slot so far, 255 = none; uint8[T]."""

    def known(self, lane: int) -> NDArray[np.bool_]:
        """Symbols received or decoded, bool[N]."""

    def complete(self, lane: int) -> NDArray[np.bool_]:
        """Units that are complete, bool[U]."""

    def present(self, lane: int) -> NDArray[np.int64]:
        """Packets of each unit that are there, int64[U]."""

    def sender_counters(self, lane: int) -> dict[str, int]:
        """source, repair, resent, manifests, losses, feedback, feedback_ignored, slots_credit."""

    def receiver_counters(self, lane: int) -> dict[str, int]:
        """source, duplicate, recovered, repairs_useful, repairs_useless, repairs_dropped, late, feedback."""

    def frozen_s(self, lane: int) -> float:
        """When the receiver froze; infinite before."""
