"""SGLang's storage backend over a kvwire store: it looks pages up by hash, fetches and decodes them; it writes none.

Source: SGLang 0.5.23, ``sglang.srt.mem_cache.hicache_storage``.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from kvwire.errors import ArgumentError, MismatchError
from kvwire.runtime.adapters import ChunkSettings, heads_of, uniform
from kvwire.runtime.chunk_reader import ChunkReader
from kvwire.store.prefix.schemes import SCHEMES

from .pages import check_pool, flat_page

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo, PoolTransfer
    from torch import Tensor

    from .pages import HostPool

SETTINGS = "kvwire"
"""Name of the settings in ``--hicache-storage-backend-extra-config``."""


class KvwireStorage(HiCacheStorage):
    """Reads pages of documents that were encoded and indexed beforehand; ignores writes."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        """Open the store.

        Args:
            storage_config: SGLang's; ``extra_config["kvwire"]`` has the settings, see ``ChunkSettings``.
            kwargs: Unused.

        Raises:
            ArgumentError: A setting is invalid, or the workers use pipeline or context parallelism.
            NotFoundError: The store has no record of the model.
            MismatchError: Another model is served, or its layers differ.
            KvwireError: The store cannot be opened.
        """
        del kwargs
        given = (storage_config.extra_config or {}).get(SETTINGS)
        if not isinstance(given, dict):
            raise ArgumentError(f'give the extra configuration "{SETTINGS}": {{"store": "file:///folder"}}')
        settings = ChunkSettings.read(given, SCHEMES["sglang"].chunk_tokens, salted=False)
        if storage_config.pp_size > 1 or storage_config.attn_cp_size > 1 or storage_config.dcp_size > 1:
            msg = "kvwire's backend supports only tensor parallelism: run without pipeline and context parallelism"
            raise ArgumentError(msg)
        corpus = settings.corpus()
        self._meta = corpus.meta
        heads, self._dim = uniform(self._meta)
        self._check_served(settings, storage_config.model_name)
        self._heads = heads_of(heads, storage_config.tp_size, storage_config.tp_rank)
        self._reader = ChunkReader(corpus, "sglang", settings)
        self._reader.check_index()
        self._pool: HostPool | None = None

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """Set the pool that pages are read into.

        Args:
            mem_pool_host: SGLang's.

        Raises:
            MismatchError: Its pages do not match the stored model.
        """
        heads = self._heads.stop - self._heads.start
        check_pool(mem_pool_host, len(self._meta.layers), heads, self._dim, self._reader.chunk_tokens)
        super().register_mem_pool_host(mem_pool_host)
        self._pool = mem_pool_host

    def exists(self, key: str) -> bool:
        """Whether a page exists.

        Args:
            key: Its hash, in hexadecimal.

        Returns:
            Whether ``get`` should find it.
        """
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many of the first pages exist.

        Args:
            keys: Hashes, in prompt order.
            extra_info: Unused.

        Returns:
            Number of pages before the first missing one.
        """
        del extra_info
        hashes = list(takewhile(bool, map(_hash, keys)))
        found = self._reader.find(hashes)
        return sum(1 for _ in takewhile(found.__contains__, hashes))

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """``batch_exists``; nothing exists if pools beside keys and values are needed."""
        if pool_transfers:
            return PoolTransferResult.empty()
        return PoolTransferResult(self.batch_exists(keys, extra_info), {})

    def get(self, key: str, target_location: object = None, target_sizes: object = None) -> Tensor | None:
        """Read a page for the pool's ``set_from_flat_data_page``; None if it is missing."""
        del target_location, target_sizes
        return self.batch_get([key])[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: object = None, target_sizes: object = None
    ) -> list[Tensor | None]:
        """Read several pages, see ``get``.

        Args:
            keys: Hashes.
            target_locations: Unused.
            target_sizes: Unused.

        Returns:
            A flat tensor for each; None for missing pages.
        """
        del target_locations, target_sizes
        pages: list[Tensor | None] = [None] * len(keys)
        for place, page in self._pages(keys):
            pages[place] = page
        return pages

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Read pages into the pool.

        Args:
            keys: Hashes.
            host_indices: Slots of all tokens of all pages in the pool.
            extra_info: Unused.

        Returns:
            Whether each was read.
        """
        del extra_info
        read = [False] * len(keys)
        for place, page in self._pages(keys):
            pool = self._pool_or_raise()
            pool.set_from_flat_data_page(int(host_indices[place * pool.page_size]), page)
            read[place] = True
        return read

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Read nothing: pools beside keys and values are not supported."""
        del extra_info
        return {each.name: [False] * len(each.keys or []) for each in transfers}

    def set(self, key: str, value: object = None, target_location: object = None, target_sizes: object = None) -> bool:
        """Report success without writing: SGLang would warn of every page."""
        del key, value, target_location, target_sizes
        return True

    def batch_set(
        self, keys: Sequence[str], values: object = None, target_locations: object = None, target_sizes: object = None
    ) -> bool:
        """As ``set``."""
        del keys, values, target_locations, target_sizes
        return True

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """As ``set``."""
        del host_indices, extra_info
        return [True] * len(keys)

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """As ``set``."""
        del extra_info
        return {each.name: [True] * len(each.keys or []) for each in transfers}

    def close(self) -> None:
        """Close the store."""
        self._reader.close()

    def _pages(self, keys: Sequence[str]) -> Iterator[tuple[int, Tensor]]:
        """Index and page of each key that can be read."""
        pool = self._pool_or_raise()
        places: dict[bytes, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(_hash(key), []).append(place)
        places.pop(b"", None)
        for each, cache in self._reader.read(list(places), pool.dtype):
            page = flat_page(cache, self._heads, pool.layout, pool.page_size)
            yield from ((place, page) for place in places[each])

    def _pool_or_raise(self) -> HostPool:
        if self._pool is None:
            raise ArgumentError("SGLang registered no host pool yet: call register_mem_pool_host first")
        return self._pool

    def _check_served(self, settings: ChunkSettings, model_name: str | None) -> None:
        served_as = settings.served_as or self._meta.model_id
        if model_name != served_as:
            raise MismatchError(
                f"SGLang serves {model_name!r}, the store's documents are of {served_as!r}: if they are one model, say "
                f'"served_as": "{model_name}"'
            )


def _hash(key: str) -> bytes:
    """A page's hash; empty for an invalid key."""
    try:
        return bytes.fromhex(key)
    except ValueError:
        return b""
