"""Both clients of a store, the one for small objects and the one for ranges, reach it in the same way; real servers."""

import asyncio
import json
import threading
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from kvwire.errors import ArgumentError, AuthError, KvwireError, NotFoundError, StorageError
from kvwire.store import Catalog, S3Settings, S3Store
from kvwire.transport import (
    HttpSource,
    HttpStore,
    HttpStoreSettings,
    RejectedError,
    open_session,
    open_source,
    read_object,
)

from ..certificates import own_context, write_certificate
from ..forward_proxy import forward_proxy
from ..posing_s3 import KEY, SECRET, posing_s3, use_keys
from ..s3_servers import fails

DATA = bytes(range(200))
ONCE = HttpStoreSettings(stall_s=5, attempts=1)
S3_ONCE = S3Settings(attempts=1, stall_s=5)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    use_keys(monkeypatch)


async def ranged(store, key="k", start=10, end=20):
    async with open_session() as session:
        source = open_source(store, key, session)
        return await read_object(source, start=start, end=end)


async def assert_reads(store, key="k"):
    """Ranges first: a loader's first request is one."""
    assert await ranged(store, key) == DATA[10:20]
    assert await asyncio.to_thread(store.get, key) == DATA
    assert (await asyncio.to_thread(store.stat, key)).size == len(DATA)


@pytest.mark.parametrize("elsewhere", [400, 301, 307])
async def test_a_bucket_in_another_region_is_found_by_both(elsewhere):
    with posing_s3(region="eu-west-1", elsewhere=elsewhere) as pose:
        pose.objects["k"] = DATA
        with closing(S3Store(pose.address(), settings=S3_ONCE)) as store:
            await assert_reads(store)
            pose.asked.clear()
            assert await ranged(store) == DATA[10:20]
            assert len(pose.asked) == 1  # the region is known from now on
            store.put("j", b"x")
            assert list(store.keys("")) == ["j", "k"]


async def test_a_region_that_the_server_keeps_to_itself_is_asked_for(monkeypatch):
    with posing_s3(region="") as pose, closing(S3Store(pose.address(), settings=S3_ONCE)) as store:
        for error in (fails(store.get, "k"), await failed(store)):
            assert "region" in str(error)
            assert "AWS_DEFAULT_REGION" in str(error)
            assert "later" not in str(error)


async def failed(store, key="k"):
    with pytest.raises(KvwireError) as caught:
        await ranged(store, key)
    return caught.value


async def test_region_endpoint_and_credentials_of_a_profile_hold_for_both(monkeypatch, tmp_path):
    use_keys(monkeypatch, None)
    with posing_s3(region="eu-west-1") as pose:
        pose.objects["k"] = DATA
        lines = ["[profile p]", "region = eu-west-1", f"endpoint_url = {pose.url}"]
        lines += [f"aws_access_key_id = {KEY}", f"aws_secret_access_key = {SECRET}"]
        (tmp_path / "config").write_text("\n".join(lines))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        with closing(S3Store("s3://bucket?profile=p", settings=S3_ONCE)) as store:
            await assert_reads(store)


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId"])
async def test_credentials_that_are_written_anew_are_found_by_both(monkeypatch, tmp_path, code):
    use_keys(monkeypatch, None)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def rotate(key):
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\naws_session_token = t\n")
        pose.keys = dict.fromkeys(pose.keys, code) | {key: None}

    with posing_s3() as pose:
        pose.objects["k"] = DATA
        rotate("FIRST")
        with closing(S3Store(pose.address(), settings=S3_ONCE)) as store:
            await assert_reads(store)
            rotate("SECOND")
            assert await ranged(store) == DATA[10:20]
            rotate("THIRD")
            assert store.stat("k").size == len(DATA)
            rotate("FOURTH")
            store.put("j", b"x")
            rotate("FIFTH")
            pose.keys = dict.fromkeys(pose.keys, code)
            assert code in str(fails(store.get, "k"))
            assert code in str(await failed(store))


async def test_an_s3_server_behind_a_proxy_is_reached_by_both(monkeypatch):
    with posing_s3() as pose:
        pose.objects["k"] = DATA
        with forward_proxy({"s3.invalid:9000": address_of(pose.url)}) as proxy:
            monkeypatch.setenv("HTTP_PROXY", proxy.url)
            with closing(S3Store(pose.address(endpoint="http://s3.invalid:9000"), settings=S3_ONCE)) as store:
                await assert_reads(store)
                store.put("j", b"x")
            assert {line.partition(" ")[0] for line in proxy.asked} == {"GET", "HEAD", "PUT"}


def address_of(url):
    parts = urlsplit(url)
    return parts.hostname, parts.port


async def test_a_web_server_behind_a_proxy_is_reached_by_both(monkeypatch, web):
    with forward_proxy({"web.invalid": address_of(web.url)}, password="me:a b") as proxy:  # noqa: S106
        monkeypatch.setenv("http_proxy", proxy.url.replace("//", "//me:a%20b@"))
        with closing(HttpStore("http://web.invalid", token="t", settings=ONCE)) as store:  # noqa: S106
            await assert_reads(store)
            await asyncio.to_thread(store.put, "j", b"x" * 100_000)
        assert "PUT http://web.invalid/j" in proxy.asked
        assert web.objects["/j"] == b"x" * 100_000
        monkeypatch.setenv("no_proxy", "web.invalid")
        with closing(HttpStore("http://web.invalid", settings=ONCE)) as store:
            assert isinstance(await failed(store), StorageError)
        before = len(proxy.asked)
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.delenv("no_proxy")
        with closing(HttpStore("http://web.invalid", settings=ONCE)) as store:
            for error in (fails(store.get, "k"), await failed(store)):
                assert "HTTP_PROXY" in str(error)
        assert len(proxy.asked) > before


@pytest.mark.parametrize("is_s3", [True, False])
async def test_https_goes_through_a_tunnel(monkeypatch, trusted, is_s3):
    with posing_s3(tls=own_context(trusted), is_public=True) as pose, forward_proxy(password="me:pw") as proxy:  # noqa: S106
        pose.objects["k"] = DATA
        monkeypatch.setenv("HTTPS_PROXY", proxy.url.replace("//", "//me:pw@"))
        host = pose.url.removeprefix("https://")
        with closing(S3Store(pose.address()) if is_s3 else HttpStore(f"{pose.url}/bucket", settings=ONCE)) as store:
            await assert_reads(store)
        assert set(proxy.asked) == {f"CONNECT {host}"}
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        with closing(S3Store(pose.address()) if is_s3 else HttpStore(f"{pose.url}/bucket", settings=ONCE)) as store:
            for error in (fails(store.get, "k"), await failed(store)):
                assert "HTTPS_PROXY" in str(error)
        asked = len(proxy.asked)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        with closing(S3Store(pose.address()) if is_s3 else HttpStore(f"{pose.url}/bucket", settings=ONCE)) as store:
            await assert_reads(store)
        assert len(proxy.asked) == asked


@pytest.mark.parametrize("named", ["socks5://me:hush@127.0.0.1:1", "http://:0", "http://me:hush@h:x"])
def test_a_proxy_that_cannot_be_used_is_told_without_its_password(monkeypatch, named):
    monkeypatch.setenv("HTTP_PROXY", named)
    error = fails(HttpStore, "http://127.0.0.1:1")
    assert isinstance(error, ArgumentError)
    assert "HTTP_PROXY" in str(error)
    assert "hush" not in f"{error!r} {error.__cause__!r}"


@pytest.mark.parametrize(
    ("variable", "is_s3"),
    [
        ("AWS_CA_BUNDLE", True),
        ("REQUESTS_CA_BUNDLE", True),
        ("SSL_CERT_FILE", True),
        ("REQUESTS_CA_BUNDLE", False),
        ("SSL_CERT_FILE", False),
    ],
)
async def test_both_trust_the_same(monkeypatch, tmp_path, variable, is_s3):
    files = write_certificate(tmp_path, "one")
    with posing_s3(tls=own_context(files), is_public=True) as pose:
        pose.objects["k"] = DATA

        def opened():
            return closing(
                S3Store(pose.address(), settings=S3_ONCE) if is_s3 else HttpStore(f"{pose.url}/bucket", settings=ONCE)
            )

        with opened() as store:
            for error in (fails(store.get, "k"), await failed(store)):
                assert "SSL_CERT_FILE" in str(error)
        monkeypatch.setenv(variable, str(files.certificate))
        with opened() as store:
            await assert_reads(store)


class Web(BaseHTTPRequestHandler):
    """Files, uploads, and the redirects and refusals that the test chose by path."""

    protocol_version = "HTTP/1.1"

    def handle_any(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        web = self.server.web
        web.asked.append((self.command, self.path, dict(self.headers)))
        status, headers, data = web.chosen.get(self.path) or self._file(web, body)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _file(self, web, body):
        if self.command == "PUT":
            web.objects[self.path] = body
            return 201, {}, b""
        data = web.objects.get(self.path)
        if data is None:
            return 404, {}, b""
        if self.headers.get("If-Match", '"1"') != '"1"':
            return 412, {}, b""
        if self.headers.get("Range"):
            start, end = self.headers["Range"].removeprefix("bytes=").split("-")
            part = data[int(start) : int(end) + 1]
            told = f"bytes {start}-{int(start) + len(part) - 1}/{len(data)}"
            return 206, {"Content-Range": told, "ETag": '"1"'}, part
        return 200, {"ETag": '"1"'}, data

    def log_message(self, *_):
        pass


for _method in ("GET", "HEAD", "PUT", "DELETE"):
    setattr(Web, f"do_{_method}", Web.handle_any)


class Site:
    def __init__(self, url):
        self.url, self.objects, self.chosen, self.asked = url, {}, {}, []


@contextmanager
def website():
    with ThreadingHTTPServer(("127.0.0.1", 0), Web) as listening:
        listening.daemon_threads = True
        listening.web = Site(f"http://127.0.0.1:{listening.server_address[1]}")
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield listening.web
        finally:
            listening.shutdown()
            thread.join()


@pytest.fixture
def web():
    with website() as web:
        web.objects["/k"] = DATA
        yield web


@pytest.fixture
def other():
    with website() as other:
        other.objects["/there/k"] = DATA
        yield other


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_both_follow_redirects_without_the_token(web, other, status):
    web.chosen["/k"] = (status, {"Location": f"{other.url}/there/k?signed=1"}, b"")
    other.objects["/there/k?signed=1"] = DATA
    with closing(HttpStore(web.url, token="hush", settings=ONCE)) as store:  # noqa: S106
        await assert_reads(store)
        other.asked.clear()
        web.asked.clear()
        async with open_session() as session:
            source = open_source(store, "k", session)
            got = [await read_object(source, start=start, end=start + 10) for start in (0, 50, 90)]
    assert b"".join(got) == DATA[:10] + DATA[50:60] + DATA[90:100]
    assert len(web.asked) == (1 if status in (301, 308) else 3)  # a permanent one is kept
    assert all("Authorization" in headers for _, _, headers in web.asked)
    assert [headers["Range"] for _, _, headers in other.asked] == ["bytes=0-9", "bytes=50-59", "bytes=90-99"]
    assert [headers.get("If-Match") for _, _, headers in other.asked] == [None, '"1"', '"1"']
    assert not any("hush" in str(headers) for _, _, headers in other.asked)


async def test_on_the_same_server_the_token_goes_along(web):
    web.chosen["/k"] = (307, {"Location": "/elsewhere"}, b"")
    web.objects["/elsewhere"] = DATA
    with closing(HttpStore(web.url, token="t", settings=ONCE)) as store:  # noqa: S106
        await assert_reads(store)
    assert all(headers["Authorization"] == "Bearer t" for _, _, headers in web.asked)


async def test_redirects_end(web):
    web.chosen["/k"] = (302, {"Location": "/k"}, b"")
    with closing(HttpStore(web.url, settings=ONCE)) as store:
        for error in (fails(store.get, "k"), await failed(store)):
            assert "redirects in a row" in str(error)
    assert len(web.asked) < 60


@pytest.mark.parametrize("location", [None, "http://me:hush@127.0.0.1/k", "ftp://h/k", "http://[::1/k"])
async def test_redirects_to_nowhere_are_told(web, location):
    web.chosen["/k"] = (301, {"Location": location} if location else {}, b"")
    with closing(HttpStore(web.url, settings=ONCE)) as store:
        for error in (fails(store.get, "k"), await failed(store)):
            assert isinstance(error, StorageError)
            assert "hush" not in str(error)
            assert "later" not in str(error)


async def test_writes_follow_where_they_stay_writes(web, other):
    for status in (307, 308):
        web.chosen["/k"] = (status, {"Location": f"{other.url}/there/k"}, b"")
        with closing(HttpStore(web.url, token="hush", settings=ONCE)) as store:  # noqa: S106
            await asyncio.to_thread(store.put, "k", b"%d" % status)
        assert other.objects["/there/k"] == b"%d" % status
    assert not any("hush" in str(headers) for _, _, headers in other.asked)
    web.chosen["/k"] = (302, {"Location": f"{other.url}/there/k"}, b"")
    with closing(HttpStore(web.url, settings=ONCE)) as store:
        assert "name the address" in str(fails(store.put, "k", b"x"))
    assert other.objects["/there/k"] == b"308"


@pytest.mark.parametrize("status", [400, 405, 414, 418])
async def test_what_stays_refused_is_asked_for_once_and_not_put_off(web, status):
    web.chosen["/k"] = (status, {}, b"")
    async with open_session() as session:
        with pytest.raises(RejectedError, match="asking again changes nothing"):
            await HttpSource(session, f"{web.url}/k").read(0, 10, lambda _: None)
    assert len(web.asked) == 1
    with closing(HttpStore(web.url, settings=ONCE)) as store:
        for error in (fails(store.get, "k"), await failed(store)):
            assert "later" not in str(error)
            assert "check the store's address" in str(error)


async def test_a_web_page_of_a_network_that_asks_for_a_login_is_no_object(web):
    """It has status 200, and says nothing of the object."""
    page = (200, {"Content-Type": "text/html; charset=utf-8"}, b"<html>Log in first")
    with closing(HttpStore(web.url, settings=ONCE)) as store:
        catalog = Catalog(store)
        entry = catalog.keys("c" * 64).document("d")
        web.chosen |= dict.fromkeys((f"/{entry}", "/k", "/?list&prefix=&after=&limit=1000"), page)
        lookups = (lambda _: catalog.by_document("c" * 64, "d"), store.stat, lambda key: store.get(key, 5, 9))
        for error in (*(fails(look, "k") for look in lookups), await failed(store)):
            assert isinstance(error, StorageError)
            assert web.url in str(error)
            assert "asks for a login first" in str(error)
        assert "asks for a login first" in str(fails(lambda _: list(store.scan("")), ""))


def refused(code):
    return 403, {}, f"<Error><Code>{code}</Code></Error>".encode() if code else b"<html>Forbidden"


@pytest.mark.parametrize(
    ("code", "token", "kind"),
    [
        ("AccessDenied", None, NotFoundError),  # buckets of S3, Google and others without the permission to list
        ("AccessDenied", "t", NotFoundError),
        ("SignatureDoesNotMatch", None, AuthError),
        ("InvalidAccessKeyId", "t", AuthError),
        ("", None, NotFoundError),  # a server of files that says so of what it may not open
        ("", "t", AuthError),  # which may be wrong
    ],
)
async def test_a_web_servers_403_is_absence_where_nothing_speaks_against_it(web, caplog, code, token, kind):
    web.chosen["/absent"] = refused(code)
    with closing(HttpStore(web.url, token=token, settings=ONCE)) as store:
        for read in (store.get, store.stat, lambda key: store.get(key, 3, 9)):
            assert isinstance(fails(read, "absent"), kind)
        assert isinstance(await failed(store, "absent"), kind)
        assert len([1 for record in caplog.records if "403" in record.message]) == (kind is NotFoundError)
        assert store.get("k") == DATA  # the token is right, then
        wanted = AuthError if code in ("SignatureDoesNotMatch", "InvalidAccessKeyId") else NotFoundError
        assert isinstance(fails(store.stat, "absent"), wanted)


async def test_what_kvwires_own_server_refuses_is_no_absence(web):
    words = json.dumps({"error": "not for you", "request_id": "r"}).encode()
    web.chosen["/k"] = (403, {}, words)
    with closing(HttpStore(web.url, settings=ONCE)) as store:
        for read in (store.get, store.stat):
            error = fails(read, "k")
            assert isinstance(error, AuthError)
            assert "not for you" in str(error)
        assert isinstance(await failed(store), AuthError)


def test_a_server_that_lists_says_404_of_what_is_absent(web):
    web.chosen["/k"] = refused("AccessDenied")
    with closing(HttpStore(web.url, settings=ONCE)) as store:
        assert isinstance(fails(store.get, "k"), NotFoundError)
        page = json.dumps({"objects": [{"key": "k", "size": 200}], "truncated": False}).encode()
        web.chosen["/?list&prefix=&after=&limit=1000"] = (200, {}, page)
        assert list(store.keys("")) == ["k"]
        for read in (store.get, store.stat):
            assert isinstance(fails(read, "k"), AuthError)  # a collector would delete what it names
