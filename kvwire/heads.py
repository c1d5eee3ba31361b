"""Documents of a load: from what the catalog knows to an open blob, or to the text that stands in for it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from kvwire import controller as ctl
from kvwire.codec import CHUNK_TOKENS, PlainBlob, Profile, read_head
from kvwire.errors import CorruptError, DeadlineError, KvwireError, NotFoundError, StorageError
from kvwire.transport import BlobFetcher, open_source
from kvwire.types import digest_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    from kvwire.codec import AnyProfile, BlobDecoder, BlobReader
    from kvwire.corpus import Corpus
    from kvwire.steering import Steering
    from kvwire.store import CatalogEntry
    from kvwire.transport import FetchSettings
    from kvwire.types import BlobInfo


_CHANGED = "its text has changed since it was encoded; encode it again"


@dataclass(frozen=True)
class Source:
    """A document as the catalog knows it before anything is fetched.

    entry None: only its text is known or kept. profile None: the blob carries its own, or the profile could not be
    read, as ``trouble`` says.
    """

    document_id: str
    entry: CatalogEntry | None
    profile: AnyProfile | None
    text: tuple[int, ...] | None
    trouble: str = ""

    @property
    def tokens(self) -> int:
        """Length of the document."""
        if self.entry and self.text is None:
            return self.entry.tokens
        return len(self.text or ())


@dataclass(eq=False)
class OpenDocument:
    """A document whose head is read, or whose text stands in for it.

    decoder None: the head start is still to be computed, or the blob cannot be used; then ``head_start`` is 0 and the
    text stands in. head_start: layers. trouble: why the blob cannot be used.
    """

    source: Source
    token_ids: tuple[int, ...] | None
    info: BlobInfo | None = None
    reader: BlobReader = field(default_factory=PlainBlob)
    fetcher: BlobFetcher | None = None
    decoder: BlobDecoder | None = None
    head_start: int = 0
    trouble: str = ""

    @property
    def has_blob(self) -> bool:
        """Whether chunks can be fetched and decoded, after a head start where one is needed."""
        return self.decoder is not None or self.head_start > 0

    def span(self, chunk: int) -> tuple[int, int]:
        """First token of a chunk, and the first token after it."""
        if self.info:
            return self.info.chunk_span(chunk)
        return chunk * CHUNK_TOKENS, min((chunk + 1) * CHUNK_TOKENS, self.source.tokens)

    def plan_input(self, layers: int) -> ctl.DocumentPlanInput:
        """What planning needs to know; layers: of the model."""
        has_text = self.token_ids is not None
        if self.info and self.has_blob:
            share = min(1.0, self.head_start / layers)
            return ctl.DocumentPlanInput.from_blob(self.info, has_text=has_text, head_start=share)
        step = self.info.chunk_tokens if self.info else CHUNK_TOKENS
        spans = [self.span(chunk) for chunk in range(-(-self.source.tokens // step))]
        return ctl.DocumentPlanInput(tuple(stop - start for start, stop in spans), (), has_text)


@dataclass(frozen=True)
class Limits:
    """Seconds to wait for the catalog, a head or a text.

    soon: where the document's text is known, or for a head where it may be stored; patience: for anything else.
    """

    soon: float
    patience: float


async def find_source(
    corpus: Corpus, steering: Steering, document_id: str, texts: Mapping[str, Sequence[int]] | None, limits: Limits
) -> Source:
    """What the catalog knows of a document, its profile included; its text alone where the catalog fails.

    texts: token ids by document, as far as the caller knows them. Raises what the catalog raises for other documents.
    """
    given = (texts or {}).get(document_id)
    text = None if given is None else tuple(given)
    try:
        wait_s = limits.patience if text is None else limits.soon
        return await steering.look_up(partial(_look_up, corpus, document_id, text), wait_s)
    except (NotFoundError, CorruptError, StorageError) as error:
        if text is None:
            raise
        return Source(document_id, None, None, text, str(error))


def _look_up(corpus: Corpus, document_id: str, text: tuple[int, ...] | None) -> Source:
    entry = corpus.find(document_id)
    corpus.count_use(document_id)
    if entry.is_text:
        return Source(document_id, None, None, text or corpus.text(entry))
    if text is not None and (len(text) != entry.tokens or entry.token_digest not in ("", digest_tokens(text))):
        return Source(document_id, None, None, text, _CHANGED)
    try:
        profile = corpus.profile(entry.profile_digest) if entry.profile_digest else None
    except (NotFoundError, CorruptError, StorageError) as error:
        return Source(document_id, entry, None, text, str(error))
    return Source(document_id, entry, profile, text)


class HeadReader:
    """Reads heads of blobs, and texts where heads fail or are late; closes what it opened at its end."""

    def __init__(self, corpus: Corpus, steering: Steering, settings: FetchSettings, limits: Limits) -> None:
        """Read nothing yet."""
        self._corpus, self._steering, self._settings = corpus, steering, settings
        self._limits = Limits(min(limits.soon, limits.patience), limits.patience)
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

    async def open(self, source: Source) -> OpenDocument:
        """Read a document's head; where that fails, is late or is of another document, find its text.

        Raises what reading the head raised where there is no text either.
        """
        document = OpenDocument(source, source.text, trouble=source.trouble)
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
                document.token_ids = self._ids_of(document.reader.head, entry) or await self._stored_text(entry)
            if document.token_ids is None:
                raise
            return document
        if source.text is not None and info.token_ids not in (None, source.text):
            document.trouble = _CHANGED
            return document
        document.info, document.token_ids = info, info.token_ids or source.text
        profile = source.profile
        if document.token_ids is not None and isinstance(profile, Profile) and profile.hidden_size:
            document.head_start = info.head_start
        return document

    async def _head(self, document: OpenDocument, entry: CatalogEntry) -> BlobInfo:
        """The head, checked against the catalog; a DeadlineError where it is late and the text is there."""
        reader = document.reader = self._corpus.catalog.blob_reader()
        source = open_source(self._corpus.catalog.store, entry.blob_key, self._steering.http)
        settings = replace(self._settings, head_bytes=max(1, entry.head_bytes))
        known = partial(BlobFetcher, source, settings=settings, link=self._steering.link, meter=self._steering.meter)
        fetcher = known(read_head=reader.read_head, check=reader.check)
        document.fetcher = await self._stack.enter_async_context(fetcher)
        self._fetchers.append(fetcher)
        opening = asyncio.create_task(fetcher.open(deadline=self._steering.clock() + self._limits.patience))
        try:
            await asyncio.wait({opening}, timeout=self._limits.soon)
            if not opening.done() and document.token_ids is None:
                document.token_ids = await self._stored_text(entry)
            if not opening.done() and document.token_ids is not None:
                msg = f"{fetcher.url}: no head within {self._limits.soon:.3g} s; check the server and the network"
                raise DeadlineError(msg)
            info = await opening
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        self._corpus.check_blob(info, entry)
        return info

    def _ids_of(self, head: bytes, entry: CatalogEntry) -> tuple[int, ...] | None:
        """Token ids from a head whose blob is of no use otherwise, where they are the ones that the catalog names."""
        ids = read_head(head).token_ids if head else None
        return ids if ids is not None and self._fits(ids, entry) else None

    def _fits(self, ids: tuple[int, ...], entry: CatalogEntry) -> bool:
        """Whether a text is the entry's: the prompt has been laid out for that many tokens."""
        return len(ids) == entry.tokens and digest_tokens(ids) == entry.token_digest

    async def _stored_text(self, entry: CatalogEntry) -> tuple[int, ...] | None:
        """Token ids from beside the blob, None where they are lost too or do not come in time."""
        try:
            ids = await self._steering.look_up(partial(self._corpus.text, entry), self._limits.patience)
        except KvwireError:
            return None
        return ids if self._fits(ids, entry) else None
