"""Reading a store over HTTP, against the real server and against bad ones."""

import asyncio
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from kvwire.errors import ArgumentError, AuthError, NotFoundError, StorageError
from kvwire.store import MemoryStore, Store
from kvwire.store.testing.samples import blob
from kvwire.transport import HttpStore, HttpStoreSettings, ServerSettings, serve

DATA = bytes(range(256)) * 20


@pytest.fixture
async def behind():
    store = MemoryStore()
    store.put("a/k", DATA)
    store.put("empty", b"")
    return store


@pytest.fixture
async def store(behind):
    async with serve(behind) as url:
        with closing(HttpStore(url)) as store:
            yield store


def run(call, *args):
    return asyncio.to_thread(call, *args)


async def test_what_it_cannot_do(store: Store):
    for key in ("absent", "a"):
        for call in (store.get, store.stat, lambda k: store.get(k, 3, 3)):
            with pytest.raises(NotFoundError):
                await run(call, key)
    for call in (lambda: store.get("../x"), lambda: store.get("a/k", 5, 3), lambda: store.keys("/")):
        with pytest.raises(ArgumentError):
            await run(call)
    with pytest.raises(AuthError, match="can be written"):
        await run(store.put, "k", b"")
    with pytest.raises(ArgumentError, match="do not belong to the key"):
        await run(store.put, blob(1)[0], b"other bytes")
    assert await run(list, store.keys("")) == ["a/k", "empty"]


async def test_who_may_only_read_is_told_so(behind):
    async with serve(behind, settings=ServerSettings(read_only=True)) as url:
        with closing(HttpStore(url)) as store:
            assert await run(store.get, "a/k") == DATA
            for call in (store.put, store.create):
                for size in (10, 20 << 20):
                    with pytest.raises(AuthError, match="may not write"):
                        await run(call, *blob(1, size))
            with pytest.raises(AuthError, match="may not write"):
                await run(store.delete, "a/k")


async def test_an_upload_over_the_servers_limit_is_told(behind):
    async with serve(behind, settings=ServerSettings(max_upload_bytes=1000)) as url:
        with closing(HttpStore(url)) as store:
            for size in (2000, 20 << 20):
                with pytest.raises(StorageError, match="larger than the server takes"):
                    await run(store.put, *blob(2, size))
            await run(store.put, *blob(3, 1000))


async def test_a_listing_is_as_long_as_it_takes(behind, store):
    names = [f"l/{n:04}" for n in range(2500)]
    for name in names:
        behind.put(name, b"x")
    assert await run(list, store.keys("l/")) == names
    assert await run(list, store.keys("l/", "l/2497")) == ["l/2498", "l/2499"]


async def test_an_address_carries_the_token_and_shows_it_to_nobody():
    with closing(HttpStore("https://h:1/p/", token="hush")) as store:  # noqa: S106
        address = store.http_address("a/b")
        assert address.url == store.object_url("a/b") == "https://h:1/p/a/b"
        assert dict(address.headers) == {"Authorization": "Bearer hush"}
        assert "hush" not in repr(address) + repr(store) + store.url
        with pytest.raises(ArgumentError):
            store.object_url("../b")


@pytest.mark.parametrize("token", ["two words", "line\n", "line\r\nX: y", "ü"])
def test_tokens_that_are_no_header_are_refused(token):
    with pytest.raises(ArgumentError) as caught:
        HttpStore("http://h", token=token)
    assert token not in str(caught.value)


async def test_the_token(behind):
    async with serve(behind, token="t") as url:  # noqa: S106
        with closing(HttpStore(url, token="t")) as store, closing(HttpStore(url)) as stranger:  # noqa: S106
            assert await run(store.get, "a/k") == DATA
            for call in (stranger.get, stranger.stat):
                with pytest.raises(AuthError):
                    await run(call, "a/k")


async def test_a_server_that_restarts_is_found_again(behind):
    async with serve(behind) as url:
        store = HttpStore(url)
        assert await run(store.get, "a/k") == DATA
    with pytest.raises(StorageError, match="connection failed"):
        await run(store.get, "a/k")
    async with serve(behind, port=int(url.rsplit(":", 1)[1])):
        assert await run(store.get, "a/k") == DATA
        store.close()


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://h", "http://", "h:80", "http://h?x", "http://h/#x", "http://u:p@h", "http://h:99999", "http://h:x"),
        *("http://[", "http://u:hush@h", "ftp://u:hush@h", "http://u:hush@h:x", "http://h?token=hush"),
    ],
)
def test_bad_addresses_are_refused_and_no_password_repeated(url):
    with pytest.raises(ArgumentError) as caught:
        HttpStore(url)
    assert "hush" not in str(caught.value)


PARTIAL = b"HTTP/1.1 206 X\r\nContent-Range: bytes "
CHUNKED = b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"garbage\r\n\r\n",
        b"HTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 X\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 X\r\nContent-Length: 1000000000000000\r\n\r\nshort",
        b"HTTP/1.1 200 X\r\nContent-Length: 10\r\n\r\nshort",
        PARTIAL + b"5-9/99\r\nContent-Length: 5\r\n\r\nabcde",
        PARTIAL + b"0-9/99\r\nContent-Length: 5\r\n\r\nabcde",
        PARTIAL + b"0-19/99\r\nContent-Length: 20\r\n\r\n" + b"x" * 20,
        *(PARTIAL + b"x\r\nContent-Length: 5\r\n\r\nabcde", CHUNKED + b"5\r\nab"),
    ],
)
def test_bad_answers_are_storage_errors(answering, answer):
    with closing(HttpStore(answering(answer))) as store, pytest.raises(StorageError):
        store.get("k", 0, 10)


def test_a_range_to_the_end_that_stops_before_it_is_an_error(answering):
    url = answering(PARTIAL + b"5-9/99\r\nContent-Length: 5\r\n\r\nabcde")
    with closing(HttpStore(url)) as store, pytest.raises(StorageError, match="ranges are broken"):
        store.get("k", 5)


def test_lookups_at_a_stopped_server_do_not_wait_for_each_other():
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:  # takes connections, answers nothing
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with closing(HttpStore(url, settings=HttpStoreSettings(stall_s=1))) as store, ThreadPoolExecutor(20) as pool:
            began = time.monotonic()
            errors = [asked.exception() for asked in [pool.submit(store.stat, f"k{n}") for n in range(20)]]
            assert time.monotonic() - began < 10  # one after the other would take 20 s
            assert all(isinstance(error, StorageError) for error in errors)


def test_more_threads_than_connections_wait_for_one(answering):
    url = answering(b"HTTP/1.1 200 X\r\nContent-Length: 2\r\n\r\nok")
    with closing(HttpStore(url, settings=HttpStoreSettings(connections=2))) as store, ThreadPoolExecutor(16) as pool:
        assert set(pool.map(lambda n: store.get(f"k{n}"), range(200))) == {b"ok"}


def test_answers_that_are_not_read_to_their_end_use_up_no_connections(answering):
    url = answering(b"HTTP/1.1 200 X\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 1_000_000)
    with closing(HttpStore(url, settings=HttpStoreSettings(connections=1, stall_s=5))) as store:
        for _ in range(5):
            assert store.get("k", 0, 10) == b"x" * 10


def test_no_more_is_read_than_asked_for(answering):
    url = answering(b"HTTP/1.1 200 X\r\n\r\n" + b"x" * 100_000, hold=True)  # a body that would never end
    with closing(HttpStore(url, settings=HttpStoreSettings(stall_s=5))) as store:
        assert store.get("k", 10, 1000) == b"x" * 990


def test_a_server_that_takes_an_upload_too_slowly_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with closing(HttpStore(url, settings=HttpStoreSettings(stall_s=0.5))) as store, pytest.raises(StorageError):
            store.put("k", bytes(64 << 20))


def test_a_folder_in_an_objects_place_is_no_object(answering):
    url = answering(b"HTTP/1.1 301 X\r\nLocation: http://elsewhere/a/k/\r\nContent-Length: 0\r\n\r\n")
    with closing(HttpStore(url)) as store:
        with pytest.raises(NotFoundError):
            store.get("a/k")
        with pytest.raises(StorageError):
            store.get("a/j")


def answer_of(status, body=""):
    data = body if isinstance(body, bytes) else body.encode()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(data)) + data


@pytest.mark.parametrize(("status", "body"), [(405, "<p>"), (403, "<p>"), (501, "<p>"), (404, "")])
def test_a_server_of_files_is_read_only_and_lists_nothing(answering, status, body):
    with closing(HttpStore(answering(answer_of(status, body)))) as store:
        for call in (lambda: store.put("k", b"x"), lambda: store.create("k", b"x")):
            with pytest.raises(StorageError, match="read-only"):
                call()
        with pytest.raises(ArgumentError, match="cannot list"):
            list(store.scan(""))


def listing(*objects, truncated=False):
    return json.dumps({"objects": objects, "truncated": truncated})


BAD_OBJECTS = [
    {"key": "b", "size": 1}, {"key": "a/..", "size": 1}, {"key": "a/b", "size": -1}, {"key": "a/b", "size": True},
    {"key": "a/b", "size": 10**18}, {"key": "a/b", "size": 1, "modified": "now"},
    {"key": "a/b", "size": 1, "modified": float("nan")}, {"key": "a/b"}, {"key": 1, "size": 1}, "a/b",
]  # fmt: skip


@pytest.mark.parametrize(
    "page",
    [
        listing({"key": "a/b", "size": 1}, {"key": "a/a", "size": 1}),
        listing({"key": "a/b", "size": 1}, {"key": "a/b", "size": 1}),
        *map(listing, BAD_OBJECTS),
        *(listing(truncated=True), listing(truncated="no"), '{"objects": {}, "truncated": false}'),
        *('{"objects": []}', '{"objects": 5, "truncated": false}'),
    ],
)
def test_listings_that_cannot_be_right_are_errors(answering, page):
    with closing(HttpStore(answering(answer_of(200, page)))) as store, pytest.raises(StorageError):
        list(store.scan("a/"))


PAGES = ["[" * 100_000, "{}", "[]", "null", '"objects"', " " * 5_000_000, "<html>"]


@pytest.mark.parametrize("body", PAGES)
def test_pages_that_are_no_listings_are_refused(answering, body):
    url = answering(answer_of(200, body))
    with closing(HttpStore(url)) as store, pytest.raises(ArgumentError, match="cannot list"):
        list(store.scan(""))


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        *((401, AuthError, "check the token"), (403, AuthError, "check the token")),
        *((404, NotFoundError, "is not in"), (410, NotFoundError, "is not in"), (429, StorageError, "busy")),
        *((503, StorageError, "busy"), (507, StorageError, "disk is full"), (418, StorageError, "status 418")),
    ],
)
def test_refusals_say_what_to_do(answering, status, kind, words):
    body = json.dumps({"error": "so it is", "status": status, "request_id": "r-1"})
    url = answering(answer_of(status, body))
    with closing(HttpStore(url, token="hush")) as store, pytest.raises(kind, match=words) as caught:  # noqa: S106
        store.get("k")
    assert "hush" not in f"{caught.value!r} {caught.value.__cause__!r}"
    if kind is not NotFoundError:
        assert "so it is; request r-1" in str(caught.value)


@pytest.mark.parametrize("body", [b"x" * 10_000_000, b'{"error": "\\u001b[31m", "request_id": "r"}', b"[" * 4000])
def test_an_error_page_is_neither_read_nor_repeated_at_length(answering, body):
    url = answering(answer_of(500, body))
    with closing(HttpStore(url)) as store, pytest.raises(StorageError, match="status 500") as caught:
        store.get("k")
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


def test_compressed_answers_are_refused(answering):
    url = answering(b"HTTP/1.1 200 X\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nok")
    with closing(HttpStore(url)) as store, pytest.raises(StorageError, match="compressed"):
        store.get("k")


def test_a_silent_server_is_given_up(answering):
    url = answering(b"HTTP/1.1 200 X\r\nContent-Le", hold=True)
    with (
        closing(HttpStore(url, settings=HttpStoreSettings(stall_s=0.2))) as store,
        pytest.raises(StorageError, match="timed out"),
    ):
        store.get("k")


@pytest.mark.parametrize("size", ["", "Content-Length: -1\r\n", "Content-Length: " + "9" * 5000 + "\r\n"])
def test_sizes_are_checked(answering, size):
    url = answering(f"HTTP/1.1 200 X\r\n{size}\r\n".encode())
    with closing(HttpStore(url)) as store, pytest.raises(StorageError):
        store.stat("k")


@pytest.mark.parametrize(
    ("answer", "span", "found"),
    [(CHUNKED + b"0\r\n\r\n", (), b"abcde"), (answer_of(200, "0123456789"), (2, 5), b"234")],
    ids=["chunked", "without ranges"],
)
def test_answers_of_other_forms_are_read(answering, answer, span, found):
    with closing(HttpStore(answering(answer))) as store:
        assert store.get("k", *span) == found
