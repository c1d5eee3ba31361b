"""Selective recomputation: recompute some rows of a linked prompt against the whole prompt.

A linked document has not seen those before it. A row recomputed at its true position attends to all before it, as in a
prefill of the whole prompt: CacheBlend (arXiv 2405.16444), EPIC (arXiv 2410.15332) and ProphetKV (arXiv 2602.02579) do
this and differ in their choice of rows.
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
    """Attention of tokens after a prompt, such as a question, to the prompt.

    Attributes:
        attention: Float32 ``[tokens]`` on the processor: attention to each token of the prompt, mean over layers, heads
            and looking tokens.
        influence: The same shape: attention times the norm of the token's value, relative to the layer's mean, of the
            head with the greatest; mean over all layers but the first, whose values depend on no other document.
    """

    attention: Tensor
    influence: Tensor


class Narrowing(Protocol):
    """Drops rows between layers, based on their new keys and values.

    Attributes:
        writes_all: Whether the layer that drops rows stores new keys and values of all rows, or only of those that go
            on. Earlier layers store all, later ones those that go on.
    """

    @property
    def writes_all(self) -> bool: ...  # noqa: D102 - see Attributes

    def choose(
        self, layer: int, rows: Tensor, stale: tuple[Tensor, Tensor], fresh: tuple[Tensor, Tensor]
    ) -> Tensor | None:
        """Choose the rows that go on; called once per layer, in order.

        Args:
            layer: Number of the layer.
            rows: int64 ``[n]``, positions of the remaining rows, on the processor.
            stale: Their keys and values in the prompt's cache, ``[kv_heads, n, dim]``.
            fresh: The new ones, of the same shapes.

        Returns:
            Indices into ``rows``, int64 in ascending order; None: all go on.
        """
        ...


class RowsEngine(Protocol):
    """What repair needs of an engine."""

    @property
    def meta(self) -> CacheMeta:
        """Metadata of its model's caches."""
        ...

    def update_rows(
        self, cache: KVCache, token_ids: Sequence[int], rows: Tensor, narrow: Narrowing | None = None
    ) -> Tensor:
        """Recompute tokens at some positions of a prompt in place, each attending to all before it.

        In each layer, the rows' new keys and values are written before attention, so that rows see each other's.
        Sliding-window layers attend to their window. In pruned caches, entries that ``cache.kept`` lacks stay masked; a
        row sees itself. Latent attention recomputes latents and rotated parts.

        Args:
            cache: The prompt's, positions on and from 0, in the engine's own memory; the rows are written into it.
            token_ids: Tokens of the whole prompt.
            rows: int64 ``[n]``, positions of the rows in ascending order.
            narrow: Drops rows between layers; None drops none.

        Returns:
            int64: the rows computed in all layers.

        Raises:
            ArgumentError: The rows do not lie in the cache, or it cannot be written in place.
            MismatchError: The model cannot run rows, since it takes no masks.
        """
        ...

    def look(self, cache: KVCache, token_ids: Sequence[int], *, layers: Sequence[int] = ()) -> AttentionSummary:
        """Measure attention of tokens after a prompt to each of its tokens.

        Args:
            cache: The prompt's; it is not changed.
            token_ids: Tokens after it, such as the question.
            layers: Layers to look at; empty for all.

        Returns:
            Numbers by token of the prompt.

        Raises:
            MismatchError: The cache is of another model, or its attention weights are not accessible.
        """
        ...


def checked_rows(rows: Tensor, tokens: int, named: int) -> Tensor:
    """Check and sort rows for ``update_rows``.

    Args:
        rows: Positions, any integer dtype, ``[n]``.
        tokens: Length of the prompt's cache.
        named: Number of token ids given with them.

    Returns:
        int64 ``[n]`` on the processor, in ascending order.

    Raises:
        ArgumentError: They lie outside the prompt, one is named twice, or the token ids are not the prompt's.
    """
    if named != tokens:
        raise ArgumentError(f"a prompt of {tokens} tokens is repaired with the ids of all of them, got {named}")
    if rows.is_floating_point() or rows.ndim != 1:
        raise ArgumentError(f"rows are positions, int64 [n], got {rows.dtype} {tuple(rows.shape)}")
    ordered = rows.to("cpu", torch.int64).sort().values
    if len(ordered) and not (int(ordered[0]) >= 0 and int(ordered[-1]) < tokens):
        raise ArgumentError(f"rows lie in 0 to {tokens - 1}, got {int(ordered[0])} to {int(ordered[-1])}")
    if bool((ordered[1:] == ordered[:-1]).any()):
        raise ArgumentError("a row is named twice; name each position once")
    return ordered
