"""No old TLS and no way from https to http, on either side; real sockets."""

import contextlib
import socket
import ssl
import threading
import warnings
from contextlib import closing

import pytest

from kvwire.errors import StorageError
from kvwire.store import MemoryStore
from kvwire.store.http_clients import client_tls
from kvwire.transport import HttpSource, HttpStore, HttpStoreSettings, ServerTls, open_session
from kvwire.transport.testing import serving

from ..certificates import own_context, trusting

KEY = "v1/k"
BODY = b"twelve bytes"
ANSWER = b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\nETag: "x"\r\nConnection: close\r\n\r\n' + BODY
ONCE = HttpStoreSettings(stall_s=5, attempts=1)


def old(context):
    """The same context with TLS 1.1 as the newest version, as programs had it years ago."""
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    with warnings.catch_warnings(action="ignore"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    return context


class Server:
    """Answers each connection with the same bytes, over TLS where there is a context; keeps what it was asked."""

    def __init__(self, answer, context=None):
        self._answer, self._context = answer, context
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._closed = False
        self.asked = []
        scheme = "https" if context else "http"
        self.url = f"{scheme}://127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        while not self._closed:
            connection, _ = self._listening.accept()
            connection.settimeout(10)
            with connection, contextlib.suppress(OSError), self._secured(connection) as link:  # or the client hung up
                if asked := link.recv(1 << 16):
                    self.asked.append(asked)
                    link.sendall(self._answer)

    def _secured(self, connection):
        return self._context.wrap_socket(connection, server_side=True) if self._context else connection

    def close(self):
        self._closed = True
        socket.create_connection(self._listening.getsockname(), timeout=5).close()
        self._thread.join(10)
        self._listening.close()


@pytest.fixture
def started():
    with contextlib.ExitStack() as stack:

        def start(*words):
            server = Server(*words)
            stack.callback(server.close)
            return server

        yield start


def speaks(url, context):
    """Whether a handshake succeeds."""
    host, port = url.rpartition("/")[2].split(":")
    try:
        with socket.create_connection((host, int(port)), timeout=10) as link:
            context.wrap_socket(link, server_hostname=host).close()
    except OSError:
        return False
    return True


def old_server(started, trusted):
    """A server of TLS 1.1, or none where this OpenSSL knows no such version any more."""
    server = started(ANSWER, old(own_context(trusted)))
    if not speaks(server.url, old(trusting(trusted))):
        pytest.skip("this OpenSSL has no TLS 1.1")
    return server


def test_the_server_refuses_old_versions(trusted, started):
    old_server(started, trusted)  # the client can speak it
    with serving(MemoryStore(), tls=ServerTls(trusted)) as url:
        assert not speaks(url, old(trusting(trusted)))
        assert speaks(url, trusting(trusted))
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = trusting(trusted)
            context.minimum_version = context.maximum_version = version
            assert speaks(url, context)


async def test_clients_refuse_old_versions(trusted, started):
    server = old_server(started, trusted)
    with closing(HttpStore(server.url, settings=ONCE)) as store, pytest.raises(StorageError, match="SSL"):
        store.get(KEY)
    async with open_session() as session:
        with pytest.raises(StorageError, match="connection failed"):
            await HttpSource(session, f"{server.url}/{KEY}").read(0, 12, lambda _: None)
    assert not server.asked


def test_the_clients_context_refuses_what_python_might_take():
    context = client_tls()
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.check_hostname
    assert context.verify_mode == ssl.CERT_REQUIRED


@pytest.mark.parametrize("status", ["301 Moved Permanently", "302 Found", "307 Temporary Redirect", "308 Permanent"])
async def test_nothing_leads_from_https_to_http(trusted, started, status):
    plain = started(ANSWER)
    lines = (f"HTTP/1.1 {status}", f"Location: {plain.url}/{KEY}", "Content-Length: 0", "Connection: close", "", "")
    server = started("\r\n".join(lines).encode(), own_context(trusted))
    with closing(HttpStore(server.url, token="hush", settings=ONCE)) as store:  # noqa: S106
        for ask in (store.get, store.stat, lambda key: store.put(key, BODY)):
            with pytest.raises(StorageError):
                ask(KEY)
    async with open_session() as session:
        with pytest.raises(StorageError, match="status 30"):
            await HttpSource(session, f"{server.url}/{KEY}", token="hush").read(0, 12, lambda _: None)  # noqa: S106
    assert len(server.asked) == 4
    assert not plain.asked


@pytest.mark.parametrize("spelt", ["HTTPS://{}/k", "https://{}?x=1"])
def test_a_redirect_may_spell_an_address_in_any_way(trusted, started, spelt):
    secure = started(ANSWER, own_context(trusted))
    place = spelt.format(secure.url.removeprefix("https://"))
    lines = ("HTTP/1.1 307 Temporary Redirect", f"Location: {place}", "Content-Length: 0", "Connection: close", "", "")
    plain = started("\r\n".join(lines).encode())
    with closing(HttpStore(plain.url, settings=ONCE)) as store:
        assert store.get(KEY) == BODY
    assert len(secure.asked) == 1
    (origin,) = (name for name in store._exchange._pools if name != plain.url)
    assert origin == secure.url
