"""A real language model from end to end: sinks, documents alone and behind a neutral text, and answers over links."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvwire.codec import decode, encode
from kvwire.engines.transformers import open_engine
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.runtime.loader import Loader
from kvwire.runtime.prefill import compute_documents, link_opened
from kvwire.runtime.quality import Reference
from kvwire.runtime.settings import LoadSettings
from kvwire.runtime.text_files import read_texts
from kvwire.store import MemoryStore
from kvwire.types import Chat

ROOT = Path(__file__).resolve().parents[2]
CHAT = Chat(system="Answer in a few words, from the documents alone.")


@pytest.fixture(scope="module")
def engine():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "demo_model.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    folder = done.stdout.strip()
    if folder == "demo/model":
        pytest.skip(done.stderr.strip().splitlines()[-1])
    return open_engine(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def town(engine):
    return {name: tuple(engine.tokenize(text)) for name, text in read_texts([str(ROOT / "demo" / "town")]).items()}


@pytest.fixture(scope="module")
def corpus(engine, town):
    made = Corpus(engine, MemoryStore(), coding=Coding(calibration="quick"))
    more = list(read_texts([str(ROOT / "demo" / "documents")]).items())[:3]
    texts = [Document(name, tuple(engine.tokenize(text))) for name, text in more]
    made.calibrate([*texts, *(Document(name, ids) for name, ids in town.items())])
    list(made.encode([Document(name, ids) for name, ids in town.items()]))
    return made


@pytest.fixture(scope="module")
def asked():
    return json.loads((ROOT / "demo" / "town" / "questions.json").read_text(encoding="utf-8"))


def reference(engine, town, names, question, neutral):
    chat = engine.render_chat(CHAT, question)
    return Reference.of(engine, [town[name] for name in names], chat.tail, 12, neutral=neutral, head=chat.head)


def test_a_single_document_is_a_prefill_but_for_its_level(engine, corpus, town):
    assert corpus.profile().has_sinks
    question = engine.tokenize("\nThe town", place="last")
    for name, ids in [*town.items()][:2]:
        assert corpus.read_header(corpus.find(name)).neutral_prefix == ()
        with Loader(engine, corpus, settings=LoadSettings(quality_floor=4)) as loader:
            answer = loader.ask([name], question)
        full = engine.forward(None, [*ids, *question], 0, logits=1)[0].log_softmax(-1)
        assert float((full.exp() * (full - answer.logits.log_softmax(-1))).sum()) < 0.02


def test_behind_a_neutral_text_links_without_repair_lose_less(engine, town, asked):
    names, question = asked[0]["documents"], asked[0]["question"]
    alone, behind = (reference(engine, town, names, question, neutral).linking_kl for neutral in (0, 64))
    assert behind < 0.7 * alone


def test_finer_levels_come_nearer_to_exact_caches(engine, corpus, town, asked):
    names, profile = asked[0]["documents"][:3], corpus.profile()
    exact = compute_documents(engine, [town[name] for name in names], 0)
    question = engine.tokenize("\nQuestion: Who built the lighthouse?", place="last")
    wanted = engine.forward(engine.past_key_values(link_opened(engine, exact)), question, sum(c.tokens for c in exact))
    kls = []
    for level in (0, 2, 4):
        blobs = [encode(cache, profile) for cache in exact]
        coded = [
            decode(blob, level, profile, dtype=torch.float32, offset=cache.meta.offset)
            for blob, cache in zip(blobs, exact, strict=True)
        ]
        linked = link_opened(engine, coded)
        found = engine.forward(engine.past_key_values(linked), question, linked.tokens)
        kls.append(float((wanted.softmax(-1) * (wanted.log_softmax(-1) - found.log_softmax(-1))).sum(-1).mean()))
    assert kls == sorted(kls, reverse=True)
    assert kls[-1] < 0.01


def test_an_answer_of_linked_documents_is_right(engine, corpus, asked):
    row = next(each for each in asked if each["question"] == "Who designed the Iron Bridge?")
    with Loader(engine, corpus, settings=LoadSettings(repair=0.3)) as loader:
        answer = loader.ask(row["documents"], f"\nQuestion: {row['question']}", chat=CHAT, tokens=20)
    assert row["answer"] in answer.text
    assert answer.repair
    assert not answer.link_warning
