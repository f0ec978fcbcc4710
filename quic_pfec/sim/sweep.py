"""Many hand-offs: every policy of a list at every cell of a point, losses paired, on all cores.

A scheme is a policy's name with what differs from its default: `deficit@full` (the other window), `flec-rt@fifo`
(blocks in the order of the cache instead of by utility), `fixed@budget` (as many repairs a source as the budget
allows, instead of 10 % until it is spent). `ddqn:FILE.npz` and `hybrid:FILE.npz` have the weights of a file that is not
in the package. Each finished hand-off is a line of a journal, keyed by all that determines it, so that a run that was
interrupted goes on and one with more policies only adds them. Who works (`sim.executors`) changes nothing: this
process, several, or a Ray cluster.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from quic_pfec.schedule.policies import Fixed, Policy, compiled, make_policy, make_twin
from quic_pfec.sim.engine import Lanes, make_scenario, reset
from quic_pfec.sim.executors import local, on_ray
from quic_pfec.sim.memory_use import PeakMemory
from quic_pfec.sim.oracle import oracle
from quic_pfec.sim.points import Cell, HandOff, hand_off
from quic_pfec.wire.errors import LocalError

__all__ = ["Scheme", "Table", "parse_scheme", "run_sweep"]

_T95 = 1.96


@dataclass(frozen=True, slots=True)
class Scheme:
    """A policy as it stands in a table.

    order: "utility" or "fifo"; window: what its repairs are over; spread: the rate of `fixed` is the cell's budget.
    """

    name: str
    policy: str
    window: str
    order: str
    spread: bool = False


def parse_scheme(text: str) -> Scheme:
    """`NAME` with any of @full or @sack, @fifo, and @budget for `fixed`. Raises ValueError for what is none.

    NAME may be ddqn:FILE or hybrid:FILE (OSError if that cannot be read).
    """
    name, *marks = text.split("@")
    window = make_policy(name, files=True).window
    order, spread = "utility", False
    for mark in marks:
        if mark in ("full", "sack"):
            window = mark  # type: ignore[assignment]
        elif mark == "fifo":
            order = mark
        elif mark == "budget" and name == "fixed":
            spread = True
        else:
            raise LocalError(f"{text!r}: a policy is followed by @full, @sack or @fifo")
    return Scheme(text, name, window, order, spread)


def policy_of(scheme: Scheme, budget: float | None = None) -> Policy:
    """Its policy at a cell of that budget, compiled."""
    if scheme.spread and budget is not None:
        return compiled(Fixed(rate=budget, window=scheme.window))  # type: ignore[arg-type]
    policy = make_policy(scheme.policy, files=True)
    if policy.window == scheme.window:
        return policy
    return compiled(replace(make_twin(scheme.policy, files=True), window=scheme.window))  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One hand-off. cpu_us: processor time a packet sent, both ends on coefficients alone, without payloads; peak_mb:
    memory at its peak beyond what the process had when blocks and losses were drawn, None where no system says it.
    """

    j_block: float
    j_frac: float
    oracle_j_block: float
    oracle_j_frac: float
    cpu_us: float
    peak_mb: float | None


def _ordered(drawn: HandOff, order: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    if order == "fifo":
        return drawn.unit_packets, drawn.utility
    return drawn.unit_packets[drawn.ranked], drawn.utility[drawn.ranked]


def play_cell(cell: Cell, seed: int, schemes: Sequence[Scheme]) -> list[Outcome]:
    """The hand-off of `seed` under each scheme."""
    _warm_up()
    return _play(cell, seed, schemes)


@cache
def _warm_up() -> None:
    """What a process loads at its first hand-off is not that hand-off's memory."""
    _play(Cell("", "", 1.0, "paper", 2, 2, 60), 0, (parse_scheme("hybrid"),))


def _play(cell: Cell, seed: int, schemes: Sequence[Scheme]) -> list[Outcome]:
    drawn, settings = hand_off(cell, seed), cell.settings(seed)
    bound = oracle(drawn.losses, drawn.unit_packets, drawn.utility)
    memory, outcomes = PeakMemory(), []
    order, world = "", None
    for scheme in schemes:
        if world is None or scheme.order != order:
            world = None  # one at a time
            order, world = scheme.order, make_scenario(*_ordered(drawn, scheme.order), drawn.losses, settings)
        memory.restart()
        lanes = Lanes(1)
        begun = time.process_time()
        reset(lanes, 0, world, settings, policy_of(scheme, cell.budget))
        lanes.finish()
        spent = time.process_time() - begun
        peak_mb = memory.peak_mb()
        j_block, j_frac = float(lanes.j_block()[0]), float(lanes.j_frac()[0])
        counters = lanes.sender_counters(0)
        packets = sum(counters[kind] for kind in ("source", "repair", "resent", "manifests"))
        cpu_us = 1e6 * spent / max(1, packets)
        outcomes.append(Outcome(j_block, j_frac, bound.j_block, bound.j_frac, cpu_us, peak_mb))
        del lanes  # the memory of one scheme is not the next one's
    return outcomes


def _key(cell: Cell, scheme: Scheme, seed: int) -> str:
    """All that determines a hand-off: cell, seed, order, and the policy with its parameters."""
    return json.dumps([asdict(cell), scheme.order, repr(policy_of(scheme, cell.budget)), seed], sort_keys=True)


_Task = tuple[Cell, int, tuple[Scheme, ...]]
_EXECUTORS = {"local": local, "ray": on_ray}


def _work(task: _Task) -> tuple[_Task, list[Outcome]]:
    return task, play_cell(*task)


class Table:
    """Outcomes by cell and scheme, and the figures made of them."""

    def __init__(self, cells: Sequence[Cell], schemes: Sequence[Scheme], seeds: Sequence[int]) -> None:
        self.cells, self.schemes, self.seeds = list(cells), list(schemes), list(seeds)
        self._outcomes: dict[tuple[Cell, str, int], Outcome] = {}

    def add(self, cell: Cell, scheme: Scheme, seed: int, outcome: Outcome) -> None:
        self._outcomes[cell, scheme.name, seed] = outcome

    def has(self, cell: Cell, scheme: Scheme, seed: int) -> bool:
        return (cell, scheme.name, seed) in self._outcomes

    def values(self, cell: Cell, scheme: str, name: str) -> NDArray[np.float64]:
        """One figure of every seed, in the order of the seeds."""
        return np.array([getattr(self._outcomes[cell, scheme, seed], name) for seed in self.seeds])

    def peak_mb(self, cell: Cell, scheme: str) -> float | None:
        """The most memory of any seed's hand-off, None where it is not known of all."""
        peaks = [self._outcomes[cell, scheme, seed].peak_mb for seed in self.seeds]
        known = [peak for peak in peaks if peak is not None]
        return max(known) if len(known) == len(peaks) else None

    def rows(self, reference: str = "hybrid") -> list[dict[str, Any]]:
        """A dictionary a cell and scheme: means with half 95 % intervals, and paired differences to `reference`."""
        compared = reference in {scheme.name for scheme in self.schemes}
        rows = []
        for cell in self.cells:
            for scheme in self.schemes:
                block, frac = self.values(cell, scheme.name, "j_block"), self.values(cell, scheme.name, "j_frac")
                row: dict[str, Any] = {
                    "point": cell.point, "model": cell.model, "rho": cell.rho, "budget": cell.budget,
                    "channel": cell.channel, "t_rtt": cell.t_rtt, "policy": scheme.policy, "window": scheme.window,
                    "order": scheme.order, "scheme": scheme.name, "seeds": len(self.seeds), "slots": cell.slots,
                    "rtt_slots": cell.rtt_slots, "slot_us": cell.slot_s * 1e6, "tokens": cell.columns * 16,
                    "j_block": float(block.mean()), "j_block_ci": half_width(block),
                    "j_frac": float(frac.mean()), "j_frac_ci": half_width(frac),
                    "oracle_j_block": float(self.values(cell, scheme.name, "oracle_j_block").mean()),
                    "oracle_j_frac": float(self.values(cell, scheme.name, "oracle_j_frac").mean()),
                    "cpu_us": float(self.values(cell, scheme.name, "cpu_us").mean()),
                    "peak_mb": self.peak_mb(cell, scheme.name),
                }  # fmt: skip
                if compared:
                    for name, mine in (("j_block", block), ("j_frac", frac)):
                        difference = mine - self.values(cell, reference, name)
                        row[f"{name}_less_{reference}"] = float(difference.mean())
                        row[f"{name}_less_{reference}_ci"] = half_width(difference)
                rows.append(row)
        return rows


def half_width(values: NDArray[np.float64]) -> float:
    """Half the 95 % confidence interval of the mean (normal); 0 for one value."""
    return float(_T95 * values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def _read_journal(path: Path, table: Table) -> None:
    wanted = {
        _key(cell, scheme, seed): (cell, scheme, seed)
        for cell in table.cells for scheme in table.schemes for seed in table.seeds
    }  # fmt: skip
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            key, values = json.loads(line)
            found = wanted.get(key)
            if found is not None:
                table.add(*found, Outcome(*values))
        except (ValueError, TypeError):
            continue  # the last line of a run that was killed


def _append_to(path: Path) -> TextIO:
    file = path.open("a+", encoding="utf-8")
    file.seek(0)
    if (file.read()[-1:] or "\n") != "\n":
        file.write("\n")  # the line of a run that was killed stays its own
    return file


def run_sweep(
    cells: Sequence[Cell],
    schemes: Sequence[Scheme],
    seeds: Sequence[int],
    *,
    jobs: int | None = 1,
    executor: str = "local",
    journal: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Table:
    """Every scheme at every cell with every seed, `jobs` of these pairs worked on at a time; None: all cores there are.

    executor: "local", processes of this machine, or "ray", a Ray cluster. journal: finished hand-offs, read first and
    then added to, by this process whoever works. progress(done, total) counts (cell, seed) pairs. Raises LocalError for
    another executor, ImportError naming the pip command where Ray is not installed.
    """
    if executor not in _EXECUTORS:
        raise LocalError(f"an executor is {' or '.join(_EXECUTORS)}, not {executor!r}")
    table = Table(cells, schemes, seeds)
    if journal is not None and journal.exists():
        _read_journal(journal, table)
    tasks: list[_Task] = []
    for cell in sorted(cells, key=lambda cell: -cell.slots):  # long ones first: no core waits for them at the end
        for seed in seeds:
            missing = tuple(scheme for scheme in schemes if not table.has(cell, scheme, seed))
            if missing:
                tasks.append((cell, seed, missing))
    total = len(cells) * len(seeds)
    done = total - len(tasks)
    progress(done, total)
    if not tasks:
        return table
    file = None if journal is None else _append_to(journal)
    try:
        for (cell, seed, missing), outcomes in _EXECUTORS[executor](_work, tasks, jobs):
            for scheme, outcome in zip(missing, outcomes, strict=True):
                table.add(cell, scheme, seed, outcome)
                if file is not None:
                    values = [getattr(outcome, name) for name in Outcome.__slots__]
                    file.write(json.dumps([_key(cell, scheme, seed), values]) + "\n")
            if file is not None:
                file.flush()
            done += 1
            progress(done, total)
    finally:
        if file is not None:
            file.close()
    return table
