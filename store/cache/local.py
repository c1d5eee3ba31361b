"""Background threads, and subfolders that one process each holds locked."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from kvwire._forks import in_child
from kvwire.store.files.files import make_folders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_log = logging.getLogger(__name__)
FOLDER_MODE = 0o700
"""Caches of conversations are private."""
_MANY = 1024


class Worker:
    """Threads that do jobs in the order in which they came. Its end does not wait for them: jobs may be cut off."""

    def __init__(self, name: str, threads: int = 1) -> None:
        """Start nothing yet."""
        self._name = name
        self._limit = threads
        self._threads: list[threading.Thread] = []
        self._jobs: deque[Callable[[], None]] = deque()
        self._running = 0
        self._closed = False
        self._changed = threading.Condition()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job; after ``close`` it is dropped."""
        with self._changed:
            if self._closed:
                return
            self._jobs.append(job)
            if len(self._threads) < min(self._limit, self._running + len(self._jobs)):
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()

    @property
    def queued(self) -> int:
        """Jobs that wait for a thread."""
        return len(self._jobs)

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is left to do."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._running, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Drop what has not begun, and wait for what has."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify_all()
        give_up_at = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, give_up_at - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    return
                job = self._jobs.popleft()
                self._running += 1
            try:
                job()
            except Exception:  # noqa: BLE001 - one broken job must not end the thread that all others need
                _log.exception("%s: a job failed", self._name)
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()


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


def lock_folder(root: Path) -> LockedFolder:
    """Hold the first free subfolder, made where there is none."""
    make_folders(root, FOLDER_MODE)
    for number in range(_MANY):
        folder = root / f"slot-{number}"
        make_folders(folder, FOLDER_MODE)
        if (slot := _locked(folder)) is not None:
            return slot
    raise OSError(f"more than {_MANY} processes share {root}")


def unlocked_folders(root: Path) -> Iterator[LockedFolder]:
    """Subfolders that no process holds."""
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
