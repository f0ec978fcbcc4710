"""What an endpoint does with hand-offs, as `Incoming` sees it: let them in, use them at their freeze, reply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quic_pfec.kv.assemble import Assembler
from quic_pfec.kv.late import LateUnits
from quic_pfec.kv.received import ReceivedKV
from quic_pfec.wire import messages
from quic_pfec.wire.errors import AppCode, Refusal
from quic_pfec.wire.manifest import Manifest

__all__ = ["Admission", "Freeze", "Handler", "Reply", "StandBy", "takes_late"]

TEXT_CHARS = 1000  # characters in one TEXT message, far below its limit in bytes


@dataclass(frozen=True, slots=True)
class Admission:
    """A hand-off was let in: where its units go, how it will be named, how to give its place back."""

    assembler: Assembler
    handle: int
    release: Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class Freeze:
    """The hand-off as it stood when it froze. `finish` turns it into a cache; it may run in a worker thread.

    frozen_s, deadline_s: `time.monotonic()`. granted_s: how long it had from admission to deadline. tokens: ids of the
    whole context, uint32 [first_token + tokens]; only where the manifest says "recompute". late: units that complete
    after the freeze, where late repair was granted; they are not part of what `finish` gives.
    """

    manifest: Manifest
    handle: int
    frozen_s: float
    deadline_s: float
    granted_s: float
    assembler: Assembler
    partial: list[tuple[int, bytes, list[tuple[int, int]]]]
    tokens: NDArray[np.uint32] | None = None
    late: LateUnits | None = None

    def finish(self) -> ReceivedKV:
        """Files what came of incomplete units and ends the assembly. Call it once."""
        mode = "zero" if self.manifest.missing == "zero" else "mask"
        for unit, data, ranges in self.partial:
            self.assembler.write_partial(unit, data, ranges, whole_rows=mode == "mask")
        kv = self.assembler.finish(mode)
        return ReceivedKV(self.manifest, kv, self.handle, self.frozen_s, self.deadline_s, self.tokens)


class StandBy(Protocol):
    """Somebody who waits for one freeze, so that decoding begins without delay."""

    def begin(self, freeze: Freeze, reply: Reply) -> None:
        """The freeze is here. Returns at once."""

    async def finished(self) -> None:
        """Waits for the end, as `Handler.received` does, and raises what went wrong."""

    def cancel(self) -> None:
        """There will be no freeze. Idempotent; after `begin` it does nothing."""


class Handler(Protocol):
    """What an endpoint does with hand-offs. `token`: what a sender must present, None = nothing."""

    token: str | None

    def admit(self, manifest: Manifest, remaining_s: float) -> Admission:
        """Lets a hand-off in, reserving its memory. Raises Refusal."""

    def expect(self, admission: Admission, manifest: Manifest, request: messages.Generate | None) -> StandBy | None:
        """The freeze is near: make ready for it what does not depend on the last rows. None: nothing to make ready.

        What is returned is begun at the freeze, in place of `received`, or cancelled.
        """

    async def received(self, freeze: Freeze, request: messages.Generate | None, reply: Reply) -> None:
        """Uses a frozen hand-off; the transfer's stream ends when this returns."""

    async def resumed(self, request: messages.Generate, reply: Reply) -> None:
        """Serves a later request on a handle. Raises Refusal."""


def takes_late(handler: Handler | None) -> bool:
    """Whether it patches units into caches that it decodes from (late repair, docs/wire.md section 8).

    A handler that does says so with an attribute `takes_late`; one without it does not know of `Freeze.late`.
    """
    return bool(getattr(handler, "takes_late", False))


class Reply:
    """The receiver's half of a transfer stream. All methods but `cancelled` belong to the event loop's thread."""

    def __init__(self, send: Callable[[messages.Message], None]) -> None:
        self._send = send
        self.cancelled = False
        """Set when nobody reads any more: work for this reply should stop. Safe to read from any thread."""
        self.failure = ""
        """Why it failed, empty if it did not."""
        self.generated = 0
        """New tokens, once it is done."""

    def decoding(self, frozen_s: float, started_s: float, missing_used: str = "") -> None:
        """`missing_used`: what was done about holes, where "recompute" was asked for."""
        self._send(messages.Decoding(max(0, int((started_s - frozen_s) * 1e6)), started_s, missing_used))

    def text(self, text: str, token: int, index: int) -> None:
        for start in range(0, max(1, len(text)), TEXT_CHARS):
            self._send(messages.Text(text[start : start + TEXT_CHARS], token, index))

    def scores(self, predictions: tuple[int, ...]) -> None:
        self._send(messages.Scores(predictions))

    def done(self, reason: str, tokens: int, patched: tuple[tuple[int, int], ...] | None = None) -> None:
        """`patched`: what late repair did, see `kv.patch.Patcher`; None where it was not granted."""
        self.generated = tokens
        self._send(messages.Done(reason, tokens, patched))

    def failed(self, code: AppCode, reason: str) -> None:
        self.failure = str(Refusal(code, reason))
        self._send(messages.Failed(code, reason[: messages.MAX_REASON]))
