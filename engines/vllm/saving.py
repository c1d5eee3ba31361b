"""Keeping what vLLM computed: pages are copied beside the model's steps, encoded in a thread, and put into the store.

Where several workers share the heads of a model, all of them copy their own, and the first one encodes and stores.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kvwire.errors import ArgumentError, KvwireError
from kvwire.runtime.coding import Document
from kvwire.runtime.saving import Rows
from kvwire.runtime.saving import Saver as PartSaver
from kvwire.store.prefix.index import opening_of
from kvwire.types import KVCache, digest_tokens

from .counting import Counts
from .loading import without_weights
from .pages import layers_with_rows, slots_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from kvwire.runtime.corpus import Corpus
    from kvwire.store import CatalogEntry
    from kvwire.store.prefix.index import PrefixHit

    from .pages import Pages
    from .save_scheduling import PageSave
    from .shards import Shards

SAVED = "saved/"
"""What the names of documents begin with that were saved from vLLM."""
_MOST = 16
_MOST_BYTES = 4 << 30
"""Of caches that wait to be encoded; what comes beyond is not kept, or waits in vLLM's pages where it has a name."""
_CLOSING_S = 20.0
_LOG = logging.getLogger("kvwire.vllm")


class PageSaver:
    """A worker's half: copies pages, and encodes and stores them, in a thread each."""

    def __init__(self, corpus: Corpus, index: str, counts: Counts | None = None) -> None:
        """Keep nothing yet."""
        self._counts = counts or Counts()
        self._corpus, self._scheme, self._index = corpus, index, corpus.index(index)
        self._pages: Pages | None = None
        self._shards: Shards | None = None
        self._block_tokens = 0
        self._layers = layers_with_rows(corpus.meta)
        self._lock = threading.Lock()
        self._stored = threading.Condition(self._lock)
        self._copied: set[str] = set()
        self._waiting: dict[str, int] = {}  # bytes of what is not stored yet, by the prompt's digest or the request
        self._warned: set[str] = set()
        self._events: list[object] = []
        self._outcomes: list[dict[str, Any]] = []
        self._under_way = 0  # documents with names
        self._is_closing = False
        self._copying = ThreadPoolExecutor(1, "kvwire-copy")
        self._encoding = ThreadPoolExecutor(1, "kvwire-encode")

    def register(self, pages: Pages, shards: Shards | None = None, block_tokens: int = 0) -> None:
        """Take the pages to read from; block_tokens: of requests' blocks, where the views' are shorter."""
        self._pages, self._shards = pages, shards
        self._block_tokens = block_tokens or pages.views[0].shape[2]

    @property
    def _is_first(self) -> bool:
        return self._shards is None or self._shards.rank == 0

    def start(self, saves: Sequence[PageSave]) -> None:
        """Begin to copy; returns at once."""
        for save in saves:
            key = save.request_id if save.document else digest_tokens(save.token_ids)
            if save.document and self._is_first:
                with self._lock:
                    self._under_way += 1
            if save.trouble:
                self._failed(ArgumentError(save.trouble), key, save.document)
                continue
            is_taken = not self._is_first or bool(save.document) or self._is_taken(key, len(save.token_ids))
            if is_taken or self._shards is not None:  # the others wait for a word
                self._copying.submit(self._copy, save, key, is_taken=is_taken)
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

    def outcomes(self) -> dict[str, Any]:
        """What became of documents with names since the last call."""
        with self._lock:
            done, self._outcomes = self._outcomes, []
            return {"under_way": self._under_way, "done": done}

    def close(self) -> None:
        """Store what was copied, for as long as that takes little time."""
        with self._stored:
            self._is_closing = True
            self._stored.notify_all()
        ending = threading.Thread(target=self._end, daemon=True)
        ending.start()
        ending.join(_CLOSING_S)

    def _end(self) -> None:
        self._copying.shutdown()
        self._encoding.shutdown()

    def _bytes(self, tokens: int) -> int:
        return tokens * sum(spec.kv_heads * (spec.key_dim + spec.value_dim) for spec in self._corpus.meta.layers) * 4

    def _is_taken(self, key: str, tokens: int) -> bool:
        """Whether there is room for a prompt that is not under way already."""
        size = self._bytes(tokens)
        with self._lock:
            if key in self._waiting:
                return False
            is_full = len(self._waiting) >= _MOST or sum(self._waiting.values()) + size > _MOST_BYTES
            if not is_full:
                self._waiting[key] = size
        if is_full:
            self._counts.add(unsaved_prompts=1)
            self._warn_once("full", "prompts come faster than they are encoded: some are not kept")
        return not is_full

    def _wait_for_room(self, key: str, tokens: int) -> None:
        """Wait for one with a name: meanwhile vLLM holds its pages, and in the end begins no other prompt."""
        size = self._bytes(tokens)
        with self._stored:
            self._stored.wait_for(lambda: self._is_closing or self._has_room(size))
            if not self._has_room(size):
                raise KvwireError("vLLM stops before there was room for it; run again: what is done is skipped")
            self._waiting[key] = size

    def _has_room(self, size: int) -> bool:
        """With the lock held; alone, a prompt of any size has room."""
        return not self._waiting or (len(self._waiting) < _MOST and sum(self._waiting.values()) + size <= _MOST_BYTES)

    def _copy(self, save: PageSave, key: str, *, is_taken: bool) -> None:
        """In a thread: whatever goes wrong, the blocks are given back."""
        sides: list[Tensor] | None = None
        problem: Exception = KvwireError("another of vLLM's workers could not read its pages; its log says why")
        is_out_of_step = False
        try:
            if save.document and self._is_first:
                self._wait_for_room(key, len(save.token_ids))
            sides = self._gathered(save) if is_taken else None
        except Exception as error:  # noqa: BLE001 - see above
            problem = error
        try:
            joined = sides if self._shards is None else self._joined(sides, self._shards)
        except Exception as error:  # noqa: BLE001 - see above
            joined, problem, is_out_of_step = None, error, True
        with self._lock:
            self._copied.add(save.request_id)
        if self._is_first and joined is not None:
            self._encoding.submit(self._store, save, joined, key)
        elif is_taken and (self._is_first or sides is None or is_out_of_step):
            self._failed(problem, key, save.document)

    def _gathered(self, save: PageSave) -> list[Tensor]:
        """This worker's keys and values of each layer, ``[heads, tokens, dim]``, in the processor's memory."""
        if self._pages is None:
            raise KvwireError("vLLM asked to keep pages before it registered them; report this")
        view = self._pages.views[0]
        slots = slots_of(save.blocks, self._block_tokens, 0, len(save.token_ids))
        sides = []
        with _own_stream(view):
            for layer in range(len(self._pages.views)):
                sides += [side.cpu().contiguous() for side in self._pages.read(layer, slots)]
        return sides

    def _joined(self, sides: list[Tensor] | None, shards: Shards) -> list[Tensor] | None:
        """All heads of each layer, in the first worker; None elsewhere, and where a worker has nothing to give."""
        if not shards.agree(sides is not None) or sides is None:
            return None
        joined = []
        for at, side in enumerate(sides):
            copies = shards.count * side.shape[0] // self._corpus.meta.layers[self._layers[at // 2]].kv_heads
            whole = shards.gather(side, max(1, copies))  # few heads are with several workers
            joined.append(side if whole is None else whole)
        return joined

    def _store(self, save: PageSave, sides: list[Tensor], key: str) -> None:
        """In a thread: nothing that goes wrong here may be anybody's trouble."""
        try:
            cache = self._corpus.cache_of(self._of_all(sides[::2]), self._of_all(sides[1::2]), save.token_ids)
            entry, seconds = self._put(save, cache, key)
            if entry is not None:
                new = entry.parts[-1] if save.way == "grown" and entry.parts else entry
                self._counts.add(saved_prompts=1, saved_tokens=new.tokens, saved_bytes=new.size)
        except Exception as error:  # noqa: BLE001 - see above
            self._failed(error, key, save.document)
            return
        with self._stored:
            self._waiting.pop(key, None)
            self._stored.notify_all()
            self._events += [] if save.event is None else [save.event]
            if save.document:
                self._note(save.document, seconds)

    def _of_all(self, sides: Sequence[Tensor]) -> list[Tensor]:
        """One tensor for each layer: those without rows have an empty one."""
        there = dict(zip(self._layers, sides, strict=True))
        none = sides[0].new_zeros(0, sides[0].shape[1], 0)
        return [there.get(layer, none) for layer in range(len(self._corpus.meta.layers))]

    def _put(self, save: PageSave, cache: KVCache, digest: str) -> tuple[CatalogEntry | None, float]:
        """Into the store, and the seconds that took; None where it is there already."""
        if save.document:
            ids, opening = save.token_ids[save.head :], save.token_ids[: save.head]
            own = cache.slice(save.head, cache.tokens) if opening else cache
            done = self._corpus.save(Document(save.document, ids), own, opening=opening)
            return done.entry, done.encode_s
        if save.way == "exact":
            head = Document(f"head-{digest[:32]}", save.token_ids)
            return self._corpus.encoder().put_exact(head, cache), 0.0
        whole = len(save.token_ids) // self._index.scheme.chunk_tokens * self._index.scheme.chunk_tokens
        hit = self._index.longest(save.token_ids)
        if hit is not None and hit.tokens >= (whole if save.way == "whole" else len(save.token_ids)):
            return None, 0.0
        if save.way == "grown":
            return self._grown(save, cache, hit), 0.0
        done = self._corpus.save(Document(f"{SAVED}{digest[:32]}", save.token_ids), cache, index=(self._scheme,))
        return done.entry, done.encode_s

    def _grown(self, save: PageSave, cache: KVCache, hit: PrefixHit | None) -> CatalogEntry:
        """As a part behind the longest prefix that the store has."""
        level, opening = save.level, () if hit is None else opening_of(hit.info)
        if level is not None:
            if hit is None or level >= len(hit.info.levels):
                raise KvwireError("the store has no more what its rows were computed over")
            level = None if hit.info.levels[level].lossless else level
        count = len(opening)
        ids, first = save.token_ids[count:], cache.slice(count, cache.tokens) if count else cache
        rows = Rows(
            ids, KVCache.from_tensors(first.keys, first.values, replace(first.meta, token_digest=""), ids), opening,
            level, hit.document if hit else None, hit.tokens - count if hit else 0, hit.tokens if hit else 0,
        )  # fmt: skip
        corpus = self._corpus.computed_by(without_weights(self._corpus, first.keys[0].dtype))
        return PartSaver(corpus, self._index).save(rows)

    def _note(self, document: str, encode_s: float = 0.0, error: str = "", message: str = "") -> None:
        """With the lock held: what became of a document."""
        self._under_way -= 1
        self._outcomes.append({"document": document, "encode_s": encode_s, "error": error, "message": message})

    def _failed(self, error: Exception, key: str, document: str = "") -> None:
        words = str(error) if isinstance(error, KvwireError) else f"{type(error).__name__}: {error}"
        self._warn_once(type(error).__name__, f"a prompt was not kept: {words}")
        with self._stored:
            self._waiting.pop(key, None)
            self._stored.notify_all()
            if document and self._is_first:
                self._note(document, error=type(error).__name__, message=words)
        if self._is_first:
            self._counts.add(unsaved_prompts=1)

    def _warn_once(self, kind: str, words: str) -> None:
        """Say once what goes wrong for each request."""
        with self._lock:
            is_new = kind not in self._warned
            self._warned.add(kind)
        if is_new:
            _LOG.warning("%s (told once)", words)


def _own_stream(view: torch.Tensor) -> AbstractContextManager[object]:
    """On a GPU a stream of its own, so that copying does not wait for the model's steps."""
    if view.device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(view.device))  # type: ignore[no-untyped-call]
