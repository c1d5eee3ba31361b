"""The catalog objects of a folder store: rows of one database, so that a million documents are not a million files."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import TYPE_CHECKING, TypeVar

from kvwire.errors import ArgumentError, CorruptError, StorageError
from kvwire.store.backends.memory import MemorySnapshot
from kvwire.store.base import Listed
from kvwire.store.files.files import CREATE_FLAGS, temporary_name
from kvwire.store.files.sqlite import Database
from kvwire.store.keys import check_key

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from kvwire.store.base import Data


T = TypeVar("T")

RESERVE_BYTES = 4 << 20
"""At most: some two hundred of a database's pages."""
_LEAST_BYTES = 256 << 10
_PLENTY_BYTES = 8 * RESERVE_BYTES  # below that, nothing is taken away from those who need it
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""A database tells a quota that is used up as an input/output error."""
FILE_NAME = ".catalog.sqlite"
"""Begins with a dot, as no key does."""
_SCHEMA = (
    "CREATE TABLE objects (key TEXT NOT NULL PRIMARY KEY, modified REAL NOT NULL, data BLOB NOT NULL) WITHOUT ROWID"
)
_OLDER = ("CREATE TABLE objects (key TEXT NOT NULL PRIMARY KEY, modified REAL NOT NULL, data BLOB NOT NULL)",)
_VERSION = 1
_PUT = (
    "INSERT INTO objects (key, modified, data) VALUES (?, ?, ?) "
    "ON CONFLICT (key) DO UPDATE SET modified = excluded.modified, data = excluded.data"
)
_FIND = "SELECT data, modified FROM objects WHERE key = ?"
_SCAN = "SELECT key, length(data), modified, typeof(data) FROM objects WHERE key >= ? AND key < ? ORDER BY key LIMIT ?"
_DELETE = "DELETE FROM objects WHERE key = ?"
_PAST = "\x7f"  # sorts after every character of a key
_NEXT = "\0"  # a key and this sort between the key and all later ones
_PAGE = 1000
_MAX_TIME_S = 253402300800.0  # the year 10000
_ADVICE = (
    "restore it from a copy, mend it with sqlite3's .recover, "
    "or move it and its -wal and -shm files away and run kvwire store rebuild"
)


class Reserve:
    """A file that takes up space, twice that of a database and its log, and is removed when a deletion finds none."""

    def __init__(self, path: Path, database: Path) -> None:
        """Keep the paths; nothing is made yet."""
        self._path = path
        self._database = database
        self._spent_bytes = 0

    def spend(self, action: Callable[[], T], before_retry: Callable[[], None]) -> T:
        """Do what frees space, or has to be done before: again, with the reserve's space, where there is no room."""
        try:
            return action()
        except StorageError as error:
            if error.errno not in _NO_ROOM:
                raise
        with contextlib.suppress(OSError):
            size = self._path.stat().st_size
            self._path.unlink()
            self._spent_bytes = size
        before_retry()
        return action()

    def keep(self) -> None:
        """Make the file where it is not there or too small, and the disk has plenty of room; else there is no harm."""
        with contextlib.suppress(OSError):
            needed = self._needed_bytes()
            if _size(self._path) < needed and _free_bytes(self._path.parent) >= _PLENTY_BYTES:
                self._make(needed)
                self._spent_bytes = 0

    def restore(self) -> None:
        """Take back the space that was spent here, once nothing needs it any more."""
        for size in (self._spent_bytes, self._spent_bytes // 2):
            if not size or self._path.exists():
                return
            with contextlib.suppress(OSError):
                self._make(size)

    def _needed_bytes(self) -> int:
        database, needed = self._database, _LEAST_BYTES
        held = _size(database) + _size(database.with_name(f"{database.name}-wal"))
        while needed < min(RESERVE_BYTES, 2 * held):
            needed *= 2
        return needed

    def _make(self, size: int) -> None:
        if not hasattr(os, "posix_fallocate"):  # macOS
            return
        temporary = self._path.with_name(temporary_name())
        descriptor = os.open(temporary, CREATE_FLAGS, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            temporary.replace(self._path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _free_bytes(folder: Path) -> int:
    about = os.statvfs(folder)
    return about.f_bavail * about.f_frsize


class CatalogRows:
    """Keys and bytes in one table, ordered by key. Safe for threads and for processes of one machine."""

    def __init__(self, folder: Path) -> None:
        """Keep the path; the database is made on the first write."""
        self._reserve = Reserve(folder / f"{FILE_NAME}-reserve", folder / FILE_NAME)
        self._database = Database(
            folder / FILE_NAME, _SCHEMA, older=_OLDER, version=_VERSION, durable=True, advice=_ADVICE
        )

    def find(self, key: str) -> MemorySnapshot | None:
        """Look a key up."""

        def query(connection: sqlite3.Connection) -> MemorySnapshot | None:
            row = connection.execute(_FIND, (key,)).fetchone()
            return MemorySnapshot(key, *_checked(row)) if row else None

        return self.spend(lambda: self._database.read(query, None))

    def put(self, items: Iterable[tuple[str, Data]], *, frees_space: bool = False) -> None:
        """Write rows, all or none; when this returns they survive a power cut."""
        now = time.time()
        rows = [(key, now, bytes(data)) for key, data in items]
        self._write(_PUT, rows, frees_space=frees_space)

    def replace(self, key: str, data: Data, etag: str) -> bool:
        """Write a row where it is still the version with this tag, in one transaction."""

        def change(connection: sqlite3.Connection) -> bool:
            row = connection.execute(_FIND, (key,)).fetchone()
            if (MemorySnapshot(key, *_checked(row)).etag if row else "") != etag:
                return False
            connection.execute(_PUT, (key, time.time(), bytes(data)))
            return True

        wrote = self._database.write(change)
        self._reserve.keep()
        return wrote

    def delete(self, keys: Iterable[str]) -> None:
        """Remove rows, all or none unless the disk is full; what is not there is no error."""
        rows = [(key,) for key in keys]
        known = self.spend(
            lambda: self._database.read(
                lambda connection: any(connection.execute(_FIND, row).fetchone() for row in rows), absent=False
            )
        )
        if known:
            self._delete(rows)

    def spend(self, action: Callable[[], T]) -> T:
        """Do what frees space, or has to be done before, with the reserve where there is no room else."""
        return self._reserve.spend(action, before_retry=self._database.merge)

    def keep_reserve(self) -> None:
        """See that the reserve is there, as after every write."""
        self._reserve.keep()

    def _delete(self, rows: list[tuple[str]]) -> None:
        try:
            self._write(_DELETE, rows, frees_space=True)
        except StorageError as error:
            if error.errno != errno.ENOSPC or len(rows) == 1:
                raise
            middle = len(rows) // 2  # fewer at a time take less space
            self._delete(rows[:middle])
            self._delete(rows[middle:])

    def _write(self, statement: str, rows: Sequence[tuple[object, ...]], *, frees_space: bool) -> None:
        def write() -> None:
            self._database.write(lambda connection: connection.executemany(statement, rows))

        if frees_space:
            self.spend(write)
        else:
            write()
        self._reserve.keep()

    def scan(self, prefix: str, after: str) -> Iterator[Listed]:
        """List rows."""
        while page := self._page(prefix, after):
            yield from page
            after = page[-1].key

    def close(self) -> None:
        """Close the connections, and take back what was spent of the reserve."""
        self._database.close()
        self._reserve.restore()

    def _page(self, prefix: str, after: str) -> list[Listed]:
        # One lower bound: of two, SQLite seeks to one and passes over every row up to the other.
        bounds = (max(prefix, after + _NEXT) if after else prefix, prefix + _PAST, _PAGE)

        def query(connection: sqlite3.Connection) -> list[Listed]:
            page: list[Listed] = []
            for row in connection.execute(_SCAN, bounds):
                page.append(_listed(row, prefix, page[-1].key if page else after))
            return page

        return self.spend(lambda: self._database.read(query, []))


def _checked(row: tuple[object, ...]) -> tuple[bytes, float]:
    match row:
        case (bytes(data), float(modified)) if 0 <= modified < _MAX_TIME_S:
            return data, modified
    raise _strange()


def _listed(row: tuple[object, ...], prefix: str, after: str) -> Listed:
    match row:
        case (str(key), int(size), float(modified), "blob") if (
            0 <= modified < _MAX_TIME_S and after < key and key.startswith(prefix)
        ):
            try:
                return Listed(check_key(key), size, modified)
            except ArgumentError as error:
                raise _strange() from error
    raise _strange()


def _strange() -> CorruptError:
    msg = f"{FILE_NAME} is damaged: a row has other types, or lies elsewhere, than kvwire writes it: {_ADVICE}"
    return CorruptError(msg)
