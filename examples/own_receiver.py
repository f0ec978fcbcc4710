"""A receiver that is no LLM endpoint: a function gets the layout, what is complete, and numpy arrays.

The deadline leaves half of the time that the cache needs, so that there are holes to see. The receiver needs no torch.

    python examples/own_receiver.py [--model smollm2-135m] [--host edge-b --ca-certs cert.pem]
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

import numpy as np

import quic_pfec
from quic_pfec.cli.cert import make_certificate
from quic_pfec.kv.profile import builtin

RATE_BPS = 20e6


def inspect(received: quic_pfec.ReceivedKV) -> None:
    """Called at the freeze. Rows that did not come are zero; `row_valid` says which those are."""
    layout, kv = received.kv.layout, received.kv
    print(f"received: {len(layout.layers)} layers, {layout.tokens} tokens, {layout.wire_dtype}")
    print(f"          {int(received.complete.sum())} of {layout.unit_count} blocks whole")
    for layer, (keys, _) in enumerate(received.float32()[:4]):  # of keys and values: [kv_heads, tokens, head_dim]
        valid = kv.row_valid[layer]  # [kv_heads, tokens]
        mean = float(np.abs(keys[valid]).mean()) if valid.any() else 0.0
        print(f"          layer {layer}: {100 * valid.mean():3.0f} % of its rows came, mean |key| {mean:.3f}")


def prefilled(model_name: str) -> quic_pfec.PreparedKV:
    """The sender's side: a real model's cache, ready to be sent."""
    from quic_pfec.llm.corpus import demo_context
    from quic_pfec.llm.generate import prefill
    from quic_pfec.llm.models import load

    model = load(model_name)
    cache = prefill(model, demo_context(model.tokenizer, 384, seed=3).ids)
    return quic_pfec.prepare(cache, profile=builtin(model.fingerprint), model=model.fingerprint)


async def send(kv: quic_pfec.PreparedKV, host: str, port: int, ca_certs: str) -> None:
    async with quic_pfec.connect(host, port, ca_certs=ca_certs, rate=RATE_BPS) as conn:
        report = await quic_pfec.send_kv(conn, kv, deadline=0.5 * kv.nbytes * 8 / RATE_BPS)
    print(f"sent:     utility of whole blocks {report.j_block:.3f}; limited by {report.limited_by}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-random", help="tiny-random, smollm2-135m, a folder or a hub id")
    parser.add_argument("--host", help="any receiver; default: the function above")
    parser.add_argument("--port", type=int, default=4433)
    parser.add_argument("--ca-certs", help="its authority, PEM")
    args = parser.parse_args()
    kv = prefilled(args.model)
    if args.host:
        await send(kv, args.host, args.port, args.ca_certs)
        return
    with tempfile.TemporaryDirectory() as folder:
        certificate, key = map(str, make_certificate(Path(folder)))
        async with await quic_pfec.serve(port=0, certificate=certificate, private_key=key, on_kv=inspect) as server:
            await send(kv, "127.0.0.1", server.port, certificate)


if __name__ == "__main__":
    asyncio.run(main())
