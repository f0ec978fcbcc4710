"""Two real aioquic connections over the simulator's own link: a whole hand-off in virtual time, repeatable.

The same sender and receiver run on the slot clock in `sim.episode`; here they run inside QUIC packets, over
`sim.virtual.VirtualNetwork`, with the channel of `sim.link`. Both must reach about the same on the same losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from quic_pfec.kv.assemble import Assembler
from quic_pfec.kv.layout import Layout
from quic_pfec.kv.prepared import PreparedKV
from quic_pfec.quic.connection import PACKET_OVERHEAD, PfecConnection, TransferEvent
from quic_pfec.quic.rate import rate_control
from quic_pfec.schedule.policies import make_policy
from quic_pfec.sim.channel import PRESETS, channel_factory, losses
from quic_pfec.sim.episode import Settings, run_episode
from quic_pfec.sim.link import Link
from quic_pfec.sim.virtual import VirtualNetwork
from quic_pfec.transfer.receiver import Frozen, ManifestReceived
from quic_pfec.transfer.report import outcome
from quic_pfec.transfer.sender import Sender
from quic_pfec.wire.frames import SOURCE_OVERHEAD
from quic_pfec.wire.limits import Limits
from quic_pfec.wire.manifest import decode_manifest, encode_manifest
from tests.quic_pair import CLIENT_ADDRESS, SERVER_ADDRESS, client_configuration, server_configuration
from tests.test_quic_connection import prepared

RATE_BPS = 20e6
RTT_S = 0.020
SEED = 5


class Node:
    """A connection of aioquic as an endpoint of the virtual network."""

    def __init__(self, quic: PfecConnection, peer: tuple[str, int]) -> None:
        self.quic = quic
        self._peer = peer

    def _started(self) -> bool:
        return self.quic.get_peer_address() is not None

    def receive(self, data: bytes, now: float) -> None:
        self.quic.receive_datagram(data, self._peer, now=now)

    def pull(self, now: float) -> list[bytes]:
        return [data for data, _ in self.quic.datagrams_to_send(now=now)] if self._started() else []

    def next_timer(self) -> float | None:
        return self.quic.get_timer() if self._started() else None

    def on_timer(self, now: float) -> None:
        self.quic.handle_timer(now=now)


@dataclass
class Result:
    j_frac: float
    j_block: float
    datagrams: int
    frozen_after_s: float
    sent: int


def hand_over(kv: PreparedKV, scheduler: str, deadline_s: float) -> Result:
    client = PfecConnection(configuration=client_configuration())
    server = PfecConnection(
        configuration=server_configuration(),
        original_destination_connection_id=client.original_destination_connection_id,
    )
    slot_s = (kv.layout.symbol_size() + SOURCE_OVERHEAD + PACKET_OVERHEAD) * 8 / RATE_BPS
    up = Link(RATE_BPS, RTT_S / 2, channel=channel_factory(PRESETS["paper"], SEED), slot_s=slot_s)
    network = VirtualNetwork(Node(client, SERVER_ADDRESS), Node(server, CLIENT_ADDRESS), up, Link(RATE_BPS, RTT_S / 2))
    client.connect(SERVER_ADDRESS, now=0.0)
    network.run(until=0.2)
    assert client.extension is not None
    client.set_congestion_control(*rate_control(RATE_BPS))
    network.epoch()
    start_s = network.now
    size = kv.layout.symbol_size()
    encoder, unit_of_sid = kv.symbols(size)
    stream_id = client.get_next_available_stream_id()
    client.send_stream_data(stream_id, b"opening")
    sender = Sender(
        stream_id,
        encoder,
        unit_of_sid,
        kv.utility,
        encode_manifest(kv.manifest(size, "mask")),
        make_policy(scheduler),
        now=start_s,
        deadline_s=start_s + deadline_s,
        path=client.path(size),
    )
    client.add_sender(sender)
    frozen: list[float] = []
    assemblers: list[Assembler] = []

    def watch() -> bool:
        while (event := server.next_event()) is not None:
            if not isinstance(event, TransferEvent):
                continue
            if isinstance(event.event, ManifestReceived) and not assemblers:
                manifest = decode_manifest(event.event.data, Limits())
                assemblers.append(Assembler(Layout.from_manifest(manifest)))
                server.receivers[stream_id].accept(
                    assemblers[0].layout.unit_sizes(), manifest.symbols, size, assemblers[0], network.now
                )
            elif isinstance(event.event, Frozen):
                frozen.append(network.now)
        return bool(frozen)

    network.run(until=start_s + deadline_s + 1.0, stop=watch)
    receiver = server.receivers[stream_id]
    known = np.unpackbits(np.frombuffer(receiver.known_bitmap(), np.uint8), bitorder="little").astype(np.bool_)
    result = outcome(known[: encoder.count], assemblers[0].complete, unit_of_sid, kv.utility)
    stats = sender.stats
    sent = stats.source + stats.repair + stats.resent + stats.manifests
    return Result(result.j_frac, result.j_block, network.events, frozen[0] - start_s, sent)


@pytest.mark.parametrize("scheduler", ["none", "arq", "hybrid", "paper-deficit"])
def test_quic_and_the_slot_clock_agree(scheduler: str) -> None:
    kv = prepared(layers=10, tokens=256)
    size = kv.layout.symbol_size()
    slot_s = (size + SOURCE_OVERHEAD + PACKET_OVERHEAD) * 8 / RATE_BPS
    slots = round(0.8 * kv.layout.symbols(size))
    result = hand_over(kv, scheduler, RTT_S / 2 + slots * slot_s)
    assert result.frozen_after_s == pytest.approx(RTT_S / 2 + slots * slot_s, abs=0.003)
    packets = kv.layout.fragment_counts(size).astype(np.int64)[kv.send_order]
    drawn = losses(channel_factory(PRESETS["paper"], SEED)(), slots)
    episode = run_episode(
        packets, kv.utility[kv.send_order], drawn, Settings(slots, round(RTT_S / slot_s), slot_s, scheduler)
    )
    # QUIC adds headers, acknowledgement delay and the pacer: a few slots of difference, not another result.
    assert result.j_frac == pytest.approx(episode.j_frac, abs=0.02)
    assert result.j_frac <= episode.bound.j_frac + 0.01


def test_virtual_time_repeats_itself() -> None:
    kv = prepared(layers=4, tokens=128)
    first, second = hand_over(kv, "hybrid", 0.1), hand_over(kv, "hybrid", 0.1)
    assert (first.j_frac, first.j_block, first.sent) == (second.j_frac, second.j_block, second.sent)
