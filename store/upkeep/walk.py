"""The walk through a store that all upkeep shares: tenants, their content, and what entries name."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kvwire.errors import FormatVersionError, NotFoundError
from kvwire.store.catalog.catalog import Catalog
from kvwire.store.key_kinds import catalog_prefixes, found_kind, kind_of, kinds
from kvwire.store.keys import check_tenant
from kvwire.store.listing import tenants
from kvwire.store.partition import WHOLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvwire.store.base import Listed, Store
    from kvwire.store.crypto.keyring import Keyring
    from kvwire.store.key_kinds import KeyKind, ObjectRef
    from kvwire.store.keys import KeySpace
    from kvwire.store.partition import Part

    OnProgress = Callable[[str, int], None]

Report = TypeVar("Report")
TELL_EVERY = 1000
_SKEW_S = 3600.0
"""How far the store's clock and this machine's may be apart: entries that young are read again."""


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
        kind, digest = found_kind(listed.key)
        is_misplaced = kind is not None and kind.place is not None and kind.place(space, digest) != listed.key
        yield Found(listed, kind, digest, is_misplaced)


def entries(
    catalog: Catalog, keys: Iterable[str]
) -> Iterator[tuple[str, KeyKind, Callable[[], Sequence[ObjectRef] | None]]]:
    """Entries with their kinds, each with a function that gives what it names; None where it is gone.

    The function raises CorruptError where the entry is damaged.
    """
    for key, read in catalog.objects.read_each(keys):
        kind = kind_of(key)
        if kind is None or kind.names is None:
            raise _unknown(key)
        yield (
            key,
            kind,
            lambda key=key, names=kind.names, read=read: (  # type: ignore[misc]
                None if (data := read()) is None else names(key, data)
            ),
        )


def named(catalog: Catalog, space: KeySpace, since: float, tell: OnProgress) -> Iterator[str]:
    """Content that entries name which may have been written since an instant."""
    young = (
        listed.key
        for kind in kinds("root")
        for listed in catalog.store.scan(kind.prefix(space))
        if not listed.modified or listed.modified > since - _SKEW_S
    )
    count = 0
    for _, _, names in entries(catalog, young):
        if (found := names()) is None:
            continue
        yield from (one.key for one in found)
        count += 1
        if count % TELL_EVERY == 0:
            tell("entries", TELL_EVERY)
    tell("entries", count % TELL_EVERY)


def refuse_unknown_kinds(store: Store, space: KeySpace) -> None:
    """Refuse a catalog that holds what this version cannot read: it may name anything."""
    known = catalog_prefixes(space)
    after = ""
    while (found := next(iter(store.scan(space.catalog, after)), None)) is not None:
        prefix = next((prefix for prefix in known if found.key.startswith(prefix)), None)
        if prefix is None:
            raise _unknown(found.key)
        after = max(found.key, f"{prefix}~")


def is_there(store: Store, key: str, size: int | None = None) -> bool:
    """Whether an object is there, and of its size where that is told."""
    try:
        return store.stat(key).size == size or size is None
    except NotFoundError:
        return False


def added(one: Report, other: Report) -> Report:
    """Two reports of a walk as one: sums, and tuples joined."""
    names = [field.name for field in fields(one)]  # type: ignore[arg-type]  # reports are dataclasses
    return type(one)(*(getattr(one, name) + getattr(other, name) for name in names))


def _unknown(key: str) -> FormatVersionError:
    return FormatVersionError(
        f"{key} is of a kind that this version does not know, and may name anything: nothing is deleted; "
        "collect with the version that wrote it"
    )
