"""Resources shared by all loads of a loader, for any threads and event loops.

One event loop in a thread of its own, one HTTP session with persistent connections, one emulated link if any, and one
controller. All reads from a store while loading go over the HTTP session and the link: catalog entries, profiles,
texts, headers and chunks.
"""

from __future__ import annotations

import asyncio
import atexit
import random
import threading
from concurrent.futures import CancelledError
from contextlib import closing, suppress
from typing import TYPE_CHECKING, TypeVar

from kvwire._forks import OwnProcess
from kvwire.errors import ArgumentError, AuthError, KvwireError, NotFoundError, StorageError
from kvwire.runtime.driver import ControllerDriver
from kvwire.runtime.threads import LOOK_UPS, LookUp, look_up_here
from kvwire.store import Store, open_object
from kvwire.transport import ReadTimeouts, RejectedError, StalledError, open_source, read_object

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator
    from concurrent.futures import Future

    import aiohttp

    from kvwire.controller import Controller
    from kvwire.runtime.threads import Threads
    from kvwire.store import Data, Listed, ObjectStat
    from kvwire.transport import EmulatedLink, FetchSettings

T = TypeVar("T")
_CLOSED = "the loader is closed: open another one"
_JOIN_S = 5.0


class Session:
    """One event loop in a thread, with what loads share. It starts with the first load and ends with ``close``.

    Attributes:
        link: The emulated link, None without one.
        lock: Held while the controller works or its estimates are read.
        threads: Threads of lanes and of blocking calls.
        process: Process of the loop and the threads.
    """

    def __init__(
        self, lock: threading.RLock, threads: Threads, link: EmulatedLink | None, fetch: FetchSettings
    ) -> None:
        """Start nothing yet."""
        self.lock = lock
        self.threads, self.link = threads, link
        self._fetch = fetch
        self.process = OwnProcess("loaders")
        self._starting = threading.RLock()  # reentrant: garbage collection may close a loader in its thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._http: aiohttp.ClientSession | None = None
        self._driver: ControllerDriver | None = None
        self._looking = asyncio.Semaphore(LOOK_UPS)
        self._look_up_threads = asyncio.Semaphore(2 * LOOK_UPS)

    def run(self, work: Coroutine[None, None, T]) -> T:
        """Run work on the session's loop and wait for it; call it from any other thread."""
        future = self._begin(work)
        look_up = look_up_here()
        if look_up is not None:
            look_up.waits_for(future)
        try:
            return future.result()
        except CancelledError:
            if self._is_closed:
                raise ArgumentError(_CLOSED) from None
            raise
        except BaseException:
            future.cancel()  # the caller was interrupted
            raise
        finally:
            del future  # with its error, whose traceback has this frame, it would be a cycle

    async def wait(self, work: Coroutine[None, None, T]) -> T:
        """``run`` for callers with an event loop of their own.

        Cancelling the caller cancels the work; the caller continues once the work has cleaned up.
        """
        caller, ended = asyncio.get_running_loop(), asyncio.Event()
        taken = threading.Lock()  # decides whether the loop runs the work, or the caller left before

        async def whole() -> T:
            if not taken.acquire(blocking=False):
                raise asyncio.CancelledError
            try:
                return await work
            finally:
                with suppress(RuntimeError):  # the caller's loop may have ended
                    caller.call_soon_threadsafe(ended.set)

        try:
            future = self._begin(whole())
        except ArgumentError:
            work.close()
            raise
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if taken.acquire(blocking=False):
                work.close()
            elif not self._is_closed:
                await ended.wait()
            task = asyncio.current_task()
            if self._is_closed and not (task and task.cancelling()):
                raise ArgumentError(_CLOSED) from None
            raise

    def _begin(self, work: Coroutine[None, None, T]) -> Future[T]:
        """Schedule work on the loop. Nothing starts after the session's end, which ends all earlier work."""
        try:
            self.process.check()
        except ArgumentError:
            work.close()
            raise
        with self._starting:
            if self._is_closed:
                work.close()
                raise ArgumentError(_CLOSED)
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop.set_default_executor(self.threads.blocking)
                self._thread = threading.Thread(target=self._serve, args=(self._loop,), name="kvwire-loop", daemon=True)
                self._thread.start()
                _RUNNING.add(self)
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
            _RUNNING.discard(self)

    def http(self) -> aiohttp.ClientSession:
        """The HTTP session, on the session's loop."""
        if self._http is None:
            from kvwire.transport import open_session  # aiohttp takes 95 ms: only stores behind HTTP need it

            self._http = open_session(connections=self._fetch.concurrency, link=self.link)
        return self._http

    def driver(self, controller: Callable[[], Controller]) -> ControllerDriver:
        """The controller's driver, on the session's loop."""
        if self._driver is None or self._driver.broken:
            self._driver = ControllerDriver(controller(), self.lock, self.threads)
        return self._driver

    async def read(
        self, store: Store, key: str, start: int, end: int | None, link: EmulatedLink | None,
        silence_s: float | None = None,
    ) -> tuple[bytes, str]:  # fmt: skip
        """Read an object over the HTTP session and a link, with the fetcher's retries; with its entity tag if known."""
        settings, failed = self._fetch, 0
        patience = settings.patience if silence_s is None else ReadTimeouts(silence_s, silence_s)
        while True:
            source = open_source(store, key, self.http)
            try:
                return await read_object(source, link, patience, start, end), source.etag
            except (ArgumentError, NotFoundError, AuthError, RejectedError):
                raise
            except KvwireError as error:
                failed += 1
                if settings.is_over(failed, error) or (silence_s is not None and isinstance(error, StalledError)):
                    raise
                await asyncio.sleep(settings.backoff(failed, random.random(), error))  # noqa: S311 - only a pause
            finally:
                await source.close()

    async def look_up(self, work: Callable[[], T], limit_s: float) -> T:
        """Run work that reads a store. A caller that leaves cancels what the work waits for on the loop.

        Threads blocked by a hung disk after their callers left are bounded, too, so that some remain for blobs.
        """
        loop, looking, running = asyncio.get_running_loop(), LookUp(work), None

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._look_up_threads.release)

        try:
            async with asyncio.timeout(limit_s), self._looking:
                await self._look_up_threads.acquire()
                running = self.threads.blocking.submit(looking)
                running.add_done_callback(ended)
                return await asyncio.wrap_future(running)
        except TimeoutError as error:
            if isinstance(error, KvwireError):
                raise
            raise StorageError(f"the store did not answer within {limit_s:g} s; check it and the network") from error
        finally:
            looking.leave()
            del looking, running  # as in ``run``

    def view(self, store: Store, *, over_link: bool = True, silence_s: float | None = None) -> Store:
        """A store whose reads go through the session, for callers in threads other than the loop's."""
        return _View(self, store, self.link if over_link else None, silence_s)

    def close(self, *, wait: bool = True) -> None:
        """End running loads, connections and threads."""
        if not self.process.is_here:
            return
        with self._starting:
            was_closed, self._is_closed = self._is_closed, True
            loop, thread = self._loop, self._thread
        if loop is not None and thread is not None:
            if not was_closed:
                asyncio.run_coroutine_threadsafe(self._end(), loop)
            if wait and thread is not threading.current_thread():
                thread.join(_JOIN_S)
        self.threads.close(wait=wait)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=_JOIN_S) if others else None
        if self._driver is not None:
            await self._driver.close()
        if self._http is not None:
            await self._http.close()
        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)


_RUNNING: set[Session] = set()
"""Sessions to end before the interpreter: a thread cut off by its exit may crash the process."""


@atexit.register
def _close_all() -> None:
    for session in tuple(_RUNNING):
        session.close()


class _View(Store):
    """A store read through a session; everything else goes to the store itself."""

    def __init__(self, session: Session, store: Store, link: EmulatedLink | None, silence_s: float | None) -> None:
        self._session, self._store, self._how = session, store, (link, silence_s)

    @property
    def url(self) -> str:
        return self._store.url

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._read(key, start, end)[0]

    def get_with_etag(self, key: str, end: int | None = None) -> tuple[bytes, str]:
        data, etag = self._read(key, 0, end)
        return (data, etag) if etag else super().get_with_etag(key, end)

    def _read(self, key: str, start: int, end: int | None) -> tuple[bytes, str]:
        link, _ = self._how
        if self._store.is_local and link is None and look_up_here():
            with suppress(StorageError), closing(open_object(self._store, key)) as reader:  # the session tries again
                return reader.read(start, reader.size if end is None else min(end, reader.size)), reader.etag
        return self._session.run(self._session.read(self._store, key, start, end, *self._how))

    def stat(self, key: str) -> ObjectStat:
        return self._store.stat(key)

    def put(self, key: str, data: Data) -> None:
        self._store.put(key, data)

    def create(self, key: str, data: Data) -> bool:
        return self._store.create(key, data)

    def replace(self, key: str, data: Data, etag: str) -> bool:
        return self._store.replace(key, data, etag)

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def delete_many(self, keys: Iterable[str]) -> None:
        self._store.delete_many(keys)

    def distrust(self, key: str, start: int = 0, end: int | None = None) -> None:
        self._store.distrust(key, start, end)

    def scan(self, prefix: str, after: str = "") -> Iterator[Listed]:
        return self._store.scan(prefix, after)

    def close(self) -> None:
        """Do nothing: the store is its owner's to close."""
