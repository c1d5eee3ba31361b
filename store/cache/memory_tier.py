"""Extents in this process's memory. No locks of its own: the cache calls it under its lock."""

from __future__ import annotations

from dataclasses import dataclass

from kvwire.store.cache.tier_index import TierIndex

EXTENT_BYTES = 512
"""Charged for each extent beyond its content: what Python needs to know of it."""


@dataclass(frozen=True)
class Leaving:
    """Bytes that the memory does not keep, or keeps no longer.

    Attributes:
        name: The object.
        start: Where the bytes lie in it.
        data: The bytes.
    """

    name: bytes
    start: int
    data: bytes


class MemoryTier:
    """Keeps bytes until the policy gives them up."""

    def __init__(self, budget_bytes: int) -> None:
        """Start empty."""
        self.index: TierIndex[bytes] = TierIndex(budget_bytes, EXTENT_BYTES)

    def add(self, name: bytes, start: int, data: bytes) -> list[Leaving]:
        """Keep what of these bytes is not there yet."""
        counters = self.index.counters
        leaving = []
        for first, last in self.index.gaps(name, start, start + len(data)):
            part = data[first - start : last - start]
            if self.index.fits(len(part)):
                self.index.add(name, first, last, part)
                counters.fills += 1
            else:
                counters.refused += 1
                leaving.append(Leaving(name, first, part))
        return leaving + [Leaving(gone, extent.start, extent.value) for gone, extent in self.index.overflow()]

    def drop(self, name: bytes, start: int, end: int | None) -> None:
        """Forget all extents that hold any byte of a range."""
        for extent in self.index.overlapping(name, start, end):
            self.index.remove(name, extent)
