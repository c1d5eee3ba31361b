"""An HTTP store's requests end in bounded time, and are sent no more often than they must be."""

import socket
import threading
import time
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from kvwire.errors import ArgumentError, StorageError
from kvwire.store import MemoryStore
from kvwire.store.testing.samples import blob
from kvwire.transport import HttpStore, HttpStoreSettings, ServerTls
from kvwire.transport.testing import serving

from ..certificates import own_context

OK = b"HTTP/1.1 200 X\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
BRIEF = HttpStoreSettings(stall_s=5, total_s=0.5)


@pytest.fixture
def talking():
    """A server that does to each connection, in a thread, what the test says, and ends that when the test ends."""
    done = threading.Event()
    threads = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def start(treat, tls=None):
            def work(connection):
                with connection, suppress(OSError):
                    if tls:
                        with tls.wrap_socket(connection, server_side=True) as secured:
                            treat(secured, done)
                    else:
                        treat(connection, done)

            def accept():
                with suppress(OSError):
                    while True:
                        connection, _ = listening.accept()
                        threads.append(threading.Thread(target=work, args=(connection,)))
                        threads[-1].start()

            threads.append(threading.Thread(target=accept))
            threads[-1].start()
            return f"http{'s' if tls else ''}://127.0.0.1:{listening.getsockname()[1]}"

        yield start
        done.set()
        listening.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    ("over", "head", "piece"),
    [
        *(("status", b"", b"H"), ("header", OK + b"X-Long: ", b"a"), ("headers", OK, b"X: y\r\n")),
        *(("tls", OK + b"X-Long: ", b"a"), ("100 Continue", b"", b"HTTP/1.1 100 Continue\r\n\r\n")),
        *(("body", OK + b"Content-Length: 1000\r\n\r\n", b"x"), ("chunk size", CHUNKED + b"5;", b"x")),
        ("trailers", CHUNKED + b"0\r\n", b"X: y\r\n"),
    ],
)
def test_an_answer_that_never_ends_is_given_up(request, talking, over, head, piece):
    asked = []

    def drip(connection, done):
        asked.append(connection.recv(65536))
        connection.sendall(head)
        for _ in range(90):
            if done.wait(0.05):
                return
            connection.sendall(piece)

    url = talking(drip, request.getfixturevalue("tls") if over == "tls" else None)
    with closing(HttpStore(url, settings=BRIEF)) as store, pytest.raises(StorageError, match=r"longer than 0\.5 s"):
        store.get("k")
    assert len(asked) == 1


@pytest.mark.parametrize("over", ["", "tls"])
def test_an_upload_that_is_taken_too_slowly_is_given_up_at_once(request, talking, over):
    taken = []

    def sip(connection, done):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        taken.append(connection)
        while not done.wait(0.05) and connection.recv(4096):
            pass

    url = talking(sip, request.getfixturevalue("tls") if over else None)
    with closing(HttpStore(url, settings=BRIEF)) as store, pytest.raises(StorageError, match="longer than"):
        store.put("k", bytes(64 << 20))
    assert len(taken) == 1


@pytest.fixture
def tls(trusted):
    return own_context(trusted)


def test_bytes_travel_over_tls(trusted):
    with serving(MemoryStore(), tls=ServerTls(trusted)) as url, closing(HttpStore(url)) as store:
        key, data = blob(1, 1 << 20)
        store.put(key, data)
        assert store.get(key) == data
        assert store.get(key, 5, 500_000) == data[5:500_000]


class Closing(BaseHTTPRequestHandler):
    """Answers the first requests of a connection, as many as its server says, and hangs up at the next."""

    protocol_version = "HTTP/1.1"

    def setup(self):
        super().setup()
        self.left = next(self.server.patience, 0)

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.command, len(body)))
        self.left -= 1
        if self.left < 0:
            self.close_connection = True
            return
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    do_GET = do_PUT = answer  # noqa: N815 - http.server's names

    def log_message(self, *_):
        pass


@pytest.fixture
def closing_server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Closing) as listening:
        listening.asked = []
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield SimpleNamespace(url=f"http://127.0.0.1:{listening.server_address[1]}", listening=listening)
        listening.shutdown()
        thread.join()


def test_a_kept_connection_that_was_closed_costs_no_pause_and_no_attempt(closing_server):
    closing_server.listening.patience = iter([1, 1])
    settings = HttpStoreSettings(attempts=1, backoff_s=60)
    began = time.monotonic()
    with closing(HttpStore(closing_server.url, settings=settings)) as store:
        assert store.get("k") == b"ok"
        store.put("k", bytes(1 << 20))
    assert time.monotonic() - began < 30
    assert closing_server.listening.asked == [("GET", 0), ("PUT", 1 << 20), ("PUT", 1 << 20)]


def test_a_body_is_sent_once_for_each_attempt(closing_server):
    closing_server.listening.patience = iter([1])
    settings = HttpStoreSettings(attempts=3, backoff_s=0.001)
    with closing(HttpStore(closing_server.url, settings=settings)) as store:
        assert store.get("k") == b"ok"
        with pytest.raises(StorageError, match="connection failed"):
            store.put("k", bytes(1 << 20))
    assert len(closing_server.listening.asked) == 1 + 1 + 3  # the kept connection, then the attempts


def test_no_attempt_begins_when_the_time_is_over(talking):
    asked = []

    def break_off(connection, done):
        asked.append(connection.recv(65536))
        connection.sendall(OK + b"Content-Length: 10\r\n\r\n")
        done.wait(0.3)

    settings = HttpStoreSettings(stall_s=5, total_s=0.7, attempts=50, backoff_s=0)
    with closing(HttpStore(talking(break_off), settings=settings)) as store, pytest.raises(StorageError):
        store.get("k")
    assert 1 <= len(asked) <= 3  # 0.3 s each


@pytest.mark.parametrize("host", ["exa mple", "exa\u2028mple", "a..b", ".b", "a" * 70, "h: 80", "h:+80", "[v1.x]"])
def test_hosts_that_cannot_be_are_refused(host):
    for scheme in ("http", "https"):
        with pytest.raises(ArgumentError, match="not the address of an http store"):
            HttpStore(f"{scheme}://{host}/")


@pytest.mark.parametrize("host", ["h", "h.", "a-b.c:80", "[::1]:80", "127.0.0.1", "a_b", "m\u00fcller.example"])
def test_hosts_that_can_be_are_taken(host):
    with closing(HttpStore(f"http://{host}/p")) as store:
        assert store.url == f"http://{host}/p"
