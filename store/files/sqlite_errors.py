"""The one place where SQLite's errors become kvwire's."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from typing import TYPE_CHECKING

from kvwire.errors import CorruptError, KvwireError, StorageError
from kvwire.store.files import sqlite_checks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
                f"one question takes longer than {sqlite_checks.QUERY_S:g} s: check the disk; "
                f"where that is sound, the file is damaged: {advice}"
            )
        failure = StorageError(f"cannot {verb} {path}: {words}")
        failure.errno = _ERRNO.get(code)
        raise failure from error


def _code(error: sqlite3.Error) -> int:
    """The primary result code; the higher bits only tell more, but for one: a side file that a full disk cuts short."""
    code = int(getattr(error, "sqlite_errorcode", 0) or 0)
    return sqlite3.SQLITE_FULL if code == sqlite3.SQLITE_IOERR_SHMSIZE else code & 0xFF
