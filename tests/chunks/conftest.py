"""A tiny model and a store of its documents, indexed as LMCache and SGLang hash."""

from __future__ import annotations

import random
import shutil
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvwire.engines.transformers import TransformersEngine
from kvwire.runtime.adapters import ChunkSettings
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.store import FolderStore, hash_scheme

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = {"a": 330, "b": 200, "c": 100, "short": 40}
CHUNK, PAGE = 64, 32


@dataclass
class Stored:
    """A store that holds documents, and what was encoded."""

    root: Path
    tokens: dict[str, tuple[int, ...]]
    engine: TransformersEngine

    @property
    def url(self):
        return f"file://{self.root}"

    def settings(self, tokens=CHUNK, **given):
        return ChunkSettings.read({"store": self.url, "chunk_tokens": tokens, **given}, tokens, salted=True)

    def hashes(self, name, scheme="lmcache", tokens=CHUNK):
        return hash_scheme(f"{scheme}:{tokens}", "").hashes(self.tokens[name])

    def exact(self, name, start, stop):
        """What the model computes."""
        (cache,) = self.engine.prefill([self.tokens[name]])
        return cache.slice(start, stop)

    def blobs(self):
        with closing(FolderStore(self.root)) as store:
            corpus = Corpus.open(store)
            documents = corpus.catalog.documents(corpus.meta.config_digest())
            return [self.root / key for key in {each.blob_key for each in documents}]


def tiny_model(**changes):
    torch.manual_seed(3)
    config = LlamaConfig(**{
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
        "initializer_range": 0.15,
    } | changes)  # fmt: skip
    return TransformersEngine(LlamaForCausalLM(config), model_id="tiny", revision="e" * 64)


@pytest.fixture(scope="session")
def encoded(tmp_path_factory):
    root, draw = tmp_path_factory.mktemp("encoded") / "store", random.Random(5)
    tokens = {name: tuple(draw.choices(range(200), k=count)) for name, count in LENGTHS.items()}
    tokens["c"] = tokens["a"][:100]  # begins as another does
    engine = tiny_model()
    with closing(FolderStore(root)) as store:
        corpus = Corpus(engine, store, coding=Coding(chunk_tokens=48, lossless=True))
        documents = [Document(name, ids) for name, ids in tokens.items()]
        list(corpus.encode(documents, index=(f"lmcache:{CHUNK}", f"sglang:{PAGE}")))
    return root, tokens, engine


@pytest.fixture
def stored(encoded, tmp_path):
    root, tokens, engine = encoded
    shutil.copytree(root, tmp_path / "store")
    return Stored(tmp_path / "store", tokens, engine)
