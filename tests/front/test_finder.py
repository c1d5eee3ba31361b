"""Catalog, headers and texts of a load: entries that are out of date, reads that hang, look-ups that are left."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec import structs

from kvwire import controller as ctl
from kvwire.errors import AuthError, FormatVersionError, KvwireError, StorageError
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.runtime.document import Timeouts
from kvwire.runtime.estimates_file import EstimatesFile
from kvwire.runtime.find import DocumentOpener, profile_in_use
from kvwire.runtime.loader import Loader
from kvwire.runtime.settings import LoadSettings
from kvwire.runtime.threads import LOOK_UPS
from kvwire.store import MemoryStore, UseCounts
from kvwire.transport import FetchSettings

from .answers import troubles
from .tiny_engine import VOCABULARY, TinyEngine

COSTS = ctl.CostModel(ctl.PrefillCost(0.002, 0.0005), ctl.DecodeCost(0.0005, 1e-5))
QUESTION = [1, 2, 3]
SOON_S = 30.0
"""What waits for a read that hangs takes longer."""


def text(tokens, seed):
    draw = random.Random(seed)
    return tuple(draw.randrange(VOCABULARY) for _ in range(tokens))


TEXTS = {"other": text(600, 1), "doc": text(300, 2)}


class Gated(MemoryStore):
    """Reads of keys that end in ``shut`` wait until that is opened."""

    def __init__(self):
        super().__init__()
        self.shut, self.open, self.asked = "-", threading.Event(), threading.Semaphore(0)

    def snapshot(self, key):
        if key.endswith(self.shut):
            self.asked.release()
            assert self.open.wait(60)
        return super().snapshot(key)


@pytest.fixture(scope="module")
def engine():
    return TinyEngine()


@pytest.fixture(scope="module")
def content(engine):
    store = encoded(Corpus(engine, MemoryStore()), TEXTS).catalog.store
    return {key: store.get(key) for key in store.keys("")}


@pytest.fixture
def store(content):
    store = Gated()
    store.put_many(content.items())
    yield store
    store.open.set()


@pytest.fixture
def corpus(engine, store):
    return Corpus(engine, store)


@pytest.fixture
def loader_of(engine, store):
    """Makes loaders, and closes them."""
    made = []

    def make(corpus, *variants, **settings):
        chosen = LoadSettings(**settings)
        made.append(Loader(engine, corpus, variants=variants, costs=COSTS, memory=EstimatesFile(None), settings=chosen))
        return made[-1]

    yield make
    store.open.set()
    for loader in made:
        loader.close()


def encoded(corpus, texts):
    for _ in corpus.encode([Document(name, ids) for name, ids in texts.items()], force=True):
        pass
    return corpus


def space_of(corpus):
    return corpus.catalog.keys(corpus.meta.config_digest())


def alike(answer, other):
    """Whether two prompts hold the same texts: of others, numbers differ by 7, at the finest level by 0.04."""
    mine, theirs = answer.prompt.cache, other.prompt.cache
    pairs = zip((*mine.keys, *mine.values), (*theirs.keys, *theirs.values), strict=True)
    return all(a.shape == b.shape and (a - b).abs().max() < 0.2 for a, b in pairs)


# Kept entries that are out of date.


@pytest.mark.parametrize("tokens", [200, 300, 400])
@pytest.mark.parametrize("kept", ["blob", "text"])
def test_a_document_of_another_length_is_answered_from_as_it_is_now(corpus, store, loader_of, tokens, kept):
    """Another process encoded it anew, or keeps it as text alone by now, and all that was there before is gone."""
    uses, names = UseCounts(), ["other", "doc", "doc"]
    loader = loader_of(Corpus(corpus._engine, store, uses=uses), quality_floor=4)
    assert loader.ask(names, QUESTION).prompt.tokens == (600, 300, 300)
    old, other = corpus.find("doc"), Corpus(corpus._engine, store)
    if kept == "blob":
        encoded(other, {"doc": text(tokens, 3)})
    else:
        other.catalog.add_text(other.meta.config_digest(), "doc", text(tokens, 3))
    store.delete_many([old.blob_key, space_of(corpus).text(old.token_digest)])
    answer = loader.ask(names, QUESTION)
    assert answer.prompt.tokens == (600, tokens, tokens)
    assert not troubles(answer.misses)
    assert uses.count(space_of(corpus).root, "doc") == 4
    assert alike(answer, loader_of(other, quality_floor=4).ask(names, QUESTION))


def test_many_loads_at_once_see_a_document_of_another_length(corpus, store, loader_of):
    loader = loader_of(Corpus(corpus._engine, store), quality_floor=4)
    loader.ask(["doc"], QUESTION)
    old, other = corpus.find("doc"), encoded(Corpus(corpus._engine, store), {"doc": text(200, 3)})
    store.delete(old.blob_key)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: loader.ask(["doc"], QUESTION), range(4)))
    fresh = loader_of(other, quality_floor=4).ask(["doc"], QUESTION)
    assert all(alike(answer, fresh) and not troubles(answer.misses) for answer in answers)


def test_a_blob_that_is_lost_for_good_is_computed_and_told(corpus, store, loader_of):
    """The catalog still names it: nothing is laid out anew for ever."""
    loader = loader_of(Corpus(corpus._engine, store))
    loader.ask(["doc"], QUESTION)
    store.delete(corpus.find("doc").blob_key)
    for _ in range(2):
        answer = loader.ask(["doc"], QUESTION)
        assert answer.prompt.tokens == (300,)
        assert len(answer.misses) == 1


def test_a_variant_whose_kept_entry_is_out_of_date_is_asked_for_again(corpus, engine, store, loader_of):
    variant = encoded(Corpus(engine, store, tenant="second"), {"doc": TEXTS["doc"]})
    loader = loader_of(corpus, Corpus(engine, store, tenant="second"))
    session, finder, timeouts = loader._session, loader._runner.finder, Timeouts(SOON_S, SOON_S, SOON_S, SOON_S)

    async def opened():
        driver = session.driver(loader._runner.new_controller)
        document = await finder.find("doc", None, timeouts)
        opener = DocumentOpener(session, driver, finder, FetchSettings(), timeouts)
        try:
            return [each.found.entry.size for each in await opener.open_all(document)]
        finally:
            await opener.close()

    old = variant.find("doc")
    assert session.run(opened()) == [corpus.find("doc").size, old.size]
    encoded(Corpus(engine, store, tenant="second", coding=Coding(lossless=True)), {"doc": TEXTS["doc"]})
    store.delete(old.blob_key)
    assert session.run(opened()) == [corpus.find("doc").size, variant.find("doc").size]


# Reads that hang or fail.


def test_a_late_header_is_not_kept_waiting_by_a_text_that_hangs(corpus, store, loader_of):
    """It comes as soon as the text is asked for; the text never does."""
    header, over = threading.Event(), threading.Event()
    snapshot = store.snapshot

    def gated(key):
        if key.endswith(".kvt"):
            header.set()
            assert over.wait(60)
        if key.endswith(".kvw"):
            assert header.wait(60)
        return snapshot(key)

    store.snapshot = gated
    loader = loader_of(corpus, open_s=0.05)
    started = time.monotonic()
    try:
        answer = loader.ask(["doc"], QUESTION)
        assert header.is_set()
        assert time.monotonic() - started < SOON_S
        assert {decision.level for decision in answer.decisions} != {None}
    finally:
        over.set()


def test_a_profile_that_hangs_holds_no_other_one_up(corpus, engine, store, loader_of):
    corpus.calibrate([Document("calibration", text(700, 9))])
    encoded(corpus, {"new": text(300, 4)})
    reader = Corpus(engine, store)
    loader = loader_of(reader)
    loader.ask(["new"], QUESTION)
    store.shut = f"{corpus.find('doc').profile_digest}.kvp"
    with ThreadPoolExecutor(2) as pool:
        hangs = pool.submit(loader.ask, ["doc"], QUESTION)
        assert store.asked.acquire(timeout=SOON_S)
        try:
            assert not troubles(pool.submit(loader.ask, ["new"], QUESTION).result(SOON_S).misses)
            assert not hangs.done()
        finally:
            store.open.set()
        assert not troubles(hangs.result(SOON_S).misses)


# Deadlines, which bound what a load waits for.


def test_an_entry_that_hangs_is_waited_for_until_the_deadline(corpus, store, loader_of):
    store.shut = space_of(corpus).document("doc")
    with pytest.raises(StorageError, match=r"the store did not answer within 2\.5 s"):
        loader_of(corpus).ask(["other", "doc"], QUESTION, deadline_s=2.5)


def test_a_short_deadline_gives_the_store_time_to_connect(corpus, store, loader_of):
    """An answer that is late is better than none."""
    store.shut = space_of(corpus).document("doc")
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(loader_of(corpus).ask, ["doc"], QUESTION, deadline_s=0.05)
        assert store.asked.acquire(timeout=SOON_S)
        time.sleep(0.2)
        store.open.set()
        assert late.result(SOON_S).reason.startswith("late by")


def test_a_header_and_a_text_that_hang_are_waited_for_until_the_deadline(corpus, store, loader_of):
    store.shut = (".kvw", ".kvt")
    loader = loader_of(corpus)
    with ThreadPoolExecutor(1) as pool, pytest.raises(KvwireError):
        pool.submit(loader.ask, ["doc"], QUESTION, deadline_s=0.5).result(SOON_S)


def test_a_profile_that_hangs_costs_half_a_deadline_and_is_read_on_for_later_loads(corpus, engine, store, loader_of):
    loader = loader_of(Corpus(engine, store))
    store.shut = ".kvp"
    answer = loader.ask(["doc"], QUESTION, deadline_s=2)
    assert any("its profile did not come within 1 s" in miss for miss in answer.misses)
    assert {decision.action for decision in answer.decisions} == {"recompute"}
    store.shut = "-"  # who asks anew is answered; who asked before still waits
    reading = next(iter(loader._runner.finder._profiles.values()))
    store.open.set()
    while not reading.done():
        time.sleep(0.001)
    assert not troubles(loader.ask(["doc"], QUESTION).misses)


def test_a_loader_begins_without_a_profile_that_hangs(corpus, engine, store, loader_of):
    store.shut = ".kvp"
    session = loader_of(corpus)._session
    view = corpus.over(session.view(store, over_link=False, silence_s=0.2))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(profile_in_use, view, None).result(SOON_S) == (None, False)


def test_look_ups_that_are_left_keep_no_thread(corpus, store, loader_of):
    """More loads than there are threads for look-ups wait for an entry that hangs, and are cancelled."""
    loader = loader_of(corpus, entries_s=0.0)
    loader.ask(["doc"], QUESTION)
    store.shut = space_of(corpus).document("other")

    async def asking():
        tasks = [asyncio.create_task(loader.ask_async(["other"], QUESTION)) for _ in range(20)]
        while store.asked._value < LOOK_UPS:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(SOON_S):
            return await loader.ask_async(["doc"], QUESTION)

    assert not troubles(asyncio.run(asking()).misses)


def test_look_ups_on_a_hung_disk_leave_threads_for_other_work(corpus, loader_of):
    session, over, begun = loader_of(corpus)._session, threading.Event(), []

    def hangs():
        begun.append(1)
        assert over.wait(60)

    async def looking():
        return await asyncio.gather(*(session.look_up(hangs, 0.1) for _ in range(20)), return_exceptions=True)

    for _ in range(4):
        assert {type(each) for each in session.run(looking())} == {StorageError}
    assert len(begun) == 2 * LOOK_UPS
    assert session.threads.blocking.submit(lambda: 1).result(SOON_S) == 1
    over.set()
    assert session.run(session.look_up(lambda: 2, SOON_S)) == 2


def newer_profile(corpus):
    """Have the catalog name a profile that a later version wrote."""
    config, data = corpus.meta.config_digest(), corpus.profile().data
    digest = corpus.catalog.profiles.put(config, data[:8] + b"\x02" + data[9:])
    corpus.catalog.profiles.set_current(config, digest)
    corpus.catalog.add(structs.replace(corpus.find("doc"), profile_digest=digest))


@pytest.mark.parametrize("given", [True, False])
def test_a_profile_of_a_later_version_is_done_without_where_the_text_is_known(corpus, engine, store, loader_of, given):
    newer_profile(corpus)
    reader = Corpus(engine, store)
    with pytest.raises(FormatVersionError):
        reader.profile()
    answer = loader_of(reader).ask(["doc"], QUESTION, texts={"doc": TEXTS["doc"]} if given else None)
    assert len(answer.misses) == 1
    assert {decision.level for decision in answer.decisions} == {None}


def test_a_loader_begins_without_a_profile_of_a_later_version(corpus, engine, store):
    assert profile_in_use(Corpus(engine, store), 1)[0] is not None
    newer_profile(corpus)
    assert profile_in_use(Corpus(engine, store), 1) == (None, False)


def test_wrong_credentials_are_told_even_where_the_text_is_known(corpus, engine, store, loader_of):
    snapshot = store.snapshot

    def refused(key):
        if key.endswith(".kvp"):
            msg = "wrong credentials"
            raise AuthError(msg)
        return snapshot(key)

    loader = loader_of(Corpus(engine, store))
    store.snapshot = refused
    with pytest.raises(AuthError, match="wrong credentials"):
        loader.ask(["doc"], QUESTION, texts={"doc": TEXTS["doc"]})
