"""The `demo` command: settings in, progress while it runs, a table, a picture and JSON out."""

from __future__ import annotations

import asyncio
import json
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from quic_pfec.cli.output import check_outputs, fail, need_extra

LEGEND = (
    "rho: time to the deadline as a share of what every packet once would take on this link, losses aside",
    "J_block: utility of the blocks that came whole, of all utility; J_frac: parts of blocks counted too",
    "oracle: the bound, J_frac of a sender that knew these losses beforehand and wasted no packet on them",
    "agreement: share of positions at which the model says the same as with the intact cache",
    "freeze: against the sender's deadline; decode: after the freeze",
)


def demo_command(
    point: Annotated[
        str,
        typer.Option(
            help="paper: 20 Mbit/s, RTT 20 ms, rho 0.8, the whole context. short: 10 Mbit/s, RTT 250 ms, one round trip"
            " for a 16-token increment. both: one after the other."
        ),
    ] = "paper",
    tokens: Annotated[int, typer.Option(min=64, max=4096, help="Tokens of the context that is handed over.")] = 512,
    seed: Annotated[int, typer.Option(help="Seed of the context and of the losses.")] = 1,
    model: Annotated[
        str, typer.Option(help="smollm2-135m, tiny-random, a folder, a .gguf file or a hub id.")
    ] = "smollm2-135m",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw which blocks came, layers by token blocks (PNG).")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write every symbol sent and the window at that moment to this CSV file.")
    ] = None,
    require: Annotated[bool, typer.Option(help="Exit with 1 if the coded runs do not beat fifo.")] = True,
) -> None:
    """See a real hand-off: a server process, a client, and between them a link that loses packets in bursts.

    The context is prefilled here, handed over with too little time for all of it, and continued there from what came.
    Agreement is the share of 64 positions at which the receiver's model says the same as with the intact cache.
    """
    if point not in ("paper", "short", "both"):
        fail(f"--point is paper, short or both, not {point!r}")
    check_outputs(json_path, picture, trace)
    with need_extra():
        import torch
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        from quic_pfec.cli import demo
        from quic_pfec.cli.processes import ServerProcess
        from quic_pfec.llm.models import load

        if picture is not None:
            from quic_pfec.cli.picture import draw_blocks
    # A pipe has no width: give the table room instead of breaking it at 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 150)
    begun_s = time.monotonic()
    torch.set_num_threads(2)
    points = {"paper": [demo.PAPER_POINT], "short": [demo.SHORT_POINT], "both": [demo.PAPER_POINT, demo.SHORT_POINT]}[
        point
    ]
    folder, certificate, key = demo.temporary_certificate()
    results: dict[str, list[demo.Outcome]] = {}
    with (
        folder,
        ServerProcess(certificate, key, "--model", model, "--threads", "1", "--max-transfers", "2") as server,
        Progress(
            TextColumn("{task.description:<28}"), BarColumn(), TextColumn("{task.fields[remark]}"), TimeElapsedColumn(),
            console=console, transient=True,
        ) as bars,
    ):  # fmt: skip
        tasks: dict[str, Any] = {}

        def progress(step: str, share: float, remark: str) -> None:
            if step not in tasks:
                for other in tasks.values():
                    bars.update(other, visible=False)
                tasks[step] = bars.add_task(step, total=1.0, remark="")
            bars.update(tasks[step], completed=share, remark=remark)

        progress("loading the model", 0.0, f"{model}; the first time it is converted, half a minute")
        try:
            loaded = load(model)
            server.wait_ready()
            setup_s = time.monotonic() - begun_s
            run_s = time.monotonic()
            context = demo.make_context(loaded, tokens, seed, progress)
            for one in points:
                results[one.name] = asyncio.run(demo.run_point(one, context, server, certificate, seed, progress))
        except (RuntimeError, OSError, ValueError) as error:  # ConnectionError is an OSError
            bars.stop()
            fail(str(error))
    run_s = time.monotonic() - run_s

    for one in points:
        _print_point(console, one, context, results[one.name])
    _explain(console, results)
    if "paper" in results:
        console.print("\n[bold]What the receiver goes on to say[/] after", repr(context.question))
        console.print(f"  {'intact cache':<28} {loaded.decode(context.intact)!r}", markup=False)
        for outcome in results["paper"]:
            console.print(f"  {outcome.scheme.label:<28} {outcome.text!r}", markup=False)
    console.print(f"\nset-up {setup_s:.1f} s (models loaded), run {run_s:.1f} s")
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(
            json.dumps(_figures(points, results, context, tokens, seed, setup_s, run_s), indent=1) + "\n"
        )
        console.print(f"figures: {json_path}")
    if picture is not None:
        first = points[0]
        panels = [
            (
                f"{outcome.scheme.label}\nJ_frac {outcome.report.j_frac:.3f}, agreement {outcome.agreement:.2f}",
                demo.shares(outcome),
            )
            for outcome in results[first.name]
        ]
        draw_blocks(
            panels,
            picture,
            f"blocks at the deadline, {len(context.ids)} tokens, {first.rate_bps / 1e6:.0f} Mbit/s, 8.4 % bursty loss",
        )
        console.print(f"picture: {picture}")
    if trace is not None:
        demo.write_traces(trace, [(one.name, outcome) for one in points for outcome in results[one.name]])
        console.print(f"trace: {trace}")
    if require:
        _require(results)


def _print_point(console: Any, point: Any, context: Any, outcomes: list[Any]) -> None:
    from rich.table import Table

    first = outcomes[0]
    rows = point.increment or len(context.ids)
    table = Table(
        title=(
            f"{point.name}: {rows} tokens of {context.model.name}, {first.report.symbols.total} packets, "
            f"{point.rate_bps / 1e6:.0f} Mbit/s, RTT {1000 * point.rtt_s:.0f} ms, bursty loss of 8.4 %, "
            f"deadline {first.report.deadline_s:.2f} s (rho {first.rho:.2f})"
        ),
        title_justify="left",
    )
    for name in (
        "scheme",
        "J_block",
        "J_frac",
        "oracle",
        "agreement",
        "blocks",
        "recovered",
        "repair",
        "resent",
        "freeze",
        "decode",
    ):
        table.add_column(name, justify="left" if name == "scheme" else "right")
    for outcome in outcomes:
        values = outcome.as_dict()
        table.add_row(
            outcome.scheme.label + (" (late)" if outcome.void else ""),
            f"{values['j_block']:.3f}",
            f"{values['j_frac']:.3f}",
            f"{values['oracle_j_frac']:.3f}",
            f"{values['agreement']:.2f}",
            f"{values['blocks_complete']}/{values['blocks_total']}",
            str(values["recovered"]),
            str(values["repair"]),
            str(values["resent"]),
            f"{values['freeze_error_ms']:+.1f} ms",
            "-" if values["decode_after_freeze_ms"] is None else f"+{values['decode_after_freeze_ms']:.1f} ms",
        )
    console.print(table)


def _explain(console: Any, results: dict[str, list[Any]]) -> None:
    """What the columns mean, once, and which rows do not count."""
    for line in LEGEND:
        console.print(line, highlight=False)
    late = [(name, outcome) for name, outcomes in results.items() for outcome in outcomes if outcome.void]
    if late:
        console.print(
            "[bold]late[/]: the link process was late or lost packets by itself, so the row measured this machine; "
            "run it again when the machine is less busy:"
        )
    for name, outcome in late:
        console.print(f"  {name}, {outcome.scheme.label}: {'; '.join(outcome.void)}", highlight=False)


def _figures(
    points: list[Any], results: dict[str, list[Any]], context: Any, tokens: int, seed: int, setup_s: float, run_s: float
) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for point in points:
        values = {outcome.scheme.key: outcome.as_dict() for outcome in results[point.name]}
        if point.name == "paper":
            figures |= values
        else:
            figures[point.name] = values
    figures["settings"] = {
        "command": " ".join(sys.argv[1:]),
        "seed": seed,
        "tokens": tokens,
        "model": context.model.name,
        "fingerprint": context.model.fingerprint,
        "profile": None if context.profile is None else context.profile.id,
        "positions": len(context.intact),
        "prefill_s": context.prefill_s,
        "setup_s": setup_s,
        "run_s": run_s,
        "points": [
            {
                "name": point.name,
                "rate_bps": point.rate_bps,
                "rtt_s": point.rtt_s,
                "channel": "gilbert-elliott 0.001,0.5,0.02,0.1",
            }
            for point in points
        ],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("quic-pfec", "aioquic", "torch", "transformers", "numpy")},
    }
    return figures


def _require(results: dict[str, list[Any]]) -> None:
    """What the demo is there to show; if it did not, it says so and fails."""
    for name, outcomes in results.items():
        by_key = {outcome.scheme.key: outcome.report for outcome in outcomes}
        if any(outcome.report.recovered_verified is False for outcome in outcomes):
            fail(f"{name}: a recovered symbol differs from the one sent")
        if name == "paper":
            for key in ("priorityfec_paper", "hybrid"):
                if by_key[key].j_frac <= by_key["fifo"].j_frac:
                    fail(f"{name}: {key} is not above fifo: {by_key[key].j_frac:.3f} and {by_key['fifo'].j_frac:.3f}")
