"""Uploading what names content, long after it was written: nobody shall find an entry that leads nowhere.

While an entry waits, a collector of garbage sees content on the remote that nobody names. So the content is looked at
before the entry is uploaded, and once more after collectors have been waited for, as ``collecting`` asks of writers.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError, CorruptError, NotFoundError
from kvwire.store.catalog.announcements import is_old, wait_for_collectors
from kvwire.store.key_kinds import content_digest, kind_of
from kvwire.store.keys import KeySpace

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.store.base import Store


@dataclass(frozen=True)
class _Named:
    """What an entry names: the object without which it leads nowhere, and others, which may never have been there."""

    space: KeySpace
    needed: str
    others: tuple[str, ...] = ()


def upload_entry(remote: Store, key: str, data: bytes, was_there: Callable[[str], bool]) -> bool:
    """Write an entry, or whatever else is not content, to the remote.

    Content that is old enough to be collected is written again first. What cannot be read, such as a sealed entry, is
    written as it is, and so is what names an object that never ``was_there``.
    """
    named = _named(key, data)
    if named is None:
        remote.put(key, data)
        return True
    if not _refresh(remote, named.needed):
        if was_there(named.needed):
            return False
        remote.put(key, data)
        return True
    for other in named.others:
        _refresh(remote, other)
    remote.put(key, data)
    wait_for_collectors(remote, named.space, [named.needed, *named.others])
    if _is_there(remote, named.needed):
        return True
    with suppress(NotFoundError):
        if remote.get(key) == data:  # and not yet another's
            remote.delete(key)
    return False


def _named(key: str, data: bytes) -> _Named | None:
    kind = kind_of(key)
    if kind is None or kind.names is None:
        return None
    _, tenant, config, _ = key.split("/", 3)
    try:
        keys = [named.key for named in kind.names(key, data)]
    except (ArgumentError, CorruptError):
        return None
    return _Named(KeySpace(tenant, config), keys[0], tuple(keys[1:])) if keys else None


def _is_there(remote: Store, key: str) -> bool:
    try:
        remote.stat(key)
    except NotFoundError:
        return False
    return True


def _refresh(remote: Store, key: str) -> bool:
    """See to it that no collector takes an object soon; False where it is gone or damaged."""
    try:
        if not is_old(remote.stat(key).modified):
            return True
        data = remote.get(key)
    except NotFoundError:
        return False
    if (digest := content_digest(key)) and hashlib.sha256(data).hexdigest() != digest:
        return False
    remote.put(key, data)
    return True
