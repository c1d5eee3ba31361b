"""The system's clock jumps by a year, forwards and backwards: loads go on, and no document loses anything."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import time
from contextlib import closing

import pytest

from kvwire.errors import AuthError
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.runtime.estimates_file import EstimatesFile
from kvwire.runtime.loader import Loader
from kvwire.runtime.settings import LoadSettings
from kvwire.store import Catalog, FolderStore, HttpAddress, MemoryStore, collect, open_tiers, tenant_hash
from kvwire.transport import AccessSettings, HttpSource, HttpStore, open_session, sign_url
from kvwire.transport.server.access import Access
from kvwire.transport.testing import serving

from ..store_wrappers import StoreWrapper
from .answers import troubles
from .tiny_engine import VOCABULARY, TinyEngine

YEAR = 365 * 24 * 3600.0
JUMPS = (0.0, YEAR, 0.0, -YEAR, 0.0)
SECRET = bytes(range(32))
CONFIG = "c0" * 32
TEXTS = {name: tuple(random.Random(name).choices(range(VOCABULARY), k=300)) for name in ("first", "second")}
QUESTION = [3, 1, 4, 1, 5]


class Clock:
    """What the system says, and how far it is off."""

    def __init__(self):
        self.real, self.off = time.time, 0.0

    def __call__(self):
        return self.real() + self.off


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    for kind in (Access, EstimatesFile):  # their defaults were bound when they were imported
        monkeypatch.setattr(kind.__init__, "__defaults__", (clock,))
    return clock


@pytest.fixture(scope="module")
def engine():
    return TinyEngine()


@pytest.fixture
def folder(engine, tmp_path):
    with closing(FolderStore(tmp_path / "store")) as store:
        corpus = Corpus(engine, store, coding=Coding(chunk_tokens=64))
        list(corpus.encode([Document(name, ids) for name, ids in TEXTS.items()]))
    return tmp_path / "store"


def ask(loader):
    answer = loader.ask(list(TEXTS), QUESTION, tokens=6)
    assert not troubles(answer.misses)
    return answer.tokens


def test_loads_over_http_through_a_cache_go_on(engine, folder, tmp_path, clock):
    """Client and server at once; estimates are kept and read anew at each jump."""
    exact = LoadSettings(quality_floor=4)
    found = []
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(closing(FolderStore(folder)))
        remote = HttpStore(stack.enter_context(serving(served)))
        tiers = open_tiers(remote, memory_bytes=1 << 20, folder=tmp_path / "cache", folder_bytes=1 << 24)
        corpus = Corpus(engine, stack.enter_context(closing(tiers)))
        settled = stack.enter_context(Loader(engine, corpus, settings=exact))
        for clock.off in JUMPS:
            found.append(ask(settled))
            with Loader(engine, corpus, settings=exact, memory=EstimatesFile(tmp_path / "estimates.json")) as loader:
                found.append(ask(loader))
    assert set(found) == {found[0]}
    kept = json.loads((tmp_path / "estimates.json").read_text())
    assert all(entry["saved"] <= time.time() for part in ("link", "engine") for entry in kept[part].values())


def test_what_a_cache_holds_stays(folder, tmp_path, clock):
    def tiers():
        return closing(open_tiers(FolderStore(folder), memory_bytes=0, folder=tmp_path / "c", folder_bytes=1 << 24))

    with closing(FolderStore(folder)) as remote, tiers() as filling:
        keys = [key for key in remote.keys("") if key.endswith(".kvw")]
        wanted = {key: filling.get(key) for key in keys}
        remote.delete_many(keys)
    for clock.off in JUMPS:
        with tiers() as kept:
            assert {key: kept.get(key) for key in keys} == wanted


def test_a_signed_url_follows_the_servers_clock_and_nothing_is_remembered(folder, tmp_path, clock):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"k": {"secret": base64.b64encode(SECRET).decode()}}))
    path.chmod(0o600)
    with closing(FolderStore(folder)) as store, serving(store, access=AccessSettings(signing_keys=path)) as url:
        key = next(key for key in store.keys("") if key.endswith(".kvw"))
        signed = sign_url(url, key, secret=SECRET, key_id="k", expires_at=clock.real() + 600)

        async def read():
            got = bytearray()
            async with open_session() as session:
                await HttpSource(session, signed).read(0, 10, got.extend)
            return bytes(got)

        for clock.off in JUMPS:
            if clock.off == YEAR:
                with pytest.raises(AuthError):
                    asyncio.run(read())
            else:  # a clock that is late lets it live longer, until it is right again
                assert asyncio.run(read()) == store.get(key, 0, 10)


def test_addresses_that_expire_are_asked_for_once_a_read_whatever_the_clock_says(folder, clock):
    asked = []
    with closing(FolderStore(folder)) as store, serving(store) as url:
        key = next(key for key in store.keys("") if key.endswith(".kvw"))

        def address(renew):
            asked.append(renew)
            return HttpAddress(f"{url}/{key}", expires_at=clock.real() + 600)  # who signs has the right time

        async def read():
            got = bytearray()
            async with open_session() as session:
                source = HttpSource(session, address)
                for clock.off in JUMPS:
                    await source.read(0, 10, got.extend)
            return bytes(got)

        assert asyncio.run(read()) == len(JUMPS) * store.get(key, 0, 10)
    assert len(asked) <= len(JUMPS)


@pytest.fixture(params=["memory", "folder"])
def store(request, tmp_path):
    with closing(MemoryStore() if request.param == "memory" else FolderStore(tmp_path / "kept")) as store:
        yield store


def filled(store, name="d"):
    """A catalog with one document, a blob and a text; and its content."""
    catalog = Catalog(store)
    digest = catalog.texts.put(CONFIG, range(9))
    catalog.put_blob(CONFIG, name.encode() * 50, document_id=name, header_bytes=9, tokens=9, token_digest=digest)
    return catalog, {key: store.get(key) for key in store.keys("")}


def test_garbage_collection_takes_nothing_from_documents(store, clock):
    catalog, content = filled(store)
    for clock.off in JUMPS:
        collect(store)
        assert {key: store.get(key) for key in store.keys("")} == content
    assert catalog.by_document(CONFIG, "d") is not None


def test_what_no_document_names_yet_goes_early_where_the_collectors_clock_runs_ahead(store, clock):
    """The grace is told by the collector's clock: ahead by more than it, what is young is taken, too."""
    catalog, content = filled(store)
    unnamed = catalog.keys(CONFIG).text(catalog.texts.put(CONFIG, range(20)))
    clock.off = -YEAR
    assert collect(store).texts == 0
    clock.off = 0.0
    assert collect(store).texts == 0
    clock.off = YEAR
    assert collect(store).texts == 1
    assert set(store.keys("")) == {*content} == {*content, unnamed} - {unnamed}


class CollectedMeanwhile(StoreWrapper):
    """A collector whose clock is a year ahead runs right before an entry of a document is written."""

    def __init__(self, inner, clock):
        super().__init__(inner)
        self._clock = clock
        self.taken = 0

    def put(self, key, data):
        if "/catalog/doc/" in key:
            self._clock.off = YEAR
            done = collect(self.inner)
            self.taken += done.blobs + done.texts
            self._clock.off = 0.0
        self.inner.put(key, data)


def test_a_writer_heals_what_such_a_collector_took_from_under_it(engine, store, clock):
    wrapped = CollectedMeanwhile(store, clock)
    corpus = Corpus(engine, wrapped, coding=Coding(chunk_tokens=64))
    (done,) = corpus.encode([Document("first", TEXTS["first"])])
    assert wrapped.taken >= 2
    kept = Corpus(engine, store)
    entry = kept.find("first")
    assert kept.read_header(entry).tokens == len(TEXTS["first"])
    assert kept.text(entry) == TEXTS["first"]
    assert done.entry == entry
    assert tenant_hash("default") in entry.blob_key
