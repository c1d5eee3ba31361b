"""From one store to another: content first, entries last, and nothing twice."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire.errors import CorruptError, NotFoundError
from kvwire.store.catalog.announcements import wait_for_collectors
from kvwire.store.catalog.catalog import Catalog
from kvwire.store.key_kinds import content_digest, kind_of
from kvwire.store.keys import check_tenant
from kvwire.store.listing import ahead, content, tenants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvwire.store.base import Listed, Store
    from kvwire.store.keys import KeySpace

    OnProgress = Callable[[int], None]

_BATCH = 500


@dataclass(frozen=True)
class Copied:
    """What was copied and what the target had.

    Attributes:
        objects: Blobs, profiles and texts that were written.
        bytes: Of those.
        entries: Catalog objects that were written.
        skipped: What the target had already.
        failures: Objects that are damaged where they come from, in words.
    """

    objects: int
    bytes: int
    entries: int
    skipped: int
    failures: tuple[str, ...]


def copy_store(source: Store, target: Store, *, jobs: int = 4, on_progress: OnProgress | None = None) -> Copied:
    """Copy all tenants' blobs, profiles, texts and catalogs; what the target has already is not written again.

    An entry is written when everything that lies before it is there, so the target can be read all the time, and a copy
    that was interrupted goes on where it was. Entries that differ become the source's. Garbage may be collected in the
    target meanwhile: once the entries are written, content is looked through again.

    Args:
        source: Where objects come from.
        target: Where they go.
        jobs: Objects copied at once, each of which lies in memory.
        on_progress: Called with the bytes of each object that was copied.

    Returns:
        What was copied, and what was left out.

    Raises:
        StorageError: Either store fails.
    """
    copier = _Copier(source, target, jobs, on_progress or (lambda _: None))
    for tenant in tenants(source):
        for space in Catalog.of_hash(source, check_tenant(tenant)).configurations():
            copier.copy(space)
    return Copied(copier.objects, copier.bytes, copier.entries, copier.skipped, tuple(copier.failures.values()))


class _Copier:
    def __init__(self, source: Store, target: Store, jobs: int, on_progress: OnProgress) -> None:
        self._source, self._target, self._jobs, self._tell = source, target, jobs, on_progress
        self.objects = self.bytes = self.entries = self.skipped = 0
        self.failures: dict[str, str] = {}

    def copy(self, space: KeySpace) -> None:
        skipped = self._copy_content(space)
        self._copy_entries(space)
        wait_for_collectors(self._target, space, None)
        self._copy_content(space)
        self.skipped += skipped

    def _copy_content(self, space: KeySpace) -> int:
        missing = _Missing(_known(self._source, space), _known(self._target, space))
        for listed, copied in ahead(missing, self._copy_object, self._jobs):
            try:
                size = copied()
            except NotFoundError:  # deleted since it was listed
                continue
            except CorruptError as error:
                self.failures[listed.key] = f"{listed.key}: {error}"
                continue
            self.objects += 1
            self.bytes += size
            self._tell(size)
        return missing.had

    def _copy_object(self, listed: Listed) -> int:
        data, sha256, kind = self._source.get(listed.key), content_digest(listed.key), kind_of(listed.key)
        if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
            msg = f"its SHA-256 is not the one in its key: it is left out, {kind.advice if kind else ''}"
            raise CorruptError(msg)
        self._target.put(listed.key, data)
        return len(data)

    def _copy_entries(self, space: KeySpace) -> None:
        keys = (
            listed.key
            for listed in self._source.scan(space.catalog)
            if (kind := kind_of(listed.key)) is None or kind.is_copied
        )
        differing = self._differing(keys)
        while batch := list(itertools.islice(differing, _BATCH)):
            if self._target.is_local:
                self._target.put_many(batch)
            else:
                for _, done in ahead(batch, lambda pair: self._target.put(*pair), self._jobs):
                    done()
            self.entries += len(batch)

    def _differing(self, keys: Iterator[str]) -> Iterator[tuple[str, bytes]]:
        for key, read in ahead(keys, lambda key: (_get(self._source, key), _get(self._target, key)), self._jobs):
            ours, theirs = read()
            if ours is not None and ours != theirs:
                yield key, ours
            else:
                self.skipped += 1


class _Missing:
    """What the first of two listings in the order of keys has and the second has not, or of another size."""

    def __init__(self, ours: Iterator[Listed], theirs: Iterator[Listed]) -> None:
        self._ours, self._theirs = ours, theirs
        self.had = 0

    def __iter__(self) -> Iterator[Listed]:
        other = next(self._theirs, None)
        for listed in self._ours:
            while other is not None and other.key < listed.key:
                other = next(self._theirs, None)
            if other is not None and (other.key, other.size) == (listed.key, listed.size):
                self.had += 1
            else:
                yield listed


def _known(store: Store, space: KeySpace) -> Iterator[Listed]:
    return (one for one in content(store, space) if (kind := kind_of(one.key)) and kind.is_copied)


def _get(store: Store, key: str) -> bytes | None:
    try:
        return store.get(key)
    except NotFoundError:
        return None
