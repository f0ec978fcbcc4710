"""CPU time of a packet at each end, over real sockets: `python -m bench.datapath --json F --picture F`.

Sender and receiver are two processes on loopback; each reads its own CPU time (user and system) around the packets,
which carry 1,400 bytes each. The rows of a run take turns, each figure is the median of its rounds.

- datagram, stream: aioquic's own asyncio client and server with DATAGRAM frames or one stream, its default congestion
  control; `-uvloop` on that loop. `datagram` is what the speed-ups are over. qh3-stream: the same of qh3.
- slow, fast-0, fast-10, fast-50: bare packets of the extension (`datapath_bare`), 0, 10 and 50 % of them repairs over
  48 symbols, as fast as a fixed window lets them. slow: every packet built and opened by aioquic.
- paced: fast-10 at 8,930 packets/s, what 100 Mbit/s carry. Lateness is that of a packet behind an even stream which no
  packet was ahead of: a burst counts as late.
- handoff-slow, handoff-fast: a whole hand-off of a synthetic cache (24 layers, 2 KV heads of 64, 1,536 tokens: 18.9 MB
  in bf16) at a provisioned rate: order, decisions, coding, decoding, digests and assembly included; packing is not, as
  it happens before the deadline runs.
- udp, udp-offload, tcp: blocking sockets of the kernel; with offload, 44 datagrams a call. TCP in units of 1,400 bytes.

A row whose peer or system call is not there is absent, and named. A machine with two cores gives each end one.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import json
import multiprocessing
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partialmethod
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import datapath_bare as bare
from bench import datapath_peers as peers
from bench.datapath_meter import Task
from quic_pfec.cli.cert import make_certificate
from quic_pfec.client import connect, prepare, send_kv
from quic_pfec.fec.codec import isa
from quic_pfec.quic.connection import PfecConnection
from quic_pfec.server import serve

LAYERS, KV_HEADS, HEAD_DIM = 24, 2, 64
PACED_PPS = 8930.0
TIMEOUT_S = 120.0
SEED = 1

# hand-offs


def _all_by_aioquic(task: Task) -> None:
    if not task.fast_path:
        PfecConnection.setup = partialmethod(PfecConnection.setup, fast_path=False)  # type: ignore[assignment]


async def receive_handoff(pipe: Pipe, task: Task) -> dict[str, float]:
    _all_by_aioquic(task)
    done = asyncio.Event()

    def received(kv: Any) -> None:
        done.set()

    async with await serve("127.0.0.1", 0, certificate=task.cert, private_key=task.key, on_kv=received) as listener:
        pipe.send(listener.port)
        started_s = time.process_time()
        await done.wait()
        return {"packets": 0, "cpu_s": time.process_time() - started_s}


async def send_handoff(port: int, task: Task) -> dict[str, float]:
    _all_by_aioquic(task)
    rng = np.random.default_rng(task.seed)
    shape = (KV_HEADS, task.tokens, HEAD_DIM)
    cache = [tuple(rng.standard_normal(shape, dtype=np.float32) for _ in range(2)) for _ in range(LAYERS)]
    kv = prepare(cache, wire_dtype="bf16", model="synthetic")
    async with connect("127.0.0.1", port, ca_certs=task.cert, server_name="localhost", rate=task.rate) as conn:
        started_s, began_s = time.process_time(), time.monotonic()
        report = await send_kv(conn, kv, 30.0)
        used_s, wall_s = time.process_time() - started_s, time.monotonic() - began_s
    symbols = report.symbols
    return {
        "packets": symbols.source + symbols.repair + symbols.resent,
        "cpu_s": used_s,
        "wall_s": wall_s,
        "megabits": kv.nbytes * 8 / 1e6,
        "j_block": report.j_block,
        "resent": symbols.resent,
    }


# rows


@dataclass(frozen=True, slots=True)
class Row:
    """Two ends, and how their task differs from the common one. needs: modules that must be importable."""

    name: str
    receive: Callable[[Pipe, Task], Any]
    send: Callable[[int, Task], Any]
    changes: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    def lacks(self) -> str:
        """Why it cannot run here, "" if it can."""
        for module in self.needs:
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed"
        if self.changes.get("offload") and not peers.has_offload():
            return "this system has no UDP_SEGMENT and UDP_GRO"
        return ""


def rows(slow_rate: str, rate: str) -> list[Row]:
    datagram = (peers.receive_datagrams, peers.send_datagrams)
    stream = (peers.receive_stream, peers.send_stream)
    ours = (bare.receive, bare.send)
    handoff = (receive_handoff, send_handoff)
    on_uvloop = {"uvloop": True}
    return [
        Row("datagram", *datagram),
        Row("datagram-uvloop", *datagram, on_uvloop, ("uvloop",)),
        Row("stream", *stream),
        Row("stream-uvloop", *stream, on_uvloop, ("uvloop",)),
        Row("qh3-stream", *stream, {"library": "qh3"}, ("qh3",)),
        Row("slow", *ours, {"repairs": 0.1, "fast_path": False}),
        Row("fast-0", *ours, {"repairs": 0.0}),
        Row("fast-10", *ours, {"repairs": 0.1}),
        Row("fast-50", *ours, {"repairs": 0.5}),
        Row("fast-10-uvloop", *ours, {"repairs": 0.1, **on_uvloop}, ("uvloop",)),
        Row("paced", *ours, {"repairs": 0.1, "pps": PACED_PPS}),
        Row("paced-uvloop", *ours, {"repairs": 0.1, "pps": PACED_PPS, **on_uvloop}, ("uvloop",)),
        Row("udp", peers.receive_udp, peers.send_udp),
        Row("udp-offload", peers.receive_udp, peers.send_udp, {"offload": True}),
        Row("tcp", peers.receive_tcp, peers.send_tcp),
        Row("handoff-slow", *handoff, {"rate": slow_rate, "fast_path": False}),
        Row("handoff-fast", *handoff, {"rate": rate}),
    ]


# two processes


def _run(end: Callable[..., Any], first: Any, task: Task) -> Any:
    found = end(first, task)
    if not asyncio.iscoroutine(found):
        return found
    factory = importlib.import_module("uvloop").new_event_loop if task.uvloop else None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(found)


def receiver_process(pipe: Pipe, end: Callable[..., Any], task: Task) -> None:
    pipe.send(_run(end, pipe, task))


def sender_process(pipe: Pipe, end: Callable[..., Any], port: int, task: Task) -> None:
    pipe.send(_run(end, port, task))


def _hear(pipe: Pipe, what: str, until_s: float) -> Any:
    try:
        if pipe.poll(max(0.0, until_s - time.monotonic())):
            return pipe.recv()
    except EOFError:
        raise RuntimeError(f"{what} ended without a result") from None
    raise RuntimeError(f"{what} said nothing for {TIMEOUT_S:.0f} s")


def measure(row: Row, task: Task) -> dict[str, float]:
    """One round of a row: us of CPU per packet at each end, packets a second. Raises RuntimeError if it did not end."""
    context = multiprocessing.get_context("spawn")
    (ours, theirs), (ours2, theirs2) = context.Pipe(), context.Pipe()
    until_s = time.monotonic() + TIMEOUT_S
    receiver = context.Process(target=receiver_process, args=(theirs, row.receive, task), daemon=True)
    receiver.start()
    theirs.close()
    children = [receiver]
    try:
        port = _hear(ours, f"{row.name}: the receiver", until_s)
        sender = context.Process(target=sender_process, args=(theirs2, row.send, port, task), daemon=True)
        sender.start()
        theirs2.close()
        children.append(sender)
        sent = _hear(ours2, f"{row.name}: the sender", until_s)
        got = _hear(ours, f"{row.name}: the receiver", until_s)
        for child in children:
            child.join(5.0)
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
            child.join()
    return figures_of(sent, got)


def figures_of(sent: dict[str, float], got: dict[str, float]) -> dict[str, float]:
    """What both ends say, per packet. An end that counted none has as many as the other."""
    sent_packets = sent["packets"] or got["seen"]
    figures = {
        "tx_us_per_packet": sent["cpu_s"] / sent_packets * 1e6,
        "rx_us_per_packet": got["cpu_s"] / (got["packets"] or sent_packets) * 1e6,
        "core_share": (sent["cpu_s"] + got["cpu_s"]) / sent["wall_s"],
    }
    if "wall_s" in got:
        figures["pps"] = got["packets"] / got["wall_s"]
        figures["received_share"] = got["seen"] / sent_packets
    else:
        figures["pps"] = sent_packets / sent["wall_s"]
    if "megabits" in sent:
        figures["mbit_s"] = sent["megabits"] / sent["wall_s"]
    kept = ("j_block", "resent", "offered_pps", "p50_late_ms", "p99_late_ms")
    return figures | {name: sent[name] for name in kept if name in sent}


# figures


def summary(median: dict[str, dict[str, float]]) -> dict[str, float]:
    """The figures that are looked at, of the rows that ran. Bare packets with 10 % repairs stand for the fast path."""
    figures: dict[str, float] = {}
    stock, fast, paced, handoff = (median.get(name) for name in ("datagram", "fast-10", "paced", "handoff-fast"))
    if fast:
        figures |= {
            "tx_us_per_packet": fast["tx_us_per_packet"],
            "rx_us_per_packet": fast["rx_us_per_packet"],
            "unpaced_pps": fast["pps"],
        }
    if stock and fast:
        figures["tx_speedup_over_stock"] = stock["tx_us_per_packet"] / fast["tx_us_per_packet"]
        figures["rx_speedup_over_stock"] = stock["rx_us_per_packet"] / fast["rx_us_per_packet"]
    if paced:
        figures |= {
            "paced_pps": paced["pps"],
            "paced_p50_late_ms": paced["p50_late_ms"],
            "paced_p99_late_ms": paced["p99_late_ms"],
            "paced_core_share": paced["core_share"],
        }
    if handoff:
        figures |= {
            "handoff_tx_us_per_packet": handoff["tx_us_per_packet"],
            "handoff_rx_us_per_packet": handoff["rx_us_per_packet"],
            "handoff_mbit_s": handoff["mbit_s"],
        }
    if stock and handoff:
        figures["handoff_tx_speedup_over_stock"] = stock["tx_us_per_packet"] / handoff["tx_us_per_packet"]
        figures["handoff_rx_speedup_over_stock"] = stock["rx_us_per_packet"] / handoff["rx_us_per_packet"]
    return figures


COLUMNS = {
    "tx_us_per_packet": "tx us/packet", "rx_us_per_packet": "rx us/packet", "pps": "packets/s",
    "received_share": "received", "core_share": "cores", "p50_late_ms": "late p50 ms", "p99_late_ms": "late p99 ms",
    "mbit_s": "Mbit/s", "j_block": "J_block", "resent": "resent",
}  # fmt: skip


def table(median: dict[str, dict[str, float]]) -> Table:
    shown = Table("row", *COLUMNS.values())
    for name, row in median.items():
        cells = (f"{row[key]:.0f}" if key == "pps" else f"{row[key]:.3g}" if key in row else "" for key in COLUMNS)
        shown.add_row(name, *cells)
    return shown


def draw(median: dict[str, dict[str, float]], path: Path) -> None:
    """Bars of CPU time per packet, sending and receiving, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(reversed(median))
    places = range(len(names))
    figure, axis = plt.subplots(figsize=(8, 0.32 * len(names) + 1.2))
    for shift, key, label, colour in (
        (0.2, "tx_us_per_packet", "sent", "#1f4e79"),
        (-0.2, "rx_us_per_packet", "received", "#f0b357"),
    ):
        values = [median[name][key] for name in names]
        bars = axis.barh([place + shift for place in places], values, 0.4, label=label, color=colour)
        axis.bar_label(bars, fmt="%.1f", fontsize=7, padding=2)
    axis.set_yticks(list(places), names, fontsize=8)
    axis.set_xscale("log")
    largest = max(max(row["tx_us_per_packet"], row["rx_us_per_packet"]) for row in median.values())
    axis.set_xlim(right=2 * largest)  # room for the numbers
    axis.set_xlabel("CPU time per packet of 1,400 bytes, us")
    axis.margins(y=0.02)
    axis.legend(fontsize=8, ncol=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def versions() -> dict[str, str]:
    found = {}
    for name in ("quic-pfec", "aioquic", "cryptography", "numpy", "uvloop", "qh3"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [row.name for row in rows("", "")]
    parser.add_argument("--rows", nargs="+", choices=known, default=known, metavar="ROW", help=f"of {', '.join(known)}")
    parser.add_argument("--packets", type=int, default=20_000, help="of every row but the hand-offs (default 20000)")
    parser.add_argument("--fast-factor", type=int, default=4, help="times as many where they go fast (default 4)")
    parser.add_argument("--burst-ms", type=float, default=1.0, help="of the pacer in the paced rows (default 1)")
    parser.add_argument("--tokens", type=int, default=1536, help="length of the synthetic cache (default 1536)")
    parser.add_argument("--slow-rate", default="60Mbps", help="rate of handoff-slow (default 60Mbps)")
    parser.add_argument("--rate", default="600Mbps", help="rate of handoff-fast (default 600Mbps)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; medians are reported (default 3)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--picture", type=Path, help="write a PNG here")
    options = parser.parse_args()
    console = Console(stderr=True)
    wanted = [row for row in rows(options.slow_rate, options.rate) if row.name in options.rows]
    absent = {row.name: lack for row in wanted if (lack := row.lacks())}
    taken: dict[str, list[dict[str, float]]] = {row.name: [] for row in wanted if row.name not in absent}
    with tempfile.TemporaryDirectory() as folder:
        cert, key = (str(path) for path in make_certificate(Path(folder)))
        common = Task(options.packets, cert, key, SEED, burst_s=options.burst_ms / 1e3, tokens=options.tokens)
        for number in range(options.rounds):
            for row in wanted:
                if row.name in absent:
                    continue
                console.print(f"round {number + 1} of {options.rounds}: {row.name}")
                task = replace(common, **row.changes)
                if row.name.startswith(("fast", "udp", "tcp")):
                    task = replace(task, packets=options.fast_factor * options.packets)
                taken[row.name].append(measure(row, task))
    median = {
        name: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        for name, rounds in taken.items()
    }
    figures = summary(median)
    Console(width=150).print(table(median))
    for name, value in figures.items():
        print(f"  {name:<32} {value:.4g}")
    for name, reason in absent.items():
        print(f"  absent: {name}: {reason}")
    if options.json is not None:
        settings = {
            "command": " ".join(sys.argv),
            "seed": SEED,
            "rounds": options.rounds,
            "payload_bytes": bare.DATAGRAM,
            "paced_pps_offered": PACED_PPS,
            "isa": isa(),
            "python": platform.python_version(),
            "versions": versions(),
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps(figures | {"rows": taken, "medians": median, "absent": absent, "settings": settings}, indent=1)
            + "\n"
        )
    if options.picture is not None:
        draw(median, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
