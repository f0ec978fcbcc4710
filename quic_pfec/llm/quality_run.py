"""A whole evaluation: profiles, simulated losses, then example after example, in one process or several.

An evaluation at full size takes an hour, so every finished example goes to a journal beside the results at once, and a
run that is started again goes on where the last one ended. A journal line names the settings it belongs to by a hash:
what was measured under others is never mixed in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import msgspec

from quic_pfec.kv.profile import PAPER_GROUPS, Profile, Receiver
from quic_pfec.llm import profiler
from quic_pfec.llm.dataset import Dataset, Example
from quic_pfec.llm.handoffs import BESIDE, SCHEMES, Ranking, completion, deliver, open_channel, packets_of_a_unit
from quic_pfec.llm.models import LoadedModel, load
from quic_pfec.llm.quality import (
    Deliveries,
    Profiles,
    Record,
    Settings,
    evaluate_example,
    layout_of,
    realisation,
    wires,
)

__all__ = ["Completion", "Journal", "Progress", "Run", "run"]

JOURNAL_VERSION: Final = 2
COMPLETION_PARTS: Final = 20

Progress = Callable[[str, int, int], None]
"""Called with a step's name, how much of it is done, and how much there is."""


class _Line(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of the journal: a profile, or all records of an example."""

    key: str
    ranking: str = ""
    receiver: str = ""
    profile: Profile | None = None
    example: str = ""
    records: list[Record] = []


@dataclass(frozen=True, slots=True)
class Completion:
    """Probability that a block is complete at the deadline, by its place in the order of sending, first to last."""

    policy: str
    rho: float
    probability: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What was measured, and on what."""

    records: list[Record]
    profiles: Profiles
    completions: list[Completion]
    examples: int
    resumed: int


class Journal:
    """Finished work of one evaluation in a JSON-lines file; `path` None keeps none. A torn last line is ignored."""

    def __init__(self, path: Path | None, key: str) -> None:
        self._path, self._key = path, key
        self.profiles: Profiles = {}
        self.records: dict[str, list[Record]] = {}
        if path is None or not path.exists():
            return
        for text in path.read_bytes().splitlines():
            try:
                line = msgspec.json.decode(text, type=_Line)
            except msgspec.DecodeError:
                continue
            if line.key != key:
                continue
            if line.profile is not None:
                self.profiles[line.ranking, line.receiver] = line.profile  # type: ignore[index]  # we wrote it
            else:
                self.records[line.example] = line.records

    def add_profile(self, ranking: Ranking, receiver: Receiver, profile: Profile) -> None:
        """Keep a measured profile."""
        self.profiles[ranking, receiver] = profile
        self._append(_Line(key=self._key, ranking=ranking, receiver=receiver, profile=profile))

    def add_records(self, example: str, records: list[Record]) -> None:
        """Keep all records of an example."""
        self.records[example] = records
        self._append(_Line(key=self._key, example=example, records=records))

    def _append(self, line: _Line) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            if file.tell():
                with self._path.open("rb") as before:
                    before.seek(-1, 2)
                    if before.read(1) != b"\n":  # what the last run did not finish writing
                        file.write(b"\n")
            file.write(msgspec.json.encode(line) + b"\n")


def settings_key(m: LoadedModel, data: Dataset, settings: Settings) -> str:
    """16 hex digits that name everything a record depends on; the batch size is no such thing."""
    values = asdict(settings)
    del values["batch"]
    schemes = [asdict(scheme) for scheme in SCHEMES]
    parts = [JOURNAL_VERSION, m.fingerprint, data.name, data.digest, values, schemes]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def run(
    m: LoadedModel,
    data: Dataset,
    settings: Settings,
    examples: int,
    *,
    journal: Path | None = None,
    jobs: int = 1,
    source: str = "",
    device: str = "cpu",
    progress: Progress = lambda step, done, total: None,
) -> Run:
    """Evaluate the first `examples` of the data's evaluation part; fewer if it has fewer.

    `jobs` > 1: as many processes, each with one thread and the model named `source` on `device`. Raises ValueError for
    settings that do not fit model or data.
    """
    layouts = {wire: layout_of(m, settings, wire) for wire in wires(m, settings)}
    packets_of_a_unit(layout_of(m, settings, "bf16"))  # what cannot be simulated must not cost a profile first
    channel = open_channel(settings.channel)
    notes = Journal(journal, settings_key(m, data, settings))
    _measure_profiles(m, data, settings, notes, progress)
    deliveries: Deliveries = {}
    completions = []
    policies = list(dict.fromkeys(scheme.policy for scheme in SCHEMES))
    beside = {scheme.policy for scheme in SCHEMES if scheme.key in BESIDE}
    reference = layouts[settings.wire_dtype]
    cells = [
        (wire, policy, rho)
        for wire, layout in layouts.items()
        if len(layout.forms) == 1  # those of two precisions are sent request by request
        for policy in policies
        if wire == settings.wire_dtype or policy in beside
        for rho in settings.rhos
    ]
    for wire, policy, rho in cells:
        layout, known = layouts[wire], []
        for loss in range(settings.losses):
            seed = realisation(settings, loss)
            known.append(deliver(layout, policy, rho, channel, seed, settings.repair_budget, reference))
            deliveries[wire, policy, rho, loss] = known[-1]
            progress("losses", len(deliveries), len(cells) * settings.losses)
        if wire == settings.wire_dtype:
            falling = completion(layout, known, min(COMPLETION_PARTS, layout.unit_count))
            completions.append(Completion(policy, rho, tuple(falling.tolist())))
    chosen = data.evaluation[:examples]
    resumed = sum(example.id in notes.records for example in chosen)
    todo = [number for number, example in enumerate(chosen) if example.id not in notes.records]
    done = resumed
    progress("examples", done, len(chosen))
    work = _Work(source, device, data.evaluation, settings, notes.profiles, deliveries)
    for number, records in _evaluated(m, work, todo, jobs):
        notes.add_records(data.evaluation[number].id, records)
        done += 1
        progress("examples", done, len(chosen))
    records = [record for example in chosen for record in notes.records[example.id]]
    return Run(records, notes.profiles, completions, len(chosen), resumed)


def _measure_profiles(m: LoadedModel, data: Dataset, settings: Settings, notes: Journal, progress: Progress) -> None:
    prompts = min(settings.profile_prompts, len(data.profile))
    kinds: list[tuple[Ranking, int]] = [("paper", min(PAPER_GROUPS, int(m.config.num_hidden_layers))), ("layer", 0)]
    for ranking, groups in kinds:
        for receiver in settings.receivers:
            if (ranking, receiver) in notes.profiles:
                continue
            wanted = profiler.Settings(
                receiver=receiver,
                groups=groups,
                context_tokens=settings.tokens,
                prompts=prompts,
                positions=settings.profile_positions,
                seed=settings.seed,
                batch=5 * settings.batch,
            )
            report = partial(progress, f"profile: {ranking}, {receiver}")
            profile = profiler.measure(m, wanted, report, data)
            notes.add_profile(ranking, receiver, profile)


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """What a process needs beside the number of its example."""

    source: str
    device: str
    examples: Sequence[Example]
    settings: Settings
    profiles: Profiles
    deliveries: Deliveries


def _evaluated(m: LoadedModel, work: _Work, todo: Sequence[int], jobs: int) -> Iterator[tuple[int, list[Record]]]:
    if jobs == 1 or len(todo) <= 1:
        for number in todo:
            yield number, _evaluate(m, work, number)
        return
    # Spawned, not forked: a fork would inherit torch's thread pool in any state.
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(work,)) as pool:
        pending = {pool.submit(_in_process, number): number for number in todo}
        for future in as_completed(pending):
            yield pending[future], future.result()


def _evaluate(m: LoadedModel, work: _Work, number: int) -> list[Record]:
    return evaluate_example(m, work.examples, number, work.settings, work.profiles, work.deliveries)


_process: dict[str, Any] = {}


def _begin(work: _Work) -> None:
    _process.update(m=load(work.source, device=work.device, threads=1), work=work)


def _in_process(number: int) -> list[Record]:
    return _evaluate(_process["m"], _process["work"], number)
