"""Chunks of several loads recomputed in one forward pass, each load's as a row.

Loads that are over are left out. If a row cannot be computed, the others still are: when the pass fails, each load's
row runs alone.
"""

from __future__ import annotations

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
        ran, seconds = await driver.compute(partial(_compute, engine, driver, rows))
    except Exception:  # noqa: BLE001 - whatever it is, passes alone need less memory, and show whose it is
        await _one_by_one(driver, request, rows)
        return
    tokens = sum(ran.values())
    for row, own in ran.items():
        row.jobs.note_recomputed(row.asked, row.chunks, seconds * own / tokens)
    firsts = {row.asked.first for row in ran}
    gone = tuple(ev.RecomputeFailed(each.first, LOAD_CANCELLED) for each in request.passes if each.first not in firsts)
    driver.tell(ev.RecomputedTogether(request.passes, seconds, not gone, gone))


def _compute(engine: Engine, driver: ControllerDriver, rows: Sequence[_Row]) -> tuple[dict[_Row, int], float]:
    """Run the rows of running loads, and write them into their prompts; returns tokens of each, and seconds.

    In the compute thread.
    """
    living = [row for row in rows if not row.jobs.is_gone]
    if not living:
        return {}, 0.0
    began = driver.clock()
    given = [row.jobs.row(row.asked.first, row.asked.last, behind=row.asked.behind) for row in living]
    prefixes, token_ids, offsets = zip(*given, strict=True)
    pieces = engine.extend_together(prefixes, token_ids, offsets=offsets)
    for row, piece in zip(living, pieces, strict=True):
        row.jobs.write(row.asked.first, piece)
    engine.synchronize()
    return dict(zip(living, map(len, token_ids), strict=True)), driver.clock() - began


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
