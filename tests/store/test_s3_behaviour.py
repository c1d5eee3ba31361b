"""What only an S3 store does: parts, presigned addresses, credentials, refusals, and servers that lie."""

import logging
import re
import secrets
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from botocore.credentials import Credentials, RefreshableCredentials
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from kvwire.errors import ArgumentError, AuthError, KvwireError, NotFoundError, StorageError
from kvwire.store import S3Settings, S3Store, open_object
from kvwire.store._s3_upload import part_size
from kvwire.store.testing.samples import blob, noise

from ..s3_servers import BUCKET, free_port, strict_moto

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


def fails(call, *arguments):
    """The call's kvwire error, as text, and everything that it was raised from."""
    with pytest.raises(KvwireError) as caught:
        call(*arguments)
    return caught.value


# Addresses


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
    [
        {"part_bytes": 1 << 20},
        {"connections": 0},
        {"stall_s": 0.0},
        {"address_s": 8 * 24 * 3600},
        {"page_keys": 1001},
    ],
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


def test_a_profile_gives_credentials_and_endpoint(server, prefix, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    config = tmp_path / "config"
    config.write_text(
        f"[profile other]\nregion = us-east-1\nendpoint_url = {server.endpoint}\n"
        f"aws_access_key_id = {server.access_key}\naws_secret_access_key = {server.secret}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    with closing(S3Store(f"s3://{BUCKET}/{prefix}?profile=other")) as store:
        store.put("k", b"x")
        assert store.get("k") == b"x"


def test_a_whole_bucket_is_a_store(server, raw):
    raw.create_bucket(Bucket="whole")
    with closing(S3Store(server.address(bucket="whole"))) as store:
        store.put("b/k", b"x")
        store.put("a", b"y")
        assert list(store.keys("")) == ["a", "b/k"]
        assert raw.get_object(Bucket="whole", Key="b/k")["Body"].read() == b"x"


def test_stores_with_related_prefixes_do_not_see_each_other(server, prefix):
    with closing(S3Store(server.address(prefix))) as one, closing(S3Store(server.address(prefix + "b"))) as other:
        one.put("k", b"1")
        other.put("k", b"2")
        assert (list(one.keys("")), list(other.keys("")), one.get("k")) == (["k"], ["k"], b"1")


# Writing


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
        msg = "the server is busy"
        raise StorageError(msg)

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
    store.delete_many(["a", *(f"absent/{n}" for n in range(1500)), "b"])
    assert sent == [1000, 502]
    assert list(store.keys("")) == []


# Credentials


def test_a_wrong_secret_is_refused_and_never_told(strict_server, monkeypatch, caplog, prefix):
    server = strict_server
    server.set_environment(monkeypatch)
    with closing(S3Store(server.address(prefix))) as store:
        store.put("k", b"x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    caplog.set_level(logging.INFO)
    with closing(S3Store(server.address(prefix))) as store:
        calls = (
            lambda: store.get("k"),
            lambda: store.get("k", 0, 5),
            lambda: store.stat("k"),
            lambda: store.put("k", b"x"),
            lambda: store.create("k", b"x"),
            lambda: store.delete("k"),
            lambda: store.delete_many(["k"]),
            lambda: list(store.keys("")),
            lambda: open_object(store, "k"),
        )
        for call in calls:
            error = fails(call)
            assert isinstance(error, AuthError), repr(error)
            assert SECRET not in f"{error!r} {error.__cause__!r}"
        assert SECRET not in repr(store) + repr(vars(store)) + store.url + caplog.text


def test_no_credentials_are_an_auth_error(server, monkeypatch, prefix):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with closing(S3Store(server.address(prefix))) as store:
        for call in (lambda: store.get("k"), lambda: store.http_address("k")):
            assert isinstance(fails(call), AuthError)


def test_half_of_the_credentials_are_an_auth_error(server, monkeypatch):
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert isinstance(fails(S3Store, server.address()), AuthError)


# Absent things


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


def test_an_unreachable_server_is_given_up_in_time(server, prefix):
    url = f"s3://{BUCKET}/{prefix}?endpoint=http://127.0.0.1:{free_port()}&region=us-east-1"
    with closing(S3Store(url, settings=S3Settings(connect_s=1, attempts=1))) as store:
        began = time.monotonic()
        for call in (lambda: store.get("k"), lambda: store.put("k", b"x"), lambda: list(store.keys(""))):
            assert isinstance(fails(call), StorageError)
        assert time.monotonic() - began < 15


def test_a_silent_server_is_given_up_in_time(server, prefix):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"s3://{BUCKET}/{prefix}?endpoint=http://127.0.0.1:{listening.getsockname()[1]}&region=us-east-1"
        with closing(S3Store(url, settings=S3Settings(stall_s=0.3, attempts=1))) as store:
            began = time.monotonic()
            assert isinstance(fails(store.get, "k"), StorageError)
            assert time.monotonic() - began < 15


# Versions


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


def test_a_digest_as_tag_does_not_break_the_condition(store):
    key, data = blob(3, 100)
    store.put(key, data)
    with closing(open_object(store, key)) as reader:
        assert reader.etag == re.search("([0-9a-f]{64})", key)[1]
        assert reader.read(0, 100) == data


# Presigned addresses


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


def test_signing_asks_nobody(server, prefix):
    url = f"s3://{BUCKET}/{prefix}?endpoint=http://127.0.0.1:{free_port()}&region=us-east-1"
    with closing(S3Store(url)) as store:
        assert "X-Amz-Signature" in store.http_address("k").url


@pytest.fixture
def clock(monkeypatch):
    """Time as the presigner sees it; signatures still carry the real one."""
    now = SimpleNamespace(time=time.time())
    monkeypatch.setattr("kvwire.store._s3_presign.time", SimpleNamespace(time=lambda: now.time))
    return now


def test_an_address_is_renewed_before_it_expires_and_on_demand(server, prefix, clock):
    with closing(S3Store(server.address(prefix), settings=S3Settings(address_s=100))) as store:
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
        assert len(store._presigner._known) == 3
        assert store.http_address("k0") is not first
        store.close()
        assert not store._presigner._known


def certificate():
    """A certificate of nobody."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "nobody")])
    now = datetime.now(UTC)
    about = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
    about = about.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    return about.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def test_addresses_trust_the_bundle_of_certificates(server, prefix, monkeypatch, tmp_path):
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(certificate())
    url = f"s3://{BUCKET}/{prefix}?endpoint=https://127.0.0.1:1&region=us-east-1"
    with closing(S3Store(url)) as store:
        assert store.http_address("k").tls is None
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    with closing(S3Store(url)) as store:
        assert store.http_address("k").tls.get_ca_certs()
        assert store.http_address("k").tls is store.http_address("j").tls
    with closing(S3Store(server.address(prefix))) as store:
        assert store.http_address("k").tls is None
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "absent.pem"))
    with pytest.raises(ArgumentError, match="AWS_CA_BUNDLE"):
        S3Store(url)


# Servers that lie


class Liar(BaseHTTPRequestHandler):
    """Gives the answer that the test chose for each method: status, headers, body, or a function that returns them."""

    protocol_version = "HTTP/1.1"

    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chosen = self.server.answers[self.command]
        status, headers, body = chosen(self) if callable(chosen) else chosen
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body)), "ETag": '"e"', "Connection": "close"} | headers).items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
    setattr(Liar, f"do_{method}", Liar.answer)


@pytest.fixture(scope="module")
def liar(ministack_server):
    """The lying server and a store on it, which does not try twice."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Liar) as listening, pytest.MonkeyPatch.context() as patch:
        ministack_server.set_environment(patch)
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        url = f"s3://bucket?endpoint=http://127.0.0.1:{listening.server_address[1]}&region=us-east-1"
        with closing(S3Store(url, settings=S3Settings(attempts=1, stall_s=5, total_s=2))) as store:
            yield SimpleNamespace(store=store, listening=listening)
        listening.shutdown()
        thread.join()


@pytest.fixture
def lying(liar):
    liar.answers = liar.listening.answers = {}
    return liar


def ranged(told, body, **headers):
    return 206, {"Content-Range": f"bytes {told}", **headers}, body


@pytest.mark.parametrize(
    "answer",
    [
        ranged("3-7/99", b"01234"),
        ranged("2-9/99", b"01234567"),
        ranged("2-5/99", b"0123"),
        ranged("2-6/99", b"0123"),
        ranged("2-6/5", b"01234"),
        ranged("2-6/*", b"01234"),
        ranged("x", b"01234"),
        (206, {}, b"01234"),
        ranged("2-6/99", b"012", **{"Content-Length": "5"}),
        (200, {"Content-Length": "999999999999999"}, b"0123"),
    ],
)
def test_wrong_ranges_are_never_given(lying, answer):
    lying.answers["GET"] = answer
    with pytest.raises(StorageError):
        lying.store.get("k", 2, 7)


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Length": None, "Transfer-Encoding": "identity"},
        {"Content-Length": "x"},
        {"Content-Length": "-5"},
        {"Content-Length": "5, 5"},
        {"Last-Modified": "never"},
        {"x-amz-missing-meta": "x"},
        {"ETag": None, "Content-Length": "99" * 20},
    ],
)
def test_strange_headers_give_kvwires_errors_or_the_bytes(lying, headers):
    lying.answers |= {"GET": (200, headers, b"01234"), "HEAD": (200, headers, b"01234")}
    for call, right in ((lambda: lying.store.get("k"), b"01234"), (lambda: lying.store.stat("k").size, 5)):
        try:
            assert call() == right
        except StorageError:
            continue


def test_uploads_that_are_answered_with_nothing_are_refused(liar):
    liar.listening.answers = dict.fromkeys(("POST", "PUT", "DELETE"), (200, {}, b""))
    url = liar.store.url
    with closing(S3Store(url, settings=replace(PARTS, attempts=1))) as store:
        assert isinstance(fails(store.put, "k", bytes(7 << 20)), StorageError)


def test_a_clamped_range_and_a_server_without_ranges_are_right(lying):
    lying.answers["GET"] = ranged("2-4/5", b"234")
    assert lying.store.get("k", 2, 7) == b"234"
    assert lying.store.get("k", 2) == b"234"
    lying.answers["GET"] = (200, {}, b"0123456789")
    assert lying.store.get("k", 2, 7) == b"23456"
    assert lying.store.get("k", 8, 17) == b"89"


def test_a_range_refused_in_the_middle_of_an_object_is_told(lying):
    lying.answers["GET"] = (416, {}, b"")
    lying.answers["HEAD"] = (200, {}, b"0123456789")
    with pytest.raises(StorageError, match="ranges are broken"):
        lying.store.get("k", 2, 7)
    assert lying.store.get("k", 10, 12) == b""


def test_a_server_that_ignores_the_condition_is_caught(lying):
    lying.answers["HEAD"] = (200, {}, b"0123456789")
    with closing(open_object(lying.store, "k")) as reader:
        lying.answers["GET"] = ranged("2-6/10", b"other", ETag='"f"')
        with pytest.raises(StorageError, match="replaced"):
            reader.read(2, 7)


def error_page(status, code, text="it said hush"):
    return status, {}, f"<Error><Code>{code}</Code><Message>{text}</Message></Error>".encode()


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (error_page(404, "NoSuchKey"), NotFoundError, "not there"),
        (error_page(404, "NoSuchBucket"), NotFoundError, "create-bucket"),
        (error_page(404, "Else"), NotFoundError, "not there"),
        (error_page(403, "SignatureDoesNotMatch"), AuthError, "SignatureDoesNotMatch"),
        (error_page(400, "ExpiredToken"), AuthError, "expired"),
        (error_page(403, "RequestTimeTooSkewed"), AuthError, "clock"),
        (error_page(403, "QuotaExceeded"), StorageError, "quota"),
        (error_page(401, "Weird"), AuthError, "credentials"),
        (error_page(412, "PreconditionFailed"), StorageError, "replaced"),
        (error_page(503, "SlowDown"), StorageError, "try again"),
        (error_page(429, "TooMany"), StorageError, "try again"),
        (error_page(500, "InternalError"), StorageError, "try again"),
        (error_page(301, "PermanentRedirect"), ArgumentError, "another region"),
        (error_page(418, "<b>x"), StorageError, "speaks S3"),
        ((500, {}, b"<html>no S3 at all"), StorageError, "try again"),
        ((404, {}, b"plain"), NotFoundError, "not there"),
    ],
)
def test_refusals_are_translated_without_the_servers_words(lying, answer, kind, words):
    lying.answers |= dict.fromkeys(("GET", "PUT", "HEAD", "POST", "DELETE"), answer)
    error = fails(lying.store.get, "k")
    assert isinstance(error, kind)
    assert words in str(error)
    assert "hush" not in str(error)


def page(keys, *, truncated=False, token=""):
    items = "".join(f"<Contents><Key>{key}</Key><Size>1</Size></Contents>" for key in keys)
    ending = f"<IsTruncated>{str(truncated).lower()}</IsTruncated>"
    if token:
        ending += f"<NextContinuationToken>{token}</NextContinuationToken>"
    return 200, {"Content-Type": "application/xml"}, f"<ListBucketResult>{items}{ending}</ListBucketResult>".encode()


def test_a_page_out_of_order_is_sorted_and_strange_names_are_skipped(lying):
    lying.answers["GET"] = page(["b", "a", "c d", "a/", ".x"])
    assert [(one.key, one.size, one.modified) for one in lying.store.scan("")] == [("a", 1, 0.0), ("b", 1, 0.0)]
    assert list(lying.store.keys("", "a")) == ["b"]
    assert list(lying.store.keys("b")) == ["b"]


@pytest.mark.parametrize(
    "pages",
    [
        [page(["b"], truncated=True, token="1"), page(["a"])],  # noqa: S106
        [page(["b"], truncated=True, token="1"), page(["b"])],  # noqa: S106
        [page(["b"], truncated=True)],
        [page(["b"], truncated=True, token="1"), page([], truncated=True, token="1")],  # noqa: S106
        [(200, {}, b"<html>")],
        [(200, {}, b"not even that")],
    ],
)
def test_a_listing_that_cannot_be_right_is_an_error(lying, pages):
    left = iter(pages)
    lying.answers["GET"] = lambda _: next(left)
    with pytest.raises(StorageError):
        list(lying.store.keys(""))


def test_a_listing_without_progress_ends(lying, monkeypatch):
    monkeypatch.setattr("kvwire.store._s3_listing._MOST_EMPTY_PAGES", 20)
    lying.answers["GET"] = lambda _: page([], truncated=True, token=secrets.token_hex(4))
    with pytest.raises(StorageError, match="how its listing goes on"):
        list(lying.store.keys(""))


@pytest.mark.parametrize("status", [409, 412, 501])
def test_create_does_without_the_condition(lying, status):
    def put(request):
        return error_page(status, "X") if request.headers.get("If-None-Match") else (200, {}, b"")

    lying.answers |= {"PUT": put, "HEAD": (404, {}, b"")}
    assert lying.store.create("k", b"four") is True
    lying.answers["HEAD"] = (200, {}, b"four")
    assert lying.store.create("k", b"four") is False
    assert lying.store.create("k", b"other size") is True


def test_a_server_without_lists_of_deletions_is_asked_one_by_one(lying):
    deleted = []
    lying.answers |= {
        "POST": error_page(501, "NotImplemented"),
        "DELETE": lambda request: deleted.append(request.path) or (204, {}, b""),
    }
    lying.store.delete_many(["a", "b/c"])
    assert deleted == ["/bucket/a", "/bucket/b/c"]


@pytest.mark.parametrize(("code", "kind"), [("AccessDenied", AuthError), ("InternalError", StorageError)])
def test_objects_that_were_not_deleted_are_told(lying, code, kind):
    body = f"<DeleteResult><Error><Key>a</Key><Code>{code}</Code></Error></DeleteResult>".encode()
    lying.answers["POST"] = (200, {}, body)
    error = fails(lying.store.delete_many, ["a", "b"])
    assert isinstance(error, kind)
    assert "1 of 2" in str(error)


def test_lists_of_deletions_carry_the_digest_that_older_servers_want(lying):
    seen = []
    lying.answers["POST"] = lambda request: seen.append(request.headers["Content-MD5"]) or (200, {}, b"<DeleteResult/>")
    lying.store.delete_many(["a"])
    assert re.fullmatch(r"[A-Za-z0-9+/]{22}==", seen[0])


def test_a_dripping_server_is_given_up(lying):
    def drip(request):
        request.send_response(200)
        request.send_header("Content-Length", "1000")
        request.end_headers()
        for _ in range(40):
            try:
                request.wfile.write(b"x")
            except OSError:
                break
            time.sleep(0.1)
        return 200, {}, b""

    lying.answers["GET"] = drip
    with pytest.raises(StorageError, match="longer than 2 s"):
        lying.store.get("k")
