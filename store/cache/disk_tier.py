"""Extents as files on a local disk.

Files appear by a rename and are never changed. Nothing is flushed: after a crash the length and the checksum decide
what a file is worth, and what is lost is read again from the remote. All changes of files happen on one thread, in the
order in which the index changed, so the folder follows the index and equals it whenever the queue is empty.

A file is a header and the bytes. Header, little-endian: magic, the object's name (32 bytes), start, length and the
object's size (uint64 each; the size is 2**64 - 1 where it was not known), CRC-32 of all of these and of the bytes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import struct
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from isal.isal_zlib import crc32

from kvwire.errors import CorruptError
from kvwire.store.cache.eviction import TierIndex
from kvwire.store.cache.local import LockedFolder, Worker, lock_folder

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from kvwire.store.cache.extents import Extent
    from kvwire.store.cache.settings import TierSettings

_MAGIC = b"kvwext1\n"
_FIELDS = struct.Struct("<8s32sQQQ")
_CRC = struct.Struct("<I")
_UNKNOWN = (1 << 64) - 1
_NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{1,16})-([0-9a-f]{1,16})\.ext")
_MODE = 0o600  # caches of conversations are private
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

HEADER_BYTES = _FIELDS.size + _CRC.size
"""Length of a file beyond its content."""
_log = logging.getLogger(__name__)
_TEMPORARY = "new.tmp"  # one is enough: one thread writes
_NOT_OURS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)  # no file, or none that was written here
_SUBFOLDER = re.compile(r"[0-9a-f]{2}")


@dataclass(frozen=True)
class ExtentName:
    """What a file's name says: object, first byte, and the byte after the last."""

    name: bytes
    start: int
    end: int

    @property
    def file_name(self) -> str:
        """Name of the file."""
        return f"{self.name.hex()}-{self.start:x}-{self.end:x}.ext"

    @property
    def path(self) -> str:
        """Path below the tier's folder; 256 folders keep each of them short."""
        return f"{self.name[:1].hex()}/{self.file_name}"

    @property
    def file_bytes(self) -> int:
        """Length of the file."""
        return HEADER_BYTES + self.end - self.start

    @classmethod
    def parse(cls, file_name: str) -> ExtentName | None:
        """Read a file's name."""
        match = _NAME.fullmatch(file_name)
        if match is None:
            return None
        start, end = int(match[2], 16), int(match[3], 16)
        named = cls(bytes.fromhex(match[1]), start, end)
        return named if start < end and named.file_name == file_name else None


def write_extent(path: Path, extent: ExtentName, size: int | None, data: bytes) -> None:
    """Write the file. It is not flushed: a crash may tear it, and the checksum tells."""
    fields = _FIELDS.pack(_MAGIC, extent.name, extent.start, len(data), _UNKNOWN if size is None else size)
    header = fields + _CRC.pack(crc32(data, crc32(fields)))
    with os.fdopen(os.open(path, _CREATE_FLAGS, _MODE), "wb") as file:
        file.write(header)
        file.write(data)


def read_extent(path: Path, extent: ExtentName) -> tuple[bytes, int | None]:
    """Read the file."""
    with open(path, "rb", opener=lambda name, _: os.open(name, _READ_FLAGS)) as file:
        header = file.read(HEADER_BYTES) or b""  # None: of a pipe
        data = file.read(extent.end - extent.start + 1) or b""  # one more: where it goes on
    if len(header) == HEADER_BYTES:
        fields = header[: _FIELDS.size]
        magic, name, start, length, size = _FIELDS.unpack(fields)
        (crc,) = _CRC.unpack(header[_FIELDS.size :])
        is_right = (magic, name, start, length) == (_MAGIC, extent.name, extent.start, extent.end - extent.start)
        if is_right and len(data) == length and crc32(data, crc32(fields)) == crc:
            return data, None if size == _UNKNOWN else size
    raise CorruptError("an extent's file is torn or rotten: drop it and read the bytes again")


class StoredFile:
    """What stands for an extent: its bytes until they are written, then only its place on the disk."""

    __slots__ = ("data", "dropped", "loading", "size", "skipped_until")

    def __init__(self, data: bytes | None, size: int | None) -> None:
        """Keep the bytes, or that there is a file."""
        self.data = data
        self.size = size
        self.dropped = False
        self.loading: Future[bytes | None] | None = None
        self.skipped_until = 0.0
        """A failed read of it is not repeated before this time (monotonic)."""


class DiskTier:
    """Files of one slot of a folder. Methods marked "locked" are called under the cache's lock, others without it."""

    def __init__(self, root: Path, budget_bytes: int, lock: threading.Lock, settings: TierSettings) -> None:
        """Touch nothing yet; ``open`` does."""
        self.index: TierIndex[StoredFile] = TierIndex(budget_bytes, HEADER_BYTES)
        self._root = root
        self._lock = lock
        self._settings = settings
        self._worker = Worker("kvwire-disk-tier")
        self._slot: LockedFolder | None = None
        self._dirty_bytes = 0
        self._off_until = 0.0
        self._skipped_until = 0.0
        self._opening = False
        self._failing = False

    @property
    def folder(self) -> Path | None:
        """The subfolder that this process holds; None while there is none."""
        return self._slot.folder if self._slot else None

    def open(self) -> None:
        """Take a subfolder and account for what is in it; where that fails, it is tried again later."""
        with self._lock:
            if self._slot or self._opening:
                return
            self._opening = True
        try:
            with contextlib.ExitStack() as stack:
                slot = lock_folder(self._root)
                stack.callback(slot.close)
                found = sorted(_scan(slot.folder), key=lambda one: one[0])
                stack.pop_all()
        except OSError as error:
            with self._lock:
                self._opening = False
                self._failed(error)
            return
        with self._lock:
            self._opening = False
            self._slot = slot
            for _, named in found:  # the oldest first, as a policy would have met them
                if self.index.of(named.name).gaps(named.start, named.end) == [(named.start, named.end)]:
                    self.index.add(named.name, named.start, named.end, StoredFile(None, None))
                else:
                    self._worker.submit(partial(self._unlink, named))
            self._shrink()

    def add(self, name: bytes, start: int, data: bytes, size: int | None) -> None:
        """Locked: keep what of these bytes is not there yet; they are written in the background."""
        if not self._is_on():
            self.index.counters.refused += 1
            return
        added = []
        for first, last in self.index.of(name).gaps(start, start + len(data)):
            length = last - first
            if not self.index.fits(length) or not self.has_room(length):
                self.index.counters.refused += 1
                continue
            self._dirty_bytes += length
            file = StoredFile(data[first - start : last - start], size)
            added.append(self.index.add(name, first, last, file))
            self.index.counters.fills += 1
        self._shrink()
        for extent in added:
            self._worker.submit(partial(self._write, name, extent))

    def has_room(self, length: int) -> bool:
        """Locked: ask the queue of writes."""
        return self._dirty_bytes + length <= self._settings.dirty_bytes

    def at(self, name: bytes, position: int) -> Extent[StoredFile] | None:
        """Locked: the extent that holds a byte."""
        extent = self.index.of(name).at(position)
        if extent is None or extent.value.data is not None:
            return extent
        return None if time.monotonic() < max(self._skipped_until, extent.value.skipped_until) else extent

    def skip_reads(self) -> None:
        """Locked: a read takes too long, so leave all files alone for a while."""
        if time.monotonic() >= self._skipped_until:
            _log.warning("the disk tier is too slow and not read for now: look after the disk")
        self._skipped_until = time.monotonic() + self._settings.retry_s

    def load(self, name: bytes, extent: Extent[StoredFile]) -> tuple[bytes, int | None] | None:
        """Read an extent's file."""
        if self._slot is None:
            return None
        named = ExtentName(name, extent.start, extent.end)
        try:
            return read_extent(self._slot.folder / named.path, named)
        except (CorruptError, OSError) as error:
            with self._lock:
                if isinstance(error, OSError) and error.errno not in _NOT_OURS:
                    extent.value.skipped_until = time.monotonic() + self._settings.retry_s
                elif self.index.remove(name, extent):
                    self.index.counters.corrupt += 1
                    self._forget(name, extent)
            return None

    def drop(self, name: bytes, start: int, end: int | None) -> None:
        """Locked: remove all extents that hold any byte of a range."""
        for extent in self.index.of(name).overlapping(start, end):
            self.index.remove(name, extent)
            self._forget(name, extent)

    def drain(self, timeout_s: float) -> bool:
        """Wait until the folder is what the index says."""
        return self._worker.drain(timeout_s)

    def close(self) -> None:
        """Write what waits, as far as time allows, and let the next process have the files."""
        self._worker.drain(self._settings.close_s)
        if self._worker.close(self._settings.close_s) and self._slot:
            self._slot.close()

    def _is_on(self) -> bool:
        now = time.monotonic()
        if now < self._off_until:
            return False
        if self._slot is None and not self._opening:
            self._off_until = now + self._settings.retry_s
            self._worker.submit(self.open)
        return self._slot is not None

    def _failed(self, error: OSError) -> None:
        self.index.counters.write_errors += 1
        self._off_until = time.monotonic() + self._settings.retry_s
        if not self._failing:
            _log.warning("the disk tier takes nothing in for now (%s): free or repair the disk", error.strerror)
        self._failing = True

    def _shrink(self) -> None:
        for name, extent in self.index.overflow():
            self._forget(name, extent)

    def _forget(self, name: bytes, extent: Extent[StoredFile]) -> None:
        extent.value.dropped = True
        self._worker.submit(partial(self._unlink, ExtentName(name, extent.start, extent.end)))

    # On the worker's thread.

    def _write(self, name: bytes, extent: Extent[StoredFile]) -> None:
        file = extent.value
        with self._lock:
            data = None if file.dropped else file.data
        error = None
        if data is not None:
            error = self._written(ExtentName(name, extent.start, extent.end), file.size, data)
        with self._lock:
            self._dirty_bytes -= extent.length
            file.data = None
            if error is not None:
                self._failed(error)
                file.dropped = True
                self.index.remove(name, extent)
            elif data is not None:
                self._failing = False

    def _written(self, named: ExtentName, size: int | None, data: bytes) -> OSError | None:
        if self._slot is None:
            return FileNotFoundError("no folder")
        path, temporary = self._slot.folder / named.path, self._slot.folder / _TEMPORARY
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_extent(temporary, named, size, data)
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            return error
        return None

    def _unlink(self, named: ExtentName) -> None:
        if self._slot is None:
            return
        try:
            (self._slot.folder / named.path).unlink(missing_ok=True)
        except OSError as error:
            with self._lock:
                self._failed(error)


def _scan(folder: Path) -> Iterator[tuple[float, ExtentName]]:
    """Times of writing and names of a slot's extents, by names and lengths alone. Removes what a crash has left."""
    with contextlib.suppress(OSError):  # on a read-only disk it stays
        (folder / _TEMPORARY).unlink(missing_ok=True)
    with os.scandir(folder) as entries:
        named = [entry for entry in entries if _SUBFOLDER.fullmatch(entry.name)]
        subfolders = [entry.path for entry in named if entry.is_dir(follow_symlinks=False)]
    for subfolder in subfolders:
        with os.scandir(subfolder) as entries:
            for entry in entries:
                extent = ExtentName.parse(entry.name)
                if extent is None:
                    continue
                about = entry.stat(follow_symlinks=False)
                if about.st_size == extent.file_bytes:
                    yield about.st_mtime, extent
                else:
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)  # noqa: PTH108 - 100,000 paths are not made into objects
