"""Marks which saved prompts were used, in the catalog."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvwire.errors import AuthError, KvwireError
from kvwire.store.base import modified
from kvwire.store.index_records import LastUse, is_saved

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvwire.store.catalog.catalog import Catalog
    from kvwire.store.catalog.objects import Config
    from kvwire.store.records import CatalogEntry

MARK_EVERY_S = 3600.0
"""A mark is written anew once it is that old: a write an hour for each prompt that is in use."""
_MOST_WAITING = 10_000


class LastUses:
    """Marks which saved prompts one process uses, each at most once in ``every_s``. For one thread at a time.

    A store that cannot be written to is no trouble: documents then count as used when they were written.
    """

    def __init__(self, catalog: Catalog, config: Config, every_s: float = MARK_EVERY_S) -> None:
        """Write nothing yet.

        Args:
            catalog: Where the documents are.
            config: The model configuration.
            every_s: Seconds after which a mark is written anew.
        """
        self._catalog, self._space, self._every_s = catalog, catalog.keys(config), every_s
        self._marked: dict[str, float] = {}  # by document; on the monotonic clock
        self._may_write = True

    def wanted(self, entries: Iterable[CatalogEntry]) -> list[CatalogEntry]:
        """Choose the documents that are to be marked.

        Args:
            entries: Documents that were used.

        Returns:
            Saved prompts among them that this process has not marked within ``every_s``.
        """
        due = time.monotonic() - self._every_s
        saved = (one for one in entries if is_saved(one.document_id) and not one.is_text)
        return [one for one in saved if self._may_write and self._marked.get(one.document_id, due) <= due]

    def mark(self, entries: Iterable[CatalogEntry]) -> int:
        """Mark documents as used now, unless a mark in the store is young.

        Args:
            entries: Documents that were used.

        Returns:
            How many marks were written.
        """
        count = 0
        for entry in {each.document_id: each for each in self.wanted(entries)}.values():
            if len(self._marked) >= _MOST_WAITING:
                self._marked.clear()
            self._marked[entry.document_id] = time.monotonic()
            try:
                count += self._mark(entry)
            except AuthError:
                self._may_write = False
                break
            except KvwireError:
                break  # the store is down or full; the next use after ``every_s`` tries again
        return count

    def _mark(self, entry: CatalogEntry) -> bool:
        key = self._space.last_use(entry.document_id)
        if modified(self._catalog.store, key) > time.time() - self._every_s:
            return False
        self._catalog.objects.write(key, LastUse(entry.document_id, entry.token_digest).to_json())
        return True
