"""Repair of links: rows of a prompt are recomputed, so that documents see those before them."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kvwire.errors import ArgumentError, MismatchError
from kvwire.reuse import RepairInput, repair_prompt, rows_for
from kvwire.reuse.repair.repairing import BLOCK_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kvwire.engines.base import Engine
    from kvwire.reuse import AttentionSummary, LinkedPrompt, PromptLayout, Repaired, Selector
    from kvwire.runtime.links import LinkPlan
    from kvwire.types import BlockDeviation


def by_token(documents: Sequence[tuple[int, BlockDeviation | None]]) -> Tensor | None:
    """Deviations by token of a prompt; None if a document has none."""
    parts = []
    for tokens, record in documents:
        if record is None:
            return None
        parts.append(torch.tensor(record.values).repeat_interleave(record.block)[:tokens])
    return torch.cat(parts) if parts else None


@dataclass(frozen=True, eq=False)
class RepairContext:
    """Facts about a prompt for its repair."""

    texts: Sequence[Sequence[int] | None]  # token ids of each document; None if not known
    # how much tokens change behind other documents, float32 ``[tokens]``; None if a blob lacks it
    deviation: Tensor | None = None
    seen: AttentionSummary | None = None  # the question's attention; None if not measured yet
    trouble: str = ""  # why no rows may be repaired; empty if they may
    laid_out: PromptLayout | None = None  # the layout of the prompt, if it has more than documents
    head: int = 0  # tokens of a system text, which the first document has not seen; 0: only BOS precedes it

    def lengths(self, prompt: LinkedPrompt) -> tuple[int, ...]:
        """Tokens of the prompt's separately computed parts; the first includes all before it."""
        return (self.head, *prompt.tokens) if self.head else prompt.lengths


def _behind_front(documents: Sequence[int], front: int) -> tuple[int, ...]:
    """Lengths of documents, with the first ``front`` tokens merged into one that needs no repair."""
    left, lengths = max(front, documents[0]), []
    for tokens in documents:
        seen = min(left, tokens)
        left -= seen
        if tokens > seen:
            lengths.append(tokens - seen)
    return (max(front, documents[0]), *lengths)


def _known(context: RepairContext, prompt: LinkedPrompt) -> list[Sequence[int]]:
    """Token ids of all documents; empty if one is not known."""
    known = [text for text in context.texts if text is not None]
    return known if len(known) == len(prompt.tokens) else []


def _check_may(context: RepairContext, prompt: LinkedPrompt) -> None:
    """Raise MismatchError where rows of a prompt may not be repaired: there is trouble, or a text is not known."""
    if context.trouble or not _known(context, prompt):
        raise MismatchError(context.trouble or "the text of a document is not known")


def _behind(share: float, lengths: Sequence[int], front: int) -> float:
    """Convert a share of the tokens after the front to one of the whole prompt."""
    return share if share == 1 else share * (1 - max(0, front - lengths[0]) / sum(lengths))


def repair_rows(  # noqa: PLR0913 - what is repaired, by what, and how far
    engine: Engine, plan: LinkPlan, prompt: LinkedPrompt, context: RepairContext, question: Sequence[int],
    share: float, front: int, *, stop: Callable[[], bool] | None, restore: Callable[[], Tensor] | None,
) -> tuple[Repaired | None, str]:  # fmt: skip
    """Repair a share of a prompt's rows in its cache; why none, if they cannot be."""
    lengths, laid_out = context.lengths(prompt), context.laid_out
    if share <= 0 or (len(lengths) == 1 and laid_out is None and share < 1):
        return None, ""
    try:
        _check_may(context, prompt)
        if laid_out is None and share < 1 and len(_behind_front(lengths, front)) == 1:
            return None, ""
        share = _behind(share, lengths, front)
        if laid_out is None:
            given = _input(engine, prompt, context, question, front)
            return repair_prompt(given, plan.selector, share, None if plan.is_wanted else stop, restore), ""
        from kvwire.reuse import repair_laid_out  # few loads need it

        return repair_laid_out(
            engine, prompt, laid_out, _known(context, prompt), question, plan.selector, share,
            deviation=context.deviation, seen=context.seen,
        ), ""  # fmt: skip
    except (ArgumentError, MismatchError) as error:
        if plan.is_wanted and isinstance(error, ArgumentError):
            raise
        words = f"links were not repaired: {error}"
        if plan.is_wanted:
            raise MismatchError(words) from error
        return None, words


def begin_repair(
    engine: Engine, plan: LinkPlan, prompt: LinkedPrompt, context: RepairContext, question: Sequence[int],
    share: float, front: int,
) -> RepairInOrder:  # fmt: skip
    """Choose rows to repair document by document."""
    _check_may(context, prompt)
    given = _input(engine, prompt, context, question, front)
    count = rows_for(_behind(share, context.lengths(prompt), front), given.documents)
    return RepairInOrder(given, plan.selector, share, count)


def _input(
    engine: Engine, prompt: LinkedPrompt, context: RepairContext, question: Sequence[int], front: int
) -> RepairInput:
    """Selectors' input for a prompt without a layout."""
    ids = (*prompt.opening, *(token for text in _known(context, prompt) for token in text))
    documents, deviation = _behind_front(context.lengths(prompt), front), context.deviation
    if deviation is not None and prompt.opening:
        deviation = torch.cat([deviation.new_zeros(len(prompt.opening)), deviation])
    return RepairInput(engine, prompt.cache, ids, documents, tuple(question), deviation, seen=context.seen)


class RepairInOrder:
    """Rows repaired by jobs during the load.

    A job sees nothing of later documents, which may be half decoded. Each row sees the final state of all before it, so
    jobs in prompt order equal one pass over all rows.

    Attributes:
        share: The chosen share of the prompt's rows.
        rows: int64, the rows to compute, ascending.
        seconds: Time spent computing them.
        select_s: Time spent choosing them.
    """

    def __init__(self, given: RepairInput, selector: Selector, share: float, count: int) -> None:
        """Choose the rows."""
        started = time.perf_counter()
        self._given, self._chosen = given, selector.choose(given, count).rows
        self.select_s, self.seconds, self.share = time.perf_counter() - started, 0.0, share
        self.rows = self._chosen[:0]

    @property
    def left(self) -> int:
        """Number of rows not computed yet."""
        return len(self._chosen) - len(self.rows)

    def run(self, stop_at: int, is_gone: Callable[[], bool]) -> int:
        """Compute the remaining rows before a position of the prompt."""
        began, given, before = time.perf_counter(), self._given, len(self.rows)
        mine = self._chosen[(self._chosen < stop_at) & ~torch.isin(self._chosen, self.rows)]
        seen, ids = given.cache.slice(0, stop_at), given.token_ids[:stop_at]
        for start in range(0, len(mine), BLOCK_ROWS):
            if is_gone():
                break
            block = given.engine.update_rows(seen, ids, mine[start : start + BLOCK_ROWS])
            self.rows = torch.cat((self.rows, block)).sort().values
        self.seconds += time.perf_counter() - began
        return len(self.rows) - before

    def computed(self) -> Tensor:
        """Rows that are done, as ``repair_prompt``'s ``restore`` returns them."""
        return self.rows

    def joined(self, after: Repaired | None, selector: Selector, share: float) -> Repaired | None:
        """Combine the repairs of jobs and closing."""
        from kvwire.reuse import Repaired

        given = self._given
        layers, asked = len(given.cache.meta.layers), len(given.question)
        if after is None:
            after = Repaired(
                self.rows[:0], selector.name, selector.cost(given.cache.tokens, 0, asked, layers), 0.0, 0.0
            )
        rows = torch.cat((self.rows, after.rows)).sort().values
        if not len(rows):
            return None
        is_cut = after.is_cut or (share < self.share and len(rows) < len(self._chosen))
        return replace(
            after, rows=rows, cost=selector.cost(given.cache.tokens, len(rows), asked, layers),
            select_s=after.select_s + self.select_s, compute_s=after.compute_s + self.seconds,
            is_cut=is_cut, kept=0, beside=len(self.rows),
        )  # fmt: skip
