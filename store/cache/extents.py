"""What is known of objects' bytes: which are there, which are on their way, and what a full tier gives up.

No locks and no I/O: the cache calls all of it under its lock.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from kvwire.errors import ArgumentError, AuthError, NotFoundError
from kvwire.store.cache.settings import TierCounters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.errors import KvwireError
    from kvwire.store.base import Data

T = TypeVar("T")
_FINAL = (ArgumentError, AuthError, NotFoundError)  # asking again gives the same answer
_MOST_FAILURES = 2
_PROTECTED_SHARE = 0.8  # of the budget, for what was used again; the rest lets what is new show that it will be


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


class SegmentedLru:
    """What was used once goes before what was used again, so that reading much once costs no hits.

    Source: Karedla, Love and Wherry (IEEE Computer 27/3, 1994), here by bytes.
    """

    def __init__(self, budget_bytes: int) -> None:
        """Hold nothing."""
        self.bytes = 0
        self._once: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._again: OrderedDict[bytes, int] = OrderedDict()
        self._again_bytes = 0
        self._most_again_bytes = int(budget_bytes * _PROTECTED_SHARE)

    def touched(self, name: bytes) -> None:
        """An object is used, held or not."""
        if name in self._again:
            self._again.move_to_end(name)
        elif name in self._once:
            self._again[name] = self._once.pop(name)
            self._again_bytes += self._again[name]
            self._demote()

    def resize(self, name: bytes, change: int) -> None:
        """More or less is held of an object; one that is new begins at 0, and one that ends there is gone."""
        segment = self._again if name in self._again else self._once
        size = segment.pop(name, 0) + change
        if size:
            segment[name] = size
        self.bytes += change
        if segment is self._again:
            self._again_bytes += change
            self._demote()

    def evict(self) -> bytes:
        """Give up the object that goes first."""
        name = next(iter(self._once or self._again))
        self.resize(name, -(self._once or self._again)[name])
        return name

    def _demote(self) -> None:
        while self._again_bytes > self._most_again_bytes:
            name, size = self._again.popitem(last=False)
            self._once[name] = size
            self._again_bytes -= size


class TierIndex(Generic[T]):
    """Extents of objects by name, their bytes, and the order in which objects go."""

    def __init__(self, budget_bytes: int, extent_bytes: int) -> None:
        """Start empty."""
        self._budget_bytes = budget_bytes
        self._order = SegmentedLru(budget_bytes)
        self._extent_bytes = extent_bytes
        self._maps: dict[bytes, ExtentMap[T]] = {}
        self._extents = 0
        self.counters = TierCounters()

    def counted(self) -> TierCounters:
        """A copy of the counters, with what is held now."""
        held = {"held_bytes": self._order.bytes, "objects": len(self._maps), "extents": self._extents}
        return replace(self.counters, **held)

    def touched(self, name: bytes) -> None:
        """An object is used, held or not."""
        self._order.touched(name)

    def of(self, name: bytes) -> ExtentMap[T]:
        """The extents of an object, to look at."""
        return self._maps.get(name) or ExtentMap()

    def all(self) -> Iterator[tuple[bytes, Extent[T]]]:
        """Everything held, object by object."""
        return ((name, extent) for name, extents in self._maps.items() for extent in extents)

    def fits(self, length: int) -> bool:
        """Whether an extent could be held at all."""
        return length + self._extent_bytes <= self._budget_bytes

    def add(self, name: bytes, start: int, end: int, value: T) -> Extent[T]:
        """Hold an extent where there is a gap; the tier may be over its budget afterwards."""
        extent = self._maps.setdefault(name, ExtentMap()).add(start, end, value)
        self._order.resize(name, extent.length + self._extent_bytes)
        self._extents += 1
        return extent

    def remove(self, name: bytes, extent: Extent[T]) -> bool:
        """Hold this very extent no longer."""
        found = self._maps.get(name)
        if found is None or not found.remove(extent):
            return False
        self._extents -= 1
        if not found:
            del self._maps[name]
        self._order.resize(name, -extent.length - self._extent_bytes)
        return True

    def overflow(self) -> Iterator[tuple[bytes, Extent[T]]]:
        """Give up objects until the rest fits; gives the extents, removed, as they go."""
        while self._order.bytes > self._budget_bytes:
            victim = self._order.evict()
            extents = self._maps.pop(victim)
            self._extents -= len(extents)
            self.counters.evictions += len(extents)
            for extent in extents:
                yield victim, extent
