"""The sender: what goes out, when, under which masks; and what it believes of the feedback that comes in."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.schedule.policies import POLICY_NAMES, Window, make_policy
from quic_pfec.schedule.state import IDLE, REPAIR, RESEND, SOURCE, Action, ActionKind, State
from quic_pfec.transfer.ledger import LossEstimate
from quic_pfec.transfer.sender import SPARE_FEEDBACK, FrameKind, Outgoing, Path, Sender, TraceRow
from quic_pfec.wire.errors import ErrorCode, LocalError, PeerError
from quic_pfec.wire.frames import AckStatus, ManifestFrame, RepairFrame, SourceFrame, source_overhead
from tests.transfer_world import MANIFEST, SIZE, SLOT_S, Always, ack, sender, world

WORLD = world([10] * 20)
NEVER = Path(1e6, 1e6, SLOT_S)


def run(out: Sender, slots: int, start: int = 0) -> list[Outgoing]:
    """One packet a slot."""
    return [frame for slot in range(start, start + slots) for frame in out.plan(slot * SLOT_S)]


def kinds(batch: list[Outgoing]) -> list[FrameKind]:
    return [outgoing.kind for outgoing in batch]


def sids(batch: list[Outgoing]) -> list[int]:
    return [outgoing.frame.sid for outgoing in batch if isinstance(outgoing.frame, SourceFrame)]


def tokens(batch: list[Outgoing]) -> dict[int, int]:
    """The token of each symbol's packet."""
    return {out.frame.sid: out.token for out in batch if isinstance(out.frame, SourceFrame) and out.token is not None}


# construction


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"repair_budget": -0.1}, "repair_budget"),
        ({"repair_budget": float("nan")}, "repair_budget"),
        ({"repair_budget": float("inf")}, "repair_budget"),
        ({"degree": 0}, "degree"),
        ({"degree": 256}, "degree"),
        ({"manifest": b""}, "manifest"),
    ],
)
def test_misuse(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(LocalError, match=reason):
        sender(WORLD, **options)


def test_a_unit_for_every_symbol() -> None:
    other = world([10] * 19)
    with pytest.raises(LocalError, match="unit for each"):
        Sender(
            0, WORLD.encoder, other.unit_of_sid, np.ones(19), MANIFEST, make_policy("none"),
            now=0.0, deadline_s=1.0, path=NEVER,
        )  # fmt: skip


# the manifest


def test_the_manifest_comes_first_and_again_every_16_packets() -> None:
    batch = run(sender(WORLD), 200)
    assert [i for i, kind in enumerate(kinds(batch)) if kind == FrameKind.MANIFEST] == list(range(0, 200, 17))
    assert sids(batch) == list(range(188))
    assert all(outgoing.token is None for outgoing in batch if outgoing.kind == FrameKind.MANIFEST)


def test_feedback_ends_the_repetition_after_three_copies() -> None:
    out = sender(WORLD)
    batch = run(out, 80)
    assert kinds(batch).count(FrameKind.MANIFEST) == 5
    out.on_feedback(ack(0, 10))
    assert FrameKind.MANIFEST not in kinds(run(out, 100, 80))


def test_three_copies_even_when_feedback_is_fast() -> None:
    out = sender(WORLD)
    batch = run(out, 2)
    out.on_feedback(ack(0, 1))
    batch += run(out, 198, 2)
    assert [i for i, kind in enumerate(kinds(batch)) if kind == FrameKind.MANIFEST] == [0, 17, 34]


def test_three_copies_even_of_the_smallest_transfer() -> None:
    batch = run(sender(world([1])), 10)
    assert kinds(batch) == [FrameKind.MANIFEST, FrameKind.SOURCE, FrameKind.MANIFEST, FrameKind.MANIFEST]


def test_a_large_manifest_goes_in_fragments() -> None:
    manifest = random.Random(1).randbytes(2500)
    out = sender(WORLD, manifest=manifest)
    batch = out.plan(0.0, 4)
    frames = [outgoing.frame for outgoing in batch[:3]]
    assert [frame.offset for frame in frames if isinstance(frame, ManifestFrame)] == [0, 1024, 2048]
    assert all(isinstance(frame, ManifestFrame) and frame.total_length == 2500 for frame in frames)
    assert b"".join(frame.data for frame in frames if isinstance(frame, ManifestFrame)) == manifest
    assert all(outgoing.frame.size() < 1173 for outgoing in batch)  # a 1,200-byte datagram less header and tag
    assert batch[3].kind == FrameKind.SOURCE
    assert out.stats.manifests == 1


def test_the_remaining_time_is_that_of_the_moment() -> None:
    out = sender(WORLD, deadline_s=0.5, path=Path(0.030, 0.010, SLOT_S))
    stated = [
        (slot, outgoing.frame.remaining_us)
        for slot in range(100)
        for outgoing in out.plan(slot * SLOT_S)
        if isinstance(outgoing.frame, ManifestFrame)
    ]
    assert len(stated) == 6
    for slot, remaining_us in stated:  # deadline - now - min_rtt / 2
        assert remaining_us == pytest.approx(500_000 - slot * 1000 - 5000, abs=1)


# the deadline


def test_nothing_leaves_that_would_be_late() -> None:
    out = sender(WORLD, "hybrid", deadline_s=0.1)
    assert out.send_cutoff_s == pytest.approx(0.095)
    assert out.slots_total in {94, 95}
    batch = run(out, 95)
    assert len(batch) == 95
    assert out.next_timer() == out.send_cutoff_s
    for now in (0.0951, 0.2, 5.0):
        assert out.finished(now)
        assert not out.ready(now)
        assert out.plan(now, 10) == []
    assert out.stats.last_packet_s == pytest.approx(0.094)


def test_a_deadline_that_has_passed_sends_nothing() -> None:
    assert sender(WORLD, deadline_s=-1.0).plan(0.0, 10) == []


@pytest.mark.parametrize("status", [AckStatus.COMPLETE, AckStatus.FROZEN])
def test_over_when_the_receiver_says_so(status: AckStatus) -> None:
    out = sender(WORLD)
    run(out, 5)
    out.on_feedback(ack(0, 4, status=status))
    assert out.plan(0.006) == []
    assert out.next_timer() is None


def test_over_when_everything_is_known_to_have_arrived() -> None:
    out = sender(world([4]), "hybrid")
    for token in tokens(run(out, 7)).values():
        out.on_fate(token, True)
    assert out.finished(0.01)
    assert run(out, 100, 8) == []


# sizes


@settings(deadline=None, max_examples=80)
@given(
    policy=st.sampled_from(["deficit", "paper-deficit", "hybrid"]),
    transfer_id=st.sampled_from([0, 60, 64, 2**14, 2**30, 2**61]),
    degree=st.sampled_from([1, 48, 255]),
    rooms=st.lists(st.integers(60, 160), min_size=5, max_size=20),
    seed=st.integers(0, 99),
)
def test_every_frame_fits(policy: str, transfer_id: int, degree: int, rooms: list[int], seed: int) -> None:
    chance = random.Random(seed)
    out = sender(WORLD, policy, transfer_id=transfer_id, degree=degree, manifest=MANIFEST[:20])
    for slot, bytes_free in enumerate([*rooms, 160] * 4):
        for outgoing in out.plan(slot * SLOT_S, 2, bytes_free):
            assert outgoing.frame.size() == 4 + len(outgoing.frame.body())
            assert outgoing.frame.size() <= bytes_free
            if outgoing.token is not None and chance.random() < 0.7:
                out.on_fate(outgoing.token, chance.random() < 0.7)
    assert out.stats.source > 3


@pytest.mark.parametrize("transfer_id", [0, 2**14, 2**61])
def test_a_source_that_just_fits_is_sent(transfer_id: int) -> None:
    out = sender(WORLD, transfer_id=transfer_id)
    out.plan(0.0)
    exact = source_overhead(transfer_id) + SIZE
    assert out.plan(0.001, 1, exact - 1) == []
    assert out.ready(0.001)
    (sent,) = out.plan(0.001, 1, exact)
    assert sent.frame.size() == exact


def test_what_does_not_fit_is_not_counted_as_sent() -> None:
    out = sender(WORLD, Always(REPAIR))
    assert out.plan(0.0, 1, 100) == []  # the manifest
    assert out.stats.manifests == 0
    out.plan(0.0, 1)
    out._policy = Always(SOURCE)
    out.plan(0.0, 4)
    out._policy = Always(REPAIR)
    assert out.plan(0.001, 1, SIZE + 20) == []
    assert (out.stats.repair, out.ledger.repairs_in_flight) == (0, 0)
    (sent,) = out.plan(0.001, 1, SIZE + 40)
    assert isinstance(sent.frame, RepairFrame)


# credit


def test_credit_stops_new_symbols_until_more_is_granted() -> None:
    out = sender(WORLD, credit=50)
    batch = run(out, 100)
    assert sids(batch) == list(range(50))
    assert out.stats.slots_credit > 40
    out.on_feedback(ack(0, 10, credit=60))
    assert sids(run(out, 50, 100)) == list(range(50, 60))


def test_credit_stops_no_resend() -> None:
    out = sender(WORLD, "arq", credit=50)
    sent = tokens(run(out, 60))
    out.on_fate(sent[7], False)
    assert sids(run(out, 5, 60)) == [7]


def test_without_credit_a_budget_is_kept_for_resends() -> None:
    out = sender(WORLD, "hybrid", credit=50, repair_budget=0.1)
    sent = tokens(run(out, 300))
    assert out.stats.repair == 0
    assert out.stats.slots_credit > 200
    for sid in range(30):
        out.on_fate(sent[sid], False)
    assert run(out, 100, 300)
    assert out.stats.resent == 20


# masks


class Wild:
    """Answers at random, in bursts, whatever is allowed."""

    def __init__(self, seed: int, window: Window) -> None:
        self.window: Window = window
        self._chance = random.Random(seed)

    def decide(self, state: State) -> Action:
        return Action(self._chance.choice(list(ActionKind)), self._chance.choice([0, 1, 4, 16, 1000]))


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    window=st.sampled_from(["sack", "full"]),
    budget=st.sampled_from([None, 0.0, 0.02, 0.1]),
    credit=st.integers(1, 300),
)
def test_budget_credit_and_deadline_hold_whatever_the_policy_says(
    seed: int, window: Window, budget: float | None, credit: int
) -> None:
    chance = random.Random(seed)
    out = sender(WORLD, Wild(seed, window), repair_budget=budget, credit=credit, deadline_s=0.305)
    for slot in range(400):
        batch = out.plan(slot * SLOT_S, chance.choice([1, 1, 5]))
        assert not batch or slot * SLOT_S < 0.3
        for outgoing in batch:
            frame = outgoing.frame
            if isinstance(frame, SourceFrame):
                assert frame.sid < min(credit, WORLD.symbols)
                assert frame.symbol == WORLD.encoder.symbol(frame.sid)
            if isinstance(frame, RepairFrame):
                assert frame.header.last_sid <= out.ledger.next
            if outgoing.token is not None and chance.random() < 0.8:
                out.on_fate(outgoing.token, chance.random() < 0.8)
    allowed = float("inf") if budget is None else int(budget * WORLD.symbols)
    assert out.stats.repair + out.stats.resent <= allowed
    assert out.ledger.next == out.stats.source <= credit


@pytest.mark.parametrize("action", [REPAIR, RESEND, Action(ActionKind.REPAIR, 16)])
def test_nothing_to_repair_or_resend_at_the_start(action: Action) -> None:
    out = sender(WORLD, Always(action))
    assert kinds(run(out, 10)) == [FrameKind.MANIFEST]
    assert not out.ready(10 * SLOT_S)


def test_without_feedback_the_manifest_is_repeated_in_time_also_when_nothing_else_may_go() -> None:
    out = sender(WORLD, "none", credit=1)
    assert kinds(run(out, 5)) == [FrameKind.MANIFEST, FrameKind.SOURCE]
    retry_s = out.next_timer()
    assert retry_s is not None
    assert not out.ready(retry_s - 1e-6)
    assert kinds(out.plan(retry_s)) == [FrameKind.MANIFEST]
    assert not out.ready(retry_s + 1e-3)


@pytest.mark.parametrize(("share", "allowed"), [(0.0, 0), (0.1, 20), (0.145, 29), (0.0049, 0)])
def test_the_budget_counts_repairs_and_resends(share: float, allowed: int) -> None:
    out = sender(WORLD, "arq", repair_budget=share)
    sent = tokens(run(out, 50))
    for sid in range(12):
        out.on_fate(sent[sid], False)
    assert kinds(run(out, 13, 50)).count(FrameKind.RESEND) == min(allowed, 12)  # one slot goes to a manifest
    out._policy = Always(REPAIR)
    run(out, 100, 63)
    assert out.stats.resent + out.stats.repair == allowed
    assert out.state(0.2).budget_left == 0
    assert not out.state(0.2).can_repair
    assert not out.state(0.2).can_resend


def test_a_burst_must_fit_the_budget_and_the_time() -> None:
    out = sender(WORLD, Always(SOURCE), repair_budget=0.05)  # ten
    run(out, 20)
    out._policy = Always(Action(ActionKind.REPAIR, 16))
    assert out.plan(0.02, 5) == []
    out._policy = Always(Action(ActionKind.REPAIR, 4))
    assert len(out.plan(0.021, 4)) == 4
    assert FrameKind.REPAIR not in kinds(out.plan(0.9935, 4))  # one slot is left
    assert out.stats.repair == 4


def test_a_burst_is_one_decision() -> None:
    policy = Always(Action(ActionKind.SOURCE, 8))
    out = sender(WORLD, policy)
    run(out, 25)  # two of them manifests
    assert (out.stats.source, policy.asked) == (23, 3)


def test_a_burst_ends_when_it_is_no_longer_allowed() -> None:
    out = sender(WORLD, Always(Action(ActionKind.SOURCE, 8)))
    sent = tokens(run(out, 9))
    policy = Always(Action(ActionKind.REPAIR, 4))
    out._policy = policy
    assert kinds(run(out, 2, 9)) == [FrameKind.REPAIR] * 2
    for token in sent.values():
        out.on_fate(token, True)
    assert run(out, 2, 11) == []  # nothing is unresolved


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_asking_often_changes_nothing(name: str) -> None:
    """A shell asks at every event, and only a packet that leaves may count."""
    asked, plain = sender(WORLD, name), sender(WORLD, name)
    for slot in range(150):
        now = slot * SLOT_S
        for early in range(5):
            asked.ready(now - SLOT_S + early * SLOT_S / 5)
        assert asked.ready(now) == plain.ready(now)
        assert kinds(asked.plan(now)) == kinds(plain.plan(now))


# resends and repairs


def test_a_resend_is_the_most_useful_loss() -> None:
    # Unit 0 has most utility, but by the packet unit 2 has more: 30/10, 8/2, 2/2, 35/10
    out = sender(world([10, 2, 2, 10]), "arq", utility=[30.0, 8.0, 2.0, 35.0])
    sent = tokens(run(out, 26))
    for sid in (0, 4, 10, 13, 20, 21):
        out.on_fate(sent[sid], False)
    assert sids(run(out, 10, 26)) == [10, 20, 21, 0, 4, 13]
    assert out.stats.losses == 6


def test_a_resend_may_be_lost_too() -> None:
    out = sender(WORLD, "arq")
    sent = tokens(run(out, 5))
    out.on_fate(sent[2], False)
    (again,) = out.plan(0.005)
    assert again.kind == FrameKind.RESEND
    assert again.token not in sent.values()
    assert again.token is not None
    out.on_fate(again.token, False)
    assert sids(run(out, 1, 6)) == [2]


def test_windows() -> None:
    for window, expected in (("sack", (2, 1, 10)), ("full", (2, 0, 18))):
        out = sender(WORLD, Always(SOURCE))
        sent = tokens(run(out, 22))
        for sid in range(10):
            out.on_fate(sent[sid], sid != 2)
        out._policy = Always(REPAIR, window)  # type: ignore[arg-type]
        (repair,) = out.plan(0.03)
        assert isinstance(repair.frame, RepairFrame)
        header = repair.frame.header
        assert (header.first_sid, header.head_span, header.tail_span) == expected
        assert header.last_sid == 20
        assert (header.degree, header.repair_number) == (48, 0)
        (repair,) = out.plan(0.031)
        assert isinstance(repair.frame, RepairFrame)
        assert repair.frame.header.repair_number == 1


def test_a_repair_spans_no_more_than_the_peer_takes() -> None:
    out = sender(WORLD, Always(SOURCE), max_window=32)
    run(out, 150)
    for window in ("sack", "full"):
        out._policy = Always(REPAIR, window)
        repair = out.plan(0.2, 2)[-1]  # behind a copy of the manifest, where one is due
        assert isinstance(repair.frame, RepairFrame)
        assert (repair.frame.header.first_sid, repair.frame.header.span) == (0, 32)


# the policy's view


def test_the_state_in_numbers() -> None:
    out = sender(world([10, 6, 20]), "none", repair_budget=0.5, path=Path(0.020, 0.010, SLOT_S), credit=100)
    sent = tokens(run(out, 15))  # 14 sources
    for sid in (0, 1, 3):
        out.on_fate(sent[sid], True)
    out.on_fate(sent[2], False)
    out.on_feedback(ack(0, 2, 10, deficit=4, ranges=((3, 5),), credit=100))
    out._policy = Always(REPAIR)
    run(out, 2, 15)
    state = out.state(0.1)
    assert state.slots_left in {894, 895}  # 1 s less half of the smallest round trip
    assert state.rtt_slots == pytest.approx(20)
    assert (state.sources_total, state.sources_sent) == (36, 14)
    assert (state.unit_packets, state.unit_position) == (6, 4)
    assert (state.in_flight, state.known_lost, state.unresolved) == (9, 1, 10)
    assert (state.repairs_in_flight, state.repairs_sent) == (2, 2)
    assert (state.window, state.feedback_deficit) == (12, 4)
    assert (state.budget_left, state.can_source, state.can_repair, state.can_resend) == (16, True, True, True)
    assert state.loss_long == pytest.approx(2 / 24)
    out._policy = Always(SOURCE)
    run(out, 25, 100)
    state = out.state(0.2)
    assert (state.unit_packets, state.unit_position, state.can_source) == (0, 0, False)
    assert out.pending_packets() == 1


def test_a_path_that_changes() -> None:
    out = sender(WORLD)
    assert out.state(0.0).slots_left in {994, 995}
    out.update_path(Path(0.010, 0.010, 2 * SLOT_S))
    assert out.state(0.0).slots_left == 497
    out.update_path(Path(0.010, 0.010, 2 * SLOT_S, reserved_s=0.5))
    assert out.state(0.0).slots_left == 247
    out.update_path(Path(0.400, 0.200, SLOT_S))
    assert out.send_cutoff_s == pytest.approx(0.9)
    out.update_path(Path(0.010, 0.010, SLOT_S, reserved_s=5.0))
    assert out.state(0.0).slots_left == 0
    assert out.slots_total in {994, 995}


def test_loss_history_is_shared() -> None:
    loss = LossEstimate(fates=80, losses=9)
    out = sender(WORLD, loss=loss)
    assert out.state(0.0).loss_long == pytest.approx(0.1)
    sent = tokens(run(out, 5))
    out.on_fate(sent[0], False)
    out.on_fate(sent[1], False, probe=True)
    assert (loss.fates, loss.losses, out.stats.losses) == (81, 10, 1)


def test_the_observer_sees_every_symbol_packet() -> None:
    rows: list[TraceRow] = []
    out = sender(WORLD, observer=rows.append)
    sent = tokens(run(out, 5))
    out.on_fate(sent[0], True)
    out.on_feedback(ack(0, 1, 3, deficit=2))
    run(out, 1, 5)
    assert [row.next for row in rows] == [1, 2, 3, 4, 5]
    assert (rows[3].prefix, rows[3].window, rows[3].deficit) == (0, 4, 0)
    assert (rows[4].prefix, rows[4].window, rows[4].deficit, rows[4].now) == (1, 4, 2, 0.005)


# feedback (the numbers are rows of the table of bad input)


def fed() -> Sender:
    """20 symbols sent, one PFEC_ACK taken: 5 known, credit 100."""
    out = sender(WORLD, credit=100)
    run(out, 22)
    out.on_feedback(ack(3, 5, 10, deficit=2, credit=100, ranges=((7, 9),)))
    return out


def rejects(out: Sender, code: ErrorCode, **fields: Any) -> None:
    with pytest.raises(PeerError) as caught:
        out.on_feedback(ack(**fields))
    assert (caught.value.code, caught.value.application) == (code, False)


def test_feedback_teaches() -> None:
    out = fed()
    assert (out.ledger.prefix, out.ledger.known, out.ledger.unresolved) == (5, 7, 13)
    assert out.state(0.03).feedback_deficit == 2
    assert out.remaining_reported_s == 0.5


def test_row_16_backwards() -> None:
    rejects(fed(), ErrorCode.PROTOCOL_VIOLATION, sequence=4, next_sid=4)
    rejects(fed(), ErrorCode.PROTOCOL_VIOLATION, sequence=4, next_sid=5, credit=99)


def test_row_16_backwards_with_a_lower_sequence_is_reordering() -> None:
    out = fed()
    out.on_feedback(ack(2, 0, credit=1))
    assert out.stats.feedback_ignored == 1


def test_row_17_window_inflation() -> None:
    out = fed()
    out.on_feedback(ack(4, 5, credit=200))  # all symbols of the transfer
    rejects(out, ErrorCode.FLOW_CONTROL_ERROR, sequence=5, next_sid=5, credit=201)


def test_row_17_a_small_transfer_keeps_the_initial_credit() -> None:
    out = sender(world([10]), credit=4096)
    run(out, 5)
    out.on_feedback(ack(0, 4, credit=4096))
    rejects(out, ErrorCode.FLOW_CONTROL_ERROR, sequence=1, next_sid=4, credit=4097)


def test_row_18_symbols_never_sent() -> None:
    out = fed()
    out.on_feedback(ack(4, 5, 15, credit=100))  # just what was sent
    rejects(out, ErrorCode.PROTOCOL_VIOLATION, sequence=5, next_sid=21, credit=100)
    rejects(out, ErrorCode.PROTOCOL_VIOLATION, sequence=5, next_sid=5, seen_span=16, credit=100)
    rejects(out, ErrorCode.PROTOCOL_VIOLATION, sequence=5, next_sid=5, seen_span=3, deficit=4, credit=100)
    assert out.ledger.known == 7  # nothing of it was believed


def test_row_19_old_feedback_is_ignored() -> None:
    out = fed()
    before = (out.ledger.known, out.ledger.prefix, out.state(0.03).feedback_deficit)
    for sequence in (3, 2, 0):
        out.on_feedback(ack(sequence, 20, status=AckStatus.COMPLETE))
    assert (out.ledger.known, out.ledger.prefix, out.state(0.03).feedback_deficit) == before
    assert (out.status, out.stats.feedback_ignored) == (AckStatus.RUNNING, 3)


def test_row_21_a_flood_is_dropped() -> None:
    out = sender(WORLD)
    run(out, 20)  # 18 symbols and two copies of the manifest
    for sequence in range(20 + SPARE_FEEDBACK):
        out.on_feedback(ack(sequence, 0))
    assert out.stats.feedback_ignored == 0
    for sequence in range(1000, 1100):
        out.on_feedback(ack(sequence, 18))
    assert out.stats.feedback_ignored == 100
    assert out.ledger.known == 0


def test_feedback_and_fates_make_one_picture() -> None:
    """A symbol that QUIC calls lost but the receiver decoded is not resent."""
    out = sender(WORLD, "arq")
    sent = tokens(run(out, 10))
    out.on_fate(sent[2], False)
    out.on_fate(sent[4], False)
    out.on_feedback(ack(0, 3, 6, ranges=((5, 7),)))
    assert sids(run(out, 2, 10)) == [4, 9]


def test_idle_policy() -> None:
    policy = Always(IDLE)
    out = sender(WORLD, policy)
    assert len(run(out, 10)) == 1  # the manifest needs nobody's opinion
    assert out.stats.slots_credit == 0
