"""The real server on loopback: ranges, preconditions, caching, limits, failures."""

import asyncio
import json
import logging
import threading
from email.utils import parsedate_to_datetime

import aiohttp
import pytest

from kvwire.errors import AuthError, NotFoundError, StorageError
from kvwire.store import FolderStore, MemoryStore
from kvwire.transport import ServerSettings, serve
from kvwire.transport.server.access import is_loopback

from .conftest import answered, exchanged

DATA = bytes(range(256)) * 8  # 2048 bytes
DIGEST = "ab" * 32
BLOB = f"v1/t/{DIGEST}.kvw"


@pytest.fixture(params=["memory", "folder"])
def store(request, tmp_path):
    store = MemoryStore() if request.param == "memory" else FolderStore(tmp_path)
    store.put(BLOB, DATA)
    store.put("v1/catalog/x.json", b"{}")
    store.put("empty", b"")
    return store


@pytest.fixture
async def url(store):
    async with serve(store, settings=ServerSettings(piece_bytes=100)) as url:
        yield url


@pytest.mark.parametrize(
    ("wanted", "status", "content_range", "body"),
    [
        (None, 200, None, DATA),
        ("bytes=0-99", 206, "bytes 0-99/2048", DATA[:100]),
        ("bytes=5-1004", 206, "bytes 5-1004/2048", DATA[5:1005]),
        ("bytes=2000-", 206, "bytes 2000-2047/2048", DATA[2000:]),
        ("bytes=2000-9999", 206, "bytes 2000-2047/2048", DATA[2000:]),
        ("bytes=-48", 206, "bytes 2000-2047/2048", DATA[2000:]),
        ("bytes=2048-", 416, "bytes */2048", None),
        ("bytes=0-1,5-6", 200, None, DATA),
        ("nonsense", 200, None, DATA),
    ],
)
async def test_ranges(url, client, wanted, status, content_range, body):
    headers = {"Range": wanted} if wanted else {}
    async with client.get(f"{url}/{BLOB}", headers=headers) as response:
        data = await response.read()
        assert response.status == status
        assert response.headers.get("Content-Range") == content_range
        assert response.headers["ETag"] == f'"{DIGEST}"'
        assert response.headers["Accept-Ranges"] == "bytes"
        assert "Content-Encoding" not in response.headers
        if body is not None:
            assert data == body
            assert response.headers["Content-Type"] == "application/octet-stream"
            assert response.headers["Content-Length"] == str(len(body))


async def test_an_empty_object(url, client):
    async with client.get(f"{url}/empty") as response:
        assert (response.status, await response.read()) == (200, b"")
    async with client.get(f"{url}/empty", headers={"Range": "bytes=0-"}) as response:
        assert (response.status, response.headers["Content-Range"]) == (416, "bytes */0")


async def test_head_tells_the_size_and_sends_nothing(url, client):
    async with client.head(f"{url}/{BLOB}", headers={"Range": "bytes=0-5"}) as response:
        assert response.status == 200
        assert response.headers["Content-Length"] == "2048"
        assert response.headers["ETag"] == f'"{DIGEST}"'
        assert await response.read() == b""
    assert await answered(client.head(f"{url}/absent")) == 404


@pytest.mark.parametrize(
    ("headers", "status", "length"),
    [
        ({"If-Match": f'"{DIGEST}"', "Range": "bytes=0-9"}, 206, 10),
        ({"If-Match": '"other"'}, 412, None),
        ({"If-None-Match": f'"{DIGEST}"'}, 304, 0),
        ({"If-None-Match": '"other"'}, 200, 2048),
        ({"If-Range": f'"{DIGEST}"', "Range": "bytes=0-9"}, 206, 10),
        ({"If-Range": '"other"', "Range": "bytes=0-9"}, 200, 2048),
        ([("If-Match", '"other"'), ("If-Match", f'"{DIGEST}"')], 200, 2048),  # several lines are one list
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_preconditions(url, client, method, headers, status, length):
    async with client.request(method, f"{url}/{BLOB}", headers=headers) as response:
        data = await response.read()
        wanted = 200 if method == "HEAD" and status == 206 else status
        assert response.status == wanted
        if length is not None and method == "GET":
            assert len(data) == length


async def test_caching(url, client):
    wanted = {
        BLOB: "public, max-age=31536000, immutable",
        "v1/catalog/x.json": "no-cache",
        "absent": "no-store",
        "..%2fx": "no-store",
        "healthz": "no-store",
    }
    for key, cache in wanted.items():
        async with client.get(f"{url}/{key}") as response:
            assert response.headers["Cache-Control"] == cache
    async with client.get(f"{url}/{BLOB}", headers={"If-None-Match": "*"}) as response:
        assert response.headers["Cache-Control"] == wanted[BLOB]
    async with client.get(f"{url}/{BLOB}", headers={"Range": "bytes=9999-"}) as response:
        assert response.headers["Cache-Control"] == "no-store"


async def raw(url, line, *headers):
    return await exchanged(url, "\r\n".join([line, "Host: localhost", "Connection: close", *headers, "", ""]).encode())


@pytest.mark.parametrize(
    "path",
    [
        *("/../../etc/passwd", "/%2e%2e/etc/passwd", "/..%2f..%2fetc%2fpasswd", "//etc/passwd", "/%2fetc/passwd"),
        *("/a/../b", "/.tmp-1-2", "/%00", "/a%0d%0ab", "/", "/%ff", "/v1", "/" + "x" * 600),
    ],
)
async def test_bad_keys_get_an_error_and_nothing_else(url, path):
    answer = await raw(url, f"GET {path} HTTP/1.1")
    assert answer.split(b" ")[1] in (b"400", b"404")
    body = json.loads(answer.split(b"\r\n\r\n", 1)[1])
    assert set(body) == {"error", "status", "request_id"}
    assert "root:" not in body["error"]


@pytest.mark.parametrize("method", ["POST", "PATCH", "OPTIONS", "TRACE", "PROPFIND"])
async def test_other_methods_are_not_offered(url, client, store, method):
    for path in (BLOB, "", "absent"):
        async with client.request(method, f"{url}/{path}", data=b"x") as response:
            assert response.status == 405
            assert response.headers["Allow"] == "GET, HEAD, PUT, DELETE"
            assert (await response.json())["status"] == 405
    async with client.put(f"{url}/healthz") as response:
        assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")
    assert store.get(BLOB) == DATA


@pytest.mark.parametrize("expect", ["100-continue", "anything"])
async def test_a_target_that_is_no_path_is_refused_as_any_other_whatever_it_expects(url, expect):
    answer = await raw(url, "OPTIONS * HTTP/1.1", f"Expect: {expect}")
    assert answer.startswith(b"HTTP/1.1 405 ")
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["status"] == 405


async def test_dates(url, client, store):
    async with client.get(f"{url}/{BLOB}") as response:
        date = response.headers["Last-Modified"]
    assert parsedate_to_datetime(date).timestamp() == int(store.stat(BLOB).modified)
    long_ago = "Sat, 01 Jan 2000 00:00:00 GMT"
    too_late = "Mon, 01 Jan 2020 00:00:00 +99999999999999999999"
    for field, value, status in [
        ("If-Modified-Since", too_late, 200),
        ("If-Unmodified-Since", too_late, 200),
        ("If-Modified-Since", date, 304),
        ("If-Modified-Since", long_ago, 200),
        ("If-Unmodified-Since", date, 200),
        ("If-Unmodified-Since", long_ago, 412),
    ]:
        assert await answered(client.get(f"{url}/{BLOB}", headers={field: value})) == status


async def test_each_answer_has_a_request_id(url, client):
    for path in (BLOB, "absent", "healthz", "metrics", "?list"):
        async with client.get(f"{url}/{path}", headers={"X-Request-Id": "mine.1_a-b"}) as response:
            assert response.headers["X-Request-Id"] == "mine.1_a-b"
        seen = set()
        for bad in ("", "x" * 65, "a b", 'a"b'):
            async with client.get(f"{url}/{path}", headers={"X-Request-Id": bad}) as response:
                seen.add(response.headers["X-Request-Id"])
                if response.status == 404:
                    assert (await response.json())["request_id"] == response.headers["X-Request-Id"]
        assert len(seen) == 4
        assert not seen & {"", "a b", 'a"b'}


async def test_health_and_metrics(url, client):
    for path, text in (("healthz", "ok\n"), ("readyz", "ready\n")):
        async with client.get(f"{url}/{path}") as response:
            assert (response.status, await response.text()) == (200, text)
    for path in (BLOB, "absent"):
        async with client.get(f"{url}/{path}") as response:
            await response.read()
    async with client.get(f"{url}/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        page = await response.text()
    lines = page.splitlines()
    assert 'kvwire_http_requests_total{method="GET",status="2xx"} 3.0' in lines
    assert 'kvwire_http_requests_total{method="GET",status="4xx"} 1.0' in lines
    assert "kvwire_http_sent_bytes_total 2048.0" in lines
    assert "kvwire_http_requests_in_flight 1.0" in lines  # this one
    assert "kvwire_http_connections 1.0" in lines
    assert 'kvwire_http_request_seconds_count{method="GET"} 4.0' in lines
    assert page.endswith("\n")
    assert DIGEST not in page


class BreakingReader:
    def __init__(self, reader, store):
        self.reader = reader
        self.store = store
        self.size = reader.size
        self.etag = reader.etag
        self.close = reader.close

    def read(self, start, end):
        if start >= self.store.after:
            raise self.store.error
        return self.reader.read(start, end)


class BrokenStore(MemoryStore):
    """Fails at once, or from a given byte on."""

    def __init__(self, after=None, error=None):
        super().__init__()
        self.after = after
        self.error = error or StorageError("cannot read /secret/path: the disk is on fire")

    def snapshot(self, key):
        if self.after is None and key != "fine":
            raise self.error
        return BreakingReader(super().snapshot(key), self)

    def stat(self, _key):
        raise self.error


@pytest.mark.parametrize(("error", "status"), [(None, 503), (RuntimeError("secret"), 500)])
async def test_store_failures_tell_nothing(client, error, status, caplog):
    async with serve(BrokenStore(error=error)) as url:
        for path in ("k", "readyz"):
            async with client.get(f"{url}/{path}") as response:
                text = await response.text()
                assert response.status == status
                assert response.headers["Cache-Control"] == "no-store"
                assert "secret" not in text
                assert json.loads(text)["status"] == status
        assert await answered(client.get(f"{url}/healthz")) == 200
    assert caplog.records


class SlowProbeStore(BrokenStore):
    """Counts who asks for what is not there, and lets them wait."""

    def __init__(self, error=None):
        super().__init__(error=error)
        self.asked = 0
        self.go_on = threading.Event()

    def stat(self, _key):
        self.asked += 1
        assert self.go_on.wait(20)
        raise self.error


@pytest.mark.parametrize(("error", "status"), [(NotFoundError("readyz"), 200), (StorageError("down"), 503)])
async def test_many_probes_are_one_look_at_the_store(client, error, status, monkeypatch):
    monkeypatch.setattr("kvwire.transport.server.storage._READY_S", 1000.0)
    store = SlowProbeStore(error)
    async with serve(store) as url:

        async def probe():
            async with client.get(f"{url}/readyz") as response:
                return response.status

        probes = [asyncio.create_task(probe()) for _ in range(50)]
        async with asyncio.timeout(20):
            while b"kvwire_http_requests_in_flight 51.0" not in await raw(url, "GET /metrics HTTP/1.1"):
                await asyncio.sleep(0.01)
        store.go_on.set()
        assert await asyncio.gather(*probes) == [status] * 50
        assert await probe() == status
        assert store.asked == 1


async def test_a_failure_in_mid_answer_breaks_the_connection(client, caplog):
    store = BrokenStore(after=100)
    store.put("fine", DATA)
    async with serve(store, settings=ServerSettings(piece_bytes=100)) as url:
        for _ in range(3):
            with pytest.raises(aiohttp.ClientError):
                async with client.get(f"{url}/fine") as response:
                    await response.read()
        async with client.get(f"{url}/fine", headers={"Range": "bytes=0-50"}) as response:
            assert await response.read() == DATA[:51]
        async with client.get(f"{url}/fine", headers={"Range": "bytes=500-"}) as response:
            assert response.status == 503  # told before the status line was out
    assert all(record.levelno <= logging.WARNING for record in caplog.records)


async def test_a_client_that_leaves_is_no_failure(store, caplog):
    caplog.set_level(logging.DEBUG, "kvwire")
    store.put("big", bytes(50_000_000))
    async with serve(store) as url:
        for _ in range(3):
            reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
            writer.write(b"GET /big HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readexactly(1000)
            writer.transport.abort()
        async with asyncio.timeout(20):
            while b"kvwire_http_requests_in_flight 1.0" not in (page := await raw(url, "GET /metrics HTTP/1.1")):
                await asyncio.sleep(0.01)
        assert DATA in await raw(url, f"GET /{BLOB} HTTP/1.1")
    assert b"kvwire_store_errors_total 0.0" in page
    told = [record for record in caplog.records if "broken off" in record.getMessage()]
    assert len(told) == 3
    assert all(record.getMessage().endswith("the client went away") for record in told)
    assert all(record.levelno == logging.DEBUG for record in told)


async def test_no_second_status_line_follows_a_first(caplog):
    store = BrokenStore(after=100, error=RuntimeError("secret"))
    store.put("fine", DATA)
    async with serve(store, settings=ServerSettings(piece_bytes=100)) as url:
        answer = await raw(url, "GET /fine HTTP/1.1")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert answer.partition(b"\r\n\r\n")[2] == DATA[:100]
        assert b"kvwire_store_errors_total 1.0" in await raw(url, "GET /metrics HTTP/1.1")


class FarStore(MemoryStore):
    """A store that cannot hold a version open, and tells how much was read at a time."""

    snapshot = None

    def __init__(self):
        super().__init__()
        self.sizes = []

    def get(self, key, start=0, end=None):
        data = super().get(key, start, end)
        self.sizes.append(len(data))
        return data


async def test_a_far_store_is_read_in_growing_but_bounded_pieces(client):
    store = FarStore()
    data = bytes(range(256)) * 40_000
    store.put("far", data)
    settings = ServerSettings(piece_bytes=100_000, max_piece_bytes=1_000_000)
    async with serve(store, settings=settings) as url:
        async with client.get(f"{url}/far") as response:
            assert await response.read() == data
        assert store.sizes[:4] == [100_000, 200_000, 400_000, 800_000]
        assert max(store.sizes) == 1_000_000
        store.sizes.clear()
        async with client.get(f"{url}/far", headers={"Range": "bytes=5-99"}) as response:
            assert await response.read() == data[5:100]
        assert store.sizes == [95]


async def test_a_replaced_object_is_still_sent_whole(client, store):
    big, other = b"a" * 8_000_000, b"b" * 8_000_000
    store.put("k", big)
    async with serve(store) as url, client.get(f"{url}/k") as response:
        first = await response.content.readexactly(10)
        store.put("k", other)
        assert first + await response.read() == big


async def test_a_client_that_takes_nothing_is_let_go(store):
    """The client takes nothing for a while, and longer each time: the machine may be busy."""
    store.put("k", bytes(30_000_000))
    async with serve(store, settings=ServerSettings(send_s=0.2)) as url:
        host, port = url.removeprefix("http://").split(":")
        for pause_s in (0.6, 3, 15):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET /k HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await asyncio.sleep(pause_s)
            try:
                await reader.readexactly(30_000_000)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            finally:
                writer.close()
        pytest.fail("the server waited for a client that takes nothing")


async def test_requests_over_the_limit_are_sent_away(client, store):
    store.put("k", bytes(30_000_000))
    async with serve(store, settings=ServerSettings(max_requests=2)) as url:
        held = [await client.get(f"{url}/k") for _ in range(2)]
        async with client.get(f"{url}/{BLOB}") as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
        for response in held:
            response.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "example.org", "127.0.0.1.example.org"])
async def test_a_public_address_needs_a_token(host):
    assert not is_loopback(host)
    assert all(is_loopback(own) for own in ("127.0.0.1", "127.9.9.9", "::1", "localhost"))
    with pytest.raises(AuthError, match="token"):
        async with serve(MemoryStore(), host):
            pass
    with pytest.raises(AuthError):
        async with serve(MemoryStore(), host, token=""):
            pass


async def test_the_token(store, client):
    async with serve(store, token="s3cret-0123456789") as url:  # noqa: S106
        refused = [{}, *({"Authorization": words} for words in ("Bearer wrong", "Basic s3cret-0123456789", "x"))]
        for headers in refused:
            for path in (BLOB, "absent", "metrics", "../x"):
                async with client.get(f"{url}/{path}", headers=headers) as response:
                    assert response.status == 401
                    assert response.headers["WWW-Authenticate"] == "Bearer"
        for path in ("healthz", "readyz"):
            assert await answered(client.get(f"{url}/{path}")) == 200
        async with client.get(f"{url}/{BLOB}", headers={"Authorization": "bearer s3cret-0123456789"}) as response:
            assert await response.read() == DATA
            assert response.headers["Cache-Control"].startswith("private, ")


async def test_an_address_in_use_is_a_storage_error():
    async with serve(MemoryStore()) as url:
        port = int(url.rsplit(":", 1)[1])
        with pytest.raises(StorageError, match="choose another"):
            async with serve(MemoryStore(), port=port):
                pass


async def test_ipv6_and_clean_shutdown(client, store):
    try:
        async with serve(store, "::1") as url:
            assert url.startswith("http://[::1]:")
            assert await answered(client.get(f"{url}/{BLOB}")) == 200
    except StorageError:
        pytest.skip("this machine has no IPv6 loopback")
    with pytest.raises(aiohttp.ClientConnectorError):
        await client.get(f"{url}/{BLOB}")
