"""Links: what was measured of them, what loads do about them, and what is never touched."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace

import pytest
import torch

from kvwire.controller.policies import CacheBlend, Fixed
from kvwire.errors import ArgumentError, CorruptError, LinkBoundError, MismatchError, StorageError
from kvwire.reuse import SELECTORS
from kvwire.runtime import link_check
from kvwire.runtime.corpus import Corpus, Document
from kvwire.runtime.link_check import CheckPrompt, check_exact, check_links, prompts_of, shortened
from kvwire.runtime.links import plan_links
from kvwire.runtime.loader import Loader
from kvwire.runtime.quality import mean_kl
from kvwire.runtime.reports import LinkReport
from kvwire.runtime.settings import LoadSettings
from kvwire.store import MemoryStore

from ..store_wrappers import StoreWrapper
from .test_engine_protocol import COSTS, TEXTS
from .tiny_engine import TinyEngine

REPORT = LinkReport(
    model_id="m",
    prompts=3,
    no_documents=0.5,
    linked=0.2,
    linked_error=0.01,
    shares=(0.05, 0.15, 0.3),
    repaired={"attention": (0.1, 0.04, 0.01), "first": (0.2, 0.21, 0.19)},
    levels={"coarse": 0.3},
    levels_repaired={"coarse": 0.1},
    repaired_share=0.15,
)


def asked(small, corpus, **settings):
    deadline_s = settings.pop("deadline_s", None)
    question = small.engine.tokenize("And the lamp was")
    with Loader(small.engine, corpus, costs=small.costs, settings=LoadSettings(**settings)) as loader:
        return loader.ask(tuple(small.tokens), question, deadline_s=deadline_s), question


def contents(store):
    return {listed.key: bytes(store.get(listed.key)) for listed in store.scan("")}


def full_logits(small, question):
    text = [token for ids in small.tokens.values() for token in ids]
    return small.engine.forward(None, [*text, *question], 0, logits=1)


def test_all_rows_repaired_answer_as_a_prefill(small):
    answer, question = asked(small, small.corpus(), repair="all", quality_floor=4)
    wanted = full_logits(small, question)
    assert mean_kl(wanted, answer.logits[None]) < 1e-6
    assert answer.first_token == int(wanted.argmax())
    assert len(answer.repair.rows) == answer.prompt.cache.tokens
    assert answer.timing.repair_s > 0


def test_all_rows_of_a_single_document_are_those_of_a_prefill_too(small):
    name, ids = next(iter(small.tokens.items()))
    question = small.engine.tokenize("And the lamp was")
    settings = LoadSettings(repair="all", quality_floor=0, quality_ceiling=0)
    with Loader(small.engine, small.corpus(), costs=small.costs, settings=settings) as loader:
        answer = loader.ask([name], question)
    assert mean_kl(small.engine.forward(None, [*ids, *question], 0, logits=1), answer.logits[None]) < 1e-6
    assert len(answer.repair.rows) == len(ids)


def test_a_share_of_the_rows_comes_nearer_to_a_prefill(small):
    plain, question = asked(small, small.corpus(), repair="none", quality_floor=4)
    wanted = full_logits(small, question)
    far = mean_kl(wanted, plain.logits[None])
    answer, _ = asked(small, small.corpus(), repair=0.3, quality_floor=4)
    assert plain.repair is None
    assert mean_kl(wanted, answer.logits[None]) < far / 2
    assert answer.repair.selector == "attention"
    assert int(answer.repair.rows.min()) >= len(next(iter(small.tokens.values())))


def test_time_before_a_deadline_is_spent_on_repair(small):
    answer, _ = asked(small, small.corpus(), deadline_s=20.0)
    assert answer.repair is not None
    left = answer.prompt.cache.tokens - (answer.front - answer.prompt.tokens[0])
    assert len(answer.repair.rows) == pytest.approx(0.3 * left, abs=1)
    soonest, _ = asked(small, small.corpus())
    assert soonest.repair is None


def test_text_sees_the_documents_before_it(small):
    """With time for a prefill, and nothing better to do with it, a load is one."""
    answer, question = asked(small, small.corpus(), deadline_s=20.0, repair_floor=0.01)
    behind = [decision for decision in answer.decisions if decision.chunk.document]
    assert all(decision.action == "recompute" for decision in behind)
    assert answer.front == answer.prompt.cache.tokens
    assert not answer.link_warning
    blind, _ = asked(small, small.corpus(), deadline_s=20.0, repair="none")
    assert blind.front == blind.prompt.tokens[0]
    wanted = full_logits(small, question)
    assert mean_kl(wanted, answer.logits[None]) < 0.01 * mean_kl(wanted, blind.logits[None])


def test_text_that_cannot_see_the_documents_before_it_is_computed_without(small, monkeypatch):
    """A pass behind others needs more memory than one alone."""
    extend = type(small.engine).extend

    def narrow(engine, prefix, token_ids, *, offset=0):
        if prefix is not None and prefix.meta.offset == 0 and prefix.tokens > 300:
            msg = "out of memory"
            raise RuntimeError(msg)
        return extend(engine, prefix, token_ids, offset=offset)

    monkeypatch.setattr(type(small.engine), "extend", narrow)
    texts = {f"text of {name}": ids[::-1] for name, ids in small.tokens.items()}
    with Loader(small.engine, small.corpus(), costs=small.costs, settings=LoadSettings(repair=0.1)) as loader:
        answer = loader.ask((*texts, *small.tokens), small.engine.tokenize("And the lamp was"), texts=texts)
    assert any("without the documents before it" in miss for miss in answer.misses)
    assert answer.front < sum(map(len, texts.values()))


def test_rows_behind_text_that_sees_are_all_that_is_repaired(small):
    """A prompt whose first documents are computed behind each other is repaired behind these alone."""
    texts = {f"text of {name}": ids[::-1] for name, ids in small.tokens.items()}
    chosen = LoadSettings(repair=0.3, policy=Fixed(4))
    with Loader(small.engine, small.corpus(), costs=small.costs, settings=chosen) as loader:
        answer = loader.ask((*texts, *small.tokens), small.engine.tokenize("And the lamp was"), texts=texts)
    front = sum(map(len, texts.values()))
    assert answer.front == front
    left = answer.prompt.cache.tokens - (front - answer.prompt.tokens[0])
    assert len(answer.repair.rows) == pytest.approx(0.3 * left, abs=1)
    ids = [token for text in texts.values() for token in text]
    (exact,) = small.engine.prefill([ids])
    seen = answer.prompt.cache.slice(0, front)
    assert all(torch.allclose(ours, theirs, atol=1e-4) for ours, theirs in zip(seen.values, exact.values, strict=True))
    assert int(answer.repair.rows.min()) >= answer.front


def test_a_single_document_has_no_links(small):
    name = next(iter(small.tokens))
    question = small.engine.tokenize("And the lamp was")
    with Loader(small.engine, small.corpus(), costs=small.costs, settings=LoadSettings(repair=0.5)) as loader:
        answer = loader.ask([name], question)
    assert answer.repair is None


def test_repairs_never_reach_the_store(small):
    """A document's objects depend on the document alone, whatever it was linked behind."""
    corpus = small.corpus()
    store = corpus.catalog.store
    before = contents(store)
    names = tuple(small.tokens)
    question = small.engine.tokenize("And the lamp was")
    with Loader(small.engine, corpus, costs=small.costs, settings=LoadSettings(repair="all")) as loader:
        poisoned = loader.ask(names, question)
        again = loader.ask(names[1:], question)
    with Loader(small.engine, corpus, costs=small.costs, settings=LoadSettings(repair="all")) as loader:
        alone = loader.ask(names[1:], question)
    assert contents(store) == before
    assert torch.equal(again.logits, alone.logits)
    assert poisoned.repair is not None


@pytest.mark.parametrize("selector", sorted(set(SELECTORS) - {"deviation", "product"}))
def test_every_selector_serves_loads(small, selector):
    answer, _ = asked(small, small.corpus(), repair=0.2, selector=selector)
    assert (answer.repair is None) == (selector == "none")


def test_an_engine_without_rows_is_told(small):
    engine = TinyEngine()
    corpus = Corpus(engine, MemoryStore())
    list(corpus.encode([Document(name, tuple(ids)) for name, ids in TEXTS.items()]))
    with Loader(engine, corpus, costs=COSTS) as loader:
        first = loader.ask(list(TEXTS), [3, 1, 4], deadline_s=5.0)
        second = loader.ask(list(TEXTS), [3, 1, 4], deadline_s=5.0)
    assert first.repair is None
    assert any("links were not repaired: this engine" in miss for miss in first.misses)
    assert second.repair is None
    assert second.misses == first.misses
    with (
        Loader(engine, corpus, costs=COSTS, settings=LoadSettings(repair=0.1)) as loader,
        pytest.raises(MismatchError, match="links were not repaired"),
    ):
        loader.ask(list(TEXTS), [3, 1, 4])
    assert small.engine is not engine


@pytest.mark.parametrize(
    "wrong", [{"repair": "some"}, {"repair": 1.5}, {"repair": -0.1}, {"repair_floor": 2.0}, {"selector": "clever"}]
)
def test_settings_that_nobody_can_mean_are_refused(wrong):
    with pytest.raises(ArgumentError):
        LoadSettings(**wrong)


def test_a_report_is_read_as_it_was_written():
    assert LinkReport.of_json(REPORT.to_json()) == REPORT
    assert not REPORT.is_within
    assert REPORT.least_share("attention") == 0.15
    assert REPORT.least_share("first") is None
    assert replace(REPORT, linked=0.01).least_share("first") == 0.0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        REPORT.to_json().replace(b'"version": 2', b'"version": 3'),
        REPORT.to_json().replace(b"0.5", b"-0.5"),
        REPORT.to_json().replace(b'"shares": [0.05, 0.15, 0.3]', b'"shares": 3'),
        REPORT.to_json().replace(b'"repaired": {', b'"repaired": {"x": 4, '),
        REPORT.to_json()[:-20],
    ],
)
def test_a_damaged_report_says_what_to_do(data):
    with pytest.raises(CorruptError, match="check-model again"):
        LinkReport.of_json(data)


def test_the_report_says_how_much_is_repaired_at_least():
    plan = plan_links("auto", None, "attention", REPORT, None)
    assert plan.option.least == 0.15
    assert plan.option.error_left(0.0) == pytest.approx(0.2)
    assert not plan.warning(0.15)
    assert plan.warning(0.05)
    assert not plan.warning(1.0)
    assert plan_links("auto", None, "first", REPORT, None).option.least == 0.3
    assert "as text" in plan_links("auto", None, "first", REPORT, None).warning(0.3)
    blind = plan_links("none", None, "attention", REPORT, None)
    assert blind.option is None
    assert "lose 40%" in blind.warning(0.0)
    assert "repair 0.15" in plan.warning(0.0)
    assert plan_links("auto", None, "attention", None, None).option.least == 0.0
    assert plan_links("all", None, "first", None, None).selector.name == "all"


def test_a_bound_of_the_users_own_takes_the_place_of_the_reports():
    assert plan_links("auto", None, "attention", REPORT, None, bound=0.4).option.least == 0.0
    strict = plan_links("auto", None, "attention", REPORT, None, bound=0.03)
    assert strict.option.least == 0.3
    strict.check(strict.warning(0.3))
    with pytest.raises(LinkBoundError, match="rows, or raise the bound"):
        strict.check(strict.warning(0.15))
    unmeasured = plan_links("auto", None, "attention", None, None, bound=0.4)
    with pytest.raises(LinkBoundError, match="run kvwire check-model"):
        unmeasured.check(unmeasured.warning(1.0))
    for plan in (plan_links("auto", None, "attention", REPORT, None), replace(strict, refuses=False)):
        plan.check(plan.warning(0.0))  # warned of, not refused
    for wrong in (-0.1, float("nan")):
        with pytest.raises(ArgumentError, match="bound on links"):
            plan_links("auto", None, "attention", None, None, bound=wrong)


def test_loads_beyond_the_bound_are_refused(small):
    corpus, log = small.corpus(), []
    with pytest.raises(LinkBoundError, match="run kvwire check-model"):
        asked(small, corpus, link_bound=0.1, record=log.append)
    assert not log  # where nobody measured, that is said before anything is fetched or computed
    corpus.set_link_report(REPORT)
    answer, _ = asked(small, corpus, link_bound=0.1)
    assert not answer.link_warning
    assert len(answer.repair.rows) == pytest.approx(0.15 * answer.prompt.cache.tokens, abs=1)
    more, _ = asked(small, corpus, link_bound=0.03)
    assert len(more.repair.rows) == pytest.approx(0.3 * more.prompt.cache.tokens, abs=1)
    with pytest.raises(LinkBoundError, match="lose 40%"):
        asked(small, corpus, link_bound=0.1, repair="none")
    with pytest.raises(LinkBoundError, match="lose"):
        asked(small, corpus, link_bound=0.1, repair=0.05)
    with pytest.raises(LinkBoundError, match="as text"):
        asked(small, corpus, link_bound=0.001)
    whole, _ = asked(small, corpus, link_bound=0.0, repair="all")
    assert not whole.link_warning


def test_cacheblends_rule_says_how_many_rows_a_load_computes(small):
    answer, _ = asked(small, small.corpus(), policy=CacheBlend(), selector="cacheblend", deadline_s=20.0)
    rows, tokens = len(answer.repair.rows), answer.prompt.cache.tokens
    assert rows >= round(0.15 * tokens) - 1
    assert answer.repair.selector == "cacheblend"
    assert {decision.level for decision in answer.decisions} == {4}
    few, _ = asked(small, small.corpus(), policy=CacheBlend(), repair=0.05)
    assert len(few.repair.rows) == pytest.approx(0.05 * tokens, abs=1)


def test_the_report_says_which_selector_serves_best():
    assert REPORT.best_selector(32) == "attention"
    blind = {"attention": (0.2, 0.2, 0.15), "blend": (0.1, 0.04, 0.01), "first": (0.2, 0.2, 0.2)}
    unseen = replace(REPORT, repaired=blind)
    assert unseen.best_selector(32) == "blend"
    plan = plan_links("auto", None, "auto", unseen, None, 32)
    assert (plan.selector.name, plan.option.least, plan.option.looks) == ("blend", 0.15, True)
    assert plan.option.scan == pytest.approx(3 / 32)
    assert plan_links("auto", None, "auto", None, None, 32).selector.name == "attention"
    hopeless = replace(REPORT, repaired={"attention": (0.2, 0.2, 0.19), "first": (0.2, 0.2, 0.18)})
    assert hopeless.best_selector(32) == "first"
    assert replace(REPORT, repaired={}).best_selector(32) == "attention"


def test_loads_follow_the_report_of_the_store(small):
    corpus = small.corpus()
    corpus.set_link_report(REPORT)
    assert corpus.link_report() == REPORT
    answer, _ = asked(small, corpus)
    assert len(answer.repair.rows) == pytest.approx(0.15 * answer.prompt.cache.tokens, abs=1)
    blind, _ = asked(small, corpus, repair="none")
    assert "lose 40%" in blind.link_warning
    corpus.catalog.models.put_link_report(small.engine.meta.config_digest(), b'{"version": 9}')
    unread, _ = asked(small, corpus)
    assert unread.repair is None  # as where nobody measured
    assert any("check-model again" in miss for miss in unread.misses)


def texts(small):
    return [ids * 2 for ids in small.tokens.values()]


def test_checking_a_model_measures_it(small):
    prompts = prompts_of(texts(small), 2, small.engine.window)
    assert [len(prompt.documents) for prompt in prompts] == [link_check.PIECES] * 2
    seen = []
    report = check_links(small.engine, prompts, small.profile, tell=seen.append)
    assert seen == [1, 2]
    assert report.prompts == 2
    assert 0 < report.linked < report.no_documents
    attention = report.repaired["attention"]
    assert attention[-1] < attention[0] < report.linked
    assert len(report.levels) == len(report.levels_repaired) == 5
    assert report.levels["finest"] == pytest.approx(report.linked, rel=0.1)
    assert report.levels_repaired["finest"] < report.levels["finest"]


def test_a_wrong_rotation_is_noticed(small, monkeypatch):
    (prompt,) = prompts_of(texts(small), 1, small.engine.window)
    check_exact(small.engine, prompt)
    shift = link_check.link

    def wrong(caches):
        linked = shift(caches)
        linked.keys[1].neg_()
        return linked

    monkeypatch.setattr(link_check, "link", wrong)
    with pytest.raises(MismatchError, match="run its prompts as text"):
        check_exact(small.engine, prompt)


def test_a_wrong_mask_is_noticed(small, monkeypatch):
    (prompt,) = prompts_of(texts(small), 1, small.engine.window)
    masks = "kvwire.engines.transformers.rows.attention_mask"
    monkeypatch.setattr(masks, lambda *given: torch.ones_like(given[2])[None, None])
    with pytest.raises(MismatchError, match="masks"):
        check_exact(small.engine, prompt)


def test_texts_that_are_too_short_are_refused():
    with pytest.raises(ArgumentError, match="longer"):
        prompts_of([[1] * 50], 3, 4096)
    with pytest.raises(ArgumentError, match="longer"):
        prompts_of([[1] * 5000], 3, 60)
    whole = CheckPrompt(((1,) * 10,), (2,) * 3, (4,) * 9)
    assert [len(prompt.rest) for prompt in shortened([whole, replace(whole, question=())], 16)] == [3]


def test_the_command_measures_and_loads_obey(run, demo_model, tmp_path, brief):
    store = f"file://{tmp_path}/store"
    documents = demo_model.parent / "documents"
    picture = tmp_path / "links.png"
    words = (
        "check-model",
        demo_model,
        "--documents",
        documents,
        "--prompts",
        2,
        "--store",
        store,
        "--shift-prompts",
        0,
    )
    code, out, _ = run(*words, "--picture", picture, "--json")
    assert code == 0
    said = json.loads(out)
    assert said["prompts"] == 2
    assert said["linked"] > 0
    assert picture.read_bytes()[:4] == b"\x89PNG"
    code, out, err = run(*words, "--bound", 0, "--picture", tmp_path / "none" / "links.png")
    assert (code, "choose another --picture" in err) == (StorageError.exit_code, True)
    assert "rows computed anew" in out  # what was measured is told all the same
    names = sorted(path.stem for path in documents.glob("*.txt"))[:2]
    files = [documents / f"{name}.txt" for name in names]
    assert run("encode", *files, "--model", demo_model, "--store", store)[0] == 0
    asked = ("ask", "--docs", *names, "--question", "Who?", "--tokens", 1, "--model", demo_model, "--store", store)
    code, out, _ = run(*asked, "--json")
    assert code == 0
    said = json.loads(out)
    is_text = all(decision["action"] == "recompute" for decision in said["decisions"])  # it has seen the prompt
    assert is_text or said["repair"]["rows"]  # nothing may be lost: the floor is what comes nearest
    code, _, err = run(*asked, "--repair", "none")
    assert code == 0
    assert "lose" in err
    assert run(*asked, "--repair", "most")[0] == 2
    assert run(*asked, "--selector", "cleverest")[0] == 2
    assert run(*asked, "--repair", "0.2", "--selector", "cacheblend")[0] == 0


def test_questions_of_ones_own(run, demo_model, tmp_path, brief):
    documents = demo_model.parent / "documents"
    names = sorted(path.stem for path in documents.glob("*.txt"))[:2]
    questions = tmp_path / "questions.json"
    questions.write_text(
        json.dumps(
            [
                {"documents": names, "question": "Who kept the light?", "answer": " The keeper."},
                {"documents": names[::-1], "question": "And who came?"},
            ]
        )
    )
    words = ("check-model", demo_model, "--documents", documents, "--json", "--questions", questions)
    code, out, _ = run(*words)
    assert code == 0
    assert json.loads(out)["prompts"] == 2
    questions.write_text('[{"documents": ["none"], "question": "Who?"}]')
    assert run(*words)[0] == 2
    questions.write_text('{"documents": []}')
    assert run(*words)[0] == 2


def test_documents_are_measured_as_the_store_has_them(run, demo_model, tmp_path, brief):
    documents, place = demo_model.parent / "documents", ("--json", "--store", f"file://{tmp_path}/store")
    (file, *_) = sorted(documents.glob("*.txt"))
    code, _, err = run("encode", file, "--model", demo_model, "--calibration", "quick", "--neutral-prefix", 8, *place)
    assert code == 0, err
    words = (
        "check-model",
        demo_model,
        "--documents",
        documents,
        "--prompts",
        1,
        "--shift-prompts",
        0,
        "--json",
        *place,
    )
    _, out, err = run(*words)
    assert (json.loads(out)["neutral"], "leave out --neutral-prefix" in err) == (8, False)
    _, out, err = run(*words, "--neutral-prefix", 0)
    assert (json.loads(out)["neutral"], "leave out --neutral-prefix" in err) == (0, True)


@pytest.mark.parametrize("edits", [False, True])
def test_texts_that_cannot_be_read_are_left_out_and_counted(run, demo_model, tmp_path, brief, edits):
    documents = tmp_path / "documents"
    shutil.copytree(demo_model.parent / "documents", documents)
    (documents / "00-latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    words = ("check-model", demo_model, "--documents", documents, "--prompts", 1, "--shift-prompts", 0, "--json")
    code, out, err = run(*words, *(["--edits"] if edits else []))
    said = json.loads(out)
    assert code == 9
    assert list(said["failures"]) == ["00-latin"]
    assert said["error"]["message"].startswith("1 of ")
    assert err.count("00-latin is left out: ") == 1
    assert said["prompts"] == 1
    for file in documents.glob("*.txt"):
        file.write_bytes(b"\xff")
    code, _, err = run(*words)
    assert code == 7
    assert "can be read; see above" in err


class Unread(MemoryStore):
    """A store whose report on links cannot be read."""

    def get(self, key, start=0, end=None):
        if key.endswith("links.json"):
            msg = "the disk failed; try again"
            raise StorageError(msg)
        return super().get(key, start, end)

    def snapshot(self, key):
        if key.endswith("links.json"):
            msg = "the disk failed; try again"
            raise StorageError(msg)
        return super().snapshot(key)


def test_a_report_that_cannot_be_read_costs_no_load(small):
    corpus = Corpus(small.engine, Unread())
    corpus.set_profile(small.profile)
    list(corpus.encode([Document(name, tuple(ids)) for name, ids in small.tokens.items()]))
    corpus.set_link_report(REPORT)
    answer, _ = asked(small, corpus, deadline_s=20.0)
    assert any("report on links was not read" in miss for miss in answer.misses)
    assert answer.repair is not None  # as where nobody measured


def test_a_report_of_a_later_version_names_selectors_that_are_not_here():
    later = replace(REPORT, repaired={"clairvoyance": (0.0, 0.0, 0.0), "attention": (0.1, 0.04, 0.01)})
    assert plan_links("auto", None, "auto", later, None, 32).selector.name == "attention"
    with pytest.raises(CorruptError):
        LinkReport.of_json(REPORT.to_json().replace(b'"prompts": 3', b'"prompts": 3, "linked": 1' + b"0" * 400))


def test_a_model_whose_logits_overflow_is_not_called_perfect(small, monkeypatch):
    (prompt,) = prompts_of(texts(small), 1, small.engine.window)
    monkeypatch.setattr(link_check, "check_exact", lambda *_: None)
    monkeypatch.setattr(link_check, "mean_kl", lambda *_: float("nan"))
    with pytest.raises(MismatchError, match="not finite"):
        check_links(small.engine, [prompt])


class AskedAtOnce(StoreWrapper):
    """Neither of two objects comes before both are asked for."""

    def __init__(self, inner, *names):
        super().__init__(inner)
        self.names, self.barrier = set(names), threading.Barrier(len(names), timeout=20)

    def _do(self, request, call):
        if (name := request.key.rpartition("/")[2]) in self.names:
            self.names.remove(name)  # an object is opened and then read
            self.barrier.wait()
        return super()._do(request, call)


def test_the_report_and_the_profile_cost_one_round_trip_together(small):
    store = AskedAtOnce(small.corpus().catalog.store, "links.json", "profile.json")
    with Loader(small.engine, Corpus(small.engine, store), costs=small.costs) as loader:
        answer = loader.ask(list(small.tokens), small.engine.tokenize("It was plain"))
    assert not [miss for miss in answer.misses if "report" in miss]
