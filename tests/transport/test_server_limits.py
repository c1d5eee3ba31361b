"""What a server does not let happen: too many, too fast, too slow; and how it stops."""

import asyncio
import contextlib
import threading

import aiohttp
import pytest

from kvwire.store import FolderStore, MemoryStore
from kvwire.transport import ObjectServer, ServerSettings, listen, serve
from kvwire.transport.server import application, connections
from kvwire.transport.server.access import RateLimiter
from kvwire.transport.server.connections import Connection

from .conftest import answered

DATA = bytes(range(256)) * 8
BIG = bytes(30_000_000)


@pytest.fixture(params=["memory", "folder"])
def store(request, tmp_path):
    store = MemoryStore() if request.param == "memory" else FolderStore(tmp_path)
    store.put("k", DATA)
    return store


@contextlib.asynccontextmanager
async def connected(url):
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, port)
    try:
        async with asyncio.timeout(20):
            yield reader, writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def get(key="k", *fields):
    return "\r\n".join([f"GET /{key} HTTP/1.1", "Host: localhost", *fields, "", ""]).encode()


async def answer(reader):
    """Status, header fields and body of one answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    lines = head.split("\r\n")
    fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
    return int(lines[0].split(" ")[1]), fields, await reader.readexactly(int(fields.get("content-length", 0)))


async def test_requests_in_a_row_are_answered_in_order(store):
    async with serve(store) as url, connected(url) as (reader, writer):
        count = 40
        writer.write(b"".join(get("k", f"Range: bytes={n}-{n + 9}", f"X-Request-Id: {n}") for n in range(count)))
        for n in range(count):
            status, fields, body = await answer(reader)
            assert (status, fields["x-request-id"], body) == (206, str(n), DATA[n : n + 10])


async def test_connections_over_the_limit_are_refused(store, monkeypatch):
    monkeypatch.setattr(connections, "_SPARE_S", 0.1)  # before one that says nothing is told so
    monkeypatch.setattr(application, "_REFRESH_S", 0.02)
    async with serve(store, settings=ServerSettings(max_connections=2)) as url:
        async with connected(url) as (reader, writer), connected(url) as (other, _):
            for _ in range(3):
                async with connected(url) as (refused, _):
                    status, fields, _ = await answer(refused)
                    assert (status, fields["connection"], fields["retry-after"]) == (503, "close", "1")
                    assert await refused.read() == b""
            writer.write(get())
            assert (await answer(reader))[0] == 200
            del other
        async with connected(url) as (reader, writer):  # a place is free again
            writer.write(get("metrics", "Connection: close"))
            page = (await answer(reader))[2].decode()
            assert "kvwire_http_connections_refused_total 3.0" in page


async def test_a_slow_header_is_given_up(store):
    async with serve(store, settings=ServerSettings(header_s=0.2)) as url:
        for start in (b"", b"GET /k HT", get()[:-2]):
            async with connected(url) as (reader, writer):
                writer.write(start)
                status, fields, _ = await answer(reader)
                assert (status, fields["connection"]) == (408, "close")
                assert await reader.read() == b""
        async with connected(url) as (reader, writer):  # each byte comes in time, the header does not
            told = asyncio.create_task(reader.readline())
            for byte in get() * 100:
                writer.write(bytes([byte]))
                await asyncio.wait({told}, timeout=0.02)
                if told.done():
                    break
            assert b" 408 " in await told


async def test_clients_that_ask_and_never_read_give_their_places_back(client):
    settings = ServerSettings(max_connections=2, keepalive_s=0.2)
    async with serve(MemoryStore(), token="t", settings=settings) as url, contextlib.AsyncExitStack() as stack:  # noqa: S106
        for _ in range(2):
            reader, writer = await stack.enter_async_context(connected(url))
            reader._transport.pause_reading()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):  # until neither side takes any more
                    while True:
                        writer.write(get() * 2000)
                        await writer.drain()
        async with asyncio.timeout(20):
            while (await client.get(f"{url}/healthz")).status != 200:
                await asyncio.sleep(0.05)


async def test_an_idle_connection_is_closed_without_words_and_a_long_answer_outlives_the_limit(store):
    store.put("k", BIG)
    settings = ServerSettings(keepalive_s=0.1, header_s=0.1)
    async with serve(store, settings=settings) as url, connected(url) as (reader, writer):
        writer.write(get())
        await asyncio.sleep(0.5)
        status, _, body = await answer(reader)
        assert (status, len(body)) == (200, len(BIG))
        assert await reader.read() == b""


@pytest.mark.parametrize("field", ["X: " + "x" * 20_000, "\r\n".join(f"X-{n}: x" for n in range(5000))])
async def test_headers_are_bounded(store, field):
    async with serve(store) as url, connected(url) as (reader, writer):
        writer.write(get("k", field))
        status, _, body = await answer(reader)
        assert status in (400, 431)
        assert b"xxx" not in body
        assert await reader.read() == b""


async def test_garbage_gets_a_plain_answer_and_harms_nobody(store, client, caplog):
    async with serve(store) as url:
        for garbage in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"\0" * 100,
            b"GET\r\n\r\n",
            b"\r\n\r\nx y\r\n\r\n",
        ):
            async with connected(url) as (reader, writer):
                writer.write(garbage)
                writer.write_eof()
                got = await reader.read()
                assert not got or got.split(b" ")[1] == b"400"
        async with client.get(f"{url}/k") as response:
            assert await response.read() == DATA
    assert "Traceback" not in caplog.text


async def test_a_client_over_the_rate_is_told_when_to_come_back(store, client):
    settings = ServerSettings(requests_per_s=0.5, burst=3)
    async with serve(store, token="t", settings=settings) as url:  # noqa: S106
        own = {"Authorization": "Bearer t"}
        statuses = []
        for _ in range(5):
            async with client.get(f"{url}/k", headers=own) as response:
                statuses.append(response.status)
        assert statuses == [200, 200, 200, 429, 429]
        assert 1 <= int(response.headers["Retry-After"]) <= 2
        statuses = []
        for n in range(5):  # guessing is counted by address
            async with client.get(f"{url}/k", headers={"Authorization": f"Bearer {n}"}) as response:
                statuses.append(response.status)
        assert statuses == [401, 401, 401, 429, 429]
        assert await answered(client.get(f"{url}/healthz")) == 200


async def test_who_guesses_too_fast_is_not_told_when_right(store, client):
    settings = ServerSettings(requests_per_s=0.01, burst=2)
    async with serve(store, token="right", settings=settings) as url:  # noqa: S106
        statuses = []
        for token, path in (("a", "k"), ("b", "k"), ("c", "k"), ("right", "k"), ("right", "metrics")):
            async with client.get(f"{url}/{path}", headers={"Authorization": f"Bearer {token}"}) as response:
                statuses.append(response.status)
        assert statuses == [401, 401, 429, 429, 429]


def test_buckets_fill_again_and_are_forgotten():
    now = 0.0
    limiter = RateLimiter(2.0, 3, clock=lambda: now)
    assert [limiter.take("a") for _ in range(4)] == [0, 0, 0, 0.5]
    assert limiter.look("a") == 0.5
    assert [limiter.look("b"), limiter.take("b"), limiter.look("b")] == [0, 0, 0]
    now = 0.25
    assert limiter.take("a") == pytest.approx(0.25)
    now = 0.5
    assert limiter.take("a") == 0
    assert limiter.take("a") == 0.5
    now = 1000.0
    assert [limiter.take("a") for _ in range(4)] == [0, 0, 0, 0.5]
    for n in range(50_000):
        limiter.take(str(n))
    assert len(limiter) < 20_000
    unlimited = RateLimiter(0.0, 1)
    assert not any(unlimited.take("a") for _ in range(1000))
    assert not len(unlimited)


@contextlib.asynccontextmanager
async def running(store, **settings):
    """A server in a task of its own, and what makes it stop."""
    server = ObjectServer(store, settings=ServerSettings(**settings))
    stop = asyncio.Event()
    bound = asyncio.get_running_loop().create_future()

    async def run():
        async with listen(server) as url:
            bound.set_result(url)
            await stop.wait()

    task = asyncio.create_task(run())
    yield server, await bound, stop
    stop.set()
    async with asyncio.timeout(30):
        await task


async def stopped(server, stop):
    stop.set()
    while not server._connections.draining:
        await asyncio.sleep(0.01)


async def test_running_answers_end_before_the_server(store):
    store.put("big", BIG)
    async with running(store, shutdown_s=20) as (server, url, stop), connected(url) as (reader, writer):
        async with connected(url) as (idle, _):
            writer.write(get("big"))
            first = await reader.readexactly(1000)
            await stopped(server, stop)
            assert await idle.read() == b""
        whole = first + await reader.read()
        assert whole.partition(b"\r\n\r\n")[2] == BIG


@pytest.mark.parametrize("takes", [True, False])
async def test_what_is_written_waits_for_its_client_but_not_for_ever(monkeypatch, takes):
    made, store = Connection.connection_made, MemoryStore()

    def roomy(self, transport):
        made(self, transport)
        transport.set_write_buffer_limits(high=1 << 30)  # an answer is written at once, and waits there

    monkeypatch.setattr(Connection, "connection_made", roomy)
    store.put("big", BIG)
    limit_s = 20 if takes else 1.5
    async with running(store, shutdown_s=limit_s) as (server, url, stop), connected(url) as (reader, writer):
        writer.write(get("big"))
        whole = await reader.readexactly(1000)
        await stopped(server, stop)
        while server._connections.running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1 if takes else 2.5)
        with contextlib.nullcontext() if takes else contextlib.suppress(ConnectionError):
            whole += await reader.read()
        assert (whole.partition(b"\r\n\r\n")[2] == BIG) is takes


async def test_the_server_stops_although_a_client_takes_nothing(store):
    store.put("big", BIG)
    async with running(store, shutdown_s=0.2) as (server, url, stop), connected(url) as (reader, writer):
        writer.write(get("big"))
        await reader.readexactly(1000)
        await stopped(server, stop)
        while server._connections.running:
            await asyncio.sleep(0.01)
        with contextlib.suppress(ConnectionError):
            assert len(await reader.read()) < len(BIG)


class WaitingStore(MemoryStore):
    """Lets a read of ``slow`` wait until it is told to go on."""

    def __init__(self):
        super().__init__()
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def snapshot(self, key):
        if key == "slow":
            self.reached.set()
            assert self.go_on.wait(20)
        return super().snapshot(key)


async def test_a_stopping_server_takes_nobody_and_ends_what_it_began(client):
    store = WaitingStore()
    store.put("slow", DATA)
    async with running(store, shutdown_s=20) as (server, url, stop), connected(url) as (reader, writer):
        writer.write(get("slow"))
        assert await asyncio.to_thread(store.reached.wait, 20)
        assert await answered(client.get(f"{url}/readyz")) == 200
        await stopped(server, stop)
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get(f"{url}/readyz")
        store.go_on.set()
        status, _, body = await answer(reader)
        assert (status, body) == (200, DATA)
        assert await reader.read() == b""
        assert not server._connections.running


async def test_readiness_is_told_until_the_end(store):
    """A request that came in before the end and is answered after it."""
    server = ObjectServer(store)
    async with listen(server) as url, connected(url) as (reader, writer):
        server._connections.draining = True
        writer.write(get("readyz"))
        status, fields, _ = await answer(reader)
        assert (status, fields["cache-control"], fields["connection"]) == (503, "no-store", "close")
