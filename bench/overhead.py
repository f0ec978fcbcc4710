"""What a hand-off costs in processor time, the paper's Table II: `python -m bench.overhead --json F --picture F`.

One transfer of the paper's geometry, payloads and all, from the real `transfer.Sender` (`plan_into`, a packet a slot)
to the real `transfer.Receiver` over the paper's channel: 100 Mbit/s, RTT 20 ms, Gilbert-Elliott losses of 8.4 %, one
slot 112 us. Sealing, sending and parsing are not in it. ms per 1,000 packets sent:

- state and feedback: fates and PFEC_ACKs into the sender, and PFEC_ACKs made by the receiver;
- inference: one decision, `Sender.ready` at the instant of the slot: masks, state (features of a learned policy), rule;
- encode: every symbol copied, or repair coded, into its datagram;
- decode: all that the receiver does with symbols: decoder, recovery, filing, copy and digest of a unit;
- total: sender and receiver, with what is none of these (frame headers, tokens, events).

How the parts are told apart: the transfer is deterministic, and is played again and again. In one play a clock is read
around the whole of each end's turn in a slot, which gives the total; in another it is read between the parts. It is
the processor time of the thread, in ns, so that other work of the machine shows in caches alone; what reading it costs
is measured and taken off each interval. Encoding happens inside `plan_into`, where no clock could be read without
distorting it: its calls are recorded and made again alone, in one loop. Of the rounds the one with the least total
counts, whole, so that percentiles are those of one transfer. The time of a decision is that of `ready`; of control that
of fates, feedback and decision in a slot.

The paper's figures are from its own machine and code; they stand beside ours as its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quic_pfec.fec.codec import Encoder, isa
from quic_pfec.kv.profile import synthetic_utility
from quic_pfec.schedule.compiled import AVAILABLE
from quic_pfec.schedule.policies import POLICY_NAMES, make_policy
from quic_pfec.sim.channel import PRESETS, GilbertElliottChannel, losses
from quic_pfec.sim.episode import fill_encoder, unit_bytes
from quic_pfec.sim.timeline import timeline
from quic_pfec.transfer.events import ManifestReceived
from quic_pfec.transfer.receiver import Receiver
from quic_pfec.transfer.sender import Path as LinkPath
from quic_pfec.transfer.sender import Sender
from quic_pfec.transfer.units import DigestSink
from quic_pfec.wire.frames import REPAIR, SOURCE, PfecAckFrame, parse_manifest, parse_repair, parse_source
from quic_pfec.wire.limits import Limits
from quic_pfec.wire.varint import size as varint_size

GEOMETRIES = {"qwen2.5-7b": (28, 96, 24), "llama-3.1-8b": (32, 96, 48)}  # layers, columns, packets a block
RHOS = (0.8, 1.0)
SYMBOL = 1372  # bytes: 1,368 of KV and the unit header
RTT_SLOTS = 179
SLOT_S = 112e-6
BYTES_FREE = 1425
DATAGRAMS = 64  # buffers that are written in turn
POLICIES = ("hybrid", "arq", "deficit", "paper-deficit", "ddqn", "ddqn-wide")  # those that there are
PARTS = ("state_feedback_ms", "inference_ms", "encode_ms", "decode_ms")
PAPER = {
    "encode_ms": (10.3, 11.3), "decode_ms": (7.2, 9.5), "total_ms": (30.0, 33.0),
    "control_mean_us": 76.0, "control_p99_us": 94.0,
}  # fmt: skip
_TYPE_SIZE = varint_size(SOURCE)

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class World:
    """What every policy meets. utility: of each unit, in the order of sending; losses: of each slot."""

    geometry: str
    rho: float
    encoder: Encoder
    unit_packets: NDArray[np.int64]
    unit_of_sid: NDArray[np.int32]
    utility: NDArray[np.float64]
    losses: list[bool]


@dataclass(slots=True)
class Play:
    """One transfer. Times in ns, the clock's own cost not yet taken off; an entry a slot, `heard` one a turn.

    learn, decide, plan: of the sender; sent: its whole turn; take: symbols into the receiver; answer: its PFEC_ACK;
    heard: the receiver's whole turn. j_block: as the receiver has it at its deadline.
    """

    packets: int = 0
    decisions: int = 0
    j_block: float = 0.0
    wrong_symbols: int = 0
    learn: list[int] = field(default_factory=list)
    decide: list[int] = field(default_factory=list)
    plan: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    take: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    heard: list[int] = field(default_factory=list)


class Tape:
    """An encoder that notes what is asked of it."""

    def __init__(self, encoder: Encoder) -> None:
        self.count, self.symbol_size, self.symbol, self.repair = (
            encoder.count, encoder.symbol_size, encoder.symbol, encoder.repair,
        )  # fmt: skip
        self.calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._encoder = encoder

    def symbol_into(self, *arguments: Any) -> None:
        self.calls.append((self._encoder.symbol_into, arguments))
        self._encoder.symbol_into(*arguments)

    def repair_into(self, *arguments: Any) -> None:
        self.calls.append((self._encoder.repair_into, arguments))
        self._encoder.repair_into(*arguments)


def make_world(geometry: str, rho: float, packets: int | None, encoder: Encoder | None, seed: int) -> World:
    """The first blocks of a geometry, about `packets` of theirs, or all; `encoder`: if they are in one already."""
    layers, columns, each = GEOMETRIES[geometry]
    units = layers * columns if packets is None else min(layers * columns, max(2, packets // each))
    unit_packets = np.full(units, each, dtype=np.int64)
    unit_of_sid = np.repeat(np.arange(units, dtype=np.int32), unit_packets)
    if encoder is None:
        encoder, unit_of_sid = fill_encoder(unit_packets, SYMBOL, seed)
    utility = np.sort(synthetic_utility((layers, columns), 0.99, seed))[::-1][:units].copy()
    slots = int(rho * units * each)
    lost = losses(GilbertElliottChannel(PRESETS["paper"], seed), slots).tolist()
    return World(geometry, rho, encoder, unit_packets, unit_of_sid, utility, lost)


def play(world: World, policy: str, budget: float | None, *, whole: bool, tape: Tape | None = None) -> Play:
    """One transfer, slot by slot, as `sim.episode` has it. `whole`: the clock is read around turns, not parts."""
    slots, rtt_s, clock = len(world.losses), RTT_SLOTS * SLOT_S, time.thread_time_ns
    deadline_s = timeline(slots, rtt_s, SLOT_S).deadline_s
    sender = Sender(
        0, world.encoder if tape is None else tape, world.unit_of_sid, world.utility, bytes(range(250)),
        make_policy(policy), now=0.0, deadline_s=deadline_s, path=LinkPath(rtt_s, rtt_s, SLOT_S), repair_budget=budget,
    )  # fmt: skip
    limits, done = Limits(), Play()
    receiver = Receiver(0, limits, 0.0)
    receiver.rtt_s = rtt_s
    sizes = np.array([unit_bytes(int(count), SYMBOL) for count in world.unit_packets], dtype=np.int64)
    arrivals: deque[tuple[float, bytes]] = deque()
    fates: deque[tuple[float, int, bool]] = deque()
    answers: deque[tuple[float, PfecAckFrame]] = deque()
    out = bytearray(DATAGRAMS * BYTES_FREE)

    def receive(until: float) -> None:
        while True:
            timer_s = receiver.next_timer()
            arrival_s = arrivals[0][0] if arrivals else inf
            now = min(arrival_s, inf if timer_s is None else timer_s)
            if now > until:
                return
            frame = _parse(arrivals.popleft()[1], limits) if arrival_s <= now else None
            begun = clock()
            if frame is None:
                events = receiver.on_timer(now)
            elif isinstance(frame, tuple):
                events = receiver.receive_symbols([frame], now)
            else:
                events = receiver.receive_batch([frame], now)
            for event in events:
                if isinstance(event, ManifestReceived):
                    receiver.accept(sizes, world.encoder.count, SYMBOL, DigestSink(), now)
            while (due_s := receiver.event_timer()) is not None and due_s <= now:
                receiver.on_timer(now)
            between = begun if whole else clock()
            ack = receiver.feedback(now) if receiver.feedback_due(now) else None
            ended = clock()
            if whole:
                done.heard.append(ended - begun)
            else:
                done.take.append(between - begun)
                done.answer.append(ended - between)
            if ack is not None:
                answers.append((now + rtt_s / 2, ack))

    for slot, lost in enumerate(world.losses):
        now = slot * SLOT_S
        receive(now)
        heard: list[PfecAckFrame] = []
        arrived: list[int] = []
        missed: list[int] = []
        while answers and answers[0][0] <= now:
            heard.append(answers.popleft()[1])
        while fates and fates[0][0] <= now:
            _, token, delivered = fates.popleft()
            (arrived if delivered else missed).append(token)
        at = slot % DATAGRAMS * BYTES_FREE
        begun = clock()
        for ack in heard:
            sender.on_feedback(ack)
        if arrived:
            sender.on_fates(arrived, True)
        if missed:
            sender.on_fates(missed, False)
        learnt = begun if whole else clock()
        asked = sender.ready(now)
        decided = begun if whole else clock()
        run = sender.plan_into(now, 1, BYTES_FREE, out, BYTES_FREE, at) if asked else None
        ended = clock()
        if whole:
            done.sent.append(ended - begun)
        else:
            done.learn.append(learnt - begun)
            done.decide.append(decided - learnt)
            done.plan.append(ended - decided)
        done.decisions += 1
        if run is None or not run.kinds:
            continue
        done.packets += 1
        if not lost:
            arrivals.append((now + rtt_s / 2, bytes(memoryview(out)[at : at + run.lengths[0]])))
        if run.tokens[0] is not None:
            fates.append((now + rtt_s, run.tokens[0], not lost))
    receive(deadline_s + 1.0)
    table, decoder = receiver.units, receiver._decoder
    if table is None or decoder is None:
        raise RuntimeError("nothing arrived")
    done.j_block = float((world.utility * table.complete).sum() / world.utility.sum())
    for start, stop in [(0, decoder.prefix), *decoder.known_ranges(world.encoder.count)]:
        done.wrong_symbols += sum(decoder.symbol(sid) != world.encoder.symbol(sid) for sid in range(start, stop))
    if done.wrong_symbols:
        raise RuntimeError(f"{done.wrong_symbols} symbols arrived wrong")
    return done


def _parse(data: bytes, limits: Limits) -> Any:
    """As the receiver takes it: (sid, symbol), the fields of a repair and its symbol, or a ManifestFrame."""
    kind = int.from_bytes(data[:_TYPE_SIZE], "big") & (1 << (8 * _TYPE_SIZE - 2)) - 1
    if kind == SOURCE:
        source, _ = parse_source(data, _TYPE_SIZE, limits)
        return source.sid, source.symbol
    if kind == REPAIR:
        repair, _ = parse_repair(data, _TYPE_SIZE, limits)
        h = repair.header
        return (
            h.transfer_id, h.repair_number, h.first_sid, h.degree, h.head_span, h.head, h.tail_offset, h.tail_span,
            repair.symbol,
        )  # fmt: skip
    return parse_manifest(data, _TYPE_SIZE, limits)[0]


def clock_ns() -> float:
    """What an interval between two readings shows when nothing lies between: the mean without the slowest 1 %."""
    clock = time.thread_time_ns
    shown = np.empty(20_000)
    for index in range(len(shown)):
        begun = clock()
        shown[index] = clock() - begun
    return float(np.sort(shown)[: len(shown) * 99 // 100].mean())


def encode_ns(calls: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> int:
    """All of `calls`, once more."""
    begun = time.thread_time_ns()
    for call, arguments in calls:
        call(*arguments)
    return time.thread_time_ns() - begun


def measure(world: World, policy: str, budget: float | None, rounds: int) -> dict[str, Any]:
    """A row: a policy at a geometry and rho."""
    tape = Tape(world.encoder)
    first = play(world, policy, budget, whole=True, tape=tape)
    spare = clock_ns()
    wholes, parts, encodes = [], [], []
    for _ in range(rounds):
        for kept, whole in ((wholes, True), (parts, False)):
            gc.collect()
            gc.freeze()  # the recorded calls are no part of a transfer: the collector need not walk them
            kept.append(play(world, policy, budget, whole=whole))
            gc.unfreeze()
        encodes.append(encode_ns(tape.calls))
    if {one.packets for one in wholes + parts} != {first.packets}:
        raise RuntimeError("the transfer was not the same each time")

    def cost(values: list[int]) -> float:
        return max(0.0, sum(values) - spare * len(values))

    total = min(cost(one.sent) + cost(one.heard) for one in wholes)
    best = min(parts, key=lambda one: sum(map(cost, (one.learn, one.decide, one.plan, one.take, one.answer))))
    per_thousand = 1e-3 / first.packets  # ns of all to ms per 1,000 packets
    decide: Times = np.maximum(0.0, np.array(best.decide) - spare) / 1e3
    control: Times = np.maximum(0.0, np.array(best.learn) - spare) / 1e3 + decide
    return {
        "geometry": world.geometry, "rho": world.rho, "policy": policy, "budget": budget,
        "packets": first.packets, "decisions": first.decisions, "j_block": first.j_block,
        "state_feedback_ms": (cost(best.learn) + cost(best.answer)) * per_thousand,
        "inference_ms": cost(best.decide) * per_thousand,
        "encode_ms": min(encodes) * per_thousand,
        "decode_ms": cost(best.take) * per_thousand,
        "total_ms": total * per_thousand,
        "sender_ms": min(cost(one.sent) for one in wholes) * per_thousand,
        "receiver_ms": min(cost(one.heard) for one in wholes) * per_thousand,
        "control_mean_us": float(control.mean()), "control_p99_us": float(np.quantile(control, 0.99)),
        "decision_mean_us": float(decide.mean()), "decision_p99_us": float(np.quantile(decide, 0.99)),
        "over_slot_share": float((control > SLOT_S * 1e6).mean()),
    }  # fmt: skip


COLUMNS = (
    ("state_feedback_ms", "state+feedback"), ("inference_ms", "inference"), ("encode_ms", "encode"),
    ("decode_ms", "decode"), ("total_ms", "total"), ("control_mean_us", "control us"), ("control_p99_us", "p99"),
    ("decision_mean_us", "decision us"), ("decision_p99_us", "p99"), ("over_slot_share", "> a slot"),
)  # fmt: skip


def _shown(name: str, value: float) -> str:
    return f"{100 * value:.3f} %" if name == "over_slot_share" else f"{value:.2f}"


def print_table(rows: list[dict[str, Any]]) -> None:
    """ms per 1,000 packets and us, the paper's last."""
    widths = [max(len(label), 9) + 1 for _, label in COLUMNS]
    head = "".join(label.rjust(width) for (_, label), width in zip(COLUMNS, widths, strict=True))
    print("ms per 1,000 packets; us".ljust(34) + head)
    for row in rows:
        label = f"{row['geometry']} {row['rho']:g} {row['policy']}".ljust(34)
        print(label + "".join(_shown(n, row[n]).rjust(w) for (n, _), w in zip(COLUMNS, widths, strict=True)))
    cells = []
    for (name, _), width in zip(COLUMNS, widths, strict=True):
        value: Any = PAPER.get(name)
        text = "" if value is None else f"{value[0]:g}-{value[1]:g}" if isinstance(value, tuple) else f"{value:g}"
        cells.append(text.rjust(width))
    print("the paper's Table II, its machine".ljust(34) + "".join(cells))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Stacked parts of every row beside the paper's total."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(10, 1.6 + 0.28 * len(rows)))
    places = list(range(len(rows)))[::-1]
    left = np.zeros(len(rows))
    for name in (*PARTS, "other"):
        label = "frames, events" if name == "other" else dict(COLUMNS)[name]
        widths = np.array(
            [row[name] if name != "other" else max(0.0, row["total_ms"] - sum(row[p] for p in PARTS)) for row in rows]
        )
        axis.barh(places, widths, left=left, label=label, height=0.75)
        left += widths
    axis.axvspan(*PAPER["total_ms"], color="#bbbbbb", label="the paper's total, its machine")  # type: ignore[misc]
    axis.axvline(10, color="black", linestyle=":", linewidth=1, label="goal")
    axis.set_yticks(places, [f"{row['geometry']}, rho {row['rho']:g}, {row['policy']}" for row in rows], fontsize=7)
    axis.set_xlabel("ms of one core per 1,000 packets")
    axis.set_xlim(0, 35)
    axis.legend(fontsize=8, loc="center right", bbox_to_anchor=(0.84, 0.5))
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packets", type=int, help="packets of a transfer (default: all, 64,512 and 147,456)")
    parser.add_argument("--policy", action="append", help="a policy; repeat. Default: hybrid, arq, deficit, ddqn ...")
    parser.add_argument("--budget", type=float, default=0.1, help="repairs and resends, a share (default 0.1)")
    parser.add_argument("--rounds", type=int, default=3, help="transfers of each kind; the fastest counts (default 3)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--picture", type=Path, help="draw them (PNG)")
    options = parser.parse_args()
    policies = options.policy or [name for name in POLICIES if name in POLICY_NAMES]
    rows: list[dict[str, Any]] = []
    begun_s = time.monotonic()
    for geometry in GEOMETRIES:
        encoder = None
        for rho in RHOS:
            world = make_world(geometry, rho, options.packets, encoder, options.seed)
            encoder = world.encoder
            for policy in policies:
                print(f"{geometry}, rho {rho:g}, {policy}", file=sys.stderr)
                rows.append(measure(world, policy, options.budget, options.rounds))
    print_table(rows)
    if options.json is not None:
        report = {
            "command": " ".join(sys.argv), "seed": options.seed, "rounds": options.rounds, "isa": isa(),
            "compiled": AVAILABLE, "machine": platform.machine(), "python": platform.python_version(),
            "quic_pfec": version("quic-pfec"), "clock_ns": clock_ns(), "slot_us": SLOT_S * 1e6,
            "wall_s": time.monotonic() - begun_s, "rows": rows, "paper": PAPER,
        }  # fmt: skip
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.picture is not None:
        draw(rows, options.picture)


if __name__ == "__main__":
    main()
