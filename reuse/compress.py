"""Caches with fewer tokens than their documents: anchors replace chunks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from kvwire.reuse.assemble import LinkedPrompt
from kvwire.reuse.soft_tokens import as_stored
from kvwire.types import KVCache

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from kvwire.reuse.layout import LinkLayout
    from kvwire.types import CacheMeta

_MASKED_TOKENS = 8192
"""Longest cache computed in one pass, since its mask is square."""


class MaskedEngine(Protocol):
    """What computing a document with anchors needs of an engine; see ``kvwire.engines.base.Engine``."""

    def prefill(self, documents: Sequence[Sequence[int]]) -> list[KVCache]: ...  # noqa: D102 - see there

    def prefill_masked(self, token_ids: Sequence[int], visible: Tensor) -> KVCache: ...  # noqa: D102 - see there

    def extend(self, prefix: KVCache | None, token_ids: Sequence[int], *, offset: int = 0) -> KVCache: ...  # noqa: D102 - see there

    def allocate(self, tokens: int) -> KVCache: ...  # noqa: D102 - see there

    @property
    def meta(self) -> CacheMeta: ...  # noqa: D102 - see there

    @property
    def vocabulary_size(self) -> int: ...  # noqa: D102 - see there


def compute_cached(engine: MaskedEngine, layout: LinkLayout, token_ids: Sequence[int]) -> KVCache:
    """Compute a document's cache in a layout.

    With anchors (KVLink, arXiv 2502.16002, section 2.4), a chunk's tokens and anchors attend to the chunk and earlier
    anchors. All but anchors is then pruned; positions do not change.

    Args:
        engine: Runs the model.
        layout: The layout.
        token_ids: The document's own.

    Returns:
        The cache, ``layout.cache_length`` long.

    Raises:
        MismatchError: The layout has anchors, and the engine takes no masks.
    """
    return compute_stored(engine, layout, layout.cache_tokens(token_ids))


def compute_stored(engine: MaskedEngine, layout: LinkLayout, token_ids: Sequence[int]) -> KVCache:
    """``compute_cached``, given all tokens of the cache (``stored_tokens`` or ``LinkLayout.cache_tokens``).

    Args:
        engine: Runs the model.
        layout: The layout.
        token_ids: The document's, including those of the layout.

    Returns:
        The cache, as long as ``token_ids``.

    Raises:
        MismatchError: As ``compute_cached`` says.
    """
    length = len(token_ids)
    stored = layout.cache_stored(length)
    if stored is None:
        return engine.prefill([token_ids])[0]
    if length > _MASKED_TOKENS:
        return _in_passes(engine, layout, token_ids)
    visible = layout.cache_visible(length)
    return _pruned(engine.prefill_masked(token_ids, visible), stored)  # type: ignore[arg-type] # pruned caches have masks


def _in_passes(engine: MaskedEngine, layout: LinkLayout, token_ids: Sequence[int]) -> KVCache:
    """``compute_stored`` in several passes, for caches too long for one mask."""
    length = len(token_ids)
    prompt = LinkedPrompt([length], engine.meta, cache=engine.allocate(length))
    compute_piece(engine, layout, prompt, 0, token_ids, (0, length))
    ids, cache = as_stored(token_ids, engine.vocabulary_size), prompt.cache
    return KVCache.from_tensors(cache.keys, cache.values, cache.meta, ids, kept=cache.kept)


def compute_piece(
    engine: MaskedEngine, layout: LinkLayout, prompt: LinkedPrompt, document: int, token_ids: Sequence[int],
    span: tuple[int, int], *, behind: bool = False,
) -> None:  # fmt: skip
    """Compute some tokens of an anchored document in a prompt, as ``compute_stored`` does for all of them.

    The order of passes replaces a mask: each chunk runs with its anchors on top of all that is stored before. A span
    that begins inside a chunk recomputes it from its first token.

    Args:
        engine: Runs the model.
        layout: The layout, with anchors.
        prompt: Its cache holds the document's stored tokens before the span; it is written to.
        document: Number of the document there.
        token_ids: All of the document's, including those of the layout.
        span: First token of the document to compute, and one after the last.
        behind: Attend also to all that precedes the document in the prompt.
    """
    stored, offset = layout.cache_stored(len(token_ids)), prompt.offset(document)
    start, stop = span
    for first, last in passes(layout, len(token_ids)):
        end = min(last, stop)
        if last <= start or first >= stop:
            continue
        context = prompt.cache.slice(0, offset + first) if behind else prompt.document(document).slice(0, first)
        piece = engine.extend(context if context.tokens else None, token_ids[first:end], offset=offset + first)
        if stored is not None:
            piece = _pruned(piece, stored[first:end])
        prompt.write(document, max(first, start), piece.slice(max(0, start - first), end - first))


def passes(layout: LinkLayout, length: int) -> Iterator[tuple[int, int]]:
    """Spans that each run in one pass: tokens attend to all of their span and to what is stored of earlier ones."""
    start, stop = len(layout.before), length - len(layout.after)
    step = layout.anchors.chunk + len(layout.anchors.tokens) if layout.anchors else max(1, stop - start)
    edges = [0, *range(start, stop, step), stop, length]
    yield from ((first, last) for first, last in pairwise(edges) if first < last)


def _pruned(cache: KVCache, stored: Tensor) -> KVCache:
    """Prune a cache to the tokens set in ``stored``, bool ``[tokens]``."""
    masks = [None if spec.kind == "none" else stored.expand(spec.kv_heads, -1) for spec in cache.meta.layers]
    keys = [key * stored[None, :, None].to(key) if key.numel() else key for key in cache.keys]
    values = [value * stored[None, :, None].to(value) if value.numel() else value for value in cache.values]
    return replace(cache, keys=keys, values=values, kept=tuple(masks))
