"""The cost model: three passes make it, one bad moment does not break it, and it says no before time is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from quic_pfec.kv import hf  # noqa: E402
from quic_pfec.kv.recompute import hole_columns  # noqa: E402
from quic_pfec.llm import generate, models  # noqa: E402
from quic_pfec.llm.recompute import MARGIN, MAX_CORRECTION, PassClock, PassCost, solve  # noqa: E402

pytestmark = pytest.mark.model
torch.set_num_threads(1)

CONTEXT = [(5 * i * i + i) % 256 for i in range(600)]
COST = PassCost(0.01, 0.001, 1e-6)


class Time:
    """A clock that each pass over n columns moves on by `cost_s` a column."""

    def __init__(self, cost_s: float = 0.0) -> None:
        self.now = 100.0
        self.cost_s = cost_s

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def m() -> models.LoadedModel:
    return models.tiny(seed=1)


@pytest.fixture(scope="module")
def arrays(m: models.LoadedModel) -> Any:
    return hf.extract(generate.prefill(m, CONTEXT), "fp32").arrays


def rebuilt(m: models.LoadedModel, arrays: Any, columns: int) -> hf.Rebuilt:
    valid = np.ones((2, 600), dtype=np.bool_)
    valid[:, 600 - columns :] = False
    return hf.rebuild(arrays, [valid] * 4, m.config, dtype=m.dtype)


def clocked(m: models.LoadedModel, monkeypatch: pytest.MonkeyPatch, cost_s: float) -> tuple[PassClock, Time]:
    """A clock with a given cost, and a model whose passes take `cost_s` a column of the test's own time."""
    now = Time(cost_s)
    clock = PassClock(m, now)
    clock.cost = COST
    forward = m.model.model.forward

    def slow(*args: Any, **options: Any) -> Any:
        now.now += now.cost_s * options["position_ids"].shape[1]
        return forward(*args, **options)

    monkeypatch.setattr(m.model.model, "forward", slow)
    return clock, now


def test_a_cost_is_found_again() -> None:
    cost = PassCost(0.05, 0.002, 3e-6)
    times = [cost.seconds(*point) for point in ((1, 256), (64, 256), (64, 1024))]
    found = solve(*times, 64, (256, 1024))
    for point in ((1, 10), (100, 1536), (1000, 8192)):
        assert found.seconds(*point) == pytest.approx(cost.seconds(*point))


@pytest.mark.parametrize("times", [(1.0, 0.5, 0.4), (0.1, 0.1, 9.0), (0.0, 0.0, 0.0), (5.0, 1.0, 2.0)])
def test_noise_makes_no_cost_negative(times: tuple[float, float, float]) -> None:
    cost = solve(*times, 64, (256, 1024))
    assert min(cost.pass_s, cost.column_s, cost.pair_s) >= 0
    assert cost.seconds(64, 256) == pytest.approx(times[1])
    assert cost.seconds(0, 4096) == 0


def test_long_jobs_pay_for_every_pass() -> None:
    assert PassCost(1.0, 0.0, 0.0).seconds(513, 1024, chunk=256) == 3.0


def test_it_measures_once(m: models.LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = PassClock(m)
    calls = []
    measure = clock._measure
    monkeypatch.setattr(clock, "_measure", lambda: (calls.append(1), measure())[1])
    first = clock.calibrate()
    assert first is clock.calibrate()
    assert calls == [1]
    assert 0 < first.seconds(1, 256) < first.seconds(1000, 256) <= first.seconds(1000, 4096)
    assert clock.predict(100, 600) == first.seconds(100, 600)


def test_it_does_what_fits(m: models.LoadedModel, arrays: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, now = clocked(m, monkeypatch, 0.0016)  # what COST says
    needed_s = COST.seconds(100, 600) * MARGIN
    filled, used = clock.fill(rebuilt(m, arrays, 100), CONTEXT, now.now + needed_s * 1.01)
    assert used == "recompute"
    assert len(hole_columns(filled)) == 0
    assert clock.correction == pytest.approx(0.16 / COST.seconds(100, 600))


def test_it_does_not_begin_what_does_not_fit(
    m: models.LoadedModel, arrays: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, now = clocked(m, monkeypatch, 0.001)
    before = rebuilt(m, arrays, 100)
    filled, used = clock.fill(before, CONTEXT, now.now + COST.seconds(100, 600) * MARGIN * 0.99)
    assert used == "mask"
    assert filled is before
    assert now.now == 100.0
    assert clock.fill(rebuilt(m, arrays, 0), CONTEXT, 0.0)[1] == "recompute"  # nothing to do always fits


def test_it_stops_when_the_prediction_was_wrong(
    m: models.LoadedModel, arrays: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two passes; what was computed stays, and the next prediction knows better."""
    clock, now = clocked(m, monkeypatch, 1.0)
    filled, used = clock.fill(rebuilt(m, arrays, 600), CONTEXT, now.now + COST.seconds(600, 600) * 2)
    assert used == "mask"
    assert hole_columns(filled).tolist() == list(range(256, 600))
    assert filled.to_cache().hole_count() == 4 * 2 * (600 - 256)
    assert clock.correction == MAX_CORRECTION
    # It is cautious now, and not for ever.
    tries = 0
    now.cost_s = 0.001
    used = "mask"
    while used == "mask":
        tries += 1
        assert tries < 20
        used = clock.fill(rebuilt(m, arrays, 100), CONTEXT, now.now + COST.seconds(100, 600) * 2)[1]
    assert tries > 1


def test_a_reader_that_gives_up_ends_it(m: models.LoadedModel, arrays: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, now = clocked(m, monkeypatch, 0.0)
    filled, used = clock.fill(rebuilt(m, arrays, 50), CONTEXT, now.now + 1e6, cancelled=lambda: True)
    assert used == "mask"
    assert len(hole_columns(filled)) == 50
    assert clock.correction == 1.0
