"""The compute that all loads share: a prefill lane and a decode lane, or one worker for both."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Literal

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from kvwire.types import ChunkId

Lane = Literal["prefill", "decode"]


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

    def slowness(self, now: float) -> float:
        """How many times as long as expected it takes at least."""
        return max(1.0, (now - self.began) / self.expected_s) if self.expected_s > 0 else 1.0


def check_seconds(seconds: float) -> None:
    """Refuse what no clock measures.

    Args:
        seconds: That something took.

    Raises:
        ArgumentError: It is not finite, or below 0.
    """
    if not (isfinite(seconds) and seconds >= 0):
        msg = f"a measured time must be a finite number of seconds, at least 0, got {seconds}"
        raise ArgumentError(msg)


class ComputeLanes:
    """At most one job on each lane, and with one worker at most one in all; then closings, in the order they came.

    A closing links a prompt that is ready and runs its question, on the lane for forward passes. It begins as soon as
    what runs there is over.
    """

    def __init__(self, workers: int) -> None:
        """Start idle.

        Args:
            workers: 1: the lanes take turns; 2: they work side by side.
        """
        self._workers = workers
        self._jobs: dict[Lane, Job] = {}
        self.closings: dict[int, Job] = {}
        self._closing_since: float | None = None  # when the first of them began

    def is_free(self, lane: Lane) -> bool:
        """Whether a job could begin."""
        if self._workers == 2:  # noqa: PLR2004 - a lane each
            return lane not in self._jobs and (lane == "decode" or not self.closings)
        return not self._jobs and not self.closings

    def close(self, job: Job) -> None:
        """Begin a load's closing, behind what runs.

        Args:
            job: The closing.
        """
        self.closings[job.load] = job
        self._begin_closing(job.began)

    def _begin_closing(self, now: float) -> None:
        runs = self._jobs if self._workers == 1 else "prefill" in self._jobs
        if self.closings and not runs and self._closing_since is None:
            self._closing_since = now

    def closed(self, load: int, now: float) -> bool:
        """End a load's closing, if there is one.

        Args:
            load: Number of the load.
            now: The instant, in seconds of the controller's clock.

        Returns:
            Whether there was one.
        """
        first = next(iter(self.closings), None) == load
        known = self.closings.pop(load, None) is not None
        if first:
            self._closing_since = None
            self._begin_closing(now)
        return known

    def start(self, lane: Lane, job: Job) -> None:
        """Begin a job on a free lane.

        Args:
            lane: Which lane.
            job: What it does.
        """
        self._jobs[lane] = job

    def end(self, lane: Lane, kind: str, chunks: tuple[ChunkId, ...], load: int, document: int, now: float) -> Job:
        """End a lane's job.

        Args:
            lane: Which lane.
            kind: What was done.
            chunks: Which chunks.
            load: Number of the load.
            document: Number of the document in the prompt.
            now: The instant, in seconds of the controller's clock.

        Returns:
            The job.

        Raises:
            ArgumentError: The lane does not run exactly this job.
        """
        job = self._jobs.get(lane)
        if job is None or (job.kind, job.chunks, job.load, job.document) != (kind, chunks, load, document):
            what = chunks or f"document {document} of load {load}"
            msg = f"no {kind} of {what} is running; report each instruction's outcome once, with exactly its chunks"
            raise ArgumentError(msg)
        del self._jobs[lane]
        self._begin_closing(now)
        return job

    def running(self, lane: Lane) -> Job | None:
        """A lane's job."""
        return self._jobs.get(lane)

    def left_s(self, lane: Lane, now: float) -> float:
        """Seconds that a lane is still busy.

        Args:
            lane: Which lane.
            now: The instant, in seconds of the controller's clock.

        Returns:
            Seconds; 0 for an idle lane.
        """
        job = self._jobs.get(lane)
        left_s = job.left_s(now) if job else 0.0
        if lane == "prefill" and self.closings:
            first, *others = (closing.expected_s for closing in self.closings.values())
            since = self._closing_since
            left_s += sum(others) + (first if since is None else abs(first - (now - since)))
        return left_s

    def slowness(self, now: float) -> float:
        """How many times as long as expected the forward pass that runs takes; 1 where none is overdue."""
        job = self._jobs.get("prefill")
        return job.slowness(now) if job else 1.0
