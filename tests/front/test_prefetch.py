"""Documents that are fetched ahead of their loads."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import closing

import pytest

import kvwire
from kvwire.controller import CostModel, DecodeCost, PrefillCost
from kvwire.errors import ArgumentError, NotFoundError
from kvwire.runtime.corpus import Corpus
from kvwire.runtime.loader import Loader
from kvwire.runtime.settings import LoadSettings
from kvwire.store import TierSettings, open_tiers
from kvwire.transport.testing import serving

from ..store_wrappers import CountingStore, SlowStore, StoreWrapper


def test_what_is_fetched_ahead_is_there_when_it_is_decoded(small):
    remote = CountingStore(small.corpus().catalog.store)
    names = list(small.tokens)
    with closing(open_tiers(remote)) as tiers:
        corpus = Corpus(small.engine, tiers)
        corpus.set_profile(small.profile)
        key = corpus.find(names[0]).blob_key
        info = corpus.read_header(corpus.find(names[0]))
        corpus.prefetch(names[:1], 1)
        assert tiers.settle(30)
        before = remote.tally("get")
        assert before.bytes < info.file_bytes
        for chunk in range(info.chunks):
            reads = info.reads(chunk, 1)
            tiers.get(key, reads[0].offset, reads[-1].end)
        assert remote.tally("get") == before
        corpus.decode(names[0], 1)
        assert remote.tally("get").requests > before.requests  # which reads the whole blob
        with pytest.raises(NotFoundError):
            corpus.prefetch(["absent"])


def test_a_load_after_that_fetches_no_chunk(small):
    """From a slow server, at the level that was named: what the load still reads are entries and texts."""
    names = list(small.tokens)
    with (
        serving(SlowStore(small.corpus().catalog.store, latency_s=0.02)) as url,
        closing(open_tiers(kvwire.open_store(url))) as tiers,
    ):
        corpus = Corpus(small.engine, tiers)
        corpus.profile()
        assert corpus.prefetch(names, 1).wait(60)
        fetched = tiers.counters().remote.bytes
        costs = CostModel(PrefillCost(10.0, 1.0), DecodeCost(1e-5, 1e-6))
        settings = LoadSettings(quality_floor=1, quality_ceiling=1)
        with Loader(small.engine, corpus, costs=costs, settings=settings) as loader:
            answer = loader.ask(names, [1, 2, 3])
        assert {decision.level for decision in answer.decisions} == {1}
        assert tiers.counters().remote.bytes == fetched


class Gated(StoreWrapper):
    """Lets reads of a blob's chunks through when it is told to; counts them."""

    def __init__(self, store):
        super().__init__(store)
        self.asked, self.gate, self.key = [], threading.Event(), ""

    def _do(self, request, call):
        if request.method == "get" and request.key == self.key:
            self.asked.append(request)
            self.gate.wait(30)
        return call(request.data)


@pytest.mark.parametrize("way", ["wait", "await"])
def test_what_is_fetched_ahead_can_be_cancelled(small, way):
    remote = Gated(small.corpus().catalog.store)
    names = list(small.tokens)
    with closing(open_tiers(remote, settings=TierSettings(prefetch_bytes=4096, prefetch_threads=1))) as tiers:
        corpus = Corpus(small.engine, tiers)
        corpus.read_header(corpus.find(names[0]))
        remote.key = corpus.find(names[0]).blob_key
        ahead = corpus.prefetch(names[:1])

        async def waits():
            await asyncio.wait_for(ahead, 0.05)

        if way == "await":
            with pytest.raises(TimeoutError):
                asyncio.run(waits())
        else:
            assert not ahead.wait(0.01)
            ahead.cancel()
        remote.gate.set()
        assert not ahead.wait(30)
        assert tiers.settle(30)
        assert len(remote.asked) <= 1  # of many
        assert corpus.prefetch(names[:1]).wait(30)
        assert asyncio.run(awaited(corpus.prefetch(names)))
        assert len(remote.asked) > 1
        assert asyncio.run(awaited(ahead)) is False  # it was cancelled, not who waits for it


async def awaited(ahead):
    return await ahead


def test_the_command_fetches_what_is_asked_next(run, small, demo_model, tmp_path):
    store, texts, cache = tmp_path / "store", tmp_path / "texts", tmp_path / "cache"
    store.mkdir()
    texts.mkdir()
    for number, text in enumerate(small.texts.values()):
        (texts / f"text-{number}.txt").write_text(text[:1500])
    place = ["--model", demo_model, "--store", store]
    code, _, err = run("encode", texts, *place, "--calibration", "quick")
    assert code == 0, err
    ask = ["ask", "--docs", "text-0", "--question", "And", "--tokens", 1, *place, "--json"]
    code, _, err = run(*ask, "--soon", "text-1")
    assert "give --cache" in err
    code, _, err = run(*ask, "--soon", "text-1", "--cache", cache)
    assert code == 0, err
    code, out, err = run(*ask[:1], "--docs", "text-1", *ask[3:], "--soon", "nothing", "--cache", cache)
    assert code != 0
    assert "nothing" in err
    assert json.loads(out.splitlines()[0])["bytes"] == 0  # over the link
    code, _, err = run(*ask[:1], "--docs", "absent", *ask[3:], "--soon", "nothing", "--cache", cache)
    assert code == 3
    assert "absent" in err
    assert "nothing" not in err  # what was not answered has no later question


def test_without_a_cache_there_is_nowhere_to_put_it(small):
    with pytest.raises(ArgumentError, match="needs a cache"):
        small.corpus().prefetch(list(small.tokens))
