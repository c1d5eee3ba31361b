"""The worker's half of the connector, without vLLM: loads run beside the model and are written between its steps."""

from __future__ import annotations

import logging
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire.errors import KvwireError, MismatchError
from kvwire.reuse.assemble import moved
from kvwire.store.recent import Recent

from .counting import Counts
from .loading import Loaded
from .outcomes import LoadOutcome
from .pages import NULL_BLOCK, BlockTable, layers_with_rows, probe, slots_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvwire.types import CacheMeta, KVCache

    from .loading import PageLoader
    from .pages import Pages
    from .scheduling import PageLoad

_AT_ONCE = 32
"""Loads under way at a time; the rest waits, and its deadlines run."""
_MOST_TAIL_BYTES = 256 << 20
"""Of documents' ends, one for each combination of late: up to 2 MB each with a model of 8B parameters."""
_MEASURED_TOKENS = 64
"""Steps of fewer tokens cost what a step costs, not what its tokens do."""
_LEARN = 0.2
_LOG = logging.getLogger("kvwire.vllm")


@dataclass(frozen=True)
class Written:
    """What became of loads since the last look."""

    requests: frozenset[str]  # whose loads have ended
    bad_blocks: frozenset[int]  # blocks of these that hold nothing of use
    outcomes: tuple[tuple[str, LoadOutcome], ...] = ()  # of each load
    failed: frozenset[str] = frozenset()  # those of which nothing is of use


class ConnectorWorker:
    """Loads documents in threads of its own, and writes what has come into pages when it is called."""

    def __init__(self, loader: PageLoader, *, rank: int = 0, ranks: int = 1, counts: Counts | None = None) -> None:
        """Load nothing yet."""
        self._loader, self._rank, self._ranks, self._counts = loader, rank, ranks, counts or Counts()
        self._pool = ThreadPoolExecutor(_AT_ONCE, "kvwire-load")
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._under_way = 0
        self._done: list[tuple[PageLoad, Loaded]] = []
        self._tails: Recent[str, tuple[int, KVCache]] = Recent(_MOST_TAIL_BYTES, lambda kept: kept[1].nbytes)
        self._pages: Pages | None = None
        self._tables: tuple[BlockTable, ...] = ()
        self._layers: list[int] = []  # of the documents' caches: some have no rows, and no pages

    def register(self, pages: Pages, meta: CacheMeta, tables: Sequence[BlockTable] = ()) -> None:
        """Take the pages to write into, once they are known to hold what is written."""
        check_layers(pages, meta)
        probe(pages)
        self._pages, self._layers = pages, layers_with_rows(meta)
        self._tables = tuple(tables) or (BlockTable(tuple(range(len(pages.views))), pages.views[0].shape[2]),)
        self._loader.is_whole = not self._takes_parts

    @property
    def _takes_parts(self) -> bool:
        """Whether vLLM can compute from the first bad block on: the others hold all that is needed for it."""
        return len(self._tables) == 1 and self._tables[0].is_whole

    def start(self, loads: Sequence[PageLoad]) -> None:
        """Begin loads; returns at once."""
        for load in loads:
            with self._lock:
                self._under_way += 1
            self._pool.submit(self._load, load)

    def wait(self, limit_s: float) -> None:
        """Let loads get on, where the model has nothing to do: steps that only ask for them take Python from them."""
        with self._ended:
            if self._under_way and not self._done:
                self._ended.wait(limit_s)

    def collect(self) -> Written:
        """Write what has come into its pages; to be called between two steps of the model."""
        with self._lock:
            done, self._done = self._done, []
        requests, bad, failed, outcomes = set(), set(), set(), []
        for load, loaded in done:
            there = min(max(loaded.tokens, load.start), load.stop) if loaded.cache is not None else load.start
            if there < load.stop and not self._takes_parts:
                there = load.start
            self._counts.add(
                loads=1, loaded_tokens=there - load.start, lost_tokens=load.stop - there, loaded_bytes=loaded.bytes
            )
            try:
                self._write(load, loaded, there)
            except KvwireError:
                raise
            except Exception as error:  # noqa: BLE001 - the other loads of the batch would be waited for, for ever
                _LOG.warning("request %s: %s: %s", load.request_id, type(error).__name__, error)
                there = load.start
            if there < load.stop and self._takes_parts:
                bad |= self._bad(load, there)
            elif there < load.stop:
                failed.add(load.request_id)
            trouble = "; ".join(loaded.troubles) if there < load.stop else ""
            counts = (load.number, there - load.start, load.stop - there)
            outcomes.append((load.request_id, LoadOutcome(*counts, loaded.level, loaded.bytes, trouble)))
            requests.add(load.request_id)
        return Written(frozenset(requests), frozenset(bad), tuple(outcomes), frozenset(failed))

    def note_step(self, tokens: int, seconds: float) -> None:
        """Learn from a step of the model what a token costs that a load loses."""
        if tokens >= _MEASURED_TOKENS:
            known = self._loader.token_s
            self._loader.token_s = seconds / tokens if not known else known + _LEARN * (seconds / tokens - known)

    def close(self) -> None:
        """End loads that are under way."""
        self._loader.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _load(self, load: PageLoad) -> None:
        """In a thread: nothing that goes wrong may leave a request waiting."""
        try:
            loaded = self._kept_tail(load) or self._loaded(load)
        except Exception as error:  # noqa: BLE001 - see above
            loaded = Loaded(None, load.position, troubles=(f"{type(error).__name__}: {error}",))
        for trouble in loaded.troubles:
            _LOG.warning("request %s: %s", load.request_id, trouble)
        with self._ended:
            self._under_way -= 1
            self._done.append((load, loaded))
            self._ended.notify_all()

    def _loaded(self, load: PageLoad) -> Loaded:
        """Documents at their place in the prompt: the cache begins at ``load.position``."""
        if not load.documents:  # a request that is to fail
            return Loaded(None, load.position)
        goal = load.choice.goal(load.left_s)
        wanted = load.stop - load.position if load.choice.prefix else None
        loaded = self._loader.load(load.documents, load.texts, goal, load.choice.level, wanted, load.kept, load.front)
        if loaded.cache is None:
            return Loaded(None, load.position, loaded.level, loaded.bytes, loaded.troubles)
        front = loaded.cache.slice(0, loaded.tokens)
        stop = load.position + loaded.tokens
        return Loaded(moved(front, load.position), stop, loaded.level, loaded.bytes, loaded.troubles)

    def _kept_tail(self, load: PageLoad) -> Loaded | None:
        """The end of documents whose full blocks vLLM still has: less than a block, which it does not keep."""
        kept = None if load.choice.prefix else self._tails.get(load.salt)
        if kept is None or kept[0] > load.start or kept[0] + kept[1].tokens != load.stop:
            return None
        return Loaded(kept[1], load.stop)

    def _write(self, load: PageLoad, loaded: Loaded, stop: int) -> None:
        """Write a load's tokens before ``stop``, into the blocks that vLLM has for them."""
        pages, cache = self._pages, loaded.cache
        if pages is None:
            raise MismatchError("vLLM asked for documents before it registered its pages; report this")
        if cache is None or stop <= load.start:
            return
        part = cache.slice(load.start - cache.meta.offset, stop - cache.meta.offset)
        for table, blocks in zip(self._tables, load.blocks, strict=True):
            slots = slots_of(blocks, table.block_tokens, load.start, stop)
            there = slots // table.block_tokens != NULL_BLOCK
            for layer in table.layers:
                sides = (part.keys[self._layers[layer]], part.values[self._layers[layer]])
                if not table.is_whole:
                    sides = (sides[0][:, there], sides[1][:, there])
                pages.write(layer, slots[there], *(self._own(pages, layer, side) for side in sides))
        if stop == load.stop and not load.choice.prefix:  # a prefix's salt does not say which
            self._keep_tail(load, cache, math.lcm(*(table.block_tokens for table in self._tables)))

    def _bad(self, load: PageLoad, stop: int) -> set[int]:
        """Blocks of what is missing of a load."""
        block_tokens = self._tables[0].block_tokens
        return set(load.blocks[0][max(stop, load.start) // block_tokens : -(-load.stop // block_tokens)])

    def _own(self, pages: Pages, layer: int, side: torch.Tensor) -> torch.Tensor:
        heads = pages.views[layer].shape[1]
        first = self._rank * side.shape[0] // self._ranks
        return side if side.shape[0] == heads else side[first : first + heads]

    def _keep_tail(self, load: PageLoad, cache: KVCache, block_tokens: int) -> None:
        start = load.stop // block_tokens * block_tokens
        first = start - cache.meta.offset
        if start == load.stop or first < 0:
            return
        tail = cache.slice(first, load.stop - cache.meta.offset)
        copied = type(tail)([k.clone() for k in tail.keys], [v.clone() for v in tail.values], tail.meta)
        self._tails.put(load.salt, (start, copied))


def check_layers(pages: Pages, meta: CacheMeta) -> None:
    """Refuse pages that are not those of a model's layers."""
    layers = layers_with_rows(meta)
    if len(pages.views) != len(layers):
        msg = f"vLLM has pages of {len(pages.views)} layers, the documents are of {len(layers)}: name their model"
        raise MismatchError(msg)
    for layer, view in zip(layers, pages.views, strict=True):
        spec = meta.layers[layer]
        if view.shape[3] != spec.key_dim + spec.value_dim or spec.kv_heads % view.shape[1]:
            raise MismatchError(
                f"layer {layer}: vLLM's pages hold {view.shape[1]} heads of {view.shape[3]} elements, the documents' "
                f"caches {spec.kv_heads} of {spec.key_dim + spec.value_dim}: name the model that they were encoded with"
            )
