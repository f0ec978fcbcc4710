"""`quic-pfec train`: the learned policies, from hand-offs at random to weights that can be shipped.

`ddqn` is the paper's learner (arXiv 2610.21390), `override` the net that may correct `hybrid`. Both say what came out
on a frozen grid beside the rules on the same losses. docs/training.md has the commands of the weights that ship.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quic_pfec.cli.output import check_outputs, fail, need_extra
from quic_pfec.cli.progress import progress_on_stderr

if TYPE_CHECKING:
    from quic_pfec.schedule.network import Network

train_app = typer.Typer(no_args_is_help=True, help="Learn policies in the simulator; writes weights (.npz).")

HEURISTICS = ("deficit", "epoch", "arq")

Seed = Annotated[int, typer.Option(min=0, help="Of everything: the same seed gives the same weights on a machine.")]
Distribution = Annotated[str, typer.Option(help="Hand-offs to learn from: paper (its ranges) or wide.")]
Weights = Annotated[Path, typer.Option(help="Where the network goes, .npz; its name says which policy it is.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write settings, learning curve and figures here.")]
Picture = Annotated[Path | None, typer.Option(help="Draw the learning curve (PNG).")]
GridSeeds = Annotated[int, typer.Option(min=0, help="Hand-offs in each cell of the frozen grid; 0 = leave it out.")]


@train_app.command(
    "ddqn",
    epilog="Examples:\n\nquic-pfec train ddqn --weights ddqn-paper.npz --picture curve.png --checkpoint run.npz\n\n"
    "quic-pfec train ddqn --weights ddqn-paper.npz --resume run.npz",
)
def ddqn_command(
    weights: Weights,
    seed: Seed = 0,
    distribution: Distribution = "paper",
    transitions: Annotated[int, typer.Option(min=100, help="Decisions in all, the heuristic's included.")] = 321_032,
    pretraining: Annotated[
        int, typer.Option(min=1, help="Of them the heuristic's, with which the replay begins.")
    ] = 56_232,
    episodes: Annotated[
        int | None, typer.Option(min=1, help="End after so many hand-offs, if that comes before the transitions do.")
    ] = None,
    heuristic: Annotated[str, typer.Option(help="Whose decisions the replay begins with: deficit, epoch or arq.")] = (
        "deficit"
    ),
    returns: Annotated[
        int,
        typer.Option(min=0, help="Updates on the returns of the heuristic's decisions before any of the learner's."),
    ] = 5_000,
    window: Annotated[str, typer.Option(help="What repairs are over: full (the paper's) or sack.")] = "full",
    resend: Annotated[bool, typer.Option(help="Is a resend among the choices? Not in the paper.")] = False,
    learning_rate: Annotated[float, typer.Option(min=0, help="Of Adam.")] = 1e-4,
    decay: Annotated[float, typer.Option(min=0, max=1, help="Share of the learning rate that is left at the end.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Transitions an update.")] = 128,
    reward_scale: Annotated[float, typer.Option(min=0, help="What rewards are multiplied by.")] = 10.0,
    choose: Annotated[
        int, typer.Option(min=0, help="How often it is measured on validation seeds; the best net is kept. 0 = last.")
    ] = 30,
    checkpoint: Annotated[Path | None, typer.Option(help="Write the run here at each measurement.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run of this checkpoint; its settings count, not those given.")
    ] = None,
    json_path: Json = None,
    picture: Picture = None,
    grid_seeds: GridSeeds = 8,
) -> None:
    """The paper's Double DQN, its hyper-parameters by default: minutes on one core.

    Then J on a frozen grid with 95 % intervals, beside none, fixed, epoch, deficit, arq and hybrid on the same losses.
    """
    if distribution not in ("paper", "wide") or heuristic not in HEURISTICS or window not in ("full", "sack"):
        fail("--distribution is paper or wide, --heuristic deficit, epoch or arq, --window full or sack")
    if pretraining >= transitions:
        fail("--pretraining is less than --transitions")
    check_outputs(weights, checkpoint, json_path, picture)
    begun_s = time.monotonic()
    with need_extra():
        from quic_pfec.train.ddqn import Args, Learner, load_checkpoint, train

        if picture is not None:
            from quic_pfec.cli.training_picture import draw_curve
    try:
        if resume is not None:
            learner = load_checkpoint(resume)
        else:
            learner = Learner(
                Args(
                    seed=seed, distribution=distribution, window=window,  # type: ignore[arg-type]
                    transitions=transitions, pretraining=pretraining, episodes=episodes, heuristic=heuristic,
                    returns=returns, resend=resend, learning_rate=learning_rate, decay=decay, batch=batch,
                    reward_scale=reward_scale, choose=choose,
                )
            )  # fmt: skip
        with progress_on_stderr() as step:

            def progress(now: Learner) -> None:
                step("learning, per mille", int(1000 * now.share), 1000)

            result = train(
                learner, name=weights.stem, command=_command(), checkpoint=checkpoint or resume, progress=progress
            )
        _save(result.network, weights)
    except (ValueError, OSError) as error:
        fail(str(error))
    args = asdict(learner.args)
    print(
        f"{learner.transitions:,} transitions, {learner.updates:,} updates, {learner.episodes} hand-offs, "
        f"{time.monotonic() - begun_s:.0f} s; J_block on validation seeds {learner.best_score:.4f}"
    )
    _report(result.network, result.curve, args, grid_seeds, json_path, begun_s)
    if picture is not None:
        draw_curve(
            result.curve, picture, f"{weights.stem}, distribution {learner.args.distribution}, seed {args['seed']}"
        )
        print(f"picture: {picture}")


@train_app.command(
    "override",
    epilog="Example:\n\nquic-pfec train override --weights hybrid-override.npz --json override.json",
)
def override_command(
    weights: Weights,
    seed: Seed = 0,
    distribution: Distribution = "wide",
    states: Annotated[int, typer.Option(min=10, help="Decisions that are tried out.")] = 80_000,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the regression.")] = 5_000,
    resend: Annotated[bool, typer.Option(help="Is a resend among the choices?")] = True,
    validation: Annotated[int, typer.Option(min=2, help="Hand-offs that the margin is chosen on.")] = 400,
    gate_seeds: Annotated[
        int, typer.Option(min=0, help="Hand-offs in each cell of the gate; 0 = not judged, which is not to act.")
    ] = 24,
    json_path: Json = None,
    picture: Picture = None,
    grid_seeds: GridSeeds = 8,
) -> None:
    """A net that may override `hybrid` where it expects to gain more than a margin.

    The margin is chosen on validation seeds. The gate then compares with the rule alone in cells that were never
    trained on; unless something is won for certain and nothing lost, the weights say: never act.
    """
    if distribution not in ("paper", "wide"):
        fail("--distribution is paper or wide")
    check_outputs(weights, json_path, picture)
    begun_s = time.monotonic()
    with need_extra():
        from quic_pfec.train import override

        if picture is not None:
            from quic_pfec.cli.training_picture import draw_curve
    try:
        args = override.Args(
            seed=seed, distribution=distribution, states=states, steps=steps,  # type: ignore[arg-type]
            resend=resend, validation=validation,
        )  # fmt: skip
        with progress_on_stderr() as step:
            labels = override.collect(args, partial(step, "trying choices"))
            network, curve = override.fit(args, labels, partial(step, "regression"))
            margin, tried = override.choose_margin(network, args, partial(step, "margin"))
        for one in tried:
            print(f"{one.label}: {one.gain:+.5f} +- {one.half:.5f} at {one.base:.4f}, acted {one.acted} times")
        judged: list[override.Gain] = []
        if margin is not None and gate_seeds:
            with progress_on_stderr() as step:
                judged = override.judge_cells(
                    replace(network, margin=margin), override.gate_cells(), gate_seeds, partial(step, "gate")
                )
        passed = bool(judged) and override.passes(judged)
        network = replace(
            network, name=weights.stem, command=_command(), margin=margin if passed else None,
            cells=[[one.label, round(one.base, 5), round(one.gain, 5), round(one.half, 5)] for one in judged],
            settings=network.settings | {"chosen_margin": margin, "passed": passed},
        )  # fmt: skip
        _save(network, weights)
    except (ValueError, OSError) as error:
        fail(str(error))
    for one in judged:
        print(f"{one.label}: {one.gain:+.5f} +- {one.half:.5f} at {one.base:.4f}, acted {one.acted} times")
    print(f"gate {'passed' if passed else 'not passed'}: margin {network.margin} (chosen {margin})")
    more = {"margins": [one.as_dict() for one in tried], "cells": [one.as_dict() for one in judged], "passed": passed}
    _report(network, curve, asdict(args), grid_seeds, json_path, begun_s, more)
    if picture is not None:
        draw_curve(curve, picture, f"{weights.stem}, distribution {distribution}, seed {seed}")
        print(f"picture: {picture}")


def _command() -> str:
    return " ".join(["quic-pfec", *sys.argv[1:]])


def _save(network: Network, path: Path) -> None:
    from quic_pfec.schedule.network import save_network

    path.parent.mkdir(parents=True, exist_ok=True)
    save_network(network, path)
    print(f"weights: {path}")


def _report(
    network: Network,
    curve: list[dict[str, float]],
    args: dict[str, Any],
    seeds: int,
    json_path: Path | None,
    begun_s: float,
    more: dict[str, Any] | None = None,
) -> None:
    from quic_pfec.train.judge import compare_grid

    rows = []
    if seeds:
        with progress_on_stderr() as step:
            rows = compare_grid(network, seeds, partial(step, "grid"))
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"{seeds} hand-offs a cell, 95 % intervals", title_justify="left")
        for name in ("cell", "policy", "J_block", "+-", "J_frac", "+-"):
            table.add_column(name, justify="left" if name in ("cell", "policy") else "right")
        said = ""
        for row in rows:
            figures = (row.j_block, row.j_block_ci, row.j_frac, row.j_frac_ci)
            table.add_row("" if row.cell == said else row.cell, row.policy, *(f"{value:.4f}" for value in figures))
            said = row.cell
        Console(width=None if sys.stdout.isatty() else 130).print(table)
    if json_path is not None:
        values = {
            "command": _command(), "settings": args, "versions": network.versions, "margin": network.margin,
            "curve": curve, "grid": [asdict(row) for row in rows], "wall_s": time.monotonic() - begun_s,
        } | (more or {})  # fmt: skip
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(values, indent=1) + "\n")
        print(f"figures: {json_path}")
