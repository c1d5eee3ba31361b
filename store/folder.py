"""A store in a folder: one file for each key.

A write goes to a temporary file in the object's own folder, is flushed to the disk, renamed into place, and the rename
is flushed too. Temporary files start with a dot, as no key can, so what a crash leaves is never listed or served.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from kvwire.errors import StorageError
from kvwire.store._file_reader import EtagCache, FileReader
from kvwire.store._os_errors import reading, writing
from kvwire.store.base import Listed, ObjectStat, Store, check_after, clamp_range
from kvwire.store.keys import check_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.store.base import Data

# Files are opened without following a link in the last step, and without waiting where someone left a FIFO.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_FOLDER_ATTEMPTS = 16
_NEW_FILE_MODE = 0o666  # less the umask, as for any program's files: other users may serve the folder


class FolderStore(Store):
    """Objects as files below one folder, which is made on the first write."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        """Keep the folder's absolute path; nothing is opened or made yet."""
        self._root = Path(root).absolute()
        self._etags = EtagCache()

    @property
    def url(self) -> str:
        """``file://`` and the folder."""
        return self._root.as_uri()

    @property
    def root(self) -> Path:
        """The folder."""
        return self._root

    def snapshot(self, key: str) -> FileReader:
        """Hold the file open as it is now: a later replacement or deletion does not touch it."""
        path = self._path(key)
        with reading(f"{key} in {self.url}"):
            return FileReader(os.open(path, _READ_FLAGS), key, self._etags)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes ``start`` to ``end`` of the object, clamped at its end."""
        with contextlib.closing(self.snapshot(key)) as reader:
            start, stop = clamp_range(start, end, reader.size)
            return reader.read(start, stop)

    def stat(self, key: str) -> ObjectStat:
        """Size and entity tag."""
        with contextlib.closing(self.snapshot(key)) as reader:
            return ObjectStat(reader.size, reader.etag, reader.modified)

    def put(self, key: str, data: Data) -> None:
        """Write the object; when this returns it survives a power cut."""
        path = self._path(key)
        with writing(f"{key} in {self.url}"):
            for attempt in range(_FOLDER_ATTEMPTS):
                try:
                    self._make_folder(path.parent)
                    _replace_file(path, data)
                except FileNotFoundError:  # a deletion took the folder, empty as it was, before the file was in it
                    if attempt == _FOLDER_ATTEMPTS - 1:
                        raise
                else:
                    return

    def delete(self, key: str) -> None:
        """Remove the file, if there is one."""
        path = self._path(key)
        with writing(f"{key} in {self.url}"):
            try:
                path.unlink()
                _sync_folder(path.parent)
            except (FileNotFoundError, NotADirectoryError):  # it, or with it its folder, is gone already
                return
            except OSError as error:
                if path.is_dir():  # a folder of keys is no object
                    return
                raise error from None
            self._prune(path.parent)

    def scan(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """Objects whose keys start with ``prefix`` and come after ``after``, in order, found while iterating."""
        check_after(prefix, after)
        return self._walk(self._root, "", prefix, after)

    def close(self) -> None:
        """Nothing is held between calls."""

    def _path(self, key: str) -> Path:
        return self._root.joinpath(*check_key(key).split("/"))

    def _walk(self, folder: Path, above: str, prefix: str, after: str) -> Iterator[Listed]:
        for name in self._names(folder):
            key = above + name
            if not (key.startswith(prefix) or prefix.startswith(key)):
                continue
            if name.endswith("/"):
                if key > after or after.startswith(key):
                    yield from self._walk(folder / name, key, prefix, after)
            elif key.startswith(prefix) and key > after:
                with contextlib.suppress(FileNotFoundError):  # deleted since the folder was read
                    about = (folder / name).stat(follow_symlinks=False)
                    yield Listed(key, about.st_size, about.st_mtime)

    def _names(self, folder: Path) -> list[str]:
        """Sorted names; folders end with a slash, so that the walk meets keys in the order of whole keys."""
        with reading(f"the folder {folder}"):
            try:
                with os.scandir(folder) as entries:
                    return sorted(name for entry in entries if (name := _listed(entry)))
            except FileNotFoundError:  # never written to, or removed meanwhile
                return []

    def _make_folder(self, folder: Path) -> None:
        missing = []
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another writer was faster; a file there fails the write below
                path.mkdir()
            _sync_folder(path.parent)

    def _prune(self, folder: Path) -> None:
        """Remove folders that a deletion left empty: an empty folder would be in the way of an object of its name."""
        with contextlib.suppress(OSError):  # not empty, or gone
            while folder != self._root:
                folder.rmdir()
                folder = folder.parent


def _listed(entry: os.DirEntry[str]) -> str | None:
    try:
        check_key(entry.name)
    except ValueError:
        return None
    if entry.is_dir(follow_symlinks=False):
        return entry.name + "/"
    return entry.name if entry.is_file(follow_symlinks=False) else None


def _replace_file(path: Path, data: Data) -> None:
    temporary = path.parent / f".tmp-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        _write_file(temporary, data)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def _write_file(path: Path, data: Data) -> None:
    descriptor = os.open(path, _CREATE_FLAGS, _NEW_FILE_MODE)
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


def _sync_folder(folder: Path) -> None:
    """Flush a folder's entries, where the file system knows how to."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
