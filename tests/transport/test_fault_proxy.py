"""The proxy does to an exchange what it was told to, and nothing to all others."""

import asyncio
import gc
import io
import random
import socket
import time
import urllib.request
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from yarl import URL

from kvwire.store import MemoryStore
from kvwire.transport import serve
from kvwire.transport.testing import serving

from ..fault_proxy import FaultKind, FaultProxy, ProxyFault, at_random, first, nth
from .conftest import exchanged

DATA = random.Random(1).randbytes(300_000)


@pytest.fixture
async def served():
    store = MemoryStore()
    store.put("v1/k", DATA)
    store.put("v1/empty", b"")
    async with serve(store) as url:
        yield url


@asynccontextmanager
async def clients(url, plan=None):
    with FaultProxy(url, plan, seed=5) as proxy:
        async with aiohttp.ClientSession(base_url=proxy.url, auto_decompress=False) as session:
            yield proxy, session


async def fetch(session, path="/v1/k", span=None, **headers):
    headers |= {"Range": f"bytes={span[0]}-{span[1] - 1}"} if span else {}
    async with session.get(path, headers=headers) as answer:
        return answer.status, await answer.read(), answer.headers


def test_connections_that_come_while_it_stops_are_closed():
    for _ in range(20):
        with FaultProxy("http://127.0.0.1:9") as proxy:
            address = urlsplit(proxy.url)
            clients = [socket.create_connection((address.hostname, address.port)) for _ in range(3)]
        for client in clients:
            client.close()
    gc.collect()  # what is left open is told of as ResourceWarning, which fails the test


def test_a_client_that_reads_nothing_does_not_keep_it_from_stopping():
    store = MemoryStore()
    store.put("v1/k", bytes(50_000_000))
    with serving(store) as url, FaultProxy(url) as proxy:
        there = urlsplit(proxy.url)
        client = socket.create_connection((there.hostname, there.port))
        client.sendall(b"GET /v1/k HTTP/1.1\r\nHost: here\r\n\r\n")
        assert client.recv(100)
    client.close()
    gc.collect()


async def test_without_faults_nothing_changes(served):
    async with clients(served) as (proxy, session):
        assert (await fetch(session))[:2] == (200, DATA)
        status, body, headers = await fetch(session, span=(1000, 2000))
        assert (status, body) == (206, DATA[1000:2000])
        assert headers["Content-Range"] == f"bytes 1000-1999/{len(DATA)}"
        assert (await fetch(session, "/v1/empty"))[:2] == (200, b"")
        assert (await fetch(session, "/none"))[0] == 404
        async with session.head("/v1/k") as answer:
            assert answer.content_length == len(DATA)
        async with session.put("/v1/k", data=b"x" * 100_000) as answer:
            assert answer.status in (201, 403, 405)
        assert proxy.requests == len(proxy.records) == 6
        assert not proxy.faults
        assert [(r.request.method, r.request.start, r.request.end) for r in proxy.records[:2]] == [
            ("GET", None, None),
            ("GET", 1000, 2000),
        ]


async def test_requests_are_passed_on_as_they_were_sent_over_kept_connections():
    """What a signature covers must not change on the way. Bodies without a length are given one."""
    seen = []

    async def answer(request):
        seen.append((request.raw_path, request.headers, request.raw_headers, await request.read(), request.transport))
        response = web.StreamResponse()  # chunked
        await response.prepare(request)
        await response.write(b"abcde")
        return response

    async with RawTestServer(answer) as server, clients(str(server.make_url(""))) as (proxy, session):
        target = URL(f"{proxy.url}/a%2Fb+c?X-Amz-Signature=a%2Bb&empty=", encoded=True)
        for _ in range(3):
            async with session.get(target, headers={"x-CaSe": "Kept"}) as response:
                assert (await response.read(), response.content_length) == (b"abcde", 5)
        async with session.put("/k", data=io.BytesIO(DATA), expect100=True) as response:
            assert response.status == 200
    path, headers, raw_headers, _, _ = seen[0]
    assert (path, headers["Host"]) == (target.raw_path_qs, proxy.url.removeprefix("http://"))
    assert (b"x-CaSe", b"Kept") in raw_headers
    assert len({transport for *_, transport in seen[:3]}) == 1
    assert (seen[3][3], "Expect" in seen[3][1]) == (DATA, False)
    record = proxy.records[0]
    assert record.request.query_names == {"X-Amz-Signature", "empty"}
    assert "a%2Bb" not in repr(record)
    assert record.request.path == "/a%2Fb+c"


async def everything(reader, received):
    """Read until the connection ends; raises how it ended."""
    while True:
        received += await reader.readexactly(1) + reader._buffer
        reader._buffer.clear()


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (ProxyFault(FaultKind.RESET, after=70_000), ConnectionResetError),
        (ProxyFault(FaultKind.RESET, after=0), ConnectionResetError),
        (ProxyFault(FaultKind.TRUNCATE, after=70_000), asyncio.IncompleteReadError),
        (ProxyFault(FaultKind.HANG_UP), asyncio.IncompleteReadError),
        (ProxyFault(FaultKind.LOST_ANSWER), ConnectionResetError),
        (ProxyFault(FaultKind.STALL, after=70_000, seconds=0.05), asyncio.IncompleteReadError),
        (ProxyFault(FaultKind.SILENT, seconds=0.05), asyncio.IncompleteReadError),
        (ProxyFault(FaultKind.LONG_LENGTH), asyncio.IncompleteReadError),
    ],
    ids=lambda value: f"{value.kind.value} {value.after}" if isinstance(value, ProxyFault) else None,
)
async def test_broken_answers_break_where_they_should(served, fault, error):
    with FaultProxy(served, first(fault)) as proxy:
        reader, writer = await asyncio.open_connection(*proxy.url.removeprefix("http://").split(":"))
        writer.write(b"GET /v1/k HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = bytearray()
        try:
            with pytest.raises(error):
                await everything(reader, received)
            received += reader._buffer
        finally:
            writer.close()
        body = received.partition(b"\r\n\r\n")[2]
        assert DATA.startswith(bytes(body))
        if fault.after is not None:
            assert len(body) == fault.after
        assert proxy.faults == {fault.kind: 1}


@pytest.mark.parametrize("kind", list(FaultKind), ids=lambda kind: kind.value)
async def test_after_a_fault_all_goes_well_again(served, kind):
    fault = ProxyFault(kind, seconds=0.01, rate=1e6)
    async with clients(served, first(fault)) as (proxy, session):
        with suppress(aiohttp.ClientError, OSError):
            await fetch(session, span=(100, 200_000))
        for _ in range(2):
            assert (await fetch(session, span=(100, 2000)))[1] == DATA[100:2000]
        assert proxy.faults == {kind: 1}
        assert proxy.records[0].fault is fault


async def test_answers_with_a_status_come_from_the_proxy_and_keep_the_connection(served):
    plan = nth(ProxyFault(FaultKind.STATUS, status=429, retry_after="2"), 0, 2)
    async with clients(served, plan) as (proxy, session):
        answers = [await fetch(session, span=(0, 5)) for _ in range(4)]
        assert [status for status, *_ in answers] == [429, 206, 429, 206]
        assert answers[0][2]["Retry-After"] == "2"
        assert [record.status for record in proxy.records] == [429, 206, 429, 206]


async def test_bytes_and_fields_change_as_told(served):
    async def changed(fault, span=(1000, 2000)):
        async with clients(served, first(fault)) as (_, session):
            return await fetch(session, span=span)

    _, body, _ = await changed(ProxyFault(FaultKind.FLIP, after=10))
    assert body[:10] + body[11:] == DATA[1000:1010] + DATA[1011:2000]
    assert body[10] != DATA[1010]
    _, body, _ = await changed(ProxyFault(FaultKind.FLIP))
    assert sum(one != other for one, other in zip(body, DATA[1000:2000], strict=True)) == 1
    _, body, headers = await changed(ProxyFault(FaultKind.SHIFTED_RANGE, shift=9))
    assert body == DATA[1000:2000]
    assert headers["Content-Range"] == f"bytes 1009-2008/{len(DATA)}"
    status, body, headers = await changed(ProxyFault(FaultKind.OTHER_RANGE, shift=9))
    assert (status, body) == (206, DATA[1009:2009])
    assert headers["Content-Range"] == f"bytes 1009-2008/{len(DATA)}"
    assert (await changed(ProxyFault(FaultKind.WHOLE)))[:2] == (200, DATA)
    status, body, headers = await changed(ProxyFault(FaultKind.REPLACED))
    assert (status, headers["ETag"]) == (206, '"another"')
    assert all(one != other for one, other in zip(body, DATA[1000:2000], strict=True))
    async with clients(served, first(ProxyFault(FaultKind.REPLACED))) as (_, session):  # it heeds no condition
        assert [(await fetch(session, span=(0, 10), **{"If-Match": '"none"'}))[0] for _ in range(2)] == [206, 412]


async def test_a_length_too_small_leaves_bytes_on_the_wire(served):
    with FaultProxy(served, first(ProxyFault(FaultKind.SHORT_LENGTH, shift=100))) as proxy:
        received = await exchanged(proxy.url, b"GET /v1/k HTTP/1.1\r\nHost: localhost\r\n\r\n")
    head, _, body = received.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(DATA) - 100}".encode() in head
    assert body == DATA


async def test_a_drip_takes_its_time(served):
    async with clients(served, first(ProxyFault(FaultKind.DRIP, rate=20_000))) as (_, session):
        started = time.monotonic()
        assert (await fetch(session, span=(0, 4000)))[1] == DATA[:4000]
        assert time.monotonic() - started >= 0.15


async def test_a_stalled_exchange_ends_when_the_client_leaves(served):
    async with clients(served, first(ProxyFault(FaultKind.STALL, after=10))) as (proxy, session):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await fetch(session)
        assert proxy.records[0].body_bytes == 10


async def test_a_stopping_proxy_lets_no_client_hang(served):
    with FaultProxy(served, first(ProxyFault(FaultKind.SILENT))) as proxy:
        hanging = asyncio.create_task(asyncio.to_thread(urllib.request.urlopen, f"{proxy.url}/v1/k", timeout=30))
        while not proxy.requests:
            await asyncio.sleep(0.005)
    with pytest.raises(OSError, match=r".+"):
        await hanging


async def test_random_faults_come_as_often_as_asked_and_again_with_the_same_seed(served):
    flip, busy = ProxyFault(FaultKind.FLIP), ProxyFault(FaultKind.STATUS, status=500)

    async def run(seed):
        async with clients(served, at_random({flip: 0.3, busy: 0.2}, seed)) as (proxy, session):
            bodies = [(await fetch(session, span=(0, 100)))[1] for _ in range(200)]
            return bodies, proxy.faults

    bodies, faults = await run(7)
    assert 30 < faults[FaultKind.FLIP] < 90
    assert 15 < faults[FaultKind.STATUS] < 65
    assert (bodies, faults) == await run(7)
    assert bodies.count(DATA[:100]) == 200 - faults[FaultKind.FLIP] - faults[FaultKind.STATUS]


async def test_a_dead_server_is_a_closed_connection():
    async with clients("http://127.0.0.1:9") as (_, session):
        with pytest.raises(aiohttp.ClientError):
            await fetch(session)


def test_rates_are_probabilities():
    with pytest.raises(ValueError, match="at most 1"):
        at_random({ProxyFault(FaultKind.FLIP): 0.7, ProxyFault(FaultKind.RESET): 0.7}, 1)
