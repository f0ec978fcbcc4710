"""FlEC real time (Michel et al., IEEE/ACM ToN 31(2), 2023) in three readings, as a baseline.

The rules follow the authors' code (github.com/francoismichel/flec, the plugins for real-time messages), on our frames
and our code. There, md counts the lost symbols of the window that no repair has made up for, ad the repairs in flight
over it; a repair answers feedback iff md/ad > 1. What they send before feedback: when no new data is ready and the
path has room, a round of 1 + min(W, max(1, 1/r, n eps)) repairs. In a hand-off data is ready until the last symbol, so
that is a tail burst.
- `flec-rt`, faithful: each loss is answered by a repair over that one symbol, which here is a resend, oldest first.
- `flec-rt-window`: it is answered by repairs over the whole window instead, while md > ad.
- `flec-rt-spread`: also, during the backlog, 1 + max(1/r, n eps) repairs every min(W, 1/p) new symbols, while fewer
  than 2 max(1, eps W) are in flight (their rule for limited buffers).
W is the span after the known prefix, n the new symbols since the round before, eps the loss rate, 1/p and 1/r the mean
lengths of good runs and of loss runs. Where we differ is in docs/decisions.md. The compiled twin is schedule/flec.c.

These policies remember: they are `Listener`s, told of every packet and fate by the planner. `decide` itself still
depends on nothing that asking changes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from math import floor, inf
from typing import Literal, Protocol, runtime_checkable

from quic_pfec.schedule.state import IDLE, REPAIR, RESEND, SOURCE, Action, ActionKind, State

Variant = Literal["flec-rt", "flec-rt-window", "flec-rt-spread"]

MOST_EVENTS = 5_000  # fates in the estimate, and their age: as the authors' loss monitor
OLDEST_S = 10.0
REFRESH_S = 0.2
ENOUGH_EVENTS = 500


class Book(Protocol):
    """What a listener may ask of the ledger."""

    @property
    def prefix(self) -> int: ...

    def is_lost(self, sid: int, /) -> bool: ...


@runtime_checkable
class Listener(Protocol):
    """A policy that wants to know what became of its decisions. The planner calls these in the order of events."""

    def start(self, ledger: Book) -> None:
        """A transfer begins with this policy."""

    def on_sent(
        self, state: State, kind: ActionKind, sid: int, token: int, stretch: tuple[int, int] | None, now: float
    ) -> None:
        """A packet left: the state it was decided in, sid of a source or resend, [first, stop) of a repair's set."""

    def on_fate(self, token: int, delivered: bool, probe: bool) -> None:
        """The first fate of a packet, after the ledger took it."""


@dataclass(frozen=True, slots=True)
class FlecCounters:
    """md, ad as above; eps, p_ge, r_ge: the channel's estimate."""

    md: int
    ad: int
    eps: float
    p_ge: float
    r_ge: float

    @property
    def d(self) -> float:
        return self.md / self.ad if self.ad else inf if self.md else 0.0


def _inverse(value: float) -> float:
    return 1.0 / value if value else inf


class GilbertEstimate:
    """eps, p (good to bad) and r (bad to good) of the last fates; a packet is in the bad state iff it was lost.

    At most 5,000 fates, not older than 10 s, looked at every 0.2 s. `enough` from 500 on.
    """

    def __init__(self) -> None:
        self.eps, self.p, self.r = 0.0, 0.0, 1.0
        self.enough = False
        self._events: deque[tuple[float, bool]] = deque()
        self._refreshed_s = -inf

    def add(self, lost: bool, now: float) -> None:
        self._events.append((now, lost))
        if len(self._events) > MOST_EVENTS:
            self._events.popleft()
        if now - self._refreshed_s < REFRESH_S:
            return
        self._refreshed_s = now
        while self._events and self._events[0][0] < now - OLDEST_S:
            self._events.popleft()
        losses = [event[1] for event in self._events]
        self.enough = len(losses) >= ENOUGH_EVENTS
        if not self.enough:
            return
        self.eps = sum(losses) / len(losses)
        pairs = list(pairwise(losses))
        after_ack = [to for origin, to in pairs if not origin]
        after_loss = [to for origin, to in pairs if origin]
        self.p = sum(after_ack) / len(after_ack) if after_ack else 0.0
        self.r = (len(after_loss) - sum(after_loss)) / len(after_loss) if after_loss else 1.0


@dataclass(slots=True)
class FlecRt:
    """One of the three variants.

    headroom: the tail burst begins when a round trip of slots exceeds so many times what is in flight. The authors ask
    for 1.1, of a congestion window; a sender paced at the path's rate that may send at all has room, hence 0.
    """

    variant: Variant = "flec-rt"
    headroom: float = 0.0
    window: Literal["sack", "full"] = "sack"
    _ledger: Book | None = field(default=None, repr=False, compare=False)
    _flying: dict[int, tuple[int, int]] = field(default_factory=dict, repr=False, compare=False)
    _seen: set[int] = field(default_factory=set, repr=False, compare=False)
    _channel: GilbertEstimate = field(default_factory=GilbertEstimate, repr=False, compare=False)
    _clock_s: float = field(default=0.0, repr=False, compare=False)  # of the last packet
    _reason: str = field(default="", repr=False, compare=False)  # why the last decision was for a repair
    _tail_end: int = field(default=0, repr=False, compare=False)
    _tail_protected: int = field(default=0, repr=False, compare=False)
    _tail_sent: int = field(default=0, repr=False, compare=False)
    _tail_most: float = field(default=0.0, repr=False, compare=False)
    _spread_end: int = field(default=0, repr=False, compare=False)
    _spread_left: float = field(default=0.0, repr=False, compare=False)

    @property
    def oldest_first(self) -> bool:
        """Losses are answered in the order of sending, not by utility."""
        return self.variant == "flec-rt"

    def start(self, ledger: Book) -> None:
        fresh = FlecRt(self.variant, self.headroom, self.window)
        for name in self.__slots__:
            setattr(self, name, getattr(fresh, name))
        self._ledger = ledger

    def counters(self, state: State) -> FlecCounters:
        """The counters at `state`, the sender's present one. Before 500 fates the channel is the long-run mean."""
        ledger, channel = self._ledger, self._channel
        seen = 0 if ledger is None else sum(ledger.is_lost(sid) for sid in self._seen)
        prefix = state.sources_sent - state.window
        ad = sum(stop > prefix for _, stop in self._flying.values())
        eps, p, r = state.loss_long, state.loss_long, 1.0
        if channel.enough:
            eps, p, r = channel.eps, channel.p, channel.r
        return FlecCounters(state.known_lost - seen, ad, eps, p, r)

    # deciding

    def decide(self, state: State) -> Action:
        self._reason = ""
        if self.variant == "flec-rt":
            if state.can_resend:
                return RESEND
        elif state.can_repair:
            counters = self.counters(state)
            if self.variant == "flec-rt-spread" and self._spread_due(state, counters):
                self._reason = "spread"
            elif counters.md > counters.ad:  # r - md/ad < -(1 - r)
                self._reason = "feedback"
        if not self._reason and state.can_source:
            return SOURCE
        if not self._reason and state.can_repair and self._tail_due(state):
            self._reason = "tail"
        return REPAIR if self._reason else IDLE

    def _tail_due(self, state: State) -> bool:
        used = state.in_flight + state.repairs_in_flight
        quiet = not state.can_source and (state.sources_sent == state.sources_total or state.budget_left == inf)
        if not quiet or used == 0 or not state.rtt_slots > self.headroom * used:
            return False
        return state.sources_sent > self._tail_end or self._tail_sent <= self._tail_most

    def _spread_due(self, state: State, counters: FlecCounters) -> bool:
        if not state.can_source or counters.ad >= 2.0 * max(1.0, counters.eps * state.window):
            return False
        if self._spread_left >= 1.0:
            return True
        fresh = state.sources_sent - self._spread_end
        return fresh >= 1 and fresh >= min(state.window, _inverse(counters.p_ge))

    # events

    def on_sent(
        self, state: State, kind: ActionKind, sid: int, token: int, stretch: tuple[int, int] | None, now: float
    ) -> None:
        self._clock_s = now
        if kind is ActionKind.RESEND:
            self._seen.discard(sid)
        if stretch is None:
            return
        counters = self.counters(state)
        self._flying[token] = stretch
        if self._reason == "tail":
            self._count_tail(state, counters)
        if self._reason == "spread":
            self._count_spread(state, counters)

    def _count_tail(self, state: State, counters: FlecCounters) -> None:
        end = state.sources_sent
        if end <= self._tail_end:
            self._tail_sent += 1
            return
        if self._tail_sent > self._tail_most:
            self._tail_protected = self._tail_end  # the round before was closed
        wanted = max(1.0, _inverse(counters.r_ge), (end - self._tail_protected) * counters.eps)
        self._tail_most = min(float(state.window), wanted)
        self._tail_sent = 1
        self._tail_end = end

    def _count_spread(self, state: State, counters: FlecCounters) -> None:
        if self._spread_left < 1.0:
            burst = 0.0 if counters.r_ge == 1.0 else _inverse(counters.r_ge)
            fresh = state.sources_sent - self._spread_end
            wanted = max(burst, fresh * counters.eps)
            self._spread_left = 1.0 + min(float(state.window), float(floor(wanted)) if wanted < inf else inf)
            self._spread_end = state.sources_sent
        self._spread_left -= 1.0

    def on_fate(self, token: int, delivered: bool, probe: bool) -> None:
        if not probe:
            self._channel.add(not delivered, self._clock_s)
        stretch = self._flying.pop(token, None)
        ledger = self._ledger
        if stretch is None or not delivered or ledger is None:
            return
        first, stop = stretch
        for sid in range(max(first, ledger.prefix), stop):
            if sid not in self._seen and ledger.is_lost(sid):
                self._seen.add(sid)
                return
