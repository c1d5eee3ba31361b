"""A store behind tiers: memory, local disk, remote."""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from concurrent.futures import Future
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvwire._forks import OwnProcess
from kvwire.errors import ArgumentError
from kvwire.store.base import HeldObject, ObjectStat, Store, clamp_range, open_object
from kvwire.store.cache.cache import RangeCache
from kvwire.store.cache.disk_tier import DiskTier
from kvwire.store.cache.local import unlocked_folders
from kvwire.store.cache.pending import PendingFolder
from kvwire.store.cache.reading import BlockingOrigin, Prefetcher, read_blocking
from kvwire.store.cache.settings import TierSettings
from kvwire.store.cache.write_back import WriteBackStore
from kvwire.store.key_kinds import content_digest, is_intact
from kvwire.store.keys import check_key

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator

    from kvwire.store.base import Data, Listed, ObjectReader
    from kvwire.store.cache.settings import Counters

_log = logging.getLogger(__name__)
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([kKMGTP]?)(i?)B?")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_PENDING = "pending"
_PENDING_SHARE = 4
_MANY_DIGITS = 20


class TieredStore(Store):
    """Reads of content go through the tiers; everything else goes to the remote. ``open_tiers`` makes one.

    Content is what its key names by digest (blobs and profiles): it never changes, so a copy is as good as the
    original, even while the remote is down or after another client has deleted it there. Catalog entries and pointers
    are never cached. There is no HTTP address: reads that went past the tiers would fetch everything anew.
    """

    def __init__(self, remote: Store, cache: RangeCache, settings: TierSettings) -> None:
        """Take over the remote."""
        self._below, self._tiers = remote, cache
        self._settings = settings
        self._prefetcher = Prefetcher(cache, settings)
        self._process = OwnProcess("stores behind tiers")

    @property
    def cache(self) -> RangeCache:
        """What ``kvwire.transport`` reads through."""
        self._process.check()
        return self._tiers

    @property
    def _remote(self) -> Store:
        self._process.check()
        return self._below

    @property
    def url(self) -> str:
        """The remote's address."""
        return self._below.url

    def name(self, key: str) -> bytes | None:
        """What the tiers call an object of this remote.

        Args:
            key: The object.

        Returns:
            Its name, 32 bytes; None where it is no content.
        """
        if content_digest(check_key(key)) is None:
            return None
        return hashlib.sha256(f"{self._remote.url}\0{key}".encode()).digest()

    def origin(self, key: str) -> Store:
        """The store below the tiers that has an object.

        Args:
            key: The object.

        Returns:
            The remote, or the store of pending writes before it.
        """
        return self._remote.origin(key) if isinstance(self._remote, WriteBackStore) else self._remote

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes ``start`` to ``end``, clamped at the object's end, each from the nearest tier that has it."""
        name = self.name(key)
        if name is None or start == end:
            return self._remote.get(key, start, end)
        self.cache.use(name)
        known = self.cache.sizes.get(name)
        if known is not None and start >= known and self._remote.stat(key).size != known:
            self._forget(key)  # it was too short when its length was told
        return self._read(name, key, start, end)

    def stat(self, key: str) -> ObjectStat:
        """Size and entity tag, from the remote: this tells what is there, not what is cached."""
        found = self._remote.stat(key)
        if (name := self.name(key)) is not None:
            self.cache.sizes.put(name, found.size)
        return found

    def snapshot(self, key: str) -> ObjectReader:
        """Hold one version open; of content, opening is one use, and reading it goes through the tiers.

        Content has one version only. It is not held on the remote: once it is deleted, what is not cached is gone.
        """
        name = self.name(key)
        if name is None:
            return open_object(self._remote, key)
        size = self.cache.sizes.get(name)
        if size is None:
            size = self.stat(key).size
        self.cache.use(name)
        return HeldObject(size, content_digest(key) or "", partial(self._read, name, key))

    def put(self, key: str, data: Data) -> None:
        """Write to the remote (with ``write_back``: durably to the local disk) and keep content in the tiers."""
        try:
            self._remote.put(key, data)
        finally:
            self._forget(key)
        self._keep(key, data)

    def create(self, key: str, data: Data) -> bool:
        """Write where the remote has nothing of that size yet."""
        written = self._remote.create(key, data)
        if written:
            self._forget(key)
            self._keep(key, data)
        return written

    def replace(self, key: str, data: Data, etag: str) -> bool:
        """Write where the remote's version is still the one with this tag."""
        written = self._remote.replace(key, data, etag)
        self._forget(key)  # in either case: what lies there is another version than a tier may hold
        if written:
            self._keep(key, data)
        return written

    def delete(self, key: str) -> None:
        """Remove the object from the remote and from the tiers."""
        try:
            self._remote.delete(key)
        finally:
            self._forget(key)

    def delete_many(self, keys: Iterable[str]) -> None:
        """Remove objects from the remote, in as few requests as it knows how to, and from the tiers."""
        several = list(keys)
        try:
            self._remote.delete_many(several)
        finally:
            for key in several:
                self._forget(key)

    def scan(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """What the remote lists."""
        return self._remote.scan(prefix, after)

    def prefetch(self, key: str, start: int = 0, end: int | None = None) -> Future[bool]:
        """Hint that content will be read soon. It is fetched in the background, while no reader fetches anything.

        Args:
            key: The object; a hint of what is no content does nothing.
            start: First byte.
            end: The byte after the last; None: to the object's end.

        Returns:
            Whether all of it came, once that is known; cancel it to drop the hint.
        """
        clamp_range(start, end, 0)
        if (name := self.name(key)) is not None:
            return self._prefetcher.hint(name, BlockingOrigin(self._remote, key), start, end)
        nothing = Future[bool]()
        nothing.set_result(False)
        return nothing

    def distrust(self, key: str, start: int = 0, end: int | None = None) -> None:
        """Forget cached bytes of a range that were found wrong, or missing; the next read asks the remote."""
        if (name := self.name(key)) is not None:
            self.cache.drop(name, start, end)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all writes are on the remote. Without write-back they are.

        Args:
            timeout_s: Longest wait in seconds; None: as long as it takes.

        Raises:
            DeadlineError: It takes longer.
        """
        if isinstance(self._remote, WriteBackStore):
            self._remote.flush(timeout_s)

    def settle(self, timeout_s: float) -> bool:
        """Wait until the background has nothing to write to the disk or to prefetch.

        Args:
            timeout_s: Longest wait for each of the two, in seconds.

        Returns:
            Whether it came to that.
        """
        return self._prefetcher.drain(timeout_s) and self.cache.drain(timeout_s)

    def counters(self) -> Counters:
        """What happened so far, and what is held now."""
        counted = self.cache.counted()
        counted.prefetch = self._prefetcher.counted()
        if isinstance(self._remote, WriteBackStore):
            counted.uploads = self._remote.counted()
        return counted

    def close(self) -> None:
        """Write what only the memory holds to the disk, upload what is pending, as far as time allows; then let go."""
        if not self._process.is_here:
            return
        self._prefetcher.close()
        self.cache.close()
        self._remote.close()

    def _read(self, name: bytes, key: str, start: int, end: int | None) -> bytes:
        return read_blocking(self.cache, name, BlockingOrigin(self._remote, key), start, end)

    def _forget(self, key: str) -> None:
        if (name := self.name(key)) is not None:
            self.cache.drop(name)

    def _keep(self, key: str, data: Data) -> None:
        """Keep what was written, as if it had been read; never what is not what its key says."""
        name = self.name(key)
        if name is None or not len(data) or not is_intact(key, data):
            return
        self.cache.use(name)
        view = memoryview(data)
        for start in range(0, len(view), self._settings.flight_bytes):
            part = bytes(view[start : start + self._settings.flight_bytes])
            self.cache.keep(name, start, part, len(view))


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
        raise ArgumentError(f"{text[:_MANY_DIGITS]!r} is not a size: write something like 20GB, 512MiB or 1000")
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
    return TieredStore(remote, RangeCache(memory_bytes, disk, settings, lock), settings)


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
