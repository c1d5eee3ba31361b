"""Documents of a load: from what the catalog says to an open blob, or to the text that stands in for it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvwire.errors import CorruptError, DeadlineError, KvwireError, NotFoundError, StorageError
from kvwire.runtime.documents import CHANGED, DocumentHandle, LengthChangedError, Timeouts
from kvwire.runtime.finder import gather_optional
from kvwire.transport import BlobFetcher, open_document
from kvwire.types import digest_tokens

if TYPE_CHECKING:
    from typing import Self

    from kvwire.codec.format.header import Header
    from kvwire.runtime.driver import ControllerDriver
    from kvwire.runtime.finder import DocumentFinder
    from kvwire.runtime.session import Session
    from kvwire.store import CatalogEntry
    from kvwire.transport import FetchSettings
    from kvwire.types import BlobInfo


class HeaderReader:
    """Reads headers of blobs, and texts where headers fail or are late; closes what it opened at its end."""

    def __init__(
        self, session: Session, driver: ControllerDriver, finder: DocumentFinder, settings: FetchSettings,
        timeouts: Timeouts,
    ) -> None:  # fmt: skip
        """Read nothing yet."""
        self._session, self._driver, self._finder, self._settings = session, driver, finder, settings
        self._timeouts = replace(timeouts, soon=min(timeouts.soon, timeouts.patience))
        self._give_up_at = driver.clock() + timeouts.patience
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
        """Bytes that came over the link so far, for all documents together, headers and chunks."""
        return sum(fetcher.counts.wire_bytes for fetcher in self._fetchers)

    async def open_all(self, document: DocumentHandle) -> list[DocumentHandle]:
        """``open`` a document and its variants."""
        variants = [self._open_variant(each) for each in document.variants]
        opened, others = await gather_optional(self.open(document), variants, self._timeouts)
        return [opened, *(each for each in others if each.joins(opened))]

    async def _open_variant(self, document: DocumentHandle) -> DocumentHandle:
        """Read a variant's header; without a text to stand in for it, raises whatever is wrong."""
        if document.entry is None or document.trouble:
            raise NotFoundError(document.trouble or f"{document.document_id!r} has no blob there")
        try:
            fetcher = await self._fetcher(document, document.entry)
            info = await fetcher.open(deadline=self._driver.clock() + self._timeouts.soon)
            document.corpus.check_blob(info, document.entry)
        except (NotFoundError, CorruptError):
            newer = await self._finder.find_again(self._driver, document, self._timeouts)
            if newer is None:
                raise
            return await self._open_variant(newer)
        document.info = info
        return document

    async def open(self, document: DocumentHandle) -> DocumentHandle:
        """Read a document's header; where that fails, is late or is of another document, find its text."""
        document.token_ids = document.text
        if document.entry is None or (document.trouble and document.text is not None):
            return document
        try:
            info = await self._header(document, document.entry)
            if document.trouble:
                raise StorageError(document.trouble)
        except KvwireError as error:
            newer = await self._newer(document, error)
            if newer is not None:
                return await self.open(newer)
            document.fall_back(str(error))
            if document.token_ids is None:
                document.token_ids = self._ids_of(document.reader.parsed, document.entry)
            if document.token_ids is None:
                document.token_ids = await self._stored_text(document, document.entry)
            if document.token_ids is None:
                raise
            return document
        if document.text is not None and info.token_ids not in (None, document.text):
            document.trouble = CHANGED
            return document
        document.use(info, info.token_ids or document.text)
        return document

    async def _newer(self, document: DocumentHandle, error: KvwireError) -> DocumentHandle | None:
        """What the catalog names instead of a kept entry whose blob is gone or does not fit it."""
        if not isinstance(error, (NotFoundError, CorruptError)):
            return None
        newer = await self._finder.find_again(self._driver, document, self._timeouts)
        if newer is not None and newer.tokens != document.tokens:
            msg = f"{document.document_id!r} has {newer.tokens} tokens now, no longer {document.tokens}; ask again"
            raise LengthChangedError(msg)
        return newer

    async def _fetcher(self, document: DocumentHandle, entry: CatalogEntry) -> BlobFetcher:
        """What reads a document's blob, open until the end of this reader."""
        catalog = document.corpus.catalog
        reader = document.reader = catalog.reader_of(entry)
        source = open_document(catalog, entry, self._session.http)
        settings = replace(self._settings, header_bytes=max(1, entry.header_bytes))
        known = partial(BlobFetcher, source, settings=settings, link=self._session.link, meter=self._driver.meter)
        fetcher = known(read_header=reader.read_header, check=reader.check)
        document.fetcher = await self._stack.enter_async_context(fetcher)
        self._fetchers.append(fetcher)
        return fetcher

    async def _header(self, document: DocumentHandle, entry: CatalogEntry) -> BlobInfo:
        """The header, checked against the catalog; a DeadlineError where it is late and the text is there."""
        fetcher = await self._fetcher(document, entry)
        opening = asyncio.create_task(fetcher.open(deadline=self._give_up_at))
        try:
            await asyncio.wait({opening}, timeout=self._timeouts.soon)
            if not opening.done() and document.token_ids is None:
                document.token_ids = await self._text_beside(opening, document, entry)
            if not opening.done() and document.token_ids is not None:
                msg = f"{fetcher.url}: no header within {self._timeouts.soon:.3g} s; check the server and the network"
                raise DeadlineError(msg)
            info = await opening
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        document.corpus.check_blob(info, entry)
        return info

    async def _text_beside(
        self, opening: asyncio.Task[BlobInfo], document: DocumentHandle, entry: CatalogEntry
    ) -> tuple[int, ...] | None:
        """``_stored_text``, for as long as a late header does not come after all."""
        reading = asyncio.create_task(self._stored_text(document, entry))
        try:
            await asyncio.wait({opening, reading}, return_when=asyncio.FIRST_COMPLETED)
            has_come = opening.done() and opening.exception() is None
            return None if has_come else await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _ids_of(self, header: Header | None, entry: CatalogEntry) -> tuple[int, ...] | None:
        """Token ids from a header whose blob is of no use otherwise, where they are the ones that the catalog names."""
        ids = header.info.token_ids if header else None
        return ids if ids is not None and self._fits(ids, entry) else None

    def _fits(self, ids: tuple[int, ...], entry: CatalogEntry) -> bool:
        """Whether a text is the entry's: the prompt has been laid out for that many tokens."""
        return len(ids) == entry.tokens and digest_tokens(ids) == entry.token_digest

    async def _stored_text(self, document: DocumentHandle, entry: CatalogEntry) -> tuple[int, ...] | None:
        """Token ids from beside the blob, None where they are lost too or do not come in time."""
        try:
            left_s = max(0.0, self._give_up_at - self._driver.clock())
            ids = await self._driver.look_up(partial(self._finder.text, document, entry), left_s)
        except KvwireError:
            return None
        return ids if self._fits(ids, entry) else None
