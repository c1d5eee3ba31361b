"""Which blob belongs to which document, and which profile a model configuration uses.

Content goes first, the entry that points at it last, and then a look whether the content is still there: a reader that
finds an entry finds what it names, even while garbage is being collected. See ``upkeep.collect``.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import replace

from kvwire.errors import ArgumentError, CorruptError, KvwireError
from kvwire.store.base import is_there
from kvwire.store.catalog.announcements import wait_for_collectors
from kvwire.store.catalog.blobs import Blobs, Texts
from kvwire.store.catalog.objects import TenantObjects, refresh
from kvwire.store.catalog.profiles import Models, Profiles
from kvwire.store.key_kinds import read_entry
from kvwire.store.keys import KeySpace, check_new_name, check_tenant, space_of, tenant_hash
from kvwire.store.listing import children
from kvwire.store.records import CatalogEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

    from kvwire.codec import AnyProfile
    from kvwire.store.base import Store
    from kvwire.store.catalog.grown import GrownDocuments
    from kvwire.store.catalog.kept import KeptRepairs
    from kvwire.store.catalog.objects import Config
    from kvwire.store.crypto.keyring import Keyring

    OnError: TypeAlias = Callable[[str, KvwireError], None]


class Catalog:
    """One tenant's documents in a store, and what belongs to them.

    Args:
        store: Where they lie.
        tenant: The tenant's name.
        salt: The deployment's secret; with it, keys of tenants cannot be guessed from their names.
        keyring: Blobs, texts and entries are sealed with the tenant's key, and what is not sealed is refused; profiles
            stay as they are.

    Attributes:
        objects: What everything here is read and written through.
        blobs: Blobs of documents.
        texts: Token ids beside them.
        profiles: Profiles, and which one is in use.
        models: Model records, and what was measured of linked documents.
    """

    def __init__(
        self, store: Store, tenant: str = "default", salt: bytes = b"", *, keyring: Keyring | None = None
    ) -> None:
        """Keep the store; nothing is read or written yet."""
        name = tenant_hash(tenant, salt)
        self._use(TenantObjects(store, name, keyring.tenant(name) if keyring else None))

    def _use(self, objects: TenantObjects) -> None:
        self.objects, self.store, self.tenant, self.keys = objects, objects.store, objects.tenant, objects.keys
        self.blobs, self.texts = Blobs(objects), Texts(objects)
        self.profiles, self.models = Profiles(objects), Models(objects)

    @cached_property
    def kept(self) -> KeptRepairs:
        """Rows that repairs computed."""
        from kvwire.store.catalog.kept import KeptRepairs

        return KeptRepairs(self.objects, self.blobs)

    @cached_property
    def grown(self) -> GrownDocuments:
        """Documents as they grow."""
        from kvwire.store.catalog.grown import GrownDocuments

        return GrownDocuments(self.objects, self.blobs, self.texts)

    @classmethod
    def _of(cls, objects: TenantObjects) -> Self:
        catalog = cls.__new__(cls)
        catalog._use(objects)  # noqa: SLF001 - of this class
        return catalog

    @classmethod
    def of_hash(cls, store: Store, tenant: str, *, keyring: Keyring | None = None) -> Self:
        """The catalog of a tenant that is known by its hash alone, as operators see it in keys."""
        return cls._of(TenantObjects(store, check_tenant(tenant), keyring.tenant(tenant) if keyring else None))

    def over(self, store: Store) -> Self:
        """The same catalog, read and written through another store object, such as one that measures."""
        return self._of(TenantObjects(store, self.tenant, self.objects.secrets))

    def configurations(self) -> Iterator[KeySpace]:
        """Model configurations that this tenant has anything of."""
        return (KeySpace(self.tenant, name) for name in children(self.store, f"v1/{self.tenant}/"))

    def put_blob(  # noqa: PLR0913 - the fields of one entry
        self,
        config: Config,
        blob: bytes,
        *,
        document_id: str,
        header_bytes: int,
        tokens: int,
        token_digest: str = "",
        profile_digest: str = "",
        profile_outline: tuple[int, str] | None = None,
        levels: Sequence[tuple[str, int]] = (),
        overwrite: bool = False,
        etag: str | None = None,
    ) -> CatalogEntry:
        """Write a blob, as ``seal`` gives it, and then its entries.

        A blob that already lies there with the same size is not written again, unless it is old enough to be collected.

        Args:
            config: The model configuration.
            blob: The bytes to store.
            document_id: The document that the blob is of.
            header_bytes: Length of the stored bytes' header.
            tokens: How many tokens the blob holds.
            token_digest: Digest of its token ids (``digest_tokens``); empty: no entry by tokens is written.
            profile_digest: SHA-256 of the profile that it was encoded with; empty where there is none.
            profile_outline: See ``CatalogEntry``.
            levels: Name and cumulative bytes of each level, coarsest first.
            overwrite: Write the blob anyway, which heals a copy that has rotted.
            etag: Replace this version of the document's entry alone, see ``Store.replace``; None: whatever it is.

        Returns:
            The entry as it was written.

        Raises:
            ConflictError: The entry is of another version.
            ArgumentError: The document's or a level's name is not taken, see ``check_new_name``.
        """
        sha256 = hashlib.sha256(blob).hexdigest()
        space = self.keys(config)
        entry = CatalogEntry(
            document_id=document_id,
            blob_key=space.blob(sha256),
            sha256=sha256,
            size=len(blob),
            header_bytes=header_bytes,
            tokens=tokens,
            token_digest=token_digest,
            profile_digest=profile_digest,
            levels=tuple((name, size) for name, size in levels),
            profile_outline=profile_outline,
        )
        _check_names(entry)
        self.blobs.write(entry.blob_key, blob, overwrite=overwrite)
        if etag is None:
            self.add(entry)
        else:  # once: another writer may have replaced it by now
            self.objects.replace_entry(space, entry, etag)
            if entry.token_digest:
                self.objects.write(space.token_entry(entry.token_digest), entry.to_json())
        self.objects.confirm(space, {entry.blob_key: blob})
        return entry

    def add(self, entry: CatalogEntry) -> None:
        """Write the entries of a blob that is in the store already; its key says which configuration it is of.

        Only for blobs that no collector may take; ``alias`` makes sure of it.

        Args:
            entry: The entry.

        Raises:
            ArgumentError: The entry's blob key is not one of this tenant, or a name in it is not taken.
        """
        _check_names(entry)
        self._add(self._space_of(entry), entry)

    def alias(self, entry: CatalogEntry, document_id: str) -> CatalogEntry | None:
        """Give the blob of an entry, or its parts, to another document too.

        A blob that is old enough to be collected is written again first.

        Args:
            entry: The entry that has the blob.
            document_id: The other document.

        Returns:
            The other document's entry; None where the blob is lost or damaged.

        Raises:
            ArgumentError: The other document's name is not taken, see ``check_new_name``.
        """
        space = self._space_of(entry)
        added = replace(entry, document_id=check_new_name(document_id, "document"))
        blobs = self.blobs.of(entry)
        if not all(refresh(self.store, key) for key in blobs):
            return None
        self._add(space, added)
        wait_for_collectors(self.store, space, list(blobs))
        return added if all(is_there(self.store, key, size) for key, size in blobs.items()) else None

    def add_text(self, config: Config, document_id: str, token_ids: Sequence[int]) -> CatalogEntry:
        """Write a text and an entry without a blob.

        Args:
            config: The model configuration.
            document_id: The document that the text is of.
            token_ids: The text.

        Returns:
            The entry as it was written.

        Raises:
            ArgumentError: The document's name is not taken, see ``check_new_name``.
        """
        space = self.keys(config)
        check_new_name(document_id, "document")
        digest = self.texts.put(space, token_ids, document_id=document_id)
        entry = CatalogEntry(document_id, "", "", 0, 0, len(token_ids), digest, "", ())
        self.objects.write(space.document(document_id), entry.to_json())
        self.confirm(space, entry, token_ids)
        return entry

    def confirm(
        self, config: Config, entry: CatalogEntry, token_ids: Sequence[int], profile: AnyProfile | None = None
    ) -> None:
        """Write again what a collector took of an entry's text and profile before it saw the entry.

        Called after the entry was written, where its text or profile was there already.

        Args:
            config: The model configuration.
            entry: The entry.
            token_ids: Its text.
            profile: Its profile; None: the profile is not looked at.
        """
        space = self.keys(config)
        text = space.text(entry.token_digest)
        used = [text, space.profile(entry.profile_digest)] if entry.profile_digest and profile else [text]
        wait_for_collectors(self.store, space, used)
        self.texts.put(space, token_ids)
        if profile and len(used) > 1 and not self.objects.is_young(used[1]):
            self.profiles.put(space, profile.data)

    def remove(self, config: Config, document_id: str) -> bool:
        """Take a document out of the catalog. What it named is left to ``collect``.

        The entry of its token sequence goes too, unless another document has the same blob and is named there, and so
        does what is kept of prompts with its text.

        Args:
            config: The model configuration.
            document_id: The document.

        Returns:
            Whether it was in.
        """
        space = self.keys(config)
        key = space.document(document_id)
        try:
            entry = self._entry(key)
        except CorruptError:
            self.store.delete(key)
            return True
        if entry is None:
            return False
        for digest in {entry.token_digest, *(part.token_digest for part in entry.parts[:1])} - {""}:
            self._remove_tokens(space, digest, document_id)
            self.kept.drop(space, digest)
        self.store.delete(key)  # last: where this ends early, who repeats it finds the document and ends it
        return True

    def _remove_tokens(self, space: KeySpace, token_digest: str, document_id: str) -> None:
        key = space.token_entry(token_digest)
        try:
            found = self._entry(key)
            is_others = found is not None and found.document_id != document_id
            named = self._entry(space.document(found.document_id)) if found and is_others else None
        except CorruptError:
            named = None
        if named is None or named.token_digest != token_digest:
            self.store.delete(key)

    def by_document(self, config: Config, document_id: str) -> CatalogEntry | None:
        """Look a document up: its entry, or None.

        Raises:
            CorruptError: The entry is damaged or speaks of something else.
        """
        return self._entry(self.keys(config).document(document_id), document_id=document_id)

    def by_tokens(self, config: Config, token_digest: str) -> CatalogEntry | None:
        """Look a token sequence up.

        Args:
            config: The model configuration.
            token_digest: Digest of the sequence (``digest_tokens``).

        Returns:
            Its entry; None where there is none.

        Raises:
            CorruptError: The entry is damaged or speaks of something else.
        """
        return self._entry(self.keys(config).token_entry(token_digest), token_digest=token_digest)

    def documents(
        self, config: Config, on_error: OnError | None = None, *, after: str = "", limit: int | None = None
    ) -> Iterator[CatalogEntry]:
        """Entries of documents, in the order of their keys, which is none that means anything.

        Args:
            config: The model configuration.
            on_error: Called with the key of a damaged entry and what is wrong, after which the listing goes on.
            after: Go on behind this key.
            limit: How many are looked at, at most; None: all.

        Yields:
            The entries.

        Raises:
            CorruptError: An entry is damaged, and there is no ``on_error``.
        """
        keys = islice(self.store.keys(self.keys(config).documents, after), limit)
        for key, read in self.objects.read_each(keys):
            try:
                if (data := read()) is not None:
                    yield read_entry(key, data)
            except CorruptError as error:
                if on_error is None:
                    raise
                on_error(key, error)

    def _add(self, space: KeySpace, entry: CatalogEntry) -> None:
        data = entry.to_json()
        document_key = space.document(entry.document_id)
        if entry.token_digest and not entry.parts:
            self.objects.write(space.token_entry(entry.token_digest), data)
        self.objects.write(document_key, data)

    def _space_of(self, entry: CatalogEntry) -> KeySpace:
        key = entry.blob_key
        if not key.startswith(f"v1/{self.tenant}/") or key != space_of(key).blob(entry.sha256):
            raise ArgumentError(f"{key} is not a blob key of this tenant: write the blob with put_blob")
        return space_of(key)

    def _entry(self, key: str, **told: str) -> CatalogEntry | None:
        data = self.objects.read(key)
        return None if data is None else read_entry(key, data, **told)


def _check_names(entry: CatalogEntry) -> None:
    check_new_name(entry.document_id, "document")
    for name, _ in entry.levels:
        check_new_name(name, "level")
