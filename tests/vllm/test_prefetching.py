"""Documents that are fetched ahead: read once, behind everything else, and loaded without the store."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing

import pytest
import torch

from kvwire.engines.vllm.counting import Counts
from kvwire.engines.vllm.prefetching import NO_CACHE, Prefetcher, PrefetchHint
from kvwire.engines.vllm.scheduling import ConnectorScheduler
from kvwire.runtime.corpus import Corpus
from kvwire.store import FolderStore, TierSettings, open_tiers
from kvwire.vllm import Choice, request_salt

from .halves import QUESTION, Halves, check


class Slow(FolderStore):
    """A store that takes its time for each read of a blob, and counts these."""

    reads = 0

    def get(self, key, start=0, end=None):
        if key.endswith(".kvw"):
            self.reads += 1
            time.sleep(0.05)
        return super().get(key, start, end)

    def snapshot(self, key):
        if key.endswith(".kvw"):
            self.reads += 1
        return super().snapshot(key)


@pytest.fixture
def slow(told):
    with closing(Slow(told.root)) as remote, closing(open_tiers(remote, memory_bytes=1 << 24)) as tiers:
        told.corpus = Corpus.open(tiers)
        yield told, remote, tiers


def wait(counts, tiers, documents):
    until, sums = time.monotonic() + 60, Counter()
    while sum(sums.values()) < documents:
        assert time.monotonic() < until
        time.sleep(0.01)
        sums.update(counts.take())
    assert tiers.settle(60)
    return sums


def test_what_was_fetched_ahead_is_loaded_without_the_store(slow):
    told, remote, tiers = slow
    counts = Counts()
    with closing(Halves(told)) as halves, closing(Prefetcher(told.corpus, counts)) as prefetcher:
        hint = {"documents": ["b"], "soon": ["a", "c"], "level": 1}
        salt = request_salt(told.corpus, Choice(("b",), level=1))
        first = halves.body("b") | {"kv_transfer_params": {"kvwire": hint}}
        assert first["cache_salt"] == salt  # what comes later changes no cache
        halves.load(first)
        hints = halves.scheduling.take_hints()
        assert hints == [PrefetchHint(("a", "c"), 1)]
        prefetcher.start(hints)
        assert wait(counts, tiers, 2) == {"soon_documents": 2}
        assert halves.scheduling.take_hints() == []
        body, before = halves.body("ac"), remote.reads
        _, blocks, said, promised = halves.load(body)
        assert (said["loaded_tokens"], remote.reads) == (promised, before)
        (cache,) = [told.corpus.decode("a", 1, dtype=torch.float32)]
        check(halves, blocks, cache, 0, cache.tokens)


@pytest.mark.parametrize(("hints", "became"), [(0, "soon_dropped"), (5, "soon_documents")])
def test_one_document_after_the_other_is_fetched(told, hints, became):
    """A cache queues a bounded number of ranges, and a document has one for each of its chunks: here up to 5."""
    counts, few = Counts(), TierSettings(prefetch_hints=hints)
    tiers = open_tiers(FolderStore(told.root), memory_bytes=1 << 24, settings=few)
    with closing(tiers), closing(Prefetcher(Corpus.open(tiers), counts)) as prefetcher:
        prefetcher.start([PrefetchHint(("a", "b", "c") * 9, 1)])
        assert wait(counts, tiers, 27) == {became: 27}


def test_a_request_may_say_nothing_else(slow):
    told, *_ = slow
    with closing(ConnectorScheduler(told.corpus)) as scheduling:
        scheduling.begin("r", {"kvwire": {"soon": ["a"]}}, QUESTION, None)
        assert scheduling.promised("r", 0) == 0
        assert scheduling.take_hints() == [PrefetchHint(("a",))]
        assert scheduling.end("r") == {"kvwire": {}}


def test_documents_that_are_lost_or_too_many_are_counted(slow, monkeypatch, caplog):
    told, _, tiers = slow
    monkeypatch.setattr("kvwire.engines.vllm.prefetching._MOST", 3)
    counts = Counts()
    with closing(Prefetcher(told.corpus, counts)) as prefetcher:
        prefetcher.start([PrefetchHint(("absent",)), PrefetchHint(("gone", "c"), 9)])
        assert wait(counts, tiers, 3) == {"soon_dropped": 3}
        assert caplog.text.count("told once") == 2  # lost; no such level
    with closing(Prefetcher(told.corpus, counts)) as prefetcher:
        monkeypatch.setattr(prefetcher._threads, "submit", lambda *_: None)
        prefetcher.start([PrefetchHint(("a",) * 5)])
        assert counts.take() == {"soon_dropped": 2}


def test_without_a_cache_the_answer_says_so(told):
    with closing(ConnectorScheduler(told.corpus)) as scheduling:
        scheduling.begin("r", {"kvwire": {"soon": ["a"]}}, QUESTION, None)
        assert scheduling.take_hints() == []
        assert scheduling.end("r") == {"kvwire": {"not_soon": NO_CACHE}}
