"""Other people's programs at both ends of HTTP: nginx before a folder of blobs, curl as the client of our server."""

import hashlib
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from kvwire.errors import ArgumentError, AuthError, NotFoundError, StorageError
from kvwire.store import Catalog, FolderStore, open_object
from kvwire.store.testing.samples import blob
from kvwire.transport import HttpStore, open_session, open_source
from kvwire.transport.testing import serving

pytestmark = pytest.mark.servers


@pytest.fixture
def folder(nginx):
    with closing(FolderStore(nginx.folder)) as folder:
        yield folder
        folder.delete_many(list(folder.keys("")))


@pytest.fixture
def store(nginx, folder):
    with closing(HttpStore(nginx.url)) as store:
        yield store


def test_objects_are_read_from_nginx(folder, store):
    key, data = blob(1, 1_000_000)
    folder.put(key, data)
    folder.put("empty", b"")
    assert store.get(key) == data
    for start, end in ((0, 10), (5, 6), (999_990, None), (999_990, 2_000_000), (1_000_000, None), (7, 7)):
        assert store.get(key, start, end) == data[start:end]
    assert store.get("empty") == store.get("empty", 0, 10) == b""
    stat = store.stat(key)
    assert stat.size == len(data)
    assert stat.etag
    assert stat.modified == int(folder.stat(key).modified)
    with closing(open_object(store, key)) as reader:
        assert reader.read(10, 20) == data[10:20]
    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(lambda n: store.get(key, n, n + 99) == data[n : n + 99], range(0, 200_000, 1000)))


def test_nginx_can_only_be_read(nginx, folder, store):
    folder.put("a/k", b"x")
    for call in (lambda: store.put("a/k", b"y"), lambda: store.create("a/j", b"y"), lambda: store.delete("a/k")):
        with pytest.raises(StorageError, match="read-only"):
            call()
    with pytest.raises(ArgumentError, match="cannot list"):
        list(store.keys(""))
    for key in ("absent", "a", "a/k/deeper"):
        with pytest.raises(NotFoundError):
            store.get(key)
    assert folder.get("a/k") == b"x"
    (nginx.folder / ".own").write_text("what a store keeps for itself")
    assert curl(f"{nginx.url}/.own", token=None)[0] == 404


def test_an_index_of_nginx_is_no_listing(nginx, folder):
    folder.put("a/k", b"x")
    with closing(HttpStore(f"{nginx.url}/indexed")) as store:
        assert store.get("a/k") == b"x"
        with pytest.raises(ArgumentError, match="cannot list"):
            list(store.keys(""))


def test_nginx_may_ask_for_the_token(nginx, folder):
    folder.put("k", b"x")
    with closing(HttpStore(f"{nginx.url}/guarded", token="secret")) as store:  # noqa: S106
        assert store.get("k") == b"x"
    with closing(HttpStore(f"{nginx.url}/guarded")) as store, pytest.raises(AuthError):
        store.get("k")


def test_nginx_with_compression_still_gives_the_bytes(nginx, folder):
    folder.put("k", b"x" * 10_000)
    with closing(HttpStore(f"{nginx.url}/zipped")) as store:
        assert store.get("k") == b"x" * 10_000
        assert store.get("k", 10, 20) == b"x" * 10


def test_a_catalog_of_files_is_read_from_nginx(nginx, store):
    config, origin = "c" * 64, FolderStore(nginx.folder, catalog="files")
    entry = Catalog(origin).put_blob(config, b"blob", document_id="d", header_bytes=1, tokens=1, token_digest="1" * 64)
    catalog = Catalog(store)
    assert catalog.by_document(config, "d") == entry
    assert catalog.by_document(config, "e") is None


async def test_ranges_of_one_version_are_read_from_nginx(folder, store):
    key, data = blob(2, 3_000_000)
    folder.put(key, data)
    async with open_session() as session:
        source = open_source(store, key, session)
        for start, end in ((0, 65_536), (1_000_000, 2_000_000), (2_999_990, None)):
            pieces = []
            await source.read(start, end, lambda piece, pieces=pieces: pieces.append(bytes(piece)))
            assert b"".join(pieces) == data[start:end]
        folder.put(key, data[:-1])  # nginx's tags tell versions by second and size
        with pytest.raises(StorageError):
            await source.read(0, 100, lambda _: None)
        await source.close()


# curl


@pytest.fixture
def url(tmp_path):
    with serving(FolderStore(tmp_path / "store"), token="t") as url:  # noqa: S106
        yield url


def curl(*arguments, body=None, token="t"):  # noqa: S107
    """Status and body of curl's answer."""
    command = ["curl", "-s", "-S", "--max-time", "20", "-w", "%{stderr}%{http_code}"]
    command += ["-H", f"Authorization: Bearer {token}"] if token else []
    done = subprocess.run([*command, *arguments], input=body, capture_output=True, check=True, timeout=60)
    return int(done.stderr), done.stdout


def test_curl_writes_reads_lists_and_deletes(url, tmp_path):
    key, data = blob(3, 3_000_000)
    file = tmp_path / "blob"
    file.write_bytes(data)
    assert curl("-T", str(file), f"{url}/{key}")[0] == 201
    assert curl("-T", str(file), "-H", "If-None-Match: *", f"{url}/{key}")[0] == 412
    assert curl(f"{url}/{key}") == (200, data)
    assert curl("-r", "100-199", f"{url}/{key}") == (206, data[100:200])
    assert curl("-r", "-50", f"{url}/{key}") == (206, data[-50:])
    assert curl("-r", "3000000-", f"{url}/{key}")[0] == 416
    status, head = curl("-I", f"{url}/{key}")
    assert status == 200
    assert f'etag: "{hashlib.sha256(data).hexdigest()}"' in head.decode().lower()
    assert curl("-H", f'If-None-Match: "{hashlib.sha256(data).hexdigest()}"', f"{url}/{key}")[0] == 304
    status, page = curl(f"{url}/?list&prefix=v1/")
    listed = json.loads(page)
    assert status == 200
    assert [(one["key"], one["size"]) for one in listed["objects"]] == [(key, len(data))]
    assert not listed["truncated"]
    assert curl("-X", "DELETE", f"{url}/{key}")[0] == 204
    assert curl(f"{url}/{key}")[0] == 404


def test_curl_is_refused_as_told(url, tmp_path):
    key, data = blob(4)
    file = tmp_path / "blob"
    file.write_bytes(data[:-1])
    assert curl("-T", str(file), f"{url}/{key}")[0] == 422
    assert curl("-T", "-", f"{url}/{key}", body=data)[0] == 411  # from a pipe, hence in chunks
    assert curl("-T", str(file), f"{url}/other")[0] == 403
    assert curl(f"{url}/{key}", token=None)[0] == 401
    assert curl(f"{url}/{key}", token="x")[0] == 401  # noqa: S106
    assert curl("--path-as-is", f"{url}/../x")[0] in (400, 404)
    status, body = curl(f"{url}/{key}")
    assert status == 404
    assert json.loads(body)["status"] == 404
