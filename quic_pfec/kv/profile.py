"""How much each part of a cache matters: measured profiles, their spread over units, and two stand-ins.

A profile is measured offline, once for a model and for one way of treating holes: the layers that matter under
zero-fill are not those that matter under a mask, so the receiver mode is part of it. It holds a value per cell of
layer x position bin (paper section III-B), the bins dividing the context whatever its length. Files are plain JSON,
decoded into a bounded type; the ones that ship lie in `profiles/` beside this module.
"""

from __future__ import annotations

import math
from importlib import resources
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from quic_pfec.kv.layout import Layout
from quic_pfec.wire.errors import LocalError

__all__ = [
    "BINS",
    "GENERIC_PROFILE_ID",
    "MAX_PROFILE_BYTES",
    "PAPER_GROUPS",
    "PROFILE_VERSION",
    "Profile",
    "Receiver",
    "builtin",
    "builtin_profiles",
    "cell_fractions",
    "decode_profile",
    "encode_profile",
    "generic_utility",
    "group_edges",
    "load_profile",
    "request_utility",
    "save_profile",
    "synthetic_utility",
    "unit_utility",
]

PROFILE_VERSION: Final = 1
MAX_PROFILE_BYTES: Final = 1 << 20
"""A profile of 256 layers x 64 bins is below 0.4 MB."""

BINS: Final = 8
"""Position bins of a profile by default (paper section III-B)."""

PAPER_GROUPS: Final = 6
"""Layer groups of the paper's profile (section III-B); ours measures every layer alone."""

TOP_SHARE: Final = 0.73
"""Share of the units that holds `share` of the utility: what rho 0.8 delivers at 8.4 % loss (scheduler section 10)."""

GENERIC_PROFILE_ID: Final = "generic"

Receiver = Literal["zero", "mask"]

_Label = Annotated[str, msgspec.Meta(min_length=1, max_length=48)]
_Text = Annotated[str, msgspec.Meta(max_length=1024)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=256)]
_Value = Annotated[float, msgspec.Meta(ge=0.0)]
_Row = Annotated[tuple[_Value, ...], msgspec.Meta(min_length=1, max_length=256)]


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Utility of each cell of layer x position bin, and where the numbers come from.

    `values[layer][bin]` >= 0 in any unit, not all zero: only ratios count. With `groups` > 0 the layers were lost in
    that many groups of neighbours (`group_edges`) and `values` has a row for each group. `fingerprint` names the exact
    model, empty if the profile holds for every model with the label `model`. `receiver` is the mode it was measured
    for. `command`, `seed`, `data`, `data_hash` (of the file, empty for the built-in text), `context_tokens` and
    `versions` say how to measure it again. Raises ValueError (LocalError through `load_profile`) if the table does not
    have one row of `bins` finite values for each layer or group.
    """

    model: _Label
    receiver: Receiver
    layers: _Count
    values: Annotated[tuple[_Row, ...], msgspec.Meta(min_length=1, max_length=256)]
    data: _Text
    context_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    command: _Text
    versions: dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=64)]]
    fingerprint: Annotated[str, msgspec.Meta(max_length=128)] = ""
    bins: _Count = BINS
    groups: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0
    data_hash: Annotated[str, msgspec.Meta(max_length=64)] = ""
    version: int = PROFILE_VERSION

    def __post_init__(self) -> None:
        if self.version != PROFILE_VERSION:
            raise LocalError(f"profile version {self.version} is not supported, expected {PROFILE_VERSION}")
        if self.groups > self.layers:
            raise LocalError(f"{self.layers} layers cannot form {self.groups} groups")
        rows, what = (self.groups, "group") if self.groups else (self.layers, "layer")
        if len(self.values) != rows:
            raise LocalError(f"the profile announces {rows} {what}s and holds {len(self.values)}")
        for index, row in enumerate(self.values):
            if len(row) != self.bins:
                raise LocalError(f"{what} {index} of the profile has {len(row)} bins, expected {self.bins}")
            if not all(math.isfinite(value) and value >= 0 for value in row):
                raise LocalError(f"{what} {index} of the profile holds a negative or non-finite value")
        if not any(any(row) for row in self.values):
            raise LocalError("the profile is zero everywhere")

    @property
    def id(self) -> str:
        """Short name for the manifest and reports, at most 64 characters: model, receiver mode, hash of the values."""
        return f"{self.model}:{self.receiver}:{xxhash.xxh3_64_hexdigest(self.table().tobytes())[:8]}"

    def table(self) -> npt.NDArray[np.float64]:
        """Utility by layer and bin, float64 [layers, bins]: a group's is divided evenly over its layers, so that the
        fractions of a cell sum to one (paper section III-B)."""
        values = np.array(self.values, dtype=np.float64)
        if not self.groups:
            return values
        sizes = np.diff(group_edges(self.layers, self.groups))
        return np.repeat(values / sizes[:, None], sizes, axis=0)

    def layer_scores(self) -> npt.NDArray[np.float64]:
        """What each layer is worth, all positions together: float64 [layers], sum 1."""
        scores = self.table().sum(axis=1)
        share: npt.NDArray[np.float64] = scores / scores.sum()
        return share


def decode_profile(data: bytes) -> Profile:
    """Profile from JSON. Raises LocalError with the reason if it is not exactly a profile."""
    if len(data) > MAX_PROFILE_BYTES:
        raise LocalError(f"a profile has at most {MAX_PROFILE_BYTES} bytes, got {len(data)}")
    try:
        return msgspec.json.decode(data, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LocalError(f"not a profile: {error}") from error


def encode_profile(profile: Profile) -> bytes:
    """The profile as indented JSON, one layer a line, ready to be put under version control."""
    checked = decode_profile(msgspec.json.encode(profile))  # bounds are enforced on decoding only
    fields = msgspec.to_builtins(checked)
    rows = ",\n".join("    " + msgspec.json.encode(row).decode() for row in fields.pop("values"))
    head = msgspec.json.format(msgspec.json.encode(fields), indent=2).decode()
    return f'{head[:-2]},\n  "values": [\n{rows}\n  ]\n}}\n'.encode()


def load_profile(path: str | Path) -> Profile:
    """Read a profile file. Raises LocalError if it is malformed, OSError if it cannot be read."""
    try:
        return decode_profile(Path(path).read_bytes())
    except LocalError as error:
        raise LocalError(f"{path}: {error}") from error


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write a profile file. Raises LocalError if a field is beyond its bounds."""
    Path(path).write_bytes(encode_profile(profile))


def builtin_profiles() -> tuple[Profile, ...]:
    """All profiles that ship with the package, by file name."""
    folder = resources.files("quic_pfec.kv").joinpath("profiles")
    if not folder.is_dir():
        return ()
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".json")), key=lambda entry: entry.name)
    return tuple(decode_profile(entry.read_bytes()) for entry in files)


def builtin(name_or_fingerprint: str, receiver: Receiver = "mask") -> Profile | None:
    """The shipped profile of a model, measured for `receiver`; None if there is none.

    A fingerprint is matched exactly and goes first, then the model label without regard to case.
    """
    candidates = [profile for profile in builtin_profiles() if profile.receiver == receiver]
    for profile in candidates:
        if profile.fingerprint and profile.fingerprint == name_or_fingerprint:
            return profile
    for profile in candidates:
        if profile.model.casefold() == name_or_fingerprint.casefold():
            return profile
    return None


def group_edges(layers: int, groups: int) -> list[int]:
    """First layer of each of `groups` groups of neighbouring layers, as even as they come, and the end behind the last.

    Raises LocalError unless 1 <= groups <= layers.
    """
    if not 1 <= groups <= layers:
        raise LocalError(f"{layers} layers cannot form {groups} groups")
    return [layers * group // groups for group in range(groups + 1)]


def cell_fractions(layout: Layout, bins: int) -> npt.NDArray[np.float64]:
    """Share of each position bin's tokens that each column carries: float64 [columns, bins].

    The bins divide the whole context of first_token + tokens. Over a whole context every bin's shares sum to one; in
    an increment they sum to the part of the bin that is new, as its other tokens are at the receiver already.
    """
    width = layout.context_tokens / bins
    edges = width * np.arange(bins + 1)
    start = layout.first_token + layout.block_tokens * np.arange(layout.columns)
    stop = np.minimum(start + layout.block_tokens, layout.context_tokens)
    overlap = np.minimum(stop[:, None], edges[1:]) - np.maximum(start[:, None], edges[:-1])
    fractions: npt.NDArray[np.float64] = np.maximum(overlap, 0.0) / width
    return fractions


def unit_utility(layout: Layout, profile: Profile) -> npt.NDArray[np.float64]:
    """Utility of every unit, float64 [unit_count]: each cell divided over the units by token overlap (paper III-B).

    Raises LocalError if the profile has another number of layers, or nothing for the tokens of this hand-off.
    """
    if profile.layers != len(layout.layers):
        raise LocalError(f"profile {profile.id} has {profile.layers} layers, the cache {len(layout.layers)}")
    table, fractions = profile.table(), cell_fractions(layout, profile.bins)
    spread = np.zeros((profile.layers, layout.columns))
    for index in range(profile.bins):
        # Not a matrix product: BLAS rounds by where an element stands, and equal blocks must tie exactly.
        spread += table[:, index, None] * fractions[None, :, index]
    utility = spread.reshape(-1)
    if not utility.any():
        raise LocalError(f"profile {profile.id} is zero for the tokens of this hand-off")
    return utility


def request_utility(
    layout: Layout, mass: npt.NDArray[np.float64], profile: Profile | None = None
) -> npt.NDArray[np.float64]:
    """Utility of every unit for one request, float64 [unit_count]: attention mass of its tokens x its layer's score.

    `mass`: float64 [layers, context_tokens], >= 0: the attention that each row of the whole context gets from the
    prompt's last queries (`llm.attention_mass`). `profile` gives the layer scores, measured for the receiver in use;
    without one all layers weigh the same. Raises LocalError for shapes that do not fit, and for a mass that is zero on
    all of this hand-off's tokens.
    """
    layers = len(layout.layers)
    if mass.shape != (layers, layout.context_tokens):
        raise LocalError(f"mass has shape {list(mass.shape)}, expected {[layers, layout.context_tokens]}")
    if profile is not None and profile.layers != layers:
        raise LocalError(f"profile {profile.id} has {profile.layers} layers, the cache {layers}")
    starts = layout.first_token + layout.block_tokens * np.arange(layout.columns)
    columns = np.add.reduceat(mass, starts, axis=1)
    scores = np.ones(layers) if profile is None else profile.layer_scores()
    utility: npt.NDArray[np.float64] = (scores[:, None] * columns).reshape(-1)
    if not utility.any():
        raise LocalError("the attention mass is zero on the tokens of this hand-off")
    return utility


def generic_utility(layout: Layout) -> npt.NDArray[np.float64]:
    """Model-independent guess for when no profile exists, float64 [unit_count]: NOT measured on any model.

    The shape of the synthetic profile without its noise: the first layers matter more, and so do the first and the
    last positions of the context (models-and-data: the prefix and the last eighth carry nearly everything).
    """
    chunks = layout.context_tokens / layout.block_tokens
    start = layout.first_token + layout.block_tokens * np.arange(layout.columns)
    rows = np.minimum(layout.block_tokens, layout.context_tokens - start)
    shape = np.outer(_layer_shape(len(layout.layers)), _chunk_shape(start / layout.block_tokens, chunks))
    utility: npt.NDArray[np.float64] = shape * (rows / layout.block_tokens)
    return utility.reshape(-1)


def synthetic_utility(geometry: Layout | tuple[int, int], share: float, seed: int) -> npt.NDArray[np.float64]:
    """Random utility for simulations, float64 [layers * columns] by unit id, summing to 1 (scheduler section 10).

    `geometry` is a layout or (layers, columns). The layer-chunk formula with log-normal noise is raised to the power
    at which the top 73 % of the units hold `share` of all utility; 0.73 < share < 1. Raises LocalError for a share
    that no power reaches.
    """
    layers, columns = (len(geometry.layers), geometry.columns) if isinstance(geometry, Layout) else geometry
    count = layers * columns
    top = round(TOP_SHARE * count)
    if layers < 1 or columns < 1 or top == count:
        raise LocalError(f"a synthetic profile needs at least two units, got {layers} layers x {columns} columns")
    noise = np.exp(0.5 * np.random.default_rng(seed).standard_normal((layers, columns)))
    shape = np.outer(_layer_shape(layers), _chunk_shape(np.arange(columns, dtype=np.float64), float(columns)))
    # Logarithms below the maximum: no power overflows, and the largest unit stays at 1.
    logs = np.log(shape * noise).reshape(-1)
    logs -= logs.max()
    ranked = np.sort(logs)[::-1]

    def top_share(power: float) -> float:
        weights = np.exp(power * ranked)
        return float(weights[:top].sum() / weights.sum())

    if not top_share(0.0) < share < 1.0:
        raise LocalError(f"share must lie between {top_share(0.0):.3f} and 1, got {share}")
    low, high = 0.0, 1.0
    while top_share(high) < share:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if top_share(middle) < share else (low, middle)
    utility: npt.NDArray[np.float64] = np.exp(high * logs)
    return utility / float(utility.sum())


def _layer_shape(layers: int) -> npt.NDArray[np.float64]:
    layer = np.arange(layers)
    shape: npt.NDArray[np.float64] = 1 + 4 * np.exp(-layer / 3) + 0.5 * np.sin(layer / 4) ** 2
    return shape


def _chunk_shape(chunk: npt.NDArray[np.float64], chunks: float) -> npt.NDArray[np.float64]:
    # Chunks may start between whole numbers in an increment, and the last one may begin less than one before the end.
    to_end = np.maximum(chunks - 1 - chunk, 0.0)
    shape: npt.NDArray[np.float64] = 1 + 4 * np.exp(-chunk / 3) + 3 * np.exp(-to_end / (0.08 * chunks + 1))
    return shape
