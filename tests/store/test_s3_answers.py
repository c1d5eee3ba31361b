"""The S3 store before servers that lie, refuse, drip or redirect without end."""

import gc
import re
import secrets
import threading
import time
import traceback
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvwire.errors import ArgumentError, AuthError, KvwireError, NotFoundError, StorageError
from kvwire.store import S3Settings, S3Store, open_object

from ..s3_servers import fails

PARTS = S3Settings(multipart_bytes=6 << 20, part_bytes=5 << 20, attempts=1)


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
        *(ranged("3-7/99", b"01234"), ranged("2-9/99", b"01234567"), ranged("2-5/99", b"0123")),
        *(ranged("2-6/99", b"0123"), ranged("2-6/5", b"01234"), ranged("2-6/*", b"01234"), ranged("x", b"01234")),
        *((206, {}, b"01234"), ranged("2-6/99", b"012", **{"Content-Length": "5"})),
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
        *({"Content-Length": length} for length in ("x", "-5", "5, 5")),
        *({"Last-Modified": "never"}, {"x-amz-missing-meta": "x"}, {"ETag": None, "Content-Length": "99" * 20}),
    ],
)
def test_strange_headers_give_kvwires_errors_or_the_bytes(lying, headers):
    lying.answers |= {"GET": (200, headers, b"01234"), "HEAD": (200, headers, b"01234")}
    for call, right in ((lambda: lying.store.get("k"), b"01234"), (lambda: lying.store.stat("k").size, 5)):
        with suppress(StorageError):
            assert call() == right


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("answer", [(200, {"Last-Modified": "never"}, b"01234"), ranged("3-7/99", b"01234")])
def test_answers_that_are_refused_are_closed(lying, answer):
    lying.answers["GET"] = answer
    gc.disable()  # which would close them some time
    try:
        before = open_files()
        for _ in range(10):
            assert isinstance(fails(lying.store.get, "k", 2, 7), StorageError)
        assert open_files() <= before + 4  # the server's side of the last ones
    finally:
        gc.enable()


def test_uploads_that_are_answered_with_nothing_are_refused(liar):
    liar.listening.answers = dict.fromkeys(("POST", "PUT", "DELETE"), (200, {}, b""))
    url = liar.store.url
    with closing(S3Store(url, settings=PARTS)) as store:
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
    monkeypatch.setattr("kvwire.store.backends.s3.requests._MOST_EMPTY_PAGES", 20)
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


@pytest.mark.parametrize("answer", [(404, "NoSuchKey"), (409, "X"), (412, "PreconditionFailed")])
def test_what_is_replaced_and_not_there_any_more_is_a_lost_race(lying, answer):
    lying.answers |= {"PUT": error_page(*answer), "HEAD": (404, {}, b"")}
    assert lying.store.replace("k", b"four", "a" * 32) is False


@pytest.mark.parametrize("quoted", [True, False])
@pytest.mark.parametrize("lies", ["a" * 32, "b" * 32])
def test_a_version_is_replaced_however_a_server_compares_tags(lying, quoted, lies):
    taken = []

    def put(request):
        if request.headers["If-Match"] != (f'"{lies}"' if quoted else lies):
            return error_page(412, "PreconditionFailed")
        taken.append(request.headers["If-Match"])
        return 200, {}, b""

    lying.answers |= {"PUT": put, "HEAD": (200, {"ETag": f'"{lies}"'}, b"four")}
    assert lying.store.replace("k", b"five", "a" * 32) is (lies == "a" * 32)
    assert len(taken) == (lies == "a" * 32)


@pytest.mark.parametrize("code", ["NoSuchBucket", "Else"])
def test_a_bucket_that_is_gone_is_no_lost_race(lying, code):
    lying.answers["PUT"] = error_page(404, code)
    assert isinstance(fails(lying.store.replace, "k", b"four", "a" * 32), NotFoundError)


def test_a_server_without_lists_of_deletions_is_asked_one_by_one(lying):
    seen, deleted = [], []
    lying.answers["POST"] = lambda request: seen.append(request.headers["Content-MD5"]) or (200, {}, b"<DeleteResult/>")
    lying.store.delete_many(["a"])
    assert re.fullmatch(r"[A-Za-z0-9+/]{22}==", seen[0])  # the digest that older servers want
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


@pytest.mark.parametrize("status", [200, 206, 400, 403, 500])
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT"])
def test_what_a_server_repeats_of_a_request_is_in_no_error(lying, method, status):
    sent = []

    def echo(request):
        sent.append(request.headers["Authorization"])
        headers = dict.fromkeys(("Content-Range", "ETag", "Last-Modified", "x-amz-error-message"), sent[-1])
        return status, headers, error_page(status, "SignatureDoesNotMatch", sent[-1])[2]

    lying.answers[method] = echo
    calls = {
        "GET": lambda: lying.store.get("k", 0, 10_000 if status == 206 else None),
        "HEAD": lambda: lying.store.stat("k"),
        "PUT": lambda: lying.store.put("k", b"x"),
    }
    try:
        calls[method]()
    except KvwireError as error:
        told = "".join(traceback.format_exception(error)) + repr(error.__cause__)
        assert sent[-1].rpartition("Signature=")[2] not in told
    assert "Signature=" in sent[-1]


def test_an_endpoint_that_is_none_is_not_repeated(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:hush@h h")
    error = fails(S3Store, "s3://bucket?region=us-east-1")
    assert isinstance(error, ArgumentError)
    assert "hush" not in "".join(traceback.format_exception(error))
