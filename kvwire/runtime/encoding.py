"""How a corpus's documents become blobs: what is due, the profile, the cache, the code and the entry."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from kvwire.codec import encode
from kvwire.errors import ArgumentError, CorruptError, MismatchError, NotFoundError
from kvwire.runtime.calibration import CALIBRATION_TOKENS, LEAST_TOKENS, compute_document, fit_profile_to
from kvwire.runtime.coding import Document, Encoded
from kvwire.runtime.kept_moments import MomentFile
from kvwire.store import ModelRecord, check_new_name
from kvwire.types import digest_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvwire.codec import AnyProfile
    from kvwire.engines.base import Engine
    from kvwire.runtime.coding import Coding
    from kvwire.runtime.corpus_reader import CorpusReader
    from kvwire.runtime.neighbours import Neighbours
    from kvwire.types import BlobInfo, BlockDeviation, KVCache

ENOUGH_TOKENS = 4096
"""A profile fitted on less gives way once twice as much text comes: a short first document must not rule for ever."""


class CorpusEncoder:
    """Encodes documents of a corpus; see ``Corpus``, whose methods of the same names call these."""

    def __init__(self, corpus: CorpusReader, engine: Engine | None, coding: Coding) -> None:
        """Keep the parts.

        Args:
            corpus: Where the documents are looked up and written.
            engine: The model; None where only caches from elsewhere are saved.
            coding: How documents are encoded.
        """
        self._corpus, self._engine, self._coding = corpus, engine, coding
        self._catalog, self._config = corpus.catalog, corpus.config

    def calibrate(self, documents: Sequence[Document], tokens: int | None = None) -> AnyProfile | None:
        """Fit a profile on the first documents and use it from now on.

        Args:
            documents: Calibration text, the first ones first.
            tokens: Fit on up to that many; None for ``CALIBRATION_TOKENS``.

        Returns:
            The profile; None where none was fitted, and then nothing changes.
        """
        most = CALIBRATION_TOKENS if tokens is None else tokens
        profile = fit_profile_to(self._needed_engine(), self._coding, documents, most)
        if profile is not None:
            self._corpus.set_profile(profile)
            MomentFile(self._coding.resume).done()
        return profile

    def encode(
        self, documents: Sequence[Document], *, force: bool = False, encode_after: int = 0, index: Sequence[str] = ()
    ) -> Iterator[Encoded]:
        """Encode what the catalog lacks, document by document.

        Args:
            documents: What the catalog is to hold.
            force: Encode and write again even what seems to be there.
            encode_after: Documents with fewer counted uses are kept as text.
            index: Schemes of the indexes that are to find the documents.

        Yields:
            What became of each document, in the order given.

        Raises:
            ArgumentError: As ``Corpus.encode`` says.
        """
        self._needed_engine()
        for document in documents:
            check_new_name(document.document_id, "document")
        indexes = [self._corpus.index(scheme) for scheme in index]
        if indexes and self._coding.neutral_prefix:
            msg = "documents behind a neutral prefix begin no prompt: encode without it, or without an index"
            raise ArgumentError(msg)
        self._corpus.changes += 1
        due = [document for document in documents if self._is_due(document.document_id, encode_after)]
        profile, encoded = self._profile_for(due, force=force), {document.document_id for document in due}
        self._publish(profile)
        around = self._neighbours(documents)
        for document in documents:
            found = None if force else self._known(document, profile)
            if found is None and document.document_id not in encoded:
                yield self._keep_text(document)
                continue
            if found is None:
                started = time.perf_counter()
                found = self._store(document, (profile, around), started)
            for each in indexes:
                each.add(found.entry, document.token_ids, is_new=not found.skipped)
            yield found

    def save(self, document: Document, cache: KVCache, *, index: Sequence[str] = ()) -> Encoded:
        """Encode a cache that was computed elsewhere, and keep it as a document.

        Args:
            document: Its name and text.
            cache: Of the whole text, computed without loss, positions on and from 0.
            index: As for ``encode``.

        Returns:
            What became of it; skipped where the catalog has it already.

        Raises:
            ArgumentError: The cache is not of the text, or as ``Corpus.save`` says.
            MismatchError: The cache is of another model, or its profile needs the model's first layers.
        """
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
        found = self._known(document, profile) or self._put(document, (cache, ()), (profile, None), started)
        for each in indexes:
            each.add(found.entry, document.token_ids, is_new=not found.skipped)
        return found

    def promote(self, uses: int, *, index: Sequence[str] = ()) -> Iterator[Encoded]:
        """Encode the documents that are kept as text and were used often enough, the most used first.

        Args:
            uses: Counted uses from which on a document is encoded.
            index: As for ``encode``.

        Yields:
            What became of each of them.
        """
        due = []
        counts = self._corpus.uses
        for document_id in counts.reached(self._corpus.scope, uses) if counts else ():
            with suppress(ArgumentError, CorruptError, NotFoundError):
                entry = self._catalog.by_document(self._config, check_new_name(document_id, "document"))
                if entry is not None and entry.is_text:
                    due.append(Document(document_id, self._corpus.text(entry)))
        yield from self.encode(due, index=index)

    def _needed_engine(self) -> Engine:
        if self._engine is None:
            msg = "this corpus was opened without an engine and cannot encode: make it with one, Corpus(engine, store)"
            raise ArgumentError(msg)
        return self._engine

    def _publish(self, profile: AnyProfile | None) -> None:
        """Write the model's record, from which ``open`` reads, where it is not there yet."""
        engine = self._needed_engine()
        digest = profile.digest if profile else ""
        self._catalog.put_model(ModelRecord(engine.meta, engine.window, engine.model_config_digest, digest))

    def _neighbours(self, documents: Sequence[Document]) -> Neighbours | None:
        """What measures deviations, where they are wanted."""
        if not self._coding.deviation:
            return None
        from kvwire.runtime.neighbours import Neighbours  # nothing else needs it

        return Neighbours(self._needed_engine(), [each.token_ids for each in documents])

    def _is_due(self, document_id: str, encode_after: int) -> bool:
        if encode_after <= 0:
            return True
        if self._corpus.uses is None:
            msg = "documents are encoded after some uses only where uses are counted: pass uses to the corpus"
            raise ArgumentError(msg)
        return self._corpus.uses.count(self._corpus.scope, document_id) >= encode_after

    def _keep_text(self, document: Document) -> Encoded:
        """The text alone; a document that has it, or a blob of an older profile, is left as it is."""
        try:
            entry = self._catalog.by_document(self._config, document.document_id)
        except CorruptError:
            entry = None
        if entry is None or entry.token_digest != digest_tokens(document.token_ids):
            entry = self._catalog.add_text(self._config, document.document_id, document.token_ids)
            self._corpus.changes += 1
            return Encoded(entry, None, skipped=False, encode_s=0.0)
        self._catalog.put_text(self._config, document.token_ids, document_id=document.document_id)
        self._corpus.changes += 1
        return Encoded(entry, None, skipped=True, encode_s=0.0)

    def _profile_for(self, documents: Sequence[Document], *, force: bool) -> AnyProfile | None:
        """The profile in use; a new one where there is none, where it is lost, or where it was fitted on too little.

        One that cannot be read intact gives way only to ``force``: it may be whole for everybody else.
        """
        try:
            profile = self._corpus.profile()
            _ = profile and profile.data  # encoders need all of it: what is damaged shows before anything is written
        except NotFoundError:
            profile = None
        except CorruptError:
            if not force:
                raise
            profile = None
        coding = self._coding
        is_behind = profile is None or profile.notes.get("neutral_prefix", 0) == coding.neutral_prefix
        if profile is not None and not (is_behind and coding.kind.is_wanted(profile, coding)):
            msg = (
                "the profile in use here is of another method or head start, or of another neutral prefix; encode with "
                "that one, name another tenant or store, or call Corpus.calibrate to replace it"
            )
            raise MismatchError(msg)
        noted = 0 if profile is None else profile.notes.get("tokens")
        seen = noted if type(noted) is int else ENOUGH_TOKENS
        tokens = sum(len(document.token_ids) for document in documents)
        if profile is None or (seen < ENOUGH_TOKENS and tokens >= 2 * seen):
            profile = self.calibrate(documents) or profile
        kind = self._coding.kind
        if profile is None and kind.needs_profile and documents:
            needs = f"needs a profile, and that {LEAST_TOKENS} tokens at least; encode more text first"
            msg = f"{kind.title}'s method {needs}"
            raise ArgumentError(msg)
        return profile

    def _store(self, document: Document, known: tuple[AnyProfile | None, Neighbours | None], started: float) -> Encoded:
        profile, around = known
        computed = compute_document(self._needed_engine(), document.token_ids, self._coding.neutral_prefix)
        deviation = around.measure(computed[0], document.token_ids) if around else None
        return self._put(document, computed, (profile, deviation), started)

    def _put(
        self, document: Document, computed: tuple[KVCache, tuple[int, ...]],
        known: tuple[AnyProfile | None, BlockDeviation | None], started: float,
    ) -> Encoded:  # fmt: skip
        """Encode and write a cache that was computed, behind a neutral prefix or none."""
        (cache, neutral), (profile, deviation) = computed, known
        layers = 0 if profile is None else profile.prefix_layers
        hidden = self._needed_engine().prefix_states(document.token_ids, layers) if layers else None
        coding = self._coding
        plain = encode(
            cache,
            profile,
            coding.ladder,
            chunk_tokens=coding.chunk_tokens,
            lossless=coding.lossless,
            hidden=hidden,
            backend=coding.backend,
            deviation=deviation,
            neutral_prefix=neutral,
        )
        blob = self._catalog.seal(plain)
        info = self._catalog.blob_reader().read_header(blob)
        self._catalog.put_text(self._config, document.token_ids, document_id=document.document_id, overwrite=True)
        entry = self._catalog.put_blob(
            self._config,
            blob,
            document_id=document.document_id,
            header_bytes=info.header_bytes,
            tokens=info.tokens,
            token_digest=info.meta.token_digest,
            profile_digest=info.profile_digest,
            profile_outline=profile.outline if profile else None,
            levels=[(level.name, level.cumulative_bytes) for level in info.levels],
            overwrite=True,  # whatever lies there was not good enough
        )
        self._catalog.confirm(self._config, entry, document.token_ids, profile.data if profile else b"")
        self._corpus.changes += 1
        return Encoded(entry, info, skipped=False, encode_s=time.perf_counter() - started)

    def _known(self, document: Document, profile: AnyProfile | None) -> Encoded | None:
        """The document as the catalog has it, where that is still what encoding would give.

        The same text under another name counts: only an entry is added then. So does the entry of its tokens under its
        own name, which is written first: a writer that was killed in between left it.
        """
        digest = digest_tokens(document.token_ids)
        wanted = (digest, profile.digest if profile else "", False)
        try:
            entry = own = self._catalog.by_document(self._config, document.document_id)
            if entry is None or (entry.token_digest, entry.profile_digest, entry.is_text) != wanted:
                entry, own = self._catalog.by_tokens(self._config, digest), None
            if entry is None or (entry.token_digest, entry.profile_digest, entry.is_text) != wanted:
                return None
            if self._catalog.store.stat(entry.blob_key).size != entry.size:
                return None
            info = self._corpus.read_header(entry)
        except (CorruptError, NotFoundError):
            return None  # a damaged entry or a blob that is gone is written again
        if not self._is_coded_so(info):
            return None
        self._catalog.put_text(self._config, document.token_ids, document_id=document.document_id)
        if own is None:
            added = self._catalog.alias(entry, document.document_id)
            if added is None:
                return None
            self._catalog.confirm(self._config, added, document.token_ids, profile.data if profile else b"")
            entry = added
        self._corpus.changes += 1
        return Encoded(entry, info, skipped=True, encode_s=0.0)

    def _is_coded_so(self, info: BlobInfo) -> bool:
        """Whether a blob has the levels and chunks that encoding would give."""
        coding = self._coding
        if len(info.neutral_prefix) != min(coding.neutral_prefix, info.tokens, self._corpus.window - info.tokens):
            return False
        if coding.lossless and not any(level.lossless for level in info.levels):
            return False
        if coding.deviation and info.deviation is None:
            return False
        return coding.kind.has_levels(info, coding) and info.chunk_tokens == coding.chunk_tokens
