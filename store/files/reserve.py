"""Space that is kept aside, so that things can be deleted from a full disk: deleting takes space too, for a while."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING, TypeVar

from kvwire.errors import StorageError
from kvwire.store.files.writer import CREATE_FLAGS, temporary_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

T = TypeVar("T")

RESERVE_BYTES = 4 << 20
"""At most: some two hundred of a database's pages."""
_LEAST_BYTES = 256 << 10
_PLENTY_BYTES = 8 * RESERVE_BYTES  # below that, nothing is taken away from those who need it
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""A database tells a quota that is used up as an input/output error."""


class Reserve:
    """A file without content that takes up space, and is removed when a deletion finds none.

    It is twice as large as a database and its log, RESERVE_BYTES at most.
    """

    def __init__(self, path: Path, database: Path) -> None:
        """Keep the paths; nothing is made yet."""
        self._path = path
        self._database = database
        self._spent_bytes = 0

    def spend(self, action: Callable[[], T], before_retry: Callable[[], None] | None = None) -> T:
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
        if before_retry is not None:
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
