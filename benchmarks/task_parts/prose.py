"""Prose that is made: a Markov chain of words, whose successors depend on what the prompt is about."""

from __future__ import annotations

import random
from itertools import accumulate

WORDS = range(112, 304)
"""Tokens of the words."""
TOPICS = 4
"""What a prompt may be about; a word has other successors in each."""
WEIGHTS = (0.6, 0.2, 0.15, 0.05)
"""How often each of a word's successors follows."""
_SEED = 20250216
_CUMULATIVE = tuple(accumulate(WEIGHTS))


def _tables() -> list[list[tuple[int, ...]]]:
    """Successors of each word in each topic, most frequent first; earlier words are more frequent, as in a language."""
    draw = random.Random(_SEED)
    popularity = [1 / (rank + 5) for rank in range(len(WORDS))]
    tables = []
    for _ in range(TOPICS):
        rows = []
        for _ in WORDS:
            row: dict[int, None] = {}
            while len(row) < len(WEIGHTS):
                row[draw.choices(WORDS, popularity)[0]] = None
            rows.append(tuple(row))
        tables.append(rows)
    return tables


SUCCESSORS = _tables()
"""``SUCCESSORS[topic][word - WORDS.start]``: tokens that follow, most frequent first."""


def walk(draw: random.Random, topic: int, count: int) -> list[int]:
    """Draw a stretch of prose.

    Args:
        draw: Source of chance.
        topic: What it is about, below ``TOPICS``.
        count: How many tokens.

    Returns:
        Tokens of words.
    """
    out: list[int] = []
    word = draw.choice(WORDS)
    table = SUCCESSORS[topic]
    for _ in range(count):
        out.append(word)
        (word,) = draw.choices(table[word - WORDS.start], cum_weights=_CUMULATIVE)
    return out
