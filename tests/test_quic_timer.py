"""Wake-ups at a time: once each, never early, none while nothing is set; with the system's timer and without."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from quic_pfec.quic import timer
from quic_pfec.quic.timer import NEAR_S, WakeUp

linux = pytest.mark.skipif(sys.platform != "linux" or sys.maxsize < 1 << 32, reason="no timerfd")


class Woken:
    """Remembers when it was called."""

    def __init__(self, **options: Any) -> None:
        self.times: list[float] = []
        self.wake_up = WakeUp(self, **options)

    def __call__(self) -> None:
        self.times.append(time.monotonic())

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.times) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("precise", [True, False])
@pytest.mark.parametrize("away_s", [-1.0, 0.0, 0.003, NEAR_S + 0.01])
async def test_it_wakes_once_and_not_early(precise: bool, away_s: float) -> None:
    woken = Woken(precise=precise)
    at_s = time.monotonic() + away_s
    woken.wake_up.set(at_s)
    assert woken.wake_up.at_s == at_s
    await woken.until(1)
    await turns()
    assert len(woken.times) == woken.wake_up.count == 1
    early_s = 0.0 if woken.wake_up.precise else time.get_clock_info("monotonic").resolution + 1e-3
    assert woken.times[0] >= at_s - early_s
    assert woken.wake_up.at_s is None
    woken.wake_up.close()


@linux
async def test_near_times_have_a_timer_of_the_system_and_far_ones_have_not() -> None:
    woken = Woken()
    woken.wake_up.set(time.monotonic() + 100)
    assert not woken.wake_up.precise
    woken.wake_up.set(time.monotonic() + NEAR_S / 2)
    assert woken.wake_up.precise
    await woken.until(1)
    woken.wake_up.close()


@pytest.mark.parametrize("precise", [True, False])
async def test_the_last_setting_counts_and_none_while_it_is_cleared(precise: bool) -> None:
    woken = Woken(precise=precise)
    woken.wake_up.set(time.monotonic())
    time.sleep(0.002)  # noqa: ASYNC251  (it is due, and the loop has not seen it)
    woken.wake_up.clear()
    await turns()
    assert woken.times == []
    for away_s in (0.001, 100.0, 0.002, 0.0):
        woken.wake_up.set(time.monotonic() + away_s)
    await woken.until(1)
    await turns()
    assert woken.wake_up.count == 1
    woken.wake_up.close()


@linux
async def test_a_time_that_was_moved_since_the_loop_saw_it_wakes_nobody() -> None:
    woken = Woken()
    woken.wake_up.set(time.monotonic())
    woken.wake_up.set(time.monotonic() + 100)
    woken.wake_up._readable()  # as a loop calls it that polled before
    assert woken.times == []
    woken.wake_up.close()
    woken.wake_up._readable()
    assert woken.times == []


async def test_it_may_be_set_from_its_own_call() -> None:
    times: list[float] = []

    def again() -> None:
        times.append(time.monotonic())
        if len(times) < 5:
            wake_up.set(times[-1] + 0.0005)

    wake_up = WakeUp(again)
    wake_up.set(time.monotonic())
    async with asyncio.timeout(10):
        while len(times) < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await turns()
    assert wake_up.count == 5
    wake_up.close()


@linux
async def test_closing_gives_the_file_back_and_ends_it() -> None:
    woken = Woken()
    woken.wake_up.set(time.monotonic() + 0.001)
    assert woken.wake_up._file is not None
    number = woken.wake_up._file.fd
    woken.wake_up.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(number)
    woken.wake_up.close()
    woken.wake_up.set(time.monotonic())
    await turns()
    assert woken.times == []
    assert woken.wake_up.at_s is None


@linux
async def test_it_may_be_closed_from_its_own_call() -> None:
    ended = asyncio.Event()

    def end() -> None:
        wake_up.close()
        ended.set()

    wake_up = WakeUp(end)
    wake_up.set(time.monotonic())
    async with asyncio.timeout(10):
        await ended.wait()
    await turns()
    assert wake_up.count == 1


def _no_files() -> Any:
    raise OSError(errno.EMFILE, "too many open files")


def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer.sys, "platform", "darwin")


def _full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "_TimerFile", _no_files)


def _sockets_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(asyncio.get_running_loop(), "add_reader", refuse)


@pytest.mark.parametrize("why", [_elsewhere, _full, _sockets_only])
async def test_without_a_timer_of_the_system_the_loop_has_to_do(
    why: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    why(monkeypatch)
    woken = Woken()
    for _ in range(2):
        count = len(woken.times)
        woken.wake_up.set(time.monotonic() + 0.001)
        assert not woken.wake_up.precise
        await woken.until(count + 1)
    assert woken.wake_up.count == 2
    woken.wake_up.close()
