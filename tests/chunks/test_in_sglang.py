"""Inside SGLang: its base class, its factory, its failure injector, its page hashes."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed here: make test-engines runs this in its own environment")

from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageFailureInjector,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed

from kvwire.errors import ArgumentError, MismatchError, NotFoundError

from .conftest import PAGE

pytestmark = pytest.mark.filterwarnings("default")
PLACES = 12 * PAGE
# Of each layout: shape of the pool's buffer, and how a page is cut out of it, for 2 layers, 2 heads of 16.
POOLS = {
    "layer_first": ((2, 2, PLACES, 2, 16), lambda buffer, at: buffer[:, :, at : at + PAGE]),
    "page_first": ((2, PLACES, 2, 2, 16), lambda buffer, at: buffer[:, at : at + PAGE].transpose(1, 2)),
    "page_first_direct": ((2, PLACES // PAGE, 2, PAGE, 2, 16), lambda buffer, at: buffer[:, at // PAGE]),
    "page_head": ((2, PLACES // PAGE, 2, PAGE, 2, 16), lambda buffer, at: buffer[:, at // PAGE].permute(0, 3, 2, 1, 4)),
}


class Pool:
    """SGLang's host pool of plain attention, whose own module needs a build for GPUs: the same buffers and pages."""

    page_size, layer_num, head_num, head_dim = PAGE, 2, 2, 16

    def __init__(self, layout="layer_first", dtype=torch.float32, **changes):
        self.layout, self.dtype = layout, dtype
        self.__dict__.update(changes)
        self.shape, self.cut = POOLS[layout]
        self.buffer = torch.zeros(self.shape, dtype=dtype)

    def set_from_flat_data_page(self, index, data_page):
        if self.layout == "layer_first":
            self.buffer[:, :, index : index + PAGE] = data_page.reshape(2, 2, PAGE, 2, 16)
        elif self.layout == "page_first":
            self.buffer[:, index : index + PAGE] = data_page.reshape(2, PAGE, 2, 2, 16)
        else:
            self.buffer[:, index // PAGE] = data_page.reshape(self.buffer[:, 0].shape)

    def page(self, index):
        """``[2, layers, tokens, heads, dim]``."""
        return self.cut(self.buffer, index)


def config(stored, extra=None, tp=(0, 1), model="tiny", **params):
    given = {"store": stored.url, "chunk_tokens": PAGE} | params
    plugin = {"backend_name": "kvwire", "module_path": "kvwire.sglang", "class_name": "KvwireStorage", "kvwire": given}
    return HiCacheStorageConfig(
        tp_rank=tp[0], tp_size=tp[1], pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=False, model_name=model, extra_config=plugin | (extra or {}),
    )  # fmt: skip


@contextmanager
def backend_of(stored, pool=None, **given):
    """As SGLang's cache controller makes it."""
    backend = StorageBackendFactory.create_backend("dynamic", config(stored, **given), None)
    if pool is not None:
        backend.register_mem_pool_host(pool)
    yield backend
    getattr(backend, "_backend", backend).close()


def keys_of(stored, name):
    count = len(stored.tokens[name]) // PAGE
    return get_hash_str(list(stored.tokens[name][: count * PAGE]), None, PAGE)


def expected(cache, heads=slice(0, 2)):
    return torch.stack(
        [torch.stack([each[heads].transpose(0, 1) for each in side]) for side in (cache.keys, cache.values)]
    )


def test_its_hashes_are_those_of_the_index(stored):
    assert [bytes.fromhex(each) for each in keys_of(stored, "a")] == stored.hashes("a", "sglang", PAGE)


@pytest.mark.parametrize("layout", sorted(POOLS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_are_read_into_the_pool(stored, layout, dtype):
    pool, keys = Pool(layout, dtype), keys_of(stored, "a")
    with backend_of(stored, pool) as backend:
        assert isinstance(backend, HiCacheStorage)
        assert backend.batch_exists([*keys, "00" * 32]) == len(keys) == 10
        places = torch.arange(PLACES).view(-1, PAGE).flip(0)[: len(keys)].flatten()
        assert backend.batch_get_v1(keys, places) == [True] * 10
        flat = backend.batch_get([keys[3], "00" * 32])
    for chunk in range(10):
        exact = expected(stored.exact("a", chunk * PAGE, (chunk + 1) * PAGE)).to(dtype)
        assert torch.equal(pool.page(int(places[chunk * PAGE])), exact)
    other = Pool(layout, dtype)
    other.set_from_flat_data_page(0, flat[0])
    assert torch.equal(other.page(0), pool.page(int(places[3 * PAGE])))
    assert flat[1] is None


def test_a_worker_reads_its_heads(stored):
    pool, keys = Pool(head_num=1), keys_of(stored, "b")
    pool.buffer = torch.zeros(2, 2, PLACES, 1, 16)
    pool.set_from_flat_data_page = lambda index, page: pool.buffer[:, :, index : index + PAGE].copy_(
        page.reshape(2, 2, PAGE, 1, 16)
    )
    with backend_of(stored, pool, tp=(1, 2)) as backend:
        assert backend.batch_get_v1(keys, torch.arange(PLACES)) == [True] * 6
    assert torch.equal(pool.buffer[:, :, :192], expected(stored.exact("b", 0, 192), slice(1, 2)))


def test_what_is_not_there_is_a_miss(stored):
    keys, seed = keys_of(stored, "a"), storage_namespace_seed(None, "a salt")
    with backend_of(stored, Pool()) as backend:
        salted = get_hash_str(list(stored.tokens["a"][:PAGE]), seed, PAGE)
        assert backend.batch_exists(salted) == 0
        assert backend.batch_exists(["no hash", *keys]) == 0
        assert backend.batch_exists([keys[0], "00" * 32, keys[1]]) == 1
        assert not backend.exists("00" * 32)
        assert backend.exists(keys[0])
        assert backend.get("no hash") is None
        mamba = [PoolTransfer(PoolName.MAMBA, keys=keys[:2])]
        assert backend.batch_exists_v2(keys).kv_hit_pages == 10
        assert backend.batch_exists_v2(keys, mamba).kv_hit_pages == 0
        assert backend.batch_get_v2(mamba) == {"mamba": [False, False]}


def test_what_is_set_is_not_kept(stored):
    with backend_of(stored, Pool()) as backend:
        assert backend.set("00" * 32, torch.zeros(4))
        assert backend.batch_set(["00" * 32], [torch.zeros(4)])
        assert backend.batch_set_v1(["00" * 32], torch.arange(PAGE)) == [True]
        assert backend.batch_set_v2([PoolTransfer(PoolName.MAMBA, keys=["a"])]) == {"mamba": [True]}
        assert not backend.exists("00" * 32)


def test_under_its_failure_injector_pages_are_right_or_missing(stored):
    keys, right = keys_of(stored, "a"), 0
    with (
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.5),
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.override(0.001),
    ):
        for _ in range(60):  # each of which reads nothing with a chance of three in four
            pool = Pool()
            with backend_of(stored, pool) as backend:
                assert isinstance(backend, HiCacheStorageFailureInjector)
                there = backend.batch_exists(keys)
                read = backend.batch_get_v1(keys[:there], torch.arange(PLACES))
            for chunk, is_read in enumerate(read):
                exact = expected(stored.exact("a", chunk * PAGE, (chunk + 1) * PAGE))
                right += is_read
                assert torch.equal(pool.page(chunk * PAGE), exact if is_read else torch.zeros_like(exact))
    assert 0 < right < 600


def test_a_damaged_blob_is_a_miss(stored):
    for path in stored.blobs():
        data = bytearray(path.read_bytes())
        data[-40] ^= 1
        path.write_bytes(data)
    keys, pool = keys_of(stored, "a"), Pool()
    with backend_of(stored, pool) as backend:
        assert backend.batch_get_v1(keys, torch.arange(PLACES)) == [True] * 9 + [False]
    assert not pool.page(9 * PAGE).any()


def test_it_says_at_the_start_what_is_wrong(stored, tmp_path, caplog):
    for error, said, given in (
        (ArgumentError, "not lossless", {"level": 1}),
        (ArgumentError, '"store"', {"extra": {"kvwire": None}}),
        (NotFoundError, "no record", {"store": f"file://{tmp_path}/none"}),
        (MismatchError, '"served_as": "another"', {"model": "another"}),
        (MismatchError, "--page-size", {"pool": Pool(), "chunk_tokens": 64}),
    ):
        with pytest.raises(error, match=said), backend_of(stored, **given):
            pass
    with backend_of(stored, chunk_tokens=64):
        pass
    assert "kvwire store index --index sglang:64" in caplog.text
    with backend_of(stored) as backend, pytest.raises(ArgumentError, match="registered no host pool"):
        backend.batch_get(keys_of(stored, "a"))
