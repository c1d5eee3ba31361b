"""Documents of a load whose caches lack entries: which of them can be computed anew, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.errors import MismatchError
from kvwire.reuse import stored_tokens

if TYPE_CHECKING:
    from kvwire.codec.format.kept import Kept
    from kvwire.engines.base import Engine
    from kvwire.reuse import LinkLayout
    from kvwire.runtime.documents import DocumentHandle


def resolve_pruned_layout(document: DocumentHandle, engine: Engine, asked: LinkLayout | None) -> None:
    """Find out how tokens of a document are computed, where more has to be done than run them behind each other."""
    decoder, ids = document.decoder, document.token_ids
    kept = decoder.kept if decoder else None
    soft = engine.soft_tokens
    named = [asked, soft.link_layout if soft else None]
    layout = next((each for each in named if each is not None and each.anchors), None)
    if layout is not None and ids is not None:
        is_of_layout = stored_tokens(layout, ids, engine.vocabulary_size) == ids
        if is_of_layout and (decoder is None or _is_stored(layout, kept, document.tokens)):
            document.layout = layout
            return
    if asked is not None and asked.anchors and decoder is not None and ids is not None:
        msg = (
            f"the blob of {document.document_id!r} does not hold the anchors of the layout {asked.name} and nothing "
            "else; encode it with that layout"
        )
        raise MismatchError(msg)
    document.has_unknown_holes = kept is not None


def _is_stored(layout: LinkLayout, kept: Kept | None, tokens: int) -> bool:
    """Whether a cache holds what a layout stores, and nothing else."""
    stored = layout.cache_stored(tokens)
    masks = [mask.cpu() for mask in kept or () if mask is not None and mask.numel()]
    return bool(masks) and stored is not None and all(bool((mask == stored).all()) for mask in masks)
