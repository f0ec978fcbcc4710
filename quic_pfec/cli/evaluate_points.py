"""`quic-pfec evaluate` at the simulated points: every policy over paired losses, beside the bound.

Tables go to stdout, one JSON row a cell and scheme to a file, figures 5 and 7 of the paper (arXiv 2610.21390) or the
curve over deadlines to a picture. Finished hand-offs go to a journal beside the JSON, from which a run goes on.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quic_pfec.cli.output import fail, need_extra
from quic_pfec.cli.progress import progress_on_stderr

SIMULATED = ("paper", "short", "heldout", "context", "5g")

SEEDS = {"paper": 24, "short": 100, "heldout": 40, "context": 4, "5g": 24}
"""Realisations by default: what gives intervals of a few thousandths, or for `context` minutes instead of hours."""

Row = dict[str, Any]


def default_schemes() -> tuple[str, ...]:
    """All policies, the fixed code also over the paper's window, and FIFO twins of what stands for others' systems."""
    from quic_pfec.schedule.network import packaged_networks
    from quic_pfec.schedule.policies import POLICY_NAMES

    # Without an override hybrid is its rule, and would stand there twice.
    names = [name for name in POLICY_NAMES if name != "hybrid-rule" or "hybrid-override" in packaged_networks()]
    extra = (
        "fixed@full",
        "fixed@budget@full",
        "none@fifo",
        "arq@fifo",
        "flec-rt@fifo",
        "flec-rt-window@fifo",
        "flec-rt-spread@fifo",
    )
    return (*names, *extra)


def evaluate_points(
    point: str,
    schedulers: list[str] | None,
    seeds: int | None,
    jobs: int | None,
    json_path: Path | None,
    picture: Path | None,
    trace: Path | None = None,
    first_seed: int = 0,
    executor: str = "local",
) -> None:
    """Runs one of `SIMULATED` and prints, writes and draws what came out."""
    with need_extra():
        from rich.console import Console

        from quic_pfec.sim.points import cells
        from quic_pfec.sim.sweep import parse_scheme, run_sweep

        if picture is not None:
            from quic_pfec.cli.points_picture import draw_points
    if trace is not None and point != "5g":
        fail("--trace belongs to --point 5g")
    journal = None
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        journal = json_path.with_suffix(".jsonl")
    try:
        chosen = [parse_scheme(text) for text in dict.fromkeys(schedulers or default_schemes())]
        with progress_on_stderr() as step:
            table = run_sweep(
                cells(point, None if trace is None else str(trace)),
                chosen,
                range(first_seed, first_seed + (seeds or SEEDS[point])),
                jobs=jobs,
                executor=executor,
                journal=journal,
                progress=partial(step, "hand-offs x schemes"),
            )
    except (ValueError, OSError, ImportError) as error:
        fail(str(error))
    rows = table.rows()
    print_points(Console(width=None if sys.stdout.isatty() else 130), rows)
    say_above(rows)
    if json_path is not None:
        release = version("quic-pfec")
        json_path.write_text(json.dumps([row | {"version": release} for row in rows], indent=1) + "\n")
        print(f"figures: {json_path}")
    if picture is not None:
        draw_points(rows, picture)
        print(f"picture: {picture}")


def _cell(row: Row) -> tuple[Any, ...]:
    names = ("model", "rho", "budget", "channel", "t_rtt", "tokens", "slots", "rtt_slots", "slot_us")
    return tuple(row[name] for name in names)


def by_cell(rows: list[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Rows of each cell, in the order of the rows."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(_cell(row), []).append(row)
    return found


def cell_title(row: Row) -> str:
    """A cell in words."""
    budget = "no limit" if row["budget"] is None else f"{100 * row['budget']:g} %"
    parts = [row["model"], f"{row['channel']} channel", f"T/RTT {row['t_rtt']:g}", f"rho {row['rho']:g}"]
    if row["point"] == "context":
        parts.append(f"{row['tokens']} tokens")
    return ", ".join([*parts, f"budget {budget}, {row['seeds']} seeds"])


def print_points(console: Any, rows: list[Row]) -> None:
    """A table a cell: means with half 95 % intervals, and the paired difference to hybrid."""
    from rich.table import Table

    for mine in by_cell(rows).values():
        first = mine[0]
        bound = f"bound J_block {first['oracle_j_block']:.4f}, J_frac {first['oracle_j_frac']:.4f}"
        table = Table(title=f"{cell_title(first)}; {bound}", title_justify="left")
        table.add_column("scheme")
        for name in ("J_block", "+-", "J_frac", "+-", "J_block - hybrid", "+-", "us/packet", "peak MB"):
            table.add_column(name, justify="right")
        for row in mine:
            difference, half = row.get("j_block_less_hybrid"), row.get("j_block_less_hybrid_ci", 0.0)
            table.add_row(
                row["scheme"], f"{row['j_block']:.4f}", f"{row['j_block_ci']:.4f}", f"{row['j_frac']:.4f}",
                f"{row['j_frac_ci']:.4f}", "" if difference is None else f"{difference:+.4f}",
                "" if difference is None else f"{half:.4f}", f"{row['cpu_us']:.2f}",
                "" if row["peak_mb"] is None else f"{row['peak_mb']:.1f}",
            )  # fmt: skip
        console.print(table)


def say_above(rows: list[Row]) -> None:
    """Where another scheme is above hybrid: the 95 % interval of the paired difference lies above 0.002."""
    compared = [row for row in rows if "j_block_less_hybrid" in row]
    above = [row for row in compared if row["j_block_less_hybrid"] - row["j_block_less_hybrid_ci"] > 0.002]
    if compared:
        print(f"hand-offs in which another scheme is certainly above hybrid, by more than 0.002: {len(above)}")
    for row in above:
        print(f"  {row['scheme']} at {cell_title(row)}: {row['j_block_less_hybrid']:+.4f}")
