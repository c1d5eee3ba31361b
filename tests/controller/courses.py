"""Random courses of loads: a driver that answers every instruction sooner or later, and a model to check it by."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from random import Random

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
from kvwire.controller.policies import Adaptive, CacheBlend, CacheGen, CacheGenArtefact, CacheGenTimed, Fixed, TextOnly
from kvwire.controller.repair import RepairOption
from kvwire.errors import ArgumentError
from kvwire.types import ChunkId

from .course_checks import Asked, Checks, fingerprint
from .playing import LookFirst

STEPS = 60
MOST_EVENTS = 5000


REPAIRS = (
    RepairOption(most=0.3, error=0.1, left=(1.0, 0.0)),
    RepairOption(least=0.2, most=0.2, scan=0.1, error=0.01),
    RepairOption(least=1.0, most=1.0, looks=False, error=0.01),
    RepairOption(least=0.2, most=0.2, looks=False, error=0.1, begins="documents"),
    RepairOption(most=0.3, error=0.1, left=(1.0, 0.0), begins="looked"),
)


def steady(_start, _seconds):
    """A true bandwidth for the policy that asks for one."""
    return 1e6


class Course(Checks):
    """One random course; ``play`` raises AssertionError where the controller does what it must not."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(seed)
        # Calm courses get to refinements: little goes wrong, and the link is better than it seemed.
        self.calm = self.random.random() < 0.4
        # Orderly ones get to rows that are computed beside the link: it is slow, and there is no text.
        self.orderly = self.random.random() < 0.25
        self.settings = self._settings()
        base_s, token_s = self._any(0, 0.05), 10 ** self._any(-3 if self.calm else -6, -2)
        if self.orderly:
            base_s, token_s = base_s / 50, token_s / 1000
        costs = CostModel(PrefillCost(base_s, token_s, 1e-9),
                          DecodeCost(self._any(0, 0.01), self._any(0, 1e-5), self._any(0, 1e-7)), 1e-6)  # fmt: skip
        if self.orderly:
            costs = replace(costs, decode=costs.decode.scaled(0.01))
        if self.random.random() < 0.5:
            costs = replace(costs, joined=costs.prefill.scaled(self._any(0.2, 1)))
        policy = self.random.choice(
            [Adaptive()] * 6
            + [LookFirst()] * 2
            + [Fixed(1), TextOnly(), CacheGen(), CacheGenTimed(), CacheGenArtefact(steady), CacheBlend()]
        )
        self.adaptive = isinstance(policy, Adaptive)
        self.pace_s = 10 ** self._any(-4, -3 if self.calm else -0.5)
        prior = 10 ** self._any(4 if self.calm else 3, 6 if self.calm else 5 if self.orderly else 8)
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
        self.closings: list[int] = []
        self.asked_for: dict[ChunkId, set[int]] = {}
        self.here: dict[ChunkId, int] = {}
        self.held: dict[ChunkId, int] = {}
        self.valid: dict[ChunkId, int] = {}
        self.no_text: set[ChunkId] = set()
        self.no_fetch: set[ChunkId] = set()
        self.more_loads = self.random.choice([1, 1, 1, 2] if self.orderly else [1, 1, 2, 4])
        kind = [0.98, 1.0] if self.orderly else [0.9, 0.95, 1.0] if self.calm else [0.3, 0.8, 0.95, 1.0]
        self.kindness = self.random.choice(kind)
        self.numbers = -1
        self.stopped = None  # the pass that was to stop

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
            interrupts=Random(f"{self.seed} interrupts").random() < 0.5,
        )  # fmt: skip

    def _document(self):
        pick = self.random.choice
        tokens = tuple(self.random.randint(1, 300) for _ in range(self.random.randint(1, 6)))
        text, layered = pick([True, True, self.calm]) and not self.orderly, pick([True, True, False])
        if self.orderly or pick([True, True, True, False]):
            return tuple(self._blob(tokens, text, layered) for _ in range(pick([1, 1, 2])))
        return (DocumentPlanInput(tokens, has_text=text),)

    def _blob(self, tokens, text, layered):
        pick = self.random.choice
        levels = self.random.randint(1, 4)
        scale = pick([0, 1, 10, 100][2 * max(self.calm, self.orderly) :])
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
        objective = pick(["earliest", "quality", "quality", "quality", "cheapest"] + ["earliest"] * 4 * self.orderly)
        if objective == "earliest" and pick([True, False]):
            deadline = None
        floor = pick([0, 0, 1, 2])
        ceiling = pick([None, None, None, floor, floor + 1])
        on_late = pick(["serve", "serve", "refuse"])
        return Goal(objective=objective, deadline_s=deadline, floor=floor, ceiling=ceiling, on_late=on_late)

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
            waits_for_driver = self.open or self.jobs or self.closings or self._unknown()
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
        steps += [self._assemble] * 3 * bool(self.closings)
        steps += [self._index] * 3 * bool(self._unknown()) + [self._bytes] * 2 * bool(self.open)
        steps += [self._stale] * bool(self.stale)
        if not ending:
            steps += [self._ask] * 2 * (len(self.loads) < self.more_loads)
            steps += [self._leave] * (bool(self.loads) and self.random.random() < 0.05)
        if self.orderly and (self._unknown() or self.jobs):
            steps = [self._index if self._unknown() else self._answer_job]
        if not steps or self.random.random() < 0.1:
            steps = [lambda: self._tell(ev.Tick())]
        self.random.choice(steps)()

    def _ask(self):
        self.numbers += self.random.choice([1, 1, 3])
        documents = [self._document() for _ in range(self.random.choice([1, 1, 2, 3][2 * self.orderly :]))]
        pick = self.random.choice
        asked = Asked(self._goal(), documents, looks=pick([True, False]), repair=pick([None, None, *REPAIRS]))
        if asked.repair is None and pick([True, False]):
            asked.links = tuple(pick([0, 1, 5]) for _ in documents)
        self.loads[self.numbers] = asked
        computed = pick([0, 32]) + sum(asked.links)
        self._tell(
            ev.LoadRequested(self.numbers, len(documents), computed, asked.goal, asked.repair, asked.looks, asked.links)
        )

    def _index(self):
        number, document = self.random.choice(self._unknown())
        load = self.loads[number]
        load.known.add(document)
        self._tell(ev.IndexKnown(number, document, load.documents[document]))

    def _leave(self):
        number = self.random.choice(list(self.loads))
        self.over.setdefault(number, "left")
        self.closings = [other for other in self.closings if other != number]
        self._tell(ev.LoadAbandoned(number))

    def _assemble(self):
        """The oldest closing is over, or nobody waits for it any more."""
        number = self.closings.pop(0)
        gone = self.random.random() < 0.1
        self._tell(ev.LoadAbandoned(number) if gone else ev.PromptAssembled(number, 100, self._any(-0.01, 0.02)))

    def _bytes(self):
        if self.random.random() < 0.3:
            self._tell(ev.FirstByte(self._any(0, 0.3)))
            return
        began = max(0.0, self.now - self._any(0, 0.05))
        size = self.random.choice([0, *[int(self.rate * (self.now - began))] * 4, 10**7])
        self._tell(ev.TransferProgress(size, began, self.now))

    def _stale(self):
        fetch = self.stale.pop(self.random.randrange(len(self.stale)))
        event = self.random.choice([ev.ChunkArrived(fetch.chunk, fetch.level), ev.ChunkFailed(fetch.chunk, "gone")])
        before = self._under_way()
        self._tell(event)
        assert before[0] <= self._under_way()[0] or fetch.chunk.load in self.over

    def _under_way(self):
        return set(self.valid), dict(self.open)

    def _answer_fetch(self):
        chunk = next(iter(self.open)) if self.orderly else self.random.choice(list(self.open))
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
        stopped, self.stopped = self.stopped, None if self.stopped is job else self.stopped
        if stopped is job and self.random.random() < 0.8:
            chunks = tuple(replace(job.first, chunk=at) for at in range(job.first.chunk, job.last.chunk + 1))
            self._tell(ev.RecomputeInterrupted(chunks, self._any(0, 1)))
        else:
            self._answer(job)

    def _answer(self, job):
        fine = self.random.random() < self.kindness
        seconds = self.random.choice([0.0, self._any(0, 0.01), self._any(0, 0.1), self._any(0, 5)])
        seconds /= 1000 if self.orderly else 1
        match job:
            case ev.Decode(chunks, levels):
                bad = () if fine else tuple(self.random.sample(chunks, self.random.randint(1, len(chunks))))
                for chunk, level in zip(chunks, levels, strict=True) if chunks[0].load not in self.over else ():
                    self._decoded(chunk, level, bad=chunk in bad)
                self._tell(ev.DecodeFailed(chunks, bad, "checksum") if bad else ev.DecodeDone(chunks, seconds))
            case ev.Recompute(first, last):
                chunks = tuple(replace(first, chunk=at) for at in range(first.chunk, last.chunk + 1))
                bad = self.random.choice(chunks)
                if fine:
                    self.valid |= dict.fromkeys(chunks, -1) if first.load not in self.over else {}
                else:
                    self.no_text.add(bad)
                blind = job.behind and self.random.random() < 0.2
                self._tell(ev.RecomputeDone(chunks, seconds, blind) if fine else ev.RecomputeFailed(bad, "memory"))
            case ev.RecomputeTogether(passes):
                self._answer_together(passes, seconds)
            case ev.Repair(number, documents):
                rows, left = self.random.randint(0, 20), self.random.randint(0, 500)
                self.loads[number].is_broken = not fine
                self._tell(ev.RepairDone(number, documents, rows * fine, left, seconds, "" if fine else "memory"))
            case ev.ComputePrefix(number, document):
                load = self.loads[number]
                load.heads[document] = "done" if fine else "failed"
                if fine:
                    self._tell(ev.PrefixComputed(number, document, seconds))
                else:
                    chunks = range(len(load.documents[document][0].tokens))
                    self.no_fetch |= {ChunkId(document, at, number) for at in chunks}
                    self._tell(ev.PrefixFailed(number, document, "memory"))

            case ev.Look(number):
                rows = [variants[0].tokens for variants in self.loads[number].documents]
                seen = tuple(tuple(self._any(0, 3) for _ in row) for row in rows) if fine else ()
                self._tell(ev.Looked(number, seen, seconds))

    def _answer_together(self, passes, seconds):
        failed, blind = [], []
        for each in passes:
            first, last = each.first, each.last
            chunks = [replace(first, chunk=at) for at in range(first.chunk, last.chunk + 1)]
            if self.random.random() > self.kindness:
                failed.append(ev.RecomputeFailed(self.random.choice(chunks), "memory"))
                self.no_text.add(failed[-1].chunk)
                continue
            blind += [first] * (each.behind and self.random.random() < 0.2)
            self.valid |= dict.fromkeys(chunks, -1) if first.load not in self.over else {}
        joined = self.random.random() < self.kindness
        unfit = tuple(each.first.load for each in passes if self.random.random() > self.kindness)
        for number in unfit:
            self.loads[number].is_unfit = True
        self._tell(ev.RecomputedTogether(passes, seconds, joined, tuple(failed), tuple(blind), unfit))

    def _decoded(self, chunk, level, *, bad):
        if not bad:
            self.valid[chunk] = level
        elif chunk in self.valid:
            self.here[chunk] = self.valid.pop(chunk)
            self.held[chunk] = self._sizes(chunk)[self.here[chunk]]
        else:
            self.held[chunk] = 0
            del self.here[chunk]
            self.no_fetch.add(chunk)

    def _break_a_rule(self):
        """An event that cannot be raises and changes nothing."""
        nobody = ChunkId(0, 0, max(self.loads, default=-1) + 1)
        wrong = [*self._of_no_load(nobody), *self._of_loads(), *self._of_work(nobody)]
        before = fingerprint(self.controller)
        event, moment = self.random.choice(wrong), self.now
        if self.random.random() < 0.2:
            event, moment = ev.Tick(), self.random.choice([nan, inf, self.log[-1].now - 1 if self.log else nan])
        with pytest.raises(ArgumentError):
            self.controller.handle(event, moment)
        assert fingerprint(self.controller) == before, event

    def _of_no_load(self, nobody):
        """Events of what is not there, and numbers that cannot be."""
        number = nobody.load
        return [
            ev.LoadAbandoned(number), ev.ChunkArrived(nobody, 0), ev.ChunkFailed(nobody, ""),
            ev.IndexKnown(number, 0, ()),
            ev.DecodeDone((), 0.1), ev.DecodeDone((nobody,), 0.1), ev.DecodeFailed((nobody,), (), ""),
            ev.RecomputeDone((nobody,), 0.1), ev.RecomputeDone((), 0.1), ev.RecomputeFailed(nobody, ""),
            ev.RecomputeInterrupted((nobody,), 0.1), ev.RecomputeInterrupted((), 0.1),
            ev.PrefixComputed(number, 0, 0.1), ev.PrefixFailed(number, 0, ""), ev.FirstByte(nan),
            ev.Looked(number, (), 0.1), ev.FirstByte(-1.0),
            ev.TransferProgress(-1, 0.0, 0.0), ev.TransferProgress(1, 1.0, 0.0),
            ev.TransferProgress(1, nan, 0.0), ev.TransferProgress(1, 0.0, inf), ev.TransferProgress(nan, 0.0, 0.0),
            ev.LoadRequested(number, 0, 0, Goal()), ev.LoadRequested(number, 1, -1, Goal()),
            ev.LoadRequested(number, 2, 8, Goal(), links=(1,)), ev.LoadRequested(number, 2, 8, Goal(), links=(5, 5)),
            ev.LoadRequested(number, 2, 8, Goal(), links=(-5, 10)),
            ev.RepairDone(number, 1, 0, 0, 0.1), ev.RecomputedTogether((), 0.1),
        ]  # fmt: skip

    def _of_loads(self):
        """Events that loads have had, or that are of other documents and chunks than theirs."""
        wrong = []
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
        return wrong

    def _of_work(self, nobody):
        """Outcomes of open fetches and running jobs that cannot be."""
        wrong = []
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
            elif isinstance(job, ev.Look):
                rows = [len(variants[0].tokens) for variants in self.loads[job.load].documents]
                wrong += [ev.Looked(job.load, (), nan), ev.Looked(job.load + 1, (), 0.1)]
                if job.load not in self.over:
                    wrong += [ev.Looked(job.load, ((1.0,) * (rows[0] + 1), *((1.0,) * row for row in rows[1:])), 0.1)]
                    wrong += [ev.Looked(job.load, tuple((-1.0,) * row for row in rows), 0.1)]
            elif isinstance(job, ev.Repair):
                wrong += [
                    ev.RepairDone(job.load, job.documents + 1, 1, 1, 0.1),
                    ev.RepairDone(job.load, job.documents, 1, 1, nan),
                    ev.RepairDone(job.load, job.documents, -1, 1, 0.1),
                    ev.RepairDone(job.load, job.documents, 1, -1, 0.1),
                ]
            elif isinstance(job, ev.RecomputeTogether):
                wrong += [ev.RecomputedTogether(job.passes[:1], 0.1), ev.RecomputedTogether(job.passes, nan)]
                wrong += [ev.RecomputedTogether(job.passes, 0.1, failed=(ev.RecomputeFailed(nobody, ""),))]
                wrong += [ev.RecomputedTogether(job.passes, 0.1, unfit=(nobody.load,))]
                wrong += [ev.RecomputedTogether(job.passes, 0.1, blind=(nobody,))]
                wrong += [ev.RecomputeDone((job.passes[0].first,), 0.1)]
            else:
                wrong += [ev.RecomputeDone((job.first,) * 2, 0.1), ev.RecomputeDone((job.first,), nan)]
        return wrong
