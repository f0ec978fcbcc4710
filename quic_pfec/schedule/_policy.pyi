"""The compiled scheduler core: `Policy`, `Ledger` and `Planner`, the twins of the Python modules named at each.

Same names, arguments, results and numbers as the twins. Misuse raises LocalError, an id or token that does not exist
IndexError. One thread at a time: every call holds the interpreter lock.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Protocol, final

import numpy as np
from numpy.typing import NDArray

from quic_pfec.schedule.network import Network
from quic_pfec.schedule.policies import Policy as AnyPolicy
from quic_pfec.schedule.policies import Window
from quic_pfec.schedule.state import Action, State

class _LossEstimate(Protocol):
    @property
    def values(self) -> Sequence[float]: ...

class _Store(Protocol):
    def symbol_into(self, sid: int, out: Any, offset: int, /) -> None: ...
    def repair_into(
        self, transfer_id: int, repair_number: int, first_sid: int, degree: int, head_span: int, head: bytes,
        tail_offset: int, tail_span: int, out: Any, offset: int, /,
    ) -> None: ...  # fmt: skip

@final
class Policy:
    """A rule of `schedule.policies`, compiled: `compiled` there makes it of the twin, with its parameters."""

    name: str
    parameters: dict[str, float]
    network: Network | None
    def __init__(
        self, name: str, window: Window = "sack", *, network: Network | None = None, **parameters: float
    ) -> None: ...
    def __reduce__(self) -> NoReturn: ...
    @property
    def window(self) -> Window: ...
    @property
    def oldest_first(self) -> bool: ...
    def decide(self, state: State) -> Action:
        """Of the state alone: the rule of an overridden one. LocalError for `ddqn`, which needs a transfer's past."""

    def outputs(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """`schedule.network.forward` of its network, float32[B, A] of float32[B, 15]."""

    def degree(self, state: State, usual: int, most: int) -> int:
        """Symbols that a repair combines, where `usual` is what the transfer was set to and `most` the peer's limit."""

    def ranks(self, state: State) -> bool:
        """Are losses to be resent by what completes units (`Ledger.rank`)?"""

    def packed(self) -> bytes:
        """The C struct `policy`, for other compiled code in this process. Good while this object lives."""

@final
class Ledger:
    """`transfer.ledger.Ledger`. priority: float64[N], lower is resent first; at most 2^24 symbols.

    `loss.values` are three doubles in one writable buffer: fates, losses, moving average.
    """

    loss: Any
    def __init__(self, priority: NDArray[np.float64], loss: _LossEstimate) -> None: ...
    def __reduce__(self) -> NoReturn: ...
    @property
    def symbols(self) -> int: ...
    @property
    def next(self) -> int: ...
    @property
    def prefix(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def repairs_in_flight(self) -> int: ...
    @property
    def known_lost(self) -> int: ...
    @property
    def known(self) -> int: ...
    @property
    def unresolved(self) -> int: ...
    @property
    def losses_queued(self) -> int: ...
    def send_source(self) -> tuple[int, int]: ...
    def send_lost(self) -> tuple[int, int]: ...
    def rank(self, unit_packets: NDArray[np.int32], unit_position: NDArray[np.int32]) -> None: ...
    def send_repair(self) -> int: ...
    def is_lost(self, sid: int) -> bool: ...
    def fate(self, token: int, delivered: bool, *, probe: bool = False) -> bool: ...
    def learn_known(self, start: int, stop: int) -> None: ...
    def sack_set(self, max_window: int, max_head_span: int) -> tuple[int, int, bytes, int, int]: ...
    def full_set(self, max_window: int) -> tuple[int, int, bytes, int, int]: ...

@final
class Planner:
    """`transfer.planner.Planner`."""

    ledger: Ledger
    policy: AnyPolicy
    def __init__(
        self,
        ledger: Ledger,
        policy: AnyPolicy,
        unit_packets: NDArray[np.int32],
        unit_position: NDArray[np.int32],
        manifest: bytes,
        *,
        now: float,
        deadline_s: float,
        transfer_id: int,
        symbol_size: int,
        degree: int,
        max_degree: int,
        max_window: int,
        credit: int,
        budget: float,
        rtt_s: float,
        min_rtt_s: float,
        slot_s: float,
        reserved_s: float,
        unit_utility: NDArray[np.float64] | None = None,
    ) -> None: ...
    def __reduce__(self) -> NoReturn: ...
    def set_path(self, rtt_s: float, min_rtt_s: float, slot_s: float, reserved_s: float) -> None: ...
    def extend(self, now: float, deadline_s: float) -> None: ...
    @property
    def send_cutoff_s(self) -> float: ...
    @property
    def slots_total(self) -> int: ...
    @property
    def packets(self) -> int: ...
    @property
    def counters(self) -> tuple[int, int, int, int, int, int, int, float | None, float | None]: ...
    @property
    def overrides(self) -> tuple[int, int]: ...
    @property
    def flec(self) -> tuple[int, int, float, float, float] | None: ...
    def finished(self, now: float) -> bool: ...
    def ready(self, now: float) -> bool: ...
    def next_timer(self) -> float | None: ...
    def state(self, now: float) -> State: ...
    def fate(self, token: int, delivered: bool, probe: bool) -> None: ...
    def fates(self, tokens: Iterable[int], delivered: bool) -> None: ...
    def feedback(self, deficit: int, credit: int, running: bool) -> None: ...
    def plan(
        self, now: float, max_packets: int, bytes_free: int
    ) -> list[tuple[int, int, int | None, tuple[int, int, bytes, int, int] | None]]: ...
    def plan_into(
        self, encoder: _Store, now: float, max_packets: int, bytes_free: int, out: Any, stride: int, offset: int
    ) -> tuple[list[int], list[int], list[int | None]]: ...
