"""quic_pfec.llm.dataset: files, their two parts, prompts of an exact length, F1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quic_pfec.llm.dataset import (
    Example,
    Source,
    builtin_dataset,
    f1_score,
    load_dataset,
    question_prompt,
    text_prompt,
)


class Words:
    """A token a character, without a chat template."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(character) for character in text]


class Chat(Words):
    chat_template = "yes"

    def apply_chat_template(self, message: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        return f"<user>{message[0]['content']}<model>"


def text_of(ids: tuple[int, ...]) -> str:
    return "".join(map(chr, ids))


def example(name: str, gold: str = "GOLD") -> Example:
    idle = tuple(Source(f"{name}{number}", f"{name} filler {number}. " * 6) for number in range(4))
    return Example(name, f"What of {name}?", ("it",), (*idle, Source("g", f"{gold} {name}", True)))


def rows(count: int) -> list[dict[str, object]]:
    return [
        {"id": f"q{n}", "question": "Why?", "answers": ["so"], "passages": [{"title": "t", "text": "x"}]}
        for n in range(count)
    ]


def write(path: Path, values: list[dict[str, object]]) -> Path:
    path.write_text("\n".join(map(json.dumps, values)) + "\n\n")
    return path


def test_parts_are_disjoint_and_stable(tmp_path: Path) -> None:
    many = rows(400)
    whole = load_dataset(write(tmp_path / "whole.jsonl", many))
    ids = {one.id for one in whole.profile}, {one.id for one in whole.evaluation}
    assert not ids[0] & ids[1]
    assert len(ids[0]) + len(ids[1]) == 400
    assert 0.12 < len(ids[0]) / 400 < 0.26
    # The part of an example does not depend on what else the file holds, or where it stands.
    half = load_dataset(write(tmp_path / "half.jsonl", many[:200][::-1]))
    assert {one.id for one in half.profile} == {one for one in ids[0] if int(one[1:]) < 200}
    assert half.digest != whole.digest
    assert (half.name, len(half.digest)) == ("half.jsonl", 64)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("nonsense", "line 2: "),
        ('{"id": "a"}', "line 2: .*required field"),
        ('{"id": "q0", "question": "?", "answers": ["a"], "passages": [{"title": "", "text": ""}]}', "second time"),
        ('{"id": "z", "question": "?", "answers": [], "passages": [{"title": "", "text": ""}]}', "line 2: "),
    ],
)
def test_malformed_files(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(rows(1)[0]) + "\n" + line)
    with pytest.raises(ValueError, match=rf"bad\.jsonl, {reason}" if reason.startswith("line") else reason):
        load_dataset(path)


def test_too_few_examples(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 examples are too few"):
        load_dataset(write(tmp_path / "one.jsonl", rows(1)))
    with pytest.raises(OSError):
        load_dataset(tmp_path / "none.jsonl")


def test_builtin_parts_share_no_passage() -> None:
    data = builtin_dataset()
    texts = [{source.text for one in part for source in one.passages} for part in (data.profile, data.evaluation)]
    assert not texts[0] & texts[1]
    for one in (*data.profile, *data.evaluation):
        assert [source.title for source in one.passages if source.gold] == [one.id]


@pytest.mark.parametrize("tokenizer", [Words(), Chat()])
def test_prompts_have_the_length_and_the_gold(tokenizer: Words) -> None:
    one, others = example("mine"), [example("yours"), example("theirs"), example("mine")]
    for tokens in (150, 333, 700, 1100):
        ids = question_prompt(tokenizer, one, others, tokens, seed=1)
        text = text_of(ids)
        assert len(ids) == tokens
        assert "g\nGOLD mine\n\n" in text
        assert text.index("Question: What of mine?") > text.index("GOLD")
        assert text.startswith("<user>") == isinstance(tokenizer, Chat)
        assert text.endswith("<model>" if isinstance(tokenizer, Chat) else "few words.\n")
    # Longer than its own passages: topped up with the others', its own not repeated.
    assert "yours" in text
    assert text.count("mine filler 0. mine filler 0. mine filler 0.") <= 3
    assert text.count("GOLD mine") == 1


def test_prompts_are_seeded() -> None:
    one, others = example("mine"), [example("yours")]
    first = question_prompt(Words(), one, others, 500, seed=1)
    assert first == question_prompt(Words(), one, others, 500, seed=1)
    assert first != question_prompt(Words(), one, others, 500, seed=2)


def test_prompts_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="mine: question and answering passages take"):
        question_prompt(Words(), example("mine", "GOLD" * 50), [], 200, seed=1)
    with pytest.raises(ValueError, match="too short for 5000"):
        question_prompt(Words(), example("mine"), [], 5000, seed=1)


def test_text_prompt_has_no_passage() -> None:
    text = text_of(text_prompt(Chat(), example("mine")))
    assert text == "<user>Question: What of mine? Answer in a few words.<model>"


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("The Oak-posts!", ["oakposts"], 1.0),
        ("oak", ["oak posts"], 2 / 3),
        ("iron", ["oak posts"], 0.0),
        ("  oak posts\nand more", ["iron", "oak posts"], 1.0),
        ("", ["oak"], 0.0),
        ("the", ["a"], 1.0),
        ("oak oak", ["oak posts"], 0.5),
    ],
)
def test_f1(answer: str, gold: list[str], expected: float) -> None:
    assert f1_score(answer, gold) == pytest.approx(expected)
