"""What only an S3 store does: parts, presigned addresses, credentials, refusals."""

import logging
import re
import secrets
import socket
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from botocore.credentials import Credentials, RefreshableCredentials

from kvwire.errors import ArgumentError, AuthError, NotFoundError, StorageError
from kvwire.store import S3Settings, S3Store, open_object
from kvwire.store.backends.s3.client import _descriptions
from kvwire.store.backends.s3.requests import part_size
from kvwire.store.testing.samples import blob, noise

from ..certificates import write_certificate
from ..s3_servers import BUCKET, fails, free_port, strict_moto

SECRET = "hush/hush+hush"  # noqa: S105
PARTS = S3Settings(multipart_bytes=6 << 20, part_bytes=5 << 20)


@pytest.fixture
def server(ministack_server, monkeypatch):
    ministack_server.set_environment(monkeypatch)
    return ministack_server


@pytest.fixture(scope="module")
def strict_server(tmp_path_factory):
    with strict_moto(tmp_path_factory.mktemp("strict")) as server:
        yield server


@pytest.fixture
def prefix():
    return f"t/{secrets.token_hex(8)}"


@pytest.fixture
def store(server, prefix):
    with closing(S3Store(server.address(prefix), settings=PARTS)) as store:
        yield store


@pytest.fixture
def raw(server):
    with closing(server.client()) as client:
        yield client


@pytest.mark.parametrize(
    ("url", "again"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("s3://bucket?endpoint=http://127.0.0.1:1/", "s3://bucket?endpoint=http://127.0.0.1:1"),
        ("s3://b.u-c/p?region=eu-1&endpoint=https%3A%2F%2Fh%3A1", "s3://b.u-c/p?endpoint=https://h:1&region=eu-1"),
    ],
)
def test_addresses_and_back(server, url, again):
    with closing(S3Store(url)) as store:
        assert store.url == again
    with closing(S3Store(again)) as store:
        assert store.url == again


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://", "does not name a bucket"),
        ("s3:bucket", "does not name a bucket"),
        ("s3://bu cket", "does not name a bucket"),
        ("s3://key:hush@bucket", "holds credentials"),
        (f"s3://key:{SECRET}@bucket", "does not name a bucket"),
        (f"s3://bucket:{SECRET}", "does not name a bucket"),
        ("s3://bucket#x", "does not name a bucket"),
        ("s3://bucket/../x", "not a key"),
        ("s3://bucket/" + "/".join(["x" * 100] * 5), "more than 500"),
        (f"s3://bucket?aws_secret_access_key={SECRET}", "no option"),
        ("s3://bucket?region=a&region=b", "twice"),
        ("s3://bucket?region=", "region is empty"),
        ("s3://bucket?region", "malformed"),
        ("s3://bucket?endpoint=ftp://h", "endpoint is not like"),
        ("s3://bucket?endpoint=h:80", "endpoint is not like"),
        ("s3://bucket?endpoint=http://h:99999", "endpoint is not like"),
        ("s3://bucket?endpoint=http://key:hush@h", "endpoint holds credentials"),
        (f"s3://bucket?endpoint=http://key:{SECRET}@h", "endpoint is not like"),
        ("s3://bucket?profile=nobody", "boto3 refused"),
        ("s3://bucket?endpoint=http://a..b", "boto3 takes no such endpoint"),
        ("s3://bucket?region=a b", "boto3 refused"),
    ],
)
def test_bad_addresses_are_refused(server, url, words):
    with pytest.raises(ArgumentError, match=words) as caught:
        S3Store(url)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [{"part_bytes": 1 << 20}, {"connections": 0}, {"stall_s": 0.0}, {"address_s": 8 * 24 * 3600}, {"page_keys": 1001}],
)
def test_settings_that_no_server_takes_are_refused(options):
    with pytest.raises(ArgumentError):
        S3Settings(**options)


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_the_environment_names_the_endpoint(server, prefix, monkeypatch, name):
    monkeypatch.setenv(name, server.endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with closing(S3Store(f"s3://{BUCKET}/{prefix}")) as store:
        store.put("a/k", b"x")
        assert store.get("a/k") == b"x"
        assert store.http_address("a/k").url.startswith(f"{server.endpoint}/{BUCKET}/{prefix}/a/k?")
        assert store.url == f"s3://{BUCKET}/{prefix}"


def test_a_named_profile_counts_where_the_environment_names_one_that_is_not_there(
    server, prefix, monkeypatch, tmp_path
):
    config = tmp_path / "config"
    config.write_text(f"[profile good]\ndata_path = {tmp_path}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_PROFILE", "missing")
    _descriptions.cache_clear()
    with closing(S3Store(f"s3://{BUCKET}/{prefix}?profile=good&endpoint={server.endpoint}&region=us-east-1")) as store:
        store.put("a/k", b"x")
        assert store.get("a/k") == b"x"


def test_whole_buckets_and_related_prefixes_are_stores_that_do_not_see_each_other(server, raw, prefix):
    raw.create_bucket(Bucket="whole")
    with closing(S3Store(server.address(bucket="whole"))) as store:
        store.put("b/k", b"x")
        store.put("a", b"y")
        assert list(store.keys("")) == ["a", "b/k"]
        assert raw.get_object(Bucket="whole", Key="b/k")["Body"].read() == b"x"
    with closing(S3Store(server.address(prefix))) as one, closing(S3Store(server.address(prefix + "b"))) as other:
        one.put("k", b"1")
        other.put("k", b"2")
        assert (list(one.keys("")), list(other.keys("")), one.get("k")) == (["k"], ["k"], b"1")


def test_objects_say_how_long_they_may_be_kept(store, raw, prefix):
    key, data = blob(1, 20)
    store.put(key, data)
    store.put("catalog/x.json", b"{}")
    told = raw.head_object(Bucket=BUCKET, Key=f"{prefix}/{key}")
    assert told["CacheControl"] == "private, max-age=31536000, immutable"
    assert told["ContentType"] == "application/octet-stream"
    assert raw.head_object(Bucket=BUCKET, Key=f"{prefix}/catalog/x.json")["CacheControl"] == "private, no-cache"


def test_a_large_object_is_written_in_parts(store, raw, prefix):
    key, data = blob(2, 12 << 20)
    store.put(key, data)
    told = raw.head_object(Bucket=BUCKET, Key=f"{prefix}/{key}")
    assert told["ETag"].strip('"').endswith("-3")
    assert told["CacheControl"] == "private, max-age=31536000, immutable"
    assert store.get(key) == data
    with closing(open_object(store, key)) as reader:
        assert reader.read(5 << 20, (5 << 20) + 9) == data[5 << 20 : (5 << 20) + 9]
        assert reader.etag == re.search("([0-9a-f]{64})", key)[1]  # which does not break the condition
    assert not store.create(key, data)


@pytest.mark.parametrize(
    ("size", "wished", "wanted"),
    [(1, 5 << 20, 5 << 20), (50_000 << 20, 5 << 20, 5 << 20), ((50_000 << 20) + 1, 5 << 20, 6 << 20)],
)
def test_parts_are_never_more_than_ten_thousand(size, wished, wanted):
    assert part_size(size, wished) == wanted
    assert -(-size // part_size(size, wished)) <= 10_000


@pytest.mark.parametrize("method", ["upload_part", "complete_multipart_upload"])
@pytest.mark.parametrize("error", [StorageError("broken"), KeyboardInterrupt()])
def test_nothing_stays_of_an_upload_that_failed(store, raw, prefix, monkeypatch, method, error):
    boto = store._client._boto
    real = getattr(boto, method)

    def broken(**wanted):
        if wanted.get("PartNumber", 2) == 2:
            raise error
        return real(**wanted)

    monkeypatch.setattr(boto, method, broken)
    with pytest.raises(type(error)):
        store.put("k", noise(12 << 20))
    assert not raw.list_multipart_uploads(Bucket=BUCKET, Prefix=f"{prefix}/k").get("Uploads")
    assert list(store.keys("")) == []


def test_an_upload_that_cannot_be_removed_is_logged(store, raw, prefix, monkeypatch, caplog):
    def refuse(**_):
        raise StorageError("the server is busy")

    monkeypatch.setattr(store._client._boto, "upload_part", refuse)
    monkeypatch.setattr(store._client._boto, "abort_multipart_upload", refuse)
    with pytest.raises(StorageError):
        store.put("k", noise(12 << 20))
    assert "unfinished upload" in caplog.text
    left = raw.list_multipart_uploads(Bucket=BUCKET, Prefix=f"{prefix}/k")["Uploads"]
    raw.abort_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/k", UploadId=left[0]["UploadId"])


def test_more_are_deleted_at_once_than_one_request_takes(store, monkeypatch):
    for key in ("a", "b"):
        store.put(key, b"x")
    sent = []
    real = store._client._boto.delete_objects
    monkeypatch.setattr(
        store._client._boto,
        "delete_objects",
        lambda **wanted: sent.append(len(wanted["Delete"]["Objects"])) or real(**wanted),
    )
    store.delete_many(["a", *(f"absent/{n}" for n in range(600)), "b"])
    assert sent == [250, 250, 102]
    assert list(store.keys("")) == []


def test_a_wrong_secret_is_refused_and_never_told(strict_server, monkeypatch, caplog, prefix):
    server = strict_server
    server.set_environment(monkeypatch)
    with closing(S3Store(server.address(prefix))) as store:
        store.put("k", b"x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    caplog.set_level(logging.INFO)
    with closing(S3Store(server.address(prefix))) as store:
        calls = (
            *(lambda: store.get("k"), lambda: store.get("k", 0, 5), lambda: store.stat("k")),
            *(lambda: store.put("k", b"x"), lambda: store.create("k", b"x"), lambda: store.delete("k")),
            *(lambda: store.delete_many(["k"]), lambda: list(store.keys("")), lambda: open_object(store, "k")),
        )
        for call in calls:
            error = fails(call)
            assert isinstance(error, AuthError), repr(error)
            assert SECRET not in f"{error!r} {error.__cause__!r}"
        assert SECRET not in repr(store) + repr(vars(store)) + store.url + caplog.text


def test_half_of_the_credentials_are_an_auth_error(server, monkeypatch):
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert isinstance(fails(S3Store, server.address()), AuthError)


def test_a_missing_bucket_is_not_made(server, raw):
    with closing(S3Store(server.address(bucket="nowhere"))) as store:
        for call in (
            lambda: store.get("k"),
            lambda: store.put("k", b"x"),
            lambda: store.create("k", b"x"),
            lambda: list(store.keys("")),
        ):
            error = fails(call)
            assert isinstance(error, NotFoundError)
            assert "create-bucket" in str(error)
        assert isinstance(fails(store.stat, "k"), NotFoundError)
    assert "nowhere" not in [bucket["Name"] for bucket in raw.list_buckets()["Buckets"]]


def given_up(url, *calls, **settings):
    began = time.monotonic()
    with closing(S3Store(url, settings=S3Settings(attempts=1, **settings))) as store:
        for call in calls:
            assert isinstance(fails(call, store), StorageError)
    assert time.monotonic() - began < 15


def test_unreachable_and_silent_servers_are_given_up_in_time(server, prefix):
    url = f"s3://{BUCKET}/{prefix}?region=us-east-1&endpoint=http://127.0.0.1"
    calls = (lambda store: store.get("k"), lambda store: store.put("k", b"x"), lambda store: list(store.keys("")))
    given_up(f"{url}:{free_port()}", *calls, connect_s=1)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        given_up(f"{url}:{listening.getsockname()[1]}", calls[0], stall_s=0.3)


@pytest.mark.parametrize("then", ["replaced", "replaced by as many bytes", "deleted"])
def test_a_snapshot_never_mixes_versions(store, then):
    store.put("k", b"first version")
    with closing(open_object(store, "k")) as reader:
        assert reader.read(0, 5) == b"first"
        if then == "deleted":
            store.delete("k")
        else:
            store.put("k", b"other version" if "many" in then else b"second")
        error = fails(reader.read, 6, 13)
    assert isinstance(error, StorageError)


def read(address, **headers):
    with urllib.request.urlopen(urllib.request.Request(address.url, headers=headers), timeout=10) as answer:
        return answer.status, answer.read()


def test_one_address_serves_all_ranges_and_threads(store):
    store.put("k", b"0123456789")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: store.http_address("k"), range(64)))
    assert len({address.url for address in found}) == 1
    assert read(found[0], Range="bytes=2-4") == (206, b"234")
    assert read(found[0]) == (200, b"0123456789")
    assert not found[0].headers
    assert "Signature" not in repr(found[0])
    assert store.http_address("k") is found[0] or store.http_address("k").url == found[0].url
    assert store.http_address("j").url != found[0].url
    assert found[0].expires_at == pytest.approx(time.time() + 3600, abs=60)
    url = f"s3://{BUCKET}/p?endpoint=http://127.0.0.1:{free_port()}&region=us-east-1"
    with closing(S3Store(url)) as elsewhere:  # signing asks nobody
        assert "X-Amz-Signature" in elsewhere.http_address("k").url


@pytest.fixture
def clock(monkeypatch):
    """Time as the presigner sees it; signatures still carry the real one."""
    now = SimpleNamespace(time=time.time())
    monkeypatch.setattr("kvwire.store.backends.s3.client.time", SimpleNamespace(time=lambda: now.time))
    return now


def test_an_address_is_renewed_before_it_expires_and_on_demand(server, prefix, clock):
    with closing(S3Store(server.address(prefix), settings=S3Settings(address_s=100))) as store:
        store.put("k", b"x")
        first = store.http_address("k")
        clock.time += 74
        assert store.http_address("k") is first
        clock.time += 2
        second = store.http_address("k")
        assert second.expires_at > first.expires_at
        clock.time += 1
        third = store.http_address("k", renew=True)
        assert third is not second
        assert third.expires_at > second.expires_at
        assert store.http_address("k") is third


def test_an_address_dies_with_temporary_credentials(server, prefix, clock):
    end = datetime.fromtimestamp(clock.time, UTC) + timedelta(minutes=20)
    lasting = RefreshableCredentials("test", "test", "token", end, lambda: None, "test")
    with closing(S3Store(server.address(prefix))) as store:
        store._client._credentials = lasting
        address = store.http_address("k")
        assert address.expires_at == pytest.approx(end.timestamp(), abs=2)
        assert int(re.search(r"X-Amz-Expires=(\d+)", address.url)[1]) <= 20 * 60
        store._client._credentials = Credentials("test", "test", "token")  # of unknown life
        assert store.http_address("j").expires_at > end.timestamp()


def test_remembered_addresses_are_bounded(server, prefix):
    with closing(S3Store(server.address(prefix), settings=S3Settings(addresses=3))) as store:
        first = store.http_address("k0")
        for n in range(1, 4):
            store.http_address(f"k{n}")
        last = store.http_address("k3")
        assert store.http_address("k0") is not first
        assert store.http_address("k3") is last
        store.close()
        assert store.http_address("k3") is not last


def test_addresses_trust_the_bundle_of_certificates(server, prefix, monkeypatch, tmp_path):
    bundle = write_certificate(tmp_path, "nobody").certificate
    url = f"s3://{BUCKET}/{prefix}?endpoint=https://127.0.0.1:1&region=us-east-1"
    with closing(S3Store(url)) as store:
        assert len(store.http_address("k").tls.get_ca_certs()) > 1  # boto3's own
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    with closing(S3Store(url)) as store:
        assert len(store.http_address("k").tls.get_ca_certs()) == 1
        assert store.http_address("k").tls is store.http_address("j").tls
    with closing(S3Store(server.address(prefix))) as store:
        assert store.http_address("k").tls is None
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "absent.pem"))
    with pytest.raises(ArgumentError, match="AWS_CA_BUNDLE"):
        S3Store(url)
