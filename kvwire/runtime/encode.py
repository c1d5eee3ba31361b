"""The steps from a document to a blob: look up, compute, code, write; and its profile before."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from kvwire.codec import Ladder, encode
from kvwire.errors import ArgumentError, CorruptError, MismatchError, NotFoundError
from kvwire.runtime.calibrate import Calibration, MomentFile
from kvwire.runtime.coding import LEAST_TOKENS, Computed, Document, Encoded, read_whole
from kvwire.runtime.prefill import (
    WITHOUT,
    Neighbours,
    lacks_opening,
    neutral_prefix,
    opening_of,
    states_of,
)
from kvwire.store import ModelRecord
from kvwire.store.prefix.index import opening_of as opening_of_blob
from kvwire.types import digest_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.codec import AnyProfile
    from kvwire.engines.base import Engine
    from kvwire.runtime.coding import Coding
    from kvwire.runtime.corpus_reader import CorpusReader
    from kvwire.store import CatalogEntry, DonorIndex, PrefixIndex
    from kvwire.types import BlobInfo, BlobPrefix, KVCache, LevelInfo, SoftTokensName

OPENING = "bos-"
"""Prefix of the document that holds the rows of the opening tokens; the tokens follow."""
_log = logging.getLogger("kvwire.encode")
ENOUGH_TOKENS = 4096
"""A profile of less text is replaced when twice as much comes, so that a short first document does not rule for
ever."""


class Encoder:
    """Encoding steps of a corpus. Each step runs in one thread at a time; different steps may run in parallel.

    Attributes:
        coding: Encoding options.
    """

    def __init__(self, corpus: CorpusReader, engine: Engine | None, coding: Coding) -> None:
        """Keep the parts."""
        self._corpus, self._engine, self.coding = corpus, engine, coding
        self._catalog, self._config = corpus.catalog, corpus.config
        self._has_told = False  # whether documents without BOS were reported

    @property
    def engine(self) -> Engine:
        """The model."""
        if self._engine is None:
            msg = "this corpus was opened without an engine and cannot encode: make it with one, Corpus(engine, store)"
            raise ArgumentError(msg)
        return self._engine

    @cached_property
    def calibration(self) -> Calibration:
        """Fits profiles, and computes documents like their texts."""
        return Calibration(self.engine, self.coding)

    @property
    def soft_tokens(self) -> SoftTokensName | None:
        """The file of soft tokens inside documents' caches; None without any."""
        layout = self.coding.layout
        if min(layout.cached_tokens, default=0) >= 0:
            return None
        soft = self.engine.soft_tokens
        if soft is None:
            msg = f"the layout {layout.name} has soft tokens inside caches: give the file of them (--soft-tokens)"
            raise ArgumentError(msg)
        soft.check_layout(layout)
        return soft.name(self.engine.vocabulary_size)

    def laid_out(self, document: Document) -> Document:
        """Add the layout's tokens to a document; see ``Calibration.laid_out``."""
        return self.calibration.laid_out(document) if self.coding.lays_out else document

    def calibrate(self, documents: Sequence[Document], tokens: int | None = None) -> AnyProfile | None:
        """Fit a profile on the first documents and use it from now on."""
        if tokens is None:
            tokens = self.calibration.tokens_to_take(documents)
        profile = self.calibration.fit(documents, tokens)
        if profile is not None:
            self._corpus.set_profile(profile)
            MomentFile(self.coding.resume).done()
        return profile

    def prepare(
        self,
        texts: Callable[[], Sequence[Document]],
        *,
        force: bool = False,
        refit: bool = False,
        profile: AnyProfile | None = None,
    ) -> AnyProfile | None:
        """Find or fit the profile to encode with, and write the model's record."""
        self._corpus.changes += 1
        _ = self.soft_tokens
        if profile is not None:
            if not self._is_wanted(profile):
                raise MismatchError(
                    "the profile given is of another method or prefix layers, or of other soft tokens; encode with "
                    "those, or fit one for these (kvwire profile fit)"
                )
            self._corpus.set_profile(profile)
        else:
            profile = (self.calibrate(texts()) if refit else None) or self._profile_for(texts, force=force)
        self.publish(profile)
        if self.calibration.opens:
            self.put_opening()
        return profile

    def indexes(self, schemes: Sequence[str]) -> list[PrefixIndex | DonorIndex]:
        """The indexes to add documents to."""
        found = self._corpus.indexes(schemes)
        if found and (self.coding.neutral_prefix or self.coding.layout.cached_tokens):
            raise ArgumentError(
                "documents behind a neutral prefix, or with a layout's tokens in their caches, cannot begin a prompt: "
                "encode without these, or without an index"
            )
        return found

    def opening(self, found: Encoded) -> tuple[int, ...]:
        """The BOS before a document's blob, for indexes."""
        return opening_of_blob(found.blob or self._corpus.read_header(found.entry))

    def add_to(self, indexes: Sequence[PrefixIndex | DonorIndex], found: Encoded, document: Document) -> None:
        """Add a document to indexes."""
        for each in indexes:
            each.add(found.entry, document.token_ids, is_new=not found.skipped, opening=self.opening(found))

    def put_opening(self) -> None:
        """Store exact rows of the opening tokens, for engines that read prefixes from the store."""
        engine = self.engine
        ids = engine.opening_tokens
        self.put_exact(Document(f"{OPENING}{'-'.join(map(str, ids))}", ids))

    def put_exact(self, document: Document, cache: KVCache | None = None) -> CatalogEntry | None:
        """Store rows of the text before documents, without loss; None if they are stored already.

        cache: the rows, if computed elsewhere.
        """
        found = self._catalog.by_tokens(self._config, digest_tokens(document.token_ids))
        if found is not None and not found.is_text:
            return None
        cache = self.engine.prefill([document.token_ids])[0] if cache is None else cache
        blob = self._catalog.blobs.seal(encode(cache, None, 0, lossless=True))
        return self.write(document, blob, self._catalog.blobs.reader().read_header(blob), None)

    def neighbours(self, documents: Sequence[Document]) -> Neighbours | None:
        """Neighbours to measure deviations with; None if these are not wanted."""
        if not self.coding.deviation:
            return None
        return Neighbours(self.engine, [each.token_ids for each in documents])

    def is_due(self, document_id: str, encode_after: int) -> bool:
        """Whether a document was used often enough to be encoded."""
        if encode_after <= 0:
            return True
        if self._corpus.uses is None:
            msg = "documents are encoded after some uses only where uses are counted: pass uses to the corpus (--uses)"
            raise ArgumentError(msg)
        return self._corpus.uses.count(self._corpus.scope, document_id) >= encode_after

    def known(self, document: Document, profile: AnyProfile | None, *, computed: bool = False) -> Encoded | None:
        """The document from the catalog, if encoding would give the same; else None.

        The same text under another name counts, and gets a new entry. So does a text's entry without the name's, left
        by a writer that was killed in between.
        """
        digest = digest_tokens(document.token_ids)
        wanted = (digest, profile.digest if profile else "", False)

        def fitting(entry: CatalogEntry | None) -> CatalogEntry | None:
            return entry if entry and (entry.token_digest, entry.profile_digest, entry.is_text) == wanted else None

        try:
            own = fitting(self._catalog.by_document(self._config, document.document_id))
            entry = own or fitting(self._catalog.by_tokens(self._config, digest))
            if entry is None:
                return None
            if any(self._catalog.store.stat(key).size != size for key, size in self._catalog.blobs.of(entry).items()):
                return None
            info = self._corpus.read_header(entry)
        except (CorruptError, NotFoundError):
            return None  # a damaged entry or a lost blob is written again
        if not self._is_coded_so(info, document.token_ids if self._engine and not computed else None):
            return None
        self._catalog.texts.put(self._config, document.token_ids, document_id=document.document_id)
        if own is None:
            added = self._catalog.alias(entry, document.document_id)
            if added is None:
                return None
            self._catalog.confirm(self._config, added, document.token_ids, profile)
            entry = added
        self._corpus.changes += 1
        return Encoded(entry, info, skipped=True, encode_s=0.0)

    def compute(
        self, document: Document, profile: AnyProfile | None, around: Neighbours | None = None,
        cache: KVCache | None = None, *, neutral_tokens: int | None = None,
    ) -> Computed:  # fmt: skip
        """Run the model over a document; no other step uses the engine."""
        engine, ids = self.engine, document.token_ids
        opening = opening_of(engine, ids)
        if cache is None:
            cache, neutral = self.calibration.compute(
                ids, self.coding.neutral_prefix if neutral_tokens is None else neutral_tokens
            )
        else:  # its position shows what precedes it: the opening tokens, or nothing
            neutral = opening if cache.meta.offset == len(opening) else ()
        deviation = around.measure(cache, ids) if around else None
        layers = 0 if profile is None else profile.prefix_layers
        count = len(opening) if neutral else 0
        hidden = states_of(engine, ids, layers, neutral[:count]) if layers else None
        beginning = engine.prefill([ids[:1]])[0] if len(neutral) > count and not count else None
        return Computed(cache, neutral, hidden, deviation, count, beginning)

    def code(
        self, computed: Computed, profile: AnyProfile | None, context_level: int | None = None,
        like: Sequence[LevelInfo] | None = None, prefix: BlobPrefix | None = None,
    ) -> tuple[bytes, BlobInfo]:  # fmt: skip
        """Code the model's output; uses neither engine nor store. like, prefix: of a part, whose levels are these."""
        coding = self.coding
        ladder: Ladder | Literal[0] | None = coding.ladder
        if like is not None:
            lossy = [level for level in like if not level.lossless]
            ladder = None if lossy else 0
            if lossy and not lossy[0].independent:
                ladder = Ladder(lossy[0].step, tuple(level.name for level in lossy))
        plain = encode(
            computed.cache,
            profile,
            ladder,
            chunk_tokens=coding.chunk_tokens,
            lossless=coding.lossless if like is None else any(level.lossless for level in like),
            hidden=computed.hidden,
            backend=coding.backend,
            deviation=computed.deviation,
            neutral_prefix=computed.neutral_prefix,
            soft_tokens=self.soft_tokens,
            opening=computed.opening,
            beginning=computed.beginning,
            prefix=prefix,
            context_level=context_level,
        )
        blob = self._catalog.blobs.seal(plain)
        return blob, self._catalog.blobs.reader().read_header(blob)

    def save(self, document: Document, cache: KVCache, opening: tuple[int, ...] = ()) -> Encoded:
        """Code and write a cache that was computed elsewhere, behind the opening tokens or behind nothing."""
        count = len(opening)
        if cache.token_ids != tuple(document.token_ids) or (cache.meta.offset, cache.meta.positions) != (count, "on"):
            raise ArgumentError(
                f"the cache is not that of {document.document_id!r}: give all of its tokens, at positions from {count}"
            )
        if cache.meta.config_digest() != self._config:
            ours = self._corpus.meta.model_id
            msg = f"the cache is of model {cache.meta.model_id!r}, the corpus of {ours!r}: name its corpus"
            raise MismatchError(msg)
        started, profile = time.perf_counter(), self._corpus.profile()
        if profile is not None and profile.prefix_layers:
            msg = "the profile in use is for readers that run the model's first layers: encode with Corpus.encode"
            raise MismatchError(msg)
        return self.known(document, profile, computed=True) or self.put(
            document, Computed(cache, opening, opening=count), profile, started
        )

    def put(self, document: Document, computed: Computed, profile: AnyProfile | None, started: float) -> Encoded:
        """Code and write a computed document."""
        blob, info = self.code(computed, profile)
        entry = self.write(document, blob, info, profile)
        return Encoded(entry, info, skipped=False, encode_s=time.perf_counter() - started)

    def write(
        self, document: Document, blob: bytes, info: BlobInfo, profile: AnyProfile | None, etag: str | None = None
    ) -> CatalogEntry:
        """Write text and blob, then the entry."""
        self._catalog.texts.put(self._config, document.token_ids, document_id=document.document_id, overwrite=True)
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
            overwrite=True,  # what exists was rejected
            etag=etag,
        )
        self._catalog.confirm(self._config, entry, document.token_ids, profile)
        self._corpus.changes += 1
        return entry

    def keep_text(self, document: Document) -> Encoded:
        """Store only the text; leaves alone a document with the same text, or with a blob of an older profile."""
        name, ids, entry = document.document_id, document.token_ids, None
        with suppress(CorruptError):
            entry = self._catalog.by_document(self._config, name)
        is_there = entry is not None and entry.token_digest == digest_tokens(ids)
        if entry is not None and is_there:
            self._catalog.texts.put(self._config, ids, document_id=name)
        else:
            entry = self._catalog.add_text(self._config, name, ids)
        self._corpus.changes += 1
        return Encoded(entry, None, skipped=is_there, encode_s=0.0)

    def publish(self, profile: AnyProfile | None) -> None:
        """Write the model's record, which ``open`` reads, if it is missing."""
        engine = self.engine
        digest = profile.digest if profile else ""
        self._catalog.models.put(ModelRecord(engine.meta, engine.window, engine.model_config_digest, digest))

    def _profile_for(self, texts: Callable[[], Sequence[Document]], *, force: bool) -> AnyProfile | None:
        """The profile in use; a new one if it is missing, lost, or fitted on too little or without BOS.

        A damaged one is replaced only with ``force``: other readers may see it whole.
        """
        try:
            profile = read_whole(self._corpus.profile())  # damage must show before anything is written
        except NotFoundError:
            profile = None
        except CorruptError:
            if not force:
                raise
            profile = None
        if profile is not None and not self._is_wanted(profile):
            raise MismatchError(
                "the profile in use here is of another method or prefix layers, or of other soft tokens; encode with "
                "those, name another tenant or store, or call Corpus.calibrate to replace it"
            )
        noted = 0 if profile is None else profile.notes.get("tokens")
        seen = noted if type(noted) is int else ENOUGH_TOKENS
        is_old = profile is not None and self.calibration.opens > 0 and not profile.notes.get("opening")
        if profile is not None and seen >= ENOUGH_TOKENS and not is_old:
            return profile
        if is_old:
            self._tell_old()
        if profile is None:
            self.publish(None)  # a store that takes no writes fails before minutes of fitting
        documents, kind = texts(), self.coding.kind
        enough = min(seen, ENOUGH_TOKENS) if is_old else 2 * seen  # a few lines do not replace a fit on many texts
        if profile is None or self.calibration.tokens_to_fit_on(documents) >= enough:
            profile = self.calibrate(documents) or profile
        if profile is None and kind.needs_profile and documents:
            needs = f"needs a profile, and that {LEAST_TOKENS} tokens at least; encode more text first"
            raise ArgumentError(f"{kind.title}'s method {needs}")
        return profile

    def _tell_old(self) -> None:
        """Log once that new documents are computed after a BOS, and older ones were not."""
        if not self._has_told:
            _log.warning("documents here were %s (those that are encoded now are done by that)", WITHOUT)
        self._has_told = True

    def _is_wanted(self, profile: AnyProfile) -> bool:
        """Whether a profile matches the encoding options."""
        soft = self.soft_tokens
        is_soft = profile.notes.get("soft_tokens", "") == (soft.digest if soft else "")
        return is_soft and self.coding.kind.is_wanted(profile, self.coding)

    def _is_coded_so(self, info: BlobInfo, token_ids: Sequence[int] | None) -> bool:
        """Whether a blob has the levels and chunks that encoding would give. token_ids: None: computed alone."""
        coding = self.coding
        if token_ids is not None and lacks_opening(self.engine, info, token_ids):
            self._tell_old()
            return False
        if token_ids is not None and coding.neutral_prefix:
            is_behind = info.neutral_prefix == neutral_prefix(self.engine, token_ids, coding.neutral_prefix)
        else:
            is_behind = len(info.neutral_prefix) == info.opening
        is_measured = info.deviation is not None or not coding.deviation
        is_exact = any(level.lossless for level in info.levels) or not coding.lossless
        has_all = is_behind and is_measured and is_exact and info.soft_tokens == self.soft_tokens
        return has_all and coding.kind.has_levels(info, coding) and info.chunk_tokens == coding.chunk_tokens
