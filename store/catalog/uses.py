"""How often documents were used, which decides whose caches are worth keeping.

Source: KVLink appendix A.7 (arXiv 2502.16002): caches for documents that are used often, text for the rest.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from kvwire._forks import lock_of_process
from kvwire.errors import CorruptError, NotFoundError
from kvwire.store.files.sqlite import Database

if TYPE_CHECKING:
    import os
    import sqlite3

_SCHEMA = (
    "CREATE TABLE uses (scope TEXT NOT NULL, document TEXT NOT NULL, count INTEGER NOT NULL, "
    "PRIMARY KEY (scope, document)) WITHOUT ROWID"
)
_VERSION = 1
_ADD = (
    "INSERT INTO uses (scope, document, count) VALUES (?, ?, 1) "
    "ON CONFLICT (scope, document) DO UPDATE SET count = count + 1"
)
_COUNT = "SELECT count FROM uses WHERE scope = ? AND document = ?"
_REACHED = "SELECT document FROM uses WHERE scope = ? AND count >= ? ORDER BY count DESC, document"
_ADVICE = "delete it; counting then starts anew"
MOST_COUNTED = 100_000
BUSY_S = 0.2
"""Longest wait for another process that holds the file: a count is not worth an answer's delay."""


class UseCounts:
    """Counts in this process's memory, of some 100,000 documents of a scope: beyond that, the least used are forgotten.

    A ``scope`` is what tells tenants and models apart, such as ``KeySpace.root``.
    """

    def __init__(self) -> None:
        """Start at nothing."""
        self._lock = lock_of_process()
        self._counts: defaultdict[str, dict[str, int]] = defaultdict(dict)

    def add(self, scope: str, document_id: str) -> None:
        """Count one use.

        Args:
            scope: The tenant and model.
            document_id: The document that was used.
        """
        with self._lock:
            counts = self._counts[scope]
            counts[document_id] = counts.get(document_id, 0) + 1
            if len(counts) > MOST_COUNTED:  # of those used alike, the latest stay
                kept = sorted(counts, key=counts.__getitem__)[-MOST_COUNTED // 2 :]
                self._counts[scope] = {name: counts[name] for name in kept}

    def count(self, scope: str, document_id: str) -> int:
        """Ask how often a document was used.

        Args:
            scope: The tenant and model.
            document_id: The document.

        Returns:
            Its uses so far.
        """
        with self._lock:
            return self._counts[scope].get(document_id, 0)

    def reached(self, scope: str, least: int) -> list[str]:
        """Documents with at least so many uses.

        Args:
            scope: The tenant and model.
            least: The number of uses.

        Returns:
            Ids of documents, the most used first.
        """
        with self._lock:
            found = [(-count, name) for name, count in self._counts[scope].items() if count >= least]
        return [name for _, name in sorted(found)]

    def close(self) -> None:
        """Nothing is held but memory."""


class UseFile(UseCounts):
    """Counts in a file, shared by the processes of one machine. A power cut may cost the last few uses."""

    def __init__(self, path: str | os.PathLike[str], *, busy_s: float = BUSY_S) -> None:
        """Keep the path; the file is made at the first use."""
        path = Path(path).absolute()
        if not path.parent.is_dir():
            raise NotFoundError(f"{path.parent} is not a folder; make it, or name another file for the counts")
        self._database = Database(path, _SCHEMA, version=_VERSION, durable=False, advice=_ADVICE, busy_s=busy_s)

    def add(self, scope: str, document_id: str) -> None:
        """Count one use."""
        self._database.write(lambda connection: connection.execute(_ADD, (scope, document_id)))

    def count(self, scope: str, document_id: str) -> int:
        """Uses of a document so far."""

        def query(connection: sqlite3.Connection) -> int:
            match connection.execute(_COUNT, (scope, document_id)).fetchone():
                case None:
                    return 0
                case (int(count),):
                    return count
            raise _strange()

        return self._database.read(query, 0)

    def reached(self, scope: str, least: int) -> list[str]:
        """Documents with at least so many uses, the most used first."""

        def query(connection: sqlite3.Connection) -> list[str]:
            names = [row[0] for row in connection.execute(_REACHED, (scope, least))]
            if not all(isinstance(name, str) for name in names):
                raise _strange()
            return names

        return self._database.read(query, [])

    def close(self) -> None:
        """Close the file."""
        self._database.close()


def _strange() -> CorruptError:
    return CorruptError(f"a count of uses has another type than kvwire writes: {_ADVICE}")
