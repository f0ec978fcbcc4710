"""Settings of the relay: one validated object, its command line, and the way between the two.

A relay may run as a thread of a test, as a child process or from a shell; all three are described by the same
`RelayOptions`, and the object stands in every report, because a figure without its link means nothing.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from quic_pfec.quantities import parse_rate
from quic_pfec.sim.channel import GilbertElliott, channel_factory, direction_seed, parse
from quic_pfec.sim.link import Clock, Link, default_queue_bytes, default_slot_s
from quic_pfec.sim.trace import load_trace

__all__ = [
    "Address",
    "RelayOptions",
    "add_link_arguments",
    "build_parser",
    "format_address",
    "link_values",
    "options_from",
    "parse_address",
]

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """What the relay listens to, where it forwards, and what it does on the way.

    - `listen`, `upstream`: (host, port); port 0 to listen takes a free one.
    - `rate_bps`, `owd_s`, `queue_bytes` (None = one bandwidth-delay product, at least 30 kB): the bottleneck, each way.
    - `loss`: Gilbert-Elliott parameters; `trace`: a file of losses instead (see `sim.trace.load_trace`). Neither = no
      loss. `loss_both`: the way back loses too, with a seed of its own.
    - `clock`, `slot_s` (None = 1,440 bytes at the rate): when the channel makes a step (see `sim.link`).
    - `seed`: of the losses. `loss_from_start`: lose from the first datagram on, instead of from the first epoch.
    - `corrupt`: share of datagrams that arrive damaged; `reorder`: share that arrive `reorder_s` late.
    - `max_clients`: addresses served at once, each with an upstream port of its own; the one silent for longest goes.
    - `fifo`: ask for real-time priority (SCHED_FIFO; needs the right to it, and the report says whether it was given).

    Raises ValueError for a value out of range.
    """

    upstream: Address
    listen: Address = ("127.0.0.1", 0)
    rate_bps: float = 20e6
    owd_s: float = 0.010
    queue_bytes: int | None = None
    loss: GilbertElliott | None = None
    trace: str | None = None
    loss_both: bool = False
    clock: Clock = "slot"
    slot_s: float | None = None
    seed: int = 0
    loss_from_start: bool = False
    corrupt: float = 0.0
    reorder: float = 0.0
    reorder_s: float = 0.005
    max_clients: int = 64
    fifo: bool = False

    def __post_init__(self) -> None:
        if self.loss is not None and self.trace is not None:
            raise ValueError("loss and trace are both given; a link has one channel")
        if not 1 <= self.max_clients <= 500:
            # The relay waits with select(2), which knows no descriptor above 1,023.
            raise ValueError(f"max_clients is between 1 and 500, got {self.max_clients}")
        for direction in (0, 1):
            self._link(direction, None)

    def links(self) -> tuple[Link, Link]:
        """The two directions: forward (client to upstream) and back. Reads the trace file, if there is one."""
        model = self.loss if self.trace is None else load_trace(self.trace)
        return self._link(0, model), self._link(1, model if self.loss_both else None)

    def _link(self, direction: int, model: GilbertElliott | npt.NDArray[np.bool_] | None) -> Link:
        seed = direction_seed(self.seed, direction)
        return Link(
            self.rate_bps,
            self.owd_s,
            self.queue_bytes,
            channel_factory(model, seed),
            clock=self.clock,
            slot_s=self.slot_s,
            corrupt=self.corrupt,
            reorder=self.reorder,
            reorder_s=self.reorder_s,
            # Any other number than the seed of the losses, so that damage and loss are independent.
            noise_seed=~seed,
            loss_from_start=self.loss_from_start,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the defaults that depend on others filled in."""
        values = asdict(self)
        values["slot_s"] = default_slot_s(self.rate_bps) if self.slot_s is None else self.slot_s
        if self.queue_bytes is None:
            values["queue_bytes"] = default_queue_bytes(self.rate_bps, self.owd_s)
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RelayOptions:
        """The inverse of `to_json`."""
        known = {field.name: values[field.name] for field in fields(cls)}
        if known["loss"] is not None:
            known["loss"] = GilbertElliott(**known["loss"])
        for name in ("listen", "upstream"):
            known[name] = (known[name][0], known[name][1])
        return cls(**known)

    def to_arguments(self) -> list[str]:
        """The command line of `python -m quic_pfec.link` that means these options."""
        arguments = [
            f"--listen={format_address(self.listen)}",
            f"--upstream={format_address(self.upstream)}",
            f"--rate={self.rate_bps:.3f}",
            f"--owd-ms={self.owd_s * 1e3!r}",
            f"--clock={self.clock}",
            f"--loss={'both' if self.loss_both else 'one-way'}",
            f"--seed={self.seed}",
            f"--corrupt={self.corrupt!r}",
            f"--reorder={self.reorder!r}",
            f"--reorder-ms={self.reorder_s * 1e3!r}",
            f"--max-clients={self.max_clients}",
        ]
        if self.queue_bytes is not None:
            arguments.append(f"--queue-bytes={self.queue_bytes}")
        if self.slot_s is not None:
            arguments.append(f"--slot-us={self.slot_s * 1e6!r}")
        if self.loss is not None:
            loss = self.loss
            numbers = (loss.loss_good, loss.loss_bad, loss.p_good_bad, loss.p_bad_good)
            arguments.append("--ge=" + ",".join(map(repr, numbers)))
        if self.trace is not None:
            arguments.append(f"--trace={self.trace}")
        if self.loss_from_start:
            arguments.append("--loss-from-start")
        if self.fifo:
            arguments.append("--fifo")
        return arguments


def parse_address(text: str) -> Address:
    """(host, port) of "host:port", ":port" (127.0.0.1) or "[::1]:port"."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: write an IPv6 address as [address]:port")
    return host or "127.0.0.1", int(port)


def format_address(address: Address) -> str:
    """The inverse of `parse_address`."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_DESCRIPTION = """\
Stand between a client and a server as a slow, lossy link: every UDP datagram passes a bottleneck of the given rate,
queue and delay, and is lost as a Gilbert-Elliott channel or a recorded trace says. Needs no rights. Point the client at
the address printed as "port"; the relay forwards to --upstream and carries the answers back.
"""

_EPILOG = """\
Losses begin with the command `epoch`, so that the handshake is not part of the experiment, and they are the same for
every run with the same seed: slot n of the link is lost or not whatever is sent in it. (--loss-from-start and
--no-control lose at once, as does a background job, which nobody can tell.) Commands, one a line on standard input,
each answered by one line of JSON on standard output:
  epoch    restart slots, losses, counters and logs now; answers with the time on the monotonic clock
  report   counters, lateness, and the losses by slot since the epoch as hexadecimal bitmaps
  quit     stop (so does the end of the input)

examples:
  python -m quic_pfec.link --upstream 127.0.0.1:4433 --listen :4434 --rate 20Mbps --owd-ms 10 --ge paper
  python -m quic_pfec.link --upstream 127.0.0.1:4433 --ge 0.001,0.5,0.02,0.1 --seed 7 --json run.json
  python -m quic_pfec.link --upstream 127.0.0.1:4433 --trace losses.csv --loss both --no-control

It judges itself: a run with late wake-ups (lateness p99 above 1 ms), ring drops or write errors is no measurement,
and the report lists what is wrong under "void". Without real-time priority some milliseconds of lateness are normal on
a busy machine. It cannot carry TCP: `python -m quic_pfec.link tun --help` shows the link that can (root).
"""


def build_parser(prog: str = "python -m quic_pfec.link") -> argparse.ArgumentParser:
    """The relay's command line, for `options_from`."""
    parser = argparse.ArgumentParser(
        prog=prog, description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_argument_group("where")
    where.add_argument("--upstream", required=True, metavar="HOST:PORT", help="the server to forward to")
    where.add_argument(
        "--listen",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="where clients send to; port 0 takes a free one and prints it (default %(default)s)",
    )
    where.add_argument(
        "--max-clients",
        type=int,
        default=64,
        metavar="N",
        help="client addresses served at once; the one silent for longest makes room (default %(default)s)",
    )
    add_link_arguments(parser)
    run = parser.add_argument_group("the run")
    run.add_argument("--loss-from-start", action="store_true", help="lose at once; do not wait for the command epoch")
    run.add_argument("--json", metavar="FILE", help="write the last report there when stopping")
    run.add_argument("--fifo", action="store_true", help="ask for real-time priority")
    run.add_argument(
        "--no-control",
        action="store_true",
        help="ignore standard input, lose from the start, run until interrupted; "
        "so without the option, too, where standard input is /dev/null",
    )
    return parser


def add_link_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that every mode has: the bottleneck and its losses, for `link_values`."""
    link = parser.add_argument_group("the bottleneck, each way")
    link.add_argument(
        "--rate", default="20Mbps", help="20Mbps, 500kbps, 1Gbps or bits per second (default %(default)s)"
    )
    link.add_argument(
        "--owd-ms",
        type=float,
        default=10.0,
        metavar="MS",
        help="one-way delay; the round trip is twice that (default %(default)s)",
    )
    link.add_argument(
        "--queue-bytes",
        type=int,
        metavar="N",
        help="tail drop beyond this backlog (default: rate x round trip, at least 30000)",
    )
    loss = parser.add_argument_group("losses")
    channel = loss.add_mutually_exclusive_group()
    channel.add_argument(
        "--ge",
        metavar="CHANNEL",
        help="paper, iid5, ge2, long8, starlink, att, verizon, none, or "
        "loss_good,loss_bad,p_good_bad,p_bad_good (default none)",
    )
    channel.add_argument(
        "--trace",
        metavar="FILE",
        help="recorded losses: a text of 0 and 1, or a CSV with a column 'lost'; wraps around",
    )
    loss.add_argument(
        "--loss",
        choices=("one-way", "both"),
        default="one-way",
        help="lose on the way forward only (to the server, left to right), or both ways (default %(default)s)",
    )
    loss.add_argument(
        "--clock",
        choices=("slot", "packet"),
        default="slot",
        help="the channel steps with time, like a radio channel, or with each packet (default %(default)s)",
    )
    loss.add_argument(
        "--slot-us", default="auto", metavar="US", help="duration of a slot (default auto: 1440 bytes at the rate)"
    )
    loss.add_argument("--seed", type=int, default=0, help="same seed, same losses (default %(default)s)")
    loss.add_argument("--corrupt", type=float, default=0.0, metavar="P", help="share of datagrams with a damaged byte")
    loss.add_argument("--reorder", type=float, default=0.0, metavar="P", help="share of datagrams held back")
    loss.add_argument("--reorder-ms", type=float, default=5.0, metavar="MS", help="by this much (default %(default)s)")


def link_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields that `add_link_arguments` gives to every kind of options. Raises ValueError for its user."""
    return {
        "rate_bps": parse_rate(arguments.rate),
        "owd_s": arguments.owd_ms / 1e3,
        "queue_bytes": arguments.queue_bytes,
        "loss": None if arguments.ge is None else parse(arguments.ge),
        "trace": arguments.trace,
        "loss_both": arguments.loss == "both",
        "clock": arguments.clock,
        "slot_s": None if arguments.slot_us == "auto" else float(arguments.slot_us) / 1e6,
        "seed": arguments.seed,
        "corrupt": arguments.corrupt,
        "reorder": arguments.reorder,
        "reorder_s": arguments.reorder_ms / 1e3,
    }


def options_from(arguments: argparse.Namespace) -> RelayOptions:
    """The options that a parsed command line means. Raises ValueError with a message for its user."""
    return RelayOptions(
        listen=parse_address(arguments.listen),
        upstream=parse_address(arguments.upstream),
        loss_from_start=arguments.loss_from_start,
        max_clients=arguments.max_clients,
        fifo=arguments.fifo,
        **link_values(arguments),
    )
