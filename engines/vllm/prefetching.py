"""Documents that later requests will name: fetched ahead into the store's cache, behind everything else."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire.errors import KvwireError
from kvwire.runtime.threads import DaemonThreads

from .counting import Counts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.runtime.corpus import Corpus

_MOST = 1024
"""Documents that wait; more are left out."""
NO_CACHE = 'this vLLM has no cache to fetch ahead into: start it with "cache" or "memory_size"'
_LOG = logging.getLogger("kvwire.vllm")


@dataclass(frozen=True)
class PrefetchHint:
    """What a request says of later ones."""

    documents: tuple[str, ...]  # their ids
    level: int | None = None  # the level that will be loaded; None: the finest that is not lossless


def has_cache(corpus: Corpus) -> bool:
    """Whether what is fetched ahead has a place."""
    return hasattr(corpus.catalog.store, "prefetch")


class Prefetcher:
    """A worker's half: a thread asks the catalog and queues ranges, which the store's cache reads when it is quiet."""

    def __init__(self, corpus: Corpus, counts: Counts | None = None) -> None:
        """Fetch nothing yet."""
        self._corpus, self._counts = corpus, counts or Counts()
        self._threads = DaemonThreads(1, "kvwire-prefetch")
        self._room = threading.BoundedSemaphore(_MOST)
        self._warned: set[str] = set()

    def start(self, hints: Sequence[PrefetchHint]) -> None:
        """Begin to fetch ahead; returns at once."""
        for hint in hints:
            for name in hint.documents:
                if self._room.acquire(blocking=False):
                    self._threads.submit(self._fetch, name, hint.level)
                else:
                    self._counts.add(soon_dropped=1)

    def close(self) -> None:
        """Leave out what waits."""
        self._threads.shutdown(wait=False)

    def _fetch(self, name: str, level: int | None) -> None:
        """In a thread: nothing that goes wrong here is any request's trouble."""
        self._room.release()
        try:
            is_there = self._corpus.prefetch((name,), level).wait()  # the cache takes few ranges at a time
            self._counts.add(**{"soon_documents" if is_there else "soon_dropped": 1})
        except Exception as error:  # noqa: BLE001 - see above
            if (kind := type(error).__name__) not in self._warned:
                self._warned.add(kind)
                words = str(error) if isinstance(error, KvwireError) else f"{kind}: {error}"
                _LOG.warning("document %r is not fetched ahead: %s (told once)", name, words)
            self._counts.add(soon_dropped=1)
