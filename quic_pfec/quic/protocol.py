"""The event loop's side of a connection: it sorts events to the hand-offs they belong to, in both directions."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from aioquic.quic.events import (
    ConnectionTerminated,
    HandshakeCompleted,
    QuicEvent,
    StopSendingReceived,
    StreamDataReceived,
    StreamReset,
)

from quic_pfec.quic.connection import PfecConnection, TransferEvent
from quic_pfec.quic.endpoint import ExtensionProtocol
from quic_pfec.quic.handler import Handler
from quic_pfec.quic.handshake import failure
from quic_pfec.quic.incoming import Incoming
from quic_pfec.quic.journal import Entry, Journal
from quic_pfec.quic.outgoing import Request
from quic_pfec.transfer.sender import TraceRow
from quic_pfec.wire.errors import AppCode, PeerError, Refusal
from quic_pfec.wire.frames import AckStatus
from quic_pfec.wire.limits import Limits

logger = logging.getLogger("quic_pfec")


class PfecProtocol(ExtensionProtocol[PfecConnection]):
    """One connection with its incoming and outgoing hand-offs.

    handler: what to do with incoming ones, None = refuse. token: the credential we present with outgoing ones. journal:
    where it is noted what became of incoming ones.
    """

    def __init__(
        self, quic: PfecConnection, *, handler: Handler | None = None, token: str = "", journal: Journal | None = None
    ) -> None:
        super().__init__(quic)
        self.handler = handler
        self.token = token
        self.observer: Callable[[TraceRow], None] | None = None
        self.close_reason = ""
        self.admitted_bytes = 0
        """Destinations of the incoming hand-offs that are not over."""
        self.late_bytes = 0
        """What is kept after their freeze for late symbols of incoming hand-offs."""
        self._journal = journal or Journal()
        self._incoming: dict[int, Incoming] = {}
        self._outgoing: dict[int, Request] = {}
        self._authorised = False

    @property
    def limits(self) -> Limits:
        return self.quic.limits

    @property
    def peer(self) -> str:
        """The peer's address and port."""
        address = self.quic.get_peer_address()
        if address is None:
            return "unknown"
        return f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"

    def note(self, entry: Entry) -> None:
        """An incoming hand-off is over."""
        self._journal.note(entry, time.monotonic())

    # credentials

    def authorised(self, handler: Handler) -> bool:
        """Whether this connection may open transfers without saying its token again."""
        return handler.token is None or self._authorised

    def authorise(self, handler: Handler, token: str) -> bool:
        """Checks a presented token, in constant time. A wrong one is refused even where another was right before."""
        if handler.token is None:
            return True
        right = hmac.compare_digest(token.encode(), handler.token.encode())
        self._authorised |= right
        return right

    # events

    def quic_event_received(self, event: QuicEvent) -> None:
        try:
            self._dispatch(event)
        except PeerError as error:
            logger.warning("%s closing the connection: %s", self.peer, error)
            self.quic.fail(error)
            self.transmit_soon()

    def _dispatch(self, event: QuicEvent) -> None:
        if isinstance(event, TransferEvent):
            if event.transfer_id in self._incoming or not self.quic.is_over(event.transfer_id):
                self._incoming_for(event.transfer_id).on_event(event.event)
        elif isinstance(event, StreamDataReceived):
            outgoing = self._outgoing.get(event.stream_id)
            if outgoing is not None:
                outgoing.on_stream(event.data, event.end_stream)
            elif self._is_incoming(event.stream_id):
                self._incoming_for(event.stream_id, by_stream=True).on_stream(event.data, event.end_stream)
        elif isinstance(event, StopSendingReceived):
            if event.stream_id in self._outgoing:
                self._outgoing[event.stream_id].on_stop(event.error_code)
            elif event.stream_id in self._incoming:
                self._incoming[event.stream_id].on_stop()
        elif isinstance(event, StreamReset):
            if event.stream_id in self._outgoing:
                self._outgoing[event.stream_id].on_reset(event.error_code)
            elif self._is_incoming(event.stream_id):  # all that came before it on the stream may have been lost
                self._incoming_for(event.stream_id, by_stream=True).on_reset(event.error_code)
        elif isinstance(event, HandshakeCompleted):
            self.transmit_soon()
        elif isinstance(event, ConnectionTerminated):
            self._terminated(event)

    def _is_incoming(self, stream_id: int) -> bool:
        """A bidirectional stream of the peer whose transfer is not over (RFC 9000 §2.1)."""
        if stream_id % 4 != (1 if self.quic.is_client else 0):
            return False
        return stream_id in self._incoming or not self.quic.is_over(stream_id)

    def _incoming_for(self, transfer_id: int, *, by_stream: bool = False) -> Incoming:
        incoming = self._incoming.get(transfer_id)
        if incoming is None:
            crowded = sum(other.is_opening for other in self._incoming.values()) >= self.limits.max_openings
            incoming = self._incoming[transfer_id] = Incoming(self, transfer_id, self.handler, by_stream)
            if crowded:
                incoming.refuse(Refusal(AppCode.BUSY, "too many openings on this connection are not whole"))
        return incoming

    @property
    def receiving(self) -> int:
        """Incoming hand-offs whose units are still coming."""
        return sum(incoming.is_receiving for incoming in self._incoming.values())

    def after_transmit(self) -> None:
        for outgoing in list(self._outgoing.values()):
            outgoing.after_transmit()

    def _terminated(self, event: ConnectionTerminated) -> None:
        self.close_reason = failure(event.error_code, event.reason_phrase, ours=False)
        self._let_go()

    def _finish(self) -> None:
        super()._finish()
        self._let_go()  # also where the connection ends without an event: given up, or dropped on a bug

    def _let_go(self) -> None:
        """The connection is over: whoever waits for an answer hears it, and all that was reserved is free."""
        error = ConnectionError(f"the connection was closed: {self.close_reason or 'by us'}")
        for outgoing in list(self._outgoing.values()):
            outgoing.close(error)
        for incoming in list(self._incoming.values()):
            incoming.close()
        for transfer_id in list(self.quic.receivers):  # some had no event yet, and so no `Incoming`
            self.quic.remove_transfer(transfer_id)

    # what hand-offs ask for

    def begin(self, outgoing: Request) -> None:
        """Starts a hand-off or a request of ours and sends its first packets. Raises ConnectionError if it cannot."""
        if self.quic.is_closing:
            code, phrase = self.quic.close_cause  # its event may still be under way
            why = self.close_reason or (failure(code, phrase, ours=False) if code or phrase else "by us")
            raise ConnectionError(f"the connection is closed: {why}")
        self._outgoing[outgoing.start()] = outgoing
        self.transmit()

    def send(self, stream_id: int, data: bytes, last: bool) -> None:
        """Writes to a transfer's stream; a stream that the peer has reset meanwhile swallows it."""
        with suppress(RuntimeError, ValueError):
            self.quic.send_stream_data(stream_id, data, last)
        self.transmit_soon()

    def stop(self, stream_id: int, code: int) -> None:
        """Asks the peer to stop writing to a stream; nothing to ask where it has ended already."""
        with suppress(ValueError):
            self.quic.stop_stream(stream_id, code)
        self.transmit_soon()

    def incoming_over(self, transfer_id: int, *, admitted: bool, waiting_for_stream: bool) -> None:
        """An incoming hand-off ended. Its last feedback is still repeated for a moment; then nothing of it is left."""
        delay_s = 2 * self.quic.rtt_s + 0.05
        if waiting_for_stream:  # a refusal that waits for the peer's half of the stream to appear
            delay_s = self.limits.manifest_timeout_us / 1e6
        receiver = self.quic.receivers.get(transfer_id)
        if receiver is not None and admitted and receiver.status is not AckStatus.RUNNING:
            receiver.release()
        else:  # refused or given up: a receiver that still listened would store again what keeps coming
            self.quic.remove_transfer(transfer_id)
        with suppress(RuntimeError):  # no running loop: the process is on its way out
            asyncio.get_running_loop().call_later(delay_s, self._forget, transfer_id)

    def _forget(self, transfer_id: int) -> None:
        self._incoming.pop(transfer_id, None)
        self.quic.remove_transfer(transfer_id)

    def outgoing_over(self, transfer_id: int) -> None:
        self._outgoing.pop(transfer_id, None)
