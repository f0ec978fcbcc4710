"""CPU time of a packet at each end, over real sockets: `python -m bench.datapath --json F`.

Sender and receiver are two processes on loopback; each reads its own CPU time (user and system) around the packets.

- stock: aioquic's own asyncio client and server, DATAGRAM frames of 1,400 bytes, its default congestion control.
- handoff, slow and fast: a whole hand-off of a synthetic cache (24 layers, 2 KV heads of 64, 1,536 tokens: 18.9 MB in
  bf16) at a provisioned rate: order, decisions, coding, decoding, digests and assembly included; packing is not, as it
  happens before the deadline runs. Slow: every packet built and opened by aioquic (`fast_path=False`).

The peers' figures stand in one run, each the median of its rounds. A machine with two cores gives each end one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import platform
import resource
import statistics
import sys
import tempfile
import time
from functools import partialmethod
from importlib.metadata import version
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import numpy as np
from aioquic.asyncio import QuicConnectionProtocol
from aioquic.asyncio import connect as stock_connect
from aioquic.asyncio import serve as stock_serve
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import DatagramFrameReceived, QuicEvent
from rich.console import Console
from rich.table import Table

from quic_pfec.cli.cert import make_certificate
from quic_pfec.client import connect, prepare, send_kv
from quic_pfec.fec.codec import isa
from quic_pfec.quic.connection import PfecConnection
from quic_pfec.server import serve

DATAGRAM = 1400
IDLE_S = 0.5  # without a packet: the stream of stock datagrams is over
LAYERS, KV_HEADS, HEAD_DIM = 24, 2, 64


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# stock aioquic


class Counting(QuicConnectionProtocol):
    """Counts DATAGRAM frames and notes the CPU time at the first and the last."""

    seen = 0
    first_s = last_s = last_at_s = 0.0

    def quic_event_received(self, event: QuicEvent) -> None:
        if isinstance(event, DatagramFrameReceived):
            if Counting.seen == 0:
                Counting.first_s = cpu_s()
            Counting.seen += 1
            Counting.last_s, Counting.last_at_s = cpu_s(), time.monotonic()


async def stock_receiver(pipe: Pipe, cert: str, key: str, packets: int) -> dict[str, float]:
    config = QuicConfiguration(is_client=False, max_datagram_frame_size=1500, max_datagram_size=1452)
    config.load_cert_chain(cert, key)
    server = await stock_serve("127.0.0.1", 0, configuration=config, create_protocol=Counting)
    pipe.send(server._transport.get_extra_info("sockname")[1])
    while Counting.seen < packets and not (Counting.seen and time.monotonic() - Counting.last_at_s > IDLE_S):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    server.close()
    return {"packets": Counting.seen, "cpu_s": Counting.last_s - Counting.first_s}


async def stock_sender(port: int, cert: str, packets: int) -> dict[str, float]:
    config = QuicConfiguration(max_datagram_frame_size=1500, max_datagram_size=1452, server_name="localhost")
    config.load_verify_locations(cert)
    data = bytes(DATAGRAM)
    async with stock_connect("127.0.0.1", port, configuration=config) as protocol:
        quic = protocol._quic
        started_s, began_s = cpu_s(), time.monotonic()
        for sent in range(packets):
            quic.send_datagram_frame(data)
            if sent % 16 == 15:
                protocol.transmit()
                while len(quic._datagrams_pending) > 64:  # noqa: ASYNC110  (aioquic has no back pressure)
                    await asyncio.sleep(0)
        while quic._datagrams_pending:
            protocol.transmit()
            await asyncio.sleep(0)
        return {"packets": packets, "cpu_s": cpu_s() - started_s, "wall_s": time.monotonic() - began_s}


# hand-offs


async def handoff_receiver(pipe: Pipe, cert: str, key: str) -> dict[str, float]:
    done = asyncio.Event()

    def received(kv: Any) -> None:
        done.set()

    async with await serve("127.0.0.1", 0, certificate=cert, private_key=key, on_kv=received) as listener:
        pipe.send(listener.port)
        started_s = cpu_s()
        await done.wait()
        return {"cpu_s": cpu_s() - started_s}


async def handoff_sender(port: int, cert: str, tokens: int, rate: str) -> dict[str, float]:
    rng = np.random.default_rng(1)
    shape = (KV_HEADS, tokens, HEAD_DIM)
    cache = [tuple(rng.standard_normal(shape, dtype=np.float32) for _ in range(2)) for _ in range(LAYERS)]
    kv = prepare(cache, wire_dtype="bf16", model="synthetic")
    async with connect("127.0.0.1", port, ca_certs=cert, server_name="localhost", rate=rate) as conn:
        started_s, began_s = cpu_s(), time.monotonic()
        report = await send_kv(conn, kv, 30.0)
        used_s, wall_s = cpu_s() - started_s, time.monotonic() - began_s
    symbols = report.symbols
    return {
        "packets": symbols.source + symbols.repair + symbols.resent,
        "cpu_s": used_s,
        "wall_s": wall_s,
        "megabits": kv.nbytes * 8 / 1e6,
        "j_block": report.j_block,
        "resent": symbols.resent,
    }


# two processes


def receiver_process(pipe: Pipe, case: str, cert: str, key: str, packets: int) -> None:
    if case == "slow":
        PfecConnection.setup = partialmethod(PfecConnection.setup, fast_path=False)  # type: ignore[assignment]
    if case == "stock":
        pipe.send(asyncio.run(stock_receiver(pipe, cert, key, packets)))
    else:
        pipe.send(asyncio.run(handoff_receiver(pipe, cert, key)))


def sender_process(pipe: Pipe, case: str, port: int, cert: str, packets: int, tokens: int, rate: str) -> None:
    if case == "slow":
        PfecConnection.setup = partialmethod(PfecConnection.setup, fast_path=False)  # type: ignore[assignment]
    if case == "stock":
        pipe.send(asyncio.run(stock_sender(port, cert, packets)))
    else:
        pipe.send(asyncio.run(handoff_sender(port, cert, tokens, rate)))


def measure(case: str, cert: str, key: str, packets: int, tokens: int, rate: str) -> dict[str, float]:
    """One round of one case: us of CPU per packet at each end, packets and megabits a second."""
    context = multiprocessing.get_context("spawn")
    (ours, theirs), (ours2, theirs2) = context.Pipe(), context.Pipe()
    receiver = context.Process(target=receiver_process, args=(theirs, case, cert, key, packets), daemon=True)
    receiver.start()
    sender = context.Process(
        target=sender_process, args=(theirs2, case, ours.recv(), cert, packets, tokens, rate), daemon=True
    )
    sender.start()
    sent, got = ours2.recv(), ours.recv()
    sender.join()
    receiver.join()
    result = {
        "tx_us_per_packet": sent["cpu_s"] / sent["packets"] * 1e6,
        "rx_us_per_packet": got["cpu_s"] / got.get("packets", sent["packets"]) * 1e6,
        "pps": sent["packets"] / sent["wall_s"],
    }
    if "megabits" in sent:
        result |= {"mbit_s": sent["megabits"] / sent["wall_s"], "j_block": sent["j_block"], "resent": sent["resent"]}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packets", type=int, default=20_000, help="DATAGRAMs of the stock case (default 20000)")
    parser.add_argument("--tokens", type=int, default=1536, help="length of the synthetic cache (default 1536)")
    parser.add_argument("--slow-rate", default="60Mbps", help="rate of the slow case (default 60Mbps)")
    parser.add_argument("--rate", default="600Mbps", help="rate of the fast case (default 600Mbps)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; medians are reported (default 3)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    cases: dict[str, list[dict[str, float]]] = {"stock": [], "slow": [], "fast": []}
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        cert, key = (str(path) for path in make_certificate(Path(folder)))
        for number in range(options.rounds):
            for case, rounds in cases.items():
                console.print(f"round {number + 1} of {options.rounds}: {case}")
                rate = options.rate if case == "fast" else options.slow_rate
                rounds.append(measure(case, cert, key, options.packets, options.tokens, rate))
    median = {
        case: {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        for case, rounds in cases.items()
    }
    stock, fast = median["stock"], median["fast"]
    figures = {
        "handoff_tx_us_per_packet": fast["tx_us_per_packet"],
        "handoff_rx_us_per_packet": fast["rx_us_per_packet"],
        "handoff_mbit_s": fast["mbit_s"],
        "handoff_tx_speedup_over_stock": stock["tx_us_per_packet"] / fast["tx_us_per_packet"],
        "handoff_rx_speedup_over_stock": stock["rx_us_per_packet"] / fast["rx_us_per_packet"],
    }
    table = Table("case", "tx us/packet", "rx us/packet", "packets/s", "Mbit/s", "J_block", "resent")
    for case, row in median.items():
        rest = [f"{row[name]:.3g}" if name in row else "" for name in ("mbit_s", "j_block", "resent")]
        table.add_row(
            case, f"{row['tx_us_per_packet']:.1f}", f"{row['rx_us_per_packet']:.1f}", f"{row['pps']:.0f}", *rest
        )
    Console().print(table)
    if options.json is not None:
        settings = {
            "command": " ".join(sys.argv),
            "seed": 1,
            "rounds": options.rounds,
            "isa": isa(),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("quic-pfec", "aioquic", "cryptography", "numpy")},
        }
        options.json.write_text(json.dumps(figures | {"cases": cases, "settings": settings}, indent=1) + "\n")


if __name__ == "__main__":
    main()
