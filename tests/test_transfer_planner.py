"""The compiled planner and its twin are given the same transfer and must do the same, to the byte.

`Sender` runs both: `Twin` below is a sender that plans in Python.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from interop.make_network_vectors import random_network
from quic_pfec.schedule import _policy
from quic_pfec.schedule.learned import Ddqn, Overridden
from quic_pfec.schedule.policies import POLICY_NAMES, Hybrid, Policy, Window, compiled, make_policy, make_twin
from quic_pfec.schedule.state import Action, ActionKind, State
from quic_pfec.transfer import ledger, planner
from quic_pfec.transfer.ledger import LossEstimate
from quic_pfec.transfer.sender import FrameKind, FrameRun, Outgoing, Path, Sender, TraceRow
from quic_pfec.wire import frames, varint
from quic_pfec.wire.errors import LocalError
from tests.transfer_world import MANIFEST, SIZE, SLOT_S, Always, ack, sender, world

WORLD = world([10] * 20)
ROOM = 1425
NETWORKS = (random_network("q", 4, resend=True), random_network("advantage", 5, margin=0.02, resend=True, features=2))
TYPES = {
    FrameKind.MANIFEST: frames.MANIFEST,
    FrameKind.SOURCE: frames.SOURCE,
    FrameKind.REPAIR: frames.REPAIR,
    FrameKind.RESEND: frames.SOURCE,
}


class Twin(Sender):
    ledger_type: ClassVar[Any] = ledger.Ledger
    planner_type: ClassVar[Any] = planner.Planner


def make(kind: type[Sender], policy: Policy, transfer_id: int = 0, **options: Any) -> Sender:
    arguments: dict[str, Any] = {"now": 0.0, "deadline_s": 0.4, "path": Path(0.020, 0.020, SLOT_S)} | options
    manifest = arguments.pop("manifest", MANIFEST)
    return kind(
        transfer_id, WORLD.encoder, WORLD.unit_of_sid, np.arange(1.0, 21.0), manifest, policy, **arguments
    )  # fmt: skip


def wire(outgoing: Outgoing) -> bytes:
    return varint.encode(TYPES[outgoing.kind]) + outgoing.frame.body()


def cut(run: FrameRun, out: bytearray, stride: int, offset: int = 0) -> list[bytes]:
    return [
        bytes(out[offset + i * stride : offset + i * stride + length]) for i, length in enumerate(run.lengths)
    ]  # fmt: skip


class Wild:
    """Answers at random, in bursts, whatever is allowed; the window changes as well."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.window: Window = "sack"

    def decide(self, state: State) -> Action:
        self.window = self._chance.choice(["sack", "full"])
        return Action(self._chance.choice(list(ActionKind)), self._chance.choice([0, 1, 4, 16, 2**40]))


@settings(deadline=None, max_examples=150)
@example(  # the path's time moves the cut-off to before now, between two plans
    name="none", seed=11376, transfer_id=0, budget=None, credit=60, max_window=4, degree=1, manifest=1, loss=0.0,
    late_s=0.1,
)  # fmt: skip
@given(
    name=st.sampled_from([*POLICY_NAMES, "wild", "crowded", "rationed", "learned"]),
    seed=st.integers(0, 2**32),
    transfer_id=st.sampled_from([0, 63, 64, 2**14, 2**30, 2**62 - 1]),
    budget=st.sampled_from([None, 0.0, 0.03, 0.2]),
    credit=st.sampled_from([1, 60, 4096]),
    max_window=st.sampled_from([4, 64, 4096]),
    degree=st.sampled_from([1, 48, 200]),
    manifest=st.sampled_from([1, 200, 1024, 1025, 3000]),
    loss=st.sampled_from([0.0, 0.1, 0.5]),
    late_s=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_both_plan_the_same_bytes(
    name: str, seed: int, transfer_id: int, budget: float | None, credit: int, max_window: int, degree: int,
    manifest: int, loss: float, late_s: float,
) -> None:  # fmt: skip
    """plan, in Python and compiled; plan_into, in Python and compiled: four senders of one transfer."""
    chance = random.Random(seed)
    data = random.Random(seed).randbytes(manifest)
    rows: list[list[TraceRow]] = [[] for _ in range(4)]
    senders = []
    path = Path(0.002, 0.002, SLOT_S) if name == "rationed" else Path(0.020, 0.020, SLOT_S)  # 200 round trips, or 20
    for index in range(4):
        twin = index % 2 == 1
        policy: Policy = Wild(seed) if name == "wild" else Hybrid(crowd=5.0, wide_degree=100.0)
        if name in ("crowded", "rationed") and not twin:
            policy = policy if index else compiled(policy)  # in the compiled planner: the rule, and the class it asks
        elif name == "learned":
            policy = Ddqn(NETWORKS[0]) if seed % 2 else Overridden(Hybrid(), NETWORKS[1])
            policy = policy if twin else compiled(policy)
        elif name in POLICY_NAMES:
            policy = (make_twin if twin else make_policy)(name)
        senders.append(
            make(
                Twin if twin else Sender, policy, transfer_id, manifest=data, repair_budget=budget, credit=credit,
                max_window=max_window, degree=degree, path=path, observer=rows[index].append, loss=LossEstimate(50, 5),
                deadline_s=0.1 if late_s else 0.4, late_s=late_s,
            )
        )  # fmt: skip
    fates: deque[tuple[float, int, bool]] = deque()
    now, sequence = 0.0, 0
    for _ in range(300):
        now += SLOT_S * chance.choice([0.0, 0.5, 1.0, 1.0, 3.0])
        room = chance.choice([ROOM, ROOM, 200, 90, 20])
        count = chance.choice([0, 1, 1, 1, 3, 100])
        stride, offset = room + chance.randrange(40), chance.randrange(30)
        if chance.random() < 0.3:
            assert len({out.ready(now) for out in senders}) == 1
        sent = [out.plan(now, count, room) for out in senders[:2]]
        plain = [wire(outgoing) for outgoing in sent[0]]
        assert sent[0] == sent[1]
        assert all(outgoing.frame.size() == len(data) <= room for outgoing, data in zip(sent[0], plain, strict=True))
        for out in senders[2:]:
            buffer = bytearray(offset + max(1, count) * stride)
            run = out.plan_into(now, count, room, buffer, stride, offset)
            assert cut(run, buffer, stride, offset) == plain
            assert run.kinds == [outgoing.kind for outgoing in sent[0]]
            assert run.tokens == [outgoing.token for outgoing in sent[0]]
        for outgoing in sent[0]:
            if outgoing.token is not None:
                fates.append((now + 0.02, outgoing.token, chance.random() >= loss))
        while fates and fates[0][0] <= now:
            _, token, delivered = fates.popleft()
            probe, batch, again = chance.random() < 0.05, chance.random() < 0.5, chance.random() < 0.05
            for out in senders:
                if batch and not probe:
                    out.on_fates([token, token] if again else [token], delivered)
                else:
                    out.on_fate(token, delivered, probe=probe)
                    if again:
                        out.on_fate(token, delivered, probe=probe)
        if chance.random() < 0.1:
            following = senders[0].ledger.next
            prefix = senders[0].ledger.prefix if sequence else 0
            start = chance.randint(prefix, following)
            stop = chance.randint(start, following)
            ranges = ((start, stop),) if prefix < start < stop else ()
            deficit = chance.randint(0, following - prefix)
            for out in senders:
                out.on_feedback(
                    ack(sequence, prefix, following - prefix, deficit=deficit, credit=max(credit, 200), ranges=ranges)
                )
            sequence += 1
        if chance.random() < 0.05:
            path = Path(0.02, 0.01, SLOT_S * chance.choice([0.5, 1.0, 2.0]), chance.choice([0.0, 0.05]))
            for out in senders:
                out.update_path(path)
        first = senders[0]
        for out in senders[1:]:
            assert out.stats == first.stats
            assert out.state(now) == first.state(now)
            assert out.flec == first.flec
            assert (out.next_timer(), out.finished(now)) == (first.next_timer(), first.finished(now))
            assert (out.pending_packets(), out.slots_total) == (first.pending_packets(), first.slots_total)
    assert rows[0] == rows[1] == rows[2] == rows[3]


def test_long_runs_go_on_until_nothing_is_due() -> None:
    out, single = sender(WORLD, "none"), sender(WORLD, "none")
    buffer = bytearray(300 * ROOM)
    run = out.plan_into(0.0, 300, ROOM, buffer, ROOM)
    assert cut(run, buffer, ROOM) == [wire(outgoing) for outgoing in single.plan(0.0, 300)]
    assert run.kinds.count(FrameKind.SOURCE) == 200
    assert out.plan_into(0.0, 300, ROOM, buffer, ROOM) == FrameRun([], [], [])


@pytest.mark.parametrize("kind", [Sender, Twin])
@pytest.mark.parametrize(
    ("count", "room", "size", "stride", "offset"),
    [
        (2, 100, 199, 100, 0),
        (1, 100, 110, 100, 11),
        (1, 101, 1000, 100, 0),
        (1, 100, 1000, 0, 0),
        (1, 100, 1000, 100, -1),
        (2**60, 100, 1000, 100, 0),
        (1, 100, 0, 100, 0),
    ],
)
def test_a_buffer_without_room_is_refused_before_anything_is_sent(
    kind: type[Sender], count: int, room: int, size: int, stride: int, offset: int
) -> None:
    out = make(kind, make_twin("none"), manifest=b"m")
    with pytest.raises(LocalError):
        out.plan_into(0.0, count, room, bytearray(size), stride, offset)
    with pytest.raises(LocalError):
        out.plan_into(0.0, 1, room, bytes(1000), 100)  # type: ignore[arg-type]
    assert out.stats.frame_bytes == 0
    assert out.plan_into(0.0, 2, 100, bytearray(211), 100, 11).kinds == [FrameKind.MANIFEST, FrameKind.SOURCE]
    assert out.plan_into(0.0, 0, 100, bytearray(0), 100).kinds == []


@pytest.mark.parametrize("kind", [Sender, Twin])
def test_a_policy_that_fails_is_heard(kind: type[Sender]) -> None:
    class Broken:
        window: Window = "sack"

        def decide(self, state: State) -> Action:
            raise ZeroDivisionError("of its own")

    out = make(kind, Broken())
    assert out.plan(0.0)  # the manifest
    for ask in (out.ready, out.plan):
        with pytest.raises(ZeroDivisionError, match="of its own"):
            ask(0.001)
    out._policy = make_policy("none")
    assert out.ready(0.001)


def test_a_policy_may_look_at_its_sender() -> None:
    """Nothing of the planner is held across the call of a policy in Python."""

    class Curious(Always):
        def decide(self, state: State) -> Action:
            if out.ledger.next < 50:
                out.ledger.send_source()
                out.state(0.0)
            return super().decide(state)

    out = make(Sender, Curious(Action(ActionKind.SOURCE)))
    out.plan(0.0, 20)
    assert out.ledger.next > 30


def test_construction_is_checked() -> None:
    book = _policy.Ledger(np.zeros(2), LossEstimate())
    right: dict[str, Any] = {
        "now": 0.0, "deadline_s": 1.0, "transfer_id": 0, "symbol_size": SIZE, "degree": 48, "max_degree": 255,
        "max_window": 4096, "credit": 10, "budget": 1.0, "rtt_s": 0.01, "min_rtt_s": 0.01, "slot_s": 0.001,
        "reserved_s": 0.0,
    }  # fmt: skip
    ones, zeros = np.ones(2, dtype=np.int32), np.zeros(2, dtype=np.int32)
    _policy.Planner(book, make_policy("none"), ones, zeros, b"m", **right)
    for wrong in (
        {"transfer_id": 2**62},
        {"max_window": 16_385},
        {"max_window": 0},
        {"degree": 0},
        {"max_degree": 47},
        {"slot_s": 0.0},
    ):
        with pytest.raises(LocalError):
            _policy.Planner(book, make_policy("none"), ones, zeros, b"m", **(right | wrong))
    with pytest.raises(LocalError):
        _policy.Planner(book, make_policy("none"), ones[:1], zeros, b"m", **right)
    with pytest.raises(LocalError):
        _policy.Planner(book, make_policy("none"), ones, zeros, b"", **right)
    with pytest.raises(LocalError):
        _policy.Planner(book, Always(Action(ActionKind.IDLE), "half"), ones, zeros, b"m", **right)  # type: ignore[arg-type]
