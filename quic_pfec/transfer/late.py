"""A receiver that goes on after its freeze: late repair (docs/wire.md §8).

The freeze is the same as without: at the deadline, with what is known then. Where late symbols were agreed on, the
decoder is kept for a bounded time, and units that complete go to another sink, from which the decoding side patches
them into a cache that is in use already. Everything that binds the receiver before its freeze binds it here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quic_pfec.transfer.events import Event, LateOver
from quic_pfec.transfer.receiver import Receiver
from quic_pfec.transfer.units import UnitSink
from quic_pfec.wire.frames import AckStatus
from quic_pfec.wire.limits import Limits

HELD_SYMBOLS = 1024
"""Symbols that wait while the freeze is being accounted for: the rest of one turn of the event loop, at 1 Gbit/s about
ten milliseconds. More are dropped, and the sender believes that they arrived: their units stay holes."""


class LateReceiver(Receiver):
    """Receives one transfer, and more of it after the freeze if `allow_late` was called before it.

    `takes_late`: frozen, and symbols are still of use. It ends with the event `LateOver` when everything is known or
    the time is up, or with `release`.
    """

    def __init__(self, transfer_id: int, limits: Limits, now: float) -> None:
        super().__init__(transfer_id, limits, now)
        self._late_s = 0.0
        self._late_until_s = 0.0
        self._gone_on = False
        self._held: list[tuple[Any, ...]] = []

    def allow_late(self, late_s: float) -> None:
        """After a freeze at the deadline, take symbols for `late_s` more. Without effect once frozen."""
        self._late_s = late_s

    def go_on(self, sink: UnitSink, now: float) -> list[Event]:
        """The freeze is accounted for: from now on units that complete go to `sink`. Raises PeerError as ever.

        Until then symbols only wait, so that what is reported is the state of the freeze.
        """
        events: list[Event] = []
        if self.takes_late and not self._gone_on:
            self._gone_on = True
            self._sink = sink
            held, self._held = self._held, []
            self._come_late(held, now, events)
        return events

    def release(self) -> None:
        if self.takes_late:  # the sender must hear that it may stop
            self._stop()
        super().release()

    def _freeze(self, now: float, status: AckStatus, events: list[Event]) -> None:
        super()._freeze(now, status, events)
        if self.status is AckStatus.FROZEN and self.units is not None and self._late_s > 0:
            self.takes_late = True
            self._late_until_s = now + self._late_s
            self._final_left = 0  # more feedback follows, and repeats what one frame says

    def _stop(self) -> None:
        self.takes_late = False
        self._held.clear()
        self._final_left = 3
        self._progress = self._urgent = True

    def _come_late(self, packets: Sequence[tuple[Any, ...]], now: float, events: list[Event]) -> None:
        if not self.takes_late or now >= self._late_until_s:
            super()._come_late(packets, now, events)
        elif self._gone_on:
            self._take(list(packets), events)
            self._settle(now, events)
        else:
            room = HELD_SYMBOLS - len(self._held)
            self._held += [(*packet[:-1], bytes(packet[-1])) for packet in packets[:room]]
            super()._come_late(packets[room:], now, events)

    def _check_complete(self, now: float, events: list[Event]) -> None:
        super()._check_complete(now, events)
        if self._gone_on and self.takes_late and self._decoder is not None and self._decoder.prefix == self._symbols:
            self.status = AckStatus.COMPLETE
            self._over(events)

    def _over(self, events: list[Event]) -> None:
        self.release()
        events.append(LateOver())

    def event_timer(self) -> float | None:
        if not self.takes_late:
            return super().event_timer()
        waits = self._gone_on and self._decoder is not None and self._decoder.pending > 0
        return min(self._newest_s, self._late_until_s) if waits else self._late_until_s

    def on_timer(self, now: float) -> list[Event]:
        if not self.takes_late:
            return super().on_timer(now)
        events: list[Event] = []
        if now >= self._late_until_s:
            self._over(events)
        elif self._gone_on:
            self._materialise(events)
            self._check_complete(now, events)
        return events

    def _remaining_s(self, now: float) -> float:
        if self.status is AckStatus.FROZEN:  # docs/wire.md §4: to the end of late repair, which 0 says is over
            return max(0.0, self._late_until_s - now) if self.takes_late else 0.0
        return super()._remaining_s(now)
