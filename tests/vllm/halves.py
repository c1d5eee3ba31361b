"""Both halves of the connector without vLLM: a tiny scheduler's steps, real loads, and pages that a reference fills."""

from __future__ import annotations

import time

import torch

from kvwire.engines.vllm.loading import PageLoader
from kvwire.engines.vllm.pages import StridedPages, slots_of
from kvwire.engines.vllm.scheduling import ConnectorScheduler
from kvwire.engines.vllm.working import ConnectorWorker
from kvwire.vllm import Choice, request_body

BLOCK = 16
QUESTION = [3, 4, 5]


class Halves:
    """Both halves, and pages of 64 blocks."""

    def __init__(self, told, link=None, counts=None, tables=(), **settings):
        self.corpus = told.corpus
        self.scheduling = ConnectorScheduler(self.corpus, patience_s=20.0, **settings)
        self.working = ConnectorWorker(PageLoader(self.corpus, torch.float32, link=link), counts=counts)
        specs = self.corpus.meta.layers
        self.views = [torch.zeros(64, s.kv_heads, BLOCK, s.key_dim + s.value_dim) for s in specs]
        self.working.register(StridedPages(self.views, [s.key_dim for s in specs]), self.corpus.meta, tables)
        self.tables, self.count = tables, 0

    def promise(self, body, computed=0):
        """Tokens promised, as a scheduler asks for them; the request's name."""
        self.count += 1
        name = f"request {self.count}"
        self.scheduling.begin(name, body.get("kv_transfer_params"), body["prompt"], body.get("cache_salt"))
        until = time.monotonic() + 120
        while (promised := self.scheduling.promised(name, computed)) is None:
            assert time.monotonic() < until
            time.sleep(0.005)
        return name, promised

    def load(self, body, computed=0, lists=None):
        """Bad blocks, all blocks, what is told, and tokens promised; lists: of each table's blocks."""
        name, promised = self.promise(body, computed)
        blocks = [(5 * i + 3) % 63 + 1 for i in range(-(-len(body["prompt"]) // BLOCK))]
        self.scheduling.allocated(name, lists or [blocks], promised)
        loads = self.scheduling.take()
        self.working.start(loads)
        until, ended, bad, self.failed = time.monotonic() + 180, set(), set(), set()
        while loads and name not in ended:
            assert time.monotonic() < until
            time.sleep(0.005)
            written = self.working.collect()
            ended |= written.requests
            bad |= written.bad_blocks
            self.failed |= written.failed
            for each in written.outcomes:
                self.scheduling.loaded(*each)
        return bad, blocks, self.scheduling.end(name)["kvwire"], promised

    def pages(self, blocks, start, stop):
        """Keys and values of all layers between two tokens of a request."""
        pages = StridedPages(self.views, [s.key_dim for s in self.corpus.meta.layers])
        return [pages.read(layer, slots_of(blocks, BLOCK, start, stop)) for layer in range(len(self.views))]

    def body(self, names, level=1, **more):
        return request_body(self.corpus, Choice(tuple(names), level=level), QUESTION) | more

    def close(self):
        self.scheduling.close()
        self.working.close()


def check(halves, blocks, cache, start, stop):
    for layer, (keys, values) in enumerate(halves.pages(blocks, start, stop)):
        assert torch.allclose(keys, cache.keys[layer][:, start:stop], atol=2e-5, rtol=0)
        assert torch.equal(values, cache.values[layer][:, start:stop])


def damage(told, name, chunk):
    """Flip a byte of a chunk's first level in the folder."""
    entry = told.corpus.find(name)
    at = told.corpus.read_header(entry).segments[chunk][0].offset + 1
    path = next(told.root.rglob(entry.blob_key.rpartition("/")[2]))
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.chmod(0o600)
    path.write_bytes(data)
