"""Writing files so that they survive a power cut, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from typing import TYPE_CHECKING

from kvwire.errors import StorageError

if TYPE_CHECKING:
    from pathlib import Path

    from kvwire.store.base import Data

TEMPORARY = ".tmp-"
"""What the names of unfinished files start with: a dot, as no key does."""
CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
NEW_FILE_MODE = 0o666
"""Less the umask, as for any program's files: other users may serve the folder."""


def temporary_beside(path: Path) -> Path:
    """A name for an unfinished file in the same folder, which nobody else uses.

    Args:
        path: The file's final place.

    Returns:
        The unfinished file's path.
    """
    return path.with_name(f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}")


def replace_file(path: Path, data: Data) -> None:
    """Write a file under another name, flush it, rename it into place and flush the rename.

    Args:
        path: The file.
        data: All of its bytes.

    Raises:
        StorageError: The file system takes no more bytes.
    """
    temporary = temporary_beside(path)
    try:
        _write_file(temporary, data)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def _write_file(path: Path, data: Data) -> None:
    descriptor = os.open(path, CREATE_FLAGS, NEW_FILE_MODE)
    try:
        view = memoryview(data)
        while view:
            written = os.write(descriptor, view)
            if not written:
                msg = f"cannot write {path}: the file system takes no more bytes; check its free space"
                raise StorageError(msg)
            view = view[written:]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, where the file system knows how to.

    Args:
        folder: The folder.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
