"""Keeping what vLLM computed: pages are copied beside the model's steps, encoded in a thread, and put into the store.

Only rows that vLLM computed itself are kept. A row that was loaded is lossy, or was computed for another prompt; kept
once more, its error would reach every prompt that begins with it.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from kvwire.engines.vllm import slots_of
from kvwire.errors import KvwireError
from kvwire.runtime.coding import Document
from kvwire.types import KVCache, digest_tokens
from kvwire.vllm.counting import Counts
from kvwire.vllm.requests import SALTED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from kvwire.engines.vllm import Pages
    from kvwire.runtime.corpus import Corpus

SaveMode: TypeAlias = Literal["off", "asked", "all"]
SAVED = "saved/"
"""What the names of documents begin with that were saved from vLLM."""
_MOST = 16
_MOST_BYTES = 4 << 30
"""Of caches that wait to be encoded; what comes beyond is not kept."""
_CLOSING_S = 20.0
_LOG = logging.getLogger("kvwire.vllm")


@dataclass(frozen=True)
class PageSave:
    """What a worker is to keep.

    Attributes:
        request_id: Whose pages.
        token_ids: Of the prompt, all of whose rows were computed.
        blocks: The request's, from its first token on; they are not given away before they were copied.
        event: What is told once the prompt is in the store; None: nothing.
    """

    request_id: str
    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    event: object = None


@dataclass(eq=False)
class _Watched:
    """One request. trouble: why it is not kept."""

    salt: str
    trouble: str


class Saving:
    """The scheduler's half: which requests are kept. Called from one thread."""

    def __init__(self, mode: SaveMode, least_tokens: int, trouble: str = "") -> None:
        """Watch nothing yet.

        Args:
            mode: ``asked``: requests that say so; ``all``: those, and all that nothing is loaded for; ``off``: none.
            least_tokens: Shorter prompts are not kept: the index would not find them.
            trouble: Why nothing can be kept here; empty where it can.
        """
        self._mode, self._least, self._trouble = mode, least_tokens, trouble
        self._watched: dict[str, _Watched] = {}
        self._saves: list[PageSave] = []

    def begin(self, request_id: str, salt: str | None, *, asks: bool, trouble: str = "") -> None:
        """Take in a request.

        Args:
            request_id: Its name.
            salt: Its ``cache_salt``.
            asks: Whether it asks to be kept.
            trouble: Why its rows are not those of its token ids alone; empty where they are.
        """
        if asks or self._mode == "all":
            off = 'this vLLM keeps nothing: start it with "save": "asked"' if self._mode == "off" else ""
            self._watched[request_id] = _Watched(salt or "", off or self._trouble or trouble)

    def had(self, request_id: str, tokens: int) -> None:
        """Note what vLLM has of a prompt before it computes: rows of other requests with the same salt.

        Args:
            request_id: Of the request.
            tokens: Of its front.
        """
        watched = self._watched.get(request_id)
        if watched and tokens and watched.salt.startswith(SALTED):
            watched.trouble = watched.trouble or "vLLM had rows of it that may have been loaded"

    def loaded(self, request_id: str) -> None:
        """Note that rows of a request are loaded.

        Args:
            request_id: Of the request.
        """
        if watched := self._watched.get(request_id):
            watched.trouble = watched.trouble or "some of its rows were loaded"

    def end(
        self, request_id: str, prompt: Sequence[int], blocks: Sequence[int], *, is_computed: bool,
        event: Callable[[], object] | None = None,
    ) -> str | None:  # fmt: skip
        """Decide about a request that ended.

        Args:
            request_id: Of the request.
            prompt: Token ids.
            blocks: The request's.
            is_computed: Whether all of the prompt was.
            event: Makes what is told once the prompt is in the store; None: nothing is.

        Returns:
            Why it is not kept; empty where it is, and its blocks are to be held; None where nobody asked.
        """
        watched = self._watched.pop(request_id, None)
        if watched is None:
            return None
        why = watched.trouble
        if not why and not is_computed:
            why = "it ended before its prompt was computed"
        if not why and len(prompt) < self._least:
            why = f"its prompt has fewer than {self._least} tokens"
        if not why:
            self._saves.append(PageSave(request_id, tuple(prompt), tuple(blocks), event() if event else None))
        return why

    def take(self) -> list[PageSave]:
        """What was decided to be kept since the last call."""
        saves, self._saves = self._saves, []
        return saves


class Saver:
    """A worker's half: copies pages, and encodes and stores them, in a thread each."""

    def __init__(self, corpus: Corpus, index: str, counts: Counts | None = None) -> None:
        """Keep nothing yet.

        Args:
            corpus: Where prompts are put, as documents of their own.
            index: The scheme by which they are found.
            counts: Where is counted what was kept; None: nowhere.
        """
        self._counts = counts or Counts()
        self._corpus, self._scheme, self._index = corpus, index, corpus.index(index)
        self._pages: Pages | None = None
        self._lock = threading.Lock()
        self._copied: set[str] = set()
        self._waiting: dict[str, int] = {}  # bytes of what is not stored yet, by the prompt's digest
        self._told: set[str] = set()
        self._events: list[object] = []
        self._copying = ThreadPoolExecutor(1, "kvwire-copy")
        self._encoding = ThreadPoolExecutor(1, "kvwire-encode")

    def register(self, pages: Pages) -> None:
        """Take the pages to read from.

        Args:
            pages: All layers', whose layout was probed.
        """
        self._pages = pages

    def start(self, saves: Sequence[PageSave]) -> None:
        """Begin to copy; returns at once.

        Args:
            saves: Whose blocks are held until ``copied`` tells of them.
        """
        for save in saves:
            digest = digest_tokens(save.token_ids)
            if self._is_taken(digest, len(save.token_ids)):
                self._copying.submit(self._copy, save, digest)
            else:
                with self._lock:
                    self._copied.add(save.request_id)

    def copied(self) -> set[str]:
        """Requests whose blocks are not needed any more, since the last call."""
        with self._lock:
            copied, self._copied = self._copied, set()
        return copied

    def events(self) -> list[object]:
        """What is to be told of prompts that were put into the store since the last call."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Store what was copied, for as long as that takes little time."""
        self._copying.shutdown(wait=True)
        ending = threading.Thread(target=self._encoding.shutdown, daemon=True)
        ending.start()
        ending.join(_CLOSING_S)

    def _is_taken(self, digest: str, tokens: int) -> bool:
        """Whether there is room for a prompt that is not under way already."""
        specs = self._corpus.meta.layers
        size = tokens * sum(spec.kv_heads * (spec.key_dim + spec.value_dim) for spec in specs) * 4
        with self._lock:
            if digest in self._waiting:
                return False
            is_full = len(self._waiting) >= _MOST or sum(self._waiting.values()) + size > _MOST_BYTES
            if not is_full:
                self._waiting[digest] = size
        if is_full:
            self._counts.add(unsaved_prompts=1)
            self._tell("full", "prompts come faster than they are encoded: some are not kept")
        return not is_full

    def _copy(self, save: PageSave, digest: str) -> None:
        """In a thread: whatever goes wrong, the blocks are given back."""
        try:
            cache = self._gathered(save)
        except Exception as error:  # noqa: BLE001 - see above
            self._failed(error, digest)
            return
        finally:
            with self._lock:
                self._copied.add(save.request_id)
        self._encoding.submit(self._store, save, cache, digest)

    def _gathered(self, save: PageSave) -> KVCache:
        if self._pages is None:
            msg = "vLLM asked to keep pages before it registered them; report this"
            raise KvwireError(msg)
        view = self._pages.views[0]
        slots = slots_of(save.blocks, view.shape[2], 0, len(save.token_ids))
        keys, values = [], []
        with _beside(view):
            for layer in range(len(self._pages.views)):
                key, value = self._pages.read(layer, slots)
                keys.append(key.cpu().contiguous())
                values.append(value.cpu().contiguous())
        return self._corpus.cache_of(keys, values, save.token_ids)

    def _store(self, save: PageSave, cache: KVCache, digest: str) -> None:
        """In a thread: nothing that goes wrong here may be anybody's trouble."""
        try:
            whole = len(save.token_ids) // self._index.scheme.chunk_tokens * self._index.scheme.chunk_tokens
            hit = self._index.longest(save.token_ids)
            if hit is None or hit.tokens < whole:
                document = Document(f"{SAVED}{digest[:32]}", save.token_ids)
                done = self._corpus.save(document, cache, index=(self._scheme,))
                self._counts.add(saved_prompts=1, saved_tokens=done.entry.tokens, saved_bytes=done.entry.size)
        except Exception as error:  # noqa: BLE001 - see above
            self._failed(error, digest)
            return
        with self._lock:
            self._waiting.pop(digest, None)
            self._events += [] if save.event is None else [save.event]

    def _failed(self, error: Exception, digest: str) -> None:
        with self._lock:
            self._waiting.pop(digest, None)
        self._counts.add(unsaved_prompts=1)
        words = str(error) if isinstance(error, KvwireError) else f"{type(error).__name__}: {error}"
        self._tell(type(error).__name__, f"a prompt was not kept: {words}")

    def _tell(self, kind: str, words: str) -> None:
        """Say once what goes wrong for each request."""
        with self._lock:
            is_new = kind not in self._told
            self._told.add(kind)
        if is_new:
            _LOG.warning("%s (told once)", words)


def _beside(view: torch.Tensor) -> AbstractContextManager[object]:
    """On a GPU a stream of its own, so that copying does not wait for the model's steps."""
    if view.device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(view.device))  # type: ignore[no-untyped-call]
