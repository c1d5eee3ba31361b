"""Writing files so that they survive a power cut, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from kvwire.store.base import Data

TEMPORARY = ".tmp-"
"""What the names of unfinished files start with: a dot, as no key does."""
CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
NEW_FILE_MODE = 0o666
"""Less the umask, as for any program's files: other users may serve the folder."""


def temporary_name() -> str:
    """A name for an unfinished file, which nobody else uses."""
    return f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"


def replace_file(folder: int, name: str, data: Data) -> None:
    """Write a file under another name, flush it, rename it into place and flush the rename."""
    temporary = temporary_name()
    try:
        _write_file(folder, temporary, data)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    sync_folder(".", folder)


def put_in_place(written: Path, target: Path) -> None:
    """Flush a file that somebody wrote and closed, rename it into place in the same folder, and flush the rename."""
    descriptor = os.open(written, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    written.replace(target)
    sync_folder(target.parent)


def _write_file(folder: int, name: str, data: Data) -> None:
    descriptor = os.open(name, CREATE_FLAGS, NEW_FILE_MODE, dir_fd=folder)
    try:
        view = memoryview(data)
        while view:
            written = os.write(descriptor, view)
            if not written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            view = view[written:]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: str | Path, within: int | None = None) -> None:
    """Flush a folder's entries, where the file system knows how to."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC, dir_fd=within)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
