"""W-TinyLFU (Einziger, Friedman and Manes, arXiv 1512.00727), with sizes in bytes."""

from __future__ import annotations

from collections import OrderedDict

from kvwire.store.cache.sketch import FrequencySketch

_WINDOW_SHARE = 0.01  # section 4.2 of the paper: best for all its traces but those of pure recency
_PROTECTED_SHARE = 0.8  # of the main part, for what was used again since it came there
_SAMPLE = 10  # uses for each held object after which counts are halved
_FEWEST = 100  # objects that the sample is reckoned with at least


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
