"""A tiny model and a store of its documents."""

from __future__ import annotations

import random
import shutil
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvwire.engines.transformers import TransformersEngine, open_engine
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.store import FolderStore

from ..engines.families import config_of, make_model
from ..engines.test_chat import tokenizer_of

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = {"a": 150, "b": 97, "c": 64}


@dataclass
class Told:
    """A store that holds documents, the engine that encoded them, and a corpus without one."""

    root: Path
    engine: TransformersEngine
    corpus: Corpus
    tokens: dict[str, tuple[int, ...]]


@contextmanager
def chat_store(root, template, texts, *, bos):
    """A store of texts that a tiny llama with a chat template encoded, and the model's folder."""
    config = config_of("llama")
    config.vocab_size, config.max_position_embeddings = 512, 2048
    make_model(config).save_pretrained(root / "model")
    tokenizer_of(template, bos=bos).save_pretrained(root / "model")
    engine = open_engine(root / "model", dtype=torch.float32)
    with closing(FolderStore(root / "store")) as store:
        corpus = Corpus(engine, store, coding=Coding(chunk_tokens=32, neutral_prefix=0))
        tokens = {name: tuple(engine.tokenize(text)) for name, text in texts.items()}
        list(corpus.encode([Document(name, ids) for name, ids in tokens.items()]))
        yield Told(root / "store", engine, corpus, tokens), root / "model"


@pytest.fixture(scope="session")
def tiny():
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, initializer_range=0.15,
    )  # fmt: skip
    return TransformersEngine(LlamaForCausalLM(config), model_id="tiny", revision="e" * 64)


@pytest.fixture(scope="session")
def encoded(tiny, tmp_path_factory):
    """Folder of a store, and the documents' token ids."""
    root, draw = tmp_path_factory.mktemp("encoded") / "store", random.Random(5)
    tokens = {name: tuple(draw.choices(range(200), k=count)) for name, count in LENGTHS.items()}
    with closing(FolderStore(root)) as store:
        corpus = Corpus(tiny, store, coding=Coding(chunk_tokens=32))
        list(corpus.encode([Document(name, ids) for name, ids in tokens.items()]))
    return root, tokens


@pytest.fixture
def told(tiny, encoded, tmp_path):
    root, tokens = encoded
    shutil.copytree(root, tmp_path / "store")
    with closing(FolderStore(tmp_path / "store")) as store:
        yield Told(tmp_path / "store", tiny, Corpus.open(store), tokens)
