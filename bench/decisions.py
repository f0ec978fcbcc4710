"""What a decision and a packet cost the sender: `python -m bench.decisions --json F`.

The geometry is the paper's: 64,512 symbols of 1,372 bytes in blocks of 24, 100 Mbit/s, RTT 20 ms (179 slots), losses of
its channel (8.4 %), budget 10 %. `decision` is `Sender.ready` at a new time in mid-transfer: masks, state and policy,
of a learned one features and network; `p99` is of the same, call by call on the wall clock, whose own time (some 40 ns)
is in it. `decide` is `policy.decide(state)` from Python, where a compiled rule must first read the State; learned
policies have no such call. Those whose weights are not in the package have random ones. `packet` is a whole transfer by
`Sender.plan_into`, in runs of as many frames as given: decision, coding set, frame header and the copy of the symbol or
the coding of the repair, with fates in batches one round trip later and feedback every 9 slots counted in. Before: the
Python twins, as many frames at a time, with `plan` and `frame.body()` (on a part of the transfer). All but p99 is CPU
time of the process, best of the rounds; the machine's other work still shows in caches.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import deque
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from interop.make_network_vectors import random_network
from quic_pfec.fec.codec import Encoder, isa
from quic_pfec.kv.profile import synthetic_utility
from quic_pfec.schedule.learned import Ddqn, Learned, Overridden
from quic_pfec.schedule.network import packaged_networks
from quic_pfec.schedule.policies import POLICY_NAMES, Hybrid, Policy, compiled, make_policy, make_twin
from quic_pfec.schedule.state import State
from quic_pfec.sim.channel import PRESETS, GilbertElliottChannel, losses
from quic_pfec.transfer import ledger, planner
from quic_pfec.transfer.sender import Path as LinkPath
from quic_pfec.transfer.sender import Sender
from quic_pfec.wire import varint
from quic_pfec.wire.frames import AckStatus, PfecAckFrame, source_overhead

LAYERS, CHUNKS, PACKETS = 28, 96, 24
SYMBOL = 1372
RTT_SLOTS = 179
SLOT_S = 112e-6
BYTES_FREE = 1425
FEEDBACK_EVERY = 9  # slots: a PFEC_ACK a millisecond
RUNS = (1, 16, 64)
RANDOM = ("ddqn (random)", "hybrid (random)")


class Twin(Sender):
    """A sender that plans in Python: what there was before."""

    ledger_type: ClassVar[Any] = ledger.Ledger
    planner_type: ClassVar[Any] = planner.Planner


class Transfer:
    """The symbols, and the losses that every run meets."""

    def __init__(self, seed: int) -> None:
        units = LAYERS * CHUNKS
        self.symbols = units * PACKETS
        self.encoder = Encoder(SYMBOL, self.symbols)
        rng = np.random.default_rng(seed)
        for _ in range(self.symbols):
            self.encoder.push(rng.bytes(SYMBOL))
        self.utility: NDArray[np.float64] = np.sort(synthetic_utility((LAYERS, CHUNKS), 0.99, seed))[::-1].copy()
        self.unit_of_sid = np.repeat(np.arange(units, dtype=np.int32), PACKETS)
        self.losses = losses(GilbertElliottChannel(PRESETS["paper"], seed), self.symbols).tolist()

    def sender(self, kind: type[Sender], policy: Policy) -> Sender:
        rtt_s = RTT_SLOTS * SLOT_S
        return kind(
            4, self.encoder, self.unit_of_sid, self.utility, bytes(200), policy, now=0.0,
            deadline_s=self.symbols * SLOT_S + rtt_s, path=LinkPath(rtt_s, rtt_s, SLOT_S), repair_budget=0.1,
            credit=self.symbols,
        )  # fmt: skip

    def play(self, sender: Sender, slots: int, run: int, *, before: bool) -> tuple[float, int, list[State]]:
        """CPU seconds in the sender, packets, and some of the states met, over `slots` slots in runs of `run`."""
        out = bytearray(run * BYTES_FREE)
        flying: deque[tuple[int, list[int], list[int]]] = deque()  # slot of the fates, delivered, lost
        heard, sequence, packets, spent_s = RTT_SLOTS, 0, 0, 0.0
        states: list[State] = []
        for slot in range(0, slots, run):
            now = slot * SLOT_S
            due = []
            while flying and flying[0][0] <= slot:
                due.append(flying.popleft())
            ack = None
            if slot - heard >= FEEDBACK_EVERY:
                heard, sequence = slot, sequence + 1
                ack = self.ack(sender, sequence)
            started_s = time.process_time()
            for _, delivered, lost in due:
                if before:
                    for token in delivered:
                        sender.on_fate(token, True)
                    for token in lost:
                        sender.on_fate(token, False)
                else:
                    sender.on_fates(delivered, True)
                    sender.on_fates(lost, False)
            if ack is not None:
                sender.on_feedback(ack)
            if before:
                batch = sender.plan(now, run, BYTES_FREE)
                for outgoing in batch:
                    varint.encode(0x0FDA91AB) + outgoing.frame.body()
                tokens = [outgoing.token for outgoing in batch]
            else:
                tokens = sender.plan_into(now, run, BYTES_FREE, out, BYTES_FREE).tokens
            spent_s += time.process_time() - started_s
            packets += len(tokens)
            fates: tuple[list[int], list[int]] = ([], [])
            for place, carried in enumerate(tokens):
                if carried is not None:
                    fates[self.losses[min(slot + place, self.symbols - 1)]].append(carried)
            flying.append((slot + RTT_SLOTS, *fates))
            if slot % 16 == 0:
                states.append(replace(sender.state(now)))
        return spent_s, packets, states

    def ack(self, sender: Sender, sequence: int) -> PfecAckFrame:
        """What a receiver half a round trip away would say; it decoded nothing."""
        prefix = sender.ledger.prefix
        span = max(0, sender.ledger.next - prefix - RTT_SLOTS // 2)
        lacking = min(span, sender.ledger.known_lost)
        return PfecAckFrame(4, sequence, AckStatus.RUNNING, prefix, span, lacking, self.symbols, 0, 0, ())


def decision_us(policy: Policy, states: list[State], rounds: int) -> float:
    """Best mean over `states`, us a call."""
    best = float("inf")
    decide = policy.decide
    for _ in range(rounds):
        started_s = time.process_time()
        for state in states:
            decide(state)
        best = min(best, (time.process_time() - started_s) / len(states))
    return 1e6 * best


def asked_us(sender: Sender, name: str, rounds: int) -> float:
    """us a call of what a shell asks several times a packet. `ready` at another time is another decision."""
    ask = getattr(sender, name)
    start_s, count = 6000 * SLOT_S, 20_000
    arguments = [() if name == "next_timer" else (start_s + number * 1e-9,) for number in range(count)]
    best = float("inf")
    for _ in range(rounds):
        started_s = time.process_time()
        for argument in arguments:
            ask(*argument)
        best = min(best, (time.process_time() - started_s) / count)
    return 1e6 * best


def p99_us(sender: Sender, count: int = 20_000) -> float:
    """us that 99 of 100 calls of `ready`, each another decision, stay below."""
    start_s, clock = 6000 * SLOT_S, time.perf_counter_ns
    taken = np.empty(count)
    for number in range(count):
        now = start_s + number * 1e-9
        begun = clock()
        sender.ready(now)
        taken[number] = clock() - begun
    return float(np.percentile(taken, 99) / 1000)


def random_twin(name: str) -> Policy:
    """A learned policy in Python without its weights."""
    if name == RANDOM[0]:
        return Ddqn(random_network("q", 3))
    return Overridden(Hybrid(), random_network("advantage", 5, resend=True, features=2, margin=0.2))


def forms(name: str) -> tuple[Policy, Policy]:
    """Compiled, and the twin."""
    if name in RANDOM:
        return compiled(random_twin(name)), random_twin(name)
    return make_policy(name), make_twin(name)


def names() -> list[str]:
    missing = [weights not in packaged_networks() for weights in ("ddqn-paper", "hybrid-override")]
    return [*POLICY_NAMES, *(name for name, lacking in zip(RANDOM, missing, strict=True) if lacking)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.decisions", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    transfer = Transfer(options.seed)
    rows: list[dict[str, Any]] = []
    for name in track(names(), "policies"):
        row: dict[str, Any] = {"policy": name}
        for label, kind, form in (("", Sender, 0), ("_before", Twin, 1)):
            sender = transfer.sender(kind, forms(name)[form])
            _, _, states = transfer.play(sender, 6000, 1, before=kind is Twin)
            learned = isinstance(forms(name)[1], Learned)
            if learned:
                sender._policy = forms(name)[form]  # no burst is left over, so that every call decides
            row["decide_us" + label] = None if learned else decision_us(forms(name)[form], states, 10)
            row["decision_us" + label] = asked_us(sender, "ready", options.rounds)
            row["decision_p99_us" + label] = p99_us(sender)
        for run in RUNS:
            times, times_before = [], []
            for _ in range(options.rounds):
                spent_s, packets, _ = transfer.play(
                    transfer.sender(Sender, forms(name)[0]), transfer.symbols, run, before=False
                )
                times.append(spent_s / packets)
                spent_s, packets, _ = transfer.play(transfer.sender(Twin, forms(name)[1]), 6000, run, before=True)
                times_before.append(spent_s / packets)
            row[f"packet_us_run{run}"] = 1e6 * min(times)
            row[f"packet_us_run{run}_before"] = 1e6 * min(times_before)
        rows.append(row)
    sender = transfer.sender(Sender, make_policy("hybrid"))
    transfer.play(sender, 6000, 1, before=False)
    asked = {name: asked_us(sender, name, options.rounds) for name in ("finished", "next_timer")}
    columns = ("decision_us", "decision_p99_us", "decide_us", *(f"packet_us_run{run}" for run in RUNS))
    print("us, in brackets the Python twin".ljust(34) + "".join(column.rjust(24) for column in columns))
    for row in rows:
        cells = (
            ("" if row[column] is None else f"{row[column]:.2f} ({row[f'{column}_before']:.2f})").rjust(24)
            for column in columns
        )
        print(row["policy"].ljust(34) + "".join(cells))
    print("asked, us a call: " + ", ".join(f"{name} {value:.2f}" for name, value in asked.items()))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "command": " ".join(sys.argv), "seed": options.seed, "rounds": options.rounds, "isa": isa(),
            "machine": platform.machine(), "python": platform.python_version(), "quic_pfec": version("quic-pfec"),
            "symbols": transfer.symbols, "symbol_size": SYMBOL, "source_overhead": source_overhead(4),
            "rows": rows, "asked_us": asked,
        }  # fmt: skip
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
