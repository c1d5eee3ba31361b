"""The S3 store on servers that people run: Ceph's gateway and OpenStack Swift."""

import asyncio
import secrets
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing

import pytest

from kvwire.errors import AuthError, NotFoundError, StorageError
from kvwire.store import Catalog, S3Settings, S3Store, open_object
from kvwire.store.testing.samples import blob, noise
from kvwire.transport import open_session, open_source

from ..s3_servers import BUCKET, S3Conformance

pytestmark = pytest.mark.servers
PARTS = S3Settings(multipart_bytes=8 << 20, part_bytes=5 << 20)


class TestRgw(S3Conformance):
    rounds = 4

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, rgw_server):
        return rgw_server


class TestSwift(S3Conformance):
    rounds = 2
    many_keys = 120  # it takes twenty keys in a second; the listing below is a long one
    settings = S3Settings(multipart_bytes=8 << 20, part_bytes=5 << 20, page_keys=25)

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, swift_server):
        return swift_server


@pytest.fixture(params=["rgw", "swift"])
def server(request, monkeypatch):
    server = request.getfixturevalue(f"{request.param}_server")
    server.set_environment(monkeypatch)
    return server


@pytest.fixture
def prefix():
    return f"t/{secrets.token_hex(8)}"


@pytest.fixture
def store(server, prefix):
    with closing(S3Store(server.address(prefix), settings=PARTS)) as store:
        yield store


def test_a_large_object_is_written_in_parts(server, store, prefix):
    key, data = blob(1, 23 << 20)
    store.put(key, data)
    with closing(server.client()) as raw:
        told = raw.head_object(Bucket=BUCKET, Key=f"{prefix}/{key}")
        assert told["ETag"].strip('"').endswith("-5")
        assert told["ContentType"] == "application/octet-stream"
    with closing(open_object(store, key)) as reader:
        for start, end in ((0, 100), ((5 << 20) - 50, (5 << 20) + 50), (len(data) - 10, len(data) + 10)):
            assert reader.read(start, end) == data[start:end]


def test_nothing_stays_of_an_upload_that_failed(server, store, prefix, monkeypatch):
    real = store._client._boto.upload_part

    def broken(**wanted):
        if wanted["PartNumber"] == 3:
            msg = "broken"
            raise StorageError(msg)
        return real(**wanted)

    monkeypatch.setattr(store._client._boto, "upload_part", broken)
    with pytest.raises(StorageError, match="broken"):
        store.put("k", noise(23 << 20))
    assert list(store.keys("")) == []
    with closing(server.client()) as raw:
        left = raw.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        assert not [one for one in left if one["Key"].startswith(prefix)]


def test_more_than_a_page_of_keys_is_listed_and_deleted(store):
    names = [f"l/{n:05}" for n in range(1105)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: store.put(name, b"x"), names))
    assert list(store.keys("l/")) == names
    assert list(store.keys("l/", "l/01100")) == names[1101:]
    store.delete_many(names)
    assert list(store.keys("")) == []


async def test_presigned_addresses_are_read_in_ranges(store):
    data = noise(12 << 20)
    await asyncio.to_thread(store.put, "k", data)
    got = {}

    async def read(start):
        pieces = []
        await source.read(start, start + (1 << 20), lambda piece: pieces.append(bytes(piece)))
        got[start] = b"".join(pieces)

    async with open_session() as session, aclosing_source(open_source(store, "k", session)) as source:
        await asyncio.gather(*(read(start) for start in range(0, len(data), 1 << 20)))
    assert b"".join(got[start] for start in sorted(got)) == data


def aclosing_source(source):
    source.aclose = source.close
    return aclosing(source)


def test_an_address_expires_and_is_signed_again(server, prefix):
    with closing(S3Store(server.address(prefix), settings=S3Settings(address_s=2))) as store:
        store.put("k", b"x")
        first = store.http_address("k")
        assert urllib.request.urlopen(first.url, timeout=10).read() == b"x"
        time.sleep(max(0, first.expires_at + 1.5 - time.time()))
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(first.url, timeout=10)
        assert caught.value.code == 403
        caught.value.close()
        assert urllib.request.urlopen(store.http_address("k").url, timeout=10).read() == b"x"


def test_a_wrong_secret_is_refused(server, prefix, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    with closing(S3Store(server.address(prefix))) as store:
        for call in (
            lambda: store.get("k"),
            lambda: store.stat("k"),
            lambda: store.put("k", b"x"),
            lambda: list(store.keys("")),
            lambda: store.delete_many(["k"]),
        ):
            with pytest.raises(AuthError) as caught:
                call()
            assert "hush" not in str(caught.value)


def test_a_missing_bucket_is_not_made(server):
    with closing(S3Store(server.address(bucket="nowhere"))) as store:
        for call in (lambda: store.put("k", b"x"), lambda: store.get("k"), lambda: list(store.keys(""))):
            with pytest.raises(NotFoundError, match="create-bucket"):
                call()


def test_racing_creators_leave_the_right_object(store):
    key, data = blob(5, 100_000)
    with ThreadPoolExecutor(16) as pool:
        wrote = list(pool.map(lambda _: store.create(key, data), range(16)))
    assert any(wrote)
    assert store.get(key) == data


def test_a_replaced_object_is_never_mixed(store):
    store.put("k", b"a" * 1000)
    with closing(open_object(store, "k")) as reader:
        assert reader.read(0, 500) == b"a" * 500
        store.put("k", b"b" * 1000)
        with pytest.raises(StorageError):
            reader.read(500, 1000)


def test_a_catalog_works_on_it(store):
    config = "c" * 64
    catalog = Catalog(store)
    entry = catalog.put_blob(config, b"blob", document_id="d", header_bytes=1, tokens=1, token_digest="1" * 64)
    assert catalog.by_document(config, "d") == entry
    assert catalog.by_document(config, "e") is None
