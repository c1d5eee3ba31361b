"""Documents of equal length in one pass of the model, if each has the same bits as alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvwire.runtime.prefill import prefill_documents

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.engines.base import Engine
    from kvwire.types import KVCache

MOST, MOST_TOKENS = 8, 2048
"""Limits of a batch: documents, and their total tokens. Longer documents fill a processor alone."""


class Batches:
    """Computes caches of documents of one length together.

    Shapes alone decide which kernels run and in which order they add. So each shape is compared once with every
    document alone; if a bit differs, documents of that shape run alone from then on.
    """

    def __init__(self, engine: Engine) -> None:
        """Start with no shape compared."""
        self._engine = engine
        self._is_equal: dict[tuple[int, int], bool] = {}

    def caches(self, documents: Sequence[Sequence[int]]) -> Sequence[KVCache | None]:
        """Compute documents of one length together; None for those to run alone."""
        shape = (len(documents), len(documents[0]) if documents else 0)
        if len(documents) < 2:  # noqa: PLR2004 - a batch
            return [None] * len(documents)
        if shape in self._is_equal:
            return prefill_documents(self._engine, documents) if self._is_equal[shape] else [None] * len(documents)
        alone = [prefill_documents(self._engine, [ids])[0] for ids in documents]
        together = prefill_documents(self._engine, documents)
        self._is_equal[shape] = all(map(_equal, alone, together))
        return alone


def _equal(one: KVCache, other: KVCache) -> bool:
    pairs = zip([*one.keys, *one.values], [*other.keys, *other.values], strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)
