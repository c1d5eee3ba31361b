"""Training samples, passages and then turns of questions and answers; and as model input: tokens, masks, targets."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.reuse import LinkLayout

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


IGNORED = -100
"""Target of rows without loss, as in torch's cross entropy."""


@dataclass(frozen=True)
class TokenSequence:
    """One prompt with its answers.

    Attributes:
        token_ids: Vocabulary ids, or soft tokens (negative).
        visible: Bool ``[tokens, tokens]``: row r sees column c.
        is_learnt: Tokens that count in the loss, as targets of the rows before them.
    """

    token_ids: Ids
    visible: Tensor
    is_learnt: tuple[bool, ...]


@dataclass(frozen=True)
class Batch:
    """Prompts side by side; shorter ones are padded at the end with tokens that see nothing and have no target.

    Attributes:
        token_ids: int64 ``[prompts, tokens]``.
        visible: Bool ``[prompts, tokens, tokens]``.
        targets: Target of each row, int64 ``[prompts, tokens]``; ``IGNORED`` if it has none.
    """

    token_ids: Tensor
    visible: Tensor
    targets: Tensor

    @property
    def learnt(self) -> int:
        """Number of tokens in the loss."""
        return int((self.targets != IGNORED).sum())

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(self.token_ids.to(device), self.visible.to(device), self.targets.to(device))


def linked(sample: Sample, layout: LinkLayout) -> TokenSequence:
    """A sample as a load links it: one pass under the layout's mask.

    Args:
        sample: The sample; without passages it is plain causal text.
        layout: Order and mask.

    Returns:
        The sequence.

    Raises:
        ArgumentError: There are more passages than the layout has link tokens for.
    """
    if not sample.passages:
        return plain(sample)
    first, rest = len(sample.turns[0].question), sample.rest
    try:
        prompt = layout.lay_out(sample.passages, rest[:first], sample.system, rest[first:])
    except ArgumentError as error:
        raise ArgumentError(f"{sample.place}: {error}") from error
    learnt = sample.is_learnt[first:]
    before = prompt.tokens - len(learnt)
    return TokenSequence(prompt.token_ids, prompt.visible(), (*(False,) * before, *learnt))


def plain(sample: Sample) -> TokenSequence:
    """A sample in full prefill: no layout tokens, causal attention.

    Args:
        sample: The sample.

    Returns:
        The sequence; the same tokens are learnt as in ``linked``, in the same order.
    """
    before = (*sample.system, *(token for passage in sample.passages for token in passage))
    token_ids = (*before, *sample.rest)
    causal = torch.ones(len(token_ids), len(token_ids), dtype=torch.bool).tril()
    return TokenSequence(token_ids, causal, (*(False for _ in before), *sample.is_learnt))


def batch_of(sequences: Sequence[TokenSequence]) -> Batch:
    """Pad sequences to one batch.

    Args:
        sequences: At least one.

    Returns:
        The batch, as long as the longest.
    """
    count, length = len(sequences), max(len(each.token_ids) for each in sequences)
    token_ids = torch.zeros(count, length, dtype=torch.long)
    visible = torch.eye(length, dtype=torch.bool).repeat(count, 1, 1)
    targets = torch.full((count, length), IGNORED)
    for row, each in enumerate(sequences):
        stop = len(each.token_ids)
        own = torch.tensor(each.token_ids)
        token_ids[row, :stop] = own
        visible[row, :stop, :stop] = each.visible
        learnt = torch.tensor(each.is_learnt[1:])
        targets[row, : stop - 1][learnt] = own[1:][learnt]
    return Batch(token_ids, visible, targets)


def check_fit(sample: Sample, layout: LinkLayout, most: int, vocabulary: int) -> None:
    """Refuse a sample that is too long or has unknown token ids."""
    sequence = linked(sample, layout)
    length = len(sequence.token_ids)
    if length > most:
        msg = f"{sample.place}: {length} tokens, laid out, are more than {most}; name fewer passages, or --skip-long"
        raise ArgumentError(msg)
    if max(sequence.token_ids) >= vocabulary:
        msg = f"{sample.place}: token ids reach {max(sequence.token_ids)}, the model's vocabulary has {vocabulary}"
        raise ArgumentError(msg)
