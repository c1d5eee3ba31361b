"""Cuts a response into the pieces that were wanted, without I/O."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from kvwire.transport.ranges import Piece, Range

T = TypeVar("T")


class Cutter(Generic[T]):
    """Feed it the bytes of a range in order; it gives each piece when its last byte is in, and drops the gaps."""

    def __init__(self, wanted: Range[T]) -> None:
        """Expect the bytes of this range."""
        self._pending = deque(wanted.pieces)
        self._start = wanted.start  # of the buffer, in the object
        self._buffer = bytearray()

    @property
    def pending(self) -> list[Piece[T]]:
        """Pieces that are not complete yet, in order."""
        return list(self._pending)

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the piece that is coming in."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[tuple[Piece[T], bytes]]:
        """Take the next bytes; returns the pieces that they complete."""
        self._buffer += data
        complete = []
        taken = 0
        while self._pending and self._pending[0].end <= self._start + len(self._buffer):
            piece = self._pending.popleft()
            first = piece.offset - self._start
            taken = first + piece.length
            complete.append((piece, bytes(memoryview(self._buffer)[first:taken])))
        if taken:
            del self._buffer[:taken]
            self._start += taken
        return complete
