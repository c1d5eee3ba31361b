"""The compute that all loads share: a worker for forward passes and one for decoding, or one for both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import TYPE_CHECKING, Literal

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from kvwire.types import ChunkId

Worker = Literal["prefill", "decode"]

NOTICED = 1.5
"""Factor off what was expected that is more than noise: of a link where samples repeat it, of a forward pass."""


@dataclass(frozen=True, eq=False)
class Job:
    """What a worker does; ``others``: the passes of other loads that run with it as rows of one."""

    kind: Literal["decode", "recompute", "joined", "head start", "look", "repair", "closing"]
    load: int
    document: int
    chunks: tuple[ChunkId, ...]
    began: float
    expected_s: float
    tokens: int = 0  # of a decode in several threads: of the busiest one, as ``size`` is
    context: int = 0
    size: int = 0
    levels: tuple[int, ...] = ()
    repair_s: float = 0.0  # of a closing: what passes of as many tokens as are repaired should take
    behind: bool = False  # it reads the documents before its own, too
    others: tuple[Job, ...] = ()

    @property
    def passes(self) -> tuple[Job, ...]:
        """Itself and those it is joined with."""
        return (self, *self.others)

    @property
    def overdue_at(self) -> float:
        """Instant from which on it takes so long that the engine must be slow."""
        return self.began + NOTICED * self.expected_s

    def slowness(self, now: float) -> float:
        """How many times as long as expected it takes at least; 1 where it is not overdue."""
        overdue = self.expected_s > 0 and now >= self.overdue_at
        return max(1.0, (now - self.began) / self.expected_s) if overdue else 1.0


def check_seconds(seconds: float) -> None:
    """Refuse what no clock measures."""
    if not (isfinite(seconds) and seconds >= 0):
        raise ArgumentError(f"a measured time must be a finite number of seconds, at least 0, got {seconds}")


class Workers:
    """At most one job on each worker; then closings, which link a ready prompt and run its question, in turn."""

    def __init__(self, count: int, patience_s: float) -> None:
        """Start idle; an engine counts as slow for ``patience_s`` after a pass that was stopped for that."""
        self._count, self._patience_s = count, patience_s
        self._jobs: dict[Worker, Job] = {}
        self.closings: dict[int, Job] = {}
        self._closing_since: float | None = None  # when the first of them began
        self._interrupted: Job | None = None  # it runs, and was asked to stop
        self._slow, self._slow_until = 1.0, -inf  # of a pass that was stopped, while nothing else is known

    def is_free(self, worker: Worker) -> bool:
        """Whether a job could begin."""
        if self._count > 1:
            return worker not in self._jobs and (worker == "decode" or not self.closings)
        return not self._jobs and not self.closings

    def start(self, worker: Worker, job: Job) -> None:
        """Begin a job on a free worker."""
        self._jobs[worker] = job

    def end(self, worker: Worker, kind: str, chunks: tuple[ChunkId, ...], load: int, document: int, now: float) -> Job:
        """End a worker's job."""
        job = self._jobs.get(worker)
        if job is None or (job.kind, job.chunks, job.load, job.document) != (kind, chunks, load, document):
            what = chunks or f"document {document} of load {load}"
            msg = f"no {kind} of {what} is running; report each instruction's outcome once, with exactly its chunks"
            raise ArgumentError(msg)
        del self._jobs[worker]
        self._begin_closing(now)
        if worker == "prefill":
            slowness = job.slowness(now)
            if job is self._interrupted and slowness > 1:
                self._slow, self._slow_until = slowness, now + self._patience_s
            elif job is not self._interrupted and slowness == 1:
                self._slow_until = -inf
            self._interrupted = None
        return job

    def running(self, worker: Worker) -> Job | None:
        """A worker's job."""
        return self._jobs.get(worker)

    def paused(self, seconds: float) -> None:
        """Take running jobs for begun later: the driver was blocked, and they may be over."""
        for worker, job in self._jobs.items():
            self._jobs[worker] = later = replace(job, began=job.began + seconds)
            if self._interrupted is job:
                self._interrupted = later
        if self._closing_since is not None:
            self._closing_since += seconds

    def close(self, job: Job) -> None:
        """Begin a load's closing, behind what runs."""
        self.closings[job.load] = job
        self._begin_closing(job.began)

    def _begin_closing(self, now: float) -> None:
        runs = self._jobs if self._count == 1 else "prefill" in self._jobs
        if self.closings and not runs and self._closing_since is None:
            self._closing_since = now

    def closed(self, load: int, now: float) -> None:
        """End a load's closing, if there is one."""
        first = next(iter(self.closings), None) == load
        self.closings.pop(load, None)
        if first:
            self._closing_since = None
            self._begin_closing(now)

    def interrupt(self) -> Job:
        """Ask the forward pass that runs to stop."""
        self._interrupted = job = self._jobs["prefill"]
        return job

    @property
    def is_interrupted(self) -> bool:
        """Whether the running forward pass was asked to stop."""
        return self._interrupted is not None

    def was_interrupted(self, now: float) -> bool:
        """Whether a pass was stopped a short while ago, and none has kept its time since."""
        return now < self._slow_until

    def slowness(self, now: float) -> float:
        """How many times as long as expected passes take; 1 where the running one is not overdue."""
        job = self._jobs.get("prefill")
        return max(job.slowness(now) if job else 1.0, self._slow if self.was_interrupted(now) else 1.0)

    def left_s(self, worker: Worker, now: float) -> float:
        """Seconds that a worker is still busy; an overdue job is taken to last as long as it is overdue."""
        job = self._jobs.get(worker)
        left_s = abs(job.expected_s - (now - job.began)) if job else 0.0
        if worker == "prefill" and self.closings:
            first, *others = (closing.expected_s for closing in self.closings.values())
            since = self._closing_since
            left_s += sum(others) + (first if since is None else abs(first - (now - since)))
        return left_s
