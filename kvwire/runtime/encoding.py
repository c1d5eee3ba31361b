"""Encodes documents of a corpus one after another."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError, CorruptError, MismatchError, NotFoundError
from kvwire.runtime.coding import Document, Encoded
from kvwire.runtime.encoding_steps import Computed, EncodingSteps
from kvwire.store import check_new_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvwire.codec import AnyProfile
    from kvwire.types import KVCache


class CorpusEncoder(EncodingSteps):
    """Encodes documents of a corpus; see ``Corpus``, whose methods of the same names call these."""

    def encode(
        self, documents: Sequence[Document], *, force: bool = False, encode_after: int = 0, index: Sequence[str] = ()
    ) -> Iterator[Encoded]:
        """Encode what the catalog lacks, document by document."""
        for document in documents:
            check_new_name(document.document_id, "document")
        indexes = self.indexes(index)
        documents = [self.laid_out(document) for document in documents]
        due = [document for document in documents if self.is_due(document.document_id, encode_after)]
        profile, encoded = self.prepare(lambda: due, force=force), {document.document_id for document in due}
        around = self.neighbours(documents)
        for document in documents:
            found = None if force else self.known(document, profile)
            if found is None and document.document_id not in encoded:
                yield self.keep_text(document)
                continue
            if found is None:
                started = time.perf_counter()
                found = self._put(document, self.compute(document, profile, around), profile, started)
            for each in indexes:
                opening = self.opening(found)
                each.add(found.entry, document.token_ids, is_new=not found.skipped, opening=opening)
            yield found

    def save(self, document: Document, cache: KVCache, *, index: Sequence[str] = ()) -> Encoded:
        """Encode a cache that was computed elsewhere, and keep it as a document."""
        check_new_name(document.document_id, "document")
        indexes = [self._corpus.index(scheme) for scheme in index]
        if cache.token_ids != tuple(document.token_ids) or (cache.meta.offset, cache.meta.positions) != (0, "on"):
            msg = f"the cache is not that of {document.document_id!r}: give all of its tokens, at positions from 0"
            raise ArgumentError(msg)
        if cache.meta.config_digest() != self._config:
            ours = self._corpus.meta.model_id
            msg = f"the cache is of model {cache.meta.model_id!r}, the corpus of {ours!r}: name its corpus"
            raise MismatchError(msg)
        started, profile = time.perf_counter(), self._corpus.profile()
        if profile is not None and profile.prefix_layers:
            msg = "the profile in use is for readers that run the model's first layers: encode with Corpus.encode"
            raise MismatchError(msg)
        found = self.known(document, profile, computed=True) or self._put(document, Computed(cache), profile, started)
        for each in indexes:
            opening = self.opening(found)
            each.add(found.entry, document.token_ids, is_new=not found.skipped, opening=opening)
        return found

    def promote(self, uses: int, *, index: Sequence[str] = ()) -> Iterator[Encoded]:
        """Encode the documents that are kept as text and were used often enough, the most used first."""
        due = []
        counts = self._corpus.uses
        for document_id in counts.reached(self._corpus.scope, uses) if counts else ():
            with suppress(ArgumentError, CorruptError, NotFoundError):
                entry = self._catalog.by_document(self._config, check_new_name(document_id, "document"))
                if entry is not None and entry.is_text:
                    due.append(Document(document_id, self._corpus.text(entry)))
        yield from self.encode(due, index=index)

    def _put(self, document: Document, computed: Computed, profile: AnyProfile | None, started: float) -> Encoded:
        blob, info = self.code(computed, profile)
        entry = self.write(document, blob, info, profile)
        return Encoded(entry, info, skipped=False, encode_s=time.perf_counter() - started)
