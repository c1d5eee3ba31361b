"""A tiny model with a tokenizer, texts in files, and a corpus in memory with a profile."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvwire.cli.app import main
from kvwire.engines.transformers import TransformersEngine, open_engine
from kvwire.offline import find_documents
from kvwire.runtime.corpus import Corpus, Document
from kvwire.store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvwire.codec import AnyProfile


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str | int, str, str]]:
    """Run the command line in this process; gives exit code, stdout and stderr."""

    def call(*words: object) -> tuple[str | int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvwire", *map(str, words)])
        code: str | int = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


@pytest.fixture(scope="session")
def model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offline") / "model"
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=600, initializer_range=0.15,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def engine(model: Path) -> TransformersEngine:
    return open_engine(model, dtype=torch.float32)


@pytest.fixture(scope="session")
def story(demo_model: Path) -> str:
    return (demo_model.parent / "documents" / "09-the-toll-gate.txt").read_text()


@pytest.fixture(scope="session")
def texts(story: str) -> dict[str, str]:
    return {f"{n % 3}/{n:02}": story[n * 300 : n * 300 + 200 + 60 * (n % 4)] for n in range(9)}


@pytest.fixture
def folder(texts: dict[str, str], tmp_path: Path) -> Path:
    for name, text in texts.items():
        path = tmp_path / "texts" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "texts"


@pytest.fixture
def refs(folder: Path):
    return find_documents([str(folder)])


@pytest.fixture(scope="session")
def profile(engine: TransformersEngine, story: str) -> AnyProfile:
    found = Corpus(engine, MemoryStore()).calibrate([Document("story", tuple(engine.tokenize(story)[:500]))])
    assert found is not None
    return found


@pytest.fixture
def corpus(engine: TransformersEngine, profile: AnyProfile) -> Corpus:
    made = Corpus(engine, MemoryStore())
    made.set_profile(profile)
    return made
