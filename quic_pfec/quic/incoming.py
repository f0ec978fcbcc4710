"""One incoming hand-off on the event loop: stream messages and transfer events in, an admitted cache and replies out.

What to do with a hand-off is the endpoint's affair (`Handler`); what a hand-off is, when it may begin and when it is
over is decided here. Every way out (refusal, reset, lost connection, end of the reply) frees what was reserved.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from quic_pfec.kv.prepared import hash_tokens
from quic_pfec.quic.handler import Admission, Freeze, Handler, Reply, StandBy, takes_late
from quic_pfec.quic.journal import Entry
from quic_pfec.quic.late import LateRepair
from quic_pfec.quic.partial import Part, PartialUnits
from quic_pfec.transfer.events import LateOver
from quic_pfec.transfer.late import LateReceiver
from quic_pfec.transfer.receiver import Event, Frozen, ManifestReceived, Receiver, ReceiverStats
from quic_pfec.transfer.report import to_bitmap
from quic_pfec.wire import messages
from quic_pfec.wire.errors import AppCode, PeerError, Refusal
from quic_pfec.wire.frames import AckStatus
from quic_pfec.wire.manifest import Manifest, decode_manifest, held_nbytes

if TYPE_CHECKING:
    from quic_pfec.quic.protocol import PfecProtocol

logger = logging.getLogger("quic_pfec")

TOKEN_SIZE = 4  # bytes of an id in TOKENS


class Incoming:
    """See the module text."""

    def __init__(self, protocol: PfecProtocol, transfer_id: int, handler: Handler | None, stream_open: bool) -> None:
        self.transfer_id = transfer_id
        self._protocol = protocol
        self._handler = handler
        self._reader = messages.MessageReader(protocol.limits, messages.Role.RECEIVER)
        self._stream_open = stream_open
        self._outbox: list[tuple[bytes, bool]] = []
        self._opening: messages.Open | None = None
        self._manifest: Manifest | None = None
        self._deadline_s: float | None = None  # stream mode only; else the receiver keeps it
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._request: messages.Generate | None = None
        self._stand_by: StandBy | None = None
        self._started = asyncio.Event()
        self._tokens: NDArray[np.uint32] | None = None  # kept for "recompute" alone
        self._tokens_hash: bytes | None = None
        self._granted_s = 0.0
        self._admission: Admission | None = None
        self._partial: PartialUnits | None = None
        self._frozen = False
        self._over = False
        self._task: asyncio.Task[None] | None = None
        self._late = LateRepair(protocol)
        self._reply = Reply(self._send)
        self._reserved_bytes = 0
        self._began_s = time.monotonic()
        self._refusal: Refusal | None = None
        self._received_s: float | None = None
        timeout_s = protocol.limits.manifest_timeout_us / 1e6
        self._opening_timer = asyncio.get_running_loop().call_later(timeout_s, self._opening_overdue)

    @property
    def is_opening(self) -> bool:
        """Whether what the peer wants is not known yet."""
        return not self._over and self._opening is None and self._request is None

    @property
    def is_receiving(self) -> bool:
        """Whether units are still coming."""
        return self._admission is not None and not self._frozen and not self._over

    # input

    def on_stream(self, data: bytes, end: bool) -> None:
        """Bytes of the transfer's stream. Raises PeerError when the peer broke a rule."""
        if not self._stream_open:
            self._stream_open = True
            for chunk, last in self._outbox:
                self._protocol.send(self.transfer_id, chunk, last)
            self._outbox.clear()
        if self._over:
            return
        for message in self._reader.feed(data):
            self._on_message(message)
        if end and not self._over:
            self._reader.finish()

    def on_stop(self) -> None:
        """The peer reads no reply: it gave the transfer up."""
        self.close()

    def on_reset(self, code: int) -> None:
        """The peer ended its half. NO_ERROR: it only stopped feeding units at its deadline, and reads our replies."""
        if code != AppCode.NO_ERROR:
            self.close()
        elif not self._started.is_set():
            self.refuse(Refusal(AppCode.DEADLINE, "the sender's deadline came before its opening was whole"))

    def _opening_overdue(self) -> None:
        if self._admission is None and not self._frozen:
            self.refuse(Refusal(AppCode.CANCELLED, "the opening never came whole"))

    def on_event(self, event: Event) -> None:
        """Something the transfer's receiver said."""
        if self._over:
            return
        if isinstance(event, ManifestReceived):
            self._on_manifest(event.data)
        elif isinstance(event, Frozen):
            self._on_frozen()
        elif isinstance(event, LateOver):
            self._late.close()

    def _on_message(self, message: messages.Message) -> None:
        if self._over:
            return
        if isinstance(message, messages.Open):
            if self._opening is not None or self._started.is_set():
                raise _out_of_order("a second opening")
            self._on_open(message)
        elif isinstance(message, messages.Generate):
            if self._request is not None or self._started.is_set():
                raise _out_of_order("a second request")
            self._request = message
            if self._opening is None:
                self._resume(message)
        elif isinstance(message, messages.Tokens):
            self._on_tokens(message)
        elif isinstance(message, messages.Start):
            if self._recomputes and self._tokens is None:
                self.refuse(Refusal(AppCode.UNSUPPORTED, "missing=recompute needs the token ids, which did not come"))
                return
            self._started.set()
            self._expect()
        elif isinstance(message, messages.Unit):
            self._on_unit(message)

    # opening

    def _on_open(self, opening: messages.Open) -> None:
        self._opening = opening
        handler = self._handler
        if handler is None:
            self.refuse(Refusal(AppCode.UNSUPPORTED, "this endpoint takes no hand-offs"))
            return
        if not self._protocol.authorise(handler, opening.token):
            self.refuse(Refusal(AppCode.UNAUTHORIZED, "the token is missing or wrong"))
            return
        now = time.monotonic()
        remaining_s = opening.remaining_us / 1e6
        if not opening.manifest:
            raise PeerError(AppCode.KV_MANIFEST, "manifest: empty", application=True)
        if opening.mode == "stream":
            if self._manifest is not None or self._receiver() is not None:
                raise _out_of_order("stream mode after frames")
            if self._protocol.receiving >= self._protocol.limits.max_transfers:
                self.refuse(Refusal(AppCode.BUSY, "too many transfers on this connection"))
                return
            self._deadline_s = now + remaining_s
            self._on_manifest(opening.manifest)
            return
        receiver = self._protocol.quic.open_receiver(self.transfer_id, now, early=False)
        if receiver is None:
            self.refuse(Refusal(AppCode.BUSY, "too many transfers on this connection"))
            return
        receiver.note_remaining(remaining_s, now)
        for event in receiver.receive_manifest(opening.manifest, now):
            self.on_event(event)
        self._on_manifest(opening.manifest)  # its event, where frames brought it first, may still be on its way

    def _on_manifest(self, data: bytes) -> None:
        if self._manifest is None:
            self._manifest = decode_manifest(data, self._protocol.limits)
        self._try_admit()

    def _receiver(self) -> LateReceiver | None:
        receivers: dict[int, LateReceiver] = self._protocol.quic.receivers
        return receivers.get(self.transfer_id)

    def _try_admit(self) -> None:
        manifest, handler = self._manifest, self._handler
        if manifest is None or self._admission is not None or self._over or handler is None:
            return
        # The manifest alone, by frame, may open a transfer only where no credential is missing: its loss and that of
        # the stream's first packets must not cost a round trip, but neither may it open a door.
        if self._opening is None and not self._protocol.authorised(handler):
            return
        now = time.monotonic()
        receiver = self._receiver()
        deadline_s = self._deadline_s
        if deadline_s is None and receiver is not None:
            deadline_s = receiver.deadline_s
        if deadline_s is None:
            return
        limits = self._protocol.limits
        remaining_s = deadline_s - now
        try:
            if not limits.min_deadline_us <= remaining_s * 1e6 <= limits.max_deadline_us:
                least_s, most_s = limits.min_deadline_us / 1e6, limits.max_deadline_us / 1e6
                raise Refusal(
                    AppCode.DEADLINE,
                    f"the deadline is {remaining_s:.4f} s away; this receiver takes {least_s:g} to {most_s:g} s",
                )
            if self._recomputes and not manifest.tokens_hash:
                raise Refusal(AppCode.UNSUPPORTED, "missing=recompute needs the token ids and their hash")
            if self._recomputes and self._opening is not None and self._opening.late_us:
                raise Refusal(AppCode.UNSUPPORTED, "late repair needs holes: with missing=recompute none are left")
            ids = manifest.first_token + manifest.tokens if self._recomputes else 0
            self._reserve(held_nbytes(manifest) + ids * TOKEN_SIZE)
            self._granted_s = remaining_s
            self._admission = handler.admit(manifest, remaining_s)
        except Refusal as refusal:
            self.refuse(refusal)
            return
        if not self._tokens_fit():
            return
        self._send(messages.Accepted(self._admission.handle))
        self._expect()
        if self._deadline_s is not None:
            loop = asyncio.get_running_loop()
            self._deadline_timer = loop.call_later(remaining_s, self._on_frozen)
            return
        if receiver is not None:
            layout = self._admission.assembler.layout
            events = receiver.accept(
                layout.unit_sizes(), manifest.symbols, manifest.symbol_size, self._admission.assembler, now
            )
            self._protocol.quic.transfer_accepted(self.transfer_id)
            self._partial = PartialUnits(
                receiver, self._admission.assembler, remaining_s, whole_rows=manifest.missing != "zero"
            )
            for event in events:
                self.on_event(event)

    def _reserve(self, nbytes: int) -> None:
        protocol = self._protocol
        if protocol.admitted_bytes + nbytes > protocol.limits.max_connection_bytes:
            raise Refusal(AppCode.BUSY, "the hand-offs of this connection would take too much memory together")
        protocol.admitted_bytes += nbytes
        self._reserved_bytes = nbytes

    @property
    def _recomputes(self) -> bool:
        return self._manifest is not None and self._manifest.missing == "recompute"

    def _on_tokens(self, message: messages.Tokens) -> None:
        ids = np.frombuffer(message.data, dtype="<u4")
        self._tokens_hash = hash_tokens(ids)
        manifest = self._manifest
        if not self._tokens_fit() or not self._recomputes or manifest is None:
            return
        context = manifest.first_token + manifest.tokens
        if len(ids) != context:
            self.refuse(Refusal(AppCode.TOKENS_MISMATCH, f"{len(ids)} token ids for a context of {context} tokens"))
            return
        self._tokens = ids

    def _tokens_fit(self) -> bool:
        """Token ids that came are those the manifest names; if not, the transfer is refused."""
        if self._tokens_hash is None or self._manifest is None or not self._manifest.tokens_hash:
            return True
        if self._tokens_hash != self._manifest.tokens_hash:
            self.refuse(Refusal(AppCode.TOKENS_MISMATCH, "the token ids are not those of the manifest"))
            return False
        return True

    def _on_unit(self, message: messages.Unit) -> None:
        if self._opening is None or self._opening.mode != "stream":
            raise _out_of_order("a unit outside of stream mode")
        if self._admission is None or self._frozen:
            return
        assembler = self._admission.assembler
        try:
            assembler.write_unit(message.unit, message.data)
        except ValueError as error:
            raise PeerError(AppCode.MESSAGE_ERROR, str(error), application=True) from None
        if bool(assembler.complete.all()):
            self._on_frozen()

    # the freeze

    def _expect(self) -> None:
        """Once the hand-off is let in and its opening is whole, somebody may stand by for its freeze."""
        admission, manifest, handler = self._admission, self._manifest, self._handler
        if admission is None or manifest is None or handler is None or self._frozen or not self._started.is_set():
            return
        if self._stand_by is None:
            self._stand_by = handler.expect(admission, manifest, self._request)
        receiver = self._receiver()
        if receiver is not None and self._opening is not None and takes_late(handler) and not self._recomputes:
            self._late.grant(receiver, self._opening, manifest, self._request)

    def _on_frozen(self) -> None:
        if self._frozen or self._over:
            return
        self._frozen = True
        now = time.monotonic()
        admission, manifest, receiver = self._admission, self._manifest, self._receiver()
        if admission is None or manifest is None:
            if self._opening is not None or self._manifest is not None:
                self.refuse(Refusal(AppCode.DEADLINE, "the deadline came before the transfer could be admitted"))
            else:
                self.close()
            return
        assembler = admission.assembler
        streamed = receiver is None or self._deadline_s is not None
        frozen_s, deadline_s = now, self._deadline_s or now
        partial: list[Part] = []
        if self._partial is not None:
            self._partial.stop()
        if receiver is not None and not streamed:
            frozen_s = now if receiver.frozen_s is None else receiver.frozen_s
            deadline_s = now if receiver.deadline_s is None else receiver.deadline_s
            partial = [] if self._partial is None else self._partial.left()
        complete = to_bitmap(assembler.complete)
        self._received_s = frozen_s - self._began_s
        late = self._late.begin(receiver, assembler)
        freeze = Freeze(
            manifest, admission.handle, frozen_s, deadline_s, self._granted_s, assembler, partial, self._tokens, late
        )
        if self._stand_by is not None:  # before the report is written: decoding waits for this alone
            self._stand_by.begin(freeze, self._reply)
        self._report(freeze, None if streamed else receiver, complete)
        if receiver is not None and late is not None:
            for event in receiver.go_on(late, now):
                self.on_event(event)
        self._task = asyncio.ensure_future(self._serve(freeze))

    def _report(self, freeze: Freeze, receiver: Receiver | None, complete: bytes) -> None:
        """Tells the peer what was there at the freeze. `receiver`: None in stream mode."""
        manifest, assembler = freeze.manifest, freeze.assembler
        known, recovered, recovered_digest, stats = b"", b"", 0, ReceiverStats()
        if receiver is not None:
            known = receiver.known_bitmap()[: (manifest.symbols + 7) // 8]
            recovered, recovered_digest = receiver.recovered_symbols()
            stats, status = receiver.stats, receiver.status
            if freeze.late is None:
                receiver.release()
        else:
            status = AckStatus.COMPLETE if bool(assembler.complete.all()) else AckStatus.FROZEN
        self._send(
            messages.Report(
                status=status,
                frozen_early_us=int((freeze.deadline_s - freeze.frozen_s) * 1e6),
                frozen_clock_s=freeze.frozen_s,
                known=known,
                complete=complete,
                corrupt=assembler.rejected,
                recovered=recovered,
                recovered_digest=recovered_digest,
                repairs_useful=stats.repairs_useful,
                repairs_useless=stats.repairs_useless,
                repairs_late=stats.repairs_late,
            )
        )

    async def _serve(self, freeze: Freeze) -> None:
        handler = self._handler
        assert handler is not None
        try:
            if self._stand_by is not None:
                await self._stand_by.finished()
            else:
                await self._wait_for_start()
                await handler.received(replace(freeze, tokens=self._tokens), self._request, self._reply)
        except Refusal as refusal:
            self._reply.failed(refusal.code, refusal.reason)
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("a hand-off failed after its freeze")
            self._reply.failed(AppCode.INTERNAL, "the receiver failed; see its log")
        self._finish()

    async def _wait_for_start(self) -> None:
        """The request may still be on its way again: the units do not wait for it, generation has to."""
        try:
            async with asyncio.timeout(self._protocol.limits.manifest_timeout_us / 1e6):
                await self._started.wait()
        except TimeoutError:
            raise Refusal(AppCode.CANCELLED, "the opening never came whole") from None

    def _resume(self, request: messages.Generate) -> None:
        handler = self._handler
        if handler is None:
            self.refuse(Refusal(AppCode.UNSUPPORTED, "this endpoint keeps no caches"))
            return
        if not self._protocol.authorise(handler, request.token):
            self.refuse(Refusal(AppCode.UNAUTHORIZED, "the token is missing or wrong"))
            return
        self._frozen = True
        self._task = asyncio.ensure_future(self._serve_again(handler, request))

    async def _serve_again(self, handler: Handler, request: messages.Generate) -> None:
        try:
            await handler.resumed(request, self._reply)
        except Refusal as refusal:
            self.refuse(refusal)
            return
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("a request on a handle failed")
            self._reply.failed(AppCode.INTERNAL, "the receiver failed; see its log")
        self._finish()

    # output and the end

    def _send(self, message: messages.Message, last: bool = False) -> None:
        if not self._over:
            self._write(messages.encode_message(message), last)

    def _write(self, data: bytes, last: bool) -> None:
        if self._stream_open:
            self._protocol.send(self.transfer_id, data, last)
        else:  # our half of a peer's stream exists only once the peer's first bytes came
            self._outbox.append((data, last))

    def refuse(self, refusal: Refusal) -> None:
        """Tells the peer why not and ends the transfer; the connection stays."""
        if self._over:
            return
        self._refusal = Refusal(refusal.code, refusal.reason)  # without a traceback, which would hold all of this
        self._send(messages.Refused(refusal.code, refusal.reason[: messages.MAX_REASON]), last=True)
        if self._stream_open:
            self._protocol.stop(self.transfer_id, refusal.code)
        self.close(keep_outbox=True)

    def _finish(self) -> None:
        if not self._over:
            self._write(b"", True)
            self.close(keep_outbox=True)

    def close(self, *, keep_outbox: bool = False) -> None:
        """Frees everything. Idempotent; also what a lost connection calls."""
        if self._over:
            return
        self._over = True
        self._late.close()
        self._reply.cancelled = True
        self._tokens = None
        self._opening_timer.cancel()
        self._protocol.admitted_bytes -= self._reserved_bytes
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        if self._partial is not None:
            self._partial.stop()
        if self._stand_by is not None:
            self._stand_by.cancel()
        if self._admission is not None:
            self._admission.release()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self._protocol.incoming_over(
            self.transfer_id,
            admitted=self._admission is not None,
            waiting_for_stream=keep_outbox and bool(self._outbox),
        )
        if self._manifest is not None or self._request is not None or self._refusal is not None:
            self._protocol.note(self._entry(given_up=not keep_outbox))

    def _entry(self, given_up: bool) -> Entry:
        """For the log: what became of it."""
        manifest, admission, refusal = self._manifest, self._admission, self._refusal
        complete = admission.assembler.complete if admission is not None else np.zeros(0, dtype=np.bool_)
        again = self._opening is None and self._request is not None
        kind: Literal["hand-off", "later turn", "credential check"] = "later turn" if again else "hand-off"
        outcome: Literal["complete", "partial", "served", "accepted", "refused", "failed", "given up"]
        if again and self._request is not None and self._request.handle == 0:
            kind = "credential check"
            if refusal is not None and refusal.code is not AppCode.UNAUTHORIZED:  # what it hopes to hear
                refusal = None
        if refusal is not None:
            outcome = "refused"
        elif self._reply.failure:
            outcome = "failed"
        elif given_up:
            outcome = "given up"
        elif again:
            outcome = "served" if kind == "later turn" else "accepted"
        else:
            outcome = "complete" if bool(complete.all()) else "partial"
        return Entry(
            peer=self._protocol.peer,
            kind=kind,
            outcome=outcome,
            total_s=time.monotonic() - self._began_s,
            reason=str(refusal) if refusal is not None else self._reply.failure,
            model="" if manifest is None else manifest.model,
            tokens=0 if manifest is None else manifest.tokens,
            blocks_complete=int(complete.sum()),
            blocks_total=len(complete),
            received_s=self._received_s,
            generated=self._reply.generated,
        )


def _out_of_order(what: str) -> PeerError:
    return PeerError(AppCode.MESSAGE_ERROR, f"{what} on a transfer's stream", application=True)
