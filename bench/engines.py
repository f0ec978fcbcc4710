"""Slots a second of both engines of the simulator: `python -m bench.engines --json F`.

A hand-off of 12,000 slots on the paper's channel, 100 Mbit/s, RTT 20 ms, rho 0.8, 24-packet blocks, processor time of
one core: `sim.episode` drives the classes that ship, payloads of 64 bytes and all; `sim.engine` is compiled. Beside
each policy stands whether both ended with the same symbols known.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from quic_pfec.kv.profile import synthetic_utility
from quic_pfec.schedule.policies import POLICY_NAMES, make_policy
from quic_pfec.sim.channel import PRESETS, GilbertElliottChannel, losses
from quic_pfec.sim.engine import Lanes, make_scenario, reset
from quic_pfec.sim.episode import Settings, run_episode


def measure(scheduler: str, slots: int, repeats: int, seed: int) -> dict[str, Any]:
    """One policy: median slots a second of each engine."""
    blocks = round(slots / 0.8 / 24)
    utility = np.sort(synthetic_utility((1, blocks), 0.93, seed))[::-1].copy()
    packets = np.full(blocks, 24, dtype=np.int64)
    lost = losses(GilbertElliottChannel(PRESETS["paper"], seed), slots)
    settings = Settings(slots, 179, scheduler=scheduler, seed=seed)
    episode_s, engine_s = [], []
    for _ in range(repeats):
        begun = time.process_time()
        slow = run_episode(packets, utility, lost, settings)
        episode_s.append(time.process_time() - begun)
    lanes, policy = Lanes(1), make_policy(scheduler)
    scenario = make_scenario(packets, utility, lost, settings)
    for _ in range(repeats):
        begun = time.process_time()
        for _ in range(10):
            reset(lanes, 0, scenario, settings, policy)
            lanes.finish()
        engine_s.append((time.process_time() - begun) / 10)
    return {
        "scheduler": scheduler,
        "episode_slots_per_s": slots / float(np.median(episode_s)),
        "engine_slots_per_s": slots / float(np.median(engine_s)),
        "same": bool((lanes.known(0) == slow.known).all() and (lanes.carried(0) == slow.carried).all()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=12_000, help="slots of a hand-off (default 12,000)")
    parser.add_argument("--repeats", type=int, default=5, help="the median of so many counts (default 5)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    rows = [measure(name, options.slots, options.repeats, options.seed) for name in POLICY_NAMES]
    print(f"{'policy':<16} {'episode, slots/s':>17} {'engine, slots/s':>16} {'same':>5}")
    for row in rows:
        print(
            f"{row['scheduler']:<16} {row['episode_slots_per_s']:>17,.0f} {row['engine_slots_per_s']:>16,.0f}"
            f" {'yes' if row['same'] else 'NO':>5}"
        )
    if options.json is not None:
        settings = {"command": " ".join(sys.argv), "seed": options.seed, "slots": options.slots}
        values = {"rows": rows, "settings": settings, "version": version("quic-pfec")}
        options.json.write_text(json.dumps(values, indent=1) + "\n")
    if not all(row["same"] for row in rows):
        sys.exit("the engines disagree")


if __name__ == "__main__":
    main()
