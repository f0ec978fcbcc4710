"""Writes interop/network.json: features and what a network of random weights makes of them, computed with torch.

`python -m interop.make_network_vectors` needs torch; the networks here do not, and serve tests and bench/decisions.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quic_pfec.schedule.features import CHOICES, NAMES
from quic_pfec.schedule.network import HIDDEN, Kind, Network

PATH = Path(__file__).parent / "network.json"
SEED = 20


def random_network(kind: Kind, seed: int, **meta: Any) -> Network:
    """Uniform weights of about the size that training begins with; every feature from -2 to 2 is in range."""
    chance = np.random.default_rng(seed)
    choices = len(CHOICES) - (not meta.get("resend", False))

    def layer(*shape: int) -> NDArray[np.float32]:
        return ((chance.random(shape) * 2 - 1) * 0.3).astype(np.float32)

    inputs = len(NAMES)
    weights = (layer(inputs, HIDDEN), layer(HIDDEN), layer(HIDDEN, HIDDEN), layer(HIDDEN), layer(HIDDEN, choices))
    wide = np.full(inputs, 2.0, dtype=np.float32)
    return Network(*weights, layer(choices), -wide, wide, kind, "random", seed=seed, **meta)


def features() -> NDArray[np.float32]:
    """float32[64, 15]."""
    return (np.random.default_rng(SEED + 1).random((64, len(NAMES))) * 2 - 1).astype(np.float32)


def outputs(network: Network, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Torch's answer, in float32."""
    import torch

    with torch.no_grad():
        value = torch.from_numpy(x)
        for layer, (w, b) in enumerate(((network.w1, network.b1), (network.w2, network.b2), (network.w3, network.b3))):
            value = torch.nn.functional.linear(value, torch.tensor(w.T), torch.tensor(b))
            value = value if layer == 2 else torch.relu(value)
        result: NDArray[np.float32] = value.numpy()
    return result


def _rows(values: NDArray[np.float32]) -> list[list[float]]:
    return [[float(f"{value:.9g}") for value in row] for row in values.tolist()]


def vectors() -> dict[str, Any]:
    """The file: the network by its seed and digest, x and y by rows."""
    network = random_network("advantage", SEED, resend=True)
    x = features()
    return {"seed": SEED, "digest": network.digest, "x": _rows(x), "y": _rows(outputs(network, x))}


if __name__ == "__main__":
    PATH.write_text(json.dumps(vectors(), indent=None, separators=(",", ":")).replace("],[", "],\n[") + "\n")
