"""By default no level is loaded of which a greater KL divergence is expected than is wanted."""

import json
from dataclasses import replace

import pytest

from kvwire import controller as ctl
from kvwire.errors import ArgumentError
from kvwire.runtime import runner as loaders
from kvwire.runtime.answer import floor_trouble, unreached_floor
from kvwire.runtime.coding import Coding
from kvwire.runtime.corpus import Corpus, Document
from kvwire.runtime.loader import Loader
from kvwire.runtime.settings import LoadSettings
from kvwire.store import FolderStore, MemoryStore

SLOW = ctl.CostModel(ctl.PrefillCost(60.0, 10.0), ctl.DecodeCost(0.0001, 1e-7))
"""With an engine that is so slow, what can be fetched is fetched."""


@pytest.fixture(scope="module")
def store(small):
    """The two documents, with a calibration by which the levels' KL divergences are ten times their errors."""
    return filled(small, (10.0, 1.0))


def filled(small, error_to_kl):
    place = MemoryStore()
    corpus = Corpus(small.engine, place)
    corpus.set_profile(replace(small.profile, error_to_kl=error_to_kl))
    list(corpus.encode([Document(name, tuple(ids)) for name, ids in small.tokens.items()]))
    return place


def kls_of(small, place):
    corpus = Corpus(small.engine, place)
    return {
        name: [level.predicted_kl for level in corpus.read_header(corpus.find(name)).levels] for name in small.tokens
    }


def between(small, place):
    """A bound that level 1 of every document keeps, and level 0 of none."""
    kls = kls_of(small, place).values()
    assert max(kl[1] for kl in kls) < min(kl[0] for kl in kls)
    return (max(kl[1] for kl in kls) + min(kl[0] for kl in kls)) / 2


def ask(small, place, deadline_s=None, objective=None, **settings):
    question = small.engine.tokenize("It was plain")
    chosen = LoadSettings(repair="none", **settings)
    with Loader(small.engine, Corpus(small.engine, place), costs=SLOW, settings=chosen) as loader:
        return loader.ask(list(small.tokens), question, deadline_s=deadline_s, objective=objective)


def levels_of(answer):
    return {decision.level for decision in answer.decisions}


@pytest.mark.parametrize(("deadline_s", "objective"), [(None, None), (30.0, "cheapest"), (30.0, "earliest")])
def test_the_first_level_that_is_good_enough_is_the_coarsest_that_is_loaded(small, store, deadline_s, objective):
    answer = ask(small, store, deadline_s, objective, max_kl=between(small, store))
    assert levels_of(answer) == {1}
    kls = kls_of(small, store)
    assert answer.document_kl == pytest.approx([kl[1] for kl in kls.values()])
    lengths = [len(ids) for ids in small.tokens.values()]
    mean = sum(kl[1] * length for kl, length in zip(kls.values(), lengths, strict=True)) / sum(lengths)
    assert answer.expected_kl == pytest.approx(mean)
    assert answer.misses == ()


def test_without_a_bound_level_0_is_loaded_and_by_default_none_beyond_three_hundredths(small, store):
    assert levels_of(ask(small, store, max_kl=None)) == {0}
    assert LoadSettings().max_kl == 0.03
    assert min(kl[0] for kl in kls_of(small, store).values()) > 0.03
    assert max(ask(small, store).document_kl) <= 0.03


@pytest.mark.parametrize("named", [{"quality_floor": 0}, {"quality_ceiling": 0}])
def test_a_floor_or_a_ceiling_that_is_asked_for_goes_before_it_and_is_told(small, store, named):
    answer = ask(small, store, max_kl=between(small, store), **named)
    assert levels_of(answer) == {0}
    word = "floor" if "quality_floor" in named else "ceiling"
    assert len(answer.misses) == len(small.tokens)
    assert all(f"level 0, the {word} that was asked for, has an expected KL of" in miss for miss in answer.misses)


def test_where_no_level_is_good_enough_the_finest_is_loaded_and_told(small, store):
    answer = ask(small, store, max_kl=1e-12)
    finest = len(next(iter(kls_of(small, store).values()))) - 1
    assert levels_of(answer) == {finest}
    assert [miss.split(": ", 1)[1].split(",")[0] for miss in answer.misses] == [
        "no level is predicted within KL 1e-12"
    ] * 2
    assert all(miss.endswith("encode with finer levels or raise max_kl") for miss in answer.misses)


def test_text_may_be_computed_whatever_is_wanted(small, store):
    quick = ctl.CostModel(ctl.PrefillCost(0.0, 1e-7), ctl.DecodeCost(60.0, 1.0))
    corpus, question = Corpus(small.engine, store), small.engine.tokenize("It was plain")
    settings = LoadSettings(repair="none", max_kl=1e-12, policy=ctl_text())
    with Loader(small.engine, corpus, costs=quick, settings=settings) as loader:
        answer = loader.ask(list(small.tokens), question)
    assert levels_of(answer) == {None}
    assert (answer.expected_kl, answer.document_kl) == (0.0, (0.0, 0.0))


def ctl_text():
    from kvwire.controller.policies import TextOnly

    return TextOnly()


def test_blobs_without_predictions_have_no_such_floor_and_their_kl_is_not_known(small):
    answer = ask(small, filled(small, None), max_kl=1e-12)
    assert levels_of(answer) == {0}
    assert (answer.expected_kl, answer.document_kl, answer.misses) == (None, (None, None), ())


@pytest.mark.parametrize("wrong", [-0.1, float("nan"), "0.1", True])
def test_what_cannot_be_a_divergence_is_refused(wrong):
    with pytest.raises(ArgumentError, match="max_kl is a KL divergence in nats"):
        LoadSettings(max_kl=wrong)


@pytest.mark.parametrize("name", ["quality_floor", "quality_ceiling"])
def test_levels_below_the_first_are_refused(name):
    with pytest.raises(ArgumentError, match=f"{name} is the number of a level, 0 or more, got -1"):
        LoadSettings(**{name: -1})


def test_trouble_in_words(small, store):
    corpus = Corpus(small.engine, store)
    info = corpus.read_header(corpus.find(next(iter(small.tokens))))
    assert floor_trouble(info, 1e9) == ""
    assert floor_trouble(info, 1e9, floor=0) == ""
    assert floor_trouble(info, 1e-12, floor=7).startswith("level 4, the floor that was asked for")
    assert (unreached_floor(info, 4), unreached_floor(info, 7, 7)) == ("", unreached_floor(info, 7))


@pytest.mark.parametrize("max_kl", [0.03, None])
def test_a_floor_above_all_levels_is_told(small, store, max_kl):
    answer = ask(small, store, quality_floor=7, max_kl=max_kl)
    assert levels_of(answer) == {4}
    assert all(
        miss.endswith("no level is as fine as 7, the floor that was asked for: 4 is its finest")
        for miss in answer.misses
    )
    assert len(answer.misses) == len(small.tokens)


def test_the_way_to_a_lossless_level_is_told(small):
    (encoded,) = Corpus(small.engine, filled(small, None), coding=Coding(lossless=True)).encode(
        [Document("exact", tuple(range(5, 40)))]
    )
    assert unreached_floor(encoded.blob, 5).endswith(": 4 is its finest; --exact takes the lossless one")
    assert unreached_floor(encoded.blob, 5, 5) == ""


@pytest.fixture
def folder(store, tmp_path):
    with_files = FolderStore(tmp_path)
    with_files.put_many((key, store.get(key)) for key in store.keys(""))
    with_files.close()
    return f"file://{tmp_path}"


def test_the_commands_take_it_and_tell(run, small, store, folder, demo_model, monkeypatch):
    monkeypatch.setattr(loaders, "measure_costs", lambda *_: SLOW)
    names, bound = list(small.tokens), between(small, store)
    where = ("--model", demo_model, "--store", folder, "--repair", "none")
    words = ("ask", "--docs", *names, "--question", "It was plain", *where, "--tokens", 1)
    code, out, err = run(*words, "--max-kl", bound, "--json")
    assert code == 0, err
    told = json.loads(out)
    assert {decision["level"] for decision in told["decisions"]} == {1}
    assert [each["document"] for each in told["documents"]] == names
    assert [each["expected_kl"] for each in told["documents"]] == pytest.approx(
        [kl[1] for kl in kls_of(small, store).values()]
    )
    assert min(each["expected_kl"] for each in told["documents"]) <= told["expected_kl"] <= bound
    monkeypatch.setenv("KVWIRE_MAX_KL", "none")
    code, out, err = run(*words)
    assert code == 0, err
    assert "level 0" in out
    assert "\nexpected KL " in out
    code, out, err = run(*words, "--max-kl", bound, "--floor", 0)
    assert "level 0, the floor that was asked for, has an expected KL of" in err
    code, _, err = run(*words, "--max-kl", "much")
    assert code == 2
    assert "or none; got 'much'" in err


@pytest.mark.parametrize("floor", [None, 0])
def test_plans_have_the_same_floor(run, small, store, folder, demo_model, monkeypatch, floor):
    monkeypatch.setattr(loaders, "measure_costs", lambda *_: SLOW)
    bound = between(small, store)
    asked = ("--max-kl", bound, "--link", "1gbit,2ms", *(() if floor is None else ("--floor", floor)))
    code, out, err = run("plan", "--docs", *small.tokens, "--model", demo_model, "--store", folder, *asked, "--json")
    assert code == 0, err
    told = json.loads(out)
    assert {chunk["level"] for chunk in told["chunks"]} == {1 if floor is None else 0}
    assert bool(told["notes"]) == (floor is not None)
    assert "level 0 (coarse)" in [each["name"] for each in told["alternatives"]]
    coarse = next(each for each in told["alternatives"] if each["name"] == "level 0 (coarse)")
    assert coarse["kl"] > bound


@pytest.mark.parametrize(("bound", "level"), [("0.1", 0), ("0.015", 1), ("none", 0)])
def test_made_up_documents_have_the_floor_of_measured_ones(run, bound, level):
    words = ("--context", "4k", "--machine", "h100", "--shape", "llama-3.1-8b", "--link", "100gbit,1ms", "--no-compare")
    code, out, err = run("plan", *words, "--max-kl", bound, "--json")
    assert code == 0, err
    told = json.loads(out)
    assert {chunk["level"] for chunk in told["chunks"]} <= {level, None}
    code, out, err = run(
        "simulate", "--context", "4k", "--link", "100gbit", "--policy", "level-0", "--max-kl", bound, "--json"
    )
    assert code == 0, err
    (load,) = json.loads(out)["loads"]
    assert [number for number, count in enumerate(load["levels"]) if count] == [level]
