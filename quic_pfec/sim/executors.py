"""Who works on the tasks of a sweep: this process, several of this machine, or a Ray cluster.

An executor takes a function of one task and yields its results as they come, in any order. It knows nothing of sweeps:
journal and progress are kept by who asks, so that a run begun with one executor goes on with another.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TypeVar

__all__ = ["local", "on_ray"]

_T = TypeVar("_T")
_R = TypeVar("_R")

_WAITING = 2  # tasks handed to the cluster for each that it can work on: none of its workers waits for the next


def local(work: Callable[[_T], _R], tasks: Sequence[_T], jobs: int | None = None) -> Iterator[_R]:
    """`jobs` processes, by default as many as cores; with one, here. `work` is a function of a module."""
    jobs = jobs or os.cpu_count() or 1
    if jobs == 1:
        yield from map(work, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(work, tasks, chunksize=max(1, min(8, len(tasks) // (8 * jobs))))


def on_ray(work: Callable[[_T], _R], tasks: Sequence[_T], jobs: int | None = None) -> Iterator[_R]:
    """A Ray cluster: that of RAY_ADDRESS or of this machine, else one that begins and ends here.

    jobs: tasks at work at a time, by default as many as the cluster has processors. Each of its machines needs this
    package. Raises ImportError naming the pip command where Ray is not installed; an error of a task is raised here.
    """
    try:
        ray = import_module("ray")
    except ImportError as error:
        raise ImportError("--executor ray needs Ray: pip install ray") from error
    begun = not ray.is_initialized()
    if begun:
        ray.init(log_to_driver=False)
    try:
        remote = ray.remote(work)
        room = jobs or _WAITING * max(1, int(ray.cluster_resources().get("CPU", 1)))
        following = iter(tasks)
        flying = [remote.remote(task) for _, task in zip(range(room), following, strict=False)]
        while flying:
            done, flying = ray.wait(flying, num_returns=1)
            for task in following:
                flying.append(remote.remote(task))
                break
            yield from ray.get(done)
    finally:
        if begun:
            ray.shutdown()
