"""The store over HTTP, in front of the real server, does what every store of blobs and catalog entries does."""

import asyncio
import threading
from contextlib import closing, contextmanager

import pytest

from kvwire.store import FolderStore, MemoryStore
from kvwire.store.testing import BlobConformance
from kvwire.transport import HttpStore, serve


@contextmanager
def serving(store, **options):
    """The server in a thread, with a loop of its own: the suite's calls block."""
    ready, loop, ends, urls = threading.Event(), asyncio.new_event_loop(), [], []

    async def run():
        async with serve(store, **options) as url:
            ends.append(asyncio.Event())
            urls.append(url)
            ready.set()
            await ends[0].wait()

    def work():
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(run())

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(10)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(ends[0].set)
        thread.join()


class TestHttpStore(BlobConformance):
    has_snapshots = False

    @pytest.fixture
    def behind(self, tmp_path):
        return FolderStore(tmp_path)

    @pytest.fixture
    def store(self, behind):
        with serving(behind) as url, closing(HttpStore(url)) as store:
            yield store


class TestHttpStoreBeforeMemoryWithAToken(TestHttpStore):
    @pytest.fixture
    def behind(self):
        return MemoryStore()

    @pytest.fixture
    def store(self, behind):
        with serving(behind, token="t") as url, closing(HttpStore(url, token="t")) as store:  # noqa: S106
            yield store
