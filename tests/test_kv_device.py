"""The mirror on a device: the same rows as the assembler's, whenever they were copied, and zeros everywhere else."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import LlamaConfig  # noqa: E402

from quic_pfec.kv import hf  # noqa: E402
from quic_pfec.kv.assemble import Assembler  # noqa: E402
from quic_pfec.kv.device import STAGING_BYTES, DeviceMirror  # noqa: E402
from quic_pfec.kv.prepared import PreparedKV, prepare_arrays  # noqa: E402

pytestmark = pytest.mark.model
torch.set_num_threads(1)

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
    ),
]
CONFIG = LlamaConfig(
    num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=64, hidden_size=256, vocab_size=256
)
CANARY = 12345.0


def prepared(tokens: int = 70, seed: int = 0, wire_dtype: str = "bf16") -> PreparedKV:
    rng = np.random.default_rng(seed)
    rows = [tuple(rng.normal(size=(2, tokens, 64)).astype(np.float32) for _ in range(2)) for _ in range(3)]
    return prepare_arrays(rows, dtype="fp32", model="test", wire_dtype=wire_dtype)  # type: ignore[arg-type]


def assert_same(frame: hf.Frame, assembler: Assembler, dtype: Any) -> None:
    for pair, raw in zip(frame.rows, assembler.arrays.layers, strict=True):
        for tensor, bits in zip(pair, raw, strict=True):
            expected = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).to(dtype)
            assert tensor.dtype == dtype
            assert torch.equal(tensor[0].cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_arrive_as_they_complete_and_parts_at_the_end(dtype: Any, device: str) -> None:
    kv = prepared()
    assembler = Assembler(kv.layout)
    mirror = DeviceMirror(assembler, CONFIG, dtype=dtype, device=device)
    copied = []
    for position in range(kv.layout.unit_count - 4):
        unit, data = kv.unit_at(position)
        if position % 5 == 4:
            assembler.write_partial(unit, data, [(0, 2000)], whole_rows=True)
        else:
            assembler.write_unit(unit, data)
        copied.append(mirror.catch_up(limit=1))
    assert copied == [0 if position % 5 == 4 else 1 for position in range(kv.layout.unit_count - 4)]
    assert mirror.catch_up() == 0
    done = assembler.finish("mask")
    frame = mirror.finish()
    assert_same(frame, assembler, dtype)
    cache = hf.to_cache(done.arrays, done.row_valid, CONFIG, dtype=dtype, device=device, frame=frame)
    holes = sum(int((~rows).sum()) for rows in done.row_valid)
    assert cache.hole_count() == holes > 0
    whole = DeviceMirror(assembler, CONFIG, dtype=dtype, device=device)
    assert_same(whole.finish(), assembler, dtype)  # nothing copied before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("followed", [True, False])
def test_refinements_arrive_after_their_bases_or_not_at_all(device: str, followed: bool) -> None:
    kv = prepared(wire_dtype="progressive")
    assembler = Assembler(kv.layout)
    mirror = DeviceMirror(assembler, CONFIG, dtype=torch.float32, device=device)
    blocks, data = kv.layout.block_count, dict(kv.unit_at(position) for position in range(kv.layout.unit_count))
    for unit in (*range(blocks - 1), *range(blocks, 2 * blocks, 2)):
        assembler.write_unit(unit, data[unit])
        if followed:
            assert mirror.catch_up() == 1
    assembler.write_partial(blocks - 1, data[blocks - 1], [(0, 1200)], whole_rows=True)
    assembler.write_partial(blocks + 1, data[blocks + 1], [(0, 500)], whole_rows=True)
    assembler.finish("mask")
    copied: list[int] = []
    mirror._copy = lambda unit, copy=mirror._copy: (copied.append(unit), copy(unit))  # type: ignore[method-assign]
    frame = mirror.finish()
    assert_same(frame, assembler, torch.float32)
    rest = {blocks - 1}
    assert set(copied) == (rest if followed else rest.union(range(blocks - 1), range(blocks, 2 * blocks, 2)))


@pytest.mark.parametrize("device", DEVICES)
def test_it_follows_from_another_thread(device: str) -> None:
    kv = prepared(tokens=640)
    assembler = Assembler(kv.layout)
    over = threading.Event()
    frames: list[hf.Frame] = []

    def follow() -> None:
        mirror = DeviceMirror(assembler, CONFIG, dtype=torch.float32, device=device)
        while not over.is_set():
            mirror.catch_up()
        frames.append(mirror.finish())

    thread = threading.Thread(target=follow)
    thread.start()
    for position in range(kv.layout.unit_count):
        assembler.write_unit(*kv.unit_at(position))
    assembler.finish("mask")
    over.set()
    thread.join(60)
    assert_same(frames[0], assembler, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_of_another_request_shows_through(device: str) -> None:
    """Canary: freed blocks of the very sizes asked for, and the staging of an earlier hand-off, are full of it."""
    kv = prepared()
    other = prepare_arrays(
        [(np.full((2, 70, 64), CANARY, np.float32),) * 2] * 3, dtype="fp32", model="test", wire_dtype="bf16"
    )
    filled = Assembler(other.layout)
    for position in range(other.layout.unit_count):
        filled.write_unit(*other.unit_at(position))
    before = DeviceMirror(filled, CONFIG, dtype=torch.float32, device=device)
    before.finish()
    freed = [torch.full((1, 2, 70, 64), CANARY, device=device) for _ in range(64)]
    freed.append(torch.full((STAGING_BYTES // 4,), CANARY, device=device))
    del freed, before
    assembler = Assembler(kv.layout)
    assembler.write_unit(*kv.unit_at(0))
    mirror = DeviceMirror(assembler, CONFIG, dtype=torch.float32, device=device)
    mirror.catch_up()
    assembler.finish("mask")
    frame = mirror.finish()
    assert_same(frame, assembler, torch.float32)
    came = sum(int(torch.count_nonzero(tensor)) for pair in frame.rows for tensor in pair)
    assert 0 < came <= (kv.layout.unit_nbytes(int(kv.send_order[0])) - 8) // 2
    canary = torch.tensor(CANARY).to(torch.bfloat16).float()
    assert not any(bool((tensor.cpu() == canary).any()) for pair in frame.rows for tensor in pair)


def test_another_models_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="the model has 2 layers, the received cache 3"):
        DeviceMirror(Assembler(prepared().layout), LlamaConfig(num_hidden_layers=2), dtype=torch.float32, device="cpu")
