"""Pictures of a cache, layers by position: which blocks came in the demo, and what a profile says of each part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

try:
    import matplotlib
except ImportError as error:
    raise ImportError('pictures need matplotlib: pip install "quic-pfec[plot]"') from error


def draw_blocks(panels: list[tuple[str, NDArray[np.float64]]], path: Path, title: str) -> None:
    """Draws each panel (caption, share present as float64 [layers, columns]) and writes a PNG."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import LinearSegmentedColormap

    # Missing, partial and complete must stay apart for colour-blind eyes and in grey print.
    colours = LinearSegmentedColormap.from_list("blocks", ["#f2f0eb", "#f0b357", "#1f4e79"])
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 4.4), sharey=True, squeeze=False)
    for axis, (caption, share) in zip(axes[0], panels, strict=True):
        axis.imshow(share, aspect="auto", cmap=colours, vmin=0.0, vmax=1.0, interpolation="nearest", origin="lower")
        axis.set_title(caption, fontsize=10)
        axis.set_xlabel("block of 16 tokens")
    axes[0][0].set_ylabel("layer")
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=colours(value), edgecolor="#888888") for value in (0.0, 0.5, 1.0)]
    figure.suptitle(title, fontsize=12)
    figure.legend(handles, ["missing", "partial", "complete"], loc="lower center", ncol=3, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 0.97))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_profile(table: NDArray[np.float64], path: Path, title: str, *, grouped: bool = False) -> None:
    """Draws a profile and its two marginals, as the paper's figure 2(a, b) does, and writes a PNG.

    `table`: float64 [layers or groups, bins]; colours are logarithmic, as few cells hold most of it.
    """
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    largest = float(table.max())
    what = "layer group" if grouped else "layer"
    figure, (axis, by_row, by_bin) = plt.subplots(1, 3, figsize=(13.0, 4.4))
    image = axis.imshow(
        np.maximum(table, largest / 1e4), aspect="auto", cmap="cividis", norm=LogNorm(largest / 1e4, largest),
        interpolation="nearest", origin="lower",
    )  # fmt: skip
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("position bin")
    axis.set_ylabel(what)
    figure.colorbar(image, ax=axis, label="KL divergence without it, nats")
    for side, values, label in ((by_row, table.mean(axis=1), what), (by_bin, table.mean(axis=0), "position bin")):
        side.bar(np.arange(len(values)), values, color="#1f4e79")
        side.xaxis.set_major_locator(MaxNLocator(integer=True))
        side.set_xlabel(label)
        side.set_ylabel("mean KL divergence, nats")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
