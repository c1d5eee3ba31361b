"""The catalog objects of a folder store: rows of one database, so that a million documents are not a million files."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvwire.errors import CorruptError
from kvwire.store.base import Listed
from kvwire.store.files.sqlite import Database
from kvwire.store.memory_snapshot import MemorySnapshot

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from kvwire.store.base import Data

FILE_NAME = ".catalog.sqlite"
"""Begins with a dot, as no key does."""
_SCHEMA = (
    "CREATE TABLE objects (key TEXT NOT NULL PRIMARY KEY, modified REAL NOT NULL, data BLOB NOT NULL) WITHOUT ROWID"
)
_VERSION = 1
_PUT = (
    "INSERT INTO objects (key, modified, data) VALUES (?, ?, ?) "
    "ON CONFLICT (key) DO UPDATE SET modified = excluded.modified, data = excluded.data"
)
_FIND = "SELECT data, modified FROM objects WHERE key = ?"
_SCAN = "SELECT key, length(data), modified FROM objects WHERE key >= ? AND key < ? ORDER BY key LIMIT ?"
_DELETE = "DELETE FROM objects WHERE key = ?"
_PAST = "\x7f"  # sorts after every character of a key
_NEXT = "\0"  # a key and this sort between the key and all later ones
_PAGE = 1000
_ADVICE = "restore it from a copy, mend it with sqlite3's .recover, or delete it and encode the documents again"


class CatalogRows:
    """Keys and bytes in one table, ordered by key. Safe for threads and for processes of one machine."""

    def __init__(self, folder: Path) -> None:
        """Keep the path; the database is made on the first write.

        Args:
            folder: Where the database lies; it must be there by the first write.
        """
        self._database = Database(folder / FILE_NAME, _SCHEMA, version=_VERSION, durable=True, advice=_ADVICE)

    def find(self, key: str) -> MemorySnapshot | None:
        """Look a key up.

        Args:
            key: The key.

        Returns:
            Its row; None where there is none.

        Raises:
            CorruptError: The row holds other types than kvwire writes.
        """

        def query(connection: sqlite3.Connection) -> MemorySnapshot | None:
            row = connection.execute(_FIND, (key,)).fetchone()
            return MemorySnapshot(key, *_checked(row)) if row else None

        return self._database.read(query, None)

    def put(self, items: Iterable[tuple[str, Data]]) -> None:
        """Write rows, all or none; when this returns they survive a power cut.

        Args:
            items: Keys and bytes.
        """
        now = time.time()
        rows = [(key, now, bytes(data)) for key, data in items]
        self._database.write(lambda connection: connection.executemany(_PUT, rows))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove rows, all or none; what is not there is no error.

        Args:
            keys: The rows' keys.
        """
        rows = [(key,) for key in keys]
        known = self._database.read(
            lambda connection: any(connection.execute(_FIND, row).fetchone() for row in rows), absent=False
        )
        if known:
            self._database.write(lambda connection: connection.executemany(_DELETE, rows))

    def scan(self, prefix: str, after: str) -> Iterator[Listed]:
        """List rows.

        Args:
            prefix: What their keys start with.
            after: Keys up to this one are left out; empty: none is.

        Returns:
            Rows in the order of keys, read in pages while iterating.
        """
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
            return [Listed(key, size, when) for key, size, when in connection.execute(_SCAN, bounds)]

        return self._database.read(query, [])


def _checked(row: tuple[object, ...]) -> tuple[bytes, float]:
    match row:
        case (bytes(data), float(modified)):
            return data, modified
    msg = f"{FILE_NAME} holds a row of other types than kvwire writes: {_ADVICE}"
    raise CorruptError(msg)
