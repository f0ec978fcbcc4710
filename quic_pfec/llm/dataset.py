"""Questions with passages to answer them from: JSON-lines files, or the corpus that ships, and prompts made of them.

What a profile is measured on must not be what it is judged by, so every data set comes in two parts that share no
example: a file is split by a hash of the example's id, which stays the same whatever else the file holds; the shipped
corpus has its two parts by hand. Prompts are cut to a length in tokens exactly, with every passage that answers the
question wholly inside if it fits at all.
"""

from __future__ import annotations

import hashlib
import random
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from quic_pfec.llm import corpus

__all__ = [
    "ANSWER_CUE",
    "BUILTIN_NAME",
    "Dataset",
    "Example",
    "Source",
    "builtin_dataset",
    "f1_score",
    "load_dataset",
    "question_prompt",
    "text_prompt",
]

ANSWER_CUE: Final = "Answer:"
"""First text behind the context: what a continuation starts from."""

BUILTIN_NAME: Final = "corpus"
PROFILE_SHARE: Final = 3 / 16
"""Share of a file's examples that are for profiles only."""

MAX_FILE_BYTES: Final = 1 << 30
_REQUEST: Final = "Answer in a few words."


class Source(msgspec.Struct, frozen=True):
    """A passage; `gold` if the answer rests on it."""

    title: str
    text: str
    gold: bool = False


class Example(msgspec.Struct, frozen=True):
    """A question, the answers that count as right, and passages with and without them: one line of a file."""

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    question: Annotated[str, msgspec.Meta(min_length=1)]
    answers: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    passages: Annotated[tuple[Source, ...], msgspec.Meta(min_length=1)]

    @property
    def is_for_profiles(self) -> bool:
        """Whether this example belongs to the part that profiles are measured on: a hash of its id decides."""
        number = int.from_bytes(hashlib.blake2b(self.id.encode(), digest_size=8).digest(), "big")
        return number < PROFILE_SHARE * 2**64


@dataclass(frozen=True, slots=True)
class Dataset:
    """`profile` and `evaluation` share no id. `digest`: of the file, hex; empty for the corpus that ships."""

    name: str
    digest: str
    profile: tuple[Example, ...]
    evaluation: tuple[Example, ...]


def load_dataset(path: str | Path) -> Dataset:
    """Read a JSON-lines file of `Example`s. Raises ValueError with file and line for anything that is not one, for an
    id that comes twice, and if either part would be empty; OSError if the file cannot be read."""
    path = Path(path)
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    data = path.read_bytes()
    decoder = msgspec.json.Decoder(Example)
    examples: dict[str, Example] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            example = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if example.id in examples:
            raise ValueError(f"{path}, line {number}: the id {example.id!r} comes a second time")
        examples[example.id] = example
    profile = tuple(example for example in examples.values() if example.is_for_profiles)
    evaluation = tuple(example for example in examples.values() if not example.is_for_profiles)
    if not profile or not evaluation:
        raise ValueError(
            f"{path}: {len(examples)} examples are too few: {len(profile)} for profiles, {len(evaluation)} to evaluate"
        )
    return Dataset(path.name, hashlib.sha256(data).hexdigest(), profile, evaluation)


def builtin_dataset() -> Dataset:
    """The corpus that ships: a question on each passage, the other passages of its part as distraction."""

    def part(passages: Sequence[corpus.Passage]) -> tuple[Example, ...]:
        return tuple(
            Example(
                asked.title,
                asked.question,
                (asked.answer,),
                tuple(Source(passage.title, passage.text, passage is asked) for passage in passages),
            )
            for asked in passages
        )

    return Dataset(BUILTIN_NAME, "", part(corpus.PROFILE), part(corpus.DEMO))


def question_prompt(
    tokenizer: Any, example: Example, others: Sequence[Example], tokens: int, seed: int
) -> tuple[int, ...]:
    """Exactly `tokens` ids: the example's passages in an order given by `seed`, the question last, a user's turn around
    it if the tokenizer has a chat template.

    Passages of `others` top it up (their own are not repeated); what is too much is cut from passages that do not
    answer, the whole ones first. Raises ValueError if question and answering passages do not fit, or if all passages
    together are too short.
    """
    rng = random.Random(f"{seed}:{example.id}")

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    opening, closing = corpus.turn(tokenizer)
    head = encode(opening)
    tail = encode(f"Question: {example.question} {_REQUEST}{closing}")
    room = tokens - len(head) - len(tail)

    def piece(source: Source) -> list[int]:
        return encode(f"{source.title}\n{source.text}\n\n")

    gold = [piece(source) for source in example.passages if source.gold]
    left = room - sum(map(len, gold))
    if left < 0:
        raise ValueError(f"{example.id}: question and answering passages take {tokens - left} tokens of {tokens}")
    own = {source.text for source in example.passages}
    idle = [source for source in example.passages if not source.gold]
    rng.shuffle(idle)
    more = [source for other in others for source in other.passages if source.text not in own]
    rng.shuffle(more)
    filler: list[list[int]] = []
    for source in (*idle, *more):
        if left <= 0:
            break
        filler.append(piece(source)[:left])
        left -= len(filler[-1])
    if left > 0:
        raise ValueError(f"{example.id}: all passages together are {left} tokens too short for {tokens}")
    pieces = [*gold, *filler]
    rng.shuffle(pieces)
    return (*head, *(token for part in pieces for token in part), *tail)


def text_prompt(tokenizer: Any, example: Example) -> tuple[int, ...]:
    """The same request without any passage: what a model says without the context."""
    opening, closing = corpus.turn(tokenizer)
    text = f"{opening}Question: {example.question} {_REQUEST}{closing}"
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def f1_score(answer: str, gold: Sequence[str]) -> float:
    """Token F1 against the nearest of `gold`, as the SQuAD evaluation counts it: case, articles and punctuation do not
    matter. Only the first line of `answer` is read."""
    lines = answer.strip().splitlines()
    mine = _words(lines[0] if lines else "")
    return max(_overlap(mine, _words(one)) for one in gold)


def _words(text: str) -> list[str]:
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def _overlap(mine: list[str], gold: list[str]) -> float:
    if not mine or not gold:
        return float(mine == gold)
    common = sum((Counter(mine) & Counter(gold)).values())
    return 2 * common / (len(mine) + len(gold))
