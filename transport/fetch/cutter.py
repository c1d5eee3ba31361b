"""Cuts a response into the pieces that were wanted, without I/O."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeGuard, TypeVar

if TYPE_CHECKING:
    from kvwire.store import Data
    from kvwire.transport.fetch.ranges import Range, WantedRange

T = TypeVar("T")


class Cutter(Generic[T]):
    """Feed it the bytes of a range in order; it gives each piece when its last byte is in, and drops the gaps.

    Pieces are copied out once, so that decoders find them aligned in memory and nothing keeps longer answers alive; one
    that is all that was fed is given as it came.
    """

    def __init__(self, wanted: Range[T]) -> None:
        """Expect the bytes of this range."""
        self._pending = deque(wanted.pieces)
        self._at = wanted.start  # of the next byte, in the object
        self._parts: list[memoryview] = []

    @property
    def pending(self) -> list[WantedRange[T]]:
        """Pieces that are not complete yet, in order."""
        return list(self._pending)

    @property
    def buffered_bytes(self) -> int:
        """Bytes since the end of the last complete piece that still comes in."""
        return sum(map(len, self._parts))

    def feed(self, data: Data) -> list[tuple[WantedRange[T], bytes]]:
        """Take the next bytes."""
        if self._is_next_piece(data):
            piece = self._pending.popleft()
            self._at = piece.end
            return [(piece, data)]
        view = memoryview(data)
        start, end = self._at, self._at + len(view)
        complete: list[tuple[WantedRange[T], bytes]] = []
        while self._pending and self._pending[0].offset <= end:
            piece = self._pending[0]
            first, last = max(piece.offset, start), min(piece.end, end)
            if first < last:
                self._parts.append(view[first - start : last - start])
            if piece.end > end:
                break
            self._pending.popleft()
            complete.append((piece, b"".join(self._parts)))
            self._parts = []
        self._at = end
        return complete

    def _is_next_piece(self, data: Data) -> TypeGuard[bytes]:
        """Whether the bytes are the next piece and nothing else, as short answers often are."""
        if self._parts or len(self._pending) != 1 or type(data) is not bytes:
            return False
        piece = self._pending[0]
        return piece.offset == self._at and piece.length == len(data)
