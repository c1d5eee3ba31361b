"""Documents that are fetched ahead of their loads."""

from __future__ import annotations

from contextlib import closing

import pytest

from kvwire.errors import ArgumentError, NotFoundError
from kvwire.runtime.corpus import Corpus
from kvwire.store import open_tiers
from kvwire.store.testing import CountingStore


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


def test_without_a_cache_there_is_nowhere_to_put_it(small):
    with pytest.raises(ArgumentError, match="needs a cache"):
        small.corpus().prefetch(list(small.tokens))
