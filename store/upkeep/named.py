"""What the entries of a configuration name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.errors import FormatVersionError
from kvwire.store.key_kinds import catalog_prefixes, kind_of, kinds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvwire.store.base import Store
    from kvwire.store.catalog.catalog import Catalog
    from kvwire.store.keys import KeySpace

    OnProgress = Callable[[str, int], None]

TELL_EVERY = 1000
_SKEW_S = 3600.0
"""How far the store's clock and this machine's may be apart: entries that young are read again."""


def named(catalog: Catalog, space: KeySpace, since: float, tell: OnProgress) -> Iterator[str]:
    """Content that entries name which may have been written since an instant."""
    young = (
        listed.key
        for kind in kinds("marks")
        for listed in catalog.store.scan(kind.prefix(space))
        if not listed.modified or listed.modified > since - _SKEW_S
    )
    count = 0
    for key, read in catalog.read_each(space, young):
        kind, data = kind_of(key), read()
        if data is None:
            continue
        if kind is None or kind.names is None:
            raise _unknown(key)
        yield from (found.key for found in kind.names(key, data))
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


def _unknown(key: str) -> FormatVersionError:
    return FormatVersionError(
        f"{key} is of a kind that this version does not know, and may name anything: nothing is deleted; "
        "collect with the version that wrote it"
    )
