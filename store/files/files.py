"""Files: read from open descriptors, written so that they survive a power cut, and errors in words."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from kvwire.errors import KvwireError, NotFoundError, StorageError
from kvwire.store.base import clamp_range
from kvwire.store.key_kinds import content_digest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kvwire.store.base import Data
    from kvwire.store.recent import Recent


_ADVICE = {
    errno.ENOSPC: "the disk is full: free space or move the store to a larger disk",
    errno.EDQUOT: "the disk quota is used up: free space or raise the quota",
    errno.EFBIG: "files may not be so large here: raise the limit (ulimit -f) or open a store on another file system",
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
TEMPORARY = ".tmp-"
"""What the names of unfinished files start with: a dot, as no key does."""
CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
NEW_FILE_MODE = 0o666
"""Less the umask, as for any program's files: other users may serve the folder."""
FileIdentity = tuple[int, int, int, int, int]
"""Device, inode, size and both times: no file is written to in place, and a replacement has another inode."""
_HASH_PIECE = 1 << 20


@contextmanager
def _translated(verb: str, what: str) -> Iterator[None]:
    try:
        yield
    except KvwireError:
        raise
    except OSError as error:
        if verb == "read" and error.errno in _ABSENT:
            raise NotFoundError(f"{what} is not there; check the address, or encode the document again") from error
        advice = _ADVICE.get(error.errno or 0, error.strerror or str(error))
        translated = StorageError(f"cannot {verb} {what}: {advice}")
        translated.errno = error.errno
        raise translated from error


def reading(what: str) -> AbstractContextManager[None]:
    """Translate errors met while reading."""
    return _translated("read", what)


def writing(what: str) -> AbstractContextManager[None]:
    """Translate errors met while writing, deleting or making folders."""
    return _translated("write", what)


def temporary_name() -> str:
    """A name for an unfinished file, unique to it."""
    return f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"


def replace_file(folder: int, name: str, data: Data) -> None:
    """Write a file under another name, flush it, rename it into place and flush the rename."""
    temporary = temporary_name()
    try:
        descriptor = os.open(temporary, CREATE_FLAGS, NEW_FILE_MODE, dir_fd=folder)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    sync_folder(".", folder)


def put_in_place(written: Path, target: Path) -> None:
    """Flush a file that was written and closed, rename it into place in the same folder, and flush the rename."""
    descriptor = os.open(written, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    written.replace(target)
    sync_folder(target.parent)


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


def make_folders(folder: Path, mode: int = 0o777) -> None:
    """Make a folder where there is none, and those above it, and flush them."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        with suppress(FileExistsError):  # another writer was faster; a file there fails what comes next
            path.mkdir(mode=mode)
        sync_folder(path.parent)


class FileReader:
    """Reads ranges of an open file; safe from several threads, as each read names its own offset."""

    def __init__(self, descriptor: int, key: str, etags: Recent[FileIdentity, str]) -> None:
        """Take over the descriptor."""
        self._descriptor = descriptor
        self._key = key
        self._etags = etags
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            self.close()
            raise NotFoundError(f"{key} is not there: a folder or a special file lies in its place")
        self.size = about.st_size
        self.modified = about.st_mtime
        self._identity = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)

    @property
    def etag(self) -> str:
        """SHA-256, from the key where it carries one."""
        etag = content_digest(self._key) or self._etags.get(self._identity)
        return self._etags.put(self._identity, self._hashed()) if etag is None else etag

    def fileno(self) -> int:
        """The descriptor, for sending the file without copying it."""
        return self._descriptor

    def read(self, start: int, end: int) -> bytes:
        """Read a range."""
        start, stop = clamp_range(start, end, self.size)
        pieces = []
        with reading(self._key):
            while start < stop and (piece := os.pread(self._descriptor, stop - start, start)):
                pieces.append(piece)
                start += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Close the file; closing twice is no error."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _hashed(self) -> str:
        digest = hashlib.sha256()
        for start in range(0, self.size, _HASH_PIECE):
            digest.update(self.read(start, start + _HASH_PIECE))
        return digest.hexdigest()
