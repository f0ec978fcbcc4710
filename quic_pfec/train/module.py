"""The network in torch, as it is trained, and its way to and from the plain arrays in which it ships."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from quic_pfec.schedule.network import HIDDEN
from quic_pfec.sim.engine import FEATURES_COUNT

try:
    import torch
    from torch import nn
except ImportError as error:
    raise ImportError('training needs an extra: pip install "quic-pfec[train]"') from error

__all__ = ["NAMES", "Arrays", "arrays", "load_arrays", "make_module", "versions"]

Name = Literal["w1", "b1", "w2", "b2", "w3", "b3"]


class Arrays(TypedDict):
    """The parameters by the names of `schedule.network.Network`."""

    w1: NDArray[np.float32]
    b1: NDArray[np.float32]
    w2: NDArray[np.float32]
    b2: NDArray[np.float32]
    w3: NDArray[np.float32]
    b3: NDArray[np.float32]


NAMES: tuple[Name, ...] = ("w1", "b1", "w2", "b2", "w3", "b3")


def make_module(choices: int, seed: int) -> nn.Sequential:
    """15-64-64-`choices` with ReLU; one thread and deterministic algorithms, so that a seed gives the same weights."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(FEATURES_COUNT, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, choices)
    )


def arrays(module: nn.Module) -> Arrays:
    """Copies of the parameters; matrices are (inputs, outputs), torch's not."""
    w1, b1, w2, b2, w3, b3 = (parameter.detach().numpy().T.copy() for parameter in module.parameters())
    return {"w1": w1, "b1": b1, "w2": w2, "b2": b2, "w3": w3, "b3": b3}


def load_arrays(module: nn.Module, values: Mapping[str, NDArray[Any]]) -> None:
    """The reverse of `arrays`. Raises ValueError for a shape that is another."""
    with torch.no_grad():
        for name, parameter in zip(NAMES, module.parameters(), strict=True):
            value = values[name].T
            if value.shape != tuple(parameter.shape) or not np.isfinite(value).all():
                raise ValueError(f"{name}: {value.shape} or not finite, {tuple(parameter.shape)} expected")
            parameter.copy_(torch.from_numpy(value.copy()))


def versions() -> dict[str, str]:
    """What the weights depend on, for their file."""
    return {"python": platform.python_version()} | {name: version(name) for name in ("torch", "numpy", "quic-pfec")}
