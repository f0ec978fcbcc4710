"""Who may come in: places and memory for hand-offs that are under way, counted for a whole server."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from quic_pfec.kv.assemble import Assembler
from quic_pfec.kv.layout import Layout
from quic_pfec.quic.handler import Admission
from quic_pfec.wire.errors import AppCode, Refusal
from quic_pfec.wire.limits import Limits
from quic_pfec.wire.manifest import ITEM_SIZES, Manifest

T = TypeVar("T")


class Admissions:
    """Lets hand-offs in while there is room. max_transfers: at once; max_bytes: of all their destinations, default
    `Limits.max_server_bytes`.

    `active` counts hand-offs from admission until their reply has ended, and later turns on their caches.
    """

    def __init__(self, max_transfers: int = 8, max_bytes: int | None = None) -> None:
        self.max_transfers = max_transfers
        self.max_bytes = Limits().max_server_bytes if max_bytes is None else max_bytes
        self.active = 0
        self.bytes = 0
        self.refused = 0

    def admit(self, manifest: Manifest, dtype: str | None = None) -> Admission:
        """Reserves a place and the memory; `dtype`: what the destination holds, default the wire dtype, or the sender's
        own if that is quantised.

        Raises Refusal BUSY or TOO_LARGE; allocates nothing before that.
        """
        layout = Layout.from_manifest(manifest)
        if layout.quantised:
            dtype = dtype or manifest.dtype
            nbytes = layout.cache_nbytes(dtype)
            if len(layout.forms) > 1:  # of two units of a block the first is kept for the second
                nbytes += int(layout.unit_sizes().sum())
        else:
            width = 1 if dtype is None else ITEM_SIZES[dtype] / ITEM_SIZES[layout.wire_dtype]
            nbytes = int(int(layout.unit_sizes().sum()) * width)
        if nbytes > self.max_bytes:
            self.refused += 1
            raise Refusal(AppCode.TOO_LARGE, f"{nbytes} bytes are more than the {self.max_bytes} this receiver takes")
        release = self.enter(nbytes)
        try:
            assembler = Assembler(layout, dtype)
        except MemoryError:
            release()
            self.refused += 1
            raise Refusal(AppCode.BUSY, f"there is no memory for {nbytes} bytes now") from None
        # 62 random bits: a handle is also the right to use the cache, nobody can guess another's.
        return Admission(assembler, secrets.randbits(62) | 1, release)

    def enter(self, nbytes: int = 0) -> Callable[[], None]:
        """Takes a place and counts `nbytes`; returns what gives them back, once. Raises Refusal BUSY."""
        if self.active >= self.max_transfers or self.bytes + nbytes > self.max_bytes:
            self.refused += 1
            raise Refusal(AppCode.BUSY, f"{self.active} hand-offs are under way: try again later")
        self.active += 1
        self.bytes += nbytes
        released = False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                self.active -= 1
                self.bytes -= nbytes

        return release


@dataclass(slots=True)
class _Kept(Generic[T]):
    value: T
    nbytes: int
    expires_s: float


class HandleStore(Generic[T]):
    """Caches kept for later turns, by handle, bounded in time and memory; the least recently used leave first.

    Safe to use from several threads; `now` is `time.monotonic()`.
    """

    def __init__(self, ttl_s: float = 300.0, max_bytes: int = 4 << 30) -> None:
        self.ttl_s = ttl_s
        self.max_bytes = max_bytes
        self.bytes = 0
        self._kept: OrderedDict[int, _Kept[T]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, handle: int, value: T, nbytes: int, now: float) -> None:
        """Keeps a cache; one larger than the whole store is not kept."""
        with self._lock:
            self._drop(handle)
            self._sweep(now)
            while self._kept and self.bytes + nbytes > self.max_bytes:
                self._drop(next(iter(self._kept)))
            if nbytes <= self.max_bytes:
                self._kept[handle] = _Kept(value, nbytes, now + self.ttl_s)
                self.bytes += nbytes

    def get(self, handle: int, now: float) -> T:
        """Raises Refusal if the handle is unknown or has expired; using it renews it."""
        with self._lock:
            self._sweep(now)
            kept = self._kept.get(handle)
            if kept is None:
                raise Refusal(AppCode.UNKNOWN_HANDLE, "the handle is unknown or has expired: hand the cache over again")
            kept.expires_s = now + self.ttl_s
            self._kept.move_to_end(handle)
            return kept.value

    def sweep(self, now: float) -> None:
        """Frees what has expired."""
        with self._lock:
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        for handle in [handle for handle, kept in self._kept.items() if kept.expires_s <= now]:
            self._drop(handle)

    def _drop(self, handle: int) -> None:
        kept = self._kept.pop(handle, None)
        if kept is not None:
            self.bytes -= kept.nbytes
