"""The emulator in C: compiled where it is first used, and run as a child process.

Neither an extension module nor part of the build: it is a program of its own, because under SCHED_FIFO it must share no
interpreter with anything; wheels have a way to build extensions but none to build programs; and whoever runs it is root
on Linux, with a compiler or a package manager. So the source travels in the wheel as data and the program lies in the
user's cache folder, under a name made of source, flags and machine. Where no compiler is, `twin` does the same, later.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quic_pfec.link.process import EmulatorChild
from quic_pfec.link.tun_options import TunOptions
from quic_pfec.link.tun_report import TunReport
from quic_pfec.sim.channel import direction_seed

__all__ = ["Emulator", "c_arguments", "compiled"]

_SOURCES = ("emulator.c", "emulator_link.h")
# Without -ffp-contract=off a compiler may fuse multiplications and additions, and losses would differ from the twin's.
_FLAGS = ("-O2", "-std=gnu11", "-ffp-contract=off")
_COMPILE_TIMEOUT_S = 60.0
_MASK64 = (1 << 64) - 1


def compiled(cache: Path | None = None) -> Path | None:
    """The program, compiled if need be into `cache` (None = the user's cache folder); None where no compiler is.

    The compiler is $CC, or cc. Raises RuntimeError with its message if it fails, and PermissionError if the folder may
    be written by others: what lies there is run as root.
    """
    compiler = shlex.split(os.environ.get("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        return None
    here = Path(__file__).parent
    digest = hashlib.sha256("\0".join((platform.machine(), *compiler, *_FLAGS)).encode())
    for name in _SOURCES:
        digest.update((here / name).read_bytes())
    folder = _private_folder(cache)
    program = folder / f"emulator-{digest.hexdigest()[:16]}"
    if program.exists():
        return program
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fresh = Path(scratch) / "emulator"
        command = [*compiler, *_FLAGS, "-o", str(fresh), str(here / _SOURCES[0]), "-lm"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
        if run.returncode:
            complaint = run.stderr.strip() or "no message"
            raise RuntimeError(f"{compiler[0]} cannot compile the emulator: {complaint[-500:]}")
        fresh.rename(program)  # in one step, because another process may be at the same
    return program


def _private_folder(cache: Path | None) -> Path:
    """The cache folder, made if it is not there, and nobody else's."""
    if cache is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quic_pfec"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = cache.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{cache} belongs to or may be written by another user: chown it, or chmod 700 it")
    return cache


def c_arguments(options: TunOptions, trace_fd: int | None = None, overhead: int = 0) -> list[str]:
    """The settings as the program in C reads them; numbers as hexadecimal doubles, so that none is rounded."""
    values = options.to_json()
    both = "_both" if options.loss_both else ""
    arguments = {
        "seconds_per_byte": (8 / options.rate_bps).hex(),
        "owd_s": float(options.owd_s).hex(),
        "queue_bytes": float(values["queue_bytes"]).hex(),
        "slot_s": float(values["slot_s"]).hex(),
        "corrupt": float(options.corrupt).hex(),
        "reorder": float(options.reorder).hex(),
        "reorder_s": float(options.reorder_s).hex(),
        "overhead": str(overhead),
        "packet_clock": str(int(options.clock == "packet")),
        "from_start": str(int(options.loss_from_start)),
        "real_time": str(int(options.fifo)),
        "seeds": ",".join(str(direction_seed(options.seed, direction) & _MASK64) for direction in (0, 1)),
    }
    if options.loss is not None:
        loss = options.loss
        numbers = (loss.loss_good, loss.loss_bad, loss.p_good_bad, loss.p_bad_good)
        arguments[f"ge{both}"] = ",".join(float(number).hex() for number in numbers)
    if trace_fd is not None:
        arguments[f"trace{both}"] = str(trace_fd)
    return [f"{key}={value}" for key, value in arguments.items()]


@contextmanager
def trace_file(options: TunOptions) -> Iterator[int | None]:
    """A descriptor of the trace's steps, a byte each, for the program in C; None without a trace."""
    bits = options.trace_bits()
    if bits is None:
        yield None
        return
    with tempfile.TemporaryFile() as file:
        file.write(bits.tobytes())
        file.flush()
        yield file.fileno()


class Emulator(EmulatorChild):
    """Runs the bottleneck between two non-blocking descriptors that carry one IP packet a read and a write.

    The caller may close its copies of them when this is constructed. `program` is "c" or "python", as it runs.
    """

    def __init__(self, left_fd: int, right_fd: int, options: TunOptions) -> None:
        self.options = options
        path = None if options.program == "python" else compiled()
        if path is None and options.program == "c":
            raise RuntimeError("there is no C compiler: apt-get install gcc libc6-dev, or take the Python twin")
        self.program = "python" if path is None else "c"
        ends = [str(left_fd), str(right_fd)]
        if path is None:
            argv = [sys.executable, "-m", "quic_pfec.link.twin", *ends, json.dumps(options.to_json())]
            super().__init__(argv, name="the emulator", pass_fds=(left_fd, right_fd))
            return
        with trace_file(options) as trace_fd:
            pass_fds = (left_fd, right_fd) if trace_fd is None else (left_fd, right_fd, trace_fd)
            argv = [str(path), *ends, *c_arguments(options, trace_fd)]
            super().__init__(argv, name="the emulator", pass_fds=pass_fds)

    def epoch(self) -> float:
        """Restart slots, losses and counters now; returns the time of it on time.monotonic()."""
        return float(self._command("epoch")["clock_s"])

    def mark(self) -> float:
        """Restart the counters, and nothing that packets would notice; returns the time of it."""
        return float(self._command("mark")["clock_s"])

    def report(self, device_drops: int = 0) -> TunReport:
        """Everything since the last mark or epoch."""
        values = {"options": self.options.to_json(), "device_drops": device_drops}
        return TunReport.from_json(values | self._command("report"))
