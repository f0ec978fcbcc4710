"""What wire dtypes keep of a model and what they cost: `python -m bench.wire_dtypes --json F`.

Contexts are prefilled and judged along what the intact cache goes on to say, with nothing lost: the KL divergence of
the next-token distributions, in nats, and how often the most likely token is the same, both against the cache as bf16
on the wire leaves it; "own" in the JSON is against the cache as the model computed it. CPU times are of this process,
one thread, of the median context: packing the whole cache, and rebuilding all of its units in fp32. Beside them, to
weigh precision against presence: bf16 with a share of the blocks missing at random, masked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from quic_pfec.client import prepare
from quic_pfec.kv.assemble import Assembler
from quic_pfec.kv.hf import as_sent
from quic_pfec.kv.layout import BLOCK_TOKENS
from quic_pfec.llm.dataset import ANSWER_CUE, builtin_dataset, load_dataset, question_prompt
from quic_pfec.llm.generate import prefill
from quic_pfec.llm.models import LoadedModel, load
from quic_pfec.llm.profiler import continuation, control_ids
from quic_pfec.llm.shared import Pattern, log_probabilities, verdicts

WIRE_DTYPES = ("bf16", "int8", "fp8", "int4", "progressive")
HOLES = (0.05, 0.2, 0.5)


def costs(cache: Any, wire_dtype: str) -> dict[str, float]:
    """Bytes of all units, CPU seconds of packing and of assembling, values saturated."""
    begun_s = time.process_time()
    kv = prepare(cache, wire_dtype=wire_dtype)
    packed_s = time.process_time()
    units = [kv.unit_at(position) for position in range(kv.layout.unit_count)]
    assembler = Assembler(kv.layout, "fp32")
    before_s = time.process_time()
    for unit, data in units:
        assembler.write_unit(unit, data)
    took_s = time.process_time() - before_s
    if not assembler.complete.all():
        raise RuntimeError(f"{wire_dtype}: {assembler.rejected} units were refused")
    return {
        "nbytes": kv.nbytes,
        "saturated": kv.saturated,
        "pack_cpu_s": packed_s - begun_s,
        "assemble_cpu_us_per_unit": took_s / len(units) * 1e6,
    }


def judge(m: LoadedModel, ids: tuple[int, ...], positions: int, seed: list[int]) -> dict[str, dict[str, float]]:
    """Figures of one context by wire dtype, and by the share of blocks that are missing."""
    cache, cue = prefill(m, ids), m.encode(ANSWER_CUE)
    forced = continuation(m, cache, cue, positions, control_ids(m))
    whole = [Pattern.whole(len(cache.layers))]
    own = log_probabilities(m, cache, cue, forced, whole, "mask")[0]
    plain = as_sent(cache, m.config, "bf16")
    bf16 = log_probabilities(m, plain, cue, forced, whole, "mask")[0]
    found: dict[str, dict[str, float]] = {}
    for wire_dtype in WIRE_DTYPES:
        sent = as_sent(cache, m.config, wire_dtype)
        found[wire_dtype] = costs(cache, wire_dtype)
        for name, reference in (("", bf16), ("own_", own)):
            [verdict] = verdicts(m, sent, cue, forced, whole, "mask", reference)
            found[wire_dtype] |= {f"{name}kl": verdict.kl, f"{name}agreement": verdict.agreement}
    rng, columns = np.random.default_rng(seed), -(-len(ids) // BLOCK_TOKENS)
    for share in HOLES:
        blocks = rng.random((len(cache.layers), columns)) >= share
        pattern = Pattern(tuple(np.repeat(blocks, BLOCK_TOKENS, axis=1)[:, : len(ids)]))
        [verdict] = verdicts(m, plain, cue, forced, [pattern], "mask", bf16)
        found[f"bf16, {share:.0%} missing"] = {"kl": verdict.kl, "agreement": verdict.agreement}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", type=Path, help="questions, JSON lines; default: the corpus that ships")
    parser.add_argument("--contexts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="of each context")
    parser.add_argument("--positions", type=int, default=64, help="of the continuation that is judged")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    m = load(options.model, threads=1)
    data = builtin_dataset() if options.data is None else load_dataset(options.data)
    examples = data.evaluation[: options.contexts]
    contexts = []
    for number, example in enumerate(examples):
        ids = question_prompt(m.tokenizer, example, data.evaluation, options.tokens, options.seed)
        contexts.append(judge(m, ids, options.positions, [options.seed, number]))
    mean = {
        row: {
            name: (statistics.median if "cpu" in name else statistics.fmean)(one[row][name] for one in contexts)
            for name in contexts[0][row]
        }
        for row in contexts[0]
    }
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    if options.json is not None:
        result = {"settings": settings, "command": " ".join(sys.argv), "model": m.fingerprint, "contexts": contexts}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result | {"mean": mean, "numpy": np.__version__}, indent=1) + "\n")
    table = Table(title=f"{m.name}, {len(examples)} contexts of {options.tokens} tokens, {options.positions} positions")
    for head in ("wire dtype", "bytes", "of bf16", "KL", "agreement", "pack, CPU s", "assemble, CPU us a unit"):
        table.add_column(head, justify="right")
    for name, row in mean.items():
        cells = [name, "", "", f"{row['kl']:.5f}", f"{row['agreement']:.4f}", "", ""]
        if "nbytes" in row:
            cells[1:3] = [f"{row['nbytes']:,.0f}", f"{row['nbytes'] / mean['bf16']['nbytes']:.3f}"]
            cells[5:] = [f"{row['pack_cpu_s']:.3f}", f"{row['assemble_cpu_us_per_unit']:.1f}"]
        table.add_row(*cells)
    Console().print(table)


if __name__ == "__main__":
    main()
