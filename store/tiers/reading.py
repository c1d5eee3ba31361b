"""How a thread reads through the tiers."""

from __future__ import annotations

from concurrent import futures
from typing import TYPE_CHECKING

from kvwire.errors import StorageError
from kvwire.store.tiers.cache import Held, Leading, OnDisk, RangeCache, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.store.tiers.flights import Flight


class TierReading:
    """One read of one object. fetch: bytes from a start to an end, clamped, from the remote."""

    def __init__(self, cache: RangeCache, name: bytes, fetch: Callable[[int, int], bytes]) -> None:
        """Prepare."""
        self._cache = cache
        self._name = name
        self._fetch = fetch
        self._failures = 0

    def read(self, start: int, end: int | None) -> bytes:
        """Bytes ``start`` to ``end``, clamped at the object's end."""
        pieces: list[memoryview] = []
        position = start
        while (step := self._cache.step(self._name, position, end, self, whole=True)) is not None:
            match step:
                case Held(data):
                    piece = data
                case OnDisk(extent):
                    piece = memoryview(self._cache.load(self._name, extent) or b"")[position - extent.start :]
                case Waiting(flight):
                    piece = self._awaited(flight, position)
                case Leading(flight):
                    piece = memoryview(lead(self._cache, flight, self._fetch, is_first=position == start))
                    if not piece:  # the object ends here
                        break
            piece = piece if end is None else piece[: end - position]
            pieces.append(piece)
            position += len(piece)
        return _joined(pieces)

    def _awaited(self, flight: Flight, position: int) -> memoryview:
        wait_for(self._cache, flight)
        data = next(flight.since(position), memoryview(b""))
        if not data and flight.error is not None:
            self._failures += 1
            if error := flight.verdict(self._failures):
                raise error
        return data


def lead(cache: RangeCache, flight: Flight, fetch: Callable[[int, int], bytes], *, is_first: bool) -> bytes:
    """Fetch a flight's range in one call, and land it whatever happens. is_first: nothing was read before it."""
    try:
        data = _checked(fetch(flight.start, flight.end), flight)
    except BaseException as error:
        cache.fail(flight, error)
        raise
    flight.feed(data)
    stop = flight.start + len(data)
    # No byte at all at the very start of a read may be far beyond the end, which tells no length.
    is_end = stop < flight.end and (len(data) > 0 or not is_first)
    cache.finish(flight, stop if is_end else None)
    return data


def _checked(data: bytes, flight: Flight) -> bytes:
    if len(data) > flight.end - flight.start:
        msg = "the remote store gave more bytes than it was asked for: its ranges are broken"
        raise StorageError(msg)
    return data


def wait_for(cache: RangeCache, flight: Flight) -> None:
    """Block until a flight is over, or give it up where nothing comes any more."""
    while not flight.done.done():
        position = flight.position
        futures.wait([flight.done], flight.limit_s)
        if not flight.done.done() and flight.position == position:
            cache.leave(flight)


def _joined(pieces: list[memoryview]) -> bytes:
    """The pieces as one; without a copy where they are one whole ``bytes`` already."""
    if len(pieces) == 1 and isinstance(whole := pieces[0].obj, bytes) and len(whole) == len(pieces[0]):
        return whole
    return b"".join(pieces)
