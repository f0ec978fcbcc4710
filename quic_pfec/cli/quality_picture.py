"""The picture of `evaluate --point quality`: retention as in the paper's figure 2(c), hand-offs, and how the chance of
a block to be complete falls with its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    import matplotlib
except ImportError as error:
    raise ImportError('pictures need matplotlib: pip install "quic-pfec[plot]"') from error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quic_pfec.llm.quality_report import Cell
    from quic_pfec.llm.quality_run import Completion

_LABELS = {
    "random": "random", "fifo": "FIFO", "paper": "paper's profile", "layer": "layer x bin", "request": "per request",
}  # fmt: skip


def draw_quality(
    table: Sequence[Cell], completions: Sequence[Completion], path: Path, title: str, wire_dtype: str = "bf16"
) -> None:
    """Draws all cells and writes a PNG. Hand-offs in other wire dtypes than `wire_dtype` have theirs in the name."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(14, 8))
    for axis, receiver in zip(axes[0], ("zero", "mask"), strict=False):
        _retention(axis, [c for c in table if c.arm == "retention" and c.receiver == receiver])
        axis.set_title(f"agreement by blocks kept, receiver {receiver}", fontsize=10)
    _divergence(axes[0][2], [cell for cell in table if cell.arm == "retention"])
    handoffs = [
        cell if cell.wire in ("", wire_dtype) else replace(cell, name=f"{cell.name}, {cell.wire}")
        for cell in table
        if cell.arm == "handoff"
    ]
    rhos = sorted({cell.share for cell in handoffs})[:2]
    for axis, rho in zip(axes[1], rhos, strict=False):
        _bars(axis, [cell for cell in handoffs if cell.share == rho])
        axis.set_title(f"hand-offs at rho {rho:g}", fontsize=10)
    for axis in axes[1][len(rhos) : 2]:
        axis.axis("off")
    _completion(axes[1][2], completions)
    figure.suptitle(title, fontsize=12)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _retention(axis: Any, cells: Sequence[Cell]) -> None:
    for name in dict.fromkeys(cell.name for cell in cells):
        mine = sorted((cell for cell in cells if cell.name == name), key=lambda cell: cell.share)
        shares = [100 * cell.share for cell in mine]
        axis.plot(shares, [cell.agreement.mean for cell in mine], marker="o", markersize=3, label=_LABELS[name])
        axis.fill_between(
            shares, [cell.agreement.low for cell in mine], [cell.agreement.high for cell in mine], alpha=0.15
        )
    axis.set_xlabel("blocks kept, %")
    axis.set_ylabel("top-1 agreement")
    axis.set_ylim(0, 1.02)
    if cells:
        axis.legend(fontsize=8)


def _divergence(axis: Any, cells: Sequence[Cell]) -> None:
    for receiver, style in (("zero", "--"), ("mask", "-")):
        for place, name in enumerate(_LABELS):
            mine = sorted(
                (c for c in cells if c.name == name and c.receiver == receiver and c.share < 1), key=lambda c: c.share
            )
            shares = [100 * cell.share for cell in mine]
            means = [max(cell.kl.mean, 1e-5) for cell in mine]
            label = _LABELS[name] if receiver == "mask" else None
            axis.plot(shares, means, style, marker="o", markersize=3, color=f"C{place}", label=label)
    axis.set_yscale("log")
    axis.set_xlabel("blocks kept, %")
    axis.set_ylabel("KL divergence, nats")
    axis.set_title("solid: mask, dashed: zero", fontsize=10)
    if cells:
        axis.legend(fontsize=8)


def _bars(axis: Any, cells: Sequence[Cell]) -> None:
    names = list(dict.fromkeys(cell.name for cell in cells))
    for shift, receiver, colour in ((-0.2, "zero", "#f0b357"), (0.2, "mask", "#1f4e79")):
        mine = {cell.name: cell.agreement for cell in cells if cell.receiver == receiver}
        if not mine:
            continue
        means = [mine[name].mean for name in names]
        spread = [
            [mine[name].mean - mine[name].low for name in names],
            [mine[name].high - mine[name].mean for name in names],
        ]
        places = [place + shift for place in range(len(names))]
        axis.barh(places, means, 0.38, xerr=spread, color=colour, label=receiver, capsize=2)
    axis.set_yticks(range(len(names)), [name.replace("_", " ") for name in names], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.02)
    axis.set_xlabel("top-1 agreement")
    axis.legend(fontsize=8, loc="lower left")


def _completion(axis: Any, completions: Sequence[Completion]) -> None:
    lowest = min((one.rho for one in completions), default=0.0)
    for one in completions:
        if one.rho == lowest:
            parts = len(one.probability)
            axis.plot([(place + 0.5) / parts for place in range(parts)], one.probability, label=one.policy)
    axis.set_xlabel("place in the order of sending")
    axis.set_ylabel("probability of being complete")
    axis.set_ylim(0, 1.02)
    axis.set_title(f"by place in the order, rho {lowest:g}", fontsize=10)
    if completions:
        axis.legend(fontsize=8)
