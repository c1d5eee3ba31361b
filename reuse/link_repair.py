"""Repair of a prompt that is laid out: rows of documents computed anew, and the link rows that see them.

Documents are final in the order of the prompt: a document's rows that are computed anew see link rows behind the
documents before it, and these see the rows of their documents as they are then. One pass over all of them at their
true positions is just that.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from kvwire.errors import ArgumentError, MismatchError
from kvwire.reuse.repair.repairing import Repaired
from kvwire.reuse.repair.selectors.base import RepairInput, rows_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.reuse.assemble import LinkedPrompt
    from kvwire.reuse.layout import PromptLayout
    from kvwire.reuse.repair.rows import AttentionSummary, RowsEngine
    from kvwire.reuse.repair.selectors.base import Selector

DROPS_ROWS = (
    "the selector {} drops rows from layer to layer, which link rows do not bear; choose attention, deviation, "
    "product, first or random"
)
"""Why a selector cannot choose rows beside link rows."""


def repair_laid_out(  # noqa: PLR0913 - a prompt, how it is repaired, and what is known of it
    engine: RowsEngine, linked: LinkedPrompt, prompt: PromptLayout, texts: Sequence[Sequence[int]],
    question: Sequence[int], selector: Selector, share: float, *, deviation: Tensor | None = None,
    seen: AttentionSummary | None = None,
) -> Repaired:  # fmt: skip
    """Compute a share of documents' rows anew, and behind the first of them system text, markers and link tokens.

    The first document counts, too, where something stands before it. With a share of 1 the cache becomes that of one
    causal pass over the whole prompt.

    Args:
        engine: Runs the model.
        linked: The prompt up to the question, with link rows (``compute_links``); it is written to.
        prompt: Where everything stands.
        texts: Tokens of each document's cache, soft tokens as blobs name them.
        question: Token ids.
        selector: Chooses rows of documents; one that drops rows on the way would drop link rows, too.
        share: Of all documents' tokens, from 0 to 1.
        deviation: How far tokens move behind other documents, float32 ``[documents' tokens]``; None where it is not
            known.
        seen: What the question sees of the prompt, where that is known.

    Returns:
        What was done; ``rows`` are those of documents alone.

    Raises:
        ArgumentError: The share is out of range, the selector lacks something, or texts are none of these documents.
        MismatchError: The selector drops rows on the way, or the model cannot run rows.
    """
    if [len(text) for text in texts] != list(prompt.lengths):
        msg = f"documents of {list(prompt.lengths)} tokens are repaired with their texts, got {[*map(len, texts)]}"
        raise ArgumentError(msg)
    started = time.perf_counter()
    total = prompt.question_start
    is_computed, ids = torch.ones(total, dtype=torch.bool), [0] * total
    rows, tokens = prompt.front_rows()
    for row, token in zip(rows.tolist(), tokens, strict=True):
        ids[row] = token
    moved = torch.zeros(total)
    at = 0
    for start, text in zip(prompt.starts, texts, strict=True):
        is_computed[start : start + len(text)] = False
        ids[start : start + len(text)] = text
        if deviation is not None:
            moved[start : start + len(text)] = deviation[at : at + len(text)]
        at += len(text)
    edges = [*dict.fromkeys([0, *prompt.starts]), total]
    spans = tuple(stop - start for start, stop in pairwise(edges))
    given = RepairInput(
        engine, linked.cache, tuple(ids), spans, tuple(question), None if deviation is None else moved, seen=seen
    )
    first = prompt.lengths[0] if prompt.starts[0] == 0 else 0  # tokens that nothing stands before
    wanted = rows_for(share, (first, sum(prompt.lengths) - first))
    chosen = torch.arange(total) if share == 1 else _chosen(given, selector, wanted, is_computed)
    selected = time.perf_counter()
    ours = chosen[~is_computed[chosen]]
    both = torch.cat([ours, rows[rows > int(ours[0])]]).sort().values if len(ours) else ours
    if len(both):
        engine.update_rows(linked.cache, ids, both)
    cost = selector.cost(total, len(both), len(question), len(linked.cache.meta.layers))
    done = time.perf_counter()
    return Repaired(ours, selector.name, cost, selected - started, done - selected)


def _chosen(given: RepairInput, selector: Selector, wanted: int, is_computed: Tensor) -> Tensor:
    """Rows that a selector chooses until so many of them are documents'; it knows nothing of link rows."""
    if not wanted:
        return torch.zeros(0, dtype=torch.int64)
    if "question" in selector.needs and given.seen is None and given.question:
        given = replace(given, seen=given.engine.look(given.cache, given.question))
    count, most = wanted, len(is_computed) - 1
    while True:
        found = selector.choose(given, min(count, most))
        if found.narrow is not None:
            raise MismatchError(DROPS_ROWS.format(selector.name))
        lacking = wanted - int((~is_computed[found.rows]).sum())
        if lacking <= 0 or count >= most:
            return found.rows
        count += lacking
