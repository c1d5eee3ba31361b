"""A SQLite database in one file, shared by threads and by processes of one machine.

A database is made whole under another name and then linked into place, so no process opens half of one. It is in WAL
mode: readers and a writer do not wait for each other, and a process that is killed leaves whole transactions. No
connection crosses a fork, and none outlives a replacement of the file.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import sqlite3
import time
import weakref
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from kvwire._forks import in_child
from kvwire.errors import CorruptError, FormatVersionError, StorageError
from kvwire.store.files.files import CREATE_FLAGS, NEW_FILE_MODE, reading, sync_folder, temporary_name, writing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


QUERY_S = 60.0
"""Longest time of one question or transaction; ordinary ones take milliseconds."""
_STEPS = 10_000  # of SQLite's machine between looks at the clock
_MAX_VALUE_BYTES = 64 << 20  # of one value or row: what a hostile file may make this process allocate
_LAYOUT = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name LIMIT 10"
_Layout = list[tuple[object, ...]]
NO_LOCKS = "its file system cannot share a database between processes: use a local disk, an S3 bucket or kvwire serve"
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_TOOBIG})
_DAMAGED_WORDS = ("no such", "Could not decode")  # a table that is gone; a text that is none, which has no code
_NOT_WRITABLE = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM})
_HELD = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_ERRNO = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_IOERR: errno.EIO}
_ADVICE = {
    sqlite3.SQLITE_FULL: "the disk is full: free space or move the store to a larger disk",
    sqlite3.SQLITE_IOERR: "the disk reported an input/output error: check its health, free space and quota",
    sqlite3.SQLITE_PROTOCOL: NO_LOCKS,
    sqlite3.SQLITE_NOLFS: NO_LOCKS,
    sqlite3.SQLITE_READONLY: "the folder is read-only for this user: remount it or give this user the right to write",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: give this user the right to the file and its folder",
}
T = TypeVar("T")
_C = TypeVar("_C", sqlite3.Connection, "sqlite3.Connection | None")
_Identity = tuple[int, int]
BUSY_S = 30.0
"""Longest wait for another process's transaction, which takes milliseconds."""
_WAL_KEPT_BYTES = 64 << 20
_WAL_PAGES = 128  # merged beyond: what a killed process leaves unmerged must fit into what is kept aside for deletions
_PAGE_BYTES = 16 << 10  # some twenty catalog entries: rows in the order of keys are then read at a stretch
_STILL_ATTEMPTS = 10
_MERGE_MS = 1000  # longest wait for others: what merging gains is worth no more
_inherited: list[object] = []  # kept for ever: even forgetting a connection of the parent process would close it


@cache
def _layout(schema: str) -> _Layout:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(schema)
        return connection.execute(_LAYOUT).fetchall()


class Database:
    """One database file; nothing is opened or made before it is needed."""

    def __init__(
        self,
        path: Path,
        schema: str,
        *,
        version: int,
        durable: bool,
        advice: str,
        busy_s: float | None = None,
        older: tuple[str, ...] = (),
    ) -> None:
        """Keep the path."""
        self._path = path
        self._schema = schema
        self._schemas = (schema, *older)
        self._version = version
        self._durable = durable
        self._advice = advice
        self._busy_s = busy_s
        self._idle: list[tuple[_Identity, sqlite3.Connection]] = []  # a list's pop and append are atomic
        in_child(self, Database._leave_to_parent)
        atexit.register(_merge_at_exit, weakref.ref(self))

    def read(self, query: Callable[[sqlite3.Connection], T], absent: T) -> T:
        """Ask a question."""
        identity = self._identity()
        if identity is None:
            return absent
        with (
            self._translated("read"),
            reading(str(self._path)),
            self._lent(identity, self._connect_to_read) as connection,
        ):
            return query(connection) if connection else self._read_still(query)

    def write(self, change: Callable[[sqlite3.Connection], T]) -> T:
        """Carry out one transaction: all of it, or nothing where it raises."""
        with self._translated("write"), writing(str(self._path)):
            identity = self._identity()
            if identity is None:
                self._create()
                identity = self._identity()
            if identity is None:
                raise StorageError(f"{self._path} was removed while it was being opened: try again")
            with self._lent(identity, lambda: self._connect("mode=rw")) as connection, _transaction(connection):
                return change(connection)

    def merge(self) -> None:
        """Put the log's changes into the file and give its space back, as far as others let it and the disk allows."""
        with (
            contextlib.suppress(sqlite3.Error, StorageError),
            contextlib.closing(self._connect("mode=rw")) as connection,
        ):
            connection.execute(f"PRAGMA busy_timeout={_MERGE_MS}")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the connections; using the database afterwards opens new ones."""
        idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def _leave_to_parent(self) -> None:
        _inherited.append(self._idle)
        self._idle = []

    def _identity(self) -> _Identity | None:
        try:
            return _identity_of(self._path)
        except (FileNotFoundError, NotADirectoryError):
            self._refuse_orphan()
            return None
        except OSError as error:
            msg = f"cannot read {self._path}: {error.strerror}; give this user the right to its folder"
            raise StorageError(msg) from error

    def _refuse_orphan(self) -> None:
        """Raise CorruptError where changes lie without their database: SQLite would put them into a new one."""
        if self._has_log() and not self._path.exists():
            name = self._path.name
            raise CorruptError(
                f"{self._path}-wal holds changes of a database that is gone: put {name} back beside it, "
                f"or remove {name}-wal and {name}-shm too"
            )

    def _has_log(self) -> bool:
        """Whether changes lie beside the file that are, or may be, not in it yet."""
        try:
            return self._path.with_name(self._path.name + "-wal").stat().st_size > 0
        except (FileNotFoundError, NotADirectoryError):
            return False

    @contextlib.contextmanager
    def _lent(self, identity: _Identity, connect: Callable[[], _C]) -> Iterator[sqlite3.Connection | _C]:
        """An idle connection, or a new one; after an error its state is unknown, and it is closed."""
        # No finalizer closes what is idle: an exit that a signal asks for would be lost in it.
        idle = self._idle  # what comes back after a fork, or after ``close``, is not used again
        connection = _taken(idle, identity) or connect()
        if connection is None:
            yield connection
            return
        _limit_time(connection)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with contextlib.suppress(OSError):
            if _identity_of(self._path) == identity:
                idle.append((identity, connection))
                return
        connection.close()  # the file was replaced meanwhile

    def _connect(self, how: str) -> sqlite3.Connection:
        name, wait_s = f"{self._path.as_uri()}?{how}", self._wait_s()
        connection = sqlite3.connect(name, uri=True, timeout=wait_s, isolation_level=None, check_same_thread=False)
        try:
            _limit_time(connection)
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
            connection.execute("PRAGMA trusted_schema=OFF")  # nothing that a file says is trusted
            connection.execute("PRAGMA cell_size_check=ON")
            connection.execute(f"PRAGMA synchronous={'FULL' if self._durable else 'NORMAL'}")
            connection.execute(f"PRAGMA journal_size_limit={_WAL_KEPT_BYTES}")
            connection.execute(f"PRAGMA wal_autocheckpoint={_WAL_PAGES}")
            self._check_layout(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_layout(self, connection: sqlite3.Connection) -> None:
        """Look whether a file is of this version, and declares what one of the schemas makes and nothing else."""
        path, advice = self._path, self._advice
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        found = connection.execute(_LAYOUT).fetchall()
        if not version and not found:
            raise CorruptError(f"{path} is damaged: it is empty, and kvwire leaves none so: {advice}")
        if version != self._version:
            msg = f"{path} has version {version}, this kvwire knows {self._version}: use the one that wrote it"
            raise FormatVersionError(msg)
        if not any(found == _layout(schema) for schema in self._schemas):
            known = [one for schema in self._schemas for one in _layout(schema)]
            strange = [f"the {kind} {str(name)[:80]!r}" for kind, name, *_ in found if (kind, name, *_) not in known]
            what = f"it holds {', '.join(strange)}" if strange else "its table is not there"
            raise CorruptError(f"{path} is not as kvwire made it ({what}): {advice}")

    def _wait_s(self) -> float:
        return BUSY_S if self._busy_s is None else self._busy_s

    def _connect_to_read(self) -> sqlite3.Connection | None:
        """A connection, read-only where need be; None where the side file for reading cannot be made."""
        for how in ("mode=rw", "mode=ro"):
            try:
                return self._connect(how)
            except sqlite3.OperationalError as error:
                code = _code(error)
                if code == sqlite3.SQLITE_FULL and not self._has_log():
                    return None
                if code not in _NOT_WRITABLE:
                    raise
        return None

    def _read_still(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Read the file as if it could not change, and again where it did."""
        for _ in range(_STILL_ATTEMPTS):
            before = self._stillness()
            try:
                with contextlib.closing(self._connect("mode=ro&immutable=1")) as connection:
                    result = query(connection)
            except (sqlite3.DatabaseError, CorruptError):
                if self._stillness() == before:
                    raise
                continue
            if self._stillness() == before:
                return result
        msg = f"{self._path} changes while it is being read: give this user the right to write to its folder"
        raise StorageError(msg)

    def _stillness(self) -> tuple[int, int, int]:
        if self._has_log():
            raise StorageError(
                f"{self._path} has changes that are not yet merged, which takes the right to write: "
                "open the store once with that right, for instance with kvwire store ls"
            )
        about = self._path.stat()
        return about.st_ino, about.st_size, about.st_mtime_ns

    def _create(self) -> None:
        temporary = self._path.with_name(temporary_name())
        try:
            os.close(os.open(temporary, CREATE_FLAGS, NEW_FILE_MODE))
            with contextlib.closing(sqlite3.connect(temporary, timeout=BUSY_S, isolation_level=None)) as connection:
                connection.execute(f"PRAGMA page_size={_PAGE_BYTES}")
                if connection.execute("PRAGMA journal_mode=WAL").fetchone()[0] != "wal":
                    raise StorageError(f"cannot make {self._path}: {NO_LOCKS}")
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
        """Translate what SQLite raises."""
        path, advice = self._path, self._advice
        try:
            yield
        except sqlite3.Error as error:
            code = _code(error)
            if code in _DAMAGED or any(words in str(error) for words in _DAMAGED_WORDS):
                raise CorruptError(f"{path} is damaged ({error}): {advice}") from error
            if code in _NOT_WRITABLE and not os.access(path.parent, os.W_OK):
                code = sqlite3.SQLITE_READONLY
            words = _ADVICE.get(code, str(error))
            if code in _HELD:
                words = (
                    f"another process has held it for more than {self._wait_s():g} s: try again, or end that process"
                )
            if code == sqlite3.SQLITE_INTERRUPT:
                words = (
                    f"one question takes longer than {QUERY_S:g} s: check the disk; "
                    f"where that is sound, the file is damaged: {advice}"
                )
            failure = StorageError(f"cannot {verb} {path}: {words}")
            failure.errno = _ERRNO.get(code)
            raise failure from error


def _code(error: sqlite3.Error) -> int:
    """The primary result code; the higher bits only tell more, but for one: a side file that a full disk cuts short."""
    code = int(getattr(error, "sqlite_errorcode", 0) or 0)
    return sqlite3.SQLITE_FULL if code == sqlite3.SQLITE_IOERR_SHMSIZE else code & 0xFF


def _limit_time(connection: sqlite3.Connection) -> None:
    """Interrupt whatever is asked once QUERY_S from now are over."""
    end = time.monotonic() + QUERY_S
    connection.set_progress_handler(lambda: time.monotonic() > end, _STEPS)


def _identity_of(path: Path) -> _Identity:
    about = path.stat()
    return about.st_dev, about.st_ino


def _merge_at_exit(database: weakref.ref[Database]) -> None:
    """Close what is idle: the last connection to close puts the log's changes into the file."""
    if (left := database()) is not None:
        with contextlib.suppress(sqlite3.Error):
            left.close()


def _taken(idle: list[tuple[_Identity, sqlite3.Connection]], identity: _Identity) -> sqlite3.Connection | None:
    """An idle connection to this very file; those to a file that was replaced are closed."""
    with contextlib.suppress(IndexError):
        while True:
            opened, connection = idle.pop()
            if opened == identity:
                return connection
            connection.close()
    return None


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
