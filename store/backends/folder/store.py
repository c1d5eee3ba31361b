"""A store in a folder: one file for each key, and one row of a database for each key of the catalog.

A write goes to a temporary file in the object's own folder, is flushed to the disk, renamed into place, and the rename
is flushed too. Temporary files start with a dot, as no key can, so what a crash leaves is never listed or served.
Catalog entries are small and many: as rows they cost neither a file nor a folder each. Where an older folder holds them
as files they are found all the same, and writing one moves it into the database.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvwire.errors import NotFoundError
from kvwire.store.backends.folder.rows import CatalogRows
from kvwire.store.base import Listed, ObjectStat, Store, check_after, clamp_range
from kvwire.store.files.os_errors import reading, writing
from kvwire.store.files.reader import EtagCache, FileReader
from kvwire.store.files.writer import TEMPORARY, replace_file, sync_folder
from kvwire.store.key_kinds import content_digest
from kvwire.store.keys import check_key, is_catalog_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvwire.store.base import Data
    from kvwire.store.memory_snapshot import MemorySnapshot

# Files are opened without following a link in the last step, and without waiting where someone left a FIFO.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_FOLDER_ATTEMPTS = 16
_BATCH = 1000


class FolderStore(Store):
    """Objects as files below one folder, which is made on the first write. ``close`` closes the catalog's database.

    Args:
        root: The folder.
        catalog: What becomes of catalog entries that are written: rows of the database, or files as well, so that any
            web server can serve the folder. Both are read.
    """

    is_local = True

    def __init__(self, root: str | os.PathLike[str], *, catalog: Literal["rows", "files"] = "rows") -> None:
        """Keep the folder's absolute path; nothing is opened or made yet."""
        self._root = Path(root).absolute()
        self._catalog = catalog
        self._etags = EtagCache()
        self._rows = CatalogRows(self._root)

    @property
    def url(self) -> str:
        """``file://`` and the folder."""
        return self._root.as_uri() + ("" if self._catalog == "rows" else "?catalog=files")

    @property
    def root(self) -> Path:
        """The folder."""
        return self._root

    @property
    def folder(self) -> Path | None:
        """The same: files are renamed within it."""
        return self._root

    def exists(self) -> bool:
        """Whether the folder is there."""
        return self._root.is_dir()

    def opens_at_once(self, key: str) -> bool:
        """Whether it is a file, and no row."""
        return not is_catalog_key(key) and content_digest(key) is not None

    def snapshot(self, key: str) -> FileReader | MemorySnapshot:
        """Hold the object as it is now: a later replacement or deletion does not touch it."""
        path = self._path(key)
        is_row = is_catalog_key(key)
        row = self._rows.find(key) if is_row else None
        if row is not None:
            return row
        try:
            with reading(f"{key} in {self.url}"):
                return FileReader(os.open(path, _READ_FLAGS), key, self._etags)
        except NotFoundError:
            row = self._rows.find(key) if is_row else None  # a writer may have moved it from the file meanwhile
            if row is None:
                raise
            return row

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
        if self._is_row(key):
            self._put_rows([(key, data)])
            return
        self._put_file(key, path, data)
        if is_catalog_key(key):
            self._rows.delete([key])  # which would be found first

    def _is_row(self, key: str) -> bool:
        return self._catalog == "rows" and is_catalog_key(key)

    def _put_file(self, key: str, path: Path, data: Data) -> None:
        with writing(f"{key} in {self.url}"):
            for attempt in range(_FOLDER_ATTEMPTS):
                try:
                    self._make_folder(path.parent)
                    replace_file(path, data)
                except FileNotFoundError:  # a deletion took the folder, empty as it was, before the file was in it
                    if attempt == _FOLDER_ATTEMPTS - 1:
                        raise
                else:
                    return

    def put_many(self, items: Iterable[tuple[str, Data]]) -> None:
        """Write objects; a thousand catalog entries at a time cost one flush of the disk."""
        pairs = iter(items)
        while batch := list(itertools.islice(pairs, _BATCH)):
            rows = [(check_key(key), data) for key, data in batch if self._is_row(key)]
            for key, data in batch:
                if not self._is_row(key):
                    self.put(key, data)
            if rows:
                self._put_rows(rows)

    def _put_rows(self, rows: list[tuple[str, Data]]) -> None:
        with writing(f"the catalog in {self.url}"):
            self._make_folder(self._root)
            self._rows.put(rows)
            for key, _ in rows:
                self._remove_file(self._path(key))

    def delete(self, key: str) -> None:
        """Remove the object, if there is one."""
        self.delete_many([key])

    def delete_many(self, keys: Iterable[str]) -> None:
        """Remove objects; a thousand catalog entries at a time are one transaction."""
        names = iter(keys)
        while batch := [check_key(key) for key in itertools.islice(names, _BATCH)]:
            rows = [key for key in batch if is_catalog_key(key)]
            if rows:
                self._rows.delete(rows)
            for key in batch:
                with writing(f"{key} in {self.url}"):
                    self._remove_file(self._path(key))

    def _remove_file(self, path: Path) -> None:
        try:
            path.unlink()
            sync_folder(path.parent)
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
        above = prefix[: prefix.rfind("/") + 1]
        files = self._walk(self._root.joinpath(*above.split("/")), above, prefix, after)
        return self._merged(self._rows.scan(prefix, after), files)

    def remove_leftovers(self, before: float) -> tuple[int, int]:
        """Remove files that writers left unfinished before that time (Unix seconds); returns how many, and bytes."""
        count = size = 0
        with writing(f"unfinished files in {self.url}"):
            for folder, _, names in os.walk(self._root):
                for path in (Path(folder, name) for name in names if name.startswith(TEMPORARY)):
                    with contextlib.suppress(FileNotFoundError):
                        about = path.lstat()
                        if about.st_mtime < before:
                            path.unlink()
                            count, size = count + 1, size + about.st_size
        return count, size

    def close(self) -> None:
        """Close the catalog's database."""
        self._rows.close()

    @staticmethod
    def _merged(rows: Iterator[Listed], files: Iterator[Listed]) -> Iterator[Listed]:
        last = ""
        for listed in heapq.merge(rows, files, key=lambda found: found.key):
            if listed.key != last:  # the row comes first, and counts
                yield listed
            last = listed.key

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
            except (FileNotFoundError, NotADirectoryError):  # never written to, removed meanwhile, or an object
                return []

    def _make_folder(self, folder: Path) -> None:
        missing = []
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another writer was faster; a file there fails the write below
                path.mkdir()
            sync_folder(path.parent)

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
