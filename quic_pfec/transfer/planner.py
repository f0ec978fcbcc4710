"""What the next packets carry: the masks around a policy, in plain Python.

This is the specification of the compiled planner (`schedule._policy.Planner`, schedule/core.c), which senders use: same
names, same answers, same bytes. Budget, credit, deadline and the manifest's copies are enforced here, outside the
policies. The shell (`transfer.sender`) validates, and turns plans into frames.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quic_pfec.schedule.features import FeatureMemory
from quic_pfec.schedule.flec import FlecRt, Listener
from quic_pfec.schedule.learned import Learned, Verdict
from quic_pfec.schedule.policies import Policy
from quic_pfec.schedule.state import IDLE, Action, ActionKind, State
from quic_pfec.transfer.ledger import Ledger, repair_header
from quic_pfec.wire import varint
from quic_pfec.wire.errors import LocalError
from quic_pfec.wire.frames import (
    MANIFEST,
    REPAIR,
    SOURCE,
    ManifestFrame,
    RepairFrame,
    SourceFrame,
    repair_overhead,
    source_overhead,
)

__all__ = ["MANIFEST_CHUNK", "MANIFEST_COPIES", "MANIFEST_EVERY", "MAX_HEAD_SPAN", "CodingSet", "Plan", "Planner"]

MANIFEST_EVERY = 16  # packets; beyond a mean bad spell of 10 (docs/wire.md §6)
MANIFEST_COPIES = 3  # at least, even when feedback comes at once
MANIFEST_CHUNK = 1024  # bytes of manifest a frame: fits a 1,200-byte datagram
MAX_HEAD_SPAN = 256  # ids in a repair's bitmap: 32 bytes, what a 1,452-byte datagram has room for

_MANIFEST, _SOURCE, _REPAIR, _RESEND = range(4)  # `sender.FrameKind`

CodingSet = tuple[int, int, bytes, int, int]
Plan = tuple[int, int, int | None, CodingSet | None, int]
"""One packet: `FrameKind`; sid, offset in the manifest or repair number; token; coding set of a repair."""


class Store(Protocol):
    """The part of the codec's Encoder that writing frames takes."""

    def symbol_into(self, sid: int, out: Any, offset: int, /) -> None: ...

    def repair_into(
        self, transfer_id: int, repair_number: int, first_sid: int, degree: int, head_span: int, head: bytes,
        tail_offset: int, tail_span: int, out: Any, offset: int, /,
    ) -> None: ...  # fmt: skip


class Planner:
    """Plans the packets of one transfer. Arguments as checked and derived by `Sender`; budget in packets.

    unit_utility: of each unit in the order of sending; learned policies need it (LocalError).
    """

    def __init__(
        self,
        ledger: Ledger,
        policy: Policy,
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
    ) -> None:
        self.ledger = ledger
        # For every sid: packets of its unit, and its place in it.
        self._unit_packets = unit_packets.data
        self._unit_position = unit_position.data
        self._unit_utility = unit_utility
        self._budget_total = budget
        self._memory: FeatureMemory | None = None
        self._manifest = manifest
        self._deadline_s = deadline_s
        self._transfer_id = transfer_id
        self._symbol_size = symbol_size
        self._degree = degree
        self._max_degree = max_degree
        self._max_window = max_window
        self._credit = credit
        self._budget = budget
        self._running = True
        self._late = False
        self._ranked = False
        self._repair_number = 0
        self._policy: Policy
        self._listener: Listener | None
        self._learned: Learned | None
        self._burst: Action | None = None
        self._verdict = int(Verdict.RULE)
        self._overridden = self._guarded = 0
        self._chosen: tuple[float, Action] | None = None
        self._heard = False
        self._feedback_deficit = 0
        self._since_manifest = MANIFEST_EVERY
        self._manifest_retry_s = float("inf")
        self._manifest_queue: list[int] = []
        self._source = self._repair = self._resent = self._manifests = 0
        self._frame_bytes = self._losses = self._slots_credit = 0
        self._first_packet_s: float | None = None
        self._last_packet_s: float | None = None
        self.set_path(rtt_s, min_rtt_s, slot_s, reserved_s)
        self._state = State(sources_total=ledger.symbols)
        self._state.slots_total = max(1, self._slots_left(now))
        self.policy = policy

    @property
    def policy(self) -> Policy:
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        """A policy that listens begins without a past."""
        self._policy = policy
        self._listener = policy if isinstance(policy, Listener) else None
        if self._listener is not None:
            self._listener.start(self.ledger)
        self._learned = policy if isinstance(policy, Learned) else None
        if self._learned is not None:
            self._learned.enter(self._remember())
        self._burst = self._chosen = None

    def _remember(self) -> FeatureMemory:
        if self._memory is None:
            sizes = np.asarray(self._unit_packets)[np.asarray(self._unit_position) == 0].astype(np.int64)
            utility = self._unit_utility
            if utility is None or len(utility) != len(sizes):
                raise LocalError("a learned policy needs the utility of each unit, in the order of sending")
            self._memory = FeatureMemory(sizes, utility, self.slots_total, self._budget_total, self._degree)
        return self._memory

    @property
    def packets(self) -> int:
        """Sent so far; a manifest counts once it is whole."""
        return self._source + self._repair + self._resent + self._manifests

    @property
    def counters(self) -> tuple[int, int, int, int, int, int, int, float | None, float | None]:
        """source, repair, resent, manifests, frame_bytes, losses, slots_credit, first_packet_s, last_packet_s."""
        sent = (self._source, self._repair, self._resent, self._manifests)
        return *sent, self._frame_bytes, self._losses, self._slots_credit, self._first_packet_s, self._last_packet_s

    @property
    def overrides(self) -> tuple[int, int]:
        """Packets that a network chose in the place of its rule, and those of which a guard left the rule its way."""
        return self._overridden, self._guarded

    @property
    def flec(self) -> tuple[int, int, float, float, float] | None:
        """md, ad, eps, p_ge, r_ge under a policy of `schedule.flec`, else None."""
        if not isinstance(self._policy, FlecRt):
            return None
        counters = self._policy.counters(self._view())
        return counters.md, counters.ad, counters.eps, counters.p_ge, counters.r_ge

    # the path

    def set_path(self, rtt_s: float, min_rtt_s: float, slot_s: float, reserved_s: float) -> None:
        if not slot_s > 0:
            raise LocalError(f"a packet takes time: {slot_s} s")
        self._rtt_s = rtt_s
        self._min_rtt_s = min_rtt_s
        self._slot_s = slot_s
        self._reserved_s = reserved_s
        self._chosen = None

    def extend(self, now: float, deadline_s: float) -> None:
        """The receiver has frozen and takes late symbols: the same rule goes on, by a second deadline.

        The manifest is over: nobody who has not heard of the transfer by then could use it (docs/wire.md §8).
        """
        self._deadline_s = deadline_s
        self._late = True
        self._burst = self._chosen = None
        self._state.slots_total = max(1, self._slots_left(now))
        if self._memory is not None:
            self._memory.extend(self.slots_total)

    @property
    def send_cutoff_s(self) -> float:
        return self._deadline_s - self._min_rtt_s / 2

    @property
    def slots_total(self) -> int:
        return self._state.slots_total

    def _slots_left(self, now: float) -> int:
        return max(0, int((self.send_cutoff_s - now - self._reserved_s) / self._slot_s))

    # deciding

    def finished(self, now: float) -> bool:
        return not self._running or self.ledger.known == self.ledger.symbols or now >= self.send_cutoff_s

    def ready(self, now: float) -> bool:
        if self.finished(now):
            return False
        return self._manifest_due(now) or self._choose(now) is not IDLE

    def next_timer(self) -> float | None:
        if not self._running:
            return None
        return self.send_cutoff_s if self._heard else min(self._manifest_retry_s, self.send_cutoff_s)

    def state(self, now: float) -> State:
        """The policy's view at `now`; the object is reused by later calls."""
        state = self._view()
        state.slots_left = self._slots_left(now)
        if self._memory is not None:
            self._memory.view(state)
        return state

    def _view(self) -> State:
        ledger, state = self.ledger, self._state
        state.rtt_slots = self._rtt_s / self._slot_s
        state.sources_sent = ledger.next
        more = ledger.next < ledger.symbols
        state.unit_packets = self._unit_packets[ledger.next] if more else 0
        state.unit_position = self._unit_position[ledger.next] if more else 0
        state.in_flight = ledger.in_flight
        state.repairs_in_flight = ledger.repairs_in_flight
        state.repairs_sent = self._repair
        state.known_lost = ledger.known_lost
        state.unresolved = ledger.unresolved
        state.window = ledger.next - ledger.prefix
        state.feedback_deficit = self._feedback_deficit
        state.packets_extra = self._repair + self._resent
        state.fates = ledger.loss.fates
        state.loss_short = ledger.loss.short
        state.loss_long = ledger.loss.long
        state.budget_left = self._budget
        state.can_source = more and ledger.next < self._credit
        state.can_repair = self._budget >= 1 and ledger.unresolved > 0
        state.can_resend = self._budget >= 1 and ledger.known_lost > 0
        return state

    def _choose(self, now: float) -> Action:
        if self._chosen is not None and self._chosen[0] == now:
            return self._chosen[1]
        state = self.state(now)
        action, self._verdict = self._burst, int(Verdict.RULE)
        if action is None or not _allowed(action, state):
            self._burst = None
            action = self._policy.decide(state)
            if self._learned is not None:
                self._verdict = self._learned.verdict
            if not _allowed(action, state):
                action = IDLE
        if action.kind is not ActionKind.RESEND and _blocked_by_credit(state):
            self._slots_credit += 1
        self._chosen = (now, action)
        return action

    def _manifest_due(self, now: float) -> bool:
        if self._late:
            return False
        if self._manifest_queue:
            return True
        if not self._heard and (self._since_manifest >= MANIFEST_EVERY or now >= self._manifest_retry_s):
            return True
        all_out = self.ledger.next == self.ledger.symbols
        return self._manifests < MANIFEST_COPIES and (all_out or self._since_manifest >= MANIFEST_EVERY)

    # planning

    def plan(self, now: float, max_packets: int, bytes_free: int) -> list[Plan]:
        plans: list[Plan] = []
        while len(plans) < max_packets and not self.finished(now):
            planned = (
                self._plan_manifest(now, bytes_free) if self._manifest_due(now) else self._plan_symbol(now, bytes_free)
            )
            if planned is None:
                break
            plan, size = planned
            if self._first_packet_s is None:
                self._first_packet_s = now
            self._last_packet_s = now
            self._frame_bytes += size
            plans.append(plan)
        return plans

    def manifest_frame(self, offset: int, now: float) -> ManifestFrame:
        # The sender states what is left, because only it has RTT samples (docs/wire.md §8).
        remaining_s = max(0.0, self._deadline_s - now - self._min_rtt_s / 2)
        data = self._manifest[offset : offset + MANIFEST_CHUNK]
        return ManifestFrame(self._transfer_id, len(self._manifest), offset, int(remaining_s * 1e6), data)

    def _plan_manifest(self, now: float, bytes_free: int) -> tuple[Plan, int] | None:
        if not self._manifest_queue:
            self._manifest_queue = list(range(0, len(self._manifest), MANIFEST_CHUNK))
        offset = self._manifest_queue[0]
        size = self.manifest_frame(offset, now).size()
        if size > bytes_free:
            return None
        self._manifest_queue.pop(0)
        if not self._manifest_queue:
            self._manifests += 1
            self._since_manifest = 0
            # Also while nothing else may be sent, for want of credit say: about a PTO later (RFC 9002 §6.2.1).
            self._manifest_retry_s = now + 1.5 * self._rtt_s + 0.025
        return (_MANIFEST, offset, None, None, 0), size

    def _plan_symbol(self, now: float, bytes_free: int) -> tuple[Plan, int] | None:
        action = self._choose(now)
        if action is IDLE:
            return None
        ledger = self.ledger
        plan: Plan
        if action.kind is ActionKind.REPAIR:
            # 8 bytes more for the fields whose size is not known yet.
            room = bytes_free - self._symbol_size - repair_overhead(self._transfer_id, 0, 0, self._max_window) - 8
            if room < 1:
                return None
            coding_set = (
                ledger.full_set(self._max_window)
                if self._policy.window == "full"
                else ledger.sack_set(self._max_window, min(MAX_HEAD_SPAN, 8 * room))
            )
            _, head_span, _, tail_offset, tail_span = coding_set
            ask = getattr(self._policy, "degree", None)
            degree = self._degree if ask is None else ask(self._state, self._degree, self._max_degree)
            size = repair_overhead(self._transfer_id, head_span, tail_offset, tail_span, degree)
            plan = (_REPAIR, self._repair_number, ledger.send_repair(), coding_set, degree)
            self._repair_number += 1
            self._budget -= 1
            self._repair += 1
        else:
            size = source_overhead(self._transfer_id)
            if size + self._symbol_size > bytes_free:
                return None
            if action.kind is ActionKind.RESEND:
                self._rank()
                plan = (_RESEND, *ledger.send_lost(), None, 0)
                self._budget -= 1
                self._resent += 1
            else:
                plan = (_SOURCE, *ledger.send_source(), None, 0)
                self._source += 1
        if self._listener is not None:
            _, number, token, coded, _ = plan
            assert token is not None
            stretch = None if coded is None else _stretch(coded)
            self._listener.on_sent(self._state, action.kind, number, token, stretch, now)
        self._overridden += self._verdict == Verdict.OVERRIDE
        self._guarded += self._verdict == Verdict.GUARD
        self._burst = Action(action.kind, action.count - 1) if action.count > 1 else None
        self._since_manifest += 1
        self._chosen = None
        return plan, size + self._symbol_size

    def _rank(self) -> None:
        ranks = getattr(self._policy, "ranks", None)
        if not self._ranked and ranks is not None and ranks(self._state):
            self._ranked = True
            self.ledger.rank(np.asarray(self._unit_packets), np.asarray(self._unit_position))

    def plan_into(
        self, encoder: Store, now: float, max_packets: int, bytes_free: int, out: Any, stride: int, offset: int
    ) -> tuple[list[int], list[int], list[int | None]]:
        """Plans, and writes frame i, its type first, at `offset + i * stride` of `out`: (kinds, lengths, tokens)."""
        view = memoryview(out)
        if view.readonly:
            raise LocalError("cannot be written to: read-only")
        if stride < 1 or offset < 0 or bytes_free > stride:
            raise LocalError(f"frames of {bytes_free} bytes, {stride} apart, from {offset} on")
        if max_packets > 0 and offset + (max_packets - 1) * stride + max(0, bytes_free) > view.nbytes:
            raise LocalError(f"{view.nbytes} bytes have no room for {max_packets} frames")
        plans = self.plan(now, max_packets, bytes_free)
        lengths = []
        for index, plan in enumerate(plans):
            data = self._frame(encoder, plan, now)
            at = offset + index * stride
            view.cast("B")[at : at + len(data)] = data
            lengths.append(len(data))
        return [plan[0] for plan in plans], lengths, [plan[2] for plan in plans]

    def _frame(self, encoder: Store, plan: Plan, now: float) -> bytes:
        kind, number, _, coding_set, degree = plan
        symbol = bytearray(self._symbol_size)
        if kind == _MANIFEST:
            return varint.encode(MANIFEST) + self.manifest_frame(number, now).body()
        if coding_set is None:
            encoder.symbol_into(number, symbol, 0)
            return varint.encode(SOURCE) + SourceFrame(self._transfer_id, number, memoryview(symbol)).body()
        header = repair_header(self._transfer_id, number, degree, coding_set)
        encoder.repair_into(self._transfer_id, number, coding_set[0], degree, *coding_set[1:], symbol, 0)
        return varint.encode(REPAIR) + RepairFrame(header, memoryview(symbol)).body()

    # learning

    def fate(self, token: int, delivered: bool, probe: bool) -> None:
        self._chosen = None
        fresh = self.ledger.fate(token, delivered, probe=probe)
        self._losses += not delivered and not probe
        if fresh and self._listener is not None:
            self._listener.on_fate(token, delivered, probe)
        if fresh and self._memory is not None and not probe:
            self._memory.on_fate(not delivered)

    def fates(self, tokens: Iterable[int], delivered: bool) -> None:
        for token in tokens:
            self.fate(token, delivered, False)

    def feedback(self, deficit: int, credit: int, running: bool) -> None:
        """What a PFEC_ACK says besides its ranges, which go to `ledger.learn_known`."""
        self._chosen = None
        self._heard = True
        self._feedback_deficit = deficit
        self._credit = max(self._credit, credit)
        self._running = running


def _stretch(coding_set: CodingSet) -> tuple[int, int]:
    """[first, stop) of a coding set."""
    first_sid, head_span, _, tail_offset, tail_span = coding_set
    return first_sid, first_sid + head_span + tail_offset + tail_span


def _allowed(action: Action, state: State) -> bool:
    """The masks every policy is under: budget, credit, time (a burst must fit what is left)."""
    match action.kind:
        case ActionKind.SOURCE:
            return state.can_source
        case ActionKind.REPAIR:
            return state.can_repair and action.count <= min(state.budget_left, max(1, state.slots_left))
        case ActionKind.RESEND:
            return state.can_resend
    return False


def _blocked_by_credit(state: State) -> bool:
    """Only missing credit keeps the sender from sending new symbols."""
    return state.sources_sent < state.sources_total and not state.can_source
