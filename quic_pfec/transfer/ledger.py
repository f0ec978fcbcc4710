"""What the sender knows of every symbol: not sent, in flight, known lost, known to have arrived.

The ledger is the one place where packet fates and the receiver's feedback meet. Neither is enough alone: QUIC's
acknowledgements drop old ranges and show no rank, feedback frames can be lost (docs/wire.md §9). `Ledger` is the
specification of the compiled one (`schedule._policy.Ledger`, schedule/ledger.c), which senders use: same names, same
answers. `LossEstimate` is one and the same for both.
"""

from __future__ import annotations

from array import array
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from quic_pfec.wire.frames import RepairHeader

UNSENT, IN_FLIGHT, LOST, KNOWN = range(4)
_REPAIR, _SETTLED = -1, -2  # what a token stands for, besides a sid
TURNS_PER_LOSS = 5  # repairs over one stretch of a wide head before the next: measured best among 1, 2, 5, no end


class LossEstimate:
    """Loss seen on the path: eps, a moving average, and eps_L, the long-run mean with a prior.

    `fates` and `losses` may be seeded from earlier transfers of the same connection. `values` holds fates, losses and
    the moving average in one place, where also the compiled ledgers count: transfers of a connection share it.
    """

    __slots__ = ("values",)

    def __init__(self, fates: int = 0, losses: int = 0) -> None:
        short = 0.05 if fates == 0 else min(0.6, max(0.002, losses / fates))
        self.values = array("d", (fates, losses, short))

    @property
    def fates(self) -> int:
        return int(self.values[0])

    @property
    def losses(self) -> int:
        return int(self.values[1])

    @property
    def short(self) -> float:
        return self.values[2]

    def add(self, lost: bool) -> None:
        self.values[0] += 1
        self.values[1] += lost
        self.values[2] = min(0.6, max(0.002, self.short + 0.01 * (lost - self.short)))

    @property
    def long(self) -> float:
        # Prior of one loss in twenty (docs/decisions.md, "The scheduler"): before any feedback this is 0.05.
        return min(0.6, (self.losses + 1) / (self.fates + 20))


class Ledger:
    """State of N symbols. `priority[sid]` orders resends, lower first.

    `next` is the first symbol never sent, `prefix` the first symbol not known to have arrived.
    """

    def __init__(self, priority: NDArray[np.float64], loss: LossEstimate) -> None:
        symbols = len(priority)
        self.symbols = symbols
        self.loss = loss
        self.next = 0
        self.prefix = 0
        self.in_flight = 0
        self.repairs_in_flight = 0
        self.known_lost = 0
        self.known = 0
        self._priority = priority
        self._units: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None  # once `rank` was called
        self._state: NDArray[np.uint8] = np.zeros(symbols + 1, dtype=np.uint8)  # one sentinel, never KNOWN
        self._at = memoryview(self._state.data)  # scalar access: a tenth of what numpy takes
        self._tokens: list[int] = []  # token -> sid, _REPAIR, or _SETTLED once its fate is known
        self._fated = 0  # 1 + highest sid whose first fate is known: where the unbroken tail in flight begins
        self._lost_heap: list[tuple[float, int]] = []
        self._stretch_start = self._stretch_stop = self._stretch_turns = 0  # of a head too wide for one bitmap

    @property
    def unresolved(self) -> int:
        """Sent symbols not known to have arrived."""
        return self.in_flight + self.known_lost

    @property
    def losses_queued(self) -> int:
        """Entries of the queue of known losses, those included that feedback has resolved."""
        return len(self._lost_heap)

    # sending

    def send_source(self) -> tuple[int, int]:
        """The next new symbol leaves: returns (sid, token)."""
        sid = self.next
        self.next += 1
        return sid, self._sent(sid)

    def send_lost(self) -> tuple[int, int]:
        """The most useful known loss leaves again: returns (sid, token). Needs known_lost > 0."""
        while True:
            _, sid = heappop(self._lost_heap)
            if self._at[sid] == LOST:
                self.known_lost -= 1
                return sid, self._sent(sid)

    def rank(self, unit_packets: NDArray[np.int32], unit_position: NDArray[np.int32]) -> None:
        """From now on losses are resent by priority times the packets of the unit over those that it lacks.

        What completes most for a packet goes first: with a budget that cannot save all, utility in units that stay
        incomplete is lost. Both arrays are of each symbol: packets of its unit, its place in it.
        """
        self._units = unit_packets, unit_position
        lost = [sid for _, sid in self._lost_heap if self._at[sid] == LOST]
        self._lost_heap = [(self._urgency(sid), sid) for sid in lost]
        heapify(self._lost_heap)

    def _urgency(self, sid: int) -> float:
        if self._units is None:
            return float(self._priority[sid])
        packets, position = int(self._units[0][sid]), int(self._units[1][sid])
        first = sid - position
        lacking = self._at[first : first + packets].tobytes().count(LOST)
        return float(self._priority[sid]) * packets / max(1, lacking)

    def send_repair(self) -> int:
        self._tokens.append(_REPAIR)
        self.repairs_in_flight += 1
        return len(self._tokens) - 1

    def _sent(self, sid: int) -> int:
        token = len(self._tokens)
        self._tokens.append(sid)
        self._at[sid] = IN_FLIGHT
        self.in_flight += 1
        return token

    # learning

    def is_lost(self, sid: int) -> bool:
        """Known to be lost, and not sent again since."""
        return self._at[sid] == LOST

    def fate(self, token: int, delivered: bool, *, probe: bool = False) -> bool:
        """QUIC says what became of the packet that carried `token`: False if it had said so before.

        A `probe` is no observation of loss.
        """
        sid = self._tokens[token]
        self._tokens[token] = _SETTLED
        if sid == _SETTLED:
            return False
        if not probe:
            self.loss.add(not delivered)
        if sid == _REPAIR:
            self.repairs_in_flight -= 1
            return True
        self._fated = max(self._fated, sid + 1)
        if delivered:
            self._mark_known(sid)
        elif self._at[sid] == IN_FLIGHT:  # by this very packet: a symbol leaves again only after it was lost
            self._at[sid] = LOST
            self.in_flight -= 1
            self.known_lost += 1
            heappush(self._lost_heap, (self._urgency(sid), sid))
        return True

    def _mark_known(self, sid: int) -> None:
        state = self._at[sid]
        if state == KNOWN:
            return
        if state == IN_FLIGHT:
            self.in_flight -= 1
        else:
            self.known_lost -= 1
        self._at[sid] = KNOWN
        self.known += 1
        if sid == self.prefix:
            self._advance()

    def learn_known(self, start: int, stop: int) -> None:
        """The receiver knows every symbol of [start, stop), stop <= next: received or decoded."""
        start = max(start, self.prefix)
        if start >= stop:
            return
        part = self._at[start:stop].tobytes()  # counting bytes: ranges are many, short and mostly old news
        fresh = stop - start - part.count(KNOWN)
        if fresh == 0:
            return
        flying = part.count(IN_FLIGHT)
        self.in_flight -= flying
        self.known_lost -= fresh - flying
        self.known += fresh
        self._state[start:stop] = KNOWN
        self._fated = max(self._fated, stop)
        if len(self._lost_heap) > 64 + 4 * self.known_lost:
            self._lost_heap = [item for item in self._lost_heap if self._at[item[1]] == LOST]
            heapify(self._lost_heap)
        self._advance()

    def _advance(self) -> None:
        if self._at[self.prefix] != KNOWN:
            return
        while True:  # jump in strides: the run of known symbols may be long
            part = self._state[self.prefix : self.prefix + 512]
            unknown = np.flatnonzero(part != KNOWN)
            if len(unknown):
                self.prefix += int(unknown[0])
                return
            self.prefix += len(part)

    # coding sets (docs/wire.md §4: head = presumed lost, always coded; tail = in flight, sampled)

    def sack_set(self, max_window: int, max_head_span: int) -> tuple[int, int, bytes, int, int]:
        """The unresolved symbols as (first_sid, head_span, head, tail_offset, tail_span). Needs unresolved > 0.

        A head that does not fit is coded in stretches, from the oldest on, and successive calls take turns: any subset
        is legal (docs/wire.md §4), and what no repair names no repair can save.
        """
        border = max(self.prefix, min(self._fated, self.next))
        heads = self.unresolved - (self.next - border)
        if heads == 0:
            return border, 0, b"", 0, min(self.next - border, max_window)
        reach = min(max_head_span, max_window)
        head_ids = self._unresolved_in(self.prefix, min(border, self.prefix + reach))
        if len(head_ids) < heads:
            head_ids = self._stretch(border, max_window, reach)
        first = int(head_ids[0])
        head_span = int(head_ids[-1]) - first + 1
        bits = np.zeros(head_span, dtype=np.uint8)
        bits[head_ids - first] = 1
        head = np.packbits(bits, bitorder="little").tobytes()
        tail_offset = border - (first + head_span)
        tail_span = min(self.next - border, first + max_window - border)
        if tail_span <= 0:
            return first, head_span, head, 0, 0
        return first, head_span, head, tail_offset, tail_span

    def _unresolved_in(self, start: int, stop: int) -> NDArray[np.int64]:
        ids: NDArray[np.int64] = np.flatnonzero(self._state[start:stop] != KNOWN) + start
        return ids

    def _stretch(self, border: int, max_window: int, reach: int) -> NDArray[np.int64]:
        """The part of the head whose turn it is. One with known losses keeps its turn until they should be solved."""
        moved = self._stretch_turns == 0
        begin = max(self.prefix, self._stretch_stop if moved else self._stretch_start)
        head_ids = self._unresolved_in(begin, min(border, begin + max_window))
        if len(head_ids) == 0:
            moved = True
            head_ids = self._unresolved_in(self.prefix, min(border, self.prefix + max_window))
        head_ids = head_ids[: int(np.searchsorted(head_ids, head_ids[0] + reach))]
        self._stretch_start, self._stretch_stop = int(head_ids[0]), int(head_ids[-1]) + 1
        if moved:
            self._stretch_turns = 1 + TURNS_PER_LOSS * int(np.count_nonzero(self._state[head_ids] == LOST))
        self._stretch_turns -= 1
        return head_ids

    def full_set(self, max_window: int) -> tuple[int, int, bytes, int, int]:
        """Everything after the prefix, oldest first, at most `max_window` symbols: the paper's window."""
        return self.prefix, 0, b"", 0, min(self.next - self.prefix, max_window)


def repair_header(
    transfer_id: int, number: int, degree: int, coding_set: tuple[int, int, bytes, int, int]
) -> RepairHeader:
    """The header of one repair over `coding_set` as `Ledger` gives it."""
    first_sid, head_span, head, tail_offset, tail_span = coding_set
    return RepairHeader(
        transfer_id=transfer_id,
        repair_number=number,
        first_sid=first_sid,
        degree=degree,
        head_span=head_span,
        head=head,
        tail_offset=tail_offset,
        tail_span=tail_span,
    )
