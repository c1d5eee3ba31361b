"""What the entries of a configuration name, in a file for each part of the content, so that they are read once."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvwire.store.key_kinds import mark

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvwire.store.partition import Part

SAMPLE = 64
"""Of what entries name in other parts: one that is there shows that the catalog is not lost."""
_BUFFERED = 1 << 16
"""Bytes of all parts together that wait to be written."""
_LENGTH = 2  # bytes before each mark: keys are no longer than 65,535


class SpilledMarks:
    """Marks of all parts, in files that go with it; a context manager. Holds no part in memory.

    Attributes:
        at: Instant at which reading the entries began, in seconds since 1970.
    """

    def __init__(self, count: int, at: float) -> None:
        """Make the folder.

        Args:
            count: Of parts.
            at: See ``at``.
        """
        self.at, self._count = at, count
        self._folder = tempfile.TemporaryDirectory(prefix="kvwire-marks-")
        self._sample: dict[int, list[str]] = defaultdict(list)
        self._sampled = 0

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """Delete the files."""
        self._folder.cleanup()

    def _file(self, number: int) -> Path:
        return Path(self._folder.name) / str(number)

    def add_all(self, keys: Iterable[str], number_of: Part) -> None:
        """Take in what entries name.

        Args:
            keys: Of content.
            number_of: Any of the parts, which tells those of keys.
        """
        waiting, size = defaultdict[int, bytearray](bytearray), 0
        for key in keys:
            number, entry = number_of.number_of(key), mark(key)
            waiting[number] += len(entry).to_bytes(_LENGTH, "big") + entry
            size += len(entry) + _LENGTH
            # A few of each of several parts, so that every part knows some of others.
            if self._sampled < SAMPLE or (number not in self._sample and len(self._sample) < SAMPLE):
                self._sample[number].append(key)
                self._sampled += 1
            if size > _BUFFERED:
                self._write(waiting)
                size = 0
        self._write(waiting)

    def _write(self, waiting: dict[int, bytearray]) -> None:
        for number, data in waiting.items():
            with self._file(number).open("ab") as file:
                file.write(data)
        waiting.clear()

    def of(self, part: Part) -> Iterator[bytes]:
        """Marks of a part, some of them more than once.

        Args:
            part: One of them.

        Yields:
            The marks.
        """
        if not self._file(part.number).exists():
            return
        with self._file(part.number).open("rb") as file:
            while length := file.read(_LENGTH):
                yield file.read(int.from_bytes(length, "big"))

    def elsewhere(self, part: Part) -> list[str]:
        """Some keys that are named in other parts.

        Args:
            part: The part.

        Returns:
            The keys.
        """
        return [key for number, keys in self._sample.items() if number != part.number for key in keys][:SAMPLE]
