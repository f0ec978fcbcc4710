"""One wake-up at a time of `time.monotonic()`, finer than an event loop's own timers.

A loop counts in milliseconds: epoll rounds its waits up to the next one, and uvloop's clock stands still in between. A
pacer at 100 Mbit/s wants nine packets a millisecond, and a wait of 1 ms that takes two costs half of them. Linux has
timers that are files (timerfd): armed for an absolute time, they wake the loop as a socket does, some 50 us late, and
cost nothing while they are not armed. Elsewhere the loop's own timer has to do.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable

__all__ = ["WakeUp"]

CLOCK_MONOTONIC = 1  # linux/time.h: what `time.monotonic()` reads
TFD_TIMER_ABSTIME = 1
EXPIRATIONS_BYTES = 8
LEAST_S = 1e-9  # a timer set to zero is not armed
NEAR_S = 0.02  # what is farther away does not need the precision, and mostly moves before it comes


class _TimerSpec(ctypes.Structure):
    """struct itimerspec: interval and time, seconds and nanoseconds."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "at_s", "at_ns")]


class _TimerFile:
    """A timerfd. Raises OSError where there is none."""

    def __init__(self) -> None:
        if sys.platform != "linux" or sys.maxsize < 1 << 32:  # the structure above is that of 64 bits
            raise OSError("no timerfd")
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            create, self._settime = libc.timerfd_create, libc.timerfd_settime
        except AttributeError:
            raise OSError("no timerfd") from None
        self._spec = _TimerSpec(0, 0, 0, 0)
        self._where = ctypes.byref(self._spec)
        self.fd = int(create(CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def set(self, at_s: float) -> None:
        """Becomes readable at `at_s`, at once if that has passed; readable no more until then."""
        at_ns = int(max(at_s, LEAST_S) * 1e9)
        self._spec.at_s, self._spec.at_ns = divmod(at_ns, 1_000_000_000)
        self._settime(self.fd, TFD_TIMER_ABSTIME, self._where, None)

    def clear(self) -> None:
        """Neither readable nor armed."""
        self._spec.at_s = self._spec.at_ns = 0
        self._settime(self.fd, 0, self._where, None)

    def close(self) -> None:
        os.close(self.fd)


class WakeUp:
    """Calls `callback` once after each `set`, unless `set` again or cleared before. precise=False: by the loop alone.

    Belongs to the running loop. `close` it, after which it is never set again: it may hold a file.
    """

    def __init__(self, callback: Callable[[], None], *, precise: bool = True) -> None:
        self.count = 0
        """How often it woke the loop."""
        self.at_s: float | None = None
        """When it will, on `time.monotonic()`; None: it is not set."""
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._precise = precise
        self._file: _TimerFile | None = None
        self._file_set = False
        self._handle: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def precise(self) -> bool:
        """Whether times that are near are kept by a timer of the system. Known once the first was set."""
        return self._file is not None

    def set(self, at_s: float) -> None:
        self.clear()
        if self._closed:
            return
        self.at_s = at_s
        away_s = at_s - time.monotonic()
        if away_s < NEAR_S and self._opened():
            assert self._file is not None
            self._file.set(at_s)
            self._file_set = True
        else:
            self._handle = self._loop.call_later(max(0.0, away_s), self._woken)

    def clear(self) -> None:
        self.at_s = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._file_set and self._file is not None:
            self._file.clear()
            self._file_set = False

    def close(self) -> None:
        """Idempotent."""
        self.clear()
        self._closed = True
        if self._file is not None:
            self._loop.remove_reader(self._file.fd)
            self._file.close()
            self._file = None

    def _opened(self) -> bool:
        if self._file is None and self._precise:
            try:
                file = _TimerFile()
            except OSError:  # not Linux, or no more files
                self._precise = False
                return False
            try:
                self._loop.add_reader(file.fd, self._readable)
            except (NotImplementedError, OSError):  # a loop that waits for sockets alone
                file.close()
                self._precise = False
                return False
            self._file = file
        return self._file is not None

    def _readable(self) -> None:
        if self._file is None:
            return
        try:
            os.read(self._file.fd, EXPIRATIONS_BYTES)
        except BlockingIOError:  # set again since the loop saw it
            return
        self._file_set = False
        self._woken()

    def _woken(self) -> None:
        self._handle = None
        self.at_s = None
        self.count += 1
        self._callback()
