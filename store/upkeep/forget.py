"""Which saved prompts a store forgets when it gets too large, or when they were not used for long.

Documents that share parts form a tree: a conversation's later turns stand behind its earlier ones. What was used least
recently goes first, leaves before what they stand on, and a use of a leaf is one of all that it stands on (as
RadixAttention evicts). Documents that were encoded by name stay unless they are asked for.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError, AuthError
from kvwire.store.base import modified
from kvwire.store.catalog.announcements import GRACE_S
from kvwire.store.index_records import is_saved
from kvwire.store.listing import ahead
from kvwire.store.upkeep.walk import Report, catalogs, counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kvwire.store.base import Store
    from kvwire.store.catalog.catalog import Catalog
    from kvwire.store.crypto.keyring import Keyring
    from kvwire.store.keys import KeySpace
    from kvwire.store.upkeep.walk import OnProgress

_WRITERS = 8


@dataclass(frozen=True)
class Forgotten(Report):
    """What was taken out of the catalog, or would be.

    Attributes:
        documents: How many.
        bytes: Of their blobs that no other document needs; ``collect`` deletes them.
        left: Bytes of all documents' blobs that remain.
        failures: In words, what could not be read; such a document stays.
    """

    documents: int = 0
    bytes: int = 0
    left: int = 0
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stored:
    """One document as forgetting sees it: its entry, its parts in order, its last use, whether it may go at all."""

    key: str
    blobs: tuple[str, ...]
    used: float
    may_go: bool


def choose(
    documents: Iterable[Stored], sizes: Mapping[str, int], keep_bytes: float = inf, unused_since: float = inf
) -> Iterator[tuple[Stored, int]]:
    """What to forget, in order, each with the bytes that its going frees, until the blobs left fit ``keep_bytes``."""
    nodes = defaultdict[tuple[str, ...], list[Stored]](list)
    for document in documents:
        nodes[document.blobs].append(document)
    needed = Counter(blob for blobs, same in nodes.items() for blob in set(blobs) for _ in same)
    used = {blobs: max(each.used for each in same) for blobs, same in nodes.items()}
    stays = {blobs for blobs, same in nodes.items() if not all(each.may_go for each in same)}
    for blobs in sorted(nodes, key=len, reverse=True):  # from the leaves on: what stands behind counts for all before
        parent = next((blobs[:end] for end in range(len(blobs) - 1, 0, -1) if blobs[:end] in nodes), None)
        if parent is not None:
            used[parent] = max(used[parent], used[blobs])
            if blobs in stays:
                stays.add(parent)
    left = sum(sizes[blob] for blob in needed)
    for blobs in sorted(nodes.keys() - stays, key=lambda each: (used[each], -len(each), each)):
        if (keep_bytes < inf and left <= keep_bytes) or used[blobs] > unused_since:
            return
        for document in nodes[blobs]:
            freed = 0
            for blob in set(blobs):
                needed[blob] -= 1
                freed += 0 if needed[blob] else sizes[blob]
            left -= freed
            yield document, freed


def forget(  # noqa: PLR0913 - what may be forgotten, and what holds it back
    store: Store,
    *,
    keep_bytes: float = inf,
    unused_s: float = 0.0,
    tenant_hash: str | None = None,
    keyring: Keyring | None = None,
    named: bool = False,
    grace_s: float = GRACE_S,
    dry_run: bool = False,
    max_fraction: float = 1.0,
    on_progress: OnProgress | None = None,
) -> Forgotten:
    """Take documents out of the catalog that were not used for long; ``collect`` then deletes what they named.

    Args:
        store: The store.
        keep_bytes: Forget no more than is needed for the blobs of what is left to be no more than this; infinite: all
            that was not used for ``unused_s``.
        unused_s: Forget only what was not used for so long.
        tenant_hash: One tenant only; None: all, of whose documents those used least recently go first.
        keyring: To read the entries of tenants whose are sealed.
        named: Documents that were encoded by name, too; of these only when they were written is known.
        grace_s: Seconds after its last use for which a document stays in any case.
        dry_run: Forget nothing, and tell what would be.
        max_fraction: Forget nothing at all where it would be more than this part of all documents' bytes.
        on_progress: Called with ``"entries"`` and how many more were looked at.

    Returns:
        What was forgotten.

    Raises:
        ArgumentError: It would be more than ``max_fraction``.
        StorageError: The store fails.
    """
    known = catalogs(store, tenant_hash, keyring)
    look = _Look(on_progress or (lambda _what, _count: None), named=named, young=time.time() - grace_s)
    for catalog in known:
        for space in catalog.configurations():
            try:
                look.read(catalog, space)
            except AuthError as error:  # sealed entries, and no key: what is not known stays
                look.failures.append(f"{space.root}: {error}")
    unused_since = min(time.time() - unused_s, look.young)
    doomed = list(choose(look.documents, look.sizes, keep_bytes, unused_since))
    whole, going = sum(look.sizes.values()), sum(size for _, size in doomed)
    if going > max_fraction * whole and not dry_run:
        raise ArgumentError(
            f"{len(doomed):,} documents with {going:,} of {whole:,} bytes would be forgotten, more than "
            f"{max_fraction:.0%}, so nothing was: look with --dry-run; where this is right, pass --yes (max_fraction=1)"
        )
    total, threads = Forgotten(left=whole, failures=tuple(look.failures)), 1 if store.is_local else _WRITERS
    remove = (lambda _: True) if dry_run else look.remove
    for window in _windows(doomed):
        for (_, size), is_gone in ahead(window, remove, threads):
            if is_gone():
                total += Forgotten(1, size, -size)
    return total


def _windows(doomed: Iterable[tuple[Stored, int]]) -> Iterator[list[tuple[Stored, int]]]:
    """Documents that may go side by side: none of them stands on another, which has to stay until it is gone."""
    window: list[tuple[Stored, int]] = []
    stood_on = set[tuple[str, ...]]()
    for document, size in doomed:
        if document.blobs in stood_on:
            yield window
            window, stood_on = [], set()
        window.append((document, size))
        stood_on.update(document.blobs[:end] for end in range(1, len(document.blobs)))
    yield window


class _Look:
    """The documents of a store, by what their entries and the marks of their last uses say."""

    def __init__(self, tell: OnProgress, *, named: bool, young: float) -> None:
        self._tell, self._named, self.young = tell, named, young
        self.documents: list[Stored] = []
        self.sizes: dict[str, int] = {}
        self.failures: list[str] = []
        self._places: dict[str, tuple[Catalog, KeySpace, str]] = {}

    def read(self, catalog: Catalog, space: KeySpace) -> None:
        """Take in all documents of one model configuration."""
        written = {one.key: one.modified for one in catalog.store.scan(space.documents)}
        marked = {one.key: one.modified for one in catalog.store.scan(space.last_uses)}
        found = catalog.documents(space, on_error=lambda key, error: self.failures.append(f"{key}: {error}"))
        for entry in counted(found, "entries", self._tell):
            if entry.is_text:
                continue
            blobs = catalog.blobs.of(entry)
            self.sizes.update(blobs)
            key, name = space.document(entry.document_id), entry.document_id
            times = written.get(key, 0.0), marked.get(space.last_use(name), 0.0)
            self._places[key] = catalog, space, name
            may_go = times[0] > 0 and max(times) < self.young and (self._named or is_saved(name))
            self.documents.append(Stored(key, tuple(blobs), max(times), may_go))

    def remove(self, doomed: tuple[Stored, int]) -> bool:
        """Take a document out, unless it was written or used since it was looked at."""
        document = doomed[0]
        catalog, space, name = self._places[document.key]
        store = catalog.store
        for key in (document.key, space.last_use(name)):
            if modified(store, key) >= self.young:
                return False
        return catalog.remove(space, name)
