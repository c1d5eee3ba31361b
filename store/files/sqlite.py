"""A SQLite database in one file, shared by threads and by processes of one machine.

A database is made whole under another name and then linked into place, so nobody ever opens half of one. It is in WAL
mode: readers and a writer do not wait for each other, and a process that is killed leaves whole transactions. No
connection crosses a fork, and none outlives a replacement of the file.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import weakref
from typing import TYPE_CHECKING, TypeVar

from kvwire.errors import CorruptError, FormatVersionError, KvwireError, StorageError
from kvwire.store.files.os_errors import reading, writing
from kvwire.store.files.writer import CREATE_FLAGS, NEW_FILE_MODE, sync_folder, temporary_beside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

T = TypeVar("T")
_Identity = tuple[int, int]

BUSY_S = 30.0
"""Longest wait for another process's transaction, which takes milliseconds."""
_MAX_VALUE_BYTES = 64 << 20  # of one value or row: what a hostile file may make this process allocate
_WAL_KEPT_BYTES = 64 << 20
_PAGE_BYTES = 16 << 10  # some twenty catalog entries: rows in the order of keys are then read at a stretch
_STILL_ATTEMPTS = 10
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_TOOBIG})
_NOT_WRITABLE = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM})
_HELD = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_NO_LOCKS = "its file system cannot share a database between processes: use a local disk, an S3 bucket or kvwire serve"
_ADVICE = {
    sqlite3.SQLITE_FULL: "the disk is full: free space or move the store to a larger disk",
    sqlite3.SQLITE_IOERR: "the disk reported an input/output error: check its health and free space",
    sqlite3.SQLITE_PROTOCOL: _NO_LOCKS,
    sqlite3.SQLITE_NOLFS: _NO_LOCKS,
    sqlite3.SQLITE_READONLY: "the folder is read-only for this user: remount it or give this user the right to write",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: give this user the right to the file and its folder",
}


class _Pool:
    """Connections of one process that nobody uses at the moment, all of the same file."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.lock = threading.Lock()
        self.identity: _Identity | None = None
        self.idle: list[sqlite3.Connection] = []

    def take(self, identity: _Identity) -> sqlite3.Connection | None:
        with self.lock:
            if identity == self.identity:
                return self.idle.pop() if self.idle else None
            stale, self.idle, self.identity = self.idle, [], identity
        _close_all(stale)
        return None

    def give(self, connection: sqlite3.Connection, identity: _Identity) -> None:
        with self.lock:
            if identity == self.identity:
                self.idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        if self.process != os.getpid():  # SQLite's connections must not be touched in a forked process
            return
        with self.lock:
            stale, self.idle, self.identity = self.idle, [], None
        _close_all(stale)


def _close_all(connections: list[sqlite3.Connection]) -> None:
    for connection in connections:
        connection.close()


_inherited: list[_Pool] = []  # kept for ever: even forgetting a connection of the parent process would close it


class Database:
    """One database file; nothing is opened or made before it is needed.

    Args:
        path: The file.
        schema: SQL that makes an empty one.
        version: Of the schema, refused where the file has another.
        durable: Whether a transaction survives a power cut once ``write`` has returned.
        advice: What to do where the file is damaged.
        busy_s: Longest wait for another process's transaction, in seconds; None for BUSY_S.
    """

    def __init__(
        self, path: Path, schema: str, *, version: int, durable: bool, advice: str, busy_s: float | None = None
    ) -> None:
        """Keep the path."""
        self._path = path
        self._schema = schema
        self._version = version
        self._durable = durable
        self._advice = advice
        self._busy_s = busy_s
        self._start()

    def read(self, query: Callable[[sqlite3.Connection], T], absent: T) -> T:
        """Ask a question.

        Args:
            query: Called with a connection.
            absent: The answer where there is no database yet.

        Returns:
            What the query gives.

        Raises:
            CorruptError: The file is damaged.
            FormatVersionError: The file's schema has another version.
            StorageError: The file cannot be read now.
        """
        identity = self._identity()
        if identity is None:
            return absent
        with self._translated("read"), reading(str(self._path)):
            connection = self._current().take(identity) or self._connect_to_read()
            if connection is None:
                return self._read_still(query)
            with self._lent(connection, identity):
                return query(connection)

    def write(self, change: Callable[[sqlite3.Connection], T]) -> T:
        """Carry out one transaction: all of it, or nothing where it raises.

        Args:
            change: Called with a connection, within the transaction.

        Returns:
            What the change gives.

        Raises:
            CorruptError: The file is damaged.
            FormatVersionError: The file's schema has another version.
            StorageError: The file cannot be written now.
        """
        with self._translated("write"), writing(str(self._path)):
            identity = self._identity()
            if identity is None:
                self._create()
                identity = self._identity()
            if identity is None:
                msg = f"{self._path} was removed while it was being opened: try again"
                raise StorageError(msg)
            connection = self._current().take(identity) or self._connect("mode=rw")
            with self._lent(connection, identity), _transaction(connection):
                return change(connection)

    def close(self) -> None:
        """Close the connections; using the database afterwards opens new ones."""
        self._pool.close()

    def _start(self) -> None:
        self._pool = _Pool()
        weakref.finalize(self, self._pool.close)

    def _current(self) -> _Pool:
        if self._pool.process != os.getpid():
            _inherited.append(self._pool)
            self._start()
        return self._pool

    def _identity(self) -> _Identity | None:
        try:
            about = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            msg = f"cannot read {self._path}: {error.strerror}; give this user the right to its folder"
            raise StorageError(msg) from error
        return about.st_dev, about.st_ino

    @contextlib.contextmanager
    def _lent(self, connection: sqlite3.Connection, identity: _Identity) -> Iterator[None]:
        """Give a connection back after use; after an error nobody knows what state it is in."""
        try:
            yield
        except BaseException:
            connection.close()
            raise
        self._current().give(connection, identity)

    def _connect(self, how: str) -> sqlite3.Connection:
        name, wait_s = f"{self._path.as_uri()}?{how}", self._wait_s()
        connection = sqlite3.connect(name, uri=True, timeout=wait_s, isolation_level=None, check_same_thread=False)
        try:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
            connection.execute("PRAGMA trusted_schema=OFF")
            connection.execute(f"PRAGMA synchronous={'FULL' if self._durable else 'NORMAL'}")
            connection.execute(f"PRAGMA journal_size_limit={_WAL_KEPT_BYTES}")
            self._check_version(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _wait_s(self) -> float:
        return BUSY_S if self._busy_s is None else self._busy_s

    def _check_version(self, connection: sqlite3.Connection) -> None:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version != self._version:
            msg = f"{self._path} has version {version}, this kvwire knows {self._version}: use the one that wrote it"
            raise FormatVersionError(msg)

    def _connect_to_read(self) -> sqlite3.Connection | None:
        """A connection, without the right to write where there is none; None where not even that works.

        Reading takes a side file, which SQLite cannot make in a read-only folder.
        """
        for how in ("mode=rw", "mode=ro"):
            try:
                return self._connect(how)
            except sqlite3.OperationalError as error:
                if _code(error) not in _NOT_WRITABLE:
                    raise
        return None

    def _read_still(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Read the file as if nobody could change it, and again where somebody did."""
        for _ in range(_STILL_ATTEMPTS):
            before = self._stillness()
            with contextlib.closing(self._connect("mode=ro&immutable=1")) as connection:
                try:
                    result = query(connection)
                except sqlite3.DatabaseError:
                    if self._stillness() == before:
                        raise
                    continue
            if self._stillness() == before:
                return result
        msg = f"{self._path} changes while it is being read: give this user the right to write to its folder"
        raise StorageError(msg)

    def _stillness(self) -> tuple[int, int, int]:
        with contextlib.suppress(FileNotFoundError):
            if self._path.with_name(self._path.name + "-wal").stat().st_size:
                msg = (
                    f"{self._path} has changes that are not yet merged, which takes the right to write: "
                    "open the store once with that right, for instance with kvwire store ls"
                )
                raise StorageError(msg)
        about = self._path.stat()
        return about.st_ino, about.st_size, about.st_mtime_ns

    def _create(self) -> None:
        temporary = temporary_beside(self._path)
        try:
            os.close(os.open(temporary, CREATE_FLAGS, NEW_FILE_MODE))
            with contextlib.closing(sqlite3.connect(temporary, timeout=BUSY_S, isolation_level=None)) as connection:
                connection.execute(f"PRAGMA page_size={_PAGE_BYTES}")
                if connection.execute("PRAGMA journal_mode=WAL").fetchone()[0] != "wal":
                    msg = f"cannot make {self._path}: {_NO_LOCKS}"
                    raise StorageError(msg)
                with _transaction(connection):
                    connection.execute(self._schema)
                    connection.execute(f"PRAGMA user_version={self._version}")
            with contextlib.suppress(FileExistsError):  # another process was faster
                os.link(temporary, self._path)
        finally:
            for end in ("", "-wal", "-shm", "-journal"):
                temporary.with_name(temporary.name + end).unlink(missing_ok=True)
        sync_folder(self._path.parent)

    @contextlib.contextmanager
    def _translated(self, verb: str) -> Iterator[None]:
        try:
            yield
        except KvwireError:
            raise
        except sqlite3.Error as error:
            code = _code(error)
            if code in _DAMAGED or (code == sqlite3.SQLITE_ERROR and "no such" in str(error)):
                msg = f"{self._path} is damaged ({error}): {self._advice}"
                raise CorruptError(msg) from error
            if code in _NOT_WRITABLE and not os.access(self._path.parent, os.W_OK):
                code = sqlite3.SQLITE_READONLY
            held = f"another process has held it for more than {self._wait_s():g} s: try again, or end that process"
            msg = f"cannot {verb} {self._path}: {held if code in _HELD else _ADVICE.get(code, str(error))}"
            raise StorageError(msg) from error


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if connection.in_transaction:  # SQLite ends it by itself where the disk is full
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _code(error: sqlite3.Error) -> int:
    """The primary result code; the higher bits only tell more."""
    return int(getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF
