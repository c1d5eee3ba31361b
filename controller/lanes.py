"""The compute that all loads share: a prefill lane and a decode lane, or one worker for both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from kvwire.types import ChunkId

Lane = Literal["prefill", "decode"]


@dataclass(frozen=True, eq=False)
class Job:
    """What a lane does.

    tokens, context, size (bytes): of it all, and of a decode in several threads of the busiest one's share.

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
    """

    kind: Literal["decode", "recompute", "head start"]
    load: int
    document: int
    chunks: tuple[ChunkId, ...]
    began: float
    expected_s: float
    tokens: int = 0
    context: int = 0
    size: int = 0

    def left_s(self, now: float) -> float:
        """Seconds that it should still take."""
        return max(0.0, self.expected_s - (now - self.began))


class ComputeLanes:
    """At most one job on each lane, and with one worker at most one in all."""

    def __init__(self, workers: int) -> None:
        """Start idle.

        Args:
            workers: 1: the lanes take turns; 2: they work side by side.
        """
        self._workers = workers
        self._jobs: dict[Lane, Job] = {}

    def is_free(self, lane: Lane) -> bool:
        """Whether a job could begin."""
        return lane not in self._jobs if self._workers == 2 else not self._jobs  # noqa: PLR2004 - a lane each

    def start(self, lane: Lane, job: Job) -> None:
        """Begin a job on a free lane.

        Args:
            lane: Which lane.
            job: What it does.
        """
        self._jobs[lane] = job

    def end(self, lane: Lane, kind: str, chunks: tuple[ChunkId, ...], load: int, document: int) -> Job:
        """End a lane's job.

        Args:
            lane: Which lane.
            kind: What was done.
            chunks: Which chunks.
            load: Number of the load.
            document: Number of the document in the prompt.

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
        return self._jobs.pop(lane)

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
        return job.left_s(now) if job else 0.0
