"""The network in torch and its plain arrays."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from quic_pfec.schedule.network import Network, forward  # noqa: E402
from quic_pfec.train.module import arrays, load_arrays, make_module, versions  # noqa: E402


@pytest.mark.parametrize("choices", [4, 5])
def test_the_arrays_are_the_network(choices: int) -> None:
    module = make_module(choices, 1)
    x = np.random.default_rng(0).random((7, 15), dtype=np.float32)
    network = Network(
        **arrays(module), low=np.zeros(15, np.float32), high=np.ones(15, np.float32), kind="q", name="t",
        resend=choices == 5,
    )  # fmt: skip
    with torch.no_grad():
        assert np.allclose(forward(network, x), module(torch.from_numpy(x)).numpy(), atol=1e-5)


def test_arrays_are_copies_and_go_back() -> None:
    module, other = make_module(4, 1), make_module(4, 2)
    held = arrays(module)
    held["b1"][:] = 0.5
    assert not np.allclose(arrays(module)["b1"], 0.5)
    load_arrays(other, held)
    assert all((arrays(other)[name] == held[name]).all() for name in ("w1", "b1", "w2", "b2", "w3", "b3"))


def test_wrong_arrays() -> None:
    module = make_module(4, 1)
    held = arrays(module)
    held["w3"] = held["w3"][:, :3]
    with pytest.raises(ValueError, match="w3"):
        load_arrays(module, held)
    held = arrays(module)
    held["b2"][0] = np.nan
    with pytest.raises(ValueError, match="b2"):
        load_arrays(module, held)


def test_a_seed_is_a_module() -> None:
    assert (arrays(make_module(4, 7))["w1"] == arrays(make_module(4, 7))["w1"]).all()
    assert {"torch", "numpy", "python"} <= set(versions())
