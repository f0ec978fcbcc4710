"""A server as a child process, for the demo: started with `--json`, ready when it says so, stopped with it."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

START_TIMEOUT_S = 300.0  # the first start converts the weights


class ServerProcess:
    """`python -m quic_pfec.server` on a free port. Raises RuntimeError with its last words if it does not start."""

    def __init__(self, certificate: Path, private_key: Path, *options: str) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in close()
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "quic_pfec.server", "-c", str(certificate), "-k", str(private_key),
                "--port", "0", "--json", *options,
            ],
            stdout=subprocess.PIPE,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self.port = 0
        self.fingerprint = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Returns when the server has loaded its model and listens."""
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not select.select([self._process.stdout], [], [], 0.2)[0]:
            if time.monotonic() > deadline_s:
                self.close()
                raise RuntimeError(f"the server was not ready after {START_TIMEOUT_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(10)
            raise RuntimeError(f"the server did not start: {self.last_words()}")
        ready = json.loads(line)
        self.port, self.fingerprint = int(ready["port"]), str(ready["fingerprint"])

    def log(self) -> list[str]:
        """The lines that it logged so far."""
        self._log.seek(0)
        return self._log.read().decode("utf-8", "replace").strip().splitlines()

    def last_words(self) -> str:
        """The end of what it logged."""
        lines = self.log()
        return lines[-1] if lines else "it said nothing"

    def close(self) -> None:
        """Stops it and waits; may be called twice."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
