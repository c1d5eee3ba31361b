"""What a collection did, or would do."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError, StorageError
from kvwire.store.upkeep.walk import added

if TYPE_CHECKING:
    from kvwire.store.base import Store

_UNFINISHED_S = 3600.0
"""A temporary file that was written to within this time is somebody's, however short the grace."""


@dataclass(frozen=True)
class Collected:
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

    def __add__(self, other: Collected) -> Collected:
        """Both together."""
        total = added(self, other)
        return replace(total, failures=tuple(dict.fromkeys(total.failures)))


def check_fraction(found: Collected, max_fraction: float) -> None:
    """Refuse to delete more than a part of what there is."""
    shares = (
        (found.bytes, found.looked_at, "bytes"),
        (found.document_bytes, found.documents_looked_at, "bytes of documents"),
    )
    for garbage, whole, what in shares:
        if garbage > max_fraction * whole:
            msg = (
                f"no document names {garbage:,} of {whole:,} {what}, more than {max_fraction:.0%}, so nothing was "
                "deleted: look with --dry-run; where the catalog lost entries, run kvwire store rebuild; where this is "
                "right, pass --yes (max_fraction=1)"
            )
            raise ArgumentError(msg)


def remove_leftovers(store: Store, grace_s: float) -> Collected:
    """Delete unfinished files that nobody writes to any more."""
    try:
        count, size = store.remove_leftovers(time.time() - max(grace_s, _UNFINISHED_S))
    except StorageError as error:
        return Collected(failures=(f"unfinished files: {error}",))
    return Collected(leftovers=count, bytes=size)
