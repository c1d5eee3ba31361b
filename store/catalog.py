"""Which blob belongs to which document, and which profile a model configuration uses.

Content goes first, the entry that points at it last: whoever finds an entry finds what it names.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from kvwire.errors import ArgumentError, CorruptError, KvwireError, NotFoundError
from kvwire.store.entry import MAX_ENTRY_BYTES, CatalogEntry, parse_object
from kvwire.store.keys import KeySpace, check_digest, tenant_hash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvwire.store.base import Store


class Catalog:
    """One tenant's documents and profiles in a store.

    salt: the deployment's secret; with it, keys of tenants cannot be guessed from their names.
    """

    def __init__(self, store: Store, tenant: str = "default", salt: bytes = b"") -> None:
        """Keep the store; nothing is read or written yet."""
        self._store = store
        self._tenant = tenant_hash(tenant, salt)

    @property
    def store(self) -> Store:
        """The store underneath."""
        return self._store

    def keys(self, config_digest: str) -> KeySpace:
        """The keys of this tenant for one model configuration (``CacheMeta.config_digest()``)."""
        return KeySpace.of(self._tenant, config_digest)

    def put_blob(  # noqa: PLR0913 - the fields of one entry
        self,
        config_digest: str,
        blob: bytes,
        *,
        document_id: str,
        head_bytes: int,
        tokens: int,
        token_digest: str = "",
        profile_digest: str = "",
        levels: Sequence[tuple[str, int]] = (),
        overwrite: bool = False,
    ) -> CatalogEntry:
        """Write a blob and then its entries.

        A blob that already lies there with the same size is not written again; ``overwrite`` does it anyway, which
        heals a copy that has rotted.
        """
        sha256 = hashlib.sha256(blob).hexdigest()
        entry = CatalogEntry(
            document_id=document_id,
            blob_key=self.keys(config_digest).blob(sha256),
            sha256=sha256,
            size=len(blob),
            head_bytes=head_bytes,
            tokens=tokens,
            token_digest=token_digest,
            profile_digest=profile_digest,
            levels=tuple((name, size) for name, size in levels),
        )
        self._put_content(entry.blob_key, blob, overwrite=overwrite)
        self.add(entry)
        return entry

    def add(self, entry: CatalogEntry) -> None:
        """Write the entries of a blob that is in the store already; its key says which configuration it is of."""
        space = self._space_of(entry)
        data = entry.to_json()
        document_key = space.document(entry.document_id)
        if entry.token_digest:
            self._store.put(space.token_entry(entry.token_digest), data)
        self._store.put(document_key, data)

    def by_document(self, config_digest: str, document_id: str) -> CatalogEntry | None:
        """The entry of a document, or None. Raises CorruptError where it is damaged or speaks of something else."""
        space = self.keys(config_digest)
        entry = self._entry(space, space.document(document_id))
        if entry is not None and entry.document_id != document_id:
            raise _misplaced(space.document(document_id))
        return entry

    def by_tokens(self, config_digest: str, token_digest: str) -> CatalogEntry | None:
        """The entry of a token sequence (``digest_tokens``), or None. Raises CorruptError like ``by_document``."""
        space = self.keys(config_digest)
        entry = self._entry(space, space.token_entry(token_digest))
        if entry is not None and entry.token_digest != token_digest:
            raise _misplaced(space.token_entry(token_digest))
        return entry

    def documents(
        self, config_digest: str, on_error: Callable[[str, KvwireError], None] | None = None
    ) -> Iterator[CatalogEntry]:
        """Entries of all documents, in no useful order.

        on_error: called with the key of a damaged entry and what is wrong, after which the listing goes on; without
        it, the first damaged entry raises CorruptError.
        """
        space = self.keys(config_digest)
        for key in self._store.keys(space.documents):
            try:
                entry = self._entry(space, key)
            except CorruptError as error:
                if on_error is None:
                    raise
                on_error(key, error)
                continue
            if entry is not None:
                yield entry

    def put_profile(self, config_digest: str, data: bytes) -> str:
        """Write a profile and return its digest; ``set_current_profile`` puts it to use."""
        digest = hashlib.sha256(data).hexdigest()
        self._put_content(self.keys(config_digest).profile(digest), data, overwrite=True)  # a rotten copy is healed
        return digest

    def get_profile(self, config_digest: str, digest: str) -> bytes:
        """Read a profile and check it against its digest: CorruptError where they differ."""
        data = self._store.get(self.keys(config_digest).profile(digest))
        if hashlib.sha256(data).hexdigest() != digest:
            msg = f"profile {digest[:12]} is damaged in {self._store.url}: delete it and fit or copy it again"
            raise CorruptError(msg)
        return data

    def set_current_profile(self, config_digest: str, digest: str) -> None:
        """Use this profile for new blobs of the configuration. Raises NotFoundError where it has not been written."""
        space = self.keys(config_digest)
        self._store.stat(space.profile(digest))
        self._store.put(space.current_profile, json.dumps({"profile_digest": digest}).encode())

    def current_profile(self, config_digest: str) -> str | None:
        """Digest of the profile in use, or None where none has been chosen."""
        fields = self._json(self.keys(config_digest).current_profile)
        if fields is None:
            return None
        try:
            return check_digest(str(fields.get("profile_digest")), "the current profile's digest")
        except ArgumentError as error:
            msg = f"the catalog's pointer to the profile is damaged ({error}): set the current profile again"
            raise CorruptError(msg) from error

    def _put_content(self, key: str, data: bytes, *, overwrite: bool) -> None:
        if not overwrite:
            try:
                if self._store.stat(key).size == len(data):
                    return
            except NotFoundError:
                pass
        self._store.put(key, data)

    def _space_of(self, entry: CatalogEntry) -> KeySpace:
        parts = entry.blob_key.split("/")
        space = KeySpace(self._tenant, parts[2] if len(parts) > 2 else "")  # noqa: PLR2004 - v1, tenant, configuration
        if entry.blob_key != space.blob(entry.sha256):
            msg = f"{entry.blob_key} is not a blob key of this tenant: write the blob with put_blob"
            raise ArgumentError(msg)
        return space

    def _entry(self, space: KeySpace, key: str) -> CatalogEntry | None:
        data = self._read(key)
        if data is None:
            return None
        entry = CatalogEntry.from_json(data)
        if entry.blob_key != space.blob(entry.sha256):  # never lead a reader into another tenant's blobs
            raise _misplaced(key)
        return entry

    def _json(self, key: str) -> dict[str, Any] | None:
        data = self._read(key)
        return None if data is None else parse_object(data)

    def _read(self, key: str) -> bytes | None:
        try:
            return self._store.get(key, 0, MAX_ENTRY_BYTES + 1)
        except NotFoundError:
            return None


def _misplaced(key: str) -> CorruptError:
    return CorruptError(
        f"the catalog entry {key} speaks of another document, tenant or model: write the document again"
    )
