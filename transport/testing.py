"""For tests: a real server in a thread."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvwire.errors import StorageError
from kvwire.transport.server.listening import serve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.store import Store


__all__ = ["serving"]

_START_S = 60.0


@contextmanager
def serving(store: Store, **options: Any) -> Iterator[str]:  # noqa: ANN401 - what ``serve`` takes
    """Serve a store while the block runs, as ``kvwire.transport.serve`` does; gives the URL."""
    ready, stop = threading.Event(), asyncio.Event()
    told: list[str | BaseException] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        try:
            async with serve(store, **options) as url:
                told.append(url)
                ready.set()
                await stop.wait()
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            told.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="serving", daemon=True)
    thread.start()
    try:
        if not ready.wait(_START_S) or not told:
            raise StorageError("the server did not start: look for a free port on 127.0.0.1")
        if isinstance(told[0], BaseException):
            raise told[0]
        yield told[0]
    finally:
        if loops and thread.is_alive():
            loops[0].call_soon_threadsafe(stop.set)
        thread.join()
