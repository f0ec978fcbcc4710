"""What the congestion controllers do to a link and to others on it: `python -m bench.sharing --json F --picture F`.

All in virtual time (`bench.flows`): a 20 Mbit/s link, 20 ms round trip, tail drop at one bandwidth-delay product,
aioquic's `cubic` in the place of TCP. Three tables: alone on a lossy link, beside another flow, and through changes of
the path. Seeds vary the losses and the times between BBR's probes. A cell of a table is a function of this module, so
the tests assert on what the table prints.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.flows import Bottleneck, Flow, jain
from quic_pfec.quic.bbr import DRAFT_LOSS_THRESHOLD, LOSSY_LOSS_THRESHOLD
from quic_pfec.sim.channel import PRESETS, ChannelFactory, GilbertElliott, channel_factory

RATE_BPS = 20e6
RTT_S = 0.020
BDP_BYTES = round(RATE_BPS * RTT_S / 8)

ALONE = ("rate:20e6", "bbr-lossy", "bbr", "cubic")
PAIRS = (
    ("cubic", "cubic"),
    ("cubic", "bbr"),
    ("bbr", "cubic"),
    ("cubic", "bbr-lossy"),
    ("bbr-lossy", "cubic"),
    ("cubic", "rate:20e6"),
    ("rate:20e6", "cubic"),
    ("cubic", "rate:60e6"),
    ("bbr", "rate:20e6"),
    ("rate:20e6", "bbr"),
    ("bbr", "bbr"),
    ("bbr-lossy", "bbr-lossy"),
    ("rate:20e6", "rate:20e6"),
    ("rate:60e6", "rate:60e6"),
)
CHANGES = ("halved", "blackhole", "longer")


def iid(loss: float, seed: int) -> ChannelFactory | None:
    """Independent losses; None for a link that loses nothing."""
    return channel_factory(GilbertElliott(loss, loss, 0.5, 0.5), seed) if loss else None


def channel(name: str, seed: int) -> ChannelFactory | None:
    """A preset of `sim.channel`, or a probability of independent loss."""
    return channel_factory(PRESETS[name], seed) if name in PRESETS else iid(float(name), seed)


def alone(
    control: str, loss: str, seed: int = 1, *, duration_s: float = 5.0, queue_bytes: int = BDP_BYTES
) -> Bottleneck:
    """One flow on a link that loses packets."""
    link = Bottleneck(
        [Flow(control, seed=seed)], rate_bps=RATE_BPS, rtt_s=RTT_S, queue_bytes=queue_bytes, channel=channel(loss, seed)
    )
    return link.run(duration_s)


@dataclass(frozen=True, slots=True)
class Sharing:
    """Two flows on one link: the share of each, Jain's index, and the delay of the queue in seconds."""

    first: str
    second: str
    shares: tuple[float, float]
    jain: float
    queue_mean_s: float
    queue_p95_s: float
    link: Bottleneck


def beside(
    first: str,
    second: str,
    seed: int = 1,
    *,
    lead_s: float = 5.0,
    settle_s: float = 7.0,
    measure_s: float = 10.0,
    queue_bytes: int = BDP_BYTES,
) -> Sharing:
    """`second` starts `lead_s` after `first`; measured from `settle_s` later."""
    flows = [Flow(first, seed=seed), Flow(second, start_s=lead_s, seed=seed + 100)]
    start_s = lead_s + settle_s
    link = Bottleneck(flows, rate_bps=RATE_BPS, rtt_s=RTT_S, queue_bytes=queue_bytes).run(start_s + measure_s)
    one, other = link.shares(start_s, start_s + measure_s)
    mean_s, p95_s = link.queue_delay(start_s, start_s + measure_s)
    return Sharing(first, second, (one, other), jain([one, other]), mean_s, p95_s, link)


def through(change: str, control: str, loss: str, seed: int = 1) -> Bottleneck:
    """One flow through a change of the path.

    halved: half the rate from 2 to 5 s, measured to 9 s. blackhole: nothing from 2 to 3 s, to 7 s. longer: 60 ms from
    2 s on, to 12 s.
    """
    queue = 3 * BDP_BYTES if change == "longer" else BDP_BYTES
    link = alone(control, loss, seed, duration_s=2.0, queue_bytes=queue)
    if change == "halved":
        link.change(rate_bps=RATE_BPS / 2)
        link.run(5.0)
        link.change(rate_bps=RATE_BPS)
        return link.run(9.0)
    if change == "blackhole":
        link.change(dead=True)
        link.run(3.0)
        link.change(dead=False)
        return link.run(7.0)
    if change == "longer":
        link.change(rtt_s=0.060)
        return link.run(12.0)
    raise ValueError(f"{change!r} is not one of {', '.join(CHANGES)}")


def measure(seeds: Sequence[int]) -> dict[str, list[dict[str, Any]]]:
    """All cells, as plain rows."""
    rows: dict[str, list[dict[str, Any]]] = {"alone": [], "beside": [], "through": []}
    cells = [(loss, control) for loss in ("paper", "long8", "0.01", "0.05", "0.2") for control in ALONE]
    for loss, control in track(cells, "alone"):
        links = [alone(control, loss, seed) for seed in seeds]
        rows["alone"].append(
            {
                "loss": loss,
                "control": control,
                "offered": [link.flows[0].offered_bps(1.0, 5.0) / RATE_BPS for link in links],
                "offered_first_s": [link.flows[0].offered_bps(0.0, 1.0) / RATE_BPS for link in links],
                "queue_p95_s": [link.queue_delay(1.0, 5.0)[1] for link in links],
            }
        )
    for first, second in track(PAIRS, "beside"):
        cases = [beside(first, second, seed) for seed in seeds]
        rows["beside"].append(
            {
                "first": first,
                "second": second,
                "shares": [list(case.shares) for case in cases],
                "jain": [case.jain for case in cases],
                "queue_mean_s": [case.queue_mean_s for case in cases],
                "queue_p95_s": [case.queue_p95_s for case in cases],
                "lost_first": [case.link.flows[0].packets_lost for case in cases],
            }
        )
    for change, control in track([(c, k) for c in CHANGES for k in ALONE[:3]], "through"):
        links = [through(change, control, "0" if control == "bbr" else "0.05", seed) for seed in seeds]
        end = {"halved": 9, "blackhole": 7, "longer": 12}[change]
        rows["through"].append(
            {
                "change": change,
                "control": control,
                "loss": 0.0 if control == "bbr" else 0.05,
                "offered_by_second": [
                    [link.flows[0].offered_bps(s, s + 1.0) / RATE_BPS for s in range(end)] for link in links
                ],
                "queue_p95_s": [link.queue_delay(2.5, float(end))[1] for link in links],
            }
        )
    return rows


def show(rows: dict[str, list[dict[str, Any]]], console: Console) -> None:
    """The three tables; ranges are over seeds."""

    def span(values: Sequence[float], factor: float = 1.0, form: str = ".2f") -> str:
        low, high = min(values) * factor, max(values) * factor
        return f"{low:{form}}" if math.isclose(low, high, abs_tol=0.005) else f"{low:{form}} .. {high:{form}}"

    table = Table("loss", "controller", "offered after 1 s", "in the first second", "queue p95, ms", title="alone")
    for row in rows["alone"]:
        table.add_row(
            row["loss"], row["control"], span(row["offered"]), span(row["offered_first_s"]),
            span(row["queue_p95_s"], 1e3, ".1f"),
        )  # fmt: skip
    console.print(table)
    table = Table("first", "second", "share", "share", "Jain", "queue mean, ms", "p95, ms", title="beside one another")
    for row in rows["beside"]:
        table.add_row(
            row["first"], row["second"], *(span([shares[i] for shares in row["shares"]]) for i in (0, 1)),
            span(row["jain"]), span(row["queue_mean_s"], 1e3, ".1f"), span(row["queue_p95_s"], 1e3, ".1f"),
        )  # fmt: skip
    console.print(table)
    table = Table("change at 2 s", "controller", "loss", "offered, second by second (seed 1)", title="through changes")
    for row in rows["through"]:
        seconds = " ".join(f"{share:.2f}" for share in row["offered_by_second"][0])
        table.add_row(row["change"], row["control"], f"{row['loss']:.2f}", seconds)
    console.print(table)


def draw(path: str) -> None:
    """Window, rate and queue over time: our controllers beside cubic, and alone on the lossy link."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cells = [
        ("bbr beside cubic", beside("cubic", "bbr").link),
        ("rate beside cubic", beside("cubic", "rate:20e6").link),
        ("bbr, lossy, on the paper's channel", alone("bbr-lossy", "paper", duration_s=8.0)),
        ("rate on the paper's channel", alone("rate:20e6", "paper", duration_s=8.0)),
    ]
    figure, axes = plt.subplots(3, len(cells), figsize=(4.2 * len(cells), 7.5), sharex="col", layout="constrained")
    for column, (title, link) in enumerate(cells):
        for flow in link.flows:
            times = [row[0] for row in flow.trace]
            axes[0][column].plot(times, [row[1] / 1e3 for row in flow.trace], linewidth=0.8, label=flow.control)
            axes[1][column].plot(times, [row[2] / 1e6 for row in flow.trace], linewidth=0.8, label=flow.control)
        axes[2][column].plot(*zip(*((t, 1e3 * q) for t, q in link.queue), strict=True), linewidth=0.6, color="0.3")
        axes[0][column].set_title(title, fontsize=10)
        axes[1][column].set_ylim(0, 45)
        axes[1][column].legend(fontsize=8, frameon=False)
        axes[2][column].set_xlabel("s")
    for row, label in enumerate(("window, kB", "rate, Mbit/s", "queue, ms")):
        axes[row][0].set_ylabel(label)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", metavar="F")
    parser.add_argument("--picture", metavar="F")
    arguments = parser.parse_args()
    started_s = time.perf_counter()
    rows = measure(range(1, arguments.seeds + 1))
    show(rows, Console(width=120))
    if arguments.json:
        facts = {
            "command": " ".join(sys.argv),
            "python": platform.python_version(),
            "aioquic": version("aioquic"),
            "seeds": list(range(1, arguments.seeds + 1)),
            "rate_bps": RATE_BPS,
            "rtt_s": RTT_S,
            "queue_bytes": BDP_BYTES,
            "loss_threshold": {"bbr": DRAFT_LOSS_THRESHOLD, "bbr-lossy": LOSSY_LOSS_THRESHOLD},
            "seconds": round(time.perf_counter() - started_s, 1),
        }
        Path(arguments.json).write_text(json.dumps(facts | rows, indent=1))
    if arguments.picture:
        draw(arguments.picture)


if __name__ == "__main__":
    main()
