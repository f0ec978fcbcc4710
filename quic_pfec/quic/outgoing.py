"""One outgoing hand-off on the event loop: it opens the stream, feeds what is sent, and hears the answer."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from quic_pfec.kv.prepared import PreparedKV
from quic_pfec.schedule.policies import make_policy
from quic_pfec.transfer.sender import Sender
from quic_pfec.wire import messages
from quic_pfec.wire.errors import AppCode, PeerError
from quic_pfec.wire.frames import SOURCE_OVERHEAD, UNIT_HEADER_SIZE, AckStatus
from quic_pfec.wire.manifest import encode_manifest

if TYPE_CHECKING:
    from quic_pfec.quic.protocol import PfecProtocol

STREAM_WATERMARK = 128 * 1024  # bytes waiting in the stream's send buffer: what has not left can still be given up
REPAIR_ROOM = 40  # bytes a REPAIR needs beyond a SOURCE, its smallest bitmap included
REASON_PTOS = 3  # probe timeouts that a refusal's reason may come later than its STOP_SENDING


class HandoffRefused(Exception):
    """The peer refused the hand-off, or gave it up: `code` says why for programs, `reason` for people."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        try:
            self.code = AppCode(code)
        except ValueError:
            self.code = AppCode.INTERNAL
        self.reason = reason

    @property
    def busy(self) -> bool:
        return self.code is AppCode.BUSY

    def __str__(self) -> str:
        return f"refused ({self.code.name.lower()}): {self.reason}"


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How a hand-off is sent; the fields of `send_kv`. deadline_s: on `time.monotonic()`; late: ask for late repair."""

    deadline_s: float
    scheduler: str = "hybrid"
    repair_budget: float | None = None
    missing: str = "mask"
    base: int = 0
    degree: int = 48
    late: bool = False


class Request:
    """A stream we opened and its answers. `replies` ends with None; `error` then says whether that was in order."""

    def __init__(self, protocol: PfecProtocol, request: messages.Generate | None) -> None:
        self.request = request
        self.error: Exception | None = None
        self.replies: asyncio.Queue[messages.Message | None] = asyncio.Queue()
        self.stream_id = -1
        self._protocol = protocol
        self._reader = messages.MessageReader(protocol.limits, messages.Role.SENDER)
        self._over = False
        self._stopped: asyncio.TimerHandle | None = None

    def start(self) -> int:
        """Opens the stream and asks; returns the stream id."""
        assert self.request is not None
        self.stream_id = self._protocol.quic.get_next_available_stream_id()
        self._protocol.send(self.stream_id, self._opening([self.request]), True)
        return self.stream_id

    def _opening(self, parts: list[messages.Message]) -> bytes:
        encoded = [messages.encode_message(message) for message in (*parts, messages.Start())]
        return messages.STREAM_PREAMBLE + b"".join(encoded)

    def after_transmit(self) -> None:
        """Room may have appeared in the stream."""

    def on_stream(self, data: bytes, end: bool) -> None:
        """Bytes of the peer's half of the stream. Raises PeerError when the peer broke a rule."""
        for message in self._reader.feed(data):
            if self._over:
                return
            self.on_message(message)
        if end:
            self.close(None)

    def on_message(self, message: messages.Message) -> None:
        if isinstance(message, messages.Refused):
            self.close(HandoffRefused(message.code, message.reason))
        else:
            self.replies.put_nowait(message)

    def on_stop(self, code: int) -> None:
        """The peer wants nothing more of the stream: a refusal. Its reason travels beside it and may come later."""
        if not self._over and self._stopped is None:
            delay_s = REASON_PTOS * self._protocol.quic.pto_s
            self._stopped = asyncio.get_running_loop().call_later(delay_s, self.on_reset, code)

    def on_reset(self, code: int) -> None:
        """The peer ended its own half: nothing more will be heard."""
        self.close(HandoffRefused(code, "the receiver stopped the transfer"))

    def close(self, error: Exception | None) -> None:
        """Ends it: whoever reads the replies gets their end, and `error`. Idempotent."""
        if self._over:
            return
        self._over = True
        if self._stopped is not None:
            self._stopped.cancel()
        self.error = error
        self.replies.put_nowait(None)
        self._protocol.outgoing_over(self.stream_id)

    def cancel(self) -> None:
        """The caller lost interest: free both sides."""
        if self._over:
            return
        quic = self._protocol.quic
        for give_up in (quic.reset_stream, quic.stop_stream):
            with suppress(RuntimeError, ValueError):  # that half has ended already
                give_up(self.stream_id, AppCode.CANCELLED)
        self.close(None)
        self._protocol.transmit_soon()


class Outgoing(Request):
    """One hand-off; see the module text. `report` is the receiver's account of its freeze."""

    def __init__(
        self, protocol: PfecProtocol, kv: PreparedKV, options: SendOptions, request: messages.Generate | None
    ) -> None:
        super().__init__(protocol, request)
        self._kv: PreparedKV | None = kv
        self.options = options
        self.started_s = time.monotonic()
        self.sender: Sender | None = None
        self.accepted: messages.Accepted | None = None
        self.report: asyncio.Future[messages.Report] = asyncio.get_running_loop().create_future()
        # Nobody may be waiting when the connection dies.
        self.report.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.symbol_size = kv.layout.symbol_size()
        self.units_sent = 0
        self.bytes_sent = 0
        self.blocked_cwnd_before = protocol.quic.blocked_cwnd
        self.late_s = 0.0
        """How long after the deadline we go on sending: late repair was asked for, of a peer that knows it."""
        self._late_timer: asyncio.TimerHandle | None = None
        self._feeding = False

    @property
    def kv(self) -> PreparedKV:
        """What is handed over. Raises RuntimeError after `release`."""
        if self._kv is None:
            raise RuntimeError("the hand-off was released")
        return self._kv

    def start(self) -> int:
        quic, kv, options = self._protocol.quic, self.kv, self.options
        now = time.monotonic()
        self.stream_id = quic.get_next_available_stream_id()
        extension = quic.extension if quic.extension is not None and quic.extension.max_transfers > 0 else None
        if extension is not None:
            largest = min(extension.max_symbol_size, quic.frame_space - SOURCE_OVERHEAD - REPAIR_ROOM)
            if self.symbol_size > largest:
                self.symbol_size = kv.layout.symbol_size(largest - UNIT_HEADER_SIZE)
        manifest = encode_manifest(kv.manifest(self.symbol_size, options.missing, options.base))
        if options.late and extension is not None and extension.takes_late:
            self.late_s = quic.limits.max_late_us / 1e6
        if extension is not None:
            encoder, unit_of_sid = kv.symbols(self.symbol_size)
            self.sender = Sender(
                self.stream_id,
                encoder,
                unit_of_sid,
                kv.utility,
                manifest,
                make_policy(options.scheduler),
                now=now,
                deadline_s=options.deadline_s,
                path=quic.path(self.symbol_size),
                repair_budget=options.repair_budget,
                credit=extension.initial_credit,
                max_window=extension.max_window,
                max_degree=extension.max_degree,
                degree=min(options.degree, extension.max_degree),
                loss=quic.loss_history,
                observer=self._protocol.observer,
                late_s=self.late_s,
            )
        remaining_us = int(max(0.0, options.deadline_s - now - quic.min_rtt_s / 2) * 1e6)
        mode: Literal["symbols", "stream"] = "symbols" if self.sender is not None else "stream"
        late_us = int(self.late_s * 1e6)
        opening: list[messages.Message] = [messages.Open(remaining_us, manifest, mode, self._protocol.token, late_us)]
        if self.request is not None:
            opening.append(self.request)
        if options.missing == "recompute" and kv.tokens is not None:
            opening.append(messages.Tokens.from_ids(kv.tokens))
        self._protocol.send(self.stream_id, self._opening(opening), self.sender is not None)
        if self.sender is not None:
            quic.add_sender(self.sender)
        else:
            self._feeding = True
            self.after_transmit()
        return self.stream_id

    def after_transmit(self) -> None:
        """Stream mode: the next units, as far as the stream's buffer has room; nothing after the deadline."""
        if not self._feeding or self._over:
            return
        quic = self._protocol.quic
        if time.monotonic() >= self.options.deadline_s - quic.min_rtt_s / 2:
            self._feeding = False
            quic.reset_stream(self.stream_id, AppCode.NO_ERROR)  # what has not left is of no use any more
            return
        while self._feeding and quic.stream_backlog(self.stream_id) < STREAM_WATERMARK:
            unit, data = self.kv.unit_at(self.units_sent)
            last = self.units_sent + 1 == len(self.kv.send_order)
            try:
                quic.send_stream_data(self.stream_id, messages.encode_message(messages.Unit(unit, data)), last)
            except (RuntimeError, ValueError):  # the peer has stopped the stream; the event that says so is on its way
                self._feeding = False
                return
            self.units_sent += 1
            self.bytes_sent += len(data)
            self._feeding = not last

    def on_message(self, message: messages.Message) -> None:
        match message:
            case messages.Accepted():
                self.accepted = message
            case messages.Report():
                if not self.report.done():
                    if len(message.known) > (self.kv.layout.symbols(self.symbol_size) + 7) // 8:
                        raise PeerError(AppCode.MESSAGE_ERROR, "the report knows symbols never sent", application=True)
                    self.report.set_result(message)
                self.end_on_time()
            case messages.Done():
                self.end_sending()
                super().on_message(message)
            case _:
                super().on_message(message)

    def end_on_time(self) -> None:
        """The freeze is over: nothing more of the units leaves but by late repair, until its time is up."""
        reported = self.report.done() and not self.report.cancelled() and self.report.exception() is None
        if not self.late_s or self._over or not reported or self.report.result().status is AckStatus.COMPLETE:
            self.end_sending()
        elif self._late_timer is None:
            left_s = self.options.deadline_s + self.late_s - time.monotonic()
            self._late_timer = asyncio.get_running_loop().call_later(max(0.0, left_s), self.end_sending)

    def end_sending(self) -> None:
        """Nothing more of the units leaves."""
        self._feeding = False
        if self._late_timer is not None:
            self._late_timer.cancel()
        self._protocol.quic.remove_transfer(self.stream_id)

    def release(self) -> None:
        """Lets go of the cache: text may follow for long, and the report, which holds it, for ever."""
        if not self.report.done():
            self.report.set_exception(ConnectionError("the report was not waited for"))
        self._kv = self.sender = None

    def close(self, error: Exception | None) -> None:
        if self._over:
            return
        super().close(error)
        if not self.report.done():
            self.report.set_exception(error or ConnectionError("the receiver ended the transfer without a report"))
        self.end_sending()
