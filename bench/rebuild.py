"""From the deadline to a cache in use, per receiver: `python -m bench.rebuild --device cuda --json F`.

A sender hands caches of Qwen2.5-7B's KV geometry (28 layers, 4 KV heads of 128, 1,536 tokens: 88 MB in bf16) to the LLM
endpoint in another process, over QUIC on loopback at a provisioned rate, with a deadline at which only a part is there.
What is measured is the endpoint's own account: from its freeze, and from its deadline, to the first step of decoding.
The model behind the geometry is small and random, so `recompute` shows the path and not a 7B model's time.

Before that, without the network: the cache rebuilt on the device is compared with the one rebuilt on the CPU, and
memory that was full of another request's values must show zeros where nothing came. `--scale` shrinks layers and bytes
alike.
Without a GPU it runs with `--device cpu`, the default.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from rich.progress import track
from transformers import LlamaConfig, LlamaForCausalLM

from quic_pfec.cli.cert import make_certificate
from quic_pfec.client import Generate, connect, send_kv
from quic_pfec.kv.assemble import Assembler
from quic_pfec.kv.attention import attach
from quic_pfec.kv.device import DeviceMirror
from quic_pfec.kv.prepared import PreparedKV, prepare_arrays
from quic_pfec.kv.received import ReceivedKV
from quic_pfec.llm.endpoint import LLMHandler
from quic_pfec.llm.generate import forced_logits
from quic_pfec.llm.models import ByteTokenizer, LoadedModel
from quic_pfec.server import serve

LAYERS, HEADS, DIM, TOKENS = 28, 4, 128, 1536
MODES = ("zero", "mask", "recompute")
CANARY = 12345.0
TOLERANCE = 0.05  # logits of order 1, bf16 on both sides


def model(layers: int, device: str, dtype: torch.dtype) -> LoadedModel:
    """A small random Llama with the KV geometry of the point."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=DIM,
        max_position_embeddings=32768,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    network = LlamaForCausalLM(config).to(device=device, dtype=dtype).eval()
    network.requires_grad_(False)
    attach(network)
    return LoadedModel(network, ByteTokenizer(), "rebuild", "", frozenset())


def cache(layers: int, tokens: int, seed: int) -> PreparedKV:
    """A cache of random rows, in bf16, with the ids of a context."""
    rng = np.random.default_rng(seed)

    def part() -> Any:
        return (rng.standard_normal((HEADS, tokens, DIM), np.float32).view(np.uint32) >> 16).astype(np.uint16)

    rows = [(part(), part()) for _ in range(layers)]
    ids = rng.integers(0, 256, tokens)
    return prepare_arrays(rows, dtype="bf16", model="unstated", tokens=ids)


def check(layers: int, tokens: int, device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Rebuilds on the device and on the CPU; raises AssertionError where they differ or foreign memory shows."""
    kv, m = cache(layers, tokens, seed), model(layers, device, dtype)
    on_cpu = m if device == "cpu" else model(layers, "cpu", dtype)
    shape = (1, HEADS, tokens, DIM)
    freed = [torch.full(shape, CANARY, dtype=dtype, device=device) for _ in range(2 * layers)]
    del freed
    assembler = Assembler(kv.layout)
    mirror = DeviceMirror(assembler, m.config, dtype=dtype, device=device)
    rng = np.random.default_rng(seed)
    for position in range(kv.layout.unit_count):
        unit, data = kv.unit_at(position)
        if rng.random() < 0.6:
            assembler.write_unit(unit, data)
        elif rng.random() < 0.3:
            assembler.write_partial(unit, data, [(0, len(data) // 2)], whole_rows=True)
        if position % 50 == 0:
            mirror.catch_up()
    received = ReceivedKV(kv.manifest(kv.layout.symbol_size(), "mask"), assembler.finish("mask"), 0, 0.0, 0.0)
    frame = mirror.finish()
    for index, pair in enumerate(frame.rows):
        hidden = torch.from_numpy(~received.kv.row_valid[index])
        for tensor in pair:
            assert not bool(tensor[0].cpu()[hidden].any()), f"layer {index}: something shows where nothing came"
    there = received.to_cache(m.config, dtype=dtype, device=device, frame=frame)
    here = received.to_cache(on_cpu.config, dtype=dtype)
    for index, (ours, theirs) in enumerate(zip(there.layers, here.layers, strict=True)):
        assert torch.equal(ours.keys.cpu(), theirs.keys), f"layer {index}: the rows differ"
        assert torch.equal(ours.values.cpu(), theirs.values), f"layer {index}: the rows differ"
    ids = list(range(32))
    apart = float((forced_logits(m, there, ids, ids).cpu() - forced_logits(on_cpu, here, ids, ids)).abs().max())
    assert apart <= TOLERANCE, f"logits differ by {apart}"
    return {"canary": "zero", "rows_equal": True, "logits_apart": apart}


def serve_process(pipe: Any, certificate: tuple[str, str], layers: int, device: str, dtype: str) -> None:
    """The endpoint, in a process of its own, until the pipe says so."""

    async def run() -> None:
        handler = LLMHandler(model(layers, device, getattr(torch, dtype)), recompute_budget_s=600.0)
        handler.warm_up()
        listener = await serve(port=0, certificate=certificate[0], private_key=certificate[1], handler=handler)
        cost = handler.clock.calibrate()
        pipe.send((listener.port, msgspec.to_builtins(cost)))
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        listener.close()
        await listener.wait_closed()
        handler.close()

    asyncio.run(run())


async def hand_off(
    port: int, certificate: str, kv: PreparedKV, missing: str, rate_bps: float, deadline_s: float
) -> dict[str, Any]:
    """One hand-off; when decoding began, in seconds after freeze and deadline."""
    async with connect("127.0.0.1", port, ca_certs=certificate, server_name="localhost", rate=rate_bps) as conn:
        then = Generate([1, 2, 3], max_new_tokens=1)
        report = await send_kv(conn, kv, deadline_s, missing=missing, then=then)  # type: ignore[arg-type]
        _ = [part async for part in report.text]
    if report.decode_started_s is None or report.frozen_s is None:
        raise RuntimeError("the endpoint did not say when decoding began")
    return {
        "after_freeze_s": report.decode_started_s - report.frozen_s,
        "after_deadline_s": report.decode_started_s - report.deadline_s,
        "units_complete": report.units_complete,
        "units_partial": report.units_partial,
        "units_missing": report.units_missing,
        "missing_used": report.missing_used,
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


async def measure(port: int, certificate: str, options: argparse.Namespace, kv: PreparedKV) -> list[dict[str, Any]]:
    """One row for each mode."""
    bits = 8 * kv.nbytes
    deadline_s = options.rho * bits / options.rate
    rows = []
    for missing in MODES:
        runs = [
            await hand_off(port, certificate, kv, missing, options.rate, deadline_s)
            for _ in track(range(options.runs), f"{missing:<10}", disable=not sys.stderr.isatty())
        ]
        after = [run["after_freeze_s"] for run in runs]
        late = [run["after_deadline_s"] for run in runs]
        rows.append(
            {
                "missing": missing,
                "runs": len(runs),
                "freeze_p50_s": percentile(after, 0.5),
                "freeze_p99_s": percentile(after, 0.99),
                "deadline_p50_s": percentile(late, 0.5),
                "deadline_p99_s": percentile(late, 0.99),
                "units_complete": statistics.mean(run["units_complete"] for run in runs),
                "units_missing": statistics.mean(run["units_missing"] for run in runs),
                "masked_instead": sum(missing == "recompute" != run["missing_used"] for run in runs),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1 ...")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the 28 layers, hence of the 88 MB")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--runs", type=int, default=12, help="hand-offs for each receiver (default 12)")
    parser.add_argument("--rate", type=float, default=200e6, help="bit/s of the sender (default 200e6)")
    parser.add_argument("--rho", type=float, default=0.8, help="deadline as a share of the time the whole takes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=None, help="compute threads")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if not torch.cuda.is_available() and options.device.startswith("cuda"):
        parser.error("there is no GPU here: run it with --device cpu")
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16  # what the endpoint computes in
    layers = max(1, round(options.scale * LAYERS))
    started_s = time.monotonic()
    checked = check(layers, min(options.tokens, 256), options.device, dtype, options.seed)
    print(
        f"rebuilt on {options.device} as on the CPU; canary: nothing shows; logits apart {checked['logits_apart']:.1e}"
    )
    kv = cache(layers, options.tokens, options.seed)
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        made = make_certificate(Path(folder))
        certificate = (str(made[0]), str(made[1]))
        name = str(dtype).removeprefix("torch.")
        child = context.Process(
            target=serve_process, args=(theirs, certificate, layers, options.device, name), daemon=True
        )
        child.start()
        if not ours.poll(120):
            raise RuntimeError("the endpoint did not start")
        port, cost = ours.recv()
        rows = asyncio.run(measure(port, certificate[0], options, kv))
        ours.send("end")
        child.join(30)
    print(f"{kv.nbytes / 1e6:.1f} MB, {options.rate / 1e6:g} Mbit/s, rho {options.rho:g}; seconds to decoding")
    print(f"{'receiver':<10} {'freeze p50':>10} {'p99':>7} {'deadline p50':>12} {'p99':>7} {'units':>7} {'missing':>7}")
    for row in rows:
        print(
            f"{row['missing']:<10}"
            f" {row['freeze_p50_s']:>10.4f} {row['freeze_p99_s']:>7.4f}"
            f" {row['deadline_p50_s']:>12.4f} {row['deadline_p99_s']:>7.4f}"
            f" {row['units_complete']:>7.0f} {row['units_missing']:>7.0f}"
        )
    if options.json is not None:
        settings = {
            "command": " ".join(sys.argv),
            "seed": options.seed,
            "bytes": kv.nbytes,
            "device": options.device,
            "device_name": torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.processor(),
            "dtype": str(dtype),
            "threads": torch.get_num_threads(),
            "pass_cost": cost,
            "took_s": time.monotonic() - started_s,
            "versions": {name: version(name) for name in ("quic-pfec", "torch", "transformers")},
        }
        options.json.write_text(json.dumps({"rows": rows, "checked": checked, "settings": settings}, indent=1) + "\n")


if __name__ == "__main__":
    main()
