"""A corpus as readers see it: documents of one model in a store, looked up and decoded."""

from __future__ import annotations

from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any, Self

from kvwire._forks import lock_of_process
from kvwire.codec import BlobDecoder, level_index
from kvwire.errors import ArgumentError, CorruptError, KvwireError, MismatchError, NotFoundError
from kvwire.runtime.link_report import LinkReport

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    import torch

    from kvwire.codec import AnyProfile
    from kvwire.engines.base import Engine
    from kvwire.reuse import LinkShift
    from kvwire.runtime.edit_report import EditReport
    from kvwire.store import Catalog, CatalogEntry, DonorIndex, ModelRecord, PrefixIndex, Store, UseCounts
    from kvwire.types import BlobInfo, CacheMeta, KVCache

_ALL_LEVELS = 1 << 30


class CorpusReader:
    """Documents of one model and one tenant in a store, to look up and decode; ``Corpus`` is the class to open.

    Attributes:
        catalog: Where entries, texts and profiles are found.
        config: Digest of the model's cache layout, under which the catalog keeps all of this.
        uses: Where loads are counted; None where they are not.
        scope: Under which name loads are counted.
        changes: How often this object wrote anything; kept entries are older than that.
    """

    def __init__(self, model: Engine | ModelRecord, catalog: Catalog, uses: UseCounts | None) -> None:
        """Keep the parts; nothing is read yet."""
        self._model, self.catalog, self.uses = model, catalog, uses
        self.config = model.meta.config_digest()
        self.scope = catalog.keys(self.config).root
        self._origin = catalog  # later reads of a profile outlive the session that read its first sections
        self._profiles: dict[tuple[str, tuple[int, str] | None], AnyProfile] = {}  # by digest and outline
        self._reading: dict[str, threading.Lock] = {}
        self.changes = 0

    def over(self, store: Store) -> Self:
        """The same corpus, read and written through another store object; both share their profiles."""
        other = copy(self)
        other.catalog = self.catalog.over(store)
        return other

    @property
    def meta(self) -> CacheMeta:
        """The model's cache layout."""
        return self._model.meta

    @property
    def window(self) -> int:
        """Most tokens that a prompt of the model may hold."""
        return self._model.window

    @property
    def model_config_digest(self) -> str:
        """SHA-256 of the model's own configuration file; empty where it is not known."""
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
        """Read a document's blob, or its parts, and decode it; no engine is needed.

        Without its first tokens, a document is shorter and stands elsewhere, and its numbers still come from all of
        it: what follows sees what it would see of the whole with these tokens masked.

        Args:
            document_id: The document's name in the catalog.
            level: Index (negative counts from the last), name, or None for the finest that is not lossless.
            device: Where the output lies.
            dtype: Of the output; None: the one that the cache was encoded from.
            offset: Position of the first token that is kept; None leaves positions off.
            first: How many tokens to leave out at the front, as a chat does that outgrows its window.
            begins: Whether nothing stands before the document in its prompt, see ``BlobInfo.can_begin``; None: where
                ``offset`` is 0. Say no to what is linked behind others.

        Returns:
            The cache.

        Raises:
            NotFoundError: There is no such document, or only its text is kept.
            ArgumentError: There is no such level, or no token is left.
            CorruptError: The blob is damaged.
            MismatchError: It needs the first layers of the model, which only an engine can run.
        """
        entry = self.find(document_id)
        if entry.is_text:
            msg = f"{document_id!r} is kept as text: it has no blob to decode; encode it"
            raise NotFoundError(msg)
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
            reads = [(each, stored[each.offset : each.end]) for each in info.reads(chunk, index)]
            segments = [reader.check(*read) if reader.check else read[1] for read in reads]
            decoder.decode_chunk(chunk, segments, index)
        return decoder.cache.slice(first, info.tokens) if first else decoder.cache

    def prefetch(self, documents: Sequence[str], level: int | str | None = None) -> None:
        """Hint that documents will be loaded soon: a store with a cache fetches them in the background.

        Args:
            documents: Their names.
            level: The finest level that will be read: index, name, or None for the finest that is not lossless.

        Raises:
            ArgumentError: The store has no cache, or there is no such level.
            NotFoundError: There is no such document.
        """
        store: Any = self.catalog.store
        if not hasattr(store, "prefetch"):
            msg = "what is fetched ahead needs a cache to lie in: open the store with one (open_tiers, --cache)"
            raise ArgumentError(msg)
        for entry in map(self.find, documents):
            if entry.is_text:
                continue
            keys = self.catalog.blobs.of(entry)
            if len(keys) > 1 or self.catalog.blobs.is_sealed:  # a header has the offsets of one plain blob
                for key in keys:
                    store.prefetch(key)
                continue
            info = self.read_header(entry)
            index = level_index(info, level)
            merged: list[tuple[int, int]] = []
            for reads in (info.reads(chunk, index) for chunk in range(info.chunks)):
                start, end = reads[0].offset, reads[-1].end
                if merged and merged[-1][1] == start:
                    start = merged.pop()[0]
                merged.append((start, end))
            for start, end in merged:
                store.prefetch(entry.blob_key, start, end)

    def profile(
        self, digest: str | None = None, *, outline: tuple[int, str] | None = None, level: int | None = None
    ) -> AnyProfile | None:
        """Look up a profile; what was read is kept.

        Where its outline is known, what levels up to ``level`` need is read, and the rest once something needs it.

        Args:
            digest: Of a stored profile; None for the one in use.
            outline: See ``CatalogEntry.profile_outline``; of the one in use, the catalog knows.
            level: Up to which level to read at once; None: all that decoding needs.

        Returns:
            The profile; None where the corpus has none in use yet.

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
        # Documents that are looked up at the same time share a reading.
        with self._reading.setdefault(digest, lock_of_process()):
            if (known := self._profiles.get((digest, outline))) is None:
                known = self._profiles[digest, outline] = self.catalog.profiles.open(
                    self.config, digest, outline, _ALL_LEVELS if level is None else level, self._origin.profiles
                )
            return known

    def profile_of(self, entry: CatalogEntry, level: int | None = None) -> AnyProfile | None:
        """Look up the profile of a document; None where its blob needs none, or has its own. See ``profile``."""
        if not entry.profile_digest:
            return None
        return self.profile(entry.profile_digest, outline=entry.profile_outline, level=level)

    def known_profile(self, entry: CatalogEntry) -> AnyProfile | None:
        """The profile of a document where it was read before; None elsewhere."""
        return self._profiles.get((entry.profile_digest, entry.profile_outline)) if entry.profile_digest else None

    def set_profile(self, profile: AnyProfile) -> None:
        """Store a profile that fits the model, and use it for what is encoded from now on."""
        profile.check_fits(self.meta)
        self.changes += 1
        digest = self.catalog.profiles.put(self.config, profile.data)
        self.catalog.profiles.set_current(self.config, digest, profile.outline)
        self._profiles |= {(digest, outline): profile for outline in (None, profile.outline)}

    def link_report(self) -> LinkReport | None:
        """What ``kvwire check-model`` measured of this model's links; None where it was not run.

        Raises:
            CorruptError: It is damaged.
        """
        data = self.catalog.models.link_report(self.config)
        return None if data is None else LinkReport.of_json(data)

    def set_link_report(self, report: LinkReport) -> None:
        """Keep what was measured of this model's links, for all who load."""
        self.catalog.models.put_link_report(self.config, report.to_json())
        self.changes += 1

    def edit_report(self) -> EditReport | None:
        """What ``kvwire check-model --edits`` measured of this model; None where it was not run.

        Raises:
            CorruptError: It is damaged.
        """
        from kvwire.runtime.edit_report import EditReport  # few loads need it

        data = self.catalog.objects.read(self.catalog.keys(self.config).edit_report)
        return None if data is None else EditReport.of_json(data)

    def set_edit_report(self, report: EditReport) -> None:
        """Keep what was measured of edited caches, for all who load."""
        self.catalog.objects.write(self.catalog.keys(self.config).edit_report, report.to_json())
        self.changes += 1

    def link_shift(self, digest: str) -> LinkShift:
        """What is added to linked documents of this model.

        Args:
            digest: As the report on links names it.

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
        """Keep a shift; it is used, and stays, while the report on links names it, which is set afterwards."""
        shift.check_fits(self.meta)
        self.catalog.models.put_link_shift(self.config, shift.data)
        self.changes += 1

    def index(self, scheme: str = "kvwire") -> PrefixIndex:
        """The index by which prompts find the documents that they begin with.

        Args:
            scheme: How prompts are hashed: ``kvwire``, ``lmcache`` or ``sglang``, with the tokens of a chunk behind a
                colon where they are not the usual ones.

        Returns:
            The index, which keeps the texts that it read of late: to be made once.

        Raises:
            ArgumentError: There is no such scheme.
        """
        from kvwire.store import PrefixIndex  # most need none

        return PrefixIndex(self.catalog, self.config, scheme)

    def donors(self, writer: str = "") -> DonorIndex:
        """The index by which prompts find documents that are much like them.

        Args:
            writer: Namespace inside the tenant: what is kept in it is found by this writer alone. Empty: by all.

        Returns:
            The index, which keeps the texts that it read of late: to be made once.
        """
        from kvwire.store import DonorIndex  # most need none

        return DonorIndex(self.catalog, self.config, writer)

    def indexes(self, schemes: Sequence[str]) -> list[PrefixIndex | DonorIndex]:
        """The indexes of some schemes, ``donors`` among them."""
        from kvwire.store import DONORS

        return [self.donors() if scheme == DONORS else self.index(scheme) for scheme in schemes]

    def count_use(self, document_id: str) -> None:
        """Count one use of a document, where uses are counted. A file that fails costs a count, not an answer."""
        if self.uses is not None:
            with suppress(KvwireError):
                self.uses.add(self.scope, document_id)

    def text(self, entry: CatalogEntry) -> tuple[int, ...]:
        """Token ids of a document, from beside its blob.

        Raises:
            NotFoundError: The text is lost.
            CorruptError: The text is damaged.
        """
        if not entry.token_digest:
            msg = f"the text of {entry.document_id!r} is not known: encode the document again"
            raise NotFoundError(msg)
        return self.catalog.texts.of(self.config, entry)

    def read_header(self, entry: CatalogEntry) -> BlobInfo:
        """What the blob of an entry says of itself.

        Raises:
            NotFoundError: Only the text is kept.
        """
        if entry.is_text:
            msg = f"{entry.document_id!r} is kept as text: it has no blob; kvwire store stat shows its entry"
            raise NotFoundError(msg)
        return self.catalog.blobs.header(entry)

    def find(self, document_id: str) -> CatalogEntry:
        """A document's entry.

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
            raise NotFoundError(msg)
        return entry

    def check_blob(self, info: BlobInfo, entry: CatalogEntry) -> None:
        """Refuse a blob that is not the one to use, or that claims more tokens than the model takes.

        Args:
            info: What the blob's header says.
            entry: The entry that names the blob.

        Raises:
            MismatchError: The blob is of another model.
            CorruptError: The blob is not what its entry names, or no cache of the model.
        """
        names = (entry.token_digest, entry.tokens, entry.size, entry.profile_digest, None)
        if names != (info.meta.token_digest, info.tokens, info.file_bytes, info.profile_digest, info.prefix):
            msg = f"the blob of {entry.document_id!r} is not the one that the catalog names; encode the document again"
            raise CorruptError(msg)
        theirs, ours = info.meta, self.meta
        if not theirs.shares_config(ours):
            msg = (
                f"the blob was encoded by model {theirs.model_id!r} ({theirs.model_revision[:12] or 'unnamed'}), "
                f"this is {ours.model_id!r} ({ours.model_revision[:12] or 'unnamed'}); "
                "encode the document with this model"
            )
            raise MismatchError(msg)
        if info.tokens > self.window:
            msg = (
                f"the blob of {entry.document_id!r} claims {info.tokens} tokens, the model's window is "
                f"{self.window}; split the document and encode it again"
            )
            raise CorruptError(msg)
