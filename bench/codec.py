"""The codec against the limit of the machine: `python -m bench.codec --json F --picture F`.

Kernels run side by side, round by round in one process, in C loops: figures are medians over rounds, ratios medians of
the ratios within a round. Times move with whatever else the machine does; trust the ratios.

repair48 is one repair over 48 symbols of 1,408 bytes (1,372 padded). `xor` is the limit: as many sources, XORed in one
pass in the registers of the level. `scalar` is the paper's class, a multiply-add with a table of 64 KiB a source;
`isal` is `ec_encode_data` of Debian's libisal. The stream (bench/codec_stream.py) is timed twice: in C, into memory
that was touched before, as the figures of others are; and through the Python API, calls included.

`encode_us_per_packet` writes every packet, source or repair, out of the arena into a datagram. The arena was packed
before, as it is before the deadline clock of a hand-off starts: `pack_us_per_symbol`, which pays for the first touch of
its memory, by large pages. `push_and_repair_us_per_packet` pays for it packet by packet: of a source's 0.45 us 0.35 are
the kernel handing out zeroed pages, against 0.07 by large pages. Decoding touches its memory as packets come.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench import codec_peers, codec_stream
from bench.codec_native import Loops, What
from quic_pfec.fec.codec import Decoder, Encoder, isa

SOURCES = 48
SIZE = 1408
STREAM_SYMBOLS = 20_000
BURST_LOST = 100  # losses in a window of 512 for the worst call
PYTHON_REPAIRS = 2_000


def kernels(loops: Loops, rounds: int) -> dict[str, list[float]]:
    """ns a run in every round, for each thing measured."""
    loops.prepare(SOURCES, SIZE)
    levels = loops.levels()
    chosen = levels[isa()]
    cases: dict[str, tuple[What, int, int]] = {
        "memcpy": (What.COPY, chosen, 2000),
        "xor": (What.XOR, chosen, 200),
        "scalar": (What.AXPYS, levels["scalar"], 5),
        "repair": (What.DOT, chosen, 200),
        "axpy": (What.AXPY, chosen, 2000),
        "axpys": (What.AXPYS, chosen, 100),
    }
    cases |= {f"level {name}": (What.DOT, index, 50) for name, index in levels.items()}
    if loops.isal is not None:
        cases["isal"] = (What.ISAL, chosen, 100)
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, (what, level, times) in cases.items():
            taken[name].append(loops.kernel_ns(what, level, SOURCES, times))
    if loops.isal is not None:  # all of this is of use only if the same bytes come out
        loops.kernel_ns(What.DOT, chosen, SOURCES, 1)
        ours = loops.output()
        loops.kernel_ns(What.ISAL, chosen, SOURCES, 1)
        if loops.output() != ours:
            raise RuntimeError("libisal and the codec disagree")
    return taken


def python_repairs(rounds: int) -> dict[str, float]:
    """Median us a repair through `Encoder.repair` and `Encoder.repairs`, over 48 symbols in cache or out of 200."""
    encoder = Encoder(codec_stream.SIZE, 256)
    for _ in range(256):
        encoder.push(bytes(range(256)) * 5 + bytes(codec_stream.SIZE - 1280))

    def single(tail: int) -> float:
        repair = encoder.repair
        started = time.perf_counter()
        for number in range(PYTHON_REPAIRS):
            repair(4, number, 0, 48, 0, b"", 0, tail)
        return 1e6 * (time.perf_counter() - started) / PYTHON_REPAIRS

    def burst(tail: int) -> float:
        repairs = encoder.repairs
        started = time.perf_counter()
        for number in range(0, PYTHON_REPAIRS, 16):
            repairs(16, 4, number, 0, 48, 0, b"", 0, tail)
        return 1e6 * (time.perf_counter() - started) / PYTHON_REPAIRS

    cases = {
        "repair48_py_us": (single, 48),
        "repair48_of_200_py_us": (single, 200),
        "repair48_burst16_py_us": (burst, 48),
    }
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, (run, tail) in cases.items():
            taken[name].append(run(tail))
    return {name: statistics.median(values) for name, values in taken.items()}


def stream(loops: Loops, rounds: int, seed: int) -> dict[str, float]:
    """us a transmitted packet, and the longest decoder call: of each call the shortest time over the rounds counts."""
    packets = codec_stream.record(STREAM_SYMBOLS, seed)
    events, heads = codec_stream.as_events(packets)
    levels = loops.levels()
    count = len(packets)
    took = (ctypes.c_double * (2 * count))(*[float("inf")] * (2 * count))
    arguments = (events, heads, STREAM_SYMBOLS, codec_stream.SIZE, levels[isa()])
    ours, eager, python = [], [], []
    python_took: list[float] = []
    for _ in range(rounds):
        ours.append(loops.stream(*arguments))
        loops.stream(*arguments, took=took)
        python.append(codec_stream.replay(packets, STREAM_SYMBOLS, seed))
        codec_stream.replay(packets, STREAM_SYMBOLS, seed, python_took)
    for _ in range(min(rounds, 3)):
        eager.append(loops.stream(*arguments, eager=True))
    median = statistics.median
    return {
        "packets": count,
        "repairs": sum(packet.header is not None for packet in packets),
        "lost": sum(packet.lost for packet in packets),
        "recovered": python[0].recovered,
        "encode_us_per_packet": median(r.encode_us for r in python) / count,
        "decode_us_per_packet": median(r.decode_us for r in python) / count,
        "decode_worst_call_us": max(python_took),
        "decode_worst_call_c_us": max(t for t in took if t != float("inf")) / 1e3,
        "encode_c_us_per_packet": median(r.encode_ns for r in ours) / 1e3 / count,
        "decode_c_us_per_packet": median(r.decode_ns for r in ours) / 1e3 / count,
        "pack_us_per_symbol": median(r.pack_us for r in python) / STREAM_SYMBOLS,
        "push_and_repair_us_per_packet": median(r.push_us for r in python) / count,
        "decode_batch16_us_per_packet": median(r.batched_decode_us for r in python) / count,
        "eager_scalar_encode_us_per_packet": median(r.encode_ns for r in eager) / 1e3 / count,
        "eager_scalar_decode_us_per_packet": median(r.decode_ns for r in eager) / 1e3 / count,
    }


def burst(rounds: int) -> dict[str, float]:
    """100 losses in a window of 512, K = 48: the longest call while they are recovered in slices of 32."""
    window = 512
    lost = set(range(3, window, window // BURST_LOST)[:BURST_LOST])
    encoder = Encoder(codec_stream.SIZE, window)
    for sid in range(window):
        encoder.push(sid.to_bytes(2, "little") * (codec_stream.SIZE // 2))
    repairs = [((4, n, 0, 48, 0, b"", 0, window), encoder.repair(4, n, 0, 48, 0, b"", 0, window)) for n in range(400)]
    shortest: dict[tuple[str, int], float] = {}
    bounded: dict[tuple[str, int], float] = {}
    for turn in range(2 * rounds):
        best, max_macs = (shortest, None) if turn % 2 else (bounded, 1_500)
        decoder = Decoder(codec_stream.SIZE, window)
        for sid in range(window):
            if sid not in lost:
                decoder.source(sid, encoder.symbol(sid))
        number = polls = 0
        while decoder.prefix < window:
            header, payload = repairs[number]
            started = time.perf_counter_ns()
            decoder.repair(*header, payload)
            key = ("repair", number)
            best[key] = min(best.get(key, float("inf")), (time.perf_counter_ns() - started) / 1e3)
            number += 1
            while decoder.pending:
                started = time.perf_counter_ns()
                decoder.poll(codec_stream.SLICE, max_macs=max_macs)
                key = ("poll", polls)
                best[key] = min(best.get(key, float("inf")), (time.perf_counter_ns() - started) / 1e3)
                polls += 1
    return {"lost100_worst_call_us": max(shortest.values()), "lost100_worst_call_1500_macs_us": max(bounded.values())}


def measure(rounds: int, seed: int) -> dict[str, Any]:
    """All figures; see the module."""
    loops = Loops()
    taken = kernels(loops, 3 * rounds)
    median = statistics.median

    def ratio(above: str, below: str) -> float | None:
        if above not in taken:
            return None
        return median(a / b for a, b in zip(taken[above], taken[below], strict=True))

    figures: dict[str, Any] = {
        "isa": isa(),
        "repair48_c_us": median(taken["repair"]) / 1e3,
        "repair48_c_over_xor": ratio("repair", "xor"),
        "scalar_c_over_repair48_c": ratio("scalar", "repair"),
        "isal_over_repair48_c": ratio("isal", "repair"),
        "axpys_over_repair48_c": ratio("axpys", "repair"),
        "memcpy_ns": median(taken["memcpy"]),
        "axpy_ns": median(taken["axpy"]),
        "xor48_c_us": median(taken["xor"]) / 1e3,
        "scalar48_c_us": median(taken["scalar"]) / 1e3,
        "isal48_c_us": median(taken["isal"]) / 1e3 if "isal" in taken else None,
        "levels_repair48_c_us": {
            name.removeprefix("level "): median(values) / 1e3 for name, values in taken.items() if "level " in name
        },
        "levels_scalar_over_repair48_c": {
            name.removeprefix("level "): ratio("scalar", name) for name in taken if "level " in name
        },
    }
    figures |= python_repairs(rounds)
    figures |= stream(loops, rounds, seed)
    figures |= burst(rounds)
    figures["peers_repair48_us"] = codec_peers.measure(SOURCES, SIZE)
    figures["settings"] = {
        "command": " ".join(sys.argv),
        "rounds": rounds,
        "seed": seed,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("quic-pfec", "numpy")},
    }
    return figures


def rows(figures: dict[str, Any]) -> list[tuple[str, float | None]]:
    """The repair of 48 symbols by everything, in us, fastest first; None = not installed."""
    table: dict[str, float | None] = {
        "XOR only (the limit)": figures["xor48_c_us"],
        "48 scalar multiply-adds (the paper's class)": figures["scalar48_c_us"],
        "libisal": figures["isal48_c_us"],
        f"{figures['isa']} from Python": figures["repair48_py_us"],
        f"{figures['isa']} from Python, bursts of 16": figures["repair48_burst16_py_us"],
    }
    table |= {f"{name} fused": us for name, us in figures["levels_repair48_c_us"].items()}
    table |= {f"{name} (PyPI)": us for name, us in figures["peers_repair48_us"].items()}
    return sorted(table.items(), key=lambda row: float("inf") if row[1] is None else row[1])


def draw(figures: dict[str, Any], path: Path) -> None:
    """Two panels: one repair by everything; the stream per packet beside the paper's class. Log scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), width_ratios=(3, 2))
    table = [(name, us) for name, us in rows(figures) if us is not None][::-1]
    ours = [figures["isa"] in name for name, _ in table]
    bars = left.barh(
        [name for name, _ in table],
        [us for _, us in table],
        color=["#1f6feb" if mine else "#b0b7c3" for mine in ours],
    )
    left.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    left.set_xscale("log")
    left.set_xlim(right=4 * max(us for _, us in table))
    left.set_xlabel("us for one repair over 48 symbols of 1,408 bytes")
    groups = {
        "encode, C": figures["encode_c_us_per_packet"],
        "encode, Python": figures["encode_us_per_packet"],
        "encode, paper's class": figures["eager_scalar_encode_us_per_packet"],
        "decode, C": figures["decode_c_us_per_packet"],
        "decode, Python": figures["decode_us_per_packet"],
        "decode, paper's class": figures["eager_scalar_decode_us_per_packet"],
    }
    bars = right.barh(
        list(groups)[::-1],
        list(groups.values())[::-1],
        color=["#b0b7c3" if "paper" in name else "#1f6feb" for name in groups][::-1],
    )
    right.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    right.set_xscale("log")
    right.set_xlim(right=4 * max(groups.values()))
    right.set_xlabel("us a packet, stream at 8.4 % bursty loss")
    figure.suptitle(f"Codec at level {figures['isa']}: a slot at 100 Mbit/s is 112 us", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="runs behind every median (default 7)")
    parser.add_argument("--seed", type=int, default=1, help="of the losses (default 1)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--picture", type=Path, help="write a PNG here")
    options = parser.parse_args()
    figures = measure(options.rounds, options.seed)
    print("one repair over 48 symbols of 1,408 bytes, us")
    for name, us in rows(figures):
        print(f"  {name:<46} {'absent' if us is None else format(us, '10.3f')}")
    print("figures")
    for name, value in figures.items():
        if isinstance(value, float | int | str) or value is None:
            print(f"  {name:<46} {format(value, '10.3f') if isinstance(value, float) else value}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    if options.picture is not None:
        draw(figures, options.picture)


if __name__ == "__main__":
    main()
