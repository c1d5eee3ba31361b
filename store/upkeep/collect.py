"""Garbage collection: blobs, profiles and texts that no document names any more are deleted, while others write.

Mark: the digests that a configuration's document entries and its pointer to the current profile name are gathered.
Sweep: what is not among them and older than the grace period is announced, looked at once more, and deleted.

Why nothing is lost that a document needs. A writer (``Catalog``) does, in this order: W1 content, which it writes again
where what is there is older than half the grace; W2 entry; W3 wait until no announcement names the content; W4 write
the content again where it is gone. A collector does: C1 mark; C2 announce; C3 mark what was written since C1; C4 leave
out what became young; C5 delete; C6 take the announcement back. Stores are consistent: a read sees every write that had
ended before it. So, wherever the two meet:

- W2 before C3 reads: C1 or C3 sees the entry, and the content stays.
- W2 after C3: C2 was before, so at W3 the announcement is there, or already taken back. The writer waits for C6, which
  is after C5, and then sees at W4 whether the content is gone.
- W1 before C5 and W2 after C6: the content that W1 found, or wrote, may be deleted; W4 writes it again.
- W1 after C5: the content is written anew and is young.
- Two collectors: announcements have names of their own, and a writer waits for each. Several of one collector have the
  same C3, which comes after the last C2 of them, and each its own C4 to C6.
- A collector that dies between C2 and C6 deletes nothing more; writers of the very objects that it named wait for a
  lease. A collector that is slower than its lease stops before it deletes, and goes on with what is left under another
  announcement, from C2: what is left to trust is that no single deletion is delayed by minutes on its way.
- A writer that dies before W2 leaves garbage, before W4 a document whose content is gone at worst: readers count a miss
  and compute the text, encoding the document again heals it.
- A writer of content long before its entry (a copy, for one) is protected by the grace period, or repeats W3 and W4.
- An entry that is removed or replaced between C1 and C5 keeps its content until the next collection.
- A dry look before is C1, too; the sweep after it goes on with what was written since. Marks only ever come, so that C2
  to C5 find what they would after a C1 of their own.

Entries of token sequences are hints. One that no document shares any more is deleted; losing one costs an encoding.
Entries of prefixes are read once they are old, and deleted where no document has their text any more; losing one costs
a miss.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from kvwire.errors import ArgumentError, AuthError, CorruptError, FormatVersionError, StorageError
from kvwire.store.base import is_there, modified
from kvwire.store.catalog.announcements import GRACE_S, LEASE_S, MAX_NAMES, announce
from kvwire.store.key_kinds import KINDS, is_misplaced, kind_of, kinds
from kvwire.store.listing import WHOLE, Part, read_ahead
from kvwire.store.upkeep.marks import Marks
from kvwire.store.upkeep.walk import (
    Collected,
    catalogs,
    check_fraction,
    counted,
    entries,
    named,
    objects,
    refuse_unknown_kinds,
    remove_leftovers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvwire.store.base import Listed, Store
    from kvwire.store.catalog.catalog import Catalog
    from kvwire.store.crypto.keyring import Keyring
    from kvwire.store.key_kinds import GcRole
    from kvwire.store.keys import KeySpace
    from kvwire.store.upkeep.walk import OnProgress

T = TypeVar("T")
_ANNOUNCEMENTS = 8
"""That share one look at the entries, for which all are listed; more would not be deleted within a lease."""
_BATCH = _ANNOUNCEMENTS * MAX_NAMES
_PIECE = 200
"""Deletions between looks at the clock, which comes after as many looks at what is to be deleted."""
_TAKEN = ("content", "alias")  # of ``KeyKind.gc_role``: what a collector deletes once nothing names it
_SHARED = tuple(kind for kind in KINDS if kind.name == "profile")


def collect(  # noqa: PLR0913 - what may be collected, and what holds it back
    store: Store,
    *,
    tenant_hash: str | None = None,
    keyring: Keyring | None = None,
    grace_s: float = GRACE_S,
    dry_run: bool = False,
    max_fraction: float = 1.0,
    allow_empty_catalog: bool = False,
    part: Part = WHOLE,
    on_progress: OnProgress | None = None,
) -> Collected:
    """Delete content that no document of its tenant and model configuration names and that is older than the grace.

    Safe beside writers and other collectors. Once the tenants are listed, a store that fails is told of in
    ``failures``, and what else can be reached is collected.

    Args:
        store: The store.
        tenant_hash: One tenant only.
        keyring: To read the entries of tenants whose are sealed; without it nothing of theirs is deleted.
        grace_s: Seconds that content stays though nothing names it; content of unknown age counts as young.
        dry_run: Delete nothing, and tell what would be.
        max_fraction: Delete nothing at all where garbage is more than this part of all content's bytes, or of those of
            blobs and texts alone.
        allow_empty_catalog: Collect even where no catalog entry of a configuration names any content that is there.
            Without it such a catalog counts as lost, and nothing of the configuration is deleted: see ``rebuild``.
        part: Content and entries to collect. All entries of documents are read for it, and of what they name only this
            part is kept in memory. Parts may be collected side by side and in any order; unfinished files go with the
            first. An entry of a prefix that leads into other parts goes once those were collected.
        on_progress: Called with ``"entries"`` or ``"objects"`` and how many more were looked at.

    Returns:
        What was deleted.

    Raises:
        ArgumentError: The grace period is negative, or garbage is more than ``max_fraction`` of the content.
        StorageError: The tenants cannot be listed.
    """
    if grace_s < 0:
        raise ArgumentError(f"a grace period is no time at least, {grace_s:g} s are less")
    tell = on_progress or (lambda _what, _count: None)
    settings = _Settings(grace_s, allow_empty_catalog=allow_empty_catalog, part=part, tell=tell, dry_run=dry_run)
    if max_fraction < 1 and not dry_run:
        look = replace(settings, dry_run=True, keeps_marks=True)
        check_fraction(_sweep(store, tenant_hash, keyring, look), max_fraction)
    total = _sweep(store, tenant_hash, keyring, settings)
    if not dry_run and part.number == 1:
        total += remove_leftovers(store, grace_s)
    return total


@dataclass(frozen=True)
class _Settings:
    grace_s: float
    allow_empty_catalog: bool
    part: Part
    tell: OnProgress
    dry_run: bool
    keeps_marks: bool = False  # of a dry look, for the sweep after it
    marks: dict[str, Marks] = field(default_factory=dict)  # that were kept, by the root of their configuration


def _sweep(store: Store, tenant_hash: str | None, keyring: Keyring | None, settings: _Settings) -> Collected:
    total = Collected()
    for catalog in catalogs(store, tenant_hash, keyring):
        try:
            for space in catalog.configurations():
                marks = settings.marks.pop(space.root, None) or Marks(settings.part)
                total += _Sweep(catalog, space, settings, marks).run()
                if settings.keeps_marks:
                    marks.pack()
                    settings.marks[space.root] = marks
        except StorageError as error:
            total += Collected(failures=(f"v1/{catalog.tenant}/: {error}",))
    return total


class _Sweep:
    """One configuration, or its part. marks: what entries name, as far as a look before has read it."""

    def __init__(self, catalog: Catalog, space: KeySpace, settings: _Settings, marks: Marks) -> None:
        self._catalog = catalog
        self._store = catalog.store
        self._space = space
        self._grace_s, self._dry_run, self._tell = settings.grace_s, settings.dry_run, settings.tell
        self._allow_empty_catalog, self._part, self._marks = settings.allow_empty_catalog, settings.part, marks
        self._done = Collected()

    def run(self) -> Collected:
        try:
            refuse_unknown_kinds(self._store, self._space)
            if not (self._marks.at and self._dry_run):
                self._mark()
            if not self._allow_empty_catalog:
                self._refuse_lost_catalog()
            hints = (one.key for one in self._entries("alias") if self._is_garbage(one.key, one.modified))
            self._batches(hints, partial(self._delete_entries, self._keys_of_garbage))
            old = (one.key for one in self._entries("derived") if self._is_old(one.modified))
            self._batches(self._leading_nowhere(old), partial(self._delete_entries, self._leading_nowhere))
            self._batches(self._garbage(), self._delete_content)
            if not self._dry_run and self._part.number == 1:
                self._delete_dead_announcements()
        except (AuthError, CorruptError, FormatVersionError, StorageError) as error:
            self._done += Collected(failures=(f"{self._space.root}: {error}",))
        return self._done

    def _mark(self) -> None:
        """Read the entries: all at first, later those that may have been written since."""
        now = time.time()
        self._marks.add_all(named(self._catalog, self._space, self._marks.at, self._tell), now)

    def _refuse_lost_catalog(self) -> None:
        """Raise CorruptError where there is garbage, and nothing that is there is named: the catalog is lost, then."""
        garbage = False
        for found in objects(self._store, self._space, self._part):
            listed = found.listed
            if self._is_collected(listed.key) and listed.key in self._marks:
                return
            garbage = garbage or self._is_garbage(listed.key, listed.modified)
        elsewhere = (key for key in self._marks.sample if not self._part.has(key))
        if garbage and not any(is_there(self._store, key) for key in elsewhere):
            raise CorruptError(
                "the catalog names none of the content that is there: it may be lost, so nothing is deleted; kvwire "
                "store rebuild makes it anew from blobs and texts; where all documents were taken out on purpose, pass "
                "--allow-empty-catalog"
            )

    def _is_garbage(self, key: str, modified: float) -> bool:
        return self._is_old(modified) and self._is_collected(key) and key not in self._marks

    def _is_old(self, modified: float) -> bool:
        return 0 < modified < time.time() - self._grace_s

    def _garbage(self) -> Iterator[Listed]:
        for found in counted(objects(self._store, self._space, self._part), "objects", self._tell):
            listed = found.listed
            of_documents = listed.size * (found.kind not in _SHARED)
            misplaced = found.is_misplaced or (found.kind is not None and found.kind.gc_role not in _TAKEN)
            self._done += Collected(looked_at=listed.size, documents_looked_at=of_documents, misplaced=misplaced)
            if self._is_garbage(listed.key, listed.modified):
                yield listed

    def _is_collected(self, key: str) -> bool:
        """Whether a collector may take a key; not what lies elsewhere than its kind does."""
        kind = kind_of(key)
        return kind is not None and kind.gc_role in _TAKEN and not is_misplaced(key, self._space)

    def _entries(self, role: GcRole) -> Iterator[Listed]:
        prefixes = [kind.prefix(self._space) for kind in kinds(role)]
        return (listed for prefix in prefixes for listed in self._part.scan(self._store, prefix))

    def _leading_nowhere(self, keys: Iterable[str]) -> Iterator[str]:
        """Entries that cannot be read, or that name nothing which a document names; unknown kinds are left alone."""
        known = (key for key in keys if (kind := kind_of(key)) is not None and kind.names is not None)
        for key, names in entries(self._catalog, known):
            try:
                named = names()
            except CorruptError:
                named = ()
            if not any(self._is_needed(one.key) for one in named):
                yield key

    def _is_needed(self, key: str) -> bool:
        """Whether a document names what lies there; where that is not known, whether it is there still."""
        return key in self._marks if self._marks.part.has(key) else is_there(self._store, key)

    def _delete_entries(self, still: Callable[[list[str]], Iterable[str]], batch: list[str]) -> None:
        """Delete what ``still`` gives of the batch after one more look at what is named."""
        if not self._dry_run:
            self._mark()
        for start in range(0, len(batch), MAX_NAMES):
            piece = batch[start : start + MAX_NAMES]
            if not self._dry_run:
                piece = list(still(piece))
                self._store.delete_many(piece)
            self._done += Collected(entries=len(piece))

    def _batches(self, found: Iterator[T], delete: Callable[[list[T]], None]) -> None:
        while batch := list(islice(found, _BATCH)):
            delete(batch)

    def _delete_content(self, batch: list[Listed]) -> None:
        if self._dry_run:
            self._count(batch)
            return
        while batch:
            looked_at = self._delete_within_lease(batch)
            if not looked_at:
                msg = f"{self._store.url}: reading the catalog takes longer than {LEASE_S:g} s: collect nearer to it"
                raise StorageError(msg)
            batch = batch[looked_at:]

    def _delete_within_lease(self, batch: list[Listed]) -> int:
        """Delete what one lease gives the time for; returns how many of the batch were done with."""
        stop_at = time.monotonic() + LEASE_S
        announced: deque[str] = deque()
        try:
            for start in range(0, len(batch), MAX_NAMES):
                names = [listed.key for listed in batch[start : start + MAX_NAMES]]
                announced.append(announce(self._store, self._space, names))
            self._mark()
            for start in range(0, len(batch), MAX_NAMES):
                done = self._delete_announced(batch[start : start + MAX_NAMES], stop_at)
                if done is not None:
                    return start + done
                self._store.delete(announced[0])  # its writers go on
                announced.popleft()
        finally:
            for at in announced:
                with suppress(StorageError):  # the first error counts; what stays is not waited for when it is old
                    self._store.delete(at)
        return len(batch)

    def _delete_announced(self, batch: list[Listed], stop_at: float) -> int | None:
        """Delete what one announcement names; returns how many were done with where the lease ends before the last."""
        for start in range(0, len(batch), _PIECE):
            piece = batch[start : start + _PIECE]
            keys = set(self._keys_of_garbage([one.key for one in piece]))
            doomed = [one for one in piece if one.key in keys]
            if time.monotonic() > stop_at:
                return start
            self._store.delete_many(one.key for one in doomed)
            self._count(doomed)
        return None

    def _keys_of_garbage(self, keys: list[str]) -> list[str]:
        """Those that were not written again, and that nothing marked meanwhile names."""
        times = read_ahead(self._store, keys, partial(modified, self._store))
        return [key for key, written in times if self._is_garbage(key, written())]

    def _count(self, deleted: list[Listed]) -> None:
        names = Counter(kind.name for listed in deleted if (kind := kind_of(listed.key)))
        size = sum(listed.size for listed in deleted)
        of_documents = sum(listed.size for listed in deleted if kind_of(listed.key) not in _SHARED)
        blobs, profiles, texts = (names.pop(name, 0) for name in ("blob", "profile", "text"))
        self._done += Collected(blobs, profiles, texts, bytes=size, others=names.total(), document_bytes=of_documents)

    def _delete_dead_announcements(self) -> None:
        dead = time.time() - 2 * LEASE_S - self._grace_s
        for kind in kinds("lease"):
            found = [one.key for one in self._store.scan(kind.prefix(self._space)) if 0 < one.modified < dead]
            self._store.delete_many(found)
