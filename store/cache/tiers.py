"""From sizes in words to a tiered store."""

from __future__ import annotations

import logging
import re
import threading
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError
from kvwire.store.cache.cache import RangeCache
from kvwire.store.cache.disk_tier import DiskTier
from kvwire.store.cache.locked_folder import unlocked_folders
from kvwire.store.cache.memory_tier import MemoryTier
from kvwire.store.cache.pending import PendingFolder
from kvwire.store.cache.settings import TierSettings
from kvwire.store.cache.tiered import TieredStore
from kvwire.store.cache.write_back import WriteBackStore

if TYPE_CHECKING:
    import os

    from kvwire.store.base import Store

_log = logging.getLogger(__name__)
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([kKMGTP]?)(i?)B?")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_PENDING = "pending"
_PENDING_SHARE = 4
_MANY_DIGITS = 20


def parse_size(text: str) -> int:
    """Bytes of a size in words: ``20GB`` is 20 * 10**9, ``512MiB`` is 512 * 2**20, ``1000`` is 1000.

    Args:
        text: The size.

    Returns:
        Bytes.

    Raises:
        ArgumentError: The text is no size.
    """
    match = _SIZE.fullmatch(text.strip()) if len(text) <= _MANY_DIGITS else None
    if match is None or (match[3] and not match[2]):
        msg = f"{text[:_MANY_DIGITS]!r} is not a size: write something like 20GB, 512MiB or 1000"
        raise ArgumentError(msg)
    unit = (1024 if match[3] else 1000) ** _POWERS[match[2]]
    return int(Fraction(match[1]) * unit)


def open_tiers(
    remote: Store,
    *,
    memory_bytes: int = 1 << 30,
    folder: str | os.PathLike[str] | None = None,
    folder_bytes: int = 0,
    write_back: bool = False,
    pending_bytes: int | None = None,
    settings: TierSettings | None = None,
) -> TieredStore:
    """Put tiers before ``remote``, which is taken over: closing the tiers closes it.

    Args:
        remote: Any store.
        memory_bytes: Size of the memory tier; 0 for none.
        folder: Of the disk tier; processes can share it.
        folder_bytes: Size of the disk tier, for each process.
        write_back: A put is done once it is safe on the local disk, see ``WriteBackStore``.
        pending_bytes: That wait there at most; by default a quarter of ``folder_bytes``.
        settings: Everything else.

    Returns:
        The store behind its tiers.

    Raises:
        ArgumentError: A size is negative, or one setting lacks another that it needs.
    """
    least = min(memory_bytes, folder_bytes, pending_bytes or 0)
    if least < 0 or (folder is None and (folder_bytes or write_back)) or (write_back and not folder_bytes):
        msg = "sizes must be 0 or more; folder_bytes and write_back need a folder, and write_back needs folder_bytes"
        raise ArgumentError(msg)
    settings = settings or TierSettings()
    lock = threading.Lock()
    disk = None
    if folder is not None and folder_bytes:
        disk = DiskTier(Path(folder).absolute(), folder_bytes, lock, settings)
        disk.open()
        if write_back:
            limit_bytes = folder_bytes // _PENDING_SHARE if pending_bytes is None else pending_bytes
            remote = _with_write_back(remote, disk, limit_bytes, settings)
    memory = MemoryTier(memory_bytes)
    return TieredStore(remote, RangeCache(memory, disk, settings, lock), settings)


def _with_write_back(remote: Store, disk: DiskTier, limit_bytes: int, settings: TierSettings) -> Store:
    """A write-back store in the disk tier's subfolder; the remote itself where that cannot be."""
    if disk.folder is None:
        _log.warning("write-back is off, as the folder cannot be used: writes go to the remote at once")
        return remote
    store = WriteBackStore(remote, PendingFolder(disk.folder / _PENDING), limit_bytes, settings)
    try:
        store.open(slot.folder / _PENDING for slot in unlocked_folders(disk.folder.parent))
    except OSError as error:
        _log.warning("write-back is off, as the folder fails (%s): writes go to the remote at once", error.strerror)
        return remote
    return store
