"""The little network of a learned policy, 15-64-64-4 or -5: its file, its checks, and its arithmetic in numpy.

This module is the specification of schedule/network.c, which decides on the data path; nothing here or there needs the
library that trained it. A file is an uncompressed .npz of plain arrays, at most `MAX_FILE_BYTES`, every one checked
before it is used; the weights that ship lie in `weights/` beside this module.

| array | what |
|---|---|
| w1, b1, w2, b2, w3, b3 | float32[15,64], [64], [64,64], [64], [64,A], [A]: y = relu(relu(x w1 + b1) w2 + b2) w3 + b3 |
| low, high | float32[15]: the range of each feature in training |
| meta | uint8: a JSON object in UTF-8, the other fields of `Network` and `"format": 1` |

A is 4, or 5 with resends: the choices of `schedule.features`. The outputs are values of the choices ("q") or what each
would gain over a base policy in whole units ("advantage"). A decision reads each of the 5,444 parameters (5,509 with
resends) once, whatever the input: bounded work, about a microsecond, which is why no clock guards it.
"""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from quic_pfec.schedule.features import CHOICES, NAMES
from quic_pfec.wire.errors import LocalError

__all__ = ["HIDDEN", "MAX_FILE_BYTES", "Network", "forward", "load_network", "packaged_networks", "save_network"]

HIDDEN = 64
MAX_FILE_BYTES = 64 * 1024  # the arrays take 23 KB
_FORMAT = 1
_FOLDER = Path(__file__).parent / "weights"  # importlib.resources would load `tempfile` and `random` into the core
_MATRICES = ("w1", "b1", "w2", "b2", "w3", "b3", "low", "high")
_META = ("kind", "features", "resend", "window", "margin", "name", "seed", "command", "versions", "settings", "cells")

Kind = Literal["q", "advantage"]


def _shape(name: str, choices: int) -> tuple[int, ...]:
    inputs = len(NAMES)
    return {
        "w1": (inputs, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, HIDDEN), "b2": (HIDDEN,), "w3": (HIDDEN, choices),
        "b3": (choices,), "low": (inputs,), "high": (inputs,),
    }[name]  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Network:
    """Weights and where they come from. Raises LocalError naming what is wrong; the arrays are kept as private copies.

    kind: what the outputs are; features: version of the features, 1 or 2; resend: is that among the choices; window:
    coding set of the policy's repairs; margin: what an advantage must exceed to be acted upon (in units, >= 0), None =
    never act; cells: of an advantage network, what its gate found in each cell; digest: of all that decides; the rest
    says how it was made.
    """

    w1: NDArray[np.float32]
    b1: NDArray[np.float32]
    w2: NDArray[np.float32]
    b2: NDArray[np.float32]
    w3: NDArray[np.float32]
    b3: NDArray[np.float32]
    low: NDArray[np.float32]
    high: NDArray[np.float32]
    kind: Kind
    name: str
    features: Literal[1, 2] = 1
    resend: bool = False
    window: Literal["sack", "full"] = "sack"
    margin: float | None = None
    seed: int = 0
    command: str = ""
    versions: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    cells: Any = None
    digest: str = field(init=False, default="")

    def __post_init__(self) -> None:
        values: dict[str, Any] = {name: getattr(self, name) for name in _META}
        for name, possible in (("kind", get_args(Kind)), ("features", (1, 2)), ("window", ("sack", "full"))):
            if type(values[name]) is not type(possible[0]) or values[name] not in possible:
                raise LocalError(f"{name} of a network is one of {possible}, not {values[name]!r}")
        if type(self.resend) is not bool:
            raise LocalError(f"resend is true or false, not {values['resend']!r}")
        margin = values["margin"]
        if margin is not None and (type(margin) not in (int, float) or not 0.0 <= margin < inf):
            raise LocalError(f"a margin is a number of units, not negative, or null: {margin!r}")
        for name, kind in (("name", str), ("seed", int), ("command", str), ("versions", dict), ("settings", dict)):
            if not isinstance(values[name], kind):
                raise LocalError(f"{name} of a network is of type {kind.__name__}, not {values[name]!r}")
        for name in _MATRICES:
            value: object = getattr(self, name)
            shape = _shape(name, self.choices)
            if not isinstance(value, np.ndarray) or value.dtype != np.float32 or value.shape != shape:
                described = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)
                raise LocalError(f"{name} of a network is float32{list(shape)}, not {described}")
            if not np.isfinite(value).all():
                raise LocalError(f"{name} of a network is not finite")
            private = np.array(value, order="C")
            private.flags.writeable = False
            object.__setattr__(self, name, private)
        if (self.low > self.high).any():
            raise LocalError("a feature's range in training ends before it begins")
        sum_ = xxhash.xxh3_64(repr((self.kind, self.features, self.resend, margin)).encode())
        for name in _MATRICES:
            sum_.update(getattr(self, name).tobytes())
        object.__setattr__(self, "digest", sum_.hexdigest())

    @property
    def label(self) -> str:
        """Name and digest: two networks of one label decide alike."""
        return f"{self.name}/{self.digest}"

    def __repr__(self) -> str:
        return f"Network({self.label!r}, kind={self.kind!r})"

    @property
    def choices(self) -> int:
        """A: how many of `schedule.features.CHOICES`, from the first."""
        return len(CHOICES) if self.resend else len(CHOICES) - 1


def forward(network: Network, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32[B, A] of the features float32[B, 15]. Raises LocalError for another shape.

    Every sum runs over the inputs in their order, as in C: the same bits on every machine, whatever the rows beside.
    """
    if x.ndim != 2 or x.shape[1] != len(NAMES) or x.dtype != np.float32:
        raise LocalError(f"features are float32[B, {len(NAMES)}], not {x.dtype}{list(x.shape)}")
    with np.errstate(over="ignore", invalid="ignore"):  # weights of any size: what uses the outputs looks at them
        first = np.maximum(_layer(x, network.w1, network.b1), np.float32(0))
        second = np.maximum(_layer(first, network.w2, network.b2), np.float32(0))
        return _layer(second, network.w3, network.b3)


def _layer(x: NDArray[np.float32], w: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    out = np.empty((len(x), len(b)), dtype=np.float32)
    for row, sums in zip(x, out, strict=True):
        sums[:] = np.add.accumulate(np.vstack((b, row[:, None] * w)))[-1]
    return out


def packaged_networks() -> tuple[str, ...]:
    """Names of the weights that ship with the package, sorted."""
    return tuple(sorted(file.stem for file in _FOLDER.glob("*.npz")))


def save_network(network: Network, path: str | Path) -> None:
    """Write the file; the same network gives the same bytes. Raises LocalError if it would be too large."""
    meta = {"format": _FORMAT} | {name: getattr(network, name) for name in _META}
    try:
        text = json.dumps(meta, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise LocalError(f"what a network says of itself must be JSON: {error}") from None
    arrays = {name: getattr(network, name) for name in _MATRICES}
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays, meta=np.frombuffer(text.encode(), dtype=np.uint8))
    if buffer.tell() > MAX_FILE_BYTES:
        raise LocalError(f"a file of weights of {buffer.tell()} bytes, at most {MAX_FILE_BYTES} are read")
    Path(path).write_bytes(buffer.getvalue())


def load_network(source: str | Path) -> Network:
    """The network of a packaged name or of a file, which a name ending in ".npz" and any Path are.

    Raises LocalError naming what is wrong with the file, or the names if there is no such one; OSError as `open` does.
    """
    if isinstance(source, str) and not source.endswith(".npz"):
        if source not in packaged_networks():
            names = ", ".join(packaged_networks()) or "there are none"
            raise LocalError(f"no weights {source!r} in the package: {names}")
        data = (_FOLDER / f"{source}.npz").read_bytes()
    else:
        with Path(source).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise LocalError(f"{source}: more than {MAX_FILE_BYTES} bytes of weights")
    try:
        return _parse(data)
    except LocalError as error:
        raise LocalError(f"{source}: {error}") from None


def _parse(data: bytes) -> Network:
    arrays: dict[str, Any] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for info in archive.infolist():
                # Stored as they are: nothing in the file can ask for more memory than the file itself has.
                if info.compress_type != zipfile.ZIP_STORED or info.file_size > len(data):
                    raise LocalError(f"{info.filename} is compressed")
                arrays[info.filename.removesuffix(".npy")] = _array(info.filename, archive.read(info))
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise LocalError(f"no .npz file: {error}") from None
    expected = {*_MATRICES, "meta"}
    if set(arrays) != expected:
        raise LocalError(f"the arrays of a network are {', '.join(sorted(expected))}, not {', '.join(sorted(arrays))}")
    meta_bytes = arrays.pop("meta")
    if meta_bytes.dtype != np.uint8 or meta_bytes.ndim != 1:
        raise LocalError("meta is JSON in an array of uint8")
    try:
        meta = json.loads(meta_bytes.tobytes().decode())
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise LocalError(f"meta is no JSON: {error}") from None
    if not isinstance(meta, dict) or meta.pop("format", None) != _FORMAT:
        raise LocalError(f"a network of format {_FORMAT} is needed")
    if "kind" not in meta or "name" not in meta or not set(meta) <= set(_META):
        raise LocalError(f"meta has kind, name and of {', '.join(_META)} what it needs, not {', '.join(sorted(meta))}")
    return Network(**arrays, **meta)


def _array(name: str, data: bytes) -> NDArray[Any]:
    stream = io.BytesIO(data)
    try:
        if np.lib.format.read_magic(stream) != (1, 0):
            raise ValueError("another version of .npy")
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        size = int(np.prod(shape, dtype=object)) if shape else 1
        if dtype.hasobject or size * dtype.itemsize != len(data) - stream.tell():
            raise ValueError(f"{dtype}{list(shape)} in {len(data)} bytes")
        stream.seek(0)
        array: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
    except (ValueError, EOFError, TypeError, OverflowError) as error:
        raise LocalError(f"{name} is no array: {error}") from None
    return array
