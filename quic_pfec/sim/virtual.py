"""Two sans-IO endpoints joined by two links, run in virtual time.

A run is deterministic: an event heap, explicit times, ties broken by order of sending. It is how protocol behaviour is
asserted, at any rate and delay, on a machine of any speed. An endpoint is asked for datagrams only after it received
something or its timer fired, so an idle endpoint costs nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from quic_pfec.sim.link import Delivery, Link

__all__ = ["Endpoint", "Livelock", "SharedNetwork", "VirtualNetwork"]

# Enough for a transfer of a million packets with its feedback; a run that needs more says so.
_MAX_EVENTS = 10_000_000

# Events at one and the same instant, or calls in a row of a timer that does not move on. A burst that fills a large
# queue is some thousand.
_MAX_EVENTS_AT_ONCE = 100_000

# A timer still due after it fired comes again this much later. Protocols compare sums of doubles: at exactly the time
# they asked for, `now - sent >= delay` may be false by one rounding. A real clock has moved on by then.
_GRANULARITY_S = 1e-6


class Endpoint(Protocol):
    """A protocol endpoint without I/O. All times are on one virtual clock, in seconds."""

    def receive(self, data: bytes, now: float) -> None:
        """A datagram arrived."""

    def pull(self, now: float) -> list[bytes]:
        """All datagrams that may leave now. Called after `receive` and `on_timer`, and when a run begins."""

    def next_timer(self) -> float | None:
        """When `on_timer` wants to be called, None for never. Asked after each `pull`."""

    def on_timer(self, now: float) -> None:
        """The time given by `next_timer` has come: a time in the past at once, or if it is still the same after a call,
        a microsecond later."""


class Livelock(RuntimeError):
    """A run exceeded its bound of events: in most cases a timer that fires without moving on."""


class VirtualNetwork:
    """`first` and `second`, joined by a link each way, at virtual time `now`.

    `max_events` bounds the events of all runs together, `max_events_at_once` those at one instant.
    """

    def __init__(
        self,
        first: Endpoint,
        second: Endpoint,
        forward: Link,
        backward: Link,
        *,
        now: float = 0.0,
        max_events: int = _MAX_EVENTS,
        max_events_at_once: int = _MAX_EVENTS_AT_ONCE,
    ) -> None:
        # Endpoints 2 i and 2 i + 1 talk to each other; the link of an endpoint is the one it sends into.
        self._endpoints = [first, second]
        self._links = [forward, backward]
        self._timers = [math.inf, math.inf]
        self._calls_in_vain = [0, 0]
        self._flying: list[tuple[float, int, int, bytes]] = []  # due, order of sending, receiver, datagram
        self._sent = 0
        self._now_s = now
        self._events = 0
        self._events_at_once = 0
        self._max_events = max_events
        self._max_events_at_once = max_events_at_once

    @property
    def now(self) -> float:
        """Virtual time in seconds."""
        return self._now_s

    @property
    def events(self) -> int:
        """Deliveries and timers so far."""
        return self._events

    @property
    def in_flight(self) -> int:
        """Datagrams sent, not lost, and not delivered yet."""
        return len(self._flying)

    def epoch(self) -> None:
        """Begin an experiment on both links now (see `Link.epoch`)."""
        for link in dict.fromkeys(self._links):
            link.epoch(self._now_s)

    def run(self, until: float = math.inf, stop: Callable[[], bool] | None = None) -> float:
        """Run to `until` (events at that very time included), or until `stop` says so after an event, or until
        nothing is in flight and no timer is set. Returns the time reached.

        All endpoints are pulled first: what the caller did to them between runs takes effect. Without an event left
        before a finite `until`, time moves on to it. Raises Livelock.
        """
        for index in range(len(self._endpoints)):
            self._poll(index)
        while stop is None or not stop():
            if not self._step(until):
                if until < math.inf:
                    self._now_s = max(self._now_s, until)
                break
        return self._now_s

    def _step(self, until: float) -> bool:
        """Process the next event at or before `until`; False if there is none. Deliveries go before timers."""
        due_s = self._flying[0][0] if self._flying else math.inf
        timer_s = min(self._timers)
        timer = self._timers.index(timer_s)
        next_s = min(due_s, timer_s)
        if next_s > until or next_s == math.inf:
            return False
        self._count(next_s)
        if due_s <= self._timers[timer]:
            _, _, index, data = heapq.heappop(self._flying)
            self._endpoints[index].receive(data, self._now_s)
        else:
            index = timer
            self._endpoints[index].on_timer(self._now_s)
        self._poll(index)
        if due_s > next_s:
            self._move_on(index)
        return True

    def _move_on(self, index: int) -> None:
        """After a call of the timer: see that the next one is later than this."""
        if self._timers[index] > self._now_s:
            self._calls_in_vain[index] = 0
            return
        self._timers[index] = self._now_s + _GRANULARITY_S
        self._calls_in_vain[index] += 1
        if self._calls_in_vain[index] > self._max_events_at_once:
            raise Livelock(f"the timer of endpoint {index} does not move on at {self._now_s!r} s")

    def _count(self, next_s: float) -> None:
        self._events += 1
        if next_s > self._now_s:
            self._now_s = next_s
            self._events_at_once = 0
        self._events_at_once += 1
        if self._events > self._max_events or self._events_at_once > self._max_events_at_once:
            raise Livelock(
                f"{self._events} events, {self._events_at_once} of them at {self._now_s!r} s; "
                f"timers at {self._timers!r}, {len(self._flying)} datagrams in flight"
            )

    def _poll(self, index: int) -> None:
        endpoint = self._endpoints[index]
        link = self._links[index]
        for data in endpoint.pull(self._now_s):
            outcome = link.send(self._now_s, len(data))
            if isinstance(outcome, Delivery):
                heapq.heappush(self._flying, (outcome.due_s, self._sent, index ^ 1, outcome.apply(data)))
            self._sent += 1
        timer = endpoint.next_timer()
        self._timers[index] = math.inf if timer is None else timer


class SharedNetwork(VirtualNetwork):
    """Several pairs of endpoints whose first ones all send into one link, `forward`: a bottleneck with one queue.

    `pairs`: (first, second) endpoints; `backward`: the way back of each. Raises ValueError unless there is a pair and
    each has a way back.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[Endpoint, Endpoint]],
        forward: Link,
        backward: Sequence[Link],
        *,
        now: float = 0.0,
        max_events: int = _MAX_EVENTS,
        max_events_at_once: int = _MAX_EVENTS_AT_ONCE,
    ) -> None:
        if not pairs or len(pairs) != len(backward):
            raise ValueError(f"{len(pairs)} pairs with {len(backward)} ways back")
        (first, second), back = pairs[0], backward[0]
        super().__init__(
            first, second, forward, back, now=now, max_events=max_events, max_events_at_once=max_events_at_once
        )
        for (first, second), back in zip(pairs[1:], backward[1:], strict=True):
            self._endpoints += [first, second]
            self._links += [forward, back]
            self._timers += [math.inf, math.inf]
            self._calls_in_vain += [0, 0]
