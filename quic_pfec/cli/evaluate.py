"""`quic-pfec evaluate`: the measurements behind the project's claims, an operating point a run.

`quality` is what a model keeps: retention by share of blocks, and end to end through simulated losses; the other
points (`cli.evaluate_points`) compare policies by the utility they deliver. Tables go to
stdout, figures to JSON, curves to a picture; finished examples go to a journal beside the JSON, from which an
interrupted run goes on.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quic_pfec.cli.evaluate_points import SIMULATED, evaluate_points
from quic_pfec.cli.output import check_outputs, fail, need_extra
from quic_pfec.cli.progress import progress_on_stderr

if TYPE_CHECKING:
    from quic_pfec.llm.quality import Settings
    from quic_pfec.llm.quality_report import Cell
    from quic_pfec.llm.quality_run import Run

POINTS = ("quality", *SIMULATED)


def evaluate_command(
    point: Annotated[
        str, typer.Option(help="What is measured: quality; or policies at paper, short, heldout, context, 5g.")
    ] = "quality",
    model: Annotated[str, typer.Option(help="smollm2-135m, a folder, a .gguf file or a hub id.")] = "smollm2-135m",
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1 ...")] = "cpu",
    data: Annotated[
        Path | None,
        typer.Option(help="Questions, JSON lines (id, question, answers, passages). Default: the corpus that ships."),
    ] = None,
    examples: Annotated[int, typer.Option(min=1, help="Examples to evaluate; none that profiles are made of.")] = 48,
    losses: Annotated[int, typer.Option(min=1, help="Realisations of the channel, the same for every scheme.")] = 5,
    channel: Annotated[
        str, typer.Option(help="paper, iid5, ge2, long8 ..., four Gilbert-Elliott numbers, or trace:FILE.")
    ] = "paper",
    rho: Annotated[
        list[float] | None, typer.Option(help="Time as a share of what all packets take; repeat. 0.8, 1.0.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of each context, a multiple of 16.")] = 1536,
    positions: Annotated[int, typer.Option(min=1, help="Tokens of the continuation that are judged.")] = 64,
    kept: Annotated[str, typer.Option(help="Percentages of blocks of the retention curves.")] = (
        "10,20,30,40,50,60,70,80,90,100"
    ),
    repair_budget: Annotated[
        float | None, typer.Option(min=0, help="Repairs and resends, a share of the packets. Default: no limit.")
    ] = None,
    wire_dtype: Annotated[
        str, typer.Option(help="What the caches travel as, and --rho is a share of: bf16, int8, progressive ...")
    ] = "bf16",
    beside: Annotated[
        list[str] | None,
        typer.Option(
            help="quality: hand-offs in this wire dtype, too, in the same time: bf16, int8, fp8, int4, progressive, "
            "or auto; repeat."
        ),
    ] = None,
    receiver: Annotated[
        list[str] | None, typer.Option(help="quality: what is done about holes, mask or zero; repeat. Default: both.")
    ] = None,
    profile_prompts: Annotated[int, typer.Option(min=1, help="Contexts that the profiles are measured on.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of contexts, random order, losses and intervals.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Patterns judged at once: memory, not results.")] = 8,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Processes: one by default for quality, each with a model; else all cores."),
    ] = None,
    scheduler: Annotated[
        list[str] | None,
        typer.Option(
            help="A policy, @full or @sack for its window, @fifo for its order; ddqn:FILE.npz and hybrid:FILE.npz have "
            "the weights of a file; repeat. Default: all."
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Paired realisations of a simulated point; 100 at short.")
    ] = None,
    executor: Annotated[
        str, typer.Option(help="Who works on a simulated point: local, or ray (a Ray cluster; RAY_ADDRESS).")
    ] = "local",
    trace: Annotated[Path | None, typer.Option(help="Measured losses in the place of the labelled ones of 5g.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="torch's CPU threads in this process.")] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here, and beside it a .jsonl to go on from.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw curves and bars (PNG).")] = None,
) -> None:
    """Measure what partial caches keep of a model, by order, receiver and scheme, with confidence intervals.

    Each context is prefilled once, and judged along what its intact cache goes on to say: the share of tokens with the
    same top-1 (agreement) and the KL divergence. At full size it takes an hour or more on a few cores; a run that was
    interrupted goes on where it was.
    """
    if point not in POINTS:
        fail(f"--point is {', '.join(POINTS)}, not {point!r}")
    check_outputs(json_path, picture)
    if point in SIMULATED:
        evaluate_points(point, scheduler, seeds, jobs, json_path, picture, trace, seed, executor)
        return
    with need_extra():
        from rich.console import Console

        from quic_pfec.llm.dataset import builtin_dataset, load_dataset
        from quic_pfec.llm.models import load
        from quic_pfec.llm.quality import RECEIVERS, Settings
        from quic_pfec.llm.quality_report import cells
        from quic_pfec.llm.quality_run import run

        if picture is not None:
            from quic_pfec.cli.quality_picture import draw_quality
    begun_s = time.monotonic()
    try:
        settings = Settings(
            tokens=tokens,
            positions=positions,
            kept=_shares(kept),
            rhos=tuple(rho or (0.8, 1.0)),
            losses=losses,
            channel=channel,
            repair_budget=repair_budget,
            profile_prompts=profile_prompts,
            seed=seed,
            wire_dtype=wire_dtype,
            beside=tuple(beside or ()),
            receivers=tuple(receiver or RECEIVERS),  # type: ignore[arg-type]  # checked there
            batch=batch,
        )
        questions = builtin_dataset() if data is None else load_dataset(data)
        with need_extra():
            loaded = load(model, device=device, threads=threads)
        with progress_on_stderr() as progress:
            result = run(
                loaded, questions, settings, examples, jobs=jobs or 1, source=model, device=device, progress=progress,
                journal=None if json_path is None else json_path.with_suffix(".jsonl"),
            )  # fmt: skip
    except (ValueError, OSError) as error:
        fail(str(error))
    table = cells(result.records, seed)
    print_tables(Console(width=None if sys.stdout.isatty() else 130), table, settings, loaded.name, questions.name)
    if json_path is not None:
        values = _figures(result, table, settings) | {
            "model": loaded.name,
            "fingerprint": loaded.fingerprint,
            "data": questions.name,
            "data_sha256": questions.digest,
            "command": " ".join(sys.argv[1:]),
            "wall_s": time.monotonic() - begun_s,
        }
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(values, indent=1) + "\n")
        print(f"figures: {json_path}")
    if picture is not None:
        title = f"{loaded.name}, {questions.name}, {tokens} tokens, {settings.wire_dtype}, {result.examples} examples"
        draw_quality(table, result.completions, picture, title, wire_dtype)
        print(f"picture: {picture}")


def _shares(text: str) -> tuple[float, ...]:
    """Percentages joined by commas, as shares. Raises ValueError."""
    try:
        return tuple(sorted({round(float(part) / 100, 6) for part in text.split(",") if part.strip()}))
    except ValueError:
        raise ValueError(f"--kept is percentages joined by commas, not {text!r}") from None


def print_tables(console: Any, table: list[Cell], settings: Settings, model: str, data: str) -> None:
    """A table for each arm and receiver, all with the wire dtype in their title."""
    from rich.table import Table

    from quic_pfec.llm.handoffs import SCHEMES

    labels = {scheme.key: scheme.label for scheme in SCHEMES}
    head = f"{model}, {data}, {settings.tokens} tokens, wire {settings.wire_dtype}"
    arms = Table(title=f"arms: {head}", title_justify="left")
    for name in ("arm", "agreement", "KL, nats", "F1"):
        arms.add_column(name)
    for cell in table:
        if cell.arm not in ("retention", "handoff"):
            arms.add_row(cell.arm.replace("_", " "), str(cell.agreement), str(cell.kl), str(cell.f1))
    console.print(arms)
    for receiver in settings.receivers:
        mine = [cell for cell in table if cell.arm == "retention" and cell.receiver == receiver]
        shares = sorted({cell.share for cell in mine})
        if mine:
            kept = Table(title=f"agreement by blocks kept, receiver {receiver}: {head}", title_justify="left")
            kept.add_column("order")
            for share in shares:
                kept.add_column(f"{100 * share:g} %", justify="right")
            for name in dict.fromkeys(cell.name for cell in mine):
                row = {cell.share: cell for cell in mine if cell.name == name}
                kept.add_row(name, *(f"{row[s].agreement.mean:.2f} \\[{row[s].agreement.low:.2f}]" for s in shares))
            console.print(kept)
    for receiver in settings.receivers:
        for rho in settings.rhos:
            here = [c for c in table if c.arm == "handoff" and c.receiver == receiver and c.share == rho]
            mine = [c for c in here if c.wire == settings.wire_dtype]
            ends = Table(
                title=f"channel {settings.channel}, rho {rho:g}, receiver {receiver}: {head}", title_justify="left"
            )
            for name in ("scheme", "blocks", "agreement", "KL, nats", "F1"):
                ends.add_column(name, justify="left" if name == "scheme" else "right")
            for cell in mine:
                assert cell.blocks is not None
                ends.add_row(
                    labels[cell.name], f"{cell.blocks.mean:.3f}", str(cell.agreement), str(cell.kl), str(cell.f1)
                )
            console.print(ends)
            if len(mine) < len(here):
                console.print(beside_table(here, settings, labels, f"rho {rho:g} of {head}, receiver {receiver}"))
    console.print("intervals: 95 %, bootstrap over examples; in the tables of blocks kept, [] is the lower end")


def beside_table(here: list[Cell], settings: Settings, labels: dict[str, str], head: str) -> Any:
    """Hand-offs by wire dtype, all in the same time; of the first only the schemes that the others have."""
    from rich.table import Table

    table = Table(title=f"wire dtypes in the same time: {head}", title_justify="left")
    for name in ("wire", "scheme", "blocks", "finer", "agreement", "KL, nats"):
        table.add_column(name, justify="left" if name in ("wire", "scheme") else "right")
    schemes = {cell.name for cell in here if cell.wire != settings.wire_dtype}
    for cell in here:
        if cell.name in schemes:
            assert cell.blocks is not None
            finer = "" if cell.finer is None else f"{cell.finer.mean:.3f}"
            wire = f"{cell.wire} ({cell.sent})" if cell.sent else cell.wire
            table.add_row(
                wire, labels[cell.name], f"{cell.blocks.mean:.3f}", finer, str(cell.agreement), str(cell.kl)
            )  # fmt: skip
    return table


def _figures(result: Run, table: list[Cell], settings: Settings) -> dict[str, Any]:
    from dataclasses import asdict

    from quic_pfec.kv.profile import encode_profile

    return {
        "cells": [cell.as_dict() for cell in table],
        "completion": [asdict(one) for one in result.completions],
        "profiles": {
            f"{ranking}:{receiver}": json.loads(encode_profile(profile))
            for (ranking, receiver), profile in result.profiles.items()
        },
        "settings": asdict(settings),
        "examples": result.examples,
        "resumed": result.resumed,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("quic-pfec", "torch", "transformers", "numpy")},
    }
