"""FlEC real time: its counters and rules on traces made by hand, and the compiled one beside the twin."""

from __future__ import annotations

from array import array
from collections import deque
from math import inf

import numpy as np
import pytest

from quic_pfec.schedule.flec import FlecCounters, FlecRt, GilbertEstimate, Listener, Variant
from quic_pfec.schedule.policies import Policy, make_policy, make_twin
from quic_pfec.schedule.state import IDLE, REPAIR, RESEND, SOURCE, ActionKind, State
from quic_pfec.sim.channel import PRESETS, GilbertElliott, GilbertElliottChannel, losses
from quic_pfec.transfer.ledger import Ledger, LossEstimate
from quic_pfec.transfer.sender import FrameKind, Path, Sender
from tests.test_transfer_planner import Twin
from tests.transfer_world import MANIFEST, SLOT_S, World, world

VARIANTS: tuple[Variant, ...] = ("flec-rt", "flec-rt-window", "flec-rt-spread")
LARGE = world([24] * 400)


class Bench:
    """A policy, its ledger, and the state they make: a planner without masks."""

    def __init__(self, variant: Variant, symbols: int = 100, headroom: float = 0.0) -> None:
        self.ledger = Ledger(np.arange(symbols, dtype=np.float64), LossEstimate())
        self.policy = FlecRt(variant, headroom)
        self.policy.start(self.ledger)
        self.now = 0.0

    def state(self, **changes: object) -> State:
        book = self.ledger
        more = book.next < book.symbols
        fields: dict[str, object] = {
            "slots_left": 1000, "slots_total": 2000, "rtt_slots": 50.0, "sources_total": book.symbols,
            "sources_sent": book.next, "in_flight": book.in_flight, "repairs_in_flight": book.repairs_in_flight,
            "known_lost": book.known_lost, "unresolved": book.unresolved, "window": book.next - book.prefix,
            "loss_long": book.loss.long, "can_source": more, "can_repair": book.unresolved > 0,
            "can_resend": book.known_lost > 0,
        }  # fmt: skip
        return State(**(fields | changes))  # type: ignore[arg-type]

    def counters(self) -> FlecCounters:
        return self.policy.counters(self.state())

    def source(self, count: int = 1) -> list[int]:
        tokens = []
        for _ in range(count):
            state = self.state()
            sid, token = self.ledger.send_source()
            self.policy.on_sent(state, ActionKind.SOURCE, sid, token, None, self.now)
            tokens.append(token)
        return tokens

    def repair(self, first: int, stop: int) -> int:
        state = self.state()
        token = self.ledger.send_repair()
        self.policy.on_sent(state, ActionKind.REPAIR, 0, token, (first, stop), self.now)
        return token

    def fate(self, token: int, delivered: bool) -> None:
        if self.ledger.fate(token, delivered):
            self.policy.on_fate(token, delivered, False)


# counters


def test_a_nack_is_missing_and_a_repair_in_flight_is_added() -> None:
    bench = Bench("flec-rt-window")
    sent = bench.source(10)
    assert (bench.counters().md, bench.counters().ad, bench.counters().d) == (0, 0, 0.0)
    bench.fate(sent[3], False)
    assert (bench.counters().md, bench.counters().ad, bench.counters().d) == (1, 0, inf)
    bench.repair(0, 10)
    assert (bench.counters().md, bench.counters().ad, bench.counters().d) == (1, 1, 1.0)


def test_a_repair_that_arrives_makes_the_smallest_missing_one_seen() -> None:
    bench = Bench("flec-rt-window")
    sent = bench.source(10)
    for sid in (2, 5, 7):
        bench.fate(sent[sid], False)
    first, second, third = bench.repair(0, 10), bench.repair(4, 10), bench.repair(0, 2)
    bench.fate(first, True)  # 2 is seen
    assert (bench.counters().md, bench.counters().ad) == (2, 2)
    bench.fate(second, True)  # of its range, 5
    assert (bench.counters().md, bench.counters().ad) == (1, 1)
    bench.fate(third, True)  # nothing of its range is missing
    assert (bench.counters().md, bench.counters().ad) == (1, 0)
    assert bench.policy._seen == {2, 5}


def test_a_repair_that_is_lost_no_longer_adds() -> None:
    bench = Bench("flec-rt-window")
    sent = bench.source(10)
    bench.fate(sent[3], False)
    repair = bench.repair(0, 10)
    assert bench.policy.decide(bench.state()) == SOURCE
    bench.fate(repair, False)
    assert (bench.counters().md, bench.counters().ad) == (1, 0)
    assert bench.policy.decide(bench.state()) == REPAIR


def test_the_prefix_takes_missing_ones_and_ranges_with_it() -> None:
    bench = Bench("flec-rt-window")
    sent = bench.source(10)
    for sid in (1, 8):
        bench.fate(sent[sid], False)
    bench.fate(bench.repair(0, 10), True)  # 1 is seen
    bench.repair(0, 5)
    bench.repair(0, 10)
    assert (bench.counters().md, bench.counters().ad) == (1, 2)
    bench.ledger.learn_known(0, 6)
    assert (bench.counters().md, bench.counters().ad) == (1, 1)  # 8, and the range that reaches it
    bench.ledger.learn_known(6, 9)
    assert (bench.counters().md, bench.counters().ad) == (0, 1)


# decisions


def test_the_trigger_of_the_window() -> None:
    bench = Bench("flec-rt-window")
    sent = bench.source(20)
    assert bench.policy.decide(bench.state()) == SOURCE
    bench.fate(sent[0], False)  # the first loss, nothing added: d is infinite
    assert bench.policy.decide(bench.state()) == REPAIR
    assert bench.policy.decide(bench.state(can_repair=False)) == SOURCE
    bench.repair(0, 20)  # d = 1 is not above 1
    assert bench.policy.decide(bench.state()) == SOURCE
    bench.fate(sent[1], False)
    assert bench.policy.decide(bench.state()) == REPAIR
    assert bench.policy.decide(bench.state(can_resend=True, budget_left=5.0)) == REPAIR  # never a resend


def test_the_faithful_one_answers_every_loss_at_once() -> None:
    bench = Bench("flec-rt")
    sent = bench.source(20)
    assert bench.policy.decide(bench.state()) == SOURCE
    bench.fate(sent[0], False)
    assert bench.policy.decide(bench.state()) == RESEND
    assert bench.policy.decide(bench.state(can_resend=False)) == SOURCE  # the budget is spent


@pytest.mark.parametrize("variant", VARIANTS[:2])
def test_no_a_priori_repair_while_sources_are_ready_or_the_path_is_full(variant: Variant) -> None:
    bench = Bench(variant, 40, headroom=1.1)
    bench.source(39)
    assert bench.policy.decide(bench.state()) == SOURCE
    bench.source()
    assert bench.policy.decide(bench.state(rtt_slots=44.0)) == IDLE  # 44 / 40 is not above 1.1
    assert bench.policy.decide(bench.state(rtt_slots=44.1)) == REPAIR
    assert bench.policy.decide(bench.state(in_flight=0)) == IDLE  # nothing in flight counts as full
    waiting = {"sources_total": 50, "rtt_slots": 60.0}
    assert bench.policy.decide(bench.state(**waiting)) == REPAIR  # no credit, no source ready
    assert bench.policy.decide(bench.state(**waiting, budget_left=5.0)) == IDLE
    bench.policy.headroom = 0.0
    assert bench.policy.decide(bench.state(rtt_slots=1.0)) == REPAIR
    assert bench.policy.decide(bench.state(in_flight=0)) == IDLE


def test_a_round_at_the_tail_opens_and_closes() -> None:
    bench = Bench("flec-rt", 40)
    bench.source(40)
    bench.ledger.loss.values[:2] = array("d", [80.0, 9.0])  # eps_L = 0.1
    repairs = 0
    while bench.policy.decide(bench.state(rtt_slots=1000.0)) == REPAIR:
        bench.repair(0, 40)
        repairs += 1
    assert repairs == 5  # one, and max(1, 1/r_ge = 1, 40 * 0.1)
    assert bench.policy.decide(bench.state(rtt_slots=1e6)) == IDLE


def test_a_round_is_no_longer_than_the_window() -> None:
    bench = Bench("flec-rt", 40)
    bench.source(40)
    bench.ledger.loss.values[:2] = array("d", [80.0, 59.0])  # 0.6
    bench.ledger.learn_known(0, 35)
    repairs = 0
    while bench.policy.decide(bench.state(rtt_slots=1000.0)) == REPAIR:
        bench.repair(35, 40)
        repairs += 1
    assert repairs == 6  # one, and W = 5


def test_the_spread_during_the_backlog() -> None:
    """eps_L = 0.05, and p the same: every 20 new ids two repairs, 1 + 20 * 0.05."""
    bench = Bench("flec-rt-spread", 200)
    carried = ""
    while bench.ledger.next < 65:
        if bench.policy.decide(bench.state()) == REPAIR:
            bench.repair(0, bench.ledger.next)
            carried += "r"
        else:
            bench.source()
            carried += "s"
    # The first id is a whole window by itself. No fate is known, so the limit grows with the window: 2 * 0.05 * W.
    round_of_20 = 20 * "s" + "rr"
    assert carried == "sr" + 3 * round_of_20 + "ssss"
    bench.source(17)  # another 21 since the round before, W = 82: fewer than 8.2 may be in flight
    assert bench.policy.decide(bench.state()) == REPAIR
    for _ in range(2):
        bench.repair(0, 10)
    assert bench.policy.decide(bench.state()) == SOURCE
    assert bench.policy.decide(bench.state(can_source=False, can_repair=False)) == IDLE


# the estimate


def test_the_channel_is_estimated() -> None:
    drawn = losses(GilbertElliottChannel(GilbertElliott(0.0, 1.0, 0.02, 0.25), 3), 5000)
    estimate = GilbertEstimate()
    for slot, lost in enumerate(drawn.tolist()):
        estimate.add(lost, slot * 1e-3)
    assert estimate.enough
    assert estimate.eps == pytest.approx(0.02 / 0.27, rel=0.25)
    assert estimate.p == pytest.approx(0.02, rel=0.3)
    assert estimate.r == pytest.approx(0.25, rel=0.3)


def test_the_estimate_forgets() -> None:
    estimate = GilbertEstimate()
    for number in range(499):
        estimate.add(number % 2 == 0, number * 1e-3)
    assert not estimate.enough
    for number in range(300):
        estimate.add(number % 2 == 0, 0.5 + number * 1e-3)
    assert estimate.enough
    assert (estimate.eps, estimate.r) == (pytest.approx(0.5, abs=0.01), pytest.approx(1.0, abs=0.01))
    for number in range(6000):  # only the last 5,000 count
        estimate.add(False, 1.0 + number * 1e-3)
    assert (estimate.eps, estimate.p, estimate.r) == (0.0, 0.0, 1.0)
    estimate.add(True, 20.0)  # all others are too old
    assert not estimate.enough


def test_before_there_is_an_estimate_the_long_run_mean_serves() -> None:
    bench = Bench("flec-rt-spread")
    counters = bench.counters()
    assert (counters.eps, counters.p_ge, counters.r_ge) == (0.05, 0.05, 1.0)


# whole transfers


def carry(kind: type[Sender], policy: Policy, of: World, seed: int, *, slots: int, rtt: int) -> tuple[Sender, bytes]:
    """One packet a slot over the paper's channel: the sender, and what each slot carried (4 = nothing)."""
    out = kind(
        0, of.encoder, of.unit_of_sid, np.linspace(2.0, 1.0, len(of.sizes)), MANIFEST, policy, now=0.0,
        deadline_s=(slots + 0.5) * SLOT_S + rtt * SLOT_S / 2, path=Path(rtt * SLOT_S, rtt * SLOT_S, SLOT_S),
        credit=2**20,
    )  # fmt: skip
    lost = losses(GilbertElliottChannel(PRESETS["paper"], seed), slots).tolist()
    fates: deque[tuple[int, int, bool]] = deque()
    carried = bytearray()
    for slot in range(slots):
        while fates and fates[0][0] <= slot:
            out.on_fate(*fates.popleft()[1:])
        plans = out.plan(slot * SLOT_S)
        carried.append(plans[0].kind if plans else 4)
        if plans and plans[0].token is not None:
            fates.append((slot + rtt, plans[0].token, not lost[slot]))
    return out, bytes(carried)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_compiled_one_does_as_the_twin_over_thousands_of_packets(variant: Variant) -> None:
    """Enough fates that the estimate serves and its ring is full; also the twin told by the compiled planner."""
    slots = 10_500
    slow, expected = carry(Twin, make_twin(variant), LARGE, 5, slots=slots, rtt=100)
    fast, carried = carry(Sender, make_policy(variant), LARGE, 5, slots=slots, rtt=100)
    told, mixed = carry(Sender, make_twin(variant), LARGE, 5, slots=slots, rtt=100)
    assert carried == expected == mixed
    assert fast.stats == slow.stats == told.stats
    assert fast.flec == slow.flec
    assert fast.flec is not None
    assert fast.flec.r_ge < 0.9
    assert told.flec is None  # the policy of the caller keeps its own
    repairs = carried.count(FrameKind.REPAIR)
    assert (repairs > 300) == (variant != "flec-rt")


def test_under_backlog_the_faithful_one_is_arq() -> None:
    of = world([24] * 50)
    slots = 1500
    _, arq = carry(Sender, make_policy("arq"), of, 2, slots=slots, rtt=60)
    _, faithful = carry(Sender, make_policy("flec-rt"), of, 2, slots=slots, rtt=60)
    last = arq.rindex(FrameKind.SOURCE)
    assert arq.count(FrameKind.RESEND) > 50
    assert faithful[: last + 1] == arq[: last + 1]
    assert FrameKind.REPAIR not in arq
    assert FrameKind.REPAIR in faithful[last:]


def test_losses_are_resent_oldest_first() -> None:
    of = world([10] * 4)
    out = Sender(
        0, of.encoder, of.unit_of_sid, np.arange(1.0, 5.0), MANIFEST, make_policy("flec-rt"), now=0.0, deadline_s=1.0,
        path=Path(0.01, 0.01, SLOT_S),
    )  # fmt: skip
    tokens = {
        plan.frame.sid: plan.token
        for plan in out.plan(0.0, 43)
        if plan.token is not None and hasattr(plan.frame, "sid")
    }
    for sid in (35, 3, 12):
        out.on_fate(tokens[sid], False)
    again = [plan.frame.sid for plan in out.plan(0.001, 3) if hasattr(plan.frame, "sid")]
    assert again == [3, 12, 35]


def test_who_listens() -> None:
    assert isinstance(make_twin("flec-rt"), Listener)
    assert not isinstance(make_twin("hybrid"), Listener)
    assert Sender(
        0, LARGE.encoder, LARGE.unit_of_sid, np.ones(400), MANIFEST, make_policy("hybrid"), now=0.0, deadline_s=1.0,
        path=Path(0.01, 0.01, SLOT_S),
    ).flec is None  # fmt: skip
