"""`quic-pfec selftest`: hand-offs of a random cache on loopback, checked bit by bit. No model, a few seconds.

A receiver that silently got other bytes than were sent would talk fluent nonsense, so this is the first thing to run on
a new machine: codec, packets, link and rebuild together, each case against the arrays that were sent.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import numpy.typing as npt
import typer

from quic_pfec.cli.output import fail

if TYPE_CHECKING:
    from quic_pfec.kv.received import ReceivedKV
    from quic_pfec.report import KVReport

LAYERS, KV_HEADS, TOKENS, HEAD_DIM = 4, 2, 256, 64
RATE_BPS, OWD_S = 10e6, 0.005
AMPLE_S = 10.0  # a deadline that no case should need
SHORT_SHARE = 0.5  # of the time that the cache needs on the link: the case that cannot be whole

Cache = list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]


@dataclass(frozen=True, slots=True)
class Result:
    """One case. problem: what is wrong, empty if nothing is."""

    name: str
    blocks_complete: int
    blocks_total: int
    symbols: int
    lost: int
    recovered: int
    seconds: float
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """One hand-off. whole: everything must arrive. recovers: losses must have been decoded, not only sent again."""

    name: str
    scheduler: str = "hybrid"
    lossy: bool = True
    extension: bool = True
    whole: bool = True
    recovers: bool = False


CASES = (
    Case("clean link", lossy=False),
    Case("bursts of losses, code only", scheduler="paper-deficit", recovers=True),
    Case("bursts of losses, hybrid"),
    Case("half the time it needs", whole=False),
    Case("peer without the extension", lossy=False, extension=False),
)


def selftest_command(
    seed: Annotated[int, typer.Option(min=0, help="Seed of the cache and of the losses.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Check this installation in a few seconds: real hand-offs on loopback, every bit compared. Needs no model.

    Exit status 0 if all that was reported complete is bit-equal, all that was decoded is what was sent, and a peer
    without the extension gets the cache over a plain stream.
    """
    say: Callable[[str], None] = (lambda line: None) if as_json else print
    say(f"{'case':<30}{'blocks':>9}{'symbols':>9}{'lost':>6}{'recovered':>11}{'seconds':>9}  result")
    try:
        results = asyncio.run(run(seed, say))
    except (RuntimeError, ConnectionError, OSError) as error:
        fail(f"the self-test could not run: {error}")
    failed = [result for result in results if result.problem]
    if as_json:
        print(json.dumps({"ok": not failed, "seed": seed, "cases": [asdict(result) for result in results]}))
    if failed:
        fail(f"{len(failed)} of {len(results)} cases failed")


def show(result: Result) -> str:
    """A row of the table."""
    blocks = f"{result.blocks_complete}/{result.blocks_total}"
    return (
        f"{result.name:<30}{blocks:>9}{result.symbols:>9}{result.lost:>6}{result.recovered:>11}"
        f"{result.seconds:>9.2f}  {result.problem or 'ok'}"
    )


def random_cache(seed: int) -> Cache:
    """LAYERS pairs of float32 [KV_HEADS, TOKENS, HEAD_DIM]."""
    rng = np.random.default_rng(seed)
    shape = (KV_HEADS, TOKENS, HEAD_DIM)
    return [(rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32)) for _ in range(LAYERS)]


async def run(seed: int, say: Callable[[str], None]) -> list[Result]:
    """Runs every case, each over a relay of its own, and says each result as it is there."""
    from quic_pfec.cli.cert import make_certificate
    from quic_pfec.server import serve

    results = []
    received: asyncio.Queue[ReceivedKV] = asyncio.Queue()
    with tempfile.TemporaryDirectory(prefix="quic_pfec-") as folder:
        certificate, key = make_certificate(Path(folder))
        async with await serve(
            port=0, certificate=str(certificate), private_key=str(key), on_kv=received.put_nowait
        ) as listener:
            for index, case in enumerate(CASES):
                result = await run_case(case, seed + index, listener.port, str(certificate), received)
                say(show(result))
                results.append(result)
    return results


async def run_case(case: Case, seed: int, port: int, ca_certs: str, received: asyncio.Queue[ReceivedKV]) -> Result:
    """One hand-off, through a relay that loses packets if the case says so."""
    from quic_pfec.client import connect, prepare, send_kv
    from quic_pfec.link.options import RelayOptions
    from quic_pfec.link.process import RelayProcess
    from quic_pfec.sim.channel import PRESETS

    cache = random_cache(seed)
    kv = prepare(list(cache), wire_dtype="fp32")
    options = RelayOptions(
        ("127.0.0.1", port), rate_bps=RATE_BPS, owd_s=OWD_S, loss=PRESETS["paper"] if case.lossy else None, seed=seed
    )
    deadline_s = AMPLE_S if case.whole else SHORT_SHARE * kv.nbytes * 8 / RATE_BPS
    with RelayProcess(options) as relay:
        started_s = time.monotonic()
        async with connect(
            "127.0.0.1", relay.port, ca_certs=ca_certs, rate=0.95 * RATE_BPS, extension=case.extension
        ) as conn:
            relay.epoch()
            report = await send_kv(conn, kv, deadline_s, scheduler=case.scheduler)
            seconds = time.monotonic() - started_s
            try:
                got = await asyncio.wait_for(received.get(), AMPLE_S)
            except TimeoutError:
                got = None
    return Result(
        name=case.name,
        blocks_complete=report.units_complete,
        blocks_total=kv.layout.unit_count,
        symbols=report.symbols.total,
        lost=report.symbols.lost,
        recovered=report.symbols.recovered,
        seconds=seconds,
        problem=find_problem(case, cache, report, got),
    )


def find_problem(case: Case, cache: Cache, report: KVReport, got: ReceivedKV | None) -> str:
    """The first thing that is wrong with a hand-off of `cache`, or an empty string."""
    if not report.confirmed or got is None:
        return "no report came from the receiver"
    if report.extension != ("on" if case.extension else "off"):
        return f"the extension was {report.extension}"
    if report.units_corrupt:
        return f"{report.units_corrupt} blocks came damaged"
    if report.recovered_verified is False:
        return "a recovered symbol differs from the one sent"
    if int(got.complete.sum()) != report.units_complete:
        return "the two ends count different blocks"
    for layer, ((keys, values), sent) in enumerate(zip(got.kv.arrays.layers, cache, strict=True)):
        valid = got.kv.row_valid[layer]
        for came, original in ((keys, sent[0]), (values, sent[1])):
            if not np.array_equal(came.view(np.uint32)[valid], original.view(np.uint32)[valid]):
                return f"layer {layer} holds rows that were not sent"
            if came[~valid].any():
                return f"layer {layer} holds something where nothing came"
    for unit in np.flatnonzero(got.complete).tolist():
        start, stop = got.kv.layout.row_range(unit)
        if not got.kv.row_valid[got.kv.layout.layer_of(unit)][:, start:stop].all():
            return f"block {unit} is called complete and is not"
    if case.whole and not got.is_complete:
        return f"{report.units_partial + report.units_missing} blocks did not come: {report.hint}"
    if not case.whole and not 0 < report.units_complete < report.units_complete + report.units_missing:
        return "all or nothing came in half the time"
    if case.recovers and not report.symbols.recovered:
        return "no loss was decoded"
    return ""
