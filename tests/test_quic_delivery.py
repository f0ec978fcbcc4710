"""Delivery-rate samples, against flights whose rate is known by construction."""

from __future__ import annotations

import pytest

from quic_pfec.quic.delivery import DeliverySampler, Sample

SIZE = 1000
RTT_S = 0.1


def flight(sampler: DeliverySampler, packets: int, gap_s: float, ack_gap_s: float) -> list[Sample | None]:
    """`packets` leave `gap_s` apart from time 0 on, their acknowledgements come `ack_gap_s` apart, one RTT later."""
    events = [(n * gap_s, 0, n) for n in range(packets)] + [(RTT_S + n * ack_gap_s, 1, n) for n in range(packets)]
    samples: list[Sample | None] = []
    in_flight = 0
    for now, kind, number in sorted(events):
        if kind == 0:
            in_flight += SIZE
            sampler.on_sent(number, SIZE, now, in_flight)
        else:
            in_flight -= SIZE
            sampler.on_acked(number, SIZE, now)
            samples.append(sampler.finish(0.0))
    return samples


def test_a_steady_flow_is_sampled_at_its_rate() -> None:
    samples = flight(DeliverySampler(), 400, 0.001, 0.001)
    late = samples[-1]
    assert late is not None
    assert late.rate == pytest.approx(SIZE / 0.001, rel=0.02)
    assert late.rtt_s == pytest.approx(RTT_S)
    assert late.delivered == pytest.approx(RTT_S / 0.001 * SIZE, rel=0.02)
    assert late.newly_acked == SIZE


@pytest.mark.parametrize(("gap_s", "ack_gap_s"), [(0.001, 0.004), (0.004, 0.001)])
def test_the_slower_of_sending_and_acknowledging_counts(gap_s: float, ack_gap_s: float) -> None:
    sampler = DeliverySampler()
    # Acknowledgements cannot overtake what was sent, so the faster side only has the start to itself.
    samples = flight(sampler, 60, gap_s, max(ack_gap_s, gap_s) if ack_gap_s < gap_s else ack_gap_s)
    rates = [sample.rate for sample in samples if sample is not None]
    assert max(rates[1:]) <= SIZE / 0.004 * 1.1


def test_a_burst_of_acknowledgements_is_one_sample() -> None:
    sampler = DeliverySampler()
    for number in range(10):
        sampler.on_sent(number, SIZE, number * 0.001, (number + 1) * SIZE)
    for number in range(10):
        sampler.on_acked(number, SIZE, 0.15)
    assert sampler.pending
    sample = sampler.finish(0.0)
    assert sample is not None
    assert (sample.newly_acked, sample.prior_delivered, sample.in_flight) == (10 * SIZE, 0, 10 * SIZE)
    assert sample.rtt_s == pytest.approx(0.15 - 0.009)  # of the packet that left last
    assert sample.rate == pytest.approx(10 * SIZE / 0.15)
    assert not sampler.pending
    assert sampler.finish(0.0) is None


def test_an_interval_shorter_than_the_path_gives_no_rate() -> None:
    sampler = DeliverySampler()
    sampler.on_sent(0, SIZE, 1.0, SIZE)
    sampler.on_acked(0, SIZE, 1.02)
    sample = sampler.finish(0.05)
    assert sample is not None
    assert sample.rate == 0.0


def test_a_moment_without_anything_to_send_marks_samples_until_it_has_left_the_path() -> None:
    sampler = DeliverySampler()
    sampler.on_sent(0, SIZE, 0.0, SIZE)
    sampler.mark_app_limited(SIZE)
    sampler.on_sent(1, SIZE, 0.05, 2 * SIZE)
    sampler.on_acked(0, SIZE, 0.1)
    first = sampler.finish(0.0)
    sampler.on_acked(1, SIZE, 0.15)
    second = sampler.finish(0.0)
    assert not sampler.app_limited
    sampler.on_sent(2, SIZE, 0.2, SIZE)
    sampler.on_acked(2, SIZE, 0.3)
    third = sampler.finish(0.0)
    assert first is not None
    assert second is not None
    assert third is not None
    assert [first.app_limited, second.app_limited, third.app_limited] == [False, True, False]


def test_losses_are_counted_and_given_up_packets_are_not() -> None:
    sampler = DeliverySampler()
    for number in range(4):
        sampler.on_sent(number, SIZE, number * 0.01, (number + 1) * SIZE)
    record = sampler.on_lost(0, SIZE)
    assert record is not None
    assert (record.in_flight, record.lost) == (SIZE, 0)
    sampler.forget(1)
    sampler.on_acked(3, SIZE, 0.2)
    sample = sampler.finish(0.0)
    assert sample is not None
    assert (sample.lost, sampler.lost, sampler.tracked) == (SIZE, SIZE, 1)


def test_packets_from_before_the_sampler_count_but_make_no_sample() -> None:
    sampler = DeliverySampler()
    sampler.on_acked(7, SIZE, 1.0)
    assert sampler.delivered == SIZE
    assert sampler.finish(0.0) is None
    assert sampler.on_lost(8, SIZE) is None
