"""What the controllers do to a link, to others on it and to one another, in virtual time (`bench.sharing`).

20 Mbit/s, 20 ms, a queue of one bandwidth-delay product. `cubic` is aioquic's, in the place of TCP.
"""

from __future__ import annotations

import pytest

from bench.flows import Bottleneck, Flow, jain
from bench.sharing import RATE_BPS, RTT_S, alone, beside, through


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_on_the_paper_s_channel_ours_keep_the_link_and_cubic_does_not(seed: int) -> None:
    offered = {
        control: alone(control, "paper", seed).flows[0].offered_bps(1.0, 5.0) / RATE_BPS
        for control in ("rate:20e6", "bbr-lossy", "cubic")
    }
    assert offered["rate:20e6"] > 0.95
    assert offered["bbr-lossy"] > 0.85
    assert offered["cubic"] < 0.3


@pytest.mark.parametrize("loss", ["0.01", "0.05", "0.1", "0.2"])
def test_random_loss_alone_does_not_make_the_provisioned_rate_back_off(loss: str) -> None:
    link = alone("rate:20e6", loss)
    controller = link.flows[0].controller
    assert controller.rate_bps == RATE_BPS
    assert controller.queue_backoffs == controller.shortfall_backoffs == 0
    assert link.flows[0].offered_bps(1.0, 5.0) > 0.97 * RATE_BPS
    assert link.queue_delay(1.0, 5.0)[1] < 0.005


@pytest.mark.parametrize("queue_products", [1, 3])
def test_a_cap_three_times_too_high_settles_in_twenty_round_trips(queue_products: int) -> None:
    link = alone("rate:60e6", "paper", queue_bytes=queue_products * 50_000)
    assert link.flows[0].controller.queue_backoffs + link.flows[0].controller.shortfall_backoffs > 0
    start_s = 20 * RTT_S
    assert link.flows[0].mean_rate_bps(start_s, start_s + 0.4) == pytest.approx(RATE_BPS, rel=0.12)
    assert link.flows[0].mean_rate_bps(1.0, 5.0) == pytest.approx(RATE_BPS, rel=0.1)
    assert link.flows[0].offered_bps(1.0, 5.0) > 0.93 * RATE_BPS
    assert link.queue_delay(1.0, 5.0)[0] < 0.6 * RTT_S


@pytest.mark.parametrize("control", ["rate:20e6", "bbr-lossy", "bbr"])
def test_half_the_rate_is_followed_down_and_up(control: str) -> None:
    link = through("halved", control, "0" if control == "bbr" else "0.05")
    flow = link.flows[0]
    assert 0.42 * RATE_BPS < flow.offered_bps(3.0, 5.0) < 0.55 * RATE_BPS
    assert flow.offered_bps(7.0, 9.0) > 0.9 * RATE_BPS
    assert link.queue_delay(3.0, 5.0)[0] < 0.75 * RTT_S  # the link is half as fast, so its queue is twice as long


@pytest.mark.parametrize("control", ["rate:20e6", "bbr-lossy", "bbr"])
def test_a_second_of_nothing_is_survived(control: str) -> None:
    link = through("blackhole", control, "0" if control == "bbr" else "0.05")
    flow = link.flows[0]
    assert flow.offered_bps(2.2, 3.0) < 0.05 * RATE_BPS  # probes only
    assert flow.offered_bps(4.5, 6.5) > 0.8 * RATE_BPS


@pytest.mark.parametrize("control", ["rate:20e6", "bbr-lossy"])
def test_a_longer_path_is_told_from_a_queue(control: str) -> None:
    flow = through("longer", control, "0.05").flows[0]
    assert flow.offered_bps(4.0, 6.0) > 0.4 * RATE_BPS
    assert flow.offered_bps(8.0, 12.0) > 0.85 * RATE_BPS


def test_a_longer_path_costs_plain_bbr_what_its_draft_says() -> None:
    """It believes in the old delay for up to ten seconds, and has two products of that in flight."""
    link = through("longer", "bbr", "0")
    assert link.flows[0].offered_bps(2.5, 4.5) > 0.6 * RATE_BPS
    link.run(16.0)
    assert link.flows[0].offered_bps(14.0, 16.0) > 0.85 * RATE_BPS


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("cubic", "bbr"),
        ("bbr", "cubic"),
        ("cubic", "bbr-lossy"),
        ("bbr-lossy", "cubic"),
        ("cubic", "rate:20e6"),
        ("rate:20e6", "cubic"),
        ("cubic", "rate:60e6"),
        ("bbr", "rate:20e6"),
        ("rate:20e6", "bbr"),
    ],
)
def test_neither_side_starves(first: str, second: str) -> None:
    case = beside(first, second)
    assert min(case.shares) > 0.2
    for start_s in (12.0, 17.0):  # not only on average
        assert min(case.link.shares(start_s, start_s + 5.0)) > 0.2
    assert sum(case.shares) > 0.9
    assert case.queue_mean_s < 0.9 * RTT_S  # the full queue is one round trip
    assert case.jain == jain(list(case.shares))


@pytest.mark.parametrize("control", ["bbr", "bbr-lossy", "rate:20e6", "rate:60e6"])
def test_two_of_a_kind_share_fairly(control: str) -> None:
    case = beside(control, control)
    assert case.jain > 0.9
    assert sum(case.shares) > 0.9
    assert case.queue_mean_s < 0.8 * RTT_S


def test_four_flows_pass_one_queue_in_the_order_of_their_coming() -> None:
    flows = [Flow("rate:2e6", seed=seed) for seed in range(4)]
    link = Bottleneck(flows, rate_bps=RATE_BPS, rtt_s=RTT_S).run(1.0)
    assert link.shares(0.2, 1.0) == pytest.approx([0.1] * 4, rel=0.03)
    assert jain([0.1] * 4) == pytest.approx(1.0)
    assert jain([1.0, 0.0]) == pytest.approx(0.5)
