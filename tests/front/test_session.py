"""One session for all loads of a loader: connections, link, look-ups, threads and their end."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from kvwire.controller import events as ev
from kvwire.controller.policies import Fixed
from kvwire.errors import ArgumentError, NotFoundError
from kvwire.runtime.corpus import Corpus, Document
from kvwire.runtime.document import Timeouts
from kvwire.runtime.layouts import PlainLayout
from kvwire.runtime.links import UNREPAIRED
from kvwire.runtime.load import Load
from kvwire.runtime.loader import Loader
from kvwire.runtime.request import LoadRequest
from kvwire.runtime.settings import LoadSettings
from kvwire.runtime.threads import DaemonThreads, Threads
from kvwire.store import FolderStore, MemoryStore, open_store
from kvwire.transport import EmulatedLink, FetchSettings, LinkSettings
from kvwire.transport.server.connections import Connections
from kvwire.transport.testing import serving

from ..fault_proxy import FaultProxy
from ..store_wrappers import CountingStore
from .answers import troubles

pytestmark = pytest.mark.usefixtures("few_objects")
QUESTION = [5, 6, 7, 8]


def ours():
    """Threads of loaders; a server in this process has its own."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("kvwire") and not name.startswith("kvwire-serve")]


@pytest.fixture
def loader_of(small):
    """Makes loaders, and closes them."""
    made = []

    def make(corpus, *, link=None, **settings):
        made.append(Loader(small.engine, corpus, costs=small.costs, link=link, settings=LoadSettings(**settings)))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


@pytest.fixture
def admitted(monkeypatch):
    """Connections that servers of this process let in."""
    seen, admitted = [], Connections.admitted
    monkeypatch.setattr(Connections, "admitted", lambda self: seen.append(1) or admitted(self))
    return seen


@pytest.mark.parametrize("link", [None, LinkSettings(1e9)])
@pytest.mark.parametrize("kind", ["memory", "folder", "http"])
def test_an_entry_comes_with_its_tag(small, loader_of, tmp_path, kind, link):
    """Over HTTP in one request, on the connection that reads have."""
    with ExitStack() as stack:
        behind = MemoryStore() if kind == "memory" else FolderStore(tmp_path)
        behind.put("v1/k", b"0123456789")
        store = behind
        if kind == "http":
            proxy = stack.enter_context(FaultProxy(stack.enter_context(serving(behind))))
            store = stack.enter_context(closing(open_store(proxy.url)))
        loader = loader_of(Corpus(small.engine, store), link=link)
        view = loader._session.view(store)
        asked = len(proxy.records) if kind == "http" else 0
        assert view.get_with_etag("v1/k", 4) == (b"0123", behind.stat("v1/k").etag)
        assert view.get_with_etag("v1/k")[0] == b"0123456789"
        with pytest.raises(NotFoundError):
            view.get_with_etag("v1/absent")
        if kind == "http":
            assert [record.request.method for record in proxy.records[asked:]] == ["GET"] * 3
        loader.close()


@pytest.mark.parametrize("entries_s", [0.0, 30.0])
def test_many_questions_over_http_share_a_few_connections(small, loader_of, admitted, entries_s):
    fetch = FetchSettings(concurrency=4, retries=2, hedge_factor=1e6)  # a request that loses to its hedge is cut
    with serving(small.corpus().catalog.store) as url, closing(open_store(url)) as store:
        loader = loader_of(Corpus(small.engine, store), fetch=fetch, entries_s=entries_s, policy=Fixed(0))
        for _ in range(40):
            assert not troubles(loader.ask(list(small.tokens), QUESTION).misses)
        loader.close()
    assert 0 < len(admitted) <= fetch.concurrency


def test_look_ups_headers_and_connections_take_the_links_time(small, loader_of):
    """A loader connects and reads the profile by itself; where it is asked at once, the load waits for both."""
    rtt_s, name = 0.5, next(iter(small.tokens))
    with serving(small.corpus().catalog.store) as url, closing(open_store(url)) as store:
        loader = loader_of(Corpus(small.engine, store), link=LinkSettings(1e9, rtt_s), policy=Fixed(0))
        times = [loader.ask([name], QUESTION).timing.ttft_s for _ in range(3)]
        loader.close()
    assert times[0] >= 3 * rtt_s  # the entry, the header, the chunks; and what the loader did not yet have
    assert 2 * rtt_s <= min(times[1:]) < 3 * rtt_s  # the header, the chunks


def test_threads_share_one_link(small, loader_of):
    """Two threads that fetch at the same time get the link's bandwidth together, not each."""
    names, rate = list(small.tokens), 250e3
    loader = loader_of(small.corpus(), link=EmulatedLink(rate), policy=Fixed(4), entries_s=60.0)
    loader.ask(names, QUESTION)
    started = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda name: loader.ask([name], QUESTION), names))
    took = time.monotonic() - started
    assert {decision.level for answer in answers for decision in answer.decisions} == {4}
    assert sum(answer.bytes for answer in answers) / took <= 1.1 * rate


def test_loads_of_event_loops_and_threads_share_one_controller(small, loader_of):
    log = []
    loader = loader_of(small.corpus(), link=EmulatedLink(200e3, 0.01), policy=Fixed(4), record=log.append)

    async def both():
        return await asyncio.gather(*(loader.ask_async([name], QUESTION) for name in small.tokens))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: asyncio.run(both()), range(2)))
    numbers = [entry.event.load for entry in log if isinstance(entry.event, ev.LoadRequested)]
    assert numbers == list(range(4))
    assert len({name for name in ours() if name.startswith("kvwire-loop")}) == 1


def test_an_entry_is_asked_for_once_and_again_after_something_was_encoded(small, loader_of):
    corpus = small.corpus()
    counting = CountingStore(corpus.catalog.store)
    mine, (name, ids) = Corpus(small.engine, counting), next(iter(small.tokens.items()))
    loader = loader_of(mine, policy=Fixed(0))
    key = corpus.catalog.keys(small.engine.meta.config_digest()).document(name)

    def asked():
        return sum(one.requests for (_, each), one in counting.tallies().items() if each == key)

    loader.ask([name], QUESTION)
    before = asked()
    assert before > 0
    loader.ask([name], QUESTION)
    assert asked() == before
    for _ in mine.encode([Document(name, tuple(ids[:200]))]):
        pass
    assert loader.ask([name], QUESTION).prompt.tokens == (200,)


@pytest.mark.parametrize("gone", ["blob", "profile"])
@pytest.mark.parametrize("loads", [1, 4])
def test_a_kept_entry_is_asked_for_again_where_what_it_names_is_gone(small, loader_of, gone, loads):
    """Another process encoded the same text anew, with another profile, and collected what was there before."""
    corpus, (name, ids) = small.corpus(), next(iter(small.tokens.items()))
    store = corpus.catalog.store
    loader = loader_of(Corpus(small.engine, store), policy=Fixed(0), max_kl=None)
    old = corpus.find(name)
    assert not loader.ask([name], QUESTION).misses
    other = Corpus(small.engine, store)
    other.calibrate([Document("x", tuple(small.tokens[list(small.tokens)[1]]))])
    for _ in other.encode([Document(name, tuple(ids))], force=True):
        pass
    space = corpus.catalog.keys(small.engine.meta.config_digest())
    store.delete(old.blob_key if gone == "blob" else space.profile(old.profile_digest))
    loader._runner.finder._views[0]._profiles.clear()  # as in a process that did not load with this profile
    with ThreadPoolExecutor(loads) as pool:
        answers = list(pool.map(lambda _: loader.ask([name], QUESTION), range(loads)))
    for answer in answers:
        assert not troubles(answer.misses)
        assert {decision.level for decision in answer.decisions} == {0}


def test_a_kept_entry_of_a_text_that_is_gone_is_asked_for_again(small, loader_of):
    """Another process encoded what was kept as text alone, and collected the text."""
    corpus, (name, ids) = small.corpus(), next(iter(small.tokens.items()))
    store = corpus.catalog.store
    entry = corpus.find(name)
    corpus.catalog.add_text(small.engine.meta.config_digest(), name, ids)
    loader = loader_of(Corpus(small.engine, store), policy=Fixed(0), max_kl=None)
    assert {decision.level for decision in loader.ask([name], QUESTION).decisions} == {None}
    for _ in Corpus(small.engine, store).encode([Document(name, tuple(ids))], force=True):
        pass
    store.delete(corpus.catalog.keys(small.engine.meta.config_digest()).text(entry.token_digest))
    assert {decision.level for decision in loader.ask([name], QUESTION).decisions} == {0}


def test_a_closed_session_refuses_work_and_leaves_none_behind(small):
    async def work():
        return 1

    loader = Loader(small.engine, small.corpus(), costs=small.costs)
    loader.close()
    with pytest.raises(ArgumentError, match="closed"):
        loader._session.run(work())
    with pytest.raises(ArgumentError, match="closed"):
        asyncio.run(loader._session.wait(work()))
    gc.collect()  # a coroutine that nobody awaited warns, and warnings are errors here


def test_work_that_is_cancelled_is_not_told_as_a_closed_loader(small, loader_of):
    async def work():
        raise asyncio.CancelledError

    session = loader_of(small.corpus())._session
    with pytest.raises(CancelledError):
        session.run(work())


async def _began(began):
    while not began.is_set():
        await asyncio.sleep(0.001)


def test_a_caller_that_is_cancelled_while_the_loader_closes_is_told_so(small):
    """Not that the loader is closed: whoever cancels, or has a time limit, looks for just that."""
    loader, began = Loader(small.engine, small.corpus(), costs=small.costs), threading.Event()

    async def work():
        began.set()
        await asyncio.Event().wait()

    async def leave():
        task = asyncio.create_task(loader._session.wait(work()))
        await _began(began)
        task.cancel()
        loader.close()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())


def test_work_that_the_loop_never_began_is_not_left_behind(small, loader_of):
    session, busy, over, begun = loader_of(small.corpus())._session, threading.Event(), threading.Event(), []

    async def block():
        busy.set()
        over.wait(60)

    async def work():
        begun.append(1)

    async def leave():
        blocking = asyncio.create_task(session.wait(block()))
        await _began(busy)
        task = asyncio.create_task(session.wait(work()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        over.set()
        await blocking

    try:
        asyncio.run(leave())
    finally:
        over.set()
    gc.collect()  # a coroutine that nobody awaited warns
    assert not begun


def test_work_that_races_with_closing_ends_with_it(small, monkeypatch):
    """Its thread loses the processor right before it hands the work to the loop."""
    loader, given = Loader(small.engine, small.corpus(), costs=small.costs), threading.Event()
    hand_over = asyncio.run_coroutine_threadsafe

    def late(work, loop):
        if threading.current_thread().name.startswith("racer"):
            given.set()
            loader._session._thread.join(0.2)  # ends at once where closing does not wait for this thread
        return hand_over(work, loop)

    loader._session.run(asyncio.sleep(0))
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", late)
    with ThreadPoolExecutor(1, "racer") as pool:
        racing = pool.submit(loader._session.run, asyncio.Event().wait())
        assert given.wait(10)
        loader.close()
        with pytest.raises(ArgumentError, match="closed"):
            racing.result(10)
    gc.collect()


def test_a_load_that_is_cancelled_twice_leaves_no_blob_open(small, loader_of):
    """The second time while it waits for its tasks to end."""
    loader, closed = loader_of(small.corpus()), []
    session = loader._session

    async def lingers():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(60)

    async def twice():
        driver, begun = session.driver(loader._runner.new_controller), []
        timeouts, layout = Timeouts(1.0, 1.0, 1.0, 1.0), PlainLayout(small.engine)
        request = LoadRequest(
            documents=[], layout=layout, settings=LoadSettings(), timeouts=timeouts, started=time.monotonic()
        )

        async def load():
            async with Load(small.engine, session, driver, loader._runner.finder, request, [], UNREPAIRED) as entered:
                entered._opener._stack.callback(closed.append, 1)
                entered.jobs.spawn(lingers())
                begun.append(entered)
                await asyncio.Event().wait()

        task = asyncio.create_task(load())
        while not begun:
            await asyncio.sleep(0)
        for _ in range(2):
            task.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
        await asyncio.gather(task, return_exceptions=True)

    session.run(twice())
    assert closed == [1]


def test_no_thread_outlives_a_loader(small):
    before = ours()
    with serving(small.corpus().catalog.store) as url, closing(open_store(url)) as store:
        with Loader(small.engine, Corpus(small.engine, store), costs=small.costs) as loader:
            loader.ask(list(small.tokens), QUESTION)
            assert ours()
        assert set(ours()) <= set(before)
    with pytest.raises(ArgumentError, match="closed"):
        loader.ask(list(small.tokens), QUESTION)


def test_closing_ends_loads_and_leaves_what_a_dead_store_blocks_behind(small):
    over, store = threading.Event(), small.corpus().catalog.store
    snapshot = store.snapshot
    store.snapshot = lambda key: snapshot(key) if over.wait(60) else None
    loader = Loader(small.engine, Corpus(small.engine, store), costs=small.costs)
    try:
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(loader.ask, list(small.tokens), QUESTION)
            while not [name for name in ours() if name.startswith("kvwire-read")]:
                time.sleep(0.001)
            started = time.monotonic()
            loader.close()
            with pytest.raises(ArgumentError, match="closed"):
                asking.result(10)
            assert time.monotonic() - started < 10
        assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("kvwire-read"))
    finally:
        over.set()


def test_a_loader_that_nobody_holds_ends(small):
    loader = Loader(small.engine, small.corpus(), costs=small.costs)
    loader.ask(list(small.tokens), QUESTION)
    session = loader._session
    del loader
    gc.collect()
    session._thread.join(10)
    assert not session._thread.is_alive()


def test_a_process_that_closes_nothing_ends_without_a_word():
    code = """
import sys
from tests.front.tiny_engine import TinyEngine
from kvwire import Corpus, Document, Loader
from kvwire.store import MemoryStore
engine = TinyEngine()
corpus = Corpus(engine, MemoryStore())
list(corpus.encode([Document("a", tuple(i % 50 for i in range(300)))]))
loader = Loader(engine, corpus)
print(loader.ask(["a"], [1, 2]).first_token)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip().isdigit()


def test_decoding_is_timed_from_when_its_thread_begins(small, loader_of, monkeypatch):
    """What another load's closing pass does in the same thread is not part of it."""
    log = []
    loader = loader_of(small.corpus(), policy=Fixed(0), record=log.append, compute_workers=1)
    loader.ask(list(small.tokens), QUESTION)
    log.clear()
    threads, busy_s = loader._session.threads, 0.2
    submit = threads.decode.submit

    def late(work, *args):
        if "_decode_here" in str(work):
            submit(time.sleep, busy_s)
        return submit(work, *args)

    monkeypatch.setattr(threads.decode, "submit", late)
    loader.ask(list(small.tokens), QUESTION)
    asked = {each.chunks: entry.now for entry in log for each in entry.instructions if isinstance(each, ev.Decode)}
    told = [entry for entry in log if isinstance(entry.event, ev.DecodeDone)]
    assert told
    assert all(entry.now - asked[entry.event.chunks] >= busy_s + entry.event.seconds for entry in told)


def test_daemon_threads_run_jobs_in_their_order_and_cancel_what_waits():
    pool, go, done = DaemonThreads(1, "few"), threading.Event(), []
    first = pool.submit(lambda: go.wait(10) and done.append(1))
    rest = [pool.submit(done.append, number) for number in (2, 3)]
    go.set()
    assert [each.result(10) for each in (first, *rest)] == [None] * 3
    assert done == [1, 2, 3]
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result(10)
    go.clear()
    began = threading.Event()
    held, waits = pool.submit(lambda: began.set() or go.wait(10)), pool.submit(done.append, 4)
    assert began.wait(10)
    pool.shutdown(wait=False)
    go.set()
    assert held.result(10)
    assert waits.cancelled()
    with pytest.raises(RuntimeError, match="ended"):
        pool.submit(print)


def test_lanes_are_one_thread_or_two():
    for workers in (1, 2):
        threads = Threads(workers)
        assert (threads.compute is threads.decode) == (workers == 1)
        threads.close()
