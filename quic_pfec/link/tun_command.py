"""`quic-pfec link tun`: the bottleneck between two namespaces from a shell, with a command on each side."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from quic_pfec.link.options import add_link_arguments, link_values
from quic_pfec.link.tun import ADDRESSES, ADDRESSES6, Side, TunLink, TunUnavailable, end
from quic_pfec.link.tun_options import MAX_MTU, TunOptions

__all__ = ["EXIT_COMMAND", "EXIT_FAILED", "EXIT_VOID", "build_parser", "main", "options_from"]

EXIT_FAILED = 1
EXIT_VOID = 3
EXIT_COMMAND = 4

_LOOK_S = 0.05  # how often the commands are looked at
_HEAD_START_S = 1.0  # of a server before its client
_GRACE_S = 5.0  # for it to end by itself after its client

_DESCRIPTION = f"""\
Put a slow, lossy link between two network namespaces, for whole IP packets: kernel TCP, QUIC, ping. Needs root, the
command ip and /dev/net/tun. Left is {ADDRESSES["left"]} and {ADDRESSES6["left"]}, right is {ADDRESSES["right"]} and
{ADDRESSES6["right"]}. Without rights use the relay, `quic-pfec link`, which carries UDP only.
"""

_EPILOG = """\
With --left or --right it starts the commands (a shell reads them; --right a second before --left), runs until --left
ends (or --right, if it is alone), ends the other and prints one JSON object; without them it runs until interrupted,
and you enter with `ip netns exec NAME bash` (the names are printed). The namespaces are gone afterwards in any case.
What the commands print goes to standard error. Losses begin with the last command, a slot after the other whatever is
sent (--clock packet: a step a packet), the same for the same seed.

examples:
  quic-pfec link tun --rate 50Mbps --ge paper --seed 1 --right 'iperf3 -s -1' --left 'iperf3 -c 10.99.0.2 -C bbr'
  quic-pfec link tun --rate 20Mbps --owd-ms 10 --loss both --ge 0.001,0.5,0.02,0.1 --json run.json
  quic-pfec link tun --rate 5Mbps --trace losses.csv --left 'ping -c 100 -i 0.1 10.99.0.2'

It judges itself. "void" lists why a run is no measurement: lateness p99 above 1 ms, ring drops, write errors, packets
dropped before the emulator read them, with --paced any drop at the queue. Repeat such a run; do not average it in.

exit status: 0 done, 1 it could not run, 2 misuse, 3 the run is void, 4 a command failed.
"""


def build_parser(prog: str = "quic-pfec link tun") -> argparse.ArgumentParser:
    """The command line, for `options_from`."""
    parser = argparse.ArgumentParser(
        prog=prog, description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sides = parser.add_argument_group("what runs on it")
    sides.add_argument("--left", metavar="CMD", help="the client or sender: forward is from left to right")
    sides.add_argument("--right", metavar="CMD", help="the server or receiver")
    sides.add_argument("--duration-s", type=float, metavar="S", help="stop after this long in any case")
    add_link_arguments(parser)
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--mtu", type=int, default=MAX_MTU, help="bytes of the largest IP packet, 1280 to %(default)s (%(default)s)"
    )
    run.add_argument("--json", metavar="FILE", help="write the object there too")
    run.add_argument("--paced", action="store_true", help="the senders stay below the rate: queue drops void the run")
    run.add_argument("--no-fifo", action="store_true", help="do without real-time priority")
    run.add_argument(
        "--emulator",
        choices=("auto", "c", "python"),
        default="auto",
        help="auto: in C, compiled on first use; where no compiler is, its slower twin in Python (default %(default)s)",
    )
    return parser


def options_from(arguments: argparse.Namespace) -> TunOptions:
    """The options that a parsed command line means. Raises ValueError with a message for its user."""
    return TunOptions(
        mtu=arguments.mtu,
        fifo=not arguments.no_fifo,
        program=arguments.emulator,
        paced=arguments.paced,
        **link_values(arguments),
    )


def main(argv: list[str] | None = None, prog: str = "quic-pfec link tun") -> int:
    """Run it with the command line `argv` (None = sys.argv). Returns the exit status."""
    parser = build_parser(prog)
    arguments = parser.parse_args(argv)
    try:
        options = options_from(arguments)
        options.trace_bits()
    except (ValueError, OSError) as error:
        parser.error(str(error))
    # A shell starts background jobs with SIGINT ignored; an interrupt must end them all the same. It only leaves a
    # note, looked at while waiting: nothing can interrupt the making and removing of the namespaces.
    stop = _Stop()
    kept = {number: signal.signal(number, stop.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _run(options, arguments, stop)
    except (TunUnavailable, RuntimeError, OSError) as error:
        print(f"{prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


class _Stop:
    """Whether a signal asked for the end, and the time at which it comes anyway."""

    def __init__(self) -> None:
        self.asked = False
        self.at_s = float("inf")

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def wait(self, done: Callable[[], bool], until_s: float = float("inf")) -> None:
        """Return when `done`, at `until_s`, or at the end."""
        while not done() and not self.asked and time.monotonic() < min(until_s, self.at_s):
            time.sleep(_LOOK_S)


def _run(options: TunOptions, arguments: argparse.Namespace, stop: _Stop) -> int:
    with TunLink(options) as link:
        if link.program == "python" and options.program == "auto":
            print("link: no C compiler, so the twin in Python runs: late by milliseconds", file=sys.stderr)
        if arguments.duration_s is not None:
            stop.at_s = time.monotonic() + arguments.duration_s
        statuses = _commands(link, arguments, stop)
        report = link.report()
        values: dict[str, Any] = report.to_json()
        values |= {"mode": "tun", "commands": {"left": arguments.left, "right": arguments.right}, "statuses": statuses}
        values |= {"kernel": platform.release(), "load_average": list(os.getloadavg())}
        text = json.dumps(values)
        if arguments.json is not None:
            Path(arguments.json).write_text(text + "\n", encoding="utf-8")
        print(text, flush=True)
    if any(status for status in statuses.values()):
        return EXIT_COMMAND
    return EXIT_VOID if report.void_reasons() else 0


def _commands(link: TunLink, arguments: argparse.Namespace, stop: _Stop) -> dict[Side, int | None]:
    """Runs the commands to their end, or waits; exit statuses, None for one that had to be ended."""
    wanted: dict[Side, str | None] = {"right": arguments.right, "left": arguments.left}
    if not any(wanted.values()):
        link.epoch()
        left, right = link.names["left"], link.names["right"]
        print(f"link: up; enter with `ip netns exec {left} bash` (left) or {right}; Ctrl-C ends it", file=sys.stderr)
        stop.wait(lambda: False)
        return {}
    children = {}
    for side, text in wanted.items():
        if text:
            link.epoch()  # the last one counts: slot 0 is when the client starts
            children[side] = link.popen(side, ["sh", "-c", text], stdout=sys.stderr, stdin=subprocess.DEVNULL)
            if side == "right" and arguments.left:
                stop.wait(lambda: children["right"].poll() is not None, time.monotonic() + _HEAD_START_S)
    leader = children.get("left") or children["right"]
    # A server that failed leaves a client waiting for ever.
    stop.wait(lambda: leader.poll() is not None or any(child.poll() for child in children.values()))
    if leader.poll() == 0:
        stop.wait(lambda: all(child.poll() is not None for child in children.values()), time.monotonic() + _GRACE_S)
    statuses = {side: child.poll() for side, child in children.items()}
    for child in children.values():
        end(child)
    return statuses
