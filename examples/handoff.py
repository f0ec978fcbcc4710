"""Hand a cache over with a deadline; the other machine goes on from what came. The example of the README.

python examples/handoff.py [--model smollm2-135m] [--host edge-b --ca-certs cert.pem]
"""

import argparse
import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import quic_pfec
from quic_pfec.cli.cert import make_certificate
from quic_pfec.kv.profile import builtin
from quic_pfec.llm.corpus import CUE, demo_context
from quic_pfec.llm.endpoint import LLMHandler
from quic_pfec.llm.generate import prefill
from quic_pfec.llm.models import LoadedModel, load


async def hand_over(model: LoadedModel, host: str, port: int, ca_certs: str) -> None:
    context = demo_context(model.tokenizer, 384, seed=1).ids
    cache = prefill(model, context)
    async with quic_pfec.connect(host, port, ca_certs=ca_certs, rate="200Mbps") as conn:
        # Packing and scoring stay outside of the deadline; the result may be sent several times.
        kv = quic_pfec.prepare(cache, tokens=context, profile=builtin(model.fingerprint), model=model.fingerprint)
        continuation = quic_pfec.Generate(CUE, max_new_tokens=48)
        report = await quic_pfec.send_kv(conn, kv, deadline=1.0, then=continuation)
        print(f"{report.units_complete} of {kv.layout.unit_count} blocks in time, J_frac {report.j_frac:.3f}")
        print(f"limited by {report.limited_by}: {report.hint}")
        print(CUE, end="", flush=True)
        async for text in report.text:
            print(text, end="", flush=True)
        print()


@asynccontextmanager
async def local_server(model: LoadedModel) -> AsyncIterator[tuple[str, int, str]]:
    """What `quic-pfec serve` does, in this process; yields where it is and the certificate to trust."""
    with tempfile.TemporaryDirectory() as folder:
        certificate, key = map(str, make_certificate(Path(folder)))
        handler = LLMHandler(model)
        async with await quic_pfec.serve(port=0, certificate=certificate, private_key=key, handler=handler) as server:
            yield "127.0.0.1", server.port, certificate
        handler.close()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-random", help="tiny-random, smollm2-135m, a folder or a hub id")
    parser.add_argument("--host", help="a running `quic-pfec serve` with the same model; default: one is started here")
    parser.add_argument("--port", type=int, default=4433)
    parser.add_argument("--ca-certs", help="its authority, PEM")
    args = parser.parse_args()
    model = load(args.model)
    if args.host:
        await hand_over(model, args.host, args.port, args.ca_certs)
    else:
        async with local_server(model) as (host, port, certificate):
            await hand_over(model, host, port, certificate)


if __name__ == "__main__":
    asyncio.run(main())
