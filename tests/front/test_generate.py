"""From documents in a store to plain generate, and the page that tells how, as it is written."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import kvwire

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "generate-with-transformers.md"
QUESTION = "It was plain to everybody that"


def test_generate_goes_on_from_what_a_loader_loaded(small):
    engine, names, question = small.engine, list(small.tokens), small.engine.tokenize(QUESTION)
    with kvwire.Loader(engine, small.corpus(), costs=small.costs) as loader:
        answers = [loader.ask(given, question, tokens=6) for given in (names, names[:1], names[::-1])]
    prompts = [answer.prompt for answer in answers]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    out = engine.model.generate(**kvwire.generate_inputs(engine, prompts, [QUESTION] * 3), **options)
    for row, answer in zip(out[:, len(question) :].tolist(), answers, strict=True):
        assert tuple(row[: len(answer.tokens)]) == answer.tokens
    one = kvwire.generate_inputs(engine, prompts[2], question, max_cache_len=4096)
    with torch.no_grad():
        logits = engine.model(**one).logits[0, -1]
    assert torch.allclose(logits, answers[2].logits, atol=1e-4 * float(logits.abs().max()))


def test_the_page_runs_as_written(monkeypatch, demo_model, tmp_path):
    (tmp_path / "demo").symlink_to(demo_model.parent)
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {}
    exec(block, names)  # noqa: S102 - this project's own page
    assert len(names["answers"]) == 4
    assert names["out"].shape[1] > names["inputs"]["input_ids"].shape[1]
