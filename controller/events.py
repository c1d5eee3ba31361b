"""What happens to a load and what it asks for: events go in, instructions come out. Plain data, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from kvwire.types import ChunkId, Decision


@dataclass(frozen=True)
class Started:
    """The first event. deadline_s: seconds from now until the first token is due, or None."""

    deadline_s: float | None = None


@dataclass(frozen=True)
class FirstByte:
    """A request's first byte came, ``seconds`` after the request."""

    seconds: float


@dataclass(frozen=True)
class TransferProgress:
    """Bytes came between two instants of the session's clock.

    started: the first byte's arrival, or the end of this request's last report; never the sending of the request.
    Report several times within the session's ``stall_s``. chunk: whose bytes; None: the oldest open request's.
    """

    bytes: int
    started: float
    ended: float
    chunk: ChunkId | None = None


@dataclass(frozen=True)
class ChunkArrived:
    """All bytes of a chunk's levels 0..level are here and sound."""

    chunk: ChunkId
    level: int


@dataclass(frozen=True)
class ChunkFailed:
    """A chunk's fetch is given up: missing, corrupt, or the link is gone."""

    chunk: ChunkId
    reason: str


@dataclass(frozen=True)
class DecodeDone:
    """A chunk is decoded, in ``seconds`` of compute."""

    chunk: ChunkId
    seconds: float


@dataclass(frozen=True)
class DecodeFailed:
    """A chunk's bytes cannot be decoded."""

    chunk: ChunkId
    reason: str


@dataclass(frozen=True)
class RecomputeDone:
    """A forward pass over the instruction's chunks ended, after ``seconds`` of compute."""

    chunks: tuple[ChunkId, ...]
    seconds: float


@dataclass(frozen=True)
class RecomputeFailed:
    """A forward pass failed as a whole; ``chunk`` of it is not to be recomputed again."""

    chunk: ChunkId
    reason: str


@dataclass(frozen=True)
class Tick:
    """Time has passed: send one every 50 ms or so while fetches are open, so that a silent link is noticed."""


@dataclass(frozen=True)
class Fetch:
    """Fetch levels 0..level of a chunk. ``bytes`` of them."""

    chunk: ChunkId
    level: int
    bytes: int


@dataclass(frozen=True)
class Decode:
    """Decode an arrived chunk."""

    chunk: ChunkId
    level: int


@dataclass(frozen=True)
class Recompute:
    """Compute chunks first..last of one document in one forward pass; what is before them in it is ready."""

    first: ChunkId
    last: ChunkId


@dataclass(frozen=True)
class Cancel:
    """Stop a fetch; whatever is still reported about it is ignored."""

    chunk: ChunkId


@dataclass(frozen=True)
class Finish:
    """All chunks are ready. decisions: what was done, in prompt order."""

    decisions: tuple[Decision, ...]
    reason: str


@dataclass(frozen=True)
class Fail:
    """The prompt cannot be made ready: a chunk can neither be fetched nor recomputed."""

    reason: str


Event: TypeAlias = (
    Started
    | FirstByte
    | TransferProgress
    | ChunkArrived
    | ChunkFailed
    | DecodeDone
    | DecodeFailed
    | RecomputeDone
    | RecomputeFailed
    | Tick
)
Instruction: TypeAlias = Fetch | Decode | Recompute | Cancel | Finish | Fail


@dataclass(frozen=True)
class LogEntry:
    """One call of ``LoadSession.handle``: enough of them replay a load."""

    now: float
    event: Event
    instructions: tuple[Instruction, ...]
