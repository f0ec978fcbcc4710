"""quic_pfec.kv.auto: bf16 exactly as long as it fits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from quic_pfec.kv.auto import choose_wire_dtype, weigh
from quic_pfec.kv.layout import LayerShape, Layout

LAYOUT = Layout((LayerShape(3, 64),) * 30, tokens=512)  # 8,640 symbols of 1,371 bytes


@dataclass(frozen=True)
class Path:
    slot_s: float


def test_bf16_while_all_of_it_and_what_is_lost_can_be_sent() -> None:
    asked = []

    def path(symbol_size: int) -> Path:
        asked.append(symbol_size)
        return Path(symbol_size * 8 / 1e8)

    needed_s = 8640 * 1371 * 8 / 1e8
    for loss in (0.0, 0.1):
        assert choose_wire_dtype(LAYOUT, path, needed_s * (1 + loss) * 1.001, loss) == "bf16"
        assert choose_wire_dtype(LAYOUT, path, needed_s * (1 + loss) * 0.999, loss) == "progressive"
    assert set(asked) == {1371}


@pytest.mark.parametrize("remaining_s", [0.0, -1.0])
def test_no_time_at_all(remaining_s: float) -> None:
    assert choose_wire_dtype(LAYOUT, lambda _: Path(1e-4), remaining_s, 0.0) == "progressive"


def test_the_grounds_are_said_in_a_line() -> None:
    tight = weigh(LAYOUT, lambda _: Path(1e-4), 0.5, 0.1)
    assert tight.needed_s == pytest.approx(8640 * 1e-4 * 1.1)
    assert tight.reason == "bf16 needs 0.95 s of the 0.5 s that are left, with 10% lost: that does not fit"
    assert weigh(LAYOUT, lambda _: Path(1e-4), 2.0, 0.0).reason.endswith(
        "of the 2 s that are left, with 0% lost: that fits"
    )


def test_what_the_layout_was_made_for_does_not_matter() -> None:
    wide = Layout(LAYOUT.layers, 512, wire_dtype="fp32")
    needed_s = 8640 * 1e-4
    assert choose_wire_dtype(wide, lambda _: Path(1e-4), needed_s * 1.01, 0.0) == "bf16"
