"""The texts: two sets that share nothing, and contexts of exactly the length asked for."""

from __future__ import annotations

import re

import pytest

from quic_pfec.llm import corpus


class Words:
    """A tokenizer of words and the white space between them, for text alone."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.words: list[str] = []
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        start = len(self.words)
        self.words += re.findall(r"\s+|\S+", text)
        return list(range(start, len(self.words)))

    def decode(self, ids: tuple[int, ...]) -> str:
        return "".join(self.words[index] for index in ids)

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        assert add_generation_prompt
        return f"<user> {messages[0]['content']} </user> <model> "


def test_profile_and_demo_share_nothing() -> None:
    for attribute in ("title", "text", "question"):
        both = [getattr(passage, attribute) for passage in (*corpus.PROFILE, *corpus.DEMO)]
        assert len(set(both)) == len(both)
    assert sum(len(passage.text.split()) for passage in (*corpus.PROFILE, *corpus.DEMO)) > 3500


@pytest.mark.parametrize("passage", [*corpus.PROFILE, *corpus.DEMO], ids=lambda passage: passage.title)
def test_passages_are_well_formed(passage: corpus.Passage) -> None:
    assert passage.text == " ".join(passage.text.split())
    assert passage.text.endswith(".")
    assert passage.question.endswith("?")
    assert 100 < len(passage.text.split()) < 250
    # The answer is in the text: most of its words occur there.
    words = set(re.findall(r"\w+", passage.text.lower()))
    answer = re.findall(r"\w+", passage.answer.lower())
    assert sum(word in words for word in answer) >= len(answer) / 2


@pytest.mark.parametrize("tokens", [64, 600, 1536, 9000])
@pytest.mark.parametrize("template", [None, "a template"])
def test_context_has_exactly_the_tokens_and_ends_in_its_question(tokens: int, template: str | None) -> None:
    for seed in range(4):
        tokenizer = Words(template)
        prompt = corpus.demo_context(tokenizer, tokens, seed)
        assert len(prompt.ids) == tokens
        text = tokenizer.decode(prompt.ids)
        end = " Explain in detail." + (" </user> <model> " if template else "\n")
        assert text.endswith(prompt.question + end)
        assert text.startswith("<user> ") == (template is not None)


@pytest.mark.parametrize("build", [corpus.demo_context, corpus.profile_context])
def test_the_passage_that_answers_is_whole(build: object) -> None:
    passages = {passage.question: passage for passage in (*corpus.PROFILE, *corpus.DEMO)}
    for seed in range(12):
        tokenizer = Words()
        prompt = build(tokenizer, 500, seed)  # type: ignore[operator]
        passage = passages[prompt.question]
        assert (passage in corpus.DEMO) == (build is corpus.demo_context)
        assert passage.title + "\n" + passage.text in tokenizer.decode(prompt.ids)
        assert prompt.answer == passage.answer


def test_seeds() -> None:
    questions = {corpus.demo_context(Words(), 700, seed).question for seed in range(20)}
    assert len(questions) > 5
    assert corpus.demo_context(Words(), 700, 3) == corpus.demo_context(Words(), 700, 3)


def test_too_short() -> None:
    with pytest.raises(ValueError, match="a context of 10 tokens has no room"):
        corpus.demo_context(Words(), 10, 0)
