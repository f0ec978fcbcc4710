"""Learned policies: what they choose, what guards them, where their weights come from; compiled and in Python alike."""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import Any

import numpy as np
import pytest

from interop.make_network_vectors import random_network
from quic_pfec.schedule import policies
from quic_pfec.schedule._policy import Policy as Native
from quic_pfec.schedule.features import FeatureMemory
from quic_pfec.schedule.learned import Ddqn, Overridden, Verdict
from quic_pfec.schedule.network import Network, save_network
from quic_pfec.schedule.policies import POLICY_NAMES, Hybrid, compiled, make_policy, make_twin
from quic_pfec.schedule.state import IDLE, REPAIR, SOURCE, Action, ActionKind, State
from quic_pfec.transfer import ledger, planner
from quic_pfec.transfer.sender import FrameKind, Path, Sender
from quic_pfec.wire.errors import LocalError
from tests.transfer_world import MANIFEST, SLOT_S, world

WORLD = world([10] * 20)


class Twin(Sender):
    ledger_type = ledger.Ledger
    planner_type = planner.Planner


def says(kind: Any, outputs: list[float], low: float = -9.0, high: float = 9.0, **meta: Any) -> Network:
    """A network with these outputs, whatever it sees."""

    def empty(*shape: int) -> Any:
        return np.zeros(shape, dtype=np.float32)

    last, wide = np.array(outputs, dtype=np.float32), np.ones(15, dtype=np.float32)
    return Network(
        empty(15, 64), empty(64), empty(64, 64), empty(64), empty(64, len(last)), last, low * wide, high * wide, kind,
        "by hand", resend=len(last) == 5, **meta,
    )  # fmt: skip


def state(**changes: Any) -> State:
    """In mid-transfer: 100 of 200 symbols are out, 20 in flight, and the receiver lacks 5."""
    fields = {
        "slots_left": 150, "slots_total": 300, "rtt_slots": 20.0, "sources_total": 200, "sources_sent": 100,
        "unit_packets": 10, "unit_position": 3, "in_flight": 20, "unresolved": 25, "window": 30, "feedback_deficit": 5,
        "can_source": True, "can_repair": True,
    } | changes  # fmt: skip
    return State(**fields)


def entered(policy: Any) -> Any:
    policy.enter(FeatureMemory(np.full(20, 10), np.arange(20.0, 0.0, -1.0), 300))
    return policy


# the twins, by hand


def test_the_highest_of_what_is_allowed() -> None:
    policy = entered(Ddqn(says("q", [0.0, 1.0, 3.0, 2.0])))
    assert policy.window == "full"
    assert policy.decide(state()) == Action(ActionKind.REPAIR, 4)
    assert policy.decide(state(budget_left=3.0)) == REPAIR
    assert policy.decide(state(feedback_deficit=0, in_flight=0)) == Action(ActionKind.SOURCE, 7)  # to the unit's end
    assert policy.decide(state(can_source=False, can_repair=False, can_resend=True)) == IDLE
    assert policy.verdict == Verdict.RULE
    resends = entered(Ddqn(says("q", [0.0, 0.0, 0.0, 0.0, 1.0])))
    assert resends.decide(state(can_resend=True)).kind is ActionKind.RESEND
    assert resends.decide(state()) == Action(ActionKind.SOURCE, 7)  # the first of equals


def test_an_override_acts_above_its_margin() -> None:
    for margin, gain, acts in ((0.5, 0.75, True), (0.5, 0.5, False), (0.0, -1.0, False), (None, 99.0, False)):
        policy = entered(Overridden(Hybrid(), says("advantage", [1.0, 0.0, 1.0 + gain, 0.0], margin=margin)))
        assert policy.decide(state()) == (Action(ActionKind.REPAIR, 4) if acts else SOURCE)
        assert policy.verdict == (Verdict.OVERRIDE if acts else Verdict.RULE)


def test_the_guards_leave_the_rule_its_way() -> None:
    wild = [0.0, 9.0, 0.0, 0.0]
    for network in (
        says("advantage", wild, margin=0.1, high=0.4),
        says("advantage", wild, margin=0.1, low=0.5),
        overflowing(),
    ):
        policy = entered(Overridden(Hybrid(), network))
        assert policy.decide(state()) == SOURCE
        assert policy.verdict == Verdict.GUARD
    policy = entered(Overridden(Hybrid(), says("advantage", wild, margin=0.1)))
    assert policy.decide(state(loss_short=float("nan"), can_resend=True)).kind is ActionKind.RESEND  # not its choice
    assert policy.verdict == Verdict.RULE
    assert policy.decide(state(can_source=False, can_repair=False)) == IDLE
    assert policy.decide(state(feedback_deficit=0, in_flight=0)) == SOURCE  # nothing else is allowed
    assert policy.verdict == Verdict.RULE


def overflowing() -> Network:
    network = random_network("advantage", 1, margin=0.1)
    changes = {
        name: getattr(network, name) for name in ("w1", "b1", "b2", "b3", "low", "high", "kind", "name", "margin")
    }
    huge = np.full((64, 64), 3e38, dtype=np.float32)
    return Network(**changes, w2=huge, w3=huge[:, :4])


def test_outside_a_transfer() -> None:
    q, gains = random_network("q", 1), random_network("advantage", 1, margin=0.0)
    for policy in (Ddqn(q), compiled(Ddqn(q))):
        with pytest.raises(LocalError, match="within a transfer"):
            policy.decide(state())
    rule = Overridden(Hybrid(), gains)
    for hybrid in (rule, compiled(rule)):
        assert isinstance(hybrid, Overridden | Native)
        assert hybrid.decide(state()) == Hybrid().decide(state())
        assert hybrid.degree(state(in_flight=500), 48, 255) == 192
        assert not hybrid.ranks(state())


def test_a_network_of_the_other_kind() -> None:
    q, gains = random_network("q", 1), random_network("advantage", 1)
    for wrong in (
        lambda: Ddqn(gains),
        lambda: Overridden(Hybrid(), q),
        lambda: Native("ddqn"),
        lambda: Native("ddqn", network=gains),
        lambda: Native("hybrid", network=q),
        lambda: Native("arq", network=gains),
    ):
        with pytest.raises(LocalError):
            wrong()


# in a sender


def send(kind: type[Sender], policy: Any, **options: Any) -> Sender:
    return kind(
        0, WORLD.encoder, WORLD.unit_of_sid, np.arange(20.0, 0.0, -1.0), MANIFEST, policy, now=0.0, deadline_s=0.4,
        path=Path(0.020, 0.020, SLOT_S), **options,
    )  # fmt: skip


def same(policy: Any) -> Any:
    return policy


# A planner in Python asks policies in Python; the compiled one takes both.
PAIRS = pytest.mark.parametrize(("kind", "form"), [(Sender, compiled), (Sender, same), (Twin, same)])


@PAIRS
def test_counters(kind: type[Sender], form: Any) -> None:
    """Of packets that left: asking counts nothing, and a burst is one decision."""

    def play(network: Network) -> Sender:
        sender = send(kind, form(Overridden(Hybrid(), network)))
        for slot in range(40):
            sender.ready(slot * SLOT_S - 1e-6)
            sender.plan(slot * SLOT_S)
        return sender

    stats = play(says("advantage", [0.0, 0.0, 1.0, 0.0], margin=0.5)).stats
    # A source first, for nothing is lacking before; then four repairs at a time while d > 0.
    assert (stats.repair, stats.overridden, stats.guarded) == (4 * stats.overridden, stats.overridden, 0)
    assert stats.overridden > 0
    stats = play(says("advantage", [0.0, 0.0, 1.0, 0.0], margin=0.5, high=0.1)).stats
    assert (stats.repair, stats.overridden) == (0, 0)
    assert stats.guarded == stats.source - 1
    stats = play(overflowing()).stats
    assert (stats.repair, stats.guarded) == (0, stats.source - 1)
    stats = play(says("advantage", [0.0, 0.0, 1.0, 0.0])).stats
    assert (stats.repair, stats.overridden, stats.guarded) == (0, 0, 0)


@PAIRS
@pytest.mark.parametrize("utility", [np.zeros(20), np.full(20, 1e300), np.full(20, np.nan)])
def test_utilities_of_all_kinds(kind: type[Sender], form: Any, utility: Any) -> None:
    for policy in (
        Ddqn(random_network("q", 1)),
        Overridden(Hybrid(), random_network("advantage", 1, margin=0.0)),
    ):
        sender = kind(
            0, WORLD.encoder, WORLD.unit_of_sid, utility, MANIFEST, form(policy), now=0.0, deadline_s=0.4,
            path=Path(0.0, 0.0, SLOT_S),
        )  # fmt: skip
        for slot in range(60):
            sender.plan(slot * SLOT_S)
        assert sender.stats.source + sender.stats.repair > 30


@PAIRS
def test_a_planner_without_utilities_refuses(kind: type[Sender], form: Any) -> None:
    sender = send(kind, make_policy("arq"))
    ones, zeros = np.ones(2, dtype=np.int32), np.zeros(2, dtype=np.int32)
    arguments: dict[str, Any] = {
        "now": 0.0, "deadline_s": 1.0, "transfer_id": 0, "symbol_size": 64, "degree": 48, "max_degree": 255,
        "max_window": 4096, "credit": 10, "budget": 1.0, "rtt_s": 0.01, "min_rtt_s": 0.01, "slot_s": 0.001,
        "reserved_s": 0.0,
    }  # fmt: skip
    for utility in (np.ones(3), None):
        book = sender.ledger_type(np.zeros(2), sender.ledger.loss)
        with pytest.raises(LocalError, match="utility of each unit"):
            sender.planner_type(
                book, form(Ddqn(random_network("q", 1))), ones, zeros, b"m", **arguments, unit_utility=utility
            )


def test_a_policy_may_come_later() -> None:
    sender = send(Sender, make_policy("none"))
    sender.plan(0.0, 50)
    sender._policy = compiled(Ddqn(says("q", [0.0, 1.0, 0.0, 0.0])))
    assert [packet.kind for packet in sender.plan(0.001, 3)].count(FrameKind.REPAIR) > 0


# where the weights come from


def test_names() -> None:
    assert isinstance(make_twin("hybrid-rule"), Hybrid)
    assert isinstance(make_twin("hybrid"), Hybrid | Overridden)
    for name in POLICY_NAMES:
        assert isinstance(make_twin(name), Ddqn) == name.startswith("ddqn")


def test_a_file_of_weights(tmp_path: FilePath) -> None:
    path = tmp_path / "a.npz"
    save_network(random_network("q", 1, window="full"), path)
    name = f"ddqn:{path}"
    first = make_policy(name, files=True)
    assert isinstance(first, Native)
    assert first.window == "full"
    assert first.network is not None
    assert first.network.digest in repr(first)
    for wrong in (name, f"hybrid:{path}", "ddqn:"):
        with pytest.raises(ValueError, match="unknown scheduler"):  # by default no name opens a file
            make_policy(wrong)
    with pytest.raises(LocalError, match="hybrid needs a network of kind 'advantage'"):
        make_policy(f"hybrid:{path}", files=True)
    with pytest.raises(ValueError, match="unknown scheduler"):
        make_policy(f"arq:{path}", files=True)
    with pytest.raises(OSError, match="No such file"):
        make_policy(f"ddqn:{tmp_path}/b.npz", files=True)
    save_network(random_network("advantage", 2, margin=0.1, resend=True), path)
    again = make_twin(f"hybrid:{path}", files=True)
    assert isinstance(again, Overridden)
    assert again.base == Hybrid()
    assert "hybrid" in repr(compiled(again))
    assert repr(compiled(again)) != repr(compiled(Hybrid()))


def test_an_override_that_never_acts_is_no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    never, acts = random_network("advantage", 1), random_network("advantage", 1, margin=0.1)
    monkeypatch.setattr(policies, "packaged_networks", lambda: ("hybrid-override",))
    monkeypatch.setattr(policies, "_read", lambda name: never)
    assert make_twin("hybrid") == Hybrid()
    monkeypatch.setattr(policies, "_read", lambda name: acts)
    assert make_twin("hybrid") == Overridden(Hybrid(), acts)
    assert make_twin("hybrid-rule") == Hybrid()
