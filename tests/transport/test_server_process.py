"""``kvwire serve``, ``sign`` and ``token`` as processes: options, signals, logs, exit codes."""

import contextlib
import hashlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest
from click.testing import CliRunner

from kvwire.cli import serve
from kvwire.errors import ArgumentError, AuthError, KvwireError, NotFoundError, StorageError
from kvwire.store import FolderStore, tenant_hash

from ..store.conftest import until

DATA = bytes(range(256)) * 8
DIGEST = hashlib.sha256(DATA).hexdigest()
BLOB = f"v1/{tenant_hash('anna')}/{'c0' * 8}/{DIGEST[:2]}/{DIGEST}.kvw"


def run(command, *words):
    result = CliRunner().invoke(command, [str(word) for word in words], catch_exceptions=True)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(autouse=True)
def logging_as_before():
    """The command sets up the process's logging; this process is not its own."""
    root, own = logging.getLogger(), logging.getLogger("kvwire")
    handlers, levels = root.handlers[:], (root.level, own.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    own.setLevel(levels[1])


@pytest.fixture
def files(tmp_path):
    """A store with one blob, a tenants file and a signing keys' file; and anna's token."""
    store = FolderStore(tmp_path / "store")
    store.put(BLOB, DATA)
    token, line = run(serve.token, "--tenant", "anna").output.splitlines()
    (tmp_path / "tenants.json").write_text(f"[{line}]")
    (tmp_path / "keys.json").write_text(json.dumps({"k": {"secret": "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="}}))
    for name in ("keys.json", "tenants.json"):
        (tmp_path / name).chmod(0o600)
    return tmp_path, token


def fetch(url, token=None):
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_a_server_from_start_to_end(files):
    folder, token = files
    tenants = folder / "tenants.json"
    command = [sys.executable, "-P", "-m", "kvwire", "serve", "--port", "0", "--json"]
    settings = {
        "KVWIRE_STORE": (folder / "store").as_uri(),
        "KVWIRE_TENANTS": str(tenants),
        "KVWIRE_SIGNING_KEYS": str(folder / "keys.json"),
        "KVWIRE_SHUTDOWN_SECONDS": "20",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=os.environ | settings, text=True, **pipes) as process:
        lines = []
        reading = threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True)
        reading.start()
        url = json.loads(process.stdout.readline())["url"]
        assert fetch(f"{url}/{BLOB}", token) == (200, DATA)
        assert fetch(f"{url}/{BLOB}")[0] == 401
        words = ("--base-url", url, "--signing-keys", folder / "keys.json", "--key-id", "k", "--seconds", "60")
        signed = run(serve.sign, BLOB, *words).output.strip()
        assert fetch(signed) == (200, DATA)

        entries = json.loads(tenants.read_text())
        about = tenants.stat()
        tenants.write_text(json.dumps([{**entries[0], "token_sha256": "0" * 64}]))
        os.utime(tenants, ns=(about.st_atime_ns, about.st_mtime_ns))
        process.send_signal(signal.SIGHUP)
        until(lambda: fetch(f"{url}/{BLOB}", token)[0] == 401)

        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as idle:
            process.send_signal(signal.SIGTERM)
            assert idle.recv(1) == b""
        assert process.wait(20) == 0
        reading.join(20)
    logged = [json.loads(line) for line in lines]
    requests = [one for one in logged if one["logger"] == "kvwire.access"]
    assert [one["status"] for one in requests][:3] == [200, 401, 200]
    assert all(one["path"] == f"/{BLOB}" for one in requests)
    assert token not in "".join(lines)
    assert signed.partition("sig=")[2] not in "".join(lines)


@pytest.mark.parametrize(
    ("words", "error", "say"),
    [
        (["--store", "memory:"], ArgumentError, "memory store"),
        (["--store", "{folder}/absent"], NotFoundError, "not a folder"),
        (["--store", "{folder}/store", "--host", "0.0.0.0"], AuthError, "tenants"),
        (["--store", "{folder}/store", "--tenants", "{folder}/absent"], StorageError, "cannot be read"),
        (["--store", "{folder}/store", "--tenants", "{folder}/keys.json"], ArgumentError, "JSON list"),
        (["--store", "{folder}/store", "--signing-keys", "{folder}/tenants.json"], ArgumentError, "JSON object"),
        (["--store", "{folder}/store", "--token", "a b"], ArgumentError, "visible ASCII"),
        (["--store", "{folder}/store", "--host", "0.0.0.0", "--token", "short"], AuthError, "16 characters"),
        (["--store", "{folder}/store", "--certificate", "{folder}/keys.json"], ArgumentError, "--private-key"),
    ],
)
def test_what_cannot_be_served(files, words, error, say):
    with pytest.raises(error, match=say) as caught:
        run(serve.serve, *[word.format(folder=files[0]) for word in words])
    assert isinstance(caught.value, KvwireError)


def test_wrong_usage(files):
    for words in (
        *(["--port", "99999"], ["--log-level", "loud"], ["--max-requests", "0"], ["--max-connections", "0"]),
        *(["--spool", files[0] / "absent"], ["--spool", files[0] / "keys.json"]),
    ):
        result = run(serve.serve, "--store", files[0] / "store", *words)
        assert result.exit_code == 2
        assert words[0] in result.output
    assert run(serve.serve).exit_code == 2


def test_a_salted_tenants_line_holds_its_namespace():
    words = ("--tenant", "anna", "--json")
    made = json.loads(run(serve.token, *words, "--salt", "pepper").output)["entry"]
    assert made == {"namespace": tenant_hash("anna", b"pepper"), "token_sha256": made["token_sha256"], "write": False}
    given = CliRunner().invoke(serve.token, words, env={"KVWIRE_SALT": "pepper"})
    assert json.loads(given.output)["entry"]["namespace"] == made["namespace"]


def test_a_server_before_a_server(files):
    """The token for the store behind is another than the one for those who ask."""
    folder, token = files
    command = [
        sys.executable,
        "-P",
        "-m",
        "kvwire",
        "serve",
        "--port",
        "0",
        "--json",
        "--log-level",
        "error",
        "--store",
    ]
    with contextlib.ExitStack() as stack:

        def start(store, **settings):
            process = subprocess.Popen([*command, store], env=os.environ | settings, text=True, stdout=subprocess.PIPE)
            stack.enter_context(process)
            stack.callback(process.terminate)
            return json.loads(process.stdout.readline())["url"]

        behind = start((folder / "store").as_uri(), KVWIRE_TENANTS=str(folder / "tenants.json"))
        before = start(behind, KVWIRE_TOKEN=token[:9], KVWIRE_STORE_TOKEN=token)
        assert fetch(f"{before}/{BLOB}", token[:9]) == (200, DATA)
        assert fetch(f"{before}/{BLOB}", token)[0] == 401


def test_tokens_are_new_each_time():
    made = [json.loads(run(serve.token, "--tenant", "t", "--write", "--json").output) for _ in range(3)]
    assert len({one["token"] for one in made}) == 3
    for one in made:
        digest = hashlib.sha256(one["token"].encode()).hexdigest()
        assert one["entry"] == {"tenant": "t", "token_sha256": digest, "write": True}


def test_signing_says_what_is_wrong(files):
    folder = files[0]
    base = ["--base-url", "https://h", "--key-id"]
    with pytest.raises(NotFoundError, match="no key"):
        run(serve.sign, BLOB, *base, "other", "--signing-keys", folder / "keys.json")
    with pytest.raises(StorageError, match="cannot be read"):
        run(serve.sign, BLOB, *base, "k", "--signing-keys", folder / "absent")
    with pytest.raises(ArgumentError):
        run(serve.sign, "../x", *base, "k", "--signing-keys", folder / "keys.json")
    told = json.loads(run(serve.sign, BLOB, *base, "k", "--signing-keys", folder / "keys.json", "--json").output)
    assert told["url"].startswith(f"https://h/{BLOB}?kid=k&exp={told['expires']}&sig=")
