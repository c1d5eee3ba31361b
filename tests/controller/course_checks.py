"""A model of the controller, which every instruction of a random course is checked by."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from kvwire.controller import DocumentPlanInput, Goal
from kvwire.controller import events as ev
from kvwire.types import ChunkId

if TYPE_CHECKING:
    from kvwire.controller.repair import RepairOption


def fingerprint(value, seen=None):
    """All that an object holds, as plain data that can be compared."""
    seen = set() if seen is None else seen
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, (list, tuple, deque)):
        return [fingerprint(each, seen) for each in value]
    if isinstance(value, dict):
        return [(repr(key), fingerprint(each, seen)) for key, each in value.items()]
    if not hasattr(value, "__dict__") or callable(value):
        return repr(value)
    if id(value) in seen:
        return "seen"
    seen.add(id(value))
    return [type(value).__name__, fingerprint(vars(value), seen)]


@dataclass
class Asked:
    """A load as the driver knows it. way: for each chunk what is known of it."""

    goal: Goal
    documents: list[tuple[DocumentPlanInput, ...]]
    known: set[int] = field(default_factory=set)
    variant: dict[int, int] = field(default_factory=dict)
    heads: dict[int, str] = field(default_factory=dict)
    repair: RepairOption | None = None
    looks: bool = False
    looked: bool = False
    links: tuple[int, ...] = ()
    final: int = 0
    share: float | None = None
    is_broken: bool = False
    is_unfit: bool = False

    def variants(self, document):
        """Those that the controller may use."""
        all_of_them = self.documents[document]
        return [all_of_them[self.variant[document]]] if document in self.variant else list(all_of_them)


class Checks:
    """Takes in what the controller says; raises AssertionError where it does what it must not."""

    def _tell(self, event):
        out = self.controller.handle(event, self.now)
        self.log.append(ev.LogEntry(self.now, event, tuple(out)))
        self.ending = {each.load for each in out if isinstance(each, (ev.Fail, ev.Refuse))}
        for instruction in out:
            self._obey(instruction)
            assert sum(self.held.values()) <= self.settings.memory_bytes
        assert sum(self.held.values()) == self.controller.held_bytes
        assert self.controller.wake_at >= self.now
        assert set(self.controller.loads) == set(self.loads) - set(self.over)
        return out

    def _sizes(self, chunk):
        load = self.loads[chunk.load]
        return load.documents[chunk.document][load.variant[chunk.document]].fetch_bytes[chunk.chunk]

    def _text(self, chunk):
        variants = self.loads[chunk.load].documents[chunk.document]
        return chunk not in self.no_text and any(variant.has_text for variant in variants)

    def _obey(self, instruction):  # noqa: C901 - a case for each instruction
        match instruction:
            case ev.Fetch():
                self._fetch(instruction)
            case ev.Decode():
                self._decode(instruction)
            case ev.Recompute() | ev.RecomputeTogether():
                self._recompute_all(instruction)
            case ev.Interrupt(first):
                job = self.jobs["prefill"]
                assert self.settings.interrupts
                assert isinstance(job, ev.Recompute)
                assert job.first == first
                assert self.stopped is not job, "asked to stop twice"
                self.stopped = job
            case ev.Repair():
                self._repair(instruction)
            case ev.ComputePrefix():
                self._head_start(instruction)
            case ev.Look():
                self._look(instruction)
            case ev.Cancel(chunk):
                fetch = self.open.pop(chunk)
                self.stale.append(fetch)
                self.no_fetch.add(chunk)
                self.held[chunk] = self._sizes(chunk)[fetch.first - 1] if fetch.first else 0
            case ev.Release(chunk):
                assert chunk not in self.open
                assert chunk.load in self.over or chunk.load in self.ending or not self._is_used(chunk)
                self.held[chunk] = 0
                self.here.pop(chunk, None)
            case ev.Finish(load):
                self._finish(load, instruction)
            case ev.Fail(load):
                self._fail(load)
            case ev.Refuse(load, late_s):
                self._end(load, "refused")
                goal = self.loads[load].goal
                assert goal.on_late == "refuse"
                assert goal.deadline_s is not None
                assert late_s > 0

    def _is_used(self, chunk):
        job = self.jobs.get("decode")
        return isinstance(job, ev.Decode) and chunk in job.chunks

    def _commit(self, number, document, variant):
        load = self.loads[number]
        assert number not in self.over
        assert document in load.known
        assert load.variant.setdefault(document, variant) == variant
        return load.documents[document][variant]

    def _fetch(self, fetch):
        chunk, load = fetch.chunk, self.loads[fetch.chunk.load]
        document = self._commit(chunk.load, chunk.document, fetch.variant)
        sizes = document.fetch_bytes[chunk.chunk]
        levels = set(range(fetch.first, fetch.level + 1))
        assert levels
        assert not levels & self.asked_for.setdefault(chunk, set()), "asked for before"
        self.asked_for[chunk] |= levels
        assert chunk not in self.open
        assert chunk not in self.no_fetch
        assert fetch.bytes == sizes[fetch.level] - (sizes[fetch.first - 1] if fetch.first else 0)
        assert fetch.until > self.now
        if fetch.first:
            assert document.layered
            assert load.goal.objective == "quality"
            assert self.here[chunk] == self.valid[chunk] == fetch.first - 1
            assert chunk.document >= load.final, "is to stay as it is"
            assert not self._is_used(chunk)
        else:
            assert chunk not in self.valid
            assert chunk not in self._pass()
            if self.adaptive and self._text(chunk):
                assert fetch.level >= min(load.goal.floor, len(sizes) - 1)
        if self.adaptive and load.goal.ceiling is not None:
            assert fetch.level <= load.goal.ceiling
        self.open[chunk] = fetch
        assert len(self.open) <= self.settings.max_in_flight
        self.held[chunk] = sizes[fetch.level]

    def _passes(self):
        job = self.jobs.get("prefill")
        return job.passes if isinstance(job, ev.RecomputeTogether) else [job] * isinstance(job, ev.Recompute)

    def _pass(self):
        return [replace(each.first, chunk=at) for each in self._passes()
                for at in range(each.first.chunk, each.last.chunk + 1)]  # fmt: skip

    def _read(self):
        """Documents that a running forward pass reads."""
        return {(each.first.load, document) for each in self._passes()
                for document in range(0 if each.behind else each.first.document, each.first.document + 1)}  # fmt: skip

    def _chunks_before(self, number, document):
        for at, variants in enumerate(self.loads[number].documents[:document]):
            for chunk in range(len(variants[0].tokens)):
                yield ChunkId(at, chunk, number)

    def _lane(self, lane, job):
        assert lane not in self.jobs
        assert not self.closings or (self.settings.workers == 2 and lane == "decode")
        assert self.settings.workers == 2 or not self.jobs
        self.jobs[lane] = job

    def _decode(self, job):
        number = job.chunks[0].load
        load = self.loads[number]
        assert number not in self.over
        assert len(set(job.chunks)) == len(job.chunks) == len(job.levels) <= self.settings.decode_batch
        for chunk, level in zip(job.chunks, job.levels, strict=True):
            assert chunk.load == number
            variant = load.documents[chunk.document][load.variant[chunk.document]]
            assert not variant.prefix_share or load.heads[chunk.document] == "done"
            if level < self.here[chunk]:  # all that came could not be decoded in time
                assert load.goal.deadline_s is not None
                assert variant.layered
                assert level >= min(load.goal.floor, self.here[chunk])
                if chunk in self.valid or load.goal.objective != "quality":
                    self.here[chunk] = level  # else the rest waits for time that is left
            else:
                assert self.here[chunk] == level
            assert chunk not in self.open
            if chunk in self.valid:
                assert level > self.valid[chunk]
                assert (chunk.load, chunk.document) not in self._read()
                assert chunk.document >= load.final, "is to stay as it is"
                look = self.jobs.get("prefill")
                assert not (isinstance(look, ev.Look) and look.load == number)
        self._lane("decode", job)

    def _recompute_all(self, job):
        if isinstance(job, ev.RecomputeTogether):
            loads = {each.first.load for each in job.passes}
            assert 2 <= len(loads) == len(job.passes) <= self.settings.max_joined
            assert not any(self.loads[number].is_unfit for number in loads)
        for each in job.passes if isinstance(job, ev.RecomputeTogether) else [job]:
            self._recompute(each)
        self._lane("prefill", job)

    def _recompute(self, job):
        first, last = job.first, job.last
        assert first.load not in self.over
        assert first.document in self.loads[first.load].known
        assert (first.document, first.load) == (last.document, last.load)
        seen = [replace(first, chunk=at) for at in range(first.chunk)]
        if job.behind:
            assert self.loads[first.load].repair
            assert first.document
            seen += self._chunks_before(first.load, first.document)
        for chunk in seen:
            assert chunk in self.valid
            assert not self._is_used(chunk)
        for chunk in (replace(first, chunk=at) for at in range(first.chunk, last.chunk + 1)):
            assert self._text(chunk)
            assert chunk not in self.valid
            assert chunk not in self.open
            assert chunk not in self.here
            assert not self._is_used(chunk)

    def _head_start(self, job):
        document = self._commit(job.load, job.document, job.variant)
        assert document.prefix_share
        assert job.document not in self.loads[job.load].heads
        self._lane("prefill", job)

    def _look(self, job):
        load = self.loads[job.load]
        assert job.load not in self.over
        assert load.looks
        assert not load.looked
        assert load.goal.objective == "quality"
        assert load.goal.deadline_s is not None
        chunks = [ChunkId(document, chunk, job.load) for document, variants in enumerate(load.documents)
                  for chunk in range(len(variants[0].tokens))]  # fmt: skip
        assert all(chunk in self.valid and not self._is_used(chunk) for chunk in chunks)
        load.looked = True
        self._lane("prefill", job)

    def _repair(self, job):
        load = self.loads[job.load]
        assert job.load not in self.over
        assert load.links or load.repair
        assert not load.is_broken, "a job failed before"
        assert load.final < job.documents < len(load.documents) == len(load.known)
        assert load.share in {None, job.share}
        for chunk in self._chunks_before(job.load, job.documents):
            assert chunk in self.valid
            assert chunk not in self.open
            assert not self._is_used(chunk)
        load.final, load.share = job.documents, job.share
        self._lane("prefill", job)

    def _end(self, number, how):
        assert number not in self.over
        self.over[number] = how
        assert not any(chunk.load == number for chunk in self.open)
        assert not any(size for chunk, size in self.held.items() if chunk.load == number)

    def _finish(self, number, finish):
        self._end(number, finish)
        self.closings.append(number)
        load, job = self.loads[number], self.jobs.get("prefill")
        assert not (isinstance(job, ev.Repair) and job.load == number)
        chunks = [ChunkId(document, chunk, number) for document, variants in enumerate(load.documents)
                  for chunk in range(len(variants[0].tokens))]  # fmt: skip
        assert [decision.chunk for decision in finish.decisions] == chunks
        assert len(load.known) == len(load.documents)
        for decision in finish.decisions:
            level = self.valid[decision.chunk]
            assert decision.level == (None if level < 0 else level)
            assert decision.action == ("recompute" if level < 0 else "fetch")
            assert not self._is_used(decision.chunk)

    def _fail(self, number):
        self._end(number, "failed")
        load = self.loads[number]
        event = self.log[-1].event
        new = (event.load, event.document) if isinstance(event, ev.IndexKnown) else None
        assert any(
            # A variant is chosen when it is known, by what is known then.
            (all if (number, document) == new else any)(
                self._is_lost(number, document, variant) for variant in load.variants(document)
            )
            for document in load.known
        ), "failed although there was a way"

    def _is_lost(self, number, document, variant):
        for at in range(len(variant.tokens)):
            chunk = ChunkId(document, at, number)
            row = variant.fetch_bytes[at] if variant.fetch_bytes else ()
            fetchable = chunk not in self.no_fetch and row and row[0] <= self.settings.memory_bytes
            if not self._text(chunk) and not fetchable and chunk not in self.valid:
                return True
        return False
