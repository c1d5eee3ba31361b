"""What clients are told of their requests, and how requests end whose documents cannot be had."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from kvwire.engines.vllm.opening import ConnectorSettings, check_version, log_as_vllm
from kvwire.engines.vllm.outcomes import LoadOutcome, RequestOutcome
from kvwire.engines.vllm.scheduling import ConnectorScheduler, names_documents
from kvwire.errors import ArgumentError, NotFoundError, StorageError
from kvwire.reuse import link
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.runtime.reports import LinkReport
from kvwire.transport import LinkSettings
from kvwire.vllm import Choice, request_body, request_salt

from ..engines.test_chat import CHATML, TEXTS
from .conftest import chat_store
from .halves import BLOCK, QUESTION, Halves, check, damage


@pytest.fixture
def halves(told):
    with closing(Halves(told)) as made:
        yield made


def test_an_answer_tells_what_was_loaded_and_lost(halves, told, caplog):
    damage(told, "b", 1)  # tokens 182 to 214
    with caplog.at_level(logging.INFO, "kvwire.vllm"):
        _, _, said, promised = halves.load(halves.body("abc"))
    assert (said["promised_tokens"], said["loaded_tokens"], said["lost_tokens"]) == (promised, 182, promised - 182)
    assert said["level"] == 1
    assert said["bytes"] > 0
    assert "b chunk 1" in said["trouble"]
    assert f"request 1: 182 of {promised} promised tokens were loaded at level 1" in caplog.text


def test_outcomes_of_workers_join_and_those_of_loads_add_up():
    outcome = RequestOutcome()
    assert outcome.report() == {}
    for each in (
        LoadOutcome(0, 10, 0, 2, 100), LoadOutcome(0, 4, 6, 1, 50, "late"), LoadOutcome(1, 6, 0, 3, 30),
    ):  # fmt: skip
        outcome.add(each)
    assert outcome.report() == {"loaded_tokens": 10, "lost_tokens": 6, "bytes": 180, "level": 1, "trouble": "late"}


@pytest.fixture
def exact(told):
    """The documents once more, with lossless levels."""
    corpus = Corpus(told.engine, told.corpus.catalog.store, coding=Coding(chunk_tokens=32, lossless=True))
    list(corpus.encode([Document(f"exact {name}", ids) for name, ids in told.tokens.items()]))
    return corpus


def test_the_lossless_level_is_loaded_by_its_number(told, exact):
    level = len(exact.find("exact a").levels) - 1
    names = ["exact a", "exact c"]
    with closing(Halves(told)) as halves:
        bad, blocks, said, promised = halves.load(halves.body(names, level))
        cache = link(told.engine.prefill([told.tokens["a"], told.tokens["c"]]))
        assert (bad, promised, said["lost_tokens"], said["level"]) == (set(), cache.tokens, 0, level)
        check(halves, blocks, cache, 0, cache.tokens)


@pytest.mark.parametrize("names", [("a",), ("exact a", "a")])
def test_levels_that_a_document_has_not_are_refused_with_those_it_has(halves, told, exact, names):
    level = len(told.corpus.find("a").levels)
    with pytest.raises(ArgumentError, match=rf"'a' has no level {level}, but 0 \(.*{level - 1} \(.*ask for one"):
        request_salt(told.corpus, Choice(names, level=level))
    body = halves.body(names, 1)
    body["kv_transfer_params"]["kvwire"]["level"] = level
    _, _, said, promised = halves.load(body)
    assert promised == 0
    assert f"'a' has no level {level}, but 0" in said["refused"]


def test_rows_of_another_text_do_not_stand_under_the_documents_salt(halves, monkeypatch):
    """What agrees is loaded; where it cannot be, what vLLM computes of it gets a salt of its own."""
    body = halves.body("ab")
    other = body | {"prompt": [*body["prompt"][:20], 255, *body["prompt"][21:]]}
    for each, tokens in ((body, 247), (other, 20)):
        name, promised = halves.promise(each)
        assert (promised, halves.scheduling.own_salt(name)) == (tokens, None)

    def lost(*_):
        msg = "the text is lost"
        raise NotFoundError(msg)

    monkeypatch.setattr(Corpus, "text", lost)
    name, promised = halves.promise(other)
    salt = halves.scheduling.own_salt(name)
    assert promised == 0
    assert salt.startswith(body["cache_salt"])
    assert names_documents(body["cache_salt"])
    assert not names_documents(salt)
    assert halves.scheduling.own_salt(name) is None  # it is told once
    name, _ = halves.promise(other | {"prompt": other["prompt"][:-1]})
    assert halves.scheduling.own_salt(name) not in (salt, None)
    name, _ = halves.promise(other | {"cache_salt": "mine"})
    assert halves.scheduling.own_salt(name) is None


@pytest.mark.parametrize(
    "said",
    [
        {"prefix": True, "level": 1},
        {"documents": ["c"], "level": 1},
        {"documents": ["a", "b"], "level": 0},
        {"documents": ["a", "b"]},
        {"save": True},
    ],
)
@pytest.mark.parametrize("own", ["", "+mine-other-"])
def test_what_is_computed_under_a_salt_of_other_documents_gets_one_of_its_own(halves, said, own):
    body = halves.body("ab")
    salt = body["cache_salt"] + own
    name, promised = halves.promise(body | {"cache_salt": salt, "kv_transfer_params": {"kvwire": said}})
    assert promised == 0
    other = halves.scheduling.own_salt(name)
    assert other.startswith(f"{body['cache_salt']}-other-")
    assert other.endswith(own)
    assert not names_documents(other)


def test_a_store_that_is_left_alone_gives_a_salt_of_its_own(halves):
    body = halves.body("ab")
    for _ in range(3):
        halves.scheduling.loaded("none", LoadOutcome(0, 0, 9))
    name, promised = halves.promise(body)
    assert promised == 0
    assert halves.scheduling.own_salt(name).startswith(f"{body['cache_salt']}-other-")


def test_a_client_adds_its_own_to_a_salt(halves, told):
    """Its documents are loaded, and in vLLM's memory nobody without its word finds them."""
    body = request_body(told.corpus, Choice(("a", "b"), level=1), QUESTION, cache_salt="mine+2")
    assert body["cache_salt"] == f"{halves.body('ab')['cache_salt']}+mine+2"
    assert names_documents(body["cache_salt"])
    name, promised = halves.promise(body)
    assert (promised, halves.scheduling.own_salt(name)) == (247, None)
    _, _, said, _ = halves.load(body | {"cache_salt": f"other+{body['cache_salt']}"})
    assert "needs the cache_salt" in said["refused"]
    plain = request_body(told.corpus, Choice(save=True), QUESTION, cache_salt="mine")
    assert plain["cache_salt"] == "mine"
    with pytest.raises(ArgumentError, match="cache_salt is a text"):
        request_body(told.corpus, Choice(("a",), level=1), QUESTION, cache_salt=3)


@pytest.mark.parametrize(
    "more", [{"cache_salt": "mine"}, {"prompt": [1, 2, 3]}, {"kv_transfer_params": {"kvwire": {"documents": ["a"]}}}]
)
def test_strict_requests_without_their_documents_fail(told, more):
    """vLLM ends a request whose blocks are bad, where it was started so."""
    with closing(Halves(told, is_strict=True)) as halves:
        body = halves.body("ab") | more
        bad, blocks, said, promised = halves.load(body)
        assert promised == len(body["prompt"]) - 1
        assert bad == set(blocks[: -(-promised // BLOCK)])
        assert said.get("refused") or said.get("trouble")
        assert halves.load(halves.body("ab"))[0] == set()


@pytest.mark.parametrize("asks", [{"soon": ["a"]}, {"save": True}])
def test_strict_requests_that_load_nothing_do_not_fail(told, asks):
    with closing(ConnectorScheduler(told.corpus, is_strict=True)) as scheduling:
        scheduling.begin("r", {"kvwire": asks}, QUESTION, None, "an adapter")
        assert scheduling.promised("r", 0) == 0
        assert scheduling.end("r")["kvwire"]["trouble"] == "an adapter"


REPORT = LinkReport("tiny", 4, 1.0, 0.3, 0.01, (0.15,), {"attention": (0.05,)}, {"standard": 0.25})


@pytest.mark.parametrize(
    ("report", "bound", "loaded", "expected", "words"),
    [
        (None, None, 247, None, ""),
        (None, 0.5, 150, None, "was not measured"),
        (REPORT, None, 247, 0.25, ""),
        (REPORT, 0.26, 247, 0.25, ""),
        (REPORT, 0.2, 150, None, "allows 0.2: what follows the first is computed"),
    ],
)
def test_links_that_lose_too_much_are_told_or_not_made(told, caplog, report, bound, loaded, expected, words):
    if report is not None:
        told.corpus.set_link_report(report)
    with caplog.at_level(logging.WARNING, "kvwire.vllm"), closing(Halves(told, link_bound=bound)) as halves:
        for _ in range(2):
            _, _, said, promised = halves.load(halves.body("ab", 1))
            assert (promised, said["loaded_tokens"], said.get("expected_kl")) == (loaded, loaded, expected)
            assert words in said.get("trouble", "")
        assert halves.load(halves.body("a", 1))[3] == 150  # nothing is linked there
    is_told = report is not None and bound is None
    assert sum("of 1 that documents tell" in each.message for each in caplog.records) == is_told


def test_what_was_measured_is_told_of_documents_computed_alike(tmp_path):
    """Behind a neutral prefix they lose less; with a bound, those that were not measured are not linked."""
    with chat_store(tmp_path, CHATML, {"a": TEXTS[0], "b": TEXTS[1]}, bos=False) as (told, _):
        behind = Corpus(told.engine, told.corpus.catalog.store, coding=Coding(chunk_tokens=32, neutral_prefix=8))
        list(behind.encode([Document(name, told.tokens[name[-1]]) for name in ("na", "nb")]))
        whole = sum(map(len, told.tokens.values()))
        for neutral, measured in ((0, ["a", "b"]), (8, ["na", "nb"])):
            told.corpus.set_link_report(replace(REPORT, neutral=neutral))
            with closing(Halves(told)) as free, closing(Halves(told, link_bound=0.5)) as bound:
                for names in (["a", "b"], ["na", "nb"], ["a", "nb"], ["na", "b"]):
                    body, is_measured = free.body(names), names == measured
                    _, _, said, promised = free.load(body)
                    assert (promised, said.get("expected_kl")) == (whole, 0.25 if is_measured else None)
                    _, _, said, promised = bound.load(body)
                    assert promised == (whole if is_measured else len(told.tokens["a"]))
                    assert ("not measured of documents computed" in said.get("trouble", "")) != is_measured


def test_a_store_that_fails_again_and_again_is_left_alone_for_a_while(told, monkeypatch, caplog):
    now, asked = [0.0], []
    body = request_body(told.corpus, Choice(("a",), level=1), QUESTION)
    with closing(ConnectorScheduler(told.corpus, patience_s=1.0, pause_s=10.0, clock=lambda: now[0])) as scheduling:
        real = scheduling._pool.submit
        monkeypatch.setattr(scheduling._pool, "submit", lambda *_: (asked.append(1), Future())[1])

        def ask(name, after=2.0):
            scheduling.begin(name, body["kv_transfer_params"], body["prompt"], body["cache_salt"])
            now[0] += after
            promised = scheduling.promised(name, 0)
            return promised, scheduling.end(name)["kvwire"].get("trouble", "")

        for number in range(3):
            assert "did not answer" in ask(f"{number}")[1]
        assert "failed 3 times in a row" in ask("paused")[1]
        assert "failed 3 times in a row" in caplog.text
        assert len(asked) == 3
        now[0] += 10.0
        assert "did not answer" in ask("asked again")[1]
        assert "failed 4 times" in ask("paused again")[1]
        now[0] += 10.0
        monkeypatch.setattr(scheduling._pool, "submit", lambda *given: (future := real(*given), future.result())[0])
        assert ask("well") == (150, "")
        assert ask("well again") == (150, "")


def test_bad_requests_do_not_have_the_store_left_alone(halves, told):
    """Names that no document can have, and a document whose entry is damaged: others are loaded as before."""
    key = next(key for key in told.corpus.catalog.store.keys("") if "/catalog/doc/" in key)
    entry = told.corpus.catalog.store.get(key)
    for name in ["x" * 5000] * 3:
        bad = halves.body("a") | {"kv_transfer_params": {"kvwire": {"documents": [name], "level": 1}}}
        assert "1 to 4096 characters" in halves.load(bad)[2]["trouble"]
    bodies = [halves.body(name) for name in "abc"]
    told.corpus.catalog.store.put(key, entry[:-9])
    said = [halves.load(body)[2] for body in [*(body for body in bodies for _ in range(3)), *bodies]]
    assert sum("is not valid JSON" in each.get("trouble", "") for each in said) == 4
    assert sum(each.get("loaded_tokens", 0) > 0 for each in said) == 8


def test_a_store_that_is_away_is_no_store_without_documents(told):
    away, prefix = told.root.with_name("away"), Choice(prefix=True, level=1)
    with closing(Halves(told, pause_s=0.0)) as halves:
        asked = [halves.body("ab"), request_body(told.corpus, prefix, [*told.tokens["a"], *QUESTION])]
        told.root.rename(away)
        for is_mount in (False, True):  # a place to mount it at may stay
            if is_mount:
                told.root.mkdir()
            for body in asked:
                _, _, said, promised = halves.load(body)
                assert promised == 0
                assert "no longer has the record of this model: mount it again" in said["trouble"]
                assert "refused" not in said
            with pytest.raises(StorageError, match="mount it again"):
                request_salt(told.corpus, prefix)
        told.root.rmdir()
        away.rename(told.root)
        assert halves.load(asked[0])[2]["lost_tokens"] == 0


@pytest.mark.parametrize(("token_s", "loaded"), [(0.0, 0), (10.0, 150)])
def test_what_would_be_lost_is_waited_for_as_long_as_computing_it_takes(told, token_s, loaded):
    body = request_body(told.corpus, Choice(("a",), deadline_s=0.1), QUESTION)
    with closing(Halves(told, link=LinkSettings(20_000.0, 0.3))) as halves:
        halves.working._loader.token_s = token_s
        _, _, said, promised = halves.load(body)
        assert (said["loaded_tokens"], said["lost_tokens"]) == (loaded, promised - loaded)


def test_the_cost_of_tokens_is_learnt_from_steps(told):
    with closing(Halves(told)) as halves:
        loader = halves.working._loader
        halves.working.note_step(2, 5.0)
        assert loader.token_s == 0.0
        halves.working.note_step(100, 1.0)
        halves.working.note_step(100, 2.0)
        assert loader.token_s == pytest.approx(0.012)


def test_waits_are_settings(told):
    settings = ConnectorSettings.read({"store": f"file://{told.root}", "load_s": 7, "patience_s": 2.5, "pause_s": 0})
    with closing(settings.loader(told.corpus, torch.float32)) as loader:
        assert (loader._settings.patience_s, loader._settings.open_s) == (7, 2.5)
    for name in ("load_s", "pause_s", "patience_s"):
        with pytest.raises(ArgumentError, match=f"{name} is a number of seconds"):
            ConnectorSettings.read({"store": "file:///x", name: -1})


def test_versions_of_vllm_are_checked(caplog):
    check_version("0.32.0+cpu")
    assert not caplog.text
    check_version("0.77.1")
    assert "this is vLLM 0.77.1, kvwire was tested inside 0.32" in caplog.text
    check_version("dev")
    with pytest.raises(ArgumentError, match=r"this is vLLM 0.31.2, the connector needs 0.32 or later"):
        check_version("0.31.2")


def test_lines_are_written_as_those_of_vllm(monkeypatch):
    ours, theirs, handler = logging.getLogger("kvwire"), logging.getLogger("vllm"), logging.NullHandler()
    monkeypatch.setattr(theirs, "handlers", [handler])
    monkeypatch.setattr(theirs, "level", logging.INFO)
    level, handlers = ours.level, list(ours.handlers)
    try:
        log_as_vllm()
        assert ours.handlers == handlers  # they go elsewhere already
        monkeypatch.setattr(ours, "propagate", False)
        log_as_vllm()
        assert (ours.handlers, ours.level) == ([handler], logging.INFO)
    finally:
        ours.handlers[:] = handlers
        ours.setLevel(level)
