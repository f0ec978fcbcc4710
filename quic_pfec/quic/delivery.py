"""Delivery-rate samples: how fast the path delivered what was sent, measured one acknowledgement at a time.

A sample spans a flight: from the state of the connection when a packet left to the state when it was acknowledged. Both
the sending and the acknowledging of that flight take time, and the longer of the two counts, so that neither a burst of
packets nor a burst of acknowledgements looks like a fast path. A sample that covers a moment in which nothing was there
to send says "application limited": the path may well be faster (draft-ietf-ccwg-bbr, "Delivery Rate Samples").

Kept apart from aioquic's packets, by packet number, which aioquic counts across its spaces. Bytes are UDP payload, and
only of packets in flight. Pure: the time is passed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["DeliverySampler", "Sample", "SentRecord"]


@dataclass(slots=True)
class SentRecord:
    """The connection's state when a packet left; `in_flight` includes the packet itself."""

    number: int
    size: int
    sent_s: float
    first_sent_s: float
    delivered: int
    delivered_s: float
    lost: int
    in_flight: int
    app_limited: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """What one acknowledgement says. `rate` in bytes/s, 0 when the interval is too short to tell.

    delivered, lost: bytes since the newest acknowledged packet left; prior_delivered, in_flight: as they were then.
    newly_acked: bytes of this acknowledgement.
    """

    rate: float
    delivered: int
    lost: int
    newly_acked: int
    prior_delivered: int
    in_flight: int
    rtt_s: float
    app_limited: bool


class DeliverySampler:
    """Per-packet records and the counts they refer to."""

    def __init__(self) -> None:
        self.delivered = 0
        self.lost = 0
        self._records: dict[int, SentRecord] = {}
        self._delivered_s = 0.0
        self._first_sent_s = 0.0
        self._app_limited_until = 0  # delivered count at which the bubble has left the path; 0: there is none
        self._newest: SentRecord | None = None  # of the acknowledgement being processed
        self._newly_acked = 0
        self._now = -math.inf

    @property
    def pending(self) -> bool:
        """Whether acknowledged packets wait for `finish`."""
        return self._newly_acked > 0

    @property
    def app_limited(self) -> bool:
        return self._app_limited_until > 0

    @property
    def tracked(self) -> int:
        """Packets in flight that there are records of."""
        return len(self._records)

    def on_sent(self, number: int, size: int, now: float, in_flight: int) -> None:
        """A packet left; `in_flight` counts it already."""
        if in_flight == size:  # an idle path: the interval starts with this packet
            self._first_sent_s = self._delivered_s = now
        self._records[number] = SentRecord(
            number, size, now, self._first_sent_s, self.delivered, self._delivered_s, self.lost, in_flight,
            self._app_limited_until > 0,
        )  # fmt: skip

    def on_acked(self, number: int, size: int, now: float) -> None:
        """A packet arrived. One that left before there was a sampler counts, but makes no sample."""
        self.delivered += size
        self._newly_acked += size
        self._now = self._delivered_s = now
        record = self._records.pop(number, None)
        if record is None:
            return
        newest = self._newest
        if newest is None or (record.sent_s, record.number) > (newest.sent_s, newest.number):
            self._newest = record

    def on_lost(self, number: int, size: int) -> SentRecord | None:
        """A packet was declared lost."""
        self.lost += size
        return self._records.pop(number, None)

    def forget(self, number: int) -> None:
        """A packet that is neither: given up by a probe timeout, or of a packet space that is discarded."""
        self._records.pop(number, None)

    def mark_app_limited(self, in_flight: int) -> None:
        """There was a moment with nothing to send: samples are application limited until what flies now has arrived."""
        self._app_limited_until = max(self.delivered + in_flight, 1)

    def finish(self, min_rtt_s: float) -> Sample | None:
        """The sample of the acknowledgement whose packets were reported since the last call; None if there is none.

        An interval below `min_rtt_s` gives no rate: the flight was acknowledged faster than the path allows.
        """
        newest, self._newest = self._newest, None
        newly_acked, self._newly_acked = self._newly_acked, 0
        if self._app_limited_until and self.delivered > self._app_limited_until:
            self._app_limited_until = 0
        if newest is None:
            return None
        interval_s = max(newest.sent_s - newest.first_sent_s, self._now - newest.delivered_s)
        self._first_sent_s = max(self._first_sent_s, newest.sent_s)
        delivered = self.delivered - newest.delivered
        rate = delivered / interval_s if interval_s > 0 and interval_s >= min_rtt_s else 0.0
        return Sample(
            rate=rate,
            delivered=delivered,
            lost=self.lost - newest.lost,
            newly_acked=newly_acked,
            prior_delivered=newest.delivered,
            in_flight=newest.in_flight,
            rtt_s=self._now - newest.sent_s,
            app_limited=newest.app_limited,
        )
