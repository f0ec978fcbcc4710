"""Every policy's rule, in states made by hand: the numbers in the comments are worked out from the rule."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.schedule.network import packaged_networks
from quic_pfec.schedule.policies import POLICY_NAMES, Epoch, Fixed, Hybrid, make_policy
from quic_pfec.schedule.state import IDLE, REPAIR, RESEND, SOURCE, Action, ActionKind, State

STATELESS = [name for name in POLICY_NAMES if not name.startswith("ddqn")]  # tests/test_schedule_learned.py has those


def view(**changes: float) -> State:
    """In mid-transfer, everything allowed: 1000 of 2000 sources sent, 100 in flight, far from the deadline."""
    fields = {
        "slots_left": 1000, "slots_total": 2000, "rtt_slots": 100.0, "sources_total": 2000, "sources_sent": 1000,
        "unit_packets": 24, "unit_position": 5, "in_flight": 100, "unresolved": 100, "window": 110,
        "can_source": True, "can_repair": True, "can_resend": False,
    } | changes  # fmt: skip
    return State(**fields)  # type: ignore[arg-type]


def after_the_last(**changes: float) -> State:
    return view(**({"sources_sent": 2000, "unit_packets": 0, "unit_position": 0, "can_source": False} | changes))


def without_credit(**changes: float) -> State:
    return view(**({"can_source": False} | changes))


NOTHING = after_the_last(can_repair=False, in_flight=0, unresolved=0, window=0)


def test_names() -> None:
    assert POLICY_NAMES[:11] == (
        "none",
        "fixed",
        "arq",
        "deficit",
        "paper-deficit",
        "epoch",
        "flec-rt",
        "flec-rt-window",
        "flec-rt-spread",
        "hybrid",
        "hybrid-rule",
    )
    weights = {"ddqn": "ddqn-paper", "ddqn-wide": "ddqn-wide"}
    assert list(POLICY_NAMES[11:]) == [name for name in weights if weights[name] in packaged_networks()]
    windows = {name: make_policy(name).window for name in POLICY_NAMES[:11]}
    assert [name for name, window in windows.items() if window == "full"] == [
        "paper-deficit",
        "flec-rt-window",
        "flec-rt-spread",
    ]
    assert make_policy("hybrid") is not make_policy("hybrid")
    with pytest.raises(ValueError, match=r"unknown scheduler 'ddpg': choose one of none, fixed"):
        make_policy("ddpg")


@pytest.mark.parametrize("name", STATELESS)
def test_idle_when_nothing_is_allowed(name: str) -> None:
    assert make_policy(name).decide(NOTHING) == IDLE


@pytest.mark.parametrize("name", STATELESS)
def test_sources_while_nothing_is_wrong(name: str) -> None:
    quiet = view(in_flight=0, unresolved=0, window=0, can_repair=False)
    assert make_policy(name).decide(quiet) == SOURCE


def test_none_never_protects() -> None:
    policy = make_policy("none")
    assert policy.decide(view(can_resend=True, known_lost=5, feedback_deficit=50)) == SOURCE
    assert policy.decide(after_the_last(can_resend=True, known_lost=5)) == IDLE


def test_arq_resends_first_and_never_codes() -> None:
    policy = make_policy("arq")
    assert policy.decide(view(can_resend=True, known_lost=1)) == RESEND
    assert policy.decide(view(feedback_deficit=50)) == SOURCE
    assert policy.decide(after_the_last(can_resend=True)) == RESEND
    assert policy.decide(after_the_last()) == IDLE


def test_fixed_sends_one_repair_for_ten_sources() -> None:
    policy = make_policy("fixed")
    sources = repairs = 0
    carried = []
    while sources < 100:
        action = policy.decide(view(sources_sent=sources, repairs_sent=repairs, can_repair=sources > 0))
        carried.append(action.kind)
        sources += action == SOURCE
        repairs += action == REPAIR
    assert carried[:12] == [ActionKind.SOURCE] * 10 + [ActionKind.REPAIR, ActionKind.SOURCE]
    assert repairs == 9  # the tenth is due now
    assert policy.decide(view(sources_sent=100, repairs_sent=9)) == REPAIR
    assert policy.decide(view(sources_sent=100, repairs_sent=10)) == SOURCE
    assert policy.decide(view(sources_sent=100, repairs_sent=9, can_repair=False)) == SOURCE


def test_fixed_at_another_rate() -> None:
    assert Fixed(rate=0.29).decide(view(sources_sent=100, repairs_sent=28)) == REPAIR
    assert Fixed(rate=0.29).decide(view(sources_sent=100, repairs_sent=29)) == SOURCE


def test_fixed_goes_on_with_repairs_after_the_last_source() -> None:
    assert make_policy("fixed").decide(after_the_last(repairs_sent=500)) == REPAIR


def test_deficit_counts_the_repairs_in_flight() -> None:
    policy = make_policy("deficit")
    # 3 - 0.95 * 2 = 1.1 > 0.5; 3 - 0.95 * 3 = 0.15
    assert policy.decide(view(feedback_deficit=3, repairs_in_flight=2, loss_short=0.05)) == REPAIR
    assert policy.decide(view(feedback_deficit=3, repairs_in_flight=3, loss_short=0.05)) == SOURCE
    # 3 - 0.8 * 3 = 0.6: with more loss a third repair may not come
    assert policy.decide(view(feedback_deficit=3, repairs_in_flight=3, loss_short=0.2)) == REPAIR
    assert policy.decide(view(feedback_deficit=3, repairs_in_flight=3, loss_short=0.05, loss_long=0.5)) == SOURCE
    assert policy.decide(view(feedback_deficit=3, can_repair=False)) == SOURCE
    assert policy.decide(view(can_resend=True, known_lost=9)) == SOURCE  # never a resend
    assert policy.decide(after_the_last()) == REPAIR


def test_paper_deficit_is_deficit_over_the_whole_window() -> None:
    paper, pruned = make_policy("paper-deficit"), make_policy("deficit")
    for state in (view(), view(feedback_deficit=3), after_the_last(), NOTHING):
        assert paper.decide(state) == pruned.decide(state)


def test_hybrid_resends_before_all_else() -> None:
    policy = make_policy("hybrid")
    for slots_left in (1000, 50, 1):
        state = view(can_resend=True, known_lost=1, slots_left=slots_left, loss_long=0.5, unit_position=0)
        assert policy.decide(state) == RESEND


def test_hybrid_codes_late_over_what_is_in_flight() -> None:
    policy = make_policy("hybrid")
    # 1.3 * 0.1 * 100 + 0.5 * sqrt(8 * 10) = 17.47; less 0.9 * 18 = 1.27, less 0.9 * 19 = 0.37
    assert policy.decide(view(slots_left=50, loss_long=0.1, repairs_in_flight=18)) == REPAIR
    assert policy.decide(view(slots_left=50, loss_long=0.1, repairs_in_flight=19)) == SOURCE
    # Earlier than half a round trip before the end a resend can still save it.
    assert policy.decide(view(slots_left=51, loss_long=0.1)) == SOURCE
    assert policy.decide(view(slots_left=50, loss_long=0.1, in_flight=0)) == SOURCE
    assert policy.decide(view(slots_left=50, loss_long=0.1, can_repair=False)) == SOURCE
    # The long-run mean decides, not the moving average.
    assert policy.decide(view(slots_left=50, loss_long=0.0, loss_short=0.6)) == SOURCE


def test_hybrid_opens_no_unit_that_cannot_finish() -> None:
    policy = make_policy("hybrid")
    covered = {"repairs_in_flight": 1000, "unit_position": 0}  # nothing more to cover
    assert policy.decide(view(slots_left=31, **covered)) == REPAIR  # 31 < 1.3 * 24 = 31.2
    assert policy.decide(view(slots_left=32, **covered)) == SOURCE
    assert policy.decide(view(slots_left=31, **(covered | {"unit_position": 1}))) == SOURCE
    assert policy.decide(view(slots_left=31, unresolved=0, **covered)) == SOURCE
    assert policy.decide(view(slots_left=31, rtt_slots=61.0, **covered)) == SOURCE  # not yet the end phase


def test_hybrid_spends_what_is_left_on_repairs() -> None:
    assert make_policy("hybrid").decide(after_the_last()) == REPAIR
    assert make_policy("hybrid").decide(after_the_last(budget_left=3)) == REPAIR


def test_hybrid_parameters() -> None:
    policy = Hybrid(horizon_rtt=2.0, alpha=1.0, spread=0.0)
    # 0.05 * 100 = 5; 5 - 0.95 * 4 = 1.2, 5 - 0.95 * 5 = 0.25
    assert policy.decide(view(slots_left=200, repairs_in_flight=4)) == REPAIR
    assert policy.decide(view(slots_left=200, repairs_in_flight=5)) == SOURCE
    assert policy.decide(view(slots_left=201, repairs_in_flight=4)) == SOURCE


def test_epoch_covers_a_share_of_what_is_in_flight() -> None:
    policy = make_policy("epoch")
    # 3 + 0.3 * 0.05 * 100 - 0.95 * R = 4.5 - 0.95 * R: a burst of 4 at R = 0, single repairs up to R = 3
    assert policy.decide(view(feedback_deficit=3)) == Action(ActionKind.REPAIR, 4)
    assert policy.decide(view(feedback_deficit=3, repairs_in_flight=1)) == REPAIR
    assert policy.decide(view(feedback_deficit=3, repairs_in_flight=3)) == REPAIR
    assert policy.decide(view(feedback_deficit=3, repairs_in_flight=4)) == SOURCE
    assert policy.decide(view(in_flight=60)) == SOURCE  # 0.9
    assert policy.decide(view(in_flight=67)) == REPAIR
    assert Epoch(alpha=0.0).decide(view(in_flight=1000)) == SOURCE
    assert policy.decide(view(feedback_deficit=30, can_repair=False)) == SOURCE
    assert policy.decide(after_the_last()) == Action(ActionKind.REPAIR, 1)


def test_epoch_sends_bursts_that_budget_and_time_allow() -> None:
    policy = make_policy("epoch")
    assert policy.decide(view(feedback_deficit=15)) == Action(ActionKind.REPAIR, 16)
    assert policy.decide(view(feedback_deficit=14)) == Action(ActionKind.REPAIR, 4)
    assert policy.decide(view(feedback_deficit=50, budget_left=15.0)) == Action(ActionKind.REPAIR, 4)
    assert policy.decide(view(feedback_deficit=50, slots_left=3)) == Action(ActionKind.REPAIR, 1)
    assert policy.decide(view(feedback_deficit=50, slots_left=0)) == Action(ActionKind.REPAIR, 1)


@pytest.mark.parametrize("name", ["fixed", "deficit", "paper-deficit", "epoch", "hybrid"])
def test_missing_credit_does_not_eat_a_budget_that_resends_will_need(name: str) -> None:
    policy = make_policy(name)
    assert policy.decide(without_credit(budget_left=100, repairs_sent=1000, in_flight=0)) == IDLE
    assert policy.decide(without_credit(budget_left=inf, repairs_sent=1000, in_flight=0)) == REPAIR


states = st.builds(
    view,
    slots_left=st.integers(0, 300),
    rtt_slots=st.floats(0.5, 1000),
    sources_sent=st.integers(0, 2000),
    repairs_sent=st.integers(0, 300),
    unit_position=st.integers(0, 23),
    in_flight=st.integers(0, 500),
    repairs_in_flight=st.integers(0, 100),
    unresolved=st.integers(0, 600),
    window=st.integers(0, 700),
    feedback_deficit=st.integers(0, 100),
    loss_short=st.floats(0.002, 0.6),
    loss_long=st.floats(1e-4, 0.6),
    budget_left=st.sampled_from([0.0, 1.0, 50.0, inf]),
    can_source=st.booleans(),
    can_repair=st.booleans(),
    can_resend=st.booleans(),
)


@settings(deadline=None, max_examples=200)
@given(name=st.sampled_from(STATELESS), state=states, others=st.lists(states, max_size=3))
def test_a_decision_is_allowed_and_depends_on_the_state_alone(name: str, state: State, others: list[State]) -> None:
    """The sender may ask any number of times before it sends: the answers in between must leave no trace."""
    policy = make_policy(name)
    action = policy.decide(state)
    for other in others:
        policy.decide(other)
    assert policy.decide(state) == action
    allowed = {
        ActionKind.IDLE: True,
        ActionKind.SOURCE: state.can_source,
        ActionKind.REPAIR: state.can_repair and action.count <= max(1, min(state.budget_left, state.slots_left)),
        ActionKind.RESEND: state.can_resend,
    }
    assert allowed[action.kind]
    if name in {"none", "arq"}:
        assert action != REPAIR
    if name not in {"arq", "flec-rt", "hybrid", "hybrid-rule"}:
        assert action != RESEND


# a budget that cannot save all, and time to choose


def rationed(**changes: Any) -> State:
    plain: dict[str, Any] = {
        "slots_total": 10_000, "slots_left": 5_000, "rtt_slots": 50.0, "sources_total": 12_000, "sources_sent": 5_000,
        "unit_packets": 24, "unit_position": 3, "in_flight": 50, "known_lost": 300, "unresolved": 350, "window": 4_000,
        "loss_long": 0.08, "budget_left": 360.0, "packets_extra": 0, "can_source": True, "can_repair": True,
        "can_resend": True,
    }  # fmt: skip
    return State(**(plain | changes))


def test_resends_wait_for_the_end_when_the_budget_binds() -> None:
    policy = make_policy("hybrid")
    assert policy.decide(rationed()) == SOURCE
    assert policy.decide(rationed(slots_left=480)) == RESEND  # 304 / 0.92 needed, and three round trips
    assert policy.decide(rationed(slots_left=481)) == SOURCE
    assert policy.decide(rationed(slots_left=400, budget_left=10.0)) == SOURCE
    assert policy.decide(rationed(can_source=False)) == RESEND  # nothing else to send
    assert policy.decide(rationed(can_source=False, can_resend=False)) == IDLE
    assert policy.decide(rationed(slots_left=20, can_resend=False, unit_position=0)) == SOURCE  # no code


@pytest.mark.parametrize(
    "change", [{"budget_left": 800.0}, {"budget_left": inf}, {"rtt_slots": 100.0}, {"loss_long": 0.03}]
)
def test_with_budget_enough_or_little_time_they_do_not_wait(change: dict[str, Any]) -> None:
    assert make_policy("hybrid").decide(rationed(**change)) == RESEND


def test_what_was_spent_is_part_of_the_budget() -> None:
    assert make_policy("hybrid").decide(rationed(budget_left=10.0, packets_extra=800)) == RESEND


# many packets in flight


def test_doubt_and_wide_repairs_with_many_in_flight() -> None:
    """1 Gbit/s before any feedback: the prior alone would send too few."""
    policy = Hybrid()
    crowded = rationed(
        slots_total=1786, slots_left=200, rtt_slots=1786.0, in_flight=1500, loss_long=0.05, budget_left=inf,
        can_resend=False, sources_sent=1500, fates=0, repairs_in_flight=130,
    )  # fmt: skip
    assert policy.decide(crowded) == REPAIR  # 1.3 * 75 + 0.5 * 150 - 0.95 * 130 > 0
    assert replace(policy, doubt=0.0).decide(crowded) == SOURCE
    assert policy.decide(replace(crowded, fates=5000)) == SOURCE  # the rate is known by now
    assert policy.degree(crowded, 48, 255) == 192
    assert policy.degree(crowded, 48, 100) == 100
    assert policy.degree(crowded, 200, 255) == 200
    assert policy.degree(replace(crowded, in_flight=200), 48, 255) == 48


def test_a_third_unit_is_opened_on_a_path_not_known_yet() -> None:
    policy = make_policy("hybrid")
    view = rationed(
        slots_total=89, slots_left=31, rtt_slots=179.0, in_flight=48, unresolved=48, loss_long=0.05, budget_left=inf,
        can_resend=False, unit_position=0, repairs_in_flight=6, fates=0,
    )  # fmt: skip
    assert policy.decide(view) == SOURCE
    assert policy.decide(replace(view, slots_left=29)) == REPAIR
    assert policy.decide(replace(view, unresolved=49)) == REPAIR
    assert policy.decide(replace(view, fates=20)) == REPAIR
