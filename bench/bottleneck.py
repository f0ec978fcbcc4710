"""Who uses a lossy link, and who shares it: `python -m bench.bottleneck --json F --picture F` (root).

Real sockets in two namespaces with the emulator of `quic-pfec link tun` between them. Alone: 50 Mbit/s, 20 ms, without
loss and with the paper's channel (GE, 8.4 %), forward only, by slot: kernel TCP, aioquic, and hand-offs under our
controllers; share of the link offered (what came to it) and delivered (what left it) after the first second. Shared:
20 Mbit/s, 20 ms, a queue of one BDP, no loss: a kernel TCP flow that began 5 s before ours. A run that the emulator
calls void is repeated, up to three times, and never averaged in; all of them are listed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quic_pfec.cli.cert import make_certificate
from quic_pfec.link.tun import ADDRESSES, Side, TunLink, TunUnavailable
from quic_pfec.link.tun_options import TunOptions
from quic_pfec.link.tun_report import TunReport
from quic_pfec.sim.channel import PRESETS

SETTLE_S = 1.0  # not measured, at the start of a flow
HEAD_START_S = 5.0  # of TCP before ours, when they share
TAIL_S = 1.0  # senders go on for this long after the measurement
REPEATS = 3  # of a void run
START_TIMEOUT_S = 60.0
OURS = ("rate", "bbr", "bbr-lossy")
ALONE = ("tcp-cubic", "tcp-bbr", "aioquic-cubic", *OURS)
ALONE_BPS, SHARED_BPS, OWD_S = 50e6, 20e6, 0.010
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Skipped(Exception):
    """This flow cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Keys:
    """A certificate for the receiver's address."""

    certificate: str
    private_key: str


class Flow:
    """A sender on the left and its receiver on the axis. Raises Skipped or RuntimeError with what an end said."""

    def __init__(self, link: TunLink, name: str, seconds: float, keys: Keys, cap: float, seed: int) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (both ends write to it until they end)
        arguments = [
            *(name, "--address", ADDRESSES["right"], "--seconds", str(seconds), "--seed", str(seed)),
            *("--rate-bps", str(link.options.rate_bps), "--cap", str(cap)),
            *("--certificate", keys.certificate, "--private-key", keys.private_key),
        ]
        self.receiver = self._start(link, "right", ["receive", *arguments])
        self.answer(self.receiver)
        self.sender = self._start(link, "left", ["send", *arguments])
        said = self.answer(self.sender)
        if "skipped" in said:
            raise Skipped(said["skipped"])
        self.started = said

    def _start(self, link: TunLink, side: Side, arguments: list[str]) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "bench.bottleneck_ends", *arguments]
        return link.popen(side, argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0)

    def answer(self, child: subprocess.Popen[bytes], key: str = "") -> dict[str, Any]:
        """The next that an end says; with `key` the next that holds it."""
        until_s = time.monotonic() + START_TIMEOUT_S
        while True:
            values: dict[str, Any] = json.loads(self._line(child, until_s - time.monotonic()))
            if key in values or not key:
                return values

    def samples(self) -> list[dict[str, Any]]:
        """What a sender of kernel TCP has said of itself since it was last asked."""
        assert self.sender.stdout is not None
        found = []
        while select.select([self.sender.stdout], [], [], 0)[0]:
            found.append(json.loads(self._line(self.sender, 0)))
        return found

    def _line(self, child: subprocess.Popen[bytes], timeout_s: float) -> bytes:
        """The next line."""
        assert child.stdout is not None
        line = child.stdout.readline() if select.select([child.stdout], [], [], max(0.0, timeout_s))[0] else b""
        if not line:
            self._errors.seek(0)
            words = self._errors.read().decode("utf-8", "replace").strip().splitlines() or ["nothing"]
            raise RuntimeError(f"{self.name}: an end stopped or hung, having said: {words[-1]}")
        return line

    def cpu_s(self) -> tuple[float, float]:
        """CPU time used so far by sender and receiver."""
        return _cpu_s(self.sender.pid), _cpu_s(self.receiver.pid)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def measured(link: TunLink, flows: list[Flow], seconds: float) -> tuple[TunReport, dict[str, Any]]:
    """Settles, marks, waits; the report of that time and what it cost the ends."""
    time.sleep(max(0.0, flows[-1].started["started"] + SETTLE_S - time.monotonic()))
    before = [flow.cpu_s() for flow in flows]
    link.mark()
    time.sleep(seconds)
    report = link.report()
    after = [flow.cpu_s() for flow in flows]
    cpu = {
        flow.name: {
            "sender_cpu_share": (last[0] - first[0]) / report.wall_s,
            "receiver_cpu_share": (last[1] - first[1]) / report.wall_s,
        }
        for flow, first, last in zip(flows, before, after, strict=True)
    }
    return report, cpu


def alone(name: str, channel: str, seed: int, seconds: float, keys: Keys, cap: float) -> dict[str, Any]:
    """One flow has the link to itself."""
    options = TunOptions(rate_bps=ALONE_BPS, owd_s=OWD_S, loss=PRESETS[channel], seed=seed)
    with TunLink(options) as link:
        flow = Flow(link, name, SETTLE_S + seconds + TAIL_S, keys, cap, seed)
        link.epoch()
        report, cpu = measured(link, [flow], seconds)
        ended = flow.answer(flow.sender, "ended")
    forward = report.forward
    return {
        "flow": name,
        "channel": channel,
        "seed": seed,
        "offered_share": forward.bytes * 8 / report.wall_s / ALONE_BPS,
        "delivered_share": forward.sent_bytes * 8 / report.wall_s / ALONE_BPS,
        "queue_delay_mean_s": forward.queue_delay.mean_s,
        "queue_delay_p99_s": forward.queue_delay.p99_s,
        **cpu[name],
        **_judged(report),
        "sender": ended,
    }


def shared(ours: str, tcp: str, seed: int, seconds: float, keys: Keys, cap: float) -> dict[str, Any]:
    """Ours joins a kernel TCP flow; without random loss the seed only moves the start of ours by some milliseconds."""
    with TunLink(TunOptions(rate_bps=SHARED_BPS, owd_s=OWD_S, seed=seed)) as link:
        longest_s = START_TIMEOUT_S + HEAD_START_S + SETTLE_S + seconds
        first = Flow(link, tcp, longest_s, keys, cap, seed)
        link.epoch()
        time.sleep(HEAD_START_S + 0.007 * seed)
        second = Flow(link, ours, SETTLE_S + seconds + TAIL_S, keys, cap, seed)
        report, cpu = measured(link, [first, second], seconds)
        looks = [look for look in first.samples() if report.clock_s - report.wall_s <= look["at"] <= report.clock_s]
        ended = second.answer(second.sender, "ended")
    forward = report.forward
    capacity = report.wall_s * SHARED_BPS / 8
    tcp_share, our_share = forward.tcp_bytes_out / capacity, forward.udp_bytes_out / capacity
    return {
        "flow": ours,
        "beside": tcp,
        "seed": seed,
        "share": our_share,
        "tcp_share": tcp_share,
        "share_of_both": our_share / max(1e-9, our_share + tcp_share),
        "jain": (our_share + tcp_share) ** 2 / (2 * (our_share**2 + tcp_share**2) or 1),
        "queue_delay_mean_s": forward.queue_delay.mean_s,
        "queue_delay_p99_s": forward.queue_delay.p99_s,
        "queue_drops": forward.queue_drops,
        "tcp_retransmissions": looks[-1]["retransmissions"] - looks[0]["retransmissions"],
        "tcp_rtt_s": statistics.median(look["rtt_s"] for look in looks),
        "cpu": cpu,
        **_judged(report),
        "sender": ended,
    }


def _judged(report: TunReport) -> dict[str, Any]:
    lateness = report.to_json()["forward"]["lateness"]
    return {
        "void": report.void_reasons(),
        "lateness": lateness,
        "backward_lateness_p99_s": report.backward.lateness.p99_s,
        "loss_share": report.forward.loss_share,
        "emulator": report.emulator,
        "load_average": os.getloadavg()[0],
    }


def until_it_counts(run: Callable[[], dict[str, Any]], voided: list[dict[str, Any]]) -> dict[str, Any] | None:
    """A run that is not void, of at most 1 + REPEATS; None when there was none. Void ones go to `voided`."""
    for _ in range(1 + REPEATS):
        row = run()
        if not row["void"]:
            return row
        voided.append(row)
        print(f"  void: {'; '.join(row['void'])}", file=sys.stderr)
    return None


@dataclass(frozen=True, slots=True)
class Plan:
    """One cell of the tables, to be run."""

    label: str
    flow: str
    run: Callable[[], dict[str, Any]]


def plans(options: argparse.Namespace, keys: Keys) -> list[Plan]:
    """All that was asked for, seeds last, so that a stopped benchmark has whole seeds."""
    wanted = []
    if "alone" in options.parts:
        for seed in range(options.seeds):
            for name in options.flows:
                for channel in ("none", "paper") if seed == 0 else ("paper",):
                    wanted.append(
                        Plan(
                            f"alone, {name}, channel {channel}, seed {seed}",
                            name,
                            partial(alone, name, channel, seed, options.seconds, keys, options.cap),
                        )
                    )
    if "shared" in options.parts:
        for seed in range(options.seeds):
            for name in (name for name in options.flows if name in OURS):
                for tcp in ("tcp-cubic", "tcp-bbr"):
                    wanted.append(
                        Plan(
                            f"shared, {name} beside {tcp}, seed {seed}",
                            name,
                            partial(shared, name, tcp, seed, options.shared_seconds, keys, options.cap),
                        )
                    )
    return wanted


def run_all(wanted: list[Plan]) -> dict[str, list[dict[str, Any]]]:
    """Runs the plans one after the other; rows, void runs, and what could not run."""
    rows: list[dict[str, Any]] = []
    voided: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for index, plan in enumerate(wanted):
        if plan.flow in skipped:
            continue
        print(f"[{index + 1}/{len(wanted)}] {plan.label}", file=sys.stderr, flush=True)
        try:
            row = until_it_counts(plan.run, voided)
        except Skipped as reason:
            skipped[plan.flow] = str(reason)
            print(f"  skipped: {reason}", file=sys.stderr)
            continue
        if row is not None:
            rows.append(row)
    return {
        "alone": [row for row in rows if "channel" in row],
        "shared": [row for row in rows if "beside" in row],
        "void": voided,
        "skipped": [{"flow": flow, "reason": reason} for flow, reason in skipped.items()],
    }


def medians(rows: list[dict[str, Any]], by: str, values: tuple[str, ...]) -> list[dict[str, Any]]:
    """One row for each flow and `by`: the medians of `values` over the seeds, and how many there were."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["flow"], row[by]), []).append(row)
    return [
        {"flow": flow, by: other, "runs": len(cell), **{v: statistics.median(row[v] for row in cell) for v in values}}
        for (flow, other), cell in cells.items()
    ]


ALONE_VALUES = (
    "offered_share", "delivered_share", "loss_share", "queue_delay_mean_s", "sender_cpu_share", "receiver_cpu_share",
)  # fmt: skip
SHARED_VALUES = (
    "share", "tcp_share", "jain", "queue_delay_mean_s", "queue_delay_p99_s", "tcp_retransmissions", "tcp_rtt_s",
)  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as text; seconds become milliseconds."""
    if not rows:
        return "(no run)"
    scaled = [
        {
            k.removesuffix("_s") + "_ms" if k.endswith("_s") else k: v * 1e3 if k.endswith("_s") else v
            for k, v in row.items()
        }
        for row in rows
    ]
    heads = list(scaled[0])
    lines = ["".join(f"{head:>{max(14, len(head) + 2)}}" for head in heads)]
    for row in scaled:
        shown = [f"{row[head]:.3f}" if isinstance(row[head], float) else str(row[head]) for head in heads]
        lines.append("".join(f"{text:>{max(14, len(head) + 2)}}" for head, text in zip(heads, shown, strict=True)))
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """A panel for the flows alone and one for those that share, whichever ran."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    parts = [part for part in ("alone_medians", "shared_medians") if results[part]]
    if not parts:
        return
    figure, axes = plt.subplots(1, len(parts), figsize=(5.5 * len(parts), 4.5), squeeze=False)
    for axis, part in zip(axes[0], parts, strict=True):
        (draw_alone if part == "alone_medians" else draw_shared)(axis, results[part])
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def draw_alone(axis: Any, cells: list[dict[str, Any]]) -> None:
    """Bars of what was offered and delivered."""
    labels = [f"{cell['flow']}\n{'8.4 % lost' if cell['channel'] == 'paper' else 'no loss'}" for cell in cells]
    places = range(len(cells))
    axis.barh([p + 0.2 for p in places], [c["offered_share"] for c in cells], 0.4, label="offered", color="#f0b357")
    axis.barh([p - 0.2 for p in places], [c["delivered_share"] for c in cells], 0.4, label="delivered", color="#1f4e79")
    axis.set_yticks(list(places), labels, fontsize=8)
    axis.set_xlabel("share of a link of 50 Mbit/s, 20 ms")
    axis.set_xlim(0, 1.05)
    axis.legend(fontsize=8, ncol=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def draw_shared(axis: Any, cells: list[dict[str, Any]]) -> None:
    """Stacked bars; the dashed lines are the 20 % that each side must have."""
    places = range(len(cells))
    axis.barh(list(places), [c["share"] for c in cells], 0.6, label="ours", color="#1f4e79")
    axis.barh(
        list(places), [c["tcp_share"] for c in cells], 0.6, left=[c["share"] for c in cells], label="kernel TCP",
        color="#bbbbbb",
    )  # fmt: skip
    axis.axvline(0.2, color="#b03030", linestyle="--", linewidth=1)
    axis.axvline(0.8, color="#b03030", linestyle="--", linewidth=1)
    axis.set_yticks(list(places), [f"{c['flow']}\nbeside {c['beside']}" for c in cells], fontsize=8)
    axis.set_xlabel("share of a link of 20 Mbit/s, 20 ms, queue 1 BDP")
    axis.set_xlim(0, 1.05)
    axis.legend(fontsize=8, ncol=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("alone", "shared"), default=["alone", "shared"])
    parser.add_argument("--flows", nargs="+", default=list(ALONE), metavar="FLOW", help=f"of {', '.join(ALONE)}, ...")
    parser.add_argument("--seeds", type=int, default=5, help="of the losses, or repetitions (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=6.0, help="measured when alone (default %(default)s)")
    parser.add_argument("--shared-seconds", type=float, default=20.0, help="when sharing (default %(default)s)")
    parser.add_argument("--cap", type=float, default=1.0, help="the rate that `rate` is told, in rates of the link (1)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--picture", type=Path, help="write a PNG here")
    options = parser.parse_args()
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    absent = [name for name in ("cubic", "bbr") if name not in available]
    if absent:
        print(f"this kernel has no {' and no '.join(absent)}: modprobe tcp_{absent[0]}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="quic_pfec-") as folder:
        certificate, key = make_certificate(Path(folder), (ADDRESSES["right"],))
        try:
            results: dict[str, Any] = dict(run_all(plans(options, Keys(str(certificate), str(key)))))
        except (TunUnavailable, RuntimeError) as error:
            print(f"bench.bottleneck: {error}", file=sys.stderr)
            return 1
    results["alone_medians"] = medians(results["alone"], "channel", ALONE_VALUES)
    results["shared_medians"] = medians(results["shared"], "beside", SHARED_VALUES)
    results["settings"] = {
        "command": " ".join(sys.argv),
        "alone": {
            "rate_bps": ALONE_BPS,
            "owd_s": OWD_S,
            "seconds": options.seconds,
            "loss": "one-way",
            "clock": "slot",
        },
        "shared": {
            "rate_bps": SHARED_BPS,
            "owd_s": OWD_S,
            "seconds": options.shared_seconds,
            "head_start_s": HEAD_START_S,
        },
        "cap": options.cap,
        "seeds": options.seeds,
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("quic-pfec", "aioquic", "numpy")},
    }
    print(f"alone, {ALONE_BPS / 1e6:.0f} Mbit/s\n{table(results['alone_medians'])}\n")
    print(f"shared, {SHARED_BPS / 1e6:.0f} Mbit/s\n{table(results['shared_medians'])}\n")
    print(f"void runs, repeated: {len(results['void'])}")
    for row in results["skipped"]:
        print(f"skipped {row['flow']}: {row['reason']}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.picture is not None:
        draw(results, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
