"""A small S3 server that decides as AWS does: by access key, by the bucket's region and by what a policy allows."""

from __future__ import annotations

import hashlib
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

EVERYTHING = frozenset({"s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject"})
KEY, SECRET = "AKIAKNOWN", "secret"
_CREDENTIAL = re.compile(r"Credential=([^/]+)/\d+/([^/]+)/s3/")
_SCOPE = re.compile(r"([^/]+)/\d+/([^/]+)/s3/")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass
class PosingS3:
    """The bucket ``bucket``, and how its server decides.

    Attributes:
        url: Of the server.
        allowed: Actions of a policy for all who have a key.
        keys: Access keys that it knows, with the code of the refusal for those that it takes no more.
        region: Where the bucket lies.
        elsewhere: How requests that are signed for another region are answered.
        listable: The prefixes that may be listed; None: all.
        denied: Names that may not be read.
        is_public: Whether requests without a signature may read.
        asked: Method, path and headers of each request.
    """

    url: str = ""
    allowed: set[str] = field(default_factory=lambda: set(EVERYTHING))
    keys: dict[str, str | None] = field(default_factory=lambda: {KEY: None})
    region: str = "us-east-1"
    elsewhere: int = 400
    listable: set[str] | None = None
    denied: set[str] = field(default_factory=set)
    is_public: bool = False
    objects: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    def address(self, prefix: str = "", region: str = "us-east-1", endpoint: str = "") -> str:
        return f"s3://bucket/{prefix}?endpoint={endpoint or self.url}&region={region}"


def use_keys(monkeypatch, key: str | None = KEY) -> None:
    """Credentials in the environment alone; None: no credentials at all."""
    from .s3_servers import S3Server

    S3Server("", key or "", SECRET).set_environment(monkeypatch)
    if key is None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_any(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pose: PosingS3 = self.server.pose
        pose.asked.append((self.command, self.path, dict(self.headers)))
        parts = urlsplit(self.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        name = unquote(parts.path).removeprefix("/bucket").removeprefix("/")
        refused = self._refused(pose, query)
        if refused is None:
            work = {"GET": self._get, "HEAD": self._get, "PUT": self._put, "POST": self._post, "DELETE": self._delete}
            refused = work[self.command](pose, name, query, body)
        if refused is not None:
            self._answer(refused[0], *_page(*refused))

    def _refused(self, pose, query):
        """Who asks, and whether for the right region, before what."""
        told = _CREDENTIAL.search(self.headers.get("Authorization") or "")
        told = told or _SCOPE.match((query.get("X-Amz-Credential") or [""])[0])
        if told is None:
            may = pose.is_public and self.command in ("GET", "HEAD") and "list-type" not in query
            return None if may else (403, "AccessDenied", "")
        key, region = told.groups()
        code = pose.keys.get(key, "InvalidAccessKeyId")
        if code:
            return (400 if code == "ExpiredToken" else 403), code, ""
        if region != pose.region:
            malformed = (
                "AuthorizationQueryParametersError" if "X-Amz-Credential" in query else "AuthorizationHeaderMalformed"
            )
            codes = {400: malformed, 301: "PermanentRedirect", 307: "TemporaryRedirect"}
            return pose.elsewhere, codes[pose.elsewhere], pose.region
        return None

    def _get(self, pose, name, query, _body):  # noqa: PLR0911 - one for each refusal
        if not name and self.command == "HEAD":
            return self._answer(200) if "s3:ListBucket" in pose.allowed else (403, "AccessDenied", "")
        if "list-type" in query:
            return self._list(pose, query)
        if name in pose.denied or not (pose.is_public or "s3:GetObject" in pose.allowed):
            return 403, "AccessDenied", ""
        if name not in pose.objects:
            may = "s3:ListBucket" in pose.allowed and pose.listable is None
            return (404, "NoSuchKey", "") if may else (403, "AccessDenied", "")
        data = pose.objects[name]
        if (wanted := self.headers.get("If-Match")) and wanted != _tag(data):
            return 412, "PreconditionFailed", ""
        headers = {"ETag": _tag(data), "Last-Modified": "Wed, 01 Jan 2020 00:00:00 GMT"}
        span = _RANGE.fullmatch(self.headers.get("Range") or "")
        if span is None:
            return self._answer(200, data, headers)
        start = int(span[1])
        if start >= len(data):
            return 416, "InvalidRange", ""
        part = data[start : int(span[2]) + 1] if span[2] else data[start:]
        headers["Content-Range"] = f"bytes {start}-{start + len(part) - 1}/{len(data)}"
        return self._answer(206, part, headers)

    def _list(self, pose, query):
        if "s3:ListBucket" not in pose.allowed:
            return 403, "AccessDenied", ""
        prefix, after = (query.get(name, [""])[0] for name in ("prefix", "start-after"))
        if pose.listable is not None and prefix not in pose.listable:
            return 403, "AccessDenied", ""
        found = [name for name in sorted(pose.objects) if name.startswith(prefix) and name > after]
        items = "".join(
            f"<Contents><Key>{name}</Key><Size>{len(pose.objects[name])}</Size></Contents>" for name in found
        )
        return self._answer(
            200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>".encode()
        )

    def _put(self, pose, name, _query, body):
        if "s3:PutObject" not in pose.allowed:
            return 403, "AccessDenied", ""
        old = pose.objects.get(name)
        if self.headers.get("If-None-Match") == "*" and old is not None:
            return 412, "PreconditionFailed", ""
        if (wanted := self.headers.get("If-Match")) and (old is None or wanted != _tag(old)):
            return (404, "NoSuchKey", "") if old is None else (412, "PreconditionFailed", "")
        pose.objects[name] = body
        return self._answer(200, headers={"ETag": _tag(body)})

    def _post(self, pose, _name, query, body):
        if "s3:DeleteObject" not in pose.allowed or "delete" not in query:
            return 403, "AccessDenied", ""
        for name in re.findall(r"<Key>([^<]*)</Key>", body.decode()):
            pose.objects.pop(name, None)
        return self._answer(200, b"<DeleteResult></DeleteResult>")

    def _delete(self, pose, name, _query, _body):
        if "s3:DeleteObject" not in pose.allowed:
            return 403, "AccessDenied", ""
        pose.objects.pop(name, None)
        return self._answer(204)

    def _answer(self, status, body=b"", headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


for _method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
    setattr(_Handler, f"do_{_method}", _Handler.handle_any)


def _tag(data):
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def _page(_status, code, region):
    told = f"<Region>{region}</Region>" if region else ""
    page = f"<Error><Code>{code}</Code><Message>hush</Message>{told}</Error>".encode()
    headers = {"x-amz-bucket-region": region} if region else {}
    return page, headers | ({"Location": "http://127.0.0.1:1/bucket/elsewhere"} if _status == 307 else {})


@contextmanager
def posing_s3(tls=None, **decides):
    """Run it; tls: a context, for https."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as listening:
        listening.daemon_threads = True
        if tls:
            listening.socket = tls.wrap_socket(listening.socket, server_side=True)
        pose = PosingS3(f"{'https' if tls else 'http'}://127.0.0.1:{listening.server_address[1]}", **decides)
        listening.pose = pose
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield pose
        finally:
            listening.shutdown()
            thread.join()
