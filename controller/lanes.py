"""The compute that all loads share: a prefill lane and a decode lane, or one worker for both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import TYPE_CHECKING, Literal

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from kvwire.types import ChunkId

Lane = Literal["prefill", "decode"]

OVERDUE = 1.5
"""Times what was expected: a forward pass that takes longer tells of a slow engine."""
_SLOW_S = 3.0  # for so long an engine counts as slow after a pass that was stopped for that


@dataclass(frozen=True, eq=False)
class Job:
    """What a lane does.

    Attributes:
        kind: What is done.
        load: Number of the load.
        document: Number of the document in the prompt.
        chunks: Which ones; none for prefix layers.
        began: When it began.
        expected_s: By the estimates when it began.
        tokens: Of it all, and of a decode in several threads of the busiest one's share.
        context: Tokens before them, likewise.
        size: Bytes, likewise.
        repair_s: Of a closing: what passes of as many tokens as are repaired should take.
        levels: Of a decode, up to which its chunks are decoded.
        behind: It reads the documents before its own, too.
        others: Of a joined pass, those of the other loads; ``expected_s`` is then that of the whole pass.
    """

    kind: Literal["decode", "recompute", "joined", "head start", "look", "repair", "closing"]
    load: int
    document: int
    chunks: tuple[ChunkId, ...]
    began: float
    expected_s: float
    tokens: int = 0
    context: int = 0
    size: int = 0
    levels: tuple[int, ...] = ()
    repair_s: float = 0.0
    behind: bool = False
    others: tuple[Job, ...] = ()

    @property
    def passes(self) -> tuple[Job, ...]:
        """Itself and those it is joined with."""
        return (self, *self.others)

    def left_s(self, now: float) -> float:
        """Seconds that it should still take; of one that is overdue nothing is known but for how long."""
        return abs(self.expected_s - (now - self.began))

    @property
    def overdue_at(self) -> float:
        """Instant from which on it takes so much longer than expected that this tells of a slow engine."""
        return self.began + OVERDUE * self.expected_s

    def slowness(self, now: float) -> float:
        """How many times as long as expected it takes at least; 1 where it is not overdue."""
        # As in ``overdue_at``, at which somebody looks: the ratio might round otherwise.
        overdue = self.expected_s > 0 and now >= self.overdue_at
        return max(1.0, (now - self.began) / self.expected_s) if overdue else 1.0


def check_seconds(seconds: float) -> None:
    """Refuse what no clock measures."""
    if not (isfinite(seconds) and seconds >= 0):
        msg = f"a measured time must be a finite number of seconds, at least 0, got {seconds}"
        raise ArgumentError(msg)


class ComputeLanes:
    """At most one job on each lane, and with one worker at most one in all; then closings, in the order they came.

    A closing links a prompt that is ready and runs its question, on the lane for forward passes. It begins as soon as
    what runs there is over.
    """

    def __init__(self, workers: int) -> None:
        """Start idle."""
        self._workers = workers
        self._jobs: dict[Lane, Job] = {}
        self.closings: dict[int, Job] = {}
        self._closing_since: float | None = None  # when the first of them began
        self._interrupted: Job | None = None  # it runs, and was asked to stop
        self._slow, self._slow_until = 1.0, -inf  # the last pass that was stopped, until another one has kept its time

    def is_free(self, lane: Lane) -> bool:
        """Whether a job could begin."""
        if self._workers == 2:  # noqa: PLR2004 - a lane each
            return lane not in self._jobs and (lane == "decode" or not self.closings)
        return not self._jobs and not self.closings

    def paused(self, seconds: float) -> None:
        """Take jobs that run for begun later: nobody listened for a while, and they may be over."""
        for lane, job in self._jobs.items():
            self._jobs[lane] = later = replace(job, began=job.began + seconds)
            if self._interrupted is job:
                self._interrupted = later
        if self._closing_since is not None:
            self._closing_since += seconds

    def close(self, job: Job) -> None:
        """Begin a load's closing, behind what runs."""
        self.closings[job.load] = job
        self._begin_closing(job.began)

    def _begin_closing(self, now: float) -> None:
        runs = self._jobs if self._workers == 1 else "prefill" in self._jobs
        if self.closings and not runs and self._closing_since is None:
            self._closing_since = now

    def closed(self, load: int, now: float) -> bool:
        """End a load's closing, if there is one."""
        first = next(iter(self.closings), None) == load
        known = self.closings.pop(load, None) is not None
        if first:
            self._closing_since = None
            self._begin_closing(now)
        return known

    def start(self, lane: Lane, job: Job) -> None:
        """Begin a job on a free lane."""
        self._jobs[lane] = job

    def end(self, lane: Lane, kind: str, chunks: tuple[ChunkId, ...], load: int, document: int, now: float) -> Job:
        """End a lane's job."""
        job = self._jobs.get(lane)
        if job is None or (job.kind, job.chunks, job.load, job.document) != (kind, chunks, load, document):
            what = chunks or f"document {document} of load {load}"
            msg = f"no {kind} of {what} is running; report each instruction's outcome once, with exactly its chunks"
            raise ArgumentError(msg)
        del self._jobs[lane]
        self._begin_closing(now)
        if lane == "prefill":
            self._note_pace(job, now)
        return job

    def _note_pace(self, job: Job, now: float) -> None:
        """Remember how slow a job was that was asked to stop, until another one has kept its time."""
        if job is self._interrupted:
            self._interrupted = None
            if job.slowness(now) > 1:  # else nobody waited for it any more
                self._slow, self._slow_until = job.slowness(now), now + _SLOW_S
        elif job.slowness(now) == 1:
            self._slow_until = -inf

    def interrupt(self) -> Job:
        """Ask the forward pass that runs to stop."""
        job = self._jobs.get("prefill")
        if job is None:
            msg = "no forward pass is running that could be stopped"
            raise ArgumentError(msg)
        self._interrupted = job
        return job

    @property
    def is_interrupted(self) -> bool:
        """Whether the job on the lane for forward passes was asked to stop."""
        return self._interrupted is not None and self._jobs.get("prefill") is self._interrupted

    def was_interrupted(self, now: float) -> bool:
        """Whether a pass was stopped a short while ago, and none has kept its time since."""
        return now < self._slow_until

    def running(self, lane: Lane) -> Job | None:
        """A lane's job."""
        return self._jobs.get(lane)

    def left_s(self, lane: Lane, now: float) -> float:
        """Seconds that a lane is still busy."""
        job = self._jobs.get(lane)
        left_s = job.left_s(now) if job else 0.0
        if lane == "prefill" and self.closings:
            first, *others = (closing.expected_s for closing in self.closings.values())
            since = self._closing_since
            left_s += sum(others) + (first if since is None else abs(first - (now - since)))
        return left_s

    def slowness(self, now: float) -> float:
        """How many times as long as expected the pass takes that runs, or that was stopped; 1 where none is overdue."""
        job = self._jobs.get("prefill")
        return max(job.slowness(now) if job else 1.0, self._slow if self.was_interrupted(now) else 1.0)
