"""quic_pfec.kv.profile: the file format, the spread over units, the stand-ins."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.kv import profile as profile_module
from quic_pfec.kv.layout import LayerShape, Layout
from quic_pfec.kv.order import order_units
from quic_pfec.kv.profile import (
    Profile,
    builtin,
    builtin_profiles,
    cell_fractions,
    decode_profile,
    encode_profile,
    generic_utility,
    group_edges,
    load_profile,
    request_utility,
    save_profile,
    synthetic_utility,
    unit_utility,
)
from quic_pfec.wire.errors import LocalError


def make_profile(values: list[list[float]] | None = None, **changes: object) -> Profile:
    rows = values if values is not None else [[4.0, 1.0, 0.0, 2.0], [1.0, 1.0, 1.0, 1.0]]
    fields: dict[str, object] = {
        "model": "Tiny-2L",
        "fingerprint": "tiny:0123",
        "receiver": "mask",
        "layers": len(rows),
        "bins": len(rows[0]),
        "values": tuple(tuple(row) for row in rows),
        "data": "made up",
        "context_tokens": 1024,
        "seed": 7,
        "command": "quic-pfec profile --seed 7",
        "versions": {"numpy": "2"},
    }
    return Profile(**(fields | changes))  # type: ignore[arg-type]


def layout_of(tokens: int, first_token: int = 0, layers: int = 2, block_tokens: int = 16) -> Layout:
    return Layout((LayerShape(1, 2),) * layers, tokens, first_token, block_tokens)


def test_file_round_trip(tmp_path: Path) -> None:
    profile = make_profile([[0.1, 1e-300, 1e300], [1 / 3, 0.0, 5.0]])
    path = tmp_path / "tiny.json"
    save_profile(profile, path)
    assert load_profile(path) == profile
    assert json.loads(path.read_text())["values"][1][0] == 1 / 3
    # One layer a line keeps diffs readable.
    assert len(path.read_text().splitlines()) > 2 + profile.layers
    assert encode_profile(load_profile(path)) == path.read_bytes()


def test_id_names_model_mode_and_values() -> None:
    profile = make_profile()
    assert profile.id.startswith("Tiny-2L:mask:")
    assert profile.id != make_profile([[4.0, 1.0, 0.0, 2.5], [1.0, 1.0, 1.0, 1.0]]).id
    assert len(make_profile(model="m" * 48).id) <= 64


def as_json(**changes: object) -> bytes:
    fields = json.loads(encode_profile(make_profile()))
    fields |= changes
    return json.dumps({key: value for key, value in fields.items() if value is not ...}).encode()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a profile"),
        (b"[]", "not a profile"),
        (b'{"model": "\xff"}', "not a profile"),
        (as_json(model=...), "missing required field `model`"),
        (as_json(extra=1), "unknown field `extra`"),
        (as_json(version=2), "version 2 is not supported"),
        (as_json(version="1"), "Expected `int`"),
        (as_json(receiver="recompute"), "Invalid enum value 'recompute'"),
        (as_json(layers=3), "announces 3 layers and holds 2"),
        (as_json(bins=8), "layer 0 of the profile has 4 bins"),
        (as_json(values=[[1, 1, 1, 1], [1, 1, 1, -1]]), "Expected `float` >= 0.0"),
        (as_json(values=[[0, 0, 0, 0], [0, 0, 0, 0]]), "zero everywhere"),
        (as_json(values=[]), "not a profile"),
        (as_json(values=[[1, 1, 1, 1], [1, 1, 1, float("nan")]]), "not a profile"),
        (as_json(values=[[1, 1, 1, 1], [1, 1, 1, float("inf")]]), "not a profile"),
        (as_json(values=[[1, 1, 1, 1], [1, 1, 1, "1"]]), "Expected `float`"),
        (as_json(context_tokens=0), "Expected `int` >= 1"),
        (as_json(seed=-1), "Expected `int` >= 0"),
        (as_json(model="m" * 49), "length <= 48"),
        (b" " * (1 << 20) + b"{}", "at most 1048576 bytes"),
    ],
)
def test_malformed_profiles(data: bytes, reason: str) -> None:
    with pytest.raises(LocalError, match=reason):
        decode_profile(data)


def test_load_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(b"{}")
    with pytest.raises(LocalError, match=r"bad\.json: not a profile"):
        load_profile(path)
    with pytest.raises(OSError):
        load_profile(tmp_path / "absent.json")


def test_save_refuses_what_load_would(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="not a profile"):
        save_profile(make_profile(model=""), tmp_path / "bad.json")
    with pytest.raises(LocalError, match="non-finite"):
        make_profile([[float("inf")]])


def test_builtin_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, zero = make_profile(), make_profile(receiver="zero")
    # A label that equals another profile's fingerprint: the fingerprint goes first.
    clash = make_profile(model="tiny:0123", fingerprint="")
    monkeypatch.setattr(profile_module, "builtin_profiles", lambda: (clash, mask, zero))
    assert builtin("tiny:0123") is mask
    assert builtin("tiny-2l") is mask
    assert builtin("Tiny-2L", "zero") is zero
    assert builtin("") is None
    assert builtin("another") is None


def test_builtin_reads_the_package_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    monkeypatch.setattr(profile_module.resources, "files", lambda package: tmp_path)
    assert builtin_profiles() == ()
    folder.mkdir()
    save_profile(make_profile(receiver="zero"), folder / "b.json")
    save_profile(make_profile(), folder / "a.json")
    (folder / "notes.txt").write_text("not a profile")
    assert [profile.receiver for profile in builtin_profiles()] == ["mask", "zero"]
    assert builtin("Tiny-2L", "zero") == make_profile(receiver="zero")


def test_every_shipped_profile_loads() -> None:
    for profile in builtin_profiles():
        found = builtin(profile.fingerprint or profile.model, profile.receiver)
        assert found == profile


def slow_fractions(layout: Layout, bins: int) -> np.ndarray:
    """Overlap by counting hundredths of a token, each a little interval of its own."""
    steps = 120  # a multiple of all bin counts used, so that no step straddles an edge
    context = layout.first_token + layout.tokens
    result = np.zeros((layout.columns, bins))
    for step in range(layout.first_token * steps, context * steps):
        column = (step // steps - layout.first_token) // layout.block_tokens
        result[column, step * bins // (context * steps)] += bins / (context * steps)
    return result


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 60),
    first_token=st.integers(0, 40),
    block_tokens=st.sampled_from([1, 5, 16]),
    bins=st.sampled_from([1, 2, 3, 8]),
)
def test_cell_fractions(tokens: int, first_token: int, block_tokens: int, bins: int) -> None:
    layout = layout_of(tokens, first_token, block_tokens=block_tokens)
    fractions = cell_fractions(layout, bins)
    assert fractions.shape == (layout.columns, bins)
    assert np.allclose(fractions, slow_fractions(layout, bins), atol=1e-9)
    if first_token == 0:
        assert np.allclose(fractions.sum(axis=0), 1.0)
    # Whatever the increment, all shares together are its part of the context.
    assert fractions.sum() / bins == pytest.approx(tokens / (first_token + tokens))


def test_utility_of_a_whole_context_is_the_profile() -> None:
    profile = make_profile()
    utility = unit_utility(layout_of(256), profile).reshape(2, 16)
    # 256 tokens, 4 bins of 64: four columns share each cell evenly.
    assert np.allclose(utility[0], np.repeat([1.0, 0.25, 0.0, 0.5], 4))
    for tokens in (1, 7, 100, 333):
        spread = unit_utility(layout_of(tokens), profile).reshape(2, -1)
        assert np.allclose(spread.sum(axis=1), profile.table().sum(axis=1))


def test_utility_of_an_increment_is_its_part_of_the_context() -> None:
    profile = make_profile()
    whole = unit_utility(layout_of(256), profile).reshape(2, 16)
    increment = unit_utility(layout_of(96, first_token=160), profile).reshape(2, 6)
    assert np.allclose(increment, whole[:, 10:])


def test_utility_refuses_another_model_and_empty_cells() -> None:
    with pytest.raises(LocalError, match="2 layers, the cache 3"):
        unit_utility(layout_of(64, layers=3), make_profile())
    with pytest.raises(LocalError, match="zero for the tokens"):
        unit_utility(layout_of(16, first_token=48), make_profile([[1.0, 1.0, 1.0, 0.0]] * 2))


def test_generic_utility_prefers_first_layers_and_both_ends() -> None:
    utility = generic_utility(layout_of(1024, layers=12)).reshape(12, 64)
    assert (utility > 0).all()
    assert (utility[0] > utility[4]).all()
    assert (utility[4] > 2 * utility[0] / 5).any()
    for row in utility:
        assert row[0] > row[1] > row[20]
        assert row[63] > row[40] > 0
    short = generic_utility(layout_of(17)).reshape(2, 2)
    assert (short[:, 1] < short[:, 0] / 4).all()  # one row of sixteen
    increment = generic_utility(layout_of(16, first_token=1008, layers=12)).reshape(12, 1)
    assert np.allclose(increment[:, 0], utility[:, 63])


@pytest.mark.parametrize("geometry", [(30, 96), (4, 8), (28, 96)])
@pytest.mark.parametrize("share", [0.85, 0.95, 0.99])
def test_synthetic_utility_concentrates_as_asked(geometry: tuple[int, int], share: float) -> None:
    utility = synthetic_utility(geometry, share, seed=5)
    count = geometry[0] * geometry[1]
    assert utility.shape == (count,)
    assert utility.sum() == pytest.approx(1.0)
    top = np.sort(utility)[::-1][: round(0.73 * count)].sum()
    assert top == pytest.approx(share, abs=1e-6)


def test_synthetic_utility_follows_the_stated_formula() -> None:
    layers, columns, seed = 5, 7, 11
    noise = np.random.default_rng(seed).standard_normal((layers, columns))
    base = np.empty((layers, columns))
    for layer in range(layers):
        for p in range(columns):
            base[layer, p] = (
                (1 + 4 * np.exp(-layer / 3) + 0.5 * np.sin(layer / 4) ** 2)
                * (1 + 4 * np.exp(-p / 3) + 3 * np.exp(-(columns - 1 - p) / (0.08 * columns + 1)))
                * np.exp(0.5 * noise[layer, p])
            )
    got = np.log(synthetic_utility((layers, columns), 0.9, seed))
    logs = np.log(base).reshape(-1)
    power = (got[0] - got[1]) / (logs[0] - logs[1])
    assert np.allclose(got - got[0], power * (logs - logs[0]))


def test_synthetic_utility_is_seeded_and_takes_a_layout() -> None:
    assert np.array_equal(synthetic_utility((2, 4), 0.9, 1), synthetic_utility(layout_of(60), 0.9, 1))
    assert not np.array_equal(synthetic_utility((2, 4), 0.9, 1), synthetic_utility((2, 4), 0.9, 2))


@pytest.mark.parametrize(
    ("geometry", "share"),
    [((1, 1), 0.9), ((0, 5), 0.9), ((4, 8), 1.0), ((4, 8), 0.7), ((4, 8), float("nan"))],
)
def test_synthetic_utility_refuses(geometry: tuple[int, int], share: float) -> None:
    with pytest.raises(LocalError):
        synthetic_utility(geometry, share, 0)


def grouped(layers: int, groups: int, bins: int, seed: int) -> Profile:
    values = np.random.default_rng(seed).random((groups, bins)).tolist()
    return make_profile(values, layers=layers, groups=groups)


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 30),
    groups=st.integers(1, 6),
    bins=st.sampled_from([1, 3, 6, 8]),
    tokens=st.integers(8, 400),
    seed=st.integers(0, 99),
)
def test_a_cell_is_shared_out_whole_and_evenly(layers: int, groups: int, bins: int, tokens: int, seed: int) -> None:
    """The fractions of a cell sum to one, however layers, tokens and padding fall (paper section III-B)."""
    groups = min(groups, layers)
    profile = grouped(layers, groups, bins, seed)
    layout = layout_of(tokens, layers=layers)
    utility = unit_utility(layout, profile).reshape(layers, layout.columns)
    values = np.array(profile.values)
    edges = group_edges(layers, groups)
    assert edges[0] == 0
    assert edges[-1] == layers
    for group in range(groups):
        part = utility[edges[group] : edges[group + 1]]
        assert part.sum() == pytest.approx(values[group].sum())
        # Bit-equal within a group: only then do ties keep the layers of a token column together.
        assert (part == part[0]).all()
    # Padding carries zero: the last column counts with the rows it has.
    rows = tokens - 16 * (layout.columns - 1)
    assert cell_fractions(layout, 1)[-1, 0] == pytest.approx(rows / tokens)


@settings(max_examples=30, deadline=None)
@given(layers=st.integers(1, 30), tokens=st.integers(8, 1700), seed=st.integers(0, 99))
def test_ties_of_a_group_go_column_by_column(layers: int, tokens: int, seed: int) -> None:
    groups = min(6, layers)
    layout = layout_of(tokens, layers=layers)
    order = order_units(layout, "utility", unit_utility(layout, grouped(layers, groups, 8, seed)))
    edges = group_edges(layers, groups)
    group_of = np.repeat(np.arange(groups), np.diff(edges))
    place = np.empty(layout.unit_count, dtype=int)
    place[order] = np.arange(layout.unit_count)
    for group in range(groups):
        mine = place.reshape(layers, -1)[group_of == group]
        # All layers of a group send a token column in one go.
        assert (mine.max(axis=0) - mine.min(axis=0) == len(mine) - 1).all()


def test_groups_must_fit() -> None:
    with pytest.raises(LocalError, match="2 layers cannot form 3 groups"):
        make_profile([[1.0]] * 3, layers=2, groups=3)
    with pytest.raises(LocalError, match="announces 2 groups and holds 3"):
        make_profile([[1.0]] * 3, layers=6, groups=2)
    with pytest.raises(LocalError, match="2 layers cannot form 0 groups"):
        group_edges(2, 0)
    profile = make_profile([[3.0, 1.0], [0.0, 4.0]], layers=5, groups=2)
    assert profile.table().tolist() == [[1.5, 0.5]] * 2 + [[0.0, 4 / 3]] * 3
    assert profile.layer_scores() == pytest.approx([0.25, 0.25, 1 / 6, 1 / 6, 1 / 6])
    assert decode_profile(encode_profile(profile)) == profile


def test_request_utility_sums_a_columns_rows() -> None:
    mass = np.arange(2 * 40, dtype=np.float64).reshape(2, 40)
    layout = layout_of(40)
    plain = request_utility(layout, mass).reshape(2, 3)
    assert plain.tolist() == [[mass[layer, a:b].sum() for a, b in ((0, 16), (16, 32), (32, 40))] for layer in (0, 1)]
    weighed = request_utility(layout, mass, make_profile([[3.0, 0.0], [0.5, 0.5]])).reshape(2, 3)
    assert np.allclose(weighed, plain * [[0.75], [0.25]])
    increment = request_utility(layout_of(24, first_token=16), mass).reshape(2, 2)
    assert np.allclose(increment, plain[:, 1:])


@pytest.mark.parametrize(
    ("mass", "reason"),
    [(np.ones((2, 39)), "mass has shape"), (np.ones((3, 40)), "mass has shape"), (np.zeros((2, 40)), "zero on the")],
)
def test_request_utility_refuses(mass: np.ndarray, reason: str) -> None:
    with pytest.raises(LocalError, match=reason):
        request_utility(layout_of(40), mass)
    with pytest.raises(LocalError, match="1 layers, the cache 2"):
        request_utility(layout_of(40), np.ones((2, 40)), make_profile([[1.0]]))


def test_profile_is_immutable() -> None:
    with pytest.raises(AttributeError):
        make_profile().model = "other"  # type: ignore[misc]
    assert isinstance(make_profile(), msgspec.Struct)
