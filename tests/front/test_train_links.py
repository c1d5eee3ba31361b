"""``kvwire train-links`` from files to what it writes, and documents encoded and asked with that."""

import json
import random

import pytest
import torch

from kvwire.engines.transformers import open_engine
from kvwire.reuse import SoftTokens
from kvwire.store import FolderStore
from kvwire.transport.testing import serving

FAST = ("--recipe", "small", "--steps", 4, "--batch", 2, "--keep-every", 2)


@pytest.fixture(scope="module")
def data(tmp_path_factory, documents):
    """Questions about passages of the demonstration's documents, and their text."""
    folder = tmp_path_factory.mktemp("data")
    pieces = [line for text in documents.values() for line in text.split(". ") if line.strip()]
    draw = random.Random(1)
    lines = [
        {"passages": draw.sample(pieces, 3), "question": "What was it?", "answer": draw.choice(pieces)[:40]}
        for _ in range(8)
    ]
    (folder / "asked.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "texts").mkdir()
    for name, text in documents.items():
        (folder / "texts" / f"{name}.txt").write_text(text)
    return folder


def test_wrappers_are_trained_and_serve(run, data, demo_model, tmp_path):
    out = tmp_path / "wrapped"
    words = ("--data", data / "asked.jsonl=2", "--data", data / "texts", "--passages", 2, "--passage-tokens", 24)
    code, told, _ = run(
        "train-links", "--model", demo_model, *words, "--rest-tokens", 24, "--method", "wrappers", "--layout",
        "wrappers:2+2", "--out", out, *FAST, "--json",
    )  # fmt: skip
    assert code == 0
    report = json.loads(told)
    assert report == json.loads((out / "report.json").read_text())
    assert len(report["loss"]) == 4
    assert sum(each["samples"] for each in report["data"].values()) == 8
    assert sorted(path.name for path in out.iterdir()) == [
        "loss.png",
        "report.json",
        "soft-tokens.safetensors",
        "state.pt",
    ]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    soft = out / "soft-tokens.safetensors"
    known = SoftTokens.from_bytes(soft.read_bytes())
    assert (known.layout, known.count) == ("wrappers:2+2", 4)
    assert known.model_revision == report["model"]["revision"]
    store = ("--model", demo_model, "--store", (tmp_path / "store").as_uri(), "--soft-tokens", soft)
    assert run("encode", data / "texts", *store)[0] == 0
    names = [path.stem for path in sorted((data / "texts").iterdir())]
    code, told, _ = run("ask", "--docs", *names, "--question", "And the lamp was", *store, "--tokens", 3, "--json")
    assert code == 0
    assert json.loads(told)["tokens"]


@pytest.mark.parametrize("frozen", [True, False])
def test_anchors_are_trained_and_serve_over_http(run, data, demo_model, tmp_path, frozen):
    out = tmp_path / "anchored"
    words = ("--data", data / "asked.jsonl", "--method", "anchors", "--layout", "anchors:20/4", "--out", out, *FAST)
    code, told, err = run("train-links", "--model", demo_model, *words, *(["--frozen"] if frozen else []), "--json")
    assert code == 0, err
    report = json.loads(told)
    assert (report["method"], report["layout"], len(report["loss"])) == ("anchors", "anchors:20/4", 4)
    model = demo_model if frozen else out / "model"
    soft = out / "soft-tokens.safetensors"
    known = SoftTokens.from_bytes(soft.read_bytes())
    assert (known.layout, known.count) == ("anchors:20/4", 4)
    assert len({tuple(row.tolist()) for row in known.embeddings}) == 4
    folder = tmp_path / "store"
    code, _, err = run("encode", data / "texts", "--model", model, "--store", folder.as_uri(), "--soft-tokens", soft)
    assert code == 0, err
    names = [path.stem for path in sorted((data / "texts").iterdir())]
    with serving(FolderStore(folder)) as url:
        ask = ("ask", "--docs", *names, "--question", "And the lamp was", "--tokens", 3, "--json")
        code, told, err = run(*ask, "--model", model, "--store", url, "--soft-tokens", soft)
    assert code == 0, err
    assert json.loads(told)["tokens"]


def test_links_are_trained_with_the_model_and_serve(run, data, demo_model, tmp_path):
    out = tmp_path / "linked"
    words = ("train-links", "--data", data / "asked.jsonl", "--layout", "links:2/4", "--out", out, *FAST)
    code, told, err = run(*words, "--model", demo_model)
    assert (code, err) == (0, "")
    assert "loss" in told
    assert str(out / "model") in told
    trained, before = (open_engine(place, dtype=torch.float32) for place in (out / "model", demo_model))
    assert trained.meta.model_revision != before.meta.model_revision
    soft = out / "soft-tokens.safetensors"
    known = SoftTokens.from_bytes(soft.read_bytes())
    assert (known.layout, known.model_revision) == ("links:2/4", trained.meta.model_revision)
    store = ("--store", (tmp_path / "store").as_uri())
    assert run("encode", data / "texts", "--model", out / "model", *store)[0] == 0
    names = [path.stem for path in sorted((data / "texts").iterdir())]
    ask = ("ask", "--docs", *names, "--question", "And the lamp was", *store, "--soft-tokens", soft, "--json")
    code, told, _ = run(*ask, "--model", out / "model", "--tokens", 3)
    assert code == 0
    assert json.loads(told)["computed_tokens"] == 2 * len(names)
    code, told, _ = run(*ask, "--model", demo_model)
    assert code == 8
    assert "trained for model" in json.loads(told)["error"]["message"]
    code, _, err = run(*words, "--model", demo_model)
    assert (code, "go on with --resume" in err) == (2, True)
    code, _, _ = run(*words, "--model", demo_model, "--resume")
    assert code == 0


@pytest.mark.parametrize(
    ("line", "more", "words"),
    [
        ({"passages": ["a"], "question": "q"}, (), "line 1: no answer to learn"),
        ({"passages": ["a"] * 5, "question": "q", "answer": "a"}, (), "link tokens for 4 documents, the prompt has 5"),
        ({"passages": ["a " * 90], "question": "q", "answer": "a"}, ("--most-tokens", 50), "are more than 50"),
        ({"passages": ["a"], "question": "q", "answer": "a"}, ("--frozen", "--layout", "plain"), "has no soft tokens"),
        ({"passages": ["a"], "question": "q", "answer": "a"}, ("--layout", "knots:5"), "there is no layout"),
        ({"passages": ["a"], "question": "q", "answer": "a"}, ("--method", "anchors"), "has no anchors to train"),
        ({"passages": ["a"], "question": "q", "answer": "a"}, ("--resume",), "leave --resume out"),
    ],
)
def test_what_cannot_be_trained_is_told_before(run, demo_model, tmp_path, line, more, words):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(line))
    code, _, err = run(
        "train-links",
        "--model",
        demo_model,
        "--data",
        path,
        "--layout",
        "links:2/4",
        "--out",
        tmp_path / "out",
        *FAST,
        *more,
    )
    assert code == 2
    assert words in err
    assert not (tmp_path / "out").exists()
