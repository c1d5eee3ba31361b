"""Bytes on their way from the remote: one reader fetches them, all others who want them wait for it."""

from __future__ import annotations

import copy
from concurrent.futures import Future
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError, AuthError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.errors import KvwireError
    from kvwire.store.base import Data

_FINAL = (ArgumentError, AuthError, NotFoundError)  # asking again gives the same answer
_MOST_FAILURES = 2


class InflightRead:
    """A range that one reader fetches. Its state is changed by the cache alone; anybody may wait for ``done``.

    ``done`` resolves in every case; then either ``error`` is set or a look at the cache tells more. A concurrent
    future serves threads and event loops alike, and cannot be cancelled by one of those who wait.
    """

    def __init__(self, name: bytes, start: int, end: int, owner: object, limit_s: float, *, background: bool) -> None:
        """Nothing has come yet."""
        self.name = name
        self.start = start
        self.end = end
        self.owner = owner
        self.limit_s = limit_s
        self.background = background
        self.done: Future[None] = Future()
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
        """The error for a reader that waited.

        After the first failure it may try for itself; after the second it shares the error, or a thousand readers would
        one after the other wait for a dead server. An error that asking again cannot change is shared at once.
        """
        if self.error is None or (failures < _MOST_FAILURES and not isinstance(self.error, _FINAL)):
            return None
        return copy.copy(self.error)  # one exception raised in many places would gather all their tracebacks
