"""A corpus for readers: documents of one model in a store, to look up and decode."""

from __future__ import annotations

from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any, Self

from kvwire._forks import lock_of_process
from kvwire.codec import BlobDecoder, level_index
from kvwire.errors import ArgumentError, CorruptError, KvwireError, MismatchError, NotFoundError
from kvwire.runtime.reports import EditReport, LinkReport

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence
    from concurrent.futures import Future

    import torch

    from kvwire.codec import AnyProfile
    from kvwire.engines.base import Engine
    from kvwire.reuse import LinkShift
    from kvwire.runtime.prefetch import Prefetch
    from kvwire.store import Catalog, CatalogEntry, DonorIndex, ModelRecord, PrefixIndex, Store, UseCounts
    from kvwire.store.crypto.sealing import BlobReader
    from kvwire.types import BlobInfo, CacheMeta, KVCache, SegmentInfo

_ALL_LEVELS = 1 << 30


def pieces_of(reader: BlobReader, reads: Sequence[SegmentInfo], data: bytes, first: int = 0) -> list[bytes]:
    """Segments, checked, out of stored bytes that begin at the blob's byte ``first``."""
    parts = [data[each.offset - first : each.end - first] for each in reads]
    return [reader.check(*read) for read in zip(reads, parts, strict=True)] if reader.check else parts


class CorpusReader:
    """Documents of one model and one tenant in a store; ``Corpus`` is the class to open.

    Attributes:
        catalog: Finds entries, texts and profiles.
        config: Digest of the model's cache layout, part of all keys.
        uses: Counts loads; None: not counted.
        scope: Name under which loads are counted.
        changes: Number of writes by this object; cached entries are older.
    """

    def __init__(self, model: Engine | ModelRecord, catalog: Catalog, uses: UseCounts | None) -> None:
        """Keep the parts; nothing is read."""
        self._model, self.catalog, self.uses = model, catalog, uses
        self.config = model.meta.config_digest()
        self.scope = catalog.keys(self.config).root
        self._origin = catalog  # lazy reads of a profile outlive the session that began it
        self._profiles: dict[tuple[str, tuple[int, str] | None], AnyProfile] = {}  # by digest and outline
        self._reading: dict[str, threading.Lock] = {}
        self.changes = 0

    def over(self, store: Store) -> Self:
        """The same corpus over another store object; both share their profiles."""
        other = copy(self)
        other.catalog = self.catalog.over(store)
        return other

    @property
    def meta(self) -> CacheMeta:
        """The model's cache layout."""
        return self._model.meta

    @property
    def window(self) -> int:
        """Longest prompt of the model in tokens."""
        return self._model.window

    @property
    def model_config_digest(self) -> str:
        """SHA-256 of the model's configuration file; empty if not known."""
        return self._model.model_config_digest

    def decode(
        self,
        document_id: str,
        level: int | str | None = None,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        offset: int | None = 0,
        first: int = 0,
        begins: bool | None = None,
    ) -> KVCache:
        """Decode a document's blob, or its parts, without an engine.

        Leaving out first tokens makes it shorter and moves it, but its numbers still come from all of it: later tokens
        see what they would see of the whole with the first tokens masked.

        Args:
            document_id: The document's name in the catalog.
            level: Index (negative counts from the last), name, or None for the finest that is not lossless.
            device: Device of the output.
            dtype: Of the output; None: the encoded cache's.
            offset: Position of the first remaining token; None leaves positions off.
            first: Number of first tokens to leave out, as a chat does that outgrows its window.
            begins: Whether the document is first in its prompt, see ``BlobInfo.can_begin``; None: if ``offset`` is 0.
                Use False for linking behind others.

        Returns:
            The cache.

        Raises:
            NotFoundError: There is no such document, or only its text is stored.
            ArgumentError: There is no such level, or no token is left.
            CorruptError: The blob is damaged.
            MismatchError: It needs the first layers of the model, which only an engine can run.
        """
        entry = self.find(document_id)
        if entry.is_text:
            raise NotFoundError(f"{document_id!r} is kept as text: it has no blob to decode; encode it")
        reader, stored = self.catalog.blobs.reader(entry), self.catalog.blobs.get(entry)
        info = reader.read_header(stored)
        self.check_blob(info, entry)
        index = level_index(info, level)
        if info.prefix_layers and not info.levels[index].lossless:
            msg = f"{document_id!r} is coded for readers that run the model's first layers: ask a Loader with an engine"
            raise MismatchError(msg)
        if not 0 <= first < info.tokens:
            msg = f"{document_id!r} has {info.tokens} tokens: leave out 0 to {info.tokens - 1} of them, not {first}"
            raise ArgumentError(msg)
        profile, at = self.profile_of(entry, index), None if offset is None else offset - first
        decoder = BlobDecoder(
            reader.parsed or b"",
            profile,
            device=device,
            dtype=dtype,
            offset=at,
            level=index,
            begins=at == 0 if begins is None else begins,
        )
        for chunk in info.chunks_of(first, info.tokens):
            decoder.decode_chunk(chunk, pieces_of(reader, info.reads(chunk, index), stored), index)
        return decoder.cache.slice(first, info.tokens) if first else decoder.cache

    def prefetch(self, documents: Sequence[str], level: int | str | None = None) -> Prefetch:
        """Fetch documents that will be read soon into the store's cache.

        Headers are read at once, chunks in the background while nobody reads through the cache, and nothing is decoded.

        Args:
            documents: Their names.
            level: The finest level that will be read: index, name, or None for the finest that is not lossless.

        Returns:
            Waits for the fetches, or cancels them.

        Raises:
            ArgumentError: The store has no cache, or there is no such level.
            NotFoundError: There is no such document.
        """
        store: Any = self.catalog.store
        if not hasattr(store, "prefetch"):
            msg = "what is fetched ahead needs a cache to lie in: open the store with one (open_tiers, --cache)"
            raise ArgumentError(msg)
        from kvwire.runtime.prefetch import Prefetch  # few programs need it

        hints: list[Future[bool]] = []
        for entry in map(self.find, documents):
            if entry.is_text:
                continue
            keys = self.catalog.blobs.of(entry)
            if len(keys) > 1 or self.catalog.blobs.is_sealed:  # a header has the offsets of one plain blob
                hints += [store.prefetch(key) for key in keys]
                continue
            info = self.read_header(entry)
            index = level_index(info, level)
            merged: list[tuple[int, int]] = []
            for reads in (info.reads(chunk, index) for chunk in range(info.chunks)):
                start, end = reads[0].offset, reads[-1].end
                if merged and merged[-1][1] == start:
                    start = merged.pop()[0]
                merged.append((start, end))
            hints += [store.prefetch(entry.blob_key, start, end) for start, end in merged]
        return Prefetch(hints)

    def profile(
        self, digest: str | None = None, *, outline: tuple[int, str] | None = None, level: int | None = None
    ) -> AnyProfile | None:
        """Look up a profile; cached.

        With its outline, only the sections for levels up to ``level`` are read, and the rest when needed.

        Args:
            digest: Of a stored profile; None: the one in use.
            outline: See ``CatalogEntry.profile_outline``; the catalog knows it for the one in use.
            level: Finest level to read at once; None: all that decoding needs.

        Returns:
            The profile; None if the corpus has none in use yet.

        Raises:
            NotFoundError: The profile is lost.
            CorruptError: The profile is damaged.
        """
        if digest is None:
            digest, outline = self.catalog.profiles.in_use(self.config) or (None, None)
        if not digest:
            return None
        if (known := self._profiles.get((digest, outline))) is not None:
            return known
        # Concurrent look-ups share one read.
        with self._reading.setdefault(digest, lock_of_process()):
            if (known := self._profiles.get((digest, outline))) is None:
                known = self._profiles[digest, outline] = self.catalog.profiles.open(
                    self.config, digest, outline, _ALL_LEVELS if level is None else level, self._origin.profiles
                )
            return known

    def profile_of(self, entry: CatalogEntry, level: int | None = None) -> AnyProfile | None:
        """Look up a document's profile; None if its blob needs none, or has its own. See ``profile``."""
        if not entry.profile_digest:
            return None
        return self.profile(entry.profile_digest, outline=entry.profile_outline, level=level)

    def known_profile(self, entry: CatalogEntry) -> AnyProfile | None:
        """A document's profile if cached, else None."""
        return self._profiles.get((entry.profile_digest, entry.profile_outline)) if entry.profile_digest else None

    def set_profile(self, profile: AnyProfile) -> None:
        """Store a profile that fits the model, and use it for encoding from now on."""
        profile.check_fits(self.meta)
        self.changes += 1
        digest = self.catalog.profiles.put(self.config, profile.data)
        self.catalog.profiles.set_current(self.config, digest, profile.outline)
        self._profiles |= {(digest, outline): profile for outline in (None, profile.outline)}

    def link_report(self) -> LinkReport | None:
        """Report of ``kvwire check-model`` on this model's links; None if it was not run.

        Raises:
            CorruptError: It is damaged.
        """
        data = self.catalog.models.link_report(self.config)
        return None if data is None else LinkReport.of_json(data)

    def set_link_report(self, report: LinkReport) -> None:
        """Store a report on this model's links, for all loads."""
        self.catalog.models.put_link_report(self.config, report.to_json())
        self.changes += 1

    def edit_report(self) -> EditReport | None:
        """Report of ``kvwire check-model --edits`` on this model; None if it was not run.

        Raises:
            CorruptError: It is damaged.
        """
        data = self.catalog.objects.read(self.catalog.keys(self.config).edit_report)
        return None if data is None else EditReport.of_json(data)

    def set_edit_report(self, report: EditReport) -> None:
        """Store a report on edited caches, for all loads."""
        self.catalog.objects.write(self.catalog.keys(self.config).edit_report, report.to_json())
        self.changes += 1

    def link_shift(self, digest: str) -> LinkShift:
        """Read the mean shift of this model.

        Args:
            digest: From the report on links.

        Returns:
            The shift.

        Raises:
            NotFoundError: It is lost.
            CorruptError: It is damaged.
            FormatVersionError: A later version wrote it.
            MismatchError: It is of another model.
        """
        from kvwire.reuse import LinkShift  # few models have one

        shift = LinkShift.of_bytes(self.catalog.models.link_shift(self.config, digest))
        shift.check_fits(self.meta)
        return shift

    def set_link_shift(self, shift: LinkShift) -> None:
        """Store a mean shift; set a report on links that names it afterwards, or it is unused and collected."""
        shift.check_fits(self.meta)
        self.catalog.models.put_link_shift(self.config, shift.data)
        self.changes += 1

    def index(self, scheme: str = "kvwire") -> PrefixIndex:
        """The index that finds documents by a prompt's beginning.

        Args:
            scheme: Hash scheme: ``kvwire``, ``lmcache`` or ``sglang``, with an unusual number of tokens per chunk after
                a colon.

        Returns:
            The index, which caches texts, so make it once.

        Raises:
            ArgumentError: There is no such scheme.
        """
        from kvwire.store import PrefixIndex  # most loads need none

        return PrefixIndex(self.catalog, self.config, scheme)

    def donors(self, writer: str = "") -> DonorIndex:
        """The index that finds documents similar to a prompt.

        Args:
            writer: Namespace inside the tenant, whose documents only this writer finds. Empty: the whole tenant's.

        Returns:
            The index, which caches texts, so make it once.
        """
        from kvwire.store import DonorIndex  # most loads need none

        return DonorIndex(self.catalog, self.config, writer)

    def indexes(self, schemes: Sequence[str]) -> list[PrefixIndex | DonorIndex]:
        """The indexes of several schemes, which may include ``donors``."""
        from kvwire.store import DONORS

        return [self.donors() if scheme == DONORS else self.index(scheme) for scheme in schemes]

    def count_use(self, document_id: str) -> None:
        """Count one use of a document, if uses are counted. Errors are ignored: they cost a count, not an answer."""
        if self.uses is not None:
            with suppress(KvwireError):
                self.uses.add(self.scope, document_id)

    def text(self, entry: CatalogEntry) -> tuple[int, ...]:
        """Token ids of a document, stored next to its blob.

        Raises:
            NotFoundError: The text is lost.
            CorruptError: The text is damaged.
        """
        if not entry.token_digest:
            raise NotFoundError(f"the text of {entry.document_id!r} is not known: encode the document again")
        return self.catalog.texts.of(self.config, entry)

    def read_header(self, entry: CatalogEntry) -> BlobInfo:
        """Header of an entry's blob.

        Raises:
            NotFoundError: Only the text is stored.
        """
        if entry.is_text:
            msg = f"{entry.document_id!r} is kept as text: it has no blob; kvwire store stat shows its entry"
            raise NotFoundError(msg)
        return self.catalog.blobs.header(entry)

    def find(self, document_id: str) -> CatalogEntry:
        """Find a document's entry.

        Raises:
            NotFoundError: The catalog has no such document; the message says how to encode it.
        """
        entry = self.catalog.by_document(self.config, document_id)
        if entry is None:
            msg = (
                f"document {document_id!r} is not in {self.catalog.store.url} for model {self.meta.model_id!r} "
                f"(weights and configuration {self.meta.model_revision[:12] or 'unnamed'}, tokenizer "
                f"{self.meta.tokenizer_digest[:12] or 'none'}); encode it first (kvwire encode), with this very model, "
                "and check the tenant"
            )
            if self.catalog.store.url.startswith("http"):
                msg += ". A web server shows only what was encoded into file:///its/folder?catalog=files"
            if self.catalog.store.url.startswith("s3:"):
                msg += ", and that the bucket is there"
            raise NotFoundError(msg)
        return entry

    def check_blob(self, info: BlobInfo, entry: CatalogEntry) -> None:
        """Refuse a blob other than the entry's, or with more tokens than the model takes.

        Args:
            info: The blob's header.
            entry: The entry that names the blob.

        Raises:
            MismatchError: The blob is of another model.
            CorruptError: The blob does not match its entry, or is no cache of the model.
        """
        names = (entry.token_digest, entry.tokens, entry.size, entry.profile_digest, None)
        if names != (info.meta.token_digest, info.tokens, info.file_bytes, info.profile_digest, info.prefix):
            msg = f"the blob of {entry.document_id!r} is not the one that the catalog names; encode the document again"
            raise CorruptError(msg)
        theirs, ours = info.meta, self.meta
        if not theirs.shares_config(ours):
            raise MismatchError(
                f"the blob was encoded by model {theirs.model_id!r} ({theirs.model_revision[:12] or 'unnamed'}), "
                f"this is {ours.model_id!r} ({ours.model_revision[:12] or 'unnamed'}); "
                "encode the document with this model"
            )
        if info.tokens > self.window:
            raise CorruptError(
                f"the blob of {entry.document_id!r} claims {info.tokens} tokens, the model's window is "
                f"{self.window}; split the document and encode it again"
            )
