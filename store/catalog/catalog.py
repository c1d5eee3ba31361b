"""Which blob belongs to which document, and which profile a model configuration uses.

Content goes first, the entry that points at it last, and then a look whether the content is still there: whoever finds
an entry finds what it names, even while garbage is being collected. See ``collecting``.
"""

from __future__ import annotations

import hashlib
import json
from copy import copy
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from kvwire.errors import ArgumentError, AuthError, CorruptError, KvwireError, NotFoundError, StorageError
from kvwire.store.catalog.announcements import is_old, wait_for_collectors
from kvwire.store.catalog_entry import MAX_ENTRY_BYTES, CatalogEntry, parse_object
from kvwire.store.key_kinds import content_digest
from kvwire.store.keys import KeySpace, check_digest, check_tenant, tenant_hash
from kvwire.store.listing import children, read_ahead
from kvwire.types import SEALED_MAGIC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvwire.store.base import Store
    from kvwire.store.crypto.keyring import Keyring
    from kvwire.store.crypto.sealing import BlobReader, TenantKeys

    OnError: TypeAlias = Callable[[str, KvwireError], None]

Config: TypeAlias = str | KeySpace
"""A model configuration: ``CacheMeta.config_digest()``, or what ``Catalog.configurations`` found."""
_MAX_SMALL_BYTES = 1 << 30
"""Of a profile or text: more is not read."""


class Catalog:
    """One tenant's documents and profiles in a store.

    Args:
        store: Where they lie.
        tenant: The tenant's name.
        salt: The deployment's secret; with it, keys of tenants cannot be guessed from their names.
        keyring: Blobs, texts and entries are sealed with the tenant's key, and what is not sealed is refused; profiles
            stay as they are.
    """

    def __init__(
        self, store: Store, tenant: str = "default", salt: bytes = b"", *, keyring: Keyring | None = None
    ) -> None:
        """Keep the store; nothing is read or written yet."""
        self._store = store
        self._tenant = tenant_hash(tenant, salt)
        self._keys: TenantKeys | None = keyring.tenant(self._tenant) if keyring else None

    @classmethod
    def of_hash(cls, store: Store, tenant: str, *, keyring: Keyring | None = None) -> Catalog:
        """The catalog of a tenant that is known by its hash alone, as operators see it in keys.

        Args:
            store: Where its documents lie.
            tenant: The tenant's hash.
            keyring: As for ``Catalog``.

        Returns:
            The catalog.

        Raises:
            ArgumentError: ``tenant_hash`` could not have given that hash.
        """
        catalog = cls(store)
        catalog._tenant = check_tenant(tenant)
        catalog._keys = keyring.tenant(tenant) if keyring else None
        return catalog

    def over(self, store: Store) -> Catalog:
        """The same catalog, read and written through another store object, such as one that measures.

        Args:
            store: The other store object.

        Returns:
            A copy of this catalog, with the same tenant and keys.
        """
        other = copy(self)
        other._store = store  # noqa: SLF001 - of this class
        return other

    @property
    def store(self) -> Store:
        """The store underneath."""
        return self._store

    @property
    def tenant(self) -> str:
        """The tenant's hash, as keys carry it."""
        return self._tenant

    def keys(self, config: Config) -> KeySpace:
        """The keys of this tenant for one model configuration.

        Args:
            config: The configuration.

        Returns:
            Its key space.

        Raises:
            ArgumentError: The configuration is another tenant's.
        """
        space = config if isinstance(config, KeySpace) else KeySpace.of(self._tenant, config)
        if space.tenant != self._tenant:
            msg = "that model configuration is another tenant's: list the configurations of this one"
            raise ArgumentError(msg)
        return space

    def seal(self, blob: bytes) -> bytes:
        """A blob as it is to be stored: sealed, where this tenant's are.

        Args:
            blob: The plain blob.

        Returns:
            The bytes to store.
        """
        return self._keys.seal_blob(blob) if self._keys else blob

    def blob_reader(self) -> BlobReader:
        """A reader for one blob as it is stored."""
        from kvwire.store.crypto.sealing import PlainBlob

        return self._keys.blob_reader() if self._keys else PlainBlob()

    def configurations(self) -> Iterator[KeySpace]:
        """Model configurations that this tenant has anything of."""
        return (KeySpace(self._tenant, name) for name in children(self._store, f"v1/{self._tenant}/"))

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
        levels: Sequence[tuple[str, int]] = (),
        overwrite: bool = False,
    ) -> CatalogEntry:
        """Write a blob, as ``seal`` gives it, and then its entries.

        A blob that already lies there with the same size is not written again, unless it is old enough to be collected.

        Args:
            config: The model configuration.
            blob: The bytes to store.
            document_id: The document that the blob is of.
            header_bytes: Length of the stored bytes' head.
            tokens: How many tokens the blob holds.
            token_digest: Digest of its token ids (``digest_tokens``); empty: no entry by tokens is written.
            profile_digest: SHA-256 of the profile that it was encoded with; empty where there is none.
            levels: Name and cumulative bytes of each level, coarsest first.
            overwrite: Write the blob anyway, which heals a copy that has rotted.

        Returns:
            The entry as it was written.
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
        )
        wrote = not overwrite and self._store.create(entry.blob_key, blob)
        if overwrite or not (wrote or self._is_young(entry.blob_key)):
            self._store.put(entry.blob_key, blob)
        self.add(entry)
        wait_for_collectors(self._store, space, [entry.blob_key])
        self._store.create(entry.blob_key, blob)
        return entry

    def add(self, entry: CatalogEntry) -> None:
        """Write the entries of a blob that is in the store already; its key says which configuration it is of.

        Only for blobs that nobody collects; ``alias`` makes sure of it.

        Args:
            entry: The entry.

        Raises:
            ArgumentError: The entry's blob key is not one of this tenant.
        """
        space = self._space_of(entry)
        data = entry.to_json()
        document_key = space.document(entry.document_id)
        if entry.token_digest:
            self._put_entry(space.token_entry(entry.token_digest), data)
        self._put_entry(document_key, data)

    def alias(self, entry: CatalogEntry, document_id: str) -> CatalogEntry | None:
        """Give the blob of an entry to another document too.

        A blob that is old enough to be collected is written again first.

        Args:
            entry: The entry that has the blob.
            document_id: The other document.

        Returns:
            The other document's entry; None where the blob is lost or damaged.
        """
        space = self._space_of(entry)
        added = replace(entry, document_id=document_id)
        try:
            if is_old(self._store.stat(entry.blob_key).modified):
                if (blob := self._intact(entry.blob_key)) is None:
                    return None
                self._store.put(entry.blob_key, blob)
            self.add(added)
            wait_for_collectors(self._store, space, [entry.blob_key])
            return added if self._store.stat(entry.blob_key).size == entry.size else None
        except NotFoundError:
            return None

    def put_text(self, config: Config, token_ids: Sequence[int], *, overwrite: bool = False) -> str:
        """Write a text where it is not there yet; an entry that names it comes afterwards.

        Args:
            config: The model configuration.
            token_ids: The text.
            overwrite: Write it anyway.

        Returns:
            The digest of its token ids.
        """
        from kvwire.codec import pack_text
        from kvwire.types import digest_tokens

        digest = digest_tokens(token_ids)
        key = self.keys(config).text(digest)
        if overwrite or not self._is_young(key):
            self._put_entry(key, pack_text(token_ids))
        return digest

    def get_text(self, config: Config, token_digest: str) -> tuple[int, ...]:
        """Read a text.

        Args:
            config: The model configuration.
            token_digest: Digest of its token ids.

        Returns:
            The token ids.

        Raises:
            NotFoundError: There is no such text.
            CorruptError: The token ids are not those of the digest.
        """
        from kvwire.codec import read_text
        from kvwire.types import digest_tokens

        key = self.keys(config).text(token_digest)
        data = self._read(key, _MAX_SMALL_BYTES)
        if data is None:
            msg = f"text {token_digest[:12]} is not in {self._store.url}: encode the document again"
            raise NotFoundError(msg)
        ids = read_text(data)
        if digest_tokens(ids) != token_digest:
            msg = f"text {token_digest[:12]} is damaged in {self._store.url}: encode the document again"
            raise CorruptError(msg)
        return ids

    def add_text(self, config: Config, document_id: str, token_ids: Sequence[int]) -> CatalogEntry:
        """Write a text and an entry without a blob.

        Args:
            config: The model configuration.
            document_id: The document that the text is of.
            token_ids: The text.

        Returns:
            The entry as it was written.
        """
        space = self.keys(config)
        digest = self.put_text(space, token_ids)
        entry = CatalogEntry(document_id, "", "", 0, 0, len(token_ids), digest, "", ())
        self._put_entry(space.document(document_id), entry.to_json())
        self.confirm(space, entry, token_ids)
        return entry

    def confirm(self, config: Config, entry: CatalogEntry, token_ids: Sequence[int], profile: bytes = b"") -> None:
        """Write again what a collector took of an entry's text and profile before it saw the entry.

        Called after the entry was written; whoever relied on a text or profile that was there already calls it.

        Args:
            config: The model configuration.
            entry: The entry.
            token_ids: Its text.
            profile: The bytes of its profile; empty: the profile is not looked at.
        """
        space = self.keys(config)
        text = space.text(entry.token_digest)
        used = [text, space.profile(entry.profile_digest)] if entry.profile_digest and profile else [text]
        wait_for_collectors(self._store, space, used)
        self.put_text(space, token_ids)
        if len(used) > 1 and not self._is_young(used[1]):
            self.put_profile(space, profile)

    def remove(self, config: Config, document_id: str) -> bool:
        """Take a document out of the catalog. What it named is left to ``collect``.

        The entry of its token sequence goes too, unless another document has the same blob and is named there.

        Args:
            config: The model configuration.
            document_id: The document.

        Returns:
            Whether it was in.
        """
        space = self.keys(config)
        key = space.document(document_id)
        try:
            entry = self._entry(space, key)
        except CorruptError:
            self._store.delete(key)
            return True
        if entry is None:
            return False
        self._store.delete(key)
        if entry.token_digest:
            self._remove_tokens(space, entry)
        return True

    def _remove_tokens(self, space: KeySpace, removed: CatalogEntry) -> None:
        key = space.token_entry(removed.token_digest)
        try:
            found = self._entry(space, key)
            named = None if found is None else self._entry(space, space.document(found.document_id))
        except CorruptError:
            named = None
        if named is None or named.token_digest != removed.token_digest:
            self._store.delete(key)

    def by_document(self, config: Config, document_id: str) -> CatalogEntry | None:
        """Look a document up.

        Args:
            config: The model configuration.
            document_id: The document.

        Returns:
            Its entry; None where there is none.

        Raises:
            CorruptError: The entry is damaged or speaks of something else.
        """
        space = self.keys(config)
        entry = self._entry(space, space.document(document_id))
        if entry is not None and entry.document_id != document_id:
            raise _misplaced(space.document(document_id))
        return entry

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
        space = self.keys(config)
        entry = self._entry(space, space.token_entry(token_digest))
        if entry is not None and entry.token_digest != token_digest:
            raise _misplaced(space.token_entry(token_digest))
        return entry

    def documents(
        self, config: Config, on_error: OnError | None = None, *, after: str = "", limit: int | None = None
    ) -> Iterator[CatalogEntry]:
        """Entries of documents, in the order of their keys, which is none that means anything.

        Args:
            config: The model configuration.
            on_error: Called with the key of a damaged entry and what is wrong, after which the listing goes on.
            after: Go on behind this key.
            limit: How many are looked at, at most; None: all.

        Returns:
            The entries.

        Raises:
            CorruptError: An entry is damaged, and there is no ``on_error``.
        """
        space = self.keys(config)
        keys = islice(self._store.keys(space.documents, after), limit)
        return (entry for _, entry in self._found(space, keys, on_error))

    def read(self, config: Config, key: str) -> bytes | None:
        """Read an object of the catalog.

        Args:
            config: The model configuration.
            key: Of the catalog.

        Returns:
            Its bytes, unsealed where this tenant's are sealed; None where there is none.

        Raises:
            AuthError: It is sealed, and this catalog has no key for it.
            CorruptError: It was changed.
        """
        self.keys(config)
        return self._read(key, MAX_ENTRY_BYTES + 1)

    def read_each(self, config: Config, keys: Iterable[str]) -> Iterator[tuple[str, Callable[[], bytes | None]]]:
        """``read`` several objects, several at a time where the store is far.

        Args:
            config: The model configuration.
            keys: The objects.

        Returns:
            Each key with a function that gives what ``read`` gives, or raises what it raises.
        """
        space = self.keys(config)
        return read_ahead(self._store, keys, lambda key: self.read(space, key))

    def _found(
        self, space: KeySpace, keys: Iterable[str], on_error: OnError | None
    ) -> Iterator[tuple[str, CatalogEntry]]:
        for key, read in read_ahead(self._store, keys, lambda key: self._read(key, MAX_ENTRY_BYTES + 1)):
            try:
                entry = self._parsed(space, key, read())
            except CorruptError as error:
                if on_error is None:
                    raise
                on_error(key, error)
                continue
            if entry is not None:
                yield key, entry

    def put_profile(self, config: Config, data: bytes) -> str:
        """Write a profile; ``set_current_profile`` puts it to use.

        Args:
            config: The model configuration.
            data: The profile's bytes. They are written even where they are, which heals a rotten copy.

        Returns:
            The profile's digest.
        """
        digest = hashlib.sha256(data).hexdigest()
        self._put_entry(self.keys(config).profile(digest), data)  # even where it is: a rotten copy is healed
        return digest

    def get_profile(self, config: Config, digest: str) -> bytes:
        """Read a profile and check it against its digest.

        Args:
            config: The model configuration.
            digest: SHA-256 of the profile.

        Returns:
            The profile's bytes.

        Raises:
            NotFoundError: There is no such profile.
            CorruptError: The bytes are not those of the digest.
        """
        try:
            data = self._intact(self.keys(config).profile(digest), _MAX_SMALL_BYTES)
        except NotFoundError as error:
            msg = f"profile {digest[:12]} is not in {self._store.url}: fit it again or copy it from where it is"
            raise NotFoundError(msg) from error
        if data is None:
            advice = "kvwire store verify --delete-damaged deletes it; then fit or copy it again"
            msg = f"profile {digest[:12]} is damaged in {self._store.url}: {advice}"
            raise CorruptError(msg)
        return data

    def set_current_profile(self, config: Config, digest: str) -> None:
        """Use this profile for new blobs of the configuration.

        Args:
            config: The model configuration.
            digest: SHA-256 of the profile.

        Raises:
            NotFoundError: The profile has not been written.
        """
        space = self.keys(config)
        self._store.stat(space.profile(digest))
        self._put_entry(space.current_profile, json.dumps({"profile_digest": digest}).encode())

    def current_profile(self, config: Config) -> str | None:
        """The profile in use.

        Args:
            config: The model configuration.

        Returns:
            Its digest; None where none has been chosen.

        Raises:
            CorruptError: The pointer to the profile is damaged.
        """
        data = self._read(self.keys(config).current_profile, MAX_ENTRY_BYTES + 1)
        if data is None:
            return None
        try:
            return check_digest(str(parse_object(data).get("profile_digest")), "the current profile's digest")
        except ArgumentError as error:
            msg = f"the catalog's pointer to the profile is damaged ({error}): set the current profile again"
            raise CorruptError(msg) from error

    def _intact(self, key: str, most: int | None = None) -> bytes | None:
        """Content that its key names by digest; None where it is damaged, not only in a copy of it nearby."""
        for _ in range(2):
            data = self._store.get(key, 0, most)
            if hashlib.sha256(data).hexdigest() == content_digest(key):
                return data
            self._store.distrust(key)
        return None

    def _is_young(self, key: str) -> bool:
        """Whether content is there and will be for a while; where nobody can say, it is written again."""
        try:
            return not is_old(self._store.stat(key).modified)
        except (NotFoundError, StorageError):
            return False

    def _space_of(self, entry: CatalogEntry) -> KeySpace:
        parts = entry.blob_key.split("/")
        space = KeySpace(self._tenant, parts[2] if len(parts) > 2 else "")  # noqa: PLR2004 - v1, tenant, configuration
        if entry.blob_key != space.blob(entry.sha256):
            msg = f"{entry.blob_key} is not a blob key of this tenant: write the blob with put_blob"
            raise ArgumentError(msg)
        return space

    def _entry(self, space: KeySpace, key: str) -> CatalogEntry | None:
        return self._parsed(space, key, self._read(key, MAX_ENTRY_BYTES + 1))

    def _parsed(self, space: KeySpace, key: str, data: bytes | None) -> CatalogEntry | None:
        if data is None:
            return None
        entry = CatalogEntry.from_json(data)
        if not entry.is_text and entry.blob_key != space.blob(entry.sha256):  # never lead into another tenant's blobs
            raise _misplaced(key)
        return entry

    # Every byte of entries, pointers and texts goes through these two, and what is written of profiles.

    def _read(self, key: str, most: int) -> bytes | None:
        try:
            data = self._store.get(key, 0, most)
        except NotFoundError:
            return None
        if content_digest(key):
            return data
        if self._keys:
            return self._keys.unseal(data, key)
        if data.startswith(SEALED_MAGIC):
            msg = f"{key} is sealed: give the keyring that it was written with (--keys)"
            raise AuthError(msg)
        return data

    def _put_entry(self, key: str, data: bytes) -> None:
        self._store.put(key, self._keys.seal(data, key) if self._keys and not content_digest(key) else data)


def _misplaced(key: str) -> CorruptError:
    return CorruptError(
        f"the catalog entry {key} speaks of another document, tenant or model: write the document again"
    )
