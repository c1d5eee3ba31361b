"""What became of fetches and jobs: how loads, link, workers and estimates take it in."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from math import isfinite
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError

from . import events as ev
from .chunk_table import ARRIVED, FETCHING, READY, REDECODING, REFINED, REFINING, ChunkState
from .workers import check_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.types import ChunkId

    from .document_state import DocumentState
    from .joining import Joining
    from .load import Load
    from .state import State

_FETCHED = bytes((FETCHING, REFINING))


class Outcomes:
    """Takes in what happened; raises ArgumentError, before anything is changed, for what cannot have."""

    def __init__(self, state: State, joining: Joining) -> None:
        """Nothing has happened."""
        self._state, self._joining = state, joining
        self.newest = -1  # number of the load that came last
        self.cancelled: set[ChunkId] = set()  # fetches of which something may still be reported

    def load(self, number: int) -> Load | None:
        """A load under way; None where it is over. Raises ArgumentError for one that never was."""
        if number > self.newest:
            raise ArgumentError(f"load {number} was never asked for")
        return self._state.loads.get(number)

    def assembled(self, event: ev.PromptAssembled, now: float) -> None:
        """End a load's closing, and learn from it; of a closing that was abandoned nothing is learnt."""
        if self.load(event.load):
            raise ArgumentError(f"load {event.load} is not finished; report its closing after Finish")
        figures = (event.seconds, event.repair_s, *event.rows, *chain.from_iterable(event.passes))
        if event.prompt_tokens < 1 or not all(map(isfinite, figures)) or min(figures[1:], default=0) < 0:
            raise ArgumentError(f"a closing has tokens, and rows and passes finite figures of at least 0, got {event}")
        closing = self._state.workers.closings.get(event.load)
        if closing:
            estimates, planned_s = self._state.estimates, closing.repair_s
            for each in event.passes:
                estimates.prefill.add(*each)
            if event.rows:
                costs = replace(estimates.costs(), repair_scale=1.0)
                planned_s = sum(replace(costs, repair_rows=rows).repair_s(event.prompt_tokens) for rows in event.rows)
            if planned_s and event.repair_s:
                estimates.repair.add(event.repair_s / planned_s)
            estimates.closing.add(max(0.0, event.seconds) / event.prompt_tokens)
            self._state.workers.closed(event.load, now)

    # Fetches.

    def _fetched(self, chunk: ChunkId) -> tuple[Load, DocumentState] | None:
        """Where a chunk is whose fetch is over; None where it was cancelled, or its load is over."""
        if chunk in self.cancelled:
            self.cancelled.discard(chunk)
            return None
        load = self.load(chunk.load)
        if load is None:
            return None
        doc, number = load.doc(chunk.document), chunk.chunk
        if not 0 <= number < doc.count:
            raise ArgumentError(f"{chunk} is not part of this load")
        state = doc.table.state[doc.start + number]
        if state not in _FETCHED:
            msg = f"{chunk} is {ChunkState(state).name.lower()}, not being fetched; report each outcome once"
            raise ArgumentError(msg)
        return load, doc

    def arrived(self, chunk: ChunkId, level: int, trouble: str, now: float, out: list[ev.Instruction]) -> bool:
        """Take in what a fetch brought; returns whether that was of no use."""
        place = self._fetched(chunk)
        if place is None:
            return False
        load, doc = place
        table, at = doc.table, doc.start + chunk.chunk
        asked = table.level[at]
        if not 0 <= level <= asked:
            raise ArgumentError(f"level {level} of {chunk} arrived, level {asked} was asked for")
        refining = table.state[at] == REFINING
        if level < asked:
            floor = max(load.goal.floor, table.floor[at])
            too_coarse = level <= table.valid_level[at] if refining else level < floor and table.can_text[at]
            if too_coarse:
                if not refining:
                    out.append(ev.Release(chunk))
                return self._lost(load, doc, chunk, trouble or f"only level {level} is there")
            doc.note(chunk.chunk, trouble)
            table.top[at] = level
            self._state.hold(doc, chunk.chunk, doc.size(chunk.chunk, level))
        self._state.link.arrived(chunk, now)
        doc.failures = 0
        table.level[at] = level
        table.move(at, REFINED if refining else ARRIVED)
        return False

    def fetch_failed(self, chunk: ChunkId, reason: str) -> bool:
        """Take in that a fetch brought nothing; returns whether a load waited for it."""
        place = self._fetched(chunk)
        return place is not None and self._lost(*place, chunk, reason)

    def _lost(self, load: Load, doc: DocumentState, chunk: ChunkId, reason: str) -> bool:
        """Take in that a fetch brought nothing of use."""
        self._state.link.drop(chunk)
        load.is_stale = True
        if doc.table.state[doc.start + chunk.chunk] == REFINING:
            doc.note(chunk.chunk, f"refinement failed: {reason}")
            self._state.settle(doc, chunk.chunk)
            return True
        self._lose(load, doc, chunk.chunk, f"fetch failed: {reason}")
        doc.failures += 1
        if doc.failures >= self._state.settings.max_failures:
            doc.give_up_blob(f"{doc.failures} fetches in a row failed")
        return True

    def _lose(self, load: Load, doc: DocumentState, chunk: int, trouble: str) -> None:
        """Lose what was or should have been fetched for a chunk."""
        doc.lose(chunk, trouble, fetch=True)
        self._state.hold(doc, chunk, 0)
        load.is_stale = True
        load.fallbacks += bool(doc.table.can_text[doc.start + chunk])

    # Decodes.

    def decoded(
        self, chunks: tuple[ChunkId, ...], bad: tuple[ChunkId, ...], seconds: float | None, reason: str,
        out: list[ev.Instruction],
    ) -> None:  # fmt: skip
        """Take in the end of a batch; ``seconds`` is None where some of it is bad."""
        if seconds is None and not (bad and set(bad) <= set(chunks)):
            raise ArgumentError("a decode that failed names at least one of its own chunks")
        if seconds is not None:
            check_seconds(seconds)
        numbers = (chunks[0].load, chunks[0].document) if chunks else (-1, -1)
        job = self._state.workers.end("decode", "decode", chunks, *numbers, self._state.now)
        if seconds is not None:
            self._state.estimates.decode.add(job.tokens, job.size, seconds)
        load = self.load(job.load)
        if load is None:
            return
        for chunk, level in zip(chunks, job.levels, strict=True):
            doc = load.doc(chunk.document)
            if chunk in bad:
                self._spoilt(load, doc, chunk.chunk, reason, out)
            else:
                self._valid(load, doc, chunk.chunk, level, out)

    def _valid(self, load: Load, doc: DocumentState, chunk: int, level: int, out: list[ev.Instruction]) -> None:
        table, at = doc.table, doc.start + chunk
        if table.state[at] == REDECODING:
            doc.reasons[chunk] = "refined: time was left"
        came, table.valid_level[at] = table.level[at], level
        if level < came:
            doc.reasons[chunk] = "more coarsely than it came, to be in time"
            if load.goal.objective == "quality":
                table.move(at, REFINED)  # the rest of it waits for time that is left
                return
            table.level[at] = table.top[at] = level
        table.move(at, READY)  # it ran, so that it may
        self._keep_or_release(load, doc, chunk, out)

    def _spoilt(self, load: Load, doc: DocumentState, chunk: int, reason: str, out: list[ev.Instruction]) -> None:
        table, at = doc.table, doc.start + chunk
        if table.state[at] == REDECODING:
            # What was valid is spoilt; its own bytes are still here, and nothing finer is tried again.
            doc.note(chunk, f"refinement cannot be decoded: {reason}")
            table.move(at, ARRIVED)
            table.level[at] = table.top[at] = level = table.valid_level[at]
            self._state.hold(doc, chunk, doc.size(chunk, level))
        else:
            self._lose(load, doc, chunk, f"decode failed: {reason}")
            out.append(ev.Release(doc.id(chunk)))

    def _keep_or_release(self, load: Load, doc: DocumentState, chunk: int, out: list[ev.Instruction]) -> None:
        """Forget a decoded chunk's bytes unless a refinement may build on them."""
        goal, table, at = load.goal, doc.table, doc.start + chunk
        finest = table.top[at] if goal.ceiling is None else min(table.top[at], goal.ceiling)
        if not (goal.objective == "quality" and table.layered[at] and table.valid_level[at] < finest):
            self._state.release(doc, chunk, out)

    # Forward passes.

    def pass_over(
        self, chunks: tuple[ChunkId, ...], seconds: float, *, blind: bool = False, stopped: bool = False,
        copied: bool = False,
    ) -> None:  # fmt: skip
        """Take in the end of a forward pass."""
        check_seconds(seconds)
        number, document = (chunks[0].load, chunks[0].document) if chunks else (-1, -1)
        job = self._state.workers.end("prefill", "recompute", chunks, number, document, self._state.now)
        if not (blind or stopped or copied):
            self._state.estimates.prefill.add(job.tokens, job.context, seconds)
        load = self.load(job.load)
        if load and stopped:
            load.pass_stopped(job)
        elif load:
            load.pass_ended(job, blind=blind)

    def pass_failed(self, chunk: ChunkId, reason: str) -> None:
        """Take in that a forward pass failed."""
        job = self._state.workers.running("prefill")
        if job is None or job.kind != "recompute" or chunk not in job.chunks:
            raise ArgumentError(f"{chunk} is not being recomputed; name a chunk of the pass that failed")
        self._state.workers.end("prefill", "recompute", job.chunks, job.load, job.document, self._state.now)
        if load := self.load(job.load):
            load.pass_stopped(job, chunk, reason)

    def passes_over(self, event: ev.RecomputedTogether) -> None:
        """Take in the end of a joined pass, for each of its loads."""
        job = self._state.workers.running("prefill")
        passes = [ev.Recompute(each.chunks[0], each.chunks[-1], each.behind) for each in job.passes] if job else []
        if job is None or job.kind != "joined" or tuple(passes) != event.passes:
            msg = "no such joined pass is running; report each instruction's outcome once, with exactly its passes"
            raise ArgumentError(msg)
        check_seconds(event.seconds)
        failed = {each.chunk.load: each for each in event.failed}
        ours = {chunk for each in job.passes for chunk in each.chunks}
        firsts = {each.chunks[0] for each in job.passes}
        are_ours = ours.issuperset(each.chunk for each in event.failed) and firsts.issuperset(event.blind)
        are_ours &= {each.load for each in firsts}.issuperset(event.unfit)
        if len(failed) < len(event.failed) or not are_ours:
            raise ArgumentError(
                "of each pass at most one chunk failed, what was blind is named by its first chunk, and loads that are "
                "unfit are those of the pass"
            )
        self._state.workers.end("prefill", "joined", job.chunks, job.load, job.document, self._state.now)
        if self._state.estimates.joined and event.joined and not (event.failed or event.blind or event.copied):
            self._state.estimates.joined.add_rows([(each.tokens, each.context) for each in job.passes], event.seconds)
        if not (event.joined or event.failed or event.unfit):
            self._joining.failed()
        for each in job.passes:
            if load := self._state.loads.get(each.load):
                load.joins &= each.load not in event.unfit
                if each.load in failed:
                    load.pass_stopped(each, failed[each.load].chunk, failed[each.load].reason)
                else:
                    load.pass_ended(each, blind=each.chunks[0] in event.blind)

    def looked(self, number: int, attention: Sequence[Sequence[float]], seconds: float) -> None:
        """Take in what the question attends to."""
        check_seconds(seconds)
        load = self.load(number)
        checked = load.checked_attention(attention) if load else ()
        self._state.workers.end("prefill", "look", (), number, -1, self._state.now)
        if load:
            load.looked(checked)

    def prefix_failed(self, number: int, document: int, reason: str, out: list[ev.Instruction]) -> None:
        """Take in that a document's blob is of no use without its prefix layers."""
        self._state.workers.end("prefill", "head start", (), number, document, self._state.now)
        load = self.load(number)
        if load is None:
            return
        doc = load.doc(document)
        doc.prefix_running = False
        trouble = f"computing its prefix layers failed: {reason}"
        for chunk in range(doc.count):
            state = doc.table.state[doc.start + chunk]
            if state == FETCHING:
                self._state.link.drop(doc.id(chunk))
                out.append(ev.Cancel(doc.id(chunk), trouble))
            if state in (FETCHING, ARRIVED):
                self._lose(load, doc, chunk, trouble)
                out.append(ev.Release(doc.id(chunk)))
        doc.give_up_blob(trouble, all_of_it=True)
