"""What a tier holds, and what it gives up when that is too much.

No I/O; used under the cache's lock.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

from kvwire.store.cache.extents import Extent, ExtentMap
from kvwire.store.cache.settings import TierCounters

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROTECTED_SHARE = 0.8  # of the budget, for what was used again; the rest lets what is new show that it will be
T = TypeVar("T")


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
