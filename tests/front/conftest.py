"""A small corpus encoded with the demo model, shared by the tests of the front door."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import LlamaConfig, LlamaForCausalLM

from kvwire import controller as ctl
from kvwire.cli.app import main
from kvwire.engines.transformers import TransformersEngine, open_engine
from kvwire.runtime import link_check, runner
from kvwire.runtime.calibrate import Calibration
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvwire.codec import AnyProfile, Profile
    from kvwire.engines.base import Engine


@pytest.fixture(scope="session", autouse=True)
def _learnt_once() -> Iterator[None]:
    """What is learnt of the same model, from the same text in the same way, is learnt once for all tests of a worker.

    Fitting a profile and measuring costs take a second each, and the command line begins with them again and again.
    """
    profiles: dict[object, AnyProfile | None] = {}
    costs: dict[object, ctl.CostModel] = {}
    fit, measure = Calibration.fit, runner.measure_costs

    def fitted(calibration: Calibration, documents: Sequence[Document], tokens: int) -> AnyProfile | None:
        engine = calibration.engine
        soft = engine.soft_tokens and engine.soft_tokens.digest
        texts = tuple(document.token_ids for document in documents)
        key = (_place(engine), engine.opening_tokens, soft, calibration.coding, texts, tokens)
        if key not in profiles:
            profiles[key] = fit(calibration, documents, tokens)
        return profiles[key]

    def measured(
        engine: Engine, profile: AnyProfile | None = None, backend: str = "auto", threads: int | None = None
    ) -> ctl.CostModel:
        key = (_place(engine), profile and profile.digest, backend, threads)
        if key not in costs:
            costs[key] = measure(engine, profile, backend, threads)
        return costs[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Calibration, "fit", fitted)
        patch.setattr(runner, "measure_costs", measured)
        yield


def _place(engine: Engine) -> tuple[object, ...]:
    """Which model it is, and where and how it runs."""
    return engine.meta.config_digest(), str(engine.device), engine.dtype


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


@dataclass
class Small:
    """costs: fixed, so that tests do not depend on how busy the machine is."""

    engine: TransformersEngine
    texts: dict[str, str]
    tokens: dict[str, list[int]]
    profile: Profile
    costs: ctl.CostModel

    def corpus(self, **coding: Any) -> Corpus:
        """A fresh store that holds the small corpus."""
        corpus = Corpus(self.engine, MemoryStore(), coding=Coding(**coding))
        corpus.set_profile(self.profile)
        for _ in corpus.encode([Document(name, tuple(ids)) for name, ids in self.tokens.items()]):
            pass
        return corpus


@pytest.fixture(scope="session")
def demo_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the demonstration's documents, and its tokenizer without BOS, small enough to be calibrated anew."""
    folder = tmp_path_factory.mktemp("demo") / "model"
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, initializer_range=0.15,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    shutil.copy(demo_model / "tokenizer_config.json", folder)
    rules = json.loads((demo_model / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(rules | {"post_processor": None}))
    shutil.copytree(demo_model.parent / "documents", folder.parent / "documents")
    return folder


@pytest.fixture(scope="session")
def bos_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a tokenizer that puts a BOS in front of whole texts."""
    folder = Path(shutil.copytree(demo_model, tmp_path_factory.mktemp("bos") / "model"))
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.post_processor = processors.TemplateProcessing("<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def bos_engine(bos_model: Path) -> TransformersEngine:
    return open_engine(bos_model, dtype=torch.float32)


@pytest.fixture(scope="session")
def engine(demo_model: Path) -> TransformersEngine:
    return open_engine(demo_model, dtype=torch.float32)


@pytest.fixture(scope="session")
def documents(demo_model: Path) -> dict[str, str]:
    folder = demo_model.parent / "documents"
    return {name: (folder / f"{name}.txt").read_text() for name in ("02-the-bell-of-ashcombe", "09-the-toll-gate")}


@pytest.fixture(scope="session")
def small(engine: TransformersEngine, documents: dict[str, str]) -> Small:
    tokens = {name: engine.tokenize(text) for name, text in documents.items()}
    corpus = Corpus(engine, MemoryStore())
    profile = corpus.calibrate([Document(name, tuple(ids)) for name, ids in tokens.items()], 16384)
    assert profile is not None
    costs = ctl.CostModel(ctl.PrefillCost(0.002, 0.0005), ctl.DecodeCost(0.0005, 1e-5))
    return Small(engine, documents, tokens, profile, costs)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of few tokens, and few ways to repair them: commands are tried, not models."""
    monkeypatch.setattr(link_check, "PIECES", 3)
    monkeypatch.setattr(link_check, "PIECE_TOKENS", 48)
    monkeypatch.setattr(link_check, "MEASURED_SELECTORS", ("attention", "first"))
    monkeypatch.setattr(link_check, "_LEVEL_PROMPTS", 1)
