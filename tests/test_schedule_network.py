"""The network's file is checked field by field, and its arithmetic is torch's, numpy's and C's alike."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interop import make_network_vectors as golden
from interop.make_network_vectors import random_network
from quic_pfec.schedule import network as module
from quic_pfec.schedule._policy import Policy
from quic_pfec.schedule.network import MAX_FILE_BYTES, Network, forward, load_network, packaged_networks, save_network
from quic_pfec.wire.errors import LocalError

PUBLISHED: dict[str, Any] = json.loads(golden.PATH.read_text())


# arithmetic


def test_torch_s_outputs() -> None:
    network = random_network("advantage", PUBLISHED["seed"], resend=True)
    assert network.digest == PUBLISHED["digest"]
    x, y = np.array(PUBLISHED["x"], dtype=np.float32), np.array(PUBLISHED["y"], dtype=np.float32)
    assert (x.shape, y.shape) == ((64, 15), (64, 5))
    assert x.tolist() == golden.features().tolist()
    for mine in (forward(network, x), Policy("hybrid", network=network).outputs(x)):
        assert np.abs(mine - y).max() < 1e-5
        assert mine.argmax(axis=1).tolist() == y.argmax(axis=1).tolist()
    assert len(set(y.argmax(axis=1).tolist())) > 2


def test_torch_still_says_so() -> None:
    pytest.importorskip("torch")
    assert np.abs(np.array(golden.vectors()["y"]) - np.array(PUBLISHED["y"])).max() < 1e-5


@pytest.mark.parametrize("resend", [False, True])
def test_numpy_and_c_agree_to_the_bit(resend: bool) -> None:
    network = random_network("q", 3, resend=resend)
    x = (np.random.default_rng(4).random((500, 15)) * 4 - 2).astype(np.float32)
    fast = Policy("ddqn", network=network).outputs(x)
    assert fast.shape == (500, 5 if resend else 4)
    assert fast.tolist() == forward(network, x).tolist()
    assert forward(network, x[7:8]).tolist() == fast[7:8].tolist()  # whatever the rows beside


def test_shapes_of_features() -> None:
    network = random_network("q", 1)
    for wrong in (np.zeros(15), np.zeros((1, 14)), np.zeros((1, 15), dtype=np.float64)):
        with pytest.raises(LocalError, match="features are float32"):
            forward(network, wrong if wrong.dtype == np.float64 and wrong.ndim == 2 else wrong.astype(np.float32))
    with pytest.raises(LocalError):
        Policy("ddqn", network=network).outputs(np.zeros((1, 14), dtype=np.float32))
    with pytest.raises(LocalError):
        Policy("arq").outputs(np.zeros((1, 15), dtype=np.float32))


# the file


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    network = random_network(
        "advantage", 5, resend=True, features=2, margin=0.15, window="full", command="train", versions={"numpy": "2"},
        settings={"steps": 5}, cells=[{"rtt": 1, "gain": 0.5}],
    )  # fmt: skip
    path = tmp_path / "a.npz"
    save_network(network, path)
    assert path.stat().st_size < MAX_FILE_BYTES
    again = load_network(str(path))
    for name in ("w1", "b1", "w2", "b2", "w3", "b3", "low", "high"):
        assert getattr(again, name).tolist() == getattr(network, name).tolist()
    for name in module._META:
        assert getattr(again, name) == getattr(network, name)
    assert again.label == network.label
    first = path.read_bytes()
    save_network(again, path)
    assert path.read_bytes() == first


def test_weights_cannot_change() -> None:
    weights = random_network("q", 1).w1.copy()
    network = random_network("q", 1)
    with pytest.raises(ValueError, match="read-only"):
        network.w1[0, 0] = 1
    assert network.w1.tolist() == weights.tolist()


def test_the_digest_is_of_what_decides() -> None:
    network = random_network("q", 1)
    assert random_network("q", 1, command="other").digest == network.digest
    others = [random_network("q", 2), random_network("q", 1, features=2), random_network("advantage", 1)]
    others.append(random_network("advantage", 1, margin=0.5))
    assert len({network.digest, *(other.digest for other in others)}) == 5


def parts(network: Network) -> dict[str, Any]:
    names = ("w1", "b1", "w2", "b2", "w3", "b3", "low", "high")
    meta = {"format": 1, "kind": network.kind, "name": network.name}
    return {name: getattr(network, name) for name in names} | {"meta": meta}


def write(path: Path, arrays: dict[str, Any], save: Callable[..., None] = np.savez) -> Path:
    meta = arrays["meta"]
    encoded = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8) if isinstance(meta, dict) else meta
    save(path, **(arrays | {"meta": encoded}))
    return path


def test_the_least_that_a_file_needs(tmp_path: Path) -> None:
    network = load_network(write(tmp_path / "a.npz", parts(random_network("q", 1))))
    assert (network.kind, network.features, network.resend, network.window, network.margin) == (
        "q", 1, False, "sack", None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"w1": np.zeros((15, 63), dtype=np.float32)}, r"w1 of a network is float32\[15, 64\]"),
        ({"w2": np.zeros((64, 64))}, r"w2 of a network is float32\[64, 64\], not float64"),
        ({"b3": np.full(4, np.nan, dtype=np.float32)}, "b3 of a network is not finite"),
        ({"low": np.full(15, 3, dtype=np.float32)}, "ends before it begins"),
        ({"w3": np.zeros((64, 5), dtype=np.float32)}, "w3"),
        ({"more": np.zeros(1)}, "the arrays of a network are"),
        ({"b1": np.array([{}], dtype=object)}, "b1.npy is no array"),
        ({"meta": np.zeros(3, dtype=np.uint8)}, "meta is no JSON"),
        ({"meta": np.zeros(3)}, "meta is JSON"),
        ({"meta": {"format": 2, "kind": "q", "name": "a"}}, "format 1"),
        ({"meta": {"format": 1, "kind": "q"}}, "meta has kind, name"),
        ({"meta": {"format": 1, "kind": "q", "name": "a", "digest": "1"}}, "meta has kind, name"),
        ({"meta": {"format": 1, "kind": "v", "name": "a"}}, "kind of a network"),
        ({"meta": {"format": 1, "kind": "q", "name": "a", "features": 3}}, "features of a network"),
        ({"meta": {"format": 1, "kind": "q", "name": "a", "features": True}}, "features of a network"),
        ({"meta": {"format": 1, "kind": "q", "name": "a", "resend": 1}}, "resend is true or false"),
        ({"meta": {"format": 1, "kind": "q", "name": "a", "window": "half"}}, "window of a network"),
        ({"meta": {"format": 1, "kind": "q", "name": "a", "margin": -1}}, "margin"),
        ({"meta": {"format": 1, "kind": "q", "name": "a", "margin": float("nan")}}, "margin"),
        ({"meta": {"format": 1, "kind": "q", "name": 7}}, "name of a network"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = write(tmp_path / "a.npz", parts(random_network("q", 1)) | changes)
    with pytest.raises(LocalError, match=said):
        load_network(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    good = parts(random_network("q", 1))
    path = tmp_path / "a.npz"
    with pytest.raises(LocalError, match="compressed"):
        load_network(write(path, good, np.savez_compressed))
    write(path, good)
    whole = path.read_bytes()
    for cut in (0, 10, 1000, len(whole) - 10):
        path.write_bytes(whole[:cut])
        with pytest.raises(LocalError, match=r"no \.npz file"):
            load_network(path)
    path.write_bytes(whole + bytes(MAX_FILE_BYTES))
    with pytest.raises(LocalError, match="more than 65536 bytes"):
        load_network(path)
    with pytest.raises(OSError, match="No such file"):
        load_network(tmp_path / "b.npz")


def test_a_header_asks_for_no_memory(tmp_path: Path) -> None:
    """An array is as long as its bytes, whatever it says of itself."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)})
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w1.npy", header.getvalue())
    with pytest.raises(LocalError, match=r"w1\.npy is no array: float32\[1099511627776\] in"):
        load_network(path)


def test_too_much_to_say(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="at most 65536"):
        save_network(random_network("q", 1, command="x" * MAX_FILE_BYTES), tmp_path / "a.npz")
    with pytest.raises(LocalError, match="JSON"):
        save_network(random_network("q", 1, settings={"a": object()}), tmp_path / "a.npz")
    assert not (tmp_path / "a.npz").exists()


def test_what_ships_can_be_read() -> None:
    for name in packaged_networks():
        assert load_network(name).name == name
    with pytest.raises(LocalError, match="no weights 'nobody' in the package"):
        load_network("nobody")
