"""What entries name, by parts of the content and in a file, so that a collection of several parts reads them once.

A mark that is lost would be content that is deleted though an entry names it. So the file has no name: no other process
can remove or shorten it, and it ends with its own. What is read is checked against what memory knows: each piece of a
part begins with place, length and CRC-32 of the piece before it, and those of the last are kept.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from isal.isal_zlib import crc32

from kvwire.errors import StorageError
from kvwire.store.key_kinds import mark

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import IO

    from kvwire.store.listing import Part

SAMPLE = 64
"""Of what entries name in other parts: one that is there shows that the catalog is not lost."""
_BUFFERED = 1 << 20
"""Bytes of all parts together that wait to be written."""
_LENGTH = 2  # bytes before each mark: keys are no longer than 65,535
_PIECE = struct.Struct("<QII")
"""Where the piece before this one lies, its length and its CRC-32."""
_NONE = (0, 0, 0)
_SAMPLED = 0  # the number under which the sample of keys lies; parts count from 1


class MarksFile:
    """A temporary file without a name, made once something is written. size: bytes written and not cut off."""

    def __init__(self) -> None:
        """Make nothing yet."""
        self.size = 0
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file, which deletes it."""
        if self._file is not None:
            self._file.close()

    def append(self, data: bytes) -> None:
        """Write behind what is there; where that fails, what was written of it does not count."""
        with _temporary("write"):
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="kvwire-marks-", buffering=0)  # noqa: SIM115 - see __exit__
            left, at = memoryview(data), self.size
            while left:
                written = os.pwrite(self._file.fileno(), left, at)
                left, at = left[written:], at + written
            self.size = at

    def read(self, at: int, length: int) -> bytes:
        """Bytes as they are in the file."""
        found = bytearray()
        with _temporary("read"):
            while self._file and (more := os.pread(self._file.fileno(), length - len(found), at + len(found))):
                found += more
        return bytes(found)

    def cut(self, size: int) -> None:
        """Give back the space of what was written last."""
        self.size = size
        if self._file is not None:
            with _temporary("shorten"):
                self._file.truncate(size)


class SpilledMarks:
    """Marks of one configuration, all parts of them, in a file that several share. Holds no part in memory.

    Attributes:
        at: Instant since which entries are to be read, in seconds since 1970; 0: none has been read.
    """

    def __init__(self, file: MarksFile) -> None:
        """Begin without marks."""
        self.at, self._file = 0.0, file
        self._last: dict[int, tuple[int, int, int]] = {}

    def add_all(self, keys: Iterable[str], at: float, number_of: Part) -> None:
        """Take in what entries name."""
        waiting, size = defaultdict[int, set[bytes]](set), 0
        sampled, sampled_of = SAMPLE * (self.at > 0), set[int]()
        for key in keys:
            number, entry = number_of.number_of(key), mark(key)
            if entry not in waiting[number]:
                waiting[number].add(entry)
                size += len(entry) + _LENGTH
            # A few of each of several parts, so that every part knows some of others.
            if sampled < SAMPLE or (not self.at and number not in sampled_of and len(sampled_of) < SAMPLE):
                waiting[_SAMPLED].add(key.encode())
                sampled += 1
                sampled_of.add(number)
            if size > _BUFFERED:
                self._write(waiting)
                waiting.clear()
                size = 0
        self._write(waiting)
        self.at = at

    def _write(self, waiting: dict[int, set[bytes]]) -> None:
        """Write a piece for each part that has marks; where that fails, none of them counts."""
        pieces, at, last = [], self._file.size, {}
        for number, entries in waiting.items():
            marks = b"".join(len(entry).to_bytes(_LENGTH, "big") + entry for entry in entries)
            piece = _PIECE.pack(*self._last.get(number, _NONE)) + marks
            last[number] = (at, len(piece), crc32(piece))
            at += len(piece)
            pieces.append(piece)
        if pieces:
            self._file.append(b"".join(pieces))
        self._last.update(last)

    def of(self, part: Part) -> Iterator[bytes]:
        """Marks of a part, some of them more than once."""
        return self._read(part.number)

    def elsewhere(self, part: Part) -> list[str]:
        """Some keys that are named in other parts."""
        keys = (entry.decode() for entry in self._read(_SAMPLED))
        return [key for key in keys if not part.has(key)][:SAMPLE]

    def _read(self, number: int) -> Iterator[bytes]:
        """What was written under a number, the last piece first."""
        at, length, crc = self._last.get(number, _NONE)
        while length:
            piece = self._file.read(at, length)
            if len(piece) != length or crc32(piece) != crc:
                raise StorageError(
                    f"the temporary file of what entries name, in {_folder()}, is not as it was written, so nothing is "
                    "deleted by it: check that disk or set TMPDIR to a folder on another one, then collect again"
                )
            yield from _entries(piece)
            at, length, crc = _PIECE.unpack_from(piece)


def _entries(piece: bytes) -> Iterator[bytes]:
    at = _PIECE.size
    while at < len(piece):
        begin = at + _LENGTH
        at = begin + int.from_bytes(piece[at:begin], "big")
        yield piece[begin:at]


@contextmanager
def _temporary(verb: str) -> Iterator[None]:
    """Say of errors of the system what to do about the temporary file."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot {verb} the temporary file of what entries name in {_folder()} ({error.strerror or error}): set "
            "TMPDIR to a folder on a disk with room, some 34 bytes for each object that is named"
        ) from error


def _folder() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:
        return os.environ.get("TMPDIR", "no folder")
