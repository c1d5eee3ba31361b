"""Fits that are interrupted go on from what they have summed, and never hold all contexts."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from kvwire.codec import fit_profile
from kvwire.errors import CorruptError, MismatchError
from kvwire.runtime.calibrate import MomentFile
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.store import MemoryStore
from kvwire.types import CacheMeta, KVCache, LayerSpec

pytestmark = pytest.mark.usefixtures("few_objects")
LAYERS = (LayerSpec(2, 16, 16),) * 2
COUNT = 6


class Contexts:
    """Makes each cache when it is asked for, and counts those that anybody still holds."""

    def __init__(self, stop_at=None, seed=0):
        self.asked, self.most, self.stop_at, self._seed = [], 0, stop_at, seed
        self._alive = weakref.WeakSet()

    def __len__(self):
        return COUNT

    def __iter__(self):
        return (self[number] for number in range(COUNT))

    def __getitem__(self, number):
        if not 0 <= number < COUNT:
            raise IndexError(number)
        draw = torch.Generator().manual_seed(100 * self._seed + number)
        tensors = [torch.randn(2, 70, 16, generator=draw) for _ in range(4)]
        ids = torch.randint(0, 50, (70,), generator=draw).tolist()
        cache = KVCache.from_tensors(tensors[:2], tensors[2:], CacheMeta("m", "r", layers=LAYERS), ids)
        self.asked.append(number)
        self._alive.add(cache)
        gc.collect()
        self.most = max(self.most, len(self._alive))
        return cache


class Interrupting(MomentFile):
    """Ends the process, so to speak, once some caches were summed and kept."""

    def __init__(self, path, after):
        super().__init__(path, save_s=0.0)
        self.after = after

    def keep(self, arrays, total):
        super().keep(arrays, total)
        self.after -= 1
        if not self.after:
            raise KeyboardInterrupt


@pytest.fixture
def path(tmp_path):
    return tmp_path / "fit.npz"


def interrupted(path, after=2, **settings):
    with pytest.raises(KeyboardInterrupt):
        fit_profile(Contexts(), keeper=Interrupting(path, after), **settings)
    return path


def test_a_fit_holds_one_context_or_two_however_many_there_are():
    contexts = Contexts()
    assert fit_profile(contexts) is not None
    assert contexts.most <= 2
    assert set(contexts.asked) == set(range(COUNT))


@pytest.mark.parametrize("after", [1, 4, COUNT])
def test_an_interrupted_fit_goes_on_and_gives_the_same(path, after, monkeypatch):
    """To the bit; and what was summed is not summed again."""
    from kvwire.codec.fitting.moments import MomentSums

    whole = fit_profile(Contexts())
    interrupted(path, after)
    summed, add = [], MomentSums.add
    monkeypatch.setattr(MomentSums, "add", lambda sums, cache: (summed.append(sums.caches), add(sums, cache))[1])
    keeper = MomentFile(path)
    assert fit_profile(Contexts(), keeper=keeper).data == whole.data
    assert summed == list(range(after, COUNT))
    assert path.exists()
    keeper.done()
    assert not path.exists()


@pytest.mark.parametrize("other", ["contexts", "settings"])
def test_sums_of_another_fit_are_refused(path, other):
    interrupted(path)
    seed, settings = (1, {}) if other == "contexts" else (0, {"group_width": 32})
    with pytest.raises(MismatchError, match="name another file, or delete this one"):
        fit_profile(Contexts(seed=seed), keeper=MomentFile(path), **settings)


def test_damaged_sums_are_refused_with_what_to_do(path):
    data, sound = interrupted(path).read_bytes(), np.load(path)
    digest, wanted = str(sound["digest"]), {name: sound[name] for name in sound.files if name != "digest"}
    sound.close()
    keeper = MomentFile(path)
    for at in range(0, len(data), 997):
        bad = bytearray(data)
        bad[at] ^= 255
        path.write_bytes(bytes(bad))
        try:
            found = keeper.recall(lambda: digest)
        except (CorruptError, MismatchError) as error:
            assert "delete" in str(error)  # noqa: PT017 - some bytes, such as those of a date, do no harm
        else:
            assert found.keys() == wanted.keys()
            assert all(map(np.array_equal, found.values(), wanted.values()))
    for end in (0, 10, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:end])
        with pytest.raises(CorruptError, match="delete the file"):
            keeper.recall(lambda: digest)
    path.write_text("no archive")
    with pytest.raises(CorruptError, match="delete the file"):
        fit_profile(Contexts(), keeper=keeper)
    np.savez(path, caches=np.array(2))
    with pytest.raises(CorruptError, match="delete the file"):
        fit_profile(Contexts(), keeper=keeper)


def test_the_file_is_written_from_time_to_time_only(path):
    fit_profile(Contexts(), keeper=MomentFile(path, save_s=3600.0))
    assert not path.exists()


def test_a_fit_goes_on_without_a_file_that_cannot_be_written(tmp_path, caplog):
    keeper = MomentFile(tmp_path / "nowhere" / "fit.npz", save_s=0.0)
    assert fit_profile(Contexts(), keeper=keeper) is not None
    assert "goes on without" in caplog.text


def test_a_corpus_goes_on_and_leaves_no_file(path, small, monkeypatch):
    documents = [Document(name, tuple(ids)) for name, ids in small.tokens.items()]
    monkeypatch.setattr("kvwire.runtime.calibrate.MomentFile", lambda path: Interrupting(path, 1))
    corpus = Corpus(small.engine, MemoryStore(), coding=Coding(resume=path))
    with pytest.raises(KeyboardInterrupt):
        corpus.calibrate(documents, 16384)
    assert path.exists()
    monkeypatch.setattr("kvwire.runtime.calibrate.MomentFile", MomentFile)
    assert corpus.calibrate(documents, 16384).data == small.profile.data
    assert list(Path(path.parent).iterdir()) == []
