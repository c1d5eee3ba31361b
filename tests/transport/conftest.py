"""Servers that misbehave, and the pieces that most tests need."""

import asyncio
import inspect
import random
import socket
import threading
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from dataclasses import replace
from types import SimpleNamespace

import aiohttp
import pytest

from kvwire.store import MemoryStore
from kvwire.store.http_clients import usual_tls
from kvwire.transport import BlobFetcher, FetchSettings, HttpSource, ReadTimeouts, SegmentError, open_session

from ..certificates import write_certificate
from ..plain_blobs import build_blob as build
from ..plain_blobs import read_blob_head as read_header

KEY = "v1/blob.kvw"
FAST = FetchSettings(backoff_s=0.001, gap_bytes=64, max_bytes=100_000, patience=ReadTimeouts(5, 5))

HEAD = 65536


def everything(info):
    return [segment for row in info.segments for segment in row]


def behind_the_head(info):
    return [segment for segment in everything(info) if segment.end > HEAD]


async def outcome(fetcher, segments, **options):
    good, bad = {}, {}
    async for result in fetcher.fetch(segments, **options):
        (bad if isinstance(result, SegmentError) else good)[result.segment] = result
    assert len(good) + len(bad) == len(segments)
    return good, bad


def check_all(blob, good):
    assert all(arrival.data == blob[s.offset : s.end] for s, arrival in good.items())


async def fetched(fetcher, blob, wanted=behind_the_head, **options):
    """Open a blob and fetch what is wanted of it, all of which has to arrive whole."""
    good, bad = await outcome(fetcher, wanted(await fetcher.open()), **options)
    assert not bad
    check_all(blob, good)
    return good


async def until(holds):
    """Wait until it holds, as a call or a coroutine tells."""
    async with asyncio.timeout(30):
        while not (await found if inspect.isawaitable(found := holds()) else found):
            await asyncio.sleep(0.001)


async def answered(asked):
    """Status of an answer, of which nothing else is looked at."""
    async with asked as response:
        return response.status


async def exchanged(url, request):
    """All that comes as the answer to a raw request."""
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    with closing(writer):
        writer.write(request)
        return await reader.read()


@pytest.fixture
def trusted(tmp_path, monkeypatch):
    """A certificate that every client here trusts."""
    files = write_certificate(tmp_path, "one")
    monkeypatch.setenv("SSL_CERT_FILE", str(files.certificate))
    usual_tls.cache_clear()
    yield files
    usual_tls.cache_clear()


@pytest.fixture
async def client():
    async with aiohttp.ClientSession() as client:
        yield client


@pytest.fixture
def fake():
    return SimpleNamespace(build=build, read_header=read_header, KEY=KEY, FAST=FAST)


@pytest.fixture
def blob():
    """12 chunks of 3 levels, 360 kB: the head is far smaller than the speculative read, the payload far larger."""
    return build([[5_000, 10_000, 15_000]] * 12)


@pytest.fixture
def store(blob):
    with closing(MemoryStore()) as store:
        store.put(KEY, blob)
        yield store


@pytest.fixture
async def session():
    async with open_session() as session:
        yield session


@pytest.fixture
def fetcher_for(session):
    """Make a fetcher of the tests' format, over HTTP or any source, that never sleeps for long."""

    def make(source, **options):
        if isinstance(source, str):
            source = HttpSource(session, source)
        options = {"read_header": read_header, "settings": FAST, "rng": random.Random(1)} | options
        return BlobFetcher(source, **options)

    return make


class Misbehaviour:
    """Raw HTTP server over one object: ``plan(n, start, end)`` chooses how request number ``n`` goes wrong."""

    def __init__(self, data, plan):
        self.data = data
        self.plan = plan
        self.requests = []
        self.conditions = []

    async def handle(self, reader, writer):
        try:
            while line := await reader.readline():
                headers = {}
                while (field := await reader.readline()).strip():
                    name, _, value = field.decode().partition(":")
                    headers[name.lower()] = value.strip()
                if not line.strip():
                    break
                await self.answer(writer, headers)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def answer(self, writer, headers):
        first, _, last = headers.get("range", f"bytes=0-{len(self.data)}").removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last) + 1, len(self.data))
        number = len(self.requests)
        self.requests.append((start, end))
        self.conditions.append(headers.get("if-match"))
        fault = self.plan(number, start, end) or {}
        body = bytearray(self.data[start:end])
        if "flip" in fault:
            body[fault["flip"] - start] ^= 1
        status = fault.get("status", "206 Partial Content")
        if not status.startswith("206"):
            body = bytearray(self.data if status.startswith("200") else b"sorry")
        shift = fault.get("shift", 0)
        lines = [
            f"HTTP/1.1 {status}",
            f"Content-Length: {len(body) - fault.get('short', 0)}",
            f"Content-Range: bytes {start + shift}-{end - 1 + shift}/{len(self.data) + shift}",
            f"ETag: {fault.get('etag', chr(34) + 'one' + chr(34))}",
            *fault.get("headers", ()),
        ]
        if fault.get("silent"):
            await asyncio.sleep(30)
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        sent = fault.get("after", len(body) - fault.get("short", 0))
        writer.write(body[:sent])
        await writer.drain()
        if fault.get("stall"):
            await asyncio.sleep(30)
        if "after" in fault:
            writer.transport.abort() if fault.get("reset") else writer.close()


@pytest.fixture
def misbehaving():
    @asynccontextmanager
    async def start(data, plan):
        server = Misbehaviour(data, plan)
        tasks = set()

        async def handle(reader, writer):
            tasks.add(asyncio.current_task())
            with suppress(asyncio.CancelledError):  # asyncio's callback in 3.11 logs a cancelled handler as an error
                await server.handle(reader, writer)

        listening = await asyncio.start_server(handle, "127.0.0.1", 0)
        host, port = listening.sockets[0].getsockname()
        server.url = f"http://{host}:{port}/{KEY}"
        try:
            yield server
        finally:
            listening.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await listening.wait_closed()

    return start


@pytest.fixture
def unsteady(blob, misbehaving, fetcher_for):
    """A server of the blob, or of ``data``, where requests go wrong by plan; and a fetcher of it."""

    @asynccontextmanager
    async def start(plan=lambda *_: None, data=blob, sleep=asyncio.sleep, **settings):
        made = {"settings": replace(FAST, **settings), "sleep": sleep}
        async with misbehaving(data, plan) as server, fetcher_for(server.url, **made) as fetcher:
            yield server, fetcher

    return start


@pytest.fixture
def answering():
    """A raw server that gives each connection one answer, or what it was sent (None), and then closes or holds it."""
    threads = []
    with ExitStack() as held, socket.create_server(("127.0.0.1", 0)) as listening:

        def start(answer, hold=False):
            def work():
                with suppress(OSError):
                    while True:
                        connection, _ = listening.accept()
                        if hold:
                            held.callback(connection.close)
                        with suppress(OSError):  # who asked may have seen enough
                            sent = connection.recv(65536)
                            connection.sendall(sent if answer is None else answer)
                        if not hold:
                            connection.close()

            threads.append(threading.Thread(target=work))
            threads[-1].start()
            return f"http://127.0.0.1:{listening.getsockname()[1]}"

        yield start
        listening.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()


class FakeTime:
    """A clock that moves only in sleeps; each overruns by ``late`` seconds."""

    def __init__(self, late=0.0):
        self.now, self.late, self.sleeps = 1000.0, late, 0

    def clock(self):
        return self.now

    async def sleep(self, seconds):
        self.sleeps += 1
        self.now += seconds + self.late
