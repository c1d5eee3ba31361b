"""What the benchmark asks: prompts of encoded documents, and four vLLMs with what stands beside them."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from measure import ROOT, calibration, windows_in

from engines_parts.serving import BLOCK, LMCacheServer, Serving, lmcache_server, store_server, vllm
from engines_parts.shaped_relay import ShapedRelay

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvwire import Corpus, TransformersEngine
    from kvwire.engines.vllm.loading import PageLoader

QUESTION = 24
"""Tokens of a question."""


@dataclass(frozen=True)
class Prompt:
    """Documents and a question. names: of the documents; whole: of a document that is all of them."""

    names: tuple[str, ...]
    texts: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]
    whole: str

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of the whole prompt."""
        return (*(token for text in self.texts for token in text), *self.question)


@dataclass(frozen=True)
class Place:
    """All that runs."""

    engine: TransformersEngine
    corpus: Corpus
    plain: Serving
    example: Serving
    lmcache: Serving | None
    kvwire: Serving
    server: LMCacheServer | None
    relays: tuple[ShapedRelay, ShapedRelay]
    loader: PageLoader
    pages: Path


def start(stack: ExitStack, args: argparse.Namespace) -> tuple[list[Prompt], Place]:
    """Encode the documents, and start whatever is asked."""
    import torch

    from kvwire import open_engine
    from kvwire.engines.vllm.loading import PageLoader
    from kvwire.runtime.corpus import Corpus
    from kvwire.store import FolderStore, open_store

    torch.set_num_threads(1)
    folder = Path(stack.enter_context(TemporaryDirectory()))
    engine = open_engine(args.model, dtype=torch.float32)
    store = FolderStore(folder / "store")
    stack.callback(store.close)
    prompts = _prompts(engine, args)
    corpus = Corpus(engine, store)
    _encode(corpus, prompts, engine, args)
    relays = [stack.enter_context(ShapedRelay(stack.enter_context(store_server(store))))]
    window = -(-(len(prompts[0].tokens) + 1) // BLOCK) * BLOCK
    more: dict[str, Any] = {"kv_connector_module_path": "kvwire.vllm", "kv_load_failure_policy": "recompute"}
    url = f"http://127.0.0.1:{relays[0].port}"
    given = stack.enter_context(
        vllm(args.model, window, "KvwireConnector", kv_connector_extra_config={"store": url}, **more)
    )
    plain = stack.enter_context(vllm(args.model, window))
    pages = folder / "pages"
    example = {"kv_connector_extra_config": {"shared_storage_path": str(pages)}}
    raw = stack.enter_context(vllm(args.model, window, "ExampleConnector", **example))
    server, theirs = _lmcache(stack, folder, args.model, window, relays)
    loader = PageLoader(Corpus.open(stack.enter_context(closing(open_store(url)))), torch.float32)
    stack.callback(loader.close)
    return prompts, Place(
        engine, corpus, plain, raw, theirs, given, server, (relays[0], relays[-1]), loader, pages,
    )  # fmt: skip


def _lmcache(
    stack: ExitStack, folder: Path, model: Path, window: int, relays: list[ShapedRelay]
) -> tuple[LMCacheServer | None, Serving | None]:
    """LMCache's server and a vLLM beside it, where it is installed; its relay joins the others."""
    from engines_parts.resp_server import resp_server

    if importlib.util.find_spec("lmcache") is None:
        return None, None
    port, _ = stack.enter_context(resp_server())
    relays.append(stack.enter_context(ShapedRelay(port)))
    server = stack.enter_context(lmcache_server(folder, relays[-1].port))
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port}
    return server, stack.enter_context(vllm(model, window, "LMCacheMPConnector", kv_connector_extra_config=extra))


def _prompts(engine: TransformersEngine, args: argparse.Namespace) -> list[Prompt]:
    """Documents and questions, cut from a text."""
    demo = sorted((ROOT / "demo" / "documents").glob("*.txt"))
    text = args.text.read_text(encoding="utf-8") if args.text else "\n".join(each.read_text("utf-8") for each in demo)
    count = args.prompts * args.documents
    name = args.text.name if args.text else "demonstration"
    cut = windows_in(engine, text, name, count, args.document_tokens, args.seed)
    asked = windows_in(engine, text, f"{name} questions", args.prompts, QUESTION, args.seed)
    prompts = []
    for number, (start, stop) in enumerate(pairwise(range(0, count + 1, args.documents))):
        names = tuple(f"document-{each}" for each in range(start, stop))
        texts = tuple(tuple(ids) for ids in cut[start:stop])
        prompts.append(Prompt(names, texts, tuple(asked[number]), f"whole-{number}"))
    return prompts


def _encode(corpus: Corpus, prompts: Sequence[Prompt], engine: TransformersEngine, args: argparse.Namespace) -> None:
    """Fit a profile on other texts, and encode every document alone and each prompt's documents as one."""
    from kvwire.runtime.corpus import Document

    if args.fit:
        fitted = calibration(engine, args.fit, 16, 1024, args.seed)
        corpus.calibrate([Document(f"fit-{number}", tuple(ids)) for number, ids in enumerate(fitted)], 12 * 1024)
    alone = [Document(*each) for prompt in prompts for each in zip(prompt.names, prompt.texts, strict=True)]
    whole = [Document(prompt.whole, prompt.tokens[:-QUESTION]) for prompt in prompts]
    list(corpus.encode([*alone, *whole], index=("kvwire",)))
