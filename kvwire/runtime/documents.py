"""Documents of a load: from what the catalog knows to an open blob, or to the text that stands in for it."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kvwire import controller as ctl
from kvwire.codec import CHUNK_TOKENS, Profile, read_header
from kvwire.errors import CorruptError, DeadlineError, KvwireError, NotFoundError, StorageError
from kvwire.store.crypto.sealing import PlainBlob
from kvwire.transport import BlobFetcher, SegmentError, open_source
from kvwire.types import digest_tokens

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence
    from typing import Self

    from kvwire.codec import AnyProfile, BlobDecoder
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.driver import ControllerDriver
    from kvwire.store import CatalogEntry
    from kvwire.store.crypto.sealing import BlobReader
    from kvwire.transport import FetchSettings
    from kvwire.types import BlobInfo, SegmentInfo

T = TypeVar("T")
_CHANGED = "its text has changed since it was encoded; encode it again"


@dataclass(frozen=True)
class DocumentRef:
    """A document as the catalog knows it before anything is fetched.

    entry None: only its text is known or kept. profile None: the blob carries its own, or the profile could not be
    read, as ``trouble`` says. variants: the same text in further corpora.
    """

    corpus: Corpus
    document_id: str
    entry: CatalogEntry | None
    profile: AnyProfile | None
    text: tuple[int, ...] | None
    trouble: str = ""
    variants: tuple[DocumentRef, ...] = ()

    @property
    def token_digest(self) -> str:
        """Of the document's text; empty where it is not known."""
        if self.text is not None:
            return digest_tokens(self.text)
        return self.entry.token_digest if self.entry else ""

    @property
    def tokens(self) -> int:
        """Length of the document."""
        if self.entry and self.text is None:
            return self.entry.tokens
        return len(self.text or ())


@dataclass(eq=False)
class DocumentHandle:
    """A document whose head is read, or whose text stands in for it.

    decoder None: the head start is still to be computed, or the blob cannot be used; then ``prefix_layers`` is 0 and
    the text stands in. prefix_layers: layers. trouble: why the blob cannot be used.
    """

    source: DocumentRef
    token_ids: tuple[int, ...] | None
    info: BlobInfo | None = None
    reader: BlobReader = field(default_factory=PlainBlob)
    fetcher: BlobFetcher | None = None
    decoder: BlobDecoder | None = None
    prefix_layers: int = 0
    trouble: str = ""

    @property
    def has_blob(self) -> bool:
        """Whether chunks can be fetched and decoded, after a head start where one is needed."""
        return self.decoder is not None or self.prefix_layers > 0

    @property
    def chunk_tokens(self) -> int:
        """Length of its chunks, but for the last."""
        return self.info.chunk_tokens if self.info else CHUNK_TOKENS

    def use(self, info: BlobInfo, token_ids: tuple[int, ...] | None) -> None:
        """Take in what the head says and what the text is known to be."""
        self.info, self.token_ids = info, token_ids
        profile = self.source.profile
        if token_ids is not None and isinstance(profile, Profile) and profile.hidden_size:
            self.prefix_layers = info.prefix_layers

    def joins(self, first: DocumentHandle) -> bool:
        """Whether this has the very chunks of another, whose text it then takes over."""
        info, ids = self.info, first.token_ids
        if info is None or (info.tokens, info.chunk_tokens) != (first.source.tokens, first.chunk_tokens):
            return False
        if ids is not None and info.token_ids not in (None, ids):
            return False
        self.use(info, ids)
        return True

    def span(self, chunk: int) -> tuple[int, int]:
        """First token of a chunk, and the first token after it."""
        if self.info:
            return self.info.chunk_span(chunk)
        return chunk * CHUNK_TOKENS, min((chunk + 1) * CHUNK_TOKENS, self.source.tokens)

    async def fetch(self, reads: Sequence[SegmentInfo], until: float, parts: dict[int, bytes]) -> str:
        """Fetch a chunk's segments, lowest level first, into ``parts`` by level; returns what was lost, in words.

        until: instant at which to give up. Ends as soon as all that are of use are in: those below one that is lost.
        """
        if self.fetcher is None:
            return "its blob is not open"
        trouble, useful = "", len(reads)
        try:
            async with aclosing(self.fetcher.fetch(reads, deadline=until)) as arrivals:
                async for arrival in arrivals:
                    if isinstance(arrival, SegmentError):
                        trouble = trouble or in_words(arrival)
                        useful = min(useful, reads.index(arrival.segment))
                    else:
                        parts[arrival.segment.level] = arrival.data
                    if all(each.level in parts for each in reads[:useful]):
                        break
        except Exception as error:  # noqa: BLE001 - whatever it is, the chunk can be recomputed
            return in_words(error)
        return trouble

    def plan_input(self, layers: int) -> ctl.DocumentPlanInput:
        """What planning needs to know; layers: of the model."""
        has_text = self.token_ids is not None
        if self.info and self.has_blob:
            share = min(1.0, self.prefix_layers / layers)
            return ctl.DocumentPlanInput.from_blob(self.info, has_text=has_text, prefix_share=share)
        spans = [self.span(chunk) for chunk in range(-(-self.source.tokens // self.chunk_tokens))]
        return ctl.DocumentPlanInput(tuple(stop - start for start, stop in spans), (), has_text)


def in_words(error: Exception) -> str:
    """What went wrong, with the kind of error where it is not one of this package."""
    return str(error) if isinstance(error, KvwireError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Timeouts:
    """Seconds to wait for the catalog, a head or a text.

    soon: where the document's text is known, or for a head where it may be stored; patience: for anything else. extra:
    further wait for variants, see ``_beside``.
    """

    soon: float
    patience: float
    extra: float


async def find_document(
    corpora: Sequence[Corpus],
    driver: ControllerDriver,
    document_id: str,
    texts: Mapping[str, Sequence[int]] | None,
    limits: Timeouts,
) -> DocumentRef:
    """What the first corpus knows of a document, its profile included; its text alone where the catalog fails.

    corpora: those after the first may have variants; one that fails, is late or has another text has none. A use is
    counted in the first alone. texts: token ids by document, as far as the caller knows them. Raises what the catalog
    raises for other documents.
    """
    given = (texts or {}).get(document_id)
    text = None if given is None else tuple(given)
    looking = _find_first(corpora[0], driver, document_id, text, limits)
    others = [driver.look_up(partial(_look_up_variant, each, document_id), limits.soon) for each in corpora[1:]]
    first, found = await _beside(looking, others, limits)
    return replace(first, variants=tuple(each for each in found if each.token_digest == first.token_digest != ""))


async def _beside(
    first: Coroutine[None, None, T], others: Sequence[Coroutine[None, None, T]], limits: Timeouts
) -> tuple[T, list[T]]:
    """What comes of the first, and of those of the others that succeed and are in time.

    They are given ``limits.extra`` more than the first, or twice as long as it, since they share the link, but never
    more than ``limits.soon`` altogether.
    """
    started = time.monotonic()
    tasks = [asyncio.create_task(each) for each in others]
    try:
        result = await first
        if tasks:
            took = time.monotonic() - started
            await asyncio.wait(tasks, timeout=max(0.0, min(max(limits.extra, took), limits.soon - took)))
        done = [task for task in tasks if task.done()]
        return result, [task.result() for task in done if not (task.cancelled() or task.exception())]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _find_first(
    corpus: Corpus, driver: ControllerDriver, document_id: str, text: tuple[int, ...] | None, limits: Timeouts
) -> DocumentRef:
    try:
        wait_s = limits.patience if text is None else limits.soon
        return await driver.look_up(partial(_look_up, corpus, document_id, text), wait_s)
    except (NotFoundError, CorruptError, StorageError) as error:
        if text is None:
            raise
        return DocumentRef(corpus, document_id, None, None, text, str(error))


def _look_up_variant(corpus: Corpus, document_id: str) -> DocumentRef:
    entry = corpus.find(document_id)
    if entry.is_text:
        msg = f"{document_id!r} is kept as text in {corpus.catalog.store.url}: that is no variant of a blob"
        raise NotFoundError(msg)
    return DocumentRef(corpus, document_id, entry, corpus.profile(entry.profile_digest), None)


def _look_up(corpus: Corpus, document_id: str, text: tuple[int, ...] | None) -> DocumentRef:
    entry = corpus.find(document_id)
    corpus.count_use(document_id)
    if entry.is_text:
        return DocumentRef(corpus, document_id, None, None, text or corpus.text(entry))
    if text is not None and (len(text) != entry.tokens or entry.token_digest not in ("", digest_tokens(text))):
        return DocumentRef(corpus, document_id, None, None, text, _CHANGED)
    try:
        profile = corpus.profile(entry.profile_digest) if entry.profile_digest else None
    except (NotFoundError, CorruptError, StorageError) as error:
        return DocumentRef(corpus, document_id, entry, None, text, str(error))
    return DocumentRef(corpus, document_id, entry, profile, text)


class HeaderReader:
    """Reads heads of blobs, and texts where heads fail or are late; closes what it opened at its end."""

    def __init__(self, driver: ControllerDriver, settings: FetchSettings, limits: Timeouts) -> None:
        """Read nothing yet."""
        self._driver, self._settings = driver, settings
        self._limits = replace(limits, soon=min(limits.soon, limits.patience))
        self._stack = AsyncExitStack()
        self._fetchers: list[BlobFetcher] = []

    async def __aenter__(self) -> Self:
        """Begin."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all fetchers."""
        await self._stack.aclose()

    @property
    def wire_bytes(self) -> int:
        """Bytes that came over the link so far, for all documents together, heads and chunks."""
        return sum(fetcher.counts.wire_bytes for fetcher in self._fetchers)

    async def open_all(self, source: DocumentRef) -> list[DocumentHandle]:
        """``open`` of a document, and those of its variants whose heads are sound, in time and of the same chunks."""
        variants = [self._open_variant(each) for each in source.variants]
        first, others = await _beside(self.open(source), variants, self._limits)
        return [first, *(each for each in others if each.joins(first))]

    async def _open_variant(self, source: DocumentRef) -> DocumentHandle:
        """Read a variant's head; without a text to stand in for it, raises whatever is wrong."""
        document = DocumentHandle(source, None)
        if source.entry is None:
            msg = f"{source.document_id!r} has no blob there"
            raise NotFoundError(msg)
        fetcher = await self._fetcher(document, source.entry)
        document.info = await fetcher.open(deadline=self._driver.clock() + self._limits.soon)
        source.corpus.check_blob(document.info, source.entry)
        return document

    async def open(self, source: DocumentRef) -> DocumentHandle:
        """Read a document's head; where that fails, is late or is of another document, find its text.

        Raises what reading the head raised where there is no text either.
        """
        document = DocumentHandle(source, source.text, trouble=source.trouble)
        entry = source.entry
        if entry is None or (source.trouble and source.text is not None):
            return document
        try:
            info = await self._head(document, entry)
            if source.trouble:
                raise StorageError(source.trouble)
        except KvwireError as error:
            document.trouble, document.fetcher = str(error), None
            if document.token_ids is None:
                document.token_ids = self._ids_of(document.reader.head, entry) or await self._stored_text(
                    source.corpus, entry
                )
            if document.token_ids is None:
                raise
            return document
        if source.text is not None and info.token_ids not in (None, source.text):
            document.trouble = _CHANGED
            return document
        document.use(info, info.token_ids or source.text)
        return document

    async def _fetcher(self, document: DocumentHandle, entry: CatalogEntry) -> BlobFetcher:
        """What reads a document's blob, open until the end of this reader."""
        catalog = document.source.corpus.catalog
        reader = document.reader = catalog.blob_reader()
        source = open_source(catalog.store, entry.blob_key, self._driver.http)
        settings = replace(self._settings, header_bytes=max(1, entry.header_bytes))
        known = partial(BlobFetcher, source, settings=settings, link=self._driver.link, meter=self._driver.meter)
        fetcher = known(read_header=reader.read_header, check=reader.check)
        document.fetcher = await self._stack.enter_async_context(fetcher)
        self._fetchers.append(fetcher)
        return fetcher

    async def _head(self, document: DocumentHandle, entry: CatalogEntry) -> BlobInfo:
        """The head, checked against the catalog; a DeadlineError where it is late and the text is there."""
        fetcher = await self._fetcher(document, entry)
        opening = asyncio.create_task(fetcher.open(deadline=self._driver.clock() + self._limits.patience))
        try:
            await asyncio.wait({opening}, timeout=self._limits.soon)
            if not opening.done() and document.token_ids is None:
                document.token_ids = await self._stored_text(document.source.corpus, entry)
            if not opening.done() and document.token_ids is not None:
                msg = f"{fetcher.url}: no head within {self._limits.soon:.3g} s; check the server and the network"
                raise DeadlineError(msg)
            info = await opening
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        document.source.corpus.check_blob(info, entry)
        return info

    def _ids_of(self, head: bytes, entry: CatalogEntry) -> tuple[int, ...] | None:
        """Token ids from a head whose blob is of no use otherwise, where they are the ones that the catalog names."""
        ids = read_header(head).token_ids if head else None
        return ids if ids is not None and self._fits(ids, entry) else None

    def _fits(self, ids: tuple[int, ...], entry: CatalogEntry) -> bool:
        """Whether a text is the entry's: the prompt has been laid out for that many tokens."""
        return len(ids) == entry.tokens and digest_tokens(ids) == entry.token_digest

    async def _stored_text(self, corpus: Corpus, entry: CatalogEntry) -> tuple[int, ...] | None:
        """Token ids from beside the blob, None where they are lost too or do not come in time."""
        try:
            ids = await self._driver.look_up(partial(corpus.text, entry), self._limits.patience)
        except KvwireError:
            return None
        return ids if self._fits(ids, entry) else None
