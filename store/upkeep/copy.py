"""From one store to another: content first, entries last, and nothing twice."""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError, CorruptError, NotFoundError
from kvwire.store.base import is_there
from kvwire.store.catalog.announcements import wait_for_collectors
from kvwire.store.key_kinds import is_intact, is_misplaced, kind_of
from kvwire.store.listing import ahead, write_all
from kvwire.store.upkeep.walk import catalogs, objects
from kvwire.types import SEALED_MAGIC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvwire.store.base import Listed, Store
    from kvwire.store.key_kinds import ObjectRef
    from kvwire.store.keys import KeySpace

    OnProgress = Callable[[int], None]

_BATCH = 500
_MOST_REMEMBERED = 10_000  # keys


@dataclass(frozen=True)
class Copied:
    """What was copied and what the target had.

    Attributes:
        objects: Blobs, profiles and texts that were written.
        bytes: Of those.
        entries: Catalog objects that were written.
        skipped: What the target had already.
        failures: Objects that are damaged where they come from, in words. Neither they nor the entries that lead
            nowhere without them were copied.
    """

    objects: int
    bytes: int
    entries: int
    skipped: int
    failures: tuple[str, ...]


def copy_store(source: Store, target: Store, *, jobs: int = 4, on_progress: OnProgress | None = None) -> Copied:
    """Copy all tenants' blobs, profiles, texts and catalogs; what the target has already is not written again.

    An entry is written when everything that it needs is there, so the target can be read all the time, and a copy that
    was interrupted goes on where it was. Entries that differ become the source's, but for those that need what is
    damaged there; what sealed ones need is not known. Documents may be encoded in the source meanwhile, and
    garbage collected in the target: once the entries are written, content is looked through again.

    Args:
        source: Where objects come from.
        target: Where they go.
        jobs: Objects copied at once, each of which lies in memory.
        on_progress: Called with the bytes of each object that was copied.

    Returns:
        What was copied, and what was left out.

    Raises:
        ArgumentError: One of the two is a folder inside the other.
        StorageError: Either store fails.
    """
    _check_apart(source, target)
    copier = _Copier(source, target, jobs, on_progress or (lambda _: None))
    for catalog in catalogs(source):
        for space in catalog.configurations():
            copier.copy(space)
    return Copied(copier.objects, copier.bytes, copier.entries, copier.skipped, tuple(copier.failures.values()))


def _check_apart(source: Store, target: Store) -> None:
    if source.folder is None or target.folder is None:
        return
    ours, theirs = source.folder.resolve(), target.folder.resolve()
    if ours != theirs and (ours in theirs.parents or theirs in ours.parents):
        msg = f"of {ours} and {theirs} one lies inside the other, where their keys would mix: name another target"
        raise ArgumentError(msg)


class _Copier:
    def __init__(self, source: Store, target: Store, jobs: int, on_progress: OnProgress) -> None:
        self._source, self._target, self._jobs, self._tell = source, target, jobs, on_progress
        self.objects = self.bytes = self.entries = self.skipped = 0
        self.failures: dict[str, str] = {}
        self._there: set[str] = set()

    def copy(self, space: KeySpace) -> None:
        skipped = self._copy_content(space)
        self._copy_entries(space)
        wait_for_collectors(self._target, space, None)
        self._copy_content(space)
        self.skipped += skipped

    def _copy_content(self, space: KeySpace) -> int:
        """Copy what the target lacks, or has of another size; returns how many objects it had."""
        had = 0

        def missing() -> Iterator[Listed]:
            nonlocal had
            theirs = _known(self._target, space)
            other = next(theirs, None)
            for listed in _known(self._source, space):  # both in the order of keys
                while other is not None and other.key < listed.key:
                    other = next(theirs, None)
                if other is not None and (other.key, other.size) == (listed.key, listed.size):
                    had += 1
                else:
                    yield listed

        for listed, copied in ahead(missing(), lambda listed: self._copy_object(listed.key), self._jobs):
            with suppress(NotFoundError):  # deleted since it was listed
                self._count(listed.key, copied)
        return had

    def _count(self, key: str, copied: Callable[[], int]) -> bool:
        """Count an object; whether it could be copied."""
        try:
            size = copied()
        except CorruptError as error:
            self.failures[key] = f"{key}: {error}"
            return False
        self.objects += 1
        self.bytes += size
        self._tell(size)
        return True

    def _copy_object(self, key: str) -> int:
        if is_misplaced(key):
            raise CorruptError("nothing leads to it, as it does not lie where its kind does: it is left out")
        data, kind = self._source.get(key), kind_of(key)
        if not is_intact(key, data):
            advice = kind.advice if kind else ""
            raise CorruptError(f"its SHA-256 is not the one in its key: with what needs it, it is left out, {advice}")
        self._target.put(key, data)
        return len(data)

    def _copy_entries(self, space: KeySpace) -> None:
        keys = (
            listed.key
            for listed in self._source.scan(space.catalog)
            if (kind := kind_of(listed.key)) is None or kind.is_copied
        )
        differing = self._differing(keys)
        while batch := list(itertools.islice(differing, _BATCH)):
            write_all(self._target, batch, self._jobs)
            self.entries += len(batch)

    def _differing(self, keys: Iterator[str]) -> Iterator[tuple[str, bytes]]:
        for key, read in ahead(keys, self._compare, self._jobs):
            try:
                data, lacking = read()
            except CorruptError as error:
                self.failures[key] = f"{key}: {error}"
                continue
            if data is None:
                self.skipped += 1
            elif all(self._complete(key, data, named) for named in lacking):
                yield key, data

    def _compare(self, key: str) -> tuple[bytes | None, list[ObjectRef]]:
        """An entry that is to be written, and what it needs that the target has not."""
        ours = _get(self._source, key)
        if ours is None or ours == _get(self._target, key):
            return None, []
        return ours, [named for named in _needed(key, ours) if not self._has(named)]

    def _has(self, named: ObjectRef) -> bool:
        """Whether the target has an object; many entries need the same profile, which is asked for once."""
        if named.key in self._there:
            return True
        if not is_there(self._target, named.key, named.size):
            return False
        if len(self._there) >= _MOST_REMEMBERED:
            self._there.clear()
        self._there.add(named.key)
        return True

    def _complete(self, key: str, data: bytes, named: ObjectRef) -> bool:
        """Copy what an entry needs and the source did not have when content was listed; whether it is there now."""
        if named.key in self.failures:
            return False
        try:
            return self._count(named.key, lambda: self._copy_object(named.key))
        except NotFoundError:
            if _get(self._source, key) == data:  # and not yet another's
                why = f"the {named.what} that it needs is not there"
                self.failures[key] = f"{key}: {why}: it is left out, encode the document again"
            return False


def _known(store: Store, space: KeySpace) -> Iterator[Listed]:
    return (one.listed for one in objects(store, space) if one.kind and one.kind.is_copied)


def _needed(key: str, data: bytes) -> list[ObjectRef]:
    """What an entry leads nowhere without; raises CorruptError where it is damaged."""
    kind = kind_of(key)
    if kind is None or kind.names is None or data.startswith(SEALED_MAGIC):
        return []
    try:
        return [named for named in kind.names(key, data) if named.is_needed]
    except ArgumentError as error:
        raise CorruptError(str(error)) from error


def _get(store: Store, key: str) -> bytes | None:
    try:
        return store.get(key)
    except NotFoundError:
        return None
