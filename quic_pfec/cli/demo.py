"""`quic-pfec demo`: a real hand-off between two processes over a link that loses packets, seen three ways.

A server process with the model, this process as the client, and the relay process between them. The client prefills a
context, hands the cache over with too little time for all of it, and compares what the server can still say with what
the intact cache says.
"""

from __future__ import annotations

import asyncio
import csv
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quic_pfec.cli.cert import make_certificate
from quic_pfec.cli.processes import ServerProcess
from quic_pfec.client import Connection, Generate, Order, connect, prepare, send_kv
from quic_pfec.kv.prepared import PreparedKV
from quic_pfec.kv.profile import Profile, builtin
from quic_pfec.link.options import RelayOptions
from quic_pfec.link.process import RelayProcess
from quic_pfec.link.report import RelayReport
from quic_pfec.llm.corpus import CUE, demo_context
from quic_pfec.llm.generate import agreement, greedy, prefill
from quic_pfec.llm.models import LoadedModel
from quic_pfec.quic.connection import PACKET_OVERHEAD
from quic_pfec.report import KVReport
from quic_pfec.sim.channel import PRESETS
from quic_pfec.sim.oracle import opportunities, oracle
from quic_pfec.transfer.sender import TraceRow
from quic_pfec.wire.frames import SOURCE_OVERHEAD


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way of sending: `key` names it in JSON."""

    key: str
    label: str
    order: Order
    scheduler: str


FIFO = Scheme("fifo", "fifo, no FEC", "fifo", "none")
PAPER = Scheme("priorityfec_paper", "priorityfec-paper (ddqn)", "utility", "ddqn")
ARQ = Scheme("arq", "utility order, resend only", "utility", "arq")
HYBRID = Scheme("hybrid", "hybrid", "utility", "hybrid")


@dataclass(frozen=True, slots=True)
class Point:
    """One operating point: link, share of the needed time that is given, what is handed over, how."""

    name: str
    rate_bps: float
    rtt_s: float
    rho: float | None
    schemes: tuple[Scheme, ...]
    increment: int = 0


PAPER_POINT = Point("paper", 20e6, 0.020, 0.8, (FIFO, ARQ, PAPER, HYBRID))
SHORT_POINT = Point("short", 10e6, 0.250, None, (ARQ, HYBRID), increment=16)
POSITIONS = 64  # teacher-forced positions of the agreement


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """One scheme at one point, with the bound of the same losses."""

    scheme: Scheme
    report: KVReport
    agreement: float
    text: str
    rho: float
    oracle_j_block: float
    oracle_j_frac: float
    relay: RelayReport
    trace: list[TraceRow]

    @property
    def void(self) -> list[str]:
        """Why this run measured the machine and not the hand-off: the relay was late, or lost what it should not."""
        return self.relay.void_reasons()

    def as_dict(self) -> dict[str, Any]:
        report = self.report
        values = report.as_dict()
        freeze_error_s = (report.frozen_clock_s or 0.0) - report.started_clock_s - report.deadline_s
        started_s = None if report.decode_clock_s is None else report.decode_clock_s - report.started_clock_s
        # One host, one clock: the receiver's own times, which two machines could not compare.
        values["frozen_s"] = report.deadline_s + freeze_error_s
        values["decode_started_s"] = started_s
        return values | {
            "rho": self.rho,
            "oracle_j_block": self.oracle_j_block,
            "oracle_j_frac": self.oracle_j_frac,
            "agreement": self.agreement,
            "freeze_error_ms": 1000 * freeze_error_s,
            "decode_after_freeze_ms": None if started_s is None else 1000 * (started_s - values["frozen_s"]),
            "symbols_recovered": report.symbols.recovered,
            "recovered_verified": report.recovered_verified,
            "void": self.void,
            "link_lateness_mean_ms": 1000 * self.relay.forward.lateness.mean_s,
            "text": self.text,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """What is handed over: the prefilled context and what the intact cache says after it."""

    model: LoadedModel
    ids: tuple[int, ...]
    question: str
    cache: Any
    prompt: tuple[int, ...]
    intact: tuple[int, ...]
    profile: Profile | None
    prefill_s: float


Progress = Callable[[str, float, str], None]
"""Called with a step's name, how far it is (0..1) and a short remark."""


def make_context(model: LoadedModel, tokens: int, seed: int, progress: Progress) -> Context:
    """Prefills a context of `tokens` tokens and continues it for POSITIONS tokens with the intact cache."""
    prompt = demo_context(model.tokenizer, tokens, seed)
    started_s = time.monotonic()
    cache = prefill(model, prompt.ids, progress=lambda done, total: progress("prefill", done / total, f"{done} tokens"))
    prefill_s = time.monotonic() - started_s
    from quic_pfec.kv.hf import fork

    cue = tuple(model.encode(CUE))
    intact: list[int] = []
    for token in greedy(replace_eos(model), fork(cache), cue, POSITIONS):
        intact.append(token)
        progress("intact continuation", len(intact) / POSITIONS, "")
    profile = builtin(model.fingerprint, "mask") or builtin(model.name, "mask")
    return Context(model, tuple(prompt.ids), prompt.question, cache, cue, tuple(intact), profile, prefill_s)


def replace_eos(model: LoadedModel) -> LoadedModel:
    """The same model without an end: agreement wants all its positions, also behind the answer."""
    return replace(model, eos_ids=frozenset())


def slot_s(symbol_size: int, rate_bps: float) -> float:
    """Link time of one SOURCE packet, headers of IP and UDP included."""
    return (symbol_size + SOURCE_OVERHEAD + PACKET_OVERHEAD) * 8 / rate_bps


async def run_point(
    point: Point, context: Context, server: ServerProcess, ca_certs: Path, seed: int, progress: Progress
) -> list[Outcome]:
    """Runs every scheme of a point, each over the same losses."""
    first_token = len(context.ids) - point.increment if point.increment else 0
    step_s = slot_s(_prepare(context, "utility", first_token).layout.symbol_size(), point.rate_bps)
    options = RelayOptions(
        upstream=("127.0.0.1", server.port),
        rate_bps=point.rate_bps,
        owd_s=point.rtt_s / 2,
        loss=PRESETS["paper"],
        slot_s=step_s,
        seed=seed,
    )
    outcomes = []
    for group in [point.schemes] if point.increment else [(scheme,) for scheme in point.schemes]:
        # A connection for each scheme, so that none profits from what another learnt of the path; only increments
        # share one, because they continue what it has handed over before.
        with RelayProcess(options) as relay:
            async with connect(
                "127.0.0.1", relay.port, ca_certs=str(ca_certs), server_name="localhost", rate=point.rate_bps
            ) as conn:
                base = 0
                if point.increment:
                    relay.epoch()
                    base = await _send_base(conn, context, first_token, point, progress)
                for scheme in group:
                    kv = _prepare(context, scheme.order, first_token)
                    outcomes.append(await _run_scheme(point, scheme, context, kv, conn, relay, step_s, base, progress))
    return outcomes


def _prepare(context: Context, order: Order, first_token: int = 0, tokens: int | None = None) -> PreparedKV:
    model = context.model
    cache = context.cache
    ids = context.ids
    if tokens is not None:
        ids = ids[:tokens]
        cache = [(layer.keys[:, :, :tokens], layer.values[:, :, :tokens]) for layer in cache.layers]
    return prepare(
        cache, tokens=ids, profile=context.profile, order=order, first_token=first_token, model=model.fingerprint,
        rope=model.rope,
    )  # fmt: skip


async def _send_base(conn: Connection, context: Context, tokens: int, point: Point, progress: Progress) -> int:
    """Hands over the rows before the increment, unhurried: losses are resent until everything is there."""
    kv = _prepare(context, "utility", tokens=tokens)
    needed_s = kv.layout.symbols(kv.layout.symbol_size()) * slot_s(kv.layout.symbol_size(), point.rate_bps)
    progress("base", 0.0, f"{tokens} tokens, {needed_s:.1f} s")
    report = await send_kv(conn, kv, deadline=2 * needed_s + 5)
    if report.units_complete != kv.layout.unit_count:
        raise RuntimeError(f"the base did not arrive whole: {report.units_complete} of {kv.layout.unit_count} blocks")
    return report.handle


async def _run_scheme(
    point: Point,
    scheme: Scheme,
    context: Context,
    kv: PreparedKV,
    conn: Connection,
    relay: RelayProcess,
    step_s: float,
    base: int,
    progress: Progress,
) -> Outcome:
    symbols = kv.layout.symbols(kv.layout.symbol_size())
    slots = point.rho * symbols if point.rho is not None else point.rtt_s / step_s
    deadline = point.rtt_s / 2 + slots * step_s
    trace: list[TraceRow] = []
    conn.trace(trace.append)
    relay.epoch()
    watcher = asyncio.ensure_future(_watch(conn, symbols, deadline, scheme, progress))
    try:
        report = await send_kv(
            conn,
            kv,
            deadline,
            scheduler=scheme.scheduler,
            base=base,
            then=Generate(context.prompt, max_new_tokens=POSITIONS, score=context.intact),
        )
    finally:
        watcher.cancel()
    link = relay.report()
    text = "".join([part async for part in report.text])
    if not report.confirmed:
        raise RuntimeError(f"{scheme.label}: no report came from the server")
    assert link.log is not None
    first_s = report.first_packet_clock_s or report.started_clock_s
    losses = opportunities(
        link.log, start_s=first_s, deadline_s=report.started_clock_s + report.deadline_s, owd_s=point.rtt_s / 2
    )
    packets = kv.layout.fragment_counts(kv.layout.symbol_size())
    bound = oracle(losses, packets, kv.utility)
    return Outcome(
        scheme=scheme,
        report=report,
        agreement=agreement(report.scores, context.intact),
        text=text,
        rho=slots / symbols,
        oracle_j_block=bound.j_block,
        oracle_j_frac=bound.j_frac,
        relay=link,
        trace=trace,
    )


async def _watch(conn: Connection, symbols: int, deadline_s: float, scheme: Scheme, progress: Progress) -> None:
    started_s = time.monotonic()
    while True:
        elapsed_s = time.monotonic() - started_s
        known = max((sender.ledger.known for sender in conn.protocol.quic.senders.values()), default=0)
        remark = f"{known} of {symbols} symbols known, {max(0.0, deadline_s - elapsed_s):.1f} s left"
        progress(scheme.label, min(1.0, elapsed_s / deadline_s), remark)
        await asyncio.sleep(0.1)


def write_traces(path: Path, outcomes: list[tuple[str, Outcome]]) -> None:
    """CSV of every symbol sent: time since the first, kind, decoded prefix, next symbol, window, reported deficit."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("point", "scheme", "t_s", "kind", "prefix", "next", "window", "deficit"))
        for point, outcome in outcomes:
            first_s = outcome.trace[0].now if outcome.trace else 0.0
            for row in outcome.trace:
                numbers = (row.prefix, row.next, row.window, row.deficit)
                writer.writerow(
                    (point, outcome.scheme.key, f"{row.now - first_s:.6f}", row.kind.name.lower(), *numbers)
                )


def shares(outcome: Outcome) -> NDArray[np.float64]:
    """Share of each block that came, [layers, columns]."""
    return np.asarray(outcome.report.unit_share, dtype=np.float64)


def temporary_certificate() -> tuple[tempfile.TemporaryDirectory[str], Path, Path]:
    """A folder that holds a fresh development certificate and its key."""
    folder = tempfile.TemporaryDirectory(prefix="quic_pfec-")
    certificate, key = make_certificate(Path(folder.name))
    return folder, certificate, key
