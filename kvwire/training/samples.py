"""What a model is trained on: passages, and turns of questions and answers behind them, as token ids."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Turn:
    """A question and what is to be learnt.

    Attributes:
        question: Token ids that are given; may be empty.
        answer: Token ids that count in the loss.
    """

    question: Ids
    answer: Ids


@dataclass(frozen=True)
class Sample:
    """One prompt to train on. It is made of tuples: nothing that samples share can grow.

    Attributes:
        passages: Token ids of documents, in prompt order.
        turns: What follows them, at least one.
        system: Token ids before the documents.
        place: Where it comes from, for messages.
        is_ordered: Whether the passages mean something in this order alone.
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
        """The same with its passages in another order, where that may be.

        Args:
            draw: Source of chance.

        Returns:
            A new sample; this one stays as it is.
        """
        if self.is_ordered:
            return self
        return replace(self, passages=tuple(draw.sample(self.passages, len(self.passages))))


def chance(seed: str) -> random.Random:
    """A source of chance."""
    return random.Random(seed)  # noqa: S311 - an order of samples
