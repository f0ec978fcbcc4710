"""Every policy on the slot clock, paired losses, beside the bound: `python -m bench.episodes --json F --picture F`.

What runs is the shipped sender and receiver (`quic_pfec.sim.episode`). Points: short = T/RTT of 0.5 to 8 on the paper's
channel, 100 Mbit/s, RTT 20 ms, 24-packet blocks, rho 0.8; paper = the geometry of Qwen2.5-7B (64,512 packets), rho 0.8.
The rate, the ratios and the policies may be others.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from quic_pfec.fec.codec import isa
from quic_pfec.kv.profile import synthetic_utility
from quic_pfec.schedule.policies import POLICY_NAMES
from quic_pfec.sim.channel import PRESETS, GilbertElliottChannel, losses
from quic_pfec.sim.episode import EpisodeResult, Settings, run_episode

RTT_S = 0.020
SLOT_S = 112e-6  # a packet at 100 Mbit/s
PACKETS = 24
RHO = 0.8
SHORT = (0.5, 1.0, 2.0, 4.0, 8.0)


def geometry(blocks: int) -> tuple[int, int]:
    """Layers and token chunks of about `blocks` blocks."""
    layers = max(1, round(blocks**0.5))
    return layers, max(1, round(blocks / layers))


def episode(
    scheduler: str, slots: int, shape: tuple[int, int], share: float, channel: str, seed: int, slot_s: float = SLOT_S
) -> EpisodeResult:
    """One hand-off in utility order over the losses of `seed`."""
    utility: NDArray[np.float64] = np.sort(synthetic_utility(shape, share, seed))[::-1].copy()
    packets = np.full(len(utility), PACKETS, dtype=np.int64)
    drawn = losses(GilbertElliottChannel(PRESETS[channel], seed), slots)
    return run_episode(packets, utility, drawn, Settings(slots, round(RTT_S / slot_s), slot_s, scheduler, seed=seed))


def interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and half width of its 95 % confidence interval (normal)."""
    return float(values.mean()), float(1.96 * values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def measure(
    point: str,
    channel: str,
    seeds: int,
    slot_s: float = SLOT_S,
    ratios: Sequence[float] = SHORT,
    schedulers: Sequence[str] = POLICY_NAMES,
) -> list[dict[str, Any]]:
    """One row for each policy and T/RTT."""
    rtt_slots = round(RTT_S / slot_s)
    if point == "paper":
        cells = [("288", int(RHO * 28 * 96 * PACKETS), (28, 96), 0.99)]
    else:
        cells = [
            (f"{ratio:g}", int(ratio * rtt_slots), geometry(round(ratio * rtt_slots / RHO / PACKETS)), 0.93)
            for ratio in ratios
        ]
    rows = []
    for name, scheduler in track([(cell, policy) for cell in cells for policy in schedulers], "episodes"):
        ratio, slots, shape, share = name
        started_s = time.perf_counter()
        results = [episode(scheduler, slots, shape, share, channel, seed, slot_s) for seed in range(seeds)]
        elapsed_s = time.perf_counter() - started_s
        block, block_ci = interval(np.array([result.j_block for result in results]))
        frac, frac_ci = interval(np.array([result.j_frac for result in results]))
        rows.append(
            {
                "t_over_rtt": ratio,
                "scheduler": scheduler,
                "j_block": block,
                "j_block_ci95": block_ci,
                "j_frac": frac,
                "j_frac_ci95": frac_ci,
                "bound_j_block": float(np.mean([result.bound.j_block for result in results])),
                "bound_j_frac": float(np.mean([result.bound.j_frac for result in results])),
                "recovered": float(np.mean([result.receiver.recovered for result in results])),
                "wrong_symbols": sum(result.wrong_symbols for result in results),
                "slots_per_s": slots * seeds / elapsed_s,
            }
        )
    return rows


def draw(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """J_block over T/RTT, a line a policy, the bound in grey."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.5))
    ratios = sorted({float(row["t_over_rtt"]) for row in rows})
    for scheduler in dict.fromkeys(str(row["scheduler"]) for row in rows):
        mine = [row for row in rows if row["scheduler"] == scheduler]
        axis.errorbar(
            [float(row["t_over_rtt"]) for row in mine],
            [row["j_block"] for row in mine],
            [row["j_block_ci95"] for row in mine],
            label=scheduler,
            marker="o",
            linewidth=2.4 if scheduler == "hybrid" else 1.2,
            capsize=2,
        )
    bound = {float(row["t_over_rtt"]): row["bound_j_block"] for row in rows}
    axis.plot(ratios, [bound[ratio] for ratio in ratios], color="#999999", linestyle="--", label="bound")
    axis.set_xscale("log", base=2)
    axis.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
    axis.set_xlabel("time to the deadline in round trips, T/RTT")
    axis.set_ylabel("J_block")
    axis.set_title(title, fontsize=10)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--point", choices=("short", "paper"), default="short")
    parser.add_argument("--channel", choices=sorted(PRESETS), default="paper")
    parser.add_argument("--seeds", type=int, default=40, help="paired loss realisations (default 40)")
    parser.add_argument("--rate-mbps", type=float, default=100.0, help="of the link (default 100)")
    parser.add_argument("--ratios", type=float, nargs="+", default=SHORT, help="T/RTT of the short point")
    parser.add_argument("--schedulers", nargs="+", choices=POLICY_NAMES, default=POLICY_NAMES)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--picture", type=Path, help="write a PNG here")
    options = parser.parse_args()
    slot_s = SLOT_S * 100 / options.rate_mbps
    rows = measure(options.point, options.channel, options.seeds, slot_s, options.ratios, options.schedulers)
    print(f"{'T/RTT':>6} {'policy':<14} {'J_block':>8} {'+-':>6} {'J_frac':>7} {'bound':>7} {'slots/s':>8}")
    for row in rows:
        print(
            f"{row['t_over_rtt']:>6} {row['scheduler']:<14} {row['j_block']:>8.3f} {row['j_block_ci95']:>6.3f}"
            f" {row['j_frac']:>7.3f} {row['bound_j_block']:>7.3f} {row['slots_per_s']:>8.0f}"
        )
    if options.json is not None:
        settings = {
            "command": " ".join(sys.argv),
            "seeds": options.seeds,
            "channel": options.channel,
            "isa": isa(),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("quic-pfec", "numpy")},
        }
        options.json.write_text(json.dumps({"rows": rows, "settings": settings}, indent=1) + "\n")
    if options.picture is not None:
        draw(
            rows,
            options.picture,
            f"{options.channel} channel, {options.rate_mbps:g} Mbit/s, RTT 20 ms, rho {RHO}, {options.seeds} seeds",
        )


if __name__ == "__main__":
    main()
