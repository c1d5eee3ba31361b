"""A lost catalog made anew from what blobs and texts say of themselves.

A blob's key names its tenant and model configuration; its header its tokens, levels and profile; a text names the
documents that have it. Nothing is deleted, and entries that lead somewhere stay as they are.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from msgspec import structs

from kvwire import codec
from kvwire.errors import (
    ArgumentError,
    AuthError,
    CorruptError,
    FormatVersionError,
    KvwireError,
    MismatchError,
    NotFoundError,
    StorageError,
    TruncatedError,
)
from kvwire.store.base import is_there
from kvwire.store.catalog.announcements import wait_for_collectors
from kvwire.store.catalog.grown import longer
from kvwire.store.key_kinds import key_digest
from kvwire.store.records import BlobPart, CatalogEntry
from kvwire.store.upkeep.walk import Found, Report, catalogs, objects
from kvwire.types import digest_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.store.base import Listed, Store
    from kvwire.store.catalog.catalog import Catalog
    from kvwire.store.crypto.keyring import Keyring
    from kvwire.store.keys import KeySpace
    from kvwire.types import BlobInfo, BlobPrefix

    OnProgress = Callable[[int], None]

_HEADER_BYTES = 64 << 10
"""Read of a blob at first: most headers are shorter."""
_NAME_DIGITS = 16
_UNREADABLE = (AuthError, CorruptError, FormatVersionError, NotFoundError)


@dataclass(frozen=True)
class Rebuilt(Report):
    """What was written into the catalog, or would be.

    Attributes:
        documents: Entries of documents with a blob.
        texts: Entries of documents of which only the text is left.
        unnamed: How many of both are called ``recovered-`` and a digest, since no text names their document.
        kept: Entries of documents that were there and lead somewhere.
        profiles: Pointers to the profile in use.
        failures: What could not be read, in words.
    """

    documents: int = 0
    texts: int = 0
    unnamed: int = 0
    kept: int = 0
    profiles: int = 0
    failures: tuple[str, ...] = ()


def rebuild(
    store: Store,
    *,
    tenant_hash: str | None = None,
    keyring: Keyring | None = None,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> Rebuilt:
    """Write catalog entries for all blobs and texts that the catalog does not lead to.

    Documents that were taken out of the catalog, but not collected yet, come back. Where several texts name a document,
    it gets the one written last, and of several blobs of a text the one written last. Not to be run beside ``collect``.

    Args:
        store: The store.
        tenant_hash: One tenant only.
        keyring: To read what is sealed, and to seal entries.
        dry_run: Write nothing, and tell what would be.
        on_progress: Called with how many more objects were looked at.

    Returns:
        What was written.

    Raises:
        StorageError: The store cannot be listed or written.
    """
    total = Rebuilt()
    for catalog in catalogs(store, tenant_hash, keyring):
        for space in catalog.configurations():
            total += _Rebuild(catalog, space, dry_run=dry_run, on_progress=on_progress).run()
    return total


@dataclass(frozen=True)
class _Text:
    """A text, the documents that it names, and its blob; either may be lacking."""

    modified: float = -1.0
    names: tuple[str, ...] = ()
    blob: CatalogEntry | None = None
    blob_modified: float = -1.0


class _Rebuild:
    """One configuration. texts: by token digest, or by the blob's own digest where its text is not known."""

    def __init__(self, catalog: Catalog, space: KeySpace, *, dry_run: bool, on_progress: OnProgress | None) -> None:
        self._catalog, self._store, self._space, self._dry_run = catalog, catalog.store, space, dry_run
        self._tell = on_progress or (lambda _: None)
        self._texts: dict[str, _Text] = {}
        self._parts: list[tuple[Listed, BlobInfo, BlobPrefix]] = []
        self._profiles: set[str] = set()
        self._outlines: dict[str, tuple[int, str] | None] = {}
        self._failures: list[str] = []
        self._done = Rebuilt()

    def run(self) -> Rebuilt:
        for found in objects(self._store, self._space):
            self._look_at(found)
            self._tell(1)
        self._join_parts()
        kept = self._kept()
        self._done += Rebuilt(kept=len(kept))
        reached = {entry.blob_key or entry.token_digest for entry in kept.values()}
        owners = self._owners()
        for name, digest in owners.items():
            if name not in kept:
                self._add(name, digest)
        for digest, text in self._texts.items():
            place = text.blob.blob_key if text.blob else digest
            if not text.names and place not in reached:
                self._add(f"recovered-{digest[:_NAME_DIGITS]}", digest)
                self._done += Rebuilt(unnamed=1)
        self._point_to_a_profile()
        return self._done + Rebuilt(failures=tuple(self._failures))

    def _look_at(self, found: Found) -> None:
        listed, kind, digest, is_misplaced = found
        if kind is None or kind.place is None or is_misplaced:
            self._failures.append(f"{listed.key}: it lies where no object of its kind does, and is left alone")
        elif kind.name == "profile":
            self._profiles.add(digest)
        elif kind.name == "text":
            names = self._catalog.texts.documents(self._space, digest)
            self._texts[digest] = replace(self._texts.get(digest, _Text()), modified=listed.modified, names=names)
        elif kind.name == "blob":
            try:
                self._look_at_blob(listed)
            except _UNREADABLE as error:
                self._failures.append(f"{listed.key}: {error}")

    def _look_at_blob(self, listed: Listed) -> None:
        info, sha256 = self._header(listed), key_digest(listed.key)
        if self._catalog.keys(info.meta.config_digest()) != self._space:
            raise CorruptError("it is of another model configuration than its key says, and is left alone")
        digest = info.meta.token_digest
        if info.prefix is not None:
            self._parts.append((listed, info, info.prefix))
            return
        levels = tuple((level.name, level.cumulative_bytes) for level in info.levels)
        entry = CatalogEntry(
            f"recovered-{(digest or sha256)[:_NAME_DIGITS]}", listed.key, sha256, listed.size, info.header_bytes,
            info.tokens, digest, info.profile_digest, levels, self._outline(info.profile_digest),
        )  # fmt: skip
        found = self._texts.get(digest or sha256, _Text())
        if listed.modified >= found.blob_modified:
            self._texts[digest or sha256] = replace(found, blob=entry, blob_modified=listed.modified)

    def _join_parts(self) -> None:
        """Make documents of the parts that stand behind a blob, the shortest first, under the names that they say."""
        texts: dict[str, tuple[int, ...]] = {}  # by digest, of what parts stand behind
        for listed, info, prefix in sorted(self._parts, key=lambda part: part[2].tokens):
            try:
                self._join(listed, info, prefix, texts)
            except (*_UNREADABLE, ArgumentError, MismatchError) as error:
                self._failures.append(f"{listed.key}: {error}")

    def _join(self, listed: Listed, info: BlobInfo, prefix: BlobPrefix, texts: dict[str, tuple[int, ...]]) -> None:
        before = self._texts.get(prefix.token_digest, _Text()).blob
        if before is None:
            msg = f"nothing is there of the {prefix.tokens} tokens before this part, and it is left alone"
            raise NotFoundError(msg)
        if prefix.token_digest not in texts:
            texts[prefix.token_digest] = self._catalog.blobs.header(before).token_ids or ()
        ids = (*texts[prefix.token_digest], *(info.token_ids or ()))
        digest = digest_tokens(ids)
        part = BlobPart(key_digest(listed.key), listed.size, info.header_bytes, info.tokens)
        levels = [(level.name, level.cumulative_bytes) for level in info.levels]
        entry = longer(before, part, digest, levels)
        texts[digest], found = ids, self._texts.get(digest, _Text())
        if listed.modified >= found.blob_modified:
            names = found.names if prefix.document in found.names else (*found.names, prefix.document)
            modified = max(found.modified, listed.modified)
            self._texts[digest] = _Text(modified, tuple(filter(None, names)), entry, listed.modified)

    def _outline(self, digest: str) -> tuple[int, str] | None:
        """The outline of a profile that is there and sound; it is read whole, as its digest vouches for all of it."""
        if digest and digest not in self._outlines:
            self._outlines[digest] = None
            with suppress(*_UNREADABLE):
                self._outlines[digest] = codec.read_profile(self._catalog.profiles.get(self._space, digest)).outline
        return self._outlines.get(digest)

    def _header(self, listed: Listed) -> BlobInfo:
        read, needed = b"", min(_HEADER_BYTES, listed.size)
        while True:
            read += self._store.get(listed.key, len(read), needed)
            try:
                return self._catalog.blobs.reader().read_header(read)
            except TruncatedError as error:
                if not len(read) < error.needed <= listed.size:
                    raise
                needed = error.needed

    def _kept(self) -> dict[str, CatalogEntry]:
        """Entries that are sound and whose blob or text is there."""
        blobs = {text.blob.blob_key for text in self._texts.values() if text.blob}
        found = {}
        for entry in self._catalog.documents(self._space, on_error=lambda _key, _error: None):
            leads = entry.token_digest in self._texts if entry.is_text else self._is_there(entry, blobs)
            if leads:
                found[entry.document_id] = entry
        return found

    def _is_there(self, entry: CatalogEntry, blobs: set[str]) -> bool:
        """Whether a blob is there; where several have a text, only the latest is among those found."""
        if not entry.parts and entry.blob_key in blobs:
            return True
        return all(is_there(self._store, key, size) for key, size in self._catalog.blobs.of(entry).items())

    def _owners(self) -> dict[str, str]:
        """For each document that texts name, the digest of the text that was written last."""
        owners: dict[str, str] = {}
        for digest, text in sorted(self._texts.items(), key=lambda item: item[1].modified):
            owners |= dict.fromkeys(text.names, digest)
        return owners

    def _add(self, name: str, digest: str) -> None:
        blob = self._texts[digest].blob
        try:
            if blob is None:
                ids = self._catalog.texts.get(self._space, digest)
                if not self._dry_run:
                    self._catalog.add_text(self._space, name, ids)
                self._done += Rebuilt(texts=1)
                return
            if not self._dry_run:
                self._catalog.add(structs.replace(blob, document_id=name))
                blobs = list(self._catalog.blobs.of(blob))
                wait_for_collectors(self._store, self._space, blobs)
                for key in blobs:
                    self._store.stat(key)
            self._done += Rebuilt(documents=1)
        except StorageError:
            raise
        except KvwireError as error:
            self._failures.append(f"{name}: {error}")

    def _point_to_a_profile(self) -> None:
        """Use the profile of the latest blob for new blobs, where none is in use."""
        try:
            if self._catalog.profiles.current(self._space) in self._profiles:
                return
        except _UNREADABLE as error:
            self._failures.append(f"{self._space.current_profile}: {error}")
        latest = sorted(self._texts.values(), key=lambda text: text.blob_modified, reverse=True)
        named = (text.blob.profile_digest for text in latest if text.blob)
        digest = next((digest for digest in named if digest in self._profiles), None)
        if digest is not None:
            if not self._dry_run:
                self._catalog.profiles.set_current(self._space, digest, self._outline(digest))
            self._done += Rebuilt(profiles=1)
