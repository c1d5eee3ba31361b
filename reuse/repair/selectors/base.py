"""Selectors: which rows of a linked prompt are recomputed."""

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
"""Inputs of a selector: all documents' caches at any level, the question too, deviations stored by encoding, or all
rows of the prompt recomputed in the first layers."""
BLOCK = 1
"""Neighbouring tokens chosen together."""


@dataclass(frozen=True, eq=False)
class RepairInput:
    """A linked prompt to repair.

    Attributes:
        engine: Runs the model.
        cache: The linked prompt's, at any level.
        token_ids: Of all documents, concatenated.
        documents: Their lengths in tokens, in prompt order.
        question: Token ids after the prompt; may be empty for selectors that do not need it.
        deviation: Float32 ``[tokens]``: expected change of each token's keys and values behind other documents,
            measured when encoding; None if it was not.
        seed: Of the selector ``random``.
        seen: The question's attention, from ``RowsEngine.look`` over all layers, perhaps on a coarser cache; None:
            selectors that need it look.
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
        """Refuse lengths that disagree."""
        lengths = {self.cache.tokens, len(self.token_ids), sum(self.documents)}
        if len(lengths) != 1 or not self.documents or min(self.documents) < 1:
            raise ArgumentError(
                f"documents of {sum(self.documents)} tokens, {len(self.token_ids)} token ids and a cache of "
                f"{self.cache.tokens} tokens are not one prompt"
            )

    @property
    def starts(self) -> tuple[int, ...]:
        """Position of each document's first token."""
        return (0, *accumulate(self.documents[:-1]))


@dataclass(frozen=True, eq=False)
class Chosen:
    """Rows to recompute.

    Attributes:
        rows: int64 in ascending order.
        narrow: Drops some of them between layers; None: all are computed in all layers.
    """

    rows: Tensor
    narrow: Narrowing | None = None


@dataclass(frozen=True)
class RepairCost:
    """Work of choosing and computing rows, without the question's pass.

    Attributes:
        token_layers: Tokens that run through a layer, summed over layers.
        pairs: Pairs of a token and a token it attends to, summed over layers; an upper bound.
    """

    token_layers: float
    pairs: float


class Selector(Protocol):
    """Chooses rows."""

    @property
    def name(self) -> str:
        """Name for users."""
        ...

    @property
    def needs(self) -> frozenset[Need]:
        """Inputs to wait for; empty: it can start before any byte is there."""
        ...

    def choose(self, given: RepairInput, count: int) -> Chosen:
        """Choose rows.

        Args:
            given: The prompt.
            count: Number of rows to compute in all layers.

        Returns:
            The rows; none of the first document, which nothing precedes, unless all are wanted.

        Raises:
            ArgumentError: An input is missing.
        """
        ...

    def cost(self, tokens: int, rows: int, question: int, layers: int) -> RepairCost:
        """Work of choosing and computing ``rows`` rows.

        Args:
            tokens: Of all documents.
            rows: Computed in all layers.
            question: Tokens of the question.
            layers: Of the model.

        Returns:
            The cost; by default of no more than to compute these rows.
        """
        del question
        return computed(rows, tokens, layers)


def rows_for(share: float, documents: tuple[int, ...]) -> int:
    """Number of rows of a share.

    Args:
        share: From 0 to 1, of the tokens of all documents.
        documents: Their lengths.

    Returns:
        At most the rows after the first document; every row for a share of 1.

    Raises:
        ArgumentError: The share is not between 0 and 1.
    """
    if not 0 <= share <= 1:
        raise ArgumentError(f"the share of rows to repair lies between 0 and 1, got {share}")
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
    """Cost of rows that run through all layers and attend to the whole prompt at most."""
    return RepairCost(float(layers * rows), float(layers * rows * tokens))
