"""Large objects in parts: all of them become the object at once, or nothing stays."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypedDict

from kvwire.errors import KvwireError
from kvwire.store.backends.s3.errors import NoSuchUploadError

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

    from kvwire.store.backends.s3.client import S3Client
    from kvwire.store.backends.s3.settings import S3Settings
    from kvwire.store.base import Data

_log = logging.getLogger(__name__)
_MOST_PARTS = 10_000  # S3's limit
_MIB = 1 << 20
_PART_THREADS = 4


class Target(TypedDict):
    """Where an object goes, as boto3's parameters.

    Attributes:
        Bucket: The bucket.
        Key: The object's full name.
    """

    Bucket: str
    Key: str


class About(TypedDict):
    """What readers are told of an object, as boto3's parameters.

    Attributes:
        ContentType: HTTP Content-Type.
        CacheControl: HTTP Cache-Control.
    """

    ContentType: str
    CacheControl: str


class Condition(TypedDict, total=False):
    """What has to hold for an object to be written, as boto3's parameters.

    Attributes:
        IfMatch: Entity tag of the version that is replaced.
        IfNoneMatch: ``*``: nothing lies there.
    """

    IfMatch: str
    IfNoneMatch: str


def part_size(size: int, wished: int) -> int:
    """Length of each part but the last."""
    least = -(-size // _MOST_PARTS)
    return max(wished, -(-least // _MIB) * _MIB)


def upload_in_parts(client: S3Client, target: Target, about: About, data: Data, settings: S3Settings) -> None:
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
    client: S3Client, target: Target, upload_id: str, data: Data, settings: S3Settings
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


def _abort(client: S3Client, target: Target, upload_id: str) -> None:
    try:
        with client.asking(target["Key"]) as boto:
            boto.abort_multipart_upload(**target, UploadId=upload_id)
    except NoSuchUploadError:
        return
    except KvwireError as error:
        _log.warning("an unfinished upload stays in the bucket until a lifecycle rule removes it: %s", error)
