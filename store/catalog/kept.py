"""Rows that repairs computed, kept under the order of the documents that they were computed behind.

Never under a document's own name: what lies there depends on the document alone. Whatever one prompt links, another
one finds rows of it only where it names the same documents before them, in the same order, for the same tenant.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvwire.errors import CorruptError, FormatVersionError
from kvwire.store.catalog.objects import intact
from kvwire.store.kept_repair import KeptRepair, KeptRows, order_digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvwire.store.catalog.blobs import Blobs
    from kvwire.store.catalog.objects import Config, TenantObjects
    from kvwire.store.keys import KeySpace

_GROWN = 1.5
"""What is kept gives way to so many times as many rows of the same level."""


class KeptRepairs:
    """A tenant's kept repairs; ``Catalog.kept`` gives them."""

    def __init__(self, objects: TenantObjects, blobs: Blobs) -> None:
        """Read and write through the catalog's objects."""
        self._objects, self._blobs, self._store = objects, blobs, objects.store

    def find(self, config: Config, documents: Sequence[str], least: int = 2) -> KeptRepair | None:
        """What is kept of an order of documents, or of the most of its first ones."""
        space = self._objects.keys(config)
        keys = {space.kept_repair(order_digest(documents[:n])): n for n in range(len(documents), least - 1, -1)}
        for key, read in self._objects.read_each(keys):
            if (data := read()) is None:
                continue
            kept = KeptRepair.from_json(data)
            if kept.documents != tuple(documents[: keys[key]]):
                raise CorruptError(f"{key} is of other documents: the next repair writes it again")
            return kept
        return None

    def rows(self, config: Config, part: KeptRows) -> bytes:
        """Read the blob of a document's rows and check it against its digest."""
        data = intact(self._store, self._objects.keys(config).kept_rows(part.sha256))
        if data is None:
            raise CorruptError(f"kept rows {part.sha256[:12]} are damaged in {self._store.url}")
        return data

    def put(
        self,
        config: Config,
        documents: Sequence[str],
        level: int,
        profile_digest: str,
        rows: Sequence[tuple[bytes, bytes]],
        *,
        overwrite: bool = False,
        least: int = 2,
    ) -> list[KeptRepair]:
        """Write rows, and then entries for beginnings of the prompt, unless better ones are kept already."""
        space = self._objects.keys(config)
        parts: list[KeptRows] = []
        sealed: dict[str, bytes] = {}
        for tokens, blob in rows:
            stored = self._blobs.seal(blob) if blob else b""
            digest = hashlib.sha256(stored).hexdigest() if blob else ""
            parts.append(KeptRows(digest, len(stored), tokens))
            sealed[digest] = stored
        due = []
        for count in range(least, len(parts) + 1):
            made = KeptRepair(tuple(documents[:count]), level, profile_digest, tuple(parts[:count]))
            if made.count and (overwrite or self._gives_way(space, made)):
                due.append(made)
        named = {part.sha256 for made in due for part in made.parts if part.count}
        keys = {space.kept_rows(digest): sealed[digest] for digest in named}
        for key, stored in keys.items():
            self._store.put(key, stored)
        for made in due:
            self._objects.write(space.kept_repair(made.digest), made.to_json())
        if due:
            self._objects.confirm(space, keys)
        return due

    def _gives_way(self, space: KeySpace, made: KeptRepair) -> bool:
        try:
            data = self._objects.read(space.kept_repair(made.digest))
            known = None if data is None else KeptRepair.from_json(data)
        except (CorruptError, FormatVersionError):
            known = None
        if known is None or known.level < made.level:
            return True
        return known.level == made.level and made.count >= _GROWN * known.count

    def each(self, config: Config) -> Iterator[tuple[str, KeptRepair]]:
        """All that is kept, with its keys; what cannot be read is left out."""
        space = self._objects.keys(config)
        for key, read in self._objects.read_each(self._store.keys(space.kept_repairs)):
            try:
                if (data := read()) is not None:
                    yield key, KeptRepair.from_json(data)
            except (CorruptError, FormatVersionError):
                continue

    def bound(self, config: Config, most_bytes: int) -> int:
        """Drop the oldest kept repairs until the rest has so many bytes at most; their rows are left to ``collect``."""
        space = self._objects.keys(config)
        known = dict(self.each(space))
        ages = {listed.key: listed.modified for listed in self._store.scan(space.kept_repairs)}
        named: dict[str, int] = {}
        dropped: list[str] = []
        size = 0
        for key in sorted(known, key=lambda key: ages.get(key, 0.0), reverse=True):
            new = {part.sha256: part.size for part in known[key].parts if part.count and part.sha256 not in named}
            if dropped or size + sum(new.values()) > most_bytes:
                dropped.append(key)
                continue
            size += sum(new.values())
            named |= new
        self._store.delete_many(dropped)
        return len(dropped)

    def drop(self, config: Config, token_digest: str) -> None:
        """Drop whatever is kept of a document."""
        found = [
            key for key, kept in self.each(config) if any(each.startswith(token_digest) for each in kept.documents)
        ]
        self._store.delete_many(found)
