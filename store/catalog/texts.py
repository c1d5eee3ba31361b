"""Texts beside blobs: token ids, to compute documents from where a blob is lost or was never made."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from kvwire.errors import AuthError, CorruptError, FormatVersionError, NotFoundError, StorageError
from kvwire.store.catalog.objects import MAX_SMALL_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.store.catalog.objects import Config, TenantObjects
    from kvwire.store.catalog_entry import CatalogEntry


class Texts:
    """A tenant's texts; ``Catalog.texts`` is one."""

    def __init__(self, objects: TenantObjects) -> None:
        """Read and write through the catalog's objects."""
        self._objects = objects

    def put(self, config: Config, token_ids: Sequence[int], *, document_id: str = "", overwrite: bool = False) -> str:
        """Write a text where it is not there yet; an entry that names it comes afterwards."""
        from kvwire.codec import pack_text
        from kvwire.types import digest_tokens

        digest = digest_tokens(token_ids)
        key = self._objects.keys(config).text(digest)
        if not overwrite and self._objects.is_young(key) and (not document_id or document_id in self._names_in(key)):
            return digest
        names = [name for name in self._names_in(key) if name != document_id]
        self._objects.write(key, pack_text(token_ids, [*names, document_id] if document_id else names))
        return digest

    def documents(self, config: Config, token_digest: str) -> tuple[str, ...]:
        """Which documents have a text, as far as it says itself."""
        return self._names_in(self._objects.keys(config).text(token_digest))

    def get(self, config: Config, token_digest: str) -> tuple[int, ...]:
        """Read a text."""
        from kvwire.codec import read_text
        from kvwire.types import digest_tokens

        key = self._objects.keys(config).text(token_digest)
        data = self._objects.read(key, MAX_SMALL_BYTES)
        if data is None:
            msg = f"text {token_digest[:12]} is not in {self._objects.store.url}: encode the document again"
            raise NotFoundError(msg)
        ids = read_text(data)
        if digest_tokens(ids) != token_digest:
            msg = f"text {token_digest[:12]} is damaged in {self._objects.store.url}: encode the document again"
            raise CorruptError(msg)
        return ids

    def of(self, config: Config, entry: CatalogEntry) -> tuple[int, ...]:
        """Read a document's text from beside its blobs."""
        if not entry.parts:
            return self.get(config, entry.token_digest)
        from kvwire.types import digest_tokens

        first, *others = entry.parts
        texts = [self.get(config, first.token_digest)]
        texts += [self.get_part(config, part.sha256) for part in others]
        ids = tuple(chain.from_iterable(texts))
        if digest_tokens(ids) != entry.token_digest:
            msg = f"the texts of the parts of {entry.document_id!r} are of another document: encode it again"
            raise CorruptError(msg)
        return ids

    def put_part(self, config: Config, sha256: str, token_ids: Sequence[int]) -> str:
        """Write the text of a document's part where it is not there yet."""
        from kvwire.codec import pack_text

        key = self._objects.keys(config).part_text(sha256)
        if not self._objects.is_young(key):
            self._objects.write(key, pack_text(token_ids))
        return key

    def get_part(self, config: Config, sha256: str) -> tuple[int, ...]:
        """Read the text of a document's part."""
        from kvwire.codec import read_text

        data = self._objects.read(self._objects.keys(config).part_text(sha256), MAX_SMALL_BYTES)
        if data is None:
            msg = f"the text of part {sha256[:12]} is not in {self._objects.store.url}: encode the document again"
            raise NotFoundError(msg)
        return read_text(data)

    def _names_in(self, key: str) -> tuple[str, ...]:
        from kvwire.codec import read_text_documents

        try:
            data = self._objects.read(key, MAX_SMALL_BYTES)
            return () if data is None else read_text_documents(data)
        except (AuthError, CorruptError, FormatVersionError, StorageError):
            return ()
