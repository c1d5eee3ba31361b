"""The prompts that trained links are judged on: answers are what the documents say, and training reads the same."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def beside_the_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture
def data():
    return importlib.import_module("links_parts.data")


def told_by(documents, name):
    """Read the documents in order, as a person would."""
    families = importlib.import_module("task_parts.families")
    meaning = {}
    for ids in documents:
        assert ids[0] == families.START
        for first, second in zip(ids[1::2], ids[2::2], strict=True):
            if second in families.COLOURS:
                meaning[first] = second
            elif first == name:
                return meaning[second]
    raise AssertionError


def test_redefined_means_what_was_said_last(data):
    changed = 0
    for seed in range(30):
        prompt = data.redefined(random.Random(seed))
        documents = prompt.documents
        for question in prompt.questions:
            assert told_by(documents, question.ids[1]) == question.answer
            changed += told_by((documents[0], *documents[:0:-1]), question.ids[1]) != question.answer
        assert len({question.ids for question in prompt.questions}) == data.USES * (data.DOCUMENTS - 1)
    assert changed > 100  # the order of documents matters


def test_training_reads_the_same_prompts_linked_and_whole(data, tmp_path):
    linked = data.write_files(tmp_path / "linked", 6, 1, linked=True)
    whole = data.write_files(tmp_path / "whole", 6, 1, linked=False)
    assert [path.name for path in linked] == [path.name for path in whole]
    for ours, theirs in zip(linked, whole, strict=True):
        for first, second in zip(ours.read_text().splitlines(), theirs.read_text().splitlines(), strict=True):
            apart, joined = json.loads(first), json.loads(second)
            assert apart.get("text") == joined.get("text")
            if "turns" in apart:
                assert [each["answer"] for each in apart["turns"]] == [each["answer"] for each in joined["turns"]]
                words = sorted(token for ids in apart["passages"] for token in ids)
                assert sorted(joined["turns"][0]["question"])[-1:] == words[-1:]
                assert len(joined["turns"][0]["question"]) == len(words) + len(apart["turns"][0]["question"])


def test_held_out_prompts_are_others_than_those_of_training(data):
    draw = random.Random("training redefined 1")
    trained = {data.redefined(draw).documents for _ in range(300)}
    assert not trained & {prompt.documents for prompt in data.held_out("redefined", 300, 1)}


def test_a_run_goes_on_and_is_judged(data, tmp_path, monkeypatch):
    runs, measuring = (importlib.import_module(f"links_parts.{name}") for name in ("runs", "measuring"))
    monkeypatch.setattr(data, "TURNS", 2)
    first = runs.learn("K = 1", tmp_path, 6, 1, steps=2)
    first.model.close()
    again = runs.learn("K = 1", tmp_path, 6, 1, steps=2)
    assert again.losses == first.losses
    found = measuring.accuracies(again, 3, 1, whole=False)
    assert {family: each["n"] for family, each in found.items()} == {"redefined": 12, "needle": 3, "legend": 3}
    assert measuring.prose_loss(again, 2, 1) > 0
    beside = measuring.repairs_beside_links(again, "redefined", 2, 1)
    assert [each["n"] for each in beside.values()] == [2, 2, 2]
    repaired = measuring.repairs(runs.untrained(), "redefined", 2, 1)
    assert repaired["whole"]["n"] == repaired["attention, 5 rows"]["n"] == 2


def test_links_alone_answer_as_the_training_reads_them(data, tmp_path):
    """Batches under the training's mask, and links of caches, give the same answers."""
    runs, measuring = (importlib.import_module(f"links_parts.{name}") for name in ("runs", "measuring"))
    learnt = runs.learn("K = 1", tmp_path, 6, 1, steps=1)
    prompts = data.held_out("needle", 12, 1)
    look = importlib.import_module("kvwire.training").linked
    hits = measuring.correct(learnt, measuring.samples_of(prompts), lambda each: look(each, learnt.layout))
    found = measuring.repairs_beside_links(learnt, "needle", 12, 1)
    assert found["links alone"]["accuracy"] == sum(hits) / len(hits)
    anchored = runs.learn("anchors 50 %", tmp_path, 6, 1, steps=1)
    assert len(anchored.losses) == 1
    assert measuring.accuracies(anchored, 3, 1, whole=False)["needle"]["n"] == 3
    anchored.finish()
