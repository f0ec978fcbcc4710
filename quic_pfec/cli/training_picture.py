"""The picture of a training run: its loss, and what the greedy policy reached on validation seeds."""

from __future__ import annotations

from pathlib import Path

try:
    import matplotlib
except ImportError as error:
    raise ImportError('pictures need matplotlib: pip install "quic-pfec[plot]"') from error


def draw_curve(curve: list[dict[str, float]], path: Path, title: str) -> None:
    """Draws the rows of a curve over the updates and writes a PNG."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    measures = [name for name in ("j_block", "j_frac") if name in curve[0]]
    figure, axes = plt.subplots(1, 2 if measures else 1, figsize=(11 if measures else 6, 4), squeeze=False)
    updates = [row["updates"] for row in curve]
    axes[0][0].plot(updates, [row["loss"] for row in curve], color="#777777")
    axes[0][0].set_ylabel("loss, moving average")
    for name in measures:
        axes[0][1].plot(updates, [row[name] for row in curve], marker="o", markersize=3, label=name)
    if measures:
        axes[0][1].set_ylabel("mean over validation hand-offs")
        axes[0][1].legend()
    for axis in axes[0]:
        axis.set_xlabel("updates")
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
