"""Cells of the operating points, and what their channels draw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quic_pfec.sim.channel import PRESETS, GilbertElliottChannel, losses, parse
from quic_pfec.sim.points import FIVE_G, POINTS, Cell, cells, draw_losses, hand_off
from quic_pfec.wire.errors import LocalError


def test_the_paper_s_geometry() -> None:
    paper = cells("paper")
    assert {(cell.model, cell.layers, cell.columns, cell.packets) for cell in paper} == {
        ("qwen2.5-7b", 28, 96, 24), ("llama-3.1-8b", 32, 96, 48),
    }  # fmt: skip
    assert {(cell.rho, cell.budget) for cell in paper} == {
        (rho, budget) for rho in (0.8, 1.0) for budget in (0.03, 0.05, 0.1, 0.15, None)
    }
    assert paper[0].slots == int(0.8 * 64_512)
    assert paper[0].t_rtt == pytest.approx(288, abs=1)


def test_the_short_point_is_28_cells_and_20_fast_ones() -> None:
    short = cells("short")
    slow = [cell for cell in short if cell.model == "100Mbps"]
    assert (len(slow), len(short)) == (28, 48)
    assert {cell.rtt_slots for cell in short} == {179, 1786}
    assert all(cell.rtt_slots * cell.slot_s == pytest.approx(0.02, rel=0.01) for cell in short)


def test_names_of_cells_are_their_own() -> None:
    for point in POINTS:
        assert len(set(cells(point))) == len(cells(point))
        assert {cell.point for cell in cells(point)} == {point}
    with pytest.raises(LocalError, match="no point 'moon'"):
        cells("moon")


def test_5g_is_a_label_or_a_trace(tmp_path: Path) -> None:
    assert parse(FIVE_G).mean_loss == pytest.approx(0.1165, abs=0.0005)
    assert {cell.channel for cell in cells("5g")} == {FIVE_G}
    assert {cell.rtt_slots for cell in cells("5g")} == {41}
    file = tmp_path / "losses.txt"
    file.write_text("0" * 900 + "1" * 300)
    traced = cells("5g", str(file))[0]
    bits = draw_losses(traced.channel, 1000, traced.slot_s, 3)
    assert 100 <= bits.sum() <= 300
    assert bits.tolist() != draw_losses(traced.channel, 1000, traced.slot_s, 4).tolist()  # begins elsewhere


def test_a_hand_off_is_a_function_of_its_seed() -> None:
    cell = cells("short")[3]
    first, again, other = hand_off(cell, 1), hand_off(cell, 1), hand_off(cell, 2)
    assert first.losses.tolist() == again.losses.tolist() != other.losses.tolist()
    assert first.utility.tolist() == again.utility.tolist() != other.utility.tolist()
    assert (np.diff(first.utility[first.ranked]) <= 0).all()
    assert len(first.losses) == cell.slots


def test_channels_that_change() -> None:
    drawn = draw_losses("none>0.5,0.5,0.5,0.5", 2000, 1e-4, 1)
    assert not drawn[:1000].any()
    assert drawn[1000:].mean() == pytest.approx(0.5, abs=0.06)
    plain = losses(GilbertElliottChannel(PRESETS["paper"], 5), 2000)
    silent = draw_losses("paper+0.05", 2000, 1e-4, 5)
    ones = np.flatnonzero(silent != plain)
    assert 300 < len(ones) <= 500
    begin = next(start for start in range(1501) if silent[start : start + 500].all())
    assert begin <= ones[0] <= ones[-1] < begin + 500
    assert draw_losses("paper+9", 100, 1e-4, 5).all()
    with pytest.raises(ValueError, match="neither a channel"):
        draw_losses("calm", 10, 1e-4, 0)


def test_steps_of_the_path() -> None:
    plain = Cell("heldout", "m", 0.8, "paper", 2, 3, 100)
    assert plain.settings(1).steps == ()
    halved = Cell("heldout", "m", 0.8, "paper", 2, 3, 100, rate_step=0.5, rtt_step=2.0).settings(1)
    assert halved.steps[0].slot == 50
    assert halved.steps[0].slot_s == pytest.approx(2 * plain.slot_s)
    assert halved.steps[0].rtt_s == pytest.approx(2 * 179 * plain.slot_s)
