"""The ledger, compiled and in Python, against a model of plain sets, and against each other.

Random sends, fates in any order, feedback in any order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.schedule import _policy
from quic_pfec.transfer.ledger import Ledger, LossEstimate, repair_header
from quic_pfec.wire.errors import LocalError
from quic_pfec.wire.frames import RepairFrame, parse_repair
from quic_pfec.wire.limits import Limits

SYMBOLS = 40
Set = tuple[int, int, bytes, int, int]
Book = Ledger | _policy.Ledger
both = pytest.mark.parametrize("kind", [_policy.Ledger, Ledger], ids=["compiled", "twin"])


def ledger(kind: type[Book], symbols: int = SYMBOLS, priority: list[float] | None = None) -> Book:
    order = np.zeros(symbols) if priority is None else np.array(priority)
    return kind(order, LossEstimate())


def ids(coding_set: Set) -> list[int]:
    """The ids that a coding set names."""
    first, head_span, head, tail_offset, tail_span = coding_set
    named = [first + i for i in range(head_span) if head[i // 8] >> i % 8 & 1]
    start = first + head_span + tail_offset
    return named + list(range(start, start + tail_span))


def check_legal(coding_set: Set, limits: Limits) -> None:
    """The strict parser takes a repair with this coding set."""
    frame = RepairFrame(repair_header(0, 0, 48, coding_set), bytes(64))
    parsed, _ = parse_repair(frame.body(), 0, limits)
    assert parsed.header == frame.header


class Naive:
    """The same knowledge in sets of ids; slow and obvious."""

    def __init__(self, priority: list[float]) -> None:
        self.priority = priority
        self.next = 0
        self.tokens: list[int | None] = []  # what each packet carried: a sid, or None for a repair
        self.settled: set[int] = set()
        self.known: set[int] = set()
        self.lost: set[int] = set()
        self.flying: dict[int, int] = {}  # sid -> token of the packet that carried it last
        self.fated = 0

    def send(self, sid: int | None) -> int:
        self.tokens.append(sid)
        if sid is not None:
            self.next = max(self.next, sid + 1)
            self.lost.discard(sid)
            self.flying[sid] = len(self.tokens) - 1
        return len(self.tokens) - 1

    def most_useful_loss(self) -> int:
        return min(self.lost, key=lambda sid: (self.priority[sid], sid))

    def learn(self, sid: int) -> None:
        self.known.add(sid)
        self.lost.discard(sid)
        self.flying.pop(sid, None)
        self.fated = max(self.fated, sid + 1)

    def fate(self, token: int, delivered: bool) -> None:
        sid = self.tokens[token]
        if token in self.settled:
            return
        self.settled.add(token)
        if sid is None:
            return
        self.fated = max(self.fated, sid + 1)
        if delivered:
            self.learn(sid)
        elif self.flying.get(sid) == token:
            del self.flying[sid]
            self.lost.add(sid)

    @property
    def repairs_in_flight(self) -> int:
        return sum(sid is None and token not in self.settled for token, sid in enumerate(self.tokens))

    @property
    def unresolved(self) -> list[int]:
        return sorted(self.lost | set(self.flying))

    @property
    def prefix(self) -> int:
        return next(sid for sid in range(SYMBOLS + 1) if sid not in self.known)


sends = st.tuples(st.sampled_from(["source", "source", "source", "resend", "repair"]), st.just(0), st.just(False))
fates = st.tuples(st.just("fate"), st.integers(0, 10_000), st.booleans())
feedback = st.tuples(st.just("feedback"), st.integers(0, 10_000), st.integers(1, 12))
events = st.lists(st.one_of(sends, sends, fates, feedback), max_size=120)


@settings(deadline=None, max_examples=300)
@given(
    events=events,
    priority=st.lists(st.integers(0, 3), min_size=SYMBOLS, max_size=SYMBOLS),
    max_window=st.sampled_from([3, 8, 20, 4096]),
    max_head=st.sampled_from([8, 256]),
)
@both
def test_against_sets(
    kind: type[Book], events: list[tuple[str, int, Any]], priority: list[int], max_window: int, max_head: int
) -> None:
    order = [float(value) for value in priority]
    naive, real = Naive(order), ledger(kind, priority=order)
    limits = Limits(max_window=max_window, max_degree=min(255, max_window)) if max_window >= 48 else None
    for what, number, value in events:
        if what == "source" and naive.next < SYMBOLS:
            sid = naive.next
            assert real.send_source() == (sid, naive.send(sid))
        elif what == "resend" and naive.lost:
            sid = naive.most_useful_loss()
            assert real.send_lost() == (sid, naive.send(sid))
        elif what == "repair":
            assert real.send_repair() == naive.send(None)
        elif what == "fate" and naive.tokens:  # in any order, some of them twice
            token = number % len(naive.tokens)
            naive.fate(token, value)
            real.fate(token, value)
        elif what == "feedback" and naive.next:
            start = number % naive.next
            stop = min(naive.next, start + value)
            for sid in range(start, stop):
                naive.learn(sid)
            real.learn_known(start, stop)

        assert real.next == naive.next
        assert real.prefix == naive.prefix
        assert real.in_flight == len(naive.flying)
        assert real.known_lost == len(naive.lost)
        assert real.known == len(naive.known)
        assert real.repairs_in_flight == naive.repairs_in_flight
        assert real.unresolved == len(naive.unresolved)
        if not naive.unresolved:
            continue

        unresolved = naive.unresolved
        pruned = real.sack_set(max_window, max_head)
        named = ids(pruned)
        head = [sid for sid in unresolved if sid < naive.fated]
        fits = unresolved[-1] - unresolved[0] < max_window and (not head or head[-1] - head[0] < max_head)
        if fits:
            assert named == unresolved
        else:
            assert set(named) < set(unresolved)
            if max_window > SYMBOLS:  # no gap is out of reach: in the end every symbol has had its turn
                turns = [real.sack_set(max_window, max_head) for _ in range(8 * SYMBOLS)]
                assert {sid for turn in turns for sid in ids(turn)} == set(unresolved)
        assert named[-1] - named[0] < max_window
        assert pruned[1] <= max_head
        full = real.full_set(max_window)
        assert ids(full) == list(range(naive.prefix, min(naive.next, naive.prefix + max_window)))
        if limits is not None:
            check_legal(pruned, limits)
            check_legal(full, limits)


@both
def test_a_resend_waits_for_its_own_fate(kind: type[Book]) -> None:
    book = ledger(kind, 3)
    _, first = book.send_source()
    book.fate(first, False)
    sid, second = book.send_lost()
    assert (sid, book.in_flight, book.known_lost) == (0, 1, 0)
    book.fate(first, False)  # said twice
    assert (book.in_flight, book.known_lost) == (1, 0)
    book.fate(second, False)
    assert (book.in_flight, book.known_lost) == (0, 1)
    assert book.loss.losses == 2


@both
def test_a_symbol_known_by_feedback_is_not_lost_by_a_later_fate(kind: type[Book]) -> None:
    book = ledger(kind, 3)
    _, token = book.send_source()
    book.learn_known(0, 1)
    book.fate(token, False)
    assert (book.prefix, book.known, book.unresolved) == (1, 1, 0)
    assert book.loss.losses == 1  # the packet was lost all the same


@both
def test_resends_go_by_priority_and_skip_what_became_known(kind: type[Book]) -> None:
    book = ledger(kind, 5, [4.0, 1.0, 3.0, 1.0, 2.0])
    tokens = [book.send_source()[1] for _ in range(5)]
    for token in tokens:
        book.fate(token, False)
    book.learn_known(3, 4)
    assert [book.send_lost()[0] for _ in range(4)] == [1, 4, 2, 0]
    assert book.known_lost == 0


@both
def test_the_prefix_passes_long_runs(kind: type[Book]) -> None:
    book = ledger(kind, 3000)
    for _ in range(3000):
        book.send_source()
    book.learn_known(1, 2000)
    book.learn_known(2001, 3000)
    assert book.prefix == 0
    book.learn_known(0, 1)
    assert book.prefix == 2000
    book.learn_known(0, 2500)
    assert (book.prefix, book.known, book.unresolved) == (3000, 3000, 0)


@both
def test_losses_that_feedback_undoes_leave_nothing_behind(kind: type[Book]) -> None:
    book = ledger(kind, 20_000)
    for start in range(0, 20_000, 100):
        for token in [book.send_source()[1] for _ in range(100)]:
            book.fate(token, False)
        book.learn_known(start, start + 100)
    assert book.known_lost == 0
    assert book.losses_queued < 400


def wide(kind: type[Book], lost_sids: set[int]) -> tuple[Book, list[int]]:
    """600 symbols sent, the fate of 500 known, all of them delivered but those."""
    book = ledger(kind, 1000)
    tokens = [book.send_source()[1] for _ in range(600)]
    for sid in range(500):
        book.fate(tokens[sid], sid not in lost_sids)
    return book, tokens


@both
def test_a_head_that_is_too_wide_begins_with_the_oldest(kind: type[Book]) -> None:
    lost = {0, 100, 200, 300, 400}
    assert ids(wide(kind, lost)[0].sack_set(4096, 256)) == [0, 100, 200, *range(500, 600)]
    assert ids(wide(kind, lost)[0].sack_set(4096, 8)) == [0, *range(500, 600)]
    assert ids(wide(kind, lost)[0].sack_set(550, 1024)) == [0, 100, 200, 300, 400, *range(500, 550)]
    assert ids(wide(kind, lost)[0].sack_set(300, 1024)) == [0, 100, 200]  # nothing of the tail within reach


@both
def test_resends_in_flight_take_turns_when_the_head_is_too_wide(kind: type[Book]) -> None:
    """None is known to be lost again, so one repair each; a run of repairs must not pass over the later ones."""
    book, _ = wide(kind, {0, 100, 200, 300, 400, 499})
    resent = [book.send_lost() for _ in range(6)]
    heads = [ids(book.sack_set(4096, 256))[:-100] for _ in range(4)]
    assert heads == [[0, 100, 200], [300, 400, 499]] * 2
    book.fate(resent[0][1], True)
    assert ids(book.sack_set(4096, 256))[:-100] == [100, 200, 300]


@both
def test_known_losses_keep_their_turn_until_they_should_be_solved(kind: type[Book]) -> None:
    book, _ = wide(kind, {0, 100, 200, 300, 400, 499})
    heads = [ids(book.sack_set(4096, 256))[:-100] for _ in range(40)]
    assert heads == [[0, 100, 200]] * 16 + [[300, 400, 499]] * 16 + [[0, 100, 200]] * 8


def test_loss_estimates() -> None:
    loss = LossEstimate()
    assert (loss.short, loss.long) == (0.05, 0.05)
    loss.add(True)
    assert loss.short == pytest.approx(0.05 + 0.01 * 0.95)
    assert loss.long == pytest.approx(2 / 21)
    for _ in range(2000):
        loss.add(False)
    assert loss.short == 0.002
    for _ in range(5000):
        loss.add(True)
    assert (loss.short, loss.long) == (0.6, 0.6)
    assert LossEstimate(fates=1000, losses=80).short == 0.08


@both
def test_a_probe_is_no_loss_but_is_sent_again(kind: type[Book]) -> None:
    book = ledger(kind, 2)
    _, token = book.send_source()
    book.fate(token, False, probe=True)
    assert (book.loss.fates, book.loss.losses, book.known_lost) == (0, 0, 1)
    repair = book.send_repair()
    book.fate(repair, False)
    assert (book.loss.losses, book.repairs_in_flight) == (1, 0)


# the compiled ledger and its twin


def picture(book: Book) -> tuple[Any, ...]:
    """All that can be asked of a ledger without changing it."""
    loss = book.loss
    return (
        book.symbols, book.next, book.prefix, book.in_flight, book.repairs_in_flight, book.known_lost, book.known,
        book.unresolved, book.losses_queued, loss.fates, loss.losses, loss.short, loss.long,
    )  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    symbols=st.sampled_from([1, 7, 40, 900]),
    loss=st.sampled_from([0.0, 0.1, 0.5, 0.95]),
    lag=st.sampled_from([1, 30, 600]),
    max_window=st.sampled_from([1, 5, 64, 300, 16_384]),
    max_head=st.sampled_from([1, 8, 100, 256]),
)
def test_the_twin_agrees_in_everything(
    seed: int, symbols: int, loss: float, lag: int, max_window: int, max_head: int
) -> None:
    """A whole transfer: sends, fates on time, late, twice or as probes, feedback of ranges right and repeated."""
    chance = np.random.default_rng(seed)
    priority = chance.integers(0, 5, symbols).astype(np.float64) / 3
    history = LossEstimate(*[(0, 0), (100, 30)][seed % 2])
    books: list[Book] = [
        Ledger(priority, history), _policy.Ledger(priority, LossEstimate(history.fates, history.losses))
    ]  # fmt: skip
    tokens = 0
    places = np.arange(symbols) % 3  # units of three, the last one what is left
    sizes = np.minimum(3, symbols - (np.arange(symbols) - places))
    ranked_at = int(chance.integers(0, 8 * symbols + 120))
    for step in range(4 * symbols + 60):
        answers: list[Any] = []
        draw = chance.random(4)
        if step == ranked_at:
            for book in books:
                book.rank(sizes.astype(np.int32), places.astype(np.int32))
        pick, start = int(draw[2] * lag), int(chance.integers(0, books[0].next + 1))
        for book in books:
            if draw[0] < 0.35 and book.next < symbols:
                answers.append(book.send_source())
            elif draw[0] < 0.45 and book.known_lost:
                answers.append(book.send_lost())
            elif draw[0] < 0.55:
                answers.append(book.send_repair())
            elif draw[0] < 0.9 and tokens:
                book.fate(max(0, tokens - 1 - pick), bool(draw[3] >= loss), probe=bool(draw[1] < 0.1))
            elif draw[0] < 0.95:
                book.learn_known(start, min(book.next, start + int(30 * draw[1] ** 3)))
            if book.unresolved and draw[1] < 0.5:
                answers += [book.sack_set(max_window, max_head), book.full_set(max_window)]
        half = len(answers) // 2
        assert answers[:half] == answers[half:]
        tokens += half > 0 and draw[0] < 0.55 and (isinstance(answers[0], int) or len(answers[0]) == 2)
        assert picture(books[0]) == picture(books[1])


@both
def test_ranked_losses_go_where_they_complete_most(kind: type[Book]) -> None:
    """Units of three with utilities 9, 6, 3; lacking three, one and one symbol."""
    book = kind(np.repeat([-3.0, -2.0, -1.0], 3), LossEstimate())
    tokens = [book.send_source()[1] for _ in range(9)]
    for sid in (0, 1, 2, 4, 7):
        book.fate(tokens[sid], False)
    book.rank(np.full(9, 3, dtype=np.int32), np.tile(np.arange(3, dtype=np.int32), 3))
    sid, token = book.send_lost()
    assert sid == 4  # 6 for one symbol; 3 for one, and 9 for three, come after
    book.fate(token, False)
    assert [book.send_lost()[0] for _ in range(5)] == [4, 0, 1, 2, 7]


def test_units_are_checked() -> None:
    ones, zeros = np.ones(4, dtype=np.int32), np.zeros(4, dtype=np.int32)
    for packets, places in ((ones[:3], zeros), (ones, ones), (2 * ones, zeros), (ones, -ones), (0 * ones, zeros)):
        with pytest.raises(LocalError):
            _policy.Ledger(np.zeros(4), LossEstimate()).rank(packets, places)
    book = _policy.Ledger(np.zeros(4), LossEstimate())
    book.rank(ones, zeros)
    with pytest.raises(LocalError):
        book.rank(ones, zeros)


@both
def test_two_ledgers_count_in_one_estimate(kind: type[Book]) -> None:
    loss = LossEstimate(fates=10, losses=1)
    books = [kind(np.zeros(3), loss), Ledger(np.zeros(3), loss)]
    for book in books:
        book.fate(book.send_source()[1], False)
    assert (loss.fates, loss.losses) == (12, 3)
    assert loss.short == pytest.approx(0.1 + 0.01 * 0.9 + 0.01 * (1 - 0.109))


@both
def test_nothing_is_sent_that_is_not_there(kind: type[Book]) -> None:
    book = ledger(kind, 1)
    with pytest.raises(IndexError):
        book.send_lost()
    book.send_source()
    with pytest.raises(IndexError):
        book.fate(1, True)


def test_what_would_leave_the_memory_is_refused() -> None:
    book = _policy.Ledger(np.zeros(4), LossEstimate())
    sid, token = book.send_source()
    assert (sid, token) == (0, 0)
    for token in (-1, 1, 2**40):
        with pytest.raises(IndexError):
            book.fate(token, True)
    for start, stop in ((0, 2), (-1, 1)):
        with pytest.raises(IndexError):
            book.learn_known(start, stop)
    for window, head in ((0, 8), (16_385, 8), (8, 0), (8, 16_385)):
        with pytest.raises(LocalError):
            book.sack_set(window, head)
    book.fate(0, True)
    with pytest.raises(IndexError):
        book.sack_set(8, 8)
    for _ in range(3):
        book.send_source()
    with pytest.raises(IndexError):
        book.send_source()
    with pytest.raises(TypeError):
        book.__reduce__()


def test_a_loss_estimate_is_three_numbers() -> None:
    class Wrong:
        values = np.zeros(2)

    with pytest.raises(LocalError):
        _policy.Ledger(np.zeros(4), Wrong())  # type: ignore[arg-type]
