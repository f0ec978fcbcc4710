"""From packets to checked units: `python -m bench.receive --json F`.

The receiver takes the stream of bench/codec_stream.py (8.4 % lost in bursts, repairs after feedback) over the cache of
a small model: 30 layers, 3 heads of 64, 1,536 tokens in bf16, 9 symbols a unit. Figures are CPU us per packet that
arrived, from its tuple to the unit whose digest is right, medians over rounds; before and after in the same process:

- `judged`: every packet by every rule in Python, one frame at a time, as `receive_batch` did it once;
- `frames`: parsed frames, 32 at a time, through `receive_batch`;
- `symbols`: raw tuples, 32 at a time, through `receive_symbols`.

`digest` keeps nothing of a unit, `assemble` writes it into a zeroed cache. The longest call counts with the shortest
time it took in any round: what other processes do to one run is not the receiver's. Its work is that of a whole batch
(32 repairs in a row where the sender's window is full) and of one slice of recovered symbols; the latter, which is what
the timer's calls do and what the POLL constants of transfer/receiver.py bound, is also given alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import codec_stream
from quic_pfec.fec.codec import INTAKE_ODD, Intake, isa
from quic_pfec.kv.assemble import Assembler
from quic_pfec.kv.prepared import PreparedKV, prepare_arrays
from quic_pfec.transfer import receiver as module
from quic_pfec.transfer.receiver import Receiver
from quic_pfec.transfer.units import DigestSink, UnitSink
from quic_pfec.wire.frames import AckStatus, RepairFrame, RepairHeader, SourceFrame
from quic_pfec.wire.limits import Limits

LAYERS, HEADS, TOKENS, DIM = 30, 3, 1536, 64
BATCH = 32
SLOT_S = 112e-6


class Judging:
    """An intake that takes nothing: the receiver judges every packet and every recovered symbol itself."""

    def __init__(self, decoder: Any, useless_repairs: int) -> None:
        self.useless_left, self.highest = useless_repairs, 0
        self._inner = Intake(decoder, useless_repairs)
        self.bind, self.collect, self.counts = self._inner.bind, self._inner.collect, self._inner.counts

    def take(self, packets: list[Any], start: int, end: int) -> tuple[int, int]:
        return start, INTAKE_ODD

    def place(self, sids: list[int], start: int) -> tuple[int, int]:
        return start, INTAKE_ODD


def cache(seed: int) -> PreparedKV:
    rng = np.random.default_rng(seed)

    def bits() -> np.ndarray:
        return rng.integers(0, 0x7F00, (HEADS, TOKENS, DIM), dtype=np.uint16)

    return prepare_arrays([(bits(), bits()) for _ in range(LAYERS)], dtype="bf16", model="bench", order="prefix")


def arrivals(kv: PreparedKV, seed: int) -> tuple[list[tuple[Any, ...]], list[SourceFrame | RepairFrame]]:
    """What arrives, as tuples over one buffer a packet and as frames."""
    encoder, _ = kv.symbols(kv.symbol_size)
    tuples: list[tuple[Any, ...]] = []
    frames: list[SourceFrame | RepairFrame] = []
    for packet in codec_stream.record(encoder.count, seed):
        if packet.lost:
            continue
        if packet.header is None:
            symbol = bytes(encoder.symbol(packet.sid))
            tuples.append((packet.sid, memoryview(symbol)))
            frames.append(SourceFrame(0, packet.sid, symbol))
        else:
            symbol = encoder.repair(*packet.header)
            tuples.append((*packet.header, memoryview(symbol)))
            frames.append(RepairFrame(RepairHeader(*packet.header), symbol))
    return tuples, frames


def accepted(kv: PreparedKV, sink: UnitSink) -> Receiver:
    made = Receiver(0, Limits(), 0.0)
    made.accept(kv.layout.unit_sizes(), kv.layout.symbols(kv.symbol_size), kv.symbol_size, sink, 0.0)
    return made


def run(
    receiver: Receiver, feed: Callable[[list[Any], float], Any], packets: list[Any], at_once: int, slices: list[float]
) -> list[float]:
    """us of every call, feedback and timers included in the call that they follow; `slices` takes those of slices."""
    took = []
    materialise = receiver._materialise

    def timed(events: Any) -> None:
        started = time.perf_counter_ns()
        materialise(events)
        slices.append((time.perf_counter_ns() - started) / 1e3)

    receiver._materialise = timed  # type: ignore[method-assign]
    now = 0.0
    for at in range(0, len(packets), at_once):
        batch = packets[at : at + at_once]
        now += SLOT_S * at_once
        started = time.perf_counter_ns()
        feed(batch, now)
        if receiver.feedback_due(now):
            receiver.feedback(now)
        took.append((time.perf_counter_ns() - started) / 1e3)
    while receiver.status is AckStatus.RUNNING and receiver.event_timer() is not None:
        started = time.perf_counter_ns()
        receiver.on_timer(now)
        took.append((time.perf_counter_ns() - started) / 1e3)
    if receiver.status is not AckStatus.COMPLETE or receiver.units is None or not receiver.units.complete.all():
        raise RuntimeError("the cache did not come whole")
    return took


def measure(rounds: int, seed: int) -> dict[str, Any]:
    kv = cache(seed)
    tuples, frames = arrivals(kv, seed)
    sinks: dict[str, Callable[[], UnitSink]] = {"digest": DigestSink, "assemble": lambda: Assembler(kv.layout)}
    ways: dict[str, tuple[Any, str, list[Any], int]] = {
        "judged": (Judging, "receive_batch", frames, 1),
        "frames": (Intake, "receive_batch", frames, BATCH),
        "symbols": (Intake, "receive_symbols", tuples, BATCH),
    }
    taken: dict[str, list[float]] = {}
    longest: dict[str, list[float]] = {}
    for _ in range(rounds):
        for sink_name, make_sink in sinks.items():
            for way, (intake, method, packets, at_once) in ways.items():
                module.Intake = intake
                receiver = accepted(kv, make_sink())
                slices: list[float] = []
                took = run(receiver, getattr(receiver, method), packets, at_once, slices)
                module.Intake = Intake
                name = f"{way}_{sink_name}"
                taken.setdefault(name, []).append(sum(took) / len(packets))
                for kind, values in (("call", took), ("slice", slices)):
                    best = longest.setdefault(f"{name}_longest_{kind}_us", values)
                    best[:] = [min(pair) for pair in zip(best, values, strict=True)]
    figures: dict[str, Any] = {"isa": isa(), "packets": len(tuples), "batch": BATCH}
    figures |= {f"{name}_us_per_packet": statistics.median(values) for name, values in taken.items()}
    figures |= {name: max(values) for name, values in longest.items()}
    for sink_name in sinks:
        pairs = zip(taken[f"judged_{sink_name}"], taken[f"symbols_{sink_name}"], strict=True)
        figures[f"judged_over_symbols_{sink_name}"] = statistics.median(old / new for old, new in pairs)
    figures["settings"] = {"command": " ".join(sys.argv), "rounds": rounds, "seed": seed}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="runs behind every median (default 5)")
    parser.add_argument("--seed", type=int, default=1, help="of the cache and the losses (default 1)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    figures = measure(options.rounds, options.seed)
    for name, value in figures.items():
        if isinstance(value, float | int | str):
            print(f"  {name:<36} {format(value, '10.3f') if isinstance(value, float) else value}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
