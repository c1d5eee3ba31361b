"""Selective recomputation: some rows of a linked prompt computed anew, against the whole prompt.

A linked document has not seen the documents before it. A row that is computed anew, at its true position, sees all that
stands before it, as in a prefill of the whole prompt: CacheBlend (arXiv 2405.16444), EPIC (arXiv 2410.15332) and
ProphetKV (arXiv 2602.02579) do this and differ in the rows that they choose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.types import CacheMeta, KVCache


@dataclass(frozen=True, eq=False)
class AttentionSummary:
    """What tokens behind a prompt, such as a question, see of it.

    Attributes:
        attention: Float32 ``[tokens]`` on the processor: how much attention they pay to each token of the prompt, in
            the mean over layers, heads and the tokens that look.
        influence: The same shape: in each layer the attention times the size of the token's value, relative to the mean
            of the layer, by the head where that is greatest; the mean over all layers but the first, which holds what
            no other document changes.
    """

    attention: Tensor
    influence: Tensor


class Narrowing(Protocol):
    """Drops rows while they are computed, by what the layers make of them.

    Attributes:
        writes_all: Whether the layer at which rows are dropped keeps the new keys and values of all of them, or of
            those that go on alone. Layers before it keep all, layers behind it those that go on.
    """

    @property
    def writes_all(self) -> bool: ...  # noqa: D102 - see Attributes

    def choose(
        self, layer: int, rows: Tensor, stale: tuple[Tensor, Tensor], fresh: tuple[Tensor, Tensor]
    ) -> Tensor | None:
        """Choose the rows that go on; called once for each layer, in their order.

        Args:
            layer: Number of the layer.
            rows: int64 ``[n]``, positions of the rows that are under way, on the processor.
            stale: Keys and values of these rows in the prompt's cache, ``[kv_heads, n, dim]``.
            fresh: The new ones, of the same shapes.

        Returns:
            Numbers of rows among ``rows``, int64 in ascending order; None: all go on.
        """
        ...


class RowsEngine(Protocol):
    """What repair asks of an engine."""

    @property
    def meta(self) -> CacheMeta:
        """What the caches of its model say of themselves."""
        ...

    def update_rows(
        self, cache: KVCache, token_ids: Sequence[int], rows: Tensor, narrow: Narrowing | None = None
    ) -> Tensor:
        """Compute tokens at some positions of a prompt anew, in place, each seeing all that stands before it.

        Layer by layer, the new keys and values of the rows take their places before that layer's attention, so that a
        row sees the others' new ones. A layer with a window shows a row what lies in its window. Pruned caches: an
        entry that ``cache.kept`` lacks is not seen and not brought back; a row sees itself. Latent attention: latents
        and rotated parts are what is computed.

        Args:
            cache: The prompt's, positions on and from 0, in the engine's own memory; the rows are written into it.
            token_ids: Tokens of the whole prompt.
            rows: int64 ``[n]``, positions of the rows in ascending order.
            narrow: Drops rows on the way; None drops none.

        Returns:
            int64: the rows that were computed to the end.

        Raises:
            ArgumentError: The rows do not lie in the cache, or it cannot be written in place.
            MismatchError: The model cannot run rows, for it takes no masks.
        """
        ...

    def look(self, cache: KVCache, token_ids: Sequence[int], *, layers: Sequence[int] = ()) -> AttentionSummary:
        """What tokens behind a prompt see of each of its tokens.

        Args:
            cache: The prompt's; it is not changed.
            token_ids: What follows it, such as the question.
            layers: Numbers of the layers to look at; empty for all.

        Returns:
            By token of the prompt.

        Raises:
            MismatchError: The cache is of another model, or its attention is not to be seen.
        """
        ...


def checked_rows(rows: Tensor, tokens: int, named: int) -> Tensor:
    """Rows as ``update_rows`` takes them.

    Args:
        rows: Positions, any integer dtype, ``[n]``.
        tokens: Length of the prompt's cache.
        named: How many token ids come with them.

    Returns:
        int64 ``[n]`` on the processor, in ascending order.

    Raises:
        ArgumentError: They do not lie in the prompt, one is named twice, or the token ids are not the prompt's.
    """
    if named != tokens:
        msg = f"a prompt of {tokens} tokens is repaired with the ids of all of them, got {named}"
        raise ArgumentError(msg)
    if rows.is_floating_point() or rows.ndim != 1:
        msg = f"rows are positions, int64 [n], got {rows.dtype} {tuple(rows.shape)}"
        raise ArgumentError(msg)
    ordered = rows.to("cpu", torch.int64).sort().values
    if len(ordered) and not (int(ordered[0]) >= 0 and int(ordered[-1]) < tokens):
        msg = f"rows lie in 0 to {tokens - 1}, got {int(ordered[0])} to {int(ordered[-1])}"
        raise ArgumentError(msg)
    if bool((ordered[1:] == ordered[:-1]).any()):
        msg = "a row is named twice; name each position once"
        raise ArgumentError(msg)
    return ordered
