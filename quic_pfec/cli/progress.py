"""How far a long command is: bars on a terminal, now and then a line where stderr goes to a file or a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quic_pfec.cli.output import need_extra

__all__ = ["LINE_EVERY_S", "Step", "progress_on_stderr"]

LINE_EVERY_S = 30.0

Step = Callable[[str, int, int], None]
"""(what is being done, how many of it are done, how many there are)."""


@contextmanager
def progress_on_stderr() -> Iterator[Step]:
    """A bar for each step, gone at the end. Without a terminal: a line every half minute, and for the end of a step."""
    with need_extra():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def draw(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total)
            bars.update(tasks[step], completed=done, total=total)

        yield draw


class _Lines:
    """The same as lines. What is over within the first half minute says nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun_s = self._said_s = clock()
        self._spoken: set[str] = set()

    def __call__(self, step: str, done: int, total: int) -> None:
        now = self._clock()
        ends = done >= total and step in self._spoken
        if now - self._said_s < LINE_EVERY_S and not ends:
            return
        self._said_s = now
        (self._spoken.discard if ends else self._spoken.add)(step)
        minutes, seconds = divmod(int(now - self._begun_s), 60)
        print(f"{step}: {done} of {total} after {minutes} min {seconds:02d} s", file=sys.stderr, flush=True)
