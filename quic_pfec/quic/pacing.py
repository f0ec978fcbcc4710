"""The token bucket that keeps a controller's rate, whatever controller it is.

aioquic's own pacer runs at cwnd/RTT in bursts of 16 packets, which a controller that knows its rate cannot use. This
one is asked before each packet and told afterwards what really left. Pure: the time is passed in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from quic_pfec.wire.errors import LocalError

__all__ = ["HEADER_BYTES", "TokenBucket"]

HEADER_BYTES = 28
"""IPv4 and UDP headers of a datagram."""


class TokenBucket:
    """Bytes that may leave, refilled at `rate_bytes_per_s` (to be overridden), `overhead` bytes charged per datagram.

    A burst is at most `burst_s` worth or two packets, whichever is larger. Timers of an event loop come up to a few
    milliseconds late, which on a slow link is several packets: whoever waited for the pacer may send in addition what
    the lateness has cost, up to `catch_up_s`. Whoever had nothing to send gets no such credit.
    """

    MAX_DEBT_S = 0.1

    def __init__(
        self,
        *,
        max_datagram_size: int = 1452,
        overhead: int = HEADER_BYTES,
        burst_s: float = 0.001,
        catch_up_s: float = 0.004,
    ) -> None:
        if burst_s < 0 or catch_up_s < 0:
            raise LocalError("burst and catch-up cannot be negative")
        self._overhead = overhead
        self._packet = max_datagram_size + overhead
        self._burst_s = burst_s
        self._catch_up_s = catch_up_s
        self._tokens = 2.0 * self._packet
        self._time_s = -math.inf
        self._due_s: float | None = None  # when whoever waits was told to come back
        self._provisional = 0  # charged since the last `settle`
        self.next_size: int | None = None

    @property
    def rate_bytes_per_s(self) -> float:
        """The rate of refilling now."""
        raise LocalError("a pacer needs a rate")

    def next_send_time(self, now: float) -> float | None:
        """None when a full packet may be sent now, else when that will be."""
        self._refill(now)
        missing = self._packet - self._tokens
        if missing <= 1e-3:  # a thousandth of a byte: rounding must not cause a timer that cannot advance
            self._due_s = None
            return None
        self._due_s = now + missing / self.rate_bytes_per_s
        return self._due_s

    def update_after_send(self, now: float) -> None:
        """One more packet is being built, of `next_size` or, until `settle` knows better, of full size."""
        self._refill(now)
        charge = self._packet if self.next_size is None else self.next_size + self._overhead
        self.next_size = None
        self._tokens -= charge
        self._provisional += charge

    def take(self, now: float, most: int) -> int:
        """Charges as many full packets as may be sent now, up to `most`; `settle` puts right what they really had."""
        if most <= 0 or self.next_send_time(now) is not None:
            return 0
        packets = min(most, max(1, int((self._tokens + 1e-3) / self._packet)))
        self._tokens -= packets * self._packet
        self._provisional += packets * self._packet
        self.next_size = None
        return packets

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        """aioquic's pacer would take cwnd/RTT here; this one takes the controller's rate."""

    def settle(self, now: float, datagram_sizes: Sequence[int]) -> None:
        """Everything that left counts, packets with acknowledgements and of the handshake among it."""
        self._refill(now)
        self._tokens += self._provisional - sum(datagram_sizes) - self._overhead * len(datagram_sizes)
        self._tokens = max(self._tokens, -self.MAX_DEBT_S * self.rate_bytes_per_s)
        self._provisional = 0
        self.next_size = None

    def _refill(self, now: float) -> None:
        if now <= self._time_s:
            return
        rate = self.rate_bytes_per_s
        depth = max(self._burst_s * rate, 2.0 * self._packet)
        if self._due_s is not None:
            depth += rate * min(max(now - self._due_s, 0.0), self._catch_up_s)
        if self._time_s > -math.inf:
            self._tokens += rate * (now - self._time_s)
        self._tokens = min(self._tokens, depth)
        self._time_s = now
