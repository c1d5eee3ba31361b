"""Profiles as files: fitted once from texts, shown, and used by encodings elsewhere; what commands tell meanwhile."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvwire.codec import encode, inspect, read_profile
from kvwire.errors import ArgumentError
from kvwire.offline import RunOptions, prepare_profile, read_manifest, summarise
from kvwire.runtime import costs
from kvwire.runtime.coding import Coding, Document
from kvwire.runtime.corpus import Corpus
from kvwire.runtime.prefill import prefill_documents
from kvwire.runtime.quality import calibrate_error
from kvwire.store import MemoryStore


@pytest.fixture
def other_model(model, tmp_path):
    folder = tmp_path / "other"
    torch.manual_seed(6)
    LlamaForCausalLM(LlamaConfig.from_pretrained(model)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, folder / name)
    return folder


@pytest.fixture
def file(run, model, folder, tmp_path):
    out = tmp_path / "model.kvp"
    code, told, err = run("profile", "fit", model, "--texts", folder, "--out", out)
    assert code == 0, err
    assert "fitted on" in told
    assert not list(tmp_path.glob("*.part"))
    return out


def test_a_profile_is_fitted_once_shown_and_used_instead_of_fitting(run, file, model, folder, tmp_path):
    profile = read_profile(file.read_bytes())
    code, told, _ = run("profile", "show", file)
    assert code == 0
    assert f"{profile.notes['tokens']:,} tokens" in told
    assert profile.digest[:12] in told
    shown = json.loads(run("profile", "show", file, "--json")[1])
    assert (shown["bytes"], shown["digest"], shown["method"]) == (file.stat().st_size, profile.digest, "kvwire")
    assert shown["levels"][0]["name"] == "coarse"
    assert shown["levels"][0]["kl"] > shown["levels"][-1]["kl"] > 0
    words = ["--model", model, "--store", tmp_path / "store", "--manifest", tmp_path / "m.jsonl"]
    code, _, err = run("encode", folder / "0", *words, "--profile", file)
    assert code == 0
    assert "fitting" not in err
    assert {row.profile for row in read_manifest(str(tmp_path / "m.jsonl"))} == {profile.digest}
    run("encode", folder / "1", *words)
    assert {row.profile for row in read_manifest(str(tmp_path / "m.jsonl"))} == {profile.digest}, "the store keeps it"


def test_what_is_shown_of_levels_is_what_blobs_measured(file, engine, story):
    ids = engine.tokenize(story)[:400]
    profile = calibrate_error(engine, read_profile(file.read_bytes()), [ids])
    levels = inspect(encode(prefill_documents(engine, [ids[:300]])[0], profile)).levels
    shown = summarise(profile).levels
    assert [level.name for level in shown] == [level.name for level in levels]
    for ours, theirs in zip(shown, levels, strict=True):
        assert ours.error == pytest.approx(theirs.measured_error, rel=1e-3)
        assert ours.kl == pytest.approx(theirs.predicted_kl, rel=1e-3)


def test_a_profile_of_another_model_or_method_is_refused(run, file, model, other_model, folder, tmp_path):
    words = ["--store", tmp_path / "store", "--profile", file]
    code, _, err = run("encode", folder, "--model", other_model, *words)
    assert (code, "belongs to model" in err) == (8, True)
    code, _, err = run("encode", folder, "--model", model, *words, "--prefix-layers", 1)
    assert (code, "the profile given is of another method or prefix layers" in err) == (8, True)
    code, _, err = run("encode", folder, "--model", model, *words, "--refit")
    assert (code, "leave one of them out" in err) == (2, True)
    code, _, err = run("encode", folder, "--model", model, "--store", tmp_path / "store", "--profile", tmp_path / "no")
    assert (code, "is not a file" in err) == (3, True)
    (tmp_path / "bad.kvp").write_bytes(file.read_bytes()[:-9])
    assert run("profile", "show", tmp_path / "bad.kvp")[0] == 4
    assert run("profile", "show", folder)[0] == 3


def test_a_fit_that_cannot_be_made_or_kept_says_so(run, model, folder, tmp_path):
    (tmp_path / "short.txt").write_text("A few words.")
    code, _, err = run("profile", "fit", model, "--texts", tmp_path / "short.txt", "--out", tmp_path / "a.kvp")
    assert (code, "64 tokens" in err) == (2, True)
    code, _, err = run("profile", "fit", model, "--texts", folder, "--out", tmp_path / "none" / "a.kvp")
    assert (code, "make it first" in err) == (3, True)


def test_stages_are_told_as_they_begin_and_only_while_a_command_runs(run, model, folder, tmp_path, story):
    (folder / "more.txt").write_text(story[-800:])  # of no other test: what was fitted before may be kept
    code, _, err = run("encode", folder, "--model", model, "--store", tmp_path / "store")
    told = [line.partition("] ")[2] for line in err.splitlines() if line.startswith("[")]
    begins = ["opening", "reading", "computing", "gathering", "fitting", "measuring", "encoding"]
    assert (code, [line.split()[0] for line in told]) == (0, begins)
    progress = logging.getLogger("kvwire.progress")
    assert progress.handlers == []
    assert progress.level == logging.NOTSET


@pytest.mark.parametrize(
    ("extent", "available", "tokens"),
    [("full", 10**6, 16384), ("full", 4000, 2000), ("full", 100, 64), ("quick", 10**6, 2048), ("quick", 3000, 1500)],
)
def test_a_small_corpus_gets_a_small_fit(extent, available, tokens):
    assert Coding(calibration=extent).calibration_tokens(available) == tokens


def test_no_more_than_half_of_a_corpus_is_fitted_on_and_it_is_not_fitted_again(engine, story):
    ids = tuple(engine.tokenize(story)[:600])
    corpus = Corpus(engine, MemoryStore())
    documents = [Document("a", ids[:300]), Document("b", ids[300:])]
    (first, _) = corpus.encode(documents)
    profile = corpus.profile()
    assert profile.notes["tokens"] == 300
    assert profile.notes["kl_held_out"] == 1
    corpus.encoder().prepare(lambda: documents)
    assert corpus.profile().digest == profile.digest == first.entry.profile_digest
    with pytest.raises(ArgumentError, match="full, quick"):
        Coding(calibration="some")


def test_quick_is_what_the_command_says(run, model, folder, tmp_path, monkeypatch):
    from kvwire.runtime import coding

    monkeypatch.setitem(coding.EXTENTS, "quick", 96)
    run("profile", "fit", model, "--texts", folder, "--out", tmp_path / "q.kvp", "--calibration", "quick")
    assert read_profile((tmp_path / "q.kvp").read_bytes()).notes["tokens"] <= 96


def test_a_given_profile_is_put_in_use(corpus, engine, refs, file):
    data = file.read_bytes()
    found = prepare_profile(Corpus(engine, corpus.catalog.store), refs, RunOptions(profile=data))
    assert found is not None
    assert found.digest == read_profile(data).digest
    assert Corpus(engine, corpus.catalog.store).profile().digest == found.digest


def test_what_an_engine_costs_is_measured_once_and_told_where_it_is_asked_for(
    run, model, folder, file, tmp_path, monkeypatch
):
    monkeypatch.setattr("kvwire.runtime.runner.measure_costs", costs.measure_costs)  # whatever other tests keep
    store = tmp_path / "store"
    run("encode", folder / "0", "--model", model, "--store", store, "--profile", file)
    words = ["ask", "--docs", "00", "--question", "So", "--model", model, "--store", store, "--tokens", 1]
    told = []
    for number, more in ((1, []), (2, ["-v"]), (2, ["-v"])):
        monkeypatch.setenv("KVWIRE_ESTIMATES", str(tmp_path / f"{number}.json"))
        code, _, err = run(*words, *more)
        assert code == 0, err
        told.append("measured this engine in" in err)
    assert told == [False, True, False]


@pytest.mark.parametrize("notes", [
    {"error_coarse": -1.0}, {"error_coarse": 1e300}, {"error_coarse": True, "tokens": True}, {"tokens": -5},
    {"error_coarse": 2, "error_fine": "x"},
])  # fmt: skip
def test_notes_of_anybody_are_shown_or_left_out(run, file, tmp_path, notes):
    made = replace(read_profile(file.read_bytes()), notes=notes, error_to_kl=(1.0, 2.0))
    (tmp_path / "made.kvp").write_bytes(made.data)
    code, out, _ = run("profile", "show", tmp_path / "made.kvp", "--json")
    assert code == 0
    told = json.loads(out)
    assert told["tokens"] == 0
    assert [level["error"] for level in told["levels"]] == [value for value in notes.values() if value in (1e300, 2)]
