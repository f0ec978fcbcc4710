"""The token bucket itself; its behaviour at a rate is tested with the controllers that set one."""

from __future__ import annotations

import pytest

from quic_pfec.quic.bbr import bbr_control
from quic_pfec.quic.pacing import HEADER_BYTES, TokenBucket
from quic_pfec.wire.errors import LocalError


class Fixed(TokenBucket):
    @property
    def rate_bytes_per_s(self) -> float:
        return 1e6


@pytest.mark.parametrize("overhead", [0, HEADER_BYTES])
def test_every_datagram_is_charged_its_overhead(overhead: int) -> None:
    bucket = Fixed(max_datagram_size=1000, overhead=overhead)
    now, sent = 1.0, 0
    while now < 2.0:
        due = bucket.next_send_time(now)
        if due is not None:
            now = due
            continue
        bucket.update_after_send(now)
        bucket.settle(now, [1000])
        sent += 1
    assert sent == pytest.approx(1e6 / (1000 + overhead), abs=3)


@pytest.mark.parametrize("most", [0, 1, 3, 44])
def test_taking_many_is_asking_for_each(most: int) -> None:
    def pair() -> tuple[Fixed, Fixed]:
        return Fixed(burst_s=0.02), Fixed(burst_s=0.02)

    for waited_s in (0.0, 0.0009, 0.003, 0.01, 0.5):
        one, many = pair()
        for bucket in (one, many):
            bucket.next_send_time(1.0)
        now, asked = 1.0 + waited_s, 0
        while asked < most and one.next_send_time(now) is None:
            one.update_after_send(now)
            asked += 1
        assert many.take(now, most) == asked
        for bucket in (one, many):
            bucket.settle(now, [700] * asked)
        assert many.next_send_time(now) == one.next_send_time(now)
        for _ in range(30):
            assert many.take(now, 1) == (one.next_send_time(now) is None)
            one.update_after_send(now)
            if one.next_send_time(now) is not None:
                break


def test_a_bucket_needs_a_rate_and_sensible_bounds() -> None:
    with pytest.raises(LocalError, match="rate"):
        TokenBucket().next_send_time(1.0)
    for wrong in ({"burst_s": -1.0}, {"catch_up_s": -1.0}):
        with pytest.raises(LocalError, match="negative"):
            Fixed(**wrong)


def test_who_was_told_to_wait_is_held_back_until_much_later() -> None:
    _, pacer = bbr_control(seed=1)
    assert not pacer.holds_back(1.0)
    while pacer.next_send_time(1.0) is None:
        pacer.update_after_send(1.0)
    due = pacer.next_send_time(1.0)
    assert due is not None
    assert pacer.holds_back(due)
    assert pacer.holds_back(due + 0.009)  # timers come late
    assert not pacer.holds_back(due + 0.011)
