"""Prompts made of similar ones: found, planned, loaded and edited, and never in the way of an answer."""

from __future__ import annotations

import json
import random
import threading
import time
from typing import ClassVar

import pytest
import torch

from kvwire.controller import CostModel, DecodeCost, PrefillCost, events
from kvwire.errors import ArgumentError, NotFoundError
from kvwire.runtime import edit_check, saving
from kvwire.runtime.corpus import Coding, Document
from kvwire.runtime.donor_search import FIRST_SEARCHES, TRIED_AGAIN
from kvwire.runtime.loader import Loader
from kvwire.runtime.quality import mean_kl
from kvwire.runtime.reports import EditReport
from kvwire.runtime.settings import LoadSettings
from kvwire.store import MemoryStore

from ..store_wrappers import CountingStore, StoreWrapper
from .test_prompts import NEVER, Failing, costs_stay, filled, full, loader

__all__ = ["costs_stay"]
CHEAP = CostModel(PrefillCost(1e-6, 1e-7), DecodeCost(1.0, 1e-3))
FINE = {"quality_floor": 4}
INDEX = ("donors", "kvwire")


@pytest.fixture(scope="module")
def texts(small):
    one, other = small.tokens.values()
    whole = (*one, *other)
    return whole[:600], whole[:-601:-1]


@pytest.fixture(scope="module")
def prompt(texts):
    """Two tokens replaced by three, one put in, one left out; 48 of its own at the end."""
    ids, other = texts
    return (*ids[:100], 7, 8, 9, *ids[102:300], 5, *ids[300:400], *ids[401:552], *other[:48])


def stored(small, ids, store=None, name="donor", coding=None, index=INDEX, **whose):
    corpus = filled(small, small.engine, store, coding, **whose)
    list(corpus.encode([Document(name, ids)], index=index))
    return corpus


@pytest.fixture
def corpus(small, texts):
    return stored(small, texts[0])


def test_a_prompt_is_made_of_one_like_it(small, corpus, texts, prompt):
    with loader(small.engine, corpus, **FINE) as made:
        answer = made.ask_prompt(prompt, reuse="auto", tokens=3)
        blind = made.ask_prompt(prompt, reuse="exact")
        alone = made.ask_prompt([*texts[0], *texts[1][:48]])
    reused = answer.reused
    assert reused.donors == (("donor", 100 + 198 + 100 + 151),)
    assert (reused.loaded, reused.holes, reused.computed) == (549, 20, 52)
    assert 0 < reused.repaired <= 86
    assert blind.reused.loaded == 100
    wanted = full(small.engine, prompt)
    own = mean_kl(wanted, blind.logits[None])
    assert mean_kl(wanted, answer.logits[None]) < max(0.1 * mean_kl(wanted, alone.logits[None]), 3 * own)
    assert answer.bytes > 0
    assert answer.prompt.tokens == (len(prompt) - 32,)
    assert answer.timing.recompute_s > 0
    assert answer.timing.repair_s > 0
    assert not answer.misses


def test_without_edits_the_rows_are_the_donors_and_a_longer_prompt_extends_them(small, texts):
    corpus = stored(small, texts[0], coding=Coding(lossless=True), index=("donors",))
    with loader(small.engine, corpus, quality_floor=4) as made:
        answer = made.ask_prompt([*texts[0], *texts[1][:32]], reuse="donors")
        list(corpus.encode([Document("donor", texts[0])], index=("kvwire",)))
        exact = made.ask_prompt([*texts[0], *texts[1][:32]], reuse="donors")
        assert (exact.reused.document, exact.reused.donors) == ("donor", ())  # there is nothing to edit
    assert answer.reused.donors == (("donor", 600),)
    assert (answer.reused.holes, answer.reused.repaired) == (0, 0)
    for ours, theirs in zip(answer.prompt.cache.keys, exact.prompt.cache.keys, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.allclose(answer.logits, exact.logits, atol=1e-4)


def test_all_rows_computed_anew_are_a_prefill(small, corpus, prompt):
    with loader(small.engine, corpus, repair="all") as made:
        answer = made.ask_prompt(prompt, reuse="donors")
    assert answer.reused.donors
    assert mean_kl(full(small.engine, prompt), answer.logits[None]) < 1e-6


def test_several_donors_serve_one_prompt(small, corpus, texts):
    list(corpus.encode([Document("other", texts[1])], index=INDEX))
    prompt = (*texts[0][:300], *texts[1][100:400], 5, 6, *texts[0][:32])
    with loader(small.engine, corpus, **FINE) as made:
        answer = made.ask_prompt(prompt, reuse="auto")
        named = made.ask_prompt(prompt, donors=["other"])
        assert dict(answer.reused.donors) == {"donor": 300, "other": 300}
        assert dict(named.reused.donors) == {"donor": 300, "other": 300}  # the first is what it begins with
        with pytest.raises(NotFoundError):
            made.ask_prompt(prompt, donors=["nothing"])
        with pytest.raises(ArgumentError, match="one text"):
            made.ask_prompt(prompt, donors="other")


def test_the_donor_with_the_fewest_holes_is_taken(small):
    """KVShare's example: 15 holes over the first request, 5 over the second, which was made of the first with 10."""
    ids = random.Random(1).sample(range(5, small.engine.vocabulary_size), 615)
    first, spare = tuple(ids[:600]), ids[600:]

    def edited(count):
        return tuple(spare[at // 35] if at % 35 == 34 and at < 35 * count else each for at, each in enumerate(first))

    corpus, second, third = stored(small, first), edited(10), edited(15)
    with loader(small.engine, corpus, **FINE) as made:
        alone = made.plan_prompt(third).best
        told = made.ask_prompt(second, reuse="donors", save=True).reused
    with loader(small.engine, corpus, **FINE) as made:
        best = made.plan_prompt(third).best
    assert [donor.document.document_id for donor in alone.donors] == ["donor"]
    assert (alone.script.computed, told.holes) == (15, 10)
    assert [donor.document.document_id for donor in best.donors] == [told.saved]
    assert best.script.computed == 5


def test_chunks_that_spans_do_not_touch_stay_where_they_are(small, texts):
    store = CountingStore(MemoryStore())
    coding = Coding(chunk_tokens=64)
    corpus = stored(small, texts[0], store, coding=coding)
    sizes = [corpus.read_header(corpus.find("donor")).chunk_bytes(chunk, 4) for chunk in range(10)]
    with loader(small.engine, corpus, quality_floor=4, quality_ceiling=4) as made:
        answer = made.ask_prompt([5, 6, *texts[0][130:190], *texts[0][400:446], *texts[1][:40]], donors=["donor"])
    assert answer.reused.donors == (("donor", 106),)
    chosen = [decision.level for decision in answer.decisions]
    assert chosen == [4, 4]
    assert sizes[2] + sizes[6] <= answer.bytes < sizes[2] + sizes[6] + 20_000


@pytest.mark.parametrize(("costs", "why"), [(CHEAP, "s without donors"), (NEVER, "")])
def test_donors_have_to_pay(small, corpus, prompt, costs, why):
    with Loader(small.engine, corpus, costs=costs, settings=LoadSettings(**FINE)) as made:
        search = made.plan_prompt(prompt)
        assert (search.plan is None) == bool(why)
        (told,) = search.considered
        assert (told.document, told.tokens, told.spans) == ("donor", 549, 4)
        assert why in told.refused
        assert bool(told.refused) == bool(why)
        answer = made.ask_prompt(prompt, reuse="auto")
        assert bool(answer.reused.donors) == (not why)
        assert made.ask_prompt(prompt, reuse="donors").reused.donors


def test_donors_are_not_looked_for_where_looking_takes_as_long_as_computing(small, texts, prompt):
    class Looked(StoreWrapper):
        keys: ClassVar[set[str]] = set()

        def _do(self, request, call):
            self.keys.add(request.key)
            return call(request.data)

    corpus = filled(small, small.engine, Looked(stored(small, texts[0]).catalog.store))
    for mode, costs, is_looked in (("auto", CHEAP, False), ("auto", NEVER, True), ("donors", CHEAP, True)):
        Looked.keys.clear()
        with Loader(small.engine, corpus, costs=costs, settings=LoadSettings(**FINE)) as made:
            answer = made.ask_prompt(prompt, reuse=mode)
        assert any("catalog/donors" in key for key in Looked.keys) == bool(answer.reused.donors) == is_looked
        assert not answer.misses


def test_no_header_is_read_of_donors_that_share_too_little(small, texts):
    """A plan that is asked for tells what they would take all the same."""
    store = CountingStore(stored(small, texts[0]).catalog.store)
    corpus = filled(small, small.engine, store)
    blob = corpus.find("donor").blob_key
    prompt = (*texts[0][:60], *texts[1][:400])
    with Loader(small.engine, corpus, costs=NEVER, settings=LoadSettings(**FINE)) as made:
        store.reset()
        assert made.ask_prompt(prompt, reuse="auto").reused.loaded == 0
        assert not [key for method, key in store.tallies() if key == blob]
        best = made.plan_prompt(prompt).best
        assert best.script.reused == 60
        assert [key for method, key in store.tallies() if key == blob]


def test_prompts_like_no_other_are_soon_searched_for_no_more(small, texts):
    """No test of the time that it takes: requests for features are counted."""
    store = CountingStore(stored(small, texts[0]).catalog.store)
    corpus = filled(small, small.engine, store)
    with Loader(small.engine, corpus, costs=NEVER, settings=LoadSettings(**FINE)) as made:
        listed = []
        for number in range(FIRST_SEARCHES + TRIED_AGAIN):
            store.reset()
            ids = random.Random(number).sample(range(5, small.engine.vocabulary_size), 200)
            answer = made.ask_prompt(ids, reuse="auto")
            assert not answer.reused.donors
            assert not answer.misses
            listed.append(store.tally("scan").requests > 0)
    assert all(listed[:FIRST_SEARCHES])
    assert sum(listed[FIRST_SEARCHES:]) == 1


def test_edited_loads_teach_what_plans_go_by(small, corpus, prompt, monkeypatch):
    monkeypatch.undo()  # of what keeps costs
    log = []
    with loader(small.engine, corpus, record=log.append, **FINE) as made:
        before = made.plan_prompt(prompt)
        answer = made.ask_prompt(prompt, reuse="donors")
        after = made.plan_prompt(prompt)
        costs = made.costs
    (told,) = (entry.event for entry in log if isinstance(entry.event, events.PromptAssembled))
    assert told.rows == (answer.reused.holes, answer.reused.repaired)
    (query,) = told.passes
    assert query[:2] == (32, len(prompt) - 32)
    assert 0 < told.repair_s < answer.timing.recompute_s + answer.timing.repair_s + 1e-6
    assert costs.prefill.seconds(32, 500) < 0.1 * NEVER.prefill.seconds(32, 500)
    assert costs.repair_scale != 1.0
    assert after.best.seconds < 0.1 * before.best.seconds


@pytest.mark.parametrize("shared", [64, 300])
def test_text_is_a_rival_of_a_stored_beginning(small, corpus, texts, shared):
    costs = CostModel(PrefillCost(0.0, 0.01), DecodeCost(0.0, 1e-6))
    prompt = (*texts[0][:shared], *texts[1])
    with Loader(small.engine, corpus, costs=costs, settings=LoadSettings(**FINE)) as made:
        answer = made.ask_prompt(prompt, reuse="exact")
    assert (answer.reused.document, answer.reused.loaded) == ("donor", shared if shared == 300 else 0)
    assert mean_kl(full(small.engine, prompt), answer.logits[None]) < (3e-3 if shared == 300 else 1e-6)


def report(holes=0.001):
    return EditReport("m", 9, (0.02, 0.1), (1.0, 2.0), (holes, holes), (0.05, 0.15), {"attention": ((0.9, 0.9),) * 2})


def test_only_a_model_that_was_measured_is_edited_where_nothing_is_said(small, corpus, prompt):
    def donors(**settings):
        with loader(small.engine, corpus, **FINE, **settings) as made:
            answer = made.ask_prompt(prompt)
            return answer.reused.donors, answer.reused.repaired, answer.reused.error

    assert donors() == ((), 0, None)
    corpus.set_edit_report(report(holes=0.9))
    assert donors() == ((), 0, None)
    corpus.set_edit_report(report())
    assert donors() == ((("donor", 549),), 0, 0.001)
    assert donors(repair=0.05) == ((), 0, None)  # which was measured, too
    corpus.catalog.objects.write(corpus.catalog.keys(corpus.config).edit_report, b"{")
    with loader(small.engine, corpus, **FINE) as made:
        answer = made.ask_prompt(prompt)
    assert not answer.reused.donors
    assert "report on edits was not read" in answer.misses[0]


def test_nothing_of_the_store_is_used_where_that_is_said(small, corpus, texts):
    with loader(small.engine, corpus, **FINE) as made:
        answer = made.ask_prompt([*texts[0], 5], reuse="none")
        assert (answer.reused.loaded, answer.bytes) == (0, 0)
        with pytest.raises(ArgumentError, match="auto, exact, donors or none"):
            made.ask_prompt(texts[0], reuse="all")
        with pytest.raises(ArgumentError, match="named and not to be used"):
            made.ask_prompt(texts[0], reuse="exact", donors=["donor"])


def test_exact_caches_are_made_of_no_donors(small, corpus, prompt):
    with loader(small.engine, corpus, exact=True) as made:
        answer = made.ask_prompt(prompt, reuse="auto")
    assert not answer.reused.donors
    assert any("exact caches were asked for" in miss for miss in answer.misses)


@pytest.mark.parametrize("unread", ["catalog/donors", "catalog/tokens", "/texts/", ".kvw"])
def test_a_store_that_fails_costs_no_answer(small, texts, prompt, unread):
    store = Failing(MemoryStore())
    corpus = stored(small, texts[0], store)
    store.unread = unread
    with loader(small.engine, corpus, **FINE) as made:
        answer = made.ask_prompt(prompt, reuse="auto", tokens=2)
    assert (len(answer.tokens), answer.reused.donors) == (2, ())
    assert mean_kl(full(small.engine, prompt), answer.logits[None]) < 3e-3
    assert answer.misses


def test_a_store_that_hangs_is_waited_for_once(small, texts, prompt):
    """For ``open_s`` in all, though a search asks for many features, and then texts."""
    is_over = threading.Event()

    class Hanging(StoreWrapper):
        def _do(self, request, call):
            if request.method == "scan" and "catalog/donors" in request.key:
                is_over.wait(120)
            return call(request.data)

    corpus = stored(small, texts[0])
    with loader(small.engine, filled(small, small.engine, Hanging(corpus.catalog.store)), open_s=2.0, **FINE) as made:
        try:
            began = time.monotonic()
            answer = made.ask_prompt(prompt, reuse="auto")
            took_s = time.monotonic() - began
        finally:
            is_over.set()
    assert not answer.reused.donors
    assert sum("no similar prompt was used" in miss for miss in answer.misses) == 1
    assert 2.0 <= took_s < 60


def damage(store, word, change):
    for key in [key for key in store.keys("") if word in key]:
        change(store, key)


@pytest.mark.parametrize(
    ("word", "change"),
    [
        (".kvw", lambda store, key: store.delete(key)),
        (".kvw", lambda store, key: store.put(key, store.get(key)[:-4000])),
        (".kvw", lambda store, key: store.put(key, store.get(key)[:3000] + bytes(len(store.get(key)) - 3000))),
        ("/texts/", lambda store, key: store.put(key, store.get(key)[:-8])),
        ("/texts/", lambda store, key: store.delete(key)),
        ("/tokens/", lambda store, key: store.put(key, b"{")),
        ("/donors/", lambda store, key: store.delete(key)),
    ],
)
def test_what_is_damaged_is_computed(small, texts, prompt, word, change):
    store = MemoryStore()
    corpus = stored(small, texts[0], store)
    damage(store, word, change)
    with loader(small.engine, corpus, **FINE) as made:
        answers = [made.ask_prompt(prompt, reuse="donors", donors=donors) for donors in ((), ("donor",))]
    for answer in answers:
        assert mean_kl(full(small.engine, prompt), answer.logits[None]) < 3e-3
    found, named = answers
    assert found.misses or word == "/donors/"
    assert named.misses or word in {"/donors/", "/tokens/"}  # which lead to donors that are not named


def test_a_prompt_that_is_kept_serves_those_like_it(small, texts, prompt):
    corpus = filled(small, small.engine)
    with loader(small.engine, corpus, **FINE) as made:
        plain = made.ask_prompt(texts[0], save=True)  # no donor, since that was not asked for
        assert plain.reused.saved
        found = made.ask_prompt(prompt, reuse="donors", save=True)
        assert (found.reused.document, found.reused.donors) == (plain.reused.saved, ())
        lossy = made.ask_prompt((*texts[0][:300], 5, *texts[1]), reuse="auto", save=True)  # rows over lossy ones
        assert lossy.reused.saved
        ids = texts[1][::-1]
        kept = made.ask_prompt(ids, reuse="auto", save=True).reused
        told = made.ask_prompt((*ids[:200], 7, *ids[201:], *texts[0][:32]), reuse="donors", save=True)
    assert told.reused.donors == ((kept.saved, 599),)
    assert told.reused.saved
    assert not told.misses


def test_an_edited_prompt_is_kept_as_a_prefill_computes_it(small, texts, prompt, monkeypatch):
    computed, save = [], saving.Saver.save
    monkeypatch.setattr(saving, "BLOCK_ROWS", 100)
    monkeypatch.setattr(
        saving.Saver, "save", lambda saver, rows, *more: computed.append(rows) or save(saver, rows, *more)
    )
    corpus = stored(small, texts[0], index=("donors",))
    with loader(small.engine, corpus, **FINE) as made:
        told = made.ask_prompt(prompt, reuse="donors", tokens=3, save=True)
    assert told.reused.donors
    assert told.reused.loaded < 600
    entry = corpus.find(told.reused.saved)
    ids = (*prompt, *told.tokens)
    assert (corpus.text(entry), corpus.read_header(entry).context_level) == (ids, None)
    (whole,), (rows,) = small.engine.prefill([ids]), computed
    for ours, theirs in zip((*rows.cache.keys, *rows.cache.values), (*whole.keys, *whole.values), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5 * float(theirs.abs().max()))
    with loader(small.engine, corpus, **FINE) as made:
        longer = made.ask_prompt((*ids, 5, 6), reuse="exact")
        like_it = made.ask_prompt((*ids[:400], 9, *ids[400:], *texts[1][:32]), reuse="donors")
    assert longer.reused.document == told.reused.saved
    assert dict(like_it.reused.donors)[told.reused.saved] >= len(ids) - 20


def test_what_an_edited_prompt_begins_with_is_stored_once(small, corpus, texts):
    """Unless that was computed over lossy rows, which are worse than those that are kept."""
    list(corpus.encode([Document("other", texts[1])], index=("donors",)))
    rest = (*texts[1][:300], 5, *texts[1][301:], *texts[0][100:140])
    with loader(small.engine, corpus, **FINE) as made:
        lossy = made.ask_prompt((*texts[0][:300], *texts[1][50:150]), reuse="exact", save=True).reused.saved
        exact = made.ask_prompt((*texts[0], *rest), reuse="donors", save=True).reused
        over = made.ask_prompt((*texts[0][:300], *texts[1][50:150], *rest), reuse="donors", save=True).reused
    assert "other" in dict(exact.donors)
    assert "other" in dict(over.donors)
    parts = corpus.find(exact.saved).parts
    assert (len(parts), parts[0].sha256) == (2, corpus.find("donor").sha256)
    levels = [corpus.read_header(corpus.find(name)).context_level for name in (lossy, exact.saved, over.saved)]
    assert levels == [4, None, None]


def test_an_edited_prompt_that_cannot_be_kept_costs_no_answer(small, texts, prompt, caplog, monkeypatch):
    store = Failing(MemoryStore())
    corpus = stored(small, texts[0], store)
    with loader(small.engine, corpus, **FINE) as made:
        monkeypatch.setattr(saving, "_MOST_WAITING", 0)
        none = made.ask_prompt(prompt, reuse="donors", save=True)
        assert (none.reused.saved, none.misses) == ("", ("prompt and answer were not saved: too many others wait",))
        monkeypatch.undo()
        store.word = ".kvw"
        told = made.ask_prompt(prompt, reuse="donors", save=True)
    assert told.first_token == none.first_token
    assert made.unsaved == 1
    assert "a prompt was not saved: the disk is full" in caplog.text


def test_an_edited_prompt_that_a_loader_leaves_behind_is_told(small, corpus, prompt, caplog, monkeypatch):
    begun, let, save = threading.Event(), threading.Event(), saving.Saver.save
    monkeypatch.setattr(saving, "_CLOSING_S", 0.01)
    monkeypatch.setattr(saving.Saver, "save", lambda *given: (begun.set(), let.wait(60), save(*given))[-1])
    with loader(small.engine, corpus, **FINE) as made:
        assert made.ask_prompt(prompt, reuse="donors", save=True).reused.saved
        assert begun.wait(60)
        threading.Timer(0.5, let.set).start()
    assert made.unsaved == 1
    assert "its loader ended before it was computed" in caplog.text


def test_prompts_of_other_tenants_and_writers_change_no_bit(small, texts, prompt):
    """A canary: the same answer, to the last bit, whether another tenant or writer has a text much like the prompt."""

    def answer(*planted):
        store = MemoryStore()
        corpus = filled(small, small.engine, store)
        for tenant, writer in planted:
            theirs = filled(small, small.engine, store, tenant=tenant)
            (found,) = theirs.encode([Document("secret", texts[0])], index=("kvwire",) if tenant != "default" else ())
            theirs.donors(writer).write(found.entry, texts[0])
        with loader(small.engine, corpus, writer="anna", **FINE) as made:
            return made.ask_prompt(prompt, reuse="donors")

    alone = answer()
    for planted in ([("elsewhere", "")], [("default", "mallory")], [("elsewhere", "anna"), ("default", "mallory")]):
        ours = answer(*planted)
        assert torch.equal(ours.logits, alone.logits)
        assert not ours.reused.donors
    assert answer(("default", "anna")).reused.donors
    assert answer(("default", "")).reused.donors


def test_a_donor_that_was_removed_is_no_longer_found(small, corpus, prompt):
    corpus.catalog.remove(corpus.config, "donor")
    with loader(small.engine, corpus, **FINE) as made:
        answer = made.ask_prompt(prompt, reuse="donors")
    assert not answer.reused.donors
    assert not answer.bytes


def test_a_deadline_is_kept_or_not_as_without_donors(small, corpus, prompt):
    with loader(small.engine, corpus, **FINE) as made:
        answer = made.ask_prompt(prompt, reuse="auto", deadline_s=30.0)
    assert answer.reused.donors
    assert answer.timing.ttft_s < 30


def test_the_command_line_plans_and_asks_similar_prompts(run, small, demo_model, tmp_path, monkeypatch):
    monkeypatch.setattr(edit_check, "TOKENS", 96)
    monkeypatch.setattr(edit_check, "MEASURED_SELECTORS", ("first",))
    monkeypatch.setattr(edit_check, "EDITED", (0.1,))
    texts, store, prompt = tmp_path / "texts", tmp_path / "store", tmp_path / "prompt.txt"
    texts.mkdir()
    store.mkdir()
    whole = "\n".join(small.texts.values())
    (texts / "donor.txt").write_text(whole)
    prompt.write_text(whole.replace("bell", "lamp", 3))
    model, place = ["--model", demo_model], ["--store", store]
    code, _, err = run("encode", texts, *model, *place, "--calibration", "quick", "--index", "donors,kvwire")
    assert code == 0, err
    code, out, err = run("plan", "--prompt", prompt, *model, *place, "--link", "1gbit", "--json")
    told = json.loads(out)
    assert [each["tokens"] > 300 for each in told["considered"]] == [True], err
    assert told["plan"]["reused"] == told["considered"][0]["tokens"]
    code, late, _ = run("plan", "--prompt", prompt, *model, *place, "--link", "1gbit", "--deadline", "1e-9", "--json")
    assert (code, json.loads(late)["error"]["kind"]) == (6, "DeadlineError")
    code, out, err = run("plan", "--prompt", prompt, *model, *place, "--link", "1gbit", "--deadline", "1000")
    assert all(word in out for word in ("without donors", "edited", "spans", "never measured", "donor")), out
    ask = ["ask", "--prompt", prompt, "--reuse", "donors", "--tokens", 2, *model, *place]
    code, out, err = run(*ask, "--json")
    assert json.loads(out)["reused"]["donors"][0][1] > 300, err
    with monkeypatch.context() as patch:
        patch.setattr(saving, "BLOCK_ROWS", 0)  # nothing can be computed
        code, out, err = run(*ask, "--save", "--json")
    assert (code, json.loads(out)["reused"]["saved"][:8]) == (9, "prompts/"), err
    assert "the answer was not saved, as told above" in err
    code, out, err = run(*ask, "--donor", told["considered"][0]["document"], "--save")
    assert ("tokens in holes" in out, "kept as prompts/" in out) == (True, True), err
    code, out, err = run("ask", "--prompt", prompt, "--reuse", "exact", *model, *place)
    assert "tokens of the prompt from prompts/" in out, err
    code, out, err = run("check-model", demo_model, "--documents", texts, "--edits", "--prompts", 2, *place, "--json")
    assert (code, json.loads(out)["edited"]) == (0, [0.1]), err
    code, out, err = run("check-model", demo_model, "--documents", texts, "--edits", "--prompts", 1)
    assert "donor as it is" in out, err
    for words, why in (
        (["ask", "--docs", "a", "--question", "x", "--reuse", "auto"], "goes without --reuse"),
        (["plan", "--prompt", prompt, "--context", "1k", *place], "--prompt needs --model and --store"),
        (["plan", "--prompt", tmp_path / "none.txt", *place], "is not a file"),
    ):
        code, out, err = run(*words, *model)
        assert (code != 0, why in err) == (True, True), err
