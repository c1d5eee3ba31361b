"""``kvwire ask --deadline`` over a real server of which some requests, or all, are never answered."""

import re
import time
from contextlib import closing

import pytest

from kvwire.runtime import document, runner
from kvwire.runtime.corpus import Corpus
from kvwire.runtime.estimates_file import EstimatesFile
from kvwire.runtime.loader import Loader
from kvwire.runtime.settings import LoadSettings
from kvwire.store import FolderStore, copy_store, open_store
from kvwire.transport.testing import serving

from ..fault_proxy import FaultKind, FaultProxy, ProxyFault

NEVER = ProxyFault(FaultKind.SILENT)
DRIP = ProxyFault(FaultKind.DRIP, rate=1000)


@pytest.fixture(scope="module")
def stored(small, tmp_path_factory):
    with closing(FolderStore(tmp_path_factory.mktemp("silent") / "store")) as store:
        copy_store(small.corpus().catalog.store, store)
        yield store


@pytest.fixture
def asked(run, demo_model, small, stored, monkeypatch):
    """Asks a question before a deadline, where requests for paths of a pattern hang."""
    monkeypatch.setattr(runner, "measure_costs", lambda *_: small.costs)
    monkeypatch.setattr(document, "_OPEN_SHARE", 0.04)
    monkeypatch.setattr(document, "_PROFILE_SHARE", 0.05)
    name = next(iter(small.texts))
    options = ("--model", demo_model, "--question", "It was plain", "--tokens", 2, "--docs", name)

    def ask(pattern, deadline_s, *more):
        with (
            serving(stored) as url,
            FaultProxy(url, lambda request: NEVER if re.search(pattern, request.path) else None) as proxy,
        ):
            return run("ask", *options, "--store", proxy.url, "--deadline", deadline_s, *more)

    ask.texts = demo_model.parent / "documents" / f"{name}.txt"
    return ask


@pytest.mark.parametrize("pattern", [".", "/catalog/doc/"], ids=["everything", "entries"])
def test_a_catalog_that_hangs_is_told_by_the_deadline(asked, monkeypatch, pattern):
    monkeypatch.setattr(document, "LEAST_PATIENCE_S", 0.0)
    code, _, err = asked(pattern, 0.6)
    assert (code, err.count("the store did not answer within 0.6 s; check it and the network")) == (7, 1)


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("/profiles/", "its profile did not come within 1 s"),
        (r"\.kvw$", "no header within 0.8 s"),
        ("/catalog/profile|\\.kvt$|/catalog/model|link", ""),
    ],
    ids=["profile", "blob", "profile in use, text, model record and links"],
)
def test_what_a_text_stands_in_for_is_done_without(asked, pattern, told):
    code, out, err = asked(pattern, 20)
    assert (code, told in err) == (0, True)
    assert "first token after" in out


def test_a_text_that_is_at_hand_is_computed_where_all_hangs(asked):
    code, out, err = asked(".", 20, "--texts", asked.texts)
    assert (code, "the store did not answer within 0.8 s" in err) == (0, True)
    assert "recompute" in out


def test_a_loader_opens_before_a_slow_steady_link_has_brought_the_profile(demo_model, small, stored):
    (profile,) = (key for key, _ in ((each.key, each) for each in stored.scan("")) if "/profiles/" in key)
    rate = stored.stat(profile).size / 60  # a minute
    drip = ProxyFault(FaultKind.DRIP, rate=rate)
    settings = LoadSettings(open_s=0.3)
    with (
        serving(stored) as url,
        FaultProxy(url, lambda request: drip if "/profiles/" in request.path else None) as proxy,
        closing(open_store(proxy.url)) as store,
    ):
        began = time.monotonic()
        Loader(small.engine, Corpus(small.engine, store), settings=settings, memory=EstimatesFile(None)).close()
        assert time.monotonic() - began < 30


@pytest.mark.parametrize("is_known", [False, True], ids=["nothing known", "costs known"])
@pytest.mark.parametrize("fault", [NEVER, DRIP], ids=["unread", "late"])
def test_costs_measured_without_the_profile_are_not_remembered(small, stored, tmp_path, monkeypatch, fault, is_known):
    monkeypatch.setattr(runner, "measure_costs", lambda *_: small.costs)
    memory = EstimatesFile(tmp_path / "estimates.json")

    def opened(place, **settings):
        with closing(open_store(place)) as store:
            loader = Loader(small.engine, Corpus(small.engine, store), settings=LoadSettings(**settings), memory=memory)
            loader._runner.remember()
            loader.close()
            return memory.recall(*loader._runner.keys).has_engine

    with (
        serving(stored) as url,
        FaultProxy(url, lambda request: fault if "/profiles/" in request.path else None) as proxy,
    ):
        assert not is_known or opened(url)
        assert opened(proxy.url, open_s=0.1) == is_known
