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
_TICKS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)  # of utility, on an axis that is stretched towards 1
_LEGEND_INCHES = 1.9
_MARKS = ("-", "--", "-.")  # of a policy's variants in the order of utility; FIFO is dotted


def draw_points(rows: Sequence[Row], path: Path) -> None:
    """Draws the rows of one point and writes a PNG."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    point = rows[0]["point"]
    if point in ("paper", "5g"):
        figure, axes = plt.subplots(2, 2, figsize=(15, 11))
        _bars(axes[0], rows)
        _budgets(axes[1], rows)
        _legend(figure, axes[1][0])
    else:
        groups = _groups(rows, "model", "channel") if point != "context" else [("J_block by tokens", list(rows))]
        height, width = (len(groups) + 3) // 4, min(4, len(groups))
        size = (4.6 * width + _LEGEND_INCHES, 4 * height)
        figure, grid = plt.subplots(height, width, figsize=size, squeeze=False)
        for axis, (title, mine) in zip(grid.flat, groups, strict=False):
            _lines(axis, mine, "tokens" if point == "context" else "t_rtt")
            axis.set_title(title, fontsize=9)
        for axis in list(grid.flat)[len(groups) :]:
            axis.axis("off")
        _legend(figure, grid.flat[0])
    figure.suptitle(f"point {point}, {rows[0]['seeds']} seeds, 95 % intervals", fontsize=12)
    figure.tight_layout(rect=(0, 0, 1 - _LEGEND_INCHES / figure.get_figwidth(), 0.97))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _groups(rows: Sequence[Row], *names: str) -> list[tuple[str, list[Row]]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(", ".join(str(row[name]) for name in names), []).append(row)
    return list(found.items())


def _schemes(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["scheme"] for row in rows))


def _styles(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """A colour a policy, a line a variant of it, the default wide."""
    policies = list(dict.fromkeys(scheme.split("@")[0] for scheme in _schemes(rows)))
    colours = matplotlib.colormaps["tab10" if len(policies) <= 10 else "tab20"]
    styles: dict[str, dict[str, Any]] = {}
    variants: dict[str, int] = {}
    for scheme in _schemes(rows):
        policy = scheme.split("@")[0]
        line = ":"
        if not scheme.endswith("@fifo"):
            line = _MARKS[min(variants.get(policy, 0), len(_MARKS) - 1)]
            variants[policy] = variants.get(policy, 0) + 1
        wide = 2.6 if scheme == "hybrid" else 1.2
        styles[scheme] = {"color": colours(policies.index(policy)), "linestyle": line, "linewidth": wide}
    return styles


def _legend(figure: Any, axis: Any) -> None:
    """One for all panels, beside them."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="center right", fontsize=8, frameon=False)


def _stretch(axis: Any, values: Sequence[float]) -> float:
    """Utility as a share, with room where it comes near 1; returns the lower end of the axis."""
    low = min(values)
    foot = max(0.05, 0.95 * low)
    axis.set_yscale("logit")
    axis.set_yticks([tick for tick in _TICKS if tick >= 0.8 * low], [f"{t:g}" for t in _TICKS if t >= 0.8 * low])
    axis.set_yticks([], minor=True)
    axis.set_ylim(foot, 0.9995)
    axis.grid(axis="y", linewidth=0.3)
    return foot


def _below_one(value: float) -> float:
    return min(value, 0.9994)


def _bars(axes: Any, rows: Sequence[Row]) -> None:
    """The paper's figure 5: schemes side by side at each rho, at the budget of 3 %, for both measures."""
    for axis, measure in zip(axes, ("j_block", "j_frac"), strict=True):
        mine = [row for row in rows if row["model"] == rows[0]["model"] and row["budget"] == 0.03]
        rhos = sorted({row["rho"] for row in mine})
        schemes = _schemes(mine)
        foot = _stretch(axis, [row[measure] - row[f"{measure}_ci"] for row in mine])
        for index, rho in enumerate(rhos):
            at = {row["scheme"]: row for row in mine if row["rho"] == rho}
            places = [place + 0.4 * index - 0.2 for place in range(len(schemes))]
            heights = [_below_one(at[scheme][measure]) for scheme in schemes]
            errors = [at[scheme][f"{measure}_ci"] for scheme in schemes]
            above = [height - foot for height in heights]
            bars = axis.bar(places, above, 0.38, bottom=foot, yerr=errors, capsize=2, label=f"rho {rho:g}")
            bound = at[schemes[0]][f"oracle_{measure}"]
            axis.axhline(bound, color=bars[0].get_facecolor(), linestyle="--", linewidth=0.8)
        axis.set_xticks(range(len(schemes)), schemes, rotation=60, ha="right", fontsize=7)
        axis.set_ylabel(measure)
        axis.set_title(f"{rows[0]['model']}, budget 3 %, dashed: bound", fontsize=9, loc="right")
        axis.legend(fontsize=8, loc="lower left", ncols=2, bbox_to_anchor=(-0.01, 0.98), frameon=False)


def _budgets(axes: Any, rows: Sequence[Row]) -> None:
    """The paper's figure 7: utility over the budget, at the smaller rho."""
    styles = _styles(rows)
    for axis, measure in zip(axes, ("j_block", "j_frac"), strict=True):
        mine = [row for row in rows if row["model"] == rows[0]["model"] and row["rho"] == min(r["rho"] for r in rows)]
        for scheme in _schemes(mine):
            line = sorted((row for row in mine if row["scheme"] == scheme), key=_budget)
            values = [_below_one(row[measure]) for row in line]
            axis.plot([_budget(row) for row in line], values, marker="o", markersize=3, label=scheme, **styles[scheme])
        ticks = sorted({_budget(row) for row in mine})
        axis.set_xticks(ticks, ["no limit" if tick == _UNLIMITED else f"{100 * tick:g} %" for tick in ticks])
        axis.set_xlabel("repair budget, share of the packets")
        _stretch(axis, [row[measure] for row in mine])
        axis.set_ylabel(measure)
        axis.set_title(f"{rows[0]['model']}, rho {mine[0]['rho']:g}", fontsize=9)


def _budget(row: Row) -> float:
    return _UNLIMITED if row["budget"] is None else float(row["budget"])


def _lines(axis: Any, rows: Sequence[Row], name: str) -> None:
    styles = _styles(rows)
    for scheme in _schemes(rows):
        line = sorted((row for row in rows if row["scheme"] == scheme), key=lambda row: row[name])
        values, errors = [row["j_block"] for row in line], [row["j_block_ci"] for row in line]
        style = {"marker": "o", "markersize": 3} | styles[scheme]
        axis.errorbar([row[name] for row in line], values, errors, capsize=2, label=scheme, **style)
    bound = {row[name]: row["oracle_j_block"] for row in rows}
    axis.plot(sorted(bound), [bound[at] for at in sorted(bound)], color="#999999", linestyle="--", label="bound")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(bound), [f"{at:g}" for at in sorted(bound)], fontsize=7)
    axis.set_xlabel("tokens" if name == "tokens" else "T/RTT")
    axis.set_ylabel("J_block")
