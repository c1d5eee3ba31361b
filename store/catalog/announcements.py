"""Announcements: a collector of garbage names what it is about to delete where writers look.

It writes an announcement, reads the entries, deletes, and removes the announcement. A writer writes its entry and then
looks for announcements. Whichever came first, one of the two sees the other: see ``upkeep.collect``.
"""

from __future__ import annotations

import json
import secrets
import time
from typing import TYPE_CHECKING

from kvwire.errors import AuthError, CorruptError, NotFoundError
from kvwire.store.records import MAX_ENTRY_BYTES, Announcement

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvwire.store.base import Store
    from kvwire.store.keys import KeySpace

GRACE_S = 24 * 3600.0
"""How long content may lie unreferenced before it counts as garbage: longer than writing an entry takes."""
LEASE_S = 300.0
"""How long an announcement holds: its collector deletes nothing later, its readers do not wait longer."""
MAX_NAMES = 8192
"""Names in one announcement, which then is shorter than what is read of a catalog object."""
_POLL_S = 0.05


def is_old(modified: float) -> bool:
    """Whether content is so old that a collector may soon take it: half the grace."""
    return 0 < modified < time.time() - GRACE_S / 2


def announce(store: Store, space: KeySpace, keys: Collection[str]) -> str:
    """Tell writers which objects are about to be deleted."""
    at = space.announcement(secrets.token_hex(16))
    store.put(at, json.dumps({"collecting": sorted(_name(key) for key in keys)}).encode())
    return at


def wait_for_collectors(store: Store, space: KeySpace, keys: Collection[str] | None) -> None:
    """Return once no collector is about to delete one of these objects, which is nearly always at once.

    Called after entries that name them were written, and before a check that they are still there.
    """
    names = None if keys is None else {_name(key) for key in keys}
    try:
        found = list(store.scan(space.announcements))
    except AuthError:  # a writer that may not list relies on the grace period
        return
    for listed in found:
        if listed.modified and listed.modified < time.time() - 2 * LEASE_S:  # its collector died
            continue
        give_up_at = time.monotonic() + LEASE_S
        while _names_any(store, listed.key, names) and time.monotonic() < give_up_at:
            time.sleep(_POLL_S)


def _names_any(store: Store, at: str, names: set[str] | None) -> bool:
    try:
        told = Announcement.from_json(store.get(at, 0, MAX_ENTRY_BYTES + 1)).collecting
    except NotFoundError:
        return False
    except CorruptError:
        return True  # it may name anything
    return names is None or not names.isdisjoint(told)


def _name(key: str) -> str:
    return key.rpartition("/")[2]
