"""Repair of a prompt with a layout: recompute rows of documents, and the link rows that see them.

Documents become final in prompt order: recomputed rows attend to link rows of earlier documents, which attend to their
documents' final rows. One pass over all of them at their true positions does exactly that.
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
    "the selector {} drops rows from layer to layer, which link rows cannot do; choose attention, deviation, "
    "product, first or random"
)
"""Why a selector cannot choose rows in a prompt with link rows."""


def repair_laid_out(  # noqa: PLR0913 - a prompt, how it is repaired, and what is known of it
    engine: RowsEngine, linked: LinkedPrompt, prompt: PromptLayout, texts: Sequence[Sequence[int]],
    question: Sequence[int], selector: Selector, share: float, *, deviation: Tensor | None = None,
    seen: AttentionSummary | None = None,
) -> Repaired:  # fmt: skip
    """Recompute a share of documents' rows, then system text, markers and link tokens after the first of them.

    The first document counts, too, if anything precedes it. With a share of 1 the cache equals that of one causal pass
    over the whole prompt.

    Args:
        engine: Runs the model.
        linked: The prompt up to the question, with link rows (``compute_links``); it is written to.
        prompt: The layout of the prompt.
        texts: Tokens of each document's cache, soft tokens as blobs name them.
        question: Token ids.
        selector: Chooses rows of documents; one that drops rows between layers would drop link rows, too.
        share: Of all documents' tokens, from 0 to 1.
        deviation: How much each document token's cache changes behind other documents, float32 ``[documents' tokens]``;
            None if not measured.
        seen: The question's attention to the prompt, if known.

    Returns:
        What was repaired; ``rows`` are those of documents only.

    Raises:
        ArgumentError: The share is out of range, the selector lacks an input, or texts do not match the documents.
        MismatchError: The selector drops rows between layers, or the model cannot run rows.
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
    deviations = torch.zeros(total)
    at = 0
    for start, text in zip(prompt.starts, texts, strict=True):
        is_computed[start : start + len(text)] = False
        ids[start : start + len(text)] = text
        if deviation is not None:
            deviations[start : start + len(text)] = deviation[at : at + len(text)]
        at += len(text)
    edges = [*dict.fromkeys([0, *prompt.starts]), total]
    spans = tuple(stop - start for start, stop in pairwise(edges))
    repair = RepairInput(
        engine, linked.cache, tuple(ids), spans, tuple(question), None if deviation is None else deviations, seen=seen
    )
    first = prompt.lengths[0] if prompt.starts[0] == 0 else 0  # tokens that no document precedes
    count = rows_for(share, (first, sum(prompt.lengths) - first))
    chosen = torch.arange(total) if share == 1 else _chosen(repair, selector, count, is_computed)
    selected = time.perf_counter()
    own_rows = chosen[~is_computed[chosen]]
    all_rows = torch.cat([own_rows, rows[rows > int(own_rows[0])]]).sort().values if len(own_rows) else own_rows
    if len(all_rows):
        engine.update_rows(linked.cache, ids, all_rows)
    cost = selector.cost(total, len(all_rows), len(question), len(linked.cache.meta.layers))
    done = time.perf_counter()
    return Repaired(own_rows, selector.name, cost, selected - started, done - selected)


def _chosen(given: RepairInput, selector: Selector, needed: int, is_computed: Tensor) -> Tensor:
    """The selector's rows until enough of them belong to documents; it knows nothing of link rows."""
    if not needed:
        return torch.zeros(0, dtype=torch.int64)
    if "question" in selector.needs and given.seen is None and given.question:
        given = replace(given, seen=given.engine.look(given.cache, given.question))
    count, most = needed, len(is_computed) - 1
    while True:
        chosen = selector.choose(given, min(count, most))
        if chosen.narrow is not None:
            raise MismatchError(DROPS_ROWS.format(selector.name))
        lacking = needed - int((~is_computed[chosen.rows]).sum())
        if lacking <= 0 or count >= most:
            return chosen.rows
        count += lacking
