"""Documents that grow: appended tokens become a part of their own, and earlier parts stay.

A token's numbers depend only on tokens before it, and a chunk is coded without earlier ones, so old parts stay valid. A
part begins where the document ended, even inside a chunk: coding the last chunk again would cost more than shorter
chunks do, see docs/how-to/grow-a-document.md.
"""

from __future__ import annotations

import operator
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError, ConflictError, CorruptError, MismatchError, NotFoundError
from kvwire.runtime.coding import Computed, Document, Encoded, read_whole
from kvwire.runtime.prefill import compute_behind, states_of
from kvwire.store import check_new_name
from kvwire.store.prefix.index import opening_of
from kvwire.store.records import MAX_PART_HEADERS_BYTES, MAX_PARTS
from kvwire.types import BlobPrefix, digest_tokens
from kvwire.types.cache import plain_token_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.runtime.corpus_reader import CorpusReader
    from kvwire.runtime.encode import Encoder
    from kvwire.store import CatalogEntry
    from kvwire.types import BlobInfo, CacheMeta, KVCache


@dataclass(frozen=True)
class Grown:
    """A document as found, and its new content.

    etag: of the entry to replace; empty for a fork. level: see ``encode``'s ``context_level``.
    """

    entry: CatalogEntry
    etag: str
    info: BlobInfo
    name: str
    token_ids: tuple[int, ...]
    added: tuple[int, ...]
    level: int | None = None

    @property
    def whole(self) -> Document:
        """The document with its new content."""
        return Document(self.name, (*self.token_ids, *self.added))


class Grower:
    """Appends to documents of a corpus, for ``Corpus.append`` and ``Corpus.compact``."""

    def __init__(self, corpus: CorpusReader, encoder: Encoder) -> None:
        """Take the corpus and the steps that encode a whole document."""
        self._corpus, self._encoder = corpus, encoder
        self._catalog, self._config, self._coding = corpus.catalog, corpus.config, encoder.coding

    def append(
        self,
        document_id: str,
        token_ids: Sequence[int],
        *,
        after: int | None = None,
        cache: KVCache | None = None,
        fork: str = "",
    ) -> Encoded:
        """Append tokens to a document, as a part of its own if possible."""
        started = time.perf_counter()
        added = plain_token_ids(token_ids)
        if not added:
            raise ArgumentError(f"there is nothing to append to {document_id!r}: give at least one token")
        if after is None:
            return self.write(self._found(document_id, added, fork), cache, started)
        try:
            after = operator.index(after)
        except TypeError as error:
            msg = f"after is the number of tokens that the document has, got {after!r}: pass entry.tokens"
            raise ArgumentError(msg) from error
        if (done := self._done(document_id, added, fork, after)) is not None:
            return done
        try:
            grown = self._found(document_id, added, fork)
            if grown.entry.tokens == after:
                return self.write(grown, cache, started)
        except (ArgumentError, ConflictError):  # perhaps another writer appended the same tokens meanwhile
            if (done := self._done(document_id, added, fork, after)) is None:
                raise
            return done
        raise self._conflict(grown.entry, added, after)

    def _done(self, document_id: str, added: tuple[int, ...], fork: str, after: int) -> Encoded | None:
        """Result of an append that was done before; None if it is still to do.

        Raises ConflictError if the document ends neither after ``after`` tokens nor with the added ones after these.
        """
        source = self._corpus.find(document_id)
        entry = self._catalog.by_document(self._config, fork) if fork else source
        if entry is not None and not entry.is_text and entry.tokens == after + len(added):
            info = self._corpus.read_header(entry)
            ids = self._text(entry, info)
            if ids == (*(ids if entry is source else self._text(source))[:after], *added):
                return Encoded(entry, info, skipped=True, encode_s=0.0)
        if source.tokens != after:
            raise self._conflict(source, added, after)
        return None

    def _text(self, entry: CatalogEntry, info: BlobInfo | None = None) -> tuple[int, ...]:
        """A document's tokens, from its header if given."""
        return info.token_ids if info and info.token_ids is not None else self._corpus.text(entry)

    def _conflict(self, entry: CatalogEntry, added: tuple[int, ...], after: int) -> ConflictError:
        has = ""
        with suppress(CorruptError, NotFoundError):
            if self._text(entry)[after : after + len(added)] == added:
                has = ", those to append already among them"
        return ConflictError(
            f"{entry.document_id!r} has {entry.tokens} tokens{has}, and was to have {after} before (after, --after): "
            f"look at what it has; to continue there, append after {entry.tokens}"
        )

    def write(self, grown: Grown, cache: KVCache | None, started: float) -> Encoded:
        """Append, unless the document has changed since it was found."""
        if not takes_parts(grown):
            return self._written_anew(grown, cache, started)
        self._corpus.changes += 1
        profile = read_whole(self._corpus.profile_of(grown.entry))
        computed = self._computed(grown, cache)
        prefix = BlobPrefix(len(grown.token_ids), digest_tokens(grown.token_ids), grown.name)
        blob, info = self._encoder.code(computed, profile, grown.level, grown.info.levels, prefix)
        self._check_alike(grown, info)
        entry = self._catalog.grown.append_part(
            self._config,
            grown.entry,
            grown.etag,
            blob,
            grown.added,
            document_id=grown.name,
            header_bytes=info.header_bytes,
            token_digest=digest_tokens(grown.whole.token_ids),
            levels=[(level.name, level.cumulative_bytes) for level in info.levels],
        )
        self._corpus.changes += 1
        return Encoded(entry, info, skipped=False, encode_s=time.perf_counter() - started)

    def compact(self, document_id: str) -> Encoded:
        """Encode a document of several parts again, as one blob."""
        started = time.perf_counter()
        grown = self._found(document_id, (), "")
        if not grown.entry.parts:
            return Encoded(grown.entry, grown.info, skipped=True, encode_s=0.0)
        return self._written_anew(grown, None, started)

    def _found(self, document_id: str, added: tuple[int, ...], fork: str) -> Grown:
        """Find the document, its header and its text."""
        name = check_new_name(fork or document_id, "document")
        entry, etag = self._catalog.grown.version(self._config, document_id)
        if entry is None:
            entry = self._corpus.find(document_id)
        if entry.is_text:
            msg = f"{document_id!r} is kept as text: encode the longer text under its name, and then append"
            raise ArgumentError(msg)
        if fork:
            etag = self._catalog.grown.version(self._config, fork).etag
            if etag:
                raise ArgumentError(f"there is a document {fork!r} already: fork {document_id!r} under another name")
        info = self._corpus.read_header(entry)
        self._corpus.check_blob(info, entry)
        if info.soft_tokens or self._coding.layout.cached_tokens:
            msg = f"{document_id!r} has a layout's tokens in its cache, and more cannot follow them: encode it again"
            raise ArgumentError(msg)
        behind, window = info.opening, self._corpus.window
        if behind + entry.tokens + len(added) > window:
            raise ArgumentError(
                f"{document_id!r} has {entry.tokens} tokens and would have {entry.tokens + len(added)}; the model's "
                f"window is {window - behind}: append less, or begin another document"
            )
        return Grown(entry, etag, info, name, self._text(entry, info), added)

    def _computed(self, grown: Grown, cache: KVCache | None) -> Computed:
        """Run the model over the appended tokens."""
        before, ids, info = len(grown.token_ids), grown.whole.token_ids, grown.info
        behind = len(info.neutral_prefix)
        if cache is None:
            engine = self._encoder.engine
            if behind > info.opening:
                cache = compute_behind(engine, info.neutral_prefix, ids)
            else:
                (whole,) = engine.prefill([(*info.neutral_prefix, *ids)])
                cache = whole.slice(behind, whole.tokens) if behind else whole
        else:
            _check_cache(cache, grown, self._config)
        part = cache.slice(before, len(ids)) if cache.tokens > len(grown.added) else cache
        part = replace(part, meta=self._alike(part, info))
        layers = info.prefix_layers
        hidden = states_of(self._encoder.engine, ids, layers, opening_of(info))[before:] if layers else None
        beginning = self._encoder.engine.prefill([ids[:1]])[0] if info.can_begin and not before else None
        return Computed(part, info.neutral_prefix, hidden, opening=info.opening, beginning=beginning)

    def _alike(self, part: KVCache, info: BlobInfo) -> CacheMeta:
        """The part's metadata, like that of the other parts."""
        is_exact = any(level.lossless for level in info.levels)
        if is_exact and part.meta.dtype != info.meta.dtype:
            raise MismatchError(
                f"the document holds numbers of {info.meta.dtype} bit for bit, what is appended is {part.meta.dtype}: "
                f"open the engine with --dtype {info.meta.dtype}"
            )
        own = part.meta
        return replace(info.meta, positions=own.positions, offset=own.offset, token_digest=own.token_digest)

    def _check_alike(self, grown: Grown, info: BlobInfo) -> None:
        """Refuse a part that could not be read with the others, before it is written."""
        ours, theirs = (
            [(level.name, level.step, level.lossless) for level in each.levels] for each in (grown.info, info)
        )
        if ours != theirs or info.profile_digest != grown.entry.profile_digest:
            raise MismatchError(
                f"{grown.entry.document_id!r} is coded in another way than its profile gives now: encode the whole "
                "document anew (kvwire append --compact)"
            )

    def _written_anew(self, grown: Grown, cache: KVCache | None, started: float) -> Encoded:
        """Encode the whole document as one blob, as ``encode`` would now."""
        whole, profile = grown.whole, read_whole(self._corpus.profile())
        if cache is not None and cache.token_ids != whole.token_ids:
            cache = None
        if cache is not None:
            _check_cache(cache, grown, self._config)
        if len(grown.info.neutral_prefix) > grown.info.opening:
            computed = self._computed(replace(grown, token_ids=(), added=whole.token_ids), cache)
        else:
            computed = self._encoder.compute(whole, profile, cache=cache, neutral_tokens=0)
        blob, info = self._encoder.code(computed, profile)
        entry = self._encoder.write(whole, blob, info, profile, etag=grown.etag)
        return Encoded(entry, info, skipped=False, encode_s=time.perf_counter() - started)


def takes_parts(grown: Grown) -> bool:
    """Whether the document can have parts, and one more.

    A profile inside a blob is that blob's own. The next header's length is not known: half of the room stays free.
    """
    entry, info = grown.entry, grown.info
    has_room = len(entry.parts) < MAX_PARTS and 2 * entry.header_bytes <= MAX_PART_HEADERS_BYTES
    return has_room and (bool(info.profile_digest) or all(level.lossless for level in info.levels))


def _check_cache(cache: KVCache, grown: Grown, config: str) -> None:
    """Refuse a cache of other tokens, or of another model."""
    before, behind = len(grown.token_ids), len(grown.info.neutral_prefix)
    at = {grown.whole.token_ids: behind, grown.added: behind + before}
    if cache.token_ids not in at or (cache.meta.offset, cache.meta.positions) != (at[cache.token_ids], "on"):
        raise ArgumentError(
            f"the cache is not that of {grown.entry.document_id!r}: give its tokens with those that are appended, at "
            f"positions from {behind}, or these alone, from {behind + before}"
        )
    if cache.meta.config_digest() != config:
        raise MismatchError(f"the cache is of model {cache.meta.model_id!r}, the document of another: name its corpus")
