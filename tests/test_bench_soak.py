"""What the soak draws and counts; the run itself takes minutes and is not for CI."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from typing import Any

import pytest

from bench.soak import Plan, Soak, state_of
from quic_pfec.quic.outgoing import HandoffRefused
from quic_pfec.wire.errors import AppCode


def test_plans_come_from_the_seed_and_cover_what_there_is() -> None:
    plans = [Plan.draw(random.Random(1)) for _ in range(2)]
    assert plans[0] == plans[1]
    rng = random.Random(2)
    many = [Plan.draw(rng) for _ in range(400)]
    assert {plan.behaviour for plan in many} >= {"reads", "cancels", "vanishes", "leaves", "reads and asks again"}
    assert {plan.wire_dtype for plan in many} >= {None, "auto", "progressive", "int4"}
    assert not any(plan.prepared and plan.wire_dtype == "auto" for plan in many)
    assert not any(plan.handoff["late"] == "patch" and plan.handoff["missing"] == "recompute" for plan in many)


def test_the_state_is_that_of_a_process() -> None:
    state = state_of(os.getpid(), 3, time.monotonic())
    assert state.handoffs == 3
    assert state.rss_mb > 10
    assert state.descriptors >= 3
    assert state.threads >= 1


@pytest.mark.parametrize(
    ("error", "outcome", "faults"),
    [
        (None, "complete", 0),
        (HandoffRefused(AppCode.BUSY, "full"), "refused: busy", 0),
        (TimeoutError(), "no answer", 1),
        (ConnectionError("gone"), "ConnectionError", 1),
    ],
)
async def test_what_is_a_fault(error: Exception | None, outcome: str, faults: int) -> None:
    class One(Soak):
        def __init__(self) -> None:
            self.outcomes, self.faults = Counter(), []

        async def _behave(self, plan: Plan) -> str:
            if error is not None:
                raise error
            return "complete"

    one: Any = One()
    await one.client(Plan.draw(random.Random(1)))
    assert one.outcomes == {outcome: 1}
    assert len(one.faults) == faults
