"""Documents' caches in the places that a layout gives them, and what is computed around them, in one prompt's cache.

The prompt's cache takes each document's cache, moved; then the rows of system text, markers and link tokens are
computed in their own places, each seeing all that stands before it. Together with the question behind them that equals
one pass over the whole prompt under ``PromptLayout.visible``.
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
    """Link documents as a layout says, up to the question.

    Args:
        engine: Runs the model.
        caches: Of the documents, with the tokens that the layout puts into them, in the order of the prompt.
        prompt: Where they stand.

    Returns:
        The prompt before the question, all of it computed; the question runs at ``prompt.question_start``.

    Raises:
        ArgumentError: There are more or fewer caches than documents, or one is of another length.
        MismatchError: The caches come from different models, or the model cannot run rows.
    """
    lengths = tuple(cache.tokens for cache in caches)
    if lengths != prompt.lengths:
        msg = (
            f"the layout {prompt.layout.name} has caches of {list(prompt.lengths)} tokens, got {list(lengths)}; "
            "compute them from LinkLayout.cache_tokens"
        )
        raise ArgumentError(msg)
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
    """Compute what stands between and around documents: system text, markers and link tokens.

    What stands behind ``stop`` is not looked at: part by part, in the prompt's order, rows become what they are all at
    once.

    What depends on several documents, or on a prompt, belongs to this prompt alone: it is never stored under the name
    of a document.

    Args:
        engine: Runs the model.
        linked: All documents in their places, in the engine's own memory; it is written to.
        prompt: Where they stand.
        start: Position from which on rows are computed; all before it are.
        stop: Position before which; None: the end of the prompt. Documents before it are complete.

    Returns:
        How many tokens were computed.

    Raises:
        ArgumentError: The cache cannot be written in place, or a token is none of the model's.
        MismatchError: The model cannot run rows.
    """
    rows, tokens = prompt.front_rows()
    stop = linked.cache.tokens if stop is None else stop
    ids, wanted = [0] * stop, (rows >= start) & (rows < stop)
    for row, token in zip(rows.tolist(), tokens, strict=True):
        if row < stop:
            ids[row] = token
        if start <= row < stop:
            linked.show(row, row + 1)
    if bool(wanted.any()):
        engine.update_rows(linked.cache.slice(0, stop), ids, rows[wanted])
    return int(wanted.sum())
