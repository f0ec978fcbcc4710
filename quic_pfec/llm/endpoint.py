"""The LLM endpoint's side of a hand-off: it checks that the cache fits the model, and continues from what came.

Torch work runs in worker threads, one a hand-off, so that decoding begins at the freeze and the event loop keeps
serving the network. A worker stops at the next token once nobody reads its reply.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from threading import Barrier
from typing import Any

import numpy as np

from quic_pfec.kv.device import DeviceMirror
from quic_pfec.kv.hf import (
    DTYPE_NAMES,
    Frame,
    Rebuilt,
    Room,
    check_base,
    extract,
    fork,
    length,
    make_frame,
    make_room,
    rebuildable,
    to_cache,
)
from quic_pfec.kv.late import LateUnits
from quic_pfec.kv.patch import Patcher
from quic_pfec.kv.prepared import hash_tokens
from quic_pfec.kv.profile import builtin
from quic_pfec.kv.received import ReceivedKV
from quic_pfec.llm.generate import TextStream, greedy, prefill, score
from quic_pfec.llm.models import LoadedModel
from quic_pfec.llm.recompute import PassClock
from quic_pfec.quic.admission import Admissions, HandleStore
from quic_pfec.quic.handler import Admission, Freeze, Reply, StandBy
from quic_pfec.wire import messages
from quic_pfec.wire.errors import AppCode, Refusal
from quic_pfec.wire.manifest import MODEL_UNSTATED, Manifest

CATCH_UP_S = 0.005  # between looks for units that a device has not got yet


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """A cache kept under a handle.

    tokens: how many positions it stands for, holes included. missing_used: what became of its holes where "recompute"
    was asked for, else empty. tokens_hash: of these very tokens, as the manifest gave it; empty if it gave none, or
    once more was generated.
    """

    cache: Any
    tokens: int
    missing_used: str = ""
    tokens_hash: bytes = b""


class LLMHandler:
    """Takes hand-offs for one model. See `quic.incoming.Handler`.

    require_fingerprint: refuse a cache whose sender did not say which model it is of. recompute_budget_s: how long
    after the deadline decoding may begin where the sender asks for "recompute" (0 = never: such holes are masked); None
    = as long as its deadline had granted the hand-off. on_received: called in a worker thread with each hand-off at its
    freeze, for tools; holes may be filled in the memory of its arrays later. Where late repair is granted, units that
    come while it decodes are patched into the cache it decodes from, which is also what it keeps.

    Raises ValueError naming the layer for a model whose cache cannot be rebuilt from rows (linear attention, Mamba).
    """

    takes_late = True

    def __init__(
        self,
        model: LoadedModel,
        *,
        token: str | None = None,
        admissions: Admissions | None = None,
        handles: HandleStore[Conversation] | None = None,
        require_fingerprint: bool = False,
        recompute_budget_s: float | None = None,
        on_received: Callable[[ReceivedKV], None] | None = None,
    ) -> None:
        rebuildable(model.config)
        self.model = model
        self.token = token
        self.admissions = admissions or Admissions()
        self.handles: HandleStore[Conversation] = HandleStore() if handles is None else handles
        self.clock = PassClock(model)
        self.recompute_budget_s = recompute_budget_s
        self._require_fingerprint = require_fingerprint
        self._on_received = on_received
        # Of increments under way, by their own handles: the base may expire or grow while one is in flight.
        self._bases: dict[int, Conversation] = {}
        self._rooms: dict[int, Future[Room]] = {}
        self._waiting: set[_StandBy] = set()
        self._workers = ThreadPoolExecutor(self.admissions.max_transfers, thread_name_prefix="quic_pfec-decode")

    def warm_up(self) -> None:
        """Runs a short forward pass with holes in every worker: a thread's first starts its pool of compute threads.

        Then measures what recomputing costs here.
        """
        workers = self.admissions.max_transfers
        together = Barrier(workers)

        def run() -> None:
            together.wait(60)
            whole = extract(prefill(self.model, [0, 0]), "bf16")
            holes = [np.arange(2 * shape.kv_heads).reshape(-1, 2) > 0 for shape in whole.shapes]
            cache = to_cache(whole.arrays, holes, self.model.config, dtype=self.model.dtype, device=self.model.device)
            score(self.model, cache, [0], [0])

        for done in [self._workers.submit(run) for _ in range(workers)]:
            done.result()
        self._workers.submit(self.clock.calibrate).result()

    def close(self) -> None:
        """Ends the workers; what they were generating is given up."""
        for waiting in list(self._waiting):
            waiting.cancel()
        self._workers.shutdown(wait=False, cancel_futures=True)

    # admission

    def admit(self, manifest: Manifest, remaining_s: float) -> Admission:
        self._check_model(manifest)
        now = time.monotonic()
        base = None
        if manifest.first_token:
            if not manifest.base:
                raise Refusal(AppCode.UNSUPPORTED, "rows from the middle of a context need a base handle")
            base = self.handles.get(manifest.base, now)
            if base.tokens != manifest.first_token:
                raise Refusal(
                    AppCode.TOKENS_MISMATCH,
                    f"the base holds {base.tokens} tokens, the increment begins at {manifest.first_token}",
                )
            try:
                check_base(base.cache)
            except ValueError as error:
                raise Refusal(AppCode.UNSUPPORTED, str(error)) from None
        elif manifest.base:
            raise Refusal(AppCode.UNSUPPORTED, "a base handle goes with rows that continue it")
        self.handles.sweep(now)
        # On a CPU units are converted as they come; elsewhere the device does it.
        on_cpu = self.model.device.type == "cpu"
        admission = self.admissions.admit(manifest, DTYPE_NAMES.get(self.model.dtype) if on_cpu else None)
        return admission if base is None else self._with_room(admission, manifest, base)

    def _with_room(self, admission: Admission, manifest: Manifest, base: Conversation) -> Admission:
        """Copies the base an increment continues while the increment is still in flight."""
        model, handle = self.model, admission.handle
        self._bases[handle] = base
        self._rooms[handle] = self._workers.submit(
            make_room, base.cache, manifest.tokens, dtype=model.dtype, device=model.device
        )

        def release() -> None:
            self._bases.pop(handle, None)
            self._rooms.pop(handle, None)
            admission.release()

        return replace(admission, release=release)

    def _check_model(self, manifest: Manifest) -> None:
        model = self.model
        stated = manifest.model != MODEL_UNSTATED
        if stated and manifest.model != model.fingerprint:
            raise Refusal(
                AppCode.MODEL_MISMATCH,
                f"this endpoint runs {model.name} ({model.fingerprint}), the cache is of {_named(manifest.model)}",
            )
        if not stated and self._require_fingerprint:
            raise Refusal(AppCode.MODEL_MISMATCH, "the cache does not say which model it is of: prepare(model=...)")
        if manifest.rope and manifest.rope != model.rope:
            raise Refusal(AppCode.MODEL_MISMATCH, "the cache was made with other rotary position settings")
        config = model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layers = sum(run.count for run in manifest.layers)
        if layers != config.num_hidden_layers or any((r.kv_heads, r.head_dim) != (heads, dim) for r in manifest.layers):
            raise Refusal(
                AppCode.MODEL_MISMATCH,
                f"the model has {config.num_hidden_layers} layers of {heads} x {dim}, the cache has other shapes",
            )
        if manifest.first_token + manifest.tokens >= model.max_tokens:
            raise Refusal(AppCode.TOO_LARGE, f"the context is longer than the model's {model.max_tokens} positions")

    # use

    def expect(self, admission: Admission, manifest: Manifest, request: messages.Generate | None) -> StandBy:
        """A worker builds the empty cache and waits for the freeze: there is one for every hand-off let in."""
        stand_by = _StandBy(self, admission, manifest, request, asyncio.get_running_loop())
        self._waiting.add(stand_by)
        stand_by.done = self._workers.submit(stand_by.run)
        stand_by.done.add_done_callback(lambda _: self._waiting.discard(stand_by))
        return stand_by

    def frame_for(self, admission: Admission) -> Frame | DeviceMirror | None:
        """The cache without its holes: tensors that share the memory being filled, or that follow it on the device."""
        model, assembler = self.model, admission.assembler
        if model.device.type != "cpu":
            return DeviceMirror(assembler, model.config, dtype=model.dtype, device=model.device)
        if assembler.dtype != DTYPE_NAMES.get(model.dtype):
            return None
        return make_frame(assembler.arrays, model.config, dtype=model.dtype)

    async def received(self, freeze: Freeze, request: messages.Generate | None, reply: Reply) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._workers, self.rebuild_and_decode, freeze, request, _ThreadReply(loop, reply))

    async def resumed(self, request: messages.Generate, reply: Reply) -> None:
        loop = asyncio.get_running_loop()
        now = time.monotonic()
        conversation = self.handles.get(request.handle, now)
        release = self.admissions.enter()  # it takes a worker, and no hand-off may have to wait for one
        remote = _ThreadReply(loop, reply)
        try:
            await loop.run_in_executor(self._workers, self._decode, conversation, request, remote, now, request.handle)
        finally:
            release()

    def rebuild_and_decode(
        self,
        freeze: Freeze,
        request: messages.Generate | None,
        reply: _ThreadReply,
        frame: Frame | DeviceMirror | None = None,
        prompt: list[int] | None = None,
    ) -> None:
        """In a worker thread: from the freeze to the end of the reply. `frame`, `prompt`: made beforehand."""
        received, model = freeze.finish(), self.model
        if isinstance(frame, DeviceMirror):
            frame = frame.finish()
        before = self._bases.pop(received.handle, None)
        base = None if before is None else before.cache
        room = self._rooms.pop(received.handle, None)
        rebuilt = received.rebuild(
            model.config, dtype=model.dtype, device=model.device, base=base, room=room and room.result(), frame=frame
        )
        used = ""
        if freeze.manifest.missing == "recompute":
            rebuilt, used = self._fill(freeze, before, rebuilt, reply)
        cache = rebuilt.to_cache()
        conversation = Conversation(cache, length(cache), used, freeze.manifest.tokens_hash)
        self.handles.put(received.handle, conversation, _nbytes(cache), time.monotonic())
        if self._on_received is not None:
            self._on_received(received)
        if request is not None:
            first = received.manifest.first_token
            self._decode(conversation, request, reply, received.frozen_s, received.handle, prompt, freeze.late, first)

    def _fill(
        self, freeze: Freeze, before: Conversation | None, rebuilt: Rebuilt, reply: _ThreadReply
    ) -> tuple[Rebuilt, str]:
        """Computes the holes if that fits before decoding must begin; says what was done. Raises Refusal."""
        if freeze.tokens is None or int(freeze.tokens.max()) >= self.model.config.vocab_size:
            raise Refusal(AppCode.UNSUPPORTED, "recompute needs the context's token ids, of the model's own tokens")
        if before is not None and before.tokens_hash not in (b"", hash_tokens(freeze.tokens[: before.tokens])):
            raise Refusal(AppCode.TOKENS_MISMATCH, "the base was made of other tokens than the increment says")
        budget_s = freeze.granted_s if self.recompute_budget_s is None else self.recompute_budget_s
        until_s = freeze.deadline_s + budget_s
        return self.clock.fill(rebuilt, freeze.tokens, until_s, lambda: reply.cancelled)

    def prompt_of(self, request: messages.Generate) -> list[int]:
        return list(request.prompt_tokens) or self.model.encode(request.prompt)

    def _decode(
        self,
        conversation: Conversation,
        request: messages.Generate,
        reply: _ThreadReply,
        frozen_s: float,
        handle: int,
        prompt: list[int] | None = None,
        late: LateUnits | None = None,
        first_token: int = 0,
    ) -> None:
        model = self.model
        prompt = self.prompt_of(request) if prompt is None else prompt
        vocabulary = model.config.vocab_size
        if not prompt or any(token >= vocabulary for token in (*prompt, *request.score_tokens)):
            raise Refusal(AppCode.UNSUPPORTED, "a continuation needs a prompt, of the model's own tokens")
        longest = conversation.tokens + len(prompt) + max(request.max_new_tokens, len(request.score_tokens))
        if longest > model.max_tokens:
            raise Refusal(AppCode.TOO_LARGE, f"{longest} tokens are more than the model's {model.max_tokens} positions")
        reply.decoding(frozen_s, time.monotonic(), conversation.missing_used)
        if request.score_tokens:
            reply.scores(tuple(score(model, conversation.cache, prompt, request.score_tokens)))
        count, reason, patched = 0, "length", None
        if request.max_new_tokens:
            cache = fork(conversation.cache)
            stream = TextStream(model)
            reason = "stop"
            patcher = None
            if late is not None:
                patcher = Patcher(late, cache, first_token=first_token, shared=conversation.cache)
            step = None if patcher is None else patcher.step
            for token in greedy(model, cache, prompt, request.max_new_tokens, before_step=step):
                if reply.cancelled:
                    return
                reply.text(stream.push(token), token, count)
                count += 1
            rest = stream.close()
            if rest:
                reply.text(rest, -1, count)
            if count == request.max_new_tokens:
                reason = "length"
            if patcher is not None:
                patcher.step()  # what came during the last pass is for later turns
                patched = patcher.patched
            grown = replace(conversation, cache=cache, tokens=length(cache), tokens_hash=b"")
            self.handles.put(handle, grown, _nbytes(cache), time.monotonic())
        reply.done(reason, count, patched)


class _StandBy:
    """A worker thread that has made ready what it can and waits for one freeze. See `quic.handler.StandBy`."""

    def __init__(
        self,
        handler: LLMHandler,
        admission: Admission,
        manifest: Manifest,
        request: messages.Generate | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.done: Future[None]
        self._handler = handler
        self._admission = admission
        self._recomputes = manifest.missing == "recompute"
        self._request = request
        self._loop = loop
        self._freeze: SimpleQueue[tuple[Freeze, Reply] | None] = SimpleQueue()

    def run(self) -> None:
        handler, request = self._handler, self._request
        frame = handler.frame_for(self._admission)
        if self._recomputes:
            handler.clock.calibrate()
        prompt = None if request is None else handler.prompt_of(request)
        begun = self._wait(frame)
        if begun is not None:
            freeze, reply = begun
            handler.rebuild_and_decode(freeze, request, _ThreadReply(self._loop, reply), frame, prompt)

    def _wait(self, frame: Frame | DeviceMirror | None) -> tuple[Freeze, Reply] | None:
        if not isinstance(frame, DeviceMirror):
            return self._freeze.get()
        while True:
            frame.catch_up()
            with suppress(Empty):
                return self._freeze.get(timeout=CATCH_UP_S)

    def begin(self, freeze: Freeze, reply: Reply) -> None:
        self._freeze.put((freeze, reply))

    async def finished(self) -> None:
        await asyncio.wrap_future(self.done)

    def cancel(self) -> None:
        self._freeze.put(None)


class _ThreadReply:
    """A reply used from a worker thread: every call is made on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, reply: Reply) -> None:
        self._loop = loop
        self._reply = reply

    @property
    def cancelled(self) -> bool:
        return self._reply.cancelled

    def decoding(self, frozen_s: float, started_s: float, missing_used: str) -> None:
        self._loop.call_soon_threadsafe(self._reply.decoding, frozen_s, started_s, missing_used)

    def text(self, text: str, token: int, index: int) -> None:
        self._loop.call_soon_threadsafe(self._reply.text, text, token, index)

    def scores(self, predictions: tuple[int, ...]) -> None:
        self._loop.call_soon_threadsafe(self._reply.scores, predictions)

    def done(self, reason: str, tokens: int, patched: tuple[tuple[int, int], ...] | None) -> None:
        self._loop.call_soon_threadsafe(self._reply.done, reason, tokens, patched)


def _named(fingerprint: str) -> str:
    """A model by what its sender called it, and by name where a shipped profile knows the fingerprint."""
    known = builtin(fingerprint)
    return fingerprint if known is None or known.model == fingerprint else f"{known.model} ({fingerprint})"


def _nbytes(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


__all__ = ["Conversation", "LLMHandler"]
