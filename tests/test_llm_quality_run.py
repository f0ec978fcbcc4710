"""quic_pfec.llm.quality_run: profiles, losses, and a run that goes on where it was interrupted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from quic_pfec.llm import models, quality_run  # noqa: E402
from quic_pfec.llm.quality import Record  # noqa: E402
from tests.test_llm_quality import DATA, SMALL  # noqa: E402
from tests.test_llm_quality import m as m  # noqa: E402
from tests.test_llm_quality import result as result  # noqa: E402

pytestmark = pytest.mark.model


def test_profiles_are_labelled(result: quality_run.Run) -> None:
    for (ranking, receiver), profile in result.profiles.items():
        assert profile.receiver == receiver
        assert profile.groups == (4 if ranking == "paper" else 0)  # the model has fewer layers than the paper's groups
        assert profile.data.startswith("made-up: 1 prompts")
    assert len(result.profiles) == 4


def test_completion_falls_with_the_place(result: quality_run.Run) -> None:
    for one in result.completions:
        if one.policy in ("arq", "hybrid"):
            assert one.probability[0] == 1.0
            assert one.probability[-1] == 0.0


def test_an_interrupted_run_goes_on(
    m: models.LoadedModel, result: quality_run.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "quality.jsonl"
    first = quality_run.run(m, DATA, SMALL, 1, journal=journal)
    assert first.resumed == 0
    with journal.open("ab") as file:
        file.write(b'{"key": "torn')
    evaluated: list[int] = []
    original = quality_run.evaluate_example

    def counted(*args: Any) -> list[Record]:
        evaluated.append(args[2])
        return original(*args)

    monkeypatch.setattr(quality_run, "evaluate_example", counted)
    monkeypatch.setattr(quality_run.profiler, "measure", lambda *args: pytest.fail("the profiles are in the journal"))
    second = quality_run.run(m, DATA, SMALL, 2, journal=journal)
    assert evaluated == [1]
    assert second.resumed == 1
    assert second.records == result.records
    third = quality_run.run(m, DATA, SMALL, 2, journal=journal)
    assert (third.resumed, evaluated) == (2, [1])
    monkeypatch.undo()
    # Other settings are other work.
    assert quality_run.settings_key(m, DATA, SMALL) != quality_run.settings_key(m, DATA, replace(SMALL, seed=1))
    assert quality_run.settings_key(m, DATA, SMALL) == quality_run.settings_key(m, DATA, replace(SMALL, batch=3))


@pytest.mark.slow
def test_processes_find_the_same(m: models.LoadedModel, result: quality_run.Run) -> None:
    calls: list[tuple[str, int, int]] = []
    again = quality_run.run(
        m, DATA, SMALL, 2, jobs=2, source="tiny-random:6", progress=lambda *step: calls.append(step)
    )
    assert again.records == result.records
    assert calls[-1] == ("examples", 2, 2)
    assert ("losses", 10, 10) in calls


def test_a_context_that_is_no_multiple_of_a_block(m: models.LoadedModel) -> None:
    with pytest.raises(ValueError, match="multiple of 16 tokens"):
        quality_run.run(m, DATA, replace(SMALL, tokens=313), 1)
