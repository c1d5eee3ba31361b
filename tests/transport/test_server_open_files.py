"""A server that may open few files: who asks is answered or told to come back, and the log stays small."""

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from kvwire.store import FolderStore

from ..certificates import trusting, write_certificate
from ..store.conftest import until

DATA = bytes(range(256)) * 8
DIGEST = hashlib.sha256(DATA).hexdigest()
BLOB = f"v1/t/{DIGEST}.kvw"
FILES = 64
IDLE = 80


class Server:
    """``kvwire serve`` as a process with a low limit of open files; keeps what it logs."""

    def __init__(self, folder, *words):
        command = [sys.executable, "-P", "-m", "kvwire", "serve", "--store", str(folder), "--port", "0", "--json"]
        limited = ["sh", "-c", f'ulimit -n {FILES}; exec "$@"', "sh", *command, *map(str, words)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(limited, text=True, env=os.environ | {"KVWIRE_LOG_FORMAT": "text"}, **pipes)
        self.lines = []
        self._reading = threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True)
        self._reading.start()
        host, port = json.loads(self.process.stdout.readline())["url"].rpartition("/")[2].split(":")
        self.address = host, int(port)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(20) == 0
        self._reading.join(20)
        self.process.stdout.close()
        self.process.stderr.close()


@pytest.fixture
def folder(tmp_path):
    with contextlib.closing(FolderStore(tmp_path / "store")) as store:
        store.put(BLOB, DATA)
    return tmp_path / "store"


@pytest.fixture
def server(folder):
    with Server(folder) as server:
        yield server


def ask(connection, path, *fields):
    """Status of one answer, of which no more than the head is looked at."""
    lines = "\r\n".join([f"GET /{path} HTTP/1.1", "Host: localhost", *fields, "", ""])
    connection.settimeout(20)
    connection.sendall(lines.encode())
    return status_of(connection)


def status_of(connection):
    head = b""
    while b"\r\n\r\n" not in head and (part := connection.recv(1 << 16)):
        head += part
    return int(head.split(b" ")[1]) if head else 0


def asked(server, path):
    with socket.create_connection(server.address, timeout=20) as connection:
        return ask(connection, path)


@contextlib.contextmanager
def connected(server, count):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(server.address, timeout=20)) for _ in range(count)]


def test_connections_that_say_nothing_shut_nobody_out(server):
    with connected(server, IDLE):
        for _ in range(5):
            assert asked(server, "healthz") == 200
            assert asked(server, BLOB) == 503
    until(lambda: asked(server, BLOB) == 200)
    warned = [line for line in server.lines if " WARNING " in line]
    assert len(warned) == 1
    assert f"this process may open {FILES} files" in warned[0]
    assert sum(map(len, server.lines)) < 10_000


def test_kept_connections_give_their_places_to_new_ones(server):
    with contextlib.ExitStack() as stack:
        kept = []
        for _ in range(IDLE):
            kept.append(stack.enter_context(socket.create_connection(server.address, timeout=20)))
            assert ask(kept[-1], "healthz", "X-Request-Id: x") == 200
            assert ask(kept[-1], "healthz") == 200  # it stays open
        assert kept[0].recv(1) == b""


def test_answers_under_way_are_not_cut_for_new_connections(folder):
    big = bytes(20_000_000)
    key = f"v1/t/{hashlib.sha256(big).hexdigest()}.kvw"
    with contextlib.closing(FolderStore(folder)) as store:
        store.put(key, big)
    with Server(folder) as server, connected(server, FILES) as slow:
        statuses = []
        for connection in slow:
            with contextlib.suppress(ConnectionError):  # one too many, closed before it was heard
                statuses.append(ask(connection, key))
        assert {*statuses} <= {0, 200, 503}
        assert statuses.count(200) >= 3
        assert asked(server, "healthz") == 200
        assert asked(server, BLOB) == 503
        first = slow[0]
        taken = 0
        while taken < len(big) - (1 << 17) and (part := first.recv(1 << 20)):
            taken += len(part)
        assert taken >= len(big) - (1 << 17)
    assert not [line for line in server.lines if "Too many open files" in line]


def test_connections_without_a_handshake_shut_nobody_out(folder, tmp_path):
    files = write_certificate(tmp_path, "one")
    words = ("--certificate", files.certificate, "--private-key", files.private_key)
    with Server(folder, *words) as server, connected(server, IDLE):
        for path, status in (("healthz", 200), (BLOB, 503)):
            raw = socket.create_connection(server.address, timeout=20)
            with trusting(files).wrap_socket(raw, server_hostname=server.address[0]) as secured:
                assert ask(secured, path) == status
    assert sum(map(len, server.lines)) < 10_000


NO_FILES = """
import asyncio, logging, os, resource, sys
from kvwire.store import MemoryStore
from kvwire.transport import serve

refused, told = asyncio.Event(), logging.StreamHandler()
told.addFilter(lambda _: refused.set() or True)
logging.basicConfig(format="%(message)s", handlers=[told])

async def main():
    async with serve(MemoryStore()) as url:
        host, port = url.rpartition("/")[2].split(":")
        busy = len(os.listdir("/dev/fd")) - 1
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        code = "import socket, sys, time\\n" \\
            f"link = socket.create_connection(({host!r}, {port}))\\n" \\
            "link.sendall(b'GET /healthz HTTP/1.0\\\\r\\\\nHost: localhost\\\\r\\\\n\\\\r\\\\n')\\n" \\
            "sys.exit(0 if b' 200 ' in link.recv(99) else 1)"
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
        resource.setrlimit(resource.RLIMIT_NOFILE, (busy, hard))  # as if others had opened all
        async with asyncio.timeout(60):
            await refused.wait()
        await asyncio.sleep(1)  # for what it would tell again
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        async with asyncio.timeout(20):
            assert await client.wait() == 0

asyncio.run(main())
"""


def test_a_system_without_files_is_waited_for_and_told_once():
    done = subprocess.run([sys.executable, "-P", "-c", NO_FILES], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    (told,) = done.stderr.splitlines()
    assert "connections cannot be taken (Too many open files)" in told


LIMITS = """
import os, resource
from kvwire.errors import StorageError
from kvwire.transport import ServerSettings
from kvwire.transport.server.listening import connection_limit

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
usual = ServerSettings()
found = []
for files in (64, 128, 256, 1024, 2048, 4096):
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    most = connection_limit(usual)
    assert 2 * most + 3 * min(most, usual.threads) + 16 <= files
    found.append(most)
assert found == sorted(found) and found[0] >= 4 and found[-1] == usual.max_connections
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
assert connection_limit(ServerSettings(max_connections=3)) == 3
resource.setrlimit(resource.RLIMIT_NOFILE, (24, hard))
try:
    connection_limit(usual)
except StorageError as error:
    assert "24 open files" in str(error) and "ulimit -n" in str(error)
else:
    raise AssertionError
"""


def test_the_limit_follows_the_files_that_may_be_opened():
    subprocess.run([sys.executable, "-P", "-c", LIMITS], check=True)
