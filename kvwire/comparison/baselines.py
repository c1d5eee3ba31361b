"""Baselines: prefill from text, and raw bf16 caches over the same link."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvwire.reuse import moved
from kvwire.runtime.prefill import link_opened, prefill_documents
from kvwire.transport import EmulatedLink, open_session, open_source, read_object
from kvwire.types import KVCache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvwire.engines.base import Engine
    from kvwire.store import Store
    from kvwire.transport import LinkSettings


def text_ttft(
    engine: Engine, documents: Sequence[Sequence[int]], question: Sequence[int], head: Sequence[int] = ()
) -> float:
    """Time one prefill of documents and question, already tokenised."""
    started = time.perf_counter()
    ids = [token for document in documents for token in document]
    int(engine.forward(None, [*(head or engine.opening_tokens), *ids, *question], 0, logits=1)[-1].argmax())
    return time.perf_counter() - started


@dataclass(frozen=True)
class RawCaches:
    """Documents' caches as plain bf16 tensors in a store: keys at positions from 0, then values, layer by layer."""

    keys: Mapping[str, str]  # keys of the stored objects, by document
    tokens: Mapping[str, int]  # length of each document

    @classmethod
    def write(cls, store: Store, engine: Engine, documents: Mapping[str, Sequence[int]]) -> RawCaches:
        """Prefill every document and store its tensors."""
        keys = {}
        for number, (name, ids) in enumerate(documents.items()):
            (cache,) = prefill_documents(engine, [ids])
            cache = moved(cache, 0)
            flat = torch.cat([tensor.to("cpu", torch.bfloat16).reshape(-1) for tensor in (*cache.keys, *cache.values)])
            keys[name] = f"raw/{number}.bin"
            store.put(keys[name], flat.view(torch.uint8).numpy().tobytes())
        return cls(keys, {name: len(ids) for name, ids in documents.items()})

    def ttft(
        self, engine: Engine, store: Store, link: LinkSettings, documents: Sequence[str], question: Sequence[int],
        head: Sequence[int],
    ) -> tuple[float, int]:  # fmt: skip
        """Fetch all documents at once, rotate, concatenate and run the question."""
        started = time.perf_counter()
        caches, size = asyncio.run(self._fetch(engine, store, documents, link))
        linked = link_opened(engine, caches, head)
        past = engine.past_key_values(linked)
        int(engine.forward(past, question, linked.tokens, logits=1)[-1].argmax())
        return time.perf_counter() - started, size

    async def _fetch(
        self, engine: Engine, store: Store, documents: Sequence[str], link: LinkSettings
    ) -> tuple[list[KVCache], int]:
        """Fetch all documents at once; threads turn each into tensors while others arrive."""
        shared = EmulatedLink.of(link)
        sizes: list[int] = []

        async def one(name: str) -> KVCache:
            data = await read_object(open_source(store, self.keys[name], session), shared)
            sizes.append(len(data))
            return await asyncio.to_thread(self._cache, engine, name, data)

        async with open_session() as session:
            caches = await asyncio.gather(*map(one, documents))
        return caches, sum(sizes)

    def _cache(self, engine: Engine, name: str, data: bytes) -> KVCache:
        flat = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).to(engine.device, engine.dtype)
        tokens, at, tensors = self.tokens[name], 0, []
        for dim in ("key_dim", "value_dim"):
            for spec in engine.meta.layers:
                shape = (spec.kv_heads, tokens, getattr(spec, dim))
                size = shape[0] * shape[1] * shape[2]
                tensors.append(flat[at : at + size].view(shape))
                at += size
        layers = len(engine.meta.layers)
        return KVCache.from_tensors(tensors[:layers], tensors[layers:], engine.meta)
