"""Joined passes: chunks of several loads are recomputed in one pass of the engine, each load's as a row.

Loads that are over are left out; when the pass fails, each row runs alone. What prompts share is computed once.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from kvwire.controller import events as ev
from kvwire.runtime.passes import LOAD_CANCELLED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.engines.base import Engine
    from kvwire.runtime.driver import ControllerDriver
    from kvwire.runtime.passes import PromptWorker
    from kvwire.types import ChunkId


@dataclass(frozen=True, eq=False)
class _Row:
    """A load's row in a joined pass."""

    jobs: PromptWorker
    asked: ev.Recompute

    @property
    def chunks(self) -> tuple[ChunkId, ...]:
        first = self.asked.first
        return tuple(replace(first, chunk=chunk) for chunk in range(first.chunk, self.asked.last.chunk + 1))

    @property
    def span(self) -> tuple[int, int]:
        """First token of the document, and the one behind the last."""
        document = self.jobs.documents[self.asked.first.document]
        return document.span(self.asked.first.chunk)[0], document.span(self.asked.last.chunk)[1]

    def begins(self, other: _Row, start: int) -> bool:
        """Whether the tokens from one on are those that the other, no shorter row computes."""
        stop = self.span[1]
        own = self.jobs.text_until(start, stop)
        return own is not None and own == other.jobs.text_until(start, stop)


async def recompute_together(
    engine: Engine, driver: ControllerDriver, request: ev.RecomputeTogether, loads: Sequence[PromptWorker]
) -> None:
    """Run a joined pass and report its outcome, even if some of its loads end meanwhile."""
    known = {jobs.number: jobs for jobs in loads}
    rows = [_Row(known[each.first.load], each) for each in request.passes if each.first.load in known]
    unfit = tuple(row.asked.first.load for row in rows if not row.jobs.can_be_row(row.asked))
    if unfit:
        await _one_by_one(driver, request, rows, unfit)
        return
    try:
        ran, seconds, copied = await driver.compute(partial(_compute, engine, driver, rows))
    except Exception:  # noqa: BLE001 - whatever it is, passes alone need less memory, and show whose it is
        await _one_by_one(driver, request, rows)
        return
    tokens = sum(ran.values())
    for row, own in ran.items():
        row.jobs.note_recomputed(row.asked, row.chunks, seconds * own / tokens)
    firsts = {row.asked.first for row in ran}
    gone = tuple(ev.RecomputeFailed(each.first, LOAD_CANCELLED) for each in request.passes if each.first not in firsts)
    driver.tell(ev.RecomputedTogether(request.passes, seconds, not gone, gone, copied=copied))


def _compute(engine: Engine, driver: ControllerDriver, rows: Sequence[_Row]) -> tuple[dict[_Row, int], float, bool]:
    """Run the rows of running loads, and write them into their prompts; in the compute thread.

    Returns tokens of each, seconds, and whether some were copied: rows of prompts that begin alike are computed once.
    """
    living = [row for row in rows if not row.jobs.is_gone]
    began = driver.clock()
    with ExitStack() as stack:
        for row in living:
            stack.enter_context(row.jobs.counting(row.asked.first))
        copied = _fill(engine, living)
    engine.synchronize()
    tokens = {row: row.span[1] - row.span[0] for row in living}
    return tokens, driver.clock() - began, copied


def _fill(engine: Engine, rows: Sequence[_Row]) -> bool:
    """Compute rows, or copy them from other loads and from each other; returns whether any were copied.

    Of rows that begin alike, the longest is computed.
    """
    left = [(row, start + row.jobs.copy(start, stop)) for row in rows for start, stop in [row.span]]
    copied = any(found > row.span[0] for row, found in left)
    leaders: list[tuple[_Row, int]] = []
    followers: list[tuple[_Row, int]] = []
    for row, found in sorted(left, key=lambda each: -each[0].span[1]):
        if any(row.begins(leader, found) for leader, at in leaders if at == found):
            followers.append((row, found))
        elif found < row.span[1]:
            leaders.append((row, found))
    if leaders:
        given = [
            row.jobs.row(row.asked.first, row.asked.last, behind=row.asked.behind, start=at) for row, at in leaders
        ]
        prefixes, token_ids, offsets = zip(*given, strict=True)
        pieces = engine.extend_together(prefixes, token_ids, offsets=offsets)
        for (row, at), piece in zip(leaders, pieces, strict=True):
            row.jobs.write(row.asked.first, piece, at)
    for row, found in followers:
        row.jobs.compute_from(found, row.asked.first, row.asked.last, behind=row.asked.behind)
    return copied or bool(followers)


async def _one_by_one(
    driver: ControllerDriver, request: ev.RecomputeTogether, rows: Sequence[_Row], unfit: tuple[int, ...] = ()
) -> None:
    """Run each load's row alone, and report the outcome of each."""
    known = {row.asked.first for row in rows}
    failed = [ev.RecomputeFailed(each.first, LOAD_CANCELLED) for each in request.passes if each.first not in known]
    blind: list[ChunkId] = []
    spent_s = 0.0
    for row in rows:
        row.jobs.begin_pass()
        match await row.jobs.recompute(row.asked):
            case ev.RecomputeFailed() as trouble:
                failed.append(trouble)
            case ev.RecomputeInterrupted(chunks):
                failed.append(ev.RecomputeFailed(chunks[0], "its pass was stopped"))
            case ev.RecomputeDone(chunks, seconds, was_blind):
                spent_s += seconds
                blind += [chunks[0]] if was_blind else []
    driver.tell(ev.RecomputedTogether(request.passes, spent_s, False, tuple(failed), tuple(blind), unfit))
