"""What late repair is worth: `python -m bench.late --json F`.

A hand-off is cut by its deadline at rho of the time it needs, and what comes after is dropped or patched in between
decode steps. The shipped sender, receiver and patcher run on a slot clock in virtual time, with the losses of one
channel and seed the same for both; a pass of the model takes `--step-ms`, whatever this machine takes, so the figures
do not depend on it. Judged along the intact cache's continuation, forced one token at a time: how often the most likely
token is the intact cache's, and the KL divergence in nats, over all positions and over the second half.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from quic_pfec.client import prepare
from quic_pfec.kv.assemble import AssembledKV, Assembler
from quic_pfec.kv.hf import as_sent, fork, to_cache
from quic_pfec.kv.late import LateRows, LateUnits
from quic_pfec.kv.patch import patch
from quic_pfec.kv.prepared import PreparedKV
from quic_pfec.kv.profile import builtin
from quic_pfec.llm.attention_mass import score_request
from quic_pfec.llm.corpus import CUE, demo_context
from quic_pfec.llm.generate import forced_logits, logits, prefill
from quic_pfec.llm.handoffs import open_channel
from quic_pfec.llm.models import LoadedModel, load
from quic_pfec.llm.profiler import continuation, control_ids
from quic_pfec.schedule.policies import make_policy
from quic_pfec.sim.channel import losses
from quic_pfec.transfer.events import Frozen
from quic_pfec.transfer.late import LateReceiver
from quic_pfec.transfer.sender import Path as NetworkPath
from quic_pfec.transfer.sender import Sender
from quic_pfec.wire.frames import ManifestFrame, PfecAckFrame, RepairFrame, SourceFrame
from quic_pfec.wire.limits import Limits
from quic_pfec.wire.manifest import encode_manifest

PACKET_OVERHEAD = 66  # bytes beyond a symbol: frame, QUIC, UDP and IP headers
RTT_S = 0.020
RECEIVERS = ("mask", "zero")


@dataclass(frozen=True, slots=True)
class Played:
    """One hand-off: the cache at its freeze, and what came later, with the pass that it was in time for."""

    frozen: AssembledKV
    later: list[tuple[int, LateRows]]


def play(kv: PreparedKV, options: argparse.Namespace, rho: float, missing: str, seed: int) -> Played:
    """One packet a slot until the last pass; fates come back after a round trip, feedback after half of one."""
    size = kv.layout.symbol_size()
    encoder, unit_of_sid = kv.symbols(size)
    slot_s = (size + PACKET_OVERHEAD) * 8 / (options.mbps * 1e6)
    deadline_s = rho * encoder.count * slot_s + RTT_S / 2
    late_s = options.positions * options.step_ms / 1000
    slots = math.ceil((deadline_s + late_s) / slot_s)
    lost = losses(open_channel(options.channel)(seed), slots)
    manifest = encode_manifest(kv.manifest(size, missing))
    sender = Sender(
        0, encoder, unit_of_sid, kv.utility, manifest, make_policy(options.scheduler), now=0.0, deadline_s=deadline_s,
        path=NetworkPath(RTT_S, RTT_S, slot_s), late_s=late_s,
    )  # fmt: skip
    receiver = LateReceiver(0, Limits(), 0.0)
    receiver.rtt_s = RTT_S
    assembler = Assembler(kv.layout, "fp32")
    late: LateUnits | None = None
    later: list[tuple[int, LateRows]] = []
    flying: deque[tuple[float, SourceFrame | RepairFrame | ManifestFrame]] = deque()
    fates: deque[tuple[float, int, bool]] = deque()
    feedback: deque[tuple[float, PfecAckFrame]] = deque()
    for slot in range(slots):
        now = slot * slot_s
        while feedback and feedback[0][0] <= now:
            sender.on_feedback(feedback.popleft()[1])
        while fates and fates[0][0] <= now:
            _, token, delivered = fates.popleft()
            sender.on_fate(token, delivered)
        for outgoing in sender.plan(now):
            if not lost[slot]:
                flying.append((now + RTT_S / 2, outgoing.frame))
            if outgoing.token is not None:
                fates.append((now + RTT_S, outgoing.token, not lost[slot]))
        events = []
        while flying and flying[0][0] <= now:
            frame = flying.popleft()[1]
            events += receiver.receive_batch([frame], now)
            if isinstance(frame, ManifestFrame) and receiver.units is None and receiver.frozen_s is None:
                receiver.accept(kv.layout.unit_sizes(), encoder.count, size, assembler, now)
                receiver.allow_late(late_s)
        while (timer_s := receiver.event_timer()) is not None and timer_s <= now:
            events += receiver.on_timer(now)
        if any(isinstance(event, Frozen) for event in events):
            for unit, data, ranges in receiver.partial_units():
                assembler.write_partial(unit, data, ranges, whole_rows=missing == "mask")
            late = LateUnits(assembler)
            receiver.go_on(late, now)
        if late is not None and receiver.frozen_s is not None:
            step = math.ceil((now - receiver.frozen_s) * 1000 / options.step_ms)
            later += [(step, rows) for rows in late.take()]
        if receiver.feedback_due(now):
            feedback.append((now + RTT_S / 2, receiver.feedback(now)))
    return Played(assembler.finish(missing), later)


def judge(
    m: LoadedModel, played: Played, missing: str, forced: list[int], reference: Tensor, patched: bool
) -> dict[str, float]:
    """Forces `forced` behind the cue, one pass a token; `reference`: log-probabilities of the intact cache."""
    rows = None if missing == "zero" else played.frozen.row_valid
    whole = to_cache(
        played.frozen.arrays, rows, m.config, missing=missing, dtype=m.dtype, device=m.device,  # type: ignore[arg-type]
    )  # fmt: skip
    cache, given = fork(whole), m.encode(CUE)
    later = played.later if patched else []
    single = min(max((step for step, _ in later), default=0), len(forced) - 1)  # passes of one token each
    said = []
    for step in range(single):
        patch(cache, [rows for before, rows in later if before == step], shared=whole)
        said.append(logits(m, cache, given, keep=1))
        given = [forced[step]]
    patch(cache, [rows for before, rows in later if before == single], shared=whole)
    rest = [*given, *forced[single:-1]]  # nothing changes any more: one pass over all that is left
    said.append(logits(m, cache, rest, keep=len(forced) - single))
    found = torch.cat(said).log_softmax(-1)
    agreed = (found.argmax(-1) == reference.argmax(-1)).double().tolist()
    divergence = (reference.exp() * (reference - found)).sum(-1).double().tolist()
    half = len(forced) // 2
    return {
        "agreement": statistics.fmean(agreed),
        "agreement_second_half": statistics.fmean(agreed[half:]),
        "kl": statistics.fmean(divergence),
        "kl_second_half": statistics.fmean(divergence[half:]),
    }


def run(m: LoadedModel, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A record for each context, receiver, rho, seed and way."""
    records: list[dict[str, Any]] = []
    for context in range(options.contexts):
        ids = demo_context(m.tokenizer, options.tokens, context + 1).ids
        cache, cue = prefill(m, ids), m.encode(CUE)
        utility = score_request(m, cache, ids, builtin(m.fingerprint, "mask"))
        kv = prepare(cache, tokens=ids, utility=utility, model=m.fingerprint)
        forced = list(continuation(m, cache, cue, options.positions, control_ids(m)))
        sent = as_sent(cache, m.config, "bf16")
        reference = forced_logits(m, sent, cue, forced).log_softmax(-1)
        for missing in options.receivers:
            for rho in options.rho:
                for seed in range(options.seeds):
                    played = play(kv, options, rho, missing, seed)
                    came = {
                        "context": context,
                        "receiver": missing,
                        "rho": rho,
                        "seed": seed,
                        "complete_at_freeze": int(played.frozen.complete.sum()) / len(played.frozen.complete),
                        "patched": len(played.later) / len(played.frozen.complete),
                        "last_step": max((step for step, _ in played.later), default=0),
                    }
                    for late in ("drop", "patch"):
                        figures = judge(m, played, missing, forced, reference, late == "patch")
                        records.append(came | {"late": late} | figures)
                    print(records[-2:], file=sys.stderr, flush=True)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--contexts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=512, help="of each context")
    parser.add_argument("--positions", type=int, default=64, help="of the continuation that is judged")
    parser.add_argument("--receivers", nargs="+", choices=RECEIVERS, default=list(RECEIVERS))
    parser.add_argument("--rho", type=float, nargs="+", default=[0.4, 0.5, 0.6])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--mbps", type=float, default=50.0)
    parser.add_argument("--step-ms", type=float, default=30.0, help="that a pass of the model takes")
    parser.add_argument("--channel", default="paper")
    parser.add_argument("--scheduler", default="hybrid")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    m = load(options.model, threads=1)
    records = run(m, options)
    if options.json is not None:
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
        result = {"settings": settings, "command": " ".join(sys.argv), "model": m.fingerprint, "records": records}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    title = (
        f"{m.name}, {options.contexts} contexts of {options.tokens} tokens, {options.seeds} seeds, {options.channel}"
    )
    table = Table(title=title)
    heads = (
        "receiver",
        "rho",
        "whole at freeze",
        "patched",
        "by pass",
        "late",
        "agreement",
        "2nd half",
        "KL",
        "2nd half",
    )
    for head in heads:
        table.add_column(head, justify="right")
    for missing in options.receivers:
        for rho in options.rho:
            for late in ("drop", "patch"):
                cell = [r for r in records if (r["receiver"], r["rho"], r["late"]) == (missing, rho, late)]
                figures = ("complete_at_freeze", "patched", "last_step", "agreement", "agreement_second_half", "kl")
                mean = {name: statistics.fmean(r[name] for r in cell) for name in (*figures, "kl_second_half")}
                table.add_row(
                    missing, f"{rho:g}", f"{mean['complete_at_freeze']:.3f}", f"{mean['patched']:.3f}",
                    f"{mean['last_step']:.0f}", late, f"{mean['agreement']:.3f}",
                    f"{mean['agreement_second_half']:.3f}", f"{mean['kl']:.4f}", f"{mean['kl_second_half']:.4f}",
                )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
