"""Listing and deleting many objects of a bucket."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from kvwire.errors import ArgumentError, StorageError
from kvwire.store.backends.s3.errors import code_of, error_of, plain_code, status_of
from kvwire.store.backends.s3.reading import modified_at
from kvwire.store.base import Listed
from kvwire.store.keys import check_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvwire.store.backends.s3.client import S3Client

_BATCH = 250  # S3 takes 1000, but Swift, at 50 in a second, says nothing until all are gone: that looks like a stall
_MOST_EMPTY_PAGES = 1000  # a server that skips many deleted objects may send some
_NOT_KNOWN = (405, 501)
_NOT_KNOWN_CODES = ("MethodNotAllowed", "NotImplemented")


def listed(client: S3Client, bucket: str, root: str, prefix: str, after: str, page_keys: int) -> Iterator[Listed]:
    """List the objects below ``root``; what is no key is skipped."""
    last, token, empty = after, None, 0
    while True:
        wanted: dict[str, Any] = {"Bucket": bucket, "Prefix": root + prefix, "MaxKeys": page_keys}
        if token:
            wanted["ContinuationToken"] = token
        elif after:
            wanted["StartAfter"] = root + after
        with client.asking() as boto:
            page = boto.list_objects_v2(**wanted)
        found = sorted(_objects(page, root, prefix, after), key=lambda one: one.key)
        if found and found[0].key <= last:
            msg = f"bucket {bucket}: the server lists its keys out of order, so a listing cannot be in order"
            raise StorageError(msg)
        yield from found
        last = found[-1].key if found else last
        empty = 0 if page.get("Contents") else empty + 1
        if not page.get("IsTruncated"):
            return
        token, before = page.get("NextContinuationToken"), token
        if not token or token == before or empty > _MOST_EMPTY_PAGES:
            msg = f"bucket {bucket}: the server does not tell how its listing goes on: check that it speaks S3"
            raise StorageError(msg)


def _objects(page: Any, root: str, prefix: str, after: str) -> Iterator[Listed]:  # noqa: ANN401 - boto3's answer
    for one in page.get("Contents") or ():
        name = one.get("Key", "")
        key = name.removeprefix(root)
        if not name.startswith(root + prefix) or key <= after or not _is_key(key):
            continue
        yield Listed(key, max(0, one.get("Size", 0)), modified_at(one))


def _is_key(name: str) -> bool:
    try:
        check_key(name)
    except ArgumentError:
        return False
    return True


def delete_in_batches(client: S3Client, bucket: str, names: Iterable[str]) -> None:
    """Remove objects, 250 with each request, or one by one where the server has no such request.

    Raises at the first batch of which the server refused something; the rest of that batch is gone.
    """
    names = iter(names)
    while batch := list(dict.fromkeys(islice(names, _BATCH))):
        _delete_batch(client, bucket, batch)


def _delete_batch(client: S3Client, bucket: str, names: list[str]) -> None:
    with client.asking() as boto:
        try:
            wanted = [{"Key": name} for name in names]
            answer = boto.delete_objects(Bucket=bucket, Delete={"Objects": wanted, "Quiet": True})  # type: ignore[typeddict-item]
        except boto.exceptions.ClientError as error:
            if status_of(error) not in _NOT_KNOWN and code_of(error) not in _NOT_KNOWN_CODES:
                raise
            answer = None
    if answer is None:
        for name in names:
            delete_one(client, bucket, name)
        return
    refused = [one for one in answer.get("Errors") or () if one.get("Code") != "NoSuchKey"]
    if refused:
        what = f"{len(refused)} of {len(names)} objects of bucket {bucket} were not deleted"
        raise error_of(plain_code(refused[0].get("Code")), 0, what, "DeleteObjects")


def delete_one(client: S3Client, bucket: str, name: str) -> None:
    """Remove one object; one that is not there is no error."""
    with client.asking(name) as boto:
        try:
            boto.delete_object(Bucket=bucket, Key=name)
        except boto.exceptions.ClientError as error:
            if code_of(error) != "NoSuchKey":  # some servers tell, S3 does not
                raise
