"""Processes that share a folder: each has a subfolder of its own, held by a file lock.

A lock ends with its process, however that ends; the next process to come finds the subfolder free and takes over what
is in it. So nobody else changes the files that a process accounts for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING

from kvwire._forks import in_child
from kvwire.store.files.writer import sync_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MODE = 0o700  # caches of conversations are private
_MANY = 1024


class LockedFolder:
    """A subfolder that this process holds until it closes the slot or ends."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        """Take over the locked descriptor."""
        self.folder = folder
        self._descriptor = descriptor
        in_child(self, LockedFolder.close)  # so that the lock ends with this process, whatever its children do

    def close(self) -> None:
        """Let others have it; closing twice is no error."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def make_folder(folder: Path) -> None:
    """Make a private folder where there is none, and those above it; flushed, since pending writes rely on it."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(mode=_MODE, exist_ok=True)
        sync_folder(path.parent)


def lock_folder(root: Path) -> LockedFolder:
    """Hold the first free subfolder, made where there is none."""
    make_folder(root)
    for number in range(_MANY):
        folder = root / f"slot-{number}"
        make_folder(folder)
        if (slot := _locked(folder)) is not None:
            return slot
    msg = f"more than {_MANY} processes share {root}"
    raise OSError(msg)


def unlocked_folders(root: Path) -> Iterator[LockedFolder]:
    """Subfolders that nobody holds."""
    for number in range(_MANY):
        folder = root / f"slot-{number}"
        if not folder.is_dir():
            return
        with contextlib.suppress(OSError):
            slot = _locked(folder)
            if slot is not None:
                with contextlib.closing(slot):
                    yield slot


def _locked(folder: Path) -> LockedFolder | None:
    """The slot, or None where another process has it."""
    path = folder / "lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # a read-only file system can be locked too
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return LockedFolder(folder, descriptor)
