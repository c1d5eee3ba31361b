"""A store in a folder: one file for each key, and one row of a database for each key of the catalog.

Catalog entries are small and many: as rows they cost neither a file nor a folder each. Where an older folder holds them
as files they are found all the same, and writing one moves it into the database.
"""

from __future__ import annotations

import contextlib
import itertools
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvwire.errors import ConflictError, NotFoundError, StorageError
from kvwire.store.backends.folder.files import ObjectFiles
from kvwire.store.backends.folder.rows import CatalogRows
from kvwire.store.base import ObjectStat, Store, clamp_range, merged
from kvwire.store.files.files import FileReader, reading, writing
from kvwire.store.key_kinds import check_place, content_digest
from kvwire.store.keys import check_after, check_key, is_announcement, is_catalog_key
from kvwire.store.recent import Recent

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator

    from kvwire.store.backends.memory import MemorySnapshot
    from kvwire.store.base import Data, Listed
    from kvwire.store.files.files import FileIdentity

_BATCH = 1000
_HASHES = 1024  # remembered, so that a range request does not hash the whole file again
_LINK = "is a link, and none is followed inside a store: move what it leads to into its place, or mount it there"


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
        self.root = Path(root).absolute()
        self._catalog = catalog
        self._etags: Recent[FileIdentity, str] = Recent(_HASHES)
        self._files = ObjectFiles(self.root)
        self._rows = CatalogRows(self.root)

    @property
    def url(self) -> str:
        """``file://`` and the folder."""
        return self.root.as_uri() + ("" if self._catalog == "rows" else "?catalog=files")

    @property
    def folder(self) -> Path | None:
        """The same: files are renamed within it."""
        return self.root

    def exists(self) -> bool:
        """Whether the folder is there."""
        return self.root.is_dir()

    def opens_at_once(self, key: str) -> bool:
        """Whether it is a file, and no row."""
        return not is_catalog_key(key) and content_digest(key) is not None

    def snapshot(self, key: str) -> FileReader | MemorySnapshot:
        """Hold the object as it is now: a later replacement or deletion does not touch it."""
        is_row = is_catalog_key(check_key(key))
        row = self._rows.find(key) if is_row else None
        if row is not None:
            return row
        try:
            with reading(f"{key} in {self.url}"):
                return FileReader(self._files.open(key), key, self._etags)
        except NotFoundError as error:
            row = self._rows.find(key) if is_row else None  # a writer may have moved it from the file meanwhile
            if row is not None:
                return row
            name, kind = self._files.obstacle(key, error.__cause__) or ("", "")
            if kind == "link":
                raise NotFoundError(f"{key} cannot be reached: {self.root / name} {_LINK}") from error
            raise

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
        if self._is_row(check_place(key)):
            self._put_rows([(key, data)], frees_space=is_announcement(key))
        elif is_catalog_key(key):
            self._put_catalog_file(key, data)
        else:
            self._put_file(key, data)

    def replace(self, key: str, data: Data, etag: str) -> bool:
        """Write where the version is still the one with this tag: of a catalog's rows, in one transaction."""
        if not self._is_row(check_place(key)) or (etag and self._rows.find(key) is None):
            return super().replace(key, data, etag)
        with writing(f"the catalog in {self.url}"):
            self._files.make_root()
            return self._rows.replace(key, data, etag)

    def _put_catalog_file(self, key: str, data: Data) -> None:
        if is_announcement(key):  # something is deleted once it is written
            self._rows.spend(lambda: self._put_file(key, data))
        else:
            self._put_file(key, data)
        self._rows.delete([key])  # which would be found first
        self._rows.keep_reserve()

    def _put_file(self, key: str, data: Data) -> None:
        try:
            with writing(f"{key} in {self.url}"):
                self._files.put(key, data)
        except StorageError as error:
            found = self._files.obstacle(key, error.__cause__)
            if found is None:
                raise
            name, kind = found
            if kind == "link":
                raise StorageError(f"cannot write {key}: {self.root / name} {_LINK}") from error
            what = f"the object {name} lies" if kind == "file" else "objects lie below that name"
            msg = f"cannot write {key} in {self.url}: {what} there: choose another key, or delete what is in the way"
            raise ConflictError(msg) from error

    def _is_row(self, key: str) -> bool:
        return self._catalog == "rows" and is_catalog_key(key)

    def put_many(self, items: Iterable[tuple[str, Data]]) -> None:
        """Write objects; a thousand catalog entries at a time cost one flush of the disk."""
        pairs = iter(items)
        while batch := list(itertools.islice(pairs, _BATCH)):
            rows = [(check_place(key), data) for key, data in batch if self._is_row(key)]
            for key, data in batch:
                if not self._is_row(key):
                    self.put(key, data)
            if rows:
                self._put_rows(rows)

    def _put_rows(self, rows: list[tuple[str, Data]], *, frees_space: bool = False) -> None:
        with writing(f"the catalog in {self.url}"):
            self._files.make_root()
            self._rows.put(rows, frees_space=frees_space)
            for key, _ in rows:
                self._files.remove(key)

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
                self._rows.spend(partial(self._remove_file, key))

    def _remove_file(self, key: str) -> None:
        with writing(f"{key} in {self.url}"):
            self._files.remove(key)

    def scan(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """Objects whose keys start with ``prefix`` and come after ``after``, in order, found while iterating."""
        check_after(prefix, after)
        return merged(self._rows.scan(prefix, after), self._files.scan(prefix, after))

    def remove_leftovers(self, before: float) -> tuple[int, int]:
        """Remove files that writers left unfinished before that time (Unix seconds); returns how many, and bytes."""
        with writing(f"unfinished files in {self.url}"):
            return self._files.remove_leftovers(before)

    def close(self) -> None:
        """Close the catalog's database."""
        self._rows.close()
