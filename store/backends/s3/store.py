"""A store in a bucket of S3, or of a server that speaks its protocol. Importing this imports boto3.

boto3 does the writing, the listing and the signing. Blobs are best read through ``http_address``: plain HTTP with one
signature for each object costs a tenth of a boto3 call.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from kvwire.errors import AuthError, NotFoundError, StorageError
from kvwire.store.backends.s3.address import S3Address, S3Settings
from kvwire.store.backends.s3.client import S3Client
from kvwire.store.backends.s3.errors import (
    DeniedError,
    NoSuchUploadError,
    is_conflict,
    is_repeated,
    is_taken,
    status_of,
)
from kvwire.store.backends.s3.requests import (
    delete_in_batches,
    delete_one,
    listed,
    modified_at,
    read_answer,
    size_told,
    strong_tag,
    upload_in_parts,
)
from kvwire.store.base import HeldObject, ObjectStat, Store, clamp_range, holds, tag_of
from kvwire.store.http_clients import range_header
from kvwire.store.key_kinds import check_place, content_digest
from kvwire.store.keys import check_after, check_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from mypy_boto3_s3 import S3Client as BotoClient

    from kvwire.errors import KvwireError
    from kvwire.store.backends.s3.requests import Params
    from kvwire.store.base import Data, Listed
    from kvwire.store.http_clients import HttpAddress

_log = logging.getLogger(__name__)
_UNSATISFIABLE = 416
_WITHOUT_WORDS = (400, 403)  # refusals whose reason only an answer with a body tells
_IMMUTABLE = "private, max-age=31536000, immutable"  # private: shared caches must not hand out guarded objects
_CHANGING = "private, no-cache"
_MOST_SCANNED = 1000  # prefixes; look-ups of donors list ever new ones


class S3Store(Store):
    """Objects of one bucket, below a prefix; ``open_store`` opens it by its address.

    Credentials, region, proxy and certificates are found as boto3 finds them: AWS_* variables, profiles, roles. Without
    credentials requests are not signed, as public buckets take them. The bucket must exist. Without the permission to
    list it, S3 refuses to read what is absent as it refuses what may not be read: such an object counts as absent, and
    the first one is told in a warning. Entity tags of content-addressed keys are the digests that the keys carry, as in
    every other store. S3's own tags, which depend on how an object was uploaded, are those of other keys, and always
    the condition under which a snapshot's ranges are read. S3 keeps no old versions for readers: a snapshot of what was
    replaced since fails with StorageError.
    """

    def __init__(self, url: str, *, settings: S3Settings | None = None) -> None:
        """Parse the address and find credentials; the server is not asked yet."""
        self._address = S3Address.parse(url)
        self._settings = settings or S3Settings()
        self._client = S3Client(self._address, self._settings)
        self._may_list = True  # until a listing is refused
        self._scanned: set[str] = set()  # prefixes
        self._has_read = False

    @property
    def url(self) -> str:
        """The address, which holds nothing secret."""
        return self._address.url

    def http_address(self, key: str, *, renew: bool = False) -> HttpAddress:
        """A presigned address for reading the object, signed here: the same for all ranges and threads for a while.

        To renew it, the object is asked for first: boto3 finds the bucket's region and credentials that were replaced,
        and its errors tell what is wrong.
        """
        if renew:
            self.get(key, 0, 1)
        return self._client.presigned(self._name(key), renew=renew)

    def snapshot(self, key: str) -> HeldObject:
        """The object as it is now: reads fail with StorageError once it is another, and never mix the two."""
        about, tag = self._head(key)
        return HeldObject(about.size, about.etag, partial(self._read_held, key, tag), about.modified)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes ``start`` to ``end`` of the object, clamped at its end."""
        return self._read_version(key, "", start, end)

    def _read_held(self, key: str, tag: str, start: int, end: int) -> bytes:
        try:
            data = self._read_version(key, tag, start, end)
        except NotFoundError as error:
            raise _replaced(key) from error
        if len(data) != end - start:  # a server without tags
            raise _replaced(key)
        return data

    def _read_version(self, key: str, tag: str, start: int, end: int | None) -> bytes:
        """As ``get``, of the version with S3's own tag; empty: of any."""
        clamp_range(start, end, 0)
        if start == end:
            self.stat(key)
            return b""
        conditions: Params = {"IfMatch": f'"{tag}"'} if tag else {}
        if start or end is not None:
            conditions["Range"] = range_header(start, end)
        with self._reading(key) as boto:
            try:
                answer = boto.get_object(**self._target(key), **conditions)
            except boto.exceptions.ClientError as error:
                if status_of(error) != _UNSATISFIABLE:
                    raise
            else:
                if tag and strong_tag(answer) != tag:  # a server that ignores If-Match
                    raise _replaced(key)
                return read_answer(answer, start, end, total_s=self._settings.total_s, what=key)
        if self.stat(key).size > start:
            msg = f"{key} in {self.url}: the server refuses a range that lies in the object; its ranges are broken"
            raise StorageError(msg)
        return b""

    def stat(self, key: str) -> ObjectStat:
        """Size, entity tag and time of writing."""
        return self._head(key)[0]

    def put(self, key: str, data: Data) -> None:
        """Write the object, in parts where it is large. Readers see it once all of it is there."""
        check_place(key)
        if memoryview(data).nbytes > self._settings.multipart_bytes:
            try:
                upload_in_parts(self._client, self._target(key), _about(key), data, self._settings)
            except NoSuchUploadError:
                if not holds(self, key, data):  # completed before, and the answer was lost
                    raise
            return
        with self._client.asking(key) as boto:
            boto.put_object(**self._target(key), **_about(key), Body=_body(data))

    def create(self, key: str, data: Data) -> bool:
        """Write where there is nothing of that size yet; tells whether it wrote.

        Small objects are sent with ``If-None-Match: *``, which saves asking first. A server that does not know it, or
        lets several writers win, only takes the same bytes again.
        """
        check_place(key)
        is_small = memoryview(data).nbytes <= self._settings.multipart_bytes
        return (is_small and bool(self._put_if(key, data, {"IfNoneMatch": "*"}))) or super().create(key, data)

    def replace(self, key: str, data: Data, etag: str) -> bool:
        """Write where the version is still the one with this tag (``If-Match``), or where nothing lies.

        A server that does not know conditional writes is asked first, which leaves a moment in between. Ceph's gateway
        (seen with 16.2) compares its tag with the condition's quotes: where the tag is still the one that was seen, it
        is sent without them, still as the condition.
        """
        if content_digest(check_place(key)) is not None:  # whose tags are not the server's, and which never changes
            return super().replace(key, data, etag)
        if not etag:
            wrote = self._put_if(key, data, {"IfNoneMatch": "*"})
        else:
            wrote = self._put_if(key, data, {"IfMatch": f'"{etag}"'})
            if wrote is False and tag_of(self, key) == etag:
                wrote = self._put_if(key, data, {"IfMatch": etag})
        return super().replace(key, data, etag) if wrote is None else wrote

    def _put_if(self, key: str, data: Data, condition: Params) -> bool | None:
        """Whether a conditional write was done; None where the server knows no such thing.

        boto3 repeats a request whose answer was lost: the condition fails then on what the first one wrote.
        """
        with self._client.asking(key) as boto:
            try:
                boto.put_object(**self._target(key), **_about(key), Body=_body(data), **condition)
            except boto.exceptions.ClientError as error:
                refused = error
            else:
                return True
            if not is_conflict(refused):
                if is_taken(refused):
                    return None
                raise refused
        return is_repeated(refused) and holds(self, key, data)

    def delete(self, key: str) -> None:
        """Remove the object, if there is one."""
        delete_one(self._client, self._address.bucket, self._name(key))

    def delete_many(self, keys: Iterable[str]) -> None:
        """Remove objects, 250 with each request where the server can do that."""
        delete_in_batches(self._client, self._address.bucket, map(self._name, keys))

    def scan(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """Objects whose keys start with ``prefix`` and come after ``after``, in order, asked for while iterating."""
        check_after(prefix, after)
        if len(self._scanned) < _MOST_SCANNED:
            self._scanned.add(prefix)
        where = self._address
        return listed(self._client, where.bucket, where.root, prefix, after, self._settings.page_keys)

    def close(self) -> None:
        """Close the connections and forget the signed addresses."""
        self._client.close()

    def _head(self, key: str) -> tuple[ObjectStat, str]:
        """The object's size, tag and time, and S3's own tag."""
        answer: Mapping[str, Any]
        with self._reading(key) as boto:
            try:
                answer = boto.head_object(**self._target(key))
            except boto.exceptions.ClientError as error:
                if status_of(error) not in _WITHOUT_WORDS:
                    raise
                answer = boto.get_object(**self._target(key))
        tag = strong_tag(answer)
        return ObjectStat(size_told(answer), content_digest(key) or tag, modified_at(answer)), tag

    @contextmanager
    def _reading(self, key: str) -> Iterator[BotoClient]:
        """``asking`` for an object; one that may not be read counts as absent where nothing tells the two apart."""
        try:
            with self._client.asking(key) as boto:
                yield boto
        except DeniedError as error:
            raise self._denied(key, error) from None
        except AuthError as error:
            if self._client.is_anonymous and self._has_read:
                raise self._denied(key, error) from None
            raise
        self._has_read = True

    def _denied(self, key: str, error: AuthError) -> KvwireError:
        is_listed = self._is_listed(key)
        if is_listed:
            return error
        if is_listed is False:
            return NotFoundError(f"{key} in {self.url}: it is not there")
        if self._may_list:
            self._may_list = False
            more = "" if self._has_read else ", and s3:GetObject on its objects where nothing is found"
            _log.warning(
                "%s: s3:ListBucket is missing, so S3 answers 403 for what is absent, too: it counts as absent. "
                "Allow s3:ListBucket on the bucket%s",
                self.url,
                more,
            )
        why = "" if self._has_read else ", or s3:GetObject is missing"
        return NotFoundError(f"{key} in {self.url}: it is not there{why} (status 403, since s3:ListBucket is missing)")

    def _is_listed(self, key: str) -> bool | None:
        """Whether a listing shows the object; None where none may be made.

        A policy may allow some listings only. What a collector found in one must not count as absent.
        """
        prefixes = [prefix for prefix in tuple(self._scanned) if key.startswith(prefix)]
        where = self._address
        for prefix in (key, *prefixes) if self._may_list else prefixes:
            try:
                found = listed(self._client, where.bucket, where.root, prefix, key[:-1], self._settings.page_keys)
                return next((one.key == key for one in found if one.key >= key), False)
            except AuthError:
                continue
        return None

    def _name(self, key: str) -> str:
        return self._address.root + check_key(key)

    def _target(self, key: str) -> Params:
        return {"Bucket": self._address.bucket, "Key": self._name(key)}


def _body(data: Data) -> bytes:
    return data if isinstance(data, bytes) else bytes(data)


def _about(key: str) -> Params:
    changing = content_digest(key) is None
    return {"ContentType": "application/octet-stream", "CacheControl": _CHANGING if changing else _IMMUTABLE}


def _replaced(key: str) -> StorageError:
    return StorageError(f"{key} was replaced or deleted while being read: open it again")
