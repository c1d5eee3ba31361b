"""A store's blocking calls, in threads: one writer of a key at a time, one look whether the store answers."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

from kvwire.errors import NotFoundError
from kvwire.store.backends.http.semantics import may_write
from kvwire.store.base import tag_of

from .exchange import RefusedError, refusal_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from kvwire.store import Store

_T = TypeVar("_T")
_CONDITIONS = ("If-Match", "If-None-Match", "If-Modified-Since", "If-Unmodified-Since", "If-Range", "Range")
_PROBE_KEY = "readyz"
_READY_S = 1.0  # one look at the store answers all probes for so long, whatever it found


class Storage:
    """A store behind the event loop."""

    def __init__(self, store: Store, threads: int) -> None:
        """Keep the store; threads start on first use."""
        self.store = store
        self._count = threads
        self._executor: ThreadPoolExecutor | None = None
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._look: asyncio.Task[RefusedError | None] | None = None
        self._look_again_at = 0.0

    def start(self, call: Callable[[], _T]) -> asyncio.Future[_T]:
        """Begin a call in a thread."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._count, thread_name_prefix="kvwire-serve")
        return asyncio.get_running_loop().run_in_executor(self._executor, call)

    async def finish(self, call: Callable[[], _T]) -> _T:
        """Run a call that uses what its caller will close: a cancelled caller waits for its end, too."""
        running = self.start(call)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running})
            raise
        finally:
            del running  # with its error, whose traceback has this frame, it would be a cycle

    def close(self) -> None:
        """Wait for running calls and end the threads."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None

    def lock(self, key: str) -> asyncio.Lock:
        """Held by the writer of a key, so that what a condition was checked on is what is replaced."""
        return self._locks.setdefault(key, asyncio.Lock())

    async def check_conditions(self, fields: dict[str, str], key: str) -> None:
        """Refuse a write whose preconditions do not hold."""
        if "If-Match" not in fields and "If-None-Match" not in fields:
            return
        etag = await self.start(lambda: tag_of(self.store, key))
        if not may_write(fields, etag):
            words = "something else lies there than the request expects"
            raise RefusedError(412, words, {"ETag": f'"{etag}"'} if etag else None, reason="precondition")

    async def check_ready(self, request_id: str) -> None:
        """Refuse where the store cannot say what it does not have."""
        look = self._look
        if look is None or (look.done() and time.monotonic() >= self._look_again_at):
            look = self._look = asyncio.create_task(self._probe(request_id))
        refusal = await asyncio.shield(look)
        if refusal is not None:
            raise RefusedError(refusal.status, str(refusal), refusal.headers, reason=refusal.reason)

    async def _probe(self, request_id: str) -> RefusedError | None:
        refusal = None
        try:
            await self.start(lambda: self.store.stat(_PROBE_KEY))
        except NotFoundError:
            pass
        except Exception as error:  # noqa: BLE001 - any failure is told in a status
            refusal = refusal_of(error, request_id)
        self._look_again_at = time.monotonic() + _READY_S
        return refusal


def conditions(request: web.BaseRequest) -> dict[str, str]:
    """The header fields that decide on an answer, several lines of one joined."""
    headers = request.headers
    return {name: ", ".join(headers.getall(name)) for name in _CONDITIONS if name in headers}
