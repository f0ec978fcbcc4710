"""Emulators as child processes: the relay, and what all of them have in common.

A relay that shares an interpreter with the endpoints it stands between waits for their lock; in a process of its own it
has a core, if there is one. Demos and tests talk to it with the three commands of `python -m quic_pfec.link`, typed.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from typing import IO, Any, Self

from quic_pfec.link.options import RelayOptions
from quic_pfec.link.report import RelayReport

__all__ = ["EmulatorChild", "RelayProcess"]

_REPLY_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 5.0


class EmulatorChild:
    """A child that answers each command, a line on its standard input, by a line of JSON.

    It ends when this process does, because its standard input then ends. Use it as a context manager. Raises
    RuntimeError with the child's own words when it cannot start or stops answering. `name` is what messages call it.
    """

    def __init__(self, argv: list[str], *, name: str, pass_fds: tuple[int, ...] = ()) -> None:
        self._name = name
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=pass_fds,
        )
        self._stdin = _pipe(self._process.stdin)
        self._stdout = _pipe(self._process.stdout)
        self._stderr = _pipe(self._process.stderr)
        self._pending = b""
        try:
            self.ready = self._reply()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child and wait for it; may be called twice."""
        self._stdin.close()  # the child's end of input: it stops by itself
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()
        self._stderr.close()

    def _command(self, command: str) -> dict[str, Any]:
        if self._stdin.closed:
            raise RuntimeError(f"{self._name} was closed")
        try:
            self._stdin.write(command.encode() + b"\n")
        except BrokenPipeError:
            raise RuntimeError(f"{self._name} is not running{self._last_words()}") from None
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        descriptor = self._stdout.fileno()
        deadline_s = time.monotonic() + _REPLY_TIMEOUT_S
        while b"\n" not in self._pending:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
                raise RuntimeError(f"{self._name} gave no answer in {_REPLY_TIMEOUT_S:.0f} s")
            chunk = os.read(descriptor, 1 << 20)
            if not chunk:
                raise RuntimeError(f"{self._name} stopped{self._last_words()}")
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        values: dict[str, Any] = json.loads(line)
        return values

    def _last_words(self) -> str:
        """What the child, which has ended, wrote to standard error."""
        text = self._stderr.read().decode("utf-8", "replace").strip()
        return f": {text.splitlines()[-1]}" if text else ""


class RelayProcess(EmulatorChild):
    """Starts a relay with `options`; ready, with its `port`, when constructed."""

    def __init__(self, options: RelayOptions) -> None:
        self.options = options
        super().__init__([sys.executable, "-m", "quic_pfec.link", *options.to_arguments()], name="the relay")
        self.port: int = self.ready["port"]

    def epoch(self) -> float:
        """Restart slots, losses, counters and logs now; returns the time of it on time.monotonic()."""
        return float(self._command("epoch")["epoch_clock_s"])

    def report(self) -> RelayReport:
        """Everything since the last epoch."""
        return RelayReport.from_json(self._command("report"))


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    """The stream, which is there because a pipe was asked for."""
    if stream is None:
        raise ValueError("the process was started without this pipe")
    return stream
