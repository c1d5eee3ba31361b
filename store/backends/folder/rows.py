"""The catalog objects of a folder store: rows of one database, so that a million documents are not a million files."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING, TypeVar

from kvwire.errors import ArgumentError, CorruptError, StorageError
from kvwire.store.base import Listed
from kvwire.store.files.sqlite import Database
from kvwire.store.keys import check_key
from kvwire.store.memory_snapshot import MemorySnapshot

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from kvwire.store.base import Data
    from kvwire.store.files.reserve import Reserve

T = TypeVar("T")

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


class CatalogRows:
    """Keys and bytes in one table, ordered by key. Safe for threads and for processes of one machine."""

    def __init__(self, folder: Path, reserve: Reserve) -> None:
        """Keep the path; the database is made on the first write."""
        self._reserve = reserve
        self._database = Database(
            folder / FILE_NAME, _SCHEMA, older=_OLDER, version=_VERSION, durable=True, advice=_ADVICE
        )

    def find(self, key: str) -> MemorySnapshot | None:
        """Look a key up."""

        def query(connection: sqlite3.Connection) -> MemorySnapshot | None:
            row = connection.execute(_FIND, (key,)).fetchone()
            return MemorySnapshot(key, *_checked(row)) if row else None

        return self._spend(lambda: self._database.read(query, None))

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
        known = self._spend(
            lambda: self._database.read(
                lambda connection: any(connection.execute(_FIND, row).fetchone() for row in rows), absent=False
            )
        )
        if known:
            self._delete(rows)

    def _spend(self, action: Callable[[], T]) -> T:
        return self._reserve.spend(action, before_retry=self._database.merge)

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
            self._spend(write)
        else:
            write()
        self._reserve.keep()

    def scan(self, prefix: str, after: str) -> Iterator[Listed]:
        """List rows."""
        while page := self._page(prefix, after):
            yield from page
            after = page[-1].key

    def close(self) -> None:
        """Close the connections."""
        self._database.close()

    def _page(self, prefix: str, after: str) -> list[Listed]:
        # One lower bound: of two, SQLite seeks to one and passes over every row up to the other.
        bounds = (max(prefix, after + _NEXT) if after else prefix, prefix + _PAST, _PAGE)

        def query(connection: sqlite3.Connection) -> list[Listed]:
            page: list[Listed] = []
            for row in connection.execute(_SCAN, bounds):
                page.append(_listed(row, prefix, page[-1].key if page else after))
            return page

        return self._spend(lambda: self._database.read(query, []))


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
