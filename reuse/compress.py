"""Fewer tokens of a document in its cache: anchors in place of chunks."""

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
"""Longest cache that is computed in one pass: its mask has that many rows and columns."""


class MaskedEngine(Protocol):
    """What computing a document with anchors asks of an engine; see ``kvwire.engines.base.Engine``."""

    def prefill(self, documents: Sequence[Sequence[int]]) -> list[KVCache]: ...  # noqa: D102 - see there

    def prefill_masked(self, token_ids: Sequence[int], visible: Tensor) -> KVCache: ...  # noqa: D102 - see there

    def extend(self, prefix: KVCache | None, token_ids: Sequence[int], *, offset: int = 0) -> KVCache: ...  # noqa: D102 - see there

    def allocate(self, tokens: int) -> KVCache: ...  # noqa: D102 - see there

    @property
    def meta(self) -> CacheMeta: ...  # noqa: D102 - see there

    @property
    def vocabulary_size(self) -> int: ...  # noqa: D102 - see there


def compute_cached(engine: MaskedEngine, layout: LinkLayout, token_ids: Sequence[int]) -> KVCache:
    """Compute a document's cache as a layout has it.

    With anchors (KVLink, arXiv 2502.16002, section 2.4), a chunk's tokens and anchors see the chunk and the anchors
    before it, and what is not an anchor is pruned: positions stay as they are.

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
    """``compute_cached`` from all tokens of a cache, as ``stored_tokens`` and ``LinkLayout.cache_tokens`` give them.

    Args:
        engine: Runs the model.
        layout: The layout.
        token_ids: The document's, with those that the layout puts into its cache.

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
    """``compute_stored`` pass by pass."""
    length = len(token_ids)
    room = LinkedPrompt([length], engine.meta, cache=engine.allocate(length))
    compute_piece(engine, layout, room, 0, token_ids, (0, length))
    ids, whole = as_stored(token_ids, engine.vocabulary_size), room.cache
    return KVCache.from_tensors(whole.keys, whole.values, whole.meta, ids, kept=whole.kept)


def compute_piece(
    engine: MaskedEngine, layout: LinkLayout, prompt: LinkedPrompt, document: int, token_ids: Sequence[int],
    span: tuple[int, int], *, behind: bool = False,
) -> None:  # fmt: skip
    """Compute some tokens of a document with anchors in its place in a prompt, as ``compute_stored`` computes all.

    What sees what follows from the order of passes: each chunk and its anchors are run in one, on top of what is stored
    of all before them. A span that begins within a chunk has that chunk run from its beginning.

    Args:
        engine: Runs the model.
        layout: The layout, with anchors.
        prompt: Whose cache holds what is stored of the document's tokens before the span; it is written to.
        document: Number of the document there.
        token_ids: All of the document's, with those that the layout puts into its cache.
        span: First token of the document to compute, and the one behind the last.
        behind: Let the tokens see what stands before the document in the prompt, too.
    """
    stored, offset = layout.cache_stored(len(token_ids)), prompt.offset(document)
    start, stop = span
    for first, last in passes(layout, len(token_ids)):
        end = min(last, stop)
        if last <= start or first >= stop:
            continue
        seen = prompt.cache.slice(0, offset + first) if behind else prompt.document(document).slice(0, first)
        piece = engine.extend(seen if seen.tokens else None, token_ids[first:end], offset=offset + first)
        if stored is not None:
            piece = _pruned(piece, stored[first:end])
        prompt.write(document, max(first, start), piece.slice(max(0, start - first), end - first))


def passes(layout: LinkLayout, length: int) -> Iterator[tuple[int, int]]:
    """Spans of a document's cache whose tokens see all of the span before them, and of earlier spans what is stored."""
    start, stop = len(layout.before), length - len(layout.after)
    step = layout.anchors.chunk + len(layout.anchors.tokens) if layout.anchors else max(1, stop - start)
    edges = [0, *range(start, stop, step), stop, length]
    yield from ((first, last) for first, last in pairwise(edges) if first < last)


def _pruned(cache: KVCache, stored: Tensor) -> KVCache:
    """A cache without what a bool ``[tokens]`` does not name."""
    kept = [None if spec.kind == "none" else stored.expand(spec.kv_heads, -1) for spec in cache.meta.layers]
    keys = [key * stored[None, :, None].to(key) if key.numel() else key for key in cache.keys]
    values = [value * stored[None, :, None].to(value) if value.numel() else value for value in cache.values]
    return replace(cache, keys=keys, values=values, kept=tuple(kept))
