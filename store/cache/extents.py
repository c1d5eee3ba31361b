"""Which byte ranges of one object are there: sorted, non-overlapping intervals, without I/O and without locks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Extent(Generic[T]):
    """A stretch of an object.

    Attributes:
        start: First byte.
        end: The byte after the last.
        value: Whatever stands for the bytes.
    """

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
            msg = f"an extent from {start} to {end} is empty or overlaps another: add the gaps alone"
            raise ArgumentError(msg)
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
