"""The one place where the operating system's errors become kvwire's."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvwire.errors import KvwireError, NotFoundError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_ADVICE = {
    errno.ENOSPC: "the disk is full: free space or move the store to a larger disk",
    errno.EDQUOT: "the disk quota is used up: free space or raise the quota",
    errno.EROFS: "the file system is read-only: remount it for writing or open a store elsewhere",
    errno.EACCES: "permission denied: give this user the right to the folder or open a store elsewhere",
    errno.EPERM: "not permitted: give this user the right to the folder or open a store elsewhere",
    errno.EMFILE: "this process has too many open files: raise its limit (ulimit -n)",
    errno.ENFILE: "the machine has too many open files: raise its limit (fs.file-max)",
    errno.ENAMETOOLONG: "the path is too long for the file system: use a shorter folder name",
    errno.ENOTDIR: "a file lies where a folder is needed: move it away or open a store elsewhere",
    errno.EIO: "the disk reported an input/output error: check its health",
}
# What reading a missing object looks like; ELOOP is how O_NOFOLLOW refuses a symbolic link.
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO})


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Translate errors met while reading."""
    try:
        yield
    except KvwireError:
        raise
    except OSError as error:
        if error.errno in _ABSENT:
            msg = f"{what} is not there; check the address, or encode the document again"
            raise NotFoundError(msg) from error
        raise _translated(error, "read", what) from error


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Translate errors met while writing, deleting or making folders."""
    try:
        yield
    except KvwireError:
        raise
    except OSError as error:
        raise _translated(error, "write", what) from error


def _translated(error: OSError, verb: str, what: str) -> StorageError:
    advice = _ADVICE.get(error.errno or 0, error.strerror or str(error))
    translated = StorageError(f"cannot {verb} {what}: {advice}")
    translated.errno = error.errno
    return translated
