"""Inside LMCache: its own checker, its plug-in loader, its keys, objects and hashes."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip(
    "lmcache", reason="LMCache is not installed here: make test-engines runs this in its own environment"
)

from lmcache.v1.check.check_mode_test_l2_adapter import _run_load_phase, _run_lookup_phase, _run_store_phase
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from prometheus_client import REGISTRY, generate_latest

from kvwire.errors import ArgumentError, NotFoundError

from .conftest import CHUNK

pytestmark = pytest.mark.filterwarnings("default")
SPLIT, FUSED = (2, 2, CHUNK, 32), (2, CHUNK, 64)


def spec(stored, **params):
    given = {"store": stored.url, "chunk_tokens": CHUNK} | params
    return {
        "type": "plugin", "module_path": "kvwire.lmcache", "class_name": "KvwireL2Adapter", "adapter_params": given,
    }  # fmt: skip


@contextmanager
def adapter_of(stored, **params):
    """As LMCache's server makes it."""
    adapter = create_l2_adapter(get_l2_adapter_config_class("plugin").from_dict(spec(stored, **params)))
    try:
        yield adapter
    finally:
        adapter.close()


def rank_of(workers, worker):
    return ObjectKey.ComputeKVRank(workers, worker, workers, worker)


def keys_of(hashes, rank=None, model="tiny", **more):
    return [ObjectKey(each, model, rank_of(1, 0) if rank is None else rank, **more) for each in hashes]


def room(count, shape=SPLIT, dtype=torch.float32):
    made = []
    for _ in range(count):
        raw = torch.zeros(torch.Size(shape).numel(), dtype=dtype)
        size = raw.numel() * raw.element_size()
        meta = MemoryObjMetadata(
            torch.Size(shape), dtype, raw.data_ptr(), size, 1, fmt=MemoryFormat.KV_2LTD, shapes=[torch.Size(shape)],
            dtypes=[dtype],
        )  # fmt: skip
        made.append(TensorMemoryObj(raw.view(torch.uint8), meta, parent_allocator=None))
    return made


def bits(bitmap, count):
    return [bool(bitmap.test(at)) for at in range(count)]


def expected(cache, heads=slice(0, 2), *, fused=False):
    sides = [torch.stack([each[heads].transpose(0, 1) for each in side]) for side in (cache.keys, cache.values)]
    both = torch.cat(sides, -1) if fused else torch.stack(sides)
    return both.flatten(-2)


def test_its_hashes_are_those_of_the_index(stored):
    hashes = TokenHasher(CHUNK, "blake3").compute_chunk_hashes(list(stored.tokens["a"]))
    assert hashes == stored.hashes("a")


def test_its_own_checker(stored):
    """The checker wants back what it stored: of a read-only adapter it sees no failure but that."""
    command = [sys.executable, "-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter", "--model", "tiny"]
    command += ["--l2-adapter", json.dumps(spec(stored))]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert "5/5 correctly absent" in run.stdout
    assert "Batch store OK" in run.stdout
    assert "0/5 found" in run.stdout
    assert "timed out" not in run.stdout
    assert "Error" not in run.stdout


@pytest.mark.parametrize(("shape", "fused"), [(SPLIT, False), (FUSED, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_documents_are_loaded_by_the_phases_of_its_checker(stored, shape, fused, dtype):
    keys = keys_of([*stored.hashes("a"), b"\1" * 32])
    with adapter_of(stored) as adapter:
        _, stored_ok = _run_store_phase(adapter, keys, room(6, shape, dtype))
        assert stored_ok
        _, found = _run_lookup_phase(adapter, keys)
        assert bits(found, 6) == [True] * 5 + [False]
        objects = room(6, shape, dtype)
        _, loaded = _run_load_phase(adapter, keys, objects)
        assert bits(loaded, 6) == [True] * 5 + [False]
        adapter.submit_unlock(keys)
        status = adapter.report_status()
    for chunk in range(5):
        exact = stored.exact("a", chunk * CHUNK, (chunk + 1) * CHUNK)
        assert torch.equal(objects[chunk].tensor, expected(exact, fused=fused).to(dtype))
    assert not objects[5].tensor.any()
    assert status["read_only"]
    assert (status["loaded_chunks"], status["troubles"]) == (5, 0)


def test_the_bytes_of_blobs_are_among_the_servers_metrics(stored):
    """LMCache's own count chunks as they are decoded."""

    def metric(name):
        (line,) = [
            each for each in generate_latest(REGISTRY).decode().splitlines() if each.startswith(f"{name}_total ")
        ]
        return float(line.split()[1])

    names = ("kvwire_lmcache_loaded_chunks", "kvwire_lmcache_fetched_bytes")
    keys, objects = keys_of(stored.hashes("a")), room(5)
    with adapter_of(stored) as adapter, adapter_of(stored):
        before = [metric(name) for name in names]
        _run_load_phase(adapter, keys, objects)
        chunks, fetched = (metric(name) - was for name, was in zip(names, before, strict=True))
        assert fetched == adapter.report_status()["fetched_bytes"]
    assert chunks == 5
    assert 0 < fetched < sum(each.tensor.numel() * each.tensor.element_size() for each in objects)


def test_two_workers_get_their_heads(stored):
    hashes, shape = stored.hashes("b"), (2, 2, CHUNK, 16)
    keys = [key for worker in (0, 1) for key in keys_of(hashes, rank_of(2, worker))]
    with adapter_of(stored) as adapter:
        _, found = _run_lookup_phase(adapter, keys)
        objects = room(6, shape)
        _, loaded = _run_load_phase(adapter, keys, objects)
        assert all(bits(found, 6) + bits(loaded, 6))
        assert adapter.report_status()["loaded_chunks"] == 3  # each was decoded once
    for worker in (0, 1):
        for chunk in range(3):
            exact = stored.exact("b", chunk * CHUNK, (chunk + 1) * CHUNK)
            assert torch.equal(objects[3 * worker + chunk].tensor, expected(exact, slice(worker, worker + 1)))


def test_a_lossy_level_reaches_only_requests_with_the_salt(stored):
    hashes = stored.hashes("a")
    with adapter_of(stored, level=2, cache_salt="coarse") as adapter:
        for salt, there in (("coarse", True), ("", False), ("other", False)):
            keys = keys_of(hashes, cache_salt=salt)
            objects = room(5)
            _, found = _run_lookup_phase(adapter, keys)
            _, loaded = _run_load_phase(adapter, keys, objects)
            assert bits(found, 5) == bits(loaded, 5) == [there] * 5
        reader = adapter._reader
        whole = reader.corpus.decode("a", 2)
        objects = room(1)
        _run_load_phase(adapter, keys_of(hashes[1:2], cache_salt="coarse"), objects)
        assert torch.equal(objects[0].tensor, expected(whole.slice(CHUNK, 2 * CHUNK)))


@pytest.mark.parametrize(
    ("key", "shape", "dtype", "said"),
    [
        ({"model": "another"}, SPLIT, torch.float32, '"served_as": "another"'),
        ({"object_group_id": 1}, SPLIT, torch.float32, "several groups"),
        ({}, (2, 3, CHUNK, 32), torch.float32, "serve that model"),
        ({}, (2, 2, 2 * CHUNK, 32), torch.float32, "chunk_tokens"),
        ({}, SPLIT, torch.uint8, "uint8"),
        ({"rank": rank_of(3, 0)}, SPLIT, torch.float32, "cannot be divided"),
    ],
)
def test_what_does_not_fit_is_a_told_miss(stored, caplog, key, shape, dtype, said):
    keys = keys_of(stored.hashes("a"), **key)
    layouts = {keys[0].object_group_id: MemoryLayoutDesc([torch.Size(shape)], [dtype])}
    with adapter_of(stored) as adapter:
        task = adapter.submit_lookup_and_lock_task(keys, layouts)
        objects = room(5, shape, dtype)
        _, loaded = _run_load_phase(adapter, keys, objects)
        while (found := adapter.query_lookup_and_lock_result(task)) is None:
            pass
        assert not any(bits(found, 5) + bits(loaded, 5))
        assert adapter.report_status()["troubles"] >= 2
    assert not any(each.tensor.any() for each in objects)
    assert said in caplog.text


def test_a_damaged_blob_is_a_miss(stored, caplog):
    for path in stored.blobs():
        data = bytearray(path.read_bytes())
        data[-40] ^= 1
        path.write_bytes(data)
    keys = keys_of(stored.hashes("a"))
    with adapter_of(stored) as adapter:
        objects = room(5)
        _, loaded = _run_load_phase(adapter, keys, objects)
    assert bits(loaded, 5)[:4] == [True] * 4
    assert not loaded.test(4)
    assert not objects[4].tensor.any()
    assert "counts as a miss" in caplog.text


def test_objects_that_are_gone_do_not_end_the_server(stored):
    keys, objects = keys_of(stored.hashes("b")), room(3)
    objects[1].invalidate()
    with adapter_of(stored) as adapter:
        _, loaded = _run_load_phase(adapter, keys, objects)
        assert not any(bits(loaded, 3))
        _, found = _run_lookup_phase(adapter, keys)
        assert all(bits(found, 3))


def test_it_says_at_the_start_what_is_wrong(stored, tmp_path, caplog):
    with pytest.raises(ArgumentError, match="not lossless"), adapter_of(stored, level=1):
        pass
    with pytest.raises(NotFoundError, match="no record"), adapter_of(stored, store=f"file://{tmp_path}/none"):
        pass
    with adapter_of(stored, chunk_tokens=256):
        pass
    assert "kvwire store index --index lmcache:256" in caplog.text


def test_it_can_be_closed_twice_and_its_events_differ(stored):
    with adapter_of(stored) as adapter:
        fds = {adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()}
        assert len(fds) == 3
        adapter.close()
