"""Documents of a load: from what the catalog says to an open blob, or to the text that stands in for it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvwire.errors import CorruptError, KvwireError, NotFoundError, StorageError
from kvwire.runtime.document import CHANGED, FoundDocument, OpenDocument, Timeouts
from kvwire.runtime.find import gather_optional
from kvwire.transport import BlobFetcher, open_document
from kvwire.types import digest_tokens

if TYPE_CHECKING:
    from kvwire.runtime.driver import ControllerDriver
    from kvwire.runtime.find import DocumentFinder
    from kvwire.runtime.session import Session
    from kvwire.store import CatalogEntry
    from kvwire.transport import FetchSettings
    from kvwire.types import BlobInfo


class DocumentOpener:
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

    async def close(self) -> None:
        """Close all fetchers."""
        await self._stack.aclose()

    @property
    def wire_bytes(self) -> int:
        """Bytes that came over the link so far, for all documents together, headers and chunks."""
        return sum(fetcher.counts.wire_bytes for fetcher in self._fetchers)

    async def open_all(self, found: FoundDocument) -> list[OpenDocument]:
        """``open`` a document and its variants; nothing where it has another length by now."""
        variants = [self._open_variant(each) for each in found.variants]
        opened, others = await gather_optional(self.open(found), variants, self._timeouts)
        if opened is None:
            return []
        return [opened, *(mine for each in others if each and (mine := each.adopt_text(opened)))]

    async def _open_variant(self, found: FoundDocument) -> OpenDocument:
        """Read a variant's header; without a text to stand in for it, raises whatever is wrong."""
        if found.entry is None or found.trouble:
            raise NotFoundError(found.trouble or f"{found.document_id!r} has no blob there")
        try:
            opened, fetcher = await self._connected(found, found.entry)
            info = await fetcher.open(deadline=self._driver.clock() + self._timeouts.soon)
            found.corpus.check_blob(info, found.entry)
        except (NotFoundError, CorruptError):
            newer = await self._finder.find_again(found, self._timeouts)
            if newer is None:
                raise
            return await self._open_variant(newer)
        return replace(opened, info=info)

    async def open(self, found: FoundDocument) -> OpenDocument | None:
        """Read a document's header; where that fails, is late or is of another document, find its text.

        None where the catalog names a text of another length by now than its kept entry did.
        """
        opened, entry = OpenDocument(found, found.text, trouble=found.trouble), found.entry
        if entry is None or (found.trouble and found.text is not None):
            return opened
        try:
            opened, fetcher = await self._connected(found, entry)
            header = await self._header(fetcher, opened, entry)
            if isinstance(header, tuple):
                late = f"no header within {self._timeouts.soon:.3g} s; check the server and the network"
                return replace(opened, token_ids=header).without_blob(f"{fetcher.url}: {late}")
            if found.trouble:
                raise StorageError(found.trouble)
        except KvwireError as error:
            newer = None
            if isinstance(error, (NotFoundError, CorruptError)):
                newer = await self._finder.find_again(found, self._timeouts)
            if newer is not None:
                return await self.open(newer) if newer.tokens == found.tokens else None
            ids = opened.token_ids or _ids_of(opened, entry) or await self._stored_text(found, entry)
            if ids is None:
                raise
            return replace(opened, token_ids=ids).without_blob(str(error))
        if found.text is not None and header.token_ids not in (None, found.text):
            return replace(opened, trouble=CHANGED)
        return opened.with_header(header, header.token_ids or found.text)

    async def _connected(self, found: FoundDocument, entry: CatalogEntry) -> tuple[OpenDocument, BlobFetcher]:
        """A document with what fetches its blob, open until the end of this opener."""
        catalog = found.corpus.catalog
        reader = catalog.reader_of(entry)
        source = open_document(catalog, entry, self._session.http)
        settings = replace(self._settings, header_bytes=max(1, entry.header_bytes))
        known = partial(BlobFetcher, source, settings=settings, link=self._session.link, meter=self._driver.meter)
        fetcher = await self._stack.enter_async_context(known(read_header=reader.read_header, check=reader.check))
        self._fetchers.append(fetcher)
        return OpenDocument(found, found.text, reader=reader, fetcher=fetcher, trouble=found.trouble), fetcher

    async def _header(
        self, fetcher: BlobFetcher, document: OpenDocument, entry: CatalogEntry
    ) -> BlobInfo | tuple[int, ...]:
        """The header, checked against the catalog; the text where that is there and the header is late."""
        opening = asyncio.create_task(fetcher.open(deadline=self._give_up_at))
        ids = document.token_ids
        try:
            await asyncio.wait({opening}, timeout=self._timeouts.soon)
            if not opening.done():
                ids = await self._text_beside(opening, document.found, entry) if ids is None else ids
                if not opening.done() and ids is not None:
                    return ids
            try:
                info = await opening
            except (NotFoundError, CorruptError):
                raise
            except KvwireError:
                if ids is None or document.token_ids is not None:
                    raise
                return ids  # read while the header was late; there may be no time to read them again
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        document.found.corpus.check_blob(info, entry)
        return info

    async def _text_beside(
        self, opening: asyncio.Task[BlobInfo], found: FoundDocument, entry: CatalogEntry
    ) -> tuple[int, ...] | None:
        """``_stored_text``, for as long as a late header does not come after all."""
        reading = asyncio.create_task(self._stored_text(found, entry))
        try:
            await asyncio.wait({opening, reading}, return_when=asyncio.FIRST_COMPLETED)
            has_come = opening.done() and opening.exception() is None
            return None if has_come else await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _stored_text(self, found: FoundDocument, entry: CatalogEntry) -> tuple[int, ...] | None:
        """Token ids from beside the blob, None where they are lost too or do not come in time."""
        try:
            left_s = max(0.0, self._give_up_at - self._driver.clock())
            ids = await self._session.look_up(partial(self._finder.text, found, entry), left_s)
        except KvwireError:
            return None
        return ids if _fits(ids, entry) else None


def _ids_of(document: OpenDocument, entry: CatalogEntry) -> tuple[int, ...] | None:
    """Token ids from a header whose blob is of no use otherwise, where they are the ones that the catalog names."""
    header = document.reader.parsed
    ids = header.info.token_ids if header else None
    return ids if ids is not None and _fits(ids, entry) else None


def _fits(ids: tuple[int, ...], entry: CatalogEntry) -> bool:
    """Whether a text is the entry's: the prompt has been laid out for that many tokens."""
    return len(ids) == entry.tokens and digest_tokens(ids) == entry.token_digest
