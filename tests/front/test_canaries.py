"""Nothing that is secret is in any error, log or output: the text of documents, tokens, salts, S3 secrets, seal keys.

Each secret is a canary. Every class of error is raised for real, with all loggers at DEBUG, and all that anybody could
see is searched: records, tracebacks of whole chains, stdout and stderr.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import logging
import os
import socket
import sys
import threading
import traceback
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest
import torch

from kvwire import errors
from kvwire.cli.app import main
from kvwire.cli.say import error_as_data
from kvwire.codec import decode, encode, inspect, positions_on
from kvwire.errors import KvwireError
from kvwire.runtime.corpus import Corpus, Document
from kvwire.store import Catalog, FolderStore, Keyring, MemoryStore, tenant_hash
from kvwire.store.schemes import open_store
from kvwire.transport import AccessSettings, HttpStore, HttpStoreSettings, sign_url
from kvwire.transport.testing import serving
from kvwire.types import KVCache

from ..store_wrappers import StoreWrapper

WORDS = ("Quetzalcoatlus9137", "zephyrous")
TEXT = f"The {WORDS[0]} told the {WORDS[1]} password to nobody but its mother. " * 30
TOKEN, WRONG, SALT = "bearer-canary-4f1b9c7e2a", "wrong-canary-77aa31c0de", "salt-canary-31337"
S3_SECRET, S3_SESSION = "s3canarysecret/8842+x", "s3canarysession/5519"
SIGNING = b"signing-canary-0123456789abcdef!"
MASTER = b"master-canary-0123456789abcdef!!"
PLAIN = (*WORDS, TOKEN, WRONG, SALT, S3_SECRET, S3_SESSION)


def shapes(secret):
    """How a secret could be written."""
    data = secret if isinstance(secret, bytes) else secret.encode()
    text = data.decode()
    coded = base64.b64encode(data).decode().rstrip("=")
    return {text, repr(text)[1:-1], quote(text, safe=""), coded, base64.urlsafe_b64encode(data).decode().rstrip("="),
            data.hex(), repr(list(data))[1:-1], text.lower(), text.upper()}  # fmt: skip


class Told:
    """All that was told while a block ran."""

    def __init__(self):
        self.parts = []
        self.error = None
        self.logged_by_boto = []

    def check(self, ids):
        """botocore's own debug log quotes requests, hence session tokens; its secret it keeps."""
        assert S3_SECRET not in "".join(self.logged_by_boto)
        wanted = [shape for secret in (*PLAIN, SIGNING, MASTER) for shape in shapes(secret)]
        wanted += [", ".join(map(str, ids[start : start + 4])) for start in range(0, len(ids) - 4, 4)]
        found = [(each, part[:2000]) for part in self.parts for each in wanted if each in part]
        if found:  # no assertion: pytest takes minutes to compare such texts
            pytest.fail(f"told {found[0][0]!r} in: {found[0][1]}")


@contextlib.contextmanager
def watched(monkeypatch):
    """Run a block; what it logs, prints and raises is kept."""
    told, out = Told(), io.StringIO()

    class Keeper(logging.Handler):
        def emit(self, record):
            kept = told.logged_by_boto if record.name.startswith("botocore") else told.parts
            kept += [self.format(record), str(getattr(record, "request", ""))]

    keeper, root = Keeper(), logging.getLogger()
    levels = {name: logging.getLogger(name).level for name in (None, "kvwire", "aiohttp", "botocore", "urllib3")}
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    root.addHandler(keeper)
    for name in levels:
        logging.getLogger(name).setLevel(logging.DEBUG)
    try:
        yield told
    except Exception as error:  # noqa: BLE001 - whatever it is, it is looked at
        told.error = error
        told.parts += [repr(error), *traceback.format_exception(error)]
        if isinstance(error, KvwireError):
            told.parts.append(json.dumps(error_as_data(error)))
    finally:
        root.removeHandler(keeper)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        monkeypatch.undo()
        told.parts.append(out.getvalue())


class Place:
    """A store of one sealed document, behind a server with a token and signing keys; and the same store directly."""

    def __init__(self, folder, engine, model):
        self.folder, self.engine, self.model = folder, engine, model
        self.ids = tuple(engine.tokenize(TEXT))
        (folder / "texts").mkdir()
        (folder / "texts" / "letter.txt").write_text(TEXT)
        self.keys = self.file("master", base64.b64encode(MASTER))
        self.signing = self.file("signing", json.dumps({"k": {"secret": base64.b64encode(SIGNING).decode()}}).encode())
        self.store = FolderStore(folder / "store")
        self.url = ""

    def file(self, name, content):
        path = self.folder / name
        path.write_bytes(content + b"\n")
        path.chmod(0o600)
        return path

    def corpus(self, store=None, **options):
        options = {"salt": SALT.encode(), "keyring": Keyring.read(self.keys)} | options
        return Corpus(self.engine, self.store if store is None else store, **options)

    def plain(self):
        """A fresh corpus that is not sealed."""
        return Corpus(self.engine, MemoryStore())

    def blob(self):
        (cache,) = self.engine.prefill([self.ids])
        return encode(cache, None)

    def command(self, *words, token=TOKEN, store=None, keys=True, code=0):
        """The command line in this process, with secrets where users have them: in the environment."""
        environment = {"KVWIRE_TOKEN": token, "KVWIRE_SALT": SALT, "KVWIRE_STORE": store or self.url,
                       "KVWIRE_MODEL": str(self.model)}  # fmt: skip
        environment |= {"KVWIRE_KEYS": str(self.keys)} if keys else {}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["kvwire", *map(str, words)])
            ended = 0
            try:
                main()
            except SystemExit as stop:
                ended = stop.code or 0
        assert ended == code


@pytest.fixture(scope="module")
def place(tmp_path_factory, engine, demo_model, small):
    place = Place(tmp_path_factory.mktemp("canaries"), engine, demo_model)
    place.corpus().set_profile(small.profile)  # fitting another takes seconds
    access = AccessSettings(TOKEN, signing_keys=place.signing)
    with pytest.MonkeyPatch.context() as patch, closing(place.store), serving(place.store, access=access) as url:
        place.url = url
        with watched(patch) as told:
            place.command("encode", place.folder / "texts", "--json")
        told.check(place.ids)
        assert told.error is None
        assert "letter" in told.parts[-1]
        yield place


def ask(place, *words, **options):
    place.command("ask", "--docs", "letter", "--question", TEXT[:60], "--tokens", "2", *words, **options)


def stored(place, ending):
    return next(key for key in place.store.keys("") if key.endswith(ending))


@contextlib.contextmanager
def answering(answer):
    """A server that answers everything with what ``answer`` makes of the request, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def work():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.sendall(answer(connection.recv(1 << 16)))

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def echo(status):
    """An answer that quotes the request's credentials, in the form of a refusal of kvwire's server."""

    def answer(sent):
        quoted = next(line for line in sent.decode("latin-1").split("\r\n") if line.startswith("Authorization"))
        body = json.dumps({"error": f"what is {quoted}?", "request_id": quoted, "status": status})
        return f"HTTP/1.1 {status} No\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()

    return answer


class Broken(StoreWrapper):
    """Fails in a way that no store should."""

    def put(self, key, data):  # noqa: ARG002 - the store's signature
        raise RuntimeError(key)


def raw(place, head, body=b""):
    """What a client sends that is none of kvwire's."""
    host, port = place.url.rpartition("/")[2].split(":")
    with socket.create_connection((host, int(port)), timeout=20) as link:
        link.sendall(head.replace("\n", "\r\n").encode() + body)
        link.shutdown(socket.SHUT_WR)
        while link.recv(1 << 16):
            pass


def request(place, method, path, body=None, token=TOKEN):
    link = http.client.HTTPConnection(place.url.rpartition("/")[2], timeout=20)
    with closing(link):
        link.request(method, path, body, {"Authorization": f"Bearer {token}"})
        print(link.getresponse().read()[:500])  # noqa: T201 - what the client sees is looked at


def s3(place, endpoint):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("ACCESS_KEY_ID", "id"), ("SECRET_ACCESS_KEY", S3_SECRET), ("SESSION_TOKEN", S3_SESSION)):
            patch.setenv(f"AWS_{name}", value)
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        with closing(open_store(f"s3://bucket/p?endpoint=http://{endpoint}&region=us-east-1")) as store:
            store.put("v1/k", TEXT.encode())


# What is raised, by its class, or None where the command line or the server tells of it.


def version_of_the_future(place):
    blob = bytearray(place.blob())
    blob[8] = 9
    inspect(bytes(blob))


def damaged_text(place):
    corpus = place.plain()
    digest = corpus.catalog.texts.put(corpus.meta.config_digest(), place.ids)
    key = next(iter(corpus.catalog.store.keys("")))
    data = corpus.catalog.store.get(key)
    corpus.catalog.store.put(key, data[:-9] + bytes(9))
    corpus.catalog.texts.get(corpus.meta.config_digest(), digest)


def damaged_sealed_text(place):
    copy = MemoryStore()
    for key in place.store.keys(""):
        data = place.store.get(key)
        copy.put(key, data[:-1] + bytes([data[-1] ^ 1]) if key.endswith(".kvt") else data)
    corpus = place.corpus(copy)
    corpus.text(corpus.find("letter"))


def not_sealed(place):
    corpus = Corpus(place.engine, MemoryStore(), salt=SALT.encode())
    corpus.catalog.add_text(corpus.meta.config_digest(), "letter", place.ids)
    place.corpus(corpus.catalog.store).find("letter")


def another_key(place):
    ring = Keyring([bytes(32)])
    place.corpus(keyring=ring).find("letter")


def open_keyring(place):
    path = place.file("open", base64.b64encode(MASTER))
    path.chmod(0o644)
    Keyring.read(path)


def keyring_line(place):
    Keyring.read(place.file("line", base64.b64encode(MASTER)[:-5] + b"!"))


def infinite_cache(place):
    (cache,) = place.engine.prefill([place.ids])
    cache.keys[0][0, 0, 0] = torch.inf
    encode(cache, None)


def out_of_reach(place):
    (cache,) = place.engine.prefill([place.ids])
    short = replace(cache.meta.ropes[0], max_positions=1 << 10)
    meta = replace(cache.meta, ropes=(short, *cache.meta.ropes[1:]))
    positions_on(replace(cache, meta=meta), 1 << 12)


def another_profile(place):
    profile = place.corpus().profile()
    (cache,) = place.engine.prefill([place.ids])
    decode(encode(cache, profile), None)


def missed_deadline(place):
    from kvwire.runtime.loader import Loader

    with Loader(place.engine, place.corpus()) as loader:
        answer = loader.ask(["letter"], place.ids[:9], deadline_s=1e-6)
    message = f"late: {answer.reason} {answer.misses}"
    raise errors.DeadlineError(message)


def refused_load(place):
    from kvwire.runtime.loader import Loader
    from kvwire.runtime.settings import LoadSettings

    with Loader(place.engine, place.corpus(), settings=LoadSettings(on_late="refuse")) as loader:
        loader._runner._estimates.bandwidth.add(20_000, 0.0, 20.0)  # who knows nothing of the link refuses nobody
        loader.ask(["letter"], place.ids[:9], deadline_s=1e-6)


def lost_links(place):
    from kvwire.runtime.loader import Loader
    from kvwire.runtime.settings import LoadSettings

    with Loader(place.engine, place.corpus(), settings=LoadSettings(link_bound=0.1)) as loader:
        loader.ask(["letter", "letter"], place.ids[:9])


def asked_over_http(place, url=None, token=TOKEN):
    settings = HttpStoreSettings(attempts=1)
    with closing(HttpStore(url or place.url, token=token, settings=settings)) as store:
        place.corpus(store).find("letter")


def echoed(place, status):
    with answering(echo(status)) as address:
        asked_over_http(place, f"http://{address}")


def echoed_s3(place):
    xml = "<Error><Code>X</Code><Message>{}</Message></Error>"

    def answer(sent):
        body = xml.format(sent.decode("latin-1").replace("<", ""))
        return f"HTTP/1.1 400 No\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()

    with answering(answer) as address:
        s3(place, address)


def failing_server(place):
    with serving(Broken(MemoryStore()), token=TOKEN) as url, closing(HttpStore(url, token=TOKEN)) as store:
        place.plain()
        Catalog(store, salt=SALT.encode()).texts.put("c" * 64, place.ids)


def object_in_the_way(place):
    with closing(FolderStore(place.folder / "crossed")) as behind:
        behind.put("notes/a", TEXT.encode())
        behind.put("notes/a/b", TEXT.encode())


def signed_wrongly(place):
    key = stored(place, ".kvw")
    url = sign_url(place.url, key, secret=b"another" * 9, key_id="k", expires_at=4e9)
    request(place, "GET", url.removeprefix(place.url), token="")
    request(place, "GET", f"/{key}?token={TOKEN}")


def refused_uploads(place):
    root = f"/v1/{tenant_hash('default', SALT.encode())}/{'c0' * 8}/catalog"
    entry = json.dumps({"document_id": TEXT, "blob_key": TEXT}).encode()
    for path in (
        f"{root}/doc/00/{'00' * 32}.json",
        f"{root}/profile.json",
        f"/v1/x/{'0' * 64}.kvw",
        f"/{'0' * 64}.kvt",
    ):
        for body in (TEXT.encode(), entry):
            request(place, "PUT", path, body)
            request(place, "PUT", path, body, token=WRONG)


def partly_encoded(place):
    from kvwire.cli.encode import EncodeOutput
    from kvwire.offline import encode_side_by_side, find_documents

    (place.folder / "mixed").mkdir()
    place.file("mixed/latin.txt", b"caf\xe9 " + TEXT.encode())
    place.file("mixed/long.txt", TEXT.encode() * 200)
    refs = find_documents([str(place.folder / "mixed")])
    output = EncodeOutput(refs, str(place.folder / "manifest.jsonl"), as_json=False, method="kvwire")
    output.take((work.row, work.encoded) for work in encode_side_by_side(place.plain(), refs, None))
    raise output.end()


def malformed_requests(place):
    raw(place, f"GET /k HTTP/1.1\nAuthorization: Bearer {TOKEN}\nbroken {WRONG}\n\n")
    raw(place, f"GET /{TOKEN} {WRONG} HTTP/9\n\n")
    raw(
        place,
        f"PUT /v1/k.kvw HTTP/1.1\nHost: h\nAuthorization: Bearer {TOKEN}\nContent-Length: 99\n\n",
        TEXT[:9].encode(),
    )
    raw(place, f"GET /k HTTP/1.1\nHost: h\nAuthorization: Bearer {TOKEN}{'x' * 9000}\n\n")


RAISED = {
    "ArgumentError": lambda place: next(place.plain().encode([Document("d", place.ids)], encode_after=2)),
    "ArgumentError, a keyring's line": keyring_line,
    "NotFoundError": lambda place: place.corpus().find("postcard"),
    "CorruptError": damaged_text,
    "CorruptError, sealed": damaged_sealed_text,
    "TruncatedError": lambda place: inspect(place.blob()[:100]),
    "NotSealedError": not_sealed,
    "FormatVersionError": version_of_the_future,
    "AuthError": lambda place: asked_over_http(place, token=WRONG),
    "AuthError, no key": lambda place: place.corpus(keyring=None).find("letter"),
    "AuthError, another key": another_key,
    "AuthError, an open keyring": open_keyring,
    "AuthError, quoted": lambda place: echoed(place, 403),
    "DeadlineError": missed_deadline,
    "OverloadedError": refused_load,
    "StorageError": lambda place: asked_over_http(place, url="http://127.0.0.1:9"),
    "StorageError, quoted": lambda place: echoed(place, 500),
    "StorageError, S3": lambda place: s3(place, "127.0.0.1:9"),
    "StorageError, S3 that quotes": echoed_s3,
    "StorageError, a failing server": failing_server,
    "ConflictError": object_in_the_way,
    "MismatchError": another_profile,
    "RopeRegimeError": out_of_reach,
    "LinkBoundError": lost_links,
    "CacheValueError": infinite_cache,
    "PartialError": partly_encoded,
}
TOLD = {
    "asking": ask,
    "asking, as JSON": lambda place: ask(place, "--json"),
    "asking late": lambda place: ask(place, "--deadline", "0.00001", code=6),
    "a wrong token": lambda place: ask(place, token=WRONG, code=5),
    "a wrong token, as JSON": lambda place: ask(place, "--json", token=WRONG, code=5),
    "no keys": lambda place: ask(place, keys=False, code=5),
    "nobody listens": lambda place: ask(place, store="http://127.0.0.1:9", code=7),
    "an address with a password": lambda place: ask(place, store=f"http://me:{TOKEN}@127.0.0.1:9", code=2),
    "encoding again": lambda place: place.command("encode", place.folder / "texts", "--force"),
    "a wrong option": lambda place: ask(place, "--floor", "9", code=2),
    "looking at the document": lambda place: place.command("store", "stat", "letter"),
    "checking the store": lambda place: place.command("store", "verify"),
    "a signature that does not fit": signed_wrongly,
    "uploads that are refused": refused_uploads,
    "requests that are none": malformed_requests,
}


@pytest.mark.parametrize("name", RAISED)
def test_an_error_tells_no_secret(place, monkeypatch, name):
    with watched(monkeypatch) as told:
        RAISED[name](place)
    told.check(place.ids)
    assert type(told.error) is getattr(errors, name.partition(",")[0]), told.error


@pytest.mark.parametrize("name", TOLD)
def test_a_command_and_a_server_tell_no_secret(place, monkeypatch, name):
    with watched(monkeypatch) as told:
        TOLD[name](place)
    told.check(place.ids)
    assert told.error is None
    assert len("".join(told.parts)) > 50


def test_every_class_of_error_is_looked_at():
    classes = {each.__name__ for each in vars(errors).values() if isinstance(each, type) and each is not KvwireError}
    assert classes - {"ClassVar"} <= {name.partition(",")[0] for name in RAISED}


def test_secrets_are_not_in_what_python_shows_of_objects():
    from kvwire.cli.options import StoreOptions

    place = StoreOptions("http://h", token=TOKEN, salt=SALT)
    shown = [repr(place), repr(AccessSettings(TOKEN, metrics_token=TOKEN)), repr(Keyring([MASTER])),
             repr(Keyring([MASTER]).tenant("0" * 32)), repr(vars(KVCache)), repr(Path("x"))]  # fmt: skip
    told = Told()
    told.parts = shown
    told.check(())
