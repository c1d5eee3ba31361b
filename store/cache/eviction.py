"""What a tier holds, and what it gives up when that is too much: W-TinyLFU with sizes in bytes.

Source: Einziger, Friedman and Manes (arXiv 1512.00727). No I/O; used under the cache's lock.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

from kvwire.store.cache.extents import Extent, ExtentMap
from kvwire.store.cache.settings import TierCounters

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROWS = 4
_INDICES = struct.Struct("<4I")
_LIMIT = 15  # counts stop there: section 3.4.1 of the paper, where a counter has four bits
_HALVED = bytes(count >> 1 for count in range(256))
_WINDOW_SHARE = 0.01  # section 4.2 of the paper: best for all its traces but those of pure recency
_PROTECTED_SHARE = 0.8  # of the main part, for what was used again since it came there
_SAMPLE = 10  # uses for each held object after which counts are halved
_FEWEST = 100  # objects that the sample is reckoned with at least
T = TypeVar("T")


class FrequencySketch:
    """Counts uses, never too few between two halvings, now and then too many."""

    def __init__(self, width: int = 1 << 16) -> None:
        """Start at zero."""
        self._width = width
        self._counts = bytearray(width * _ROWS)
        self.additions = 0
        """Uses counted since the last halving, those that were halved counting half."""

    def add(self, key: bytes) -> None:
        """Count one use."""
        places = self._places(key)
        least = min(self._counts[place] for place in places)
        if least < _LIMIT:
            for place in places:
                if self._counts[place] == least:
                    self._counts[place] = least + 1
        self.additions += 1

    def estimate(self, key: bytes) -> int:
        """How often a key was used."""
        return min(self._counts[place] for place in self._places(key))

    def halve(self) -> None:
        """Let everything count half."""
        self._counts = self._counts.translate(_HALVED)
        self.additions //= 2

    def _places(self, key: bytes) -> list[int]:
        mask = self._width - 1
        digest = hashlib.blake2b(key, digest_size=_INDICES.size).digest()
        return [row * self._width + (index & mask) for row, index in enumerate(_INDICES.unpack(digest))]


class _Segment:
    """Names and sizes, the least recently used first."""

    def __init__(self, share_bytes: int) -> None:
        self.share_bytes = share_bytes
        self.bytes = 0
        self.sizes: OrderedDict[bytes, int] = OrderedDict()

    @property
    def overflows(self) -> bool:
        return self.bytes > self.share_bytes

    def put(self, name: bytes, size: int) -> None:
        self.bytes += size - self.sizes.get(name, 0)
        self.sizes[name] = size
        self.sizes.move_to_end(name)

    def take(self, name: bytes) -> int:
        size = self.sizes.pop(name)
        self.bytes -= size
        return size

    def first(self) -> bytes:
        return next(iter(self.sizes))


class WindowTinyLfu:
    """Decides which object a tier gives up. It holds names and sizes only and is called under the tier's lock.

    A tier first adds what it would like to keep and asks for victims while it holds too much; an object that is not
    worth its room is its own victim, which is how admission is refused.

    A small window in order of use; what leaves it must be used more often than what it would push out.

    The candidate of the window stands against as many of the main part's least recently used objects as must go for
    it, their uses added up: otherwise a large object would push out many small ones that are worth more together.
    """

    def __init__(self, budget_bytes: int) -> None:
        """Share out the tier's bytes."""
        window = int(budget_bytes * _WINDOW_SHARE)
        self._window = _Segment(window)
        self._probation = _Segment(0)
        self._protected = _Segment(int((budget_bytes - window) * _PROTECTED_SHARE))
        self._budget_bytes = budget_bytes
        self._sketch = FrequencySketch()

    def touched(self, name: bytes) -> None:
        """Count the use; what is used again in the main part becomes protected."""
        self._sketch.add(name)
        segment = self._segment_of(name)
        if self._sketch.additions >= _SAMPLE * max(_FEWEST, self._objects()):
            self._sketch.halve()
        if segment is self._probation:
            self._protected.put(name, self._probation.take(name))
            self._unprotect()
        elif segment is not None:
            segment.sizes.move_to_end(name)

    def added(self, name: bytes, size: int) -> None:
        """What is new starts in the window; what overflows it moves on while there is room for all."""
        segment = self._segment_of(name) or self._window
        segment.put(name, size)
        self._unprotect()
        while self._window.overflows and self._bytes() <= self._budget_bytes:
            first = self._window.first()
            self._probation.put(first, self._window.take(first))

    def removed(self, name: bytes) -> None:
        """Forget it, but not how often it was used."""
        if segment := self._segment_of(name):
            segment.take(name)

    def victim(self, excess: int) -> bytes:
        """Choose what goes."""
        if not self._window.overflows:
            return next(one for one in (self._probation, self._protected, self._window) if one.sizes).first()
        candidate = self._window.first()
        rival = self._rival(excess, self._sketch.estimate(candidate))
        if rival is None:
            return candidate
        self._probation.put(candidate, self._window.take(candidate))
        return rival

    def _rival(self, excess: int, uses: int) -> bytes | None:
        """The first to go for a candidate of so many uses; None where those to go are worth as much."""
        first, freed, worth = None, 0, 0
        for segment in (self._probation, self._protected):
            for name, size in segment.sizes.items():
                if freed >= excess:
                    return first
                first = first or name
                freed += size
                worth += self._sketch.estimate(name)
                if worth >= uses:
                    return None
        return first if freed >= excess else None

    def _unprotect(self) -> None:
        while self._protected.overflows:
            first = self._protected.first()
            self._probation.put(first, self._protected.take(first))

    def _segment_of(self, name: bytes) -> _Segment | None:
        for segment in (self._protected, self._probation, self._window):
            if name in segment.sizes:
                return segment
        return None

    def _objects(self) -> int:
        return len(self._window.sizes) + len(self._probation.sizes) + len(self._protected.sizes)

    def _bytes(self) -> int:
        return self._window.bytes + self._probation.bytes + self._protected.bytes


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
