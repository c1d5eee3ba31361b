"""S3's requests one by one: ranges of an answer, listings, deletions, and large objects in parts."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from kvwire.errors import KvwireError, StorageError
from kvwire.store.backends.s3.errors import NoSuchUploadError, code_of, error_of, plain_code, status_of
from kvwire.store.base import Listed
from kvwire.store.http_clients import other_range, range_told
from kvwire.store.keys import is_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

    from kvwire.store.backends.s3.address import S3Settings
    from kvwire.store.backends.s3.client import S3Client
    from kvwire.store.base import Data

Params: TypeAlias = dict[str, Any]
"""Of one request, as boto3 takes them."""
_PIECE_BYTES = 256 * 1024
_PARTIAL = 206
_TOO_LARGE = 10**18
_BATCH = 250  # S3 takes 1000, but Swift, at 50 in a second, says nothing until all are gone: that looks like a stall
_MOST_EMPTY_PAGES = 1000  # a server that skips many deleted objects may send some
_NOT_KNOWN = (405, 501)
_NOT_KNOWN_CODES = ("MethodNotAllowed", "NotImplemented")
_log = logging.getLogger(__name__)
_MOST_PARTS = 10_000  # S3's limit
_MIB = 1 << 20
_PART_THREADS = 4


def strong_tag(answer: Mapping[str, Any]) -> str:
    """The answer's entity tag."""
    tag = answer.get("ETag") or ""
    return "" if tag.startswith("W/") else tag.strip('"')


def size_told(answer: Mapping[str, Any]) -> int:
    """The body's length that the answer announces."""
    size = answer.get("ContentLength")
    if not isinstance(size, int) or not 0 <= size < _TOO_LARGE:
        raise StorageError("an answer tells no proper size: check that the server speaks S3")
    return size


def modified_at(answer: Mapping[str, Any]) -> float:
    """When the object was written."""
    modified = answer.get("LastModified")
    return modified.timestamp() if isinstance(modified, datetime) else 0.0


def read_answer(answer: Mapping[str, Any], start: int, end: int | None, *, total_s: float, what: str) -> bytes:
    """Read a range from S3's answer."""
    length = size_told(answer)
    if answer["ResponseMetadata"]["HTTPStatusCode"] == _PARTIAL:
        told = range_told(answer.get("ContentRange"), start, end)
        if told is None or told[2] is None or length != told[1] - told[0]:
            raise other_range(what, start, end)
        return _read(answer["Body"], length, total_s, what)
    wanted = length if end is None else min(end, length)  # the whole object, asked for or not
    return _read(answer["Body"], wanted, total_s, what)[start:]


def _read(body: Any, length: int, total_s: float, what: str) -> bytes:  # noqa: ANN401 - botocore's StreamingBody
    """Read piece by piece: memory grows with what has come, not with what is announced."""
    give_up_at = time.monotonic() + total_s
    # read1 returns with what is there; read waits for the full piece, which a dripping server can make last.
    read = getattr(getattr(body, "_raw_stream", None), "read1", None) or body.read
    pieces: list[bytes] = []
    left = length
    try:
        while left and (piece := read(min(left, _PIECE_BYTES))):
            pieces.append(piece)
            left -= len(piece)
            if time.monotonic() > give_up_at:
                msg = f"{what}: the answer took longer than {total_s:g} s: check the server and the network"
                raise StorageError(msg)
        if left:
            raise StorageError(f"{what}: the answer ended {left} bytes early; try again")
        read(1)  # an answer whose end was met gives its connection back
    finally:
        body.close()
    return b"".join(pieces)


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
        if not name.startswith(root + prefix) or key <= after or not is_key(key):
            continue
        yield Listed(key, max(0, one.get("Size", 0)), modified_at(one))


def delete_in_batches(client: S3Client, bucket: str, names: Iterable[str]) -> None:
    """Remove objects, 250 with each request, up to the first batch of which the server refuses something."""
    names = iter(names)
    while batch := list(dict.fromkeys(islice(names, _BATCH))):
        _delete_batch(client, bucket, batch)


def _delete_batch(client: S3Client, bucket: str, names: list[str]) -> None:
    """In one request, or one by one where the server has no such request."""
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


def part_size(size: int, wished: int) -> int:
    """Length of each part but the last."""
    least = -(-size // _MOST_PARTS)
    return max(wished, -(-least // _MIB) * _MIB)


def upload_in_parts(client: S3Client, target: Params, about: Params, data: Data, settings: S3Settings) -> None:
    """Write one object in parts, a few at a time. What was sent is removed again where any of it fails."""
    key = target["Key"]
    with client.asking(key) as boto:
        upload_id = boto.create_multipart_upload(**target, **about)["UploadId"]
    try:
        parts = _send_parts(client, target, upload_id, data, settings)
        with client.asking(key) as boto:
            boto.complete_multipart_upload(**target, UploadId=upload_id, MultipartUpload={"Parts": parts})
    except BaseException:  # an interrupt too: parts that stay are paid for and never seen
        _abort(client, target, upload_id)
        raise


def _send_parts(
    client: S3Client, target: Params, upload_id: str, data: Data, settings: S3Settings
) -> list[CompletedPartTypeDef]:
    view = memoryview(data).cast("B")
    size = part_size(len(view), settings.part_bytes)

    def send(number: int) -> CompletedPartTypeDef:
        body = bytes(view[(number - 1) * size : number * size])  # copied only now: few parts are in memory twice
        with client.asking(target["Key"]) as boto:
            sent = boto.upload_part(**target, UploadId=upload_id, PartNumber=number, Body=body)
        return {"PartNumber": number, "ETag": sent["ETag"]}

    pool = ThreadPoolExecutor(_PART_THREADS, thread_name_prefix="kvwire-s3")
    try:
        futures = [pool.submit(send, number) for number in range(1, -(-len(view) // size) + 1)]
        wait(futures, return_when="FIRST_EXCEPTION")
        return [future.result() for future in futures if future.done()]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)  # no part may arrive after the upload was aborted


def _abort(client: S3Client, target: Params, upload_id: str) -> None:
    try:
        with client.asking(target["Key"]) as boto:
            boto.abort_multipart_upload(**target, UploadId=upload_id)
    except NoSuchUploadError:
        return
    except KvwireError as error:
        _log.warning("an unfinished upload stays in the bucket until a lifecycle rule removes it: %s", error)
