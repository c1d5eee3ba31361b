"""Objects as files below a root: how they are opened, written, removed and listed.

A write goes to a temporary file in the object's own folder, is flushed to the disk, renamed into place, and the rename
is flushed too. Temporary files start with a dot, as no key can, so what a crash leaves is never listed or served.

No link below the root is followed: each folder is opened from the one before it, and a link is as if
nothing were there. So no key reaches anything outside. The root itself may be reached through links.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from functools import partial
from typing import TYPE_CHECKING, Literal

from kvwire.store.base import Listed
from kvwire.store.files.files import TEMPORARY, make_folders, reading, replace_file, sync_folder
from kvwire.store.keys import is_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvwire.store.base import Data

# A folder that is only passed through takes the right to search it, not the right to list it.
_ROOT_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_PASS_FLAGS = _ROOT_FLAGS | os.O_NOFOLLOW
_LIST_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_file(root: Path, parts: Sequence[str], flags: int) -> int:
    """Open a file."""
    folder = os.open(root, _ROOT_FLAGS)
    try:
        for part in parts[:-1]:
            below = os.open(part, _PASS_FLAGS, dir_fd=folder)
            os.close(folder)
            folder = below
        return os.open(parts[-1], flags, dir_fd=folder)
    finally:
        os.close(folder)


def open_folder(root: Path, parts: Sequence[str]) -> int:
    """Open a folder for listing what is in it."""
    if parts:
        return open_file(root, parts, _LIST_FLAGS)
    return os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


@contextlib.contextmanager
def folders(root: Path, parts: Sequence[str], *, make: bool = False) -> Iterator[list[int]]:
    """Hold every folder of a way open."""
    held = [os.open(root, _ROOT_FLAGS)]
    try:
        for part in parts:
            held.append(_made(held[-1], part) if make else os.open(part, _PASS_FLAGS, dir_fd=held[-1]))
        yield held
    finally:
        for descriptor in held:
            os.close(descriptor)


def _made(folder: int, name: str) -> int:
    try:
        return os.open(name, _PASS_FLAGS, dir_fd=folder)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # another writer was faster
            os.mkdir(name, dir_fd=folder)
        sync_folder(".", folder)
        return os.open(name, _PASS_FLAGS, dir_fd=folder)


# Files are opened without following a link in the last step, and without waiting where someone left a FIFO.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FOLDER_ATTEMPTS = 16
_BLOCKED = (errno.ENOTDIR, errno.ELOOP, errno.EISDIR)


class ObjectFiles:
    """The files of one folder store. Keys are checked by the caller, who also translates OSError."""

    def __init__(self, root: Path) -> None:
        """Keep the root; nothing is opened or made yet."""
        self._root = root

    def open(self, key: str) -> int:
        """Open an object for reading."""
        return open_file(self._root, key.split("/"), _READ_FLAGS)

    def obstacle(self, key: str, error: BaseException | None) -> tuple[str, Literal["link", "file", "folder"]] | None:
        """What is in an object's way, for a message: a link, a file in a folder's place, or a folder in the file's."""
        if not isinstance(error, OSError) or error.errno not in _BLOCKED:
            return None
        parts, path = key.split("/"), self._root
        for count, part in enumerate(parts, 1):
            path /= part
            name = "/".join(parts[:count])
            if path.is_symlink():
                return name, "link"
            if path.is_dir() == (count == len(parts)) and path.exists():
                return name, "folder" if count == len(parts) else "file"
        return None

    def put(self, key: str, data: Data) -> None:
        """Write an object; when this returns it survives a power cut."""
        *above, name = key.split("/")
        for attempt in range(_FOLDER_ATTEMPTS):
            try:
                self.make_root()
                with folders(self._root, above, make=True) as held:
                    replace_file(held[-1], name, data)
            except FileNotFoundError:  # a deletion took the folder, empty as it was, before the file was in it
                if attempt == _FOLDER_ATTEMPTS - 1:
                    raise
            else:
                return

    def remove(self, key: str) -> None:
        """Remove an object, and folders that are left empty: one would be in the way of an object of its name."""
        *above, name = key.split("/")
        try:
            with folders(self._root, above) as held:
                if not _unlinked(held[-1], name):
                    return
                sync_folder(".", held[-1])
                with contextlib.suppress(OSError):  # not empty, or gone
                    for folder, below in zip(held[-2::-1], reversed(above), strict=True):
                        os.rmdir(below, dir_fd=folder)
        except (FileNotFoundError, NotADirectoryError):  # it, or with it its folder, is gone already
            return

    def scan(self, prefix: str, after: str) -> Iterator[Listed]:
        """List objects."""
        above = prefix[: prefix.rfind("/") + 1]
        folder = _opened(lambda: open_folder(self._root, above.split("/")[:-1]), above)
        if folder is not None:
            yield from _walk(folder, above, prefix, after)

    def remove_leftovers(self, before: float) -> tuple[int, int]:
        """Remove files that writers left unfinished."""
        count = size = 0
        root = _opened(lambda: open_folder(self._root, []), "")
        if root is None:
            return 0, 0
        try:
            for _, _, names, folder in os.fwalk(".", dir_fd=root):
                for name in (one for one in names if one.startswith(TEMPORARY)):
                    with contextlib.suppress(FileNotFoundError):
                        about = os.stat(name, dir_fd=folder, follow_symlinks=False)
                        if about.st_mtime < before:
                            os.unlink(name, dir_fd=folder)
                            count, size = count + 1, size + about.st_size
        finally:
            os.close(root)
        return count, size

    def make_root(self) -> None:
        """Make the root where there is none, and the folders above it; they are flushed."""
        make_folders(self._root)


def _unlinked(folder: int, name: str) -> bool:
    """Remove a file; tells whether one lay there, and raises where there is one that cannot be removed."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    except OSError as error:
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):  # a folder of keys is no object
            return False
        raise error from None
    return True


def _opened(open_: Callable[[], int], what: str) -> int | None:
    """A folder's descriptor; None where it was never written to, is gone meanwhile, or is an object or a link."""
    with reading(f"the folder {what}"):
        try:
            return open_()
        except (FileNotFoundError, NotADirectoryError):
            return None


def _walk(folder: int, above: str, prefix: str, after: str) -> Iterator[Listed]:
    """Objects in an open folder and below it; closes it."""
    try:
        for name in _names(folder, above):
            key = above + name
            if not (key.startswith(prefix) or prefix.startswith(key)):
                continue
            if name.endswith("/"):
                if key > after or after.startswith(key):
                    below = _opened(partial(os.open, name[:-1], _LIST_FLAGS, dir_fd=folder), key)
                    if below is not None:
                        yield from _walk(below, key, prefix, after)
            elif key.startswith(prefix) and key > after and (listed := _found(folder, name, key)):
                yield listed
    finally:
        os.close(folder)


def _found(folder: int, name: str, key: str) -> Listed | None:
    with reading(key):
        try:
            about = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:  # deleted since the folder was read
            return None
    return Listed(key, about.st_size, about.st_mtime)


def _names(folder: int, what: str) -> list[str]:
    """Sorted names; folders end with a slash, so that the walk meets keys in the order of whole keys."""
    with reading(f"the folder {what}"), os.scandir(folder) as entries:
        return sorted(name for entry in entries if (name := _listed(entry)))


def _listed(entry: os.DirEntry[str]) -> str | None:
    if not is_key(entry.name):
        return None
    if entry.is_dir(follow_symlinks=False):
        return entry.name + "/"
    return entry.name if entry.is_file(follow_symlinks=False) else None
