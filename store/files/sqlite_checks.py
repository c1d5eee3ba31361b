"""Whether a SQLite file is one that kvwire made, and SQLite's errors as kvwire's.

A file may come from anybody: a view in place of the table would be asked without end, a trigger would change what is
written. So what a file declares has to be, word for word, what kvwire declares.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import time
from functools import cache, partial
from typing import TYPE_CHECKING

from kvwire.errors import CorruptError, FormatVersionError, KvwireError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
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


def restrict(connection: sqlite3.Connection) -> None:
    """Trust nothing of what a file says: before anything is asked of it."""
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
    connection.execute("PRAGMA trusted_schema=OFF")
    connection.execute("PRAGMA cell_size_check=ON")


def limit_time(connection: sqlite3.Connection) -> None:
    """Interrupt whatever is asked once QUERY_S from now are over."""
    connection.set_progress_handler(partial(_is_over, time.monotonic() + QUERY_S), _STEPS)


def check_layout(connection: sqlite3.Connection, path: Path, schemas: Sequence[str], version: int, advice: str) -> None:
    """Look whether a file is of this version, and declares what one of the schemas makes and nothing else."""
    found_version = connection.execute("PRAGMA user_version").fetchone()[0]
    found = connection.execute(_LAYOUT).fetchall()
    if not found_version and not found:
        msg = f"{path} is damaged: it is empty, and kvwire leaves none so: {advice}"
        raise CorruptError(msg)
    if found_version != version:
        msg = f"{path} has version {found_version}, this kvwire knows {version}: use the one that wrote it"
        raise FormatVersionError(msg)
    if not any(found == _layout(schema) for schema in schemas):
        known = [one for schema in schemas for one in _layout(schema)]
        strange = [f"the {kind} {str(name)[:80]!r}" for kind, name, *_ in found if (kind, name, *_) not in known]
        what = f"it holds {', '.join(strange)}" if strange else "its table is not there"
        msg = f"{path} is not as kvwire made it ({what}): {advice}"
        raise CorruptError(msg)


@cache
def _layout(schema: str) -> _Layout:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(schema)
        return connection.execute(_LAYOUT).fetchall()


def _is_over(end: float) -> bool:
    return time.monotonic() > end


def is_not_writable(error: sqlite3.Error) -> bool:
    """Whether the right to write is missing."""
    return _code(error) in _NOT_WRITABLE


def is_full(error: sqlite3.Error) -> bool:
    """Whether the disk takes no more."""
    return _code(error) == sqlite3.SQLITE_FULL


@contextlib.contextmanager
def translated(path: Path, verb: str, *, advice: str, wait_s: float) -> Iterator[None]:
    """Translate what SQLite raises."""
    try:
        yield
    except KvwireError:
        raise
    except sqlite3.Error as error:
        code = _code(error)
        if code in _DAMAGED or any(words in str(error) for words in _DAMAGED_WORDS):
            msg = f"{path} is damaged ({error}): {advice}"
            raise CorruptError(msg) from error
        if code in _NOT_WRITABLE and not os.access(path.parent, os.W_OK):
            code = sqlite3.SQLITE_READONLY
        words = _ADVICE.get(code, str(error))
        if code in _HELD:
            words = f"another process has held it for more than {wait_s:g} s: try again, or end that process"
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
