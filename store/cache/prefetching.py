"""Hints: bytes that will be wanted soon, fetched while nobody fetches what is wanted now."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvwire.errors import KvwireError
from kvwire.store.cache.cache import DiskHit, Fetch, Hit, Wait
from kvwire.store.cache.counters import PrefetchCounters
from kvwire.store.cache.tier_reading import RemoteObject, lead
from kvwire.store.cache.worker import Worker

if TYPE_CHECKING:
    from kvwire.store.cache.cache import RangeCache
    from kvwire.store.cache.settings import TierSettings

_PATIENCE_S = 10.0  # a hint that finds no pause for that long is worth nothing any more


class Prefetcher:
    """Threads that walk through hinted ranges in short requests, each only once the foreground is quiet.

    At most ``prefetch_threads * prefetch_bytes`` are on their way at a time, which is also the most that a foreground
    read can find ahead of its own bytes.
    """

    def __init__(self, cache: RangeCache, settings: TierSettings) -> None:
        """Start nothing yet."""
        self._cache = cache
        self._settings = settings
        self._worker = Worker("kvwire-prefetch", settings.prefetch_threads)
        self._closed = False
        self._counters = PrefetchCounters()

    def hint(self, name: bytes, remote: RemoteObject, start: int, end: int | None) -> None:
        """Queue a range; dropped where too many wait already."""
        if self._worker.queued >= self._settings.prefetch_hints:
            self._counters.dropped += 1
            return
        self._counters.taken += 1
        self._worker.submit(partial(self._walk, name, remote, start, end))

    def counted(self) -> PrefetchCounters:
        """The counters."""
        return PrefetchCounters(self._counters.taken, self._counters.dropped)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no hint is left."""
        return self._worker.drain(timeout_s)

    def close(self) -> None:
        """Drop the hints."""
        self._closed = True
        self._worker.close(self._settings.close_s)

    def _walk(self, name: bytes, remote: RemoteObject, start: int, end: int | None) -> None:
        position: int | None = start
        try:
            while position is not None and not self._closed:
                if not self._cache.wait_for_quiet(_PATIENCE_S):
                    self._counters.dropped += 1
                    return
                position = self._next(name, remote, position, end)
        except KvwireError:
            return  # whoever reads the bytes will hear of it

    def _next(self, name: bytes, remote: RemoteObject, position: int, end: int | None) -> int | None:
        """See to the next piece; returns where it ends, None at the end of all."""
        match self._cache.step(name, position, end, self, whole=True, background=True):
            case None:
                return None
            case Hit(data):
                return position + len(data)
            case DiskHit(extent):
                return position if self._cache.load(name, extent) is None else extent.end
            case Wait(flight):
                return flight.end
            case Fetch(flight):
                fetched = lead(self._cache, flight, remote)
                return flight.end if len(fetched) == flight.end - flight.start else None
