"""Agent A reads a document and hands what it has understood to agent B, which answers, and answers again.

A never sends the text: B gets A's KV cache, keeps it under a handle, and takes the second question on top of the first.

    python examples/two_agents.py [--model smollm2-135m] [--host edge-b --ca-certs cert.pem]
"""

import argparse
import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import quic_pfec
from quic_pfec.cli.cert import make_certificate
from quic_pfec.kv.profile import builtin
from quic_pfec.llm.corpus import demo_context
from quic_pfec.llm.endpoint import LLMHandler
from quic_pfec.llm.generate import prefill
from quic_pfec.llm.models import load


async def start_agent_b(stack: AsyncExitStack, model: str) -> tuple[str, int, str]:
    """Agent B: a server with a model of its own. Returns where it is and the certificate to trust."""
    certificate, key = map(str, make_certificate(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
    handler = LLMHandler(load(model))
    stack.callback(handler.close)
    server = await quic_pfec.serve(port=0, certificate=certificate, private_key=key, handler=handler)
    await stack.enter_async_context(server)
    return "127.0.0.1", server.port, certificate


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-random", help="tiny-random, smollm2-135m, a folder or a hub id")
    parser.add_argument("--host", help="a running `quic-pfec serve` with the same model; default: one is started here")
    parser.add_argument("--port", type=int, default=4433)
    parser.add_argument("--ca-certs", help="its authority, PEM")
    args = parser.parse_args()
    async with AsyncExitStack() as stack:
        peer = (args.host, args.port, args.ca_certs) if args.host else await start_agent_b(stack, args.model)
        agent_a = load(args.model)
        document = demo_context(agent_a.tokenizer, 384, seed=2)
        cache = prefill(agent_a, document.ids)
        print(f"A: read {len(document.ids)} tokens; the question is: {document.question}")

        host, port, ca_certs = peer
        conn = await stack.enter_async_context(quic_pfec.connect(host, port, ca_certs=ca_certs, rate="200Mbps"))
        kv = quic_pfec.prepare(cache, profile=builtin(agent_a.fingerprint), model=agent_a.fingerprint)
        first = quic_pfec.Generate("The answer is", max_new_tokens=24)
        report = await quic_pfec.send_kv(conn, kv, deadline=1.0, then=first)
        print(f"A: {report.units_complete} of {kv.layout.unit_count} blocks reached B before the deadline")
        print("B: The answer is" + "".join([text async for text in report.text]))

        second = await conn.generate(report.handle, quic_pfec.Generate(" In other words,", max_new_tokens=24))
        print("B: In other words," + await second.whole())


if __name__ == "__main__":
    asyncio.run(main())
