"""What of a document is computed, and how: with a layout's tokens in its cache, without those to drop, with anchors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvwire.reuse import compute_stored, drop_tokens, own_tokens, stored_tokens
from kvwire.runtime.opening import opening_of, prefill_documents

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.engines.base import Engine
    from kvwire.runtime.coding import Coding, Document
    from kvwire.types import KVCache


def laid_out(engine: Engine, coding: Coding, document: Document) -> Document:
    """A document as it is computed: with the tokens that the layout puts into its cache, without those to drop."""
    layout, ids = coding.layout, document.token_ids
    if coding.drop_tokens:
        ids = drop_tokens(engine, own_tokens(layout, ids, engine.vocabulary_size), coding.drop_tokens)
    if layout.cached_tokens:
        ids = stored_tokens(layout, ids, engine.vocabulary_size)
    return document if ids == document.token_ids else replace(document, token_ids=ids)


def without_anchors(engine: Engine, coding: Coding, document: Document) -> Document:
    """A document that can be cut anywhere: one that is cut within a chunk of the layout would be none of it."""
    layout, ids = coding.layout, document.token_ids
    own = own_tokens(layout, ids, engine.vocabulary_size) if layout.anchors else ids
    return document if own == ids else replace(document, token_ids=own)


def compute_document(
    engine: Engine, ids: Sequence[int], coding: Coding, neutral: int = 0
) -> tuple[KVCache, tuple[int, ...]]:
    """A document's cache behind as many neutral tokens, and all tokens that it was computed behind."""
    opening = opening_of(engine, ids)
    if coding.layout.anchors is not None:
        return compute_stored(engine, coding.layout, ids), ()
    if neutral:
        from kvwire.runtime.neutral import compute_behind, neutral_prefix

        prefix = neutral_prefix(engine, ids, neutral)
        if len(prefix) > len(opening):
            return compute_behind(engine, prefix, ids), prefix
    return prefill_documents(engine, [ids])[0], opening
