"""The two ends of every flow of `bench.bottleneck`, each a process of its own inside a namespace.

A receiver prints {"ready": true}; a sender prints {"started": ...} when its handshake is over and it begins to send,
and what it knows of itself when it is done. Nothing here measures the link: the emulator does, for all alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import struct
import sys
import time
from typing import Any

import numpy as np

PORT = 5000
TCP_INFO_S = 0.25  # between two looks at TCP_INFO
TOTAL_RETRANS = struct.Struct("@100xI")  # linux/tcp.h, struct tcp_info: tcpi_total_retrans
RTT_US = struct.Struct("@68xI")  # tcpi_rtt
CHUNK = 1 << 16
LAYERS, KV_HEADS, HEAD_DIM = 24, 8, 128
TOKEN_BYTES = LAYERS * KV_HEADS * HEAD_DIM * 2 * 2  # keys and values, bf16


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


# kernel TCP


def receive_tcp(options: argparse.Namespace) -> None:
    with socket.create_server((options.address, PORT)) as server:
        say(ready=True)
        peer, _ = server.accept()
        with peer:
            while peer.recv(CHUNK):
                continue


def send_tcp(options: argparse.Namespace) -> None:
    """As much as it takes for `seconds`, with the controller named."""
    sock = socket.socket()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, options.flow.removeprefix("tcp-").encode())
    sock.connect((options.address, PORT))
    used = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
    started_s = time.monotonic()
    say(started=started_s, congestion_control=used)
    data, looked_s = bytes(CHUNK), 0.0
    sock.settimeout(TCP_INFO_S)
    while (now := time.monotonic()) < started_s + options.seconds:
        if now - looked_s >= TCP_INFO_S:
            looked_s = now
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            say(at=now, retransmissions=TOTAL_RETRANS.unpack_from(info)[0], rtt_s=RTT_US.unpack_from(info)[0] * 1e-6)
        try:
            sock.send(data)
        except TimeoutError:
            continue
    say(ended=time.monotonic())
    os._exit(0)  # closing would wait for what is buffered


# aioquic as it is


async def receive_aioquic(options: argparse.Namespace) -> None:
    from aioquic.asyncio import QuicConnectionProtocol, serve
    from aioquic.quic.configuration import QuicConfiguration

    config = QuicConfiguration(is_client=False, alpn_protocols=["bench"], max_data=1 << 40, max_stream_data=1 << 40)
    config.load_cert_chain(options.certificate, options.private_key)
    await serve(options.address, PORT, configuration=config, create_protocol=QuicConnectionProtocol)
    say(ready=True)
    await asyncio.Event().wait()


async def send_aioquic(options: argparse.Namespace) -> None:
    """One stream that always has data."""
    from aioquic.asyncio import connect
    from aioquic.quic.configuration import QuicConfiguration

    config = QuicConfiguration(
        is_client=True, alpn_protocols=["bench"], congestion_control_algorithm=options.flow.removeprefix("aioquic-")
    )
    config.load_verify_locations(options.certificate)
    async with connect(options.address, PORT, configuration=config) as protocol:
        say(started=time.monotonic())
        stream = protocol._quic.get_next_available_stream_id()
        # Written at once: no callback tells when a stream wants more.
        protocol._quic.send_stream_data(stream, bytes(int(options.rate_bps / 8 * (options.seconds + 1))))
        protocol.transmit()
        await asyncio.sleep(options.seconds)
        say(ended=time.monotonic())
        os._exit(0)


# a hand-off of a synthetic cache


async def receive_handoff(options: argparse.Namespace) -> None:
    from quic_pfec.server import serve

    await serve(
        options.address, PORT, certificate=options.certificate, private_key=options.private_key,
        on_kv=lambda kv: None,
    )  # fmt: skip
    say(ready=True)
    await asyncio.Event().wait()


async def send_handoff(options: argparse.Namespace) -> None:
    """A hand-off of more than the link can carry until its deadline, in `seconds`."""
    from quic_pfec.client import connect, prepare, send_kv

    tokens = 16 * (1 + int(options.rate_bps / 8 * (options.seconds + 1) / TOKEN_BYTES / 16))
    rng = np.random.default_rng(options.seed)
    shape = (KV_HEADS, tokens, HEAD_DIM)
    bits = [rng.integers(0x3C00, 0x4000, shape, dtype=np.uint16) for _ in range(2)]
    kv = prepare([(bits[0], bits[1])] * LAYERS)
    rate = options.rate_bps * options.cap if options.flow == "rate" else None
    try:
        connection = connect(
            options.address,
            PORT,
            ca_certs=options.certificate,
            congestion_control=options.flow.removesuffix("-lossy"),
            rate=rate,
            lossy=options.flow.endswith("-lossy"),
        )
        async with connection as conn:
            say(started=time.monotonic())
            report = await send_kv(conn, kv, options.seconds, scheduler=options.scheduler)
            say(
                ended=time.monotonic(),
                cache_bytes=kv.nbytes,
                symbols=report.symbols.total,
                lost=report.symbols.lost,
                recovered=report.symbols.recovered,
                limited_by=report.limited_by,
                hint=report.hint,
            )
            os._exit(0)
    except ValueError as error:  # a controller that this version does not have
        say(skipped=str(error))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("send", "receive"))
    parser.add_argument("flow", help="tcp-NAME, aioquic-NAME, or a controller of quic_pfec")
    parser.add_argument("--address", required=True)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rate-bps", type=float, default=20e6, help="of the link")
    parser.add_argument("--cap", type=float, default=1.0, help="provisioned rate of `rate`, in rates of the link")
    parser.add_argument("--scheduler", default="hybrid")
    parser.add_argument("--certificate")
    parser.add_argument("--private-key")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sending = options.role == "send"
    if options.flow.startswith("tcp-"):
        (send_tcp if sending else receive_tcp)(options)
    elif options.flow.startswith("aioquic-"):
        asyncio.run((send_aioquic if sending else receive_aioquic)(options))
    else:
        asyncio.run((send_handoff if sending else receive_handoff)(options))


if __name__ == "__main__":
    sys.exit(main())
