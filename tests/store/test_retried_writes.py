"""Writes that a server did and whose answers were lost: repeated, they are done once and not taken for another's."""

import hashlib
import os
import secrets
import threading
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from botocore.exceptions import ClientError

from kvwire.errors import StorageError
from kvwire.store import Catalog, FolderStore, KeySpace, MemoryStore, S3Settings, S3Store, TierSettings, open_tiers
from kvwire.store.backends.s3 import requests
from kvwire.transport import HttpStore, HttpStoreSettings, ServerSettings
from kvwire.transport.testing import serving

from ..fault_proxy import FaultKind, FaultProxy, ProxyFault
from ..s3_servers import S3Server
from ..store_wrappers import StoreWrapper

LOST = ProxyFault(FaultKind.LOST_ANSWER)
SPACE = KeySpace("ab" * 16, "cd" * 8)
ENTRY = SPACE.current_profile
PLAIN = "v1/t/c/catalog/doc/ab/one.json"
"""An entry that names nothing, so that nothing has to be there before it."""
CONTENT = os.urandom(100)
BLOB = SPACE.blob(hashlib.sha256(CONTENT).hexdigest())
PARTS = S3Settings(multipart_bytes=6 << 20, part_bytes=5 << 20)


def first(method, then=None):
    """A plan: the answer to the first request of a method is lost, and before it is repeated something happens."""
    seen = []

    def plan(request):
        if request.method != method:
            return None
        seen.append(request)
        if len(seen) == 2 and then:
            then()
        return LOST if len(seen) == 1 else None

    return plan


def pointer(digit):
    return b'{"profile_digest": "%s"}' % (digit.encode() * 64)


@pytest.fixture(params=["serve", "serve over s3", "moto", "ministack"])
def case(request, tmp_path, monkeypatch):
    settings = ServerSettings(spool_folder=tmp_path)
    with ExitStack() as stack:
        if request.param == "serve":
            behind = MemoryStore()
            proxy = stack.enter_context(FaultProxy(stack.enter_context(serving(behind, settings=settings))))
            store = HttpStore(proxy.url, settings=HttpStoreSettings(backoff_s=0.01))
        else:
            server = request.getfixturevalue("ministack_server" if request.param == "ministack" else "moto_server")
            server.set_environment(monkeypatch)
            prefix = f"r/{secrets.token_hex(8)}"
            proxy = stack.enter_context(FaultProxy(server.endpoint))
            behind = stack.enter_context(closing(S3Store(server.address(prefix))))
            ours = S3Server(proxy.url, server.access_key, server.secret).address(prefix)
            store = S3Store(ours, settings=PARTS)
            if request.param == "serve over s3":
                url = stack.enter_context(serving(stack.enter_context(closing(store)), settings=settings))
                store = HttpStore(url)
        yield SimpleNamespace(proxy=proxy, store=stack.enter_context(closing(store)), behind=behind)


def test_a_replacement_is_known_as_our_own(case):
    case.proxy.plan = first("PUT")
    assert case.store.replace(ENTRY, pointer("a"), "")
    tag = case.behind.stat(ENTRY).etag
    case.proxy.plan = first("PUT")
    assert case.store.replace(ENTRY, pointer("b"), tag)
    assert case.proxy.faults[FaultKind.LOST_ANSWER] == 2
    assert case.behind.get(ENTRY) == pointer("b")
    assert not case.store.replace(ENTRY, pointer("c"), tag)
    assert not case.store.replace(ENTRY, pointer("b"), "")  # of two that write the same, one wins


def test_what_others_wrote_in_between_stays(case):
    case.behind.put(ENTRY, pointer("a"))
    case.proxy.plan = first("PUT", lambda: case.behind.put(ENTRY, pointer("c")))
    assert not case.store.replace(ENTRY, pointer("b"), case.behind.stat(ENTRY).etag)
    assert case.behind.get(ENTRY) == pointer("c")


def test_content_and_deletions_are_done_once(case):
    case.proxy.plan = first("PUT")
    assert case.store.create(BLOB, CONTENT)
    assert not case.store.create(BLOB, CONTENT)
    case.proxy.plan = first("DELETE")
    case.store.delete(BLOB)
    assert not list(case.behind.keys(""))


def put(url, data, **headers):
    """Status and entity tag of a PUT, as any client sends it."""
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urlopen(Request(url, data, fields, method="PUT")) as answer:
            return answer.status, answer.headers["ETag"]
    except HTTPError as error:
        return error.code, error.headers["ETag"]


@pytest.mark.parametrize("over", ["memory", "s3"])
def test_any_client_of_a_server_sees_what_lies_there_where_a_condition_fails(request, tmp_path, monkeypatch, over):
    """So that it can tell its own write, whose answer it lost, from another's."""
    behind = MemoryStore()
    if over == "s3":
        server = request.getfixturevalue("moto_server")
        server.set_environment(monkeypatch)
        behind = S3Store(server.address(f"r/{secrets.token_hex(8)}"))
    digest = f'"{hashlib.sha256(CONTENT).hexdigest()}"'
    with closing(behind), serving(behind, settings=ServerSettings(spool_folder=tmp_path)) as url:
        assert put(f"{url}/{BLOB}", CONTENT, If_None_Match="*") == (201, digest)
        assert put(f"{url}/{BLOB}", CONTENT, If_None_Match="*") == (412, digest)
        for text in (pointer("a"), pointer("b")):
            is_new = text == pointer("a")
            condition = {"If_None_Match": "*"} if is_new else {"If_Match": f'"{behind.stat(ENTRY).etag}"'}
            status, tag = put(f"{url}/{ENTRY}", text, **condition)
            lies = f'"{behind.stat(ENTRY).etag}"'
            assert (status, tag) == (201, lies if over == "memory" else None)  # never one that is not the object's
            assert put(f"{url}/{ENTRY}", text, **condition) == (412, lies)


class _Parts(BaseHTTPRequestHandler):
    """S3 as far as an upload in parts goes; the first answer to ``completing`` is lost, and it is over then."""

    protocol_version = "HTTP/1.1"

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        server, status, told = self.server, 200, b""
        if "uploads" in self.path:
            told = b"<R><UploadId>u</UploadId></R>"
        elif self.command == "PUT":
            server.parts[int(self.path.partition("partNumber=")[2].partition("&")[0])] = body
        elif self.command in ("POST", "DELETE") and server.is_over:
            status, told = 404, b"<Error><Code>NoSuchUpload</Code></Error>"
        elif self.command == "POST":
            server.is_over = True
            whole = b"".join(server.parts[number] for number in sorted(server.parts))
            server.stored = whole if server.completes else bytes(len(whole))
            self.close_connection = True
            return
        elif self.command in ("GET", "HEAD"):
            start, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            told = server.stored[int(start) : int(last) + 1 if last else None]
            status = 206 if self.command == "GET" else 200
        self.send_response(status)
        self.send_header("ETag", '"e"')
        self.send_header("Content-Length", str(len(told)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{int(start) + len(told) - 1}/{len(server.stored)}")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(told)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer  # noqa: N815 - the names that http.server calls

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("completes", [True, False])
def test_an_upload_in_parts_that_was_completed_is_done(ministack_server, monkeypatch, caplog, completes):
    ministack_server.set_environment(monkeypatch)
    data = os.urandom(11 << 20)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Parts) as server:
        server.parts, server.is_over, server.stored, server.completes = {}, False, b"", completes
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"s3://bucket?endpoint=http://127.0.0.1:{server.server_address[1]}&region=us-east-1"
        try:
            with closing(S3Store(url, settings=PARTS)) as store:
                if completes:
                    store.put("k", data)
                else:
                    with pytest.raises(StorageError, match="ended from elsewhere"):
                        store.put("k", data)
        finally:
            server.shutdown()
            thread.join()
    assert (server.stored == data) == completes
    assert "unfinished upload" not in caplog.text  # there is none


@pytest.mark.parametrize("where", ["uploads", "partNumber", "uploadId"])
def test_an_upload_in_parts_survives_any_answer_that_is_lost(moto_server, monkeypatch, where):
    moto_server.set_environment(monkeypatch)
    left, data, prefix = [1], os.urandom(11 << 20), f"r/{secrets.token_hex(8)}"

    def plan(request):
        if not left or where not in request.query_names or request.method not in ("POST", "PUT"):
            return None
        left.pop()
        return LOST

    with FaultProxy(moto_server.endpoint, plan) as proxy:
        url = S3Server(proxy.url, moto_server.access_key, moto_server.secret).address(prefix)
        with closing(S3Store(url, settings=PARTS)) as store:
            store.put(BLOB, data)
            assert proxy.faults[FaultKind.LOST_ANSWER] == 1
            assert store.get(BLOB) == data


def test_aborting_what_is_over_is_no_trouble(moto_server, monkeypatch, caplog):
    moto_server.set_environment(monkeypatch)
    with closing(S3Store(moto_server.address("r"))) as store, closing(moto_server.client()) as raw:
        with pytest.raises(ClientError, match="NoSuchUpload"):
            raw.abort_multipart_upload(Bucket="kvwire", Key="r/k", UploadId="none")
        requests._abort(store._client, {"Bucket": "kvwire", "Key": "r/k"}, "none")
    assert not caplog.text


class _Dropping(StoreWrapper):
    """Does the first put of an entry, and is away then until it is told otherwise."""

    def __init__(self, inner):
        super().__init__(inner)
        self.is_away, self.has_dropped = False, threading.Event()

    def _do(self, request, call):
        if self.is_away:
            raise StorageError("the remote is away")
        found = call(request.data)
        if request.method == "put" and request.key == PLAIN and not self.has_dropped.is_set():
            self.is_away = True
            self.has_dropped.set()
            raise StorageError("the answer was lost")
        return found


def _tiers(remote, folder, backoff_s=0.001):
    settings = TierSettings(backoff_s=backoff_s, max_backoff_s=backoff_s, close_s=0.05)
    return open_tiers(remote, folder=folder, folder_bytes=1 << 20, write_back=True, settings=settings)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("others", [None, pointer("c")], ids=["nobody else", "another writer"])
@pytest.mark.parametrize("before", [None, pointer("0")], ids=["new", "old"])
def test_what_others_wrote_is_not_undone_by_an_upload_that_is_repeated(tmp_path, restarts, others, before):
    store, cache = FolderStore(tmp_path / "remote"), tmp_path / "cache"
    if before:
        store.put(PLAIN, before)
    remote = _Dropping(store)
    tiers = _tiers(remote, cache, backoff_s=3600.0 if restarts else 0.001)
    with closing(tiers):
        tiers.put(PLAIN, pointer("b"))
        assert remote.has_dropped.wait(10)
        assert store.get(PLAIN) == pointer("b")
        if others:
            store.put(PLAIN, others)
        if not restarts:
            remote.is_away = False
            tiers.flush(10)
    if restarts:
        with closing(_tiers(store, cache)) as tiers:
            tiers.flush(10)
    assert store.get(PLAIN) == (others or pointer("b"))
    assert not [path for path in cache.rglob("*") if path.suffix in {".put", ".tried"}]


@pytest.mark.parametrize("mark", [b"", b"torn", b"\xff\n"])
def test_a_mark_that_was_cut_off_costs_no_write(tmp_path, mark):
    """A process that is killed while it notes an attempt has not made it."""
    store, cache = FolderStore(tmp_path / "remote"), tmp_path / "cache"
    remote = _Dropping(store)
    remote.is_away = True
    with closing(_tiers(remote, cache, backoff_s=3600.0)) as tiers:
        tiers.put(PLAIN, pointer("b"))
    (pending,) = cache.rglob("*.put")
    pending.with_suffix(".tried").write_bytes(mark)
    pending.with_name("0000000000000099.tried").write_bytes(b"of one that is gone\n")
    with closing(_tiers(store, cache)) as tiers:
        tiers.flush(10)
    assert store.get(PLAIN) == pointer("b")
    assert not list(cache.rglob("0000000000000099.tried"))


def test_an_entry_that_was_pending_when_it_was_read_is_replaced(moto_server, monkeypatch, tmp_path):
    """S3 has tags of its own: that of what was uploaded since is another than that of what was pending."""
    moto_server.set_environment(monkeypatch)
    prefix, gate = f"r/{secrets.token_hex(8)}", threading.Event()

    class Gate(StoreWrapper):
        def put(self, key, data):
            assert gate.wait(20)
            self.inner.put(key, data)

    with closing(_tiers(Gate(S3Store(moto_server.address(prefix))), tmp_path)) as tiers:
        tiers.put(ENTRY, pointer("a"))
        tag = tiers.stat(ENTRY).etag
        gate.set()
        assert tiers.replace(ENTRY, pointer("b"), tag)
        assert tiers.get(ENTRY) == pointer("b")
        assert not tiers.replace(ENTRY, pointer("c"), tag)


def test_a_removal_that_ended_early_is_ended_by_the_next(tmp_path):
    config = "c0" * 32

    class Dying(StoreWrapper):
        left = 10

        def delete(self, key):
            self.left -= 1
            if self.left < 0:
                raise StorageError("killed")
            self.inner.delete(key)

    for left in range(3):
        with closing(FolderStore(tmp_path / str(left))) as store:
            dying = Dying(store)
            catalog = Catalog(store)
            for name in ("one", "two"):
                fields = {"header_bytes": 10, "tokens": 3, "token_digest": "ab" * 32, "levels": [("a", 100)]}
                catalog.put_blob(config, bytes(100), document_id=name, **fields)
            catalog.remove(config, "one")
            assert catalog.by_tokens(config, "ab" * 32) is not None  # the other document has the same text
            dying.left = left
            if left < 2:
                with pytest.raises(StorageError, match="killed"):
                    catalog.over(dying).remove(config, "two")
                assert catalog.remove(config, "two")
            else:
                assert catalog.over(dying).remove(config, "two")
            assert not list(store.keys(catalog.keys(config).catalog))
            assert not catalog.remove(config, "two")
