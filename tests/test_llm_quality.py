"""quic_pfec.llm.quality on a random model: what is judged, against the receiver's own path."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from msgspec import structs  # noqa: E402

from quic_pfec.client import prepare  # noqa: E402
from quic_pfec.kv import hf  # noqa: E402
from quic_pfec.kv.assemble import Assembler  # noqa: E402
from quic_pfec.kv.units import KVArrays  # noqa: E402
from quic_pfec.llm import generate, handoffs, models, quality, quality_run  # noqa: E402
from quic_pfec.llm.dataset import Dataset, Example, Source  # noqa: E402
from quic_pfec.llm.handoffs import SCHEMES  # noqa: E402
from quic_pfec.llm.quality import RANKINGS, RECEIVERS, Settings  # noqa: E402
from quic_pfec.wire.limits import UNIT_HEADER_SIZE  # noqa: E402

pytestmark = pytest.mark.model
torch.set_num_threads(1)

SMALL = Settings(
    tokens=320, positions=6, answer_tokens=3, kept=(0.4, 1.0), rhos=(0.7,), losses=2, profile_prompts=1,
    profile_positions=2, batch=16,
)  # fmt: skip


def example(name: str) -> Example:
    idle = tuple(Source("t", f"{name} {word} " * 9) for word in ("red", "blue", "green", "white", "black"))
    return Example(name, f"What is {name}?", ("that",), (Source("t", f"{name} is that. ", True), *idle))


DATA = Dataset("made-up", "", (example("p"),), tuple(example(name) for name in "abc"))


@pytest.fixture(scope="module")
def m() -> models.LoadedModel:
    return models.tiny(seed=6)


@pytest.fixture(scope="module")
def result(m: models.LoadedModel) -> quality_run.Run:
    return quality_run.run(m, DATA, SMALL, 2)


def test_every_cell_is_there(result: quality_run.Run) -> None:
    records = result.records
    assert result.examples == 2
    for name in "ab":
        mine = [record for record in records if record.example == name]
        kept = {(r.receiver, r.name, r.share) for r in mine if r.arm == "retention"}
        assert kept == {(receiver, name, share) for receiver in RECEIVERS for name in RANKINGS for share in (0.4, 1.0)}
        sent = [(r.receiver, r.name, r.share, r.loss) for r in mine if r.arm == "handoff"]
        assert sorted(sent) == sorted(
            (receiver, scheme.key, 0.7, loss) for receiver in RECEIVERS for scheme in SCHEMES for loss in (0, 1)
        )
        assert [r.arm for r in mine[:3]] == ["intact", "wrong_cache", "no_context"]
    assert len(records) == 2 * (3 + 20 + 32)
    assert {record.example for record in records} == {"a", "b"}  # none that the profiles were measured on


def test_four_arms(result: quality_run.Run) -> None:
    """The whole cache as sent in bf16 agrees with itself, another prompt's does not."""
    by_arm = {
        arm: [record for record in result.records if record.arm == arm]
        for arm in ("intact", "wrong_cache", "no_context")
    }
    assert all(record.kl < 1e-3 and record.agreement > 0.8 for record in by_arm["intact"])
    for arm in ("wrong_cache", "no_context"):
        assert all(record.kl > 0.1 for record in by_arm[arm])
    whole = [record for record in result.records if record.arm == "retention" and record.share == 1]
    intact = {record.example: record.kl for record in by_arm["intact"]}
    assert all(record.kl == pytest.approx(intact[record.example], abs=1e-6) for record in whole)


def test_a_handoff_equals_the_receivers_own_path(m: models.LoadedModel, result: quality_run.Run) -> None:
    """One judgement of each receiver, again: the simulated packets through the rebuilt cache of `kv.hf`."""
    from quic_pfec.kv.reception import fragments_by_unit, kept_elements
    from quic_pfec.llm.handoffs import deliver, open_channel

    layout = quality.layout_of(m, SMALL)
    known = deliver(layout, "hybrid", 0.7, open_channel("paper"), 1, None)
    task = quality._Task(m, DATA.evaluation, 0, SMALL, result.profiles)
    intact = torch.log_softmax(
        generate.forced_logits(m, generate.prefill(m, task._ids(task.example)), task.cue, task.forced), dim=-1
    )
    for receiver in RECEIVERS:
        size = layout.symbol_size()
        fragments = fragments_by_unit(layout, size, task.order("request", receiver), known)
        elements = kept_elements(layout, size, fragments)
        arrays = hf.extract(task.wire, "fp32").arrays
        pairs = tuple(
            (np.where(held[:, :, 0], keys, 0), np.where(held[:, :, 1], values, 0))
            for (keys, values), held in zip(arrays.layers, elements, strict=True)
        )
        valid = [held.all(axis=(2, 3)) for held in elements]
        partial = hf.to_cache(KVArrays(pairs, "fp32"), valid, m.config, missing=receiver)
        lossy = torch.log_softmax(generate.forced_logits(m, partial, task.cue, task.forced), dim=-1)
        [record] = [
            r for r in result.records
            if (r.example, r.arm, r.name, r.receiver, r.loss) == ("a", "handoff", "hybrid", receiver, 1)
        ]  # fmt: skip
        assert record.kl == pytest.approx(float((intact.exp() * (intact - lossy)).sum(-1).mean()), abs=1e-4)
        assert record.agreement == pytest.approx(float((intact.argmax(-1) == lossy.argmax(-1)).float().mean()))
        assert record.blocks == pytest.approx(float(fragments.all(axis=1).mean()))
        assert 0 < record.blocks < 1
        assert record.kl > 1e-4


BESIDE = replace(
    SMALL, kept=(), rhos=(0.5,), losses=1, beside=("int8", "progressive", "auto"), receivers=("mask",)
)  # fmt: skip


@pytest.fixture(scope="module")
def beside(m: models.LoadedModel) -> quality_run.Run:
    return quality_run.run(m, DATA, BESIDE, 1)


def test_wire_dtypes_stand_side_by_side(beside: quality_run.Run) -> None:
    sent = [record for record in beside.records if record.arm == "handoff"]
    by_wire = {wire: {(r.receiver, r.name): r for r in sent if r.wire == wire} for wire in ("bf16", *BESIDE.beside)}
    assert sum(map(len, by_wire.values())) == len(sent)
    assert {name for _, name in by_wire["bf16"]} == {scheme.key for scheme in SCHEMES}
    for wire in BESIDE.beside:
        assert set(by_wire[wire]) == {("mask", key) for key in handoffs.BESIDE}
        assert {record.sent for record in by_wire[wire].values()} == {"progressive" if wire == "auto" else ""}
    for cell, record in by_wire["auto"].items():  # half the time of bf16 is not enough for it
        assert structs.replace(record, wire="progressive", sent="") == by_wire["progressive"][cell]
        assert record.finer is not None
        assert record.blocks is not None
        assert record.finer <= record.blocks
        blocks = by_wire["bf16"][cell].blocks, by_wire["int8"][cell].blocks
        assert blocks[0] is not None
        assert blocks[1] is not None
        assert blocks[0] < blocks[1]  # the same time, fewer bytes


def test_two_precisions_equal_the_receivers_own_path(m: models.LoadedModel, beside: quality_run.Run) -> None:
    """The simulated packets of a progressive hand-off through the assembler and the rebuilt cache of `kv.hf`."""
    task = quality._Task(m, DATA.evaluation, 0, BESIDE, beside.profiles)
    cache = generate.prefill(m, task._ids(task.example))
    intact = torch.log_softmax(generate.forced_logits(m, cache, task.cue, task.forced), dim=-1)
    layout = quality.layout_of(m, BESIDE, "progressive")
    utility = task.utility("request", "mask")
    kv = prepare(cache, utility=utility, wire_dtype="progressive")
    assert np.array_equal(kv.send_order, task.order("request", "mask", layout))
    known = handoffs.deliver_units(
        layout, kv.send_order, utility, "hybrid", 0.5, handoffs.open_channel("paper"), 0, None, task.layout
    )
    unit_of_sid, fragment = kv.sid_units(kv.symbol_size)
    came: dict[int, list[int]] = {}
    for sid in np.flatnonzero(known).tolist():
        came.setdefault(int(unit_of_sid[sid]), []).append(int(fragment[sid]))
    assembler, payload = Assembler(layout, "fp32"), kv.symbol_size - UNIT_HEADER_SIZE
    for position in range(layout.unit_count):
        unit, data = kv.unit_at(position)
        assembler.write_partial(
            unit, data, [(part * payload, min((part + 1) * payload, len(data))) for part in came.get(unit, ())]
        )
    assembled = assembler.finish("mask")
    partial = hf.to_cache(assembled.arrays, list(assembled.row_valid), m.config, missing="mask")
    lossy = torch.log_softmax(generate.forced_logits(m, partial, task.cue, task.forced), dim=-1)
    [record] = [r for r in beside.records if (r.arm, r.name, r.wire) == ("handoff", "hybrid", "progressive")]
    assert record.kl == pytest.approx(float((intact.exp() * (intact - lossy)).sum(-1).mean()), abs=1e-4)
    assert record.agreement == pytest.approx(float((intact.argmax(-1) == lossy.argmax(-1)).float().mean()))
    bases, both = assembled.complete.reshape(2, -1)
    assert record.blocks == pytest.approx(float(bases.mean()))
    assert record.finer == pytest.approx(float((bases & both).mean()))
    assert record.kl > 1e-4


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"kept": (0.0,)}, "between 0 and 1"),
        ({"rhos": (0.0,)}, "rho must be positive"),
        ({"wire_dtype": "auto"}, "wire_dtype is one of bf16"),
        ({"beside": ("int3",)}, "others of bf16"),
        ({"receivers": ("guess",)}, "receivers are zero and mask"),
        ({"beside": ("bf16",)}, "others of bf16"),
    ],
)
def test_settings(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Settings(**wrong)
