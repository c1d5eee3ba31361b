"""What is known of an object's bytes: which are there, and which are on their way.

No locks and no I/O: the cache calls all of it under its lock.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, bisect_right
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from kvwire.errors import ArgumentError, AuthError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.errors import KvwireError
    from kvwire.store.base import Data

T = TypeVar("T")
_FINAL = (ArgumentError, AuthError, NotFoundError)  # asking again gives the same answer
_MOST_FAILURES = 2


@dataclass(frozen=True, eq=False)
class Extent(Generic[T]):
    """A stretch of an object, from ``start`` to before ``end``; ``value`` stands for the bytes."""

    start: int
    end: int
    value: T

    @property
    def length(self) -> int:
        """Number of bytes."""
        return self.end - self.start


class ExtentMap(Generic[T]):
    """The extents of one object in one place: in memory, on the disk, or on their way."""

    def __init__(self) -> None:
        """Start empty."""
        self._starts: list[int] = []
        self._extents: list[Extent[T]] = []

    def __len__(self) -> int:
        """Number of extents."""
        return len(self._extents)

    def __iter__(self) -> Iterator[Extent[T]]:
        """Extents in ascending order."""
        return iter(self._extents)

    @property
    def end(self) -> int:
        """Where the last extent ends; 0 without any."""
        return self._extents[-1].end if self._extents else 0

    def at(self, position: int) -> Extent[T] | None:
        """The extent that holds a byte."""
        index = bisect_right(self._starts, position) - 1
        if index < 0 or self._extents[index].end <= position:
            return None
        return self._extents[index]

    def next_start(self, position: int) -> int | None:
        """Where the next extent starts."""
        index = bisect_right(self._starts, position)
        return self._starts[index] if index < len(self._starts) else None

    def overlapping(self, start: int, end: int | None = None) -> list[Extent[T]]:
        """Extents that hold any byte of a range."""
        first = max(0, bisect_right(self._starts, start) - 1)
        last = len(self._starts) if end is None else bisect_left(self._starts, end)
        return [extent for extent in self._extents[first:last] if extent.end > start]

    def gaps(self, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of a range that no extent holds."""
        found = []
        for extent in self.overlapping(start, end):
            if extent.start > start:
                found.append((start, extent.start))
            start = extent.end
        if start < end:
            found.append((start, end))
        return found

    def add(self, start: int, end: int, value: T) -> Extent[T]:
        """Add an extent."""
        index = bisect_left(self._starts, start)
        follows = index == 0 or self._extents[index - 1].end <= start
        precedes = index == len(self._starts) or end <= self._starts[index]
        if not (0 <= start < end and follows and precedes):
            raise ArgumentError(f"an extent from {start} to {end} is empty or overlaps another: add the gaps alone")
        extent = Extent(start, end, value)
        self._starts.insert(index, start)
        self._extents.insert(index, extent)
        return extent

    def remove(self, extent: Extent[T]) -> bool:
        """Remove this very extent."""
        index = bisect_left(self._starts, extent.start)
        if index == len(self._starts) or self._extents[index] is not extent:
            return False
        del self._starts[index], self._extents[index]
        return True


class InflightRead:
    """A range that one reader fetches; the cache alone changes its state, and ``done`` resolves in every case."""

    def __init__(self, name: bytes, start: int, end: int, owner: object, limit_s: float, *, background: bool) -> None:
        """Nothing has come yet."""
        self.name = name
        self.start = start
        self.end = end
        self.owner = owner
        self.limit_s = limit_s
        self.background = background
        self.done: Future[None] = Future()  # serves threads and event loops; no reader that waits can cancel it
        self.done.set_running_or_notify_cancel()
        self.pieces: list[Data] = []
        self.position = start
        self.data = b""
        self.error: KvwireError | None = None
        self.stale = False
        """Its bytes may be given on, but not kept: they were deleted, replaced or found wrong meanwhile."""

    def feed(self, piece: Data) -> None:
        """Take the leader's next bytes."""
        self.pieces.append(piece)
        self.position += len(piece)

    def since(self, position: int) -> Iterator[memoryview]:
        """What has come from a position on; may be asked while more comes in."""
        at = self.start
        for piece in [self.data] if self.data else list(self.pieces):
            if at + len(piece) > position:
                yield memoryview(piece)[max(0, position - at) :]
            at += len(piece)

    def verdict(self, failures: int) -> KvwireError | None:
        """The error for a reader that waited; None where it may try for itself."""
        # After the second failure it is shared, or a thousand readers would wait for a dead server one after the other.
        if self.error is None or (failures < _MOST_FAILURES and not isinstance(self.error, _FINAL)):
            return None
        return copy.copy(self.error)  # one exception raised in many places would gather all their tracebacks
