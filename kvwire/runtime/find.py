"""Finds documents of a load: their catalog entries, and their open blobs or texts."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kvwire.errors import CorruptError, FormatVersionError, KvwireError, NotFoundError, StorageError
from kvwire.runtime.document import CHANGED, FoundDocument, OpenDocument, Timeouts
from kvwire.runtime.tasks import gather_optional
from kvwire.transport import BlobFetcher, open_document
from kvwire.types import digest_tokens
from kvwire.types.cache import plain_token_ids

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvwire.codec import AnyProfile
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.driver import ControllerDriver
    from kvwire.runtime.session import Session
    from kvwire.store import CatalogEntry
    from kvwire.transport import FetchSettings
    from kvwire.types import BlobInfo


_MOST_KEPT = 10_000  # entries
_PROFILE_S = 300.0
"""Longest read of a profile. No load waits that long, but a shorter limit might never let it finish."""
UNREADABLE = (NotFoundError, CorruptError, FormatVersionError, StorageError)
"""Errors after which a document's text is used. AuthError is not one: wrong credentials must be reported."""


def profile_in_use(corpus: Corpus, level: int | None) -> tuple[AnyProfile | None, bool]:
    """Read the corpus's profile, None if it has none; tells, too, whether the read succeeded."""
    try:
        return corpus.profile(level=level), True
    except UNREADABLE:
        return None, False


class DocumentFinder:
    """Looks documents up in their catalogs, over the session's link, and caches the entries.

    An entry is cached for some seconds, and dropped when this process writes to the corpus, or when its blob is gone.
    """

    def __init__(self, session: Session, corpora: Sequence[Corpus], kept_s: float, level: int | None) -> None:
        """Start with nothing cached."""
        self._session, self._corpora, self._kept_s, self._level = session, corpora, kept_s, level
        self._views = [corpus.over(session.view(corpus.catalog.store)) for corpus in corpora]
        self._kept: dict[tuple[int, str], _Kept] = {}
        self._profiles: dict[tuple[int, str], asyncio.Task[AnyProfile | None]] = {}  # being read

    async def find(
        self, document: str | FoundDocument, texts: Mapping[str, Sequence[int]] | None, timeouts: Timeouts, *,
        anew: bool = False,
    ) -> FoundDocument:  # fmt: skip
        """Look a document up in the first corpus, unless it was; with its profile, or if the catalog fails, its text.

        A further corpus that fails, is late or has another text gives no variant. A use is counted in the first corpus
        only.
        """
        if isinstance(document, FoundDocument):
            return document
        document_id, given = document, (texts or {}).get(document)
        text = None if given is None else plain_token_ids(given)
        looking = self._find_first(document_id, text, timeouts, anew=anew)
        others = [
            self._find_in(number, document_id, None, timeouts, timeouts.soon, anew=anew)
            for number in range(1, len(self._corpora))
        ]
        first, found = await gather_optional(looking, others, timeouts)
        return replace(first, variants=tuple(each for each in found if each.token_digest == first.token_digest != ""))

    async def find_again(self, document: FoundDocument, timeouts: Timeouts) -> FoundDocument | None:
        """Ask the catalog again, after a cached entry was out of date."""
        if not document.entry_is_kept:
            return None
        number = self._corpora.index(document.corpus)
        fresh = document.document_id, document.text, timeouts, timeouts.soon
        try:
            found = await self._find_in(number, *fresh, anew=True)
        except UNREADABLE:
            return None
        return None if found.entry == document.entry else found

    async def of_entry(self, entry: CatalogEntry, text: tuple[int, ...] | None, timeouts: Timeouts) -> FoundDocument:
        """A document of the first corpus from an entry just read."""
        known = self._views[0].known_profile(entry)
        found = FoundDocument(self._corpora[0], entry.document_id, entry, known, text)
        try:
            return found if known else replace(found, profile=await self._profile(0, entry, timeouts.profile))
        except UNREADABLE as error:
            return replace(found, trouble=str(error))

    def text(self, document: FoundDocument, entry: CatalogEntry) -> tuple[int, ...]:
        """Read the text stored next to a document's blob; blocks."""
        return self._views[self._corpora.index(document.corpus)].text(entry)

    async def _find_first(
        self, document_id: str, text: tuple[int, ...] | None, timeouts: Timeouts, *, anew: bool
    ) -> FoundDocument:
        wait_s = timeouts.patience if text is None else timeouts.soon
        try:
            return await self._find_in(0, document_id, text, timeouts, wait_s, anew=anew, is_use=not anew)
        except UNREADABLE as error:
            if text is None:
                raise
            return FoundDocument(self._corpora[0], document_id, None, None, text, str(error))

    async def _find_in(
        self, number: int, document_id: str, text: tuple[int, ...] | None,
        timeouts: Timeouts, wait_s: float, *, anew: bool, is_use: bool = False,
    ) -> FoundDocument:  # fmt: skip
        """Entry and profile from a catalog; asks again if a cached entry's blob or profile is gone."""
        looking = partial(self._look_up, number, document_id, text, anew=anew, is_use=is_use)
        cached = None if anew or text is not None or self._corpora[number].uses else self._fresh(number, document_id)
        if cached is not None and not cached.is_text:  # needs no thread
            known = self._views[number].known_profile(cached)
            found = FoundDocument(self._corpora[number], document_id, cached, known, text, entry_is_kept=True)
        else:
            found = await self._session.look_up(looking, wait_s)
        if found.entry is None or found.profile is not None:
            return found
        try:
            return replace(found, profile=await self._profile(number, found.entry, timeouts.profile))
        except UNREADABLE as error:
            if found.entry_is_kept and isinstance(error, (NotFoundError, CorruptError)):
                return await self._find_in(number, document_id, text, timeouts, wait_s, anew=True)
            return replace(found, trouble=str(error))

    async def _profile(self, number: int, entry: CatalogEntry, wait_s: float) -> AnyProfile | None:
        """A document's profile; loads share a read, which goes on when they leave."""
        if not entry.profile_digest:
            return None
        key = number, entry.profile_digest
        reading = self._profiles.get(key)
        if reading is None:
            looking = self._session.look_up(partial(self._views[number].profile_of, entry, self._level), _PROFILE_S)
            reading = self._profiles[key] = asyncio.create_task(looking)
            reading.add_done_callback(partial(self._read, key))
        await asyncio.wait({reading}, timeout=wait_s)
        if reading.done():
            return reading.result()
        raise StorageError(f"its profile did not come within {wait_s:.3g} s; check the store and the network")

    def _read(self, key: tuple[int, str], reading: asyncio.Task[AnyProfile | None]) -> None:
        del self._profiles[key]
        if not reading.cancelled():
            reading.exception()  # raised to those who wait, if any

    def _entry(self, number: int, document_id: str, *, anew: bool) -> tuple[CatalogEntry, bool]:
        """A document's entry, and whether it was cached."""
        if anew:
            self._kept.pop((number, document_id), None)
        elif (cached := self._fresh(number, document_id)) is not None:
            return cached, True
        key, now, changes = (number, document_id), time.monotonic(), self._corpora[number].changes
        entry = self._views[number].find(document_id)
        if self._kept_s > 0:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = _Kept(entry, now, changes)
        return entry, False

    def _fresh(self, number: int, document_id: str) -> CatalogEntry | None:
        """A cached entry that is still valid."""
        cached, changes = self._kept.get((number, document_id)), self._corpora[number].changes
        is_fresh = cached is not None and time.monotonic() - cached.read_at < self._kept_s and cached.changes == changes
        return cached.entry if cached is not None and is_fresh else None

    def _look_up(
        self, number: int, document_id: str, text: tuple[int, ...] | None, *, anew: bool, is_use: bool = False
    ) -> FoundDocument:
        """Entry from a catalog, with the profile if that was read before."""
        corpus, view = self._corpora[number], self._views[number]
        if is_use:
            corpus.count_use(document_id)
        entry, is_kept = self._entry(number, document_id, anew=anew)
        if entry.is_text:
            try:
                found = FoundDocument(corpus, document_id, None, None, text or view.text(entry))
            except (NotFoundError, CorruptError):
                if not is_kept:
                    raise
                return self._look_up(number, document_id, text, anew=True)
        elif text is not None and (len(text) != entry.tokens or entry.token_digest not in ("", digest_tokens(text))):
            found = FoundDocument(corpus, document_id, None, None, text, CHANGED)
        else:
            found = FoundDocument(corpus, document_id, entry, view.known_profile(entry), text)
        return replace(found, entry_is_kept=is_kept)


class _Kept(NamedTuple):
    """An entry, when it was requested, and the corpus's changes until then."""

    entry: CatalogEntry
    read_at: float
    changes: int


class DocumentOpener:
    """Reads headers of blobs, and texts if headers fail or are late; closes what it opened."""

    def __init__(
        self, session: Session, driver: ControllerDriver, finder: DocumentFinder, settings: FetchSettings,
        timeouts: Timeouts,
    ) -> None:  # fmt: skip
        """Do not read yet."""
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
        """Bytes received over the link for all documents, headers and chunks."""
        return sum(fetcher.counts.wire_bytes for fetcher in self._fetchers)

    async def open_all(self, found: FoundDocument) -> list[OpenDocument]:
        """``open`` a document and its variants; empty if its length has changed."""
        variants = [self._open_variant(each) for each in found.variants]
        opened, others = await gather_optional(self.open(found), variants, self._timeouts)
        if opened is None:
            return []
        return [opened, *(mine for each in others if each and (mine := each.adopt_text(opened)))]

    async def _open_variant(self, found: FoundDocument) -> OpenDocument:
        """Read a variant's header; there is no text to replace it, so any error is raised."""
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
        """Read a document's header; if that fails, is late or is another document's, find its text.

        None if the catalog's text now has another length than the cached entry's.
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
                if isinstance(error, NotFoundError | CorruptError):
                    name, advice = found.document_id, "give the text (--texts), or encode it again"
                    raise type(error)(f"{name!r} and its text cannot be read: {advice} ({error})") from error
                raise
            return replace(opened, token_ids=ids).without_blob(str(error))
        if found.text is not None and header.token_ids not in (None, found.text):
            return replace(opened, trouble=CHANGED)
        return opened.with_header(header, header.token_ids or found.text)

    async def _connected(self, found: FoundDocument, entry: CatalogEntry) -> tuple[OpenDocument, BlobFetcher]:
        """A document with its blob's fetcher, which this opener closes."""
        catalog = found.corpus.catalog
        reader = catalog.blobs.reader(entry)
        source = open_document(catalog, entry, self._session.http)
        settings = replace(self._settings, header_bytes=max(1, entry.header_bytes))
        known = partial(BlobFetcher, source, settings=settings, link=self._session.link, meter=self._driver.meter)
        fetcher = await self._stack.enter_async_context(known(read_header=reader.read_header, check=reader.check))
        self._fetchers.append(fetcher)
        return OpenDocument(found, found.text, reader=reader, fetcher=fetcher, trouble=found.trouble), fetcher

    async def _header(
        self, fetcher: BlobFetcher, document: OpenDocument, entry: CatalogEntry
    ) -> BlobInfo | tuple[int, ...]:
        """The header, checked against the catalog; the text if that arrives before a late header."""
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
        """``_stored_text``, given up if the late header arrives after all."""
        reading = asyncio.create_task(self._stored_text(found, entry))
        try:
            await asyncio.wait({opening, reading}, return_when=asyncio.FIRST_COMPLETED)
            has_come = opening.done() and opening.exception() is None
            return None if has_come else await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _stored_text(self, found: FoundDocument, entry: CatalogEntry) -> tuple[int, ...] | None:
        """Token ids stored next to the blob; None if they are lost or late."""
        try:
            left_s = max(0.0, self._give_up_at - self._driver.clock())
            ids = await self._session.look_up(partial(self._finder.text, found, entry), left_s)
        except KvwireError:
            return None
        return ids if _fits(ids, entry) else None


def _ids_of(document: OpenDocument, entry: CatalogEntry) -> tuple[int, ...] | None:
    """Token ids from the header of an otherwise useless blob, if they match the catalog."""
    header = document.reader.parsed
    ids = header.info.token_ids if header else None
    return ids if ids is not None and _fits(ids, entry) else None


def _fits(ids: tuple[int, ...], entry: CatalogEntry) -> bool:
    """Whether a text is the entry's: the prompt was laid out for its length."""
    return len(ids) == entry.tokens and digest_tokens(ids) == entry.token_digest
