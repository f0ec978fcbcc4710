"""The stream that `bench.codec` measures: losses, delayed feedback and repairs, recorded once and replayed.

The paper's channel (8.4 % in bursts), one packet a slot, feedback 178 slots late (20 ms at 112 us). The sender repairs
when the receiver's deficit, as known to it, exceeds the repairs it has on the way; a repair covers the symbols reported
missing (head) and those sent since (tail), 48 of them. With 512 symbols not known to be complete it idles.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from bench.codec_native import Event
from quic_pfec.fec.codec import Decoder, Encoder
from quic_pfec.sim.channel import PRESETS, GilbertElliottChannel

SIZE = 1372  # bytes: 4 of header, 1,368 of payload
DEGREE = 48
WINDOW = 512
FEEDBACK_SLOTS = 178
SLICE = 32
DATAGRAMS, DATAGRAM, OFFSET = 64, 1500, 61  # a packet is built behind the headers of its datagram, 64 to a send
RING = 251  # distinct symbols: the packet before the codec lies in cache, as a packetiser or a decryption leaves it

Header = tuple[int, int, int, int, int, bytes, int, int]


@dataclass(frozen=True, slots=True)
class Packet:
    """One slot: a source (`header` is None) or a repair."""

    sid: int
    header: Header | None
    lost: bool


@dataclass(frozen=True, slots=True)
class _Report:
    prefix: int
    highest: int
    deficit: int
    missing: tuple[int, ...]
    repairs: int  # the number the next repair had when this was the state of the receiver


def _header(number: int, missing: tuple[int, ...], tail: range) -> Header:
    if not missing:
        return 4, number, tail.start, DEGREE, 0, b"", 0, len(tail)
    first, span = missing[0], missing[-1] - missing[0] + 1
    bitmap = bytearray((span + 7) // 8)
    for sid in missing:
        bitmap[(sid - first) // 8] |= 1 << (sid - first) % 8
    offset = tail.start - first - span if len(tail) else 0
    return 4, number, first, DEGREE, span, bytes(bitmap), offset, len(tail)


def record(symbols: int, seed: int, channel: str = "paper") -> list[Packet]:
    """Run the sender against the real decoder until all `symbols` are known; returns every packet sent."""
    losses = GilbertElliottChannel(PRESETS[channel], seed)
    encoder, decoder = Encoder(8, symbols), Decoder(8, symbols)
    zeros = bytes(8)
    packets: list[Packet] = []
    reports = deque([_Report(0, 0, 0, (), 0)] * FEEDBACK_SLOTS)
    number = 0
    while decoder.prefix < symbols:
        report = reports.popleft()
        sent = encoder.count
        lost = losses.lost()
        unseen_end = sent == symbols and report.highest < symbols  # the last packets may be lost and in no deficit yet
        if number - report.repairs < report.deficit + unseen_end and report.prefix < sent:
            header = _header(number, report.missing, range(max(report.highest, report.prefix), sent))
            number += 1
            packets.append(Packet(0, header, lost))
            if not lost:
                decoder.repair(*header, zeros)
        elif sent < min(symbols, report.prefix + WINDOW):
            encoder.push(zeros)
            packets.append(Packet(sent, None, lost))
            if not lost:
                decoder.source(sent, zeros)
        decoder.poll(SLICE)
        runs = decoder.known_ranges(10_000)
        missing: list[int] = []
        at = decoder.prefix
        for start, stop in [*runs, (decoder.highest, decoder.highest)]:
            missing += range(at, start)
            at = stop
        reports.append(_Report(decoder.prefix, decoder.highest, decoder.deficit, tuple(missing), number))
    return packets


def as_events(packets: list[Packet]) -> tuple[ctypes.Array[Event], bytes]:
    """For `codec_native.Loops.stream`: the events and the bitmaps they point into."""
    events = (Event * len(packets))()
    heads = bytearray()
    for event, packet in zip(events, packets, strict=True):
        event.lost, event.sid = packet.lost, packet.sid
        if packet.header is not None:
            (
                _,
                event.number,
                event.first_sid,
                event.degree,
                event.head_span,
                head,
                event.tail_offset,
                event.tail_span,
            ) = packet.header
            event.is_repair, event.head_at = 1, len(heads)
            heads += head
    return events, bytes(heads)


@dataclass(frozen=True, slots=True)
class PythonTimes:
    """One replay through the Python API, us."""

    pack_us: float  # all symbols into a run of the arena, its memory included
    encode_us: float  # every packet, source or repair, out of the packed arena into a datagram
    push_us: float  # the way without packing: `push` a source, `repair` to bytes, memory touched as they come
    decode_us: float
    batched_decode_us: float  # 16 packets in one receive_batch
    recovered: int


def replay(packets: list[Packet], symbols: int, seed: int, took: list[float] | None = None) -> PythonTimes:
    """Encode all packets, then decode those that arrived, through the API; every recovered byte is compared.

    `took`, if given, receives the us of each decoder call (source, repair or poll) where they are less than what is
    there.
    """
    rng = random.Random(seed)
    ring = [rng.randbytes(SIZE) for _ in range(RING)]
    truth = [ring[sid % RING] for sid in range(symbols)]
    rows = np.frombuffer(b"".join(ring), dtype=np.uint8).reshape(RING, SIZE)
    started = time.perf_counter()
    encoder = Encoder(SIZE, symbols)
    run = np.asarray(encoder.reserve_run(symbols))
    for start in range(0, symbols, RING):
        run[start : start + RING] = rows[: symbols - start]
    del run
    encoder.commit_run()
    pack_us = 1e6 * (time.perf_counter() - started)

    datagrams = bytearray(DATAGRAMS * DATAGRAM)
    places = [DATAGRAM * (i % DATAGRAMS) + OFFSET for i in range(len(packets))]
    written = [
        (encoder.symbol_into, (p.sid, datagrams, place))
        if p.header is None
        else (encoder.repair_into, (*p.header, datagrams, place))
        for p, place in zip(packets, places, strict=True)
    ]
    started = time.perf_counter()
    for write, arguments in written:
        write(*arguments)
    encode_us = 1e6 * (time.perf_counter() - started)

    lazy = Encoder(SIZE, symbols)
    calls = [(lazy.push, (truth[p.sid],)) if p.header is None else (lazy.repair, p.header) for p in packets]
    started = time.perf_counter()
    made = [call(*arguments) for call, arguments in calls]
    push_us = 1e6 * (time.perf_counter() - started)
    last = len(packets) - 1
    if packets[last].header is not None and datagrams[places[last] : places[last] + SIZE] != made[last]:
        raise RuntimeError("the packed and the pushed encoder disagree")

    received = [
        ((p.sid, truth[p.sid]) if p.header is None else (*p.header, result))
        for p, result in zip(packets, made, strict=True)
        if not p.lost
    ]
    decoder = Decoder(SIZE, symbols)
    arrivals = [(decoder.source if len(arguments) == 2 else decoder.repair, arguments) for arguments in received]
    if took is None:
        started = time.perf_counter()
        for call, arguments in arrivals:
            call(*arguments)
            if decoder.pending:
                decoder.poll(SLICE)
        while decoder.pending:
            decoder.poll(SLICE)
        decode_us = 1e6 * (time.perf_counter() - started)
    else:
        clock = time.perf_counter_ns
        times = []
        for call, arguments in arrivals:
            before = clock()
            call(*arguments)
            between = clock()
            if decoder.pending:
                decoder.poll(SLICE)
            times += [between - before, clock() - between]
        while decoder.pending:
            decoder.poll(SLICE)
        decode_us = sum(times) / 1e3
        took[:] = (
            [min(old, new / 1e3) for old, new in zip(took, times, strict=True)] if took else [t / 1e3 for t in times]
        )
    for sid in range(symbols):
        if decoder.symbol(sid) != truth[sid]:
            raise RuntimeError(f"symbol {sid} is wrong")

    batched = Decoder(SIZE, symbols)
    batches = [received[at : at + 16] for at in range(0, len(received), 16)]
    started = time.perf_counter()
    for batch in batches:
        batched.receive_batch(batch)
        while batched.pending:
            batched.poll(SLICE)
    batched_us = 1e6 * (time.perf_counter() - started)
    if batched.prefix != symbols:
        raise RuntimeError("the batches did not complete the stream")
    return PythonTimes(pack_us, encode_us, push_us, decode_us, batched_us, decoder.counters()["recovered"])
