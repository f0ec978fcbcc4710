"""`bbr`: its phases and bounds in virtual time, alone on a link, and inside whole connections."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.tls import Epoch

from bench.flows import PAYLOAD, Bottleneck, Flow
from bench.sharing import RATE_BPS, RTT_S, alone, iid
from quic_pfec.quic.bbr import DRAFT_LOSS_THRESHOLD, LOSSY_LOSS_THRESHOLD, BbrController, bbr_control
from quic_pfec.quic.bbr_controller import Phase
from quic_pfec.sim.channel import PRESETS, channel_factory, losses
from quic_pfec.transfer.receiver import Receiver

from .quic_pair import Direction, make_pair, random_loss
from .quic_toy import Toy
from .test_quic_connection import World, prepared

MBPS = 1e6
BDP = RATE_BPS * RTT_S / 8


def packet(number: int, sent_s: float, size: int = PAYLOAD) -> QuicSentPacket:
    return QuicSentPacket(Epoch.ONE_RTT, True, True, False, number, QuicPacketType.ONE_RTT, sent_s, size)


def phases(control: str, duration_s: float, step_s: float = 0.005, **options: Any) -> tuple[list[Phase], Bottleneck]:
    """The phases that one flow goes through, each once when it begins."""
    link = Bottleneck([Flow(control)], rate_bps=RATE_BPS, rtt_s=RTT_S, **options)
    seen: list[Phase] = []
    while link.now < duration_s:
        link.run(link.now + step_s)
        phase = link.flows[0].controller.phase
        if not seen or seen[-1] is not phase:
            seen.append(phase)
    return seen, link


def test_the_phases_follow_one_another_and_the_round_trip_is_probed_after_five_seconds() -> None:
    seen, link = phases("bbr", 7.0)
    order = [phase for phase in seen if phase is not Phase.DOWN]  # DOWN is over at once when there is no queue
    assert order[:5] == [Phase.STARTUP, Phase.DRAIN, Phase.CRUISE, Phase.REFILL, Phase.UP]
    assert seen.count(Phase.STARTUP) == 1
    assert seen.count(Phase.UP) >= 4
    assert seen.count(Phase.PROBE_RTT) == 1
    after = {first: {b for a, b in itertools.pairwise(seen) if a is first} for first in seen}
    assert after[Phase.UP] <= {Phase.DOWN, Phase.PROBE_RTT}
    assert after[Phase.PROBE_RTT] == {Phase.CRUISE}
    controller = link.flows[0].controller
    assert controller.bandwidth_bytes_per_s == pytest.approx(RATE_BPS / 8 * PAYLOAD / 1480, rel=0.03)
    assert controller.min_rtt_s == pytest.approx(RTT_S + 0.001, abs=0.002)


def test_alone_it_fills_the_link_and_keeps_the_queue_short() -> None:
    link = alone("bbr", "0", duration_s=4.0, queue_bytes=4 * int(BDP))
    assert link.flows[0].delivered_bps(0.5, 4.0) > 0.95 * RATE_BPS
    mean_s, p95_s = link.queue_delay(0.5, 4.0)
    assert mean_s < 0.25 * RTT_S
    assert p95_s < 1.1 * RTT_S  # the window is two bandwidth-delay products


def test_startup_takes_a_few_round_trips() -> None:
    link = alone("bbr", "0", duration_s=1.0)
    assert link.flows[0].delivered_bps(0.1, 0.3) > 0.9 * RATE_BPS


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_startup_survives_a_first_round_trip_that_loses_half(seed: int) -> None:
    bits = losses(channel_factory(PRESETS["paper"], seed)(), 20_000)
    bits[:45] = np.random.default_rng(seed).random(45) < 0.5
    for control in ("bbr-lossy", "rate:20e6"):
        link = Bottleneck([Flow(control)], rate_bps=RATE_BPS, rtt_s=RTT_S, channel=channel_factory(bits, 0)).run(1.0)
        assert link.flows[0].offered_bps(0.0, 0.5) > 0.8 * RATE_BPS
        assert link.flows[0].offered_bps(0.5, 1.0) > 0.85 * RATE_BPS


def test_the_draft_s_threshold_backs_off_where_the_raised_one_does_not() -> None:
    ordinary, lossy = alone("bbr", "0.05"), alone("bbr-lossy", "0.05")
    assert ordinary.flows[0].offered_bps(1.0, 5.0) < 0.7 * RATE_BPS
    assert lossy.flows[0].offered_bps(1.0, 5.0) > 0.9 * RATE_BPS
    assert ordinary.flows[0].controller.loss_threshold == DRAFT_LOSS_THRESHOLD
    assert lossy.flows[0].controller.loss_threshold == LOSSY_LOSS_THRESHOLD


def test_losses_of_a_full_queue_bound_the_volume_in_flight() -> None:
    link = Bottleneck([Flow("bbr")], rate_bps=RATE_BPS, rtt_s=RTT_S, queue_bytes=round(BDP / 5)).run(4.0)
    controller = link.flows[0].controller
    assert controller.probes_too_high > 0
    assert link.flows[0].packets_lost < 0.03 * len(link.flows[0].sent_at)
    assert link.flows[0].delivered_bps(1.0, 4.0) > 0.8 * RATE_BPS


def test_an_application_that_sends_little_does_not_grow_window_or_rate() -> None:
    flow = Flow("bbr", wants=lambda now: now % 0.05 < 0.002)
    link = Bottleneck([flow], rate_bps=RATE_BPS, rtt_s=RTT_S).run(0.5)
    window, rate = flow.recovery.congestion_window, flow.recovery.rate_bps
    link.run(4.0)
    assert flow.recovery.congestion_window <= max(window, 25 * PAYLOAD)
    assert flow.recovery.rate_bps <= rate
    assert flow.controller.phase is Phase.STARTUP  # it has not seen the link, and does not think so
    flow.wants = lambda now: True
    link.run(5.0)
    assert flow.delivered_bps(4.2, 5.0) > 0.95 * RATE_BPS


def test_a_flow_that_was_idle_starts_where_it_was() -> None:
    flow = Flow("bbr", wants=lambda now: not 1.0 <= now < 3.0)
    link = Bottleneck([flow], rate_bps=RATE_BPS, rtt_s=RTT_S).run(3.5)
    assert flow.delivered_bps(3.0 + RTT_S, 3.2) > 0.9 * RATE_BPS
    assert link.queue_delay(3.0, 3.2)[1] < RTT_S


def test_persistent_congestion_restarts_from_two_packets() -> None:
    controller, _ = bbr_control(max_datagram_size=PAYLOAD)
    link = alone("bbr", "0", duration_s=1.0)
    running: BbrController = link.flows[0].controller
    assert running.congestion_window > 20 * PAYLOAD
    running.on_persistent_congestion()
    assert running.congestion_window == 2 * PAYLOAD
    link.run(1.5)
    assert running.congestion_window > 20 * PAYLOAD
    assert controller.congestion_window == 10 * PAYLOAD  # a fresh one has the initial window


def test_bytes_in_flight_return_to_zero_whatever_happens_to_packets() -> None:
    controller, _ = bbr_control(seed=1)
    packets = [packet(number, 1.0, PAYLOAD - number) for number in range(8)]
    for sent in packets:
        controller.on_packet_sent(packet=sent)
    controller.on_packet_acked(now=1.1, packet=packets[0])
    controller.on_rtt_measurement(now=1.1, rtt=0.1)
    controller.on_packets_lost(now=1.1, packets=iter(packets[1:4]))
    controller.on_packets_expired(packets=filter(lambda sent: sent.in_flight, packets[4:]))
    assert controller.bytes_in_flight == 0
    assert (controller.packets_acked, controller.packets_lost) == (1, 3)  # expired packets are probes, not losses
    assert controller.min_rtt_s == pytest.approx(0.1)
    assert controller.get_log_data()["bbr_phase"] == "startup"


def test_the_same_seed_gives_the_same_run() -> None:
    first, again, other = (alone("bbr-lossy", "paper", seed, duration_s=1.5).flows[0] for seed in (1, 1, 2))
    assert first.sent_at == again.sent_at
    assert first.sent_at != other.sent_at


def test_one_standing_queue_is_judged_by_the_draft_s_threshold_in_every_mode() -> None:
    """The raised threshold is for random loss, which builds no queue."""
    flow = Flow("bbr-lossy")
    link = Bottleneck([flow], rate_bps=RATE_BPS, rtt_s=RTT_S, queue_bytes=4 * int(BDP)).run(1.0)
    model = flow.controller._model
    assert model.present_threshold == LOSSY_LOSS_THRESHOLD
    link.change(rate_bps=RATE_BPS / 3)  # the window is now six bandwidth-delay products: a queue, until it is drained
    seen = set()
    while link.now < 1.5:
        link.run(link.now + 0.005)
        seen.add(model.present_threshold)
    assert DRAFT_LOSS_THRESHOLD in seen


# ---- in whole connections --------------------------------------------------------------------------------------------


class Modelled(Toy):
    def setup(self, *, lossy: bool = False, **options: Any) -> None:
        super().setup(**options)
        self.set_congestion_control(*bbr_control(lossy=lossy, seed=3))


def bottleneck(loss: float = 0.0, rate: float = 10 * MBPS) -> Direction:
    return Direction(rate_bps=rate, queue_bytes=round(rate * 0.02 / 8), drop=random_loss(loss, 1))


@pytest.mark.parametrize(("lossy", "loss", "least"), [(False, 0.0, 0.93), (True, 0.08, 0.85)])
def test_frames_of_ours_fill_the_link(lossy: bool, loss: float, least: float) -> None:
    pair = make_pair(Modelled, Modelled, client_options={"total": 10**9, "lossy": lossy}, up=bottleneck(loss))
    pair.connect()
    pair.run(0.4)
    before = pair.up.wire_bytes
    pair.run(1.2)
    assert least < (pair.up.wire_bytes - before) * 8 / 1.2 / (10 * MBPS) < 1.1
    client: Any = pair.client
    assert client.congestion_control == "bbr"
    assert client.send_rate_bps == pytest.approx(10 * MBPS, rel=0.2)
    assert not client.bugs


def test_plain_streams_fill_the_link_too() -> None:
    pair = make_pair(
        Modelled,
        Modelled,
        client_options={"lossy": True},
        up=bottleneck(0.05),
        server_changes={"max_data": 1 << 30, "max_stream_data": 1 << 30},
    )
    pair.connect()
    pair.client.send_stream_data(0, bytes(6_000_000))
    pair.run(0.4)
    before = pair.up.delivered_bytes
    pair.run(1.2)
    assert (pair.up.delivered_bytes - before) * 8 / 1.2 > 0.8 * 10 * MBPS


def test_a_later_transfer_of_the_connection_starts_with_what_was_learned() -> None:
    pair = make_pair(Modelled, Modelled, client_options={"total": 600}, up=bottleneck())
    pair.connect()
    pair.run(2.0)
    client: Any = pair.client
    assert client.sent == 600
    assert client._loss._cc._sampler.app_limited or client._loss._cc.bytes_in_flight == 0
    rate = client.send_rate_bps
    assert rate == pytest.approx(10 * MBPS, rel=0.2)
    before = pair.up.wire_bytes
    client.total = 10**9
    pair.run(0.1)
    assert (pair.up.wire_bytes - before) * 8 / 0.1 > 0.85 * 10 * MBPS
    assert client.send_rate_bps == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize("controller", ["rate", "bbr"])
def test_recovered_symbols_stay_lost_for_the_controller(controller: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding on or off, what the link dropped is what the controller saw as lost."""
    seen: dict[bool, tuple[int, int, int]] = {}
    for decoding in (True, False):
        if not decoding:
            take = Receiver._take
            monkeypatch.setattr(
                Receiver,
                "_take",
                lambda self, packets, events, take=take: take(self, [p for p in packets if len(p) == 2], events),
            )
        world = World()
        world.connect()
        if controller == "bbr":
            world.client.set_congestion_control(*bbr_control(lossy=True, seed=1))
        kv = prepared()
        dropped = world.pair.up.dropped
        cc = world.client._loss._cc
        lost, acked = cc.packets_lost, cc.packets_acked
        deadline_s = 0.01 + 0.8 * kv.layout.symbols(kv.layout.symbol_size()) * 1480 * 8 / world.rate_bps
        sender = world.send(kv, deadline_s, "paper-deficit")
        world.pair.run(deadline_s + 0.01)
        assert world.frozen is not None
        world.pair.run(0.2)
        recovered = world.server.receivers[sender.transfer_id].stats.recovered
        seen[decoding] = (cc.packets_lost - lost, world.pair.up.dropped - dropped, recovered)
        total = cc.packets_acked - acked + cc.packets_lost - lost
        assert seen[decoding][0] / total == pytest.approx(0.084, abs=0.05)
        # Packets that hold nothing but an acknowledgement are dropped unseen, the last ones die as probes.
        assert seen[decoding][0] <= seen[decoding][1] <= seen[decoding][0] + 8
    assert seen[True][2] > 0
    assert seen[False][2] == 0


def test_independent_losses_come_from_the_seed() -> None:
    assert iid(0.0, 1) is None
    assert iid(0.5, 1) is not None
