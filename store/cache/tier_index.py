"""What one tier holds, and what it gives up when that is too much. No I/O; used under the cache's lock."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

from kvwire.store.cache.counters import TierCounters
from kvwire.store.cache.extents import Extent, ExtentMap
from kvwire.store.cache.tinylfu import WindowTinyLfu

if TYPE_CHECKING:
    from collections.abc import Iterator


T = TypeVar("T")


class TierIndex(Generic[T]):
    """Extents of objects by name, their bytes, and the eviction policy over the objects (W-TinyLFU)."""

    def __init__(self, budget_bytes: int, extent_bytes: int) -> None:
        """Start empty."""
        self._budget_bytes = budget_bytes
        self._policy = WindowTinyLfu(budget_bytes)
        self._extent_bytes = extent_bytes
        self._maps: dict[bytes, ExtentMap[T]] = {}
        self._sizes: dict[bytes, int] = {}
        self._held_bytes = 0
        self._extents = 0
        self.counters = TierCounters()

    def counted(self) -> TierCounters:
        """A copy of the counters, with what is held now."""
        held = {"held_bytes": self._held_bytes, "objects": len(self._maps), "extents": self._extents}
        return replace(self.counters, **held)

    def touched(self, name: bytes) -> None:
        """An object is used, held or not."""
        self._policy.touched(name)

    def at(self, name: bytes, position: int) -> Extent[T] | None:
        """The extent that holds a byte."""
        found = self._maps.get(name)
        return found.at(position) if found else None

    def next_start(self, name: bytes, position: int) -> int | None:
        """Where the next extent starts."""
        found = self._maps.get(name)
        return found.next_start(position) if found else None

    def gaps(self, name: bytes, start: int, end: int) -> list[tuple[int, int]]:
        """Parts of a range that are not held."""
        found = self._maps.get(name)
        return found.gaps(start, end) if found else [(start, end)]

    def overlapping(self, name: bytes, start: int, end: int | None) -> list[Extent[T]]:
        """Extents that hold any byte of a range."""
        found = self._maps.get(name)
        return found.overlapping(start, end) if found else []

    def all(self) -> Iterator[tuple[bytes, Extent[T]]]:
        """Everything held, object by object."""
        return ((name, extent) for name, extents in self._maps.items() for extent in extents)

    def fits(self, length: int) -> bool:
        """Whether an extent could be held at all."""
        return length + self._extent_bytes <= self._budget_bytes

    def add(self, name: bytes, start: int, end: int, value: T) -> Extent[T]:
        """Hold an extent where there is a gap; the tier may be over its budget afterwards."""
        extent = self._maps.setdefault(name, ExtentMap()).add(start, end, value)
        self._resize(name, extent.length + self._extent_bytes)
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
        self._resize(name, -extent.length - self._extent_bytes)
        return True

    def overflow(self) -> Iterator[tuple[bytes, Extent[T]]]:
        """Give up objects until the rest fits; gives the extents, removed, as they go."""
        while self._held_bytes > self._budget_bytes:
            victim = self._policy.victim(self._held_bytes - self._budget_bytes)
            extents = self._maps.pop(victim)
            self._held_bytes -= self._sizes.pop(victim)
            self._extents -= len(extents)
            self.counters.evictions += len(extents)
            self._policy.removed(victim)
            for extent in extents:
                yield victim, extent

    def _resize(self, name: bytes, change: int) -> None:
        self._held_bytes += change
        size = self._sizes.pop(name, 0) + change
        if size:
            self._sizes[name] = size
            self._policy.added(name, size)
        else:
            self._policy.removed(name)
