"""kvwire's own server, for tests and programs that block."""

import asyncio
import threading
from contextlib import contextmanager

from kvwire.transport import serve


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
    assert ready.wait(60)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(ends[0].set)
        thread.join()
