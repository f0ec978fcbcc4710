"""Who works: nobody changes a result, and a journal goes on with another executor.

Ray itself is not among the test dependencies: a module of a few lines stands in for it, which runs its tasks in this
process, in another order than they were given, and refuses what Ray would.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quic_pfec.sim.executors import local, on_ray
from quic_pfec.sim.points import cells
from quic_pfec.sim.sweep import parse_scheme, run_sweep
from quic_pfec.wire.errors import LocalError


class FakeRay(ModuleType):
    """What `on_ray` uses of Ray, without a cluster."""

    def __init__(self, cpus: int = 2) -> None:
        super().__init__("ray")
        self.cpus, self.up, self.inits, self.most, self.pending = cpus, False, 0, 0, 0

    def is_initialized(self) -> bool:
        return self.up

    def init(self, **options: Any) -> None:
        assert not self.up
        self.up, self.inits = True, self.inits + 1

    def shutdown(self) -> None:
        self.up = False

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(self.cpus)}

    def remote(self, work: Any) -> Any:
        ray = self

        class Handle:
            def remote(self, task: Any) -> Any:
                assert ray.up
                ray.pending += 1
                ray.most = max(ray.most, ray.pending)
                return lambda: work(task)

        return Handle()

    def wait(self, flying: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        assert num_returns == 1
        self.pending -= 1
        return flying[-1:], flying[:-1]

    def get(self, done: list[Any]) -> list[Any]:
        return [result() for result in done]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


def square(value: int) -> int:
    return value * value


def refuse(value: int) -> int:
    raise ValueError(f"not {value}")


def test_local_with_one_job_works_here() -> None:
    assert list(local(square, range(5), 1)) == [0, 1, 4, 9, 16]
    assert list(local(square, [], 1)) == []


def test_ray_does_every_task_once_and_waits_for_room(ray: FakeRay) -> None:
    results = list(on_ray(square, range(40)))
    assert sorted(results) == [value * value for value in range(40)]
    assert results != sorted(results)
    assert ray.most == 4
    assert (ray.inits, ray.up) == (1, False)
    assert sorted(on_ray(square, range(7), 3)) == [value * value for value in range(7)]
    assert list(on_ray(square, [])) == []


def test_a_cluster_that_is_there_stays(ray: FakeRay) -> None:
    ray.init()
    assert list(on_ray(square, [3])) == [9]
    assert (ray.inits, ray.up) == (1, True)


def test_an_error_of_a_task_is_an_error_here(ray: FakeRay) -> None:
    with pytest.raises(ValueError, match="not 1"):
        list(on_ray(refuse, [1, 1]))
    assert not ray.up


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match="pip install ray"):
        list(on_ray(square, [1]))


def test_sweeps_on_ray_and_on_with_the_journal(ray: FakeRay, tmp_path: Path) -> None:
    chosen = [cell for cell in cells("short") if cell.slots < 200][:2]
    schemes = [parse_scheme("hybrid"), parse_scheme("arq")]
    journal = tmp_path / "sweep.jsonl"
    there = run_sweep(chosen, schemes, range(3), executor="ray", jobs=None, journal=journal)
    here = run_sweep(chosen, schemes, range(3))
    for name in ("j_block", "j_frac", "oracle_j_block", "oracle_j_frac"):
        assert [row[name] for row in there.rows()] == [row[name] for row in here.rows()]
    assert len(journal.read_text().splitlines()) == 12
    counts: list[tuple[int, int]] = []
    run_sweep(chosen, schemes, range(4), journal=journal, progress=lambda *count: counts.append(count))
    assert counts == [(6, 8), (7, 8), (8, 8)]  # in this process, from where Ray was
    run_sweep(chosen, schemes, range(4), executor="ray", journal=journal, progress=lambda *count: counts.append(count))
    assert counts[3:] == [(8, 8)]
    with pytest.raises(LocalError, match="local or ray"):
        run_sweep(chosen, schemes, range(1), executor="slurm")
