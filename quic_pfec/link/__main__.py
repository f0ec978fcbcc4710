"""`python -m quic_pfec.link`: the relay from a shell, or as the child process of `link.process`; `tun` as first word
is the bottleneck between namespaces instead.

The serving thread is the main one: if the relay fails, the process ends with its traceback. Commands are read in a
second thread, which only waits.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quic_pfec.link import tun_command
from quic_pfec.link.options import build_parser, options_from
from quic_pfec.link.relay import Relay

__all__ = ["main"]

_LONGEST_COMMAND = 4096
_STANDARD_INPUT = 0


def main(argv: list[str] | None = None) -> int:
    """Run `tun ...` or the relay with the command line `argv` (None = sys.argv). Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["tun"]:
        return tun_command.main(argv[1:])
    parser = build_parser()
    arguments = parser.parse_args(argv[1:] if argv[:1] == ["relay"] else argv)
    controlled = not arguments.no_control and _has_commands(_STANDARD_INPUT)
    arguments.loss_from_start |= not controlled  # nobody could say when they are to begin
    try:
        relay = Relay(options_from(arguments))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # a shell starts background jobs with SIGINT ignored
            signal.signal(number, signal.default_int_handler)
        _reply({"ready": True, "port": relay.port})
        if controlled:
            threading.Thread(target=_control, args=(relay,), daemon=True).start()
        relay.run()
    except KeyboardInterrupt:
        pass
    finally:
        if arguments.json is not None:
            Path(arguments.json).write_text(json.dumps(relay.report().to_json()) + "\n", encoding="utf-8")
        relay.close()
    return 0


def _has_commands(descriptor: int) -> bool:
    """Whether somebody may write there: shells and service managers give background jobs /dev/null, which is at its
    end from the start."""
    try:
        return os.isatty(descriptor) or not stat.S_ISCHR(os.fstat(descriptor).st_mode)
    except OSError:  # it is closed
        return False


def _control(relay: Relay) -> None:
    """Obey the lines of standard input until `quit` or its end; whatever ends it stops the relay."""
    try:
        for command in _lines(_STANDARD_INPUT):
            if command == "epoch":
                _reply({"epoch_clock_s": relay.epoch()})
            elif command == "report":
                _reply(relay.report().to_json())
            elif command == "quit":
                break
            elif command:
                _reply({"error": f"unknown command {command[:40]!r}; there are epoch, report and quit"})
    finally:
        relay.stop()


def _lines(descriptor: int) -> Iterator[str]:
    """Lines without their ends, read unbuffered: a thread inside sys.stdin would block the interpreter's exit."""
    pending = b""
    while chunk := os.read(descriptor, _LONGEST_COMMAND):
        *lines, pending = (pending + chunk).split(b"\n")
        pending = pending[:_LONGEST_COMMAND]
        for line in lines:
            yield line.decode("utf-8", "replace").strip()


def _reply(values: dict[str, Any]) -> None:
    print(json.dumps(values, separators=(",", ":")), flush=True)


if __name__ == "__main__":
    sys.exit(main())
