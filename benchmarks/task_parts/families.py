"""Families of prompts ``[document 1] ... [document n] [question]``, as token ids, each with its answer.

- *repeat*: every document lists items; one item stands in two documents. Which?
- *chain*: the first document gives names a colour each, later ones say ``name earlier-name``: the same colour. Which
  colour has a name of the last document?
- *legend*: the first document gives signs a colour each, later ones give names a sign each. Which colour has a name?
- *needle*: documents give names a colour each. Which colour has a name? Nothing here needs another document.
- *prose*: which word follows a word in what these documents are about?

Facts are two tokens; prose fills the documents. A fact's second token stands right behind the token that it tells of.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from task_parts.prose import SUCCESSORS, TOPICS, WORDS, walk

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

PAD, START, SEEN, LISTED = 0, 1, 2, 3
QUESTIONS = {"repeat": 4, "chain": 5, "legend": 6, "needle": 7, "prose": 8}
"""The token that begins the question of each family."""
FAMILIES = tuple(QUESTIONS)
COLOURS = range(16, 32)
SIGNS = range(32, 48)
NAMES = range(48, 112)
VOCABULARY = WORDS.stop


@dataclass(frozen=True)
class Question:
    """One question about a prompt's documents.

    Attributes:
        ids: Its tokens; the last one is where the answer is predicted.
        answer: The expected token.
        rows: Positions in the prompt of tokens whose keys and values need earlier documents, in order: enough to
            recompute for this question.
        source: The row that tells the answer in full prefill, where one token names it; training guides the last token
            there.
    """

    ids: tuple[int, ...]
    answer: int
    rows: tuple[int, ...] = ()
    source: int | None = None


@dataclass(frozen=True)
class Prompt:
    """Documents and what can be asked about them.

    Attributes:
        family: Its family.
        documents: Token ids of each.
        questions: The first is what is measured, the others are for training.
        labels: What rows of the documents, by position in the prompt, can tell only with earlier documents; training
            lets them predict it in place. The rows that depend on other documents, whatever is asked.
        sources: The row of an earlier document that each of them needs.
    """

    family: str
    documents: tuple[tuple[int, ...], ...]
    questions: tuple[Question, ...]
    labels: dict[int, int] = field(default_factory=dict)
    sources: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Size:
    """How large a prompt is.

    Attributes:
        tokens: Length of each document.
        hops: Links of a chain, the first of them a colour.
        chains: How many chains run side by side.
        facts: Items, signs or names in a document.
    """

    tokens: tuple[int, ...] = (28, 28, 28, 28, 28)
    hops: int = 3
    chains: int = 3
    facts: int = 4


Fact = tuple[int, int]


def make(family: str, draw: random.Random, size: Size | None = None) -> Prompt:
    """Draw a prompt.

    Args:
        family: One of ``FAMILIES``.
        draw: Source of chance; the same state gives the same prompt.
        size: How large.

    Returns:
        The prompt.
    """
    return _MAKERS[family](draw, size or Size())


def chance(prompt: Prompt) -> float:
    """How often the best guess is right that knows the prompt and the family, but not where to look.

    Args:
        prompt: The prompt.

    Returns:
        The share: of the most frequent answer to such questions; of one listed item; of the word that follows in most
        topics.
    """
    if prompt.family == "repeat":
        return 1 / len({token for ids in prompt.documents for token in ids if token in NAMES})
    if prompt.family == "prose":
        word = prompt.questions[0].ids[-1] - WORDS.start
        return Counter(table[word][0] for table in SUCCESSORS).most_common(1)[0][1] / TOPICS
    answers = Counter(question.answer for question in prompt.questions)
    return answers.most_common(1)[0][1] / answers.total()


class _Draft:
    """Documents of facts with prose between them, and where each fact came to stand."""

    def __init__(self, draw: random.Random, tokens: Sequence[int], facts: Sequence[Sequence[Fact]]) -> None:
        self.topic = draw.randrange(TOPICS)
        self.documents: list[tuple[int, ...]] = []
        self.at: dict[tuple[int, Fact], int] = {}
        """Position of the second token of each fact, by document."""
        start = 0
        for number, (length, told) in enumerate(zip(tokens, facts, strict=True)):
            self._write(draw, number, start, length, list(told))
            start += length

    def _write(self, draw: random.Random, number: int, start: int, length: int, facts: list[Fact]) -> None:
        draw.shuffle(facts)
        words = length - 1 - 2 * len(facts)
        assert words >= 0, f"{len(facts)} facts do not fit into {length} tokens"
        cuts = [0, *sorted(draw.randint(0, words) for _ in facts), words]
        ids = [START]
        for index in range(len(cuts) - 1):
            ids += walk(draw, self.topic, cuts[index + 1] - cuts[index])
            if index < len(facts):
                ids += facts[index]
                self.at[number, facts[index]] = start + len(ids) - 1
        self.documents.append(tuple(ids))

    def prompt(
        self, family: str, questions: Sequence[Question], labels: dict[int, int], sources: dict[int, int]
    ) -> Prompt:
        return Prompt(family, tuple(self.documents), tuple(questions), labels, sources)


def _repeat(draw: random.Random, size: Size) -> Prompt:
    count = len(size.tokens)
    drawn = _grid(draw, count, size.facts)
    first, second = sorted(draw.sample(range(count), 2))
    again = drawn[second][0] = draw.choice(drawn[first])
    draft = _Draft(draw, size.tokens, [[(name, LISTED) for name in names] for names in drawn])
    row = draft.at[second, (again, LISTED)] - 1
    question = Question((QUESTIONS["repeat"],) * 2, again, (row,))
    return draft.prompt("repeat", [question], {row: SEEN}, {row: draft.at[first, (again, LISTED)]})


def _chain(draw: random.Random, size: Size) -> Prompt:
    homes = [0, *sorted(draw.sample(range(1, len(size.tokens)), size.hops - 1))]
    colours = draw.sample(COLOURS, size.chains)
    told: list[list[Fact]] = [[] for _ in size.tokens]
    chains = []
    for colour, names in zip(colours, _grid(draw, size.chains, size.hops), strict=True):
        chains.append(list(zip(names, [colour, *names[:-1]], strict=True)))
        for home, fact in zip(homes, chains[-1], strict=True):
            told[home].append(fact)
    draft = _Draft(draw, size.tokens, told)
    labels, sources, questions = {}, {}, []
    for colour, chain in zip(colours, chains, strict=True):
        rows = [draft.at[home, fact] for home, fact in zip(homes, chain, strict=True)]
        labels |= dict.fromkeys(rows[1:], colour)
        sources |= dict(zip(rows[1:], rows[:-1], strict=True))
        for link, (name, _) in enumerate(chain):
            asked = Question((QUESTIONS["chain"], name), colour, tuple(rows[1 : link + 1]), rows[link])
            questions.append((size.hops - link, draw.random(), asked))
    questions.sort(key=lambda entry: entry[:2])
    return draft.prompt("chain", [asked for *_, asked in questions], labels, sources)


def _legend(draw: random.Random, size: Size) -> Prompt:
    signs = draw.sample(SIGNS, size.facts)
    meaning = dict(zip(signs, draw.sample(COLOURS, size.facts), strict=True))
    told: list[list[Fact]] = [list(meaning.items())]
    told += [[(name, draw.choice(signs)) for name in names] for names in _grid(draw, len(size.tokens) - 1, size.facts)]
    draft = _Draft(draw, size.tokens, told)
    labels, sources, questions = {}, {}, []
    for (number, (name, sign)), row in draft.at.items():
        if number:
            labels[row] = meaning[sign]
            sources[row] = draft.at[0, (sign, meaning[sign])]
            questions.append(Question((QUESTIONS["legend"], name), meaning[sign], (row,), row))
    draw.shuffle(questions)
    return draft.prompt("legend", questions, labels, sources)


def _needle(draw: random.Random, size: Size) -> Prompt:
    told = [[(name, draw.choice(COLOURS)) for name in names] for names in _grid(draw, len(size.tokens), size.facts)]
    draft = _Draft(draw, size.tokens, told)
    questions = [
        Question((QUESTIONS["needle"], name), colour, (), row) for (_, (name, colour)), row in draft.at.items()
    ]
    draw.shuffle(questions)
    return draft.prompt("needle", questions, {}, {})


def _prose(draw: random.Random, size: Size) -> Prompt:
    draft = _Draft(draw, size.tokens, [[] for _ in size.tokens])
    successors = SUCCESSORS[draft.topic]
    words = draw.sample(WORDS, 4)
    questions = [Question((QUESTIONS["prose"], word), successors[word - WORDS.start][0]) for word in words]
    return draft.prompt("prose", questions, {}, {})


def _grid(draw: random.Random, rows: int, columns: int) -> list[list[int]]:
    """Different names."""
    drawn = draw.sample(NAMES, rows * columns)
    return [drawn[row * columns : (row + 1) * columns] for row in range(rows)]


_MAKERS: dict[str, Callable[[random.Random, Size], Prompt]] = {
    "repeat": _repeat,
    "chain": _chain,
    "legend": _legend,
    "needle": _needle,
    "prose": _prose,
}
