"""The bottleneck between two network namespaces, whole: namespaces, devices, emulator, and commands on either side.

The link for comparisons with the kernel's own TCP: both ends see ordinary network devices, and nothing between them but
a rate, a queue, a delay and losses. Needs root; without it there is the relay.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from quic_pfec.link.emulator import Emulator
from quic_pfec.link.namespaces import ADDRESSES, ADDRESSES6, NamespacePair, Side, TunUnavailable, why_unavailable
from quic_pfec.link.tun_options import TunOptions
from quic_pfec.link.tun_report import TunReport

__all__ = ["ADDRESSES", "ADDRESSES6", "Side", "TunLink", "TunUnavailable", "why_unavailable"]

_TERM_TIMEOUT_S = 2.0


class TunLink:
    """A running bottleneck; a context manager. Forward is left to right.

    Nothing is lost before the first `epoch` unless the options say so. Raises TunUnavailable where this machine or user
    cannot have it, RuntimeError when the emulator fails, ValueError or OSError for a bad trace file.
    """

    def __init__(self, options: TunOptions) -> None:
        self.options = options
        self._children: list[subprocess.Popen[Any]] = []
        self._emulator: Emulator | None = None
        self._pair = NamespacePair(options.mtu)
        try:
            left, right = self._pair.descriptors
            self._emulator = Emulator(left, right, options)
            self._pair.close_descriptors()
            self._pair.move()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def program(self) -> str:
        """Which emulator runs: "c", or "python" where no compiler is."""
        return self._running.program

    @property
    def names(self) -> dict[Side, str]:
        """The namespaces' names, as ip(8) knows them."""
        return dict(self._pair.names)

    def popen(self, side: Side, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start `argv` on one side, in a process group of its own that ends with the link; options as of Popen."""
        child = subprocess.Popen(self._pair.command(side, argv), process_group=0, **options)
        self._children.append(child)
        return child

    def epoch(self) -> float:
        """Restart slots, losses and counters now; returns the time of it on time.monotonic()."""
        return self._running.epoch()

    def mark(self) -> float:
        """Restart the counters, and nothing that packets would notice; returns the time of it."""
        return self._running.mark()

    def report(self) -> TunReport:
        """Everything since the last mark or epoch."""
        return self._running.report(self._pair.device_drops())

    def close(self) -> None:
        """End the commands, the emulator and the namespaces; may be called twice."""
        with contextlib.ExitStack() as stack:  # each step, whatever became of the one before
            stack.callback(self._pair.close)
            if self._emulator is not None:
                stack.callback(self._emulator.close)
            for child in self._children:
                stack.callback(end, child)
            self._children = []

    @property
    def _running(self) -> Emulator:
        if self._emulator is None:
            raise RuntimeError("the link was never started")
        return self._emulator


def end(child: subprocess.Popen[Any]) -> None:
    """End a command and what it started in its process group: SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_TERM_TIMEOUT_S)
