"""Caches that calibration puts on disk."""

from __future__ import annotations

import resource
import sys
import weakref
from dataclasses import replace

import pytest
import torch

from kvwire.codec import fit_profile
from kvwire.runtime.calibrate import spilled

from ..codec.synthetic import MIXED, MIXED_ROPES, make_cache, make_statistics


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fit_on_mapped_caches_is_the_same(tmp_path, dtype):
    caches = [make_cache(n, n, layers=MIXED, ropes=MIXED_ROPES, dtype=dtype) for n in (200, 1, 77)]
    mapped = spilled(caches, len(caches), tmp_path)
    for ours, theirs in zip(mapped, caches, strict=True):
        assert ours.meta == theirs.meta
        assert ours.token_ids == theirs.token_ids
        pairs = zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True)
        assert all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
    statistics = make_statistics(MIXED, MIXED_ROPES, words=True)
    assert fit_profile(mapped, statistics).digest == fit_profile(caches, statistics).digest


def test_files_leave_no_name_behind(tmp_path):
    mapped = spilled((make_cache(9) for _ in range(3)), 3, tmp_path)
    assert len(mapped) == 3
    assert not list(tmp_path.iterdir())


def test_without_room_caches_stay_in_memory(tmp_path, caplog):
    cache = make_cache(9)
    (kept,) = spilled([cache], 1, tmp_path / "nowhere")
    assert kept is cache
    assert "stays in memory" in caplog.text


def test_a_disk_that_fills_up_keeps_caches_in_memory(tmp_path, caplog):
    if sys.platform == "win32":
        pytest.skip("needs a limit on files")
    limits, cache = resource.getrlimit(resource.RLIMIT_FSIZE), make_cache(900)
    import signal

    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
        (kept,) = spilled([cache], 1, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert kept is cache
    assert "stays in memory" in caplog.text
    assert not list(tmp_path.iterdir())


def test_one_cache_is_held_at_a_time(tmp_path):
    """Each is written and let go of before the one after the next is made."""
    made = []

    def caches():
        for number in range(5):
            assert sum(cache() is not None for cache in made) <= 1
            cache = make_cache(50, number)
            made.append(weakref.ref(cache))
            yield cache

    assert len(spilled(caches(), 5, tmp_path)) == len(made) == 5


def test_where_no_file_can_be_mapped_caches_stay_in_memory(tmp_path, caplog, monkeypatch):
    def refuse(*_, **__):
        msg = "unable to mmap"
        raise RuntimeError(msg)

    monkeypatch.setattr(torch, "from_file", refuse)
    cache = make_cache(9)
    assert spilled([cache], 1, tmp_path) == [cache]
    assert "stays in memory" in caplog.text
    assert not list(tmp_path.iterdir())


def test_tensors_of_several_widths_share_a_file(tmp_path):
    cache = make_cache(9)
    keys = [torch.arange(3, dtype=torch.uint8).reshape(1, 3, 1), *cache.keys[1:]]
    (mapped,) = spilled([replace(cache, keys=keys)], 1, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(mapped.keys, keys, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(mapped.values, cache.values, strict=True))
