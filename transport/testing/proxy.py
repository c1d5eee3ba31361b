"""A proxy that stands before any HTTP/1.1 server and makes exchanges go wrong.

It runs in a thread of its own, so synchronous and asynchronous clients are tested alike. ``Host`` is passed on as the
client sent it: URLs that are presigned for the proxy's address stay valid behind it, for servers check the signature
against the ``Host`` that they are told.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter, deque
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qsl, urlsplit

from kvwire.errors import ArgumentError, StorageError
from kvwire.transport.testing._exchange import Exchange, Upstream
from kvwire.transport.testing._http1 import MAX_HEADER_BYTES, Head, read_header
from kvwire.transport.testing.faults import ProxyRecord, ProxyRequest

if TYPE_CHECKING:
    from types import TracebackType

    from kvwire.transport.testing.faults import FaultKind, FaultPlan

_START_S = 10.0
_KEPT_RECORDS = 100_000


class FaultProxy:
    """A context manager: ``with FaultProxy("http://127.0.0.1:9000", plan) as proxy: ... proxy.url``.

    upstream: address of the real server, without a path. plan: chooses the fault of each request, or None; it is called
    in the proxy's thread and may be replaced at any time. seed: of the places of faults that name none.
    """

    def __init__(self, upstream: str, plan: FaultPlan | None = None, *, seed: int = 0) -> None:
        """Remember; nothing is bound or started yet. Raises ArgumentError for an address without host and port."""
        parts = urlsplit(upstream)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            msg = f"{upstream!r} is not the address of a server: write http://host:port"
            raise ArgumentError(msg)
        self._host, self._port = parts.hostname, parts.port
        self.plan = plan
        self._rng = random.Random(seed)  # noqa: S311 - repeatable faults, guards nothing
        self._records: deque[ProxyRecord] = deque(maxlen=_KEPT_RECORDS)
        self._requests = 0
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._address = ""

    @property
    def url(self) -> str:
        """The proxy's own address."""
        return f"http://{self._address}"

    @property
    def records(self) -> list[ProxyRecord]:
        """The exchanges, in the order of their requests; the last hundred thousand."""
        return list(self._records)

    @property
    def requests(self) -> int:
        """Number of requests that came in."""
        return self._requests

    @property
    def faults(self) -> Counter[FaultKind]:
        """How often each kind of fault was done."""
        return Counter(record.fault.kind for record in self.records if record.fault)

    def __enter__(self) -> Self:
        """Bind a free port of the loopback address and start."""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="fault-proxy", daemon=True)
        self._thread.start()
        if not self._ready.wait(_START_S) or not self._address:
            msg = "the fault proxy did not start: look for a free port on 127.0.0.1"
            raise StorageError(msg)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Break off what still runs, and stop."""
        if self._loop and self._stop and self._thread:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), (stop := asyncio.Event())
        tasks: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if stop.is_set():
                writer.close()
                return
            task = asyncio.ensure_future(self._connection(reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            task.add_done_callback(lambda task: _leave(writer, at_once=task.cancelled()))

        try:
            server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=MAX_HEADER_BYTES)
            self._address = "{}:{}".format(*server.sockets[0].getsockname()[:2])
        finally:
            self._ready.set()
        await stop.wait()
        # Connections that asyncio is accepting come first: their sockets stay open where it is closed or cancelled.
        for listening in server.sockets:
            self._loop.remove_reader(listening.fileno())  # no more of them
        while accepting := asyncio.all_tasks() - {asyncio.current_task()} - tasks:
            await asyncio.wait(accepting)
        server.close()
        running = list(tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await server.wait_closed()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(0)  # what drain() has let through is with the system: a reset keeps it
        behind = Upstream(self._host, self._port)
        broken = False
        try:
            while not broken and (head := await read_header(reader)):
                broken = await self._exchange(reader, writer, behind, head)
        except (OSError, EOFError, ValueError, StorageError):
            pass  # one of the sides left, or talks no HTTP: the other side is left too
        finally:
            behind.close()

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, behind: Upstream, head: Head
    ) -> bool:
        request = _request(self._requests, head)
        self._requests += 1
        fault = self.plan(request) if self.plan else None
        record = ProxyRecord(request, fault)
        self._records.append(record)
        exchange = Exchange(reader, writer, behind, head, record, self._rng.random())
        await exchange.run()
        return exchange.broken


def _leave(writer: asyncio.StreamWriter, *, at_once: bool) -> None:
    """Close a client's connection; what is not sent yet would be waited for else."""
    if at_once:
        writer.transport.abort()
    else:
        writer.close()


def _request(number: int, head: Head) -> ProxyRequest:
    method, _, rest = head.line.partition(" ")
    parts = urlsplit(rest.partition(" ")[0])
    names = frozenset(name for name, _ in parse_qsl(parts.query, keep_blank_values=True))
    start, _, last = (head.get("Range") or "").removeprefix("bytes=").partition("-")
    if not start.isdigit():
        return ProxyRequest(number, method, parts.path, query_names=names)
    end = int(last) + 1 if last.isdigit() else None
    return ProxyRequest(number, method, parts.path, int(start), end, names)
