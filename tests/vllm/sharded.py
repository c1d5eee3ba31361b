"""One of several workers with some heads each, a process of its own: its pages hold the same numbers in every run."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing

import torch

from kvwire.engines.vllm.pages import StridedPages
from kvwire.engines.vllm.save_scheduling import PageSave
from kvwire.engines.vllm.saving import PageSaver
from kvwire.engines.vllm.shards import Shards
from kvwire.runtime.corpus import Corpus
from kvwire.store import FolderStore


def pages_of(corpus: Corpus, block: int, first: int = 0, heads: int | None = None) -> StridedPages:
    """Pages of some heads, of numbers that are the same in all workers."""
    specs, drawn = corpus.meta.layers, torch.Generator().manual_seed(1)
    views = [torch.randn(64, s.kv_heads, block, s.key_dim + s.value_dim, generator=drawn) for s in specs]
    last = None if heads is None else first + heads
    return StridedPages([view[:, first:last].clone() for view in views], [s.key_dim for s in specs])


def main(place: str, store: str, rank: int, ranks: int, prompt: list[int], blocks: list[int], block: int) -> None:
    """Save a document, one that this worker lacks blocks of where it is not the first, and a prompt."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=ranks)
    with closing(FolderStore(store)) as opened:
        corpus = Corpus.open(opened)
        kv_heads = corpus.meta.layers[0].kv_heads
        pages = pages_of(corpus, block, rank * kv_heads // ranks, max(1, kv_heads // ranks))
        ids = tuple(prompt)
        broken = PageSave("broken", ids, tuple(blocks[: 2 if rank else None]), document="broken")
        saves = [
            PageSave("r", ids, tuple(blocks), document="whole"),
            broken,
            PageSave("plain", ids[:64], tuple(blocks)),
        ]
        with closing(PageSaver(corpus, "kvwire:16")) as saver:
            saver.register(pages, Shards(range(ranks)))
            saver.start(saves)
            until, back, done = time.monotonic() + 60, set(), []
            while len(back) < len(saves) or saver._waiting or (rank == 0 and len(done) < 2):
                assert time.monotonic() < until
                time.sleep(0.005)
                back |= saver.copied()
                done += saver.outcomes()["done"]
        sys.stdout.write(json.dumps({"back": sorted(back), "done": done, "counts": saver._counts.take()}))
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
