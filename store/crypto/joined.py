"""A document of several blobs, read as one object: all headers in a row, then all payloads in the same order.

Nothing is stored like that. Readers ask for ranges of this virtual object, ``Extents`` says where they lie, and
``JoinedBlob`` makes one header of all.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from kvwire.codec.format.joining import join_headers, join_infos
from kvwire.errors import CorruptError, TruncatedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvwire.codec.format.header import Header
    from kvwire.store.crypto.sealing import BlobReader
    from kvwire.store.records import BlobPart
    from kvwire.types import BlobInfo, SegmentInfo


class Piece(NamedTuple):
    """A range of one part's own blob: number of the part, first byte, and the byte after the last."""

    part: int
    start: int
    end: int


class Extents:
    """Where ranges of the joined object lie."""

    def __init__(self, parts: Sequence[BlobPart]) -> None:
        """Lay the parts out."""
        headers = [Piece(number, 0, part.header_bytes) for number, part in enumerate(parts)]
        payloads = [Piece(number, part.header_bytes, part.size) for number, part in enumerate(parts)]
        self._pieces = [piece for piece in (*headers, *payloads) if piece.end > piece.start]
        self._starts = [0, *accumulate(piece.end - piece.start for piece in self._pieces)]
        self.size = self._starts[-1]
        """Length of the joined object in bytes."""

    def pieces(self, start: int, end: int | None = None) -> Iterator[Piece]:
        """Cut a range of the joined object."""
        stop = self.size if end is None else min(end, self.size)
        at = bisect_right(self._starts, start) - 1
        while start < stop:
            piece, first = self._pieces[at], self._starts[at]
            last = min(stop, self._starts[at + 1])
            yield Piece(piece.part, piece.start + start - first, piece.start + last - first)
            start, at = last, at + 1


class JoinedBlob:
    """Reads a document of several blobs, sealed or plain; a ``BlobReader``."""

    check: Callable[[SegmentInfo, bytes], bytes] | None

    def __init__(self, parts: Sequence[BlobPart], readers: Sequence[BlobReader]) -> None:
        """Nothing was read yet."""
        self._parts, self._readers = parts, readers
        self._own: list[tuple[BlobReader, SegmentInfo]] = []
        self._first: list[int] = []
        self.parsed: Header | None = None
        self.check = self._checked if readers[0].check is not None else None

    def read_header(self, data: bytes) -> BlobInfo:
        """Parse the joined object's beginning."""
        needed = sum(part.header_bytes for part in self._parts)
        if len(data) < needed:
            msg = f"the headers of the document's parts end after {len(data)} of {needed} bytes; fetch them again"
            raise TruncatedError(msg, needed)
        infos, headers, at = [], [], 0
        for number, (part, reader) in enumerate(zip(self._parts, self._readers, strict=True)):
            info = self._read_part(number, reader, data[at : at + part.header_bytes])
            infos.append(info)
            headers += [reader.parsed] if reader.parsed else []
            at += part.header_bytes
        joined, self.parsed = join_infos(infos), join_headers(headers)
        self._own = []
        self._first = []
        for reader, info in zip(self._readers, infos, strict=True):
            for row in info.segments:
                self._first.append(len(self._own))
                self._own += [(reader, segment) for segment in row]
        return joined

    def _read_part(self, number: int, reader: BlobReader, data: bytes) -> BlobInfo:
        part = self._parts[number]
        try:
            info = reader.read_header(data)
        except TruncatedError as error:
            msg = f"part {number} of the document has a longer header than the catalog says; append or encode it again"
            raise CorruptError(msg) from error
        told = (info.header_bytes, info.file_bytes, info.tokens)
        is_other = part.token_digest not in ("", info.meta.token_digest)
        if told != (part.header_bytes, part.size, part.tokens) or is_other:
            msg = f"part {number} of the document is not the one that the catalog names; encode the document again"
            raise CorruptError(msg)
        return info

    def _checked(self, segment: SegmentInfo, stored: bytes) -> bytes:
        reader, own = self._own[self._first[segment.chunk] + segment.level]
        return stored if reader.check is None else reader.check(own, stored)
