"""Datagrams become smaller on a path that loses large ones alone, and on no other."""

from __future__ import annotations

import random
from typing import Any

import pytest
from aioquic.quic.events import DatagramFrameReceived
from aioquic.quic.packet import QuicErrorCode

from quic_pfec.quic.path_size import FLOOR, MISSES, ROUNDS, PathSize
from quic_pfec.wire.errors import LocalError

from .quic_pair import Direction, Pair, make_pair, random_loss
from .quic_toy import FastToy, Toy

KINDS = pytest.mark.parametrize("kind", [Toy, FastToy])


def swallow(most: int) -> Any:
    return lambda index, size: size > most


def pair_of(kind: type[Toy], drop: Any = None, **options: Any) -> Pair:
    pair = make_pair(kind, kind, **options)
    if drop is not None:
        pair.up.drop = drop
    pair.connect()
    return pair


# the count


def test_rounds_of_large_losses_and_small_arrivals_shrink_it() -> None:
    path = PathSize(1452)
    fallen, number = [], 0
    for _ in range(ROUNDS):
        for _ in range(MISSES // ROUNDS + 1):
            path.on_lost(number)
            number += 1
        fallen.append(path.on_acked(number, large=False))
        number += 1
    assert fallen == [False] * (ROUNDS - 1) + [True]
    assert path.size == path.size_now(0) == FLOOR
    path.on_lost(number)
    assert path.missed == 0  # there is no smaller one


def test_few_large_losses_take_more_rounds() -> None:
    path, rounds = PathSize(1452), 0
    while path.size > FLOOR:
        path.on_lost(2 * rounds)
        path.on_acked(2 * rounds + 1, large=False)
        rounds += 1
    assert rounds == MISSES


def test_a_large_arrival_starts_anew() -> None:
    path = PathSize(1452)
    for number in range(0, 200, 10):
        for lost in range(MISSES):
            path.on_lost(number + lost)
        assert not path.on_acked(number + MISSES, large=number % 20 == 10)
    assert path.size == 1452


def test_small_arrivals_without_a_new_loss_are_no_rounds() -> None:
    path = PathSize(1452)
    for number in range(3 * MISSES):
        path.on_lost(number)
    for number in range(100, 120):
        assert not path.on_acked(number, large=False)
    assert not path.on_acked(5, large=False)  # sent before the losses
    assert path.size == 1452


def test_probe_timeouts_with_large_losses_make_small_packets() -> None:
    path = PathSize(1452)
    assert path.size_now(5) == 1452
    path.on_lost(1)
    assert [path.size_now(count) for count in range(4)] == [1452, 1452, FLOOR, FLOOR]
    path.on_acked(2, large=False)
    assert [path.size_now(count) for count in range(3)] == [1452, FLOOR, FLOOR]


# in a connection


@KINDS
@pytest.mark.parametrize("most", [FLOOR, 1300])
def test_a_black_hole_is_found(kind: type[Toy], most: int) -> None:
    pair = pair_of(kind, swallow(most), client_options={"total": 200})
    client, server = pair.client, pair.server
    assert isinstance(client, Toy)
    assert isinstance(server, Toy)
    shrunk: list[int] = []
    client.path_shrunk = lambda: shrunk.append(client.frame_space)  # type: ignore[method-assign]
    pair.run_until(lambda: bool(shrunk), 10.0)
    assert client.path_size.size == FLOOR
    assert shrunk == [FLOOR - 27]
    assert server.path_size.size == 1452  # the other direction is another path
    client.size = 1000
    client.total += 50
    before = len(server.received)
    pair.run_until(lambda: len(server.received) >= before + 50, 10.0)
    assert client.bugs == server.bugs == 0


@KINDS
def test_a_stream_survives_a_black_hole(kind: type[Toy]) -> None:
    pair = pair_of(kind, swallow(1300))
    pair.client.send_stream_data(0, bytes(100_000), end_stream=True)
    pair.run_until(lambda: any(getattr(event, "end_stream", False) for event in pair.events["server"]), 30.0)


@pytest.mark.parametrize("drop", [swallow(FLOOR), None])
def test_a_handshake_has_small_packets(drop: Any) -> None:
    sizes: list[int] = []
    pair = make_pair(Toy, Toy)
    for direction in (pair.up, pair.down):
        direction.drop = lambda index, size: sizes.append(size) or (drop is not None and drop(index, size))  # type: ignore[func-returns-value]
    pair.connect()
    assert max(sizes) == FLOOR
    assert isinstance(pair.client, Toy)
    assert pair.client.frame_space == 1452 - 27  # what a transfer that begins now is cut for


@KINDS
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_outages_do_not_shrink_it(kind: type[Toy], seed: int) -> None:
    pair = pair_of(kind, client_options={"total": 10**6})
    generator, lossy = random.Random(seed), random_loss(0.2, seed)
    silent_until = 0.0

    def drop(index: int, size: int) -> bool:
        nonlocal silent_until
        if generator.random() < 0.002:
            silent_until = pair.now + 0.3
        return pair.now < silent_until or lossy(index, size)

    pair.up = Direction(drop=drop)
    pair.run(8.0)
    assert isinstance(pair.client, Toy)
    assert pair.up.dropped > 50
    assert pair.client.path_size.size == 1452


def test_datagrams_that_do_not_fit_any_more_block_nobody() -> None:
    changes = {"max_datagram_frame_size": 1500}
    pair = pair_of(Toy, client_changes=changes, server_changes=changes)
    pair.run(0.2)
    pair.up.drop = swallow(FLOOR)
    client: Any = pair.client
    for size in (1400, 300):
        client.send_datagram_frame(bytes(size))
    client.path_size.size = FLOOR
    client._path_shrunk()
    pair.run(0.2)
    assert pair.up.dropped == 0
    assert [len(event.data) for event in pair.events["server"] if isinstance(event, DatagramFrameReceived)] == [300]
    with pytest.raises(LocalError, match="exceeds"):
        client.send_datagram_frame(bytes(1400))


def test_a_bug_in_the_hook_ends_the_connection_and_nothing_else() -> None:
    pair = pair_of(Toy)
    client: Any = pair.client

    def fail() -> None:
        raise RuntimeError("a bug")

    client.path_shrunk = fail
    client._path_shrunk()
    pair.run(2.0)
    assert client.bugs == 1
    assert pair.terminated("server").error_code == QuicErrorCode.INTERNAL_ERROR
