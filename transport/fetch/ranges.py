"""From pieces wanted to ranges asked for, and from bytes that arrive to pieces."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeGuard, TypeVar

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvwire.store import Data


T = TypeVar("T")


class WantedRange(NamedTuple, Generic[T]):
    """A piece of an object that is wanted.

    Attributes:
        offset: First byte, in the object.
        length: Bytes.
        tag: The caller's.
    """

    offset: int
    length: int
    tag: T

    @property
    def end(self) -> int:
        """First byte after the piece."""
        return self.offset + self.length


class Range(NamedTuple, Generic[T]):
    """One request.

    Attributes:
        start: First byte, in the object.
        end: First byte after it.
        pieces: What is wanted of it, in ascending order without overlap.
    """

    start: int
    end: int
    pieces: tuple[WantedRange[T], ...]


def coalesce(pieces: Iterable[WantedRange[T]], *, gap_bytes: int, max_bytes: int) -> list[Range[T]]:
    """Join pieces that follow each other, in the list and in the object, into ranges.

    The order of the list is the order of importance and is kept: a piece joins the range of the one before it, never
    an earlier range.

    Args:
        pieces: In the order of importance.
        gap_bytes: Bytes that may be read in vain between two pieces.
        max_bytes: Longest range; a longer piece has a range of its own.

    Returns:
        The ranges, in the order of importance.

    Raises:
        ArgumentError: A limit or a piece makes no sense.
    """
    if gap_bytes < 0 or max_bytes < 1:
        raise ArgumentError(f"gap_bytes must be 0 or more and max_bytes 1 or more, got {gap_bytes} and {max_bytes}")
    ranges: list[list[WantedRange[T]]] = []
    for piece in pieces:
        if piece.offset < 0 or piece.length < 0:
            raise ArgumentError(f"a piece cannot start at {piece.offset} or be {piece.length} bytes long")
        run = ranges[-1] if ranges else []
        if run and 0 <= piece.offset - run[-1].end <= gap_bytes and piece.end - run[0].offset <= max_bytes:
            run.append(piece)
        else:
            ranges.append([piece])
    return [Range(run[0].offset, run[-1].end, tuple(run)) for run in ranges]


def split(pieces: Iterable[WantedRange[T]], *, max_bytes: int) -> list[WantedRange[T]]:
    """Cut pieces longer than ``max_bytes`` into as few parts of about equal length as fit; the tag goes with each.

    Args:
        pieces: In any order.
        max_bytes: Longest part.

    Returns:
        The parts, in the order of the pieces.

    Raises:
        ArgumentError: ``max_bytes`` is less than 1.
    """
    if max_bytes < 1:
        raise ArgumentError(f"max_bytes must be 1 or more, got {max_bytes}")
    parts: list[WantedRange[T]] = []
    for piece in pieces:
        if piece.length <= max_bytes:
            parts.append(piece)
            continue
        count = -(-piece.length // max_bytes)
        cuts = [piece.offset + piece.length * index // count for index in range(count + 1)]
        parts.extend(WantedRange(start, end - start, piece.tag) for start, end in pairwise(cuts))
    return parts


class Cutter(Generic[T]):
    """Feed it the bytes of a range in order; it gives each piece when its last byte is in, and drops the gaps."""

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
            complete.append((piece, b"".join(self._parts)))  # a copy is aligned, and keeps no longer answer alive
            self._parts = []
        self._at = end
        return complete

    def _is_next_piece(self, data: Data) -> TypeGuard[bytes]:
        """Whether the bytes are the next piece and nothing else, as short answers often are."""
        if self._parts or len(self._pending) != 1 or type(data) is not bytes:
            return False
        piece = self._pending[0]
        return piece.offset == self._at and piece.length == len(data)
