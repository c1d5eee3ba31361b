"""Documents of a load: what their catalogs say of them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kvwire.errors import CorruptError, NotFoundError, StorageError
from kvwire.runtime.documents import CHANGED, DocumentHandle, Timeouts
from kvwire.types import digest_tokens

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.driver import ControllerDriver
    from kvwire.runtime.session import Session
    from kvwire.store import CatalogEntry

T = TypeVar("T")
_MOST_KEPT = 10_000  # entries


async def beside(
    first: Coroutine[None, None, T], others: Sequence[Coroutine[None, None, T]], timeouts: Timeouts
) -> tuple[T, list[T]]:
    """Wait for the first, and for those of the others that succeed and are in time.

    The others are given ``timeouts.extra`` more than the first, or twice as long as it, since they share the link, but
    never more than ``timeouts.soon`` altogether.

    Args:
        first: What counts.
        others: What is done without where it fails or is late.
        timeouts: How long to wait.

    Returns:
        What comes of the first, and of those of the others that succeeded in time.
    """
    started = time.monotonic()
    tasks = [asyncio.create_task(each) for each in others]
    try:
        result = await first
        if tasks:
            took = time.monotonic() - started
            await asyncio.wait(tasks, timeout=max(0.0, min(max(timeouts.extra, took), timeouts.soon - took)))
        done = [task for task in tasks if task.done()]
        return result, [task.result() for task in done if not (task.cancelled() or task.exception())]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class DocumentFinder:
    """Looks documents up in their catalogs, over the session's link; what was found of late is not asked for again.

    An entry is kept for some seconds, and no longer than until this process encodes anything into the corpus, or until
    the blob that it names turns out to be gone.
    """

    def __init__(self, session: Session, corpora: Sequence[Corpus], kept_s: float) -> None:
        """Look nothing up yet.

        Args:
            session: Whose link and connections are used.
            corpora: Those after the first may hold variants.
            kept_s: Seconds that an entry is used for after it was read; 0: every load asks the catalog.
        """
        self._corpora, self._kept_s = corpora, kept_s
        self._views = [corpus.over(session.view(corpus.catalog.store)) for corpus in corpora]
        self._kept: dict[tuple[int, str], _Kept] = {}

    async def find(
        self,
        driver: ControllerDriver,
        document_id: str,
        texts: Mapping[str, Sequence[int]] | None,
        timeouts: Timeouts,
    ) -> DocumentHandle:
        """What the first corpus knows of a document, its profile included; its text alone where the catalog fails.

        Of the other corpora, one that fails, is late or has another text has no variant. A use is counted in the first
        alone.

        Args:
            driver: Of the load.
            document_id: The document's name.
            texts: Token ids by document, as far as the caller knows them.
            timeouts: How long to wait.

        Raises:
            KvwireError: What the catalog raises, for a document whose text is not known.
        """
        given = (texts or {}).get(document_id)
        text = None if given is None else tuple(given)
        looking = self._find_first(driver, document_id, text, timeouts)
        others = [
            driver.look_up(partial(self._look_up_variant, number, document_id), timeouts.soon)
            for number in range(1, len(self._corpora))
        ]
        first, found = await beside(looking, others, timeouts)
        first.variants = tuple(each for each in found if each.token_digest == first.token_digest != "")
        return first

    async def find_again(self, driver: ControllerDriver, document: DocumentHandle, timeouts: Timeouts) -> bool:
        """Ask the catalog anew where a kept entry was used.

        Args:
            driver: Of the load.
            document: Gets what is found.
            timeouts: How long to wait.

        Returns:
            Whether the catalog names another blob now.
        """
        number = self._corpora.index(document.corpus)
        kept = self._kept.pop((number, document.document_id), None)
        if kept is None or kept.is_new:
            return False
        found = await driver.look_up(partial(self._look_up, number, document.document_id, document.text), timeouts.soon)
        if found.entry is None or found.entry == document.entry:
            return False
        document.entry, document.profile, document.trouble = found.entry, found.profile, found.trouble
        return True

    def text(self, document: DocumentHandle, entry: CatalogEntry) -> tuple[int, ...]:
        """Read a document's text from beside its blob; blocks.

        Args:
            document: The document.
            entry: Its entry.

        Returns:
            Its token ids.
        """
        return self._views[self._corpora.index(document.corpus)].text(entry)

    async def _find_first(
        self, driver: ControllerDriver, document_id: str, text: tuple[int, ...] | None, timeouts: Timeouts
    ) -> DocumentHandle:
        try:
            wait_s = timeouts.patience if text is None else timeouts.soon
            return await driver.look_up(partial(self._look_up, 0, document_id, text, is_use=True), wait_s)
        except (NotFoundError, CorruptError, StorageError) as error:
            if text is None:
                raise
            return DocumentHandle(self._corpora[0], document_id, None, None, text, str(error))

    def _entry(self, number: int, document_id: str) -> CatalogEntry:
        """A document's entry, kept or read."""
        key, now, corpus = (number, document_id), time.monotonic(), self._corpora[number]
        kept = self._kept.get(key)
        if kept is not None and now - kept.read_at < self._kept_s and kept.changes == corpus.changes:
            kept.is_new = False
            return kept.entry
        changes = corpus.changes
        entry = self._views[number].find(document_id)
        if self._kept_s > 0:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = _Kept(entry, now, changes)
        return entry

    def _look_up_variant(self, number: int, document_id: str) -> DocumentHandle:
        entry = self._entry(number, document_id)
        corpus = self._corpora[number]
        if entry.is_text:
            msg = f"{document_id!r} is kept as text in {corpus.catalog.store.url}: that is no variant of a blob"
            raise NotFoundError(msg)
        profile = self._views[number].profile(entry.profile_digest)
        return DocumentHandle(corpus, document_id, entry, profile, None)

    def _look_up(
        self, number: int, document_id: str, text: tuple[int, ...] | None, *, is_use: bool = False
    ) -> DocumentHandle:
        entry, corpus, view = self._entry(number, document_id), self._corpora[number], self._views[number]
        if is_use:
            corpus.count_use(document_id)
        if entry.is_text:
            return DocumentHandle(corpus, document_id, None, None, text or view.text(entry))
        if text is not None and (len(text) != entry.tokens or entry.token_digest not in ("", digest_tokens(text))):
            return DocumentHandle(corpus, document_id, None, None, text, CHANGED)
        try:
            profile = view.profile(entry.profile_digest) if entry.profile_digest else None
        except (NotFoundError, CorruptError, StorageError) as error:
            return DocumentHandle(corpus, document_id, entry, None, text, str(error))
        return DocumentHandle(corpus, document_id, entry, profile, text)


@dataclass
class _Kept:
    """An entry, the instant at which it was asked for, and the corpus's changes by then. is_new: not used again yet."""

    entry: CatalogEntry
    read_at: float
    changes: int
    is_new: bool = True
