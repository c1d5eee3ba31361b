"""Reading a store over HTTP, against the real server and against bad ones."""

import asyncio
import socket
import threading
from contextlib import closing

import pytest

from kvwire.errors import ArgumentError, AuthError, NotFoundError, StorageError
from kvwire.store import Catalog, MemoryStore, Store, open_object
from kvwire.transport import HttpStore, HttpStoreSettings, serve

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


async def test_it_reads_what_lies_behind(store: Store):
    assert await run(store.get, "a/k") == DATA
    assert await run(store.get, "empty") == b""
    for start, end in [(0, 10), (5, 6), (100, None), (5000, 9999), (5120, None), (9999, 10_000), (7, 7), (0, 0)]:
        assert await run(store.get, "a/k", start, end) == DATA[start:end]
    assert await run(store.get, "empty", 0, 10) == b""
    stat = await run(store.stat, "a/k")
    assert stat.size == len(DATA)
    reader = await run(open_object, store, "a/k")
    assert await run(reader.read, 3, 9) == DATA[3:9]


async def test_what_it_cannot_do(store: Store):
    for key in ("absent", "a"):
        for call in (store.get, store.stat, lambda k: store.get(k, 3, 3)):
            with pytest.raises(NotFoundError):
                await run(call, key)
    for call in (lambda: store.get("../x"), lambda: store.get("a/k", 5, 3), lambda: store.keys("")):
        with pytest.raises(ArgumentError):
            await run(call)
    for call in (lambda: store.put("k", b""), lambda: store.delete("k")):
        with pytest.raises(StorageError, match="read-only"):
            await run(call)


async def test_a_catalog_works_over_it(behind, store):
    config = "c" * 64
    writer = Catalog(behind)
    entry = writer.put_blob(config, b"blob", document_id="d", head_bytes=1, tokens=1, token_digest="1" * 64)
    digest = writer.put_profile(config, b"profile")
    writer.set_current_profile(config, digest)
    catalog = Catalog(store)
    assert await run(catalog.by_document, config, "d") == entry
    assert await run(catalog.by_tokens, config, "1" * 64) == entry
    assert await run(catalog.by_document, config, "e") is None
    assert await run(catalog.current_profile, config) == digest
    assert await run(catalog.get_profile, config, digest) == b"profile"


async def test_threads_share_it(store):
    results = await asyncio.gather(*(run(store.get, "a/k", n, n + 50) for n in range(100)))
    assert results == [DATA[n : n + 50] for n in range(100)]


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
        "ftp://h",
        "http://",
        "h:80",
        "http://h?x",
        "http://h/#x",
        "http://u:p@h",
        "http://h:99999",
        "http://h:x",
        "http://[",
    ],
)
def test_bad_addresses(url):
    with pytest.raises(ArgumentError):
        HttpStore(url)


def test_addresses_of_objects():
    assert HttpStore("https://h:1/p/").object_url("a/b") == "https://h:1/p/a/b"
    with pytest.raises(ArgumentError):
        HttpStore("https://h").object_url("../b")


@pytest.fixture
def answering():
    """A raw server that gives one fixed answer to each connection, then closes it, or stays silent."""
    listening = socket.create_server(("127.0.0.1", 0))
    held = []

    def start(answer, hold=False):
        def work():
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                connection.recv(65536)
                connection.sendall(answer)
                if hold:
                    held.append(connection)
                else:
                    connection.close()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        held.append(thread)
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield start
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    for thing in held:
        thing.join(5) if isinstance(thing, threading.Thread) else thing.close()


PARTIAL = b"HTTP/1.1 206 X\r\nContent-Range: bytes "


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
        PARTIAL + b"x\r\nContent-Length: 5\r\n\r\nabcde",
    ],
)
def test_bad_answers_are_storage_errors(answering, answer):
    with closing(HttpStore(answering(answer))) as store, pytest.raises(StorageError):
        store.get("k", 0, 10)


def test_a_silent_server_is_given_up(answering):
    store = HttpStore(answering(b"HTTP/1.1 200 X\r\nContent-Le", hold=True), settings=HttpStoreSettings(stall_s=0.2))
    with pytest.raises(StorageError, match="timed out"):
        store.get("k")


@pytest.mark.parametrize("size", ["", "Content-Length: -1\r\n", "Content-Length: " + "9" * 5000 + "\r\n"])
def test_sizes_are_checked(answering, size):
    url = answering(f"HTTP/1.1 200 X\r\n{size}\r\n".encode())
    with closing(HttpStore(url)) as store, pytest.raises(StorageError):
        store.stat("k")


def test_a_server_without_ranges_is_read_whole(answering):
    with closing(HttpStore(answering(b"HTTP/1.1 200 X\r\nContent-Length: 10\r\n\r\n0123456789"))) as store:
        assert store.get("k", 2, 5) == b"234"
