"""The client without asyncio, for notebooks and scripts: the same calls, blocking, over an event loop in a thread.

    from quic_pfec import sync

    with sync.connect("edge-b", 4433, ca_certs="ca.pem", rate="50Mbps") as conn:
        handoff = conn.send_kv(kv, deadline=0.35, then=quic_pfec.Generate("The answer is"))
        print(handoff.report.j_frac, handoff.text.whole())

A notebook's own event loop is running already and cannot wait for another call; a loop in a thread of its own can. The
thread also keeps the connection alive between two cells. Calls may come from several threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from quic_pfec import client
from quic_pfec.client import Generate
from quic_pfec.report import KVReport

__all__ = ["Connection", "Handoff", "Text", "connect"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Handoff:
    """What `Connection.send_kv` returns. report: see `KVReport`, but read the text from here."""

    report: KVReport
    text: Text


class Text:
    """Generated text as it comes: iterate it, or take it `whole`. Raises as `quic_pfec.client.KVText` does."""

    def __init__(self, conn: Connection, parts: AsyncIterator[str]) -> None:
        self._conn = conn
        self._parts = parts

    def __iter__(self) -> Iterator[str]:
        while (part := self._conn.call(self._next())) is not None:
            yield part

    def whole(self) -> str:
        """All that is still to come, joined."""
        return "".join(self)

    async def _next(self) -> str | None:
        return await anext(self._parts, None)


class Connection:
    """A connection to a peer that takes hand-offs. Made by `connect`; close it, or use it in a `with` statement."""

    def __init__(self, host: str, port: int, options: dict[str, Any]) -> None:
        self._ready: concurrent.futures.Future[client.Connection] = concurrent.futures.Future()
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._held = True
        self._thread = threading.Thread(
            target=self._run, args=(host, port, options), name="quic_pfec-sync", daemon=True
        )
        self._thread.start()
        try:
            self._conn = self._ready.result()
        except BaseException:
            self.close()
            raise

    @property
    def extension(self) -> Literal["on", "off"]:
        """See `quic_pfec.client.Connection.extension`."""
        return self._conn.extension

    def send_kv(self, cache: Any, deadline: float | None = None, **options: Any) -> Handoff:
        """Hands a cache over. Arguments and exceptions are those of `quic_pfec.send_kv`."""
        report = self.call(client.send_kv(self._conn, cache, deadline, **options))
        return Handoff(report, Text(self, report.text))

    def generate(self, handle: int, request: Generate) -> Text:
        """A later turn on a cache that the peer keeps. See `quic_pfec.client.Connection.generate`."""
        return Text(self, aiter(self.call(self._conn.generate(handle, request))))

    def authorise(self) -> None:
        """See `quic_pfec.client.Connection.authorise`."""
        self.call(self._conn.authorise())

    def close(self) -> None:
        """Closes the connection, gives up what is under way and ends the thread; may be called twice."""
        if not self._closed:
            self._closed = True
            with suppress(RuntimeError):  # the loop is over: the connection never came about
                self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the connection's loop and waits for it; an interrupt cancels it.

        Raises ConnectionError if this connection was closed, or is closed meanwhile.
        """
        if self._closed:
            work.close()
            raise ConnectionError("the connection is closed: by us")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise ConnectionError("the connection was closed: by us") from None
        except BaseException:
            future.cancel()
            raise

    def _run(self, host: str, port: int, options: dict[str, Any]) -> None:
        with suppress(asyncio.CancelledError), asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._hold(host, port, options))

    async def _hold(self, host: str, port: int, options: dict[str, Any]) -> None:
        """Keeps the connection open until it is cancelled; a failure to connect goes to whoever waits for it."""
        try:
            async with client.connect(host, port, **options) as conn:
                self._ready.set_result(conn)
                await asyncio.get_running_loop().create_future()
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)
        finally:
            self._held = False

    def _cancel(self) -> None:
        if not self._held:
            return  # the loop is on its way out, which must not be cancelled
        for task in asyncio.all_tasks(self._loop):
            task.cancel()


def connect(host: str, port: int = 4433, **options: Any) -> Connection:
    """Connects to a peer. Options and exceptions are those of `quic_pfec.connect`."""
    return Connection(host, port, options)
