"""Random courses of loads: a driver that answers every instruction sooner or later, and a model to check it by."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from math import inf, nan
from random import Random

import numpy as np
import pytest

from kvwire.controller import (
    Controller,
    ControllerSettings,
    CostModel,
    DecodeCost,
    DocumentPlanInput,
    Estimates,
    Goal,
    PrefillCost,
)
from kvwire.controller import events as ev
from kvwire.controller.policies import Adaptive, CacheGen, CacheGenArtefact, Fixed, TextOnly
from kvwire.errors import ArgumentError
from kvwire.types import ChunkId

STEPS = 60
MOST_EVENTS = 5000


def steady(_start, _seconds):
    """A true bandwidth for the policy that asks for one."""
    return 1e6


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

    def variants(self, document):
        """Those that the controller may use."""
        all_of_them = self.documents[document]
        return [all_of_them[self.variant[document]]] if document in self.variant else list(all_of_them)


class Course:
    """One random course; ``play`` raises AssertionError where the controller does what it must not."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(seed)
        # Calm courses get to refinements: little goes wrong, and the link is better than it seemed.
        self.calm = self.random.random() < 0.4
        self.settings = self._settings()
        costs = CostModel(PrefillCost(self._any(0, 0.05), 10 ** self._any(-3 if self.calm else -6, -2), 1e-9),
                          DecodeCost(self._any(0, 0.01), self._any(0, 1e-5), self._any(0, 1e-7)), 1e-6)  # fmt: skip
        policy = self.random.choice([Adaptive()] * 8 + [Fixed(1), TextOnly(), CacheGen(), CacheGenArtefact(steady)])
        self.adaptive = isinstance(policy, Adaptive)
        self.pace_s = 10 ** self._any(-4, -3 if self.calm else -0.5)
        prior = 10 ** self._any(4 if self.calm else 3, 6 if self.calm else 8)
        self.rate = prior * 10 ** (self._any(1, 3) if self.calm else self._any(-3, 3))
        estimates = Estimates(costs, prior, self._any(0, 0.01 if self.calm else 0.2))
        self.log: list[ev.LogEntry] = []
        self.fresh = Controller(estimates.copy(), self.settings, policy)
        self.controller = Controller(estimates, self.settings, policy)
        self.now = 0.0
        self.loads: dict[int, Asked] = {}
        self.over: dict[int, object] = {}
        self.open: dict[ChunkId, ev.Fetch] = {}
        self.stale: list[ev.Fetch] = []
        self.jobs: dict[str, object] = {}
        self.asked_for: dict[ChunkId, set[int]] = {}
        self.here: dict[ChunkId, int] = {}
        self.held: dict[ChunkId, int] = {}
        self.valid: dict[ChunkId, int] = {}
        self.no_text: set[ChunkId] = set()
        self.no_fetch: set[ChunkId] = set()
        self.more_loads = self.random.choice([1, 1, 2, 4])
        self.kindness = self.random.choice([0.9, 0.95, 1.0] if self.calm else [0.3, 0.8, 0.95, 1.0])
        self.numbers = -1

    # What there is.

    def _any(self, low, high):
        return self.random.uniform(low, high)

    def _settings(self):
        pick = self.random.choice
        return ControllerSettings(
            max_in_flight=pick([1, 2, 3, 8]), horizon_s=pick([0.0, 0.02, 1.0]), workers=pick([1, 2]),
            decode_batch=pick([1, 2, 4]), decode_threads=pick([1, 1, 2]),
            max_pass_s=pick([0.001, 0.5]), stall_s=pick([0.01, 0.25]),
            max_failures=pick([1, 2, 3]), replan_s=pick([0.0, 0.005, 0.1]), reserve_s=pick([0.0, 0.01]),
            cancel_margin=pick([1.0, 1.5]), memory_bytes=pick([50, 1000, 20_000, 1 << 32, 1 << 32][3 * self.calm :]),
        )  # fmt: skip

    def _document(self):
        pick = self.random.choice
        tokens = tuple(self.random.randint(1, 300) for _ in range(self.random.randint(1, 6)))
        text, layered = pick([True, True, self.calm]), pick([True, True, False])
        if pick([True, True, True, False]):
            return tuple(self._blob(tokens, text, layered) for _ in range(pick([1, 1, 2])))
        return (DocumentPlanInput(tokens, has_text=text),)

    def _blob(self, tokens, text, layered):
        pick = self.random.choice
        levels = self.random.randint(1, 4)
        scale = pick([0, 1, 10, 100][2 * self.calm :])
        rows, errors = [], []
        for size in tokens:
            there = pick([levels, levels, levels, self.random.randint(0, levels)])
            rows.append(tuple(scale * size * 2**level for level in range(there)))
            errors.append(tuple(0.1**level for level in range(there)))
        measured = tuple(errors) if pick([True, False]) else ()
        return DocumentPlanInput(tokens, tuple(rows), text, measured, layered, pick([0.0, 0.0, 0.3]))

    def _goal(self):
        pick = self.random.choice
        deadline = pick([0.2, 0.5, 1.0, 2.0] if self.calm else [-1.0, 0.0, 0.01, 0.1, 0.3, 1.0, 1000.0])
        objective = pick(["earliest", "quality", "quality", "quality", "cheapest"])
        if objective == "earliest" and pick([True, False]):
            deadline = None
        floor = pick([0, 0, 1, 2])
        ceiling = pick([None, None, None, floor, floor + 1])
        return Goal(objective=objective, deadline_s=deadline, floor=floor, ceiling=ceiling)

    def _wait(self):
        self.now += self.random.choice([0.0, self._any(0, self.pace_s), self._any(0, 1e-3), self._any(0, 0.02)])

    # The course.

    def play(self):
        """Some random steps, then only answers until every load is over; returns the number of events."""
        for _ in range(STEPS):
            if set(self.loads) - set(self.over) or len(self.loads) < self.more_loads:
                self._wait()
                self._step(ending=False)
        idle = 0
        while set(self.loads) - set(self.over):
            assert len(self.log) < MOST_EVENTS, "loads do not end"
            waits_for_driver = self.open or self.jobs or self._unknown()
            if waits_for_driver:
                self._wait()
                self._step(ending=True)
                idle = 0
            else:
                assert self.controller.wake_at < inf, "nothing is under way and no tick is asked for"
                self.now = max(self.now, self.controller.wake_at)
                idle = 0 if self._tell(ev.Tick()) else idle + 1
                assert idle < 3, "ticks bring nothing about"
        assert self.controller.held_bytes == 0
        assert not self.controller.loads
        if self.seed % 4 == 0:
            self._replay()
        return len(self.log)

    def _replay(self):
        for entry in self.log:
            assert tuple(self.fresh.handle(entry.event, entry.now)) == entry.instructions

    def _unknown(self):
        return [(number, at) for number, load in self.loads.items() if number not in self.over
                for at in range(len(load.documents)) if at not in load.known]  # fmt: skip

    def _step(self, *, ending):
        if self.random.random() < 0.06:
            self._break_a_rule()
        if self.controller.wake_at < self.now:
            self._tell(ev.Tick())
        steps = [self._answer_fetch] * 4 * bool(self.open) + [self._answer_job] * 4 * bool(self.jobs)
        steps += [self._index] * 3 * bool(self._unknown()) + [self._bytes] * 2 * bool(self.open)
        steps += [self._stale] * bool(self.stale)
        if not ending:
            steps += [self._ask] * 2 * (len(self.loads) < self.more_loads)
            steps += [self._leave] * (bool(self.loads) and self.random.random() < 0.05)
        if not steps or self.random.random() < 0.1:
            steps = [lambda: self._tell(ev.Tick())]
        self.random.choice(steps)()

    def _ask(self):
        self.numbers += self.random.choice([1, 1, 3])
        documents = [self._document() for _ in range(self.random.choice([1, 1, 2, 3]))]
        self.loads[self.numbers] = Asked(self._goal(), documents)
        self._tell(
            ev.LoadRequested(self.numbers, len(documents), self.random.choice([0, 32]), self.loads[self.numbers].goal)
        )

    def _index(self):
        number, document = self.random.choice(self._unknown())
        load = self.loads[number]
        load.known.add(document)
        self._tell(ev.IndexKnown(number, document, load.documents[document]))

    def _leave(self):
        number = self.random.choice(list(self.loads))
        self.over.setdefault(number, "left")
        self._tell(ev.LoadAbandoned(number))

    def _bytes(self):
        if self.random.random() < 0.3:
            self._tell(ev.FirstByte(self._any(0, 0.3)))
            return
        chunk = self.random.choice([None, *self.open, *(fetch.chunk for fetch in self.stale)])
        began = max(0.0, self.now - self._any(0, 0.05))
        size = self.random.choice([0, *[int(self.rate * (self.now - began))] * 4, 10**7])
        self._tell(ev.TransferProgress(size, began, self.now, chunk))

    def _stale(self):
        fetch = self.stale.pop(self.random.randrange(len(self.stale)))
        event = self.random.choice([ev.ChunkArrived(fetch.chunk, fetch.level), ev.ChunkFailed(fetch.chunk, "gone")])
        before = self._under_way()
        self._tell(event)
        assert before[0] <= self._under_way()[0] or fetch.chunk.load in self.over

    def _under_way(self):
        return set(self.valid), dict(self.open)

    def _answer_fetch(self):
        chunk = self.random.choice(list(self.open))
        fetch = self.open.pop(chunk)
        load, sizes = self.loads[chunk.load], self._sizes(chunk)
        chance = self.random.random()
        if chance < self.kindness:
            level = fetch.level
        elif chance < self.kindness + (1 - self.kindness) / 2:
            level = self.random.randint(max(0, fetch.first - 1), fetch.level)
        else:
            level = -1
        wanted = self._text(chunk) and level < load.goal.floor and level < fetch.level
        lost = level < fetch.first or (not fetch.first and wanted)
        if not lost:
            self.here[chunk] = level
            self.held[chunk] = sizes[level]
        elif fetch.first:
            self.held[chunk] = sizes[fetch.first - 1]
        else:
            self.held[chunk] = 0
            self.no_fetch.add(chunk)
        trouble = "missing" if level < fetch.level else ""
        self._tell(ev.ChunkFailed(chunk, "broken") if level < 0 else ev.ChunkArrived(chunk, level, trouble))

    def _answer_job(self):
        lane = self.random.choice(list(self.jobs))
        job = self.jobs.pop(lane)
        fine = self.random.random() < self.kindness
        seconds = self.random.choice([0.0, self._any(0, 0.01), self._any(0, 0.1), self._any(0, 5)])
        match job:
            case ev.Decode(chunks):
                bad = () if fine else tuple(self.random.sample(chunks, self.random.randint(1, len(chunks))))
                for chunk in chunks if chunks[0].load not in self.over else ():
                    self._decoded(chunk, bad=chunk in bad)
                self._tell(ev.DecodeFailed(chunks, bad, "checksum") if bad else ev.DecodeDone(chunks, seconds))
            case ev.Recompute(first, last):
                chunks = tuple(replace(first, chunk=at) for at in range(first.chunk, last.chunk + 1))
                bad = self.random.choice(chunks)
                if fine:
                    self.valid |= dict.fromkeys(chunks, -1) if first.load not in self.over else {}
                else:
                    self.no_text.add(bad)
                self._tell(ev.RecomputeDone(chunks, seconds) if fine else ev.RecomputeFailed(bad, "memory"))
            case ev.ComputePrefix(number, document):
                load = self.loads[number]
                load.heads[document] = "done" if fine else "failed"
                if fine:
                    self._tell(ev.PrefixComputed(number, document, seconds))
                else:
                    chunks = range(len(load.documents[document][0].tokens))
                    self.no_fetch |= {ChunkId(document, at, number) for at in chunks}
                    self._tell(ev.PrefixFailed(number, document, "memory"))

    def _decoded(self, chunk, *, bad):
        if not bad:
            self.valid[chunk] = self.here[chunk]
        elif chunk in self.valid:
            self.here[chunk] = self.valid.pop(chunk)
            self.held[chunk] = self._sizes(chunk)[self.here[chunk]]
        else:
            self.held[chunk] = 0
            del self.here[chunk]
            self.no_fetch.add(chunk)

    def _break_a_rule(self):
        """An event that cannot be raises and changes nothing."""
        newest = max(self.loads, default=-1)
        nobody = ChunkId(0, 0, newest + 1)
        wrong = [
            ev.LoadAbandoned(newest + 1), ev.ChunkArrived(nobody, 0), ev.ChunkFailed(nobody, ""),
            ev.IndexKnown(newest + 1, 0, ()),
            ev.DecodeDone((), 0.1), ev.DecodeDone((nobody,), 0.1), ev.DecodeFailed((nobody,), (), ""),
            ev.RecomputeDone((nobody,), 0.1), ev.RecomputeDone((), 0.1), ev.RecomputeFailed(nobody, ""),
            ev.PrefixComputed(newest + 1, 0, 0.1), ev.PrefixFailed(newest + 1, 0, ""), ev.FirstByte(nan),
            ev.FirstByte(-1.0), ev.TransferProgress(-1, 0.0, 0.0), ev.TransferProgress(1, 1.0, 0.0),
            ev.TransferProgress(1, nan, 0.0), ev.TransferProgress(1, 0.0, inf), ev.TransferProgress(nan, 0.0, 0.0),
            ev.LoadRequested(newest + 1, 0, 0, Goal()), ev.LoadRequested(newest + 1, 1, -1, Goal()),
        ]  # fmt: skip
        for number, load in self.loads.items():
            wrong.append(ev.LoadRequested(number, 1, 0, Goal()))
            if number in self.over:
                continue
            wrong += [ev.IndexKnown(number, len(load.documents), load.documents[0]), ev.IndexKnown(number, -1, ())]
            wrong += [ev.IndexKnown(number, at, load.documents[at]) for at in load.known]
            wrong += [ev.IndexKnown(number, at, ()) for at in range(len(load.documents))]
            stale = {fetch.chunk for fetch in self.stale} | set(self.open)
            chunks = [
                ChunkId(document, chunk, number) for document in range(len(load.documents)) for chunk in (-1, 0, 99)
            ]
            wrong += [ev.ChunkArrived(chunk, 0) for chunk in chunks if chunk not in stale]
            wrong += [ev.ChunkFailed(chunk, "") for chunk in chunks if chunk not in stale]
        for chunk, fetch in self.open.items():
            wrong += [ev.ChunkArrived(chunk, fetch.level + 1), ev.ChunkArrived(chunk, -1)]
        for job in self.jobs.values():
            if isinstance(job, ev.Decode):
                wrong += [
                    ev.DecodeDone(job.chunks, nan),
                    ev.DecodeDone(job.chunks, -1.0),
                    ev.DecodeDone(job.chunks[1:], 0.1),
                ]
                wrong += [ev.DecodeFailed(job.chunks, (), ""), ev.DecodeFailed(job.chunks, (nobody,), "")]
            elif isinstance(job, ev.ComputePrefix):
                wrong += [
                    ev.PrefixComputed(job.load, job.document, inf),
                    ev.PrefixComputed(job.load, job.document + 1, 0.1),
                ]
            else:
                wrong += [ev.RecomputeDone((job.first,) * 2, 0.1), ev.RecomputeDone((job.first,), nan)]
        before = fingerprint(self.controller)
        event, moment = self.random.choice(wrong), self.now
        if self.random.random() < 0.2:
            event, moment = ev.Tick(), self.random.choice([nan, inf, self.log[-1].now - 1 if self.log else nan])
        with pytest.raises(ArgumentError):
            self.controller.handle(event, moment)
        assert fingerprint(self.controller) == before, event

    # What comes out.

    def _tell(self, event):
        out = self.controller.handle(event, self.now)
        self.log.append(ev.LogEntry(self.now, event, tuple(out)))
        self.ending = {each.load for each in out if isinstance(each, ev.Fail)}
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

    def _obey(self, instruction):
        match instruction:
            case ev.Fetch():
                self._fetch(instruction)
            case ev.Decode():
                self._decode(instruction)
            case ev.Recompute():
                self._recompute(instruction)
            case ev.ComputePrefix():
                self._head_start(instruction)
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
            assert not self._is_used(chunk)
        else:
            assert chunk not in self.valid
            assert chunk not in self._pass()
            if self.adaptive and self._text(chunk):
                assert fetch.level >= min(load.goal.floor, document.finest)
        if self.adaptive and load.goal.ceiling is not None:
            assert fetch.level <= load.goal.ceiling
        self.open[chunk] = fetch
        assert len(self.open) <= self.settings.max_in_flight
        self.held[chunk] = sizes[fetch.level]

    def _pass(self):
        job = self.jobs.get("prefill")
        if not isinstance(job, ev.Recompute):
            return []
        return [replace(job.first, chunk=at) for at in range(job.first.chunk, job.last.chunk + 1)]

    def _lane(self, lane, job):
        assert lane not in self.jobs
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
            assert self.here[chunk] == level
            assert chunk not in self.open
            if chunk in self.valid:
                assert level > self.valid[chunk]
                assert (chunk.load, chunk.document) not in {(other.load, other.document) for other in self._pass()}
        self._lane("decode", job)

    def _recompute(self, job):
        first, last = job.first, job.last
        assert first.load not in self.over
        assert first.document in self.loads[first.load].known
        assert (first.document, first.load) == (last.document, last.load)
        for at in range(first.chunk):
            chunk = replace(first, chunk=at)
            assert chunk in self.valid
            assert not self._is_used(chunk)
        self._lane("prefill", job)
        assert self._pass()
        for chunk in self._pass():
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

    def _end(self, number, how):
        assert number not in self.over
        self.over[number] = how
        assert not any(chunk.load == number for chunk in self.open)
        assert not any(size for chunk, size in self.held.items() if chunk.load == number)

    def _finish(self, number, finish):
        self._end(number, finish)
        load = self.loads[number]
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
