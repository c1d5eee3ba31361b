"""Whether everything in a store is what was written, and whether what the catalog names is there."""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvwire.errors import AuthError, CorruptError, FormatVersionError, NotFoundError, NotSealedError, TruncatedError
from kvwire.store.base import open_object
from kvwire.store.keys import content_digest, text_digest
from kvwire.store.listing import ahead, content

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvwire.errors import KvwireError
    from kvwire.store.base import Store
    from kvwire.store.catalog.catalog import Catalog
    from kvwire.store.catalog_entry import CatalogEntry
    from kvwire.store.keys import KeySpace
    from kvwire.types import SegmentInfo

    OnProgress = Callable[[int], None]

_PIECE_BYTES = 8 << 20
_MAX_SMALL_BYTES = 64 << 20
"""Of a text, which is read whole."""


@dataclass(frozen=True)
class Damage:
    """An object that is not what was written, or an entry whose content is not there."""

    key: str
    problem: str
    deleted: bool


@dataclass(frozen=True)
class Verified:
    """What was looked at.

    objects, bytes: of content. entries: of documents. sealed: objects of which only the hash, or nothing, could be
    checked, since what they hold is encrypted.
    """

    objects: int
    bytes: int
    entries: int
    sealed: int
    damaged: tuple[Damage, ...]


def verify_store(
    store: Store,
    catalogs: Iterable[Catalog],
    *,
    jobs: int = 4,
    delete_damaged: bool = False,
    on_progress: OnProgress | None = None,
) -> Verified:
    """Read every blob, profile and text of these catalogs' tenants, and their document entries.

    Blobs are checked against the hash in their key and, segment by segment, against their own checksums, a piece at a
    time. jobs: objects read at once. delete_damaged: delete content and entries that are damaged, so that documents are
    computed from their text or encoded again; entries are kept where only their content is missing, and whatever a
    second look does not find damaged too, or finds written meanwhile. on_progress: called with the bytes of each object
    that was read. Raises StorageError where the store fails.
    """
    verifier = _Verifier(store, jobs, delete_damaged=delete_damaged, on_progress=on_progress)
    for catalog in catalogs:
        for space in catalog.configurations():
            verifier.check(catalog, space)
    return verifier.result()


class _Verifier:
    def __init__(self, store: Store, jobs: int, *, delete_damaged: bool, on_progress: OnProgress | None) -> None:
        self._store = store
        self._jobs = jobs
        self._delete = delete_damaged
        self._tell = on_progress or (lambda _: None)
        self._objects = self._bytes = self._entries = self._sealed = 0
        self._damaged: list[Damage] = []

    def result(self) -> Verified:
        return Verified(self._objects, self._bytes, self._entries, self._sealed, tuple(self._damaged))

    def check(self, catalog: Catalog, space: KeySpace) -> None:
        sound: set[bytes] = set()
        known = (one for one in content(self._store, space) if content_digest(one.key) or text_digest(one.key))
        for listed, checked in ahead(known, lambda listed: self._check_object(listed.key), self._jobs):
            try:
                self._sealed += not checked()
                sound.add(_mark(listed.key, listed.size))
            except NotFoundError:  # deleted since it was listed
                continue
            except (CorruptError, FormatVersionError) as error:
                self._report(listed.key, error, self._check_object)
            self._objects += 1
            self._bytes += listed.size
            self._tell(listed.size)
        try:
            on_error = partial(self._report, look=lambda key: list(catalog.entries(space, [key])))
            for entry in catalog.documents(space, on_error):
                self._entries += 1
                self._check_entry(space, entry, sound)
        except AuthError:  # sealed with a key that is not at hand: nothing can be said of them
            self._sealed += 1

    def _check_object(self, key: str) -> bool:
        """Whether what it holds could be checked; raises what is wrong."""
        if key.endswith(".kvw"):
            return _check_blob(self._store, key)
        if key.endswith(".kvt"):
            return _check_text(self._store, key)
        return _check_profile(self._store, key)

    def _check_entry(self, space: KeySpace, entry: CatalogEntry, sound: set[bytes]) -> None:
        key = space.document(entry.document_id)
        if entry.is_text:
            wanted: list[tuple[str, str, int | None]] = [("text", space.text(entry.token_digest), None)]
        else:
            wanted = [("blob", entry.blob_key, entry.size)]
        if entry.profile_digest:
            wanted.append(("profile", space.profile(entry.profile_digest), None))
        for what, at, size in wanted:
            if size is not None and _mark(at, size) in sound:
                continue
            try:
                found = self._store.stat(at).size
            except NotFoundError:
                found = -1
            if found < 0 or size not in (None, found):
                problem = f"the {what} of document {entry.document_id!r} is not there: encode it again"
                self._damaged.append(Damage(key, problem, deleted=False))

    def _report(self, key: str, error: KvwireError, look: Callable[[str], object]) -> None:
        """Note what is wrong. What this reader merely cannot read is not deleted."""
        deleted = self._delete and _is_damage(error) and self._delete_damaged(key, look)
        self._damaged.append(Damage(key, str(error), deleted=deleted))

    def _delete_damaged(self, key: str, look: Callable[[str], object]) -> bool:
        """Delete what is damaged at a second look too, and was not written meanwhile; tells whether it was."""
        self._store.distrust(key)
        try:
            before = self._store.stat(key)
            try:
                look(key)
            except (CorruptError, FormatVersionError) as error:
                if _is_damage(error) and self._store.stat(key) == before:
                    self._store.delete(key)
                    return True
        except NotFoundError:  # deleted by somebody else
            pass
        return False


def _is_damage(error: KvwireError) -> bool:
    return not isinstance(error, NotSealedError | FormatVersionError)


def _mark(key: str, size: int) -> bytes:
    return bytes.fromhex(content_digest(key) or text_digest(key) or "") + size.to_bytes(8, "little")


def _check_blob(store: Store, key: str) -> bool:
    digest, check = hashlib.sha256(), _SegmentCheck()
    with closing(open_object(store, key)) as reader:
        for start in range(0, reader.size, _PIECE_BYTES):
            piece = reader.read(start, start + _PIECE_BYTES)
            digest.update(piece)
            check.feed(piece)
    if digest.hexdigest() != content_digest(key):
        msg = "its SHA-256 is not the one in its key: encode the document again"
        raise CorruptError(msg)
    return check.finish()


def _check_profile(store: Store, key: str) -> bool:
    from kvwire.codec import read_profile
    from kvwire.store.crypto.sealing import is_sealed

    data = store.get(key)
    if is_sealed(data):
        return False
    if hashlib.sha256(data).hexdigest() != content_digest(key):
        msg = "its SHA-256 is not the one in its key: fit or copy the profile again"
        raise CorruptError(msg)
    read_profile(data)
    return True


def _check_text(store: Store, key: str) -> bool:
    from kvwire.codec import read_text
    from kvwire.store.crypto.sealing import is_sealed
    from kvwire.types import digest_tokens

    data = store.get(key, 0, _MAX_SMALL_BYTES)
    if is_sealed(data):
        return False
    if digest_tokens(read_text(data)) != text_digest(key):
        msg = "it holds another text than its key says: encode the document again"
        raise CorruptError(msg)
    return True


class _SegmentCheck:
    """Checks a blob's head and the checksums of its segments while its bytes come by, in order."""

    def __init__(self) -> None:
        self._start = b""
        self._needed = 1
        self._is_sealed = False
        self._segments: list[SegmentInfo] | None = None
        self._file_bytes = 0
        self._at = self._index = self._crc = 0

    def feed(self, piece: bytes) -> None:
        if self._is_sealed:
            return
        if self._segments is None:
            self._start += piece
            if len(self._start) >= self._needed and self._begin():
                piece, self._start = self._start, b""
                self._segment_bytes(piece)
            return
        self._segment_bytes(piece)

    def finish(self) -> bool:
        """Whether the content could be checked; raises CorruptError where it ended early or late."""
        if self._is_sealed:
            return False
        if self._segments is None:
            self._begin()
        if self._segments is None or self._at != self._file_bytes or self._index != len(self._segments):
            msg = f"the blob has {self._at} bytes, its head says {self._file_bytes}: encode the document again"
            raise CorruptError(msg)
        return True

    def _begin(self) -> bool:
        from kvwire.codec import read_header
        from kvwire.store.crypto.sealing import is_sealed

        if is_sealed(self._start):
            self._is_sealed = True
            return False
        try:
            info = read_header(self._start)
        except TruncatedError as error:
            if error.needed <= len(self._start):
                raise
            self._needed = error.needed
            return False
        self._segments = sorted((one for row in info.segments for one in row), key=lambda one: one.offset)
        self._file_bytes = info.file_bytes
        return True

    def _segment_bytes(self, piece: bytes) -> None:
        from isal.isal_zlib import crc32

        view, segments = memoryview(piece), self._segments or []
        start, self._at = self._at, self._at + len(piece)
        while self._index < len(segments) and segments[self._index].offset < self._at:
            segment = segments[self._index]
            self._crc = crc32(view[max(0, segment.offset - start) : segment.end - start], self._crc)
            if segment.end > self._at:
                return
            if self._crc != segment.crc32:
                msg = f"chunk {segment.chunk} level {segment.level} does not match its checksum: encode it again"
                raise CorruptError(msg)
            self._index, self._crc = self._index + 1, 0
