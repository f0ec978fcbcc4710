"""The extension on two real aioquic connections in virtual time: a whole hand-off, deterministic, lossy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from aioquic.quic.events import ConnectionTerminated

from quic_pfec.kv.assemble import Assembler
from quic_pfec.kv.layout import Layout
from quic_pfec.kv.prepared import PreparedKV, prepare_arrays
from quic_pfec.quic.connection import PfecConnection, TransferEvent
from quic_pfec.quic.rate import rate_control
from quic_pfec.schedule.policies import make_policy
from quic_pfec.sim import channel
from quic_pfec.transfer.receiver import Frozen, ManifestReceived
from quic_pfec.transfer.sender import Sender, TraceRow
from quic_pfec.wire import frames
from quic_pfec.wire.errors import ErrorCode
from quic_pfec.wire.limits import Limits
from quic_pfec.wire.manifest import decode_manifest, encode_manifest
from tests.quic_pair import Direction, Pair, client_configuration, server_configuration


def prepared(layers: int = 6, tokens: int = 128, seed: int = 0) -> PreparedKV:
    rng = np.random.default_rng(seed)
    arrays = [
        (rng.normal(size=(2, tokens, 64)).astype(np.float32), rng.normal(size=(2, tokens, 64)).astype(np.float32))
        for _ in range(layers)
    ]
    return prepare_arrays(arrays, dtype="fp32", model="test", wire_dtype="bf16")


@dataclass
class World:
    """One hand-off between two connections; the test's stand-in for the event loop's side."""

    rate_bps: float = 20e6
    rtt_s: float = 0.02
    loss: bool = True
    seed: int = 1
    client_options: dict[str, object] = field(default_factory=dict)
    server_options: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        client = PfecConnection(configuration=client_configuration(), options=self.client_options)
        server = PfecConnection(
            configuration=server_configuration(),
            options=self.server_options,
            original_destination_connection_id=client.original_destination_connection_id,
        )
        self.client, self.server = client, server
        step_s = 1440 * 8 / self.rate_bps
        model = channel.GilbertElliottChannel(channel.PRESETS["paper"], self.seed)
        self.losses = channel.losses(model, 200_000)
        self.lossy = False

        def drop(index: int, size: int) -> bool:
            if not (self.lossy and self.loss):
                return False
            return bool(self.losses[int((self.pair.now - self.start_s) / step_s)])

        self.pair = Pair(
            client,
            server,
            Direction(self.rtt_s / 2, drop, self.rate_bps),
            Direction(self.rtt_s / 2, rate_bps=self.rate_bps),
        )
        self.start_s = 0.0
        self.frozen: Frozen | None = None
        self.assembler: Assembler | None = None
        self.trace: list[TraceRow] = []
        self.pair.on_step = self._on_step

    def connect(self) -> None:
        self.pair.connect()
        controller, pacer = rate_control(self.rate_bps)
        self.client.set_congestion_control(controller, pacer)

    def send(self, kv: PreparedKV, deadline_s: float, scheduler: str = "hybrid") -> Sender:
        now = self.pair.now
        self.start_s, self.lossy = now, True
        stream_id = self.client.get_next_available_stream_id()
        self.client.send_stream_data(stream_id, b"opening")
        size = kv.layout.symbol_size()
        encoder, unit_of_sid = kv.symbols(size)
        sender = Sender(
            stream_id,
            encoder,
            unit_of_sid,
            kv.utility,
            encode_manifest(kv.manifest(size, "mask")),
            make_policy(scheduler),
            now=now,
            deadline_s=now + deadline_s,
            path=self.client.path(size),
            observer=self.trace.append,
        )
        self.client.add_sender(sender)
        return sender

    def _on_step(self, now: float) -> None:
        for event in self.pair.events["server"]:
            if not isinstance(event, TransferEvent):
                continue
            if isinstance(event.event, ManifestReceived) and self.assembler is None:
                manifest = decode_manifest(event.event.data, Limits())
                self.assembler = Assembler(Layout.from_manifest(manifest))
                receiver = self.server.receivers[event.transfer_id]
                receiver.accept(
                    self.assembler.layout.unit_sizes(), manifest.symbols, manifest.symbol_size, self.assembler, now
                )
            elif isinstance(event.event, Frozen):
                self.frozen = event.event


def test_negotiation_and_lossless_transfer_is_bit_equal_and_early() -> None:
    world = World(loss=False)
    world.connect()
    assert world.client.extension is not None
    assert world.server.extension is not None
    kv = prepared()
    sender = world.send(kv, deadline_s=30.0)
    world.pair.run_until(lambda: world.frozen is not None, 30.0)
    assert world.frozen == Frozen(True)
    assert world.pair.now - world.start_s < 5.0
    assert world.assembler is not None
    sent = kv.layout
    for unit in range(sent.unit_count):
        position = int(np.flatnonzero(kv.send_order == unit)[0])
        assert world.assembler.complete[unit]
        assert kv.unit_at(position)[0] == unit
    world.pair.run_until(lambda: sender.status.name == "COMPLETE", 1.0)
    assert sender.stats.losses == 0


@pytest.mark.parametrize("scheduler", ["hybrid", "arq", "deficit", "paper-deficit", "fixed", "none"])
def test_lossy_transfer_freezes_at_the_deadline(scheduler: str) -> None:
    world = World()
    world.connect()
    kv = prepared()
    size = kv.layout.symbol_size()
    deadline_s = 0.01 + 0.8 * kv.layout.symbols(size) * world.client.path(size).slot_s
    sender = world.send(kv, deadline_s, scheduler)
    receiver_id = sender.transfer_id
    world.pair.run_until(lambda: world.frozen is not None, 10.0)
    receiver = world.server.receivers[receiver_id]
    assert receiver.frozen_s is not None
    assert receiver.frozen_s - world.start_s == pytest.approx(deadline_s, abs=0.003)
    table = receiver.units
    assert table is not None
    encoder, _ = kv.symbols(size)
    decoder = receiver._decoder
    assert decoder is not None
    for sid in range(encoder.count):
        if decoder.known(sid):
            assert decoder.symbol(sid) == encoder.symbol(sid)
    if scheduler in ("deficit", "paper-deficit", "fixed"):
        assert receiver.stats.repairs_useful > 0
        assert receiver.stats.recovered > 0
    # The budgeted slots were used: the pacer keeps the provisioned rate.
    sent = sender.stats.source + sender.stats.repair + sender.stats.resent + sender.stats.manifests
    if scheduler != "none":
        assert sent >= 0.95 * sender.slots_total


def test_acknowledgements_travel_with_feedback() -> None:
    world = World(loss=False, rate_bps=100e6)
    world.connect()
    before = world.server.packets_sent
    world.send(prepared(layers=12, tokens=256), 30.0)
    world.pair.run_until(lambda: world.frozen is not None, 30.0)
    feedback = world.server.extension_stats.feedback_sent
    assert feedback > 50
    assert world.server.packets_sent - before < 1.2 * feedback


def test_window_slides_only_by_feedback() -> None:
    world = World()
    world.connect()
    kv = prepared()
    world.send(kv, 0.4, "paper-deficit")
    world.pair.run_until(lambda: world.frozen is not None, 10.0)
    prefixes = [row.prefix for row in world.trace]
    assert prefixes == sorted(prefixes)
    assert prefixes[-1] > 0
    assert any(row.kind.name == "REPAIR" for row in world.trace)
    first_move_s = next(row.now for row in world.trace if row.prefix > 0)
    assert first_move_s - world.start_s >= world.rtt_s


def test_without_the_extension_nothing_of_it_is_sent() -> None:
    world = World(server_options={"enabled": False})
    world.connect()
    assert world.client.extension is None
    assert world.server.extension is None


def test_frame_for_a_transfer_of_the_wrong_initiator_closes() -> None:
    world = World(loss=False, client_options={"fast_path": False})  # frames are then written from the sender's fields
    world.connect()
    kv = prepared(layers=2, tokens=16)
    sender = world.send(kv, 1.0)
    sender.transfer_id = 1  # a server-initiated stream id, sent by the client
    world.pair.run(0.5)
    closed = [event for event in world.pair.events["client"] if isinstance(event, ConnectionTerminated)]
    assert closed
    assert closed[0].error_code == ErrorCode.PROTOCOL_VIOLATION


def test_feedback_for_a_transfer_never_sent_closes() -> None:
    world = World(loss=False)
    world.connect()
    ack = frames.PfecAckFrame(0, 0, frames.AckStatus.RUNNING, 0, 0, 0, 4096, 0, 0, ())
    with pytest.raises(Exception, match="never sent"):
        world.client.extension_frame(frames.PFEC_ACK, memoryview(ack.body()), world.pair.now)


def test_more_transfers_than_allowed_are_dropped_and_counted() -> None:
    world = World(loss=False, server_options={"limits": Limits(max_transfers=1)})
    world.connect()
    world.send(prepared(), 1.0)
    world.pair.run(0.03)
    world.send(prepared(layers=2, tokens=16), 0.5)  # urgent, so that it comes while the first is under way
    world.pair.run(0.2)
    assert len(world.server.receivers) == 1
    assert world.server.extension_stats.dropped_busy > 0
    # Its packets were acknowledged, so the sender takes them for arrived: it must not be let in half-way.
    world.server.remove_transfer(0)
    assert world.server.open_receiver(4, world.pair.now) is None
    assert world.server.open_receiver(8, world.pair.now) is not None


def test_removed_transfer_drops_what_is_late() -> None:
    world = World(loss=False)
    world.connect()
    kv = prepared()
    sender = world.send(kv, 5.0)
    world.pair.run(0.05)
    world.server.remove_transfer(sender.transfer_id)
    world.pair.run(0.05)
    assert not world.server.receivers
    assert world.server.extension_stats.dropped_closed > 0
    assert not world.pair.server.is_closing  # type: ignore[attr-defined]


def test_no_frame_leaves_on_a_stream_that_the_peer_has_not_granted() -> None:
    world = World(loss=False)
    world.connect()
    while world.client.may_open(world.client.get_next_available_stream_id()):
        world.client.send_stream_data(world.client.get_next_available_stream_id(), b"")
    blocked = world.client.get_next_available_stream_id()
    assert not world.server.peer_stream_limit > blocked // 4
    sender = world.send(prepared(1, 16), 1.0)
    assert sender.transfer_id == blocked
    assert sender.ready(world.pair.now)
    assert not world.client.has_frame(world.pair.now)
