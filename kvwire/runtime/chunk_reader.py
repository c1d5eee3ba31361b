"""Reads chunks of documents by chained hash, for caches that know nothing else of a prompt."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from kvwire.codec import BlobDecoder, level_index
from kvwire.errors import ArgumentError, KvwireError, MismatchError, NotFoundError
from kvwire.reuse import link
from kvwire.runtime.adapters import FINEST, LOSSLESS
from kvwire.runtime.corpus_reader import pieces_of
from kvwire.store.listing import ahead
from kvwire.store.prefix.index import opening_of
from kvwire.types import digest_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch

    from kvwire.codec import AnyProfile
    from kvwire.codec.format.header import Header
    from kvwire.runtime.adapters import ChunkSettings
    from kvwire.runtime.corpus import Corpus
    from kvwire.store import CatalogEntry, PrefixHit
    from kvwire.store.crypto.sealing import BlobReader
    from kvwire.types import BlobInfo, KVCache

log = logging.getLogger("kvwire")
GROUP = 16
"""Hashes looked up at once; a prompt's first chunk goes alone, since most prompts have none stored."""
_READERS = 8
_HITS, _BLOBS, _TOLD, _LOOKED_AT = 1 << 16, 64, 256, 64


class Troubles:
    """Logs each problem once."""

    def __init__(self, tell: Callable[[str], None] = log.warning) -> None:
        """Start with nothing logged."""
        self._tell, self._told, self._lock = tell, set[str](), Lock()
        self.count = 0

    def tell(self, trouble: str) -> None:
        """Log a problem, unless it was logged before."""
        with self._lock:
            self.count += 1
            is_new = trouble not in self._told and len(self._told) < _TOLD
            self._told.add(trouble) if is_new else None
        if is_new:
            self._tell(trouble)


@dataclass(frozen=True, eq=False)
class _Blob:
    """A blob with a parsed header, as plain and as stored bytes, and the level to serve."""

    document: CatalogEntry
    reader: BlobReader
    header: Header
    info: BlobInfo
    profile: AnyProfile | None
    level: int


class ChunkReader:
    """Reads chunks of one model's documents at one level; every failure is a miss. Thread-safe.

    Attributes:
        corpus: Corpus of the documents.
        troubles: Logs what goes wrong.
    """

    def __init__(self, corpus: Corpus, scheme: str, settings: ChunkSettings, troubles: Troubles | None = None) -> None:
        """Do not read yet."""
        self.corpus, self.troubles = corpus, troubles or Troubles()
        self._told_scheme = f"{scheme}:{settings.chunk_tokens}"
        self._index = corpus.index(self._told_scheme)
        self._level = None if settings.level == FINEST else settings.level
        self._hits: OrderedDict[bytes, PrefixHit] = OrderedDict()
        self._openings: dict[tuple[tuple[int, ...], torch.dtype | None], KVCache] = {}
        self._blobs: OrderedDict[str, _Blob] = OrderedDict()
        self._lock = Lock()
        self.bytes = self.chunks = 0

    @property
    def chunk_tokens(self) -> int:
        """Tokens per chunk."""
        return self._index.scheme.chunk_tokens

    def close(self) -> None:
        """Close the store."""
        self.corpus.catalog.store.close()

    def check_index(self, documents: int = 4) -> bool:
        """Check that some of the first documents of a chunk or more can be found; log if none can."""
        catalog, config = self.corpus.catalog, self.corpus.meta.config_digest()
        looked = 0
        try:
            for entry in catalog.documents(config, lambda *_: None, limit=_LOOKED_AT):
                if entry.is_text or entry.tokens < self.chunk_tokens:
                    continue
                ids = (*opening_of(self.corpus.read_header(entry)), *self.corpus.text(entry))
                hashes = self._index.scheme.hashes(ids[: self.chunk_tokens])
                if self._index.look_up(hashes) != [None]:
                    return True
                looked += 1
                if looked == documents:
                    break
        except KvwireError as error:
            self.troubles.tell(f"documents could not be looked at: {error}")
            return False
        if looked:
            self.troubles.tell(
                f"no document is found by {self._told_scheme}: kvwire store index --index {self._told_scheme}, "
                "with the engine's own tokens of a chunk"
            )
        return not looked

    def find(self, hashes: Sequence[bytes]) -> set[bytes]:
        """Look up hashes of one or several prompts, until a group of them is incomplete."""
        found: set[bytes] = set()
        unique = list(dict.fromkeys(hashes))
        at, size = 0, 1
        while at < len(unique):
            group = unique[at : at + size]
            here = self._look_up(group)
            found.update(here)
            if len(here) < len(group):
                break
            at, size = at + size, GROUP
        return found

    def read(self, hashes: Sequence[bytes], dtype: torch.dtype) -> Iterator[tuple[bytes, KVCache]]:
        """Fetch and decode chunks."""
        with self._lock:
            cached = {each: self._hits[each] for each in hashes if each in self._hits}
        if missing := [each for each in dict.fromkeys(hashes) if each not in cached]:
            cached |= self._look_up(missing)
        by_blob: dict[str, list[tuple[bytes, PrefixHit]]] = {}
        for each, hit in cached.items():
            by_blob.setdefault(_name(hit.document), []).append((each, hit))
        for hits in by_blob.values():
            hits.sort(key=lambda pair: pair[1].start)
            try:
                yield from self._decode(self._open(hits[0][1].document), hits, dtype)
            except KvwireError as error:
                self._forget(hits, error)

    def _look_up(self, hashes: Sequence[bytes]) -> dict[bytes, PrefixHit]:
        """Hits whose blobs can be opened; remembered."""
        found: dict[bytes, PrefixHit] = {}
        try:
            hits = self._index.look_up(hashes, self.troubles.tell)
        except KvwireError as error:
            self.troubles.tell(f"the index cannot be read: {error}")
            return found
        for each, hit in zip(hashes, hits, strict=True):
            if hit is None:
                continue
            try:
                self._open(hit.document)
            except KvwireError as error:
                self._forget([(each, hit)], error)
                continue
            found[each] = hit
        with self._lock:
            self._hits.update(found)
            while len(self._hits) > _HITS:
                self._hits.popitem(last=False)
        return found

    def _forget(self, hits: Iterable[tuple[bytes, PrefixHit]], error: KvwireError) -> None:
        for each, hit in hits:
            self.troubles.tell(f"document {hit.document.document_id!r} counts as a miss: {error}")
            with self._lock:
                self._hits.pop(each, None)
                self._blobs.pop(_name(hit.document), None)

    def _open(self, document: CatalogEntry) -> _Blob:
        """Read a blob's header, or recall it; raises KvwireError if the blob cannot serve chunks."""
        with self._lock:
            if (cached := self._blobs.get(_name(document))) is not None:
                self._blobs.move_to_end(_name(document))
                return cached
        catalog = self.corpus.catalog
        reader = catalog.blobs.reader(document)
        info = reader.read_header(catalog.blobs.get(document, 0, document.header_bytes))
        self.corpus.check_blob(info, document)
        level = self._level_of(info)
        if info.prefix_layers and not info.levels[level].lossless:
            msg = "it is coded for readers that run the model's first layers: encode it without prefix layers"
            raise MismatchError(msg)
        if info.context_level is not None and self._level is not None and info.context_level < level:
            msg = "rows of it were computed over a coarser level than the one to serve: compact the document"
            raise MismatchError(msg)
        header = reader.parsed
        if header is None or header.kept_bits or len(info.neutral_prefix) > info.opening or info.soft_tokens:
            msg = "it is pruned, or was computed behind a neutral prefix or with soft tokens: its rows begin no prompt"
            raise MismatchError(msg)
        if info.opening:
            self._opening_rows(opening_of(info), None)  # must exist before a hit is reported
        profile = self.corpus.profile_of(document, level)
        blob = _Blob(document, reader, header, info, profile, level)
        with self._lock:
            self._blobs[_name(document)] = blob
            while len(self._blobs) > _BLOBS:
                self._blobs.popitem(last=False)
        return blob

    def _level_of(self, info: BlobInfo) -> int:
        try:
            return level_index(info, self._level)
        except ArgumentError as error:
            way = "encode with --lossless, or serve another level" if self._level == LOSSLESS else "serve one of these"
            raise MismatchError(f"{error}; {way}") from error

    def _decode(
        self, blob: _Blob, hits: Sequence[tuple[bytes, PrefixHit]], dtype: torch.dtype
    ) -> Iterator[tuple[bytes, KVCache]]:
        """Chunks of one blob, from the document's first on, without those that fail."""
        info = blob.info
        head = info.opening
        spans = {each: info.chunks_of(max(0, hit.start - head), hit.stop - head) for each, hit in hits}
        decoder = BlobDecoder(
            blob.header, blob.profile, dtype=dtype, level=blob.level, max_tokens=self.corpus.window, offset=head
        )
        store, left, bad = self.corpus.catalog.store, list(hits), set[int]()
        needed = sorted({chunk for span in spans.values() for chunk in span})
        threads = 1 if store.is_local else _READERS
        for chunk, fetched in ahead(needed, lambda chunk: self._fetch(blob, chunk), threads):
            try:
                decoder.decode_chunk(chunk, fetched(), blob.level)
            except KvwireError as error:
                bad.add(chunk)
                self._forget([pair for pair in hits if chunk in spans[pair[0]]], error)
            while left and spans[left[0][0]][-1] <= chunk:
                each, hit = left.pop(0)
                if not bad.intersection(spans[each]):
                    with self._lock:
                        self.chunks += 1
                    stop = min(hit.stop - head, info.tokens)
                    rows = decoder.cache.slice(max(0, hit.start - head), stop)
                    if hit.start < head:
                        rows = link([self._opening_rows(opening_of(info), dtype), rows]).slice(hit.start, head + stop)
                    yield each, rows

    def _opening_rows(self, opening: tuple[int, ...], dtype: torch.dtype | None) -> KVCache:
        """Rows of the BOS before documents; NotFoundError if the store has none."""
        with self._lock:
            if (cached := self._openings.get((opening, dtype))) is not None:
                return cached
        entry = self.corpus.catalog.by_tokens(self.corpus.meta.config_digest(), digest_tokens(opening))
        if entry is None or entry.is_text:
            raise NotFoundError("the rows of its BOS are not in the store: run kvwire encode again")
        rows = self.corpus.decode(entry.document_id, LOSSLESS, dtype=dtype)
        with self._lock:
            self._openings[opening, dtype] = rows
        return rows

    def _fetch(self, blob: _Blob, chunk: int) -> list[bytes]:
        """Fetch a chunk's contiguous segments as one range."""
        reads = blob.info.reads(chunk, blob.level)
        data = self.corpus.catalog.blobs.get(blob.document, reads[0].offset, reads[-1].end)
        with self._lock:
            self.bytes += len(data)
        return pieces_of(blob.reader, reads, data, reads[0].offset)


def _name(document: CatalogEntry) -> str:
    """Identity of a document's blob: if it has several parts, forks share the first."""
    return document.sha256 + (document.token_digest if document.parts else "")
