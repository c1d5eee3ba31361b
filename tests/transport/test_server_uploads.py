"""Uploads, deletions and listings: what is accepted, what is refused, and that refused bytes leave nothing."""

import asyncio
import errno
import gc
import hashlib
import io
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvwire.codec import pack_text
from kvwire.errors import StorageError
from kvwire.store import Catalog, FolderStore, MemoryStore, tenant_hash
from kvwire.transport import AccessSettings, ServerSettings, new_token, serve
from kvwire.transport.server.exchange import RefusedError
from kvwire.transport.server.metrics import ServerMetrics
from kvwire.transport.server.uploads import SpoolBudget
from kvwire.types import SEALED_MAGIC

from .conftest import answered, until

DATA = bytes(range(256)) * 8192  # 2 MiB: several batches
DIGEST = hashlib.sha256(DATA).hexdigest()
BLOB = f"v1/t/{DIGEST}.kvw"
CONFIG = "c0" * 32
ROOT = f"v1/{tenant_hash('default')}/{CONFIG[:16]}/"


@pytest.fixture(params=["memory", "folder"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else FolderStore(tmp_path / "store")


@pytest.fixture
def spool(tmp_path):
    folder = tmp_path / "spool"
    folder.mkdir()
    return folder


@pytest.fixture
async def url(store, spool):
    async with serve(store, settings=ServerSettings(spool_folder=spool, max_upload_bytes=3 << 20)) as url:
        yield url


def held_files(folder):
    """What this process still holds open below a folder, deleted or not."""
    return [link for link in Path("/proc/self/fd").iterdir() if _target(link).startswith(str(folder))]


def _target(link):
    try:
        return str(link.readlink())
    except OSError:
        return ""


def all_keys(store):
    return [one.key for one in store.scan("")]


async def metrics(client, url):
    async with client.get(f"{url}/metrics") as response:
        page = await response.text()
    rows = (line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in rows}


async def test_a_blob_is_written_and_read_back(url, client, store, spool):
    for _ in range(2):  # writing it again is no error, and heals a copy that has rotted
        async with client.put(f"{url}/{BLOB}", data=io.BytesIO(DATA)) as response:
            assert (response.status, response.headers["ETag"]) == (201, f'"{DIGEST}"')
            assert response.headers["Cache-Control"] == "no-store"
    async with client.get(f"{url}/{BLOB}", headers={"Range": "bytes=1000000-1999999"}) as response:
        assert await response.read() == DATA[1_000_000:2_000_000]
    assert store.get(BLOB) == DATA
    assert not held_files(spool)
    assert not list(spool.iterdir())
    counted = await metrics(client, url)
    assert counted["kvwire_uploads_accepted_total"] == 2
    assert counted["kvwire_http_received_bytes_total"] == 2 * len(DATA)
    assert counted["kvwire_spool_bytes"] == 0
    empty = f"v1/t/profiles/{hashlib.sha256(b'').hexdigest()}.kvp"
    assert await answered(client.put(f"{url}/{empty}", data=b"")) == 201
    assert store.get(empty) == b""


async def test_other_bytes_than_the_key_says_stay_invisible(url, client, store, spool):
    for data in (DATA[:-1], DATA + b"x", b"", b"x" * len(DATA)):
        async with client.put(f"{url}/{BLOB}", data=io.BytesIO(data)) as response:
            assert response.status == 422
            assert response.headers["Cache-Control"] == "no-store"
    assert all_keys(store) == []
    assert not held_files(spool)
    counted = await metrics(client, url)
    assert counted['kvwire_uploads_refused_total{reason="digest"}'] == 4


async def test_what_lies_there_decides(url, client, store):
    async def put(**headers):
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        async with client.put(f"{url}/{BLOB}", data=io.BytesIO(DATA), headers=headers) as response:
            return response.status

    assert await put(If_Match="*") == 412
    assert await put(If_None_Match="*") == 201
    assert await put(If_None_Match="*") == 412
    assert await put(If_Match='"other"') == 412
    assert await put(If_Match=f'"{DIGEST}"') == 201
    assert await put(If_None_Match=f'"{DIGEST}"') == 412
    assert await answered(client.delete(f"{url}/{BLOB}", headers={"If-Match": '"other"'})) == 412
    assert store.get(BLOB) == DATA


async def test_what_changed_while_the_body_came_decides(url, client, store, entries):
    """Of two that replace the same version, one wins, in whatever order their bodies come."""
    key = next(key for key in entries if key.endswith("/profile.json"))
    versions = [json.dumps({"profile_digest": digit * 64}).encode() for digit in "123"]
    store.put(key, versions[0])
    condition = f'If-Match: "{hashlib.sha256(versions[0]).hexdigest()}"'
    for method in ("PUT", "DELETE"):
        head = (f"PUT /{key} HTTP/1.1", f"Content-Length: {len(versions[1])}", condition, "Expect: 100-continue")
        reader, writer = await raw(url, head)
        assert await status_of(reader) == 100  # the condition held
        await reader.readuntil(b"\r\n")
        async with client.request(method, f"{url}/{key}", data=versions[2] if method == "PUT" else None) as response:
            assert response.status in (201, 204)
        writer.write(versions[1])
        assert await status_of(reader) == 412
        writer.close()
        left = [store.get(key)] if method == "PUT" else all_keys(store)
        assert left == ([versions[2]] if method == "PUT" else [])
        store.put(key, versions[0])


async def test_of_many_that_replace_one_version_one_wins(url, client, store, entries):
    key = next(key for key in entries if key.endswith("/profile.json"))
    store.put(key, entries[key])
    condition = {"If-Match": f'"{hashlib.sha256(entries[key]).hexdigest()}"'}

    async def replace(number):
        data = json.dumps({"profile_digest": f"{number:064x}"}).encode()
        async with client.put(f"{url}/{key}", data=data, headers=condition) as response:
            return response.status

    statuses = await asyncio.gather(*map(replace, range(20)))
    assert sorted(statuses) == [201, *[412] * 19]
    won = json.loads(store.get(key))["profile_digest"]
    assert int(won, 16) == statuses.index(201)


IN_CATALOG = [f"{ROOT}catalog/{DIGEST}.{suffix}" for suffix in ("kvw", "kvp", "kvt")]
"""A folder would keep them as rows of its database, and read all of one for each range."""
OTHERS = ["a/k", "x.kvw", "v1/t/" + "0" * 63 + ".kvw", "v1/t/" + "0" * 64 + ".kvx", "readyz2"]


@pytest.mark.parametrize("key", [*IN_CATALOG, *OTHERS])
async def test_other_keys_are_not_written(url, client, store, key):
    assert await answered(client.put(f"{url}/{key}", data=io.BytesIO(DATA))) == 403
    assert all_keys(store) == []


async def test_deleting(url, client, store):
    store.put("any/key", b"x")
    for _ in range(2):
        async with client.delete(f"{url}/any/key") as response:
            assert (response.status, await response.read()) == (204, b"")
    assert all_keys(store) == []
    for path in ("", "?list"):
        assert await answered(client.delete(f"{url}/{path}")) in (404, 405)


async def test_listing_in_pages(url, client, store):
    keys = sorted(f"v1/{n % 3}/{n:03}" for n in range(50))
    for key in keys:
        store.put(key, key.encode())
    found, after, pages = [], "", 0
    while True:
        async with client.get(
            f"{url}/", params={"list": "", "prefix": "v1/1/", "limit": "5", "after": after}
        ) as response:
            assert response.status == 200
            assert response.headers["Cache-Control"] == "no-store"
            page = await response.json()
        found += page["objects"]
        pages += 1
        if not page["truncated"]:
            break
        after = page["objects"][-1]["key"]
    wanted = [key for key in keys if key.startswith("v1/1/")]
    assert [one["key"] for one in found] == wanted
    assert pages == -(-len(wanted) // 5)
    assert all(one["size"] == len(one["key"]) and one["modified"] > 1e9 for one in found)


async def test_a_listing_that_cannot_be(url, client):
    for query in (
        *("limit=0", "limit=1001", "limit=x", "limit=-1", "limit=", "limit=%C2%B2", "prefix=/x", "prefix=..%2f"),
    ):
        assert await answered(client.get(f"{url}/?list&{query}")) == 400
    assert await answered(client.get(f"{url}/?list&after=%2fx")) == 400
    for query in ("", "?prefix=x", "?listing"):
        assert await answered(client.get(f"{url}/{query}")) == 404
    assert await answered(client.get(f"{url}/?list&" + "a=1&" * 50)) == 400


@pytest.fixture
def entries():
    """Real entries of the catalog, by key."""
    behind = MemoryStore()
    catalog = Catalog(behind)
    catalog.put_blob(CONFIG, b"blob", document_id="d", header_bytes=1, tokens=1, token_digest="1" * 64)
    catalog.profiles.set_current(CONFIG, catalog.profiles.put(CONFIG, b"profile"))
    return {one.key: behind.get(one.key) for one in behind.scan("") if one.key.endswith(".json")}


async def test_catalog_entries_are_written(url, client, store, entries):
    assert len(entries) == 3
    for key, data in entries.items():
        async with client.put(f"{url}/{key}", data=data) as response:
            assert response.status == 201
            assert response.headers["ETag"] == f'"{hashlib.sha256(data).hexdigest()}"'
        assert await answered(client.put(f"{url}/{key}", data=data, headers={"If-None-Match": "*"})) == 412
        assert store.get(key) == data
    announcement = ROOT + "catalog/collecting/" + "0" * 32 + ".json"
    text = ROOT + "texts/00/" + "0" * 64 + ".kvt"
    for added, data in ((announcement, b'{"collecting": ["x"]}'), (text, pack_text([1, 2]))):
        assert await answered(client.put(f"{url}/{added}", data=data)) == 201
    sealed = SEALED_MAGIC + b"anything"
    assert await answered(client.put(f"{url}/{key}", data=sealed)) == 201
    assert store.get(key) == sealed


async def test_entries_belong_to_their_keys(url, client, store, entries):
    document, tokens, pointer = sorted(entries, key=lambda key: ("/doc/" not in key, "/tokens/" not in key))
    other = document.replace(tenant_hash("default"), "0" * 32)
    shifted = document[:-10] + ("0" if document[-10] != "0" else "1") + document[-9:]
    fold = document.split("/")[5]
    misfolded = document.replace(f"/{fold}/", "/zz/").replace("/zz/", f"/{fold[::-1] if fold != fold[::-1] else '01'}/")
    for key, data in [
        *((document, entries[pointer]), (tokens, entries[document].replace(b"1" * 64, b"2" * 64))),
        (pointer, entries[document]),
        (other, entries[document]),  # leads readers of one tenant to another's blob
        *((shifted, entries[document]), (misfolded, entries[document]), (ROOT + "catalog/other.json", b"{}")),
        *((ROOT + "catalog/other.json", SEALED_MAGIC), ("catalog/x.json", b"{}")),
        ("a/catalog/profile.json", b'{"profile_digest": "' + b"0" * 64 + b'"}'),
        *((pointer, b'{"profile_digest": "../x"}'), (pointer, b"[]")),
        (ROOT + "catalog/collecting/" + "0" * 32 + ".json", b'{"collecting": [1]}'),
        *((ROOT + "texts/00/" + "0" * 64 + ".kvt", b"{}"), (document, b""), (document, b"{" * 100_000)),
    ]:
        assert await answered(client.put(f"{url}/{key}", data=data)) in (403, 422), key
    assert await answered(client.put(f"{url}/{document}", data=io.BytesIO(bytes((1 << 20) + 1)))) == 413
    assert all_keys(store) == []


async def raw(url, head, body=b"", *, end=False):
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, port)
    writer.write("\r\n".join([*head, "Host: localhost", "", ""]).encode() + body)
    if end:
        writer.write_eof()
    return reader, writer


async def status_of(reader):
    async with asyncio.timeout(20):
        return int((await reader.readuntil(b"\r\n")).split(b" ")[1])


async def settled(client, url):
    """Wait until the server has only the request that asks for its metrics."""
    async with asyncio.timeout(20):
        while (await metrics(client, url))["kvwire_http_requests_in_flight"] != 1:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["abort", "half-close"])
async def test_a_client_that_goes_away_leaves_nothing(url, client, store, spool, how):
    head = (f"PUT /{BLOB} HTTP/1.1", f"Content-Length: {len(DATA)}")
    reader, writer = await raw(url, head, DATA[: 3 << 19])

    async def is_spooled():
        return (await metrics(client, url))["kvwire_spool_bytes"] >= 1 << 20

    await until(is_spooled)
    assert held_files(spool)
    assert (await metrics(client, url))["kvwire_spool_bytes"] < len(DATA)
    if how == "abort":
        writer.transport.abort()
    else:
        writer.write_eof()
        await reader.read()
        writer.close()
    await settled(client, url)
    assert all_keys(store) == []
    assert not held_files(spool)
    counted = await metrics(client, url)
    assert counted["kvwire_spool_bytes"] == 0
    assert counted['kvwire_uploads_refused_total{reason="gone"}'] == 1


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ((), 411),
        (("Transfer-Encoding: chunked",), 411),
        (("Content-Length: 9999999999999999999999",), 400),
        (("Content-Length: -5",), 400),
        (("Content-Length: 5", "Content-Length: 6"), 400),
        (("Content-Length: 5", "Transfer-Encoding: chunked"), 400),
        ((f"Content-Length: {(3 << 20) + 1}",), 413),
        (("Content-Length: 5", "Content-Encoding: gzip"), 415),
    ],
)
async def test_lengths_that_cannot_be(url, store, fields, status):
    reader, writer = await raw(url, (f"PUT /{BLOB} HTTP/1.1", *fields))
    got = await status_of(reader)
    writer.close()
    assert got == status or (status == 400 and 400 <= got < 500)
    assert all_keys(store) == []


async def test_bytes_beyond_the_length_are_no_part_of_it(url, store):
    reader, writer = await raw(url, (f"PUT /{BLOB} HTTP/1.1", f"Content-Length: {len(DATA)}"), DATA + b"more\r\n\r\n")
    assert await status_of(reader) == 201
    answer = await reader.read()
    assert b" 400 Bad Request\r\n" in answer
    writer.close()
    assert store.get(BLOB) == DATA


async def test_continue_is_only_said_to_what_will_be_taken(url, store):
    expect = "Expect: 100-continue"
    reader, writer = await raw(url, (f"PUT /{BLOB} HTTP/1.1", f"Content-Length: {len(DATA)}", expect))
    assert await status_of(reader) == 100
    await reader.readuntil(b"\r\n")
    writer.write(DATA)
    assert await status_of(reader) == 201
    writer.close()
    for key in ("nothing", BLOB + "/../x"):
        reader, writer = await raw(url, (f"PUT /{key} HTTP/1.1", f"Content-Length: {len(DATA)}", expect))
        assert await status_of(reader) in (400, 403)
        writer.close()
    assert all_keys(store) == [BLOB]


async def test_a_slow_upload_is_given_up(store, spool, client):
    for settings in ({"upload_idle_s": 0.1}, {"upload_s": 0.1}):
        async with serve(store, settings=ServerSettings(spool_folder=spool, **settings)) as url:
            reader, writer = await raw(url, (f"PUT /{BLOB} HTTP/1.1", "Content-Length: 100"), b"x")
            assert await status_of(reader) == 408
            writer.close()
            assert not held_files(spool)
            assert (await metrics(client, url))['kvwire_uploads_refused_total{reason="slow"}'] == 1


async def test_uploads_share_the_spool(store, spool, client):
    settings = ServerSettings(spool_folder=spool, max_spool_bytes=len(DATA) + 10)
    async with serve(store, settings=settings) as url:
        _, writer = await raw(url, (f"PUT /{BLOB} HTTP/1.1", f"Content-Length: {len(DATA)}"), DATA[: 3 << 19])
        async with asyncio.timeout(20):
            while (await metrics(client, url))["kvwire_spool_bytes"] == 0:
                await asyncio.sleep(0.01)
        async with client.put(f"{url}/{BLOB}", data=io.BytesIO(DATA)) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "5")
        writer.transport.abort()
        await settled(client, url)
        assert await answered(client.put(f"{url}/{BLOB}", data=io.BytesIO(DATA))) == 201


def test_each_client_has_its_share_of_the_spool():
    budget = SpoolBudget(100, 40, ServerMetrics())
    with budget.share("a", 40) as one, budget.share("a", 40) as other, budget.share("b", 50) as third:
        one(40)
        other(10)
        with pytest.raises(RefusedError, match="try again"):
            other(1)
        with pytest.raises(RefusedError, match="try again"), budget.share("a", 1):
            pass
        third(50)
        with pytest.raises(RefusedError, match="try again"), budget.share("c", 1):
            pass
    with budget.share("a", 50) as again:
        again(50)
    large = SpoolBudget(100, 90, ServerMetrics())
    with large.share("a", 90) as whole:  # one upload of the largest size always fits into an empty spool
        whole(90)


async def test_announcing_much_takes_no_room_from_others(store, spool, client, tmp_path):
    made = {name: new_token() for name in ("anna", "berta")}
    entries = [{"tenant": name, "token_sha256": digest, "write": True} for name, (_, digest) in made.items()]
    tenants = tmp_path / "tenants.json"
    tenants.write_text(json.dumps(entries))
    settings = ServerSettings(spool_folder=spool, max_upload_bytes=1 << 30, max_spool_bytes=4 << 30)
    async with serve(store, access=AccessSettings(tenants=tenants), settings=settings) as url:
        writers = []
        for n in range(4):
            key = f"v1/{tenant_hash('anna')}/c/{n:064}.kvw"
            authorization = f"Authorization: Bearer {made['anna'][0]}"
            head = (f"PUT /{key} HTTP/1.1", f"Content-Length: {1 << 30}", authorization, "Expect: 100-continue")
            reader, writer = await raw(url, head, b"x")
            assert await status_of(reader) == 100
            writers.append(writer)
        key = f"v1/{tenant_hash('berta')}/c/{DIGEST}.kvw"
        headers = {"Authorization": f"Bearer {made['berta'][0]}"}
        assert await answered(client.put(f"{url}/{key}", data=io.BytesIO(DATA), headers=headers)) == 201
        for writer in writers:
            writer.transport.abort()


class RefusingStore(MemoryStore):
    """A store that cannot write."""

    def put(self, *_):
        msg = "cannot write /secret/disk"
        raise StorageError(msg) from OSError(errno.ENOSPC, "no space left on /secret/disk")


async def test_a_full_disk_is_told_as_such(client, spool, caplog):
    store = RefusingStore()
    async with serve(store, settings=ServerSettings(spool_folder=spool)) as url:
        async with client.put(f"{url}/{BLOB}", data=io.BytesIO(DATA)) as response:
            assert response.status == 507
            assert "secret" not in await response.text()
        counted = await metrics(client, url)
        assert counted['kvwire_uploads_refused_total{reason="disk_full"}'] == 1
    assert "no space is left" in caplog.text
    gc.collect()
    assert not held_files(spool)


FULL_SPOOL = """
import asyncio, hashlib, resource, sys, aiohttp
from pathlib import Path
from kvwire.store import MemoryStore
from kvwire.transport import ServerSettings, serve

async def main(folder):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    data = bytes(3 << 20)
    store = MemoryStore()
    async with serve(store, settings=ServerSettings(spool_folder=folder)) as url, aiohttp.ClientSession() as client:
        async with client.put(f"{url}/{hashlib.sha256(data).hexdigest()}.kvw", data=data) as response:
            print(response.status, (await response.json())["error"])
        data = data[:1000]
        async with client.put(f"{url}/{hashlib.sha256(data).hexdigest()}.kvw", data=data) as response:
            print(response.status, len(list(store.scan(""))), len(list(folder.iterdir())))

asyncio.run(main(Path(sys.argv[1])))
"""


def test_a_spool_that_takes_no_more(spool):
    done = subprocess.run(
        [sys.executable, "-P", "-c", FULL_SPOOL, spool], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.splitlines() == ["507 no space is left: delete something or try again later", "201 1 0"], done


async def test_the_store_gets_a_view_and_no_copy(client, spool):
    class Watching(MemoryStore):
        def put(self, key, data):
            self.kind = type(data)
            self.thread = threading.current_thread()
            super().put(key, data)

    store = Watching()
    settings = ServerSettings(spool_folder=spool)
    async with serve(store, settings=settings) as url, client.put(f"{url}/{BLOB}", data=io.BytesIO(DATA)) as response:
        assert response.status == 201
    assert store.kind is memoryview
    assert store.thread is not threading.main_thread()


async def test_a_folder_spools_inside_itself(client, tmp_path):
    store = FolderStore(tmp_path / "new" / "folder")
    async with serve(store) as url:
        _, writer = await raw(url, (f"PUT /{BLOB} HTTP/1.1", f"Content-Length: {len(DATA)}"), b"x")
        await until(lambda: held_files(store.root))
        assert all_keys(store) == []
        writer.transport.abort()
        await settled(client, url)
        assert not held_files(store.root)
    assert json.dumps([path.name for path in store.root.rglob("*")]) == "[]"
