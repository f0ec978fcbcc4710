"""One connection on an event loop: its timer, its events, and one transmission a turn.

The clock is `time.monotonic()` everywhere: under uvloop the loop's own moves in steps of 1 ms, and epoll rounds waits
up to 1 ms. What is due soon therefore has a timer of the system where there is one (`timer`); what lateness costs all
the same, the pacer makes up for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from aioquic.quic.connection import NetworkAddress
from aioquic.quic.events import (
    ConnectionIdIssued,
    ConnectionIdRetired,
    ConnectionTerminated,
    HandshakeCompleted,
    QuicEvent,
)
from aioquic.quic.packet import QuicErrorCode, QuicFrameType

from quic_pfec.quic.compat import ExtensionConnection
from quic_pfec.quic.handshake import failure
from quic_pfec.quic.timer import WakeUp
from quic_pfec.quic.udp import UdpSocket

__all__ = ["ExtensionProtocol", "Router"]

logger = logging.getLogger("quic_pfec.quic")

EARLY_S = 0.0005  # a timer this early is on time; asking again would spin on loops that count in milliseconds
MAX_BUGS = 3  # exceptions from one connection before it is dropped without a word

C = TypeVar("C", bound=ExtensionConnection)


class Router(Protocol):
    """Who hands a server's datagrams to connections by connection id."""

    def route(self, cid: bytes, protocol: ExtensionProtocol[Any]) -> None: ...

    def unroute(self, cid: bytes, protocol: ExtensionProtocol[Any]) -> None: ...

    def forget(self, protocol: ExtensionProtocol[Any]) -> None: ...


class ExtensionProtocol(Generic[C]):
    """One connection on an event loop. Override `quic_event_received` and `after_transmit`.

    An exception that leaves a hook or the connection is logged, counted in `bugs`, and closes this connection; the
    endpoint and its other connections go on.
    """

    def __init__(self, quic: C) -> None:
        self.quic = quic
        self.bugs = 0
        self.terminated: ConnectionTerminated | None = None
        self._loop = asyncio.get_running_loop()
        self._udp: UdpSocket | None = None
        self._listener: Router | None = None
        self._settled = asyncio.Event()  # connected, or over
        self._closed = asyncio.Event()
        self._turn_handle: asyncio.Handle | None = None
        self._timer = WakeUp(self._on_timer)
        self._deadline: float | None = None
        self._latest = 0.0

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def quic_event_received(self, event: QuicEvent) -> None:
        """One event of the connection, ConnectionTerminated last of all."""

    def after_transmit(self) -> None:
        """Called after each transmission: there may be room again in what was waiting."""

    # ---- for the application -----------------------------------------------------------------------------------------

    @property
    def wake_ups(self) -> int:
        """How often a timer woke this connection; an idle one sleeps."""
        return self._timer.count

    def transmit(self) -> None:
        """Send what may be sent now and set the timer."""
        if self._udp is None or self._closed.is_set():
            return
        try:
            self.quic.send_runs(self._clock(), self._udp.send_run)
            self._arm(self.quic.get_timer())
            self.after_transmit()
        except Exception as exc:
            self._bug(exc)

    def transmit_soon(self) -> None:
        """Handle events and transmit once in the next turn of the loop, however often this is called until then."""
        if self._turn_handle is None and not self._closed.is_set():
            self._turn_handle = self._loop.call_soon(self._turn)

    def close(self, error_code: int = QuicErrorCode.NO_ERROR, reason: str = "") -> None:
        """Close with an application error code. `wait_closed` returns after the closing period of three PTO."""
        if self._closed.is_set():
            return
        if self._udp is None or self.quic.get_peer_address() is None:
            self._finish()
            return
        self.quic.close(error_code=error_code, reason_phrase=reason)
        self.transmit()
        self.transmit_soon()

    async def wait_connected(self) -> None:
        """Raises ConnectionError with the reason when the handshake fails."""
        await self._settled.wait()
        if self.terminated is not None or not self.quic.handshake_complete:
            end = self.terminated
            # A server judges our certificate only after we have seen the handshake complete.
            ours = not self.quic.handshake_complete
            why = "closed" if end is None else failure(end.error_code, end.reason_phrase, ours=ours)
            raise ConnectionError(f"the handshake failed: {why}")

    async def wait_closed(self) -> None:
        """Returns when nothing of the connection is left on the loop."""
        await self._closed.wait()

    # ---- for the endpoint --------------------------------------------------------------------------------------------

    def attach(self, udp: UdpSocket, listener: Router | None = None) -> None:
        self._udp = udp
        self._listener = listener

    def start(self, addr: NetworkAddress) -> None:
        """Begin the handshake as client."""
        self.quic.connect(addr, now=self._clock())
        self.transmit()

    def datagrams_received(self, datagrams: Sequence[bytes], addr: NetworkAddress) -> None:
        try:
            self.quic.receive_datagrams(datagrams, addr, self._clock())
        except Exception as exc:
            self._bug(exc)
        if self._turn_handle is not None:
            self._turn_handle.cancel()
        if not self._closed.is_set():
            self._turn()  # what a wake-up brought came together: another turn of the loop would add nothing

    def abandon(self) -> None:
        """Forget the connection without telling the peer."""
        self._finish()

    def _clock(self) -> float:
        self._latest = max(self._latest, time.monotonic())
        return self._latest

    def _turn(self) -> None:
        self._turn_handle = None
        self._process_events()
        self.transmit()

    def _process_events(self) -> None:
        while (event := self.quic.next_event()) is not None:
            if isinstance(event, ConnectionIdIssued):
                if self._listener is not None:
                    self._listener.route(event.connection_id, self)
            elif isinstance(event, ConnectionIdRetired):
                if self._listener is not None:
                    self._listener.unroute(event.connection_id, self)
            elif isinstance(event, HandshakeCompleted):
                self._settled.set()
            elif isinstance(event, ConnectionTerminated):
                self.terminated = event
            try:
                self.quic_event_received(event)
            except Exception as exc:
                self._bug(exc)
        if self.terminated is not None:
            self._finish()

    def _arm(self, deadline: float | None) -> None:
        self._deadline = deadline
        if deadline is None or (self._timer.at_s is not None and self._timer.at_s <= deadline):
            return  # a timer that comes too early looks again: cheaper than a new one for every packet
        self._timer.set(deadline)

    def _on_timer(self) -> None:
        deadline = self._deadline
        if deadline is None or self._closed.is_set():
            return
        if self._clock() < deadline - EARLY_S:
            self._arm(deadline)
            return
        self._latest = max(self._latest, deadline)
        try:
            self.quic.handle_timer(self._latest)
        except Exception as exc:
            self._bug(exc)
        self._process_events()
        self.transmit()

    def _bug(self, exc: Exception) -> None:
        self.bugs += 1
        logger.error("closing a connection on an internal error", exc_info=exc)
        if self.bugs >= MAX_BUGS:
            self._finish()
            return
        self.quic.close(QuicErrorCode.INTERNAL_ERROR, QuicFrameType.PADDING, "internal error")
        self.transmit_soon()

    def _finish(self) -> None:
        if self._turn_handle is not None:
            self._turn_handle.cancel()
        self._turn_handle = self._deadline = None
        self._timer.close()
        self._settled.set()
        self._closed.set()
        if self._listener is not None:
            self._listener.forget(self)
