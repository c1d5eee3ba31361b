"""Selectors: which rows of a linked prompt are computed anew."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from kvwire.controller.repair import rows_of
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

    from kvwire.reuse.repair.rows import AttentionSummary, Narrowing, RowsEngine
    from kvwire.types import KVCache

Need = Literal["caches", "question", "deviation", "rows"]
"""What a selector waits for: all documents' caches at any level, the question too, what encoding stored, or what all
rows of the prompt become in the first layers."""
BLOCK = 1
"""Neighbouring tokens that are chosen together."""


@dataclass(frozen=True, eq=False)
class RepairInput:
    """A linked prompt that is to be repaired.

    Attributes:
        engine: Runs the model.
        cache: The prompt's, as it was linked, at any level.
        token_ids: Of all documents, one after the other.
        documents: Their lengths in tokens, in the order of the prompt.
        question: Token ids of what follows; may be empty for selectors that do not need it.
        deviation: Float32 ``[tokens]``: how far each token's keys and values are expected to move behind other
            documents, as measured at encode time; None where it was not.
        seed: Of the selector ``random``.
        seen: What the question sees, from ``RowsEngine.look`` over all layers, where that is known already, perhaps
            from a coarser cache; None: selectors that need it look.
    """

    engine: RowsEngine
    cache: KVCache
    token_ids: tuple[int, ...]
    documents: tuple[int, ...]
    question: tuple[int, ...] = ()
    deviation: Tensor | None = None
    seed: int = 0
    seen: AttentionSummary | None = None

    def __post_init__(self) -> None:
        """Refuse lengths that do not fit each other."""
        lengths = {self.cache.tokens, len(self.token_ids), sum(self.documents)}
        if len(lengths) != 1 or not self.documents or min(self.documents) < 1:
            msg = (
                f"documents of {sum(self.documents)} tokens, {len(self.token_ids)} token ids and a cache of "
                f"{self.cache.tokens} tokens are not one prompt"
            )
            raise ArgumentError(msg)

    @property
    def starts(self) -> tuple[int, ...]:
        """Position of each document's first token."""
        return (0, *accumulate(self.documents[:-1]))


@dataclass(frozen=True, eq=False)
class Chosen:
    """Rows to compute anew.

    Attributes:
        rows: int64 in ascending order.
        narrow: Drops some of them on the way; None where all are computed to the end.
    """

    rows: Tensor
    narrow: Narrowing | None = None


@dataclass(frozen=True)
class RepairCost:
    """What choosing and computing rows takes of a model, the question's own pass left out.

    Attributes:
        token_layers: Tokens that run through a layer, summed over layers.
        pairs: Pairs of a token and a token that it sees, summed over layers, upper bound.
    """

    token_layers: float
    pairs: float


class Selector(Protocol):
    """Chooses rows."""

    @property
    def name(self) -> str:
        """Under which users ask for it."""
        ...

    @property
    def needs(self) -> frozenset[Need]:
        """What it waits for; empty: it can start before any byte is there."""
        ...

    def choose(self, given: RepairInput, count: int) -> Chosen:
        """Choose rows.

        Args:
            given: The prompt.
            count: How many rows are to be computed to the end.

        Returns:
            The rows, none of the first document's unless all are asked for: nothing stands before that.

        Raises:
            ArgumentError: Something that it needs is not there.
        """
        ...

    def cost(self, tokens: int, rows: int, question: int, layers: int) -> RepairCost:
        """What choosing and computing ``rows`` rows takes.

        Args:
            tokens: Of all documents.
            rows: That are computed to the end.
            question: Tokens of the question.
            layers: Of the model.

        Returns:
            The cost.
        """
        ...


def rows_for(share: float, documents: tuple[int, ...]) -> int:
    """Rows that a share of a prompt is.

    Args:
        share: From 0 to 1, of the tokens of all documents.
        documents: Their lengths.

    Returns:
        The number of rows, at most those behind the first document; every one of the prompt for a share of 1.

    Raises:
        ArgumentError: The share is not between 0 and 1.
    """
    if not 0 <= share <= 1:
        msg = f"the share of rows to repair lies between 0 and 1, got {share}"
        raise ArgumentError(msg)
    return rows_of(share, sum(documents), documents[0])


def highest(scores: Tensor, count: int, documents: tuple[int, ...], block: int = BLOCK) -> Tensor:
    """The rows with the highest scores."""
    tokens = sum(documents)
    if count >= tokens:
        return torch.arange(tokens)
    first = documents[0]
    able = scores[first:].double()
    blocks = -(-len(able) // block)
    means = torch.full((blocks * block,), torch.nan, dtype=torch.float64)
    means[: len(able)] = able
    order = means.view(blocks, block).nanmean(1).argsort(descending=True, stable=True)
    rows = (order[:, None] * block + torch.arange(block)).flatten()
    return (rows[rows < len(able)][:count] + first).sort().values


def computed(rows: int, tokens: int, layers: int) -> RepairCost:
    """Rows that run through all layers and see the whole prompt at most."""
    return RepairCost(float(layers * rows), float(layers * rows * tokens))


def none_needed(given: RepairInput, need: Need, selector: str) -> ArgumentError | None:
    """What to raise where something that a selector needs is missing."""
    if need == "question" and not given.question:
        return ArgumentError(f"the selector {selector} looks where the question looks; give it a question")
    if need == "deviation" and given.deviation is None:
        msg = (
            f"the selector {selector} needs deviations measured at encode time, which these blobs lack; encode with "
            "deviations, or choose the selector attention"
        )
        return ArgumentError(msg)
    return None
