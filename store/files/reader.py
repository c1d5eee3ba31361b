"""One file of a folder store, held open."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import OrderedDict

from kvwire._forks import lock_of_process
from kvwire.errors import NotFoundError
from kvwire.store.base import clamp_range
from kvwire.store.files.os_errors import reading
from kvwire.store.key_kinds import content_digest

_Identity = tuple[int, int, int, int, int]
_HASH_PIECE = 1 << 20


class EtagCache:
    """Remembers hashes of files, so that a range request does not hash the whole file again.

    A file is known by device, inode, size and both of its times: a store's file is never written to in place, and a
    replacement has another inode.
    """

    def __init__(self, limit: int = 1024) -> None:
        """Start empty."""
        self._limit = limit
        self._lock = lock_of_process()
        self._known: OrderedDict[_Identity, str] = OrderedDict()

    def find(self, identity: _Identity) -> str | None:
        """Look a hash up."""
        with self._lock:
            return self._known.get(identity)

    def keep(self, identity: _Identity, etag: str) -> None:
        """Remember a hash."""
        with self._lock:
            self._known[identity] = etag
            while len(self._known) > self._limit:
                self._known.popitem(last=False)


class FileReader:
    """Reads ranges of an open file; safe from several threads, as each read names its own offset."""

    def __init__(self, descriptor: int, key: str, etags: EtagCache) -> None:
        """Take over the descriptor."""
        self._descriptor = descriptor
        self._key = key
        self._etags = etags
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            self.close()
            msg = f"{key} is not there: a folder or a special file lies in its place"
            raise NotFoundError(msg)
        self._size = about.st_size
        self.modified = about.st_mtime
        self._identity = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)

    @property
    def size(self) -> int:
        """Length in bytes when it was opened."""
        return self._size

    @property
    def etag(self) -> str:
        """SHA-256, from the key where it carries one."""
        etag = content_digest(self._key) or self._etags.find(self._identity)
        if etag is None:
            etag = self._hashed()
            self._etags.keep(self._identity, etag)
        return etag

    def fileno(self) -> int:
        """The descriptor, for sending the file without copying it."""
        return self._descriptor

    def read(self, start: int, end: int) -> bytes:
        """Read a range."""
        start, stop = clamp_range(start, end, self._size)
        pieces = []
        with reading(self._key):
            while start < stop and (piece := os.pread(self._descriptor, stop - start, start)):
                pieces.append(piece)
                start += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Close the file; closing twice is no error."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _hashed(self) -> str:
        digest = hashlib.sha256()
        for start in range(0, self._size, _HASH_PIECE):
            digest.update(self.read(start, start + _HASH_PIECE))
        return digest.hexdigest()
