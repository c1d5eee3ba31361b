"""What a server's answers mean to a store: which are failures, and what a page of a listing says."""

from __future__ import annotations

import re
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from kvwire._json import record, strict_json
from kvwire.errors import (
    ArgumentError,
    AuthError,
    ConflictError,
    CorruptError,
    KvwireError,
    NotFoundError,
    StorageError,
)
from kvwire.store.backends.http.semantics import retry_after_s
from kvwire.store.base import Listed
from kvwire.store.http_clients import LOGIN_ADVICE, PROXY_ADVICE, WRONG_ADDRESS, is_passing
from kvwire.store.keys import check_key

if TYPE_CHECKING:
    from kvwire.store.backends.http.exchange import Reply

MAX_PAGE_BYTES = 4 << 20
PAGE_KEYS = 1000
_MAX_WORDS = 200
_MAX_SIZE = 10**18
_FORBIDDEN, _CONFLICT, _CHANGED, _TOO_LARGE, _WRONG, _FULL = 403, 409, 412, 413, 422, 507
_UNKNOWN, _ABSENT, _BUSY = 401, (404, 410), (429, 503)
_PROXYS, _BEHIND = 407, 502
_MOVED = (301, 302, 303, 307, 308)
_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,64})</Code>")  # as S3, Google's and Alibaba's storage and CDNs before them
_WRITES = ("PUT", "DELETE")
_NOT_FOR_FILES = (400, 403, 404, 405, 410, 501)  # how servers of plain files answer what they do not do


class _Object(Struct):
    key: str
    size: Annotated[int, Meta(ge=0, lt=_MAX_SIZE)]
    modified: float = 0.0


class _Page(Struct):
    objects: list[_Object]
    truncated: bool


class _Refusal(Struct):
    error: str
    request_id: str


def is_hidden(reply: Reply, *, is_trusted: bool) -> bool:
    """Whether a refusal to read may mean that nothing is there; kvwire's own server says 404 then."""
    # Servers of files say 403 of what they cannot open, buckets of what is absent to clients that may not list.
    if reply.status != _FORBIDDEN or _told(reply):
        return False
    code = _CODE.search(reply.body)
    return code[1] == b"AccessDenied" if code else is_trusted


def refusal(reply: Reply, method: str, key: str, url: str) -> KvwireError:
    """The error for an answer that refuses to read or write an object."""
    status, told = reply.status, _told(reply)
    if status in (_UNKNOWN, _FORBIDDEN) and (told or method not in _WRITES or status == _UNKNOWN):
        msg = f"{url} refused (status {status}{told}): check the token and what it may do"
        return AuthError(msg)
    if method in _WRITES and status in _NOT_FOR_FILES:
        msg = f"{url} is read-only (status {status}{told}): write to the store on the server's side"
        return StorageError(msg)
    if status in _ABSENT or (status in _MOVED and reply.fields.get("Location", "").endswith(f"/{key}/")):  # a folder
        return NotFoundError(f"{key} is not in {url}")
    if status == _WRONG:
        return ArgumentError(f"{url} refused {key} (status {status}{told}): the bytes do not belong to the key")
    if status == _CONFLICT and told:  # of another server it may mean anything
        return ConflictError(f"{url} refused {key} (status {status}{told}): choose another key, or delete the other")
    advice = {
        _CHANGED: "something else lies there than expected: look again",
        _TOO_LARGE: "the object is larger than the server takes: raise its limit",
        _FULL: "the server's disk is full: free space there",
        _PROXYS: PROXY_ADVICE,
        _BEHIND: "what lies behind the server fails: look into its log",
    }
    wait_s = retry_after_s(reply.fields.get("Retry-After", ""))
    advice |= dict.fromkeys(_BUSY, f"it is busy: try again {f'in {ceil(wait_s)} s' if wait_s else 'later'}")
    advice |= dict.fromkeys(_MOVED, "it redirects what is written: name the address that it redirects to")
    words = advice.get(status, "try again later or check the server" if is_passing(status) else WRONG_ADDRESS)
    return StorageError(f"{url} answered with status {status}{told}: {words}")


def page(reply: Reply, prefix: str, after: str, url: str) -> tuple[list[Listed], bool]:
    """Parse one page of a listing."""
    if reply.status in (_UNKNOWN, _FORBIDDEN) and (_told(reply) or reply.status == _UNKNOWN):
        raise refusal(reply, "GET", prefix, url)
    try:
        told = strict_json(reply.body) if reply.status == 200 and not reply.cut else None  # noqa: PLR2004 - OK
    except ArgumentError as error:
        if b'"objects"' in reply.body:
            raise _senseless(url) from error
        told = None
    if reply.status not in (200, *_NOT_FOR_FILES):
        raise refusal(reply, "GET", prefix, url)
    if not isinstance(told, dict) or "objects" not in told:
        msg = f"{url} cannot list its keys: look documents up by id, or list the store on the server's side"
        raise ArgumentError(f"{msg}; or {LOGIN_ADVICE}" if reply.body.lstrip().startswith(b"<") else msg)
    try:
        return _objects(record(told, _Page, "a listing", "ask again"), prefix, after)
    except (ArgumentError, CorruptError) as error:
        raise _senseless(url) from error


def _senseless(url: str) -> StorageError:
    return StorageError(f"{url} gave a listing that makes no sense: check that 'kvwire serve' answers there")


def _objects(page: _Page, prefix: str, after: str) -> tuple[list[Listed], bool]:
    keys = [after, *(check_key(one.key) for one in page.objects)]
    if not all(key < following for key, following in pairwise(keys)):
        raise CorruptError("keys are out of order")
    if not all(key.startswith(prefix) for key in keys[1:]) or (page.truncated and not page.objects):
        raise CorruptError("keys are not those that were asked for, or it does not tell how it goes on")
    return [Listed(one.key, one.size, one.modified) for one in page.objects], page.truncated


def _told(reply: Reply) -> str:
    """What kvwire's own server says about a refusal, as ``: words``; empty for any other server."""
    try:
        told = record(strict_json(reply.body), _Refusal, "", "")
    except (ArgumentError, CorruptError):
        return ""
    if not (told.error + told.request_id).isprintable():
        return ""
    return f": {told.error[:_MAX_WORDS]}; request {told.request_id[:_MAX_WORDS]}"
