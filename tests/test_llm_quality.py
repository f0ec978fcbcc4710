"""quic_pfec.llm.quality on a random model: what is judged, against the receiver's own path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from quic_pfec.kv import hf  # noqa: E402
from quic_pfec.kv.units import KVArrays  # noqa: E402
from quic_pfec.llm import generate, models, quality, quality_run  # noqa: E402
from quic_pfec.llm.dataset import Dataset, Example, Source  # noqa: E402
from quic_pfec.llm.handoffs import SCHEMES  # noqa: E402
from quic_pfec.llm.quality import RANKINGS, RECEIVERS, Settings  # noqa: E402

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
    assert len(records) == 2 * (3 + 20 + 28)
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


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"kept": (0.0,)}, "between 0 and 1"),
        ({"rhos": (0.0,)}, "rho must be positive"),
    ],
)
def test_settings(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Settings(**wrong)
