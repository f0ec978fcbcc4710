"""The compiled rules answer as their twins, and the compiled module refuses what it must."""

from __future__ import annotations

import subprocess
import sys
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.schedule import compiled as module
from quic_pfec.schedule._policy import Policy
from quic_pfec.schedule.flec import FlecRt
from quic_pfec.schedule.learned import Overridden
from quic_pfec.schedule.policies import POLICY_NAMES, Deficit, Epoch, Fixed, Hybrid, compiled, make_policy, make_twin
from quic_pfec.schedule.state import SOURCE, Action, State
from quic_pfec.wire.errors import LocalError

states = st.builds(
    State,
    slots_left=st.one_of(st.integers(0, 40), st.integers(0, 2**40)),
    slots_total=st.integers(1, 2**40),
    rtt_slots=st.floats(1e-3, 1e5),
    sources_total=st.integers(0, 200),
    sources_sent=st.integers(0, 200),
    unit_packets=st.integers(0, 48),
    unit_position=st.sampled_from([0, 0, 1, 7]),
    in_flight=st.integers(0, 5000),
    repairs_in_flight=st.integers(0, 60),
    repairs_sent=st.integers(0, 60),
    known_lost=st.integers(0, 60),
    unresolved=st.integers(0, 60),
    window=st.integers(0, 6000),
    feedback_deficit=st.integers(0, 60),
    packets_extra=st.integers(0, 60),
    fates=st.sampled_from([0, 1, 20, 5000]),
    loss_short=st.floats(0.002, 0.6),
    loss_long=st.floats(1e-6, 0.6),
    budget_left=st.sampled_from([0.0, 1.0, 3.0, 4.0, 15.0, 16.0, 1000.0, inf]),
    can_source=st.booleans(),
    can_repair=st.booleans(),
    can_resend=st.booleans(),
)
rules = st.one_of(
    st.sampled_from([name for name in POLICY_NAMES if not name.startswith("ddqn")]).map(make_twin),
    st.builds(
        FlecRt, variant=st.sampled_from(["flec-rt", "flec-rt-window", "flec-rt-spread"]), headroom=st.floats(0, 3)
    ),
    st.builds(Fixed, rate=st.floats(0, 2)),
    st.builds(Epoch, alpha=st.floats(0, 2)),
    st.builds(
        Hybrid,
        horizon_rtt=st.floats(0, 4),
        alpha=st.floats(0, 3),
        open_share=st.floats(0, 3),
        spread=st.floats(0, 2),
        blind_share=st.floats(0, 3),
        hold_rtt=st.sampled_from([0.0, 3.0, 1e9]),
        doubt=st.floats(0, 9),
        crowd=st.sampled_from([0.0, 5.0, 200.0]),
        wide_degree=st.sampled_from([0.0, 48.0, 192.0]),
        window=st.sampled_from(["sack", "full"]),
    ),
)


@settings(deadline=None, max_examples=1000)
@given(rule=rules, state=states)
def test_the_same_answer(rule: Hybrid | Overridden, state: State) -> None:
    fast = compiled(rule)
    assert isinstance(fast, Policy)
    assert fast.window == rule.window
    assert fast.decide(state) == rule.decide(state)
    if isinstance(rule, Hybrid | Overridden):
        assert fast.ranks(state) == rule.ranks(state)
        assert [fast.degree(state, 48, most) for most in (60, 255)] == [
            rule.degree(state, 48, most) for most in (60, 255)
        ]
    else:
        assert fast.degree(state, 48, 255) == 48


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_names_give_compiled_rules(name: str) -> None:
    assert module.AVAILABLE
    assert isinstance(make_policy(name), Policy)
    assert make_policy(name).window == make_twin(name).window


def test_parameters_travel() -> None:
    fast = compiled(Hybrid(alpha=2.5, window="full"))
    assert repr(fast) == (
        "Policy('hybrid', 'full', **{'horizon_rtt': 0.5, 'alpha': 2.5, 'open_share': 1.3, 'spread': 0.5, "
        "'blind_share': 1.25, 'hold_rtt': 3.0, 'doubt': 4.0, 'crowd': 200.0, 'wide_degree': 192.0})"
    )


def test_a_policy_of_ones_own_stays_what_it_is() -> None:
    class Mine(Deficit):
        def decide(self, state: State) -> Action:
            return SOURCE

    mine = Mine()
    assert compiled(mine) is mine


@pytest.mark.parametrize(("name", "options"), [("ddpg", {}), ("hybrid", {"window": "sac"}), ("hybrid", {"beta": 1.0})])
def test_misuse(name: str, options: dict[str, object]) -> None:
    with pytest.raises(LocalError):
        Policy(name, **options)  # type: ignore[arg-type]


def test_without_the_compiled_module_the_twins_serve_and_one_warning_says_so() -> None:
    code = """
import sys, warnings
sys.modules["quic_pfec.schedule._policy"] = None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from quic_pfec.transfer import planner, sender
    from quic_pfec.schedule.policies import Hybrid, make_policy
    import quic_pfec.sim.episode
assert [warning.category for warning in caught] == [RuntimeWarning], caught
assert isinstance(make_policy("hybrid-rule"), Hybrid)
assert sender.Sender.planner_type is planner.Planner
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
