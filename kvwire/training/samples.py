"""Training samples: passages, then turns of questions and answers, as token ids."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Turn:
    """A question and its answer.

    Attributes:
        question: Given token ids; may be empty.
        answer: Token ids in the loss.
    """

    question: Ids
    answer: Ids


@dataclass(frozen=True)
class Sample:
    """One training prompt, in tuples, so that samples can share parts.

    Attributes:
        passages: Token ids of documents, in prompt order.
        turns: What follows them, at least one.
        system: Token ids before the documents.
        place: Source, for messages.
        is_ordered: Whether the passages must stay in order.
    """

    passages: tuple[Ids, ...]
    turns: tuple[Turn, ...]
    system: Ids = ()
    place: str = ""
    is_ordered: bool = False

    @property
    def rest(self) -> Ids:
        """Token ids of all turns, in order."""
        return tuple(token for turn in self.turns for token in (*turn.question, *turn.answer))

    @property
    def is_learnt(self) -> tuple[bool, ...]:
        """Which tokens of ``rest`` belong to answers."""
        return tuple(
            learnt for turn in self.turns for learnt in (*(False for _ in turn.question), *(True for _ in turn.answer))
        )

    def shuffled(self, draw: random.Random) -> Sample:
        """Shuffle the passages, unless they must stay in order.

        Args:
            draw: Random generator.

        Returns:
            A new sample.
        """
        if self.is_ordered:
            return self
        return replace(self, passages=tuple(draw.sample(self.passages, len(self.passages))))


def chance(seed: str) -> random.Random:
    """A random generator for a seed."""
    return random.Random(seed)  # noqa: S311 - an order of samples
