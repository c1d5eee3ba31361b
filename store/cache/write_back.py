"""A store that acknowledges a write once it is safe on the local disk, and uploads it in the background.

Order: content (known by its digest) is uploaded whenever its turn comes; any other write waits until everything that
was acknowledged before it is on the remote, and what it names is looked at once more, since a collector may have taken
it meanwhile. So no reader finds an entry on the remote without the blob that it names.
Reads through this store see what is pending.
"""

from __future__ import annotations

import heapq
import logging
import random
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvwire.errors import CorruptError, DeadlineError, KvwireError, NotFoundError, StorageError
from kvwire.store.backends.memory import MemorySnapshot
from kvwire.store.base import Listed, ObjectStat, Store, clamp_range, holds, is_there, merged, open_object, tag_of
from kvwire.store.cache.pending import upload_entry
from kvwire.store.cache.settings import UploadCounters
from kvwire.store.catalog.announcements import GRACE_S
from kvwire.store.key_kinds import check_place, content_digest, entity_tag, is_intact
from kvwire.store.keys import check_after, check_key, is_announcement, is_catalog_key
from kvwire.store.recent import Recent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from kvwire.store.base import Data, ObjectReader
    from kvwire.store.cache.pending import PendingFolder, PendingWrite
    from kvwire.store.cache.settings import TierSettings

_log = logging.getLogger(__name__)
_MOST_UPLOADED = 1 << 14


class WriteBackStore(Store):
    """Writes to a pending folder first, and from there to ``remote``, which it takes over."""

    def __init__(self, remote: Store, folder: PendingFolder, limit_bytes: int, settings: TierSettings) -> None:
        """Touch nothing yet; ``open`` does."""
        self._remote = remote
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._settings = settings
        self._changed = threading.Condition()
        self._queue: OrderedDict[int, PendingWrite] = OrderedDict()
        self._content: list[tuple[float, int, PendingWrite]] = []  # a heap by the time of the next attempt
        self._latest: dict[str, PendingWrite] = {}
        self._uploaded: Recent[str, bool] = Recent(_MOST_UPLOADED)
        self._bytes = 0
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._trouble = ""
        self._counters = UploadCounters()

    def open(self, abandoned: Iterable[Path] = ()) -> None:
        """Go on with what earlier processes left here and in abandoned pending folders."""
        left = self._folder.load()
        for folder in abandoned:
            left += self._folder.adopt(folder)
        with self._changed:
            for pending in left:
                self._bytes += pending.size
                self._enqueue(pending)

    @property
    def url(self) -> str:
        """The remote's address."""
        return self._remote.url

    def origin(self, key: str) -> Store:
        """Whichever store has the newest bytes of a key."""
        return self if self._pending(key) else self._remote

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes of a range, of what is pending where anything is."""
        data = self._pending_data(key, start, end)
        return self._remote.get(key, start, end) if data is None else data

    def stat(self, key: str) -> ObjectStat:
        """Size and entity tag, of what is pending where anything is."""
        pending = self._pending(key)
        if pending is not None and (digest := content_digest(key)):
            return ObjectStat(pending.size, digest, pending.written)
        if pending is None or (data := self._pending_data(key)) is None:
            return self._remote.stat(key)
        return ObjectStat(len(data), entity_tag(key, data), pending.written)

    def snapshot(self, key: str) -> ObjectReader:
        """Hold one version open."""
        pending = self._pending(key)
        if pending is None or (data := self._pending_data(key)) is None:
            return open_object(self._remote, key)
        return MemorySnapshot(key, data, pending.written)

    def put(self, key: str, data: Data) -> None:
        """Make the write durable here, or else on the remote at once; waits ``put_s`` while the folder is full."""
        check_place(key)
        if is_announcement(key):  # it has to be seen before anything is deleted
            self._remote.put(key, data)
            return
        if not is_intact(key, data) or len(data) > self._limit_bytes:
            self._put_directly(key, data)
            return
        self._reserve(len(data))
        try:
            pending = self._folder.write(key, data)
        except BaseException as error:
            with self._changed:
                self._bytes -= len(data)
                self._changed.notify_all()
            if not isinstance(error, OSError):
                raise
            _log.warning("a write goes to the remote at once, as the pending folder fails (%s)", error.strerror)
            self._put_directly(key, data)
            return
        with self._changed:
            self._enqueue(pending)

    def create(self, key: str, data: Data) -> bool:
        """Write where neither the pending folder nor the remote has anything of that size; tells whether it wrote."""
        try:
            if is_there(self, key, len(data)):
                return False
        except StorageError:
            _log.info("the remote cannot be asked: the write is queued without")
        self.put(key, data)
        return True

    def replace(self, key: str, data: Data, etag: str) -> bool:
        """Write at once where the remote's version is still the one with this tag; what is pending goes up first."""
        self.flush(self._settings.put_s)
        if self._remote.replace(key, data, etag):
            return True
        tag = self._uploaded_tag(key, etag)
        return bool(tag) and self._remote.replace(key, data, tag)

    def _uploaded_tag(self, key: str, etag: str) -> str:
        """The remote's own tag of what had this one while it was pending; empty where something else lies there."""
        tag = tag_of(self._remote, key) or ""
        with suppress(NotFoundError):  # deleted meanwhile
            return tag if tag not in ("", etag) and entity_tag(key, self._remote.get(key)) == etag else ""
        return ""

    def delete(self, key: str) -> None:
        """Call off what is pending of the key, then delete it from the remote."""
        self._call_off({check_key(key)})
        self._remote.delete(key)

    def delete_many(self, keys: Iterable[str]) -> None:
        """The same for many keys."""
        several = [check_key(key) for key in keys]
        self._call_off(set(several))
        self._remote.delete_many(several)

    def scan(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """What the remote lists, together with what is pending."""
        check_after(prefix, after)
        if is_announcement(prefix):
            return self._announced(prefix, after)  # none where the remote is away: uploads wait for collectors anyway
        with self._changed:  # before the remote is asked: what is uploaded in between is in one of the two
            keys = sorted(key for key in self._latest if key.startswith(prefix) and key > after)
            own = [Listed(key, self._latest[key].size, self._latest[key].written) for key in keys]
        return merged(iter(own), self._remote.scan(prefix, after))

    def _announced(self, prefix: str, after: str) -> Iterator[Listed]:
        try:
            return iter(list(self._remote.scan(prefix, after)))
        except StorageError:
            _log.info("the remote cannot be asked for announcements: uploads look for them")
            return iter(())

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything acknowledged so far is on the remote."""
        with self._changed:
            numbers = set(self._queue)
            if not self._changed.wait_for(lambda: numbers.isdisjoint(self._queue), timeout_s):
                msg = f"{len(self._queue)} writes are not on the remote yet ({self._trouble or 'it is slow'}); "
                raise DeadlineError(msg + "they stay on the local disk and are uploaded later")

    def counted(self) -> UploadCounters:
        """The counters, with what is pending now."""
        with self._changed:
            return replace(self._counters, pending=len(self._queue), pending_bytes=self._bytes)

    def close(self) -> None:
        """Upload what can be uploaded soon; the rest stays for the next process."""
        with suppress(DeadlineError):
            self.flush(self._settings.close_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        give_up_at = time.monotonic() + self._settings.close_s
        for thread in self._threads:
            thread.join(max(0.0, give_up_at - time.monotonic()))
        self._remote.close()

    def _put_directly(self, key: str, data: Data) -> None:
        if content_digest(key) is None:
            self.flush(self._settings.put_s)
        with self._changed:
            self._counters.direct += 1
        self._remote.put(key, data)

    def _reserve(self, size: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._bytes + size <= self._limit_bytes, self._settings.put_s):
                msg = f"the pending folder is full: uploads lag ({self._trouble or 'the remote is slow'}); try later"
                raise DeadlineError(msg)
            self._bytes += size

    def _pending(self, key: str) -> PendingWrite | None:
        with self._changed:
            return self._latest.get(key)

    def _pending_data(self, key: str, start: int = 0, end: int | None = None) -> bytes | None:
        pending = self._pending(key)
        if pending is None:
            return None
        start, end = clamp_range(start, end, pending.size)
        try:
            return self._folder.read_range(pending, start, end)
        except (CorruptError, FileNotFoundError):
            return None  # uploaded meanwhile, or damaged: the remote is asked
        except OSError as error:
            msg = f"the pending write of {key} cannot be read now ({error.strerror}): try again"
            raise StorageError(msg) from error

    def _call_off(self, keys: set[str]) -> None:
        with self._changed:
            if not self._changed.wait_for(
                lambda: not any(one.is_running for one in self._queue.values() if one.key in keys), self._settings.put_s
            ):
                raise DeadlineError("the object is just being uploaded, and that takes too long: delete it later")
            mine = [one for one in self._queue.values() if one.key in keys]
            for one in mine:  # keeps the upload threads off
                one.is_running = True
        self._remove(mine)

    def _enqueue(self, pending: PendingWrite) -> None:
        self._queue[pending.number] = pending
        if pending.key is not None:
            self._latest[pending.key] = pending
        self._offer(pending)
        if len(self._threads) < min(self._settings.upload_threads, len(self._queue)) and not self._closed:
            thread = threading.Thread(target=self._work, name="kvwire-upload", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._changed.notify_all()

    def _offer(self, pending: PendingWrite) -> None:
        if pending.is_content:
            heapq.heappush(self._content, (pending.not_before, pending.number, pending))

    def _choose(self) -> tuple[PendingWrite | None, float | None]:
        """The write to upload next, or the seconds after which to look again."""
        while self._content and self._content[0][2].is_running:  # given up
            heapq.heappop(self._content)
        first = next(iter(self._queue.values()), None)
        able = [first] if first is not None and not first.is_content and not first.is_running else []
        able += [one for _, _, one in self._content[:1]]
        now = time.monotonic()
        for pending in able:
            if pending.not_before <= now:
                if pending.is_content:
                    heapq.heappop(self._content)
                return pending, None
        return None, min((one.not_before - now for one in able), default=None)

    def _work(self) -> None:
        while True:
            with self._changed:
                pending, pause_s = self._choose()
                while pending is None and not self._closed:
                    self._changed.wait(pause_s)
                    pending, pause_s = self._choose()
                if pending is None or self._closed:
                    return
                pending.is_running = True
            self._upload(pending)

    def _upload(self, pending: PendingWrite) -> None:
        data: bytes | None = None
        try:
            data = self._folder.read(pending)
            is_up = self._put(pending, data)
        except Exception as error:  # noqa: BLE001 - a store that breaks its promise must not end the thread
            if not isinstance(error, (KvwireError, OSError)):
                _log.exception("an upload failed in a way that no store should")
            if data is None and isinstance(error, (CorruptError, FileNotFoundError)):
                self._set_aside(pending)
            else:
                self._retry_later(pending, error)
            return
        with self._changed:
            self._counters.uploaded += is_up
            self._counters.damaged += not is_up
            self._trouble = ""
        self._remove([pending])

    def _put(self, pending: PendingWrite, data: bytes) -> bool:
        key = pending.key or ""
        if pending.is_content:
            self._remote.put(key, data)
        elif self._was_replaced(pending, key, data):
            return True
        elif not upload_entry(self._remote, key, data, partial(self._was_there, pending)):
            _log.error("the content of a pending entry is gone from the remote: encode the document again")
            return False
        if not is_catalog_key(key):
            self._uploaded.put(key, True)
        return True

    def _was_replaced(self, entry: PendingWrite, key: str, data: bytes) -> bool:
        """Whether others wrote after an earlier attempt, whose answer was lost: another would undo what they wrote."""
        tag = tag_of(self._remote, key) or ""
        if entry.found is None:
            self._folder.note_attempt(entry, tag)
            return False
        return tag != entry.found and not holds(self._remote, key, data)

    def _was_there(self, entry: PendingWrite, key: str) -> bool:
        """Whether an object was on the remote when an entry was written, as far as can be known."""
        return bool(self._uploaded.get(key)) or entry.written < time.time() - GRACE_S / 4

    def _set_aside(self, damaged: PendingWrite) -> None:
        """Give up a damaged write, and the entries behind it, which may name it."""
        with self._changed:
            behind = [one for one in self._queue.values() if one.number > damaged.number]
            lost = [damaged, *(one for one in behind if not one.is_content and not one.is_running)]
            self._counters.damaged += len(lost)
            for one in lost:
                one.is_running = True
        self._remove(lost[::-1])  # the entries first: a crash in between leaves none that leads nowhere
        _log.error("%d pending writes were damaged on the local disk: encode the documents again", len(lost))

    def _remove(self, finished: list[PendingWrite]) -> None:
        """Forget writes that are done with: their files first, since a flush may then tell that nothing is left."""
        for pending in finished:
            try:
                self._folder.remove(pending)
            except OSError as error:
                _log.warning("a finished upload could not be removed (%s): it will be repeated", error.strerror)
        with self._changed:
            for pending in finished:
                if self._queue.pop(pending.number, None) is None:
                    continue
                self._bytes -= pending.size
                if pending.key is not None and self._latest.get(pending.key) is pending:
                    del self._latest[pending.key]
            self._changed.notify_all()

    def _retry_later(self, pending: PendingWrite, error: Exception) -> None:
        settings = self._settings
        pause_s = min(settings.max_backoff_s, settings.backoff_s * 2.0 ** min(pending.failures, 60))
        with self._changed:
            self._counters.failures += 1
            self._trouble = str(error)
            pending.is_running = False
            pending.failures += 1
            pending.not_before = time.monotonic() + pause_s * random.uniform(0.5, 1)  # noqa: S311 - spreads retries
            self._offer(pending)
            self._changed.notify_all()
