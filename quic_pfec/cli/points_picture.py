"""The picture of a simulated point: recovered utility by scheme and over the budget, in the shape of the paper's
figures 5 and 7, or over the deadline where that is what varies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import matplotlib
except ImportError as error:
    raise ImportError('pictures need matplotlib: pip install "quic-pfec[plot]"') from error

Row = dict[str, Any]

_UNLIMITED = 0.2  # where no limit stands on the axis of budgets


def draw_points(rows: Sequence[Row], path: Path) -> None:
    """Draws the rows of one point and writes a PNG."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    point = rows[0]["point"]
    if point in ("paper", "5g"):
        figure, axes = plt.subplots(2, 2, figsize=(15, 10))
        _bars(axes[0], rows)
        _budgets(axes[1], rows)
    else:
        groups = _groups(rows, "model", "channel") if point != "context" else [("J_block by tokens", list(rows))]
        height = (len(groups) + 3) // 4
        figure, grid = plt.subplots(
            height, min(4, len(groups)), figsize=(4.6 * min(4, len(groups)), 4 * height), squeeze=False
        )
        for axis, (title, mine) in zip(grid.flat, groups, strict=False):
            _lines(axis, mine, "tokens" if point == "context" else "t_rtt")
            axis.set_title(title, fontsize=9)
        for axis in list(grid.flat)[len(groups) :]:
            axis.axis("off")
        grid.flat[0].legend(fontsize=6, ncols=2)
    figure.suptitle(f"point {point}, {rows[0]['seeds']} seeds, 95 % intervals", fontsize=12)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _groups(rows: Sequence[Row], *names: str) -> list[tuple[str, list[Row]]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(", ".join(str(row[name]) for name in names), []).append(row)
    return list(found.items())


def _schemes(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["scheme"] for row in rows))


def _style(scheme: str) -> dict[str, Any]:
    return {"linewidth": 2.4 if scheme == "hybrid" else 1.0, "linestyle": ":" if scheme.endswith("@fifo") else "-"}


def _bars(axes: Any, rows: Sequence[Row]) -> None:
    """The paper's figure 5: schemes side by side at each rho, at the budget of 3 %, for both measures."""
    for axis, measure in zip(axes, ("j_block", "j_frac"), strict=True):
        mine = [row for row in rows if row["model"] == rows[0]["model"] and row["budget"] == 0.03]
        rhos = sorted({row["rho"] for row in mine})
        schemes = _schemes(mine)
        for index, rho in enumerate(rhos):
            at = {row["scheme"]: row for row in mine if row["rho"] == rho}
            places = [place + 0.4 * index - 0.2 for place in range(len(schemes))]
            heights = [at[scheme][measure] for scheme in schemes]
            errors = [at[scheme][f"{measure}_ci"] for scheme in schemes]
            bars = axis.bar(places, heights, 0.38, yerr=errors, capsize=2, label=f"rho {rho:g}")
            bound = at[schemes[0]][f"oracle_{measure}"]
            axis.axhline(bound, color=bars[0].get_facecolor(), linestyle="--", linewidth=0.8)
        axis.set_xticks(range(len(schemes)), schemes, rotation=60, ha="right", fontsize=7)
        axis.set_ylim(0.3, 1.01)
        axis.set_ylabel(measure)
        axis.set_title(f"{rows[0]['model']}, budget 3 %, dashed: bound", fontsize=9)
        axis.legend(fontsize=8)


def _budgets(axes: Any, rows: Sequence[Row]) -> None:
    """The paper's figure 7: utility over the budget, at the smaller rho."""
    for axis, measure in zip(axes, ("j_block", "j_frac"), strict=True):
        mine = [row for row in rows if row["model"] == rows[0]["model"] and row["rho"] == min(r["rho"] for r in rows)]
        for scheme in _schemes(mine):
            line = sorted((row for row in mine if row["scheme"] == scheme), key=_budget)
            axis.plot([_budget(row) for row in line], [row[measure] for row in line], marker="o", markersize=3,
                      label=scheme, **_style(scheme))  # fmt: skip
        ticks = sorted({_budget(row) for row in mine})
        axis.set_xticks(ticks, ["no limit" if tick == _UNLIMITED else f"{100 * tick:g} %" for tick in ticks])
        axis.set_xlabel("repair budget, share of the packets")
        axis.set_ylabel(measure)
        axis.set_title(f"{rows[0]['model']}, rho {mine[0]['rho']:g}", fontsize=9)
        axis.legend(fontsize=6, ncols=2)


def _budget(row: Row) -> float:
    return _UNLIMITED if row["budget"] is None else float(row["budget"])


def _lines(axis: Any, rows: Sequence[Row], name: str) -> None:
    for scheme in _schemes(rows):
        line = sorted((row for row in rows if row["scheme"] == scheme), key=lambda row: row[name])
        values, errors = [row["j_block"] for row in line], [row["j_block_ci"] for row in line]
        style = {"marker": "o", "markersize": 3} | _style(scheme)
        axis.errorbar([row[name] for row in line], values, errors, capsize=2, label=scheme, **style)
    bound = {row[name]: row["oracle_j_block"] for row in rows}
    axis.plot(sorted(bound), [bound[at] for at in sorted(bound)], color="#999999", linestyle="--", label="bound")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(bound), [f"{at:g}" for at in sorted(bound)], fontsize=7)
    axis.set_xlabel("tokens" if name == "tokens" else "T/RTT")
    axis.set_ylabel("J_block")
