"""A chat of many turns, kept by appending: bytes that are written, what is read back, and loads by number of parts.

    python benchmarks/growing.py --turns 50 --tokens 80

Bytes are all that was sent to the store for the chat: blobs, texts and catalog entries. Loads go over HTTP and an
emulated link; of the same chat, one blob, and parts of several lengths.
"""

from __future__ import annotations

import argparse
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from measure import add_common_options, default_texts, one_thread, summary, windows, write_json
from test_parts.store_wrappers import Request, StoreWrapper

import kvwire
from kvwire.controller import CostModel, DecodeCost, PrefillCost
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.runtime.loader import Loader
from kvwire.runtime.quality import Reference
from kvwire.runtime.settings import LoadSettings
from kvwire.store import MemoryStore
from kvwire.transport import parse_link
from kvwire.transport.testing import serving

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.codec import AnyProfile
    from kvwire.store.base import Data
    from kvwire.types import KVCache

LEVELS = (1, 4)
FETCH = CostModel(PrefillCost(10.0, 1.0), DecodeCost(0.0005, 1e-9))
"""Computing takes so long that whatever can be fetched is."""


class Written(StoreWrapper):
    """Counts the bytes that are written, by kind of object, and the requests that read."""

    def __init__(self) -> None:
        """Start from nothing."""
        super().__init__(MemoryStore())
        self.bytes: Counter[str] = Counter()
        self.reads = 0

    def _do(self, request: Request, call: Callable[[Data], Any]) -> Any:  # noqa: ANN401 - of any call
        result = call(request.data)
        if request.method in ("put", "create") and result is not False:
            kind = "entries" if "/catalog/" in request.key else request.key.rpartition(".")[2]
            self.bytes[kind] += memoryview(request.data).nbytes
        self.reads += request.method in ("get", "snapshot", "open")
        return result


def grown(cache: KVCache, engine: Any, profile: AnyProfile, tokens: int, *, lossless: bool) -> tuple[Corpus, Written]:  # noqa: ANN401 - any engine
    """A corpus with the chat, appended ``tokens`` at a time."""
    store, ids = Written(), cache.token_ids or ()
    corpus = Corpus(engine, store, coding=Coding(lossless=lossless))
    corpus.set_profile(profile)
    store.bytes.clear()
    corpus.save(Document("chat", ids[:tokens]), cache.slice(0, tokens))
    for end in range(2 * tokens, len(ids) + 1, tokens):
        corpus.append("chat", ids[end - tokens : end], cache=cache.slice(0, end))
    return corpus, store


def bytes_written(engine: Any, cache: KVCache, profile: AnyProfile, tokens: int) -> dict[str, Any]:  # noqa: ANN401 - any engine
    """Bytes of appending over those of one encode, and whether lossless levels are equal bit for bit."""
    found: dict[str, Any] = {}
    for lossless in (False, True):
        corpus, parts = grown(cache, engine, profile, tokens, lossless=lossless)
        _, whole = grown(cache, engine, profile, cache.tokens, lossless=lossless)
        ratio = sum(parts.bytes.values()) / sum(whole.bytes.values())
        found["with lossless" if lossless else "lossy"] = {
            "bytes": dict(parts.bytes), "of_one_encode": dict(whole.bytes), "ratio": ratio,
            "ratio_of_blobs": parts.bytes["kvw"] / whole.bytes["kvw"],
        }  # fmt: skip
        print(
            f"{tokens} tokens a turn, lossless {lossless}: {ratio:.3f} of one encode, {dict(parts.bytes)}", flush=True
        )
    exact = corpus.decode("chat", "lossless")
    pairs = zip((*exact.keys, *exact.values), (*cache.keys, *cache.values), strict=True)
    found["lossless_is_equal"] = all(torch.equal(ours, real) for ours, real in pairs)
    return found


def loads(engine: Any, cache: KVCache, profile: AnyProfile, tokens: int, args: argparse.Namespace) -> dict[str, Any]:  # noqa: ANN401 - any engine
    """Seconds to the first token, requests and divergence of loads of the chat in parts of so many tokens."""
    corpus, store = grown(cache, engine, profile, tokens, lossless=False)
    question = engine.tokenize("It was plain to everybody that")
    reference = Reference.of(engine, [list(cache.token_ids or ())], question, 8)
    found: dict[str, Any] = {"parts": max(1, len(corpus.find("chat").parts))}
    for level in LEVELS:
        settings = LoadSettings(quality_floor=level, quality_ceiling=level)
        times, requests = [], []
        with serving(store) as url, closing(kvwire.open_store(url)) as far:
            link = parse_link(args.link)
            loader = Loader(engine, Corpus(engine, far), costs=FETCH, link=link, settings=settings)
            for _ in range(args.rounds + 1):
                store.reads = 0
                answer = loader.ask(["chat"], question)
                times.append(answer.timing.ttft_s)
                requests.append(store.reads)
        kl, _ = reference.compare(engine, answer.prompt.cache)
        found[f"level {level}"] = {
            "ttft_s": summary(times[1:]),
            "requests": requests[-1],
            "kl": kl,
            "bytes": answer.bytes,
        }
        print(tokens, found["parts"], level, found[f"level {level}"], answer.misses[:1], flush=True)
    return found


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_common_options(parser, "growing")
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--tokens", type=int, nargs="+", default=[20, 40, 80])
    parser.add_argument("--link", default="200mbit,20ms")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    one_thread()
    engine = kvwire.open_engine(args.model, dtype=torch.float32)
    fitted = [Document(path.stem, tuple(windows(engine, path, 1, 1024, args.seed)[0])) for path in args.fit[:12]]
    profile = Corpus(engine, MemoryStore()).calibrate(fitted)
    if profile is None:
        parser.error("there is too little text to fit a profile: name longer files with --fit")
    most = max(args.tokens)
    (ids,) = windows(engine, default_texts()[0], 1, args.turns * most, args.seed)
    (cache,) = engine.prefill([ids])
    results: dict[str, Any] = {"bytes": {}, "loads": {}}
    for tokens in args.tokens:
        results["bytes"][str(tokens)] = bytes_written(engine, cache.slice(0, tokens * args.turns), profile, tokens)
    for tokens in (most * args.turns, 512, 256, most):
        results["loads"][str(tokens)] = loads(
            engine, cache.slice(0, len(ids) // tokens * tokens), profile, tokens, args
        )
    settings = {"model": args.model.name, "turns": args.turns, "link": args.link, "rounds": args.rounds}
    write_json(args.out, "growing", settings, results)


if __name__ == "__main__":
    main()
