"""The walk through a store that all upkeep shares: tenants, their content, what entries name, and the outcome."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kvwire.errors import ArgumentError, FormatVersionError, StorageError
from kvwire.store.catalog.catalog import Catalog
from kvwire.store.key_kinds import find_kind, kind_of, kinds
from kvwire.store.keys import check_tenant
from kvwire.store.listing import WHOLE, tenants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Self

    from kvwire.store.base import Listed, Store
    from kvwire.store.crypto.keyring import Keyring
    from kvwire.store.key_kinds import KeyKind, ObjectRef
    from kvwire.store.keys import KeySpace
    from kvwire.store.listing import Part

    OnProgress = Callable[[str, int], None]


T = TypeVar("T")
_TELL_EVERY = 1000
_SKEW_S = 3600.0
"""How far the store's clock and this machine's may be apart: entries that young are read again."""
_UNFINISHED_S = 3600.0
"""A temporary file written to within this time belongs to a running writer, however short the grace."""


@dataclass(frozen=True)
class Report:
    """What a walk did; that of several walks is their sum."""

    def __add__(self, other: Self) -> Self:
        """Both together: sums, and tuples joined; what both say is said once."""
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return type(self)(**{name: tuple(dict.fromkeys(v)) if isinstance(v, tuple) else v for name, v in sums.items()})


class Found(NamedTuple):
    """One object of content, as it is listed, and what its key says."""

    listed: Listed
    kind: KeyKind | None
    digest: str
    is_misplaced: bool


def catalogs(store: Store, tenant: str | None = None, keyring: Keyring | None = None) -> list[Catalog]:
    """Catalogs of all tenants, or of one, by their hashes."""
    known = list(tenants(store)) if tenant is None else [tenant]
    return [Catalog.of_hash(store, check_tenant(each), keyring=keyring) for each in known]


def objects(store: Store, space: KeySpace, part: Part = WHOLE) -> Iterator[Found]:
    """All content of a configuration, or a part of it."""
    for listed in part.content(store, space):
        kind, digest = find_kind(listed.key) or (None, "")
        is_misplaced = kind is not None and kind.place is not None and kind.place(space, digest) != listed.key
        yield Found(listed, kind, digest, is_misplaced)


def entries(catalog: Catalog, keys: Iterable[str]) -> Iterator[tuple[str, Callable[[], Sequence[ObjectRef]]]]:
    """Entries, each with a function that gives what it names, nothing where it is gone, or raises CorruptError."""
    for key, read in catalog.objects.read_each(keys):
        kind = kind_of(key)
        if kind is None or kind.names is None:
            raise _unknown(key)
        yield key, partial(_names, key, kind.names, read)


def _names(
    key: str, names: Callable[[str, bytes], Sequence[ObjectRef]], read: Callable[[], bytes | None]
) -> Sequence[ObjectRef]:
    return () if (data := read()) is None else names(key, data)


def named(catalog: Catalog, space: KeySpace, since: float, tell: OnProgress) -> Iterator[str]:
    """Content that entries name which may have been written since an instant."""
    young = (
        listed.key
        for kind in kinds("root")
        for listed in catalog.store.scan(kind.prefix(space))
        if not listed.modified or listed.modified > since - _SKEW_S
    )
    for _, names in counted(entries(catalog, young), "entries", tell):
        yield from (one.key for one in names())


def counted(items: Iterable[T], what: str, tell: OnProgress) -> Iterator[T]:
    """Items as they come; each thousand of them, and the rest, is told of."""
    count = 0
    for count, item in enumerate(items, 1):
        yield item
        if count % _TELL_EVERY == 0:
            tell(what, _TELL_EVERY)
    tell(what, count % _TELL_EVERY)


def refuse_unknown_kinds(store: Store, space: KeySpace) -> None:
    """Refuse a catalog that holds what this version cannot read: it may name anything."""
    known = [kind.prefix(space) for kind in kinds() if kind.is_catalog]
    after = ""
    while (found := next(iter(store.scan(space.catalog, after)), None)) is not None:
        prefix = next((prefix for prefix in known if found.key.startswith(prefix)), None)
        if prefix is None:
            raise _unknown(found.key)
        after = max(found.key, f"{prefix}~")


def _unknown(key: str) -> FormatVersionError:
    return FormatVersionError(
        f"{key} is of a kind that this version does not know, and may name anything: nothing is deleted; "
        "collect with the version that wrote it"
    )


@dataclass(frozen=True)
class Collected(Report):
    """What was deleted, or would be.

    Attributes:
        entries: Of token sequences, and of their prefixes, that no document has.
        leftovers: Unfinished files.
        bytes: Of all but entries.
        failures: In words, model configurations where an entry that cannot be read hides what is needed, or where the
            store failed, so that less was deleted than might be. The same failure of several parts is told once.
        others: Objects of further kinds.
        looked_at: Bytes of all content that was looked at.
        documents_looked_at: Bytes of all of it but profiles, which are shared and outweigh a few documents.
        document_bytes: Bytes of what was deleted but profiles.
        misplaced: Objects of known kinds that lie where none of their kind does, so that nothing leads to them. They
            are left alone: ``verify_store`` names them.
    """

    blobs: int = 0
    profiles: int = 0
    texts: int = 0
    entries: int = 0
    leftovers: int = 0
    bytes: int = 0
    failures: tuple[str, ...] = ()
    others: int = 0
    looked_at: int = field(default=0, compare=False)
    documents_looked_at: int = field(default=0, compare=False)
    document_bytes: int = field(default=0, compare=False)
    misplaced: int = field(default=0, compare=False)


def check_fraction(found: Collected, max_fraction: float) -> None:
    """Refuse to delete more than a part of what there is."""
    shares = (
        (found.bytes, found.looked_at, "bytes"),
        (found.document_bytes, found.documents_looked_at, "bytes of documents"),
    )
    for garbage, whole, what in shares:
        if garbage > max_fraction * whole:
            raise ArgumentError(
                f"no document names {garbage:,} of {whole:,} {what}, more than {max_fraction:.0%}, so nothing was "
                "deleted: look with --dry-run; where the catalog lost entries, run kvwire store rebuild; where this is "
                "right, pass --yes (max_fraction=1)"
            )


def remove_leftovers(store: Store, grace_s: float) -> Collected:
    """Delete unfinished files that no writer goes on with."""
    try:
        count, size = store.remove_leftovers(time.time() - max(grace_s, _UNFINISHED_S))
    except StorageError as error:
        return Collected(failures=(f"unfinished files: {error}",))
    return Collected(leftovers=count, bytes=size)
