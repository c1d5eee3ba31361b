"""LMCache's L2 adapter over a kvwire store: it reads chunks by hash, and writes none.

Source: LMCache 0.5.6, ``lmcache.v1.distributed.l2_adapters.base``.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from kvwire.errors import KvwireError
from kvwire.runtime.adapters import ChunkSettings, uniform
from kvwire.runtime.chunk_reader import ChunkReader, Troubles
from kvwire.store.prefix.schemes import SCHEMES

from .layout import ObjectLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.memory_management import MemoryObj

T = TypeVar("T")
log = logging.getLogger("kvwire")
_THREADS = 4


class Finished(Generic[T]):
    """Results of tasks of one kind until they are fetched, with an event file descriptor."""

    def __init__(self) -> None:
        """Start without results."""
        self.event = create_event_notifier()
        self._results: dict[int, T] = {}
        self._lock = Lock()

    def add(self, task: int, result: T) -> None:
        """Add a result and signal the event."""
        with self._lock:
            self._results[task] = result
        self.event.notify()

    def pop(self, task: int) -> T | None:
        """Remove and return a task's result; None if it is not finished."""
        with self._lock:
            return self._results.pop(task, None)

    def pop_all(self) -> dict[int, T]:
        """Remove and return all results."""
        with self._lock:
            results, self._results = self._results, {}
        return results


class _Metrics(Collector):
    """What all adapters of this process did, beside LMCache's own metrics, which count chunks as they are decoded."""

    def __init__(self) -> None:
        """Of no adapter yet."""
        self.adapters: WeakSet[KvwireL2Adapter] = WeakSet()

    def collect(self) -> Iterator[CounterMetricFamily]:
        """As Prometheus asks for it."""
        told = [adapter.report_status() for adapter in list(self.adapters)]
        for name, words in _COUNTED.items():
            yield CounterMetricFamily(f"kvwire_lmcache_{name}", words, value=sum(each[name] for each in told))


_COUNTED = {
    "loaded_chunks": "Chunks that were read from kvwire's store.",
    "fetched_bytes": "Bytes of their blobs.",
    "troubles": "Failures; the log tells each kind once.",
}
"""Names in an adapter's status that are metrics, too."""
_METRICS = _Metrics()
REGISTRY.register(_METRICS)


class KvwireL2Adapter(L2AdapterInterface):
    """Reads chunks of documents that were encoded and indexed beforehand.

    A store task succeeds at once with no byte written, like in LMCache's own read-only adapter: LMCache would warn of
    every failed task.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        """Open the store.

        Args:
            params: ``adapter_params``, see ``ChunkSettings``.
            l1_memory_desc: Unused: chunks are copied into LMCache's objects.

        Raises:
            ArgumentError: A parameter is invalid.
            NotFoundError: The store has no record of the model.
            MismatchError: The model's layers differ.
            KvwireError: The store cannot be opened.
        """
        super().__init__(max_capacity_bytes=0)
        del l1_memory_desc
        settings = ChunkSettings.read(params, SCHEMES["lmcache"].chunk_tokens, salted=True)
        corpus = settings.corpus()
        self._meta, self._salt, self._cpu_block = corpus.meta, settings.cache_salt, settings.cpu_block
        uniform(self._meta)
        self._served_as = settings.served_as or self._meta.model_id
        self._troubles = Troubles()
        self._reader = ChunkReader(corpus, "lmcache", settings, self._troubles)
        self._reader.check_index()
        self._stores, self._lookups = Finished[L2StoreResult](), Finished[Bitmap]()
        self._loads = Finished[Bitmap]()
        self._numbers = count()
        self._pool = ThreadPoolExecutor(_THREADS, "kvwire-lmcache")
        self._is_closed = False
        _METRICS.adapters.add(self)

    def get_store_event_fd(self) -> int:
        """Signalled when a store task is done."""
        return int(self._stores.event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Signalled when a look-up is done."""
        return int(self._lookups.event.fileno())

    def get_load_event_fd(self) -> int:
        """Signalled when a load is done."""
        return int(self._loads.event.fileno())

    def submit_store_task(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> int:
        """Report a success of 0 bytes.

        Args:
            keys: Ignored.
            objects: Ignored.

        Returns:
            Task number.
        """
        del keys, objects
        task = next(self._numbers)
        self._stores.add(task, L2StoreResult(success=True, bytes_transferred=0))
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Finished store tasks, each once."""
        return self._stores.pop_all()

    def submit_lookup_and_lock_task(
        self, keys: Sequence[ObjectKey], group_layout_descs: Mapping[int, MemoryLayoutDesc]
    ) -> int:
        """Look chunks up. No lock is needed: if a document is deleted meanwhile, its load misses.

        Args:
            keys: Keys of the chunks.
            group_layout_descs: Layouts of the objects to load into, if known.

        Returns:
            Task number.
        """
        return self._submit(self._lookups, partial(self._look_up, list(keys), dict(group_layout_descs)), len(keys))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Which chunks exist, once; None while the task runs."""
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: Sequence[ObjectKey]) -> None:
        """Do nothing: nothing was locked."""

    def submit_load_task(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> int:
        """Load chunks into memory objects.

        Args:
            keys: Keys of the chunks.
            objects: One for each; unchanged if its chunk cannot be loaded.

        Returns:
            Task number.
        """
        return self._submit(self._loads, partial(self._load, list(keys), list(objects)), len(keys))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Which chunks were loaded, once; None while the task runs."""
        return self._loads.pop(task_id)

    def report_status(self) -> dict[str, Any]:
        """Counts of reads and failures."""
        return {
            "is_healthy": not self._is_closed,
            "type": type(self).__name__,
            "read_only": True,
            "loaded_chunks": self._reader.chunks,
            "fetched_bytes": self._reader.bytes,
            "troubles": self._troubles.count,
        }

    def close(self) -> None:
        """Wait for running tasks, and drop the others."""
        if self._is_closed:
            return
        self._is_closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._reader.close()
        for kind in (self._stores, self._lookups, self._loads):
            kind.event.close()

    def _submit(self, kind: Finished[Bitmap], work: Callable[[], list[int]], keys: int) -> int:
        task = next(self._numbers)

        def run() -> None:
            found = Bitmap(keys)
            try:
                for place in work():
                    found.set(place)
            except Exception:  # a failing cache must not end LMCache's server
                log.exception("kvwire's adapter failed: its chunks count as misses")
                found = Bitmap(keys)
            kind.add(task, found)

        self._pool.submit(run)
        return task

    def _look_up(self, keys: Sequence[ObjectKey], descs: Mapping[int, MemoryLayoutDesc]) -> list[int]:
        for group, desc in descs.items():
            ranks = {key.kv_rank for key in keys if key.object_group_id == group}
            if not all(self._fits(rank, desc.shapes, desc.dtypes) for rank in ranks):
                return []
        found = self._reader.find([key.chunk_hash for key in keys if self._is_ours(key)])
        return [place for place, key in enumerate(keys) if key.chunk_hash in found and self._is_ours(key)]

    def _load(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> list[int]:
        """Load chunks; returns the indices of loaded keys. Workers that share a chunk are written from one decoding."""
        places: dict[Any, dict[bytes, list[int]]] = {}
        for place, (key, each) in enumerate(zip(keys, objects, strict=True)):
            shapes, dtypes = _held(each)
            if self._is_ours(key) and self._fits(key.kv_rank, shapes, dtypes):
                places.setdefault(dtypes[0], {}).setdefault(key.chunk_hash, []).append(place)
        loaded = []
        for dtype, by_hash in places.items():
            for chunk_hash, cache in self._reader.read(list(by_hash), dtype):
                for place in by_hash[chunk_hash]:
                    self._layout(keys[place].kv_rank).write(objects[place].tensor, cache)
                    loaded.append(place)
        return loaded

    def _is_ours(self, key: ObjectKey) -> bool:
        if key.model_name != self._served_as:
            self._troubles.tell(
                f"LMCache asks for {key.model_name!r}, the store's documents are of {self._served_as!r}: if they are "
                f'one model, say "served_as": "{key.model_name}"'
            )
            return False
        if key.object_group_id:
            self._troubles.tell("the model has several groups of layers here, which the adapter does not serve")
            return False
        return bool(key.cache_salt == (self._salt or ""))

    def _layout(self, kv_rank: int) -> ObjectLayout:
        return ObjectLayout.of(self._meta, self._reader.chunk_tokens, kv_rank, self._cpu_block)

    def _fits(self, kv_rank: int, shapes: Sequence[Sequence[int]], dtypes: Sequence[Any]) -> bool:
        try:
            self._layout(kv_rank).check(shapes, dtypes)
        except KvwireError as error:
            self._troubles.tell(str(error))
            return False
        return True


def _held(each: MemoryObj) -> tuple[Sequence[Sequence[int]], Sequence[Any]]:
    """Shapes and dtypes in a memory object."""
    meta = each.metadata
    if meta.shapes is not None and meta.dtypes is not None:
        return list(meta.shapes), list(meta.dtypes)
    return [meta.shape], [meta.dtype]
