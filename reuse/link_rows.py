"""Place documents' caches in a layout's prompt, and compute the tokens around them.

Each document's cache is rotated into its place; then rows of system text, markers and link tokens are computed in
theirs, attending to all before them. With the question after them that equals one pass over the prompt under
``PromptLayout.visible``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError
from kvwire.reuse.assemble import LinkedPrompt
from kvwire.types import KVCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.reuse.layout import PromptLayout
    from kvwire.reuse.repair.rows import RowsEngine


def link_documents(engine: RowsEngine, caches: Sequence[KVCache], prompt: PromptLayout) -> LinkedPrompt:
    """Link documents in a layout, up to the question.

    Args:
        engine: Runs the model.
        caches: Of the documents, including the layout's tokens, in prompt order.
        prompt: The layout of the prompt.

    Returns:
        The complete prompt before the question, which runs at ``prompt.question_start``.

    Raises:
        ArgumentError: Caches and documents differ in number or length.
        MismatchError: The caches come from different models, or the model cannot run rows.
    """
    lengths = tuple(cache.tokens for cache in caches)
    if lengths != prompt.lengths:
        raise ArgumentError(
            f"the layout {prompt.layout.name} has caches of {list(prompt.lengths)} tokens, got {list(lengths)}; "
            "compute them from LinkLayout.cache_tokens"
        )
    sample = next(key for key in caches[0].keys if key.numel())
    room = KVCache.zeros(caches[0].meta, prompt.question_start, dtype=sample.dtype, device=sample.device)
    linked = LinkedPrompt(lengths, caches[0].meta, cache=room, starts=prompt.starts)
    for index, cache in enumerate(caches):
        linked.write(index, 0, cache)
    compute_links(engine, linked, prompt)
    return linked


def compute_links(
    engine: RowsEngine, linked: LinkedPrompt, prompt: PromptLayout, start: int = 0, stop: int | None = None
) -> int:
    """Compute the tokens between and around documents: system text, markers and link tokens.

    Rows from ``stop`` on are ignored: computing part by part, in prompt order, gives the same rows as all at once.

    These rows depend on several documents or on a prompt: they are never stored under the name of a document.

    Args:
        engine: Runs the model.
        linked: All documents in their places, in the engine's own memory; it is written to.
        prompt: The layout of the prompt.
        start: First position to compute; earlier ones are complete.
        stop: Position after the last; None: the end of the prompt. Documents before it are complete.

    Returns:
        How many tokens were computed.

    Raises:
        ArgumentError: The cache cannot be written in place, or the model lacks a token.
        MismatchError: The model cannot run rows.
    """
    rows, tokens = prompt.front_rows()
    stop = linked.cache.tokens if stop is None else stop
    ids, in_span = [0] * stop, (rows >= start) & (rows < stop)
    for row, token in zip(rows.tolist(), tokens, strict=True):
        if row < stop:
            ids[row] = token
        if start <= row < stop:
            linked.show(row, row + 1)
    if bool(in_span.any()):
        engine.update_rows(linked.cache.slice(0, stop), ids, rows[in_span])
    return int(in_span.sum())
